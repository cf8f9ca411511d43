"""Methods as plain functions of logits, and of hidden states: what train.py composes, in one call."""

import losses
from lib import fused


def method_loss(name, z_s, z_t, y, n_sequences=1, **overrides):
    """A method's loss of one forward batch, differentiable, and the means of its terms."""
    method = losses.evaluator(name, n_sequences, **overrides).args[0]
    loss, sums = losses._mean_loss(method, z_s, z_t, y)
    n_valid = sums.pop("n_valid").clamp(min=1)
    return loss, {key: value / n_valid for key, value in sums.items()}


def fused_head_losses(students, h_t, w_t, y, group=1, compile=False):
    heads = [(h, w, losses.evaluator(name, group, compile, **of)) for h, w, name, of in students]
    if not any(losses.needs_teacher(name) for _, _, name, _ in students):
        h_t = w_t = None
    return fused.head_losses(heads, h_t, w_t, y, group)


def fused_head_loss(h_s, w_s, h_t, w_t, y, method, group=1, compile=False, **overrides):
    return fused_head_losses([(h_s, w_s, method, overrides)], h_t, w_t, y, group, compile)[0]


def keywords(name):
    return frozenset(losses.settings(name))
