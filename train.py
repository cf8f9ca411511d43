"""Train one or more students by distillation from one teacher, with AdamW.

    python train.py config/alra_200m.py [--key=value ...]
    torchrun --nproc_per_node=2 train.py config/alra_200m.py

The same command resumes a run from its newest checkpoint. Ctrl-C and signals such as SIGTERM end
the run after the current update: it saves a checkpoint and exits with code 75 (run/exits.py). The
teacher's forward pass is computed once for all students. run/checkpoints.py describes the folder of
a run.

Dimension key: B rows, T time, D width.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import configure

if __name__ == "__main__":
    configure.check_flags()

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lib import parallel
from lib.device import pick_device
from lib.errors import UserError
from lib.files import locked
from lib.head import weight_of
from lib.hf import weights_hash
from lib.rows import read_ahead, row_order
from lib.vocab import IGNORE
from run import exits, startup
from run.checkpoints import (
    check_methods,
    finish_saving,
    read_folder,
    resume,
    save_checkpoints,
    save_model,
    stop_diverged,
    wait_for_writer,
)
from run.log import (
    UNWRITTEN,
    log_terms,
    log_validation,
    say,
    write_waiting,
)
from run.methods import compute_dtype, head_losses, make_method, method_at, method_lines
from run.provenance import student_shape
from run.startup import open_teacher
from run.students import Run, Student
from run.teacher import compile_layers, load_model, mask_documents
from run.validate import validate

# ----------------------------------------------------------------------------------------------
# rows


def micro_batches(rows, teacher, steps: Iterable[int], cfg):
    """Yield this process's micro-batches of the updates `steps`.

    A micro-batch is a tuple: inputs x [B, T], labels y [B, T] (IGNORE for padding), and the
    teacher's last hidden states [B, T, D_t] (None without a teacher). A thread reads the rows
    ahead, while the caller's runs the teacher.
    """
    for x, y, index in read_ahead(read_rows(rows, steps, cfg)):
        yield x, y, teacher.hidden(x, rows, index) if teacher else None


def read_rows(rows, steps: Iterable[int], cfg):
    """Yield x, y and the rows' indices [B] of each micro-batch.

    The rows of an update depend on no earlier one.
    """
    shuffle_seed = cfg.seed if cfg.shuffle else None
    for step in steps:
        order = row_order(step - rows.first_row_step, cfg.batch_rows, rows.n, shuffle_seed)
        world = parallel.world()
        n_micro = cfg.batch_rows // cfg.micro_batch // world
        for index in order.reshape(world, n_micro, cfg.micro_batch)[parallel.rank()]:
            yield *rows.batch(index, torch.device(cfg.device)), index


def timed(batches: Iterable, run) -> Iterator:
    """Yield the batches. The time that they take is added to the run's `wait_sec`."""
    began = time.perf_counter()
    for batch in batches:
        run.wait_sec += time.perf_counter() - began
        yield batch
        began = time.perf_counter()


# ----------------------------------------------------------------------------------------------
# students


def make_student(name, cfg, tokenizer=None, teacher=None) -> Student:
    """Build a student and its optimizer. All students of a run start from the same weights.

    Other optimizers, and parameter groups with an lr of their own, are welcome: `update` multiplies
    each group's initial lr by the schedule.

    teacher  gives its width to the method's `term`, if there is one
    """
    dtype = compute_dtype(cfg)
    model = initial_model(cfg)
    if cfg.mask_documents:
        mask_documents(model, cfg.student, tokenizer.eos_token_id)
    init_sha256 = weights_hash(model)
    torch.manual_seed(cfg.seed)  # for the initial weights of the method's modules
    method = make_method(name, cfg, len(model.head))
    extras = nn.ModuleDict()
    if isinstance(method.fn, nn.Module):
        extras["objective"] = method.fn
    if method.term:
        d_s = weight_of(model.head).shape[1]
        d_t = weight_of(teacher.head).shape[1]
        extras["term"] = method.term(d_s, d_t)
    if cfg.compile:
        compile_layers(model)
    if cfg.shard > 1:
        if list(extras.parameters()):
            raise UserError(
                f"shard={cfg.shard}: {name} trains parameters beside the student's; set shard=1"
            )
        parallel.shard(model, cfg.shard, torch.device(cfg.device), dtype)
    model.to(cfg.device)
    extras.to(cfg.device)

    decayed = {"params": [], "weight_decay": cfg.weight_decay}
    others = {"params": [], "weight_decay": 0.0}
    for p in (*model.parameters(), *extras.parameters()):
        group = decayed if cfg.decay_1d or p.ndim > 1 else others
        group["params"].append(p)
    betas = (cfg.beta1, cfg.beta2)
    groups = [decayed] if cfg.decay_1d else [decayed, others]
    optimizers = [torch.optim.AdamW(groups, cfg.lr_of(name), betas, cfg.adam_eps, fused=True)]

    return Student(
        name=name,
        model=model,
        extras=extras,
        optimizers=optimizers,
        folder=Path(cfg.out_dir) / name,
        init_sha256=init_sha256,
        method=method,
        tokenizer=tokenizer,
        dtype=dtype,
    )


