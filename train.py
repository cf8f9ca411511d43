"""Distil one or more students from one teacher: AdamW, cosine, one forward of the teacher for all.

    python train.py config/alra_200m.py [--key=value ...]
    torchrun --nproc_per_node=2 train.py config/alra_200m.py

The run's folder holds `run.json` (resolved config, versions, hashes) and one folder per method with `log.jsonl`,
`checkpoints/` and, at the end, `model/`, which Hugging Face reads. Started again, a run goes on from its newest
checkpoint; SIGINT and SIGTERM save one and exit 0, once it trains.

Dimension key: B rows, T time, D width, V vocabulary.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from tqdm import tqdm

import checkpoint
import configure
from configure import Config, ConfigError
from losses import IGNORE, METHODS, alra, alra_terms, fused_head_losses, keywords, needs_teacher, resolve, wsd
from model import (
    PRESETS,
    Qwen2,
    Qwen2Config,
    device_name,
    find_folder,
    init_student,
    load_config,
    load_tokenizer,
    pick_device,
    tokenizer_hash,
    weights_hash,
)
from rows import PAD, open_rows, row_order

# Keys that may differ when a run goes on: they change what is done when and where, not what is learnt. Those of the
# second line name files whose content is compared instead (SAME_FACTS); those of the last only prepare.py reads.
FREE_KEYS = {"max_steps", "micro_batch", "log_every_steps", "checkpoint_every_steps", "keep_checkpoints", "out_dir",
             "data_dir", "teacher", "tokenizer",
             "histogram_every_steps", "tensorboard", "wandb_project", "val_every_steps", "val_max_rows",
             "source", "source_revision", "n_documents", "train_rows", "val_rows", "val_share", "prepare_workers"}  # fmt: skip
SAME_FACTS = ("data_sha256", "val_sha256", "tokenizer_sha256", "teacher_sha256", "teacher_shape")


# --- data ------------------------------------------------------------------------------------------------------


class Rows:
    """A rows file as batches. The same index gives the same row for everyone."""

    def __init__(self, cfg: Config, name: str):
        self.ids, self.manifest = open_rows(cfg.data_dir, name)  # [n, seq_len + 1]
        self.n, width = self.ids.shape
        if width != cfg.row_len:
            raise ConfigError(
                f"seq_len={cfg.seq_len}: {cfg.data_dir} has rows for seq_len={width - 1}; prepare again or set it"
            )
        self.eos, self.mask_after_eos = self.manifest["eos_id"], cfg.mask_after_eos
        self.batch_rows, self.shuffle_seed = cfg.batch_rows, cfg.seed if cfg.shuffle else None

    def of_update(self, step: int) -> np.ndarray:
        """The indices of an update's rows."""
        return row_order(step, self.batch_rows, self.n, self.shuffle_seed)

    def batch(self, index: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Rows of these indices -> inputs x [B, T], labels y [B, T] (IGNORE where there is none), and how many are valid."""
        ids = self.ids[index].astype(np.int64)
        x, y = ids[:, :-1], ids[:, 1:].copy()
        y[y == PAD] = IGNORE
        if self.mask_after_eos:
            y[x == self.eos] = IGNORE
        x = np.where(x == PAD, self.eos, x)  # causal attention keeps it from every valid position
        n_valid = int((y != IGNORE).sum())
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        if device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True), n_valid


class Batch(NamedTuple):
    """One micro-batch, and what the teacher makes of it."""

    x: Tensor  # [B, T] int64 inputs
    y: Tensor  # [B, T] int64 labels, IGNORE where there is none
    n_valid: int
    h_t: Tensor | None  # [B, T, D_t] the teacher's last hidden states


def batches(rows: Rows, teacher: "Teacher | None", step: int, cfg: Config, env: "Env") -> Iterator[Batch]:
    """This process's micro-batches from update `step` on, each one asked for while the one before is still at work.

    On a GPU, or with a teacher on a device of its own, the next rows and hidden states are then already under way.
    """
    ahead = None
    for at in range(step, cfg.max_steps):
        mine = np.array_split(rows.of_update(at), env.world)[env.rank]
        for index in np.split(mine, len(mine) // cfg.micro_batch):
            x, y, n_valid = rows.batch(index, env.device)
            with env.autocast():
                batch = Batch(x, y, n_valid, teacher.hidden(x) if teacher else None)
            if ahead:
                yield ahead
            ahead = batch
    if ahead:
        yield ahead


# --- teacher and students ---------------------------------------------------------------------------------------


class Teacher:
    """The frozen teacher, on a device of its own if the config says so: hidden states travel, not logits (V / D times fewer bytes)."""

    def __init__(self, model: Qwen2, device: torch.device):
        self.model, self.device = model, device
        self.head = model.head.to(device)  # [V, D] beside the students; the same tensor where they share a device

    @torch.no_grad()
    def hidden(self, x: Tensor) -> Tensor:
        """x [B, T] on any device -> [B, T, D] on the students'."""
        return self.model.hidden(x.to(self.model.head.device, non_blocking=True)).to(self.device, non_blocking=True)


@dataclass
class Student:
    """One method's weights, optimizer and account."""

    name: str  # of the method and its folder
    model: Qwen2
    optimizer: torch.optim.AdamW
    folder: Path
    overrides: dict
    init_sha256: str
    sums: dict[str, Tensor] = field(default_factory=dict)  # of each term over the tokens since the last log line
    gnorm: Tensor | None = None
    stopped: str | None = None  # why, where it could not go on
    sinks: list[Callable[[dict], None]] = field(default_factory=list)  # beside log.jsonl: TensorBoard, Weights & Biases

    def record(self, values: dict) -> None:
        """One more line of this student's log."""
        append_json(self.folder / "log.jsonl", values)
        for sink in self.sinks:
            sink(values)


def make_student(name: str, cfg: Config, device: torch.device) -> Student:
    """A student before its first update, the same weights for every method of the run.

    A parameter group may have an `lr_factor` (1 where it has none): `update` multiplies the schedule's rate by it. For
    muP or a slower head, split `groups` here and give each its factor; a resumed run comes through here again.
    """
    model = first_weights(cfg)
    sha = weights_hash(model)
    model.to(device)
    decayed = [p for p in model.parameters() if cfg.decay_1d or p.ndim > 1]
    others = [p for p in model.parameters() if not (cfg.decay_1d or p.ndim > 1)]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps, fused=True)  # fmt: skip
    overrides = {k: v for k, v in cfg.overrides.items() if k in keywords(name)}
    return Student(name, model, optimizer, Path(cfg.out_dir) / name, overrides, sha)


