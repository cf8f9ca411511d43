"""What made a student (run/provenance.py): which edits count, and what may follow on a run."""

import dataclasses
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import typing
import zipfile
from collections import namedtuple
from unittest import mock

import pytest
import torch

import configure
import losses
import train
from lib import device, source
from lib.files import read_json
from losses import METHODS, Method
from run import objective_trial, provenance, startup
from tests import world
from tests.world import ROOT, config, distil, final_bits, read_table, records, refusal

FILES = {
    "mine": """
import math as m
import parts
from parts import square as raised, Terms
from losses import enter, leave

FACTOR = 1.0
EXTRA = {"a", "b"}
GROUPS = {"c": {"d", "e"}}

def make(k):
    def inner(x):
        return k * x
    return inner

def unused(x):
    return x

twice = make(2)

def mine(z_s, z_t, y):
    \"\"\"A docstring.\"\"\"
    z_s, z_t, _, valid = enter(z_s, z_t, y)  # a comment
    loss = FACTOR * twice(raised(z_s - z_t)) + len(EXTRA) + len(GROUPS)
    return Terms(leave(parts.mean(loss) * m.pi, valid))
""",
    "parts": """
from functools import cache, wraps
from typing import NamedTuple
from torch import Tensor
SHIFT = 0.0
class Terms(NamedTuple):
    loss: Tensor
class Halved:
    @staticmethod
    def forward(x):
        return half(x)
BY = 2
def half(x, by=BY):
    return x / by
def logged(fn):
    @wraps(fn)
    def wrapper(x):
        return fn(x)
    return wrapper
@logged
def square(x):
    return x.square() + shift()
@cache
def shift():
    return SHIFT
def mean(x):
    return Halved.forward(x.mean(-1))
def unused(x):
    return x
""",
}
# file => old text => new text => the definition that the edit changes; none: it does not count
EDITED = """
mine => z_s - z_t => z_t - z_s => mine.mine
mine => FACTOR = 1.0 => FACTOR = 1.5 => mine.mine
mine => {"a", "b"} => {"a", "c"} => mine.mine
mine => {"a", "b"} => {"b", "a"}
mine => {"c": {"d", "e"}} => {"c": {"e", "d"}}
mine => make(2) => make(3) => mine.make.<locals>.inner
mine => k * x => k + x => mine.make.<locals>.inner
mine => import square as => import mean as => parts.square
parts => x.square() => x.abs() => parts.square
parts => return fn(x) => return 2 * fn(x) => parts.square
parts => x.mean(-1) => x.sum(-1) => parts.mean
parts => BY = 2 => BY = 3 => parts.half
parts => SHIFT = 0.0 => SHIFT = 1.0 => parts.shift
parts => loss: Tensor => kd: Tensor => parts.Terms
mine => A docstring => Another one
mine => # a comment => # other words
mine => def unused(x): => def unused(y):
parts => def unused(x): => def unused(y):
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """project(file, old, new) -> `mine`, imported anew from the files of FILES with one edit."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def project(edited="", old="", new=""):
        for name, text in FILES.items():
            sys.modules.pop(name, None)
            assert name != edited or text.count(old) == 1
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if name == edited else text)
        importlib.invalidate_caches()
        source.source_of.cache_clear()
        return importlib.import_module("mine")

    yield project
    for name in FILES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("edit", read_table(EDITED))
def test_an_objective_is_known_by_all_that_it_reaches(project, edit):
    """Also in other files, which git does not track, and by what it has in it."""
    *edit, definition = edit if len(edit) == 4 else [*edit, None]
    before = source.reached(project().mine)
    after = source.reached(project(*edit).mine)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    assert definition in changed if definition else not changed


ANY = mock.MagicMock()


def test_an_object_with_any_attribute_is_reached_once():
    def objective():
        return ANY.tau

    assert len(source.reached(objective)) == 1


def test_an_objective_reaches_files_of_lib_but_no_other_objective(tiny):
    cfg = config(tiny, "unused", methods="vanilla_kd,taid_adaptive")
    names, taid = (provenance.made_by(cfg, name)["source"].keys() for name in cfg.methods)
    common = {"losses.enter", "lib.vocab.full_kl", "losses.cross_entropy", "losses.position_weight"}
    assert {"losses.vanilla_kd", *common} <= names
    assert not {"losses.alra", "losses.mean_loss", "lib.vocab.top"} & names
    assert "losses.AdaptiveTaid" in taid
    several = dataclasses.replace(cfg, teacher=f"{cfg.teacher},{cfg.teacher}")
    more = provenance.made_by(several, "vanilla_kd")["source"].keys() - names
    assert "lib.head.OutputHead.logits" in more


