"""All tests that need a GPU.

They import only torch and what is always beside it: a machine with a GPU may lack the rest.
"""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from lib import metrics, parallel
from lib.vocab import IGNORE
from model import Qwen2Config, init_student
from run.teacher import compile_layers
from tests.test_head import FIRST_TIER, assert_near, case, fused, plain, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # of dynamo, and of Inductor about speed
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(?s).*Online softmax is disabled"),
]
DTYPES = (torch.float32, torch.bfloat16)


def cast(inputs, dtype):
    """Hidden states and heads in `dtype`; labels stay."""
    *floats, y = inputs
    return [*(x.to(dtype) for x in floats), y]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FIRST_TIER)
def test_head_and_loss_equal_the_plain_path_in_fp64(name, dtype, compile):
    inputs = cast(case(t=13), dtype)
    expected, _, *exact = run(plain, *cast(inputs, torch.float64), name)
    on_gpu = [x.cuda() for x in inputs]
    loss, _, *gradients = run(fused, *on_gpu, name, compile=compile)
    assert_close(loss.double().cpu(), expected, rtol=1e-5, atol=1e-6)
    bar = 1e-5
    if dtype == torch.bfloat16:
        bar = 6e-3
    for gradient, x in zip(gradients, exact, strict=True):
        assert_near(gradient.cpu(), x, bar)


@pytest.mark.parametrize("compile", [False, True])
def test_masked_documents_are_those_of_the_cpu(compile):
    """No card has run this yet."""
    model = init_student(Qwen2Config(64, 96, 2, 4, 2, vocab_size=101))
    model.document_end = 0
    idx = torch.arange(600).view(2, 300) ** 2 % 101
    expected = model.hidden(idx)
    exact = torch.autograd.grad(expected.square().sum(), [*model.layers.parameters()])
    model.cuda()
    if compile:
        compile_layers(model)
    h = model.hidden(idx.cuda())
    gradients = torch.autograd.grad(h.square().sum(), [*model.layers.parameters()])
    assert_near(h.cpu(), expected, 1e-4)
    for gradient, x in zip(gradients, exact, strict=True):
        assert_near(gradient.cpu(), x, 1e-4, 1e-4)


def test_nccl_sums_gradients(monkeypatch):
    """In a group of one process. No card has run this yet."""
    p = torch.ones(5, device="cuda", requires_grad=True)
    p.grad = 2 * p.detach()
    processes = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", device_id=p.device, **processes)
    monkeypatch.setattr(parallel, "world", lambda: 2)  # else nothing is sent
    parallel.sum_gradients([p])
    parallel.stop()
    assert (p.grad == 2).all()


def sums(inputs):
    h_s, w_s, h_t, w_t, y = inputs
    student = (lambda _: h_s, w_s)
    row = torch.arange(len(y), device=y.device)[:, None]
    batch = (row.expand_as(y), y, y, h_t)
    (results,) = metrics.sums_by_part([student], w_t, [batch], len(y))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_metrics_are_those_of_the_cpu(dtype):
    inputs = cast(case(), dtype)
    expected = sums(inputs)
    on_gpu = sums([x.cuda() for x in inputs])
    assert (inputs[-1] == IGNORE).any()
    assert expected["ce"].any()
    for key, value in on_gpu.items():
        assert_close(value.cpu(), expected[key], rtol=1e-5, atol=1e-5)
