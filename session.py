"""What stands around the loop of train.py: device and processes, what is checked before the first step, the run's folder.

Nothing here changes what is learnt.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import platform
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import configure
from configure import Config, ConfigError
from lib import checkpoint, parallel, runlog
from lib.batches import Rows
from lib.device import ROOM, device_name, fitting_micro_batch, free_bytes, gib, pick_device, require_compiler, run_bytes
from lib.files import RENAMED, append_line, locked, read_json, read_lines
from lib.hf import find_folder, load_tokenizer, pinned, tokenizer_hash, weights_hash
from lib.runlog import Clock
from lib.teacher import Teacher, for_students, teacher_size
from losses import (
    check_settings,
    keywords,
    needs_teacher,
    settings_at,
)
from model import INLINE, PRESETS, Qwen2, Qwen2Config, load_config, student_config

# Keys that may differ when a run goes on: they change what is done where, when and how fast, not what is learnt. Of data,
# teacher and tokenizer the content is compared instead (SAME_FACTS); only prepare.py reads the last ones.
FREE_KEYS = {"max_steps", "micro_batch", "log_every_steps", "checkpoint_every_steps", "checkpoint_every_minutes",
             "keep_checkpoints", "out_dir", "device", "teacher_device", "recompute", "compile", "repeat_rows",
             "data_dir", "teacher", "tokenizer",
             "histogram_every_steps", "tensorboard", "wandb_project", "val_every_steps", "val_max_rows",
             "source", "source_config", "source_text", "source_split", "n_documents", "train_rows", "val_rows", "val_share",
             "bos", "shard", "timeout_minutes"}  # fmt: skip
RUN_KEYS = {"config": {"methods": list}}  # of run.json
STATE_KEYS = {"config?": dict, "sums": {"*": float}, **dict.fromkeys(runlog.CLOCK_KEYS, float)}  # of a checkpoint
PLACES = {"out_dir", "data_dir", "teacher", "tokenizer", "student_weights"}  # compared by what is there
PACKAGES = 320 * 2**20  # bytes of a process that has imported what train.py needs
SAME_FACTS = ("data_sha256", "val_sha256", "tokenizer_sha256", "teacher_sha256", "teacher_shape")


class Env:
    """Where the run computes: device, precision, its place among the processes, and whether it was asked to stop."""

    def __init__(self, cfg: Config):
        self.device = pick_device(cfg.device)
        narrow = cfg.dtype == "bfloat16" or (cfg.dtype == "auto" and self.device.type == "cuda")
        self.dtype = torch.bfloat16 if narrow else torch.float32  # of activations and products
        parallel.start(self.device, cfg.timeout_minutes)
        self.rank, self.world = parallel.rank(), parallel.world()
        self.first = self.rank == 0
        self.signalled = self.stopping = False  # this process got a signal; any process did
        self.due, self.saving = math.inf, False  # when the next checkpoint is due; whether it is
        self.writer, self.written = ThreadPoolExecutor(1), Future()  # of checkpoints, one at a time
        self.written.set_result(None)
        self.heads, self.rows_below, self.wide, self.redrawn = [], 0, 0, []  # of the table that is printed

    def hold_signals(self) -> None:
        """From now on signals end the run after its update. Before, they end the process: nothing is to be saved."""
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if sign != signal.SIGHUP or signal.getsignal(sign) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(sign, self._on_signal)

    def _on_signal(self, *_):
        self.signalled = True

    def over_processes(self, n: int) -> Tensor:
        """On the device, fp64: the sum of `n`, how many processes got a signal, whether a checkpoint is due."""
        due = self.first and time.perf_counter() > self.due
        sums = torch.tensor([n, self.signalled, due], dtype=torch.float64).to(self.device, non_blocking=True)
        parallel.sum_in_place([sums])
        return sums

    def table(self, first: str, columns: dict[str, str], redraw: bool = False) -> None:
        """Print a row of a table; its head too, where that differs from the one before or stands 20 rows back.

        On a terminal `redraw` writes head and row over those before, below the progress bar.
        first  what stands before the columns, which begin where those of the rows before do
        """
        if not self.first:
            return
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        width, self.wide = shutil.get_terminal_size().columns if terminal else runlog.WIDTH, max(self.wide, len(first))
        heads, rows = runlog.table_lines(f"{first:<{self.wide}}  |", columns, width)
        if terminal and redraw:
            lines = list(itertools.chain.from_iterable(zip(heads, rows, strict=True)))
            for i in range(len(self.redrawn), len(lines)):
                self.redrawn.append(tqdm(bar_format="{desc}", position=i + 1, leave=False))
            for line, text in itertools.zip_longest(self.redrawn, lines, fillvalue=""):
                line.set_description_str(text)
            return
        again = self.heads == heads and (self.rows_below < 20 or not redraw)  # rows of one validation stay together
        self.heads, self.rows_below = heads, self.rows_below + 1 if again else 1
        for head, row in zip(heads, rows, strict=True):
            self.say(row if again else f"{head}\n{row}")

    def leave_table(self) -> None:
        """Turn head and row that were redrawn into plain lines above the progress bar."""
        texts = [line.desc for line in self.redrawn]
        while self.redrawn:
            self.redrawn.pop().close()
        for text in texts:
            self.say(text)

    def say(self, text: str) -> None:
        if self.first:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


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
    sinks: list[runlog.Sink] = field(default_factory=list)  # beside log.jsonl: TensorBoard, Weights & Biases

    def totals(self) -> dict[str, float]:
        """`sums` over all processes."""
        values = torch.stack(list(self.sums.values())) if self.sums else torch.zeros(0)
        parallel.sum_in_place([values])
        return dict(zip(self.sums, values.tolist(), strict=True))

    def record(self, values: dict) -> None:
        """One more line of this student's log."""
        append_line(self.folder / "log.jsonl", values)
        for sink in self.sinks:
            sink.record(values)


