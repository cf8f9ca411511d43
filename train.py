"""Distil one or more students from one teacher: AdamW, cosine, one forward pass of the teacher for all.

    python train.py config/alra_200m.py [--key=value ...]
    torchrun --nproc_per_node=2 train.py config/alra_200m.py

The run's folder holds `run.json` (resolved config, versions, hashes) and one folder per student with `log.jsonl`,
`checkpoints/` and, at the end, `model/`, which Hugging Face reads. Started again, a run goes on from its newest
checkpoint; SIGINT, SIGTERM and SIGHUP save one and exit 0, once it trains.

Dimension key: B rows, T time, D width, V vocabulary, N positions.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import configure
from configure import Config, ConfigError
from lib import checkpoint, heldout, parallel, runlog
from lib.batches import Rows
from lib.checks import IGNORE, all_finite
from lib.device import ROOM, device_name, fitting_micro_batch, free_bytes, pick_device, require_compiler, run_bytes
from lib.figures import figures
from lib.files import RENAMED, append_line, locked, read_json, read_lines, write_json, writing
from lib.fused import head_losses
from lib.hf import find_folder, load_tokenizer, tokenizer_hash, weights_hash
from lib.histograms import histograms
from lib.rows import row_order
from lib.runlog import Clock
from lib.teacher import Teacher, for_students, load_teacher, preset_lines, teacher_size
from losses import (
    alra_terms,
    check_settings,
    evaluator,
    kd_weight,
    keywords,
    method_lines,
    needs_teacher,
    resolve,
    settings_at,
)
from model import INLINE, PRESETS, Qwen2, Qwen2Config, init_student, load_config, student_config

# Keys that may differ when a run goes on: they change what is done where, when and how fast, not what is learnt. Of data,
# teacher and tokenizer the content is compared instead (SAME_FACTS); only prepare.py reads the last ones.
FREE_KEYS = {"max_steps", "micro_batch", "log_every_steps", "checkpoint_every_steps", "checkpoint_every_minutes",
             "keep_checkpoints", "out_dir", "device", "teacher_device", "recompute", "compile", "repeat_rows",
             "data_dir", "teacher", "tokenizer",
             "histogram_every_steps", "tensorboard", "wandb_project", "val_every_steps", "val_max_rows",
             "source", "source_revision", "source_config", "source_text", "source_split", "n_documents", "train_rows", "val_rows", "val_share", "prepare_workers",
             "bos", "shard", "timeout_minutes"}  # fmt: skip
RUN_KEYS = {"config": {"methods": list}}  # of run.json
STATE_KEYS = {"config?": dict, "sums": {"*": float}, **dict.fromkeys(runlog.CLOCK_KEYS, float)}  # of a checkpoint
PLACES = {"out_dir", "data_dir", "teacher", "tokenizer", "student_weights"}  # compared by what is there
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
        self.heads, self.rows_below, self.redrawn = [], 0, []  # of the table that is printed

    def hold_signals(self) -> None:
        """From now on signals end the run after its update. Before, they end the process: nothing is to be saved."""
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if sign != signal.SIGHUP or signal.getsignal(sign) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(sign, self._on_signal)

    def _on_signal(self, *_):
        self.signalled = True

    def flags(self) -> Tensor:
        """On the device: how many processes got a signal, and whether a checkpoint is due; so all do the same."""
        flags = torch.tensor([float(self.signalled), float(self.first and time.perf_counter() > self.due)])
        flags = flags.to(self.device, non_blocking=True)
        parallel.sum_in_place([flags])
        return flags

    def table(self, first: str, columns: dict[str, str], redraw: bool = False) -> None:
        """Print a row of a table; its head too, where that differs from the one before or stands 20 rows back.

        On a terminal `redraw` writes head and row over those before, below the progress bar.
        """
        if not self.first:
            return
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        heads, rows = runlog.table_lines(
            first, columns, shutil.get_terminal_size().columns if terminal else runlog.WIDTH
        )
        if terminal and redraw:
            lines = list(itertools.chain.from_iterable(zip(heads, rows, strict=True)))
            for i in range(len(self.redrawn), len(lines)):
                self.redrawn.append(tqdm(bar_format="{desc}", position=i + 1))
            for line, text in itertools.zip_longest(self.redrawn, lines, fillvalue=""):
                line.set_description_str(text)
            return
        again = self.heads == [head.split() for head in heads] and self.rows_below < 20
        self.heads, self.rows_below = [head.split() for head in heads], self.rows_below + 1 if again else 1
        for head, row in zip(heads, rows, strict=True):
            self.say(row if again else f"{head}\n{row}")

    def say(self, text: str) -> None:
        if self.first:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


# --- data and teacher ------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """One micro-batch, and the teacher's hidden states of it."""

    x: Tensor  # [B, T] int64 inputs
    y: Tensor  # [B, T] int64 labels, IGNORE where there is none
    n_valid: int
    h_t: Tensor | None  # [B, T, D_t]


