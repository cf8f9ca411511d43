"""The folder of a run: what is checked before the first step, what the run was made of, its checkpoints and logs.

OUT/run.json                    config, command, hashes of data and teacher, versions, machine; `starts`: the same for each start
OUT/METHOD/log.jsonl            a record every log_every_steps, and one for each validation
OUT/METHOD/checkpoints/step_00001000/   model.safetensors, optimizer.safetensors (PARAMETER/exp_avg ..), state.json
OUT/METHOD/model/, run.json     at the end: the model for transformers, and what it was made of
OUT/METHOD/stopped.json         instead, if it broke: at which step, and why

Nothing here changes what is learnt. A checkpoint is complete under its name, or it does not exist.
"""

import contextlib
import dataclasses
import hashlib
import json
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
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from configure import LEARNT, Config
from lib import parallel
from lib.checks import all_finite
from lib.device import gib, machine_facts
from lib.files import append_line, atomic_folder, locked, read_json, reading, require, truncate_lines, write_json
from lib.hf import find_folder, load_tokenizer, pinned, tensors_hash, tokenizer_hash, weights_hash
from lib.rows import Rows
from lib.teacher import Teacher, check_teacher, inherited
from losses import check_settings, needs_teacher
from model import Qwen2, Qwen2Config, student_config

CONTENT = ("data_sha256", "val_sha256", "tokenizer_sha256", "teacher_sha256", "teacher_shape")  # fixed within a run
COUNTS = ("valid_tokens", "since_log_tokens", "since_log_steps", "since_log_sec")  # since the last record of the log
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps for each parameter


@dataclass
class Student:
    """One method's weights and optimizer, and what is logged of it."""

    name: str  # METHOD or METHOD@LABEL; also its folder's name
    model: Qwen2
    optimizer: torch.optim.AdamW
    folder: Path
    init_sha256: str
    lr_factor: float = 1.0  # of the schedule's rate
    sums: dict[str, Tensor] = field(default_factory=dict)  # fp64, by term: this process's, since the last record
    gnorm: float = 0.0
    stopped: str | None = None  # why it could not continue
    services: list[Callable] = field(default_factory=list)  # beside log.jsonl: TensorBoard, Weights & Biases

    def totals(self) -> dict[str, float]:
        """`sums` over all processes."""
        return dict(zip(self.sums, parallel.all_reduce_sum(*self.sums.values()), strict=True)) if self.sums else {}

    def record(self, values: dict) -> None:
        """Add one record to this student's log."""
        if parallel.rank() == 0:
            append_line(self.folder / "log.jsonl", values)
            for send in self.services:
                send(values)

    def checkpoints(self) -> dict[int, Path]:
        """The complete ones by step, oldest first."""
        paths = self.folder.glob("checkpoints/step_*")
        return dict(sorted((int(p.name[5:]), p) for p in paths if re.fullmatch(r"step_\d{8,}", p.name) and p.is_dir()))


def say(text: str) -> None:
    """Print on the first process, above the progress bar."""
    if parallel.rank() == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def compute_dtype(cfg: Config) -> torch.dtype:
    """Of activations and products."""
    bf16 = cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and cfg.device.startswith("cuda"))
    return torch.bfloat16 if bf16 else torch.float32


def student_shape(cfg: Config) -> Qwen2Config:
    """The students' shape. A vocabulary larger than the teacher's is cut to that."""
    given = inherited(cfg.teacher)
    shape = student_config(cfg.student, given)
    most = given["vocab_size"] if given and any(map(needs_teacher, cfg.methods)) else shape.vocab_size
    return dataclasses.replace(shape, vocab_size=min(shape.vocab_size, most))


