"""The folder of a run: checkpoints, resuming from them, and students that stop.

OUT/run.json             config, command, hashes of data and teacher, versions, machine
OUT/starts.jsonl         the same for each start, with its step, time and host
OUT/exit.json            how the last start ended: its exit code, step, max_steps, and why
OUT/code_HASH.zip        all code of the project that a start has loaded; `code` in run.json has
                         the hashes of each file in all starts
OUT/teacher.jsonl        an entry every histogram_every_steps
OUT/METHOD/log.jsonl     an entry every log_every_steps, and one for each validation
OUT/METHOD/histograms.jsonl
                         an entry every histogram_every_steps, of ALRA's local budgets
OUT/METHOD/checkpoints/step_00001000/
                         model/ as below, state.json, and training.pt, which torch.load reads: the
                         state dicts of `extras` and of the optimizers, and of the trained weights
                         if model/ has others, such as averages
OUT/METHOD/model/, run.json
                         at the end: the model for transformers, and its provenance
OUT/METHOD/stopped.json  instead, if the student stopped: at which step, and why

A checkpoint appears under its name only once it is complete. The first process decides from which
one the run resumes, and every process checks that it reads the files that the first one has seen.
"""

import functools
import math
import platform
import re
import shlex
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lib import files, parallel
from lib.device import gib
from lib.errors import UserError
from lib.files import read_json, reading
from lib.hf import all_finite, checkpoints_in, find_folder, tensors_hash
from lib.source import edited, hashes, loaded_sources, merged, write_snapshot
from model import Qwen2
from run.log import say
from run.provenance import file_hash, record_changes, student_changes
from run.students import Student, student_facts
from run.teacher import load_model

# files of tensors in a checkpoint
MODEL = "model/model.safetensors"
TRAINING = "training.pt"
STATE = (  # what is read from a checkpoint's state.json
    "made_by",
    "init_sha256",
    "sums",
    "step",
    "first_row_step",
    "skipped",
    "files_sha256",
    "valid_tokens",
    "since_log_tokens",
)
ANOTHER = "restore it, or use another checkpoint"
WRITER = ThreadPoolExecutor(1)  # writes checkpoints while training goes on

# ----------------------------------------------------------------------------------------------
# resuming


def resume(students, run) -> list[Student]:
    """Restore all students, and `run`, from their newest common checkpoint.

    A new run begins at step 0, or with the checkpoint that `resume_from` names. Returns the
    students that have not stopped.
    """
    cfg = run.cfg
    parallel.check_agreement(initial_weights=students[0].init_sha256)
    stops, sources, is_new = run.found
    for s in students:
        if s.name in stops:
            s.stopped = stops[s.name]["why"]
            say(f"{s.name} stopped at {s.stopped}")
    live = [s for s in students if not s.stopped]
    if not live:
        run.step = max(stop["step"] for stop in stops.values())
    if sources:
        for s in live:
            checkpoint, state = sources[s.name]
            load_checkpoint(checkpoint, state, s, run)
        parallel.all_gather(None)  # raises the error of a process that could not load one
        say_edits(state, run)
    if run.step > cfg.max_steps:
        raise UserError(
            f"max_steps={cfg.max_steps}: {cfg.out_dir} is at step {run.step}; set at least that"
        )
    parallel.on_first(say_summary, students, run)
    parallel.on_first(begin_logs, live, run)
    if live and is_new:
        save_checkpoints(live, run)  # so that logs never exist without one to resume from
        finish_saving(run)
    return live