def open_data(cfg: Config, name: str) -> Rows:
    return Rows(cfg.data_dir, name, cfg.seq_len, cfg.mask_after_eos, student_shape(cfg).vocab_size)


def rows_of_update(rows: Rows, step: int, cfg: Config) -> np.ndarray:
    """The indices of an update's rows: a function of the step alone."""
    return row_order(step, cfg.batch_rows, rows.n, cfg.seed if cfg.shuffle else None)


def batches(rows: Rows, teacher: Teacher | None, step: int, cfg: Config, env: Env) -> Iterator[Batch]:
    """This process's micro-batches from update `step` on, each requested while the one before is still being used.

    On a GPU, or with a teacher on a device of its own, the next rows and hidden states are then already under way.
    """
    ahead = None
    for at in range(step, cfg.max_steps):
        mine = np.array_split(rows_of_update(rows, at, cfg), env.world)[env.rank]
        for index in np.split(mine, len(mine) // cfg.micro_batch):
            x, y, n_valid = rows.batch(index, env.device)
            batch = Batch(x, y, n_valid, teacher.hidden(x) if teacher else None)
            if ahead:
                yield ahead
            ahead = batch
    if ahead:
        yield ahead


def open_teacher(cfg: Config, env: Env) -> Teacher | None:
    """The frozen teacher, or None where no method of the run reads its logits."""
    takers = [name for name in cfg.methods if needs_teacher(name)]
    if not takers:
        return None
    if cfg.teacher is None:
        raise ConfigError(f"teacher=None: {takers[0]} learns from one; set a local folder or hub id")
    place = pick_device(cfg.teacher_device) if cfg.teacher_device else env.device
    n_vocab = student_shape(cfg).vocab_size
    return load_teacher(cfg.teacher, env.dtype, place, env.device, cfg.compile, n_vocab, cfg.shard)


# --- students --------------------------------------------------------------------------------------------------------


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
    sums: dict[str, Tensor] = field(default_factory=dict)  # fp64, of each term over the tokens since the last log line
    gnorm: float = 0.0
    stopped: str | None = None  # why it could not go on
    sinks: list[Callable[[dict], None]] = field(default_factory=list)  # beside log.jsonl: TensorBoard, Weights & Biases

    def record(self, values: dict) -> None:
        """One more line of this student's log."""
        append_line(self.folder / "log.jsonl", values)
        for sink in self.sinks:
            sink(values)


def make_student(name: str, cfg: Config, device: torch.device) -> Student:
    """A student before its first update; the same weights for every method of the run.

    A parameter group may have an `lr_factor` (1 where it has none): `update` multiplies the schedule's rate by it. For
    muP or a slower head, split `groups` here and give each its factor; a resumed run comes through here again.
    """
    model = first_weights(cfg)
    sha = weights_hash(model)
    if cfg.compile:
        model.compile_layers()
    if cfg.shard > 1:
        parallel.spread(model, model.model.layers, cfg.shard, device, layers_only=False)
    model.to(device)
    decayed = [p for p in model.parameters() if cfg.decay_1d or p.ndim > 1]
    others = [p for p in model.parameters() if not (cfg.decay_1d or p.ndim > 1)]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    betas = (cfg.beta1, cfg.beta2)
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=betas, eps=cfg.adam_eps, fused=True)
    folder, overrides = Path(cfg.out_dir) / name, cfg.overrides_of(name)
    return Student(name, model, optimizer, folder, overrides, sha, cfg.lr_factor(name))


