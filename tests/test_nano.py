"""examples/nano.py: its objectives beside losses.py, its updates beside train.py, its resume."""

import contextlib
import re

import numpy as np
import pytest
from torch.testing import assert_close

import configure
import train
from lib.hf import load_tokenizer
from lib.rows import PAD
from model import Qwen2
from tests import world
from tests.test_losses import assert_same_loss, case
from tests.world import DEMO, ROOT

NANO = ROOT / "examples/nano.py"
METHODS = ("pretrain", "vanilla_kd", "alra")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the demo's teacher, and rows of unequal lengths in data/demo."""
    ids = load_tokenizer(DEMO).encode((ROOT / "LICENSE").read_text())
    rows = np.full((9, 25), PAD, np.uint32)
    for n, row in enumerate(rows):
        row[: 25 - 2 * n] = ids[25 * n : 25 * n + 25 - 2 * n]
    facts = {"tokenizer": DEMO, "vocab_size": 4096, "unigram_ce": 7.0}
    for name in ("train", "val"):
        world.write_rows(tmp_path / "data/demo", name, ids=rows, **facts)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def nano(stop="never", **settings):
    """Run nano.py on the CPU with other settings, up to a line that starts with `stop`.

    Returns its variables, and the lines that it printed.
    """
    source = NANO.read_text()
    for key, value in {"device": "cpu", **settings}.items():
        source, n = re.subn(rf"^{key} = .*", f"{key} = {value!r}", source, flags=re.M)
        assert n == 1, key
    lines = []

    def say(line):
        if line.startswith(stop):
            raise KeyboardInterrupt
        lines.append(line)

    names = {"__file__": str(NANO), "print": say}
    with contextlib.suppress(KeyboardInterrupt):
        exec(compile(source, NANO, "exec"), names)
    return names, lines


def test_losses_are_those_of_losses_py_and_updates_those_of_train_py(folder):
    """Those of the demo's config but for their number. nano.py is stopped once, and resumes.

    ALRA has bounds of its own: rounding may choose another token where two logits are nearly equal.
    When one position in thirty had another token, a loss moved by 0.02, a gradient norm by 0.2;
    without the anchor, losses move by 1.
    """
    flags = (
        "--max_steps=4 --schedule_steps=4 --warmup_steps=2 --log_every_steps=1 --val_every_steps=2 "
        f"--seq_len=24 --repeat_rows=True --device=cpu --methods={','.join(METHODS)}"
    )
    cfg = configure.load([str(ROOT / "config/demo.py"), *flags.split()])
    assert train.distil(cfg) == 0
    settings = {"max_steps": 4, "warmup_steps": 2, "log_every": 1, "val_every": 2}
    # Half a unit of the last printed digit, and ten times the rounding that was measured: 5e-6 of
    # a loss, 1e-4 of a norm in fp32.
    exact = {"step": 0, "lr": 1e-5, "loss": 1e-4, "gnorm": 2e-2, "CE": 1e-4}
    for method in METHODS:
        bounds = exact
        if method == "alra":
            bounds = exact | {"loss": 0.05, "gnorm": 0.5, "CE": 0.05}
        names, before = nano(stop="step 4", method=method, **settings)
        objective = names["objective"]
        for n, v in ((1, 26), (7, 31), (23, 1009)):
            inputs = case(n, n, v, student=3.0, ignored=())
            assert_same_loss(lambda *z, fn=objective: fn(*z).mean(), method, *inputs)
        names, after = nano(method=method, **settings)
        assert after.pop(0).startswith("resumes from out/nano")
        assert before.pop(0) == after.pop(0)  # CEs to compare with
        assert before.pop() == after[0]  # step 3, to the last digit
        records = world.records(folder / "out/demo", method)
        for line, record in zip(before + after, records, strict=True):
            printed = re.findall(r"(\w+) ([\d.e-]+)(?:  |$)", line)
            assert len(printed) in (2, 4)
            for key, value in printed:
                expected = record["val_ce" if key == "CE" else key]
                assert float(value) == pytest.approx(expected, rel=0, abs=bounds[key]), line
        saved = Qwen2.from_pretrained(f"out/nano/{method}/model")
        assert_close(saved.state_dict(), names["student"].state_dict(), rtol=0, atol=0)


def test_the_lines_of_its_docstring_are_of_its_settings():
    text = NANO.read_text()
    lr, min_lr, warmup = (
        float(re.search(rf"^{key} = (\S+)", text, re.M)[1])
        for key in ("lr", "min_lr", "warmup_steps")
    )
    assert re.findall(r"lr (\S+e-\d+)", text) == [f"{20 / warmup * lr:.2e}", f"{min_lr:.2e}"]
