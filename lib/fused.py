"""Fused head and loss: the logits of one forward batch exist at a time, and their gradients are computed at once.

Written once, around any objective. It never sees a method's name: it is handed a function of logits.

Dimension key: B rows, T time, D width, V vocabulary, N = group * T positions of a forward batch.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lib.checks import IGNORE
from lib.errors import require

Terms = dict[str, Tensor]
Evaluate = Callable[[torch.dtype | None, Tensor, Tensor | None, Tensor], tuple[Tensor, Terms, Tensor | None]]


def head_losses(
    students: list[tuple[Tensor, Tensor, Evaluate]], h_t: Tensor | None, w_t: Tensor | None, y: Tensor, group: int = 1
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Each student's loss and terms over the forward batches of y; the teacher's logits are computed once for all.

    students  (h_s [B, T, D_s], w_s [V, D_s], evaluate) each: last hidden states, head weight, and
              evaluate(dtype of the gradient or None, z_s [N, V], z_t [N, V], y [N])
              -> mean loss [], sums of terms with n_valid, gradient of z_s or None; it may overwrite z_s
    h_t, w_t  [B, T, D_t], [V, D_t]; None where no student has a teacher
    y         [B, T] labels, IGNORE where not in T_B
    group     rows per forward batch, a divisor of B

    -> per student: loss [], the mean over forward batches, differentiable in h_s and w_s, once; and the detached means
       of its terms over all valid positions. Each student gets the bits that it would get alone.
    """
    require(y.shape[0] % group == 0, f"group={group}: expected a divisor of the {y.shape[0]} sequences")
    n_batches = y.shape[0] // group
    teacher = None if h_t is None else _operands(h_t, w_t, y)
    work = [_Work.begin(*student, y) for student in students]
    with torch.autocast(y.device.type, enabled=False), torch.no_grad():
        for rows in (slice(i * group, (i + 1) * group) for i in range(n_batches)):
            z_t = None if teacher is None else _logits(*teacher, rows)  # [N, V] fp32
            labels = y[rows].flatten()  # [N]
            for s in work:
                wanted = None if s.dh is None and s.dw is None else s.w.dtype  # on a GPU bf16, as under autocast
                loss, sums, dz = s.evaluate(wanted, _logits(s.h, s.w, rows), z_t, labels)
                for key, value in {"mean": loss * (1 / n_batches), **sums}.items():
                    s.sums[key] = s.sums.get(key, 0) + value
                if wanted:
                    _add_gradients(s, dz, rows, n_batches)
    return [_finish(s) for s in work]


class _Work(NamedTuple):
    """One student's operands, and its sums over the forward batches of a call."""

    inputs: tuple[Tensor, Tensor]  # h_s, w_s as they came
    h: Tensor  # [B, T, D] as multiplied
    w: Tensor  # [V, D] as multiplied
    evaluate: Evaluate
    dh: Tensor | None  # [B, T, D] gradient of h_s, where wanted
    dw: Tensor | None  # [V, D] gradient of w_s in fp32 or wider, where wanted
    sums: dict[str, Tensor]  # mean losses by "mean", and the terms

    @classmethod
    def begin(cls, h_s, w_s, evaluate, y):
        h, w = _operands(h_s, w_s, y)
        wanted = torch.is_grad_enabled()
        dh = torch.zeros_like(h_s) if wanted and h_s.requires_grad else None
        dw = torch.zeros_like(w, dtype=_wide(w_s)) if wanted and w_s.requires_grad else None
        return cls((h_s, w_s), h, w, evaluate, dh, dw, {})


def _add_gradients(s: _Work, dz: Tensor, rows: slice, n_batches: int) -> None:
    """From the gradient of a forward batch's logits [N, V] those of the hidden states and of the head."""
    if s.dh is not None:
        s.dh[rows] = mm(dz, s.w).div_(n_batches).view_as(s.dh[rows]).to(s.dh.dtype)
    if s.dw is not None:
        mm(dz.t(), s.h[rows].flatten(0, 1), onto=s.dw, alpha=1 / n_batches)


def _finish(s: _Work) -> tuple[Tensor, dict[str, Tensor]]:
    loss, n_valid = s.sums.pop("mean"), s.sums.pop("n_valid").clamp(min=1)
    return _Attach.apply(*s.inputs, loss, s.dh, s.dw), {key: value / n_valid for key, value in s.sums.items()}


class _Attach(torch.autograd.Function):
    """Attach gradients that are already computed to a loss. They are given away: backward runs once."""

    @staticmethod
    def forward(ctx, h_s, w_s, loss, dh, dw):
        ctx.gradients, ctx.dtype = (dh, dw), w_s.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.gradients is None:
            raise RuntimeError("head_losses: backward() called twice; the gradients are freed after the first call")
        (dh, dw), ctx.gradients = ctx.gradients, None
        return dh if dh is None else dh.mul_(g), dw if dw is None else dw.mul_(g).to(ctx.dtype), None, None, None


def _operands(h, w, y) -> tuple[Tensor, Tensor]:
    """h [B, T, D] and w [V, D] as multiplied: in h's dtype; on the CPU widened to fp32. Ignored positions are 0."""
    h = h.detach().masked_fill((y == IGNORE)[..., None], 0.0)
    return operand(h, h.dtype), operand(w.detach(), h.dtype)


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Hidden states or a head as multiplied: in the hidden states' dtype, on the CPU widened to fp32."""
    x = x.to(dtype)
    return x if x.is_cuda else x.to(_wide(x))


def _logits(h, w, rows) -> Tensor:
    return mm(h[rows].flatten(0, 1), w.t())


def mm(a: Tensor, b: Tensor, onto: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """a @ b, accumulated and written in fp32 (fp64 stays fp64), or alpha times that added onto a tensor."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(a, b) if onto is None else onto.addmm_(a, b, alpha=alpha)
    if onto is not None and _adds_in_place(a.device, a.dtype):
        return torch.ops.aten.addmm.dtype_out(onto, a, b, torch.float32, alpha=alpha, out=onto)
    product = torch.mm(a, b, out_dtype=torch.float32)
    return product if onto is None else onto.add_(product, alpha=alpha)


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device adds a product of narrow numbers onto fp32 in place: tried once, where the sum is known."""
    ones, onto = torch.ones(16, 16, device=device, dtype=dtype), torch.full((16, 16), 1 + 2**-20, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(onto, ones, ones, torch.float32, alpha=0.5, out=onto)
        return torch.equal(onto, torch.full_like(onto, 9 + 2**-20))  # exact in fp32 alone
    except RuntimeError:  # no such kernel
        return False


def _wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