def student_shape(cfg: Config) -> Qwen2Config:
    """The students' shape. A preset or an inline shape takes from the teacher what it does not say.

    A vocabulary beyond the teacher's is cut to it (`check_vocabulary` sees to it that this is padding).
    """
    return _student_shape(cfg.student, cfg.teacher, any(map(needs_teacher, cfg.methods)))


@functools.cache
def _student_shape(student: str, teacher: str | None, matched: bool) -> Qwen2Config:
    given = for_students(teacher)
    shape = student_config(student, given)
    most = given["vocab_size"] if given and matched else shape.vocab_size
    return dataclasses.replace(shape, vocab_size=min(shape.vocab_size, most))


def first_weights(cfg: Config) -> Qwen2:
    """The first weights of every student, fp32 on the CPU: drawn from the seed, or those of `student_weights`."""
    if cfg.student_weights is None:
        return init_student(student_shape(cfg), cfg.seed)
    model = Qwen2.from_pretrained(cfg.student_weights)
    model.cut(student_shape(cfg).vocab_size)
    return model.requires_grad_(True).train()


def overrides_at(s: Student, step: int, cfg: Config) -> dict:
    """A student's overrides in update `step`, with the settings that move."""
    return {**s.overrides, **settings_at(s.name, step, cfg.schedule_steps, **s.overrides)}


def objective_at(s: Student, step: int, cfg: Config) -> Callable:
    """A student's objective in update `step`. `w_kd_schedule` moves w_kd and w_ce = 1 - w_kd (PD, Eq. 1)."""
    objective = evaluator(s.name, cfg.group, cfg.compile, **overrides_at(s, step, cfg))
    if cfg.w_kd_schedule == "constant" or not needs_teacher(s.name):
        return objective
    w_kd = kd_weight(step, cfg.schedule_steps, peak=resolve(s.name, **s.overrides).w_kd)
    # a tensor, so that one compiled graph serves every weight; filled, since a copy would make the host wait
    return functools.partial(objective, w_kd=torch.full((), w_kd, dtype=torch.float64, device=s.model.head.device))


