"""How training calls the methods of losses.py.

This file schedules their settings, seeds random objectives, and compiles a method's loss together
with its gradient.

Dimensions: N positions, V vocabulary.
"""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from lib import parallel
from lib.head import AttachGradients, Head, OutputHead, add_mm, mm
from lib.torch_setup import mend_compiler
from lib.vocab import IGNORE
from losses import (
    METHODS,
    Method,
    built,
    default_settings,
    mean_loss,
    resolve,
    with_given,
)

# ----------------------------------------------------------------------------------------------
# names and settings


def scheduled_settings(method, step, n_steps: int) -> dict[str, float]:
    """Return the settings that change during a run, with their values in update `step`."""
    return {key: value_at(step / n_steps) for key, value_at in method.moving.items()}


def method_lines() -> list[str]:
    """Return the lines of `--help`: each objective with its settings, and its methods."""
    first = "methods; --METHOD.SETTING=VALUE sets a setting of its objective, or w_kd, w_ce, lr"
    lines = {}  # of each objective: its own line, then those of its methods
    for name, row in METHODS.items():
        defaults = [f"{key}={value}" for key, value in default_settings(row.fn, row.term).items()]
        objective = f"    {getattr(row.fn, 'func', row.fn).__name__}: {', '.join(defaults)}"
        method = f"        {name}: w_kd={row.w_kd}, w_ce={row.w_ce} {row.hyper or ''}"
        lines.setdefault(objective, [objective]).append(method)
    return [first, *itertools.chain(*lines.values())]


# ----------------------------------------------------------------------------------------------
# what a training step calls


def compute_dtype(cfg) -> torch.dtype:
    """Return the dtype of activations and products."""
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "bfloat16" if cfg.device.startswith("cuda") else "float32"
    return getattr(torch, dtype)


def make_method(name, cfg, n_vocab: int) -> Method:
    """Return a student's method with the settings of its config, for a vocabulary of `n_vocab`."""
    method = resolve(name, **cfg.overrides_of(name))
    given = {"n_vocab": n_vocab, "n_sequences": cfg.group}
    return built(with_given(method, **given, generator=None))  # `method_at` puts one there


def method_at(s, step, cfg) -> Method:
    """Return the method of a student in update `step`, with its moving settings."""
    method = s.method
    now = {}
    for key, value in scheduled_settings(method, step, cfg.schedule_steps).items():
        # A tensor, so that one compiled graph serves every value. `torch.full` avoids a blocking
        # host-to-device copy.
        now[key] = torch.full((), value, dtype=torch.float64, device=cfg.device)
    if "w_kd" in now:
        w_kd = now.pop("w_kd")
        method = method._replace(w_kd=w_kd, w_ce=1.0 - w_kd)
    if "generator" in method.hyper:
        now["generator"] = seeded_generator(s.name, step, cfg)
    return method._replace(hyper=method.hyper | now)


def seeded_generator(name, step, cfg) -> torch.Generator:
    """Return the generator of a student's random numbers in update `step`.

    It is seeded for this process's first forward batch; `HeadLoss.add` seeds it for the next.
    Seeds depend on a forward batch's place in the update, and not on how the update is divided into
    micro-batches and processes. Students METHOD@LABEL of one method have the same random numbers.
    """
    first_row = parallel.rank() * cfg.batch_rows // parallel.world()
    method = name.partition("@")[0]
    seed = random.Random(f"{cfg.seed} {step} {method}").getrandbits(62) + first_row // cfg.group
    return torch.Generator(cfg.device).manual_seed(seed)


