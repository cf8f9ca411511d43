"""All tests that need a GPU.

They import only torch and what is always beside it: a machine with a GPU may lack the rest.
"""

import pytest
import torch

from lib import metrics
from lib.checks import IGNORE
from tests.test_head import FIRST_TIER, case, fused, plain, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # dynamo's own
]


def cast(inputs, dtype):
    """Hidden states and heads in `dtype`; labels stay."""
    return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FIRST_TIER)
def test_head_and_loss_equal_the_plain_path_in_fp64(name, dtype, compile):
    inputs = cast(case(t=13), dtype)
    expected = run(plain, *cast(inputs, torch.float64), name)
    result = run(fused, *(x.cuda() for x in inputs), name, compile=compile)
    torch.testing.assert_close(result[0].double().cpu(), expected[0], rtol=1e-5, atol=1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 6e-3
    for a, b in zip(result[2:], expected[2:], strict=True):
        assert (a.cpu() - b).norm() <= tolerance * b.norm()


def sums(inputs):
    h_s, w_s, h_t, w_t, y = inputs
    students = [(lambda _: h_s, w_s)]
    return metrics.row_sums(students, w_t, [(0, y, y, h_t)], len(y))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_metrics_are_those_of_the_cpu(dtype):
    inputs = cast(case(), dtype)
    expected = sums(inputs)
    assert (inputs[-1] == IGNORE).any() and expected["ce"].any()
    for key, value in sums([x.cuda() for x in inputs]).items():
        torch.testing.assert_close(value.cpu(), expected[key], rtol=1e-5, atol=1e-5)
