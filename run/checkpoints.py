"""The folder of a run: checkpoints, resuming from them, and students that stop.

OUT/run.json             config, command, hashes of data and teacher, versions, machine; in `starts`
                         the same for each start
OUT/exit.json            how the last start ended: its exit code, step, max_steps, and why
OUT/code.diff            the uncommitted edits of the newest start that had any
OUT/teacher.jsonl        a record every histogram_every_steps
OUT/METHOD/log.jsonl     a record every log_every_steps, and one for each validation
OUT/METHOD/checkpoints/step_00001000/
                         model/ as below, optimizer.safetensors (tensors PARAMETER/exp_avg ..),
                         extras.safetensors if the student has extras, state.json
OUT/METHOD/model/, run.json
                         at the end: the model for transformers, and its provenance
OUT/METHOD/stopped.json  instead, if the student stopped: at which step, and why

A checkpoint appears under its name only once it is complete.
"""

import math
import platform
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch
import transformers

import configure
from lib import files, parallel
from lib.checks import all_finite
from lib.device import gib, uncommitted_edits
from lib.errors import UserError, first_line
from lib.files import read_json, reading
from lib.hf import find_folder, tensors_hash
from lib.settings import NonNegativeInt
from model import Qwen2
from run.identity import EDITS, RUN_FILE, file_hash, record_changes
from run.log import say, write_waiting
from run.methods import compute_dtype
from run.students import COUNTS, Student, student_facts

# files of tensors in a checkpoint
MODEL = "model/model.safetensors"
OPTIMIZER = "optimizer.safetensors"
EXTRAS = "extras.safetensors"
STATE = {  # what is read from a checkpoint's state.json
    "made_by": dict,
    "sums": dict[str, float | None],
    "step": NonNegativeInt,
    "files_sha256": dict[str, str],
    **dict.fromkeys(COUNTS, float),
}

# ----------------------------------------------------------------------------------------------
# resuming


def resume(students, run):
    """Restore all students, and `run`, from their newest common checkpoint.

    A new run begins at step 0, or with the checkpoint that `resume_from` names.
    """
    cfg = run.cfg
    out = Path(cfg.out_dir)
    starts = earlier_starts(out / "run.json", cfg)
    histories = [[s.init_sha256, *s.checkpoints()] for s in students]
    parallel.check_agreement(**{"first weights and checkpoints": histories})
    stop_steps = read_stops(students)
    live = [s for s in students if not s.stopped]
    common = set()  # the steps of which every live student has a checkpoint
    if live:
        common = set.intersection(*[{*s.checkpoints()} for s in live])
    if not live:  # every student has stopped
        run.step = max(stop_steps)
    elif common:
        run.step = newest_intact(live, common)
        restore(live, run)
    elif any((s.folder / "log.jsonl").exists() for s in live):
        raise UserError(
            f"{out}: its students have no checkpoint in common; "
            "restore one, or choose another out_dir"
        )
    elif cfg.resume_from:
        start_from(cfg.resume_from, live, run)
    if run.step > cfg.max_steps:
        raise UserError(
            f"max_steps={cfg.max_steps}: {out} is at step {run.step}; set at least that"
        )
    say_summary(students, run)
    parallel.all_gather(None)  # all processes have read the folder before the first one writes
    if parallel.rank() == 0:
        for s in live:
            s.folder.mkdir(parents=True, exist_ok=True)
            files.truncate_lines(s.folder / "log.jsonl", run.step)
            # those of this step were recorded before its update, which comes again
            files.truncate_lines(s.folder / "histograms.jsonl", run.step - 1)
            if cfg.tensorboard or cfg.wandb_project:
                from run.services import services

                s.services = services(s, run)
        files.truncate_lines(out / "teacher.jsonl", run.step - 1)
        record_start(out / "run.json", starts, run)
    if live and not common:  # so that logs never exist without a checkpoint to resume from
        save_checkpoints(live, run)
    configure.PROGRESS["step"] = run.step


def earlier_starts(file, cfg) -> list[dict]:
    """Return the starts in a run's run.json; none if it is missing or broken.

    Raises `UserError` if it is that of a student, or of a run of other methods.
    """
    try:
        facts = read_json(file, RUN_FILE)
    except UserError:
        return []
    methods = facts["config"]["methods"]
    if "method" in facts or {*methods} != {*cfg.methods}:
        kind = facts.get("method", ",".join(methods))
        raise UserError(f"out_dir={cfg.out_dir}: its run.json is of {kind}; choose another out_dir")
    return facts.get("starts", [])