def first_weights(cfg: Config) -> Qwen2:
    """The weights that every student starts from, in fp32 on the CPU: drawn from the seed, or those of `student_weights`."""
    if cfg.student_weights is None:
        return init_student(cfg.student, cfg.seed)
    return Qwen2.from_pretrained(cfg.student_weights).requires_grad_(True).train()


def settings(s: Student, step: int, cfg: Config) -> dict:
    """A student's overrides in update `step`; with a schedule, w_kd follows it and w_ce is what is left to 1 (PD, Eq. 1)."""
    if cfg.kd_schedule == "constant" or not needs_teacher(s.name):
        return s.overrides
    w_kd = wsd(step, cfg.schedule_steps, peak=resolve(s.name, **s.overrides).w_kd)
    return {**s.overrides, "w_kd": w_kd, "w_ce": 1.0 - w_kd}


def learning_rate(step: int, cfg: Config) -> float:
    """The rate of update `step`, counted from 0: linear to `lr` at the last warm-up update, cosine to `min_lr` at the last of all."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    part = (step + 1 - cfg.warmup_steps) / (cfg.schedule_steps - cfg.warmup_steps)
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * part))


# --- the step --------------------------------------------------------------------------------------------------


def update(
    students: list[Student], teacher: Teacher | None, stream: Iterator[Batch], step: int, cfg: Config, env: "Env"
) -> int:
    """One optimizer step of every student from one pass of the teacher -> valid tokens seen.

    A forward batch is `group` rows. The loss of an update is the mean over its forward batches of the mean over
    each one's valid positions, however they are dealt out to micro-batches and processes.
    """
    n_micro, n_valid = cfg.batch_rows // cfg.micro_batch, 0  # over all processes
    for x, y, n, h_t in itertools.islice(stream, n_micro // env.world):
        n_valid += n
        with env.autocast():
            h_s = [s.model.hidden(x, recompute=cfg.recompute).to(env.dtype) for s in students]  # each [B, T, D_s]
        heads = [(h, s.model.head, s.name, settings(s, step, cfg)) for h, s in zip(h_s, students, strict=True)]
        results = fused_head_losses(heads, h_t, teacher.head if teacher else None, y, cfg.group, compile=cfg.compile)
        for s, (loss, terms) in zip(students, results, strict=True):
            (loss / n_micro).backward()
            for name, value in terms.items():
                s.sums[name] = s.sums.get(name, 0.0) + value * n
    for s in students:
        grads = [p.grad for p in s.model.parameters()]
        env.sum(grads)
        s.gnorm = clip_gradients(s.model.parameters(), cfg.clip)
        if not torch.isfinite(s.gnorm):
            s.stopped = f"step {step}: gradient norm {s.gnorm.item()}; {broken_terms(s)}; the update was not made"
            continue
        for group in s.optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg) * group.get("lr_factor", 1.0)
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
    grads = [p.grad for p in parameters]
    if grads[0].is_cuda:
        norm = torch.nn.utils.get_total_norm(grads)
    else:
        blocks = [block for g in grads for block in g.flatten().split(1 << 20)]
        norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
        norm = torch.linalg.vector_norm(torch.stack(norms)).float()
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def broken_terms(s: Student) -> str:
    """Which of a student's terms are not finite, in words."""
    broken = [name for name, value in s.sums.items() if not math.isfinite(value)]
    return f"not finite: {', '.join(broken)}" if broken else "every term is finite, the backward pass is not"


