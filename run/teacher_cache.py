"""The teacher's last hidden states, computed once and stored beside the rows for all runs.

DATA_DIR/teacher_HEAD.safetensors   the head; HEAD is a hash of the teacher's content, the source of
                                    rows and of `Qwen2`, and the dtype
DATA_DIR/teacher_ROWS.NAME.states   hidden states [rows, seq_len, D] of NAME.bin in that dtype,
                                    followed by a uint64 for each row; ROWS is a hash of the same,
                                    the content of NAME.bin and `mask_documents`

Objectives stay exact, as hidden states and head give the logits of the whole vocabulary. The uint64
of a missing row is 0. That of a stored row is 2**32 + a checksum of the file's name, the row's
number and its bytes, so nothing that a kill, a full disk or a copy leaves behind is taken for a
complete row. A run computes the rows that are missing before its first update.
"""

import contextlib
import gc
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from configure import TRY_AGAIN
from lib import parallel
from lib.device import gib
from lib.errors import UserError
from lib.files import atomic_write, flush, writing
from lib.head import OutputHead, weight_of
from lib.rows import Rows, row_order
from lib.source import reached
from model import Qwen2
from run.log import say
from run.provenance import content_hash, record_hash
from run.teacher import Ensemble, Teacher

RowIndices = dict[Rows, np.ndarray]  # by rows file, the indices of the rows that are read


class States:
    """The stored hidden states of one rows file, as bytes. B rows of a batch, M bytes of a row."""

    def __init__(self, rows, facts: dict, position_bytes: int):
        source = Path(rows.file)
        masked = rows.mask_documents * ", masked"
        key = record_hash(facts | {"rows": rows.manifest["sha256"] + masked})[:12]
        self.file = source.with_name(f"teacher_{key}.{source.stem}.states")
        row_bytes = (rows.manifest["row_len"] - 1) * position_bytes
        size = rows.n * (row_bytes + 8)
        if not self.file.is_file() or self.file.stat().st_size != size:
            with writing(self.file), self.file.open("ab"):
                # Missing rows take no space on the disk. A file that was cut is filled up with
                # zeros: its rows without a checksum count as missing.
                os.truncate(self.file, size)
        # both views also show what other processes write
        self.values = np.memmap(self.file, np.uint8, "r", shape=(rows.n, row_bytes))  # [n, M]
        self.sums = np.memmap(self.file, np.uint64, "r", offset=self.values.size)  # [n]

    def checksums(self, index, values) -> np.ndarray:
        begins = [zlib.crc32(f"{self.file.name} {row}".encode()) for row in index]
        return 2**32 + np.array([*map(zlib.crc32, values, begins)], np.uint64)

    def write(self, index, values):
        """Store rows [B, M], then their checksums. Several processes may write at a time."""
        self.put(0, index, values)
        self.put(self.values.size, index, self.checksums(index, values))

    def put(self, start: int, index, parts):
        # on a full disk this is an error; a write to a memmap would be a crash
        with writing(self.file), self.file.open("r+b") as file:
            for row, part in zip(index.tolist(), parts, strict=True):
                file.seek(start + row * part.nbytes)
                file.write(part)
        flush(self.file)


@dataclass
class CachedTeacher:
    """A `Teacher` that reads hidden states from the cache, and computes nothing."""

    head: Tensor | OutputHead
    states: dict[Rows, States]
    is_stored = True

    def hidden(self, x: Tensor, rows, index: np.ndarray) -> Tensor:
        """Return the stored hidden states [B, T, D] of rows `index`, whose inputs are x [B, T]."""
        if not torch.equal(x, rows.batch(index, x.device)[0]):
            raise UserError(
                "teacher_cache=True: inputs are not those of Rows.batch; change them there, or set "
                "teacher_cache=False"
            )
        states = self.states[rows]
        values = states.values[index]
        bad = index[states.checksums(index, values) != states.sums[index]]
        if len(bad):
            row = f"{states.file}: row {bad[0]}"
            if not states.sums[bad[0]]:
                raise UserError(
                    f"{row} was not stored; an order of rows of your own belongs into row_order of "
                    "lib/rows.py"
                )
            states.put(states.values.size, bad, 0 * states.sums[bad])  # which are missing now
            error = UserError(f"{row} is damaged; the same command computes it anew")
            error.exit_code = TRY_AGAIN
            raise error
        h = torch.from_numpy(values).view(self.head.dtype).view(*x.shape, -1)
        if self.head.device.type == "cuda":
            h = h.pin_memory()
        return h.to(self.head.device, non_blocking=True)