def read_stops(students) -> list[int]:
    """Mark the students that stopped in an earlier start. Returns the steps at which they did."""
    steps = []
    for s in students:
        file = s.folder / "stopped.json"
        if file.is_file():
            facts = read_json(file, {"why": str, "step": int})
            s.stopped = facts["why"]
            steps.append(facts["step"])
            say(f"{s.name} stopped at {s.stopped}")
    return steps


def newest_intact(live, steps) -> int:
    """Return the newest of `steps` at which every student's checkpoint is as it was saved.

    Raises `UserError` if there is none.
    """
    for step in sorted(steps, reverse=True):
        try:
            for s in live:
                read_state(s.checkpoints()[step])
            return step
        except UserError as error:
            if step == min(steps):
                raise
            say(f"skipped: {error}")


def check_same_run(name, checkpoint, run):
    """Raise `UserError` if a checkpoint belongs to another student than `name` of this run.

    With `accept_edits`, edited code counts as equal; run.json records it.
    """
    changes = record_changes(read_state(checkpoint)["made_by"], run.facts["made_by"][name])
    if not changes:
        return
    phrases = "; ".join(list(changes.values())[:3])
    only_edits = changes.keys() <= {*EDITS}
    if run.cfg.accept_edits and only_edits:
        run.facts.setdefault("accepted_edits", {})[name] = phrases
        say(f"{name}: accepted edits; {phrases}")
        return
    message = (
        f"{checkpoint}: contains a different run ({name}: {phrases}); choose another out_dir; "
        "there --resume_from=CHECKPOINT continues it, and --student_weights starts anew from "
        "its weights"
    )
    if only_edits:
        message += "; --accept_edits=True takes the code as equal"
    raise UserError(message)


def restore(live, run):
    """Load every student's checkpoint of `run.step`, and the counts of the run.

    Raises `UserError` if one belongs to another run.
    """
    # the saved sums are over all processes, so the first process takes them
    share = 0.0 if parallel.rank() else 1.0
    for s in live:
        checkpoint = s.checkpoints()[run.step]
        check_same_run(s.name, checkpoint, run)
        state = load_checkpoint(checkpoint, s)
        for key, value in state["sums"].items():
            total = math.nan if value is None else value * share  # JSON has no NaN
            s.sums[key] = torch.tensor(total, dtype=torch.float64, device=s.model.head.device)
    run.counts = {key: state[key] for key in COUNTS}


def start_from(name, live, run):
    """Load the checkpoint `resume_from` into every student. `run` goes on from its step."""
    checkpoint = find_folder(name).parent  # find_folder returns CHECKPOINT/model
    if not (checkpoint / "state.json").is_file():
        raise UserError(
            f"resume_from={name}: no checkpoint; expected out/NAME/METHOD/checkpoints/step_.."
        )
    state = read_state(checkpoint)
    for s in live:
        changes = record_changes(state["made_by"], run.facts["made_by"][s.name])
        for key in ("shape", "tokenizer_sha256", "batch_rows"):
            if key in changes:
                raise UserError(f"resume_from={name}: {changes[key]}; expected the same")
        load_checkpoint(checkpoint, s)
    run.step = state["step"]
    run.counts["valid_tokens"] = state["valid_tokens"]


def record_start(file, starts, run):
    """Write run.json with this start after the earlier ones, and code.diff if code was edited.

    A broken run.json is set aside.
    """
    edits = uncommitted_edits()
    if edits:
        files.atomic_write(file.with_name("code.diff"), edits)
    if file.is_file() and not starts:
        files.set_aside(file)
    start = {
        "step": run.step,
        "time": time.strftime("%FT%T%z"),
        "host": platform.node(),
        "processes": parallel.world(),
    }
    files.write_json(file, run.facts | {"starts": [*starts, start | run.facts]})


