"""Stored hidden states of the teacher: the bits of a run without them, whatever was killed, cut, altered or exchanged."""

import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import configure
import eval as ev
import prepare
import train
from lib import cache, teacher
from lib.files import UserError
from tests.test_teacher import FOREIGN, NATIVE, make  # noqa: F401
from tests.test_train import handlers  # noqa: F401
from tests.world import SEQ, config, final_bits, flags, read_jsonl, untimed, write_text

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
        ev.run([str(tmp_path / name), "--tasks=none"])
        held_out = re.findall(r"(?m)^\| (?:vanilla_kd|alra) .*", capsys.readouterr().out)
        of_students = [(final_bits(tmp_path / name, m), untimed(tmp_path / name, m)) for m in ("vanilla_kd", "alra")]
        return of_students, read_jsonl(tmp_path / name / "teacher.jsonl"), held_out

    plain, stored = outcome("plain"), outcome("stores", teacher_cache=True)
    assert plain == stored and sum(forward.rows) == 24 + 7 and len(plain[-1]) == 2  # each row once, and eval.py none
    monkeypatch.setattr(train, "load_teacher", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(ev, "load_teacher", train.load_teacher)
    assert outcome("reads", teacher_cache=True) == plain and not forward.rows


def states_of(cfg, load=True):
    """The hidden states of seven rows of each file, and the head; None where it has to compute and `load` is False."""
    name, cpu, index = cfg.teacher, torch.device("cpu"), np.arange(7)
    wanted = {train.open_data(cfg, part): index for part in ("train", "val")}
    load = (lambda: teacher.load_teacher(name, torch.float32, cpu)) if load else None
    if cached := cache.open_cached(name, torch.float32, cpu, 99, wanted, load):
        return [cached.hidden(rows.batch(index, cpu)[0], rows, index) for rows in wanted], cached.head[:99]


ROW = SEQ * 24 * 4  # bytes
BOTH = ".train.bin", ".train.map"
DAMAGES = {  # files; their bytes, bytes of a row in them, bytes of the same file of val -> what is there instead
    "a flipped bit": (BOTH[:1], lambda b, n, val: bytes([b[0] ^ 1]) + b[1:]),
    "rows exchanged": (BOTH, lambda b, n, val: b[n : 2 * n] + b[:n] + b[2 * n :]),
    "rows of another file": (BOTH, lambda b, n, val: val + b[len(val) :]),
    "a torn row": (BOTH[:1], lambda b, n, val: b[: 5 * n - 40] + bytes(40) + b[5 * n :]),
    "cut": (BOTH[:1], lambda b, n, val: b[:-1]),
    "gone": (BOTH[:1], lambda b, n, val: b""),
    "marks cut": (BOTH[1:], lambda b, n, val: b[:-8]),
    "another head": ([".safetensors"], lambda b, n, val: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:]),
    "half a head": ([".safetensors"], lambda b, n, val: b[:-5]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_damaged_is_refused_or_computed_again_and_never_used(name, world):
    cfg, (ends, damage), data = config(world, "unused"), DAMAGES[name], world / "data"
    right = states_of(cfg)
    torch.testing.assert_close(states_of(cfg, load=False), right, rtol=0, atol=0)
    for end in ends:
        file, val = (next(data.glob(f"teacher_*{e}")) for e in (end, end.replace("train", "val")))
        content = file.read_bytes()
        file.write_bytes(damage(content, len(content) // 97, val.read_bytes()))
    try:
        assert states_of(cfg, load=False) is None
    except UserError as error:
        assert re.search("not as it was written; |cannot be used ", str(error))
        if end == ".safetensors":
            file.unlink()
        assert states_of(cfg, load=False) is None  # no longer taken for whole
    torch.testing.assert_close(states_of(cfg), right, rtol=0, atol=0)
    torch.testing.assert_close(states_of(cfg, load=False), right, rtol=0, atol=0)


def test_a_fill_that_was_killed_goes_on_where_it_was(world, forward):
    cfg = config(world, "unused", teacher_cache=True, **KEYS)  # 24 rows, and 7 held-out ones
    forward.most = 5
    with pytest.raises(AssertionError):
        train.fill_teacher_cache(cfg)
    forward.most = 99
    for _ in range(2):
        train.fill_teacher_cache(cfg)
    assert forward.rows == [2] * 12 + [2, 2, 2, 1]


def test_prepare_fills_ahead_and_another_teacher_has_files_of_its_own(make, tmp_path, monkeypatch, forward):  # noqa: F811
    keys = {"source": write_text(tmp_path / "text.jsonl"), "val_share": 0, "val_rows": 5, "n_documents": "none", "train_rows": "none",
            "data_dir": tmp_path / "data", "student": "16x1x2", "methods": "tad", "max_steps": 2, "teacher_cache": True}  # fmt: skip
    for kind, n_files in ((FOREIGN["pythia"], 5), (NATIVE["smollm2"], 10)):
        argv = flags(tmp_path, tmp_path / str(n_files), teacher=make(kind), **keys)
        monkeypatch.setattr(sys, "argv", ["prepare.py", *argv])
        assert prepare.main() == 0
        assert sum(forward.rows) == 8 + 5 and len([*(tmp_path / "data").glob("teacher_*")]) == n_files
        forward.rows.clear()
        assert train.distil(configure.load(argv)) == 0 and not forward.rows


def test_what_the_disk_has_no_room_for_is_refused_and_compare_leaves_it_out(world, monkeypatch):
    cfg = config(world, "unused", teacher_cache=True)
    for free, fits in ((2 * 104 * ROW, False), (2 * 104 * ROW + 1, True), (31 * ROW, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert cache.fits_disk(cfg) == fits
    with pytest.raises(
        UserError, match=r"teacher_cache=True: hidden states take 0.0 MiB more of disk in .*data, .* free"
    ):
        train.open_teacher(cfg)