def logits(h: Tensor, w: Tensor) -> Tensor:
    """h [T, D], w [V, D] -> [T, V] in fp32, whatever autocast said."""
    return h.float() @ w.float().T


def compare(z_s: Tensor, z_t: Tensor | None, y: Tensor) -> dict[str, Tensor]:
    """Sums over the valid positions of one row, at temperature 1: what a validation reports, before the division.

    z_s, z_t [T, V]; y [T]. CE of student and teacher, KL(teacher || student), the teacher's entropy, in nats; and
    how often their most likely tokens are the same.
    """
    z_s, z_t, y = z_s[y != IGNORE], None if z_t is None else z_t[y != IGNORE], y[y != IGNORE]
    logp_s = z_s.log_softmax(-1)
    sums = {"ce": -logp_s.gather(1, y[:, None]).sum()}
    if z_t is not None:
        logp_t = z_t.log_softmax(-1)
        entropy = -(logp_t.exp() * logp_t).sum()
        sums["kl"] = -(logp_t.exp() * logp_s).sum() - entropy
        sums["agree"] = (z_s.argmax(-1) == z_t.argmax(-1)).sum()
        sums["teacher_ce"] = -logp_t.gather(1, y[:, None]).sum()
        sums["teacher_entropy"] = entropy
    return sums


@torch.no_grad()
def validate(students: list[Student], teacher: Teacher | None, rows: Rows, cfg: Config, env: "Env") -> dict[str, dict]:
    """Per student: CE, KL(teacher || student) and top-1 agreement, at temperature 1, per token of the validation rows."""
    n_rows, n_valid = min(rows.n, cfg.val_max_rows or rows.n), 0
    sums = {s.name: {} for s in students}
    for first in range(0, n_rows, cfg.micro_batch):
        x, y, n = rows.batch(np.arange(first, min(first + cfg.micro_batch, n_rows)), env.device)
        n_valid += n
        with env.autocast():
            h_t = teacher.hidden(x) if teacher else None
            h_s = [s.model.hidden(x) for s in students]
        for b in range(len(x)):  # one row's logits at a time: [T, V]
            z_t = logits(h_t[b], teacher.head) if teacher else None
            for s, h in zip(students, h_s, strict=True):
                for name, value in compare(logits(h[b], s.model.head), z_t, y[b]).items():
                    sums[s.name][name] = sums[s.name].get(name, 0.0) + value
    return {name: {k: float(v) / n_valid for k, v in got.items()} for name, got in sums.items()}