def rows_of_run(cfg, rows, val) -> RowIndices:
    """Return the indices of all rows that a run reads."""
    shuffle_seed = cfg.seed if cfg.shuffle else None
    steps = range(cfg.max_steps - rows.first_row_step)
    order = [row_order(step, cfg.batch_rows, rows.n, shuffle_seed) for step in steps]
    return {rows: np.unique(np.array(order, int)), val: np.arange(val.n)[: cfg.val_max_rows]}


def open_cached(
    name,
    dtype,
    output_device: torch.device,
    wanted: RowIndices,
    load=None,
    size: int = 1,
) -> CachedTeacher | None:
    """Return a teacher that reads the hidden states of `wanted` from the cache.

    load  a function that returns the `Teacher`. All processes call it if the head or a row is
          missing, and then compute what is missing, `size` rows at a time

    Returns None if something is missing and there is no `load`. The head on disk is whole; the
    teacher's has the vocabulary of the rows.
    """
    first, *_ = wanted
    folder = Path(first.file).parent
    facts = {"teacher": content_hash(name), "dtype": str(dtype)}
    own = (Rows.read, Rows.batch, Teacher.hidden, Ensemble.hidden, Qwen2.hidden, Qwen2.layer)
    facts["source"] = reached(*own)
    head_file = folder / f"teacher_{record_hash(facts)[:12]}.safetensors"
    head = read_head(head_file)
    teacher = None
    if not all(parallel.all_gather(head is not None)):  # another program may be writing
        if not load:
            return None
        teacher = load()
        head = teacher.model.head.to("cpu")
        parallel.on_first(write_head, head_file, head)
    row_bytes = weight_of(head).shape[1] * dtype.itemsize
    states = {}
    for rows, index in wanted.items():
        states[rows] = stored = States(rows, facts, row_bytes)
        missing = index[stored.sums[index] == 0]
        missing = parallel.all_gather(missing)[0]  # process 0 decides
        if len(missing):
            if not load:
                return None
            teacher = teacher or load()
            n_bytes = len(missing) * stored.values.shape[1]
            say(f"teacher: hidden states of {rows.file} take {gib(n_bytes)} more disk space")
            fill(teacher, rows, stored, missing, size)
    say(f"teacher: all hidden states are in {folder}")
    del teacher
    gc.collect()  # compiled and sharded layers refer to themselves
    return CachedTeacher(head[: first.n_vocab].to(output_device), states)


def fill(teacher: Teacher, rows: Rows, states: States, index: np.ndarray, size: int):
    """Compute and store rows of a file, divided among the processes."""
    rank = parallel.rank()
    starts = range(0, len(index), parallel.world() * size)
    for first in progress(starts, f"teacher, {rows.file}", unit="batch", disable=rank > 0):
        batch = index[first + rank * size :][:size]
        # sharded layers compute on all processes together, even without a row of their own
        x, _ = rows.batch(batch if len(batch) else index[:1], teacher.head.device)
        h = teacher.hidden(x)
        values = h.cpu().contiguous().view(torch.uint8).flatten(1).numpy()
        states.write(batch, values[: len(batch)])
    parallel.all_gather(None)  # every row is there


def write_head(file, head: Tensor | OutputHead):
    weight = weight_of(head).contiguous()
    saved = {
        "head": weight,
        "checksum": torch.tensor(checksum_of(weight)),
        "widths": torch.tensor(getattr(head, "widths", ())),
        "caps": torch.tensor(getattr(head, "caps", ())),
    }
    try:
        atomic_write(file, safetensors.torch.save(saved))
    except UserError:
        if read_head(file) is None:  # else another program has written it meanwhile
            raise


def read_head(file) -> Tensor | OutputHead | None:
    """Return the stored head, or None if there is none or it is damaged."""
    with contextlib.suppress(Exception):  # each kind of broken file has an error of its own
        saved = safetensors.torch.load_file(file)
        if checksum_of(saved["head"]) == saved["checksum"]:
            parts = (tuple(saved[key].tolist()) for key in ("widths", "caps"))
            return OutputHead(saved["head"], *parts) if len(saved["caps"]) else saved["head"]
    return None


def checksum_of(head: Tensor) -> int:
    return zlib.crc32(head.view(torch.uint8).numpy())


def progress(*args, **kwargs) -> tqdm:
    """Return a progress bar with ETA; without a terminal, one line of it every half minute."""
    seconds = 0.1 if sys.stderr.isatty() else 30
    return tqdm(*args, mininterval=seconds, maxinterval=30, **kwargs)
