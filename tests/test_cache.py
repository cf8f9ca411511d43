"""Stored hidden states give the bits of a run without them, whatever was killed or damaged."""

import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as ev
import train
from lib import rows as rows_py
from lib.errors import UserError
from lib.files import read_json
from lib.rows import Rows
from model import Qwen2
from run import startup, teacher, teacher_cache
from tests.test_teacher import FOREIGN, NATIVE, make  # noqa: F401
from tests.world import (
    SEQ,
    config,
    distil,
    final_bits,
    read_jsonl,
    refusal,
    untimed,
    write_rows,
)

FLAGS = "--methods=vanilla_kd,alra --shuffle=True --histogram_every_steps=2"
CACHED = f"{FLAGS} --teacher_cache=True"
CPU = torch.device("cpu")


@pytest.fixture
def world(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "world")


@pytest.fixture
def forward(monkeypatch):
    """The rows of each forward pass of a teacher; `limit`: how many passes there may be."""
    calls = SimpleNamespace(rows=[], limit=1e9)
    hidden = teacher.Teacher.hidden

    def counted(self, x, *rows):
        assert len(calls.rows) < calls.limit
        calls.rows.append(len(x))
        return hidden(self, x)

    monkeypatch.setattr(teacher.Teacher, "hidden", counted)
    return calls


def test_storing_and_reading_keep_the_bits_and_reading_loads_no_body(
    world, tmp_path, monkeypatch, forward, printed
):
    """Where documents do not see each other, and eval.py scores them as validation does."""
    masked = "--mask_documents=True"
    load = teacher.load_teacher

    def students_only(name, *args, **kwargs):
        assert not f"{name}".startswith(f"{world}"), "loaded"
        return load(name, *args, **kwargs)

    def results(name, flags):
        out = tmp_path / name
        forward.rows.clear()
        distil(world, out, flags)
        n_rows.append(sum(forward.rows))
        with monkeypatch.context() as patch:
            if name != "plain":  # eval.py loads the two students alone
                patch.setattr(ev, "load_teacher", students_only)
            ev.main([str(out), "--tasks=none"])
        tables = re.findall(r"(?m)^\| (?:vanilla_kd|alra) .*", printed())
        assert len(tables) == 2
        for m in ("vanilla_kd", "alra"):
            values = read_jsonl(out / m / "results.jsonl")[-1]["values"]
            log = untimed(out, m)[-1]
            for key in ("ce", "kl", "teacher_ce"):
                assert values[key] == pytest.approx(log[f"val_{key}"], rel=1e-5)
        students = [(final_bits(out, m), untimed(out, m)) for m in ("vanilla_kd", "alra")]
        return students, read_jsonl(out / "teacher.jsonl"), tables

    n_rows = []
    plain = results("plain", f"{FLAGS} {masked}")
    assert results("stores", f"{CACHED} {masked}") == plain
    monkeypatch.setattr(startup, "load_teacher", lambda *_: pytest.fail("loaded"))
    assert results("reads", f"{CACHED} {masked}") == plain
    assert n_rows[1:] == [24 + 7, 0]  # each row once


def test_the_rows_of_two_folders_train_as_those_of_one(world, tmp_path):
    """Also stored and resumed. The folders' order counts."""
    for name, cut, n in (("train", 60, 97), ("val", 4, 7)):
        ids = startup.open_data(config(world, "unused"), name).read(np.arange(n))
        write_rows(tmp_path / "a", name, ids=ids[:cut])
        write_rows(tmp_path / "b", name, ids=ids[cut:], seed=2)
    one = config(world, tmp_path / "one", f"{FLAGS} --methods=vanilla_kd")
    assert train.distil(one) == 0
    out = tmp_path / "two"
    two = f"{CACHED} --methods=vanilla_kd --data_dir={tmp_path}/a,{tmp_path}/b"
    for steps in (4, 6):
        distil(world, out, two, max_steps=steps)
    assert final_bits(out, "vanilla_kd") == final_bits(tmp_path / "one", "vanilla_kd")
    assert len([*tmp_path.glob("a/teacher_*")]) == 3
    facts = read_json(out / "vanilla_kd/run.json")
    assert facts["made_by"]["data_sha256"] == "train1,train2"
    assert facts["val_sha256"] == "val1,val2"
    with refusal("data_sha256 was 'train1,train2', now 'train2,train1'"):
        train.distil(config(world, out, f"{two} --data_dir={tmp_path}/b,{tmp_path}/a"))


def fill(cfg):
    """Store what a run reads, as training does before its first update."""
    startup.open_teacher(cfg, *(startup.open_data(cfg, part) for part in ("train", "val")))


def states_of(cfg, load=True):
    """The hidden states of seven rows of each file, and the head.

    None where it has to compute and `load` is False.
    """
    index = np.arange(7)
    wanted = {startup.open_data(cfg, part): index for part in ("train", "val")}
    loads = []
    if load:
        rows = next(iter(wanted))
        loads = [lambda: teacher.load_teacher(cfg.teacher, torch.float32, CPU, rows=rows)]
    cached = teacher_cache.open_cached(cfg.teacher, torch.float32, CPU, wanted, *loads)
    if not cached:
        return None
    states = [cached.hidden(rows.batch(index, CPU)[0], rows, index) for rows in wanted]
    return [*states, cached.head[:99]]


