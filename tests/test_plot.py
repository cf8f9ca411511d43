"""Figures and samples: their numbers, that no two methods look alike, and what is refused."""

import math

import pytest
import torch

import losses
from lib.files import write_json
from lib.hf import load_tokenizer
from run.paper import NAMES
from tests.world import DEMO, STUDENT, make_model, refusal, write_jsonl, write_run
from tools import plot, sample
from train import VALIDATION_FIGURES


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, by name."""
    figures = {}
    save = plot.save

    def keep(figure, path):
        figures[path.name] = figure
        save(figure, path)
        assert path.read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(plot, "save", keep)
    return figures


def lines(axis):
    """Return the points of the lines by their labels; of two, those of the last."""
    points = {line.get_label(): list(map(tuple, line.get_xydata())) for line in axis.lines}
    return {label: at for label, at in points.items() if label[0] != "_"}  # single seeds


def heights(line):
    return line.get_ydata().tolist()


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
            record |= terms.get(method, {})
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


def test_curves_have_the_numbers_of_the_logs(run, drawn, capsys):
    plot.main([str(run)])
    captured = capsys.readouterr()
    assert captured.out.split() == [f"{run}/curves.png"]
    for line, figure in zip(captured.err.splitlines(), ("budget", "anchoring"), strict=True):
        assert line.startswith(f"no {figure}.png: ") and "--histogram_every_steps=N" in line
    axes = {axis.get_ylabel(): lines(axis) for axis in drawn["curves.png"].axes}
    assert set(axes) == {*plot.PANELS, "forward"} - {"support"}
    assert axes["forward"] == {"mine": [(40, 0.5), (80, 0.5), (120, 0.5)]}
    assert axes["d_u"] == {"alra": [(40, 4.5), (80, 4.5), (120, 4.5)]}
    assert axes["ce"]["alra"] == [(40, 6.0), (80, 3.5), (120, 5 / 3 + 1)]
    assert axes["val_ce"]["alra"] == [(80, 4.0), (120, 3.0)]
    assert "teacher: 1.50" in axes["val_ce"]


def make_logs(ys, steps=(1, 2)):
    """Return logs of students whose held-out CE falls to y from y + 1."""
    logs = {}
    for name, y in ys.items():
        log = [{"step": step, "val_ce": y + steps[-1] - step} for step in steps]
        logs[name] = {"config": {"batch_rows": 4, "seq_len": 10}, "log": log}
    return logs


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_curves_of_several_seeds_are_means_with_intervals_or_ranges(n, tmp_path, drawn):
    seeds = [make_logs({"alra": 4.5 + 2 * seed}) for seed in range(n)]
    plot.curves(seeds, tmp_path / "c.png")
    (axis,) = drawn["c.png"].axes
    mean = 4.5 + n - 1
    assert lines(axis) == {"alra": [(40, mean + 1), (80, mean)]}
    band = axis.collections[0].get_paths()[0].vertices
    high = max(y for x, y in band if x == 80)
    # Student's t of three degrees of freedom; the deviation of four seeds is sqrt(20 / 3)
    half = 3.18245 * math.sqrt(20 / 3) / 2 if n == 4 else n - 1
    assert high == pytest.approx(mean + half, rel=1e-4)


def test_no_student_and_no_reference_flattens_the_curves(tmp_path, drawn):
    logs = make_logs({"a": 3.0, "b": 3.3, "far": 6.0})
    for student in logs.values():
        student["log"][1] |= {"val_teacher_ce": 2.0, "val_uniform_ce": 8.0}
    plot.curves([logs], tmp_path / "c.png")
    (axis,) = drawn["c.png"].axes
    low, high = axis.get_ylim()
    assert 2.9 < low < 3.0 and 4.3 < high < 4.4
    names = {"a", "b", "far", "teacher: 2.00", "ln V: 8.00"}
    assert names == {text.get_text() for text in drawn["c.png"].legends[0].get_texts()}


def test_what_is_logged_once_has_no_panel(tmp_path, drawn):
    logs = make_logs({"a": 3.0})
    logs["a"]["log"][0]["val_kl"] = 1.0
    plot.curves([logs], tmp_path / "c.png")
    assert [axis.get_ylabel() for axis in drawn["c.png"].axes] == ["val_ce"]
    plot.curves([make_logs({"a": 3.0}, steps=(1,))], tmp_path / "c.png")
    assert lines(drawn["c.png"].axes[0]) == {"a": [(40, 3.0)]}


def test_every_term_and_every_validation_figure_has_a_panel():
    z = torch.zeros(3, 31)
    terms = losses.method_loss("alra", z, z, torch.tensor([1, 2, 3]))[1]
    assert {"loss", "kd", "ce", *terms} <= set(plot.PANELS)
    assert set(VALIDATION_FIGURES) <= {*plot.PANELS, *plot.UNDRAWN}


def test_curves_of_several_folders_are_named_by_folder(run, tmp_path):
    other = tmp_path / "other/alra"
    write_jsonl(other / "log.jsonl", [{"step": 1, "ce": 9.0}, {"step": 1, "ce": 7.0}])
    with (other / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "c')  # being written
    write_json(other.parent / "run.json", {"config": {"batch_rows": 3, "seq_len": 7}})
    assert list(plot.read_logs([run])) == ["pretrain", "alra", "fixed_7", "mine"]
    logs = plot.read_logs([other, run])
    assert list(logs)[:3] == [f"{run}/pretrain", str(other), f"{run}/alra"]
    assert plot.read_curves([logs])["ce"][str(other), 21, 0] == 7.0  # the last line of a step


def test_no_two_methods_look_alike():
    """Those of the paper keep their look whatever is drawn beside them, and differ in grey too."""
    looks = plot.looks([*losses.METHODS, *(f"mine_{i}" for i in range(200))])
    assert len({tuple(look.values()) for look in looks.values()}) == len(looks)
    in_grey = [(looks[name]["linestyle"], looks[name]["marker"]) for name in NAMES]
    assert len(set(in_grey)) == len({looks[name]["color"] for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert plot.looks(["mine", name, "yours"])[name] == looks[name]


def test_budget_counts_by_hand(logged, drawn):
    plot.budget(plot.read_logs([logged]), logged / "budget.png")
    # a fixed budget has no distribution
    axis, only_step_0 = drawn["budget.png"].axes
    assert "late, step 0 to 0: 100.0% below" in lines(only_step_0)
    early, late, teacher = axis.get_lines()
    assert early.get_label() == "early, step 10 to 15: 50.0% below"
    assert late.get_label() == "late, step 60 to 65: 58.8% below"
    assert teacher.get_label() == "teacher, step 0 to 10: 40.0% below"
    assert heights(early) == pytest.approx([0, 0, 0, 4 / 13, 2 / 13, 3 / 13, 4 / 13])
    assert heights(late) == [0, 0, 0, 0.5, 0.3, 0.2, 0]
    assert heights(teacher) == [0, 0, 0, 0.625, 0, 0.25, 0.125]
    assert "d_{max}$ = 7" in axis.get_title()


def test_the_teachers_d_max_may_be_another_one(logged, drawn):
    write_jsonl(logged / "teacher.jsonl", [{"step": 0, "d_u_hist": list(range(9))}])
    plot.budget(plot.read_logs([logged]), logged / "budget.png")
    assert "d_{max}$ = 7" in drawn["budget.png"].axes[0].get_title()


def test_anchoring_counts_by_hand(logged, drawn):
    plot.anchoring(plot.read_logs([logged]), logged / "a/b/anchoring.png")
    density, means = drawn["anchoring.png"].axes
    of_label, of_top_1 = (patch.get_data().values for patch in density.patches)
    assert of_label == pytest.approx([1.5, 0.5])
    assert of_top_1 == pytest.approx([0.8, 1.2])
    curves = [heights(line) for line in means.get_lines()]
    assert curves[::2] == [[0.5, 0.25], [0.75, 0.5], [0.5, 0.75]]
    running = [12.5 / 40, 22.5 / 40, 27.5 / 40]
    assert [curve[-1] for curve in curves[1::2]] == pytest.approx(running)


def test_a_sentence_shows_the_sets_and_masses_of_alra(tmp_path, drawn):
    tokenizer = load_tokenizer(DEMO)
    run = tmp_path / "run"
    models = {"t": make_model()}
    for step in (2, 9):
        name = f"run/alra@x/checkpoints/step_{step:08d}/model"
        models[name] = make_model(STUDENT, seed=step)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name, tokenizer)
    config = {"teacher": f"{tmp_path}/t", "hyper": {"alra@x": {"d_max": 5, "tau": 2.0}}}
    about = {"config": config, "bos": None}
    write_json(run / "run.json", about | {"made_by": {"alra@x": {"teacher_sha256": "of another"}}})
    with refusal("/t: its content has changed since the student was"):
        plot.main([f"{run}/alra@x", "--text=import $x$ os"])
    write_json(run / "run.json", about | {"made_by": {}})
    plot.main([f"{run}/alra@x", "--text=import $x$ os"])
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer("import $x$ os").input_ids])
    z_t, *students = (m.hidden(ids[None, :-1])[0] @ m.head.T for m in models.values())
    n_red = 0
    for axis, z_s in zip(drawn["sentence.png"].axes, students, strict=True):
        terms = losses.alra(z_s, z_t, ids[1:], d_max=5, tau=2.0)
        d_u, *masses = axis.containers
        assert [bar.get_height() for bar in d_u] == terms.d_u.tolist()
        for z, bars in zip((z_t, z_s), masses, strict=True):
            p = (z / 2).softmax(-1)
            for u, bar in enumerate(bars):
                mass = p[u, terms.tokens[u, : int(terms.d_u[u])]].sum()
                assert bar.get_width() / 0.64 == pytest.approx(float(mass), rel=1e-5)
        cells = [text for text in axis.texts if text.get_family() == ["monospace"]]
        assert len(cells) == len(z_s) * 7
        for cell in cells:
            u, y = cell.get_position()
            column = {-2.5: ids[u], -1.5: ids[u + 1], **dict(enumerate(terms.tokens[u]))}
            word = ascii(tokenizer.decode(column[y]))[1:-1].replace(" ", "␣")
            is_red = y > -2 and column[y] not in z_s[u].topk(5).indices
            assert cell.get_text() == word[:12]
            assert (cell.get_color() == "red") == is_red
            n_red += is_red
    assert n_red and "update 9" in axis.get_title()


def test_what_cannot_be_drawn_is_refused(tmp_path):
    config = {"hyper": {}, "teacher": None}
    write_json(tmp_path / "run.json", {"config": config, "bos": None, "made_by": {}})
    with refusal("x: no log.jsonl; expected a run"):
        plot.main([f"{tmp_path}/x"])
    with refusal("expected a student of ALRA with checkpoints"):
        plot.main([f"{tmp_path}/tad", "--text=x"])


def test_samples_are_a_function_of_the_seed(tmp_path, printed):
    """And temperature 0 takes the most likely token."""
    tokenizer = load_tokenizer(DEMO)
    model = make_model(STUDENT)
    write_run(tmp_path, {"mine": model}, tokenizer, tmp_path, tmp_path)

    def text(*flags: str):
        sample.main([f"{tmp_path}/mine", "--prompt=def ", "--tokens=9", *flags])
        return printed().removesuffix("\n")

    assert text("--seed=1") == text("--seed=1") != text("--seed=2")
    ids = [tokenizer.eos_token_id, *tokenizer.encode("def ", add_special_tokens=False)]
    for _ in range(9):
        z = model.hidden(torch.tensor([ids]))[0, -1] @ model.head.T
        ids.append(int(z.argmax()))
    assert text("--temperature=0") == tokenizer.decode(ids[1:])
    with refusal("--temperature -1.0: expected 0 or more"):
        sample.main(["x", "--temperature=-1"])
