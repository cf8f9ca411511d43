"""The recorded numbers of the authors' codes: loss and gradient."""

from pathlib import Path

import pytest

from tests import golden_table
from tests.golden_table import BARS, names

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
