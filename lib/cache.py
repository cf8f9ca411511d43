"""The teacher's last hidden states of the rows, stored beside them: one pass of the teacher for all runs, seeds and methods.

DATA_DIR/teacher_KEY.safetensors   its head; KEY is of the teacher's content and the dtype of its activations
DATA_DIR/teacher_KEY.NAME.bin      [rows, seq_len, D] of that dtype, for NAME.bin; KEY is of the rows' content too
DATA_DIR/teacher_KEY.NAME.map      uint64 of each row: 2**32 + its checksum, or 0 while it is missing

Every objective stays exact over the whole vocabulary, as it would not from stored top-K logits. A checksum is of KEY, the
row's number and its bytes: whatever a kill, a full disk or a copy left behind, no row is taken for another or for whole.
"""

import hashlib
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from configure import Config
from lib import parallel
from lib.device import gib
from lib.files import UserError, atomic_write, reading, require, writing
from lib.identity import content_hash
from lib.rows import Rows, open_rows
from lib.run import say
from lib.teacher import Teacher, foreign_config

Wanted = dict[Rows, np.ndarray]  # the numbers of the rows that are read, by file


class States:
    """The stored hidden states of one rows file. B rows of a batch, T time, D width."""

    def __init__(self, rows: Rows, teacher: str, dtype: torch.dtype, width: int):
        self.key, self.dtype = hash_of(teacher, dtype, rows.manifest["sha256"]), dtype
        self.shape, self.row_bytes = (rows.ids.shape[1] - 1, width), (rows.ids.shape[1] - 1) * width * dtype.itemsize
        self.file = Path(rows.file).with_name(f"teacher_{self.key}.{Path(rows.file).name}")
        self.map = self.file.with_suffix(".map")
        self.sizes = {self.file: rows.n * self.row_bytes, self.map: rows.n * 8}
        whole = all(file.is_file() and file.stat().st_size == size for file, size in self.sizes.items())
        self.sums = np.memmap(self.map, np.uint64, "r") if whole else np.zeros(rows.n, np.uint64)

    def checksums(self, index: np.ndarray, h: Tensor) -> np.ndarray:
        own = (zlib.crc32(x, zlib.crc32(f"{self.key} {i}".encode())) for i, x in zip(index, as_bytes(h), strict=True))
        return 2**32 + np.fromiter(own, np.uint64, len(index))

    def read(self, index: np.ndarray, pin: bool) -> tuple[Tensor, np.ndarray]:
        """-> [B, T, D] on the CPU; which of the rows [B] are as they were written"""
        h = torch.empty((len(index), *self.shape), dtype=self.dtype, pin_memory=pin)
        with reading(self.file), self.file.open("rb", buffering=0) as file:
            for i, into in zip(index.tolist(), as_bytes(h), strict=True):
                file.seek(i * self.row_bytes)
                file.readinto(into)
        return h, self.checksums(index, h) == self.sums[index]

    def write(self, index: np.ndarray, h: Tensor) -> None:
        """Store rows [B, T, D]. Several processes may write at a time."""
        for file, size in self.sizes.items():
            with writing(file), file.open("ab"):
                os.truncate(file, size)
        h = h.cpu().contiguous()
        self.put(self.file, index, as_bytes(h))
        self.put(self.map, index, self.checksums(index, h))  # after the bytes
        self.sums = np.memmap(self.map, np.uint64, "r")  # shows what other processes write too

    def put(self, path: Path, index: np.ndarray, values: np.ndarray) -> None:
        with writing(path), path.open("r+b") as file:
            for i, value in zip(index.tolist(), values, strict=True):
                file.seek(i * value.nbytes)
                file.write(value)


class CachedTeacher:
    """As `Teacher`, for rows whose hidden states are stored; `body` computes and stores those that are missing."""

    def __init__(self, head: Tensor, states: dict[str, States], body: Teacher | None):
        self.head, self.states, self.body = head, states, body
        # sharded layers compute on all processes or on none, whatever each of them could read
        self.always = body is not None and any(map(parallel.is_sharded, body.model.modules()))

    def hidden(self, x: Tensor, rows: Rows, index: np.ndarray) -> Tensor:
        """Inputs [B, T], which are the rows `index` -> last hidden states [B, T, D]. One that is missing: all are computed."""
        states, pin = self.states[rows.file], self.head.is_cuda
        stored = states.sums[index] > 0
        if not self.always and (stored.all() or not self.body):
            h, stored = states.read(index, pin)
            if stored.all():
                return h.to(self.head.device, non_blocking=True)
        new = index[~stored]
        if not self.body:
            states.put(states.map, new, np.zeros(len(new), np.uint64))
            raise UserError(f"{states.file}: row {new[0]} is not as it was written; the same command computes it anew")
        h = self.body.hidden(x)
        if len(new):
            states.write(new, h[torch.from_numpy(~stored).to(h.device)])
        return h

    def flops_per_token(self, seq_len: int) -> float:
        return self.body.flops_per_token(seq_len) if self.body else 0.0


