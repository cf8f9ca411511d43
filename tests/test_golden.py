"""The recorded numbers of the authors' codes: loss, gradient, and the parts that the files hold."""

from pathlib import Path

import pytest
import torch

import losses
from tests import golden_table
from tests.golden_table import BARS, call, cases, names

VECTORS = golden_table.read()
# what FOLDER was thinned from
LARGER = Path(__file__).resolve().parents[2] / "shared/golden"


def is_near(v):
    errors = golden_table.errors(v)
    return all(error <= BARS[column] for column, error in errors.items())


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v.case)
def test_the_recorded_loss_and_gradient(v):
    assert is_near(v), golden_table.errors(v)


@pytest.mark.skipif(not LARGER.is_dir(), reason=f"no larger set of golden vectors at {LARGER}")
def test_the_recorded_losses_and_gradients_of_the_larger_set():
    vectors = golden_table.read(LARGER)
    assert len(vectors) > 180
    assert not [v.case for v in vectors if not is_near(v)]


def test_every_file_is_read_and_every_first_tier_objective_has_vectors():
    files = {v.case.split(": ")[0] for v in VECTORS}
    kinds = {v.case.split(": ")[1].split("|")[0] for v in VECTORS}
    assert files == set(names())
    assert kinds == {"small", "peaked_teacher"}
    first_tier = {"vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra"}
    assert first_tier <= {v.objective for v in VECTORS}
    assert len(files) == 26
    assert len(VECTORS) > 100


def evaluated(name, **settings):
    """Each case of a file, its parts [N] or [N, ..], and its objective's result."""
    for case in cases(name):
        z_s, z_t, y = case.logits
        objective, keywords = call(name, case.settings, z_s.shape[1])
        keywords |= settings
        result = getattr(losses, objective)(z_s, z_t, y, **keywords)
        parts = {}
        for key, value in case.below("part").items():
            parts[key] = torch.from_numpy(value)
        yield case, parts, result


def assert_recorded(got, expected, case):
    expected = expected.flatten().to(got.dtype)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12, msg=case.label)


@pytest.mark.parametrize("pair", ["swpra", "pra", "pra_u"])
def test_the_pieces_of_alra(pair):
    for case, parts, terms in evaluated("ref_alra", pair=pair):
        assert_recorded(terms.pair, parts[pair], case)
        assert_recorded(terms.support, parts["E_loc"], case)
        for key in ("mass", "local", "rest", "d_u"):
            assert_recorded(getattr(terms, key), parts[key], case)
        for u, d_u in enumerate(terms.d_u):
            local = terms.tokens[u, :d_u].sort().values
            assert_recorded(local, parts["local_set"][u].nonzero(), case)


@pytest.mark.parametrize(
    ("name", "key", "settings"),
    [
        ("atkd", "hard", {"easy_weight": 0.0}),
        ("sekd", "selected", {}),
    ],
)
def test_the_recorded_positions(name, key, settings):
    for case, parts, loss in evaluated(name, **settings):
        assert_recorded(loss != 0, parts[key], case)


def test_the_pieces_of_tad():
    head_only = evaluated("ref_tad", beta=0.0, norm="unit")
    both = evaluated("ref_tad", beta=1.0, norm="unit")
    for (case, parts, d1), (_, _, sum_of_both) in zip(head_only, both, strict=True):
        assert_recorded(d1, parts["dkl1_tok"], case)
        assert_recorded(sum_of_both - d1, parts["dkl2_tok"], case)


@pytest.mark.parametrize("name", ["skew_fkl", "taid", "todi", "ref_topk_tail"])
def test_the_recorded_number_of_each_position(name):
    for case, parts, loss in evaluated(name):
        assert_recorded(loss, parts["tok"], case)


def test_the_recorded_head_of_akl():
    for case, parts, loss in evaluated("akl"):
        h = parts["h_ratio"]
        assert_recorded(loss, h * parts["fkl"] + (1 - h) * parts["rkl"], case)
        z_s, z_t, _ = case.logits
        q = z_s.softmax(-1)
        share = losses._head_share(q, z_t.log_softmax(-1), case.settings["mu"])
        assert_recorded(share[:, 0], h, case)
