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


def test_a_run_that_computes_stores_or_reads_has_the_same_bits_and_loads_the_body_only_to_compute(world, tmp_path, monkeypatch, forward, capsys):  # fmt: skip
    def outcome(name, **more):
        forward.rows.clear()
        assert train.distil(config(world, tmp_path / name, **KEYS, **more)) == 0
        assert ev.run([str(tmp_path / name), "--tasks=none"]) is None
        logs = [untimed(tmp_path / name, method) for method in ("vanilla_kd", "alra")]
        held_out = re.findall(r"(?m)^\| (?:vanilla_kd|alra) .*", capsys.readouterr().out)
        return [final_bits(tmp_path / name, m) for m in ("vanilla_kd", "alra")], logs, read_jsonl(tmp_path / name / "teacher.jsonl"), held_out  # fmt: skip

    plain, stored = outcome("plain"), outcome("stores", teacher_cache=True)
    assert plain == stored and sum(forward.rows) == 24 + 7 and len(plain[-1]) == 2  # each row once, and eval.py none
    for module in (train, ev):
        monkeypatch.setattr(module, "load_teacher", None)
    assert outcome("reads", teacher_cache=True) == plain and not forward.rows


def states_of(cfg, load=True):
    """The hidden states of all rows, as a run reads them; None where it has to compute and `load` is False."""
    rows = [train.open_data(cfg, name) for name in ("train", "val")]
    wanted = {r: np.arange(r.n) for r in rows}
    load = (lambda: teacher.load_teacher(cfg.teacher, torch.float32, torch.device("cpu"))) if load else None
    if cached := cache.open_cached(cfg.teacher, torch.float32, torch.device("cpu"), 99, wanted, load):
        index = np.arange(7)
        h = [cached.hidden(r.batch(index, torch.device("cpu"))[0], r, index) for r in rows]
        return torch.stack([*h]), cached.head[:99]


DAMAGES = {
    "a flipped bit": (".train.bin", lambda b: bytes([b[0] ^ 1]) + b[1:]),
    "rows exchanged": (".train.bin", lambda b: b[SEQ * 96 : SEQ * 192] + b[: SEQ * 96] + b[SEQ * 192 :]),
    "rows and checksums exchanged": (".train.map", lambda b: b[8:16] + b[:8] + b[16:]),
    "cut": (".train.bin", lambda b: b[:-1]),
    "gone": (".train.bin", lambda b: b""),
    "a map that was cut": (".train.map", lambda b: b[:-8]),
    "a torn row": (".train.bin", lambda b: bytes(40) + b[40:]),
    "another head": (".safetensors", lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:]),
    "half a head": (".safetensors", lambda b: b[:-5]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_damaged_is_refused_or_computed_again_and_never_used(name, world):
    cfg = config(world, "unused", max_steps=25, schedule_steps=25)
    right, (end, damage) = states_of(cfg), DAMAGES[name]
    train.fill_teacher_cache(
        config(world, "unused", max_steps=25, schedule_steps=25, teacher_cache=True, micro_batch=1)
    )
    torch.testing.assert_close(states_of(cfg, load=False), right)
    file = next(f for f in (world / "data").glob(f"teacher_*{end}"))
    file.write_bytes(damage(file.read_bytes()))
    for load in (False, True):
        try:
            result = states_of(cfg, load)
            assert load or result is None, "used"
        except UserError as error:
            assert re.search("not as it was written; |cannot be used ", str(error))
            if end == ".safetensors":
                file.unlink()
                result = states_of(cfg)
            else:
                assert states_of(cfg, load=False) is None  # the row is no longer whole
    torch.testing.assert_close(result, right)


def test_a_fill_that_was_killed_goes_on_where_it_was(world, forward, monkeypatch):
    cfg = config(world, "unused", teacher_cache=True, **KEYS)  # 24 rows, and 7 held-out ones
    forward.most = 5
    with pytest.raises(AssertionError):
        train.fill_teacher_cache(cfg)
    forward.most = 1e9
    train.fill_teacher_cache(cfg)
    train.fill_teacher_cache(cfg)
    assert forward.rows == [2] * 12 + [2, 2, 2, 1]


def test_prepare_fills_ahead_and_another_teacher_has_files_of_its_own(make, tmp_path, monkeypatch, forward):  # noqa: F811
    text, folder = write_text(tmp_path / "text.jsonl", 60), tmp_path / "data"
    for kind, other in ((FOREIGN["pythia"], 5), (NATIVE["smollm2"], 10)):
        argv = flags(
            tmp_path, tmp_path / kind[0].model_type, data_dir=folder, teacher=make(kind), student="16x1x2", **KEYS
        )
        argv += [f"--source={text}", "--val_share=0", "--val_rows=5", "--n_documents=none", "--train_rows=none", "--teacher_cache=true"]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["prepare.py", *argv])
        assert prepare.main() == 0
        assert sum(forward.rows) == 24 + 5 and len([*folder.glob("teacher_*")]) == other
        forward.rows.clear()
        assert train.distil(configure.load(argv)) == 0 and not forward.rows


def test_a_cache_that_the_disk_has_no_room_for_is_refused_and_compare_leaves_it_out(world, monkeypatch):
    cfg, free = config(world, "unused", teacher_cache=True), 2 * 104 * SEQ * 24 * 4
    for left, fits in ((free, False), (free + 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, left=left: SimpleNamespace(free=left))
        assert cache.fits_disk(cfg) == fits
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=31 * SEQ * 24 * 4))
    with pytest.raises(
        UserError, match=r"teacher_cache=True: hidden states take 0.0 MiB more of disk in .*data, .* are free"
    ):
        train.open_teacher(cfg)
