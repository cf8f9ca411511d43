"""examples/nano.py: its objectives beside losses.py, its updates beside train.py."""

import re

import pytest
from torch.testing import assert_close

import configure
import train
from model import Qwen2
from tests import world
from tests.test_losses import assert_same_loss, case
from tests.world import DEMO, ROOT

NANO = ROOT / "examples/nano.py"
METHODS = ("pretrain", "vanilla_kd", "alra")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the demo's teacher, and rows of unequal lengths in data/demo."""
    facts = {"tokenizer": DEMO, "vocab_size": 4096, "unigram_ce": 7.0}
    for name in ("train", "val"):
        world.write_rows(tmp_path / "data/demo", name, n=9, **facts)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def nano(**settings):
    """Run nano.py on the CPU with other settings. Return its variables and the printed lines."""
    source = NANO.read_text()
    for key, value in {"device": "cpu", **settings}.items():
        source, n = re.subn(rf"^{key} = .*", f"{key} = {value!r}", source, flags=re.M)
        assert n == 1, key
    lines = []
    names = {"__file__": str(NANO), "print": lines.append}
    exec(compile(source, NANO, "exec"), names)
    return names, lines


@pytest.mark.parametrize("method", METHODS)
def test_the_losses_are_those_of_losses_py(method, folder):
    names, _ = nano(method=method, max_steps=0)
    for n, v in ((1, 26), (7, 31), (23, 1009)):
        inputs = case(n, n, v, student=3.0, ignored=())
        assert_same_loss(lambda *z: names["objective"](*z).mean(), method, *inputs)


def test_updates_are_those_of_train_py(folder):
    """Those of the demo's config but for their number.

    ALRA has bounds of its own: rounding may choose another token where two logits are nearly equal.
    When one position in thirty had another token, a loss moved by 0.02, a gradient norm by 0.2;
    without the anchor, losses move by 1.
    """
    flags = (
        "--max_steps=4 --schedule_steps=4 --warmup_steps=2 --log_every_steps=1 --val_every_steps=2 "
        f"--seq_len={world.SEQ} --repeat_rows=True --device=cpu --methods={','.join(METHODS)}"
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
        names, (_, *lines) = nano(method=method, **settings)
        records = world.records(folder / "out/demo", method)
        for line, record in zip(lines, records, strict=True):
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
