"""Distil one or more students from one teacher: AdamW, a schedule, one forward pass of the teacher for all.

    python train.py config/alra_200m.py [--key=value ...]
    torchrun --nproc_per_node=2 train.py config/alra_200m.py

The same command resumes a run from its newest checkpoint. SIGINT, SIGTERM, SIGHUP and SIGUSR1 end it after the current
update, with a checkpoint and exit code 75. lib/run.py says what the run's folder contains.

Dimension key: B rows, T time, D width, V vocabulary, N positions.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import configure
from configure import Config
from lib import metrics, parallel, run
from lib.cache import CachedTeacher, Wanted, fill, open_cached, read_ahead
from lib.checks import IGNORE
from lib.device import gib, mfu, peak_bytes, pick_device, repair_compile_cache
from lib.errors import UserError, require
from lib.files import locked, read_json
from lib.fused import head_losses
from lib.hf import load_tokenizer, weights_hash
from lib.identity import student_shape
from lib.rows import Rows, row_order
from lib.run import Student, say
from lib.teacher import Teacher, check_teacher, load_teacher
from losses import alra, default_settings, make_loss_fn, method_lines, needs_teacher, resolve, scheduled_settings
from model import Qwen2, flops_per_token, init_student


def open_data(cfg: Config, name: str) -> Rows:
    return Rows(cfg.data_dir, name, cfg.seq_len, cfg.mask_after_eos, student_shape(cfg).vocab_size)


def rows_of_update(rows: Rows, step: int, cfg: Config) -> np.ndarray:
    """This process's rows of an update: a function of the step alone."""
    order = row_order(step, cfg.batch_rows, rows.n, cfg.seed if cfg.shuffle else None)
    return np.array_split(order, parallel.world())[parallel.rank()]


