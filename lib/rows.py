"""The rows files that prepare.py writes: NAME.bin in a folder, and its manifest NAME.json.

NAME.bin is uint32 [n_rows, row_len], with PAD in the unused tail of a row. A run reads the rows of
one folder, or those of several, "data/a,data/b", one after the other.

Dimension key: B rows, T time.
"""

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from lib.errors import UserError
from lib.files import read_json
from lib.vocab import IGNORE

PAD = 0xFFFFFFFF  # in the unused tail of a row; no token id
BLOCK = 1 << 20  # bytes read at a time
# what readers need of a manifest
MANIFEST = ("rows", "row_len", "eos_id", "bos", "sha256", "quick_sha256", "tokenizer_sha256")
# what the rows of several folders must have in common
SHARED = (
    "row_len",
    "rule_version",
    "held_out_version",
    "val_share",
    "tokenizer_sha256",
    "vocab_size",
    "eos_id",
    "bos",
)


def read_manifest(data_dir: str | Path, name) -> dict:
    """Return the manifest of the rows NAME of a folder, or one for those of several folders.

    Its sha256 is then that of each folder, with commas between them. Its unigram CE is the mean
    over all held-out rows, each under the token frequencies of its own folder. Raises `UserError`
    if the folders' rows do not go together.
    """
    folders = f"{data_dir}".split(",")
    manifests = []
    for folder in folders:
        file = Path(folder, f"{name}.json")
        if not file.is_file() or not file.with_suffix(".bin").is_file():
            remedy = "run prepare.py with the config"
            if file.with_name("train.json").exists():  # prepare.py takes it for a finished folder
                remedy = f"move it aside, and {remedy}"
            raise UserError(f"{folder}: no {name}.bin with {name}.json; {remedy}")
        manifests.append(read_json(file, MANIFEST, f"move {folder} aside and prepare it again"))
    if len(folders) == 1:
        return manifests[0]
    hashes = [manifest["sha256"] for manifest in manifests]
    if len({*hashes}) < len(hashes):
        raise UserError(f"{data_dir}: two folders hold the same rows; name each once")
    joint = {"sha256": ",".join(hashes), "rows": sum(x["rows"] for x in manifests)}
    for key in SHARED:
        values = [manifest.get(key) for manifest in manifests]
        if len({*values}) > 1:
            raise UserError(f"{data_dir}: {key} is {values}; prepare all with one config")
        joint[key] = values[0]
    if name == "val":
        ended = [np.array(x.get("ended_in_train", [0] * x["rows"])) for x in manifests]
        # far apart, as no document goes on in the next folder
        joint["ended_in_train"] = np.concatenate([x + (n << 32) for n, x in enumerate(ended)])
    if all("unigram_ce" in manifest for manifest in manifests):
        figures = [(x["valid_targets"], x["unigram_ce"], x["unigram_half"]) for x in manifests]
        n, ce, half = np.array(figures, float).T  # half is NaN for a folder without an interval
        joint["unigram_ce"] = n @ ce / n.sum()
        joint["unigram_half"] = np.linalg.norm(n * half) / n.sum()
    return joint


def open_rows(folder: str | Path, name):
    """Return the ids [n_rows, row_len] uint32 of one folder, memory-mapped, and the manifest.

    Raises `UserError` if they do not match.
    """
    file = Path(folder) / f"{name}.bin"
    facts = read_manifest(folder, name)
    if quick_hash(file) != facts["quick_sha256"]:  # also of a file that was cut
        raise UserError(
            f"{file}: not the bytes that {name}.json describes; move {folder} aside and prepare it "
            "again"
        )
    return np.memmap(file, np.uint32, "r").reshape(-1, facts["row_len"]), facts