def initial_model(cfg):
    """Return a model with the weights that every student starts from, in fp32 on the CPU.

    They are drawn from the seed, or read from `student_weights`.
    """
    shape = student_shape(cfg)
    if cfg.student_weights is None:
        model = shape.draw(cfg.seed)
    else:
        model = load_model(cfg.student_weights, as_student=True)
        model.cut(shape.vocab_size)  # it may have padding beyond the vocabulary
    if model.config != shape:
        raise UserError(
            f"student_weights={cfg.student_weights}: not of the shape of student={cfg.student}; "
            "set both"
        )
    return model.requires_grad_(True).train()


# ----------------------------------------------------------------------------------------------
# one update, and the loop around it


def update(students, teacher, stream: Iterator, step, cfg) -> float:
    """Make one optimizer step of every student. Returns the number of labels of this process.

    An update has `batch_rows` rows, divided over the processes. A process runs the models on
    `micro_batch` rows at a time, and an objective sees `group` of these: the paper's forward batch.
    Losses are means over its labels, then over all forward batches of the update, so micro-batches
    and processes do not change them.

    From here to an objective: `head_losses` (run/methods.py) calls `HeadLoss.add` for one or more
    forward batches, which calls `evaluate` for loss and gradient, `mean_loss` and the objective.
    """
    head_t = teacher.head if teacher else None
    n_micro = cfg.batch_rows // cfg.micro_batch  # of all processes together
    n_each = n_micro // parallel.world()
    methods = [method_at(s, step, cfg) for s in students]
    n_valid = 0
    for i in range(n_each):
        x, y, h_t = next(stream)
        inputs = []
        for s, method in zip(students, methods, strict=True):
            # of models that draw random numbers, as for dropout
            torch.manual_seed(hash((cfg.seed, step, parallel.rank() * n_each + i)))
            h = s.model.hidden(x, cfg.recompute, s.dtype)
            inputs.append((h, s.model.head, method))  # `hidden` gathers a sharded head
        # runs the heads forward and backward, with the logits of some positions at a time
        results = head_losses(inputs, h_t, head_t, y, cfg.group, cfg.compile, cfg.chunk_positions)
        for s, (h, *_), (loss, sums) in zip(students, inputs, results, strict=True):
            if s.method.term:
                loss = loss + term_of(s, h, h_t, y, cfg.group)
            # `head_losses` has computed the gradients of h_s and of the head already. Backward
            # divides them by n_micro, and goes on from h_s through the layers.
            (loss / n_micro).backward()
            for key, value in sums.items():  # over the labels of these rows
                s.sums[key] += value.double()
        n_valid += (y != IGNORE).sum()
    for s in students:
        for p in s.trained:
            if p.grad is None and p.requires_grad:  # as of a layer that this process has skipped
                p.grad = torch.zeros_like(p)
        if n_each < n_micro:
            parallel.sum_gradients(s.trained)
    norms = [clip_gradients(s.trained, cfg.clip) for s in students]
    *norms, n_valid = torch.stack([*norms, n_valid.float()]).tolist()  # the one wait for the device
    rate = learning_rate(step, cfg)
    for s, norm in zip(students, norms, strict=True):
        s.gnorm = norm
        if s.state:
            advance_state(s)
        if math.isfinite(norm):
            for optimizer in s.optimizers:
                for group in optimizer.param_groups:
                    # `initial` (run/students.py) has the options that the group was made with
                    group["lr"] = rate * (group["initial"]["lr"] / cfg.lr)
                optimizer.step()
            s.skipped = 0
        else:
            count_skipped_update(s, step, cfg)
        for optimizer in s.optimizers:
            optimizer.zero_grad()
    return n_valid


