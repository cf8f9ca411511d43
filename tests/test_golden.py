"""The recorded numbers of the authors' codes: loss, gradient, and the parts that the files hold."""

from pathlib import Path

import numpy as np
import pytest

import losses
from tests import golden_table
from tests.golden_table import BARS, FOLDER, KEYWORDS, below, logits, names

LARGER = Path(__file__).resolve().parents[2] / "shared" / "golden"  # what FOLDER was thinned from
needs_larger = pytest.mark.skipif(not LARGER.is_dir(), reason=f"no larger set of golden vectors at {LARGER}")
VECTORS = golden_table.read()


def outside(v):
    return {column: error for column, error in golden_table.errors(v).items() if not error <= BARS[column]}


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v.case)
def test_the_recorded_loss_and_gradient(v):
    assert not outside(v)


@needs_larger
def test_the_recorded_losses_and_gradients_of_the_larger_set():
    found = {v.case: outside(v) for v in golden_table.read(LARGER)}
    assert len(found) > 180 and not {case: error for case, error in found.items() if error}


def test_every_file_is_read_and_every_first_tier_objective_has_vectors():
    assert set(names()) == set(KEYWORDS)
    assert {v.case.split(": ")[0] for v in VECTORS} == set(KEYWORDS)
    assert {v.case.split(": ")[1].split("|")[0] for v in VECTORS} == {"small", "peaked_teacher"}
    assert {v.objective for v in VECTORS} >= {"vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra"}
    assert len(VECTORS) > 100


def cases(name):
    """Label, (z_s, z_t, y), settings and parts of each case."""
    for label, arrays in golden_table.cases(FOLDER, name):
        settings = {key: value.item() for key, value in below(arrays, "hp").items()}
        yield label, logits(arrays), settings, below(arrays, "part")


def test_the_pieces_of_alra():
    for label, (z_s, z_t, y), settings, part in cases("ref_alra"):
        _, keywords = KEYWORDS["ref_alra"](settings, z_s.shape[1])
        for pair in ("swpra", "pra", "pra_u"):
            terms = losses.alra(z_s, z_t, y, pair=pair, **keywords)
            np.testing.assert_allclose(terms.pair, part[pair], rtol=1e-9, err_msg=label)
        for key in ("mass", "local", "rest"):
            np.testing.assert_allclose(getattr(terms, key), part[key], rtol=1e-9, err_msg=label)
        np.testing.assert_allclose(terms.support, part["E_loc"], rtol=1e-9, err_msg=label)
        np.testing.assert_array_equal(terms.d_u, part["d_u"], err_msg=label)
        for u, (tokens, d_u) in enumerate(zip(terms.tokens.tolist(), terms.d_u.tolist(), strict=True)):
            assert sorted(tokens[:d_u]) == np.flatnonzero(part["local_set"][u]).tolist(), label


def test_the_halves_of_atkd_and_the_positions_of_sekd_and_adakd():
    for label, (z_s, z_t, y), settings, part in cases("atkd"):
        hard_only = losses.atkd(z_s, z_t, y, tau=settings["T"], easy_weight=0.0)
        np.testing.assert_array_equal(hard_only != 0, part["hard"].flatten(), err_msg=label)
    for label, (z_s, z_t, y), settings, part in cases("sekd"):
        kept = losses.sekd(z_s, z_t, y, keep=settings["k_percent"] / 100) != 0
        np.testing.assert_array_equal(kept, part["selected"].flatten(), err_msg=label)
    for label, (z_s, z_t, y), settings, part in cases("adakd"):
        _, keywords = KEYWORDS["adakd"](settings, z_s.shape[1])
        np.testing.assert_array_equal(
            losses.adakd(z_s, z_t, y, **keywords).nonzero()[:, 0], sorted(part["sel"]), err_msg=label
        )


def test_the_pieces_of_tad():
    for label, (z_s, z_t, y), settings, part in cases("ref_tad"):
        d1, d1_d2 = (
            losses.tad(z_s, z_t, y, tau=settings["T"], top_k=settings["K"], beta=b, norm="unit") for b in (0.0, 1.0)
        )
        np.testing.assert_allclose(d1, part["dkl1_tok"].flatten(), rtol=1e-9, err_msg=label)
        np.testing.assert_allclose(d1_d2 - d1, part["dkl2_tok"].flatten(), rtol=1e-9, err_msg=label)