def read_folder(run):
    """Return what process 0 finds in the folder of a run. A teacher has not computed anything yet.

    ->  by student, the facts of those that stopped; for the others, the checkpoint to begin with
        and its state, if any; and whether the run is new

    Raises `UserError` for a run of other students.
    """
    cfg = run.cfg
    stops = {}
    live = {}
    for name in cfg.methods:
        folder = Path(cfg.out_dir, name)
        file = folder / "stopped.json"
        if file.is_file():
            stops[name] = read_json(file, ["why", "step", "made_by"])
            check_same_run(name, file, stops[name], run)
        else:
            live[name] = folder
    sources = newest_intact(live)
    is_new = not sources
    for name, folder in live.items():
        if not is_new:
            check_same_run(name, *sources[name], run)
        elif (folder / "log.jsonl").exists():
            raise UserError(
                f"{cfg.out_dir}: its students have no checkpoint in common; "
                "restore one, or choose another out_dir"
            )
        elif cfg.resume_from:
            sources[name] = begin_branch(name, run)
    return stops, sources, is_new


def check_methods(cfg):
    """Raise `UserError` if out_dir has a run.json of a student, or of a run of other methods.

    Nothing is written into such a folder: its exit.json stays as it is.
    """
    file = Path(cfg.out_dir, "run.json")
    if not file.is_file():
        return
    with reading(file):
        facts = read_json(file)
        methods = [*facts["config"]["methods"]]
    if "method" in facts or {*methods} != {*cfg.methods}:
        kind = facts.get("method", ",".join(methods))
        raise UserError(f"out_dir={cfg.out_dir}: its run.json is of {kind}; choose another out_dir")


def read_checkpoint(path) -> tuple[Path, dict]:
    """Return a checkpoint and its state. Raises `UserError` unless it is as it was saved."""
    state = read_json(path / "state.json", STATE, ANOTHER)
    if path.name != f"step_{state['step']:08d}":
        raise UserError(f"{path}: its name is not that of step {state['step']}; {ANOTHER}")
    check_files(path, state)
    return path, state


def newest_intact(folders) -> dict[str, tuple]:
    """Return, by student, the newest common checkpoint that is as it was saved, and its state.

    Empty if there is no common checkpoint. Raises `UserError` if all of them are broken.
    """
    paths = {name: checkpoints_in(folder) for name, folder in folders.items()}
    steps = set().union(*paths.values()).intersection(*paths.values())
    for step in sorted(steps, reverse=True):
        try:
            return {name: read_checkpoint(saved[step]) for name, saved in paths.items()}
        except UserError as error:
            if step == min(steps):
                raise
            say(f"skipped: {error}")
    return {}


def check_same_run(name, checkpoint, state, run):
    """Raise `UserError` if a file's or checkpoint's state is not of the student `name` of a run."""
    changes = student_changes(state["made_by"], run.facts["made_by"][name])
    if changes:
        # config keys come first; of hashes the beginning is enough
        phrases = re.sub(r"([0-9a-f]{8})[0-9a-f]{56}", r"\1", "; ".join(list(changes.values())[:3]))
        raise UserError(
            f"{checkpoint}: contains a different run ({name}: {phrases}); choose another out_dir; "
            "--resume_from=CHECKPOINT goes on from a checkpoint, --student_weights=FOLDER begins "
            "anew with its weights"
        )


def say_edits(state, run):
    """Print what has changed since the run began.

    That is code, versions of packages, held-out rows, and logs that were cut short.
    """
    earlier = state.get("code", {})  # an older version recorded none
    changes = edited(earlier, hashes(loaded_sources()))
    changes += record_changes(state["versions"], run.facts["versions"]).values()
    held_out = run.facts["val_sha256"]
    if state.get("val_sha256", held_out) != held_out:  # an older version recorded none
        changes.append("held-out rows")
    if changes:
        say(f"edited since the run began: {', '.join(changes)}")
    for name, size in state.get("logs", {}).items():
        log = Path(run.cfg.out_dir, name)
        if not log.is_file() or log.stat().st_size < size:
            say(f"{log}: has lost entries of the steps before {state['step']}")
    run.facts["code"] = earlier


def branch_point(name):
    """Return the checkpoint `resume_from` and its state. The counts for a log begin anew."""
    checkpoint = find_folder(name).parent  # find_folder returns CHECKPOINT/model
    if not (checkpoint / "state.json").is_file():
        raise UserError(
            f"resume_from={name}: no checkpoint; expected out/NAME/METHOD/checkpoints/step_.."
        )
    _, state = read_checkpoint(checkpoint)
    return checkpoint, state | {"sums": {}, "since_log_tokens": 0, "logs": {}}