def loop(run, rows, val, teacher, students):
    """Train until `max_steps` is reached, a signal arrives, or every student has stopped.

    A checkpoint comes last in a step, so that it is never ahead of the log.
    """
    cfg = run.cfg
    if cfg.histogram_every_steps:
        from run.histograms import log_histograms  # few runs need it
    live = resume(students, run)
    stream = micro_batches(rows, teacher, range(run.step, cfg.max_steps), cfg)
    if teacher and teacher.is_stored:  # no model runs, so a thread may look up ahead
        stream = read_ahead(stream)
    stream = timed(stream, run)
    is_hidden = parallel.rank() > 0 or None  # None: unless on a terminal
    bar = tqdm(total=cfg.max_steps, initial=run.step, unit="step", disable=is_hidden)
    run.start_clock()
    exits.TRAINING.append(run)  # signals wait for the end of an update once the first is done

    while run.step < cfg.max_steps and live and not run.stop:
        if teacher and cfg.histogram_every_steps and run.step % cfg.histogram_every_steps == 0:
            by_forward_batch = dataclasses.replace(cfg, micro_batch=cfg.group)
            batches = micro_batches(rows, teacher, [run.step], by_forward_batch)
            log_histograms(live, teacher, batches, run)

        n_valid = update(live, teacher, stream, run.step, cfg)
        run.count_update(n_valid, exits.must_stop(live))
        validation_is_due = run.is_due(cfg.val_every_steps)
        live = stop_diverged(live, run, check_weights=run.save or validation_is_due)

        if live and run.is_due(cfg.log_every_steps):
            log_terms(live, teacher, learning_rate(run.step - 1, cfg), run)
        if live and validation_is_due:
            log_validation(live, validate(live, teacher, val, cfg), val, run)
        if live and (run.save or run.stop):
            save_checkpoints(live, run)
        if run.step == run.first_step + 1:
            run.began = time.perf_counter()  # for the ETA: the first update may compile
        bar.update()
    bar.close()
    finish_saving(run)
    parallel.on_first(write_waiting)


# ----------------------------------------------------------------------------------------------
# what the update calls


def learning_rate(step, cfg) -> float:
    """Return the learning rate of update `step`, counted from 0.

    It rises linearly to `lr` at the last warm-up update. After that it follows `lr_schedule`, up to
    the end of the `schedule_steps` updates that a run can have at most. A student with a rate of
    its own (METHOD.lr) has this schedule times METHOD.lr / `lr`:

    cosine    falls to `min_lr` at the schedule's last update
    wsd       stays at `lr`, then falls linearly to `min_lr`; the fall takes the last `decay_share`
              of the schedule
    constant  stays at `lr`

    Your own goes here, and in no other place.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.lr_schedule == "constant":
        return cfg.lr
    if cfg.lr_schedule == "wsd":
        left = cfg.schedule_steps - step - 1
        height = min(left / (cfg.decay_share * cfg.schedule_steps), 1.0)
    elif cfg.lr_schedule == "cosine":
        part = (step + 1 - cfg.warmup_steps) / (cfg.schedule_steps - cfg.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * part))
    else:
        raise UserError(f"lr_schedule={cfg.lr_schedule}: expected cosine, wsd or constant")
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * height


def clip_gradients(parameters, max_norm: float) -> Tensor:
    """Scale all gradients by one factor, so that their common norm is at most `max_norm`.

    Returns the norm before scaling, in fp32. The squares are added in fp64, since torch's fp32 norm
    loses accuracy on the CPU: it is up to 2 % off for 67M equal elements.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(grads, 2, torch.float64)
    norm = parallel.full_tensor(torch.linalg.vector_norm(torch.stack(norms))).float()
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def term_of(s, h_s, h_t, y, group: int) -> Tensor:
    """Return the mean of a student's own term over the forward batches of a micro-batch."""
    batches = zip(h_s.split(group), h_t.split(group), y.split(group), strict=True)
    terms = torch.stack([s.extras["term"](*batch) for batch in batches])
    n_valid = (y != IGNORE).view(len(terms), -1).sum(-1)
    s.sums["term"] += terms.detach().double() @ n_valid.double()  # the log has means over labels
    return terms.mean()