class Rows:
    """The rows NAME as batches for a model. An index means the same row on every process.

    data_dir  a folder, or several, whose rows come one after the other
    """

    def __init__(self, data_dir: str | Path, name, seq_len, mask_after_eos: bool, n_vocab: int):
        folders = str(data_dir).split(",")
        self.ids = ConcatDataset([open_rows(folder, name)[0] for folder in folders])
        self.manifest = read_manifest(data_dir, name)
        self.n = len(self.ids)
        self.mask_documents = False  # whether a token sees its own document alone (configure.py)
        self.first_row_step = 0  # the update that reads row 0; not 0 in a branch on other rows
        self.file = f"{folders[0]}/{name}.bin"
        self.n_vocab = n_vocab
        self.eos = self.manifest["eos_id"]
        self.mask_after_eos = mask_after_eos
        stored_len = self.manifest["row_len"] - 1
        if stored_len != seq_len:
            raise UserError(
                f"seq_len={seq_len}: {data_dir} has rows for seq_len={stored_len}; set that"
            )
        # CEs to compare a model's with: a uniform guess, and token frequencies (held-out rows only)
        self.reference_ces = {"uniform_ce": math.log(n_vocab)}
        if "unigram_ce" in self.manifest:
            self.reference_ces["unigram_ce"] = self.manifest["unigram_ce"]

    def read(self, index: np.ndarray) -> np.ndarray:
        """Return the ids [B, row_len] of the rows of these indices."""
        return np.stack([self.ids[i] for i in index])

    def batch(self, index: np.ndarray, device):
        """Return the rows of these indices as model inputs.

        -> inputs x [B, T], labels y [B, T] (IGNORE for padding)
        """
        ids = torch.from_numpy(self.read(index).astype(np.int64))
        is_pad = ids == PAD
        tokens = ids.masked_fill(is_pad, self.eos)
        if tokens.amax() >= self.n_vocab:
            raise UserError(
                f"{self.file}: an id beyond the vocabulary of {self.n_vocab} in rows {index}"
            )
        y = ids.masked_fill(is_pad, IGNORE)[:, 1:]
        if self.mask_after_eos:
            y[ids[:, :-1] == self.eos] = IGNORE
        inputs_labels = torch.stack([tokens[:, :-1], y])  # no label follows padding
        if device.type == "cuda":
            inputs_labels = inputs_labels.pin_memory()
        return inputs_labels.to(device, non_blocking=True).unbind()

    def documents(self, index: np.ndarray) -> np.ndarray:
        """Return the number of the document of each label of these rows [B, T], from 0 on."""
        ids = self.read(index)
        is_eos = ids == self.eos  # an EOS is the last token of a document
        n_ended = is_eos.cumsum().reshape(is_eos.shape) - is_eos  # before each token
        if "ended_in_train" in self.manifest:
            n_ended += np.array(self.manifest["ended_in_train"])[index, None]
        is_label = ids[:, 1:] != PAD
        numbers = np.zeros(is_label.shape, int)
        numbers[is_label] = np.unique(n_ended[:, 1:][is_label], return_inverse=True)[1]
        return numbers


def quick_hash(file) -> str:
    """Return the sha256 of a file's size and of 64 blocks of 1 MiB spread over it.

    Of a file of up to 64 MiB, all blocks are read, one after the other.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as f:
        for i in range(min(64, size // BLOCK + 1)):
            f.seek(max(i * BLOCK, i * (size - BLOCK) // 63))
            digest.update(f.read(BLOCK))
    return digest.hexdigest()


def row_order(step, batch_rows: int, n_rows: int, shuffle_seed: int | None) -> np.ndarray:
    """Return the indices of the rows of update `step`, a pure function of the step.

    Rows come in stored order; with a seed, each pass shuffles them anew. A batch may contain the
    last rows of a pass and the first ones of the next. An order of your own goes here: training,
    the teacher's cache and a student's record all call this function.
    """
    places = step * batch_rows + np.arange(batch_rows)
    nth_pass, place = np.divmod(places, n_rows)
    if shuffle_seed is not None:
        for n in np.unique(nth_pass):
            here = nth_pass == n
            place[here] = shuffled(place[here], n_rows, (shuffle_seed, int(n)))
    return place


def shuffled(i: np.ndarray, n: int, seed: tuple[int, ...]) -> np.ndarray:
    """Return the images of the indices `i` under a permutation of range(n), drawn from `seed`.

    Needs memory for these indices only, and no floating point. A Feistel network on pairs of
    numbers below `side` permutes range(side**2), where side**2 >= n. An index that it takes to n or
    beyond goes through it again until it is below n (cycle walking). The mixing function is that of
    splitmix64.
    """
    side = math.isqrt(n - 1) + 1
    keys = np.random.SeedSequence(seed).generate_state(8, np.uint64)
    i = i.astype(np.uint64)
    outside = np.full(len(i), True)
    while outside.any():
        left, right = np.divmod(i[outside], side)
        for key in keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
            mixed = (mixed ^ (mixed >> 31)) % side
            left, right = right, (left + mixed) % side
        i[outside] = left * side + right
        outside = i >= n
    return i.astype(np.int64)


def read_ahead(items: Iterator) -> Iterator:
    """Yield the items of an iterator. A thread makes the next one while the caller uses this one.

    Stops at the first item that is empty.
    """
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, items, None)
        while item := future.result():
            future = thread.submit(next, items, None)
            yield item