def begin_branch(name, run):
    """Return the checkpoint `resume_from` and its state, for a student to begin with.

    Raises `UserError` unless the student has its shape, tokenizer and rows per update.
    """
    checkpoint, state = branch_point(run.cfg.resume_from)
    changes = student_changes(state["made_by"], run.facts["made_by"][name])
    for key in ("shape", "tokenizer_sha256", "batch_rows"):
        if key in changes:
            raise UserError(f"resume_from={checkpoint}: {changes[key]}; expected the same")
    return checkpoint, state


def begin_logs(live, run):
    """Remove what the logs have beyond the run's step, and record this start beside them."""
    out = Path(run.cfg.out_dir)
    for s in live:
        (s.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        files.truncate_lines(s.folder / "log.jsonl", run.step)
        # those of this step were recorded before its update, which comes again
        files.truncate_lines(s.folder / "histograms.jsonl", run.step - 1)
        if run.cfg.tensorboard or run.cfg.wandb_project:
            from run.trackers import services

            s.services = services(s, run)
    files.truncate_lines(out / "teacher.jsonl", run.step - 1)
    sources = loaded_sources()
    run.facts["code"] = merged(run.facts.get("code", {}), hashes(sources))
    start = {
        "step": run.step,
        "time": time.strftime("%FT%T%z"),
        "host": platform.node(),
        "processes": parallel.world(),
    }
    files.write_json(out / "run.json", run.facts)
    files.append_line(out / "starts.jsonl", start | run.facts)
    write_snapshot(out, sources)


def say_summary(students, run):
    """Print machine, teacher, students and their size, and how far the run is."""
    cfg = run.cfg
    names = [f"{s.name} {cfg.settings_of(s.name) or ''}".strip() for s in students]
    first = students[0]  # all begin with equal weights
    dtype = str(first.dtype).removeprefix("torch.")
    n_params = sum(p.numel() for p in first.model.parameters())
    # bytes per parameter: 12 in a checkpoint (weights and two moments), 4 in the final model
    n_kept = cfg.keep_checkpoints + 1
    if cfg.keep_every_steps:
        n_kept += cfg.max_steps // cfg.keep_every_steps
    n_bytes = len(students) * n_params * (12 * n_kept + 4)
    say(
        f"{run.facts['machine']}, processes: {parallel.world()}, {dtype}, "
        f"compile={cfg.compile}, micro_batch={cfg.micro_batch}"
    )
    say(f"{run.facts['teacher_used'] or 'no teacher'} -> {', '.join(names)}")
    say(f"{cfg.student}: {n_params:,} parameters, initial weights {first.init_sha256[:12]}")
    say(
        f"{cfg.out_dir}: step {run.step:,} of {cfg.max_steps:,}, {cfg.batch_rows} rows each; "
        f"checkpoints and models take some {gib(n_bytes)} of disk"
    )
    n_there = sum(file.lstat().st_size for file in Path(cfg.out_dir).rglob("*"))
    free = shutil.disk_usage(cfg.out_dir).free
    if free + n_there < n_bytes:
        say(f"warning: only {gib(free)} more are free there")


# ----------------------------------------------------------------------------------------------
# saving


def save_model(s, run):
    """Write the model for transformers, and then its provenance beside it."""
    weights = parallel.whole_on_cpu(s.scored.state_dict())
    parallel.on_first(write_model, s, weights, run)
    say(f"{s.name}: {s.folder / 'model'}")


def write_model(s, weights, run):
    folder = s.folder / "model"
    dtype = getattr(torch, run.cfg.save_dtype)
    saved = {name: p.to(dtype) for name, p in weights.items()}
    facts = student_facts(s, run)
    with files.atomic_folder(folder) as new:
        s.scored.save_pretrained(new, s.tokenizer, saved)
        (new / "README.md").write_text(model_card(s, run, facts))
    # of the weights as they are read again
    facts["weights_sha256"] = tensors_hash({name: p.float() for name, p in saved.items()})
    if "probe" in read_json(folder / "config.json"):
        say(f"{folder}: an edited student: model.py computes it, and transformers something else")
    files.write_json(s.folder / "run.json", facts)


def model_card(s, run, facts) -> str:
    """Return what is in a student's folder, in Markdown."""
    log = files.read_lines(s.folder / "log.jsonl")
    return f"""# {s.name}

A language model, trained by logit distillation.

- teacher: {facts["teacher_used"]}
- method: {s.name} {facts["made_by"]["hyper"]}
- rows: {run.step * run.cfg.batch_rows:,} of {run.cfg.data_dir}
- tokens: {run.valid_tokens:,.0f}
- held-out CE, nats/token: {[x["val_ce"] for x in log if "val_ce" in x][-1:]}
- commit: {facts["git_commit"]}
"""


def save_checkpoints(live, run):
    """Copy every student to the CPU; a thread writes the checkpoints while training goes on.

    The copies take 12 bytes for each parameter of each student, so they wait until the earlier
    checkpoints are written.
    """
    began = time.perf_counter()
    if run.saving:
        run.saving.result()
    copies = []
    out = Path(run.cfg.out_dir)
    logs = [*out.glob("*.jsonl"), *out.glob("*/log.jsonl"), *out.glob("*/histograms.jsonl")]
    sizes = {f"{x.relative_to(out)}": x.stat().st_size for x in logs}
    for s in live:
        tensors = {  # all that training has changed
            "model": s.scored.state_dict(),
            "extras": s.extras.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in s.optimizers],
        }
        if s.scored is not s.model:
            tensors["trained"] = s.model.state_dict()
        state = student_facts(s, run)
        state |= {"sums": files.for_json(s.totals()), "skipped": s.skipped, "logs": sizes}
        copies.append((s, parallel.whole_on_cpu(tensors), state))
    run.save_in(run.cfg.checkpoint_every_minutes)
    if parallel.rank() == 0:
        run.saving = WRITER.submit(try_to_write, copies, run.step, run)
    run.save_sec += time.perf_counter() - began


