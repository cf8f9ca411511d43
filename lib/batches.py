"""Prepared rows as inputs and labels.

Dimension key: B rows, T time.
"""

import numpy as np
import torch
from torch import Tensor

from lib.checks import IGNORE
from lib.files import UserError
from lib.rows import PAD, open_rows


class Rows:
    """A rows file as batches. The same index gives the same row to everyone."""

    def __init__(self, folder: str, name: str, seq_len: int, mask_after_eos: bool, n_vocab: int):
        self.ids, self.manifest = open_rows(folder, name)  # [n, seq_len + 1]
        self.file, self.n_vocab = f"{folder}/{name}.bin", n_vocab
        self.n, width = self.ids.shape
        if width != seq_len + 1:
            raise UserError(f"seq_len={seq_len}: {folder} has rows for seq_len={width - 1}; prepare again or set it")
        self.eos, self.mask_after_eos = self.manifest["eos_id"], mask_after_eos

    def check(self) -> None:
        """`UserError` where no row has a valid target. Most often the first one has."""
        if not any(self.batch(np.array([i]), torch.device("cpu"))[2] for i in range(self.n)):
            raise UserError(f"{self.file}: no valid target in any row; prepare it from more text")

    def batch(self, index: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Rows of these indices -> inputs x [B, T], labels y [B, T] (IGNORE where there is none), number of labels."""
        ids = self.ids[index].astype(np.int64)
        x, y = ids[:, :-1], ids[:, 1:].copy()
        y[y == PAD] = IGNORE
        if self.mask_after_eos:
            y[x == self.eos] = IGNORE
        bad = (ids >= self.n_vocab) & (ids != PAD)
        if bad.any():
            row = index[bad.any(1)][0]
            raise UserError(
                f"{self.file}: id {ids[bad][0]} in row {row}, with a vocabulary of {self.n_vocab}; prepare it again"
            )
        x = np.where(x == PAD, self.eos, x)  # causal attention keeps padding from every valid position
        n_valid = int((y != IGNORE).sum())
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        if device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True), n_valid
