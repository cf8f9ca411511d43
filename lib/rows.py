"""The rows file that `prepare.py` writes and the other scripts read.

`<data_dir>/NAME.bin`: uint32, row-major [n_rows, row_len], PAD in the unused tail of a row. `NAME.json`: its manifest.
"""

import functools
import hashlib
from pathlib import Path

import numpy as np

from lib.files import UserError, read_json

PAD = 0xFFFFFFFF  # in the unused tail of a row; no token id
# What readers need of a manifest.
MANIFEST = {"rows": int, "row_len": int, "eos_id": int, "sha256": str, "quick_sha256": str, "tokenizer_sha256": str}
BLOCK = 1 << 20  # bytes read at a time


def open_rows(folder: str | Path, name: str) -> tuple[np.ndarray, dict]:
    """The ids [n_rows, row_len] uint32, memory-mapped, and the manifest. `UserError` where they do not match."""
    file, manifest = Path(folder) / f"{name}.bin", Path(folder) / f"{name}.json"
    if not manifest.is_file() or not file.is_file():
        more = ", with val_rows or val_share above 0" if name == "val" else ""
        raise UserError(f"{folder}: no {name}.bin with {name}.json there; run prepare.py with the same config{more}")
    facts = read_json(manifest, MANIFEST, "prepare it again")
    n, width, size = facts["rows"], facts["row_len"], file.stat().st_size
    if size != n * width * 4:
        raise UserError(f"{file}: {size:,} bytes, expected {n * width * 4:,} by {manifest.name}; prepare it again")
    if not size:
        raise UserError(f"{file}: no rows; prepare it again")
    if quick_hash(file) != facts["quick_sha256"]:
        raise UserError(f"{file}: not the bytes that {manifest.name} describes; prepare it again")
    return np.memmap(file, np.uint32, "r", shape=(n, width)), facts


def quick_hash(file: Path) -> str:
    """sha256 of a file's size and of 64 blocks of 1 MiB spread over it, so of the whole file up to 64 MiB."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as f:
        for i in range(64):
            f.seek(max(i * BLOCK, i * (size - BLOCK) // 63))
            digest.update(f.read(BLOCK))
    return digest.hexdigest()


def row_order(step: int, batch_rows: int, n_rows: int, shuffle_seed: int | None) -> np.ndarray:
    """The rows of update `step`, a pure function of the step: in stored order, or newly shuffled for each pass."""
    place = np.arange(step * batch_rows, (step + 1) * batch_rows)
    if shuffle_seed is None:
        return place % n_rows
    return np.array([shuffled(n_rows, shuffle_seed, int(i) // n_rows)[i % n_rows] for i in place])


@functools.lru_cache(maxsize=2)  # an update may reach from one pass into the next
def shuffled(n_rows: int, seed: int, nth_pass: int) -> np.ndarray:
    return np.random.default_rng((seed, nth_pass)).permutation(n_rows)