def advance_state(s):
    """Replace the state of an objective by the mean of what its forward batches left.

    The mean is over the labels of the update, on all processes. A skipped update changes nothing.
    """
    n = s.sums.pop("state.")
    # what they left, each times its number of labels, added up
    left = {key: s.sums.pop(f"state.{key}") for key in s.state}
    if not math.isfinite(s.gnorm):
        return
    parallel.sum_in_place([n, *left.values()])
    for key, value in s.state.items():
        value.copy_(torch.where(n > 0, left[key] / n, value))


def count_skipped_update(s, step, cfg):
    """Count an update whose gradient is not finite. After too many in a row the student stops."""
    # `s.sums` covers all updates since the last log entry: a term that was bad in an earlier one is
    # named too
    bad_terms = [name for name, value in s.totals().items() if not math.isfinite(value)]
    causes = ", ".join(bad_terms) or "the gradient alone"
    reason = f"gradient norm {s.gnorm}, not finite: {causes}"
    s.skipped += 1
    say(f"{s.name}, step {step + 1}: skipped the update, {s.skipped} in a row; {reason}")
    if s.skipped > cfg.max_skipped_updates:
        s.stopped = f"{s.skipped} updates in a row skipped; {reason}"


# ----------------------------------------------------------------------------------------------
# a whole run


def distil(cfg) -> int:
    """Train the students of a config and return the exit code.

    The code is TRY_AGAIN after a signal; else 1 if a student stopped, 0 if all reached the end.
    """
    UNWRITTEN.clear()  # lines left over from an earlier run in this process
    cfg = dataclasses.replace(cfg, device=str(pick_device(cfg.device)))
    parallel.start(torch.device(cfg.device), cfg.timeout_minutes)
    lock = locked(
        Path(cfg.out_dir),
        f"out_dir={cfg.out_dir}: another train.py is running there; wait until it ends, or choose "
        "another out_dir",
    )
    with contextlib.ExitStack() as stack:
        parallel.on_first(stack.enter_context, lock)  # process 0 holds it for all
        stack.callback(wait_for_writer)  # whatever ends the run, and before the lock is released
        parallel.on_first(check_methods, cfg)  # before anything is written there
        stack.enter_context(exits.reported(cfg))
        startup.check_config(cfg)
        share = cfg.batch_rows // parallel.world()  # rows of this process in an update
        # lowered to a divisor of the share, so that all micro-batches have the same size
        micro_batch = math.gcd(share, cfg.micro_batch or share)
        chunk = startup.positions_at_once(cfg)
        code = train_students(
            dataclasses.replace(cfg, micro_batch=micro_batch, chunk_positions=chunk)
        )
    parallel.stop()  # not after an error: it may wait for a process that is lost
    return code


def train_students(cfg) -> int:
    """Check the inputs, train, and save the models. Returns the exit code."""
    rows = startup.open_data(cfg, "train")
    val = startup.open_data(cfg, "val")
    tokenizer = startup.checked_tokenizer(cfg, rows, val)
    run = Run(cfg, startup.run_facts(cfg, rows, val))
    run.found = parallel.on_first(read_folder, run)
    last_rate = learning_rate(cfg.schedule_steps - 1, cfg)  # refuses an unknown schedule
    rate = learning_rate(cfg.max_steps - 1, cfg)
    if rate != last_rate:
        say(
            f"max_steps={cfg.max_steps}: the rate ends at {rate:.1e} of {cfg.lr:.1e}; to end at "
            f"{last_rate:.1e} set schedule_steps too"
        )
    if cfg.compile:
        say("compiling the models: the first update may take minutes")
    teacher = open_teacher(cfg, rows, val)
    students = [make_student(name, cfg, tokenizer, teacher) for name in cfg.methods]
    loop(run, rows, val, teacher, students)
    for s in students:
        if not s.stopped and not run.stop:
            save_model(s, run)
    return exits.exit_code(students, run)


def main(argv) -> int:
    return distil(configure.load(argv, method_lines))


if __name__ == "__main__":
    configure.run(main)
