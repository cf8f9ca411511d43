"""The teacher's last hidden states of the rows, stored beside them: one pass of the teacher for all runs, seeds and methods.

DATA_DIR/teacher_KEY.safetensors   its head; KEY is of the teacher's content and the dtype of its activations
DATA_DIR/teacher_KEY.NAME.states   for NAME.bin, whose content is in KEY too: [rows, seq_len, D] of that dtype, uint64 [rows]

Every objective stays exact over the whole vocabulary. A row's uint64 is 0 while it is missing, then 2**32 + a checksum of KEY,
its number and its bytes: whatever a kill, a full disk or a copy left behind, no row is taken for another or for whole.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from lib import parallel
from lib.device import gib
from lib.errors import require
from lib.files import atomic_write, reading, writing
from lib.identity import content_hash, record_hash
from lib.rows import Rows
from lib.run import say
from lib.teacher import Teacher

Wanted = dict[Rows, Iterable[np.ndarray]]  # the numbers of the rows that are read, in blocks


class States:
    """The stored hidden states of one rows file, as bytes. B rows of a batch, M bytes of a row."""

    def __init__(self, rows: Rows, facts: dict, position_bytes: int):
        source, key = Path(rows.file), record_hash(facts | {"rows": rows.manifest["sha256"]})[:12]
        self.file = source.with_name(f"teacher_{key}.{source.stem}.states")
        n, row_bytes = rows.n, (rows.ids.shape[1] - 1) * position_bytes
        if not self.file.is_file() or self.file.stat().st_size != n * (row_bytes + 8):
            with writing(self.file), self.file.open("ab"):
                os.truncate(self.file, n * (row_bytes + 8))  # sparse; a file that was cut has lost its checksums
        self.values = np.memmap(self.file, np.uint8, "r", shape=(n, row_bytes))  # [n, M]
        self.sums = np.memmap(self.file, np.uint64, "r", self.values.size)  # [n], also what other processes write

    def checksums(self, index: np.ndarray, values: np.ndarray) -> np.ndarray:
        seeds = (zlib.crc32(f"{self.file.name} {i}".encode()) for i in index)
        return 2**32 + np.fromiter(map(zlib.crc32, values, seeds), np.uint64, len(index))

    def write(self, index: np.ndarray, values: np.ndarray) -> None:
        """Store rows [B, M], then their checksums. Several processes may write at a time."""
        self.put(0, index, values)
        self.put(self.values.size, index, self.checksums(index, values))

    def put(self, start: int, index: np.ndarray, parts: np.ndarray) -> None:
        with writing(self.file), self.file.open("r+b") as file:  # a full disk is an error here, in a memmap a crash
            for i, part in zip(index.tolist(), parts, strict=True):
                file.seek(start + i * part.nbytes)
                file.write(part)


class CachedTeacher:
    """As `Teacher`, for rows whose hidden states are stored; `body` computes and stores those that are missing."""

    def __init__(self, head: Tensor, states: dict[Rows, States], body: Teacher | None):
        self.head, self.states, self.body = head, states, body
        # sharded layers compute on all processes or on none, whatever each of them could read
        self.always = body is not None and any(map(parallel.is_sharded, body.model.modules()))

    def hidden(self, x: Tensor, rows: Rows, index: np.ndarray) -> Tensor:
        """Inputs [B, T], which are the rows `index` -> last hidden states [B, T, D]. One that is missing: all are computed."""
        states = self.states[rows]
        if not self.body or (states.sums[index].all() and not self.always):
            values = states.values[index]
            damaged = index[states.checksums(index, values) != states.sums[index]]
            if not len(damaged):
                h = torch.from_numpy(values).view(self.head.dtype).view(*x.shape, -1)
                return (h.pin_memory() if self.head.is_cuda else h).to(self.head.device, non_blocking=True)
            states.put(states.values.size, damaged, np.zeros(len(damaged), np.uint64))
            require(self.body, f"{states.file}: row {damaged[0]} is damaged; the same command computes it anew")
        h, missing = self.body.hidden(x), states.sums[index] == 0
        if missing.any():
            states.write(index[missing], h.cpu().contiguous().view(torch.uint8).flatten(1).numpy()[missing])
        return h

    def flops_per_token(self, seq_len: int) -> float:
        return self.body.flops_per_token(seq_len) if self.body else 0.0


def open_cached(
    name: str, dtype: torch.dtype, home: torch.device, vocab_size: int, wanted: Wanted, load: Callable = lambda: None
) -> CachedTeacher | None:
    """The teacher of these rows. If states are missing it has the body that `load` makes; without one it is None."""
    folder, facts = Path(next(iter(wanted)).file).parent, {"teacher": content_hash(name), "dtype": str(dtype)}
    file, head, body = folder / f"teacher_{record_hash(facts)[:12]}.safetensors", None, None
    if file.is_file():
        with reading(file, remedy := "delete it, and it is written anew"):
            head, checksum = map(safetensors.torch.load_file(file).get, ("head", "checksum"))
        require(zlib.crc32(head.view(torch.uint8).numpy()) == checksum, f"{file}: damaged; {remedy}")
    if any(parallel.all_gather(head is None)) and not (body := load()):
        return None
    if head is None:
        head = body.whole_head.cpu().contiguous()
        saved = {"head": head, "checksum": torch.tensor(zlib.crc32(head.view(torch.uint8).numpy()))}
        if parallel.rank() == 0:
            atomic_write(file, safetensors.torch.save(saved))
    states, needs = {rows: States(rows, facts, head.shape[1] * dtype.itemsize) for rows in wanted}, 0
    for rows, blocks in wanted.items():
        needs += states[rows].values.shape[1] * sum(int((states[rows].sums[i] == 0).sum()) for i in blocks)
    if not body and not any(parallel.all_gather(needs)):
        say(f"teacher: its body is not loaded, as all hidden states are in {folder}")
        return CachedTeacher(head[:vocab_size].to(home, copy=True), states, None)
    if not (body := body or load()):
        return None
    free = shutil.disk_usage(folder).free
    disk = f"hidden states take {gib(needs)} more of disk in {folder}, {gib(free)} are free"
    require(needs < free, f"teacher_cache=True: {disk}; leave it out, or choose another disk")
    say(f"teacher: {disk}")
    return CachedTeacher(body.head, states, body)


def fill(teacher: CachedTeacher, wanted: Wanted, size: int) -> None:
    """Compute and store what is missing, `size` rows at a time, divided among the processes."""
    first, step = parallel.rank() * size, parallel.world() * size
    for rows, blocks in wanted.items():
        for nth, block in enumerate(blocks, 1):
            # as process 0 sees it: all compute equally many batches, as sharded layers need, whoever writes meanwhile
            missing = block[parallel.all_gather(teacher.states[rows].sums[block] == 0)[0]]
            label = f"teacher, {rows.file}, block {nth}"
            end = len(missing) + (first if teacher.always else 0)
            for at in tqdm(range(first, end, step), label, unit="batch", disable=first > 0):
                index = missing[at : at + size] if at < len(missing) else missing[:1]
                teacher.hidden(rows.batch(index, teacher.head.device)[0], rows, index)


def read_ahead(stream: Iterator[tuple]) -> Iterator[tuple]:
    """The batches of `stream`, each made by a thread while the one before is used."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, stream, None)
        while batch := ahead.result():
            ahead = pool.submit(next, stream, None)
            yield batch
