"""What goes into an objective and what comes out: shapes, dtypes, ignored positions.

Every objective starts with `enter` and ends with `leave`. A NaN in the logits of a position that
counts makes the loss NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import lib.torch_setup  # noqa: F401  (all that computes imports this file)
from lib.errors import UserError
from lib.vocab import LEAST

IGNORE = -100  # label of an ignored position; torch's own `ignore_index`


def enter(z_s, z_t, y):
    """Check and widen the input.

    -> z_s and z_t [N, V] in fp32, or in fp64 if z_s has it, 0 at ignored positions, z_t constant;
       labels [N], 0 where ignored; valid [N] bool
    """
    shape = tuple(z_s.shape)
    if z_s.ndim != 2 or y.shape != z_s.shape[:1]:
        raise UserError(f"z_s, y: expected [N, V] and [N], got {shape} and {tuple(y.shape)}")
    if y.dtype != torch.int64:
        raise UserError(f"y: expected int64 labels, got {y.dtype}")
    if not z_s.is_floating_point():
        raise UserError(f"z_s: expected floating-point logits, got {z_s.dtype}")
    ignored = y == IGNORE
    y = y.masked_fill(ignored, 0)
    dtype = torch.promote_types(z_s.dtype, torch.float32)
    z_s = z_s.to(dtype).masked_fill(ignored[:, None], 0.0)
    if z_t is not None:
        if tuple(z_t.shape) != shape:
            raise UserError(f"z_t: expected shape {shape} as z_s has")
        if not z_t.is_floating_point():
            raise UserError(f"z_t: expected floating-point logits, got {z_t.dtype}")
        z_t = z_t.detach().to(dtype).masked_fill(ignored[:, None], 0.0)
    if not torch.compiler.is_compiling():
        check_values(z_t, y, shape[1])
    return z_s, z_t, y, ~ignored


def check_values(z_t, y, V):
    """Check labels, and on the CPU the teacher's logits. A GPU checks labels without a wait.

    Compiled code does not check.
    """
    fits = ((y >= 0) & (y < V)).all()
    message = f"y: expected labels 0 to {V - 1}, or {IGNORE} where ignored"
    if y.is_cuda:
        torch._assert_async(fits, message)
        return
    if not fits:
        raise UserError(f"{message}; got {y.min()} to {y.max()}")
    if z_t is not None and (z_t.amin(-1) <= LEAST).any():
        raise UserError(
            f"z_t: expected logits above {LEAST}, got {z_t.amin():.1e}; "
            "instead of masking tokens, cut them off the logits of both models"
        )


def leave(loss, valid) -> Tensor:
    """Return the loss with 0 at ignored positions, [N] -> [N]."""
    return loss.masked_fill(~valid, 0.0)


def valid_mean(x, valid) -> Tensor:
    """Return the mean over the valid positions, 0 where there is none, [N] -> []."""
    return leave(x, valid).sum() / valid.sum().clamp(min=1)


class Batch(NamedTuple):
    """What an objective that sees N positions knows of the whole forward batch of M positions."""

    values: Tensor  # [M] the objective's statistic, from a pass without gradient
    valid: Tensor  # [M] bool
    here: Tensor | slice  # [N] int64 places of the chunk's positions, or all


def whole_batch(values, valid, batch: Batch | list | None) -> Batch:
    """Return a statistic of the whole forward batch, of which the values [N] may be a chunk.

    batch  the keyword of an objective that is called twice for each chunk: first with a list, to
           which this appends the values (what the objective returns is then not used); then with a
           `Batch` of all values
    """
    if isinstance(batch, Batch):
        return batch
    if batch is not None:
        batch.append(values.detach())
    return Batch(values, valid, slice(None))


def all_finite(z) -> bool:
    """Return whether every element is finite: one pass and no mask. Waits for the device."""
    return not z.numel() or all(end.isfinite() for end in z.detach().aminmax())