@torch.no_grad()
def log_histograms(live: list[Student], teacher: Teacher, rows: Rows, step: int, cfg: Config, env: "Env") -> None:
    """The paper's two figures of what training looks at, over the rows of update `step`, without touching the run.

    `teacher.jsonl`: the teacher's probability of the label and of its own top-1 (50 equal bins of [0, 1]), how often
    the two tokens agree, its CE and entropy, and the local budgets with the teacher's own top d_max as candidates.
    `<method>/histograms.jsonl`: the local budgets of each ALRA student, by size from 0 to d_max.
    """
    if not env.first:
        return
    x, y, n_valid = rows.batch(rows.of_update(step), env.device)
    settings = {s.name: resolve(s.name, **s.overrides) for s in live}
    hyper = {s.name: m.hyper for s, m in zip(live, settings.values(), strict=True) if m.fn is alra}
    hyper[""] = {
        k: v for k, v in cfg.overrides.items() if k in keywords("alra") - {"w_kd", "w_ce"}
    }  # the teacher's own
    counts = dict.fromkeys(hyper, 0)
    p_hist, sums = {"label": 0, "top1": 0}, {}
    for first in range(0, len(x), cfg.group):
        part = slice(first, first + cfg.group)
        labels = y[part].flatten()
        with env.autocast():
            h_t = teacher.hidden(x[part])
            h_s = {s.name: (s.model.hidden(x[part]), s.model.head) for s in live if s.name in hyper}
        z_t = logits(h_t.flatten(0, 1), teacher.head)
        valid = labels != IGNORE
        logp = z_t[valid].log_softmax(-1)
        of_label, top = logp.gather(1, labels[valid][:, None])[:, 0], logp.max(-1)
        for key, p in (("label", of_label.exp()), ("top1", top.values.exp())):
            p_hist[key] = p_hist[key] + torch.histc(p.float(), 50, 0, 1)
        for key, value in {"p_label": of_label.exp(), "p_top1": top.values.exp(), "agree": (top.indices == labels[valid]).float(),
                           "ce": -of_label, "entropy": -(logp.exp() * logp).sum(-1)}.items():  # fmt: skip
            sums[key] = sums.get(key, 0.0) + float(value.sum())
        for name in counts:
            z_s = logits(h_s[name][0].flatten(0, 1), h_s[name][1]) if name else z_t
            d_max = {**alra.__kwdefaults__, **hyper[name]}["d_max"]
            d_u = alra_terms(z_s, z_t, labels, **hyper[name]).d_u[valid]
            counts[name] = counts[name] + torch.bincount(d_u, minlength=d_max + 1)
    for name, count in counts.items():
        record = {"step": step, "n": n_valid, "d_u_hist": count.tolist()}
        if not name:
            record |= {key: value / n_valid for key, value in sums.items()}
            record |= {f"p_{key}_hist": hist.long().tolist() for key, hist in p_hist.items()}
        append_json(
            Path(cfg.out_dir) / name / "histograms.jsonl" if name else Path(cfg.out_dir) / "teacher.jsonl", record
        )


# --- the run ---------------------------------------------------------------------------------------------------


def run(loaded: configure.Loaded) -> int:
    """The whole of a run -> its exit code: 0 when every student got there, or a signal asked for the end."""
    cfg = fit_processes(loaded.config, int(os.environ.get("WORLD_SIZE", 1)))
    env = Env(cfg)
    if cfg.micro_batch != loaded.config.micro_batch:
        env.say(
            f"micro_batch={loaded.config.micro_batch}: lowered to {cfg.micro_batch}, the most that fits {env.world} processes; the result is the same"
        )
    check_methods(cfg, env.device)
    if env.first:
        check_sinks(cfg)
    check_student(cfg, env)
    rows, val = Rows(cfg, "train"), Rows(cfg, "val")
    if not cfg.repeat_rows and rows.n < cfg.max_steps * cfg.batch_rows:
        raise ConfigError(
            f"max_steps={cfg.max_steps}: needs {cfg.max_steps * cfg.batch_rows:,} rows, {cfg.data_dir} has {rows.n:,}; "
            "ask for fewer steps, prepare more rows, or set repeat_rows=True"
        )
    tokenizer, teacher = check_tokenizer(cfg, rows), load_teacher(cfg, env)
    students = [make_student(name, cfg, env.device) for name in cfg.methods]
    facts = run_facts(rows, val, teacher, env.device)
    open_folder(loaded, students, facts, env)
    live = [s for s in students if not s.stopped]
    step, clock = resume(live, cfg, facts, env)
    if step:
        env.say(f"{cfg.out_dir}: going on from step {step} of {cfg.max_steps}")
    if env.first:
        open_sinks(live, cfg)
    env.hold_signals()
    stream = batches(rows, teacher, step, cfg, env)
    bar = tqdm(total=cfg.max_steps, initial=step, unit="step", disable=None if env.first else True, dynamic_ncols=True)
    while step < cfg.max_steps and live and not env.asked_to_stop():
        if teacher and cfg.histogram_every_steps and step % cfg.histogram_every_steps == 0:
            log_histograms(live, teacher, rows, step, cfg, env)
        t0 = time.perf_counter()
        n_valid = update(live, teacher, stream, step, cfg, env)
        clock.count(n_valid, time.perf_counter() - t0)
        step += 1
        for s in live:
            if s.stopped and env.first:
                write_json(s.folder / "stopped.json", {"step": step - 1, "why": s.stopped})
        live = [s for s in live if not s.stopped]
        last = step == cfg.max_steps
        if step % cfg.log_every_steps == 0 or last:
            log_terms(live, teacher, step, clock, cfg, env)
        if step % cfg.val_every_steps == 0 or last:
            log_validation(live, validate(live, teacher, val, cfg, env), step, env)
        if step % cfg.checkpoint_every_steps == 0 or last:
            save_checkpoints(live, step, clock, cfg, facts, env)
        bar.update()
    bar.close()
    if env.signalled:
        save_checkpoints(live, step, clock, cfg, facts, env)
    for s in students:
        if s.stopped:
            env.say(f"{s.name} stopped at {s.stopped}")
        elif step < cfg.max_steps:
            env.say(f"{s.name}: stopped by a signal after step {step}; the same command goes on from there")
        elif env.first:
            with checkpoint.writing(s.folder / "model.tmp"):
                s.model.save_pretrained(s.folder / "model", tokenizer)
            write_json(s.folder / "run.json", student_facts(s, step, clock, cfg, facts))
            env.say(f"{s.name}: {s.folder / 'model'}")
    env.wait()
    if env.world > 1:
        dist.destroy_process_group()
    return 1 if any(s.stopped for s in students) else 0


