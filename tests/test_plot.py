"""Figures and samples from logs: their numbers, that no two methods look alike, and what is refused."""

import json
import math
import re

import matplotlib.pyplot as plt
import pytest
import torch

import losses
from lib.hf import load_tokenizer
from run.paper import NAMES
from tests import world
from tools import plot, sample


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, still open, by name."""
    figures, save = {}, plot.save

    def keep(figure, path):
        figures[path.name] = figure
        with monkeypatch.context() as m:
            m.setattr(plt, "close", lambda figure: None)
            save(figure, path)
        assert path.read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(plot, "save", keep)
    yield figures
    plt.close("all")


def lines(axis) -> dict:
    return {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axis.get_lines()}


# Two ALRA students, of which one has a fixed budget, and one without a teacher; d_max = 7, two bins of probability.
BUDGETS = {
    "alra": [
        {"step": 0, "n": 11, "d_u_hist": [0, 0, 0, 0, 0, 0, 11, 0]},
        {"step": 10, "n": 13, "d_u_hist": [0, 0, 0, 1, 2, 3, 4, 3]},
        {"step": 15, "n": 13, "d_u_hist": [0, 0, 0, 3, 0, 0, 0, 10]},
        {"step": 60, "n": 13, "d_u_hist": [0, 0, 0, 13, 0, 0, 0, 0]},  # neither early nor late
        {"step": 110, "n": 17, "d_u_hist": [0, 0, 0, 5, 3, 2, 0, 7]},
    ],
    "fixed_7": [{"step": s, "n": 13, "d_u_hist": [0, 0, 0, 0, 0, 0, 0, 13]} for s in (10, 110)],
}
TEACHER = [
    {"step": 0, "n": 10, "d_u_hist": [0, 0, 0, 4, 0, 0, 2, 4], "p_label": 0.5, "p_top1": 0.75, "agree": 0.5,
     "p_label_hist": [6, 4], "p_top1_hist": [1, 9]},
    {"step": 10, "n": 30, "d_u_hist": [0, 0, 0, 6, 0, 4, 0, 20], "p_label": 0.25, "p_top1": 0.5, "agree": 0.75,
     "p_label_hist": [24, 6], "p_top1_hist": [15, 15]},
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    out = tmp_path / "run"
    for i, method in enumerate(("pretrain", "alra", "fixed_7", "mine")):
        rates = {"mfu": None, "lr": 0.1, "gnorm": 2.0, "tok_per_sec": 9.0}  # no terms, and not drawn
        records = [{"step": s, "ce": 5.0 / s + i, "loss": 1.0, **rates} for s in (1, 2, 3)]
        records += [{"step": 3, "val_ce": 2.0 + i, "val_kl": 0.5, "val_agree": 0.25, "val_teacher_ce": 1.5}]
        if method == "alra":
            records[0] |= dict.fromkeys(("kd", "mass", "local", "rest", "pair"), 0.125) | {"d_u": 4.5}
        if method == "mine":
            records[0] |= {"forward": 0.5}  # a part of an objective that plot.py has never heard of
        write(out / method / "log.jsonl", records)
    (out / "run.json").write_text(json.dumps({"config": {"batch_rows": 4, "seq_len": 10}}))
    return out


@pytest.fixture
def logged(run):
    """The same, with histograms."""
    for method, records in BUDGETS.items():
        write(run / method / "histograms.jsonl", records)
    write(run / "teacher.jsonl", TEACHER)
    return run


def test_curves_have_the_numbers_of_the_logs(run, drawn, capsys):
    plot.main([str(run)])
    said = capsys.readouterr()
    assert said.out.split() == [str(run / "curves.png")]
    for figure in ("budget", "anchoring"):  # what could not be drawn is said
        assert re.search(rf"no {figure}.png: .*--histogram_every_steps=N", said.err)
    axes = {axis.get_ylabel().split(" [")[0]: lines(axis) for axis in drawn["curves.png"].axes if axis.get_visible()}
    assert set(axes) == {"loss", "ce", "kd", "mass", "local", "rest", "pair", "d_u", "val_ce", "val_kl", "val_agree", "forward"}  # fmt: skip
    assert axes["forward"] == {"mine": [(40, 0.5)]} and axes["d_u"] == {"alra": [(40, 4.5)]}
    assert axes["ce"]["alra"] == [(40, 6.0), (80, 3.5), (120, pytest.approx(5 / 3 + 1))]
    assert axes["val_ce"]["fixed_7"] == [(120, 4.0)] and {y for _, y in axes["val_ce"]["teacher"]} == {1.5}


def test_curves_of_several_seeds_are_means_with_bands(run, tmp_path, drawn):
    one = plot.read_curves(plot.find_logs([run]))
    two = {name: {key: [(t, v + 2) for t, v in at] for key, at in terms.items()} for name, terms in one.items() if name != "mine"}  # fmt: skip
    points = plot.over_seeds([one, two])
    half = 12.7062 * math.sqrt(2) / math.sqrt(2)  # Student's t of one degree of freedom, deviation sqrt(2)
    assert points["alra"]["ce"][0] == (40, 7.0, pytest.approx(half, rel=1e-4))
    assert points["mine"]["ce"][0] == (40, 8.0, 0.0) and plot.over_seeds([one])["alra"]["ce"][0] == (40, 6.0, 0.0)
    points = {f"{name} (lr=0.00132, tau=1, w_kd=1, w_ce=0)": {k: terms[k] for k in ("loss", "ce")} for name, terms in points.items()}  # fmt: skip
    plot.curves(points, tmp_path / "c.png")
    assert drawn["c.png"].legends[0].get_window_extent().x0 >= 0  # it is centred
    bar = drawn["c.png"].axes[1].collections[1].get_paths()[0].get_extents()  # of ce, alra
    assert bar.y1 == pytest.approx(7 + half, rel=1e-4) and bar.x0 == bar.x1 == 40  # seen at a single point too
    assert bar.y0 < 0 and all(axis.get_ylim()[0] >= 0 for axis in drawn["c.png"].axes)


def test_a_student_far_above_the_others_does_not_flatten_their_curves(tmp_path, drawn):
    points = {
        name: {"val_ce": [(40, y + 1, 9.0), (80, y, 9.0)], "val_agree": [(80, 0.1)]}
        for name, y in {"a": 3.0, "b": 3.3, "far": 6.0}.items()
    }
    plot.curves(points, tmp_path / "c.png")
    assert drawn["c.png"].axes[0].get_ylim() == (0, pytest.approx(1.03 * 4.3))  # intervals may reach beyond both ends


def test_every_term_and_every_validation_figure_has_a_panel():
    z = torch.zeros(3, 31)
    assert {"loss", "kd", "ce"} <= set(plot.PANELS)
    assert set(losses.method_loss("alra", z, z, torch.tensor([1, 2, 3]))[1]) <= set(plot.PANELS)
    from train import VALIDATED

    assert {f"val_{key}" for key in VALIDATED} <= set(plot.PANELS) | set(plot.LEVELS)


def test_one_method_of_two_runs_keeps_both_names_and_its_colour(run, tmp_path):
    other = tmp_path / "other"
    write(
        other / "alra" / "log.jsonl", [{"step": 1, "ce": 9.0}, {"step": 1, "ce": 7.0}]
    )  # the last line of a step counts
    with (other / "alra" / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "c')  # being written
    hyper = {"alra": {"gamma": 3.0}, "tad": {"tau": 2.0}}
    (other / "run.json").write_text(json.dumps({"config": {"batch_rows": 3, "seq_len": 7, "hyper": hyper}}))
    logs = plot.find_logs([run, other / "alra", run])
    assert list(logs) == ["pretrain", f"alra ({run})", f"alra ({other})", "fixed_7", "mine"]
    points = plot.read_curves(logs)
    assert points[f"alra ({other}) (gamma=3.0)"]["ce"] == [(21, 7.0)] and "fixed_7" in points
    first, second = (look for name, look in plot.looks([*logs]).items() if name.startswith("alra"))
    assert first["color"] == second["color"] == plot.looks(["tad", "alra"])["alra"]["color"]
    assert first["linestyle"] != second["linestyle"] and first["markerfacecolor"] != second["markerfacecolor"]


def test_no_two_methods_look_alike():
    """Those of the paper keep their look whatever is drawn beside them, and differ without colour too."""
    names = [*losses.METHODS, *(f"mine_{i}" for i in range(200))]
    looks = plot.looks(names)
    assert len({(x["color"], x["linestyle"], x["marker"]) for x in looks.values()}) == len(names)
    assert len({looks[name]["color"] for name in NAMES}) == len(NAMES) == 20
    assert len({(looks[name]["linestyle"], looks[name]["marker"]) for name in NAMES}) == len(NAMES)
    assert all(plot.looks(["mine", name, "yours"])[name] == looks[name] for name in NAMES)


def test_budget_counts_by_hand(logged, drawn):
    more = [record | {"d_u_hist": [*record["d_u_hist"], 0]} for record in TEACHER]  # ALRA's own d_max is another one
    write(logged / "teacher.jsonl", more)
    plot.budget(plot.find_logs([logged]), logged / "budget.png")
    assert "d_{max}$ = 7" in drawn["budget.png"].axes[0].get_title()
    write(logged / "teacher.jsonl", TEACHER)
    plot.budget(plot.find_logs([logged]), logged / "budget.png")
    below, shares = drawn["budget.png"].axes  # of alra alone: a fixed budget has no distribution
    curves = {label: [y for _, y in points] for label, points in lines(below).items()}
    early = [0, 0, 0, 4 / 13, 2 / 13, 3 / 13, 4 / 13]
    assert curves == {"early, step 10 to 15": pytest.approx(early), "late, step 110": [0, 0, 0, 0.5, 0.3, 0.2, 0],
                      "teacher, step 0 to 10": [0, 0, 0, 0.625, 0, 0.25, 0.125]}  # fmt: skip
    assert plot.stages([{"step": 0}]) == {"early": [{"step": 0}], "late": [{"step": 0}]}
    heights = [[bar.get_height() for bar in bars] for bars in shares.containers]
    assert heights == [pytest.approx(x) for x in ([50, 50], [1000 / 17, 700 / 17], [40, 60])]


def test_anchoring_counts_by_hand(logged, drawn):
    plot.anchoring(plot.find_logs([logged]), logged / "a" / "b" / "anchoring.png")
    density, means, agree = drawn["anchoring.png"].axes
    assert [[*patch.get_data().values] for patch in density.patches] == [
        [1.5, 0.5],
        [pytest.approx(0.8), pytest.approx(1.2)],
    ]
    ys = [[y for _, y in zip(*line.get_data(), strict=True)] for axis in (means, agree) for line in axis.get_lines()]
    expected = [[0.5, 0.25], [0.5, 12.5 / 40], [0.75, 0.5], [0.75, 22.5 / 40], [0.5, 0.75], [0.5, 27.5 / 40]]
    assert ys == [pytest.approx(y) for y in expected]


def test_a_sentence_shows_the_sets_and_masses_of_alra(tmp_path, drawn):
    tokenizer, teacher, folder = load_tokenizer(world.DEMO), world.make_model(), tmp_path / "run" / "alra@x"
    students = {step: world.make_model(world.STUDENT, seed=step) for step in (2, 9)}
    models = {tmp_path / "t": teacher, **{folder / f"checkpoints/step_{s:08d}/model": m for s, m in students.items()}}
    for path, model in models.items():
        model.save_pretrained(path, tokenizer)
    config = {"teacher": str(tmp_path / "t"), "hyper": {"alra@x": {"d_max": 5, "tau": 2.0}}}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": config, "bos": None}))
    plot.main(["--sentence=import $x$ os", str(folder)])
    ids = torch.tensor([tokenizer.eos_token_id, *tokenizer.encode("import $x$ os", add_special_tokens=False)])
    for axis, (step, model) in zip(drawn["sentence.png"].axes, students.items(), strict=True):
        z_s, z_t = (m.hidden(ids[None, :-1])[0] @ m.head.T for m in (model, teacher))
        terms = losses.alra(z_s, z_t, ids[1:], d_max=5, tau=2.0)
        d_u, *masses = axis.containers
        assert f"update {step}" in axis.get_title() and [bar.get_height() for bar in d_u] == terms.d_u.tolist()
        for z, bars in zip((z_t, z_s), masses, strict=True):
            p = (z / 2).softmax(-1)
            mass = [float(p[u, terms.tokens[u, :d]].sum()) for u, d in enumerate(terms.d_u)]
            assert [bar.get_width() / 0.64 for bar in bars] == pytest.approx(mass, rel=1e-5)
        cells = {
            text.get_position(): text
            for text in axis.texts
            if len(text.get_position()) and text.get_family() == ["monospace"]
        }
        for (u, y), text in cells.items():
            token = {-2.5: ids[u], -1.5: ids[u + 1]}.get(y, terms.tokens[u, max(int(y), 0)])
            assert text.get_text() == ascii(tokenizer.decode([token]))[1:-1].replace(" ", "␣")[:12]
            assert (text.get_color() == "red") == (y > -2 and token not in z_s[u].topk(5).indices)
        assert len(cells) == len(z_s) * 7 and any(text.get_color() == "red" for text in cells.values())


def test_what_cannot_be_drawn_is_refused(tmp_path):
    write(tmp_path / "run.json", [{"config": {"hyper": {}}, "bos": None}])
    for argv, message in (([f"{tmp_path}/x"], f"{tmp_path}/x: no log.jsonl there or one folder below"),
                          ([f"{tmp_path}/tad", "--sentence=x"], "expected a student of ALRA with checkpoints")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            plot.main(argv)
    with pytest.raises(ValueError, match="alra: no term logged yet"):
        plot.curves({"alra": {"lr": [(0, 1.0)]}}, tmp_path / "c.png")


def test_samples_are_a_function_of_the_seed_and_temperature_0_takes_the_most_likely(tmp_path, capsys):
    tokenizer, model = load_tokenizer(world.DEMO), world.make_model(world.STUDENT)
    world.write_run(tmp_path, {"mine": model}, tokenizer, tmp_path, tmp_path)

    def text(*flags: str) -> str:
        sample.main([str(tmp_path / "mine"), "--prompt=def ", "--tokens=9", *flags])
        return capsys.readouterr().out.removesuffix("\n")

    assert text("--seed=1") == text("--seed=1") != text("--seed=2")
    ids = [tokenizer.eos_token_id, *tokenizer.encode("def ", add_special_tokens=False)]
    for _ in range(9):
        ids.append(int((model.hidden(torch.tensor([ids]))[0, -1] @ model.head.T).argmax()))
    assert text("--temperature=0") == text("--top_k=1") == tokenizer.decode(ids[1:])
    with pytest.raises(ValueError, match="expected a --temperature of 0, or"):
        sample.main(["x", "--temperature=-1"])
