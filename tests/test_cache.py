"""Stored hidden states of the teacher: the bits of a run without them, whatever was killed, cut, altered or exchanged."""

import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configure
import eval as ev
import prepare
import train
from lib import parallel
from lib.errors import UserError
from lib.rows import row_order
from run import cache, preflight, teacher
from tests.several import free_port
from tests.test_teacher import FOREIGN, NATIVE, make  # noqa: F401
from tests.world import SEQ, config, final_bits, flags, read_jsonl, start, untimed, write_text

KEYS = {"methods": "vanilla_kd,alra", "shuffle": True, "histogram_every_steps": 2}


@pytest.fixture
def world(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "world")


@pytest.fixture
def forward(monkeypatch):
    """The rows of each forward pass of a teacher; `most`: how many passes there may be."""
    calls, hidden = SimpleNamespace(rows=[], most=1e9), teacher.Teacher.hidden

    def counted(self, x, *rows):
        assert len(calls.rows) < calls.most
        calls.rows.append(len(x))
        return hidden(self, x)

    monkeypatch.setattr(teacher.Teacher, "hidden", counted)
    return calls


def test_storing_and_reading_keep_the_bits_and_reading_loads_no_body(world, tmp_path, monkeypatch, forward, capsys):
    def outcome(name, **more):
        forward.rows.clear()
        assert train.distil(config(world, tmp_path / name, **KEYS, **more)) == 0
        ev.main([str(tmp_path / name), "--tasks=none"])
        held_out = re.findall(r"(?m)^\| (?:vanilla_kd|alra) .*", capsys.readouterr().out)
        of_students = [(final_bits(tmp_path / name, m), untimed(tmp_path / name, m)) for m in ("vanilla_kd", "alra")]
        return of_students, read_jsonl(tmp_path / name / "teacher.jsonl"), held_out

    plain, stored = outcome("plain"), outcome("stores", teacher_cache=True)
    assert plain == stored and sum(forward.rows) == 24 + 7 and len(plain[-1]) == 2  # each row once, and eval.py none
    monkeypatch.setattr(preflight, "load_teacher", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(ev, "load_teacher", cache.load_teacher)
    assert outcome("reads", teacher_cache=True) == plain and not forward.rows


def states_of(cfg, load=True):
    """The hidden states of seven rows of each file, and the head; None where it has to compute and `load` is False."""
    name, cpu, index = cfg.teacher, torch.device("cpu"), np.arange(7)
    wanted = {preflight.open_data(cfg, part): [index] for part in ("train", "val")}
    loads = [lambda: teacher.load_teacher(name, torch.float32, cpu)] if load else []
    if cached := cache.open_cached(name, torch.float32, cpu, 99, wanted, *loads):
        return [cached.hidden(rows.batch(index, cpu)[0], rows, index) for rows in wanted], cached.head[:99]


ROW = SEQ * 24 * 4  # bytes


def exchanged(b: bytes, at: int, n: int) -> bytes:
    return b[:at] + b[at + n : at + 2 * n] + b[at : at + n] + b[at + 2 * n :]


def with_rows(b: bytes, other: bytes) -> bytes:
    """The first seven rows and their checksums are those of a file of seven rows."""
    return other[: 7 * ROW] + b[7 * ROW : 97 * ROW] + other[7 * ROW :] + b[97 * ROW + 56 :]


HEAD, STATES = ".safetensors", ".train.states"
DAMAGES = {  # a file; its bytes, those of the states of val -> what is there instead
    "a flipped bit": (STATES, lambda b, val: bytes([b[0] ^ 1]) + b[1:]),
    "rows exchanged": (STATES, lambda b, val: exchanged(exchanged(b, 0, ROW), 97 * ROW, 8)),
    "rows of another file": (STATES, lambda b, val: with_rows(b, val)),
    "a torn row": (STATES, lambda b, val: b[: 5 * ROW - 40] + bytes(40) + b[5 * ROW :]),
    "cut": (STATES, lambda b, val: b[: 97 * ROW + 7]),
    "longer": (STATES, lambda b, val: b[:99] + b),
    "gone": (STATES, lambda b, val: b""),
    "another head": (HEAD, lambda b, val: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:]),
    "half a head": (HEAD, lambda b, val: b[:-5]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_damaged_is_refused_or_computed_again_and_never_used(name, world):
    cfg, (end, damage) = config(world, "unused"), DAMAGES[name]
    right = states_of(cfg)
    torch.testing.assert_close(states_of(cfg, load=False), right, rtol=0, atol=0)
    file, val = (next((world / "data").glob(f"teacher_*{e}")) for e in (end, ".val.states"))
    file.write_bytes(damage(file.read_bytes(), val.read_bytes()))
    try:
        assert states_of(cfg, load=False) is None
    except UserError as error:
        assert re.search("damaged|cannot be used ", str(error))
        if end == HEAD:
            file.unlink()
        assert states_of(cfg, load=False) is None  # no longer taken for whole
    torch.testing.assert_close(states_of(cfg), right, rtol=0, atol=0)
    torch.testing.assert_close(states_of(cfg, load=False), right, rtol=0, atol=0)


def test_a_fill_that_was_killed_goes_on_where_it_was(world, forward):
    cfg = config(world, "unused", teacher_cache=True, **KEYS)  # 24 rows, and 7 held-out ones
    forward.most = 5
    with pytest.raises(AssertionError):
        cache.fill_cache(cfg)
    forward.most = 99
    for _ in range(2):
        cache.fill_cache(cfg)
    assert forward.rows == [2] * 12 + [2, 2, 2, 1]
    short = shutil.copytree(world / "teacher", world / "short") / "config.json"
    short.write_text(re.sub('("max_position_embeddings": )\\d+', r"\g<1>4", short.read_text()))
    with pytest.raises(UserError, match="short supports 4 positions; set a smaller one"):  # before hours of it, as train.py does
        cache.fill_cache(config(world, "unused", teacher_cache=True, **KEYS, teacher=short.parent))


def fill_as(rank: int, port: int, argvs: list[list[str]]) -> None:
    """Process `rank` of two that fill, one after the other, what each of `argvs` reads."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    stop, parallel.stop = parallel.stop, lambda: None  # the port serves one start
    for argv in argvs:
        cache.fill_cache(configure.load(argv))
    stop()


@pytest.mark.slow
def test_two_processes_fill_the_same_bytes_as_one(world, tmp_path):
    keys = {"methods": "alra", "max_steps": 25, "schedule_steps": 25, "teacher_cache": True, "micro_batch": 1}
    worlds, port = [shutil.copytree(world, tmp_path / f"shard={n}") for n in (1, 2)], free_port()
    argvs = [flags(folder, "unused", shard=n, **keys) for n, folder in enumerate(worlds, 1)]
    processes = [start(fill_as, rank, port, argvs, out=tmp_path / "said") for rank in range(2)]
    cache.fill_cache(config(world, "unused", **keys))
    for process in processes:
        process.join(120)
        process.kill()  # or it would wait on
        assert process.exitcode == 0, (tmp_path / "said").read_text()
    alone = [*(world / "data").glob("teacher_*")]
    for folder in worlds:
        assert all((folder / "data" / file.name).read_bytes() == file.read_bytes() for file in alone)
    assert len(alone) == 3 and all(np.memmap(f, np.uint64)[-7:].all() for f in alone if f.suffix == ".states")


def test_the_rows_of_a_long_run_are_told_in_blocks(tiny):
    class Some:  # stands for rows without their file
        def __init__(self, n):
            self.n = n

    for steps, order in ((12_000, np.sort(row_order(0, 1_200_000, 1_300_000, 1234))), (40_000, np.arange(1_300_000))):
        cfg = config(tiny, "unused", shuffle=True, batch_rows=100, micro_batch=1, max_steps=steps, schedule_steps=steps)
        blocks = [*cache.rows_of_run(cfg, rows := Some(1_300_000), Some(7))[rows]]
        assert len(blocks) == 2 and np.array_equal(np.sort(np.concatenate(blocks)), order)


def test_a_command_fills_ahead_and_another_teacher_has_files_of_its_own(make, tmp_path, monkeypatch, forward):  # noqa: F811
    keys = {"source": write_text(tmp_path / "text.jsonl"), "val_share": 0, "val_rows": 5, "n_documents": "none", "train_rows": "none",
            "data_dir": tmp_path / "data", "student": "16x1x2", "methods": "tad", "max_steps": 2, "teacher_cache": True}  # fmt: skip
    for kind, n_files in ((FOREIGN["pythia"], 3), (NATIVE["smollm2"], 6)):
        argv = flags(tmp_path, tmp_path / str(n_files), teacher=make(kind), **keys)
        assert prepare.main(argv) == 0 and cache.main(argv) == 0
        assert sum(forward.rows) == 8 + 5 and len([*(tmp_path / "data").glob("teacher_*")]) == n_files
        forward.rows.clear()
        assert train.distil(configure.load(argv)) == 0 and not forward.rows


def test_what_the_disk_has_no_room_for_is_refused(world, monkeypatch):
    cfg = config(world, "unused", teacher_cache=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=31 * ROW))
    with pytest.raises(
        UserError, match=r"teacher_cache=True: hidden states take 0.0 MiB more of disk in .*data, .* free"
    ):
        cache.open_teacher(cfg, preflight.open_data(cfg, "train"), preflight.open_data(cfg, "val"))