def check_config(cfg: Config) -> None:
    """Validate the config before any data is read."""
    parallel.check_agreement(**{key: getattr(cfg, key) for key in LEARNT})
    shape, world = student_shape(cfg), parallel.world()
    for name in dict.fromkeys((*cfg.methods, *cfg.hyper)):
        check_settings(name, shape.vocab_size, **cfg.overrides_of(name))
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
        t = check_teacher(cfg.teacher, tokenizer, cfg.seq_len)["vocab_size"]
    n, before = max(ids.values()) + 1, {}
    if cfg.student_weights and (find_folder(cfg.student_weights) / "tokenizer.json").is_file():
        before = load_tokenizer(cfg.student_weights).get_vocab()
    for ok, message in (
        *((rows.manifest.get(key) == val.manifest.get(key), f"{cfg.data_dir}: {key} differs in train.json and val.json; prepare them together")
          for key in ("tokenizer_sha256", "vocab_size", "eos_id", "bos")),
        (tokenizer_hash(tokenizer) == rows.manifest["tokenizer_sha256"], f"tokenizer {name}: not the one that {cfg.data_dir} was prepared with; prepare again"),
        (before | ids == ids | before, f"student_weights={cfg.student_weights}: its tokenizer has other ids"),
        (cfg.repeat_rows or rows.n >= needed, f"max_steps={cfg.max_steps}: needs {needed:,} rows, {cfg.data_dir} has {rows.n:,}; "
         "set fewer steps, prepare more rows, or set repeat_rows=True"),
        (n <= s, f"student={cfg.student}: vocabulary of {s:,}, but the tokenizer has {n:,} tokens; choose a larger one"),
    ):  # fmt: skip
        require(ok, message)
    if t != s:
        say(f"vocabulary: {t:,} of the teacher, {s:,} of the student: cut to {min(t, s):,}; the tokenizer has {n:,}")
    return tokenizer