class Env:
    """Where the run computes: device, precision, its place among the processes, and whether it was asked to stop."""

    def __init__(self, cfg: Config):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.first, self.signalled = self.rank == 0, False
        self.device = pick_device(cfg.device)
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
            cfg.dtype, torch.bfloat16 if self.device.type == "cuda" else torch.float32
        )
        if self.world > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def hold_signals(self) -> None:
        """From here on SIGINT and SIGTERM end the run after its update; before, they end the process, as nothing is to be saved."""
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, self._on_signal)

    def _on_signal(self, *_):
        self.signalled = True

    def asked_to_stop(self) -> bool:
        """True where any process got a signal, so that all of them stop after the same step."""
        if self.world > 1:
            flag = torch.tensor([float(self.signalled)], device=self.device)
            dist.all_reduce(flag)
            self.signalled = bool(flag.item())
        return self.signalled

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, tensors: list[Tensor]) -> None:
        """Add up each tensor over the processes, in place."""
        if self.world > 1:
            for handle in [dist.all_reduce(t, async_op=True) for t in tensors]:
                handle.wait()

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            self.sum([torch.zeros(1, device=self.device)])

    def say(self, text: str) -> None:
        if self.first:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


def fit_processes(cfg: Config, world: int) -> Config:
    """The config with the greatest micro_batch up to the one asked for that fits each process's share of the rows."""
    if cfg.batch_rows % (world * cfg.group):
        raise ConfigError(
            f"{world} processes with group={cfg.group}: expected their product to divide batch_rows={cfg.batch_rows}; start another number of processes, or set --batch_rows"
        )
    share = cfg.batch_rows // world
    sizes = range(cfg.group, min(cfg.micro_batch, share) + 1, cfg.group)
    return dataclasses.replace(cfg, micro_batch=max(m for m in sizes if share % m == 0))


def holds_weights(name: str) -> bool:
    return any(find_folder(name).glob("*.safetensors"))


def check_student(cfg: Config, env: Env) -> None:
    """`student_weights` have the student's shape; a `student` whose own weights stay unused is said."""
    shape = load_config(cfg.student)
    if cfg.student_weights is not None:
        there = load_config(str(find_folder(cfg.student_weights) / "config.json"))  # never a preset of the same name
        for key, value in vars(there).items():
            if value != getattr(shape, key):
                raise ConfigError(
                    f"student_weights={cfg.student_weights}: {key} is {value} there, but {getattr(shape, key)} in student={cfg.student}; set --student={cfg.student_weights} to take the shape from there too"
                )
    elif cfg.student not in PRESETS and not cfg.student.endswith(".json") and holds_weights(cfg.student):
        env.say(
            f"student={cfg.student}: only the shape is taken from there, the weights are drawn anew; --student_weights={cfg.student} starts from its weights"
        )