def open_cached(
    name: str, dtype: torch.dtype, home: torch.device, vocab_size: int, wanted: Wanted, load: Callable[[], Teacher] | None = None,
) -> CachedTeacher | None:  # fmt: skip
    """The teacher of these rows. If states are missing it has the body that `load` makes; without `load` it is None."""
    sha, folder, head, body = content_hash(name), Path(next(iter(wanted)).file).parent, None, None
    file, remedy = folder / f"teacher_{hash_of(sha, dtype)}.safetensors", "delete it, and it is written anew"
    if file.is_file():
        with reading(file, remedy):
            head, checksum = map(safetensors.torch.load_file(file).get, ("head", "checksum"))
        require(zlib.crc32(as_bytes(head)) == checksum, f"{file}: not as it was written; {remedy}")

    def missing_bytes(width: int) -> int:
        states.update({rows.file: States(rows, sha, dtype, width) for rows in wanted})
        return sum(int((states[r.file].sums[i] == 0).sum()) * states[r.file].row_bytes for r, i in wanted.items())

    states: dict[str, States] = {}
    if not any(parallel.all_gather(head is None or missing_bytes(head.shape[1]))):
        say(f"teacher: its body is not loaded, as all hidden states are in {folder}")
        return CachedTeacher(head[:vocab_size].to(home, copy=True), states, None)
    if load is None:
        return None
    body = load()
    needs, free = missing_bytes(body.whole_head.shape[1]), shutil.disk_usage(folder).free
    disk = f"hidden states take {gib(needs)} more of disk in {folder}, {gib(free)} are free"
    require(needs < free, f"teacher_cache=True: {disk}; leave it out, or choose another disk")
    say(f"teacher: {disk}")
    if parallel.rank() == 0 and head is None:
        head = body.whole_head.cpu().contiguous()
        saved = {"head": head, "checksum": torch.tensor(zlib.crc32(as_bytes(head)))}
        atomic_write(file, safetensors.torch.save(saved))
    return CachedTeacher(body.head, states, body)


def fill(teacher: CachedTeacher, wanted: Wanted, size: int) -> None:
    """Compute and store what is missing, `size` rows at a time, divided among the processes."""
    for rows, index in wanted.items():
        mine = np.array_split(index, parallel.world())[parallel.rank()]
        mine = mine[teacher.states[rows.file].sums[mine] == 0]
        most = max(parallel.all_gather(len(mine)))  # sharded layers need all processes in every batch
        for first in tqdm(range(0, most, size), f"teacher, {rows.file}", unit="batch", disable=parallel.rank() > 0):
            part = mine[first : first + size] if first < len(mine) else index[:1]
            teacher.hidden(rows.batch(part, teacher.head.device)[0], rows, part)


def read_ahead(stream: Iterator[tuple], teacher: CachedTeacher | Teacher | None) -> Iterator[tuple]:
    """The batches of `stream`; if their hidden states are only read, two ahead by a thread."""
    if not isinstance(teacher, CachedTeacher) or teacher.body:
        yield from stream
        return
    with ThreadPoolExecutor(1) as pool:
        batches = deque(pool.submit(next, stream, None) for _ in range(2))
        while batch := batches.popleft().result():
            batches.append(pool.submit(next, stream, None))
            yield batch


def fits_disk(cfg: Config) -> bool:
    """Whether the states of all rows, in fp32, would take less than half of the disk that is free without them."""
    width = foreign_config(cfg.teacher).get_text_config().hidden_size
    n_rows = sum(len(open_rows(cfg.data_dir, name)[0]) for name in ("train", "val"))
    own = sum(file.stat().st_blocks * 512 for file in Path(cfg.data_dir).glob("teacher_*"))
    return n_rows * cfg.seq_len * width * 4 < (shutil.disk_usage(cfg.data_dir).free + own) / 2


def hash_of(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:12]


def as_bytes(t: Tensor) -> np.ndarray:
    """[B, ...] on the CPU -> [B, bytes], the same memory"""
    return t.view(torch.uint8).flatten(1).numpy()