def lock_run_dir(cfg: Config) -> contextlib.AbstractContextManager:
    """The run's folder, created if necessary and locked for this run."""
    out = Path(cfg.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    busy = f"out_dir={out}: another train.py is running there; wait until it ends, or choose another out_dir"
    return contextlib.nullcontext() if parallel.rank() else locked(out, busy)


def run_facts(cfg: Config, rows: Rows, val: Rows, teacher: Teacher | None) -> dict:
    """The provenance of every result of the run."""
    return {
        "config": dataclasses.asdict(cfg),
        "argv": sys.argv[1:],
        "bos": rows.manifest["bos"],  # the id before each document, if any
        "data_sha256": rows.manifest["sha256"],
        "val_sha256": val.manifest["sha256"],
        "tokenizer_sha256": rows.manifest["tokenizer_sha256"],
        "teacher_used": pinned(cfg.teacher) if teacher else None,
        "teacher_sha256": weights_hash(teacher.model) if teacher else None,
        "teacher_shape": teacher.shape if teacher else None,  # the hash is of weights alone
        **machine_facts(torch.device(cfg.device)),
    }


def student_facts(s: Student, step: int, counts: dict, facts: dict, cfg: Config) -> dict:
    """The provenance of one student's weights and scores."""
    own = {"method": s.name, "overrides": cfg.settings_of(s.name), "student": cfg.student, "seed": cfg.seed}
    own |= {"init_sha256": s.init_sha256, "step": step, "nominal_tokens": step * cfg.batch_rows * cfg.seq_len}
    return {**own, **counts, **facts}


def check_same_run(before: dict, where: str | Path, facts: dict) -> None:
    """Raise `UserError` unless `before`, of run.json or of a checkpoint, was written by this very run."""
    with reading(where):
        old, new = before["config"], json.loads(json.dumps(facts["config"]))
        differ = [f"{key} was {old[key]!r}, now {new[key]!r}" for key in sorted(LEARNT) if old[key] != new[key]]
        differ += [f"{key} differs" for key in CONTENT if before[key] != facts[key]]
    require(not differ, f"{where}: contains a different run ({'; '.join(differ[:3])}); choose another out_dir")


def resume(students: list[Student], facts: dict, cfg: Config) -> tuple[int, dict]:
    """Restore all students from their newest common checkpoint, or start at step 0 -> that step and the counts."""
    out, same = Path(cfg.out_dir), {key: facts[key] for key in CONTENT}
    same |= {"weights": [s.init_sha256 for s in students], "checkpoints": [[*s.checkpoints()] for s in students]}
    parallel.check_agreement(**same)
    before = read_json(out / "run.json") if (out / "run.json").is_file() else {}
    if before:
        check_same_run(before, f"out_dir={out}", facts)
    for s in students:
        if (s.folder / "stopped.json").is_file():
            s.stopped = read_json(s.folder / "stopped.json", ["why"])["why"]
            say(f"{s.name} stopped at {s.stopped}")
    live = [s for s in students if not s.stopped]
    common = set.intersection(*({*s.checkpoints()} for s in live)) if live else {cfg.max_steps}
    started = any((s.folder / name).exists() for s in live for name in ("log.jsonl", "model", "checkpoints"))
    message = f"{out}: its students have no checkpoint in common; restore one, or choose another out_dir"
    require(common or not started, message)
    step, counts = max(common, default=0), dict.fromkeys(COUNTS, 0)
    require(step <= cfg.max_steps, f"max_steps={cfg.max_steps}: {out} is at step {step}; set at least that")
    for s in live if common else ():
        counts = load_checkpoint(s.checkpoints()[step], s, facts)
    say(summary(students, step, facts, cfg))
    parallel.barrier(torch.device(cfg.device))  # all processes have read the folder before the first one writes
    if parallel.rank() == 0:
        for s in live:
            s.folder.mkdir(parents=True, exist_ok=True)
            truncate_lines(s.folder / "log.jsonl", step)
            truncate_lines(
                s.folder / "histograms.jsonl", step - 1
            )  # a line of step n is of the weights before update n
            s.services = open_services(s, student_facts(s, step, counts, facts, cfg), cfg)
        truncate_lines(out / "teacher.jsonl", step - 1)
        now = {"step": step, "time": time.strftime("%FT%T%z"), "host": platform.node(), "processes": parallel.world()}
        write_json(out / "run.json", facts | {"starts": [*before.get("starts", []), now | facts]})
    if not common:  # from now on there is always a checkpoint that explains the logs
        save_checkpoints(live, 0, counts, facts, cfg)
    return step, counts


def summary(students: list[Student], step: int, facts: dict, cfg: Config) -> str:
    """What runs on what. Raises `UserError` if its checkpoints do not fit the disk."""
    n, out = students[0].model.n_params, Path(cfg.out_dir)
    needs = len(students) * n * (12 * (cfg.keep_checkpoints + 1) + 4)  # weights and two moments; at the end the model
    free = shutil.disk_usage(out).free + sum(f.stat().st_size for f in out.glob("*/checkpoints/*/*"))
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


def drop_broken(live: list[Student], step: int, cfg: Config, check_weights: bool) -> list[Student]:
    """The students that can continue; the others get a stopped.json."""
    if check_weights:
        broken = [not all(all_finite(parallel.local(p)) for p in s.model.parameters()) for s in live]
        for s, n in zip(live, parallel.all_reduce_sum(*broken), strict=True):  # all processes stop the same ones
            s.stopped = s.stopped or ("its weights are not finite" if n else None)
    for s in live:
        if s.stopped:
            s.stopped = f"step {step}: {s.stopped}; try a smaller lr than {cfg.lr * s.lr_factor:g}"
            newest = [*s.checkpoints().values()][-1:]
            hint = "".join(f"; to continue, start another run with --student_weights={path}" for path in newest)
            say(f"{s.name} stopped at {s.stopped}{hint}")
            if parallel.rank() == 0:
                write_json(s.folder / "stopped.json", {"step": step, "why": s.stopped})
    return [s for s in live if not s.stopped]


def save_model(
    s: Student, step: int, counts: dict, facts: dict, tokenizer: PreTrainedTokenizerFast, cfg: Config
) -> None:
    """The model for transformers, then beside it what it was made of."""
    weights = parallel.to_first(s.model.state_dict())
    if parallel.rank() == 0:
        s.model.save_pretrained(s.folder / "model", tokenizer, weights)
        write_json(s.folder / "run.json", student_facts(s, step, counts, facts, cfg))
    say(f"{s.name}: {s.folder / 'model'}")


def save_checkpoints(live: list[Student], step: int, counts: dict, facts: dict, cfg: Config) -> None:
    """A checkpoint of each student; all are written before any older one is removed. That of step 0 has no tensors."""
    for s in live:
        names = {p: name for name, p in s.model.named_parameters()}
        moments = {f"{names[p]}/{k}": v for p, state in s.optimizer.state.items() for k, v in state.items()}
        tensors = {"model": s.model.state_dict(), "optimizer": moments} if step else {}
        tensors = {name: parallel.to_first(dict(sorted(group.items()))) for name, group in tensors.items()}
        state = student_facts(s, step, counts, facts, cfg) | {"sums": s.totals()}
        path = s.folder / "checkpoints" / f"step_{step:08d}"
        if parallel.rank() == 0 and not path.exists():
            with atomic_folder(path) as new:
                for name, group in tensors.items():
                    safetensors.torch.save_file(group, new / f"{name}.safetensors")
                    state[f"{name}_sha256"] = tensors_hash(group)
                write_json(new / "state.json", state)
    for s in live if parallel.rank() == 0 else ():
        for old in [path for at, path in s.checkpoints().items() if at <= step][: -cfg.keep_checkpoints]:
            doomed = old.with_name(old.name + ".tmp")  # renamed first: a kill leaves no incomplete checkpoint
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(old, doomed)
            shutil.rmtree(doomed)


def load_checkpoint(path: Path, s: Student, facts: dict) -> dict:
    """Restore a student from a checkpoint -> the counts. Raises `UserError` if it is broken or of another run."""
    with reading(path, f"move {path} aside to resume from the one before"):
        state = read_json(path / "state.json")
        check_same_run(state, path, facts)
        names = ("model", "optimizer") if state["step"] else ()
        tensors = {name: safetensors.torch.load_file(path / f"{name}.safetensors") for name in names}
        right = (state["method"], state["init_sha256"], state["step"]) == (s.name, s.init_sha256, int(path.name[5:]))
        hashes = {name: tensors_hash(dict(sorted(group.items()))) for name, group in tensors.items()}
        right &= all(state[f"{name}_sha256"] == sha for name, sha in hashes.items())
        require(right, f"{path}: not as it was saved, or of another run; move it aside to resume from the one before")
        with torch.no_grad():
            for name, p in s.model.named_parameters() if tensors else ():
                p.copy_(parallel.distribute_like(tensors["model"][name], p))
                moments = {k: tensors["optimizer"][f"{name}/{k}"] for k in MOMENTS}
                s.optimizer.state[p] = {k: parallel.distribute_like(t, p) for k, t in moments.items()}
        share = 0.0 if parallel.rank() else 1.0  # the sums are over all processes: the first one takes them
        like = {"dtype": torch.float64, "device": s.model.head.device}
        s.sums = {key: torch.tensor(value * share, **like) for key, value in state["sums"].items()}
        return {key: state[key] for key in COUNTS}


def open_services(s: Student, facts: dict, cfg: Config) -> list[Callable[[dict], None]]:
    """TensorBoard and Weights & Biases, if asked for: each takes the records of log.jsonl."""
    services = []
    if cfg.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(s.folder / "tensorboard")

        def send(record: dict) -> None:
            for key in record.keys() - {"step"}:
                if record[key] is not None:
                    board.add_scalar(key, record[key], record["step"])
            board.flush()

        services.append(send)
    if cfg.wandb_project:
        import wandb

        id = hashlib.sha256(f"{platform.node()} {s.folder.resolve()}".encode()).hexdigest()[
            :12
        ]  # the same after a resume
        run = wandb.init(project=cfg.wandb_project, group=cfg.out_dir, name=s.name, id=id, dir=s.folder, config=facts,
                         resume="allow", reinit="create_new")  # fmt: skip
        services.append(lambda record: run.log(record, step=record["step"]))
    return services
