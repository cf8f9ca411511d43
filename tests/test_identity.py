"""What made a student (run/identity.py): which edits count, and what may follow on a run."""

import functools
import importlib
import inspect
import itertools
import re
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import losses
import train
from lib import code, device
from lib.files import read_json
from losses import METHODS, Method
from run import cache, identity, methods, preflight, scoring, trial
from tests import world
from tests.world import ROOT, config, final_bits, read_table, records, refusal

# file => old text => new text => the definition that the edit changes, in hashes of a step
COUNTED = r"""
model.py => F.silu( => F.gelu( => model
train.py => optim.AdamW( => optim.Adam( => make_student
losses.py => leave(nll, => leave(1.5 * nll, => cross_entropy
losses.py => method.w_kd * kd => 2 * method.w_kd * kd => mean_loss
losses.py => tau: Positive = 0.5,\n    t2 => tau: Positive = 0.6,\n    t2 => vanilla_kd
run/methods.py => (step / n_steps) => (step) => run.methods
lib/rows.py => mixed >> 30 => mixed >> 29 => lib.rows
lib/rows.py => IGNORE)[:, 1:] => IGNORE)[:, :-1] => lib.rows
lib/vocab.py => LEAST = -1e30 => LEAST = -1e29 => lib.vocab
lib/vocab.py => return mixture_kl( => return 3 * mixture_kl( => lib.vocab
"""
SCORED = """
lib/metrics.py => = ce_t => = ce => lib.metrics
model.py => F.silu(self => F.gelu(self => model
eval.py => tokens // longest => tokens // 2 // longest => Scorer
eval.py => "num_fewshot": 0 => "num_fewshot": 1 => benchmark
lib/tokens.py => def token_bytes( => def token_bytes(_,  => lib.tokens
"""
# an annotation, a comment, a docstring, a message, a printed line, the log, the loop, a checkpoint,
# another objective, a new one, and its row
NOT_COUNTED = r"""
train.py => rate(step, cfg) -> float: => rate(step, cfg):
train.py =>     n_valid = 0\n =>     # none yet\n\n    n_valid = 0\n
losses.py => Causal language modelling => Language modelling
losses.py => needs teacher logits => lacks teacher logits
train.py => skipped the update => left out the update
run/log.py => def add_entry( => def add_entry(_=
train.py =>     bar.update()\n =>     bar.update(1)\n
run/checkpoints.py => def save_model( => def save_model(_=
losses.py => def pd(\n    z_s => def pd(\n    a, z_s
losses.py => class Method( => def mine(z_s, z_t, y): ...\n\n\nclass Method(
losses.py => "alra": Method( => "mine": Method(tvd),\n    "alra": Method(
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project's files."""
    root = tmp_path_factory.mktemp("project")
    for file in (*ROOT.glob("*.py"), *ROOT.glob("lib/*.py"), *ROOT.glob("run/*.py")):
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    return root


def clear_caches():
    for function in (code.read_tree, code.definitions, code.files_reached):
        function.cache_clear()


@pytest.fixture(scope="module")
def hashes(project):
    """hashes(kind) -> hashes of the unedited files and definitions, and those of today's."""

    def reached(kind):
        clear_caches()
        if kind == "scores":
            names = itertools.chain(*scoring.SCORING.values())
            return code.code_reached(("eval",), names, scoring.NOT_SCORING, project)
        step = code.code_reached(
            identity.STEP_MODULES, identity.STEP, identity.NOT_FOLLOWED, project
        )
        names = ("vanilla_kd", "mean_loss")
        return step | code.definitions_reached(names, project / "losses.py")

    originals = {kind: reached(kind) for kind in ("step", "scores")}
    return lambda kind: (originals[kind], reached(kind))


EDITS = [("step", *edit) for edit in read_table(COUNTED + NOT_COUNTED)]
EDITS += [("scores", *edit) for edit in read_table(SCORED)]


@pytest.mark.parametrize("edit", EDITS)
def test_edits_that_can_change_a_number_are_known_by_definition(project, hashes, edit):
    kind, name, old, new, *definitions = (part.replace("\\n", "\n") for part in edit)
    text = (project / name).read_text()
    assert text.count(old) == 1
    (project / name).write_text(text.replace(old, new))
    original, edited = hashes(kind)
    (project / name).write_text(text)
    changed = [path for path in {**original, **edited} if original.get(path) != edited.get(path)]
    assert changed == definitions


