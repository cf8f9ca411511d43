"""The output head: logits in fp32, and the gradients of hidden states and head weight.

The gradients are computed with the loss, so that the logits of one forward batch, or of one chunk,
exist at a time.

Dimension key: B rows, T time, D width, V vocabulary, N positions at a time.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.vocab import IGNORE


@dataclass(frozen=True)
class CappedHead:
    """A head whose logits are cap * tanh(z / cap), as in Gemma 2; z is hidden states times weight.

    It has what a run needs of a bare weight [V, D]: device, dtype, len, rows, and `to`.
    """

    weight: Tensor  # [V, D]
    cap: float

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, rows) -> "CappedHead":
        return CappedHead(self.weight[rows], self.cap)

    def to(self, *args) -> "CappedHead":
        return CappedHead(self.weight.to(*args), self.cap)


def weight_of(head: Tensor | CappedHead) -> Tensor:
    return getattr(head, "weight", head)


def soft_cap(z: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(z / cap), in the memory of z."""
    return z.div_(cap).tanh_().mul_(cap)


class Head:
    """A model's last hidden states and head weight, cast for `mm`. To be used under `no_grad`.

    h, w    [B * T, D], [V, D]; h is 0 at ignored positions, so that no NaN there reaches dw
    inputs  hidden states and weight as given, with their graph
    """

    def __init__(self, h, w, y):
        """Take hidden states [B, T, D], weight [V, D] or `CappedHead`, and labels [B * T]."""
        self.cap = None
        if isinstance(w, CappedHead):
            self.cap = w.cap
            w = w.weight
        self.inputs = (h, w)
        h = h.flatten(0, 1).masked_fill((y == IGNORE)[:, None], 0.0)
        self.h = operand(h, h.dtype)
        self.w = operand(w, h.dtype)

    def logits(self, here) -> Tensor:
        """Return the logits [N, V] of the positions `here`, a slice of B * T."""
        z = mm(self.h[here], self.w.t())
        return soft_cap(z, self.cap) if self.cap else z


class AttachGradients(torch.autograd.Function):
    """Return the loss []. Its backward gives h [B, T, D] and w [V, D] the gradients dh and dw.

    They are scaled in place by the incoming gradient, so backward may run once.
    """

    @staticmethod
    def forward(ctx, h, w, loss, dh, dw):
        ctx.save_for_backward(dh.view_as(h), dw)
        return loss.clone()

    @staticmethod
    def backward(ctx, g):
        dh, dw = ctx.saved_tensors
        return dh.mul_(g), dw.mul_(g), None, None, None


def operand(x: Tensor, dtype) -> Tensor:
    """Cast hidden states or a head for `mm`: to `dtype`, on the CPU to fp32 or wider."""
    x = x.to(dtype)
    if x.is_cuda:
        return x
    return x.to(torch.promote_types(dtype, torch.float32))


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, accumulated and written in fp32. fp64 stays fp64."""
    if a.dtype.itemsize > 2:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def add_mm(total: Tensor, a: Tensor, b: Tensor):
    """Add a @ b onto `total`, accumulated in fp32 or wider."""
    if a.dtype.itemsize > 2:
        total.addmm_(a, b)
    elif _adds_in_place(a.device, a.dtype):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.add_(mm(a, b))


@functools.cache
def _adds_in_place(device, dtype) -> bool:
    """Whether the device can add a product of bf16 or fp16 matrices onto an fp32 matrix in place.

    Tested once per device and dtype, on a product whose sum is known.
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    onto = torch.full((16, 16), 1 + 2**-19, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(onto, ones, ones, torch.float32, out=onto)
        return torch.equal(onto, torch.full_like(onto, 17 + 2**-19))  # exact in fp32 alone
    except RuntimeError:  # no such kernel
        return False