def batches(rows: Rows, teacher: Teacher | None, step: int, cfg: Config) -> Iterator[tuple]:
    """This process's micro-batches from update `step` on.

    -> inputs x [B, T], labels y [B, T] (IGNORE for padding), number of labels, the teacher's hidden states [B, T, D_t]
    """
    for at in range(step, cfg.max_steps):
        mine = rows_of_update(rows, at, cfg)
        for index in np.split(mine, len(mine) // cfg.micro_batch):
            x, y, n_valid = rows.batch(index, torch.device(cfg.device))
            yield x, y, n_valid, teacher.hidden(x, rows, index) if teacher else None


def rows_of_run(cfg: Config, rows: Rows, val: Rows) -> Wanted:
    """The rows that a run reads, by file, a million at a time."""
    n = min(rows.n, max(cfg.max_steps, 2) * cfg.batch_rows)  # choose_micro_batch reads up to two updates
    size, seed = min(n, 1 << 20), cfg.seed if cfg.shuffle and n < rows.n else None  # of all rows any order will do
    blocks = (np.sort(row_order(at // size, size, rows.n, seed)[: n - at]) for at in range(0, n, size))
    return {rows: blocks, val: [np.arange(val.n)[: cfg.val_max_rows]]}


def open_teacher(cfg: Config, *data: Rows) -> Teacher | CachedTeacher | None:
    """The frozen teacher, or None if no method of the run reads its logits. `teacher_cache` needs the rows and held-out rows."""
    if not any(map(needs_teacher, cfg.methods)):
        return None
    home, n_vocab = torch.device(cfg.device), student_shape(cfg).vocab_size
    device = pick_device(cfg.teacher_device) if cfg.teacher_device else home
    dtype = run.compute_dtype(cfg)
    load = functools.partial(load_teacher, cfg.teacher, dtype, device, home, cfg.compile, n_vocab, cfg.shard)
    if not cfg.teacher_cache:
        return load()
    return open_cached(cfg.teacher, dtype, home, n_vocab, rows_of_run(cfg, *data), load)


def fill_teacher_cache(cfg: Config) -> None:
    """Compute and store ahead what runs of `cfg` and scores of their students read of the teacher."""
    if not any(map(needs_teacher, cfg.methods)):
        return
    cfg = dataclasses.replace(cfg, device=str(pick_device(cfg.device)), val_max_rows=None)
    parallel.start(torch.device(cfg.device), cfg.timeout_minutes)
    data = open_data(cfg, "train"), open_data(cfg, "val")
    check_teacher(cfg.teacher, load_tokenizer(cfg.tokenizer or cfg.teacher), cfg.seq_len)
    fill(open_teacher(cfg, *data), rows_of_run(cfg, *data), cfg.micro_batch or min(cfg.batch_rows, 16))
    parallel.stop()


def make_student(name: str, cfg: Config, tokenizer: PreTrainedTokenizerFast | None = None) -> Student:
    """A student before its first update; the same weights for every method of the run.

    A parameter group may have an `lr_factor` (default 1): `update` multiplies the schedule's rate by it. `extras` are modules
    for a term of your own, such as a projection of hidden states.
    """
    model = first_weights(cfg)
    sha = weights_hash(model)
    torch.manual_seed(cfg.seed)
    extras = nn.ModuleDict()
    if cfg.compile:
        model.compile_layers()
    if cfg.shard > 1:
        require(not len(extras), f"shard={cfg.shard}: not supported with extras")
        parallel.shard(model, model.model.layers, cfg.shard, torch.device(cfg.device), False, run.compute_dtype(cfg))
    model.to(cfg.device)
    extras.to(cfg.device)
    groups = {True: [], False: []}  # with and without weight decay
    for p in (*model.parameters(), *extras.parameters()):
        groups[cfg.decay_1d or p.ndim > 1].append(p)
    groups = [{"params": ps, "weight_decay": cfg.weight_decay * decays} for decays, ps in groups.items() if ps]
    optimizer = torch.optim.AdamW(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.adam_eps, fused=True)
    return Student(name, model, extras, optimizer, Path(cfg.out_dir) / name, sha, tokenizer, cfg.lr_factor(name))


def first_weights(cfg: Config) -> Qwen2:
    """The first weights of every student, fp32 on the CPU: drawn from the seed, or those of `student_weights`."""
    shape, source = student_shape(cfg), cfg.student_weights
    model = init_student(shape, cfg.seed) if source is None else Qwen2.from_pretrained(source)
    model.cut(shape.vocab_size)
    same = model.config == shape
    require(same, f"student_weights={source}: not of the shape of student={cfg.student}; set --student={source} too")
    return model.requires_grad_(True).train()


def objective_at(s: Student, step: int, cfg: Config) -> Callable:
    """A student's objective in update `step`, with the settings that change during a run.

    A random one is seeded for each forward batch by its number in the update, however that is divided.
    """
    overrides, device = cfg.overrides_of(s.name), s.model.head.device
    method = resolve(s.name, **overrides)
    scheduled = scheduled_settings(method, step, cfg.schedule_steps, cfg.w_kd_schedule)
    # tensors, so that one compiled graph serves every value; filled, since a copy would make the host wait
    scheduled = {key: torch.full((), x, dtype=torch.float64, device=device) for key, x in scheduled.items()}
    evaluate = make_loss_fn(s.name, cfg.group, cfg.compile, **overrides)
    if "generator" not in default_settings(method.fn):
        return functools.partial(evaluate, scheduled=scheduled)
    first = parallel.rank() * cfg.batch_rows // parallel.world() // cfg.group
    seeds = (random.Random(f"{cfg.seed} {step} {s.name} {n}").getrandbits(63) for n in itertools.count(first))
    return lambda *z: evaluate(*z, scheduled | {"generator": torch.Generator(device).manual_seed(next(seeds))})


def learning_rate(step: int, cfg: Config) -> float:
    """The rate of update `step`, counted from 0: linear to `lr` at the last warm-up update, then by `lr_schedule`.

    cosine    falls to `min_lr` at the schedule's last update
    wsd       stays at `lr`, then falls linearly to `min_lr` over the last `decay_share` of the schedule
    constant  stays at `lr`
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.lr_schedule == "constant":
        return cfg.lr
    if cfg.lr_schedule == "wsd":
        left = (cfg.schedule_steps - step - 1) / (cfg.decay_share * cfg.schedule_steps)
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * min(left, 1.0)
    part = (step + 1 - cfg.warmup_steps) / (cfg.schedule_steps - cfg.warmup_steps)
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * part))


def choose_micro_batch(students: list[Student], teacher: Teacher | None, rows: Rows, cfg: Config) -> Config:
    """The config with the `micro_batch` that is used: a divisor of each process's share of an update's rows.

    None means the value of the run that is resumed. A new run takes the largest whose forward and backward pass fits the
    card beside AdamW's moments, by trying; on the CPU, and with sharded weights, it takes `group`.
    """
    share, chosen, before = cfg.batch_rows // parallel.world(), cfg.micro_batch, Path(cfg.out_dir) / "run.json"
    sizes = [m for m in range(share, cfg.group - 1, -cfg.group) if share % m == 0]  # largest first
    if chosen is None and before.is_file():
        chosen = read_json(before, ["config"])["config"].get("micro_batch")
    for m in sizes if chosen is None and cfg.device.startswith("cuda") and cfg.shard == 1 else ():
        moments = [torch.empty_like(p) for s in students for p in s.parameters().values() for _ in range(2)]
        # two micro-batches, of which only the first is computed: nothing is summed over processes
        trial = dataclasses.replace(cfg, micro_batch=m, batch_rows=2 * m * parallel.world(), max_steps=1)
        with contextlib.suppress(torch.OutOfMemoryError):
            accumulate(students, teacher, itertools.islice(batches(rows, teacher, 0, trial), 1), 0, trial)
            chosen = m
        del moments
        for s in students:
            s.sums = {}
            s.optimizer.zero_grad()
        if chosen := min(parallel.all_gather(chosen or 0)):
            break
    used = next((m for m in sizes if m <= (chosen or cfg.group)), cfg.group)
    if cfg.micro_batch not in (None, used):
        say(f"micro_batch={cfg.micro_batch}: lowered to {used} for {parallel.world()} processes; the result is the same")  # fmt: skip
    return dataclasses.replace(cfg, micro_batch=used)


def accumulate(
    students: list[Student], teacher: Teacher | None, stream: Iterator[tuple], step: int, cfg: Config
) -> int:
    """The gradients of an update, summed over the processes -> valid tokens of this process."""
    objectives, dtype = [objective_at(s, step, cfg) for s in students], run.compute_dtype(cfg)
    n_micro = cfg.batch_rows // cfg.micro_batch
    n_mine, n_valid, handles = n_micro // parallel.world(), 0, []  # of this process
    for nth, (x, y, n, h_t) in enumerate(itertools.islice(stream, n_mine), 1):
        n_valid += n
        h_s = [s.model.hidden(x, recompute=cfg.recompute, dtype=dtype) for s in students]  # each [B, T, D_s]
        heads = [(h, s.model.head, objective) for h, s, objective in zip(h_s, students, objectives, strict=True)]
        results = head_losses(heads, h_t, teacher.head if teacher else None, y, cfg.group)
        for s, (loss, terms) in zip(students, results, strict=True):
            with parallel.summing_gradients(s.model, s.extras, nth == n_mine, handles):
                (loss / n_micro).backward()
            for name, value in terms.items():
                s.sums[name] = s.sums.get(name, 0.0) + value.double() * n
    for handle in handles:
        handle.wait()
    return n_valid


def update(students: list[Student], teacher: Teacher | None, stream: Iterator[tuple], step: int, cfg: Config) -> int:
    """One optimizer step of every student from one pass of the teacher -> valid tokens of this process.

    A forward batch is `group` rows. The loss of an update is the mean over its forward batches of the mean over each
    one's valid positions, however they are divided into micro-batches and processes. The log has means over all tokens.
    """
    n_valid = accumulate(students, teacher, stream, step, cfg)
    norms = torch.stack([clip_gradients(s.parameters().values(), cfg.clip) for s in students])
    for s, norm in zip(students, norms.tolist(), strict=True):  # the host waits for the device here alone
        s.gnorm = norm
        if not math.isfinite(norm):
            broken = [name for name, value in s.totals().items() if not math.isfinite(value)]
            s.skipped += 1
            s.optimizer.zero_grad(set_to_none=True)
            why = f"gradient norm {norm}, not finite: {', '.join(broken) or 'the gradient alone'}"
            run.say(f"{s.name}, step {step + 1}: skipped the update, {s.skipped} in a row; {why}")
            s.stopped = f"{s.skipped} updates in a row skipped; {why}" if s.skipped > cfg.max_skipped_updates else None
            continue
        s.skipped = 0
        for group in s.optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg) * s.lr_factor * group.get("lr_factor", 1.0)
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=True)
    return n_valid


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients by one factor, so that their common norm is at most `max_norm` -> the norm before, fp32.

    On the CPU torch adds squares one after the other in fp32, and the norm is 2 % low for 67M equal elements. There they
    are added in fp64, 1M elements at a time.
    """
    parameters = [p for p in parameters if p.grad is not None]
    grads = [parallel.local(p.grad) for p in parameters]
    if grads[0].is_cuda:
        norm = torch.nn.utils.get_total_norm(grads)
    else:
        blocks = [block for g in grads for block in g.flatten().split(1 << 20)]
        norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    norm = parallel.reduce_norm(norm, parameters[0]).float()
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


VALIDATED = {"ce": "ce", "kl": "kl", "agree": "top1", "teacher_ce": "teacher_ce", "teacher_entropy": "teacher_entropy"}


def as_model(s: Student, cfg: Config) -> metrics.Model:
    """Its forward pass and head. Inside `gathered_roots`, or a sharded head is not whole."""
    return functools.partial(s.model.hidden, dtype=run.compute_dtype(cfg)), s.model.head


def validate(live: list[Student], teacher: Teacher | None, rows: Rows, cfg: Config) -> dict[str, dict]:
    """Per student: CE, KL(teacher || student) and top-1 agreement per token of the validation rows, temperature 1."""
    n_rows, size = min(rows.n, cfg.val_max_rows or rows.n), cfg.micro_batch

    def batches() -> Iterator[tuple]:
        # sharded weights need all processes in every batch: the last ones may have no label
        begin = parallel.rank() * size
        for first in range(begin, n_rows + (begin if cfg.shard > 1 else 0), parallel.world() * size):
            index = np.arange(n_rows)[first : first + size] if first < n_rows else np.array([0])
            x, y, _ = rows.batch(index, torch.device(cfg.device))
            h_t = teacher.hidden(x, rows, index) if teacher else None
            yield first, x, y if first < n_rows else torch.full_like(y, IGNORE), h_t

    with parallel.gathered_roots(s.model for s in live):
        head_t = teacher.head if teacher else None
        sums = metrics.row_sums([as_model(s, cfg) for s in live], head_t, batches(), n_rows)
    parallel.sum_in_place([value for student in sums for value in student.values()])
    figures = [metrics.figures({key: value.sum(0).cpu().numpy() for key, value in student.items()}) for student in sums]
    return {
        s.name: {f"val_{key}": float(figure[name]) for key, name in VALIDATED.items() if name in figure}
        for s, figure in zip(live, figures, strict=True)
    }


def log_histograms(live: list[Student], teacher: Teacher, rows: Rows, step: int, cfg: Config) -> None:
    """The paper's Figures 3 and 4 over the rows of update `step`, without any effect on the run.

    `teacher.jsonl` gets the teacher's record, `METHOD/histograms.jsonl` the local budgets of a student that has some.
    """
    of_update = batches(rows, teacher, step, dataclasses.replace(cfg, max_steps=step + 1))
    budget = functools.partial(alra, **resolve("alra", **cfg.overrides_of("alra")).hyper)
    with parallel.gathered_roots(s.model for s in live):
        students = {}
        for s in live:
            method = resolve(s.name, **cfg.overrides_of(s.name))
            if "d_u" in getattr(inspect.signature(method.fn).return_annotation, "_fields", ()):
                students[s.name] = as_model(s, cfg), functools.partial(method.fn, **method.hyper)
        record, counts = metrics.histograms(teacher.head, budget, students, of_update, cfg.group)
    if parallel.rank() == 0:
        run.append(Path(cfg.out_dir) / "teacher.jsonl", {"step": step, **record})
        for name, count in counts.items():
            line = {"step": step, "n": record["n"], "d_u_hist": count}
            run.append(Path(cfg.out_dir) / name / "histograms.jsonl", line)


def log_terms(
    live: list[Student], teacher: Teacher | None, step: int, left_sec: float, counts: dict, cfg: Config
) -> None:
    """One record per student with means over all tokens since the last one, and a line of their terms."""
    device = torch.device(cfg.device)
    tok_per_sec = counts["since_log_steps"] * cfg.batch_rows * cfg.seq_len / counts["since_log_sec"]
    flops = sum(flops_per_token(s.model.config, cfg.seq_len, trained=True) for s in live)
    flops += teacher.flops_per_token(cfg.seq_len) if teacher else 0.0
    shared = {
        "tok_per_sec": tok_per_sec,
        "mfu": mfu(tok_per_sec * flops, device, parallel.world()),
        "mem_gib": peak_bytes(device) / 2**30,
        "eta_sec": left_sec,
        "time": round(time.time()),  # seconds since 1970
    }
    rate, logged = learning_rate(step - 1, cfg), {}
    for s in live:
        logged[s.name] = {name: value / max(counts["since_log_tokens"], 1) for name, value in s.totals().items()}
        tokens = {"nominal_tokens": step * cfg.batch_rows * cfg.seq_len, "valid_tokens": counts["valid_tokens"]}
        s.record({"step": step, **tokens, **logged[s.name], "lr": rate * s.lr_factor, "gnorm": s.gnorm, **shared})
        s.sums = {}
    used = f"  mfu {shared['mfu']:.0%}" if shared["mfu"] else ""
    eta = tqdm.format_interval(left_sec)
    label = f"step {step}/{cfg.max_steps}  lr {rate:.1e}  {tok_per_sec:8,.0f} tok/s{used}  eta {eta:>8}"
    say_values(label, logged, ("ce",), cfg)


def say_values(label: str, values: dict[str, dict[str, float]], keys: Iterable[str], cfg: Config) -> None:
    """Print all values of a lone student; of several, one row for each of `keys`, with a column for each student."""
    if len(cfg.methods) == 1:
        say(f"{label}  |  " + "  ".join(f"{key} {x:.4f}" for own in values.values() for key, x in own.items()))
    else:
        for key in keys:
            say_row(f"{label}  {key}", {name: f"{own[key]:.4f}" for name, own in values.items()}, cfg)


def say_levels(values: dict[str, float]) -> None:
    """What the first held-out CEs are read against. A teacher that knows less than the frequencies of tokens is told."""
    known = {key.removeprefix("val_"): value for key, value in values.items()}
    say(f"held-out {metrics.levels(known)}")
    if known.get("teacher_ce", 0) > min(known.get("unigram_ce", math.inf), 0.95 * known["uniform_ce"]):
        say(f"warning: the teacher's held-out CE is {known['teacher_ce']:.2f}: it knows less of this text than token frequencies, and a low KL to it is no success; choose another teacher")  # fmt: skip


def say_row(label: str, cells: dict[str, str], cfg: Config) -> None:
    say(f"{label:<64} |" + "".join(f"{cells.get(name, ''):>{max(len(name), 6) + 2}}" for name in cfg.methods))


STOP = threading.Event()  # set by a signal
TRY_AGAIN = 75  # exit code of a run that a signal ended before its last update: EX_TEMPFAIL of sysexits.h


def catch_signals() -> None:
    """From now on signals end the run after the current update. Before, they end the process: there is nothing to save."""
    STOP.clear()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda *_: STOP.set())


def distil(cfg: Config) -> int:
    """A whole run -> its exit code: 0 if every student reached the end, 1 if one stopped, TRY_AGAIN after a signal."""
    cfg = dataclasses.replace(cfg, device=str(pick_device(cfg.device)))
    parallel.start(torch.device(cfg.device), cfg.timeout_minutes)
    try:
        run.check_config(cfg)
        rows, val = open_data(cfg, "train"), open_data(cfg, "val")
        tokenizer = run.check_data(cfg, rows, val)
        records = run.agreed_records(cfg)
        if cfg.max_steps < cfg.schedule_steps and cfg.lr_schedule != "constant":
            say(f"max_steps={cfg.max_steps}: the rate ends at {learning_rate(cfg.max_steps - 1, cfg):.1e} of {cfg.lr:.1e}; to end at {cfg.min_lr:.1e} set schedule_steps too")  # fmt: skip
        if cfg.compile:
            say("compiling, once: the first update may take minutes")
            repair_compile_cache()
        teacher = open_teacher(cfg, rows, val)
        students = [make_student(name, cfg, tokenizer) for name in cfg.methods]
        cfg = choose_micro_batch(students, teacher, rows, cfg)
        facts = run.run_facts(cfg, rows, records)
        busy = (
            f"out_dir={cfg.out_dir}: another train.py is running there; wait until it ends, or choose another out_dir"
        )
        with contextlib.nullcontext() if parallel.rank() else locked(Path(cfg.out_dir), busy):
            step, counts = loop(cfg, rows, val, teacher, students, facts)
            for s in students:
                if not s.stopped and step == cfg.max_steps:
                    run.save_model(s, step, counts, facts, cfg)
        stopped = [s for s in students if s.stopped]
        resumes = step < cfg.max_steps and len(stopped) < len(students)
        say(f"{cfg.out_dir}: step {step} of {cfg.max_steps}{'; the same command resumes' if resumes else ''}")
        if resumes:
            return TRY_AGAIN
        if len(stopped) == len(students):
            print(f"{cfg.out_dir}: all students stopped; {stopped[0].stopped}", file=sys.stderr)
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))  # torchrun would begin again, in vain
        return 1 if stopped and not restarts else 0
    except torch.OutOfMemoryError as error:
        less = f"a micro_batch below {cfg.micro_batch}" if (cfg.micro_batch or 0) > cfg.group else "--shard=N"
        raise UserError(f"out of memory on {cfg.device}: set {less}, --recompute=True, or fewer methods") from error
    finally:
        parallel.stop()


def loop(
    cfg: Config, rows: Rows, val: Rows, teacher: Teacher | None, students: list[Student], facts: dict
) -> tuple[int, dict]:
    """From the newest checkpoint to the last update, a signal, or no student left -> the step that was reached, and the counts."""
    first, counts = run.resume(students, facts, cfg)
    live, step, stop, failed, started = [s for s in students if not s.stopped], first, False, None, time.perf_counter()
    catch_signals()
    pause = 60 * (cfg.checkpoint_every_minutes or math.inf)  # seconds between checkpoints
    stream, due = batches(rows, teacher, step, cfg), started + pause
    if isinstance(teacher, CachedTeacher) and not teacher.body:
        stream = read_ahead(stream)  # nothing is computed in its thread
    if len(students) > 1:
        say_row("", {name: name for name in cfg.methods}, cfg)
    bar = tqdm(total=cfg.max_steps, initial=step, unit="step", disable=True if parallel.rank() else None)
    while step < cfg.max_steps and live and not stop:
        if teacher and cfg.histogram_every_steps and step % cfg.histogram_every_steps == 0:
            log_histograms(live, teacher, rows, step, cfg)
        t0 = time.perf_counter()
        n_valid = update(live, teacher, stream, step, cfg)
        step, now = step + 1, time.perf_counter()
        n_valid, stop, save = parallel.all_reduce_sum(n_valid, STOP.is_set(), parallel.rank() == 0 and now > due)
        for key, value in zip(run.COUNTS, (n_valid, n_valid, 1, now - t0), strict=True):
            counts[key] += value
        last = step == cfg.max_steps
        save = save or stop or last or step % (cfg.checkpoint_every_steps or math.inf) == 0
        live = run.drop_broken(live, step, counts, facts, cfg, save or step % cfg.val_every_steps == 0)
        if step == first + 1:
            say(f"peak memory after the first update: {gib(peak_bytes(torch.device(cfg.device)))}")
        if live and (step % cfg.log_every_steps == 0 or last):
            log_terms(live, teacher, step, (now - started) / (step - first) * (cfg.max_steps - step), counts, cfg)
            counts |= dict.fromkeys(run.COUNTS[1:], 0)
        if live and (step % cfg.val_every_steps == 0 or last):
            validated = validate(live, teacher, val, cfg)
            say_values(f"step {step}", validated, ("val_ce", "val_kl", "val_agree") if teacher else ("val_ce",), cfg)
            levels = {f"val_{key}": ce for key, ce in val.levels.items()}
            if step <= first + cfg.val_every_steps:
                say_levels(validated[live[0].name] | levels)
            for s in live:
                s.record({"step": step, **validated[s.name], **levels})
                ce, of_guess = validated[s.name]["val_ce"], levels["val_uniform_ce"]
                if not ce < of_guess:
                    say(f"{s.name}, step {step}: held-out CE {ce:.2f} is past ln V = {of_guess:.2f}, a uniform guess's; if it was lower before, try a smaller lr")  # fmt: skip
        if save:
            before, failed = failed, run.save_checkpoints(live, step, counts, facts, cfg)
            if failed and (stop or last):
                raise failed
            if failed and not before:
                say(f"step {step}: no checkpoint; trying after each update from now on: {failed}")
            due = time.perf_counter() + (0 if failed else pause)
        bar.update()
    bar.close()
    return step, counts


def main(argv: list[str]) -> int:
    return distil(configure.load(argv, method_lines))


if __name__ == "__main__":
    sys.exit(configure.guard(lambda: main(sys.argv[1:])))