def learning_rate(step: int, cfg: Config) -> float:
    """The rate of update `step`, counted from 0: linear to `lr` at the last warm-up update, then by `lr_schedule`.

    cosine    falls to `min_lr` at the schedule's last update
    wsd       stays, and falls linearly to `min_lr` over the last 10 % of the schedule
    constant  stays
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.lr_schedule == "constant":
        return cfg.lr
    if cfg.lr_schedule == "wsd":
        left = (cfg.schedule_steps - step - 1) / (0.1 * cfg.schedule_steps)
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * min(left, 1.0)
    part = (step + 1 - cfg.warmup_steps) / (cfg.schedule_steps - cfg.warmup_steps)
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * part))


# --- the step --------------------------------------------------------------------------------------------------------


def update(
    students: list[Student], teacher: Teacher | None, stream: Iterator[Batch], step: int, cfg: Config, env: Env
) -> int:
    """One optimizer step of every student from one pass of the teacher -> valid tokens seen.

    A forward batch is `group` rows. The loss of an update is the mean over its forward batches of the mean over each
    one's valid positions, however they are dealt out to micro-batches and processes.
    """
    objectives = [objective_at(s, step, cfg) for s in students]
    n_micro, n_valid = cfg.batch_rows // cfg.micro_batch, 0  # over all processes
    n_mine, under_way = n_micro // env.world, []
    for nth, (x, y, n, h_t) in enumerate(itertools.islice(stream, n_mine), 1):
        n_valid += n
        h_s = [s.model.hidden(x, recompute=cfg.recompute, dtype=env.dtype) for s in students]  # each [B, T, D_s]
        heads = [(h, s.model.head, objective) for h, s, objective in zip(h_s, students, objectives, strict=True)]
        results = head_losses(heads, h_t, teacher.head if teacher else None, y, cfg.group)
        for s, (loss, terms) in zip(students, results, strict=True):
            with parallel.summing(s.model, nth == n_mine, under_way):
                (loss / n_micro).backward()
            for name, value in terms.items():
                s.sums[name] = s.sums.get(name, 0.0) + value.double() * n
    for handle in under_way:
        handle.wait()
    norms = [clip_gradients(list(s.model.parameters()), cfg.clip) for s in students]
    *norms, stop, save = torch.cat([torch.stack(norms), env.flags()]).tolist()  # the one time that the host waits
    env.stopping, env.saving = stop > 0, save > 0
    for s, s.gnorm in zip(students, norms, strict=True):
        if not math.isfinite(s.gnorm):
            s.stopped = f"step {step}: gradient norm {s.gnorm}; {broken_terms(s)}; the update was not made"
            continue
        for group in s.optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg) * s.lr_factor * group.get("lr_factor", 1.0)
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=True)
    return n_valid


def clip_gradients(parameters: Iterable[Tensor], most: float) -> Tensor:
    """Scale all gradients by one factor, so that their common norm is at most `most` -> the norm before, fp32.

    On a GPU torch adds the squares in a tree. On the CPU it adds them one after the other in fp32, and the norm is 2 % low
    for 67M equal elements. There they are added in fp64, 1M elements at a time: 0.4 ms per million parameters, where
    torch's norm in fp64 of a whole tensor takes 20.
    """
    parameters = [p for p in parameters if p.grad is not None]
    grads = [parallel.local(p.grad) for p in parameters]
    if grads[0].is_cuda:
        norm = torch.nn.utils.get_total_norm(grads)
    else:
        blocks = [block for g in grads for block in g.flatten().split(1 << 20)]
        norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    norm = parallel.norm_of_parts(norm, parameters[0]).float()
    torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def broken_terms(s: Student) -> str:
    """Name the terms of a student that are not finite, on whatever process."""
    sums = torch.stack(list(s.sums.values()))
    parallel.sum_in_place([sums])
    broken = [name for name, value in zip(s.sums, sums.tolist(), strict=True) if not math.isfinite(value)]
    return f"not finite: {', '.join(broken)}" if broken else "every term is finite, the backward pass is not"


def going_on(live: list[Student], step: int, env: Env) -> list[Student]:
    """The students that have not broken; those that have get a `stopped.json`."""
    for s in live:
        if s.stopped and env.first:
            write_json(s.folder / "stopped.json", {"step": step - 1, "why": s.stopped})
    return [s for s in live if not s.stopped]


def check_weights(live: list[Student], step: int, env: Env) -> None:
    """Stop the students that an update has left with weights that are not finite, before these are used or saved."""
    broken = [not all(all_finite(parallel.local(p)) for p in s.model.parameters()) for s in live]
    broken = torch.tensor(broken, dtype=torch.float32, device=env.device)
    parallel.sum_in_place([broken])  # all processes stop the same students
    for s, n in zip(live, broken.tolist(), strict=True):
        if n and not s.stopped:
            s.stopped = f"step {step - 1}: its update made weights that are not finite; try a smaller lr"


# --- validation and histograms ---------------------------------------------------------------------------------------

VALIDATED = {"ce": "ce", "kl": "kl", "agree": "top1", "teacher_ce": "teacher_ce", "teacher_entropy": "teacher_entropy"}


def validate(live: list[Student], teacher: Teacher | None, rows: Rows, cfg: Config, env: Env) -> dict[str, dict]:
    """Per student: CE, KL(teacher || student) and top-1 agreement per token of the validation rows, temperature 1.

    The rows are dealt out to the processes; the sums of each row are added up over them.
    """
    n_rows = min(rows.n, cfg.val_max_rows or rows.n)
    with parallel.whole_roots(s.model for s in live):
        students = [model_of(s, env) for s in live]
        batches = validation_batches(rows, n_rows, cfg.micro_batch, env)
        sums = heldout.row_sums(students, (teacher.hidden, teacher.head) if teacher else None, batches, n_rows)
    parallel.sum_in_place([value for of in sums for value in of.values()])
    found = [figures({key: value.sum(0).cpu().numpy() for key, value in of.items()}) for of in sums]
    return {
        s.name: {key: float(of[figure]) for key, figure in VALIDATED.items() if figure in of}
        for s, of in zip(live, found, strict=True)
    }


def validation_batches(rows: Rows, n_rows: int, size: int, env: Env) -> Iterator[tuple[int, Tensor, Tensor]]:
    """This process's batches: (number of the first row, inputs, labels).

    All processes have as many, the last one perhaps without a label: where weights are spread, a forward needs them all.
    """
    for at in range(0, n_rows, env.world * size):
        first = at + env.rank * size
        index = np.arange(n_rows)[first : first + size]
        x, y, _ = rows.batch(index if len(index) else np.array([0]), env.device)
        yield first, x, y if len(index) else torch.full_like(y, IGNORE)


def model_of(s: Student, env: Env) -> heldout.Model:
    return functools.partial(s.model.hidden, dtype=env.dtype), s.model.head


def log_histograms(live: list[Student], teacher: Teacher, rows: Rows, step: int, cfg: Config, env: Env) -> None:
    """The paper's Figures 3 and 4 over the rows of update `step`, without any effect on the run.

    `teacher.jsonl` gets the teacher's record, `METHOD/histograms.jsonl` the local budgets of each student that has some.
    """
    mine = np.array_split(rows_of_update(rows, step, cfg), env.world)[env.rank]
    x, y, _ = rows.batch(mine, env.device)
    objective = {s.name: resolve(s.name, **s.overrides) for s in live if needs_teacher(s.name)}
    budget = functools.partial(alra_terms, **resolve("alra", **cfg.overrides_of("alra")).hyper)
    with parallel.whole_roots(s.model for s in live):
        students = {
            s.name: (model_of(s, env), functools.partial(objective[s.name].fn, **objective[s.name].hyper))
            for s in live
            if s.name in objective
        }
        of_teacher, counts = histograms((teacher.hidden, teacher.head), budget, students, x, y, cfg.group)
    if not env.first:
        return
    append_line(Path(cfg.out_dir) / "teacher.jsonl", {"step": step, **of_teacher})
    for s in live:
        if s.name in counts:
            append_line(s.folder / "histograms.jsonl", {"step": step, "n": of_teacher["n"], "d_u_hist": counts[s.name]})


# --- the run ---------------------------------------------------------------------------------------------------------


@parallel.told_when_lost()
def run(loaded: configure.Loaded) -> int:
    """A whole run -> its exit code: 0 when every student reached the end, or a signal asked for an early one."""
    _student_shape.cache_clear()  # folders may have changed since a run before in this process
    env, asked = Env(loaded.config), loaded.config.micro_batch
    parallel.agree(**{key: value for key, value in vars(loaded.config).items() if key not in PLACES})
    if env.world % loaded.config.shard:
        raise ConfigError(
            f"shard={loaded.config.shard}: expected a divisor of the {env.world} processes; start more of them, or set it"
        )
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
    rows, val = open_data(cfg, "train"), open_data(cfg, "val")
    if not cfg.repeat_rows and rows.n < cfg.max_steps * cfg.batch_rows:
        raise ConfigError(
            f"max_steps={cfg.max_steps}: needs {cfg.max_steps * cfg.batch_rows:,} rows, {cfg.data_dir} has {rows.n:,}; "
            "ask for fewer steps, prepare more rows, or set repeat_rows=True"
        )
    tokenizer = open_tokenizer(cfg, rows)
    check_vocabulary(cfg, tokenizer, env)
    check_rows(rows, val, cfg)
    try:
        teacher = open_teacher(cfg, env)
        students = [make_student(name, cfg, env.device) for name in cfg.methods]
        out = Path(cfg.out_dir)
        if env.first:
            out.mkdir(parents=True, exist_ok=True)
        busy = ConfigError(
            f"out_dir={out}: another train.py is at work there; wait for its end, or choose another out_dir"
        )
        with locked(out, busy) if env.first else contextlib.nullcontext():
            parallel.agree_on_folder(out)
            return distil(loaded, cfg, env, rows, val, tokenizer, teacher, students)
    except torch.OutOfMemoryError as error:
        less = fitting_micro_batch(cfg.batch_rows // env.world, cfg.group, cfg.micro_batch - 1, 0, 1)
        what = (
            f"set --micro_batch={less}"
            if less < cfg.micro_batch
            else "set --recompute=True, or train fewer methods at once"
        )
        raise ConfigError(f"micro_batch={cfg.micro_batch}: out of memory on {env.device}; {what}") from error


def distil(
    loaded: configure.Loaded, cfg: Config, env: Env, rows: Rows, val: Rows, tokenizer: PreTrainedTokenizerFast,
    teacher: Teacher | None, students: list[Student],
) -> int:  # fmt: skip
    """The loop, from the newest checkpoint to the saved models -> the exit code of `run`."""
    facts = run_facts(rows, val, teacher, env.device)
    found = {s.name: [path.name for path in checkpoint.whole(s.folder / "checkpoints")] for s in students}
    first_weights = {s.name: s.init_sha256 for s in students}
    parallel.agree(**facts | {"machine": None}, first_weights=first_weights, checkpoints=found)
    check_folder(students, cfg, facts)
    live = [s for s in students if not s.stopped]
    done = all(ended(s, cfg) for s in live)
    step, clock = (cfg.max_steps, Clock()) if done else resume(live, cfg, facts, env)
    if not done:
        announce(students, teacher, cfg, env)
        open_folder(loaded, live, step, clock, cfg, facts, env)
    if step and not done:
        env.say(f"{cfg.out_dir}: going on from step {step} of {cfg.max_steps}")
    env.hold_signals()
    env.due = time.perf_counter() + 60 * (cfg.checkpoint_every_minutes or math.inf)
    stream = batches(rows, teacher, step, cfg, env)
    bar = tqdm(total=cfg.max_steps, initial=step, unit="step", disable=None if env.first else True, dynamic_ncols=True)
    while step < cfg.max_steps and live and not env.stopping:
        if teacher and cfg.histogram_every_steps and step % cfg.histogram_every_steps == 0:
            log_histograms(live, teacher, rows, step, cfg, env)
        t0 = time.perf_counter()
        n_valid = update(live, teacher, stream, step, cfg, env)
        clock.count(n_valid, time.perf_counter() - t0)
        step += 1
        last = step == cfg.max_steps
        save = env.saving or last or (cfg.checkpoint_every_steps and step % cfg.checkpoint_every_steps == 0)
        if save or env.stopping or step % cfg.val_every_steps == 0:
            check_weights(live, step, env)
        live = going_on(live, step, env)
        if step % cfg.log_every_steps == 0 or last:
            log_terms(live, teacher, step, clock, cfg, env)
        if live and (step % cfg.val_every_steps == 0 or last):
            with clock.aside("validation"):
                log_validation(live, validate(live, teacher, val, cfg, env), step, env)
            live = going_on(live, step, env)
        if save:
            with clock.aside("checkpoints"):
                save_checkpoints(live, step, clock, cfg, facts, env)
        bar.update()
    bar.close()
    if env.stopping:
        save_checkpoints(live, step, clock, cfg, facts, env)
    parallel.outlast(env.written)
    if not done:
        env.say(clock.summary(step))
    for s in students:
        if s.stopped:
            env.say(f"{s.name} stopped at {s.stopped}")
        elif step < cfg.max_steps:
            env.say(f"{s.name}: stopped by a signal after step {step}; the same command goes on from there")
        elif done:
            env.say(f"{s.name}: {s.folder / 'model'}")
        else:
            save_model(s, student_facts(s, step, clock, cfg, facts), tokenizer, env)
    parallel.wait(env.device)
    parallel.stop()
    return 1 if any(s.stopped for s in students) else 0


def save_model(s: Student, facts: dict, tokenizer: PreTrainedTokenizerFast, env: Env) -> None:
    weights = parallel.copies(s.model.state_dict())

    def write():
        with writing(s.folder / "model.tmp"):
            s.model.save_pretrained(s.folder / "model", tokenizer, weights)
        write_json(s.folder / "run.json", facts)

    if env.first:
        env.written = env.writer.submit(write)
    parallel.outlast(env.written)
    env.say(f"{s.name}: {s.folder / 'model'}")


def log_terms(live: list[Student], teacher: Teacher | None, step: int, clock: Clock, cfg: Config, env: Env) -> None:
    """One record per student, and one row for all: means over all tokens since the last row.

    The row shows the CE of each student; of a lone one its loss, terms and gradient norm.
    """
    counts = torch.tensor([clock.line_valid, clock.valid_tokens], dtype=torch.float64, device=env.device)
    parallel.sum_in_place([counts])
    line_valid, valid_tokens = (int(c) for c in counts.tolist())
    eta_sec = clock.eta_sec(step, cfg.max_steps)
    tok_per_sec = clock.line_steps * cfg.batch_rows * cfg.seq_len / clock.line_sec
    used = runlog.mfu(tok_per_sec * run_flops_per_token(len(live), teacher, cfg), env.device, env.world)
    cuda, columns = env.device.type == "cuda", {}
    for s in live:
        sums = torch.stack(list(s.sums.values()))
        parallel.sum_in_place([sums])
        terms = dict(zip(s.sums, (sums / max(line_valid, 1)).tolist(), strict=True))
        record = {
            "step": step,
            "nominal_tokens": step * cfg.batch_rows * cfg.seq_len,
            "valid_tokens": valid_tokens,
            **terms,
            "lr": learning_rate(step - 1, cfg) * s.lr_factor,
            "gnorm": s.gnorm,
            "tok_per_sec": tok_per_sec,
            "mfu": used,
            "mem_gib": torch.cuda.max_memory_allocated(env.device) / 2**30 if cuda else None,
            "eta_sec": eta_sec,
        }
        s.sums = {}
        if env.first:
            s.record(record)
        of = {**terms, "gnorm": s.gnorm} if len(live) == 1 else {s.name: terms["ce"]}
        columns |= {key: f"{value:.4f}" for key, value in of.items()}
    if live:
        env.table(runlog.step_text({**record, "lr": learning_rate(step - 1, cfg)}, cfg.max_steps), columns, redraw=True)
    clock.start_line()


def run_flops_per_token(n_students: int, teacher: Teacher | None, cfg: Config) -> float:
    """The run's own arithmetic per token; the teacher counts once."""
    flops = n_students * runlog.flops_per_token(student_shape(cfg), cfg.seq_len, trained=True)
    return flops + (teacher.flops_per_token(cfg.seq_len) if teacher else 0.0)