def head_losses(students, h_t, w_t, y, group=1, compile=False, chunk=512):
    """Return each student's loss and the sums of its terms over the rows of a micro-batch.

    students  for each student (h_s [B, T, D_s], w_s [V, D_s], method): last hidden states, head
              weight or `OutputHead`, and `Method`
    h_t, w_t  [B, T, D_t], [V, D_t] the teacher's, likewise; None if no student has a teacher
    y         [B, T] labels; IGNORE marks ignored positions
    group     rows per forward batch, a divisor of B
    compile   use torch.compile: one graph per method, settings and shape; not for random objectives
              and modules
    chunk     positions whose logits exist at a time, at most: those of several forward batches, or,
              if the method is `in_chunks`, of a part of one
    ->        for each student its loss [], the mean over forward batches, whose backward may run
              once; and the detached sums of its terms over all valid positions

    All students share the teacher's logits, and each gets the same bits as if it were alone.
    """
    y = y.reshape(-1, group * y.shape[1])
    n_batches, size = y.shape  # size: positions of a forward batch
    n_valid = (y != IGNORE).sum(-1).clamp(min=1).repeat_interleave(size)  # [B * T]
    y = y.flatten()
    n = chunk // size * size or size  # positions of the forward batches in one pass
    while len(y) % n:  # as many in each pass: one shape, which compiles once
        n -= size
    with torch.autocast(y.device.type, enabled=False), torch.no_grad():
        teacher = None if h_t is None else Head(h_t, w_t)
        heads = [
            HeadLoss(h, w, with_given(method, batch=size), y, n_valid, compile)
            for h, w, method in students
        ]
        divided = [head for head in heads if head.method.in_chunks and size > chunk]
        whole = [head for head in heads if head not in divided]
        for first in range(0, len(y), n):
            here = slice(first, first + n)
            if whole:
                z_t = teacher and teacher.logits(here)
                for head in whole:
                    m = n if head.method.in_chunks else size  # positions of one call
                    for i in range(0, n, m):
                        head.add(slice(first + i, first + i + m), teacher and z_t[i : i + m])
                del z_t  # before those of a chunk are computed
            if divided:
                add_chunks(divided, teacher, y, here, chunk, compile)
    return [  # losses and gradients are sums over the forward batches, to be divided
        (AttachGradients.apply(head.loss, head.gradients, *head.inputs) / n_batches, head.sums)
        for head in heads
    ]


def add_chunks(heads, teacher, y, batch: slice, chunk, compile):
    """Add a forward batch to the students' losses, `chunk` positions at a time.

    An objective that takes `batch` is called twice, first for what it gives to `over_batch`.
    """
    first = range(batch.start, batch.stop, chunk)
    chunks = [slice(i, min(i + chunk, batch.stop)) for i in first]
    given_of = compiled(given_over_batch, y.device.type) if compile else given_over_batch
    given = {head: [] for head in heads if "batch" in head.method.hyper}
    if given:
        for here in chunks:
            z_t = teacher and teacher.logits(here)
            for head, of_chunks in given.items():
                z_s = head.logits(here)
                of_chunks += given_of(head.method, z_s, z_t, y[here])
                del z_s
            del z_t  # before those of the next chunk are computed
    results = {}
    for head, of_chunks in given.items():
        if of_chunks:  # settings like TAD's norm="unit" need none
            fn, *_ = of_chunks
            values = torch.cat(of_chunks[1::2])
            results[head] = fn(values, y[batch] != IGNORE).split(chunk)
    for i, here in enumerate(chunks):
        z_t = teacher and teacher.logits(here)
        for head in heads:
            if head in results:
                head.method = with_given(head.method, batch=results[head][i])
            head.add(here, z_t)
        del z_t


