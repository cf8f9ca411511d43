"""The folder of a run: its students, logs and checkpoints.

OUT/run.json             config, command, hashes of data and teacher, versions, machine; in `starts`
                         the same for each start
OUT/teacher.jsonl        a record every histogram_every_steps
OUT/METHOD/log.jsonl     a record every log_every_steps, and one for each validation
OUT/METHOD/checkpoints/step_00001000/
                         model/ as below, optimizer.safetensors (PARAMETER/exp_avg ..), state.json
OUT/METHOD/model/, run.json
                         at the end: the model for transformers, and its provenance
OUT/METHOD/stopped.json  instead, if the student stopped: at which step, and why

Nothing here changes what a student learns. A checkpoint is complete under its name, or it does not
exist.
"""

import dataclasses
import functools
import hashlib
import inspect
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from configure import Config
from lib import files, metrics, parallel
from lib.checks import all_finite
from lib.device import gib
from lib.errors import UserError, first_line
from lib.files import read_json, reading
from lib.hf import find_folder
from lib.identity import differences, file_hash, record_hash
from lib.methods import resolve
from losses import alra
from model import Qwen2

# Counts of the whole run, and since the log's last record.
COUNTS = ("valid_tokens", "since_log_tokens", "since_log_steps", "since_log_sec")


@dataclass
class Student:
    """One method's weights and optimizer, and what the log says of them."""

    name: str  # METHOD or METHOD@LABEL; also the name of the student's folder
    model: Qwen2
    extras: nn.ModuleDict  # for terms of your own: trained, in checkpoints, never in model/
    optimizer: torch.optim.Optimizer
    folder: Path
    init_sha256: str
    tokenizer: PreTrainedTokenizerFast | None = None  # saved with the model
    lr_factor: float = 1.0  # multiplies the schedule's learning rate
    sums: dict[str, Tensor] = field(default_factory=dict)  # fp64, by term, since the last record
    gnorm: float = 0.0
    skipped: int = 0  # updates in a row without a finite gradient
    stopped: str | None = None  # why the student cannot continue
    services: dict[str, Callable] = field(default_factory=dict)  # TensorBoard, Weights & Biases
    objective_at: Callable | None = None  # update -> objective (lib/methods.py)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the model and of the extras by name."""
        extras = {f"extras.{name}": p for name, p in self.extras.named_parameters()}
        return dict(self.model.named_parameters()) | extras

    def totals(self) -> dict[str, float]:
        """Return `sums`, added up over all processes."""
        if not self.sums:
            return {}
        return dict(zip(self.sums, parallel.all_reduce_sum(*self.sums.values()), strict=True))

    def record(self, values: dict) -> None:
        """Add a record to the student's log, with None for a value that is not finite."""
        if parallel.rank() != 0:
            return
        values = files.for_json(values)
        append(self.folder / "log.jsonl", values)
        for service, send in list(self.services.items()):
            try:
                send(values)
            except Exception as error:  # whatever it is, log.jsonl has the record
                why = first_line(error)
                say(f"{self.name}: left out {service} from step {values['step']} on: {why}")
                del self.services[service]

    def checkpoints(self) -> dict[int, Path]:
        """Return the complete checkpoints by step, oldest first."""
        complete = {}
        for path in self.folder.glob("checkpoints/step_*"):
            if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir():
                complete[step_of(path)] = path
        return dict(sorted(complete.items()))


@dataclass
class Run:
    """Where a run stands, and what its files say of it."""

    cfg: Config
    facts: dict  # the provenance of every result (lib/preflight.py)
    step: int = 0  # updates that are made
    counts: dict = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    best_tok_per_sec: float = 0.0  # since the start
    slowdown_said: bool = False


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def compute_dtype(cfg: Config) -> torch.dtype:
    """Return the dtype of activations and products."""
    on_cuda = cfg.device.startswith("cuda")
    if cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and on_cuda):
        return torch.bfloat16
    return torch.float32


def hidden_and_head(s: Student, cfg: Config) -> metrics.Model:
    """Return a student as lib/metrics.py takes it.

    Call it inside `gathered_roots`: outside, a sharded head is not whole.
    """
    return functools.partial(s.model.hidden, dtype=compute_dtype(cfg)), s.model.head