FILES = {
    "a.py": """
from lib.b import *

def start(x: Shape):
    return table[x] + late(x)

if True:
    def late(x):
        return SIZE

for k in (1, 2):
    ROWS[f"x{k}"] = make(k)

def by_row(x):
    return ROWS["x1"](x)

def make(k): ...

SIZE = 3
other = 1
""",
    "lib/__init__.py": "from lib.c import f",
    "lib/b.py": "def later():\n    from lib import d",
    "lib/c.py": "f = 1",
    "lib/d.py": "g = 1",
    "lib/e.py": "unused = 1",
}


def test_code_is_followed_through_files_and_definitions(tmp_path):
    (tmp_path / "lib").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert [*code.files_reached(("a",), root=tmp_path)] == ["a", "lib", "lib.b", "lib.c", "lib.d"]
    assert [*code.files_reached(("a",), ("lib.b",), tmp_path)] == ["a"]
    file = tmp_path / "a.py"
    assert [*code.definitions_reached(["start"], file)] == ["SIZE", "late", "start"]
    assert [*code.definitions_reached(["by_row"], file)] == ["ROWS", "by_row", "k", "make"]


def test_an_objective_made_by_a_closure_is_known_by_its_variables(tmp_path, monkeypatch):
    text = "def make(k, f):\n    def mine(z_s, z_t, y): return f(z_s, z_t, y) * k\n    return mine"
    module = world.import_objective(text, tmp_path)
    rows = {"a": (2, losses.tvd), "b": (3, losses.tvd), "c": (2, losses.jsd)}
    known = []
    for name, values in rows.items():
        monkeypatch.setitem(METHODS, name, Method(module.make(*values)))
        known.append(identity.objective_code(name))
    assert known[0] != known[1] and known[0] != known[2]
    assert {"tvd", "mean_loss", module.__name__} <= known[0].keys()
    monkeypatch.setitem(METHODS, "table", Method(lambda *z: losses.tvd(*z) ** 2))
    assert {"METHODS", "tvd"} <= identity.objective_code("table").keys()
    made = {}
    exec("def f(z_s, z_t, y): return z_s", made)
    monkeypatch.setitem(METHODS, "made", Method(made["f"]))
    with refusal("made: its objective is in no file"):
        identity.objective_code("made")


def test_a_record_lists_settings_in_the_order_of_the_signature(tiny):
    """A set would list them in an order that changes with PYTHONHASHSEED."""
    cfg = config(tiny, "unused", **{"methods": "alra", "alra.lr": 1.0})
    order = [*inspect.signature(losses.alra).parameters][3:-1]  # all but `batch`
    assert [*identity.made_by(cfg, "alra")["hyper"]] == [*order, "lr", "w_kd", "w_ce"]


def test_a_record_changes_with_a_teachers_config_and_a_row_of_methods(tiny, tmp_path, monkeypatch):
    """Also if the file keeps its size within one process."""
    teacher = shutil.copytree(tiny / "teacher", tmp_path / "teacher")
    cfg = config(tiny, "unused", methods="taid", teacher=teacher)
    before = identity.made_by(cfg, "taid")
    text = (teacher / "config.json").read_text()
    assert "1e-06" in text
    (teacher / "config.json").write_text(text.replace("1e-06", "1e-05"))
    monkeypatch.setitem(METHODS, "taid", METHODS["taid"]._replace(moving={}))
    after = identity.made_by(cfg, "taid")
    changed = [key for key in before if before[key] != after[key]]
    assert changed == ["moving", "teacher_sha256"]


MINE = """
from losses import enter, leave
def helper(z):
    return z.square()
def mine(z_s, z_t, y):
    z_s, z_t, _, valid = enter(z_s, z_t, y)
    return leave(helper(z_s - z_t).mean(-1), valid)
"""


