"""What made a student, told by run/identity.py: edits that count, edits that do not, and what may follow on a run."""

import functools
import importlib.util
import itertools
import linecache
import sys
import types

import pytest
import torch

import losses
import train
from lib import device
from lib.errors import UserError
from losses import Method
from run import identity, methods
from tests.world import config, final_bits, records

FILE = '''
import functools

SCALE = 2.0
TABLE = {"a": 1}


def helper(x):
    """A docstring."""
    return x * SCALE


class Terms:
    weight = 3.0


def make(power):
    def inner(x):
        return helper(x) ** power + TABLE["a"]

    return inner


def unused(x):
    return x


def loss(z_s, z_t, y, *, tau=1.0):  # a comment
    """Another docstring."""
    return FN(z_s - z_t) * Terms.weight


FN = make(3.0)
PART = functools.partial(loss, tau=2.0)
'''
COUNTS = itertools.count()


@pytest.fixture
def module(tmp_path):
    def load(text: str):
        name = f"edited_{next(COUNTS)}"
        (tmp_path / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    return load


@pytest.mark.parametrize(("old", "new", "counts"), [
    ("x * SCALE", "x / SCALE", True), ("SCALE = 2.0", "SCALE = 2.5", True), ('{"a": 1}', '{"a": 2}', True), ("make(3.0)", "make(0.01)", True),
    ("weight = 3.0", "weight = 4.0", True), ("** power", "* power", True), ("tau=2.0", "tau=3.0", True), ("z_s - z_t", "z_t - z_s", True),
    ("A docstring", "Words", False), ("  # a comment", "", False), ("def unused(x):\n    return x", "", False), ("import functools", "import functools, math", False),
])  # fmt: skip
def test_an_edit_that_can_change_a_result_changes_the_hash(module, old, new, counts):
    assert FILE.count(old) == 1
    before, after = (identity.code_hash(module(text).PART) for text in (FILE, FILE.replace(old, new)))
    assert (before != after) is counts


def test_code_without_a_file_has_a_hash_too(monkeypatch):
    """Also where `<string>` has a source, that of `python -c`, as since Python 3.13."""
    monkeypatch.setitem(linecache.cache, "<string>", (9, None, ["x = 1\n"] * 9, "<string>"))
    made = {}
    exec("def f(x, y=(1, 2)):\n    return [x + 1 for _ in y]\ndef g(x, y=(1, 2)):\n    return [x + 2 for _ in y]", made)
    powers = [lambda x, power=power: x**power for power in (1, 2)]
    hashes = [identity.code_hash(fn) for fn in (made["f"], made["g"], *powers)]
    assert len({*hashes}) == 4 and hashes[0] == identity.code_hash.__wrapped__(made["f"])


def test_an_edited_objective_does_not_go_on(tiny, tmp_path, module, monkeypatch, capsys):
    """Its helper is edited between two starts, half-way and after the end; the message names two ways on."""
    text = """
from lib.checks import enter, leave
def helper(z):
    return z.square()
def mine(z_s, z_t, y):
    z_s, z_t, _, valid = enter(z_s, z_t, y, guard=True)
    return leave(helper(z_s - z_t).mean(-1), valid)
"""
    keys = {"methods": "mine", "micro_batch": 4}

    def go(text: str, out: str, **more) -> int:
        monkeypatch.setitem(losses.METHODS, "mine", Method(module(text).mine, {}, 1.0, 0.0))
        return train.distil(config(tiny, tmp_path / out, **keys, **more))

    edited = text.replace("square()", "abs()")
    assert go(text, "a", max_steps=3) == 0
    for steps in (6, 3):
        with pytest.raises(UserError, match=r"a different run \(mine: its objective, or a function that it calls, was "
                           r"edited\); choose another out_dir; .*--resume_from=.* --student_weights"):  # fmt: skip
            go(edited, "a", max_steps=steps)
    assert go("# a comment\n" + text, "a") == 0 and len(records(tmp_path / "a", "mine")) == 6
    start = tmp_path / "a/mine/checkpoints/step_00000006"
    assert go(edited, "b", student_weights=start, max_steps=1) == 0  # the second way on
    monkeypatch.setitem(losses.METHODS, "mine", losses.METHODS["mine"]._replace(w_ce=0.5))
    with pytest.raises(UserError, match=r"mine: hyper was .*'w_ce': 0.0.*, now .*'w_ce': 0.5"):
        train.distil(config(tiny, tmp_path / "b", **keys, student_weights=start))


def test_a_branch_begins_with_all_of_a_checkpoint(tiny, tmp_path, monkeypatch):
    """A decay from the middle of a constant rate: as if the run had gone on so, and after a kill with the same bits."""
    keys = {"methods": "vanilla_kd", "lr_schedule": "constant", "warmup_steps": 1, "keep_checkpoints": 9}
    assert train.distil(config(tiny, tmp_path / "base", **keys)) == 0
    start = tmp_path / "base/vanilla_kd/checkpoints/step_00000004"
    branch = keys | {"lr_schedule": "wsd", "decay_share": 1 / 3, "resume_from": start}  # step 4: the first that decays
    with monkeypatch.context() as patch:
        patch.setattr(train, "learning_rate", lambda step, cfg: 1e-2 if step < 4 else 5e-3 if step == 4 else 1e-3)
        assert train.distil(config(tiny, tmp_path / "whole", **keys)) == 0
        assert train.distil(config(tiny, tmp_path / "branch", **branch, max_steps=5)) == 0
        assert train.distil(config(tiny, tmp_path / "branch", **branch)) == 0
    assert final_bits(tmp_path / "whole", "vanilla_kd") == final_bits(tmp_path / "branch", "vanilla_kd")
    assert [r["step"] for r in records(tmp_path / "branch", "vanilla_kd") if "ce" in r] == [5, 6]
    cfg = config(tiny, tmp_path / "branch", **branch)
    assert [train.learning_rate(step, cfg) for step in (3, 4)] == [1e-2, pytest.approx(6e-5 + (1e-2 - 6e-5) / 2)]
    with pytest.raises(UserError, match=r"max_steps=3: .*late is at step 4; set at least that"):
        train.distil(config(tiny, tmp_path / "late", **branch, max_steps=3))
    with pytest.raises(UserError, match=r"resume_from=.*vanilla_kd: no checkpoint; expected out/NAME/METHOD/checkp"):
        train.distil(config(tiny, tmp_path / "wrong", **branch | {"resume_from": tmp_path / "base/vanilla_kd"}))
    with pytest.raises(UserError, match="a student of another shape"):
        train.distil(config(tiny, tmp_path / "other", **branch, student="32x1x2"))


def test_a_row_may_hold_a_partial_of_an_objective(monkeypatch, capsys):
    """Its arguments are defaults, shown by --help, and count like a setting."""
    row = Method(functools.partial(losses.vanilla_kd, tau=2.0), {}, 1.0, 0.0)
    monkeypatch.setitem(losses.METHODS, "soft", row)
    assert "    vanilla_kd: tau=2.0, t2_scaling=False, standardize=False" in methods.method_lines()
    methods.check_settings("soft", 64, t2_scaling=True)
    z, y = torch.randn(2, 5, 9), torch.arange(5)
    ours, theirs = (losses.method_loss(*named)[0] for named in (("soft", *z, y), ("vanilla_kd", *z, y)))
    assert torch.equal(ours, losses.method_loss("vanilla_kd", *z, y, tau=2.0, w_kd=1.0, w_ce=0.0)[0]) and ours != theirs
    assert identity.code_hash(row.fn) != identity.code_hash(functools.partial(losses.vanilla_kd, tau=3.0))


def test_a_commit_with_edits_is_marked(monkeypatch):
    seen = []
    for edits, mark in (("", ""), ("-a\n+b\n", "+"), ("-a\n+c\n", "+")):
        said = {"rev-parse": "abc\n", "diff": edits}
        run = lambda line, **_: types.SimpleNamespace(stdout=said[line[3]], seen=seen.append(line))  # noqa: B023, E731
        monkeypatch.setattr(device.subprocess, "run", run)
        commits = device.machine_facts(torch.device("cpu"))["git_commit"]
        assert commits.startswith(f"abc{mark}") and len(commits) == (16 if mark else 3)
    assert seen[-1][-1] == ":(top,exclude)study/results"  # a report that is written anew is no edit
