"""The output head: logits in fp32, and the gradients of hidden states and head weight.

The gradients are computed with the loss, so that the logits of one forward batch, or of one chunk,
exist at a time.

Dimension key: B rows, T time, D width, V vocabulary, N positions at a time.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class OutputHead:
    """A head whose logits are more than hidden states [N, D] times its weight.

    It has what a run needs of a bare weight [V, D]: device, dtype, len, rows, and `to`.
    """

    weight: Tensor  # [V, D]; of several models side by side
    widths: tuple[int, ...]  # of the models, sum D; logits are ln of their mean probabilities
    caps: tuple[float, ...]  # a model's logits z become cap * tanh(z / cap), as in Gemma 2; 0: none

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, rows) -> "OutputHead":
        return replace(self, weight=self.weight[rows])

    def to(self, *args) -> "OutputHead":
        return replace(self, weight=self.weight.to(*args))

    def logits(self, h, w) -> Tensor:
        """Return the logits [N, V] of h [N, D]; w is the weight, cast for `mm`."""
        of_models = []
        parts = zip(h.split(self.widths, 1), w.split(self.widths, 1), self.caps, strict=True)
        for h_part, w_part, cap in parts:
            z = mm(h_part, w_part.t())
            of_models.append(soft_cap(z, cap) if cap else z)
        if len(of_models) == 1:
            return of_models[0]
        logp = [z.log_softmax(-1) for z in of_models]
        return functools.reduce(torch.logaddexp, logp) - math.log(len(logp))

    def before_cap(self, dz, z) -> Tensor:
        """Return the gradient before the cap, of dz [N, V] after it; z are one model's logits."""
        (cap,) = self.caps
        return dz * (1 - (z / cap).square()).to(dz.dtype)


def weight_of(head: Tensor | OutputHead) -> Tensor:
    return getattr(head, "weight", head)


def soft_cap(z: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(z / cap), in the memory of z."""
    return z.div_(cap).tanh_().mul_(cap)


class Head:
    """A model's last hidden states and head weight, cast for `mm`. To be used under `no_grad`.

    h, w    [N, D], [V, D] in the dtype of the hidden states; on the CPU in fp32 or wider
    inputs  hidden states and weight as given, with their graph
    """

    def __init__(self, h, head):
        """Take hidden states [.., D], of N positions in all, and weight [V, D] or `OutputHead`."""
        dtype = h.dtype if h.is_cuda else torch.promote_types(h.dtype, torch.float32)
        weight = head if isinstance(head, Tensor) else head.weight
        self.head = head
        self.inputs = (h, weight)
        self.h = h.flatten(0, -2).to(dtype)
        self.w = weight.to(h.dtype).to(dtype)

    def logits(self, here=slice(None)) -> Tensor:
        """Return the logits [n, V] of the positions `here`, a slice or indices of N; of all."""
        h = self.h[here]
        return mm(h, self.w.t()) if isinstance(self.head, Tensor) else self.head.logits(h, self.w)


class AttachGradients(torch.autograd.Function):
    """Return the loss []. Its backward gives each input, such as h [B, T, D], its gradient.

    They are scaled in place by the incoming gradient, so backward may run once.
    """

    @staticmethod
    def forward(ctx, loss, gradients, *inputs):
        ctx.save_for_backward(*(d.view_as(x) for d, x in zip(gradients, inputs, strict=True)))
        return loss.clone()

    @staticmethod
    def backward(ctx, g):
        return None, None, *(gradient.mul_(g) for gradient in ctx.saved_tensors)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, accumulated and written in fp32. fp64 stays fp64."""
    if a.dtype.itemsize > 2:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def add_mm(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b onto `total`, accumulated in fp32 or wider, and return it; None counts as 0."""
    if total is None:
        return mm(a, b)
    if a.dtype.itemsize > 2:
        return total.addmm_(a, b)
    if _adds_in_place(a.device, a.dtype):
        return torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    return total.add_(mm(a, b))


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
