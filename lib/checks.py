"""What goes into an objective and what comes out: shapes, dtypes, ignored positions.

Every objective starts with `enter` and ends with `leave`. A logit that is not finite makes the loss
not finite; where a label out of range is read, torch raises an error of its own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lib.errors import UserError

IGNORE = -100  # label of an ignored position; torch's own `ignore_index`


def enter(z_s, z_t, y):
    """Check and widen the input.

    -> z_s and z_t [N, V] in fp32 or wider, 0 at ignored positions, z_t constant; labels [N], 0
       where ignored; valid [N] bool
    """
    shape = tuple(z_s.shape)
    if z_s.ndim != 2 or y.shape != z_s.shape[:1]:
        raise UserError(f"z_s, y: expected [N, V] and [N], got {shape} and {tuple(y.shape)}")
    if z_t is not None and z_t.shape != z_s.shape:
        raise UserError(f"z_t: expected shape {shape} as z_s has")
    if y.dtype != torch.int64:
        raise UserError(f"y: expected int64 labels, got {y.dtype}")
    dtype = torch.promote_types(z_s.dtype, torch.float32)
    ignored = y == IGNORE
    z_s = z_s.to(dtype).masked_fill(ignored[:, None], 0.0)
    if z_t is not None:
        z_t = z_t.detach().to(dtype).masked_fill(ignored[:, None], 0.0)
    return z_s, z_t, y.masked_fill(ignored, 0), ~ignored


def leave(loss, valid) -> Tensor:
    """Return the loss with 0 at ignored positions, [N] -> [N]."""
    return loss.masked_fill(~valid, 0.0)


def valid_mean(x, valid) -> Tensor:
    """Return the mean over the valid positions, 0 where there is none, [N] -> []."""
    return leave(x, valid).sum() / valid.sum().clamp(min=1)


class Batch(NamedTuple):
    """A statistic of every position of a forward batch, for an objective that sees a chunk of it.

    Dimensions: M positions of the forward batch, N of the chunk.
    """

    values: Tensor  # [M] what the objective returned in a pass without gradient
    valid: Tensor  # [M] bool
    here: Tensor  # [N] int64 places of the chunk's positions


def whole_batch(values, valid, batch: Batch | None) -> Batch:
    """Return the statistic of the whole forward batch: `batch`, or the values [N] themselves."""
    if batch is not None:
        return batch
    return Batch(values, valid, torch.arange(len(values), device=values.device))


def all_finite(z) -> bool:
    """Return whether every element is finite: one pass and no mask. Waits for the device."""
    return not z.numel() or all(end.isfinite() for end in z.detach().aminmax())
