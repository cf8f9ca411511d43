"""What made a student (run/identity.py): which edits count, and what may follow on a run."""

import functools
import importlib
import inspect
import itertools
import linecache
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import losses
import train
from lib import device
from lib.errors import UserError
from losses import METHODS, Method
from run import identity, methods
from tests.world import ROOT, config, final_bits, records

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
COUNTED = {
    "x * SCALE": "x / SCALE",
    "SCALE = 2.0": "SCALE = 2.5",
    '{"a": 1}': '{"a": 2}',
    "make(3.0)": "make(0.01)",
    "weight = 3.0": "weight = 4.0",
    "** power": "* power",
    "tau=2.0": "tau=3.0",
    "z_s - z_t": "z_t - z_s",
}
NOT_COUNTED = {
    "A docstring": "Words",
    "  # a comment": "",
    "def unused(x):\n    return x": "",
    "import functools": "import functools, math",
}
NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that writes a module and imports it."""

    def load(text: str):
        name = f"edited_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(("old", "new"), [*COUNTED.items(), *NOT_COUNTED.items()])
def test_an_edit_that_can_change_a_result_changes_the_hash(module, old, new):
    assert FILE.count(old) == 1
    before = identity.code_hash(module(FILE).PART)
    after = identity.code_hash(module(FILE.replace(old, new)).PART)
    assert (before != after) is (old in COUNTED)


def test_code_without_a_file_has_a_hash_too(monkeypatch):
    """Also where `<string>` has a source, that of `python -c`, as since Python 3.13."""
    monkeypatch.setitem(linecache.cache, "<string>", (9, None, ["x = 1\n"] * 9, "<string>"))
    made = {}
    for name, n in (("f", 1), ("g", 2)):
        exec(f"def {name}(x, y=(1, 2)):\n    return [x + {n} for _ in y]", made)
    powers = [lambda x, power=power: x**power for power in (1, 2)]
    hashes = [identity.code_hash(fn) for fn in (made["f"], made["g"], *powers)]
    assert len({*hashes}) == 4 and hashes[0] == identity.code_hash.__wrapped__(made["f"])


def test_a_record_lists_settings_in_the_order_of_the_signature(tiny):
    """A set would list them in an order that changes with PYTHONHASHSEED."""
    cfg = config(tiny, "unused", **{"methods": "alra", "alra.lr": 1.0})
    order = [*inspect.signature(losses.alra).parameters][3:]
    assert [*identity.made_by(cfg, "alra")["hyper"]] == ["w_kd", "w_ce", *order, "lr"]


def test_a_record_changes_with_a_teachers_config_and_a_row_of_methods(tiny, tmp_path, monkeypatch):
    """Also if the file keeps its size within one process."""
    teacher = shutil.copytree(tiny / "teacher", tmp_path / "teacher")
    cfg = config(tiny, "unused", methods="taid", teacher=teacher)
    before = identity.made_by(cfg, "taid")
    text = (teacher / "config.json").read_text()
    assert "1e-06" in text
    (teacher / "config.json").write_text(text.replace("1e-06", "1e-05"))
    monkeypatch.setitem(METHODS, "taid", METHODS["taid"]._replace(moving=()))
    after = identity.made_by(cfg, "taid")
    changed = [key for key in before if before[key] != after[key]]
    assert changed == ["objective", "teacher_sha256"]


MINE = """
from lib.checks import enter, leave
def helper(z):
    return z.square()
def mine(z_s, z_t, y):
    z_s, z_t, _, valid = enter(z_s, z_t, y, guard=True)
    return leave(helper(z_s - z_t).mean(-1), valid)
