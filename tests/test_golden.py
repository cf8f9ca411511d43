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


@pytest.mark.parametrize("pair", ["swpra", "pra", "pra_u"])
def test_the_pieces_of_alra(pair):
    names = {"pair": pair, "support": "E_loc", "mass": "mass", "local": "local", "rest": "rest"}
    names["d_u"] = "d_u"
    for case in cases("ref_alra"):
        z_s, z_t, y = case.logits
        _, keywords = call("ref_alra", case.settings, z_s.shape[1])
        terms = losses.alra(z_s, z_t, y, **keywords | {"pair": pair})
        parts = {key: torch.from_numpy(part) for key, part in case.below("part").items()}
        for key, recorded in names.items():
            got = getattr(terms, key)
            expected = parts[recorded].flatten().to(got.dtype)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12, msg=case.label)
        for u, d_u in enumerate(terms.d_u):
            local = terms.tokens[u, :d_u].sort().values
            assert torch.equal(local, parts["local_set"][u].nonzero().flatten())
