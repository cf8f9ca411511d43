"""The trial of a method on a few positions, before a run starts.

It finds settings that are wrong or teach nothing, and objectives of one's own that break a rule of
losses.py.

Dimensions: N positions, V vocabulary.
"""

import traceback

import torch
from torch import Tensor

from lib.errors import UserError, first_line
from lib.vocab import IGNORE
from losses import resolve, settings, takes
from run.log import LOGGED
from run.methods import head_losses

RESERVED = (*LOGGED, "kd", "ce")  # names that no part of an objective may have


def check_settings(name, V: int, compile=False, /, **overrides):
    """Try the method on a few positions at a vocabulary of V.

    With `compile`, it is also compiled if its settings move. Raises `UserError` if a setting
    is wrong, or if the objective breaks a rule of losses.py.
    """
    settings(name)  # all have a kind
    method = resolve(name, **(resolve(name).hyper | overrides))  # checks those of the row too
    if method.w_ce == 0 and (method.w_kd == 0 or not method.has_teacher):
        raise UserError(f"{name}: both weights are zero; set w_kd or w_ce")
    if not method.has_teacher:
        return
    try:
        _check_contract(method, V)
    except Exception as error:
        where = ""
        if not isinstance(error, UserError):
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({type(error).__name__} in {at.filename}, line {at.lineno})"
        raise UserError(f"{name}: {first_line(error)}{where}") from error
    if compile:
        _check_moving(name, method, V)


def _check_moving(name, method, V):
    """Try to compile a method whose settings move, which are tensors then. Raises `UserError`."""
    moving = method.moving.keys() - {"w_kd"}  # a weight, not a setting of the objective
    if not moving or takes(method.fn, "generator"):
        return
    keywords = dict(method.hyper)
    for key in moving:
        keywords[key] = torch.tensor(method.moving[key](0.5), dtype=torch.float64)
    if method.state:
        keywords["state"] = method.state
    z_s, z_t = torch.randn(2, 8, V, generator=torch.Generator().manual_seed(0))
    traced = torch.compile(method.fn, backend="eager", fullgraph=True)
    try:
        traced(z_s, z_t, torch.zeros(8, dtype=torch.int64), **keywords)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise UserError(
            f"{name}: cannot be compiled where {', '.join(moving)} moves ({first_line(error)}); "
            "use functions of torch instead of an `if`, or set compile=False"
        ) from error


