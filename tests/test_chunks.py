"""A forward batch in chunks of positions gives what it gives at once."""

import shutil

import pytest
import safetensors.torch
import torch
from torch.testing import assert_close

import train
from losses import METHODS, resolve, with_sequences
from run.methods import head_losses
from tests.test_head import case
from tests.world import config


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].in_chunks])
def test_chunks_change_nothing(name, group):
    settings = {"d_max": 5} if name == "alra" else {}
    results = []
    for chunk in (512, 3):
        h_s, w_s, h_t, w_t, y = case(dtype=torch.float64)
        h_s.requires_grad_()
        w_s.requires_grad_()
        student = (h_s, w_s, with_sequences(resolve(name, **settings), group))
        ((loss, terms),) = head_losses([student], h_t, w_t, y, group, chunk=chunk)
        loss.backward()
        results.append((loss.detach(), terms, h_s.grad, w_s.grad))
    whole, chunked = results
    assert_close(chunked, whole, rtol=1e-10, atol=1e-13)


def test_students_of_a_run_see_chunks_of_rows_in_groups_and_stored_teachers(tiny, tmp_path):
    """One of them is not divided, and has the same bits."""
    methods = ("pretrain", "alra", "tad", "atkd", "sekd", "adakd")
    flags = f"--methods={','.join(methods)} --group=2 --max_steps=2 --checkpoint_every_steps=2"
    shutil.copytree(tiny, tmp_path / "world")
    for out, more in (("whole", ""), ("chunks", " --chunk_positions=7 --teacher_cache=True")):
        assert train.distil(config(tmp_path / "world", tmp_path / out, flags + more)) == 0
    same_bits = set()
    for method in methods:
        folders = [tmp_path / out / method / "model" for out in ("whole", "chunks")]
        whole, chunks = (safetensors.torch.load_file(f / "model.safetensors") for f in folders)
        tolerance = 0 if method == "adakd" else 1e-6
        assert_close(chunks, whole, rtol=tolerance, atol=tolerance)
        if all(chunks[key].equal(whole[key]) for key in whole):
            same_bits.add(method)
    assert "adakd" in same_bits and "alra" not in same_bits
