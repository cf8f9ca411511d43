"""What goes into and comes out of an objective: shapes, values, settings, ignored positions.

Every objective starts with `enter` and ends with `leave`. Shapes and settings are always checked. Values (labels out of
range, logits that are not finite at a valid position) are checked on the CPU only: on a GPU a look at them would wait
for the device. There a bad label trips torch's own assertion and a bad logit makes the loss non-finite; `check_values`
tells which one it was.
"""

import math
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from lib.figures import LOGGED
from lib.files import first_line

IGNORE = -100  # label of a position outside T_B


def enter(z_s, z_t, y, guard=False) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Check and widen the input -> z_s, z_t (constant), labels (0 where ignored), valid [N] bool.

    guard  give ignored positions a gradient of exactly 0, even where a NaN stands. `vocab.split` and `vocab.log_p` do
           so in the pass that they make anyway; an objective that uses z_s in any other way sets it.
    """
    require(z_s.ndim == 2, f"z_s: expected [N, V], got shape {tuple(z_s.shape)}")
    require(z_s.is_floating_point(), f"z_s: expected a float dtype, got {z_s.dtype}")
    require(y.shape == z_s.shape[:1], f"y: expected shape [N={z_s.shape[0]}] as z_s has, got {tuple(y.shape)}")
    require(y.dtype == torch.int64, f"y: expected int64 labels, got {y.dtype}")
    require(y.device == z_s.device, f"y: expected on {z_s.device} where z_s is, got {y.device}")
    if z_t is not None:
        require(z_t.shape == z_s.shape, f"z_t: expected shape {tuple(z_s.shape)} as z_s has, got {tuple(z_t.shape)}")
        require(z_t.is_floating_point(), f"z_t: expected a float dtype as z_s has, got {z_t.dtype}")
        require(z_t.device == z_s.device, f"z_t: expected on {z_s.device} where z_s is, got {z_t.device}")
    if z_s.device.type == "cpu" and not torch.compiler.is_compiling():
        check_values(z_s, z_t, y)
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


def check_values(z_s: Tensor, z_t: Tensor | None, y: Tensor) -> None:
    """Refuse labels out of range and logits that are not finite at a valid position. Waits for the device."""
    check_labels(y, z_s.shape[-1])
    for name, z in (("z_s", z_s), ("z_t", z_t)):
        if z is None or all_finite(z):
            continue
        bad = (y != IGNORE) & ~z.detach().isfinite().all(-1)
        if bad.any():
            u = int(bad.nonzero()[0])
            i = int((~z[u].detach().isfinite()).nonzero()[0])
            raise ValueError(f"{name}: expected finite logits at valid positions, got {float(z[u, i])} at [{u}, {i}]")


def check_labels(y, V) -> None:
    bad = (y != IGNORE) & ((y < 0) | (y >= V))
    if bad.any():
        at = bad.nonzero()[0].tolist()
        raise ValueError(f"y: expected labels of 0 to V-1={V - 1}, or IGNORE={IGNORE}, got {int(y[tuple(at)])} at {at}")


def all_finite(z) -> bool:
    """One pass, without a mask of [N, V]. Waits for the device."""
    return not z.numel() or all(bool(end.isfinite()) for end in z.detach().aminmax())


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def positive(**settings) -> None:
    for name, value in settings.items():
        require(0 < value < math.inf, f"{name}={value}: expected more than 0")


def not_negative(**settings) -> None:
    for name, value in settings.items():
        require(0 <= value < math.inf, f"{name}={value}: expected 0 or more")


def between(low, high, **settings) -> None:
    for name, value in settings.items():
        require(low <= value <= high, f"{name}={value}: expected {low} to {high}")


def one_of(*choices, **settings) -> None:
    for name, value in settings.items():
        require(value in choices, f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")


def check_objective(fn: Callable, V: int, n_sequences: int = 1) -> None:
    """Run fn(z_s, z_t, y) on random logits. `ValueError` where it breaks the contract at the head of losses.py.

    Each of the sequences has three positions, of which the second is ignored.
    """
    generator = torch.Generator().manual_seed(0)
    z_s, z_t = (torch.randn(3 * n_sequences, V, generator=generator) for _ in range(2))
    y = torch.randint(V, (3 * n_sequences,), generator=generator)
    y[1::3] = IGNORE
    try:
        with torch.enable_grad():
            found = fn(z_s.requires_grad_(), z_t, y)
    except ValueError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{type(error).__name__} in {at.filename}, line {at.lineno}: {first_line(error)}; it was given {len(y)} positions, "
            f"{n_sequences} of them with the label IGNORE={IGNORE}, which `enter` turns into 0"
        ) from error
    parts = found._asdict() if hasattr(found, "_asdict") else {"loss": found}
    loss = parts.pop("loss", None)
    require(
        isinstance(loss, Tensor),
        f"expected a tensor [N], or a NamedTuple with `loss` first, got {type(found).__name__}",
    )
    require(loss.shape == y.shape, f"expected one number per position, [N={len(y)}], got {list(loss.shape)}")
    taken = [key for key in parts if key in (*LOGGED, "ce", "kd") or key.startswith("val_")]
    require(not taken, f"its part {taken[:1]} has the name of another column of the log; choose another")
    value = float(loss.detach()[1::3].abs().max())
    require(value == 0, f"expected 0 at ignored positions, got {value:.4g}; end with `return leave(.., valid)`")
    require(loss.requires_grad, "no gradient reaches z_s: a student cannot learn from it")
    (slope,) = torch.autograd.grad(loss, z_s, torch.ones_like(loss))
    require(
        not slope[1::3].any(),
        "ignored positions have a gradient; leave them out of means over positions (`valid_mean`)",
    )
