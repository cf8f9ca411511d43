"""A run in chunks of positions gives what it gives at once (each method: test_head.py)."""

import shutil

import safetensors.torch
from torch.testing import assert_close

import train
from tests.world import config


def test_students_of_a_run_see_chunks_of_rows_in_groups_and_stored_teachers(tiny, tmp_path):
    """One of them is not divided, and has the same bits."""
    methods = ("alra", "tad", "adakd")
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