def student_shape(cfg: Config) -> Qwen2Config:
    """The students' shape. A preset or an inline shape takes from the teacher what it does not say.

    A vocabulary beyond the teacher's is cut to it (`check_vocabulary` sees to it that this is padding).
    """
    return shape_of(cfg.student, cfg.teacher, any(map(needs_teacher, cfg.methods)))


@functools.cache
def shape_of(student: str, teacher: str | None, matched: bool) -> Qwen2Config:
    given = for_students(teacher)
    shape = student_config(student, given)
    most = given["vocab_size"] if given and matched else shape.vocab_size
    return dataclasses.replace(shape, vocab_size=min(shape.vocab_size, most))


# --- what must be right before the first step ------------------------------------------------------------------------


def begin(loaded: configure.Loaded) -> tuple[Config, Env]:
    """The config with the `micro_batch` that is used, and where the run computes; what needs no data is checked."""
    shape_of.cache_clear()  # folders may have changed since a run before in this process
    env, asked = Env(loaded.config), loaded.config.micro_batch
    parallel.agree(**{key: value for key, value in vars(loaded.config).items() if key not in PLACES})
    if env.world % loaded.config.shard:
        raise ConfigError(
            f"shard={loaded.config.shard}: expected a divisor of the {env.world} processes; start more of them, or set it"
        )
    takers = [name for name in loaded.config.methods if needs_teacher(name)]
    if takers and loaded.config.teacher is None:
        raise ConfigError(f"teacher=None: {takers[0]} learns from one; set a local folder or hub id")
    cfg = dataclasses.replace(loaded.config, micro_batch=choose_micro_batch(loaded.config, env))
    if asked and cfg.micro_batch != asked:
        env.say(
            f"micro_batch={asked}: lowered to {cfg.micro_batch}, the most that fits {env.world} processes; the result is "
            "the same"
        )
    check_methods(cfg, env.device)
    if env.first:
        runlog.check_sinks(cfg.tensorboard, cfg.wandb_project)
    check_student(cfg, env)
    return cfg, env


@contextlib.contextmanager
def taken(cfg: Config, env: Env) -> Iterator[None]:
    """The run's folder, made if need be and kept for this run alone."""
    out = Path(cfg.out_dir)
    if env.first:
        out.mkdir(parents=True, exist_ok=True)
    busy = ConfigError(f"out_dir={out}: another train.py is at work there; wait for its end, or choose another out_dir")
    with locked(out, busy) if env.first else contextlib.nullcontext():
        parallel.agree_on_folder(out)
        yield