def _check_contract(method, V):
    """Check an objective on ordinary logits, with the labels 0, V - 1 and an ignored one.

    Settings that change during a run have their largest values.
    """
    hyper = dict(method.hyper)
    for key, value_at in method.moving.items():
        hyper[key] = max(value_at(i / 100) for i in range(101))
    w_kd = hyper.pop("w_kd", method.w_kd)  # a weight, not a setting of the objective
    method = method._replace(hyper=hyper)
    generator = torch.Generator().manual_seed(0)
    N = max(8, min(32, 2**20 // V))
    z = torch.randn(2, N, V, generator=generator)  # student's and teacher's logits
    z *= torch.linspace(0.3, 3.0, N)[:, None]  # nearly uniform at the first position, peaked later
    y = torch.randint(V, (N,), generator=generator)
    y[:3] = torch.tensor([0, IGNORE, V - 1])
    random_state = torch.get_rng_state()
    first = _try_once(method, z, y)
    _try_once(method, -z, y)  # if it remembers these logits, the next call differs
    again = _try_once(method, z, y)
    if not all(x.isfinite().all() for x in first):
        raise UserError("its loss or gradient is not finite at ordinary logits")
    drew = not torch.equal(torch.get_rng_state(), random_state)
    if drew or not all(map(torch.equal, first, again)):
        raise UserError(
            "equal calls differ; keep a state as docs/objectives.md shows, "
            "draw from a keyword `generator: torch.Generator | None = None`"
        )
    is_random = takes(method.fn, "generator")
    z_wild = z.clone()
    z_wild[:, 1] *= 1e3  # other logits at the ignored position
    as_first = all(map(torch.equal, first, _try_once(method, z_wild, y)))
    if as_first and not is_random:  # draws may depend on the number of positions
        kept = y != IGNORE
        expected = [x[kept] for x in first[:2]] + first[2:]
        others = zip(expected, _try_once(method, z[:, kept], y[kept]), strict=True)
        as_first = all(torch.allclose(x, other, rtol=1e-3, atol=1e-6) for x, other in others)
    if not as_first:
        raise UserError("an ignored position changes others; use `enter` and `valid_mean`")
    if w_kd > 0 and first[1].abs().sum() < 1e-6 * N:
        raise UserError(
            "its gradient is zero at ordinary logits: it teaches nothing; see its settings"
        )
    if method.in_chunks and not (method.state or is_random):
        _check_chunks(method._replace(w_kd=1.0, w_ce=0.0), V, y)


def _check_chunks(method, V, y):
    """Check that the halves of a forward batch have the gradient of the whole.

    The logits are those of random hidden states [1, N, 8] and one head [V, 8]. The later a
    position, the larger they are: so the halves differ in all that an objective may average.
    """
    N = len(y)
    generator = torch.Generator().manual_seed(0)
    rising = torch.linspace(0.1, 1.0, N)[:, None]
    h_s, h_t = torch.randn(2, 1, N, 8, generator=generator) * rising
    w = torch.randn(V, 8, generator=generator)
    h_s.requires_grad_()
    gradients = []
    for chunk in (N, (N + 1) // 2):
        ((loss, _),) = head_losses([(h_s, w, method)], h_t, w, y[None], chunk=chunk)
        gradients += torch.autograd.grad(loss, h_s)
    whole, halves = gradients
    if (halves - whole).norm() > 1e-3 * whole.norm():
        raise UserError(
            "in_chunks=True: half a forward batch has another gradient than the whole; pass what a "
            "position needs of the others, detached, through `whole_batch`, or set in_chunks=False"
        )


def _check_unchanged(name, argument, original):
    if not torch.equal(argument, original):
        raise UserError(f"{name} is changed in place; write x = x / 2 and not x /= 2")


def _try_once(method, z, y) -> list[Tensor]:
    """Return loss [N], gradient [N, V] and the tensors of the next state; z is [2, N, V]."""
    leaf = z[0].clone().requires_grad_()
    z_s = leaf.clone()  # unlike a leaf, it may be changed in place
    z_t = z[1].clone()
    labels = y.clone()
    state = {key: value.clone() for key, value in method.state.items()}
    keywords = dict(method.hyper)
    if takes(method.fn, "generator"):
        keywords["generator"] = torch.Generator()
    if state:
        keywords["state"] = state
    result = method.fn(z_s, z_t, labels, **keywords)
    if not isinstance(result, Tensor) and not hasattr(result, "_asdict"):
        got = type(result).__name__
        raise UserError(f"expected a tensor [N], or a NamedTuple whose field is `loss`; got {got}")
    parts = {"loss": result} if isinstance(result, Tensor) else result._asdict()
    loss = parts["loss"]
    next_state = parts.pop("state", {})
    shapes = {key: value.shape for key, value in next_state.items()}
    expected = {key: value.shape for key, value in method.state.items()}
    if shapes != expected or any(value.requires_grad for value in next_state.values()):
        raise UserError(f"state: expected detached tensors of shapes {expected}, got {shapes}")
    for key, value in (*method.state.items(), *next_state.items()):
        if not value.is_floating_point():
            raise UserError(f"state {key}: {value.dtype}; expected floating-point numbers")
    if loss.shape != y.shape or loss.dtype.itemsize < 4 or loss[y == IGNORE].any():
        raise UserError(
            "expected one number per position, in fp32 or wider, 0 where ignored: end with "
            "`return leave(.., valid)`"
        )
    for name, part in parts.items():
        got = tuple(part.shape) if isinstance(part, Tensor) else [part]
        if name in (*RESERVED, *method.moving) or name.startswith("val_"):
            raise UserError(f"part {name}: the log has its own {name!r}; choose another name")
        if got[:1] != y.shape:
            raise UserError(
                f"part {name}: expected a tensor [N], or [N, ..] that is not logged; got {got}"
            )
    _check_unchanged("z_s", z_s, z[0])
    _check_unchanged("z_t", z_t, z[1])
    _check_unchanged("y", labels, y)
    for key, value in state.items():
        _check_unchanged(f"state[{key!r}]", value, method.state[key])
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
    if gradient is None:
        raise UserError("its loss has no gradient; compute it from z_s, without `detach` or `item`")
    if gradient[y == IGNORE].any():
        raise UserError("ignored positions have a gradient; use `enter` and `valid_mean`")
    return [loss.detach(), gradient, *next_state.values()]
