"""The folder of a run: what is checked before the first step, what the run was made of, its checkpoints and logs.

OUT/run.json                    config, command, hashes of data and teacher, versions, machine; `starts`: the same for each start
OUT/METHOD/log.jsonl            a record every log_every_steps, and one for each validation
OUT/METHOD/checkpoints/step_00001000/   model/ as below, optimizer.safetensors (PARAMETER/exp_avg ..), state.json
OUT/METHOD/model/, run.json     at the end: the model for transformers, and what it was made of
OUT/METHOD/stopped.json         instead, if it broke: at which step, and why

Nothing here changes what is learnt. A checkpoint is complete under its name, or it does not exist.
"""

import dataclasses
import functools
import hashlib
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from configure import Config
from lib import files, parallel
from lib.checks import all_finite
from lib.device import gib, machine_facts
from lib.errors import UserError, first_line, require
from lib.files import read_json, reading
from lib.hf import find_folder, load_tokenizer, pinned, tokenizer_hash
from lib.identity import differences, file_hash, made_by, record_hash, student_shape
from lib.rows import Rows
from lib.teacher import check_teacher, inherited
from losses import check_settings, needs_teacher
from model import Qwen2, student_config

# Of the run, and since the log's last record.
COUNTS = ("valid_tokens", "since_log_tokens", "since_log_steps", "since_log_sec")


@dataclass
class Student:
    """One method's weights and optimizer, and what is logged of it."""

    name: str  # METHOD or METHOD@LABEL; also its folder's name
    model: Qwen2
    extras: nn.ModuleDict  # trained beside it, for terms of one's own: in checkpoints, never in model/
    optimizer: torch.optim.Optimizer
    folder: Path
    init_sha256: str
    tokenizer: PreTrainedTokenizerFast | None = None  # saved with the model
    lr_factor: float = 1.0  # of the schedule's rate
    sums: dict[str, Tensor] = field(default_factory=dict)  # fp64, by term: this process's, since the last record
    gnorm: float = 0.0
    skipped: int = 0  # updates in a row without a finite gradient
    stopped: str | None = None  # why it could not continue
    services: dict[str, Callable] = field(default_factory=dict)  # beside log.jsonl: TensorBoard, Weights & Biases

    def parameters(self) -> dict[str, Tensor]:
        """Those of the model and of the extras by name."""
        extras = {f"extras.{name}": p for name, p in self.extras.named_parameters()}
        return dict(self.model.named_parameters()) | extras

    def totals(self) -> dict[str, float]:
        """`sums` over all processes."""
        return dict(zip(self.sums, parallel.all_reduce_sum(*self.sums.values()), strict=True)) if self.sums else {}

    def record(self, values: dict) -> None:
        """Add one record to this student's log, None for a value that is not finite. A service that fails is left out."""
        values = files.for_json(values)
        if parallel.rank() == 0:
            append(self.folder / "log.jsonl", values)
            for service, send in [*self.services.items()]:
                try:
                    send(values)
                except Exception as error:  # whatever it is: log.jsonl has all of it
                    say(f"{self.name}: left out {service} from step {values['step']} on: {first_line(error)}")
                    del self.services[service]

    def checkpoints(self) -> dict[int, Path]:
        """The complete ones by step, oldest first."""
        paths = self.folder.glob("checkpoints/step_*")
        return dict(sorted((int(p.name[5:]), p) for p in paths if re.fullmatch(r"step_\d{8,}", p.name) and p.is_dir()))


def say(text: str) -> None:
    """Print on the first process, above the progress bar."""
    if parallel.rank() == 0:
        try:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        except OSError:  # Ctrl-C has ended `| tee` too: the checkpoint is still to come
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


UNWRITTEN: dict[Path, list[dict]] = {}


def append(path: Path, record: dict) -> None:
    """Add a record to a file of JSON lines. While it cannot be written, as on a full disk, records wait for the next one."""
    waiting = UNWRITTEN.setdefault(path, [])
    waiting.append(record)
    try:
        while waiting:
            files.append_line(path, waiting[0])
            waiting.pop(0)
    except UserError as error:
        if len(waiting) == 1:
            say(str(error))


def compute_dtype(cfg: Config) -> torch.dtype:
    """Of activations and products."""
    bf16 = cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and cfg.device.startswith("cuda"))
    return torch.bfloat16 if bf16 else torch.float32


