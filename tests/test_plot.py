"""Figures and samples: their numbers, that no two methods look alike, and what is refused."""

import shutil

import matplotlib
import pytest
import torch

import losses
from lib.files import write_json
from lib.hf import load_tokenizer
from run.paper_numbers import NAMES
from tests.world import (
    ROOT,
    STUDENT,
    TOKENIZER,
    make_model,
    read_jsonl,
    write_jsonl,
    write_run,
)
from tools import plot


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, by name; their pixels, a second each, are those of studies."""
    monkeypatch.setattr("matplotlib.figure.Figure.set_layout_engine", lambda *_, **__: None)
    figures = {}

    def keep(figure, path, **_):
        figures[path.name] = figure
        path.touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
    return figures


def lines(axis):
    """Return the points of the lines by their labels."""
    return {line.get_label(): list(map(tuple, line.get_xydata())) for line in axis.lines}


# Of two ALRA students, of which one has a fixed budget, and of their teacher; d_max = 7.
ADAPTIVE = """\
{"step": 0, "d_u_hist": [0, 0, 0, 0, 0, 0, 11, 0]}
{"step": 10, "d_u_hist": [0, 0, 0, 1, 2, 3, 4, 3]}
{"step": 15, "d_u_hist": [0, 0, 0, 3, 0, 0, 0, 10]}
{"step": 20, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 25, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 30, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 35, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 40, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 45, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 50, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 55, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]}
{"step": 60, "d_u_hist": [0, 0, 0, 5, 3, 2, 0, 7]}
{"step": 65, "d_u_hist": [0, 0, 0, 5, 3, 2, 0, 7]}
"""
FIXED = """\
{"step": 10, "d_u_hist": [0, 0, 0, 0, 0, 0, 0, 13]}
"""
TEACHER = """\
{"step": 0, "n": 10, "d_u_hist": [0, 0, 0, 4, 0, 0, 2, 4],
 "p_label": 0.5, "p_top1": 0.75, "agree": 0.5, "p_label_hist": [6, 4], "p_top1_hist": [1, 9]}
{"step": 10, "n": 30, "d_u_hist": [0, 0, 0, 6, 0, 4, 0, 20],
 "p_label": 0.25, "p_top1": 0.5, "agree": 0.75, "p_label_hist": [24, 6], "p_top1_hist": [15, 15]}