def test_a_snapshot_has_all_code_that_is_loaded(project, tmp_path):
    """Also that outside of the project's folder, and that git does not track."""
    project()
    sources = source.loaded_sources()
    mine = os.path.relpath(tmp_path / "mine.py", ROOT)
    assert {mine, "lib/__init__.py", "run/provenance.py", "tests/world.py"} <= sources.keys()
    assert not [name for name in sources if "python3" in name]
    source.write_snapshot(tmp_path, sources)
    (file,) = tmp_path.glob("code_*.zip")
    with zipfile.ZipFile(file) as archive:
        assert archive.read(mine).decode() == FILES["mine"]
    hashes = source.hashes(sources)
    edited = hashes | {mine: "another"}
    assert source.edited(hashes, hashes) == []
    assert source.edited(hashes, edited | {"new.py": "a"}, {}) == [mine]
    twice = source.merged(hashes, edited, hashes)  # of a run that was edited, and edited back
    assert source.edited(twice) == [mine]


@dataclasses.dataclass(frozen=True)
class NewConfig(configure.Config):
    margin: float = 0.5
    prior: str | None = None


def test_a_new_key_identifies_a_student_and_a_file_by_its_content(tmp_path, monkeypatch):
    """Records that are older than the key have its default."""
    assert {*provenance.FREE.split()} < {*configure.KINDS}
    kinds = typing.get_type_hints(NewConfig, include_extras=True)
    for place in (configure, provenance):
        monkeypatch.setattr(place, "KINDS", kinds)
    monkeypatch.setattr(provenance, "Config", NewConfig)

    def changes(earlier, **keys):
        settings = provenance.settings_of_run(NewConfig(**keys)) | {"shape": {}}
        return list(provenance.student_changes(earlier, settings).values())

    old = provenance.settings_of_run(configure.Config()) | {"shape": {}}
    assert "margin" not in old and changes(old) == []
    assert changes(old, margin=0.7) == ["margin was 0.5, now 0.7"]
    new = provenance.settings_of_run(NewConfig(margin=0.7)) | {"shape": {}}
    new["out_dir"] = "of a key that was not free"
    assert provenance.student_changes(new, old) == {"margin": "margin was 0.7, now None"}
    file = tmp_path / "prior.npy"
    file.write_bytes(b"1")
    known = provenance.settings_of_run(NewConfig(prior=f"{file}")) | {"shape": {}}
    moved = shutil.copy(file, tmp_path / "moved.npy")
    assert changes(known, prior=f"{moved}") == []
    file.write_bytes(b"12")
    (phrase,) = changes(known, prior=f"{file}")
    assert re.match("prior was '.*', now '", phrase)


def test_a_record_changes_with_a_teachers_config_and_a_row_of_methods(tiny, tmp_path, monkeypatch):
    """Also if the file keeps its size within one process."""
    teacher = shutil.copytree(tiny / "teacher", tmp_path / "teacher")
    cfg = config(tiny, "unused", methods="taid", teacher=teacher)
    before = provenance.made_by(cfg, "taid")
    world.edit(teacher / "config.json", "rms_norm_eps=1e-05")
    row = METHODS["taid"]._replace(moving={})
    monkeypatch.setitem(METHODS, "taid", row)
    after = provenance.made_by(cfg, "taid")
    assert {*provenance.student_changes(before, after)} == {"moving", "teacher_sha256"}

    class Wider(namedtuple("Wider", [*row._fields, "taus", "rule"], defaults=((1.0,), None))):
        """With fields of one's own, of which only what differs from a default counts."""

        has_teacher = True

    def record(*values):
        monkeypatch.setattr(provenance, "resolve", lambda name: Wider(*row, *values))
        return provenance.made_by(cfg, "taid")

    assert record() == after
    own = record((2.0, 4.0), world.write_text)
    assert own["hyper"] == after["hyper"] | {"taus": [2.0, 4.0]}
    assert "tests.world.write_text" in own["source"]


def test_a_run_goes_on_only_with_its_objective(tiny, tmp_path, project, monkeypatch, printed):
    """Its helper is edited half-way, and after the end. The message names two ways on."""

    def go(out, edit, flags=""):
        monkeypatch.setitem(METHODS, "mine", Method(project(*edit).mine))
        return train.distil(config(tiny, tmp_path / out, f"--methods=mine {flags}"))

    helper = ("parts", "x.square()", "x.abs()")
    assert go("a", (), "--max_steps=3") == 0
    problem = r"a different run \(mine: edited since: parts.square\); "
    for steps in (6, 3):
        with refusal(problem + "choose another out_dir; --resume_from=.* --student_weights"):
            go("a", helper, f"--max_steps={steps}")
    printed()
    assert go("a", ("parts", "def unused(x):", "def unused(y):"), "--max_steps=4") == 0
    assert re.search(r"edited since the run began: \S*parts.py\n", printed())
    assert source.edited(read_json(tmp_path / "a/mine/run.json")["code"])  # for tables
    assert len([*tmp_path.glob("a/code_*.zip")]) == 2
    weights = f"--student_weights={tmp_path}/a/mine/checkpoints/step_00000004"
    cfg = config(tiny, tmp_path / "b", f"--methods=mine --max_steps=1 {weights}")  # the second way
    assert train.distil(cfg) == 0
    monkeypatch.setitem(METHODS, "mine", METHODS["mine"]._replace(w_ce=0.5))
    with refusal(r"mine: hyper.w_ce was 0.0, now 0.5"):
        train.distil(cfg)