def check_disk(students, cfg) -> str:
    """Check that checkpoints and models fit on the disk. Returns a sentence with both sizes."""
    out = Path(cfg.out_dir)
    n_params = students[0].model.n_params
    n_checkpoints = cfg.keep_checkpoints + 1
    if cfg.keep_every_steps:
        n_checkpoints += cfg.max_steps // cfg.keep_every_steps
    # bytes per parameter: 12 in a checkpoint (weights and two moments), 4 in the final model
    needed = len(students) * n_params * (12 * n_checkpoints + 4)
    free = shutil.disk_usage(out).free
    # old checkpoints are deleted as new ones are written, so their space counts as free
    for file in out.glob("*/checkpoints/**/*"):
        if file.is_file():
            free += file.stat().st_size
    use = f"checkpoints and models take up to {gib(needed)} of disk, {gib(free)} are free"
    if needed > free:
        raise UserError(f"out_dir={out}: {use}; choose another disk, or set --keep_checkpoints=1")
    return use


def say_summary(students, run):
    """Print machine, teacher, students and their size, how far the run is, and its disk space."""
    cfg = run.cfg
    first = students[0]
    names = [f"{s.name} {cfg.settings_of(s.name) or ''}".strip() for s in students]
    teacher = run.facts["teacher_used"] or "no teacher"
    dtype = str(compute_dtype(cfg)).removeprefix("torch.")
    say(
        f"{run.facts['machine']}, processes: {parallel.world()}, {dtype}, compile={cfg.compile}, "
        f"micro_batch={cfg.micro_batch}"
    )
    say(f"{teacher} -> {', '.join(names)}")
    say(
        f"{cfg.student}: {first.model.n_params:,} parameters, "
        f"initial weights {first.init_sha256[:12]}"
    )
    say(
        f"{cfg.out_dir}: step {run.step:,} of {cfg.max_steps:,}, {cfg.batch_rows} rows each; "
        f"{check_disk(students, cfg)}"
    )


# ----------------------------------------------------------------------------------------------
# saving


def save_model(s, run):
    """Write the model for transformers, and then its provenance beside it."""
    weights = parallel.to_first(s.model.state_dict())
    parallel.on_first(write_model, s, weights, run)
    say(f"{s.name}: {s.folder / 'model'}")


def write_model(s, weights, run):
    folder = s.folder / "model"
    s.model.save_pretrained(folder, s.tokenizer, weights)
    facts = student_facts(s, run) | {"weights_sha256": tensors_hash(weights)}
    problem = differs_in_transformers(folder, s.model.config, weights)
    if problem:
        facts["differs_in_transformers"] = problem
        say(
            f"{folder}: transformers computes another model from it: {problem}; "
            "save_folder in lib/hf.py must write what was edited in model.py"
        )
    files.write_json(s.folder / "run.json", facts)


@torch.no_grad()
def differs_in_transformers(folder, shape, weights) -> str | None:
    """Return how transformers' logits of a saved model differ beyond rounding, or its error."""
    with torch.device("meta"):
        model = Qwen2(shape)
    model.load_state_dict(weights, assign=True)
    ids = torch.arange(16)[None] % shape.vocab_size
    z = model(ids)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        error = (saved(ids).logits - z).norm() / z.norm()
    except Exception as problem:  # whatever it is, training has ended well
        return first_line(problem)
    return None if error < 1e-4 else f"its logits differ by {error:.2%}"


def save_checkpoints(live, run):
    """Write a checkpoint of every student, then delete older ones.

    Raises `UserError`, on all processes, if one cannot be written: then nothing is deleted.
    """
    parallel.on_first(write_waiting)  # first, as a run that resumes here does not log these again
    for s in live:
        groups = {}
        if run.step:  # a checkpoint of step 0 has no tensors
            groups = tensors_of(s)
        state = student_facts(s, run)
        state["sums"] = files.for_json(s.totals())
        path = s.folder / "checkpoints" / f"step_{run.step:08d}"
        parallel.on_first(write_checkpoint, path, groups, state, s)
    for s in live:
        parallel.on_first(delete_older, s, run)


def tensors_of(s):
    """Return the tensors of each file of a checkpoint, unsharded; none but on the first process."""
    optimizer = {}
    for name, p in s.parameters_by_name().items():
        for key, value in s.optimizer.state[p].items():
            optimizer[f"{name}/{key}"] = value
    groups = {OPTIMIZER: optimizer, MODEL: s.model.state_dict()}
    if s.extras:
        groups[EXTRAS] = s.extras.state_dict()
    return {file: parallel.to_first(tensors) for file, tensors in groups.items()}


