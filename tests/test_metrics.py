"""lib/metrics.py: figures as in plain loops; products of the training path, few waits."""

import collections
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib import metrics
from lib.rows import IGNORE
from model import Qwen2Config
from tests import world

STUDENT = Qwen2Config(24, 53, 2, 4, 2, vocab_size=311)
TEACHER = Qwen2Config(36, 61, 3, 3, 1, vocab_size=311, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def models():
    return world.make_model(STUDENT, 5, 7.0), world.make_model(TEACHER, 6, 7.0)


@pytest.fixture(scope="module")
def batch():
    """Inputs and labels [11, 22], and bytes of each token; 0, which has none, stands inside."""
    rng = np.random.default_rng(5)
    ids, n_bytes = torch.from_numpy(rng.integers(1, 307, (11, 23))), torch.from_numpy(rng.integers(1, 9, 311))
    ids[3, 8] = n_bytes[0] = 0
    y = ids[:, 1:].clone()
    for row, n in ((2, 16), (5, 1), (7, 18)):
        y[row, n:] = IGNORE
    return ids[:, :-1], y, n_bytes


def sums_of(students, teacher, batch, size=11, n_bytes=None):
    x, y, _ = batch
    h_t, head_t = (teacher.hidden(x), teacher.head) if teacher else (x, None)
    parts = [(first, *(t[first : first + size] for t in (x, y, h_t))) for first in range(0, len(x), size)]
    students = [(m.hidden, m.head) for m in students]
    return [{k: v.numpy() for k, v in s.items()} for s in metrics.row_sums(students, head_t, parts, len(x), n_bytes)]


def test_figures_equal_plain_loops(models, batch):
    (student, teacher), (x, y, n_bytes) = models, batch
    sums = sums_of([student], teacher, batch, 2, n_bytes)[0]
    got = metrics.figures({key: value.sum(0) for key, value in sums.items()})
    total, bins = collections.Counter(), [[] for _ in range(15)]
    p_s, p_t = (m(x).double().softmax(-1).flatten(0, 1).numpy() for m in (student, teacher))
    for s, t, label in zip(p_s, p_t, y.flatten().tolist(), strict=True):
        if label != IGNORE:
            best_s, best_t = np.argsort(-s), np.argsort(-t)
            total["n"] += 1
            total["ce"] -= math.log(s[label])
            total["teacher_ce"] -= math.log(t[label])
            total["teacher_entropy"] -= sum(b * math.log(b) for b in t)
            total["kl"] += sum(b * math.log(b / a) for a, b in zip(s, t, strict=True))
            total["top1"] += best_s[0] == best_t[0]
            total["top5"] += len(set(best_s[:5]) & set(best_t[:5])) / 5
            total["text_ce"] -= math.log(s[label]) if label else 0
            total["text_bytes"] += int(n_bytes[label])
            p = s[best_s[0]]
            bins[math.ceil(p * 15) - 1].append(p - (best_s[0] == label))
    wanted = {key: total[key] / total["n"] for key in ("ce", *metrics.TEACHER_KEYS)}
    wanted |= {"bits_per_byte": total["text_ce"] / total["text_bytes"] / math.log(2)}
    wanted |= {"ece": sum(abs(sum(b)) for b in bins) / total["n"]}
    assert total["n"] == sums["n"].sum() and got == pytest.approx(wanted, rel=1e-5)


def test_a_student_is_scored_alike_alone_and_in_company(models, batch):
    student, teacher = models
    other, n_bytes = world.make_model(STUDENT, 8, 7.0), batch[2]
    (alone,), (_, both) = (sums_of(some, teacher, batch, n_bytes=n_bytes) for some in ([student], [other, student]))
    (bare,) = sums_of([student], None, batch, 1, n_bytes)
    for key in alone:
        np.testing.assert_array_equal(alone[key], both[key])
        if key not in metrics.TEACHER_KEYS:
            np.testing.assert_allclose(alone[key], bare[key], rtol=1e-5, atol=1e-5)
    assert set(metrics.TEACHER_KEYS).isdisjoint(bare)


def test_a_certain_student_falls_into_the_last_bin(batch):
    certain = world.make_model(STUDENT, 5, 900.0)
    gap, z = sums_of([certain], None, batch)[0]["gap"], certain(batch[0][:1])[0]
    assert (z.softmax(-1).amax(-1) == 1).any()  # exactly, in fp32
    wrong = (z.argmax(-1) != batch[1][0]).sum()
    assert gap[0].sum() == pytest.approx(wrong, abs=0.5) and gap[0, -1] > 0.9 * wrong


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
    monkeypatch.setattr(metrics, "LEAST", 4)
    monkeypatch.setitem(metrics.N_LOGITS, "cpu", 1)
    with Count() as count:
        (found,) = metrics.row_sums([student], teacher[1], [(0, y, y, teacher[0](y))] * 2, B)
    waits = {op: n for op, n in count.n.items() if op in ("nonzero", "masked_select", "_local_scalar_dense", "item")}
    assert waits == {"nonzero": 2} and count.n["mm"] == 2 * 2 * 5  # two batches, two models, 18 positions by fours
    casts = {torch.float32: 0, torch.bfloat16: 3}[dtype]  # the student's to bf16; on the CPU both to fp32
    assert count.n["_to_copy of a head"] == casts
    h, w = student[0](None).float(), student[1].to(dtype).float()
    ce = torch.nn.functional.cross_entropy(h.flatten(0, 1) @ w.T, y.flatten(), ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(found["ce"], 2 * ce.view(B, T).sum(1).double(), rtol=1e-6, atol=0)