# ----------------------------------------------------------------------------------------------
# the terminal and the logs


def say(text: str) -> None:
    """Print on the first process, above the progress bar."""
    if parallel.rank() != 0:
        return
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except OSError:  # Ctrl-C has ended `| tee` too: the checkpoint is still to come
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_names(students: list[Student], cfg: Config) -> None:
    """Print the heads of the columns that `say_values` fills, if there are several students."""
    if len(students) > 1:
        say_row("", {name: name for name in cfg.methods}, cfg)


def say_values(
    label: str, values: dict[str, dict[str, float]], keys: Iterable[str], cfg: Config
) -> None:
    """Print all values of a lone student; of several, a row for each of `keys`."""
    if len(cfg.methods) == 1:
        for terms in values.values():
            cells = "  ".join(f"{key} {x:.4f}" for key, x in terms.items())
            say(f"{label}  |  {cells}")
        return
    for key in keys:
        cells = {name: f"{terms[key]:.4f}" for name, terms in values.items()}
        say_row(f"{label}  {key}", cells, cfg)


def say_row(label: str, cells: dict[str, str], cfg: Config) -> None:
    line = f"{label:<64} |"
    for name in cfg.methods:
        width = max(len(name), 6) + 2
        line += f"{cells.get(name, ''):>{width}}"
    say(line)


def say_if_slower(tok_per_sec: float, run: Run) -> None:
    """Say once what to do if a run on the CPU falls below a third of its best speed.

    Threads wait for each other after every operation, so one that shares its core delays all.
    """
    slow = tok_per_sec < run.best_tok_per_sec / 3
    run.best_tok_per_sec = max(run.best_tok_per_sec, tok_per_sec)
    several = run.cfg.device == "cpu" and torch.get_num_threads() > 1
    if slow and several and not run.slowdown_said:
        run.slowdown_said = True
        speeds = f"{tok_per_sec:,.0f} tok/s after {run.best_tok_per_sec:,.0f}"
        remedy = "if other programs use these cores, Ctrl-C and resume with OMP_NUM_THREADS=1"
        say(f"step {run.step}: {speeds}; {remedy}, which changes last digits")


def log_validation(
    live: list[Student],
    validated: dict[str, dict],
    rows_levels: dict[str, float],
    is_first: bool,
    run: Run,
) -> None:
    """Print and record the results of a validation.

    rows_levels  CEs of a uniform guess and of token frequencies (`Rows.levels`)
    is_first     also print the CEs that the first results are read against
    """
    levels = {f"val_{key}": ce for key, ce in rows_levels.items()}
    keys = [key for key in ("val_ce", "val_kl", "val_agree") if key in validated[live[0].name]]
    say_values(f"step {run.step}", validated, keys, run.cfg)
    if is_first:
        say_levels(validated[live[0].name] | levels)
    for s in live:
        s.record({"step": run.step, **validated[s.name], **levels})
        ce = validated[s.name]["val_ce"]
        uniform = levels["val_uniform_ce"]
        if not ce < uniform:
            past = f"held-out CE {ce:.2f} is past ln V = {uniform:.2f}, a uniform guess's"
            say(f"{s.name}, step {run.step}: {past}; if it was lower before, try a smaller lr")


def say_levels(values: dict[str, float]) -> None:
    """Print what the first held-out CEs are read against.

    Warns if the teacher does worse than token frequencies.
    """
    levels = {key.removeprefix("val_"): value for key, value in values.items()}
    say(f"held-out {metrics.levels(levels)}")
    bound = min(levels.get("unigram_ce", math.inf), 0.95 * levels["uniform_ce"])
    teacher_ce = levels.get("teacher_ce", 0)
    if teacher_ce > bound:
        what = "it knows less of this text than token frequencies, and a low KL to it is no success"
        remedy = "choose another teacher"
        say(f"warning: the teacher's held-out CE is {teacher_ce:.2f}: {what}; {remedy}")


