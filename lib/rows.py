"""The rows file that `prepare.py` writes: `<data_dir>/NAME.bin`, uint32 [n_rows, row_len], PAD in the unused tail; NAME.json is its manifest.

Dimension key: B rows, T time.
"""

import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lib.checks import IGNORE
from lib.errors import require
from lib.files import read_json

PAD = 0xFFFFFFFF  # in the unused tail of a row; no token id
BLOCK = 1 << 20  # bytes read at a time
MANIFEST = ("rows", "row_len", "eos_id", "bos", "sha256", "quick_sha256", "tokenizer_sha256")  # what readers need of it


def open_rows(folder: str | Path, name: str) -> tuple[np.ndarray, dict]:
    """The ids [n_rows, row_len] uint32, memory-mapped, and the manifest. Raises `UserError` if they do not match."""
    file, manifest = Path(folder) / f"{name}.bin", Path(folder) / f"{name}.json"
    exist, remedy = manifest.is_file() and file.is_file(), f"move {folder} aside and prepare it again"
    require(exist, f"{folder}: no {name}.bin with {name}.json; run prepare.py with the same config")
    facts = read_json(manifest, MANIFEST, remedy)
    n, width, size = facts["rows"], facts["row_len"], file.stat().st_size
    require(size == n * width * 4 > 0, f"{file}: {size:,} bytes, expected {n * width * 4:,}; {remedy}")
    described = quick_hash(file) == facts["quick_sha256"]
    require(described, f"{file}: not the bytes that {manifest.name} describes; {remedy}")
    return np.memmap(file, np.uint32, "r", shape=(n, width)), facts


class Rows:
    """A rows file as batches. The same index gives the same row on every process."""

    def __init__(self, folder: str, name: str, seq_len: int, mask_after_eos: bool, n_vocab: int):
        self.ids, self.manifest = open_rows(folder, name)  # [n, seq_len + 1]
        self.file, self.n_vocab, (self.n, width) = f"{folder}/{name}.bin", n_vocab, self.ids.shape
        fits = width == seq_len + 1
        require(fits, f"seq_len={seq_len}: {folder} has rows for seq_len={width - 1}; set that, or prepare again")
        self.eos, self.mask_after_eos = self.manifest["eos_id"], mask_after_eos
        # CEs that a model's is read against: of a uniform guess, ln V, and of token frequencies (held-out rows alone)
        self.levels = {"uniform_ce": math.log(n_vocab)} | {k: x for k, x in self.manifest.items() if k == "unigram_ce"}

    def batch(self, index: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Rows of these indices -> inputs x [B, T], labels y [B, T] (IGNORE for padding), number of labels."""
        ids = self.ids[index].astype(np.int64)
        pad = ids == PAD
        known = (ids[~pad] < self.n_vocab).all()
        require(known, f"{self.file}: an id beyond the vocabulary of {self.n_vocab} in rows {index}; prepare it again")
        x = np.where(pad, self.eos, ids)[:, :-1]  # causal attention keeps padding from every valid position
        y = np.where(pad, IGNORE, ids)[:, 1:]
        if self.mask_after_eos:
            y[ids[:, :-1] == self.eos] = IGNORE
        n_valid = int((y != IGNORE).sum())
        x, y = (torch.from_numpy(np.ascontiguousarray(a)) for a in (x, y))
        if device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True), n_valid


def quick_hash(file: Path) -> str:
    """sha256 of a file's size and of 64 blocks of 1 MiB spread over it, so of the whole file up to 64 MiB."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as f:
        for i in range(min(64, size // BLOCK + 1)):
            f.seek(max(i * BLOCK, i * (size - BLOCK) // 63))
            digest.update(f.read(BLOCK))
    return digest.hexdigest()


def row_order(step: int, batch_rows: int, n_rows: int, shuffle_seed: int | None) -> np.ndarray:
    """The rows of update `step`, a pure function of the step: in stored order, or newly shuffled for each pass."""
    nth_pass, place = np.divmod(np.arange(step * batch_rows, (step + 1) * batch_rows), n_rows)
    if shuffle_seed is None:
        return place
    seeds = [(shuffle_seed, int(i)) for i in np.unique(nth_pass)]
    return np.concatenate([shuffled(place[nth_pass == seed[1]], n_rows, seed) for seed in seeds])


def shuffled(i: np.ndarray, n: int, seed: tuple[int, ...]) -> np.ndarray:
    """Where a permutation of range(n), drawn from `seed`, takes the indices `i`. Only these are computed, by integers alone.

    A Feistel network on pairs of numbers below `side` permutes range(side**2), where side**2 >= n. What it takes to n or
    beyond goes through it again until it is below (cycle walking). The mixing is splitmix64's.
    """
    side, keys = math.isqrt(n - 1) + 1, np.random.SeedSequence(seed).generate_state(8, np.uint64)
    i, outside = i.astype(np.uint64), np.full(len(i), True)
    while outside.any():
        left, right = np.divmod(i[outside], side)
        for key in keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
            left, right = right, (left + (mixed ^ (mixed >> 31)) % side) % side
        i[outside] = left * side + right
        outside = i >= n
    return i.astype(np.int64)
