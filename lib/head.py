"""Output head and loss in one: only one forward batch's logits exist at any time.

The gradients of hidden states and head weight are computed along with the loss. This file knows no
method: it is given a function of logits.

Dimension key: B rows, T time, D width, V vocabulary, N = group * T positions of a forward batch.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lib.checks import IGNORE
from lib.errors import UserError

Terms = dict[str, Tensor]
Evaluate = Callable[..., tuple[Tensor, Terms, Tensor | None]]


def head_losses(
    students: list[tuple[Tensor, Tensor, Evaluate]],
    h_t: Tensor | None,
    w_t: Tensor | None,
    y: Tensor,
    group: int = 1,
) -> list[tuple[Tensor, Terms]]:
    """Return each student's loss and the means of its terms over the rows of a micro-batch.

    students  for each student (h_s [B, T, D_s], w_s [V, D_s], evaluate): last hidden states, head
              weight and objective
    h_t, w_t  [B, T, D_t], [V, D_t] the teacher's; None if no student has a teacher
    y         [B, T] labels; IGNORE marks positions outside T_B
    group     rows per forward batch, a divisor of B
    ->        for each student its loss [], the mean over forward batches, whose backward may run
              once; and the detached means of its terms over all valid positions

    `evaluate(gradient_dtype, z_s [N, V], z_t [N, V], y [N])` returns the mean loss [], the sums of
    its terms with `n_valid`, and the gradient of z_s (None if gradient_dtype is None). It may
    overwrite z_s. The teacher's logits are computed once for all students, and every student gets
    the same bits as if it were alone.
    """
    n_rows = len(y)
    if n_rows % group:
        raise UserError(f"group={group}: expected a divisor of the {n_rows} sequences")
    ignored = (y == IGNORE)[..., None]
    if h_t is not None:
        w_t = operand(w_t, h_t.dtype)
        h_t = h_t.masked_fill(ignored, 0.0)
        h_t = operand(h_t, h_t.dtype)
    heads = [_Head(*student, ignored) for student in students]
    with torch.autocast(y.device.type, enabled=False), torch.no_grad():
        for first in range(0, n_rows, group):
            rows = slice(first, first + group)
            labels = y[rows].flatten()  # [N]
            z_t = None
            if h_t is not None:
                h = h_t[rows].flatten(0, 1)  # [N, D_t]
                z_t = mm(h, w_t.t())  # [N, V] fp32
            for head in heads:
                head.add_batch(rows, z_t, labels, n_rows // group)
    return [head.result() for head in heads]


class _Head:
    """One student's operands and gradients, and its sums over the forward batches of a call.

    h_s, w_s  [B, T, D], [V, D] last hidden states and head weight
    h, w      the same as multiplied; hidden states of ignored positions are 0
    dh, dw    [B, T, D], [V, D] gradients, dw in fp32 or wider; None where none is needed
    sums      the mean losses under "mean", and the sums of terms
    """

    def __init__(self, h_s: Tensor, w_s: Tensor, evaluate: Evaluate, ignored: Tensor):
        self.h_s = h_s
        self.w_s = w_s
        self.evaluate = evaluate
        self.h = operand(h_s.masked_fill(ignored, 0.0), h_s.dtype)
        self.w = operand(w_s, h_s.dtype)
        self.sums = {}
        self.gradient_dtype = None
        self.dh = None
        self.dw = None
        needs_gradient = h_s.requires_grad or w_s.requires_grad
        if needs_gradient and torch.is_grad_enabled():
            self.gradient_dtype = self.w.dtype  # on a GPU bf16, as under autocast
            self.dh = torch.zeros_like(h_s)
            self.dw = torch.zeros_like(self.w, dtype=_wide(w_s))

    def add_batch(self, rows: slice, z_t: Tensor | None, labels: Tensor, n_batches: int) -> None:
        """Add one of the forward batches: rows of h_s, teacher logits [N, V] and labels [N]."""
        share = 1 / n_batches
        h = self.h[rows].flatten(0, 1)  # [N, D]
        loss, sums, dz = self.evaluate(self.gradient_dtype, mm(h, self.w.t()), z_t, labels)
        sums["mean"] = loss * share
        for key, value in sums.items():
            self.sums[key] = self.sums.get(key, 0) + value
        if dz is not None:
            dh = mm(dz, self.w).div_(n_batches)
            self.dh[rows] = dh.view_as(self.dh[rows])
            mm(dz.t(), h, onto=self.dw, alpha=share)

    def result(self) -> tuple[Tensor, Terms]:
        """Return the loss with its gradients attached, and the means of its terms."""
        mean = self.sums.pop("mean")
        loss = _Attach.apply(self.h_s, self.w_s, mean, self.dh, self.dw)
        n_valid = self.sums.pop("n_valid").clamp(min=1)
        means = {key: value / n_valid for key, value in self.sums.items()}
        return loss, means


class _Attach(torch.autograd.Function):
    """Attach gradients that are already computed to a loss.

    They are freed after use; backward may run only once.
    """

    @staticmethod
    def forward(ctx, h_s, w_s, loss, dh, dw):
        ctx.gradients = dh, dw
        ctx.dtype = w_s.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.gradients is None:
            problem = "the gradients are freed after the first call"
            raise RuntimeError(f"head_losses: backward() called twice; {problem}")
        dh, dw = ctx.gradients
        ctx.gradients = None
        dh.mul_(g)
        dw = dw.mul_(g).to(ctx.dtype)
        return dh, dw, None, None, None


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden states or a head as they are multiplied: in `dtype`, on the CPU in fp32."""
    x = x.detach().to(dtype)
    if x.is_cuda:
        return x
    return x.to(_wide(x))


def mm(a, b, onto: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """Return a @ b, accumulated and written in fp32; or add alpha times the product onto `onto`.

    fp64 stays fp64.
    """
    is_narrow = a.element_size() == 2  # bf16 or fp16
    if onto is None:
        if is_narrow:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b)
    if not is_narrow:
        return onto.addmm_(a, b, alpha=alpha)
    if _adds_in_place(a.device, a.dtype):
        return _add_in_place(onto, a, b, alpha)
    return onto.add_(mm(a, b), alpha=alpha)


def _add_in_place(onto, a, b, alpha) -> Tensor:
    addmm = torch.ops.aten.addmm.dtype_out
    return addmm(onto, a, b, torch.float32, alpha=alpha, out=onto)


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device can add a product of bf16 or fp16 matrices onto an fp32 matrix in place.

    Tried once per device, on a product whose sum is known.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    onto = torch.full((16, 16), 1 + 2**-20, device=device)
    try:
        _add_in_place(onto, ones, ones, 0.5)
        return torch.equal(onto, torch.full_like(onto, 9 + 2**-20))  # exact in fp32 alone
    except RuntimeError:  # no such kernel
        return False


def _wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
