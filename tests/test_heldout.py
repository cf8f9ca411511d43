"""The scorer of held-out rows: products of the training path, few waits. Its figures are tested in test_eval.py."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib import heldout
from lib.checks import IGNORE

B, T, D, V = 3, 7, 5, 101


def case(dtype):
    g = torch.Generator().manual_seed(0)
    h_s, h_t, w_s, w_t = (torch.randn(*shape, generator=g) for shape in ((B, T, D), (B, T, D), (V, D), (V, D)))
    y = torch.randint(V, (B, T), generator=g)
    y[1, 3:] = IGNORE
    return (lambda x: h_s.to(dtype), w_s), (lambda x: h_t.to(dtype), w_t.to(dtype)), y


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.n = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        whole_head = isinstance(found, torch.Tensor) and found.shape == (V, D)
        self.n[op.overloadpacket.__name__ + " of a head" * whole_head] += 1
        if op is torch.ops.aten.index.Tensor:  # by a mask it counts what is kept, which a GPU waits for
            self.n["nonzero"] += any(i is not None and i.dtype == torch.bool for i in args[1])
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_waits_once_and_a_head_is_cast_once(dtype, monkeypatch):
    student, teacher, y = case(dtype)
    monkeypatch.setitem(heldout.N_LOGITS, "cpu", 4 * V)
    with Count() as count:
        (found,) = heldout.row_sums([student], teacher, [(0, y, y), (0, y, y)], B)
    waits = {op: n for op, n in count.n.items() if op in ("nonzero", "masked_select", "_local_scalar_dense", "item")}
    assert waits == {"nonzero": 2} and count.n["mm"] == 2 * 2 * 5  # two batches, two models, 18 positions by fours
    casts = {torch.float32: 0, torch.bfloat16: 3}[dtype]  # the student's to bf16; on the CPU both to fp32
    assert count.n["_to_copy of a head"] == casts
    h, w = student[0](None).float(), student[1].to(dtype).float()
    ce = torch.nn.functional.cross_entropy(h.flatten(0, 1) @ w.T, y.flatten(), ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(found["ce"], 2 * ce.view(B, T).sum(1).double(), rtol=1e-6, atol=0)
