"""A forward batch in chunks of positions gives what it gives at once."""

import pytest
import torch
from torch.testing import assert_close

from losses import METHODS, resolve, with_sequences
from run.methods import head_losses
from tests.test_head import case


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].in_chunks])
def test_chunks_change_nothing(name, group):
    settings = {"d_max": 5} if name == "alra" else {}
    results = []
    for chunk in (512, 3):
        h_s, w_s, h_t, w_t, y = case(dtype=torch.float64)
        h_s.requires_grad_()
        w_s.requires_grad_()
        student = (h_s, w_s, with_sequences(resolve(name, **settings), group))
        ((loss, terms),) = head_losses([student], h_t, w_t, y, group, chunk=chunk)
        loss.backward()
        results.append((loss.detach(), terms, h_s.grad, w_s.grad))
    whole, chunked = results
    assert_close(chunked, whole, rtol=1e-10, atol=1e-13)
