"""The recorded numbers of the authors' codes: loss, gradient, and the parts that the files hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

import losses
from tests import golden_table
from tests.golden_table import BARS, call, cases, names

# what FOLDER was thinned from
LARGER = Path(__file__).resolve().parents[2] / "shared" / "golden"
VECTORS = golden_table.read()


def outside(v):
    errors = golden_table.errors(v)
    return {column: error for column, error in errors.items() if not error <= BARS[column]}


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v.case)
def test_the_recorded_loss_and_gradient(v):
    assert not outside(v)


@pytest.mark.skipif(not LARGER.is_dir(), reason=f"no larger set of golden vectors at {LARGER}")
def test_the_recorded_losses_and_gradients_of_the_larger_set():
    vectors = golden_table.read(LARGER)
    assert len(vectors) > 180
    assert not [v.case for v in vectors if outside(v)]


def test_every_file_is_read_and_every_first_tier_objective_has_vectors():
    labels = [v.case.split(": ") for v in VECTORS]
    assert {file for file, _ in labels} == set(names()) and len(names()) == 26
    assert {label.split("|")[0] for _, label in labels} == {"small", "peaked_teacher"}
    first_tier = {"vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra"}
    assert {v.objective for v in VECTORS} >= first_tier
    assert len(VECTORS) > 100


def evaluated(name, **settings):
    """Each case of a file, with its parts, and its objective's result."""
    for case in cases(name):
        z_s, z_t, y = case.logits
        objective, keywords = call(name, case.settings, z_s.shape[1])
        result = getattr(losses, objective)(z_s, z_t, y, **keywords | settings)
        yield case, case.below("part"), result


@pytest.mark.parametrize("pair", ["swpra", "pra", "pra_u"])
def test_the_pieces_of_alra(pair):
    for case, part, terms in evaluated("ref_alra", pair=pair):
        expected = {"pair": part[pair], "support": part["E_loc"], "d_u": part["d_u"]}
        expected |= {key: part[key] for key in ("mass", "local", "rest")}
        for key, value in expected.items():
            np.testing.assert_allclose(getattr(terms, key), value, rtol=1e-9, err_msg=case.label)
        for u, d_u in enumerate(terms.d_u):
            local = terms.tokens[u, :d_u].tolist()
            assert sorted(local) == np.flatnonzero(part["local_set"][u]).tolist(), case.label


@pytest.mark.parametrize(
    ("name", "key", "settings"),
    [("atkd", "hard", {"easy_weight": 0.0}), ("sekd", "selected", {})],
)
def test_the_recorded_positions(name, key, settings):
    for case, part, loss in evaluated(name, **settings):
        np.testing.assert_array_equal(loss != 0, part[key].flatten(), err_msg=case.label)


def test_the_hardest_positions_of_adakd():
    for case, part, loss in evaluated("adakd"):
        hardest = loss.nonzero()[:, 0]
        np.testing.assert_array_equal(hardest, sorted(part["sel"]), err_msg=case.label)


def test_the_pieces_of_tad():
    head_only = evaluated("ref_tad", beta=0.0, norm="unit")
    both = evaluated("ref_tad", beta=1.0, norm="unit")
    for (case, part, d1), (_, _, d1_d2) in zip(head_only, both, strict=True):
        for value, key in ((d1, "dkl1_tok"), (d1_d2 - d1, "dkl2_tok")):
            expected = part[key].flatten()
            np.testing.assert_allclose(value, expected, rtol=1e-9, err_msg=case.label)


@pytest.mark.parametrize("name", ["skew_fkl", "taid", "todi", "ref_topk_tail"])
def test_the_recorded_number_of_each_position(name):
    for case, part, loss in evaluated(name):
        expected = torch.from_numpy(part["tok"]).flatten()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12, msg=case.label)


def test_the_recorded_head_of_akl():
    for case, part, loss in evaluated("akl"):
        z_s, z_t, _ = case.logits
        keys = ("h_ratio", "fkl", "rkl")
        h, forward, reverse = (torch.from_numpy(part[key]).flatten(0, 1) for key in keys)
        expected = h * forward + (1 - h) * reverse
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0, msg=case.label)
        share = losses._head_share(z_s, z_t, case.settings["mu"])
        torch.testing.assert_close(share, h[:, None], rtol=1e-9, atol=0, msg=case.label)
