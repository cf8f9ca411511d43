"""Output head and loss in one: only one forward batch's logits exist at any time.

The gradients of hidden states and head weight are computed along with the loss. This file knows no
method: it is given a function of logits.

Dimension key: B rows, T time, D width, V vocabulary, N = group * T positions of a forward batch.
"""

import functools

import torch
from torch import Tensor

from lib.checks import IGNORE, Batch
from lib.errors import UserError


def head_losses(
    students,
    h_t: Tensor | None,
    w_t: Tensor | None,
    y: Tensor,
    group: int = 1,
    chunk: int = 512,
):
    """Return each student's loss and the means of its terms over the rows of a micro-batch.

    students  for each student (h_s [B, T, D_s], w_s [V, D_s], evaluate): last hidden states, head
              weight, and the function described below
    h_t, w_t  [B, T, D_t], [V, D_t] the teacher's; None if no student has a teacher
    y         [B, T] labels; IGNORE marks ignored positions
    group     rows per forward batch, a divisor of B
    chunk     positions whose logits exist at a time, at most
    ->        for each student its loss [], the mean over forward batches, whose backward may run
              once; and the detached means of its terms over all valid positions

    `evaluate(gradient_dtype, z_s [N, V], z_t [N, V], y [N])` returns the mean loss [], the sums of
    its terms with `n_valid`, and the gradient of z_s (None if gradient_dtype is None). It may
    overwrite z_s. The teacher's logits are computed once for all students, and every student gets
    the same bits as if it were alone.
    """
    n_rows = y.shape[0]
    if n_rows % group:
        raise UserError(f"group={group}: expected a divisor of the {n_rows} rows")
    ignored = (y == IGNORE)[..., None]
    if h_t is not None:
        h_t, w_t = operands(h_t, w_t, ignored)
    heads = [_Head(*student, ignored) for student in students]
    with torch.autocast(y.device.type, enabled=False), torch.no_grad():
        for first in range(0, n_rows, group):
            rows = slice(first, first + group)
            labels = y[rows].flatten()  # [M]
            valid = labels != IGNORE
            size = len(labels)
            if len(labels) > chunk and all(head.has_chunks for head in heads):
                size = chunk
            places = torch.arange(len(labels), device=y.device).split(size)

            def teacher_logits(here, rows=rows):
                if h_t is None:
                    return None
                return mm(h_t[rows].flatten(0, 1)[here], w_t.t())  # [N, V] fp32

            if len(places) == 1:
                z_t = teacher_logits(places[0])
                for head in heads:
                    head.add(rows, places[0], z_t, labels, n_rows // group)
                continue
            statistics = [[] for _ in heads]
            if any(head.has_statistic for head in heads):
                for here in places:
                    z_t = teacher_logits(here)
                    for head, values in zip(heads, statistics, strict=True):
                        if head.has_statistic:
                            values.append(head.statistic(rows, here, z_t, labels))
            for here in places:
                z_t = teacher_logits(here)
                for head, values in zip(heads, statistics, strict=True):
                    settings = {"n": valid.sum()}
                    if values:
                        settings["batch"] = Batch(torch.cat(values), valid, here)
                    head.add(rows, here, z_t, labels, n_rows // group, **settings)
    return [head.result() for head in heads]


class _Head:
    """One student's operands and gradients, and its sums over the forward batches of a call.

    h_s, w_s  [B, T, D], [V, D] last hidden states and head weight
    evaluate  the student's objective, as in `head_losses`
    ignored   [B, T, 1] whether a position has no label
    h, w      h_s and w_s in the dtype of the products; h is 0 at ignored positions
    dh, dw    [B, T, D], [V, D] gradients, dw in fp32 or wider; None where none is needed
    sums      the mean losses under "mean", and the sums of terms
    """

    def __init__(self, h_s, w_s, evaluate, ignored):
        self.h_s = h_s
        self.w_s = w_s
        self.evaluate = evaluate
        method = getattr(evaluate, "method", None)  # a random objective has none
        self.has_chunks = method is not None and method.statistic is not None
        self.has_statistic = self.has_chunks and bool(method.statistic)
        self.h, self.w = operands(h_s, w_s, ignored)
        self.dh = None
        self.dw = None
        self.sums = {}
        if torch.is_grad_enabled() and h_s.requires_grad:
            self.dh = torch.zeros_like(h_s)
        if torch.is_grad_enabled() and w_s.requires_grad:
            self.dw = torch.zeros_like(self.w, dtype=_wide(w_s))

    def statistic(self, rows, here, z_t, labels):
        """Return the objective's statistic of the positions `here`, [N]."""
        h = self.h[rows].flatten(0, 1)[here]
        return self.evaluate.statistic(mm(h, self.w.t()), z_t, labels[here])

    def add(self, rows, here, z_t, labels, n_batches, **settings):
        """Add a chunk of one of `n_batches` forward batches.

        rows    slice of the rows of h_s
        here    [N] places of the chunk in the forward batch
        z_t     [N, V] the teacher's logits, or None
        labels  [M] of the forward batch
        """
        h = self.h[rows].flatten(0, 1)[here]  # [N, D]
        gradient_dtype = None
        if self.dh is not None or self.dw is not None:
            gradient_dtype = self.w.dtype  # on a GPU bf16, as under autocast
        z_s = mm(h, self.w.t())
        loss, sums, dz = self.evaluate(gradient_dtype, z_s, z_t, labels[here], **settings)
        del z_s
        sums["mean"] = loss * (1 / n_batches)
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0) + value
        if self.dh is not None:
            dh = mm(dz, self.w).div_(n_batches)
            self.dh[rows].view(-1, dh.shape[1])[here] = dh.to(self.dh.dtype)
        if self.dw is not None:
            add_mm(self.dw, dz.t(), h, 1 / n_batches)

    def result(self):
        """Return the loss with its gradients attached, and the means of its terms."""
        loss = _Attach.apply(self.h_s, self.w_s, self.sums.pop("mean"), self.dh, self.dw)
        n_valid = self.sums.pop("n_valid").clamp(min=1)
        return loss, {key: value / n_valid for key, value in self.sums.items()}


class _Attach(torch.autograd.Function):
    """Attach gradients that are already computed to a loss.

    They are freed after use; backward may run only once.
    """

    @staticmethod
    def forward(ctx, h_s, w_s, loss, dh, dw):
        ctx.gradients = (dh, dw)
        ctx.dtype = w_s.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.gradients is None:
            raise RuntimeError(
                "head_losses: backward() called twice; the gradients are freed after the first call"
            )
        dh, dw = ctx.gradients
        ctx.gradients = None
        if dh is not None:
            dh = dh.mul_(g)
        if dw is not None:
            dw = dw.mul_(g).to(ctx.dtype)
        return dh, dw, None, None, None


def operands(h: Tensor, w: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and head for `mm`, with hidden states of 0 at ignored positions."""
    h = h.detach().masked_fill(ignored, 0.0)
    return operand(h, h.dtype), operand(w.detach(), h.dtype)


def operand(x: Tensor, dtype) -> Tensor:
    """Cast hidden states or a head for `mm`: to `dtype`, on the CPU to fp32 or wider."""
    x = x.to(dtype)
    return x if x.is_cuda else x.to(_wide(x))


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, accumulated and written in fp32. fp64 stays fp64."""
    if a.dtype.itemsize > 2:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def add_mm(total: Tensor, a: Tensor, b: Tensor, alpha: float):
    """Add alpha times a @ b onto `total`, accumulated in fp32 or wider."""
    if a.dtype.itemsize > 2:
        total.addmm_(a, b, alpha=alpha)
    elif _adds_in_place(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, alpha=alpha, out=total)
    else:
        total.add_(mm(a, b), alpha=alpha)


@functools.cache
def _adds_in_place(device, dtype) -> bool:
    """Whether the device can add a product of bf16 or fp16 matrices onto an fp32 matrix in place.

    Tried once per device and dtype, on a product whose sum is known.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    onto = torch.full((16, 16), 1 + 2**-20, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(onto, ones, ones, torch.float32, alpha=0.5, out=onto)
        return torch.equal(onto, torch.full_like(onto, 9 + 2**-20))  # exact in fp32 alone
    except RuntimeError:  # no such kernel
        return False


def _wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
