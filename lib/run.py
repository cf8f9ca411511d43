"""A run's folder: what is checked before the first step, what the run is made of, its checkpoints and logs.

OUT/run.json                    config, command, hashes of data and teacher, versions, machine; `starts`: the same of each start
OUT/METHOD/log.jsonl            one record for each line of the log, and for each validation
OUT/METHOD/checkpoints/step_00001000/   model.safetensors, optimizer.safetensors (PARAMETER/exp_avg ..), state.json
OUT/METHOD/model/, run.json     at the end: the model for transformers, and what it is made of; stopped.json: why it broke

Nothing here changes what is learnt. A checkpoint is complete under its name, or it does not exist.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
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
from lib.files import UserError, append_line, locked, read_json, read_lines, reading, write_json, write_lines, writing
from lib.hf import find_folder, load_tokenizer, pinned, tensors_hash, tokenizer_hash, weights_hash
from lib.rows import Rows
from lib.settings import require
from lib.teacher import Teacher, for_students
from losses import check_settings, needs_teacher
from model import Qwen2, Qwen2Config, student_config

SAME_FACTS = ("data_sha256", "val_sha256", "tokenizer_sha256", "teacher_sha256", "teacher_shape")  # of one run
COUNTS = ("valid_tokens", "line_valid", "line_steps", "line_sec")  # of all updates, and since the last line of the log
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


@dataclass
class Student:
    """One method's weights and optimizer, and what is logged of it."""

    name: str  # METHOD or METHOD@LABEL, and its folder's
    model: Qwen2
    optimizer: torch.optim.AdamW
    folder: Path
    overrides: dict  # of the method's row in METHODS
    init_sha256: str
    lr_factor: float = 1.0  # of the schedule's rate
    sums: dict[str, Tensor] = field(default_factory=dict)  # fp64, by term: this process's tokens since the last line
    gnorm: float = 0.0
    stopped: str | None = None  # why it could not go on
    sinks: list[Callable] = field(default_factory=list)  # beside log.jsonl: TensorBoard, Weights & Biases

    def totals(self) -> dict[str, float]:
        """`sums` over all processes."""
        return dict(zip(self.sums, parallel.total(*self.sums.values()), strict=True)) if self.sums else {}

    def record(self, values: dict) -> None:
        """One more line of this student's log."""
        for write in (
            (functools.partial(append_line, self.folder / "log.jsonl"), *self.sinks) if not parallel.rank() else ()
        ):
            write(values)

    def checkpoints(self) -> dict[int, Path]:
        """The complete ones by step, oldest first."""
        found = {
            int(p.name[5:]): p
            for p in self.folder.glob("checkpoints/step_*")
            if re.fullmatch(r"step_\d{8,}", p.name) and p.is_dir()
        }
        return dict(sorted(found.items()))


def say(text: str) -> None:
    if parallel.rank() == 0:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def activations(cfg: Config) -> torch.dtype:
    """Of activations and products."""
    narrow = cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and cfg.device.startswith("cuda"))
    return torch.bfloat16 if narrow else torch.float32


def student_shape(cfg: Config) -> Qwen2Config:
    """The students' shape. A preset or an inline shape takes from the teacher what it does not say; a larger vocabulary is cut."""
    return _shape(cfg.student, cfg.teacher, any(map(needs_teacher, cfg.methods)))


@functools.lru_cache(maxsize=1)
def _shape(student: str, teacher: str | None, matched: bool) -> Qwen2Config:
    given = for_students(teacher)
    shape = student_config(student, given)
    most = given["vocab_size"] if given and matched else shape.vocab_size
    return dataclasses.replace(shape, vocab_size=min(shape.vocab_size, most))


# --- what must be right before the first step ------------------------------------------------------------------------