def log_histograms(live: list[Student], teacher, batches: Iterable[tuple], run: Run) -> None:
    """Record the paper's Figures 3 and 4 over one update's batches, with no effect on the run.

    `teacher.jsonl` gets the teacher's record, `METHOD/histograms.jsonl` the local budgets of a
    student whose objective has some.
    """
    cfg = run.cfg
    budget = functools.partial(alra, **resolve("alra", **cfg.overrides_of("alra")).hyper)
    with parallel.gathered_roots(s.model for s in live):
        students = {}
        for s in live:
            method = resolve(s.name, **cfg.overrides_of(s.name))
            returned = inspect.signature(method.fn).return_annotation
            if "d_u" in getattr(returned, "_fields", ()):
                objective = functools.partial(method.fn, **method.hyper)
                students[s.name] = (hidden_and_head(s, cfg), objective)
        record, counts = metrics.histograms(teacher.head, budget, students, batches, cfg.group)
    if parallel.rank() != 0:
        return
    out = Path(cfg.out_dir)
    append(out / "teacher.jsonl", {"step": run.step, **record})
    for name, count in counts.items():
        line = {"step": run.step, "n": record["n"], "d_u_hist": count}
        append(out / name / "histograms.jsonl", line)


UNWRITTEN: dict[Path, list[dict]] = {}


def append(path: Path, record: dict) -> None:
    """Add a record to a file of JSON lines.

    While the file cannot be written, as on a full disk, records wait for the next call.
    """
    waiting = UNWRITTEN.setdefault(path, [])
    waiting.append(record)
    try:
        while waiting:
            files.append_line(path, waiting[0])
            waiting.pop(0)
    except UserError as error:
        if len(waiting) == 1:
            say(str(error))


def services(s: Student, run: Run) -> dict[str, Callable]:
    """Return the services that the config asks for, by name.

    Each is a function of a record of log.jsonl, and opens with the first one.
    """
    chosen = {}
    if run.cfg.tensorboard:
        chosen["TensorBoard"] = tensorboard(s.folder / "tensorboard")
    if run.cfg.wandb_project:
        chosen["Weights & Biases"] = wandb_logger(s, run)
    return chosen


def tensorboard(folder: Path) -> Callable:
    @functools.cache
    def writer():
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(folder)

    def send(record: dict) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                writer().add_scalar(key, value, record["step"])
        writer().flush()

    return send


def wandb_logger(s: Student, run: Run) -> Callable:
    cfg = run.cfg
    facts = student_facts(s, run)
    place = f"{platform.node()} {s.folder.resolve()}"
    keys = {"project": cfg.wandb_project, "group": cfg.out_dir, "name": s.name, "dir": s.folder}
    keys["id"] = hashlib.sha256(place.encode()).hexdigest()[:12]  # the same after a resume

    @functools.cache
    def opened():
        import wandb

        return wandb.init(**keys, config=facts, resume="allow", reinit="create_new")

    return lambda record: opened().log(record, step=record["step"])


# ----------------------------------------------------------------------------------------------
# resuming


def resume(students: list[Student], run: Run) -> None:
    """Restore all students, and `run`, from their newest common checkpoint.

    A new run begins at step 0, or with the checkpoint that `resume_from` names.
    """
    cfg = run.cfg
    out = Path(cfg.out_dir)
    read = [[s.init_sha256, *s.checkpoints()] for s in students]
    parallel.check_agreement(**{"first weights and checkpoints": read})
    stop_steps = read_stops(students)
    live = [s for s in students if not s.stopped]
    common = common_steps(live)
    if not live:
        run.step = max(stop_steps)
    elif common:
        run.step = newest_complete(live, common, run.facts)
        run.counts = restore(live, run.step)
    elif any((s.folder / name).exists() for s in live for name in ("log.jsonl", "model")):
        problem = "its students have no checkpoint in common"
        raise UserError(f"{out}: {problem}; restore one, or choose another out_dir")
    elif cfg.resume_from:
        run.step, run.counts["valid_tokens"] = start_from(cfg.resume_from, live)
    if run.step > cfg.max_steps:
        problem = f"{out} is at step {run.step}"
        raise UserError(f"max_steps={cfg.max_steps}: {problem}; set at least that")
    say_summary(students, run)
    parallel.all_gather(None)  # all processes have read the folder before the first one writes
    if parallel.rank() == 0:
        for s in live:
            s.folder.mkdir(parents=True, exist_ok=True)
            files.truncate_lines(s.folder / "log.jsonl", run.step)
            # a histogram of step n is of the weights before update n
            files.truncate_lines(s.folder / "histograms.jsonl", run.step - 1)
            s.services = services(s, run)
        files.truncate_lines(out / "teacher.jsonl", run.step - 1)
        record_start(out / "run.json", run)
    if live and not common:  # from now on there is always a checkpoint that explains the logs
        save_checkpoints(live, run)