"""


@pytest.fixture
def run(tmp_path):
    out = tmp_path / "run"
    rates = {"mfu": None, "lr": 0.1, "gnorm": 2.0, "tok_per_sec": 9.0}
    validated = {"step": 3, "val_kl": 0.5, "val_agree": 0.25, "val_teacher_ce": 1.5}
    alra = dict.fromkeys(("kd", "mass", "local", "rest", "pair", "d_u"), 4.5)
    terms = {"alra": alra, "mine": {"forward": 0.5}}  # of which plot.py has never heard
    for i, method in enumerate(("pretrain", "alra", "fixed_7", "mine")):
        records = [{"step": s, "ce": 5.0 / s + i, "loss": 1.0, **rates} for s in (1, 2, 3)]
        for record in records:
            record |= terms.get(method, {}) | {"nominal_tokens": 40 * record["step"]}
        records += [validated | {"step": step, "val_ce": 5.0 + i - step} for step in (2, 3)]
        write_jsonl(out / method / "log.jsonl", records)
    write_json(out / "run.json", {"config": {"batch_rows": 4, "seq_len": 10}})
    return out


@pytest.fixture
def logged(run):
    """The same, with histograms."""
    (run / "alra/histograms.jsonl").write_text(ADAPTIVE)
    (run / "fixed_7/histograms.jsonl").write_text(FIXED)
    (run / "mine/histograms.jsonl").write_text(ADAPTIVE.splitlines()[0])
    (run / "teacher.jsonl").write_text(TEACHER.replace(",\n", ","))
    return run


def test_curves_have_the_numbers_of_the_logs(run, drawn, printed):
    plot.main([str(run)])
    assert printed().split() == [f"{run}/curves.png"]
    axes = {}
    for axis in drawn["curves.png"].axes:
        axes[axis.get_ylabel().partition(",")[0]] = lines(axis)
    assert set(axes) == {*plot.PANELS, "forward"} - {"support"}
    assert axes["forward"] == {"mine": [(40, 0.5), (80, 0.5), (120, 0.5)]}
    assert axes["d_u"] == {"alra": [(40, 4.5), (80, 4.5), (120, 4.5)]}
    assert axes["ce"]["alra"] == [(40, 6.0), (80, 3.5), (120, 5 / 3 + 1)]
    assert axes["val_ce"]["alra"] == [(80, 4.0), (120, 3.0)]
    assert "teacher: 1.50" in axes["val_ce"]


def test_a_panel_says_that_it_has_one_step(tmp_path, drawn):
    log = [{"step": 1, "nominal_tokens": 9, "ce": 3.0}, {"step": 2, "ce": 2.0, "val_ce": 4.0}]
    plot.curves([{"alra": log}], tmp_path / "c.png")
    titles = [axis.get_title() for axis in drawn["c.png"].axes]
    assert titles == ["held-out cross-entropy (at one step)", "training cross-entropy"]


def test_no_student_and_no_reference_flattens_the_curves(tmp_path, drawn):
    """Whatever their names: underscores and dollar signs have a meaning in matplotlib."""
    logs = {}
    for name, y in {"_a$b$": 3.0, "$\\bad$": 3.3, "far": 6.0}.items():
        last = {"step": 2, "val_ce": y, "val_teacher_ce": 2.0, "val_uniform_ce": 8.0}
        logs[name] = [{"step": 1, "nominal_tokens": 40, "val_ce": y + 1}, last]
    plot.curves([logs], tmp_path / "c.png")
    (axis,) = drawn["c.png"].axes
    low, high = axis.get_ylim()
    assert 2.9 < low < 3.0 and 4.3 < high < 5.2
    names = ["_a$b$", "$\\bad$", "far", "teacher: 2.00", "ln V: 8.00"]
    (legend,) = drawn["c.png"].legends
    assert [text.get_text() for text in legend.get_texts()] == names
    texts = drawn["c.png"].findobj(matplotlib.text.Text)
    assert not any(text.get_parse_math() for text in texts)


def test_the_pictures_of_the_lesson_are_drawn_anew(tmp_path, capsys, monkeypatch):
    """Byte for byte, where matplotlib is the locked one: another one draws other pixels."""
    shutil.unpack_archive(ROOT / "docs/lesson/runs.zip", tmp_path)
    sentence = (tmp_path / "sentence.jsonl").read_bytes()
    plot.main([str(tmp_path)])
    locked = f"matplotlib=={matplotlib.__version__}\n" in (ROOT / "requirements.lock").read_text()
    lesson = (ROOT / "LESSON.md").read_text()
    monkeypatch.chdir(tmp_path)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        block = lesson.split("<!-- temperature -->\n```python\n")[1]
        exec(block.split("```")[0], {"torch": torch})
    for name in ("curves.png", "sentence.png", "temperature.png"):
        drawn = (tmp_path / name).read_bytes()
        assert not locked or drawn == (ROOT / "docs/lesson" / name).read_bytes()
        assert f"](docs/lesson/{name})" in lesson
    assert (tmp_path / "sentence.jsonl").read_bytes() == sentence


def test_curves_of_several_folders_are_named_by_folder(run, tmp_path, drawn):
    other = tmp_path / "other/alra"
    write_jsonl(other / "log.jsonl", [{"step": 1, "nominal_tokens": 21, "ce": 9.0}])
    with (other / "log.jsonl").open("a") as file:
        file.write('{"step": 1, "ce": 7.0}\n{"step": 2, "c')  # written again; being written
    plot.main([str(run), str(other), f"--out={tmp_path}/new/folder"])
    _, training, *_ = drawn["curves.png"].axes
    curves = lines(training)
    assert curves.pop(str(other)) == [(21, 7.0)]  # the last line of a step
    assert set(curves) == {f"{run}/{folder.name}" for folder in run.glob("*/")}


def test_no_two_methods_look_alike():
    """Those of the paper keep their look whatever is drawn beside them."""
    looks = plot.looks([*losses.METHODS, *(f"mine_{i}" for i in range(200))])
    assert len({tuple(look.values()) for look in looks.values()}) == len(looks)
    for name in NAMES:
        assert plot.looks(["mine", name])[name] == looks[name]


def test_budget_and_anchoring_count_by_hand(logged, drawn):
    plot.main([str(logged)])
    # a fixed budget has no distribution; `mine` has a histogram of untrained weights alone
    axis, only_step_0 = drawn["budget.png"].axes
    assert set(lines(only_step_0)) == {"student: 100.0% below", "teacher: 40.0% below"}
    assert "too few" in only_step_0.get_xlabel() and "too few" not in axis.get_xlabel()
    heights = {label: [y for _, y in points] for label, points in lines(axis).items()}
    assert heights == {
        "early: 50.0% below": pytest.approx([0, 0, 0, 4 / 13, 2 / 13, 3 / 13, 4 / 13]),
        "late: 58.8% below": [0, 0, 0, 0.5, 0.3, 0.2, 0],
        "teacher: 40.0% below": [0, 0, 0, 0.625, 0, 0.25, 0.125],
    }

    density, means = drawn["anchoring.png"].axes
    assert lines(density) == {
        "label": [(0.25, 1.5), (0.75, 0.5)],
        "teacher's top-1": [(0.25, 0.8), (0.75, 1.2)],
    }
    assert lines(means) == {
        "label: 0.312": [(0, 0.5), (10, 12.5 / 40)],
        "teacher's top-1: 0.562": [(0, 0.75), (10, 22.5 / 40)],
        "top-1 is the label: 0.688": [(0, 0.5), (10, 27.5 / 40)],
    }


def test_a_sentence_shows_the_sets_and_probabilities_of_alra(tmp_path, drawn):
    """How they look is in the picture of the lesson."""
    tokenizer = load_tokenizer(TOKENIZER)
    models = [make_model(), make_model(STUDENT, seed=9)]
    models[0].save_pretrained(tmp_path / "t", tokenizer)
    hyper = {"d_max": 5, "tau": 2.0, "anchor": "both"}
    facts = {"config": {"teacher": f"{tmp_path}/t"}, "overrides": hyper}
    facts["made_by"] = {"hyper": losses.default_settings(losses.alra) | hyper}
    write_run(tmp_path, {"alra@x": models[1]}, tokenizer, tmp_path, tmp_path, **facts)
    plot.main([f"{tmp_path}/alra@x", "--text=import $x$ os", f"--out={tmp_path}/new"])
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer("import $x$ os").input_ids])
    z_t, z_s = (model(ids[None, :-1])[0] for model in models)
    terms = losses.alra(z_s, z_t, ids[1:], **hyper)
    records = read_jsonl(tmp_path / "new/sentence.jsonl")
    assert len(records) == len(z_s) > 3
    for u, record in enumerate(records):
        candidates = terms.tokens[u]
        p_t, p_s = ((z[u] / 2).softmax(-1)[candidates].tolist() for z in (z_t, z_s))
        expected = {
            "before": tokenizer.decode(ids[1 : u + 1]),
            "candidates": [ascii(tokenizer.decode(token)) for token in candidates],
            "is_next": (candidates == ids[u + 1]).tolist(),
            "teacher": pytest.approx(p_t, rel=1e-4),
            "student": pytest.approx(p_s, rel=1e-4),
            "d_u": int(terms.d_u[u]),
            "added": [token not in z_s[u].topk(5).indices for token in candidates],
        }
        assert record | expected == record
    assert any(any(record["added"][1:]) for record in records)  # labels are anchors too
    assert len(drawn["sentence.png"].axes) == 3
