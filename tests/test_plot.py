"""Figures and samples: from logs that are there, with the numbers beside them, refused in words."""

import csv
import json
import math
import re

import plot
import pytest
import sample
import torch
from PIL import Image

import losses
from lib.tasks import TASKS
from model import Qwen2Config, init_student
from tests import plain


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def table(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def small_png(path):
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 500
    return path.stat().st_size < 300_000


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
        lines = [{"step": s, "ce": 5.0 / s + i, "loss": 1.0, **rates} for s in (1, 2, 3)]
        lines += [{"step": 3, "val_ce": 2.0 + i, "val_kl": 0.5, "val_agree": 0.25, "val_teacher_ce": 1.5}]
        if method == "alra":
            lines[0] |= dict.fromkeys(("kd", "mass", "local", "rest", "pair"), 0.125) | {"d_u": 4.5}
        if method == "mine":
            lines[0] |= {"forward": 0.5}  # a part of an objective that plot.py has never heard of
        write(out / method / "log.jsonl", lines)
    (out / "run.json").write_text(json.dumps({"config": {"batch_rows": 4, "seq_len": 10}}))
    return out


@pytest.fixture
def logged(run):
    """The same, with histograms."""
    for method, records in BUDGETS.items():
        write(run / method / "histograms.jsonl", records)
    write(run / "teacher.jsonl", TEACHER)
    return run


def test_curves_come_with_their_numbers(run, capsys):
    plot.run([str(run)])
    said = capsys.readouterr()
    assert said.out.split() == [str(run / "curves.png"), str(run / "curves.csv")]
    for figure in ("budget", "anchoring"):  # what could not be drawn is said
        assert re.search(rf"no {figure}.png: .*--histogram_every_steps=N", said.err)
    assert small_png(run / "curves.png")
    rows = table(run / "curves.csv")
    points = {(r["curve"], r["key"], int(r["nominal_tokens"])): float(r["value"]) for r in rows}
    assert len(points) == len(rows) == 4 * 10 + 6 + 1 and points["mine", "forward", 40] == 0.5
    assert [points["alra", "ce", tokens] for tokens in (40, 80, 120)] == [6.0, 3.5, pytest.approx(5 / 3 + 1)]
    assert points["fixed_7", "val_ce", 120] == 4.0 and points["mine", "val_teacher_ce", 120] == 1.5
    assert points["alra", "d_u", 40] == 4.5 and points["alra", "pair", 40] == 0.125


def test_curves_of_several_seeds_are_means_with_bands(run, tmp_path):
    one = plot.read_curves(plot.find_logs([run]))
    two = {name: {key: [(t, v + 2) for t, v in of[key]] for key in of} for name, of in one.items() if name != "mine"}
    assert plot.over_seeds([one]) is one
    points = plot.over_seeds([one, two])
    half = 12.7062 * math.sqrt(2) / math.sqrt(2)  # Student's t of one degree of freedom, deviation sqrt(2)
    assert points["alra"]["ce"][0] == (40, 7.0, pytest.approx(half, rel=1e-4)) and points["mine"]["ce"][0] == (
        40,
        8.0,
        0.0,
    )
    plot.curves(points, tmp_path / "c.png")
    flat = {name: {key: [(t, mean, 0.0) for t, mean, _ in of[key]] for key in of} for name, of in points.items()}
    plot.curves(flat, tmp_path / "flat.png")
    assert small_png(tmp_path / "c.png") and (tmp_path / "c.png").read_bytes() != (tmp_path / "flat.png").read_bytes()
    cells = {(r["curve"], r["key"], r["nominal_tokens"]): r for r in table(tmp_path / "c.csv")}
    assert float(cells["alra", "ce", "40"]["half"]) == pytest.approx(half, rel=1e-4)


def test_every_term_and_every_validation_figure_has_a_panel():
    z = torch.zeros(3, 31)
    assert {"loss", "kd", "ce"} <= set(plot.PANELS)
    assert set(plain.method_loss("alra", z, z, torch.tensor([1, 2, 3]))[1]) <= set(plot.PANELS)
    from train import VALIDATED

    assert {f"val_{key}" for key in VALIDATED} <= set(plot.PANELS) | set(plot.LEVELS)


def test_one_method_of_two_runs_keeps_both_names_and_its_colour(run, tmp_path):
    other = tmp_path / "other"
    write(other / "alra" / "log.jsonl", [{"step": 1, "ce": 7.0}])
    (other / "run.json").write_text(json.dumps({"config": {"batch_rows": 3, "seq_len": 7}}))
    logs = plot.find_logs([run, other / "alra", run])
    assert list(logs) == ["pretrain", f"alra ({run})", f"alra ({other})", "fixed_7", "mine"]
    assert plot.read_curves(logs)[f"alra ({other})"]["ce"] == [(21, 7.0)]
    first, second = (look for name, look in plot.looks(logs).items() if name.startswith("alra"))
    assert first["color"] == second["color"] == plot.looks(["tad", "alra"])["alra"]["color"]
    assert first["linestyle"] != second["linestyle"] and first["markerfacecolor"] != second["markerfacecolor"]


def test_a_line_being_written_and_a_step_logged_twice_are_told_apart(tmp_path):
    write(tmp_path / "log.jsonl", [{"step": 1, "ce": 2.0}, {"step": 1, "val_ce": 3.0}, {"step": 1, "ce": 2.5}])
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "c')
    assert plot.read_log(tmp_path / "log.jsonl") == [{"step": 1, "ce": 2.5}, {"step": 1, "val_ce": 3.0}]


def test_every_method_has_a_look_of_its_own_also_without_colour():
    assert set(plot.STYLE) <= set(losses.METHODS)
    drawn = [(of["color"], of["linestyle"], of["marker"]) for of in plot.looks(losses.METHODS).values()]
    assert len(set(drawn)) == len(losses.METHODS)
    assert len({color for color, _, _ in plot.STYLE.values()}) == len(plot.STYLE)
    assert len({(line, marker) for _, line, marker in plot.STYLE.values()}) == len(plot.STYLE)
    assert plot.looks(["mine", "yours"])["yours"] == plot.looks(["yours"])["yours"]  # whatever stands beside it


def test_a_method_of_ones_own_has_no_other_methods_colour_and_no_others_look():
    """400 names, and 336 looks for them: some names would look alike."""
    known = {color for color, _, _ in plot.STYLE.values()}
    names = [f"mine_{i}" for i in range(400)]
    alone = {name: plot.looks([name])[name] for name in names}
    assert known.isdisjoint(plot.OTHERS) and {look["color"] for look in alone.values()} == set(plot.OTHERS)
    places = {}
    for name, look in alone.items():
        places.setdefault((look["color"], look["linestyle"], look["marker"]), []).append(name)
    first, second = next(two[:2] for two in places.values() if len(two) > 1)
    for order in ([first, "alra", second], [second, first]):  # they would look alike: the second of the alphabet moves
        found = plot.looks(order)
        assert found[min(first, second)] == alone[min(first, second)]
        moved = found[max(first, second)]
        assert moved["color"] != alone[max(first, second)]["color"] and moved["color"] in plot.OTHERS
    some = plot.looks(names[:336]).values()
    assert len({(look["color"], look["linestyle"], look["marker"]) for look in some}) == 336


def test_budget_counts_by_hand(logged, capsys):
    plot.run([str(logged), "--figures=budget"])
    assert capsys.readouterr().out.split() == [str(logged / "budget.png"), str(logged / "budget.csv")]
    assert small_png(logged / "budget.png")
    rows = table(logged / "budget.csv")
    assert {r["curve"] for r in rows} == {"alra"}  # a fixed budget has no distribution
    cells = {(r["stage"], int(r["d_u"])): r for r in rows}
    assert {stage for stage, _ in cells} == {"early", "late", "teacher"} and len(rows) == 3 * 8
    spans = {
        stage: {(cells[stage, d]["first_step"], cells[stage, d]["last_step"]) for d in range(8)} for stage, _ in cells
    }
    assert spans == {"early": {("10", "15")}, "late": {("110", "110")}, "teacher": {("0", "10")}}
    counts = {stage: [int(cells[stage, d]["count"]) for d in range(8)] for stage in spans}
    assert counts["early"] == [0, 0, 0, 4, 2, 3, 4, 13] and counts["late"] == [0, 0, 0, 5, 3, 2, 0, 7]
    assert counts["teacher"] == [0, 0, 0, 10, 0, 4, 2, 24]
    assert float(cells["late", 7]["share"]) == pytest.approx(7 / 17) and cells["late", 7]["share_below_d_max"] == ""
    assert float(cells["late", 3]["share_below_d_max"]) == 0.5
    assert float(cells["teacher", 5]["share"]) == 0.1 and float(cells["teacher", 5]["share_below_d_max"]) == 0.25


@pytest.mark.parametrize("steps, stages", (([0], {"student": [0]}), ([7], {"student": [7]}), ([0, 5], {"early": [0], "late": [5]}),
                                            ([0, 5, 9], {"early": [5], "late": [9]}), ([0, *range(10, 121, 10)], {"early": [10, 20], "late": [110, 120]})))  # fmt: skip
def test_early_and_late_are_a_tenth_of_the_logged_updates(steps, stages):
    found = plot.stages([{"step": s} for s in steps])
    assert {stage: [r["step"] for r in records] for stage, records in found.items()} == stages


def test_anchoring_counts_by_hand(logged, capsys):
    plot.run([str(logged), "--figures=anchoring", f"--out={logged / 'a' / 'b'}"])
    assert capsys.readouterr().out.split()[1] == str(logged / "a" / "b" / "anchoring.csv")
    assert small_png(logged / "a" / "b" / "anchoring.png")
    cells = {}
    for r in table(logged / "a" / "b" / "anchoring.csv"):
        cells.setdefault((r["panel"], r["series"]), []).append((float(r["x"]), pytest.approx(float(r["value"]))))
    assert cells == {
        ("step", "p_label"): [(0, 0.5), (10, 0.25)],
        ("running_mean", "p_label"): [(0, 0.5), (10, (10 * 0.5 + 30 * 0.25) / 40)],
        ("density", "p_label"): [(0.25, 30 / 40 * 2), (0.75, 10 / 40 * 2)],
        ("step", "p_top1"): [(0, 0.75), (10, 0.5)],
        ("running_mean", "p_top1"): [(0, 0.75), (10, 22.5 / 40)],
        ("density", "p_top1"): [(0.25, 16 / 40 * 2), (0.75, 24 / 40 * 2)],
        ("step", "agree"): [(0, 0.5), (10, 0.75)],
        ("running_mean", "agree"): [(0, 0.5), (10, 27.5 / 40)],
    }


def test_one_histogram_alone_is_drawn(logged, capsys):
    write(logged / "alra" / "histograms.jsonl", BUDGETS["alra"][:1])
    write(logged / "teacher.jsonl", TEACHER[:1])
    plot.run([str(logged)])
    said = capsys.readouterr()
    assert [line for line in said.out.split() if line.endswith("png")] == [
        str(logged / f"{f}.png") for f in plot.FIGURES
    ]
    assert said.err == ""
    rows = table(logged / "budget.csv")
    assert [int(r["count"]) for r in rows if r["stage"] == "student"] == BUDGETS["alra"][0]["d_u_hist"]


def test_a_missing_log_says_what_to_set(logged, tmp_path):
    write(logged / "alra" / "histograms.jsonl", [])
    with pytest.raises(
        plot.MissingLog, match=r"no histograms.jsonl with a d_u below d_max; .*--histogram_every_steps=N"
    ):
        plot.run([str(logged), "--figures=budget"])
    write(logged / "teacher.jsonl", [])
    with pytest.raises(plot.MissingLog, match=r"teacher.jsonl: no record yet; .*--histogram_every_steps=N"):
        plot.run([str(logged), "--figures=anchoring"])
    (logged / "teacher.jsonl").unlink()
    with pytest.raises(plot.MissingLog, match=r"teacher.jsonl: no such log; .*--histogram_every_steps=N"):
        plot.run([str(logged), "--figures=curves,anchoring"])
    write(tmp_path / "other" / "tad" / "log.jsonl", [{"step": 1}])
    with pytest.raises(plot.MissingLog, match="one figure shows one run's teacher"):
        plot.run([str(logged), str(tmp_path / "other"), "--figures=anchoring"])


def test_pair_scores_by_hand_and_as_trained(tmp_path, capsys):
    plot.run(["--pairs", f"--out={tmp_path}"])
    assert capsys.readouterr().out.split() == [str(tmp_path / "pairs.png"), str(tmp_path / "pairs.csv")]
    assert small_png(tmp_path / "pairs.png")
    rows = table(tmp_path / "pairs.csv")
    cells = {tuple(float(r[k]) for k in ("gamma", "p_i", "p_j")): r for r in rows}
    assert len(rows) == len(cells) == 4 * 231 and max(p_i + p_j for _, p_i, p_j in cells) == 1
    r = cells[5, 0.5, 0.25]
    assert float(r["mass"]) == 0.75 and float(r["gap_factor"]) == pytest.approx(math.exp(-1.25))
    assert float(r["score"]) == pytest.approx(0.75 * math.exp(-1.25))
    assert float(cells[0, 0.2, 0.7]["score"]) == pytest.approx(0.9)

    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    z_t = torch.arange(5, 0, -1).double()[None]  # the same order
    weight = losses.alra(p.log()[None], z_t, torch.tensor([0]), d_min=4, d_max=4, gamma=5.0, eps=1e-300).weight[0]
    score = torch.tensor(
        [[plot.pair_score(float(p[i]), float(p[j]), 5.0)[2] if i < j else 0.0 for j in range(4)] for i in range(4)]
    ).double()
    torch.testing.assert_close(weight, score / score.sum(), rtol=1e-6, atol=1e-9)


def test_sizes_of_the_evaluation_sets(tmp_path):
    plot.run(["--sets", f"--out={tmp_path}"])
    assert small_png(tmp_path / "sets.png")
    rows = {(r["task"], r["role"]): (r["split"], int(r["examples"])) for r in table(tmp_path / "sets.csv")}
    assert len(rows) == 9 + 3 and {task for task, _ in rows} == set(TASKS)
    assert rows["hellaswag", "validation"] == ("train", 39_905) and rows["hellaswag", "heldout"] == (
        "validation",
        10_042,
    )
    assert rows["openbookqa", "heldout"] == ("test", 500) and ("openbookqa", "validation") not in rows


def test_rows_by_hand(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"train.json: not there; expected a folder that prepare.py has written"):
        plot.run([f"--rows={tmp_path}"])
    manifest = {"split": "train", "rows": 8, "padding_share": 0.25, "length_histogram": [0, 0, 1, 0, 2, 5],
                "ends": {"eos": 0.125, "line": 0.5, "sentence": 0.25, "none": 0.125}}  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps(manifest))
    plot.run([f"--rows={tmp_path}"])
    assert capsys.readouterr().out.split() == [str(tmp_path / "rows.png"), str(tmp_path / "rows.csv")]
    expected = [("length", "2", 1), ("length", "4", 2), ("length", "5", 5)]
    expected += [("end", end, share) for end, share in manifest["ends"].items()]
    assert [(r["kind"], r["key"], float(r["value"])) for r in table(tmp_path / "rows.csv")] == expected
    (tmp_path / "val.json").write_text(json.dumps(manifest | {"split": "val"}))
    plot.run([f"--rows={tmp_path}"])
    assert [r["split"] for r in table(tmp_path / "rows.csv")] == ["train"] * 7 + ["val"] * 7 and small_png(
        tmp_path / "rows.png"
    )