def read_stops(students: list[Student]) -> list[int]:
    """Mark the students that an earlier start has stopped. Returns their steps."""
    steps = []
    for s in students:
        file = s.folder / "stopped.json"
        if file.is_file():
            stop = read_json(file, ["why", "step"])
            s.stopped = stop["why"]
            steps.append(stop["step"])
            say(f"{s.name} stopped at {s.stopped}")
    return steps


def common_steps(live: list[Student]) -> list[int]:
    """Return the steps of which every student has a checkpoint, newest first."""
    if not live:
        return []
    steps = set.intersection(*[{*s.checkpoints()} for s in live])
    return sorted(steps, reverse=True)


def newest_complete(live: list[Student], steps: list[int], facts: dict) -> int:
    """Return the first of `steps` whose checkpoints are as they were saved, of this very run."""
    for step in steps:
        try:
            for s in live:
                checkpoint = s.checkpoints()[step]
                check_same_run(s.name, read_state(checkpoint), checkpoint, facts)
            return step
        except BrokenError as error:
            if step == steps[-1]:
                raise UserError(str(error)) from error
            say(f"passed over: {error}")


def check_same_run(name: str, state: dict, checkpoint: Path, facts: dict) -> None:
    """Raise `UserError` if a checkpoint is of another student than the one that this run makes."""
    differ = "; ".join(differences(state["made_by"], facts["made_by"][name])[:3])
    if differ:
        raise UserError(
            f"{checkpoint}: contains a different run ({name}: {differ}); choose another out_dir; "
            "there --resume_from=CHECKPOINT continues it, and --student_weights starts anew from "
            "its weights"
        )


def restore(live: list[Student], step: int) -> dict:
    """Load every student's checkpoint of a step. Returns the counts."""
    # The saved sums are over all processes: the first process takes them.
    share = 0.0 if parallel.rank() else 1.0
    for s in live:
        state = load_checkpoint(s.checkpoints()[step], s)
        for key, value in state["sums"].items():
            total = math.nan if value is None else value * share
            s.sums[key] = torch.tensor(total, dtype=torch.float64, device=s.model.head.device)
    return {key: state[key] for key in COUNTS}


def start_from(name: str, live: list[Student]) -> tuple[int, int]:
    """Load the checkpoint `resume_from` into every student. Returns its step and valid tokens."""
    checkpoint = find_folder(name).parent
    if not (checkpoint / "state.json").is_file():
        expected = "out/NAME/METHOD/checkpoints/step_.."
        raise UserError(f"resume_from={name}: no checkpoint; expected {expected}")
    for s in live:
        state = load_checkpoint(checkpoint, s)
    return state["step"], state["valid_tokens"]


def record_start(file: Path, run: Run) -> None:
    """Write run.json with one more entry in `starts`."""
    starts = []
    if file.is_file():
        starts = read_json(file).get("starts", [])
    start = {
        "step": run.step,
        "time": time.strftime("%FT%T%z"),
        "host": platform.node(),
        "processes": parallel.world(),
    }
    files.write_json(file, run.facts | {"starts": [*starts, start | run.facts]})


def check_disk(students: list[Student], cfg: Config) -> str:
    """Check that checkpoints and models fit the disk. Returns a sentence that says so."""
    out = Path(cfg.out_dir)
    n_params = students[0].model.n_params
    n_checkpoints = cfg.keep_checkpoints + 1
    # weights and two moments in each checkpoint; at the end the model
    needed = len(students) * n_params * (12 * n_checkpoints + 4)
    free = shutil.disk_usage(out).free
    for file in out.glob("*/checkpoints/**/*"):
        if file.is_file():
            free += file.stat().st_size
    use = f"checkpoints and models take up to {gib(needed)} of disk, {gib(free)} are free"
    if needed > free:
        remedy = "choose another disk, or set --keep_checkpoints=1"
        raise UserError(f"out_dir={out}: {use}; {remedy}")
    return use