def check_config(cfg: Config) -> None:
    """Validate the config before any data is read."""
    parallel.check_agreement(methods=cfg.methods, seq_len=cfg.seq_len)
    shape, world = student_shape(cfg), parallel.world()
    for name in dict.fromkeys((*cfg.methods, *cfg.hyper)):
        check_settings(name, shape.vocab_size, cfg.w_kd_schedule, cfg.compile, **cfg.overrides_of(name))
    unused = [*(cfg.hyper.keys() - {*cfg.methods, *(name.partition("@")[0] for name in cfg.methods)})]
    learner = next(filter(needs_teacher, cfg.methods), None)
    for ok, message in (
        (cfg.batch_rows % (world * cfg.group) == 0, f"{world} processes with group={cfg.group}: expected their product to divide batch_rows={cfg.batch_rows}"),
        (world % cfg.shard == 0, f"shard={cfg.shard}: expected a divisor of the {world} processes; start more of them, or set it"),
        (cfg.teacher or not learner, f"teacher=None: {learner} learns from one; set a local folder or hub id"),
        (not unused, f"settings of {unused}, not among methods={cfg.methods}; add the method, or remove its settings"),
        (cfg.seq_len <= shape.max_position_embeddings, f"seq_len={cfg.seq_len}: the student supports {shape.max_position_embeddings} positions; set less"),
    ):  # fmt: skip
        require(ok, message)


def check_data(cfg: Config, rows: Rows, val: Rows) -> PreTrainedTokenizerFast:
    """Check that rows, tokenizer and vocabularies match -> the tokenizer."""
    name, given = cfg.tokenizer or cfg.teacher, inherited(cfg.teacher)
    require(name, "tokenizer=None with teacher=None: set the tokenizer of the rows; it is saved with the model")
    tokenizer, s = load_tokenizer(name), student_config(cfg.student, given).vocab_size
    t, ids, needed = s, tokenizer.get_vocab(), cfg.max_steps * cfg.batch_rows
    if given and any(map(needs_teacher, cfg.methods)):
        check_teacher(cfg.teacher, tokenizer, cfg.seq_len)
        t = given["vocab_size"]
    n, before = max(ids.values()) + 1, {}
    if cfg.student_weights and (find_folder(cfg.student_weights) / "tokenizer.json").is_file():
        before = load_tokenizer(cfg.student_weights).get_vocab()
    n_val, half, fit = min(val.n, cfg.val_max_rows or val.n), val.manifest.get("unigram_half"), rows.n // cfg.batch_rows
    warmup = f" --warmup_steps={fit // 10}" if cfg.warmup_steps >= fit else ""
    shorter = f"set --max_steps={fit} --schedule_steps={fit}{warmup}, or " if fit else ""
    for ok, message in (
        *((rows.manifest.get(key) == val.manifest.get(key), f"{cfg.data_dir}: {key} differs in train.json and val.json; prepare them together")
          for key in ("tokenizer_sha256", "vocab_size", "eos_id", "bos")),
        (rows.manifest["sha256"] != val.manifest["sha256"], f"{cfg.data_dir}: val.bin has the rows of train.bin; prepare it again"),
        (rows.manifest["eos_id"] == tokenizer.eos_token_id, f"{cfg.data_dir}: eos_id={rows.manifest['eos_id']}, the tokenizer has {tokenizer.eos_token_id}; prepare it again"),
        (tokenizer_hash(tokenizer) == rows.manifest["tokenizer_sha256"], f"tokenizer {name}: not the one that {cfg.data_dir} was prepared with; prepare again"),
        (before | ids == ids | before, f"student_weights={cfg.student_weights}: its tokenizer has other ids"),
        (cfg.repeat_rows or rows.n >= needed, f"max_steps={cfg.max_steps}: needs {needed:,} rows, {cfg.data_dir} has {rows.n:,}; "
         f"{shorter}set --repeat_rows=True, or prepare more rows"),
        (n <= s, f"student={cfg.student}: vocabulary of {s:,}, but the tokenizer has {n:,} tokens; choose a larger one"),
    ):  # fmt: skip
        require(ok, message)
    say(f"{cfg.data_dir}: {cfg.max_steps:,} updates of {cfg.batch_rows} rows are {needed / rows.n:,.2f} passes over {rows.n:,} rows")  # fmt: skip
    if half and (half := half * math.sqrt(val.n / n_val)) > 0.1:
        say(f"{n_val:,} held-out rows give a CE to about ± {half:.2f} nats (95 %): too few to tell close methods apart")
    if t != s:
        say(f"vocabulary: {t:,} of the teacher, {s:,} of the student: cut to {min(t, s):,}; the tokenizer has {n:,}")
    return tokenizer