def test_the_manifest_has_the_keys_that_are_drawn():
    from prepare import KINDS

    assert set(plot.ENDS) == set(KINDS.values())


def test_forest_keeps_the_tables_order_and_its_numbers(tmp_path):
    rows = [{"name": "pretrain", "mean": 0.5, "low": 0.25, "high": 0.625, "p": 0.01},
            {"name": "vanilla_kd", "mean": 0.0, "low": None, "high": None},
            {"name": "fixed_7", "mean": -0.125, "low": -0.25, "high": 0.125},
            {"name": "fixed_7", "mean": 0.25, "low": 0.25, "high": 0.25}]  # fmt: skip
    plot.forest(rows, tmp_path / "new" / "f.png", "against vanilla_kd", "difference [nats per token]")
    assert small_png(tmp_path / "new" / "f.png")
    assert (tmp_path / "new" / "f.csv").read_text().splitlines() == [
        "name,mean,low,high", "pretrain,0.5,0.25,0.625", "vanilla_kd,0.0,,", "fixed_7,-0.125,-0.25,0.125", "fixed_7,0.25,0.25,0.25"]  # fmt: skip
    for bad in ({"low": 0.75}, {"high": 0.25}, {"low": None}):
        with pytest.raises(ValueError, match=r"'pretrain'.*: expected low <= mean <= high, or None"):
            plot.forest([rows[1], rows[0] | bad], tmp_path / "bad.png", "", "")