def say_summary(students: list[Student], run: Run) -> None:
    """Print the machine, who learns from whom, the students' size, and where the run stands."""
    cfg = run.cfg
    names = [f"{s.name} {cfg.settings_of(s.name) or ''}".strip() for s in students]
    teacher = run.facts["teacher_used"] or "no teacher"
    dtype = str(compute_dtype(cfg)).removeprefix("torch.")
    mode = "compiled" if cfg.compile else "eager"
    machine = f"{run.facts['machine']}, processes: {parallel.world()}"
    size = f"{students[0].model.n_params:,} parameters"
    weights = students[0].init_sha256[:12]
    progress = f"step {run.step:,} of {cfg.max_steps:,}, {cfg.batch_rows} rows each"
    say(f"{machine}, {dtype}, {mode}, micro_batch {cfg.micro_batch}")
    say(f"{teacher} -> {', '.join(names)}")
    say(f"{cfg.student}: {size}, initial weights {weights}")
    say(f"{cfg.out_dir}: {progress}; {check_disk(students, cfg)}")


# ----------------------------------------------------------------------------------------------
# saving


def student_facts(s: Student, run: Run) -> dict:
    """Return the provenance of one student's weights and scores."""
    cfg = run.cfg
    record = run.facts["made_by"][s.name]
    return {
        "method": s.name,
        "overrides": cfg.settings_of(s.name),
        "student": cfg.student,
        "seed": cfg.seed,
        "init_sha256": s.init_sha256,
        "step": run.step,
        "nominal_tokens": run.step * cfg.batch_rows * cfg.seq_len,
        **run.counts,
        **run.facts,
        "made_by": record,
        "made_by_sha256": record_hash(record),
    }


def save_model(s: Student, run: Run) -> None:
    """Write the model for transformers, then its provenance beside it."""
    weights = parallel.to_first(s.model.state_dict())
    if parallel.rank() == 0:
        s.model.save_pretrained(s.folder / "model", s.tokenizer, weights)
        files.write_json(s.folder / "run.json", student_facts(s, run))
    say(f"{s.name}: {s.folder / 'model'}")


def save_checkpoints(live: list[Student], run: Run) -> UserError | None:
    """Write a checkpoint of every student, then delete older ones.

    Returns the error if one could not be written: then nothing is deleted.
    """
    failed = None
    for s in live:
        groups = {}
        if run.step:  # a checkpoint of step 0 has no tensors
            groups = tensors_of(s)
        state = student_facts(s, run)
        state["sums"] = files.for_json(s.totals())
        try:
            if parallel.rank() == 0:
                name = f"step_{run.step:08d}"
                write_checkpoint(s.folder / "checkpoints" / name, groups, state, s)
        except UserError as error:
            failed = error
    if parallel.rank() == 0 and not failed:
        for s in live:
            delete_older(s, run)
    return failed


def tensors_of(s: Student) -> dict[str, dict[str, Tensor]]:
    """Return weights, extras and optimizer state as whole tensors; on the first process alone."""
    names = {p: name for name, p in s.parameters().items()}
    moments = {}
    for p, kept in s.optimizer.state.items():
        for key, value in kept.items():
            moments[f"{names[p]}/{key}"] = value
    groups = {"model": s.model.state_dict(), "extras": s.extras.state_dict(), "optimizer": moments}
    gathered = {}
    for name, group in groups.items():
        if group:
            gathered[name] = parallel.to_first(dict(sorted(group.items())))
    return gathered


def write_checkpoint(path: Path, groups: dict[str, dict], state: dict, s: Student) -> None:
    """Write a folder with model/ for transformers, further groups of tensors, and state.json."""
    with files.atomic_folder(path) as new:
        for name, group in groups.items():
            if name == "model":
                s.model.save_pretrained(new / "model", s.tokenizer, group)
            else:
                safetensors.torch.save_file(group, new / f"{name}.safetensors")
        hashes = {}
        for file in sorted(new.rglob("*.safetensors")):
            hashes[str(file.relative_to(new))] = file_hash(file)
        state["files_sha256"] = hashes
        files.write_json(new / "state.json", state)