def check_sinks(cfg: Config) -> None:
    """The packages that the config asks for are there."""
    asked = {"tensorboard": f"tensorboard={cfg.tensorboard}" if cfg.tensorboard else None,
             "wandb": f"wandb_project={cfg.wandb_project}" if cfg.wandb_project else None}  # fmt: skip
    for package, key in asked.items():
        if key and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{key}: {package} is not installed; run `pip install {package}`, or leave it off")


def check_methods(cfg: Config, device: torch.device) -> None:
    """Every method is in the table, every override is a keyword of one of them, and they can be compiled if they are to be."""
    taken = frozenset().union(*(keywords(name) for name in cfg.methods))
    for key in cfg.overrides:
        if key not in taken:
            raise ConfigError(f"{key}={cfg.overrides[key]}: none of methods={cfg.methods} takes it; remove it")
    if cfg.kd_schedule != "constant" and cfg.compile:
        raise ConfigError(
            "kd_schedule=wsd with compile=True: every new weight would be compiled anew; set compile=False"
        )
    if cfg.compile and device.type == "cpu":
        from torch._inductor import cpp_builder  # not above: it takes a second, and few runs need it
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            cpp_builder.get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                "compile=True: no C++ compiler works here; install g++, name one in CXX, or set compile=False"
            ) from error


def check_tokenizer(cfg: Config, rows: "Rows"):
    """The run's tokenizer, held against the one that made the rows and against the student's vocabulary."""
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
    n, v = len(tokenizer), load_config(cfg.student).vocab_size
    if n > v:
        raise ConfigError(
            f"student={cfg.student}: vocabulary of {v:,}, but the tokenizer {name} has {n:,} tokens; take a larger one"
        )
    return tokenizer


def load_teacher(cfg: Config, env: Env) -> Teacher | None:
    """The frozen teacher, or None where no method of the run looks at it."""
    takers = [name for name in cfg.methods if needs_teacher(name)]
    if not takers:
        return None
    if cfg.teacher is None:
        raise ConfigError(f"teacher=None: {takers[0]} learns from one; set a local folder or hub id")
    t, s = load_config(cfg.teacher).vocab_size, load_config(cfg.student).vocab_size
    if t != s:
        raise ConfigError(
            f"teacher={cfg.teacher}: vocabulary of {t:,}, student={cfg.student} has {s:,}; logits are matched token by token, so they must be equal"
        )
    place = pick_device(cfg.teacher_device) if cfg.teacher_device else env.device
    return Teacher(Qwen2.from_pretrained(cfg.teacher, dtype=env.dtype, device=place), env.device)


def run_facts(rows: Rows, val: Rows, teacher: Teacher | None, device: torch.device) -> dict:
    """What a result must be read with: hashes of data and teacher, versions, commit, machine."""
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "data_sha256": rows.manifest["sha256"],
        "val_sha256": val.manifest["sha256"],
        "tokenizer_sha256": rows.manifest["tokenizer_sha256"],
        "teacher_sha256": weights_hash(teacher.model) if teacher else None,
        "teacher_shape": dataclasses.asdict(teacher.model.config) if teacher else None,  # the hash is of weights alone
        "git_commit": git.stdout.strip() or None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "machine": device_name(device),
    }


