"""Fused head and loss: the logits of one forward batch exist at a time, with their gradients.

Written once, around any objective. It never sees a method's name: it is handed a function of
logits.

Dimension key: B rows, T time, D width, V vocabulary, N = group * T positions of a forward batch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lib.checks import IGNORE
from lib.errors import require

Terms = dict[str, Tensor]
Evaluate = Callable[..., tuple[Tensor, Terms, Tensor | None]]


@dataclass
class _Student:
    """One student's operands, and its sums over the forward batches of a call."""

    h_s: Tensor  # [B, T, D]
    w_s: Tensor  # [V, D]
    evaluate: Evaluate
    h: Tensor  # h_s as multiplied
    w: Tensor  # w_s as multiplied
    dh: Tensor | None = None  # [B, T, D] gradient of h_s, if wanted
    dw: Tensor | None = None  # [V, D] gradient of w_s in fp32 or wider, if wanted
    sums: Terms = field(default_factory=dict)  # mean losses by "mean", and the terms


def head_losses(
    students: list[tuple[Tensor, Tensor, Evaluate]],
    h_t: Tensor | None,
    w_t: Tensor | None,
    y: Tensor,
    group: int = 1,
) -> list[tuple[Tensor, Terms]]:
    """Return each student's loss and terms over the forward batches of y.

    students  (h_s [B, T, D_s], w_s [V, D_s], evaluate) each: last hidden states, head weight, and
              evaluate(dtype of the gradient or None, z_s [N, V], z_t [N, V], y [N])
              -> mean loss [], sums of terms with n_valid, gradient of z_s or None; it may overwrite
              z_s
    h_t, w_t  [B, T, D_t], [V, D_t]; None where no student has a teacher
    y         [B, T] labels, IGNORE where not in T_B
    group     rows per forward batch, a divisor of B

    -> per student: loss [], the mean over forward batches, differentiable in h_s and w_s, once; and
       the detached means of its terms over all valid positions. Each student gets the bits that it
       would get alone: the teacher's logits are computed once for all.
    """
    n_rows = y.shape[0]
    require(n_rows % group == 0, f"group={group}: expected a divisor of the {n_rows} sequences")
    n_batches = n_rows // group
    ignored = (y == IGNORE)[..., None]
    if h_t is not None:
        w_t = operand(w_t.detach(), h_t.dtype)
        h_t = operand(h_t.detach().masked_fill(ignored, 0.0), h_t.dtype)
    work = []
    for h_s, w_s, evaluate in students:
        h = operand(h_s.detach().masked_fill(ignored, 0.0), h_s.dtype)
        w = operand(w_s.detach(), h_s.dtype)
        s = _Student(h_s, w_s, evaluate, h, w)
        if torch.is_grad_enabled() and h_s.requires_grad:
            s.dh = torch.zeros_like(h_s)
        if torch.is_grad_enabled() and w_s.requires_grad:
            s.dw = torch.zeros_like(w, dtype=_wide(w_s))
        work.append(s)

    with torch.autocast(y.device.type, enabled=False), torch.no_grad():
        for first in range(0, n_rows, group):
            rows = slice(first, first + group)
            labels = y[rows].flatten()  # [N]
            z_t = None
            if h_t is not None:
                z_t = mm(h_t[rows].flatten(0, 1), w_t.t())  # [N, V] fp32
            for s in work:
                h = s.h[rows].flatten(0, 1)  # [N, D]
                wanted = s.dh is not None or s.dw is not None
                dtype = s.w.dtype if wanted else None  # on a GPU bf16, as under autocast
                loss, sums, dz = s.evaluate(dtype, mm(h, s.w.t()), z_t, labels)
                sums["mean"] = loss * (1 / n_batches)
                for key, value in sums.items():
                    s.sums[key] = s.sums.get(key, 0) + value
                if s.dh is not None:
                    dh = mm(dz, s.w).div_(n_batches)
                    s.dh[rows] = dh.view_as(s.dh[rows]).to(s.dh.dtype)
                if s.dw is not None:
                    mm(dz.t(), h, onto=s.dw, alpha=1 / n_batches)

    results = []
    for s in work:
        loss = _Attach.apply(s.h_s, s.w_s, s.sums.pop("mean"), s.dh, s.dw)
        n_valid = s.sums.pop("n_valid").clamp(min=1)
        results.append((loss, {key: value / n_valid for key, value in s.sums.items()}))
    return results


class _Attach(torch.autograd.Function):
    """Attach gradients that are already computed to a loss.

    They are given away: backward runs once.
    """

    @staticmethod
    def forward(ctx, h_s, w_s, loss, dh, dw):
        ctx.gradients = (dh, dw)
        ctx.dtype = w_s.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.gradients is None:
            problem = "the gradients are freed after the first call"
            raise RuntimeError(f"head_losses: backward() called twice; {problem}")
        dh, dw = ctx.gradients
        ctx.gradients = None
        if dh is not None:
            dh = dh.mul_(g)
        if dw is not None:
            dw = dw.mul_(g).to(ctx.dtype)
        return dh, dw, None, None, None


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden states or a head as multiplied: in the hidden states' dtype.

    On the CPU they are widened to fp32.
    """
    x = x.to(dtype)
    return x if x.is_cuda else x.to(_wide(x))


def mm(a: Tensor, b: Tensor, onto: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """a @ b, accumulated and written in fp32, or alpha times that added onto a tensor.

    fp64 stays fp64.
    """
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(a, b) if onto is None else onto.addmm_(a, b, alpha=alpha)
    if onto is not None and _adds_in_place(a.device, a.dtype):
        return torch.ops.aten.addmm.dtype_out(onto, a, b, torch.float32, alpha=alpha, out=onto)
    product = torch.mm(a, b, out_dtype=torch.float32)
    return product if onto is None else onto.add_(product, alpha=alpha)


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device adds a product of narrow numbers onto fp32 in place.

    It is tried once, where the sum is known.
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