def check_config(cfg: Config) -> None:
    """Refuse what needs no data to be seen."""
    _shape.cache_clear()  # folders may have changed since a run before in this process
    parallel.agree(**{key: getattr(cfg, key) for key in LEARNT})
    shape, world, taken = (
        student_shape(cfg),
        parallel.world(),
        {*cfg.methods, *(name.partition("@")[0] for name in cfg.methods)},
    )
    for name in dict.fromkeys((*cfg.methods, *cfg.hyper)):
        check_settings(name, shape.vocab_size, **cfg.overrides_of(name))
    for ok, message in (
        (cfg.batch_rows % (world * cfg.group) == 0, f"{world} processes with group={cfg.group}: expected their product to divide batch_rows={cfg.batch_rows}"),
        (world % cfg.shard == 0, f"shard={cfg.shard}: expected a divisor of the {world} processes; start more of them, or set it"),
        (cfg.teacher or not any(map(needs_teacher, cfg.methods)), f"teacher=None: one of {cfg.methods} learns from one; set a local folder or hub id"),
        (taken >= cfg.hyper.keys(), f"{[*cfg.hyper.keys() - taken]}: settings of what is not among methods={cfg.methods}; add it, or remove them"),
        (cfg.seq_len <= shape.max_position_embeddings, f"seq_len={cfg.seq_len}: the student supports {shape.max_position_embeddings} positions; set less"),
    ):  # fmt: skip
        require(ok, message)


def check_data(cfg: Config, rows: Rows, val: Rows) -> PreTrainedTokenizerFast:
    """Refuse rows, tokenizer and vocabularies that do not belong together -> the tokenizer."""
    name, given = cfg.tokenizer or cfg.teacher, for_students(cfg.teacher)
    require(
        name, "tokenizer=None with teacher=None: set the tokenizer that made the rows, it goes into the saved model"
    )
    tokenizer, shape, needed = load_tokenizer(name), student_config(cfg.student, given), cfg.max_steps * cfg.batch_rows
    ours = tokenizer.get_vocab()
    n, s, t = max(ours.values()) + 1, shape.vocab_size, shape.vocab_size
    if given and any(map(needs_teacher, cfg.methods)):
        t, length = given["vocab_size"], given.get("max_position_embeddings") or math.inf
        require(
            cfg.seq_len <= length, f"seq_len={cfg.seq_len}: teacher={cfg.teacher} supports {length} positions; set less"
        )
    theirs = (
        load_tokenizer(cfg.student_weights).get_vocab()
        if cfg.student_weights and (find_folder(cfg.student_weights) / "tokenizer.json").is_file()
        else {}
    )
    for ok, message in (
        (theirs | ours == ours | theirs, f"student_weights={cfg.student_weights}: its tokenizer gives other ids"),
        *((rows.manifest.get(key) == val.manifest.get(key), f"{cfg.data_dir}: {key} differs in train.json and val.json; prepare them together")
          for key in ("tokenizer_sha256", "vocab_size", "eos_id", "bos")),
        (cfg.repeat_rows or rows.n >= needed, f"max_steps={cfg.max_steps}: needs {needed:,} rows, {cfg.data_dir} has {rows.n:,}; "
         "ask for fewer steps, prepare more rows, or set repeat_rows=True"),
        (tokenizer_hash(tokenizer) == rows.manifest["tokenizer_sha256"], f"tokenizer {name}: not the one that {cfg.data_dir} was prepared with; prepare again"),
        (n <= t, f"teacher={cfg.teacher}: vocabulary of {t:,}, but the tokenizer has {n:,} tokens; logits are matched token by token"),
        (n <= s, f"student={cfg.student}: vocabulary of {s:,}, but the tokenizer has {n:,} tokens; take a shape with a larger one"),
    ):  # fmt: skip
        require(ok, message)
    if t != s:
        say(
            f"vocabulary: {t:,} of the teacher and {s:,} of the student are cut to {min(t, s):,}; the tokenizer has {n:,} ids"
        )
    return tokenizer