def finish_saving(run):
    """Wait until the checkpoints are written. Raises `UserError` if they could not be."""
    parallel.on_first(lambda: run.saving and run.saving.result())


def wait_for_writer():
    WRITER.submit(int).result()  # it has one thread, so all that was submitted earlier is written


def try_to_write(copies, step, run) -> UserError | None:
    """Write checkpoints. If they cannot be, as on a full disk, say so, and return the error.

    The older ones are then still there.
    """
    try:
        write_checkpoints(copies, step, run.cfg)
    except UserError as error:
        say(f"step {step}: no checkpoint: {error}; a run that goes on tries again in a minute")
        run.save_in(minutes=1)
        return UserError(str(error))  # without a traceback, which would keep the copies in memory


def write_checkpoints(copies, step, cfg):
    """Write a checkpoint of every student, and then delete all but `keep_checkpoints` of them."""
    for s, tensors, state in copies:
        with files.atomic_folder(s.folder / "checkpoints" / f"step_{step:08d}") as new:
            s.scored.save_pretrained(new / "model", s.tokenizer, tensors.pop("model"))
            with (new / TRAINING).open("wb") as file:  # names the cause of an error, unlike torch's
                torch.save(tensors, file)
            state["files_sha256"] = {file: file_hash(new / file) for file in (MODEL, TRAINING)}
            files.write_json(new / "state.json", state)
    for s, *_ in copies:
        saved = checkpoints_in(s.folder)
        earlier = [n for n in saved if n <= step]
        for n in earlier[: -cfg.keep_checkpoints]:
            if not cfg.keep_every_steps or n % cfg.keep_every_steps:
                files.discard(saved[n])


