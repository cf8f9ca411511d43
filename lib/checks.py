"""What goes into and comes out of an objective: shapes, dtypes, ignored positions.

Every objective starts with `enter` and ends with `leave`. A logit that is not finite makes the loss not finite; a label out
of range raises torch's own error.
"""

import torch
from torch import Tensor

from lib.errors import require

IGNORE = -100  # label of a position outside T_B; torch's own `ignore_index`


def enter(z_s, z_t, y, guard=False) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Check and widen the input -> z_s, z_t (constant), labels (0 where ignored), valid [N] bool.

    guard  give ignored positions a gradient of exactly 0, even if their logits are NaN. `vocab.split` and `vocab.log_p`
           do so in the pass that they make anyway; an objective that uses z_s in any other way sets it.
    """
    fits = z_s.ndim == 2 and y.shape == z_s.shape[:1]
    require(fits, f"z_s, y: expected [N, V] and [N], got {tuple(z_s.shape)} and {tuple(y.shape)}")
    require(z_t is None or z_t.shape == z_s.shape, f"z_t: expected shape {tuple(z_s.shape)} as z_s has")
    require(y.dtype == torch.int64, f"y: expected int64 labels, got {y.dtype}")
    dtype = torch.promote_types(z_s.dtype, torch.float32)
    valid = y != IGNORE
    z_t = None if z_t is None else z_t.detach().to(dtype)
    z_s = z_s.to(dtype)
    return _Guard.apply(z_s, valid) if guard else z_s, z_t, y.masked_fill(~valid, 0), valid


class _Guard(torch.autograd.Function):
    """The logits unchanged, with a gradient of exactly 0 at ignored positions."""

    @staticmethod
    def forward(ctx, z, valid):
        ctx.save_for_backward(valid)
        return z.view_as(z)

    @staticmethod
    def backward(ctx, g):
        return g.masked_fill(~ctx.saved_tensors[0][:, None], 0.0), None


def leave(loss, valid) -> Tensor:
    """0 at ignored positions  # [N] -> [N]"""
    return loss.masked_fill(~valid, 0.0)


def valid_mean(x, valid) -> Tensor:
    """Mean over the valid positions, 0 where there is none  # [N] -> []"""
    return leave(x, valid).sum() / valid.sum().clamp(min=1)


def all_finite(z) -> bool:
    """One pass, without a mask of [N, V]. Waits for the device."""
    return not z.numel() or all(bool(end.isfinite()) for end in z.detach().aminmax())