"""


def test_an_edited_objective_does_not_go_on(tiny, tmp_path, module, monkeypatch):
    """Its helper is edited half-way, and after the end. The message names two ways on."""

    def go(text: str, out: str, **keys) -> int:
        monkeypatch.setitem(METHODS, "mine", Method(module(text).mine))
        return train.distil(config(tiny, tmp_path / out, methods="mine", **keys))

    edited = MINE.replace("square()", "abs()")
    assert go(MINE, "a", max_steps=3) == 0
    refusal = (
        r"a different run \(mine: its objective, or a function that it calls, was edited\); "
        "choose another out_dir; .*--resume_from=.* --student_weights"
    )
    for steps in (6, 3):
        with pytest.raises(UserError, match=refusal):
            go(edited, "a", max_steps=steps)
    assert go("# a comment\n" + MINE, "a") == 0 and len(records(tmp_path / "a", "mine")) == 6
    keys = {"methods": "mine", "max_steps": 1}
    keys["student_weights"] = tmp_path / "a/mine/checkpoints/step_00000006"
    cfg = config(tiny, tmp_path / "b", **keys)  # the second way on
    assert train.distil(cfg) == 0
    monkeypatch.setitem(METHODS, "mine", METHODS["mine"]._replace(w_ce=0.5))
    with pytest.raises(UserError, match=r"mine: hyper was .*'w_ce': 0.0.*, now .*'w_ce': 0.5"):
        train.distil(cfg)


def test_a_branch_begins_with_all_of_a_checkpoint(tiny, tmp_path, monkeypatch):
    """A decay from the middle of a constant rate: as if the run had gone on so, also resumed."""

    def go(out: str, **keys) -> None:
        assert train.distil(config(tiny, tmp_path / out, **keys)) == 0

    keys = {"methods": "vanilla_kd", "lr_schedule": "constant", "warmup_steps": 1}
    go("base", **keys, keep_checkpoints=9)
    branch = keys | {"lr_schedule": "wsd", "decay_share": 1 / 3}  # step 4: the first that decays
    cfg = config(tiny, "unused", **branch)
    rates = [train.learning_rate(step, cfg) for step in (3, 4)]
    assert rates == [1e-2, pytest.approx(6e-5 + (1e-2 - 6e-5) / 2)]
    branch["resume_from"] = tmp_path / "base/vanilla_kd/checkpoints/step_00000004"
    rates = [1e-2, 1e-2, 1e-2, 1e-2, 5e-3, 1e-3]
    monkeypatch.setattr(train, "learning_rate", lambda step, cfg: rates[step])
    go("whole", **keys)
    go("branch", **branch, max_steps=5)
    go("branch", **branch)
    bits = [final_bits(tmp_path / out, "vanilla_kd") for out in ("whole", "branch")]
    assert bits[0] == bits[1]
    lines = records(tmp_path / "branch", "vanilla_kd")
    assert [line["step"] for line in lines if "ce" in line] == [5, 6]


def test_a_row_may_hold_a_partial_of_an_objective(monkeypatch):
    """Its arguments are defaults, shown by --help, and count like a setting."""
    row = Method(functools.partial(losses.vanilla_kd, tau=2.0))
    monkeypatch.setitem(METHODS, "soft", row)
    line = "    vanilla_kd: tau=2.0, t2_scaling=False, standardize=False"
    assert line in methods.method_lines()
    methods.check_settings("soft", 64, t2_scaling=True)
    batch = (*torch.randn(2, 5, 9), torch.arange(5))
    loss, _ = losses.method_loss("soft", *batch)
    expected, _ = losses.method_loss("vanilla_kd", *batch, tau=2.0, w_kd=1.0, w_ce=0.0)
    assert torch.equal(loss, expected)  # alone it has tau 0.5
    other = functools.partial(losses.vanilla_kd, tau=3.0)
    assert identity.code_hash(row.fn) != identity.code_hash(other)


@pytest.mark.parametrize(("edits", "pattern"), [("", "abc"), ("-a\n+b\n", r"abc\+\w{12}")])
def test_a_commit_with_edits_is_marked(edits, pattern, monkeypatch):
    answers = {"rev-parse": "abc\n", "diff": edits}
    git = mock.Mock(side_effect=lambda line, **_: SimpleNamespace(stdout=answers[line[3]]))
    monkeypatch.setattr(device.subprocess, "run", git)
    commit = device.machine_facts(torch.device("cpu"))["git_commit"]
    assert re.fullmatch(pattern, commit)
    excluded = git.call_args.args[0][-1].removeprefix(":(top,exclude)")
    assert (ROOT / excluded).samefile(ROOT / "study/results")  # a report written anew is no edit