def agreed_records(cfg: Config) -> dict[str, dict]:
    """What makes each student (lib/identity.py), on every process the same."""
    records = {name: made_by(cfg, name) for name in cfg.methods}
    for name, record in records.items():
        parallel.check_agreement(**{f"{name}, {key}": value for key, value in record.items()})
    return records


def run_facts(cfg: Config, rows: Rows, records: dict[str, dict]) -> dict:
    """The provenance of every result of the run."""
    return {
        "config": dataclasses.asdict(cfg),
        "argv": sys.argv[1:],
        "made_by": records,
        "bos": rows.manifest["bos"],  # the id before each document, if any
        "teacher_used": pinned(cfg.teacher) if any(map(needs_teacher, cfg.methods)) else None,
        **machine_facts(torch.device(cfg.device)),
    }


def student_facts(s: Student, step: int, counts: dict, facts: dict, cfg: Config) -> dict:
    """The provenance of one student's weights and scores."""
    own = {"method": s.name, "overrides": cfg.settings_of(s.name), "student": cfg.student, "seed": cfg.seed}
    own |= {"init_sha256": s.init_sha256, "step": step, "nominal_tokens": step * cfg.batch_rows * cfg.seq_len}
    record = facts["made_by"][s.name]
    return {**own, **counts, **facts, "made_by": record, "made_by_sha256": record_hash(record)}


def check_same_run(name: str, before: dict, where: Path, facts: dict) -> None:
    """Raise `UserError` unless the student of a checkpoint's state is the one that this run makes."""
    differ = "; ".join(differences(before["made_by"], facts["made_by"][name])[:3])
    require(not differ, f"{where}: contains a different run ({name}: {differ}); choose another out_dir; there "
            "--resume_from=CHECKPOINT continues it, and --student_weights starts anew from its weights")  # fmt: skip


def resume(students: list[Student], facts: dict, cfg: Config) -> tuple[int, dict]:
    """Restore all students from their newest common checkpoint, or begin -> the step and the counts."""
    out = Path(cfg.out_dir)
    there = [[s.init_sha256, *s.checkpoints()] for s in students]
    parallel.check_agreement(**{"first weights and checkpoints": there})
    stops = [(s, s.folder / "stopped.json") for s in students]
    stops = [(s, read_json(file, ["why", "step"])) for s, file in stops if file.is_file()]
    for s, stop in stops:
        s.stopped = stop["why"]
        say(f"{s.name} stopped at {s.stopped}")
    live = [s for s in students if not s.stopped]
    common = set.intersection(*({*s.checkpoints()} for s in live)) if live else {max(stop["step"] for _, stop in stops)}
    started = any((s.folder / name).exists() for s in live for name in ("log.jsonl", "model"))
    message = f"{out}: its students have no checkpoint in common; restore one, or choose another out_dir"
    require(common or not started, message)
    step, counts = max(common, default=0), dict.fromkeys(COUNTS, 0)
    for step in sorted(common, reverse=True) if live else ():  # a broken newest one is passed over
        try:
            for s in live:
                check_same_run(s.name, read_state(s.checkpoints()[step]), s.checkpoints()[step], facts)
            break
        except BrokenError as error:
            require(step > min(common), str(error))
            say(f"passed over: {error}")
    for s in live if common else ():
        state = load_checkpoint(s.checkpoints()[step], s)
        share = 0.0 if parallel.rank() else 1.0  # the sums are over all processes: the first one takes them
        like = {"dtype": torch.float64, "device": s.model.head.device}
        s.sums = {key: torch.tensor(math.nan if x is None else x * share, **like) for key, x in state["sums"].items()}
        counts = {key: state[key] for key in COUNTS}
    for s in live if cfg.resume_from and not common else ():
        checkpoint = find_folder(cfg.resume_from).parent
        complete = (checkpoint / "state.json").is_file()
        require(complete, f"resume_from={cfg.resume_from}: no checkpoint; expected out/NAME/METHOD/checkpoints/step_..")
        state = load_checkpoint(checkpoint, s)
        step, counts["valid_tokens"] = state["step"], state["valid_tokens"]
    require(step <= cfg.max_steps, f"max_steps={cfg.max_steps}: {out} is at step {step}; set at least that")
    say(summary(students, step, facts, cfg))
    parallel.all_gather(None)  # all processes have read the folder before the first one writes
    if parallel.rank() == 0:
        for s in live:
            s.folder.mkdir(parents=True, exist_ok=True)
            files.truncate_lines(s.folder / "log.jsonl", step)
            files.truncate_lines(s.folder / "histograms.jsonl", step - 1)  # of step n: the weights before update n
            s.services = services(s, student_facts(s, step, counts, facts, cfg), cfg)
        files.truncate_lines(out / "teacher.jsonl", step - 1)
        starts = read_json(out / "run.json").get("starts", []) if (out / "run.json").is_file() else []
        now = {"step": step, "time": time.strftime("%FT%T%z"), "host": platform.node(), "processes": parallel.world()}
        files.write_json(out / "run.json", facts | {"starts": [*starts, now | facts]})
    if not common:  # from now on there is always a checkpoint that explains the logs
        save_checkpoints(live, step, counts, facts, cfg)
    return step, counts