def test_an_edited_objective_does_not_go_on(tiny, tmp_path, monkeypatch, printed):
    """Its helper is edited half-way, and after the end. The message names three ways on."""
    monkeypatch.syspath_prepend(tmp_path)

    def go(text, out, flags=""):
        sys.modules.pop("mine", None)
        clear_caches()
        (tmp_path / "mine.py").write_text(text)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.setitem(METHODS, "mine", Method(importlib.import_module("mine").mine))
        return train.distil(config(tiny, tmp_path / out, f"--methods=mine {flags}"))

    edited = MINE.replace("square()", "abs()")
    assert go(MINE, "a", "--max_steps=3") == 0
    problem = (
        r"a different run \(mine: edited since: mine\); choose another out_dir; "
        ".*--resume_from=.* --student_weights.* --accept_edits=True"
    )
    for steps in (6, 3):
        with refusal(problem):
            go(edited, "a", f"--max_steps={steps}")
    assert go(f"# a comment\n{MINE}", "a", "--max_steps=4") == 0
    assert go(edited, "a", "--accept_edits=True") == 0
    assert len(records(tmp_path / "a", "mine")) == 7
    assert "mine: accepted edits; edited since: mine" in printed()
    facts = read_json(tmp_path / "a/run.json")
    assert facts["accepted_edits"] == {"mine": "edited since: mine"}
    weights = f"--student_weights={tmp_path}/a/mine/checkpoints/step_00000006"
    cfg = config(tiny, tmp_path / "b", f"--methods=mine --max_steps=1 {weights}")  # the second way
    assert train.distil(cfg) == 0
    monkeypatch.setitem(METHODS, "mine", METHODS["mine"]._replace(w_ce=0.5))
    with refusal(r"mine: hyper.w_ce was 0.0, now 0.5"):
        train.distil(cfg)


def test_a_branch_begins_with_all_of_a_checkpoint(tiny, tmp_path, monkeypatch):
    """A decay from the middle of a constant rate: as if the run had gone on so, also resumed."""

    def go(out, flags):
        assert train.distil(config(tiny, tmp_path / out, flags)) == 0

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
    """Its counts, its advice and its cache follow; a branch of the branch goes on in these rows."""
    read = []
    batch = preflight.Rows.batch

    def watched(rows, index, device):
        if rows.file.endswith("train.bin"):
            read.extend(index.tolist())
        return batch(rows, index, device)

    def go(out, flags):
        read.clear()
        assert train.distil(config(tiny, tmp_path / out, f"{plain} {flags}")) == 0
        return read.copy()

    plain = "--methods=vanilla_kd --lr_schedule=constant --warmup_steps=1 --val_every_steps=99"
    monkeypatch.setattr(preflight.Rows, "batch", watched)
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
    cfg = config(tiny, tmp_path / "cached", f"{plain} {again} --max_steps=5")
    rows = preflight.open_data(cfg, "train")
    index, _ = cache.rows_of_run(cfg, rows, preflight.open_data(cfg, "val")).values()
    assert index.tolist() == [0, 1, 2, 3]


def test_a_row_may_hold_a_partial_of_an_objective(monkeypatch):
    """Its arguments are defaults, shown by --help, and count like a setting."""
    row = Method(functools.partial(losses.vanilla_kd, tau=2.0))
    monkeypatch.setitem(METHODS, "soft", row)
    line = "    vanilla_kd: tau=2.0, t2_scaling=False, standardize=False"
    assert line in methods.method_lines()
    trial.check_settings("soft", 64, t2_scaling=True)
    batch = (*torch.randn(2, 5, 9), torch.arange(5))
    loss, _ = losses.method_loss("soft", *batch)
    expected, _ = losses.method_loss("vanilla_kd", *batch, tau=2.0, w_kd=1.0, w_ce=0.0)
    assert torch.equal(loss, expected)  # alone it has tau 0.5


@pytest.mark.parametrize(("edits", "pattern"), [("", "abc"), ("-a\n+b\n", r"abc\+\w{12}")])
def test_a_commit_with_edits_is_marked(edits, pattern, monkeypatch):
    answers = {"rev-parse": "abc\n", "diff": edits}
    git = mock.Mock(side_effect=lambda line, **_: SimpleNamespace(stdout=answers[line[3]]))
    monkeypatch.setattr(device.subprocess, "run", git)
    commit = device.machine_facts(torch.device("cpu"))["git_commit"]
    assert re.fullmatch(pattern, commit)
    excluded = git.call_args.args[0][-1].removeprefix(":(top,exclude)")
    assert (ROOT / excluded).samefile(ROOT / "study/results")  # a report written anew is no edit
