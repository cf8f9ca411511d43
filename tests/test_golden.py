"""The recorded numbers of the authors' codes: loss, gradient, and the parts that the files hold."""

import numpy as np
import pytest
import torch

import losses
from tests import golden_table
from tests.golden_table import BARS, FOLDER, KEYWORDS

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden vectors at {FOLDER}")
VECTORS = golden_table.read() if FOLDER.is_dir() else []


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v.case)
def test_the_recorded_loss_and_gradient(v):
    found = golden_table.errors(v)
    assert not {column: error for column, error in found.items() if not error <= BARS[column]}


def test_every_file_is_read_and_every_first_tier_objective_has_vectors():
    assert {path.stem for path in FOLDER.glob("*.npz")} == set(KEYWORDS)
    assert len(VECTORS) > 150
    assert {v.objective for v in VECTORS} >= {"vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra"}


def test_the_table_says_whether_all_is_within_the_bars(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(golden_table, "read", lambda folder: VECTORS[::20])
    assert golden_table.main() == 0
    assert "| NO |" not in capsys.readouterr().out
    monkeypatch.setattr(golden_table, "read", lambda folder: [VECTORS[0]._replace(loss=VECTORS[0].loss * (1 + 1e-8))])
    assert golden_table.main() == 1
    assert "| NO |" in capsys.readouterr().out
    monkeypatch.undo()
    assert golden_table.main(tmp_path) == 1


def cases(name):
    file = np.load(FOLDER / f"{name}.npz")
    for i, label in enumerate(file["labels_of_cases"]):
        at = f"c{i:02d}/"
        tensors = {key: torch.from_numpy(file[at + key]).flatten(0, 1) for key in ("student_logits", "teacher_logits", "labels")}  # fmt: skip
        part = {key[len(at + "part/") :]: file[key] for key in file.files if key.startswith(at + "part/")}
        settings = {key[len(at + "hp/") :]: file[key].item() for key in file.files if key.startswith(at + "hp/")}
        yield str(label), (tensors["student_logits"], tensors["teacher_logits"], tensors["labels"]), settings, part


def test_the_pieces_of_alra():
    for label, (z_s, z_t, y), settings, part in cases("ref_alra"):
        _, keywords = KEYWORDS["ref_alra"](settings, z_s.shape[1])
        for pair in ("swpra", "pra", "pra_u"):
            terms = losses.alra_terms(z_s, z_t, y, pair=pair, **keywords)
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
