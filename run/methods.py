"""How training calls the methods of losses.py.

This file schedules their settings, seeds random objectives, compiles a method's loss together with
its gradient, and tries each method on three positions before a run.

Dimensions: N positions, V vocabulary.
"""

import functools
import itertools
import random
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lib import parallel
from lib.checks import IGNORE
from lib.errors import UserError, first_line
from losses import (
    METHODS,
    Method,
    default_settings,
    mean_loss,
    parts_of,
    resolve,
    with_sequences,
)

# What a record of log.jsonl has besides an objective's terms and the figures of validations.
LOGGED = (
    "step",
    "nominal_tokens",
    "valid_tokens",
    "lr",
    "gnorm",
    "tok_per_sec",
    "mfu",
    "mem_gib",
    "eta_sec",
    "checkpoint_sec",  # this and `time` are in earlier logs only
    "time",
)
RESERVED = (*LOGGED, "kd", "ce", "mean", "n_valid")  # names that no part of an objective may have

# ----------------------------------------------------------------------------------------------
# names and settings


def needs_teacher(name) -> bool:
    """Return whether the method reads teacher logits."""
    return resolve(name).has_teacher


def scheduled_settings(method, step, n_steps: int) -> dict[str, float]:
    """Return the settings that change during a run, with their values in update `step`."""
    return {key: value_at(step / n_steps) for key, value_at in method.moving.items()}


def method_lines() -> list[str]:
    """Return the lines of `--help`: each objective with its settings, and its methods."""
    lines = ["methods; --METHOD.SETTING=VALUE sets a setting of its objective, or w_kd, w_ce, lr"]
    for fn in dict.fromkeys(method.fn for method in METHODS.values()):
        defaults = [f"{key}={value}" for key, value in default_settings(fn).items()]
        lines.append(f"    {getattr(fn, 'func', fn).__name__}: {', '.join(defaults)}")
        for name, row in METHODS.items():
            if row.fn is fn:
                lines.append(f"        {name}: w_kd={row.w_kd}, w_ce={row.w_ce} {row.hyper or ''}")
    return lines


# ----------------------------------------------------------------------------------------------
# what a training step calls


def compute_dtype(cfg) -> torch.dtype:
    """Return the dtype of activations and products."""
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "bfloat16" if cfg.device.startswith("cuda") else "float32"
    return getattr(torch, dtype)


