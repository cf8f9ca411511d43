"""What goes into an objective and what comes out: shapes, dtypes, ignored positions.

Every objective starts with `enter` and ends with `leave`. A logit that is not finite makes the loss
not finite; where a label out of range is read, torch raises an error of its own.
"""

import torch
from torch import Tensor

import lib.torch_setup  # noqa: F401  (all that computes imports this file)
from lib.errors import UserError

IGNORE = -100  # label of an ignored position; torch's own `ignore_index`


def enter(z_s, z_t, y, guard=False):
    """Check and widen the input.

    guard  give ignored positions a gradient of exactly 0, even if their logits are NaN. Set it if
           the objective itself computes with z_s; `vocab.split`, `vocab.log_p` and
           `vocab.pointwise` see to it themselves

    -> z_s and z_t [N, V] in fp32 or wider, z_t constant; labels [N], 0 where ignored; valid [N]
       bool
    """
    shape = tuple(z_s.shape)
    if z_s.ndim != 2 or y.shape != z_s.shape[:1]:
        raise UserError(f"z_s, y: expected [N, V] and [N], got {shape} and {tuple(y.shape)}")
    if z_t is not None and z_t.shape != z_s.shape:
        raise UserError(f"z_t: expected shape {shape} as z_s has")
    if y.dtype != torch.int64:
        raise UserError(f"y: expected int64 labels, got {y.dtype}")
    dtype = torch.promote_types(z_s.dtype, torch.float32)
    valid = y != IGNORE
    if z_t is not None:
        z_t = z_t.detach().to(dtype)
    z_s = z_s.to(dtype)
    if guard:
        z_s = _Guard.apply(z_s, valid)
    return z_s, z_t, y.masked_fill(~valid, 0), valid


class _Guard(torch.autograd.Function):
    """The logits unchanged, with a gradient of exactly 0 at ignored positions."""

    @staticmethod
    def forward(ctx, z, valid):
        ctx.save_for_backward(valid)
        return z.view_as(z)

    @staticmethod
    def backward(ctx, g):
        (valid,) = ctx.saved_tensors
        return g.masked_fill(~valid[:, None], 0.0), None


def leave(loss, valid) -> Tensor:
    """Return the loss with 0 at ignored positions, [N] -> [N]."""
    return loss.masked_fill(~valid, 0.0)


def valid_mean(x, valid) -> Tensor:
    """Return the mean over the valid positions, 0 where there is none, [N] -> []."""
    return leave(x, valid).sum() / valid.sum().clamp(min=1)


def all_finite(z) -> bool:
    """Return whether every element is finite: one pass and no mask. Waits for the device."""
    return not z.numel() or all(end.isfinite() for end in z.detach().aminmax())