@contextlib.contextmanager
def taken(cfg: Config) -> Iterator[None]:
    """The run's folder, made if need be and kept for this run alone."""
    out = Path(cfg.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    busy = UserError(f"out_dir={out}: another train.py is at work there; wait for its end, or choose another out_dir")
    with contextlib.nullcontext() if parallel.rank() else locked(out, busy):
        yield


# --- what the run is made of -----------------------------------------------------------------------------------------


def facts(cfg: Config, rows: Rows, val: Rows, teacher: Teacher | None) -> dict:
    """Provenance of every result of the run."""
    return {
        "config": dataclasses.asdict(cfg),
        "argv": sys.argv[1:],
        "bos": rows.manifest.get("bos"),  # the id before each document; rows without the key have none
        "data_sha256": rows.manifest["sha256"],
        "val_sha256": val.manifest["sha256"],
        "tokenizer_sha256": rows.manifest["tokenizer_sha256"],
        "teacher_used": pinned(cfg.teacher) if teacher else None,
        "teacher_sha256": weights_hash(teacher.model) if teacher else None,
        "teacher_shape": teacher.shape if teacher else None,  # the hash is of weights alone
        **machine_facts(torch.device(cfg.device)),
    }


def of_student(s: Student, step: int, counts: dict, about: dict, cfg: Config) -> dict:
    """What stands beside a student's weights and scores."""
    own = {
        "method": s.name,
        "overrides": cfg.settings_of(s.name),
        "student": cfg.student,
        "seed": cfg.seed,
        "init_sha256": s.init_sha256,
    }
    return {**own, "step": step, "nominal_tokens": step * cfg.batch_rows * cfg.seq_len, **counts, **about}


def check_same(before: dict, where: str | Path, about: dict) -> None:
    """`UserError` unless the facts `before`, of run.json or of a checkpoint, are of this very run."""
    there, here = before["config"], json.loads(json.dumps(about["config"]))
    differs = [f"{key}={there[key]!r} there, {here[key]!r} here" for key in sorted(LEARNT) if there[key] != here[key]]
    differs += [f"{key} differs" for key in SAME_FACTS if before[key] != about[key]]
    require(
        not differs, f"{where}: already contains a different run ({', '.join(differs[:3])}); choose another out_dir"
    )


def begin(students: list[Student], about: dict, cfg: Config) -> tuple[int, dict]:
    """Restore all students from their newest common step, or begin at 0 -> that step and the counts."""
    out, first = Path(cfg.out_dir), parallel.rank() == 0
    parallel.agree(data=about["data_sha256"], teacher=about["teacher_sha256"], weights=[s.init_sha256 for s in students],
                   checkpoints=[[*s.checkpoints()] for s in students])  # fmt: skip
    before = read_json(out / "run.json") if (out / "run.json").is_file() else {}
    if before:
        with reading(out / "run.json"):
            check_same(before, f"out_dir={out}", about)
    for s in students:
        if (s.folder / "stopped.json").is_file():
            s.stopped = read_json(s.folder / "stopped.json")["why"]
            say(f"{s.name} stopped at {s.stopped}")
    live = [s for s in students if not s.stopped]
    step = max(set.intersection(*({*s.checkpoints()} for s in live)), default=None) if live else cfg.max_steps
    there = any(
        path.exists() for s in live for path in (s.folder / "log.jsonl", s.folder / "model", s.folder / "checkpoints")
    )
    require(
        step is not None or not there,
        f"{out}: no checkpoint is left that all its students have; put it back, or choose another out_dir",
    )
    begun, step = step is not None, step or 0
    require(step <= cfg.max_steps, f"max_steps={cfg.max_steps}: {out} is at step {step}; set it to that at least")
    logs = {s.folder / "log.jsonl": 0 for s in live}  # 1: a line is of the weights before its step
    logs |= dict.fromkeys((out / "teacher.jsonl", *(s.folder / "histograms.jsonl" for s in live)), 1)
    counts = dict.fromkeys(COUNTS, 0)
    for s in live if begun else ():
        counts = load(s.checkpoints()[step], s, about)
    kept = {
        path: [line for line in read_lines(path, {"step": int}) if line["step"] <= step - before]
        for path, before in logs.items()
        if path.is_file()
    }
    say(opening(students, step, about, cfg))
    parallel.wait(torch.device(cfg.device))  # nobody looks for the files while they are being written
    if first:
        for s in live:
            s.folder.mkdir(parents=True, exist_ok=True)
            s.sinks = sinks(s, of_student(s, step, counts, about, cfg), cfg)
        for path, lines in kept.items():
            write_lines(path, lines)
        now = {
            "step": step,
            "time": time.strftime("%FT%T%z"),
            "host": platform.node(),
            "processes": parallel.world(),
            **about,
        }
        write_json(out / "run.json", about | {"starts": [*before.get("starts", []), now]})
    if not begun:  # from now on there is always a checkpoint behind the logs
        save(live, 0, counts, about, cfg)
    return step, counts


def opening(students: list[Student], step: int, about: dict, cfg: Config) -> str:
    """What runs on what, and what it will take. `UserError` where its checkpoints do not fit the disk."""
    n, out = students[0].model.n_params, Path(cfg.out_dir)
    needs = len(students) * n * (12 * (cfg.keep_checkpoints + 1) + 4)  # weights and two moments; at the end the model
    free = shutil.disk_usage(out).free + sum(f.stat().st_size for f in out.glob("*/checkpoints/*/*"))
    require(
        needs <= free,
        f"out_dir={out}: checkpoints and models take {gib(needs)}, {gib(free)} are free; choose another disk, or set --keep_checkpoints=1",
    )
    who = ", ".join(f"{s.name} {cfg.settings_of(s.name) or ''}".strip() for s in students)
    dtype, compiled = str(activations(cfg)).removeprefix("torch."), "compiled" if cfg.compile else "eager"
    return (
        f"{about['machine']}, {parallel.world()} processes, {dtype}, {compiled}, micro_batch {cfg.micro_batch}\n"
        f"{about['teacher_used'] or 'no teacher'} -> {who}\n"
        f"{cfg.student}: {n:,} parameters, initial weights {students[0].init_sha256[:12]}\n"
        f"{out}: step {step:,} of {cfg.max_steps:,}, {cfg.batch_rows} rows each; checkpoints and models take {gib(needs)} of {gib(free)}"
    )


def still_whole(live: list[Student], step: int, look: bool) -> list[Student]:
    """The students that have not broken; `look` at their weights too. Those that have get a `stopped.json`."""
    if look:
        broken = [not all(all_finite(parallel.local(p)) for p in s.model.parameters()) for s in live]
        for s, n in zip(live, parallel.total(*broken), strict=True):  # all processes stop the same ones
            s.stopped = s.stopped or ("its update made weights that are not finite" if n else None)
    for s in live:
        if s.stopped:
            s.stopped = f"step {step}: {s.stopped}; try a smaller lr"
            kept = [*s.checkpoints().values()][-1:]
            say(f"{s.name} stopped at {s.stopped}" + "".join(f", from --student_weights={path}" for path in kept))
            if parallel.rank() == 0:
                write_json(s.folder / "stopped.json", {"step": step, "why": s.stopped})
    return [s for s in live if not s.stopped]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save(live: list[Student], step: int, counts: dict, about: dict, cfg: Config) -> None:
    """A checkpoint of each student; all are written before any older one is removed."""
    for s in live:
        names = {p: name for name, p in s.model.named_parameters()}
        moments = {f"{names[p]}/{k}": v for p, kept in s.optimizer.state.items() for k, v in kept.items()}
        tensors = (
            {"model": s.model.state_dict(), "optimizer": moments} if step else {}
        )  # the first weights come from the config
        tensors = {name: parallel.copies(dict(sorted(of.items()))) for name, of in tensors.items()}
        state = of_student(s, step, counts, about, cfg) | {"sums": s.totals()}
        if parallel.rank() == 0:
            write_checkpoint(s.folder / "checkpoints" / f"step_{step:08d}", tensors, state)
    for s in live if parallel.rank() == 0 else ():
        for old in [path for at, path in s.checkpoints().items() if at <= step][: -cfg.keep_checkpoints]:
            gone = old.with_name(old.name + ".tmp")  # renamed before it is deleted: a kill leaves no partial one
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(old, gone)
            shutil.rmtree(gone)


def write_checkpoint(final: Path, tensors: dict[str, dict[str, Tensor]], state: dict) -> None:
    """Write under another name, flush to the disk, then rename."""
    new = final.with_name(final.name + ".tmp")
    if final.exists():
        return
    shutil.rmtree(new, ignore_errors=True)
    with writing(new):
        new.mkdir(parents=True)
        write_json(new / "state.json", state | {f"{name}_sha256": tensors_hash(of) for name, of in tensors.items()})
        for name, of in tensors.items():
            safetensors.torch.save_file(of, new / f"{name}.safetensors")
            shutil.copymode(new / "state.json", new / f"{name}.safetensors")  # safetensors keeps others from reading
        for path in (*new.iterdir(), new):
            flush(path)
        os.replace(new, final)
        flush(final.parent)


def flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename never survives a crash without its content."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def load(path: Path, s: Student, about: dict) -> dict:
    """A checkpoint into its student -> its counts. `UserError` where it is broken or another run's."""
    with reading(path, f"move {path} aside to go on from the one before"):
        state = read_json(path / "state.json")
        check_same(state, path, about)
        names = ("model", "optimizer") if state["step"] else ()
        tensors = {name: safetensors.torch.load_file(path / f"{name}.safetensors") for name in names}
        right = (state["method"], state["init_sha256"], state["step"]) == (s.name, s.init_sha256, int(path.name[5:]))
        right &= all(tensors_hash(dict(sorted(of.items()))) == state[f"{name}_sha256"] for name, of in tensors.items())
        require(right, f"{path}: not as it was saved, or of another run")
        with torch.no_grad():
            for name, p in s.model.named_parameters() if tensors else ():
                p.copy_(parallel.part_like(tensors["model"][name], p))
                s.optimizer.state[p] = {k: parallel.part_like(tensors["optimizer"][f"{name}/{k}"], p) for k in MOMENTS}
        sums = {
            key: 0.0 if parallel.rank() else value for key, value in state["sums"].items()
        }  # they are of all processes
        s.sums = {
            key: torch.tensor(value, dtype=torch.float64, device=s.model.head.device) for key, value in sums.items()
        }
        return {key: state[key] for key in COUNTS}


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """The weights alone of a checkpoint of a model of the same shape."""
    with reading(path):
        model.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))


