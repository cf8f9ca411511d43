"""Results in the paper's rows, and which of them share a table."""

import json
import math
import re

import pandas as pd
import pytest

from lib import tasks
from lib.files import append_line, read_json, read_lines, write_json, write_lines
from run import tables
from run.paper_numbers import PAPER, paper_rows
from tests import world
from tests.world import read_table, refusal


def cells(text, start, nth=0):
    lines = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [c.strip() for c in lines[nth].strip("|").split("|")]


def test_the_papers_averages_are_those_of_its_tasks():
    main = PAPER.dropna()
    assert len(main) == 18 and len(PAPER) == 2 * (9 + 2 + 10)  # the last: two tables share an alra
    assert (main[[*tables.COLUMNS.values()]].mean(axis=1) - main["avg"]).abs().max() < 0.0101


PROTOCOL = {"lm_eval": "0.4.13", "dtype": "float32", "max_length": 512}


def fake(folder, method, accs, norms=(), seed=1234, split="heldout", student="200m", limit=None):
    """Write the scores of a made-up student, and return the file.

    `accs` has the accuracies by task, in %; `norms` has those of another metric, of some tasks.
    """
    teacher = None if method == "pretrain" else "teacher"
    made_by = {"methods": method, "seed": seed, "lr": 0.1, "teacher_sha256": teacher}
    made_by |= {"objective": method, "code": {"model": method}}  # of older versions
    run = {"method": method, "seed": seed, "student": student, "init_sha256": f"init{seed}"}
    run |= {"step": 7, "overrides": {}, "made_by": made_by, "code": {"train.py": "a"}}
    scores = {}
    for t, acc in accs.items():
        n_paper = tasks.SUITES[split][t].n_paper
        scores[t] = {"acc": acc / 100, "n": 500, "n_paper": n_paper}
        scores[t] |= {"data_sha256": t, "prompts_sha256": t}
    for t, norm in norms:
        scores[t]["acc_norm"] = norm / 100
    result = {"name": str(folder), "kind": split, "run": run, "values": scores, "scored": {}}
    result |= {"protocol": PROTOCOL | {"limit": limit}, "weights_sha256": str(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    append_line(folder / "results.jsonl", result)
    return folder / "results.jsonl"


def edit(file, *changes: str):
    """Set keys of the last result of a file: "a.b=3" sets b inside a."""
    *results, last = read_lines(file)
    single = file.with_name("edited.json")
    write_json(single, last)
    world.edit(single, *changes)
    write_lines(file, [*results, read_json(single)])
    single.unlink()


ALL = {t: 20.0 + i for i, t in enumerate(tables.COLUMNS)}


def table_of(*paths, reference="pretrain", metric="acc"):
    return tables.tabulate([str(path) for path in paths], reference, metric)


def test_the_paper_has_no_number_of_a_task_of_ones_own():
    row = paper_rows("200m", "heldout", ["PIQA", "mine"]).loc["alra"]
    assert [*row] == ["58.65", "–", "–"]
    nine = [*PAPER.columns[3:11], "mine"]
    assert paper_rows("200m", "heldout", nine).loc["alra", "avg"] == "–"


def test_a_table_byte_for_byte(tmp_path):
    """Rows in the paper's order, others last. One seed each is not ranked.

    One result lacks a task: averages are over eight, ours and the paper's.
    """
    fake(tmp_path / "alra", "alra", {**ALL, "piqa": 58.654, "arc_easy": 37.0})
    fake(tmp_path / "pretrain", "pretrain", ALL)
    fake(tmp_path / "bdl", "bdl", {t: a for t, a in ALL.items() if t != "storycloze_2016"})
    (tmp_path / "run.json").write_text("{}")
    text = """\
## Accuracy in %, heldout

|  | ARC-C | ARC-E | HS | LAMB | OBQA | PIQA | SIQA | WG | Avg. (8 of 9) |
| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |
| pretrain | 20.00 | 21.00 | 22.00 | 23.00 | 24.00 | 25.00 | 26.00 | 28.00 | 23.62 |
| alra | 20.00 | 37.00 | 22.00 | 23.00 | 24.00 | 58.65 | 26.00 | 28.00 | 29.83 |
| bdl | 20.00 | 21.00 | 22.00 | 23.00 | 24.00 | 25.00 | 26.00 | 28.00 | 23.62 |

One seed each.

## Accuracy in %, heldout: difference to pretrain

|  | ARC-C | ARC-E | HS | LAMB | OBQA | PIQA | SIQA | WG | Avg. (8 of 9) |
| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |
| alra | +0.00 | +16.00 | +0.00 | +0.00 | +0.00 | +33.65 | +0.00 | +0.00 | +6.21 |
| bdl | +0.00 | +0.00 | +0.00 | +0.00 | +0.00 | +0.00 | +0.00 | +0.00 | +0.00 |

ARC-C: 500 items, the paper has 1,172.
ARC-E: 500 items, the paper has 2,376.
HS: 500 items, the paper has 10,042.
LAMB: 500 items, the paper has 5,153.
PIQA: 500 items, the paper has 1,838.
SIQA: 500 items, the paper has 1,954.
WG: 500 items, the paper has 1,267.

The paper's acc, after 126,400 updates (ours: 7):

|  | ARC-C | ARC-E | HS | LAMB | OBQA | PIQA | SIQA | WG | Avg. (8 of 9) |
| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |
| pretrain | 21.84 | 32.45 | 26.46 | 12.92 | 23.80 | 55.28 | 34.03 | 50.51 | 32.16 |
| alra | 21.33 | 37.71 | 28.09 | 19.91 | 24.20 | 58.65 | 35.41 | 51.85 | 34.64 |

Protocol: student 200m, lm_eval 0.4.13, dtype float32, max_length 512.
"""
    assert table_of(*sorted(tmp_path.iterdir())) == text


def test_the_paper_has_averages_alone_of_its_ablations(tmp_path):
    three = dict.fromkeys(tables.SUITES["validation"], 40.0)
    for method in ("fixed_3", "alra"):
        fake(tmp_path / method, method, three, split="validation", student="500m")
    text = table_of(tmp_path, reference="alra")
    assert cells(text, "fixed_3", 1)[1:] == ["+0.00"] * 4
    assert cells(text, "fixed_3", 2)[1:] == ["–"] * 3 + ["39.27"]
    with refusal("--reference main: expected one of alra, fixed_3"):
        table_of(tmp_path, reference="main")


def test_acc_norm_where_a_task_has_it_and_scores_of_first_items(tmp_path):
    for method, norm in (("pretrain", 50), ("alra", 60)):
        fake(tmp_path / method, method, ALL, [("piqa", norm), ("arc_easy", norm)])
        fake(tmp_path / method, method, {"piqa": 77.0}, limit=60)
    text = table_of(tmp_path, metric="acc_norm")
    assert "## Accuracy in %, acc_norm where a task has it, heldout" in text
    mean = (sum(ALL.values()) - ALL["piqa"] - ALL["arc_easy"] + 120) / 9
    shown = [cells(text, "alra")[i] for i in (1, 2, 6, 10)]
    assert shown == ["20.00", "60.00", "60.00", f"{mean:.2f}"]
    assert "acc_norm" not in table_of(tmp_path)
    assert cells(text, "alra", 3) == ["alra", "77.00", "77.00"]  # a table of its own
    assert re.findall("limit.*", text) == ["limit 60."]


def test_several_seeds_become_mean_and_interval(tmp_path):
    """What prints alike ties."""
    for seed in (1, 2, 3):
        mores = {"alra": 3 * seed - 3, "tad": 3 * seed - 3 + 1e-3, "pretrain": 3 * seed - 4}
        for method, more in mores.items():
            accs = {t: a + more for t, a in ALL.items()}
            fake(tmp_path / f"s{seed}" / method, method, accs, seed=seed)
    text = table_of(*sorted(tmp_path.glob("*/*")))
    half = f"± {4.303 * 3 / math.sqrt(3):.2f}"
    assert cells(text, "alra")[1] == cells(text, "tad")[1] == f"**23.00 {half}**"
    assert cells(text, "pretrain")[1] == f"*22.00 {half}*"
    assert "over 3 seeds" in text
    # seed by seed, not mean by mean
    assert cells(text, "alra", 1)[-1] == "+1.00 ± 0.00, p < 0.0001"


@pytest.mark.parametrize("more", [[-1, 1, 0, 0, 0.1], [1, 1, 1, 1, 1.1]])
def test_a_difference_of_one_seed_is_within_noise_if_its_interval_holds_0(more):
    n = [10] * 5
    students = []
    for change in ([0] * 5, more):
        ces = [10 + x for x in change]
        students.append({"ce": sum(ces) / 50, "documents": {"n": n, "ce": ces, "kl": ces}})
    index = pd.MultiIndex.from_tuples([("alra", 1), ("mine", 1)], names=["method", "seed"])
    text = "\n".join(tables.figure_tables("", pd.DataFrame(students, index), "alra"))
    cell = text[text.index("| mine | +") :].split(" |")[1]
    assert cell.endswith("over documents, within noise" if more[0] < 0 else "over documents")


DIFFER = """
run.init_sha256="other" => init_sha256 of seed 1234
run.step=8 => step was 7, now 8
values.arc_challenge.prompts_sha256="other" => prompts of arc_challenge
run.made_by.lr="other" => lr was .*, now .other
scored.vocabulary="other" => scored vocabulary was .3., now .other
"""


def test_columns_are_aligned_on_a_terminal_alone(monkeypatch):
    text = "A line.\n\n|  | CE |\n| --- | --: |\n| alra | 10.5 |\n\n|  | b |\n| --- | --: |"
    assert tables.for_screen(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    aligned = "A line.\n\n|      |   CE |\n| ---  |  --: |\n| alra | 10.5 |\n\n"
    assert tables.for_screen(text) == aligned + "|     |   b |\n| --- | --: |"


@pytest.mark.parametrize(("change", "named"), read_table(DIFFER))
def test_what_cannot_be_compared(tmp_path, change, named):
    edit(fake(tmp_path / "x", "pretrain", ALL), 'scored.vocabulary="3"')
    edit(fake(tmp_path / "y", "alra", ALL), 'scored.vocabulary="3"', change)
    with refusal(f"{tmp_path}/x and {tmp_path}/y cannot be compared: {named}"):
        table_of(tmp_path)


def test_edits_are_shown(tmp_path):
    for method in ("pretrain", "alra"):
        file = fake(tmp_path / method, method, ALL)
    assert "Edited" not in table_of(tmp_path)
    edit(file, 'run.code={"train.py": "b"}', 'code={"eval.py": "a"}')
    text = table_of(tmp_path)
    assert "\nEdited between these trainings and scorings: train.py.\n" in text


def test_a_method_without_a_teacher_does_not_hide_that_two_teachers_differ(tmp_path):
    for method, teacher in (("pretrain", None), ("tad", "one"), ("alra", "another")):
        file = fake(tmp_path / method, method, ALL)
        edit(file, f"run.made_by.teacher_sha256={json.dumps(teacher)}")
        edit(file, 'scored.teacher_sha256="a third, which scores all"')
    with refusal("cannot be compared: teacher_sha256 was 'one', now 'another'"):
        table_of(*(tmp_path / name for name in ("pretrain", "alra", "tad")))


def figures_of(folder, ce, weights="w", rows="r", protocol="0 to 9 of data/x", name="a", **values):
    result = {"name": name, "kind": "figures", "run": {}, "weights_sha256": weights}
    result |= {"protocol": {"rows": protocol}, "scored": {"rows_sha256": rows}}
    values |= {"ce": ce, "n_targets": 20, "n_rows": 10}
    folder.mkdir(exist_ok=True)
    append_line(folder / "results.jsonl", result | {"values": values})


def test_the_newest_figures_count_and_take_nothing_from_earlier_ones(tmp_path):
    """The rows were prepared again, with fewer documents, and then the model was trained again."""
    figures_of(tmp_path, 5.0, ce_half=0.25, documents={"n": [4] * 5})
    assert "| a | 5.0000 ± 0.2500 |" in table_of(tmp_path)
    few = {"n": [12, 0, 8]}  # one of the documents has no target
    figures_of(tmp_path, 4.0, rows="other", documents=few)
    text = table_of(tmp_path)
    assert "| a | 4.0000 |" in text
    assert "20 targets in 10 rows of 2 documents, too few for an interval; no teacher." in text
    figures_of(tmp_path, 3.0, weights="other", rows="other")
    assert "| a | 3.0000 |" in table_of(tmp_path)


def test_other_rows_have_a_table_of_their_own(tmp_path):
    """Two models share a folder of results, as by `eval.py a b --out=DIR`."""
    figures_of(tmp_path, 4.0, "a", name="a", kl=1.0)
    figures_of(tmp_path, 5.0, "b", name="b")
    figures_of(tmp_path, 6.0, "a", "more", "0 to 99 of data/x")
    text = table_of(tmp_path)
    shown = [cells(text, *at)[1] for at in (("a", 0), ("b", 0), ("a", 1))]
    assert shown == ["4.0000", "5.0000", "6.0000"]
    assert text.count(" Not all rows have KL to teacher, nats.\n") == 1
    assert re.findall("Held-out rows .*", text) == [
        f"Held-out rows 0 to {n} of data/x" for n in (9, 99)
    ]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("source", "edited since: gamma"),
        ("hyper", "hyper of alra.gamma was 5, now 1"),
        ("shape", "shape of alra.gamma was 5, now 1"),
    ],
)
def test_seeds_of_a_method_are_of_one_recipe(key, change, tmp_path):
    for seed in (1, 2):
        file = fake(tmp_path / f"alra{seed}", "alra", ALL, seed=seed)
        edit(file, f'run.made_by.{key}={{"gamma": 5}}')
    assert "over 2 seeds" in table_of(tmp_path)
    edit(file, f'run.made_by.{key}={{"gamma": 1}}')
    with refusal(f"cannot be compared: {change}"):
        table_of(tmp_path)


def test_what_may_differ_between_rows(tmp_path):
    fake(tmp_path / "x", "pretrain", ALL)
    varied = [f'run.made_by.{key}="other"' for key in tables.VARIES]
    edit(fake(tmp_path / "y", "alra", ALL), *varied)
    assert "| alra | 20.00 |" in table_of(tmp_path)
    edit(tmp_path / "y/results.jsonl", "run.made_by.clip=0.5")  # the default of an older record
    assert "| alra | 20.00 |" in table_of(tmp_path)
    edit(tmp_path / "y/results.jsonl", "run.made_by.clip=0.7")
    with refusal("clip was 0.5, now 0.7"):
        table_of(tmp_path)


def test_one_place_for_each_student(tmp_path):
    for name in ("a", "b"):
        fake(tmp_path / name / "alra", "alra", ALL)
    with refusal("both hold alra with seed 1234"):
        table_of(tmp_path / "a", tmp_path / "b")
    # the same model after it was trained again
    edit(fake(tmp_path / "a/alra", "alra", ALL | {"piqa": 99.0}), 'weights_sha256="x"')
    assert "99.00" in table_of(tmp_path / "a")
    edit(fake(tmp_path / "c/alra", "alra", ALL), "run.overrides.d_max=9")
    text = table_of(tmp_path / "a", tmp_path / "c", tmp_path / "a/alra")
    assert cells(text, "alra d_max=9")[1] == "20.00"
    fake(tmp_path / "a", "pd", ALL)  # results of its own, as by eval.py --out
    assert "alra" not in table_of(tmp_path / "a")


def test_a_folder_without_scores_is_named_and_left_out(tmp_path, capsys):
    fake(tmp_path / "a/alra", "alra", ALL)
    assert "| alra |" in table_of(tmp_path / "a", tmp_path / "c")
    assert capsys.readouterr().err == f"{tmp_path}/c: no results in it\n"
    with refusal(f"{tmp_path}/c: no results; first: python eval.py"):
        table_of(tmp_path / "c")