def summary(students: list[Student], step: int, facts: dict, cfg: Config) -> str:
    """What runs on what. Raises `UserError` if its checkpoints do not fit the disk."""
    n, out = students[0].model.n_params, Path(cfg.out_dir)
    needs = len(students) * n * (12 * (cfg.keep_checkpoints + 1) + 4)  # weights and two moments; at the end the model
    free = shutil.disk_usage(out).free + sum(f.stat().st_size for f in out.glob("*/checkpoints/**/*") if f.is_file())
    disk = f"checkpoints and models take up to {gib(needs)} of disk, {gib(free)} are free"
    require(needs <= free, f"out_dir={out}: {disk}; choose another disk, or set --keep_checkpoints=1")
    names = ", ".join(f"{s.name} {cfg.settings_of(s.name) or ''}".strip() for s in students)
    dtype, mode = str(compute_dtype(cfg)).removeprefix("torch."), "compiled" if cfg.compile else "eager"
    return (
        f"{facts['machine']}, processes: {parallel.world()}, {dtype}, {mode}, micro_batch {cfg.micro_batch}\n"
        f"{facts['teacher_used'] or 'no teacher'} -> {names}\n"
        f"{cfg.student}: {n:,} parameters, initial weights {students[0].init_sha256[:12]}\n"
        f"{out}: step {step:,} of {cfg.max_steps:,}, {cfg.batch_rows} rows each; {disk}"
    )


def drop_broken(
    live: list[Student], step: int, counts: dict, facts: dict, cfg: Config, check_weights: bool
) -> list[Student]:
    """The students that can continue; the others get a stopped.json, and before it a checkpoint while their weights are finite."""
    if check_weights or any(s.stopped for s in live):
        broken = [not all(all_finite(parallel.local(p)) for p in s.parameters().values()) for s in live]
        for s, n in zip(live, parallel.all_reduce_sum(*broken), strict=True):  # all processes stop the same ones
            if s.stopped and not n and (failed := save_checkpoints([s], step, counts, facts, cfg)):
                s.stopped += f"; its last weights are lost: {failed}"
            s.stopped = s.stopped or ("its weights are not finite" if n else None)
    for s in live:
        if s.stopped:
            newest = [*s.checkpoints().values()][-1:]
            hint = "".join(f"; to go on, --resume_from={path} with another out_dir and" for path in newest)
            s.stopped = f"step {step}: {s.stopped}{hint or '; try'} a smaller lr than {cfg.lr * s.lr_factor:g}"
            say(f"{s.name} stopped at {s.stopped}")
            if parallel.rank() == 0:
                files.write_json(
                    s.folder / "stopped.json", student_facts(s, step, counts, facts, cfg) | {"why": s.stopped}
                )
    return [s for s in live if not s.stopped]


def save_model(s: Student, step: int, counts: dict, facts: dict, cfg: Config) -> None:
    """The model for transformers, then beside it what it was made of."""
    weights = parallel.to_first(s.model.state_dict())
    if parallel.rank() == 0:
        s.model.save_pretrained(s.folder / "model", s.tokenizer, weights)
        files.write_json(s.folder / "run.json", student_facts(s, step, counts, facts, cfg))
    say(f"{s.name}: {s.folder / 'model'}")