def student_facts(s: Student, step: int, clock: "Clock", cfg: Config, facts: dict) -> dict:
    """What a score of this student must be read with; two students compare where all but the method is equal."""
    return {
        "method": s.name,
        "overrides": s.overrides,
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


def open_folder(loaded: configure.Loaded, students: list[Student], facts: dict, env: Env) -> None:
    """Make the run's folder, or see that the one there holds this very run."""
    path = Path(loaded.config.out_dir) / "run.json"
    if path.is_file():
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON ({error}); set another out_dir, or remove that folder") from error
        now = json.loads(json.dumps(dataclasses.asdict(loaded.config)))
        differs = [
            f"{k}={before['config'].get(k)!r} there, {now[k]!r} here"
            for k in now
            if k not in FREE_KEYS and before["config"].get(k) != now[k]
        ]
        differs += [f"{k} differs" for k in SAME_FACTS if before.get(k) != facts[k]]
        if differs:
            raise ConfigError(
                f"out_dir={path.parent}: holds another run ({differs[0]}); set another out_dir, or remove that folder"
            )
    env.wait()  # nobody looks for the file while it is being written
    if env.first:
        for s in students:
            s.folder.mkdir(parents=True, exist_ok=True)
        configure.save(loaded, path, **facts)
    for s in students:
        stopped = s.folder / "stopped.json"
        s.stopped = json.loads(stopped.read_text())["why"] if stopped.is_file() else None
        env.say(f"{s.name}: {s.model.n_params:,} parameters, initial weights {s.init_sha256[:12]}, in {s.folder}")


# --- arithmetic ------------------------------------------------------------------------------------------------

# Dense bf16 products with fp32 accumulation, FLOP/s, as the makers' data sheets give them.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


def flops_per_token(shape: Qwen2Config, seq_len: int, trained: bool) -> float:
    """FLOPs of one token: two per weight of every matrix that multiplies it (the head too, the embedding look-up not),
    and 2 * 2 * H * K * T / 2 per layer for causal attention; three times that where a backward pass follows."""
    d, k = shape.hidden_size, shape.head_dim
    attention = d * k * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads)
    matrices = shape.num_hidden_layers * (attention + 3 * d * shape.intermediate_size) + shape.vocab_size * d
    scores = shape.num_hidden_layers * 2 * shape.num_attention_heads * k * seq_len
    return (2 * matrices + scores) * (3 if trained else 1)


def mfu(tok_per_sec: float, n_students: int, teacher: "Teacher | None", cfg: Config, env: "Env") -> float | None:
    """Share of the cards' peak that the run's own arithmetic takes, teacher counted once; None on an unknown card."""
    if env.device.type != "cuda":
        return None
    card = torch.cuda.get_device_name(env.device)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    each = n_students * flops_per_token(load_config(cfg.student), cfg.seq_len, trained=True)
    each += flops_per_token(teacher.model.config, cfg.seq_len, trained=False) if teacher else 0.0
    return tok_per_sec * each / (peak * env.world) if peak else None


# --- the account -----------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """What the log needs to know since its last line, and since the process began."""

    begun_step: int = 0  # where this process took over
    begun: float = field(default_factory=lambda: time.perf_counter())
    valid_tokens: int = 0  # of all updates of the run, on this process's share of the rows
    line_steps: int = 0  # since the last line
    line_valid: int = 0
    line_sec: float = 0.0  # inside updates only

    def count(self, n_valid: int, seconds: float) -> None:
        self.valid_tokens += n_valid
        self.line_valid += n_valid
        self.line_steps += 1
        self.line_sec += seconds


CLOCK_KEYS = ("valid_tokens", "line_steps", "line_valid", "line_sec")  # what a checkpoint keeps of it


def log_terms(live: list[Student], teacher: Teacher | None, step: int, clock: Clock, cfg: Config, env: Env) -> None:
    """One line and one record per student: means over all tokens since the last line."""
    names = sorted({name for s in live for name in s.sums})
    counts = torch.tensor([clock.line_valid, clock.valid_tokens], dtype=torch.float64, device=env.device)
    env.sum([counts])
    line_valid, valid_tokens = (int(c) for c in counts.tolist())
    left = (time.perf_counter() - clock.begun) / (step - clock.begun_step) * (cfg.max_steps - step)
    tok_per_sec = clock.line_steps * cfg.batch_rows * cfg.seq_len / clock.line_sec
    used = mfu(tok_per_sec, len(live), teacher, cfg, env)
    for s in live:
        sums = torch.stack(
            [torch.as_tensor(s.sums[name], dtype=torch.float64, device=env.device) for name in names if name in s.sums]
        )
        env.sum([sums])
        terms = dict(zip([n for n in names if n in s.sums], (sums / max(line_valid, 1)).tolist(), strict=True))
        record = {
            "step": step,
            "nominal_tokens": step * cfg.batch_rows * cfg.seq_len,
            "valid_tokens": valid_tokens,
            "loss": terms.pop("loss"),
            **terms,
            "lr": learning_rate(step - 1, cfg),
            "gnorm": float(s.gnorm),
            "tok_per_sec": tok_per_sec,
            "mfu": used,
            "mem_gib": torch.cuda.max_memory_allocated(env.device) / 2**30 if env.device.type == "cuda" else None,
            "eta_sec": left,
        }
        s.sums = {}
        if env.first:
            s.record(record)
        parts = " ".join(f"{k} {v:.4f}" for k, v in {"loss": record["loss"], **terms}.items())
        env.say(
            f"{s.name:<10} step {step}/{cfg.max_steps}  {parts}  lr {record['lr']:.1e} gnorm {record['gnorm']:.2f}  "
            f"{tok_per_sec / 1e3:.1f}k tok/s {f'mfu {used:.0%} ' if used else ''} eta {hours(left)}"
        )
    clock.line_valid, clock.line_steps, clock.line_sec = 0, 0, 0.0