def check_files(path, state):
    """Raise `UserError` unless the tensors of a checkpoint are those that its state describes."""
    for file, sha in state["files_sha256"].items():
        if not (path / file).is_file() or file_hash(path / file) != sha:
            raise UserError(f"{path}: {file}: not as it was saved; {ANOTHER}")


@torch.no_grad()
def load_checkpoint(path, state, s, run):
    """Restore a student and the counts of its run. All processes call it.

    state  the checkpoint's state.json as process 0 has read it
    """
    check_files(path, state)
    remedy = "restore the edit of model, extras or optimizer, or choose another checkpoint"
    with reading(path, remedy):
        saved = torch.load(path / TRAINING, "cpu", mmap=True, weights_only=True)
        if isinstance(s.model, Qwen2):
            weights = safetensors.torch.load_file(path / MODEL)
        else:  # transformers writes some weights under other names
            weights = load_model(f"{path}/model").state_dict()
        for model, values in ((s.scored, weights), (s.model, saved.get("trained", weights))):
            for key, p in model.state_dict().items():
                p.copy_(parallel.distribute_like(values[key], p))
        s.extras.load_state_dict(saved["extras"])
        for optimizer, values in zip(s.optimizers, saved["optimizers"], strict=True):
            load_optimizer(optimizer, values)
    for key, value in state["sums"].items():
        if parallel.rank() > 0:  # the saved sums are over all processes: the first one takes them
            value = 0.0
        elif value is None:
            value = math.nan  # JSON has no NaN
        s.sums[key] = torch.tensor(value, dtype=torch.float64, device=s.model.head.device)
    s.skipped = state["skipped"]
    s.init_sha256 = state["init_sha256"]
    run.step = state["step"]
    run.valid_tokens = state["valid_tokens"]
    run.since_log_tokens = state["since_log_tokens"]


def load_optimizer(optimizer, saved):
    """Load a state dict, sharded as the parameters are.

    Of a group's entries, those that training has changed are state, such as a counter. The others
    are settings, which stay those of this run.
    """
    parameters = []
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        parameters += group["params"]
        # an older version has none
        if old.setdefault("names", group["names"]) != group["names"]:
            raise ValueError("the optimizer had other parameters, or in another order")
        for key, value in old.pop("initial").items():
            if old[key] == value:
                old[key] = group[key]
        old["initial"] = group["initial"]
    for index, values in saved["state"].items():
        place = functools.partial(parallel.distribute_like, like=parameters[index])
        saved["state"][index] = tree_map_only(Tensor, place, values)
    optimizer.load_state_dict(saved)


# ----------------------------------------------------------------------------------------------
# stopping


def stop_diverged(live, run, check_weights: bool) -> list[Student]:
    """Stop the students that cannot continue. Returns the others."""
    for s in live:
        if check_weights and not s.stopped:
            finite = [all_finite(parallel.local(p)) for p in s.trained]
            # summed, so that all processes stop the same students
            (diverged,) = parallel.all_reduce_sum([not all(finite)])
            if diverged:
                s.stopped = "its weights are not finite"
        if s.stopped:
            stop(s, run)
    return [s for s in live if not s.stopped]


def stop(s, run):
    """Write stopped.json, and print how the student can continue.

    It names the newest checkpoint before the last good update: from later ones, every gradient was
    bad.
    """
    wait_for_writer()
    begin = ""
    for step, path in parallel.on_first(checkpoints_in, s.folder).items():
        if 0 < step < run.step - s.skipped:
            begin = f" --resume_from={shlex.quote(str(path))}"
    s.stopped = (
        f"step {run.step}: {s.stopped}; to try again, run the same command with "
        f"--methods={s.name}{begin}, another out_dir, and an lr below {run.cfg.lr_of(s.name):g}"
    )
    say(f"{s.name} stopped at {s.stopped}")
    facts = student_facts(s, run) | {"why": s.stopped}
    parallel.on_first(files.write_json, s.folder / "stopped.json", facts)