def save_checkpoints(live: list[Student], step: int, counts: dict, facts: dict, cfg: Config) -> UserError | None:
    """A checkpoint of each student -> why one could not be written. That of step 0 has no tensors.

    All are written before any older one is removed.
    """
    failed = None
    for s in live:
        names = {p: name for name, p in s.parameters().items()}
        kept = {f"{names[p]}/{key}": value for p, own in s.optimizer.state.items() for key, value in own.items()}
        groups = {"model": s.model.state_dict(), "extras": s.extras.state_dict(), "optimizer": kept} if step else {}
        groups = {name: parallel.to_first(dict(sorted(group.items()))) for name, group in groups.items() if group}
        state = student_facts(s, step, counts, facts, cfg) | {"sums": files.for_json(s.totals())}
        try:
            if parallel.rank() == 0:
                write_checkpoint(s.folder / "checkpoints" / f"step_{step:08d}", groups, state, s)
        except UserError as error:
            failed = error
    for s in live if parallel.rank() == 0 and not failed else ():
        # all of one that stops: until its stopped.json is there, a kill must leave what it has in common with the others
        older = [path for at, path in s.checkpoints().items() if at <= step and not s.stopped][: -cfg.keep_checkpoints]
        for old in (path for path in older if not cfg.keep_every_steps or int(path.name[5:]) % cfg.keep_every_steps):
            files.discard(old)
    return failed


def write_checkpoint(path: Path, groups: dict[str, dict[str, Tensor]], state: dict, s: Student) -> None:
    """A folder with model/ for transformers, further groups of tensors, and state.json with the hashes of all."""
    with files.atomic_folder(path) as new:
        for name, group in groups.items():
            if name == "model":
                s.model.save_pretrained(new / "model", s.tokenizer, group)
            else:
                safetensors.torch.save_file(group, new / f"{name}.safetensors")
        state["files_sha256"] = {str(f.relative_to(new)): file_hash(f) for f in sorted(new.rglob("*.safetensors"))}
        files.write_json(new / "state.json", state)


class BrokenError(UserError):
    """A checkpoint is not as it was saved."""


def read_state(path: Path) -> dict:
    """A checkpoint's state.json. Raises `BrokenError` unless all of the checkpoint is as it was saved."""
    try:
        state = read_json(path / "state.json", ("config", "made_by", "sums", "step", "files_sha256", *COUNTS))
        broken = [file for file, sha in state["files_sha256"].items() if file_hash(path / file) != sha]
        require(not broken, f"{path}: {broken} not as it was saved")
    except UserError as error:
        raise BrokenError(f"{error}; move {path} aside to resume from the one before") from error
    return state


def load_checkpoint(path: Path, s: Student) -> dict:
    """Restore a student's weights, extras and optimizer -> the checkpoint's state."""
    state, parameters = read_state(path), s.parameters()
    same = state["made_by"]["shape"] == dataclasses.asdict(s.model.config)
    require(same, f"{path}: a student of another shape; set --student to it, or choose another checkpoint")
    groups = {Path(file).stem: safetensors.torch.load_file(path / file) for file in state["files_sha256"]}
    edited = "its student had other parameters or extras; undo the edit, or choose another checkpoint"
    with reading(path, edited), torch.no_grad():
        for name, module in (("model", s.model), ("extras", s.extras)) if groups else ():
            for key, p in module.state_dict().items():
                p.copy_(parallel.distribute_like(groups[name][key], p))
        for key, value in groups.get("optimizer", {}).items():
            name, _, kept = key.rpartition("/")
            p = parameters[name]
            s.optimizer.state[p][kept] = parallel.distribute_like(value, p)
    return state


def services(s: Student, facts: dict, cfg: Config) -> dict[str, Callable]:
    """TensorBoard and Weights & Biases, if asked for: each takes the records of log.jsonl, and opens with the first."""

    @functools.cache
    def board():
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(s.folder / "tensorboard")

    @functools.cache
    def wandb_run():
        import wandb

        id = hashlib.sha256(f"{platform.node()} {s.folder.resolve()}".encode()).hexdigest()[:12]  # again after a resume
        return wandb.init(project=cfg.wandb_project, group=cfg.out_dir, name=s.name, id=id, dir=s.folder, config=facts,
                          resume="allow", reinit="create_new")  # fmt: skip

    def to_tensorboard(record: dict) -> None:
        for key in record.keys() - {"step"}:
            if record[key] is not None:
                board().add_scalar(key, record[key], record["step"])
        board().flush()

    sends = {"TensorBoard": to_tensorboard} if cfg.tensorboard else {}
    return sends | ({"Weights & Biases": lambda r: wandb_run().log(r, step=r["step"])} if cfg.wandb_project else {})
