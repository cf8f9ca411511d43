"""Distil one or more students from one teacher: AdamW, cosine, one forward pass of the teacher for all.

    python train.py config/alra_200m.py [--key=value ...]
    torchrun --nproc_per_node=2 train.py config/alra_200m.py

The run's folder holds `run.json` (resolved config, versions, hashes) and one folder per student with `log.jsonl`,
`checkpoints/` and, at the end, `model/`, which Hugging Face reads. Started again, a run goes on from its newest
checkpoint; SIGINT, SIGTERM and SIGHUP save one and exit 0, once it trains.

Dimension key: B rows, T time, D width, V vocabulary, N positions.
"""

import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import configure
from configure import Config
from lib import checkpoint, heldout, parallel, runlog
from lib.batches import Rows
from lib.checks import IGNORE, all_finite
from lib.device import pick_device
from lib.figures import figures
from lib.files import append_line, write_json, writing
from lib.fused import head_losses
from lib.hf import weights_hash
from lib.histograms import histograms
from lib.rows import row_order
from lib.runlog import Clock
from lib.teacher import Teacher, load_teacher
from losses import (
    alra_terms,
    evaluator,
    kd_weight,
    method_lines,
    needs_teacher,
    resolve,
    settings_at,
)
from model import Qwen2, init_student
from session import (
    Env,
    Student,
    announce,
    begin,
    check_folder,
    check_rows,
    check_vocabulary,
    close_sinks,
    ended,
    how_to_go_on,
    is_checkpoint,
    open_folder,
    open_tokenizer,
    out_of_memory,
    resume,
    run_facts,
    save_checkpoints,
    student_facts,
    student_shape,
    taken,
)

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
    if not any(map(needs_teacher, cfg.methods)):
        return None
    place = pick_device(cfg.teacher_device) if cfg.teacher_device else env.device
    n_vocab = student_shape(cfg).vocab_size
    return load_teacher(cfg.teacher, env.dtype, place, env.device, cfg.compile, n_vocab, cfg.shard)


# --- students --------------------------------------------------------------------------------------------------------


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


def first_weights(cfg: Config) -> Qwen2:
    """The first weights of every student, fp32 on the CPU: drawn from the seed, or those of `student_weights`."""
    if cfg.student_weights is None:
        return init_student(student_shape(cfg), cfg.seed)
    if is_checkpoint(cfg.student_weights):
        model = init_student(student_shape(cfg), cfg.seed)
        checkpoint.load_weights(Path(cfg.student_weights), model)
    else:
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
    """One optimizer step of every student from one pass of the teacher -> valid tokens seen by all processes.

    A forward batch is `group` rows. The loss of an update is the mean over its forward batches of the mean over each
    one's valid positions, however they are dealt out to micro-batches and processes. The log has means over all tokens.
    """
    objectives = [objective_at(s, step, cfg) for s in students]
    n_micro = cfg.batch_rows // cfg.micro_batch
    n_mine, n_valid, under_way = n_micro // env.world, 0, []  # of this process
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
    # the one time that the host waits
    *norms, n_valid, stop, save = torch.cat([torch.stack(norms), env.over_processes(n_valid)]).tolist()
    env.stopping, env.saving = stop > 0, save > 0
    for s, norm in zip(students, norms, strict=True):
        s.gnorm = norm
        if not math.isfinite(s.gnorm):
            s.stopped = f"step {step + 1}: gradient norm {s.gnorm}; {broken_terms(s)}; the update was not made; try a smaller lr"
            continue
        for group in s.optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg) * s.lr_factor * group.get("lr_factor", 1.0)
        s.optimizer.step()
        s.optimizer.zero_grad(set_to_none=True)
    return int(n_valid)


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
    broken = [name for name, value in s.totals().items() if not math.isfinite(value)]
    return f"not finite: {', '.join(broken)}" if broken else "the terms are finite, their gradient is not"


def going_on(live: list[Student], step: int, cfg: Config, env: Env) -> list[Student]:
    """The students that have not broken; those that have are told at once and get a `stopped.json`."""
    for s in live:
        if s.stopped and env.first:
            write_json(s.folder / "stopped.json", {"step": step, "why": s.stopped})
            env.say(f"{s.name} stopped at {s.stopped}{how_to_go_on(s, cfg)}")
    return [s for s in live if not s.stopped]


def check_weights(live: list[Student], step: int, env: Env) -> None:
    """Stop the students that an update has left with weights that are not finite, before these are used or saved."""
    broken = [not all(all_finite(parallel.local(p)) for p in s.model.parameters()) for s in live]
    broken = torch.tensor(broken, dtype=torch.float32, device=env.device)
    parallel.sum_in_place([broken])  # all processes stop the same students
    for s, n in zip(live, broken.tolist(), strict=True):
        if n and not s.stopped:
            s.stopped = f"step {step}: its update made weights that are not finite; try a smaller lr"


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
def run(cfg: Config) -> int:
    """A whole run -> its exit code: 0 when every student reached the end, or a signal asked for an early one."""
    cfg, env = begin(cfg)
    rows, val = open_data(cfg, "train"), open_data(cfg, "val")
    tokenizer = open_tokenizer(cfg, rows)
    check_vocabulary(cfg, tokenizer, env)
    check_rows(rows, val, cfg)
    try:
        teacher = open_teacher(cfg, env)
        students = [make_student(name, cfg, env.device) for name in cfg.methods]
        with taken(cfg, env):
            return distil(cfg, env, rows, val, tokenizer, teacher, students)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(cfg, env) from error