def finish(s: Student, step: int, counts: dict, about: dict, tokenizer: PreTrainedTokenizerFast, cfg: Config) -> None:
    """The model for transformers, and beside it what it is made of."""
    weights = parallel.copies(s.model.state_dict())
    if parallel.rank() == 0:
        with writing(s.folder / "model.tmp"):
            s.model.save_pretrained(s.folder / "model", tokenizer, weights)
        write_json(s.folder / "run.json", of_student(s, step, counts, about, cfg))
    say(f"{s.name}: {s.folder / 'model'}")


# --- services that receive the log -----------------------------------------------------------------------------------


def sinks(s: Student, facts: dict, cfg: Config) -> list[Callable[[dict], None]]:
    """TensorBoard and Weights & Biases, where asked for: each takes the records of log.jsonl."""
    found = []
    if cfg.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(s.folder / "tensorboard")
        found.append(
            lambda of: (
                [board.add_scalar(k, v, of["step"]) for k, v in of.items() if k != "step" and v is not None]
                and board.flush()
            )
        )
    if cfg.wandb_project:
        import wandb

        name = hashlib.sha256(f"{platform.node()} {s.folder.resolve()}".encode()).hexdigest()[
            :12
        ]  # the same when it goes on
        run = wandb.init(project=cfg.wandb_project, group=cfg.out_dir, name=s.name, id=name, dir=s.folder, config=facts,
                         resume="allow", reinit="create_new")  # fmt: skip
        found.append(lambda of: run.log(of, step=of["step"]))
    return found