class HeadLoss(Head):
    """One student in `head_losses`: its head, its method, and what is added up over positions.

    inputs     of the head; and the parameters of an objective that is a module
    gradients  of the inputs: dh [B * T, D], dw [V, D] in fp32 or wider (None before the first
               positions), and those of parameters
    loss       [] sum of the forward batches' mean losses
    sums       of the method's terms
    n_valid    [B * T] number of valid positions in each position's forward batch, at least 1

    `here` is a slice of the B * T positions of the micro-batch.
    """

    def __init__(self, h, w, method, y, n_valid, compile):
        super().__init__(h, w)
        # so that no NaN at an ignored position reaches dw
        self.h = self.h.masked_fill((y == IGNORE)[:, None], 0.0)
        self.gradients = [torch.zeros_like(self.h), None]
        self.loss = 0.0
        self.sums = Counter()
        self.y = y
        self.n_valid = n_valid
        self.method = method
        self.evaluate = evaluate
        if isinstance(method.fn, nn.Module):
            parameters = tuple(p for p in method.fn.parameters() if p.requires_grad)
            self.inputs += parameters
            self.gradients += map(torch.zeros_like, parameters)
            self.evaluate = evaluate_module
        elif compile and "generator" not in method.hyper:
            self.evaluate = compiled(evaluate, y.device.type)

    def add(self, here, z_t):
        """Add loss and gradients of the positions `here`: forward batches, or a chunk of one."""
        z_s = self.logits(here).requires_grad_()
        loss, sums, dz, *gradients = self.evaluate(
            self.method,
            self.w.dtype,
            z_s,
            z_t,
            self.y[here],
            self.n_valid[here],
            *self.inputs[2:],
        )
        if isinstance(self.head, OutputHead):
            dz = self.head.before_cap(dz, z_s)
        del z_s
        self.gradients[0][here] = mm(dz, self.w)
        # dw does not exist before its first sum: the objective needs the memory
        self.gradients[1] = add_mm(self.gradients[1], dz.t(), self.h[here])
        if gradients:
            torch._foreach_add_(self.gradients[2:], gradients)
        self.loss += loss
        self.sums.update(sums)  # adds
        generator = self.method.hyper.get("generator")
        if generator:
            generator.manual_seed(generator.initial_seed() + 1)


# Settings of torch's Inductor that suit tensors of [N, V]. By default it reorders the block sums of
# two losses, which then need a pass each, and stores results that are cheap to compute again. ALRA
# then reads and writes 2.4 GB instead of 1.4 at N = 512, V = 151,936, and RLD 4.5 instead of 1.4.
FEWER_PASSES = {
    "reorder_for_locality": False,
    "realize_reads_threshold": 6,
    "realize_opcount_threshold": 55,
}


@functools.cache
def compiled(fn, device_type) -> Callable:
    """Return a compiled function, the same one each time. Sets options of torch._dynamo."""
    # torch counts recompilations per function, and all methods share `fn`
    torch._dynamo.config.recompile_limit = 256
    # forward and backward are one graph, so that no [N, V] tensor is saved between them
    torch._dynamo.config.trace_autograd_ops = True
    mend_compiler()
    options = FEWER_PASSES if device_type == "cuda" else None
    return torch.compile(fn, dynamic=False, fullgraph=True, options=options)


def evaluate(method, dtype: torch.dtype, z_s, z_t, y, n, *parameters):
    """Return what `mean_loss` returns, detached, and the gradients in z_s and in the parameters.

    The gradient in z_s, which must require it, is cast to `dtype`. Parameters are those of an
    objective that is a module. Other arguments are those of `mean_loss`.
    """
    with torch.enable_grad():
        loss, sums = mean_loss(method, z_s, z_t, y, n)
    inputs = (z_s, *parameters)  # of which the loss may leave out some
    dz, *gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return loss.detach(), sums, dz.to(dtype), *gradients


def evaluate_module(method, dtype, z_s, z_t, y, n, *parameters):
    """Return what `evaluate` returns, for an objective that is a module.

    Its buffers stay as they are, as every forward batch of an update begins with them. What the
    objective leaves in a buffer KEY is in the sums under "state.KEY", times the number of valid
    positions, and that number under "state.", so that their quotient is its mean.
    """
    state = {key: buffer.clone() for key, buffer in method.fn.named_buffers()}

    def objective(*inputs, **keywords):
        return torch.func.functional_call(method.fn, state, inputs, keywords)

    called = method._replace(fn=objective)
    loss, sums, *gradients = evaluate(called, dtype, z_s, z_t, y, n, *parameters)
    n_valid = (y != IGNORE).sum().double()
    if state:
        sums["state."] = n_valid
    for key, value in state.items():
        sums[f"state.{key}"] = torch.where(n_valid > 0, value.detach().double() * n_valid, 0.0)
    return loss, sums, *gradients


@torch.no_grad()
def given_over_batch(method, z_s, z_t, y) -> list:
    """Return function and values [N] that an objective gives to `over_batch`, if it does."""
    given = []
    method.fn(z_s, z_t, y, **method.hyper | {"batch": given})
    return given