ROW = SEQ * 24 * 4  # bytes
SUMS = 97 * ROW


def exchange(b, at, n):
    return b[:at] + b[at + n : at + 2 * n] + b[at : at + n] + b[at + 2 * n :]


DAMAGES = {  # from a file's bytes and those of the states of val
    "rows exchanged": lambda b, val: exchange(exchange(b, 0, ROW), SUMS, 8),
    # its first seven rows and their checksums
    "rows of another file": lambda b, val: (
        val[: 7 * ROW] + b[7 * ROW : SUMS] + val[7 * ROW :] + b[SUMS + 56 :]
    ),
    "cut": lambda b, val: b[: SUMS + 7],
    "another head": lambda b, val: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:],
}


def test_what_was_damaged_is_refused_or_computed_again_and_never_used(world):
    cfg = config(world, "unused")
    states = states_of(cfg)

    def assert_all_stored():
        torch.testing.assert_close(states_of(cfg, load=False), states, rtol=0, atol=0)

    assert_all_stored()
    (val,) = world.glob("data/teacher_*.val.states")
    for name, damage in DAMAGES.items():
        kind = ".safetensors" if "head" in name else ".train.states"
        (file,) = world.glob(f"data/teacher_*{kind}")
        file.write_bytes(damage(file.read_bytes(), val.read_bytes()))
        try:
            assert states_of(cfg, load=False) is None, name
        except UserError as error:
            assert "is damaged; the same command computes it anew" in str(error)
            assert error.exit_code == 75
            assert states_of(cfg, load=False) is None, name  # its row is missing now
        torch.testing.assert_close(states_of(cfg), states, rtol=0, atol=0)
        assert_all_stored()


def test_inputs_that_are_not_the_stored_rows_are_refused(world, tmp_path, monkeypatch):
    read = train.read_rows

    def noisy(*args):
        for x, *others in read(*args):
            yield x.fill_(1), *others

    monkeypatch.setattr(train, "read_rows", noisy)
    with refusal("teacher_cache=True: inputs are not those of Rows.batch"):
        distil(world, tmp_path / "out", CACHED)


def test_the_rows_of_an_order_of_ones_own_are_stored(world, tmp_path, monkeypatch):
    """It depends on the update."""
    order = rows_py.row_order

    def alternating(step, batch_rows, *others):
        return order(step, batch_rows, *others) + step % 2 * 40

    for module in (train, teacher_cache):
        monkeypatch.setattr(module, "row_order", alternating)
    keys = "--methods=vanilla_kd --shuffle=False"
    distil(world, tmp_path / "out", f"{CACHED} {keys}")
    distil(world, tmp_path / "plain", f"{FLAGS} {keys}")
    bits = [final_bits(tmp_path / name, "vanilla_kd") for name in ("out", "plain")]
    assert bits[0] == bits[1]


def test_the_states_of_masked_documents_are_stored_apart(world):
    states_of(config(world, "unused"))
    masked_cfg = config(world, "unused", mask_documents=True)
    assert states_of(masked_cfg, load=False) is None
    states_of(masked_cfg)
    assert len([*world.glob("data/teacher_*")]) == 5  # they share the head


def test_a_fill_that_was_killed_goes_on_where_it_was(world, forward):
    cfg = config(world, "unused", CACHED)  # 24 rows, and 7 held-out ones
    forward.limit = 5
    with pytest.raises(AssertionError):
        fill(cfg)
    forward.limit = 99
    fill(cfg)
    fill(cfg)
    assert forward.rows == [2] * 12 + [2, 2, 2, 1]


def test_other_teachers_and_code_have_files_of_their_own(make, world, monkeypatch):  # noqa: F811
    for kind, n_files in ((FOREIGN["pythia"], 3), (NATIVE["smollm2"], 6)):
        fill(config(world, "unused", CACHED, teacher=make(*kind)))
        assert len([*world.glob("data/teacher_*")]) == n_files
    for n_files, (owner, name) in {9: (Qwen2, "hidden"), 12: (Rows, "batch")}.items():
        own = getattr(owner, name)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, own=own, n=n_files: own(*args))
            fill(config(world, "unused", CACHED, teacher=make(*kind)))
        assert len([*world.glob("data/teacher_*")]) == n_files


def test_hidden_states_are_on_the_disk_before_their_checksums(tmp_path, monkeypatch):
    manifest = {"sha256": "", "row_len": 3}
    rows = SimpleNamespace(file=tmp_path / "val.bin", n=2, manifest=manifest, mask_documents=False)
    states = teacher_cache.States(rows, {}, 4)
    stored = []
    monkeypatch.setattr(
        os, "fsync", lambda _: stored.append([states.values.all(), states.sums.any()])
    )
    states.write(np.arange(2), np.ones((2, 8), np.uint8))
    assert stored == [[True, False], [True, True]]
