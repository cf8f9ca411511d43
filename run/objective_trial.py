"""The trial of a method on a few positions, before a run starts.

It finds settings that are wrong or teach nothing, and objectives of one's own that break a rule of
losses.py. Dimensions: N positions, V vocabulary.
"""

import copy

import torch
from torch import Tensor, nn

from lib.errors import UserError
from lib.vocab import IGNORE
from losses import built, keywords, resolve, with_given
from run.log import LOGGED
from run.methods import head_losses

RESERVED = {*LOGGED, "kd", "ce", "term"}  # names that no part of an objective may have


def check_settings(name, V: int, in_parts=True, /, **overrides):
    """Try a method at a vocabulary of V. Raises `UserError` if it cannot be trained as it is.

    in_parts  whether a call of the objective may see more or less than one forward batch
    """
    method = resolve(name, **overrides)
    if method.w_ce == 0 and (method.w_kd == 0 or not method.has_teacher):
        raise UserError(f"{name}: both weights are zero; set w_kd or w_ce")
    if method.has_teacher:
        try:
            try_method(method, V, in_parts)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        except Exception as error:
            error.add_note(f"In the trial of {name} on a few positions, before training.")
            raise


def try_method(method, V, in_parts):
    """Call an objective on ordinary logits, with the labels 0, V - 1 and an ignored one.

    Settings that change during a run have their values halfway.
    """
    halfway = {key: f(0.5) for key, f in method.moving.items() if key != "w_kd"}
    method = method._replace(hyper=method.hyper | halfway, w_kd=1.0, w_ce=0.0)
    method = built(with_given(method, n_vocab=V))
    modules = [*method.fn.modules()] if isinstance(method.fn, nn.Module) else []
    attributes = str([*map(vars, modules)])
    generator = torch.Generator().manual_seed(0)
    N = 2 * max(4, min(16, 2**19 // V))
    z = torch.randn(2, N, V, generator=generator)  # student's and teacher's logits
    z *= torch.linspace(0.3, 3.0, N)[:, None]  # nearly uniform at the first position, peaked later
    y = torch.randint(V, (N,), generator=generator)
    y[:3] = torch.tensor([0, IGNORE, V - 1])
    loss, gradient = loss_and_gradient(method, z, y)
    if not (loss.isfinite().all() and gradient.isfinite().all()):
        raise UserError("its loss or gradient is not finite at ordinary logits")
    if gradient.abs().sum() < 1e-6 * N:
        raise UserError("its gradient is zero at ordinary logits: it teaches nothing")
    loss_and_gradient(method, -z, y)  # if it remembers these logits, the next call differs
    if not torch.equal(loss, loss_and_gradient(method, z, y)[0]):
        raise UserError("equal calls differ; docs/editing.md shows a state, and random numbers")
    if str([*map(vars, modules)]) != attributes:
        raise UserError("an attribute has changed; docs/editing.md shows a state: a buffer")
    kept = y != IGNORE
    if "generator" not in keywords(method.fn):  # draws may depend on the number of positions
        loss_of_kept, _ = loss_and_gradient(method, z[:, kept], y[kept])
        if not torch.allclose(loss_of_kept, loss[kept], rtol=1e-3, atol=1e-6):
            raise UserError("an ignored position changes others; use `enter` and `valid_mean`")
    if in_parts and method.in_chunks:
        check_parts(method, V, y.view(2, -1), generator)


def loss_and_gradient(method, z, y) -> tuple[Tensor, Tensor]:
    """Return the loss [N] of an objective and its gradient [N, V]; z is [2, N, V]."""
    method = with_given(method, generator=torch.Generator())
    objective = method.fn
    if isinstance(objective, nn.Module):
        # each call begins with these parameters and buffers, so one that keeps more differs
        state = copy.deepcopy(objective.state_dict())

        def objective(*inputs, **keywords):
            return torch.func.functional_call(method.fn, state, inputs, keywords)

    leaf = z[0].clone().requires_grad_()
    inputs = (leaf.clone(), z[1].clone(), y.clone())  # a leaf may not be changed in place
    result = objective(*inputs, **method.hyper)
    loss = getattr(result, "loss", result)
    for name in {*RESERVED, *method.moving}.intersection(getattr(result, "_fields", ())):
        raise UserError(f"part {name}: the log has its own {name!r}; choose another name")
    if not getattr(loss, "requires_grad", False):
        raise UserError("expected a loss [N], or a NamedTuple of one, with a gradient from z_s")
    if not all(map(torch.equal, inputs, (*z, y))):
        raise UserError("an input is changed in place; write x = x / 2 and not x /= 2")
    (gradient,) = torch.autograd.grad(loss.sum(), leaf, materialize_grads=True)
    if loss.shape != y.shape or loss[y == IGNORE].any() or gradient[y == IGNORE].any():
        raise UserError("expected [N], 0 where ignored; begin with `enter`, end with `leave`")
    result = objective(*z, y, **method.hyper)
    if getattr(result, "loss", result).requires_grad:
        raise UserError("a parameter would not be trained; docs/editing.md shows one that is")
    return loss.detach(), gradient


def check_parts(method, V, y, generator):
    """Check that two forward batches at once, and halves of each, have the gradient of one each."""
    M = y.shape[1]
    h = torch.randn(2, 2, M, 8, generator=generator)  # student's and teacher's
    # the later a position, the larger its logits: the parts differ in all that may be averaged
    h_s, h_t = h * torch.linspace(0.1, 1, 2 * M).view(2, M, 1)
    w = torch.randn(V, 8, generator=generator)
    h_s.requires_grad_()
    gradients = []
    for n in (M, M // 2, 2 * M):
        ((loss, _),) = head_losses([(h_s, w, method)], h_t, w, y, chunk=n)
        gradients += torch.autograd.grad(loss, h_s)
        if (gradients[-1] - gradients[0]).norm() > 1e-3 * gradients[0].norm():
            message = "half a forward batch, or two at once, have another gradient than one; use "
            remedy = "`over_batch`, in_chunks=False, or chunk_positions of group * seq_len"
            raise UserError(message + remedy)