def test_a_method_is_drawn_in_its_very_colour(tmp_path):
    names = [*plot.STYLE, "mine"]
    rows = [{"name": name, "mean": i / 10, "low": i / 10 - 1, "high": i / 10 + 1} for i, name in enumerate(names)]
    plot.forest(rows, tmp_path / "f.png", "", "")
    with Image.open(tmp_path / "f.png") as image:
        painted = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
    assert len(painted) <= 256 and (255, 255, 255) in painted
    for color in (of["color"] for of in plot.looks(names).values()):
        assert tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) in painted


def test_a_methods_colour_outlives_a_thousand_commoner_ones(tmp_path):
    image = Image.new("RGB", (1009, 3))
    image.putdata([(i % 256, i // 256 * 50, 200) for _ in range(3) for i in range(1009)])
    rare = [tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in ("#d62728", plot.OTHERS[8])]
    for x, color in enumerate(rare):
        image.putpixel((x, 0), color)  # once; all others stand there two or three times
    image.save(tmp_path / "i.png")
    plot.few_colours(tmp_path / "i.png")
    with Image.open(tmp_path / "i.png") as image:
        painted = image.convert("RGB")
    assert [painted.getpixel((x, 0)) for x in (0, 1)] == rare and len(painted.getcolors()) <= 256


def test_many_methods_over_many_steps_stay_small(tmp_path):
    points = {name: {key: [(t, 9 / (t + 1) + (t * (i + 3) % 7) / 9) for t in range(211)] for key in plot.PANELS}
              for i, name in enumerate([*plot.STYLE][:20])}  # fmt: skip
    plot.curves(points, tmp_path / "c.png")
    assert small_png(tmp_path / "c.png")


def test_what_cannot_be_drawn_is_refused(tmp_path, run):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/x: no log.jsonl there or one folder below")):
        plot.run([str(tmp_path / "x")])
    with pytest.raises(ValueError, match="no figure 'budgets', there are curves, budget, anchoring"):
        plot.run([str(run), "--figures=curves,budgets"])
    for argv in ([], ["--figures=curves", "--sets"]):
        with pytest.raises(ValueError, match="nothing to draw: expected a run's folder, --pairs, --sets or --rows"):
            plot.run(argv)
    with pytest.raises(ValueError, match="alra: no term logged yet"):
        plot.curves({"alra": {"lr": [(0, 1.0)]}}, tmp_path / "c.png")


def test_sampling_is_a_function_of_the_seed_and_0_takes_the_most_likely():
    model = init_student(Qwen2Config(16, 23, 1, 2, 2, vocab_size=31, max_position_embeddings=8))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    a, b, c = (sample.generate(model, [3, 5], 12, 1.0, None, seed) for seed in (1, 1, 2))
    assert a == b != c and len(a) == 14 and a[:2] == [3, 5]
    greedy = sample.generate(model, [3, 5], 5, 0, None, 0)
    with torch.no_grad():
        assert all(int(model(torch.tensor([greedy[:i]]))[0, -1].argmax()) == greedy[i] for i in range(2, 7))
    assert sample.generate(model, [3, 5], 5, 1.0, 1, 0) == greedy  # the only one of the top 1


def test_sample_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="expected --temperature of 0 or more"):
        sample.run(["x", "--temperature=-1"])