def write_checkpoint(path, groups, state: dict, s):
    """Write a folder with model/ for transformers, further groups of tensors, and state.json."""
    hashes = {}
    with files.atomic_folder(path) as new, ThreadPoolExecutor() as pool:
        for file, tensors in groups.items():
            if file == MODEL:
                s.model.save_pretrained(new / "model", s.tokenizer, tensors)
            else:
                safetensors.torch.save_file(tensors, new / file)
            hashes[file] = pool.submit(file_hash, new / file)  # while the next one is written
        state["files_sha256"] = {file: sha.result() for file, sha in hashes.items()}
        files.write_json(new / "state.json", state)


def delete_older(s, run):
    """Delete checkpoints up to this step, except the last `keep_checkpoints`.

    A stopping student keeps all of them: if a kill comes before stopped.json is written, the run
    resumes from a step that all students have.
    """
    if s.stopped:
        return
    cfg = run.cfg
    saved = s.checkpoints()
    steps = [step for step in saved if step <= run.step]
    for step in steps[: -cfg.keep_checkpoints]:
        if not cfg.keep_every_steps or step % cfg.keep_every_steps:
            files.discard(saved[step])


def read_state(path) -> dict:
    """Read a checkpoint's state.json.

    Raises `UserError` unless every file of the checkpoint is as it was saved.
    """
    remedy = "restore it, or use another checkpoint"
    state = read_json(path / "state.json", STATE, remedy)
    hashes = state["files_sha256"]
    changed = []
    for file, sha in hashes.items():
        if not (path / file).is_file() or file_hash(path / file) != sha:
            changed.append(file)
    if state["step"]:
        changed += {MODEL, OPTIMIZER} - hashes.keys()
    if path.name != f"step_{state['step']:08d}":
        changed.append(f"its name, as it is of step {state['step']}")
    if changed:
        raise UserError(f"{path}: {', '.join(changed)}: not as it was saved; {remedy}")
    return state


def load_checkpoint(path, s) -> dict:
    """Restore a student's weights, extras and optimizer. Returns the checkpoint's state."""
    state = read_state(path)
    groups = {file: safetensors.torch.load_file(path / file) for file in state["files_sha256"]}
    if not groups:  # a checkpoint of step 0
        return state
    remedy = "its student had other parameters or extras; choose another checkpoint"
    with reading(path, remedy), torch.no_grad():
        copy_tensors(groups[MODEL], s.model)
        copy_tensors(groups.get(EXTRAS, {}), s.extras)
        parameters = s.parameters_by_name()
        for key, value in groups[OPTIMIZER].items():
            name, _, state_key = key.rpartition("/")
            p = parameters[name]
            s.optimizer.state[p][state_key] = parallel.distribute_like(value, p)
    return state


def copy_tensors(saved, module):
    for key, p in module.state_dict().items():
        p.copy_(parallel.distribute_like(saved[key], p))


# ----------------------------------------------------------------------------------------------
# stopping


def stop_diverged(live, run, check_weights: bool) -> list[Student]:
    """Stop the students that cannot continue. Returns the others.

    If a stopping student still has finite weights, they are saved in a last checkpoint.
    """
    if check_weights or any(s.stopped for s in live):
        for s in live:
            finite = [all_finite(parallel.local(p)) for p in s.parameters_by_name().values()]
            # summed, so that all processes stop the same students
            (diverged,) = parallel.all_reduce_sum(not all(finite))
            if diverged:
                s.stopped = s.stopped or "its weights are not finite"
            elif s.stopped:
                try:
                    save_checkpoints([s], run)
                except UserError as error:
                    s.stopped += f"; its last weights are lost: {error}"
    for s in live:
        if s.stopped:
            stop(s, run)
    return [s for s in live if not s.stopped]


def stop(s, run):
    """Write stopped.json, and print how the student can continue."""
    remedy = "begin again"
    for step, path in s.checkpoints().items():
        if step:  # that of step 0 has no tensors
            remedy = f"to go on, --resume_from={path}"
    s.stopped = (
        f"step {run.step}: {s.stopped}; {remedy} with another out_dir and an lr below "
        f"{run.cfg.lr * s.lr_factor:g}"
    )
    say(f"{s.name} stopped at {s.stopped}")
    facts = student_facts(s, run) | {"why": s.stopped}
    parallel.on_first(files.write_json, s.folder / "stopped.json", facts)