def test_a_branch_begins_with_all_of_a_checkpoint(tiny, tmp_path, monkeypatch):
    """A decay from the middle of a constant rate: as if the run had gone on so, also resumed."""

    def go(out, flags):
        distil(tiny, tmp_path / out, flags)

    plain = "--methods=vanilla_kd --warmup_steps=1 --lr_schedule=constant"
    go("base", f"{plain} --keep_checkpoints=9")
    # step 4: the first that decays
    branch = f"--methods=vanilla_kd --warmup_steps=1 --lr_schedule=wsd --decay_share={1 / 3}"
    branch += f" --resume_from={tmp_path}/base/vanilla_kd/checkpoints/step_00000004"
    rates = [1e-2, 1e-2, 1e-2, 1e-2, 5e-3, 1e-3]
    monkeypatch.setattr(train, "learning_rate", lambda step, cfg: rates[step])
    go("whole", plain)
    go("branch", f"{branch} --max_steps=5")
    go("branch", branch)
    bits = [final_bits(tmp_path / out, "vanilla_kd") for out in ("whole", "branch")]
    assert bits[0] == bits[1]
    lines = records(tmp_path / "branch", "vanilla_kd")
    assert [line["step"] for line in lines if "ce" in line] == [5, 6]
    ends = [read_json(tmp_path / out / "vanilla_kd/run.json") for out in ("whole", "branch")]
    assert ends[0]["valid_tokens"] == ends[1]["valid_tokens"]


def test_a_branch_on_other_rows_begins_at_row_0(tiny, tmp_path, monkeypatch, printed):
    """Its counts and its advice follow; a branch of the branch goes on in these rows."""
    read = []
    batch = startup.Rows.batch

    def watched(rows, index, device):
        if rows.file.endswith("train.bin"):
            read.extend(index.tolist())
        return batch(rows, index, device)

    def go(out, flags):
        read.clear()
        distil(tiny, tmp_path / out, f"{plain} {flags}")
        return read.copy()

    plain = "--methods=vanilla_kd --lr_schedule=constant --warmup_steps=1 --val_every_steps=99"
    monkeypatch.setattr(startup.Rows, "batch", watched)
    go("base", "--max_steps=4")
    data = tmp_path / "data"
    shutil.copytree(tiny / "data", data)
    world.write_rows(data, "train", 9, seed=5)  # two updates of four rows
    place = f"--data_dir={data} --resume_from={tmp_path}"
    branch = f"{place}/base/vanilla_kd/checkpoints/step_00000004"
    with refusal("max_steps=7: needs 12 rows, .* has 9; set --max_steps=6 "):
        go("branch", f"{branch} --max_steps=7 --schedule_steps=9")
    rows = go("branch", f"{branch} --max_steps=5")
    assert rows + go("branch", branch) == [*range(8)]
    assert "2 updates of 4 rows are 0.89 passes over 9 rows" in printed()
    again = f"{place}/branch/vanilla_kd/checkpoints/step_00000006 --schedule_steps=9"
    assert go("again", f"{again} --max_steps=7 --repeat_rows=True") == [8, 0, 1, 2]


def test_a_row_may_hold_a_partial_of_an_objective(monkeypatch):
    """Its arguments are defaults, and count like a setting."""
    row = Method(functools.partial(losses.vanilla_kd, tau=2.0))
    monkeypatch.setitem(METHODS, "soft", row)
    objective_trial.check_settings("soft", 64, t2_scaling=True)
    batch = (*torch.randn(2, 5, 9), torch.arange(5))
    loss, _ = losses.method_loss("soft", *batch)
    expected, _ = losses.method_loss("vanilla_kd", *batch, tau=2.0, w_kd=1.0, w_ce=0.0)
    assert torch.equal(loss, expected)  # alone it has tau 0.5


def test_only_a_repository_of_the_project_alone_gives_the_commit(tmp_path, monkeypatch, capsys):
    """Not one around it, nor one that the environment names. Edits mark it."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a"]
    (tmp_path / "x").touch()
    for command in (["init", "-q"], ["add", "x"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)

    def commit_of(root):
        monkeypatch.setattr(device, "ROOT", root)
        device.git_commit.cache_clear()
        return device.git_commit()

    (tmp_path / "project").mkdir()
    for edit, pattern in (("", r"\w{40}"), ("b", r"\w{40}\+\w{12}")):
        (tmp_path / "x").write_text(edit)
        assert re.fullmatch(pattern, commit_of(tmp_path))
        assert commit_of(tmp_path / "project") is None
    device.git_commit()
    device.git_commit.cache_clear()
    assert capsys.readouterr().err.count("no commit is recorded") == 2