def distil(
    cfg: Config, env: Env, rows: Rows, val: Rows, tokenizer: PreTrainedTokenizerFast,
    teacher: Teacher | None, students: list[Student],
) -> int:  # fmt: skip
    """The loop, from the newest checkpoint to the saved models -> the exit code of `run`."""
    facts = run_facts(rows, val, teacher, cfg, env.device)
    found = {s.name: [path.name for path in checkpoint.whole(s.folder / "checkpoints")] for s in students}
    first_weights = {s.name: s.init_sha256 for s in students}
    parallel.agree(**facts | {"machine": None, "teacher_used": None}, first_weights=first_weights, checkpoints=found)
    check_folder(students, cfg, facts)
    live = [s for s in students if not s.stopped]
    done = all(ended(s, cfg) for s in live)
    step, clock = (cfg.max_steps, Clock()) if done else resume(live, cfg, facts, env)
    if not done:
        announce(students, facts, cfg, env)
        open_folder(live, step, clock, cfg, facts, env)
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
        live = going_on(live, step, cfg, env)
        if step % cfg.log_every_steps == 0 or last:
            log_terms(live, teacher, step, clock, cfg, env)
        if live and (step % cfg.val_every_steps == 0 or last):
            with clock.aside("validation"):
                log_validation(live, validate(live, teacher, val, cfg, env), step, cfg, env)
            live = going_on(live, step, cfg, env)
        if save:
            with clock.aside("checkpoints"):
                save_checkpoints(live, step, clock, cfg, facts, env)
        bar.update()
    env.leave_table()
    bar.close()
    if env.stopping:
        save_checkpoints(live, step, clock, cfg, facts, env)
    parallel.outlast(env.written)
    if not done:
        env.say(clock.summary(step))
    for s in students:
        of_student = student_facts(s, step, clock, cfg, facts)
        if s.stopped:
            env.say(f"{s.name} stopped at {s.stopped}{how_to_go_on(s, cfg)}")
        elif step < cfg.max_steps:
            env.say(f"{s.name}: stopped by a signal after step {step}; the same command goes on from there")
        elif done:
            env.say(f"{s.name}: trained before; {s.folder / 'model'}")
        else:
            save_model(s, of_student, tokenizer, env)
        if s.stopped or step == cfg.max_steps:
            close_sinks(s, of_student)
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
    eta_sec = clock.eta_sec(step, cfg.max_steps)
    tok_per_sec = clock.line_steps * cfg.batch_rows * cfg.seq_len / clock.line_sec
    used = runlog.mfu(tok_per_sec * run_flops_per_token(len(live), teacher, cfg), env.device, env.world)
    cuda, columns = env.device.type == "cuda", {} if len(cfg.methods) == 1 else dict.fromkeys(cfg.methods, "stopped")
    for s in live:
        terms = {name: value / max(clock.line_valid, 1) for name, value in s.totals().items()}
        record = {
            "step": step,
            "nominal_tokens": step * cfg.batch_rows * cfg.seq_len,
            "valid_tokens": clock.valid_tokens,
            **terms,
            "lr": learning_rate(step - 1, cfg) * s.lr_factor,
            "gnorm": s.gnorm,
            "tok_per_sec": tok_per_sec,
            "mfu": used,
            "mem_gib": torch.cuda.max_memory_allocated(env.device) / 2**30 if cuda else None,
            "eta_sec": eta_sec,
            "time": round(time.time()),  # seconds since 1970
        }
        s.sums = {}
        if env.first:
            s.record(record)
        of = {**terms, "gnorm": s.gnorm} if len(cfg.methods) == 1 else {s.name: terms["ce"]}
        columns |= {key: f"{value:.4f}" for key, value in of.items()}
    if live:
        env.table(runlog.step_text({**record, "lr": learning_rate(step - 1, cfg)}, cfg.max_steps), columns, redraw=True)
    clock.start_line()


def run_flops_per_token(n_students: int, teacher: Teacher | None, cfg: Config) -> float:
    """The run's own arithmetic per token; the teacher counts once."""
    flops = n_students * runlog.flops_per_token(student_shape(cfg), cfg.seq_len, trained=True)
    return flops + (teacher.flops_per_token(cfg.seq_len) if teacher else 0.0)


def log_validation(live: list[Student], found: dict[str, dict], step: int, cfg: Config, env: Env) -> None:
    """One record per student, and one row for each figure."""
    for s in live:
        bad = [name for name, value in found[s.name].items() if not math.isfinite(value)]
        if bad:
            s.stopped = f"step {step}: after its update val_{bad[0]} is not finite; try a smaller lr"
        elif env.first:
            s.record({"step": step, **{f"val_{name}": value for name, value in found[s.name].items()}})
    of = found[live[0].name] if live else {}
    for figure in [key for key in of if not key.startswith("teacher")]:
        values = {name: f"{found[name][figure]:.4f}" if name in found else "stopped" for name in cfg.methods}
        env.table(f"step {step}  val_{figure}", values)
    if "teacher_ce" in of:
        env.say(f"step {step}  teacher: CE {of['teacher_ce']:.4f}, entropy {of['teacher_entropy']:.4f}")


def main() -> None:
    sys.exit(configure.guard(lambda: run(configure.load(sys.argv[1:], method_lines))))


if __name__ == "__main__":
    main()