def delete_older(s: Student, run: Run) -> None:
    """Delete all checkpoints up to this step but the last `keep_checkpoints`.

    A stopping student keeps all until stopped.json is written: after a kill the students need a
    common step.
    """
    if s.stopped:
        return
    cfg = run.cfg
    older = [path for step, path in s.checkpoints().items() if step <= run.step]
    for path in older[: -cfg.keep_checkpoints]:
        if not cfg.keep_every_steps or step_of(path) % cfg.keep_every_steps:
            files.discard(path)


class BrokenError(UserError):
    """A checkpoint is not as it was saved."""


def read_state(path: Path) -> dict:
    """Read a checkpoint's state.json.

    Raises `BrokenError` unless every file of the checkpoint is as it was saved.
    """
    keys = ("config", "made_by", "sums", "step", "files_sha256", *COUNTS)
    try:
        state = read_json(path / "state.json", keys)
        changed = []
        for file, sha in state["files_sha256"].items():
            if file_hash(path / file) != sha:
                changed.append(file)
        if changed:
            raise UserError(f"{path}: {changed} not as it was saved")
    except UserError as error:
        remedy = f"move {path} aside to resume from the one before"
        raise BrokenError(f"{error}; {remedy}") from error
    return state


def load_checkpoint(path: Path, s: Student) -> dict:
    """Restore a student's weights, extras and optimizer. Returns the checkpoint's state."""
    state = read_state(path)
    if state["made_by"]["shape"] != dataclasses.asdict(s.model.config):
        remedy = "set --student to it, or choose another checkpoint"
        raise UserError(f"{path}: a student of another shape; {remedy}")
    groups = {}
    for file in state["files_sha256"]:
        groups[Path(file).stem] = safetensors.torch.load_file(path / file)
    if not groups:  # a checkpoint of step 0
        return state
    problem = "its student had other parameters or extras"
    with reading(path, f"{problem}; undo the edit, or choose another checkpoint"), torch.no_grad():
        copy_tensors(groups["model"], s.model)
        copy_tensors(groups.get("extras", {}), s.extras)
        parameters = s.parameters()
        for key, value in groups.get("optimizer", {}).items():
            name, _, kept = key.rpartition("/")
            p = parameters[name]
            s.optimizer.state[p][kept] = parallel.distribute_like(value, p)
    return state


def copy_tensors(saved: dict[str, Tensor], module: nn.Module) -> None:
    for key, p in module.state_dict().items():
        p.copy_(parallel.distribute_like(saved[key], p))


# ----------------------------------------------------------------------------------------------
# stopping


def drop_broken(live: list[Student], check_weights: bool, run: Run) -> list[Student]:
    """Stop the students that cannot continue. Returns the others.

    A student whose weights are still finite gets a last checkpoint before its stopped.json.
    """
    if check_weights or any(s.stopped for s in live):
        broken = [not has_finite_weights(s) for s in live]
        broken = parallel.all_reduce_sum(*broken)  # all processes stop the same students
        for s, is_broken in zip(live, broken, strict=True):
            if is_broken:
                s.stopped = s.stopped or "its weights are not finite"
            elif s.stopped:
                failed = save_checkpoints([s], run)
                if failed:
                    s.stopped += f"; its last weights are lost: {failed}"
    for s in live:
        if s.stopped:
            stop(s, run)
    return [s for s in live if not s.stopped]


def has_finite_weights(s: Student) -> bool:
    return all(all_finite(parallel.local(p)) for p in s.parameters().values())


def stop(s: Student, run: Run) -> None:
    """Write stopped.json, and print how the student can go on."""
    remedy = "try"
    checkpoints = list(s.checkpoints().values())
    if checkpoints:
        remedy = f"to go on, --resume_from={checkpoints[-1]} with another out_dir and"
    rate = run.cfg.lr * s.lr_factor
    s.stopped = f"step {run.step}: {s.stopped}; {remedy} a smaller lr than {rate:g}"
    say(f"{s.name} stopped at {s.stopped}")
    if parallel.rank() == 0:
        record = student_facts(s, run) | {"why": s.stopped}
        files.write_json(s.folder / "stopped.json", record)