def log_validation(live: list[Student], found: dict[str, dict], step: int, env: Env) -> None:
    """One record per student, and one row for each figure."""
    for s in live:
        bad = [name for name, value in found[s.name].items() if not math.isfinite(value)]
        if bad:
            s.stopped = f"step {step - 1}: after its update val_{bad[0]} is not finite; try a smaller lr"
        elif env.first:
            s.record({"step": step, **{f"val_{name}": value for name, value in found[s.name].items()}})
    of = found[live[0].name] if live else {}
    for figure in [key for key in of if not key.startswith("teacher")]:
        env.table(f"step {step}  val_{figure}".ljust(24) + "|", {s.name: f"{found[s.name][figure]:.4f}" for s in live})
    if "teacher_ce" in of:
        env.say(f"step {step}  teacher: CE {of['teacher_ce']:.4f}, entropy {of['teacher_entropy']:.4f}")


# --- what must be right before the first step ------------------------------------------------------------------------


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


def announce(students: list[Student], teacher: Teacher | None, cfg: Config, env: Env) -> None:
    """Say what runs on what, and what it will take. `ConfigError` where its checkpoints do not fit the disk."""
    fixed, per_row = expected_bytes(cfg, env)
    n, kept = students[0].model.n_params, sum(f.stat().st_size for f in Path(cfg.out_dir).glob("*/checkpoints/*/*"))
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
    env.say(
        f"{device_name(env.device)}, {env.world} process{'es' * (env.world > 1)}, "
        f"{str(env.dtype).removeprefix('torch.')}, {'compiled' if cfg.compile else 'eager'}, "
        f"micro_batch {cfg.micro_batch}\n"
        f"{cfg.teacher if teacher else 'no teacher'} -> {', '.join(s.name for s in students)}: {cfg.student}, {n:,} "
        f"parameters, initial weights {students[0].init_sha256[:12]}, in {cfg.out_dir}\n"
        f"{cfg.max_steps:,} steps of {cfg.batch_rows} rows: {rows * cfg.seq_len:,} nominal tokens; about "
        f"{gib(fixed + cfg.micro_batch * per_row)} of memory ({gib(fixed)} and {gib(per_row)} for each row of a "
        f"micro-batch), {gib(needs)} of disk ({gib(free)} are free)"
    )


def gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def holds_weights(name: str) -> bool:
    return any(find_folder(name).glob("*.safetensors"))


def check_student(cfg: Config, env: Env) -> None:
    """Check that `student_weights` have the student's shape; say so where a `student` folder's weights are not used."""
    shape = student_shape(cfg)
    if cfg.seq_len > shape.max_position_embeddings:
        raise ConfigError(
            f"seq_len={cfg.seq_len}: student={cfg.student} supports {shape.max_position_embeddings} positions; set less"
        )
    if cfg.student_weights is not None:
        there = load_config(str(find_folder(cfg.student_weights) / "config.json"))  # never a preset of the same name
        for key, value in vars(there).items():
            if value != getattr(shape, key) and not (key == "vocab_size" and value > shape.vocab_size):
                raise ConfigError(
                    f"student_weights={cfg.student_weights}: {key} is {value} there, but {getattr(shape, key)} in "
                    f"student={cfg.student}; set --student={cfg.student_weights} to take the shape from there too"
                )
    elif not (cfg.student in PRESETS or INLINE.match(cfg.student) or cfg.student.endswith(".json")) and holds_weights(
        cfg.student
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
    """Check that training and validation rows were made alike, and that both hold something to learn."""
    for key in ("tokenizer_sha256", "vocab_size", "eos_id", "bos"):
        here, there = rows.manifest.get(key), val.manifest.get(key)
        if here != there:
            raise ConfigError(
                f"{cfg.data_dir}: {key} is {here} in train.json, {there} in val.json; prepare them together"
            )
    rows.check()
    val.check()


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
    if n > s:
        raise ConfigError(
            f"student={cfg.student}: vocabulary of {s:,}, but the tokenizer has {n:,} tokens; take a larger one"
        )
    if given is None or not any(map(needs_teacher, cfg.methods)):
        return
    t, length = given["vocab_size"], given.get("max_position_embeddings")
    if n > t:
        raise ConfigError(
            f"teacher={cfg.teacher}: vocabulary of {t:,}, but the tokenizer has {n:,} tokens; logits are matched token by token"
        )
    if t != s:
        env.say(
            f"vocabulary: {t:,} of the teacher and {s:,} of the student are cut to {min(t, s):,}; the tokenizer has {n:,} ids"
        )
    if length and cfg.seq_len > length:
        raise ConfigError(f"seq_len={cfg.seq_len}: teacher={cfg.teacher} supports {length} positions; set less")


# --- the run's folder ------------------------------------------------------------------------------------------------


def run_facts(rows: Rows, val: Rows, teacher: Teacher | None, device: torch.device) -> dict:
    """Provenance of every result of the run: hashes of data and teacher, versions, commit, machine."""
    return {
        "bos": rows.manifest.get("bos"),  # the id before each document; rows without the key have none
        "data_sha256": rows.manifest["sha256"],
        "val_sha256": val.manifest["sha256"],
        "tokenizer_sha256": rows.manifest["tokenizer_sha256"],
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
        raise ConfigError(f"{where}: already contains a different run ({differs[0]}); choose another out_dir")


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
        sums = {key: float(value) for key, value in s.sums.items()}
        state = {"step": step, "method": s.name, "init_sha256": s.init_sha256, **facts, "sums": sums, **clock.state()}
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
                f"{lost.folder / 'checkpoints'}: no step that all students have, but {cfg.out_dir} holds their work; put "
                "the lost checkpoints back, or choose another out_dir"
            )
        return 0, Clock()
    if step > cfg.max_steps:
        raise ConfigError(f"max_steps={cfg.max_steps}: {cfg.out_dir} is at step {step}; set it to that at least")
    for s in live:
        path, belongs = s.folder / "checkpoints" / f"step_{step:08d}", {"method": s.name, "init_sha256": s.init_sha256}
        state = checkpoint.load(path, s.model, s.optimizer, belongs, STATE_KEYS)
        check_same(state, path, cfg, facts)
        s.sums = {
            key: torch.tensor(value, dtype=torch.float64, device=env.device) for key, value in state["sums"].items()
        }
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
        configure.save(loaded, Path(cfg.out_dir) / "run.json", micro_batch=cfg.micro_batch, **facts)
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


def main() -> None:
    sys.exit(configure.guard(lambda: run(configure.load(sys.argv[1:], method_lines(), preset_lines))))


if __name__ == "__main__":
    main()