def out_of_memory(cfg: Config, env: Env) -> ConfigError:
    less = fitting_micro_batch(cfg.batch_rows // env.world, cfg.group, cfg.micro_batch - 1, 0, 1)
    smaller = less < cfg.micro_batch
    what = f"set --micro_batch={less}" if smaller else "set --recompute=True, or train fewer methods at once"
    return ConfigError(f"micro_batch={cfg.micro_batch}: out of memory on {env.device}; {what}")


def choose_micro_batch(cfg: Config, env: Env) -> int:
    """The rows of a micro-batch: at most `micro_batch`, and a divisor of each process's share of an update's rows.

    None is the value of the run that goes on; for a new run what fits the card's free memory (`run_bytes`), on the CPU
    `group`.
    """
    if cfg.batch_rows % (env.world * cfg.group):
        raise ConfigError(
            f"{env.world} processes with group={cfg.group}: expected their product to divide batch_rows={cfg.batch_rows}; "
            "start another number of processes, or set --batch_rows"
        )
    share, most, before = cfg.batch_rows // env.world, cfg.micro_batch, Path(cfg.out_dir) / "run.json"
    if most is None and before.is_file():
        most = read_json(before, {"micro_batch?": int}).get("micro_batch")
    if most is None and env.device.type == "cuda":
        room = min(parallel.everyones(int(ROOM * free_bytes(env.device))))
        most = fitting_micro_batch(share, cfg.group, room, *expected_bytes(cfg, env))
    return fitting_micro_batch(share, cfg.group, most or cfg.group, 0, 1)


def expected_bytes(cfg: Config, env: Env) -> tuple[int, int]:
    """Peak memory of the run on each device -> (bytes at any micro_batch, bytes more for each row of a micro-batch)."""
    teacher = teacher_size(cfg.teacher) if any(map(needs_teacher, cfg.methods)) else None
    student, width = student_shape(cfg), env.dtype.itemsize
    return run_bytes(student, len(cfg.methods), teacher, cfg.seq_len, cfg.group, width, cfg.recompute, cfg.shard)


def announce(students: list[Student], facts: dict, cfg: Config, env: Env) -> None:
    """Say what runs on what, and what it will take. `ConfigError` where its checkpoints do not fit the disk."""
    fixed, per_row = expected_bytes(cfg, env)
    n = students[0].model.n_params
    fixed += PACKAGES + 12 * n * len(students) if env.device.type == "cpu" else 0  # and the copy that is written
    kept = sum(f.stat().st_size for f in Path(cfg.out_dir).glob("*/checkpoints/*/*"))
    needs = len(students) * n * (12 * (cfg.keep_checkpoints + 1) + 4)  # weights and two moments; at the end the model
    free = shutil.disk_usage(cfg.out_dir).free
    if needs > free + kept:
        raise ConfigError(
            f"out_dir={cfg.out_dir}: checkpoints and models take {gib(needs)}, {gib(free + kept)} are free; choose another "
            f"disk, or set --keep_checkpoints=1 (now {cfg.keep_checkpoints})"
        )
    if cfg.device == "auto" and env.device.type == "cpu" and Path("/proc/driver/nvidia/version").is_file():
        env.say("device=auto: this machine has an NVIDIA driver, but this torch finds no GPU; the run is on the CPU")
    rows = cfg.batch_rows * cfg.max_steps
    lines = [
        f"{device_name(env.device)}, {env.world} process{'es' * (env.world > 1)}, "
        f"{str(env.dtype).removeprefix('torch.')}, {'compiled' if cfg.compile else 'eager'}, "
        f"micro_batch {cfg.micro_batch}",
        f"{facts['teacher_used'] or 'no teacher'} -> {', '.join(with_settings(s.name, cfg) for s in students)}",
        f"{cfg.student}: {n:,} parameters, initial weights {students[0].init_sha256[:12]}, in {cfg.out_dir}",
        f"{cfg.max_steps:,} steps of {cfg.batch_rows} rows: {rows * cfg.seq_len:,} nominal tokens",
        f"about {gib(fixed + cfg.micro_batch * per_row)} of memory{' for each process' * (env.world > 1)}: {gib(fixed)} and "
        f"{cfg.micro_batch} x {gib(per_row)} for the rows of a micro-batch; {gib(needs)} of disk, {gib(free)} are free",
    ]
    env.say(
        "\n".join(textwrap.fill(line, runlog.WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
    )


def with_settings(student: str, cfg: Config) -> str:
    of = ", ".join(f"{key}={value}" for key, value in cfg.settings_of(student).items())
    return f"{student} ({of})" if of else student


def is_checkpoint(name: str) -> bool:
    """Whether `student_weights` names a checkpoint of a run, and not a model's folder."""
    return (Path(name) / "state.json").is_file()


def holds_weights(name: str) -> bool:
    return any(find_folder(name).glob("*.safetensors"))


def check_student(cfg: Config, env: Env) -> None:
    """Check that `student_weights` have the student's shape; say so where a `student` folder's weights are not used."""
    shape = student_shape(cfg)
    n, given = shape.max_position_embeddings, (for_students(cfg.teacher) or {}).get("max_position_embeddings")
    if cfg.seq_len > n:
        whose = f"teacher={cfg.teacher}, and so the student," if n == given else f"student={cfg.student}"
        raise ConfigError(f"seq_len={cfg.seq_len}: {whose} supports {n} positions; set less")
    if cfg.student_weights is not None and not is_checkpoint(cfg.student_weights):
        there = load_config(str(find_folder(cfg.student_weights) / "config.json"))  # never a preset of the same name
        for key, value in vars(there).items():
            if value != getattr(shape, key) and not (key == "vocab_size" and value > shape.vocab_size):
                raise ConfigError(
                    f"student_weights={cfg.student_weights}: {key} is {value} there, but {getattr(shape, key)} in "
                    f"student={cfg.student}; set --student={cfg.student_weights} to take the shape from there too"
                )
    elif (
        cfg.student_weights is None
        and not (cfg.student in PRESETS or INLINE.match(cfg.student) or cfg.student.endswith(".json"))
        and holds_weights(cfg.student)
    ):
        env.say(
            f"student={cfg.student}: only the shape is taken from there, the weights are drawn anew; "
            f"--student_weights={cfg.student} starts from its weights"
        )


def check_methods(cfg: Config, device: torch.device) -> None:
    """Check that the table has every method, that methods take their settings, and that a needed compiler works."""
    for name in dict.fromkeys((*cfg.methods, *cfg.hyper)):
        check_settings(name, student_shape(cfg).vocab_size, **cfg.overrides_of(name))
    taken = {*cfg.methods, *(name.partition("@")[0] for name in cfg.methods)}
    unused = [name for name in cfg.hyper if name not in taken]
    if unused:
        raise ConfigError(f"{unused[0]}: has settings, but is not among methods={cfg.methods}; add it, or remove them")
    for name in cfg.methods if cfg.compile else ():
        first, last = (settings_at(name, step, 1, **cfg.overrides_of(name)) for step in (0, 1))
        if first != last:
            key = min(first)
            raise ConfigError(
                f"{name}.{key} moves to {last[key]} with compile=True: every new value would be compiled anew; set "
                f"--{name}.{key}_end={first[key]} to hold it, or compile=False"
            )
    if cfg.compile:
        require_compiler(device)


def check_rows(rows: Rows, val: Rows, cfg: Config) -> None:
    """Check that training and validation rows were made alike and hold something to learn, and that there are enough."""
    for key in ("tokenizer_sha256", "vocab_size", "eos_id", "bos"):
        here, there = rows.manifest.get(key), val.manifest.get(key)
        if here != there:
            raise ConfigError(
                f"{cfg.data_dir}: {key} is {here} in train.json, {there} in val.json; prepare them together"
            )
    rows.check()
    val.check()
    if not cfg.repeat_rows and rows.n < cfg.max_steps * cfg.batch_rows:
        raise ConfigError(
            f"max_steps={cfg.max_steps}: needs {cfg.max_steps * cfg.batch_rows:,} rows, {cfg.data_dir} has {rows.n:,}; "
            "ask for fewer steps, prepare more rows, or set repeat_rows=True"
        )


def open_tokenizer(cfg: Config, rows: Rows) -> PreTrainedTokenizerFast:
    """Load the run's tokenizer; check it against the rows, and the one of `student_weights` against it."""
    name = cfg.tokenizer or cfg.teacher
    if name is None:
        raise ConfigError(
            "tokenizer=None with teacher=None: set the tokenizer that made the rows, it goes into the saved model"
        )
    tokenizer = load_tokenizer(name)
    if tokenizer_hash(tokenizer) != rows.manifest["tokenizer_sha256"]:
        raise ConfigError(
            f"tokenizer {name}: not the one that {cfg.data_dir} was prepared with; prepare again or name that one"
        )
    if cfg.student_weights and (find_folder(cfg.student_weights) / "tokenizer.json").is_file():
        token = {i: t for t, i in tokenizer.get_vocab().items()}
        for t, i in load_tokenizer(cfg.student_weights).get_vocab().items():
            if token.get(i, t) != t:
                raise ConfigError(
                    f"student_weights={cfg.student_weights}: id {i} is {t!r} to its tokenizer, {token[i]!r} to {name}; start "
                    "from weights with the same tokenizer"
                )
    return tokenizer


def check_vocabulary(cfg: Config, tokenizer: PreTrainedTokenizerFast, env: Env) -> None:
    """Check that teacher and student have a row for each of the tokenizer's ids; say what is cut of the larger one."""
    given = for_students(cfg.teacher)
    n, s = max(tokenizer.get_vocab().values()) + 1, student_config(cfg.student, given).vocab_size
    matched = given is not None and any(map(needs_teacher, cfg.methods))
    if matched and n > given["vocab_size"]:
        raise ConfigError(
            f"teacher={cfg.teacher}: vocabulary of {given['vocab_size']:,}, but the tokenizer has {n:,} tokens; logits are "
            "matched token by token"
        )
    if n > s:
        raise ConfigError(
            f"student={cfg.student}: vocabulary of {s:,}, but the tokenizer has {n:,} tokens; take a shape with a larger one"
        )
    if not matched:
        return
    t, length = given["vocab_size"], given.get("max_position_embeddings")
    if t != s:
        env.say(
            f"vocabulary: {t:,} of the teacher and {s:,} of the student are cut to {min(t, s):,}; the tokenizer has {n:,} ids"
        )
    if length and cfg.seq_len > length:
        raise ConfigError(f"seq_len={cfg.seq_len}: teacher={cfg.teacher} supports {length} positions; set less")


# --- the run's folder ------------------------------------------------------------------------------------------------


def run_facts(rows: Rows, val: Rows, teacher: Teacher | None, cfg: Config, device: torch.device) -> dict:
    """Provenance of every result of the run: hashes of data and teacher, versions, commit, machine."""
    return {
        "bos": rows.manifest.get("bos"),  # the id before each document; rows without the key have none
        "data_sha256": rows.manifest["sha256"],
        "val_sha256": val.manifest["sha256"],
        "tokenizer_sha256": rows.manifest["tokenizer_sha256"],
        "teacher_used": pinned(cfg.teacher) if teacher else None,
        "teacher_sha256": weights_hash(teacher.model) if teacher else None,
        "teacher_shape": teacher.shape if teacher else None,  # the hash is of weights alone
        **runlog.machine_facts(device),
    }


def student_facts(s: Student, step: int, clock: "Clock", cfg: Config, facts: dict) -> dict:
    """Provenance that is stored beside a student's scores."""
    return {
        "method": s.name,
        "overrides": cfg.settings_of(s.name),
        "student": cfg.student,
        "student_weights": cfg.student_weights,
        "teacher": cfg.teacher,
        "seed": cfg.seed,
        "init_sha256": s.init_sha256,
        "step": step,
        "schedule_steps": cfg.schedule_steps,
        "nominal_tokens": step * cfg.batch_rows * cfg.seq_len,
        "valid_tokens": clock.valid_tokens,
        **facts,
    }


def check_folder(students: list[Student], cfg: Config, facts: dict) -> None:
    """Check that a folder that is there holds this very run, and read which students have broken."""
    path = Path(cfg.out_dir) / "run.json"
    if path.is_file():
        check_same(read_json(path, RUN_KEYS), f"out_dir={path.parent}", cfg, facts)
    for s in students:
        stopped = s.folder / "stopped.json"
        s.stopped = read_json(stopped, {"why": str})["why"] if stopped.is_file() else None


def ended(s: Student, cfg: Config) -> bool:
    """Whether the student's model after the last step is there."""
    file = s.folder / "run.json"  # written after the model
    return file.is_file() and read_json(file, {"step": int})["step"] == cfg.max_steps


def how_to_go_on(s: Student, loaded: configure.Loaded, cfg: Config) -> str:
    """What a student that broke can do: go on from kept weights, with half of its rate and under a label of its own."""
    saved = [path for path in checkpoint.whole(s.folder / "checkpoints") if checkpoint.step_of(path)]
    if not saved:
        return "; no weights of it are kept: begin anew with a smaller lr"
    label = f"{s.name.partition('@')[0]}@lower"
    settings = cfg.settings_of(s.name) | {"lr": cfg.lr * s.lr_factor / 2}
    flags = [arg for arg in loaded.argv if not re.match(r"--(methods|student_weights|out_dir|[^=]*\.[^=]*)=", arg)]
    flags += [f"--methods={label}", *(f"--{label}.{key}={value}" for key, value in settings.items())]
    flags += [f"--student_weights={saved[-1]}", f"--out_dir={cfg.out_dir}_lower"]
    steps = ", ".join(str(checkpoint.step_of(path)) for path in saved)
    return (
        f"\n  Its weights after step {steps} are kept. To go on from the last of them with half the rate (schedule, AdamW and data "
        f"begin anew):\n  python train.py {shlex.join(flags)}"
    )


def check_same(before: dict, where: str | Path, cfg: Config, facts: dict) -> None:
    """`ConfigError` unless the facts `before`, of run.json or of a checkpoint, are of this very run."""
    there, here = config_of(before) if "config" in before else {}, dataclasses.asdict(cfg)
    there, here = json.loads(
        json.dumps([dataclasses.asdict(Config()) | there, here])
    )  # what older runs lack was at its default
    compared = [key for key in here if key not in FREE_KEYS and "config" in before]  # older checkpoints have none
    differs = [f"{key}={there.get(key)!r} there, {here[key]!r} here" for key in compared if there.get(key) != here[key]]
    differs += [f"{key} differs" for key in SAME_FACTS if key in before and before[key] != facts[key]]
    if differs:
        told = ", ".join(differs[:3]) + (f" and {len(differs) - 3} more" if len(differs) > 3 else "")
        raise ConfigError(f"{where}: already contains a different run ({told}); choose another out_dir")


def changes(before: dict | None, step: int, cfg: Config, facts: dict) -> list[dict]:
    """What run.json tells of a run that went on: at which step, and by key what was and what is."""
    if before is None:
        return []
    there, here = json.loads(json.dumps([config_of(before) | before, dataclasses.asdict(cfg) | facts]))
    keys = [*FREE_KEYS, "git_commit", "machine", "versions"]
    now = {key: [there.get(key), here[key]] for key in sorted(keys) if key in there and there[key] != here[key]}
    return [*before.get("changes", []), *([{"step": step, **now}] if now else [])]


def config_of(run: dict) -> dict:
    """The config in a run.json. Older ones have the settings as keys of their own, for all methods at once."""
    config = {RENAMED.get(key, key): value for key, value in run["config"].items()}
    if "hyper" not in config:
        old = {key: value for key, value in config.items() if key not in configure.TYPES and value is not None}
        hyper = {name: {key: old[key] for key in old if key in keywords(name)} for name in config["methods"]}
        config["hyper"] = {name: of for name, of in hyper.items() if of}
    return config


def save_checkpoints(live: list[Student], step: int, clock: Clock, cfg: Config, facts: dict, env: Env) -> None:
    """Write one per student from a copy, while training goes on; all are written before any older one is removed."""
    env.due = time.perf_counter() + 60 * (cfg.checkpoint_every_minutes or math.inf)
    parallel.outlast(env.written)  # the ones before; their error is raised here
    copies, config = [], dataclasses.asdict(cfg)
    for s in live:
        state = {"step": step, "method": s.name, "init_sha256": s.init_sha256, **facts, **clock.state()}
        state["sums"] = s.totals()
        tensors = checkpoint.copied(s.model, s.optimizer) if step else ({}, {})
        copies.append((s.folder / "checkpoints", *tensors, state | {"config": config}))

    def write():
        for copy in copies:
            checkpoint.save(*copy)
        for folder, *_ in copies:
            checkpoint.prune(folder, cfg.keep_checkpoints, step)

    if env.first:
        env.written = env.writer.submit(write)


def resume(live: list[Student], cfg: Config, facts: dict, env: Env) -> tuple[int, Clock]:
    """Restore all students from their newest common step -> that step and the clock. It only reads.

    `ConfigError` where no step is common, but something of a run is there.
    """
    steps = [{checkpoint.step_of(path) for path in checkpoint.whole(s.folder / "checkpoints")} for s in live]
    step = max(set.intersection(*steps), default=None)
    if step is None:
        left = [path for path in (*logs(live, cfg), *(s.folder / "model" for s in live)) if path.exists()]
        if left or set.union(*steps) - {0}:
            lost = min(zip(steps, live, strict=True), key=lambda pair: len(pair[0]))[1]
            raise ConfigError(
                f"{lost.folder / 'checkpoints'}: without these no step is left that all students of {cfg.out_dir} have; put them "
                "back, or choose another out_dir (--student_weights=CHECKPOINT takes the weights of one along)"
            )
        return 0, Clock()
    if step > cfg.max_steps:
        raise ConfigError(f"max_steps={cfg.max_steps}: {cfg.out_dir} is at step {step}; set it to that at least")
    for s in live:
        path, belongs = s.folder / "checkpoints" / f"step_{step:08d}", {"method": s.name, "init_sha256": s.init_sha256}
        state = checkpoint.load(path, s.model, s.optimizer, belongs, STATE_KEYS)
        check_same(state, path, cfg, facts)
        sums = {key: value if env.first else 0.0 for key, value in state["sums"].items()}  # they are of all processes
        s.sums = {key: torch.tensor(value, dtype=torch.float64, device=env.device) for key, value in sums.items()}
    for path in logs(live, cfg):
        read_lines(path, {"step": int})  # a broken one shows before anything is changed
    return step, Clock(step, **{key: state[key] for key in runlog.CLOCK_KEYS})


def logs(live: list[Student], cfg: Config) -> dict[Path, int]:
    """Each log of the run -> 0 where a line is of the weights after its step, 1 where it is of those before."""
    histograms = [Path(cfg.out_dir) / "teacher.jsonl", *(s.folder / "histograms.jsonl" for s in live)]
    return {s.folder / "log.jsonl": 0 for s in live} | dict.fromkeys(histograms, 1)


def open_folder(
    loaded: configure.Loaded, live: list[Student], step: int, clock: Clock, cfg: Config, facts: dict, env: Env
) -> None:
    """Make the run's folder, or cut the logs of the one there to what happened up to `step`."""
    parallel.wait(env.device)  # nobody looks for the files while they are being written
    if env.first:
        for s in live:
            s.folder.mkdir(parents=True, exist_ok=True)
        path = Path(cfg.out_dir) / "run.json"
        state = live[0].folder / "checkpoints" / f"step_{step:08d}" / "state.json"
        before = path if path.is_file() else state  # where run.json was lost
        there = read_json(before, RUN_KEYS) if before.is_file() else None
        facts["changes"] = changes(there, step, cfg, facts)
        now = {"step": step, "time": time.strftime("%FT%T%z"), "host": platform.node(), "processes": env.world}
        facts["starts"] = [*(there or {}).get("starts", []), now]
        configure.save(loaded, path, micro_batch=cfg.micro_batch, **facts)
        for path, before in logs(live, cfg).items():
            if path.is_file():
                checkpoint.drop_after(path, step - before)
    if step == 0:  # from now on there is always a checkpoint behind the logs
        save_checkpoints(live, 0, clock, cfg, facts, env)
        parallel.outlast(env.written)
    if env.first:
        for s in live:
            about = {**dataclasses.asdict(cfg), **student_facts(s, step, clock, cfg, facts)}
            s.sinks = runlog.open_sinks(s.folder, cfg.tensorboard, cfg.wandb_project, about)


def close_sinks(s: Student, facts: dict) -> None:
    """Give the services that receive the log what is known at the run's end: facts, and the student's pictures."""
    if not s.sinks:
        return
    import plot  # matplotlib takes a second

    drawn = plot.draw_logs(plot.FIGURES, {s.name: s.folder}, s.folder)
    pictures = [s.folder / f"{name}.png" for name in drawn]
    for sink in s.sinks:
        sink.end(facts, pictures)