def log_validation(live: list[Student], figures: dict[str, dict], step: int, env: Env) -> None:
    for s in live:
        record = {"step": step, **{f"val_{name}": value for name, value in figures[s.name].items()}}
        if env.first:
            s.record(record)
        env.say(f"{s.name:<10} step {step}  " + "  ".join(f"{k} {v:.4f}" for k, v in record.items() if k != "step"))


def open_sinks(live: list[Student], cfg: Config) -> None:
    """TensorBoard and Weights & Biases, where the config asks for them: both get the records of log.jsonl."""
    for s in live:
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            s.sinks.append(functools.partial(to_tensorboard, SummaryWriter(s.folder / "tensorboard")))
        if cfg.wandb_project:
            import wandb

            name = f"{Path(cfg.out_dir).name}/{s.name}"
            run = wandb.init(
                project=cfg.wandb_project, name=name, id=name.replace("/", "-"), resume="allow", reinit="create_new"
            )
            s.sinks.append(lambda record, run=run: run.log(record, step=record["step"]))


def to_tensorboard(writer, record: dict) -> None:
    for key, value in record.items():
        if key != "step" and value is not None:
            writer.add_scalar(key, value, record["step"])


def append_json(path: Path, record: dict) -> None:
    with checkpoint.writing(path), path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def write_json(path: Path, value: dict) -> None:
    with checkpoint.writing(path):
        configure.write_whole(path, json.dumps(value, indent=1) + "\n")


def hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m" if minutes else f"{seconds:.0f}s"


# --- checkpoints -----------------------------------------------------------------------------------------------


def save_checkpoints(live: list[Student], step: int, clock: Clock, cfg: Config, facts: dict, env: Env) -> None:
    """One per student, all of them before any older one goes."""
    if not env.first:
        return
    for s in live:
        sums = {k: float(v) for k, v in s.sums.items()}
        account = {k: v for k, v in vars(clock).items() if k in CLOCK_KEYS}
        state = {"step": step, "method": s.name, "init_sha256": s.init_sha256, **facts, "sums": sums, **account}
        checkpoint.save(s.folder / "checkpoints", s.model, s.optimizer, state)
    for s in live:
        checkpoint.prune(s.folder / "checkpoints", cfg.keep_checkpoints)


def resume(live: list[Student], cfg: Config, facts: dict, env: Env) -> tuple[int, Clock]:
    """Put every student where the newest step that all of them have left it -> that step and the clock."""
    common = (
        set.intersection(*({p.name for p in checkpoint.whole(s.folder / "checkpoints")} for s in live))
        if live
        else set()
    )
    step = int(max(common).removeprefix("step_")) if common else 0
    if env.first:
        for path in (*Path(cfg.out_dir).glob("*.jsonl"), *(p for s in live for p in s.folder.glob("*.jsonl"))):
            # what was said of steps that were lost with the process; a histogram is of the weights before its step
            drop_after(path, step if path.name == "log.jsonl" else step - 1)
    if not common:
        return 0, Clock()
    for s in live:
        belongs = {
            "method": s.name,
            "init_sha256": s.init_sha256,
            **{k: facts[k] for k in ("data_sha256", "teacher_sha256")},
        }
        state = checkpoint.load(s.folder / "checkpoints" / max(common), s.model, s.optimizer, belongs)
        s.sums = {k: torch.tensor(v, device=env.device) for k, v in state["sums"].items()}
    return step, Clock(step, **{k: state[k] for k in CLOCK_KEYS})


def drop_after(path: Path, step: int) -> None:
    """Remove a log's records of later steps, and a last line that a kill cut short."""
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    configure.write_whole(path, "".join(kept))


def main() -> None:
    sys.exit(configure.guard(lambda: run(configure.load(sys.argv[1:], METHODS))))


if __name__ == "__main__":
    main()