def make_evaluate_at(name, cfg):
    """Return a function (update, state) -> the `MethodLoss` of this student in an update.

    The random numbers of a forward batch depend on its place in the update, and not on how the
    update is divided into micro-batches and processes. An objective that draws some is not
    compiled.
    """
    overrides = cfg.overrides_of(name)
    is_random = "generator" in default_settings(resolve(name).fn)
    method_loss = make_loss_fn(name, cfg.group, cfg.compile and not is_random, **overrides)

    def evaluate_at(step, state):
        settings = {}
        moving = scheduled_settings(method_loss.method, step, cfg.schedule_steps)
        for key, value in moving.items():
            # A tensor, so that one compiled graph serves every value. `torch.full` avoids a
            # blocking host-to-device copy.
            settings[key] = torch.full((), value, dtype=torch.float64, device=cfg.device)
        if state:
            settings["state"] = state
        if not is_random:
            return method_loss.with_settings(settings)
        first_row = parallel.rank() * cfg.batch_rows // parallel.world()
        places = itertools.count(first_row // cfg.group)  # of forward batches, which come in order

        def with_generator(*inputs):
            seed = random.Random(f"{cfg.seed} {step} {name} {next(places)}").getrandbits(63)
            generator = torch.Generator(cfg.device).manual_seed(seed)
            return method_loss.with_settings(settings | {"generator": generator})(*inputs)

        return with_generator

    return evaluate_at


def make_loss_fn(name, n_sequences: int = 1, compile: bool = False, **settings):
    """Return the `MethodLoss` of a method with these settings."""
    return MethodLoss(with_sequences(resolve(name, **settings), n_sequences), compile)


class MethodLoss(NamedTuple):
    """A method's loss and gradient, as `head_losses` calls them.

    compile  use torch.compile: one graph per method, settings and shape
    """

    method: Method
    compile: bool = False

    def __call__(self, *inputs, **chunk):
        fn = compiled(loss_and_gradient) if self.compile else loss_and_gradient
        return fn(self.method, *inputs, **chunk)

    def statistic(self, *inputs):
        fn = compiled(statistic) if self.compile else statistic
        return fn(self.method, *inputs)

    def with_settings(self, settings):
        """Replace settings by tensors, a state or a generator. If w_kd is one, w_ce = 1 - w_kd."""
        hyper = self.method.hyper | settings
        method = self.method
        if "w_kd" in settings:
            w_kd = hyper.pop("w_kd")
            method = method._replace(w_kd=w_kd, w_ce=1.0 - w_kd)
        return self._replace(method=method._replace(hyper=hyper))


@functools.cache
def compiled(fn) -> Callable:
    # torch counts recompilations per function, and all methods share these
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(fn, dynamic=False, fullgraph=True)


def loss_and_gradient(method, dtype: torch.dtype | None, z_s, z_t, y, n=None, batch=None):
    """Return the loss and sums of `mean_loss`, and the gradient with respect to z_s.

    dtype     of the gradient; None: no gradient is computed
    n, batch  labels of the forward batch, and its statistic, where this is a chunk of it
    """
    if batch is not None:
        method = method._replace(hyper=method.hyper | {"batch": batch})
    if not dtype:
        with torch.no_grad():
            loss, sums = mean_loss(method, z_s, z_t, y, n)
        return loss, sums, None
    if torch.compiler.is_compiling():
        # forward and backward in one graph, so that no [N, V] tensor is saved for backward
        both = torch.func.grad_and_value(mean_loss, argnums=1, has_aux=True)
        dz, (loss, sums) = both(method, z_s, z_t, y, n)
        return loss, sums, dz.to(dtype)
    with torch.enable_grad():
        loss, sums = mean_loss(method, z_s.requires_grad_(), z_t, y, n)
    if loss.requires_grad:
        (dz,) = torch.autograd.grad(loss, z_s)
    else:
        dz = torch.zeros_like(z_s)
    return loss.detach(), sums, dz.to(dtype)


@torch.no_grad()
def statistic(method, z_s, z_t, y) -> Tensor:
    """Return the part that an objective needs of every position of a forward batch, [N]."""
    method = with_sequences(method, 1)  # a chunk may end within a sequence
    return parts_of(method.fn(z_s, z_t, y, **method.hyper))[method.statistic]


# ----------------------------------------------------------------------------------------------
# the trial before a run


def check_settings(name, V: int, /, **overrides):
    """Try the method on three positions at a vocabulary of V.

    Raises `UserError` if a setting is wrong, or if the objective breaks a rule of losses.py.
    """
    method = resolve(name, **overrides)
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


def _check_contract(method, V):
    """Check an objective on the labels 0 and V - 1 with an ignored position between them.

    Settings that change during a run have their values in its first update.
    """
    hyper = method.hyper | scheduled_settings(method, 0, 1)
    hyper.pop("w_kd", None)  # a weight, not a setting of the objective
    method = method._replace(hyper=hyper)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 3, V, generator=generator)  # student's and teacher's logits
    y = torch.tensor([0, IGNORE, V - 1])
    z_wild = z * torch.tensor([1.0, 1e3, 1.0])[:, None]  # other logits at the ignored position
    random_state = torch.get_rng_state()
    first = _try_once(method, z, y)
    wild = _try_once(method, z_wild, y)
    _try_once(method, -z, y)  # if it remembers these logits, the next call differs
    again = _try_once(method, z, y)
    if not first.isfinite().all():
        raise UserError("its loss or gradient is not finite at ordinary logits")
    drew = not torch.equal(torch.get_rng_state(), random_state)
    if drew or not torch.equal(first, again):
        raise UserError(
            "equal calls differ; keep a state as docs/objectives.md shows, "
            "draw from a keyword `generator: torch.Generator | None = None`"
        )
    if not torch.equal(first, wild):
        raise UserError("ignored logits change other positions; use `valid_mean`")


def _check_unchanged(name, argument, original):
    if not torch.equal(argument, original):
        raise UserError(f"{name} is changed in place; other students read it too: make a copy")


def _try_once(method, z, y) -> Tensor:
    """Return loss, gradient and next state in one tensor; z is [2, N, V], y [N]."""
    z_s, z_t = z.clone()
    labels = y.clone()
    state = {key: value.clone() for key, value in method.state.items()}
    keywords = dict(method.hyper)
    if "generator" in default_settings(method.fn):
        keywords["generator"] = torch.Generator()
    if state:
        keywords["state"] = state
    parts = parts_of(method.fn(z_s.requires_grad_(), z_t, labels, **keywords))
    loss = parts["loss"]
    next_state = parts.pop("state", {})
    shapes = {key: value.shape for key, value in next_state.items()}
    expected = {key: value.shape for key, value in method.state.items()}
    if shapes != expected or any(value.requires_grad for value in next_state.values()):
        raise UserError(f"state: expected detached tensors of shapes {expected}, got {shapes}")
    if getattr(loss, "shape", None) != y.shape or loss[1] != 0:
        raise UserError(
            "expected one number per position, 0 where ignored: end with `return leave(.., valid)`"
        )
    for name, part in parts.items():
        got = tuple(part.shape) if isinstance(part, Tensor) else [part]
        if name in RESERVED or name.startswith("val_"):
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
    (gradient,) = torch.autograd.grad(loss.sum(), z_s)
    if gradient[1].any():
        raise UserError("ignored positions have a gradient; use `valid_mean`, and `guard=True`")
    tensors = [loss.detach(), gradient, *next_state.values()]
    return torch.cat([tensor.flatten() for tensor in tensors])
