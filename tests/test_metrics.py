"""lib/metrics.py: figures as in plain loops, extremes, intervals."""

import math

import numpy as np
import pytest
import torch

from lib import metrics
from lib.stats import half_interval
from lib.vocab import IGNORE
from model import Qwen2Config
from tests.world import make_model

STUDENT = Qwen2Config(24, 53, 2, 4, 2, vocab_size=311, max_position_embeddings=600)
TEACHER = Qwen2Config(36, 61, 3, 3, 1, vocab_size=311, tie_word_embeddings=False)


def test_figures_equal_plain_loops():
    """Two rows at a time; token 0, which stands for no text, is inside."""
    student = make_model(STUDENT, 5, 7.0)
    teacher = make_model(TEACHER, 6, 7.0)
    rng = np.random.default_rng(5)
    ids = torch.from_numpy(rng.integers(1, 307, (11, 23)))
    ids[3, 8] = 0
    n_bytes = torch.from_numpy(rng.integers(1, 9, 311))
    n_bytes[0] = 0
    x = ids[:, :-1]
    y = ids[:, 1:].clone()
    y[2, 16:] = IGNORE
    y[5, 1:] = IGNORE
    row = torch.arange(11)[:, None].expand_as(x)
    batches = []
    for part in torch.arange(11).split(2):
        batches.append((row[part], x[part], y[part], teacher.hidden(x[part])))
    models = [(student.hidden, student.head)]
    (sums,) = metrics.sums_by_part(models, teacher.head, batches, 11, n_bytes)
    totals = {key: value.numpy().sum(0) for key, value in sums.items()}
    figures = metrics.figures(totals)
    keep = y.flatten() != IGNORE
    labels = y.flatten()[keep].numpy()
    s, t = (
        model(x).flatten(0, 1)[keep].double().softmax(-1).numpy() for model in (student, teacher)
    )
    at = np.arange(len(labels))
    nats = -np.log(s[at, labels])
    top_s, top_t = (np.argsort(-p)[:, :5] for p in (s, t))
    gaps = [0.0] * 15
    for i in at:
        gaps[math.ceil(s[i].max() * 15) - 1] += s[i].max() - (top_s[i, 0] == labels[i])
    is_text = labels != 0
    expected = {
        "ce": nats.mean(),
        "teacher_ce": -np.log(t[at, labels]).mean(),
        "teacher_entropy": -(t * np.log(t)).sum(-1).mean(),
        "kl": (t * np.log(t / s)).sum(-1).mean(),
        "top1": (top_s[:, 0] == top_t[:, 0]).mean(),
        "top5": np.mean([np.isin(*pair).mean() for pair in zip(top_s, top_t, strict=True)]),
        "bits_per_byte": nats[is_text].sum() / math.log(2) / n_bytes.numpy()[labels].sum(),
        "ece": np.abs(gaps).sum() / len(labels),
    }
    assert totals["n"] == len(labels)
    assert figures == pytest.approx(expected, rel=1e-5)


def test_extremes_have_a_bin_or_no_ce():
    """A probability of exactly 1 falls into the last bin. A logit that is no number makes NaN."""
    y = torch.tensor([[0, 3]])
    h = torch.tensor([[[3.0, 1.0, 0.0, 2.0, 4.0], [0.0, 2.0, 1.0, 3.0, 4.0]]])
    head = torch.eye(5)
    models = [(lambda x, scale=scale: scale * h, head) for scale in (1.0, -900.0, math.nan)]
    sums, certain, of_nan = metrics.sums_by_part(models, head, [(y, y, y, h)], 4)
    assert sums["top5"].sum() == sums["n"].sum() == 2
    assert certain["gap"][:, -1].sum() == 2  # both are wrong
    assert of_nan["ce"].isnan().sum() == of_nan["n"].sum() == 2


@pytest.mark.parametrize(("n_documents", "has_one"), [(1, False), (4, False), (5, True)])
def test_few_documents_have_no_interval(n_documents, has_one):
    """One without a target does not count."""
    n = np.array([0, *[9] * n_documents])
    assert math.isfinite(half_interval(n * 2.0 + np.arange(len(n)), n)) == has_one
