"""Comparisons: what is run, that it goes on after a kill, that nothing is left out, and every number of the report."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import compare
import pytest

import configure
import eval as ev
import train
from lib import report as reports
from lib.files import UserError, read_lines, write_json, write_lines
from lib.report import Spec
from lib.stats import Estimate, differences, estimate, holm

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "replication"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# --- statistics ------------------------------------------------------------------------------------------------------

T975 = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # Student's t of two degrees of freedom, in closed form


def test_means_intervals_and_p_against_closed_forms():
    assert estimate({1: 1.0, 2: 3.0}).p == pytest.approx(1 - 2 / math.pi * math.atan(2))  # t = 2, one degree of freedom
    t = 2 / (1 / math.sqrt(3))  # mean 2, deviation 1, three pairs
    for sign in (1, -1):
        e = estimate({seed: sign * value for seed, value in {1: 3.0, 2: 1.0, 3: 2.0}.items()})
        assert e[:4] == pytest.approx((3, sign * 2.0, T975 / math.sqrt(3), 1 - t / math.sqrt(2 + t * t)))
    assert estimate({5: 0.7}) == Estimate(1, 0.7) and estimate({}) == Estimate(0)
    assert estimate({1: 0.0, 2: 0.0}).p == 1.0 and estimate({1: 0.5, 2: 0.5}).p == 0.0
    assert estimate({1: 1.0, 2: 3.0}).text(1, "+") == "+2.0 ± 12.7" and Estimate(0).text(2) == "–"


def test_differences_are_paired_by_seed_and_one_family():
    first = {3: 0.3, 1: 0.25}
    (e,) = differences([({1: 0.5, 2: 0.25, 3: 0.1}, first)])
    assert e[:4] == pytest.approx(estimate({1: 0.25, 3: -0.2})[:4]) and e.p_holm == e.p
    a, b, none = differences([({1: 1.0, 3: 1.1}, first), ({1: 0.5, 3: 0.1}, first), ({2: 0.0}, first)])
    assert none == Estimate(0) and a.p < b.p == b.p_holm and a.p_holm == 2 * a.p


def test_holm_by_hand():
    # 4 * 0.005, 3 * 0.01, 2 * 0.03, and 0.04 no smaller than the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([None, 0.4, 0.7]) == [None, 0.8, 0.8]
    assert holm([0.9, 0.6]) == [1.0, 1.0] and holm([]) == []


# --- what is run -----------------------------------------------------------------------------------------------------


def loaded(*argv: str) -> configure.Config:
    return configure.load(["config/mini.py", *argv])


def test_every_method_has_as_many_trials_and_fewer_settings_mean_more_rates():
    found = compare.trials(("lr=1e-3,1e-2", "alra.gamma=1,5,9", "tad.beta=0,2"), ("alra", "tad", "pd"))
    assert [len(of) for of in found.values()] == [6, 6, 6]
    assert found["alra"] == [{"gamma": g, "lr": lr} for lr in (1e-3, 1e-2) for g in (1, 5, 9)]
    assert [of["lr"] for of in found["pd"]] == [1e-3, 1e-2, 3.16e-3, 1.78e-3, 5.62e-3, 1.33e-3]
    assert {of["lr"] for of in found["tad"]} == {1e-3, 1e-2, 3.16e-3} and {of["beta"] for of in found["tad"]} == {0, 2}
    found = compare.trials(("lr=1e-3,1e-2", "alra.gamma=1,5,9", "tad.beta=0,1,2,3"), ("alra", "tad", "pd"))
    assert [len(of) for of in found.values()] == [8, 8, 8]  # 3 does not divide 8: the last rate has fewer partners
    assert compare.trials((), ("alra",)) == {}
    for bad, methods in (
        ("lr=1e-3", "alra"),
        ("lr=a,b", "alra"),
        ("pd.tau=1,2", "alra"),
        ("gamma=1,2", "alra"),
        ("pd.lr=1,2", "pd"),
    ):
        with pytest.raises(UserError, match=re.escape(f"--tune={bad}: expected lr=RATE,RATE,..")):
            compare.trials((bad,), (methods,))
    with pytest.raises(UserError, match="add --tune=lr="):
        compare.trials(("alra.gamma=1,5",), ("alra", "pd"))


def replication(*argv: str) -> tuple[Spec, list[compare.Student]]:
    args, spec, of = compare.arguments(["config/mini.py", *argv])
    return spec, compare.plan(spec, of, args.given, {})


def test_the_replication_has_the_students_of_its_committed_results():
    spec, students = replication()
    kept = {(x["settings"], x["method"], x["seed"]) for x in read_lines(RESULTS / "results.jsonl")}
    assert {(s.study, s.name, s.cfg.seed) for s in students} == kept and len(students) == len(kept) == 5 * 35
    wanted = {me for _, _, rows, _ in spec.tables for _, *both in rows for me in both}
    assert {(s.study, s.name) for s in students} == wanted
    shown = {(s.study, s.cfg.seed) for s in students if s.cfg.histogram_every_steps}
    assert shown == {("main", 1)}  # only this run counts histograms
    paper = {"beta1": 0.9, "beta2": 0.98, "adam_eps": 1e-6, "weight_decay": 1e-2, "clip": 0.5, "batch_rows": 16}
    assert all({k: getattr(s.cfg, k) for k in paper} == paper for s in students)


def test_flags_beat_studies_and_a_study_that_no_longer_differs_joins_the_main_one():
    _, students = replication("--max_steps=200", "--schedule_steps=200", "--warmup_steps=20", "--seeds=2")
    assert {s.study for s in students} == {"main", "detach", "group4", "group16"}
    assert {s.cfg.max_steps for s in students} == {200} and len(students) == 2 * 29
    spec, students = replication("--methods=pd,tad", "--tune=none")  # a comparison of one's own
    assert {(s.study, s.name) for s in students} == {("main", "pd"), ("main", "tad")} and not spec.tables
    assert spec.tune == () and spec.seeds == 5


def test_students_that_differ_in_method_and_settings_alone_share_a_run(tmp_path):
    _, students = replication("--seeds=2")
    jobs = compare.together(students, tmp_path, 99)
    held = [(job.students[0].study, job.students[0].cfg.seed, len(job.students)) for job in jobs]
    assert sorted(held) == sorted((s, seed, n) for s, n in (("main", 20), ("detach", 1), ("group4", 4), ("group16", 4),
                                                            ("long", 6)) for seed in (1, 2))  # fmt: skip
    cfg = configure.load(jobs[0].argv[1:])
    assert cfg.methods == tuple(s.name for s in jobs[0].students) and cfg.out_dir == str(tmp_path / jobs[0].name)
    detach = next(job for job in jobs if job.students[0].study == "detach")
    assert configure.load(detach.argv[1:]).settings_of("alra") == {"detach_weights": False}
    folder = tmp_path / detach.name / "alra"
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    assert compare.made(tmp_path) == {detach.students[0].made_by: folder}  # the others have not ended
    few = compare.together(students, tmp_path, 7)
    assert max(len(job.students) for job in few) == 7 and sum(len(job.students) for job in few) == 2 * 35
    assert len({job.name for job in few}) == len(few)


def test_the_settings_that_were_chosen_are_the_methods_or_those_it_is_like():
    chosen = {"pd": {"lr": 1e-3}, "alra": {"lr": 1e-2, "gamma": 9}}
    _, spec, of = compare.arguments(["config/mini.py", "--alra.tau=2"])
    settings = {(s.study, s.name): s.cfg.settings_of(s.name) for s in compare.plan(spec, of, set(), chosen)}
    assert settings["main", "pd"] == {"lr": 1e-3} and settings["main", "alra"] == {"tau": 2, "lr": 1e-2, "gamma": 9}
    assert settings["main", "fixed_3"] == {"lr": 1e-2, "gamma": 9} and settings["long", "alra"]["lr"] == 1e-2
    assert settings["detach", "alra"]["detach_weights"] is False


def test_an_edited_objective_is_another(monkeypatch):
    """Its row or its function; a student made with the former one is not taken for one of the new."""
    cfg = loaded()
    before = {m: compare.made_by(cfg, m) for m in ("pd", "tad", "alra@x")}
    assert before["alra@x"] == compare.made_by(cfg, "alra") != compare.made_by(cfg, "alra_n")
    monkeypatch.setitem(compare.METHODS, "pd", compare.METHODS["pd"]._replace(w_ce=0.25))
    monkeypatch.setitem(compare.METHODS, "tad", compare.METHODS["tad"]._replace(fn=compare.METHODS["bild"].fn))
    monkeypatch.setattr(compare, "objective", compare.objective.__wrapped__)
    after = {m: compare.made_by(cfg, m) for m in before}
    assert after["alra@x"] == before["alra@x"] and after["pd"] != before["pd"] and after["tad"] != before["tad"]
    other = dataclasses.replace(cfg, hyper={"pd": {"tau": 2.0}}, val_every_steps=7, out_dir="elsewhere")
    assert (
        compare.made_by(other, "alra") == compare.made_by(cfg, "alra") and compare.made_by(other, "pd") != after["pd"]
    )
    assert compare.made_by(dataclasses.replace(cfg, clip=1.0), "alra") != compare.made_by(cfg, "alra")


def test_at_equal_flops_a_method_without_a_teacher_makes_more_updates():
    cfg = loaded()
    student, teacher = compare.flops(cfg)
    longer = compare.at_equal("flops", "pretrain", cfg)
    assert longer.max_steps == longer.schedule_steps
    assert longer.max_steps * student == pytest.approx(150 * (student + teacher), rel=0.01)
    assert compare.at_equal("flops", "alra", cfg) == cfg == compare.at_equal("updates", "pretrain", cfg)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed=3"], "--seed: compare.py sets it itself"),
        (["--seeds=0"], "--seeds=0: expected at least 1"),
        (["--jobs=0"], "--jobs=0: expected at least 1"),
        (["--per_run=0"], "--per_run=0: expected at least 1"),
        (["--reference=tad"], "--reference=tad: expected one of pretrain, vanilla_kd, alra"),
        (["--tunes=x"], "--tunes=x: no such key 'tunes'"),
        (["--methods=alr@x"], "no such method 'alr', did you mean 'alra'?"),
        (["--alra.gama=1"], "alra takes no gama (did you mean 'gamma'?)"),
        (["--tune=lr=1e-3,1e-2", "--tune=alra.gama=1,2"], "alra takes no gama (did you mean 'gamma'?)"),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        compare.arguments(["config/demo.py", *argv])


def test_a_configs_wrong_key_for_compare_is_refused(tmp_path):
    (tmp_path / "c.py").write_text('methods = ("pd",)\n_compare = {"seed": 3}\n')
    with pytest.raises(UserError, match="_compare: no such key 'seed'"):
        compare.arguments([str(tmp_path / "c.py")])


# --- running it ------------------------------------------------------------------------------------------------------

TINY = ["--device=cpu", "--max_steps=3", "--schedule_steps=3", "--warmup_steps=1", "--seq_len=31", "--batch_rows=2", "--micro_batch=2",
        "--val_every_steps=3", "--checkpoint_every_steps=1", "--val_max_rows=3", "--student=mini", "--log_every_steps=1"]  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Prepared rows of a little text: flags for compare.py."""
    folder = tmp_path_factory.mktemp("rows")
    for i in range(60):
        (folder / f"{i}.txt").write_text("".join(f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(20)))
    argv = ["config/demo.py", *TINY, f"--source={folder}", f"--data_dir={folder / 'data'}", "--seeds=2", "--rows=4"]
    subprocess.run([sys.executable, "prepare.py", *argv[:-2]], check=True, cwd=ROOT, capture_output=True)
    return argv


@pytest.fixture
def here(monkeypatch):
    """Runs are made in this process, without the seconds that an import takes -> the names of those that began."""
    begun = []

    def launch(jobs, out, n):
        said = {}
        for job in jobs:
            begun.append(job.name)
            try:
                trains, argv = job.argv[0] == "train.py", job.argv[1:]
                train.run(configure.load(argv)) if trains else ev.run(argv)
            except ValueError as error:
                said[job.name] = str(error)
            write_lines(out / "runs.jsonl", [*read_lines(out / "runs.jsonl"), {"run": job.name, "wall_sec": 60.0}])
        return said

    monkeypatch.setattr(compare, "launch", launch)
    monkeypatch.setattr(compare, "prepare", lambda cfg, file: None)
    monkeypatch.setattr(train.Env, "hold_signals", lambda self: None)
    monkeypatch.setattr(reports, "draw_figures", lambda *a: [])
    return begun


def test_a_comparison_from_trials_to_report_and_nothing_is_made_twice(rows, here, tmp_path, capsys):
    argv = [*rows, "--methods=pretrain,alra", f"--out={tmp_path}", "--tune=lr=1e-3,1e-2", "--tune=alra.gamma=1,5"]
    assert compare.run(argv) == 0
    assert [name.split("_")[0] for name in here] == ["tune", "main", "main", "eval"]
    lines, rates = (read_lines(tmp_path / "report" / f"{name}.jsonl") for name in ("results", "rates"))
    assert [(x["method"], x["seed"], x["trials"], x["n_rows"]) for x in lines] == [(m, s, 4, 4) for m in ("pretrain", "alra") for s in (1, 2)]  # fmt: skip
    tried = [x for x in rates if x["method"] == "alra"]
    best = min(tried, key=lambda x: x["val_ce"])
    assert len(rates) == 8 and len({x["val_ce"] for x in rates}) == 8
    assert all(x["overrides"] == x["chosen"] == best["settings"] and x["lr"] == best["lr"] for x in lines[2:])
    a, b, c, d = lines
    assert a["init_sha256"] == c["init_sha256"] != b["init_sha256"] == d["init_sha256"]
    cfg = compare.arguments(argv)[2]
    student, teacher = compare.flops(cfg)
    assert c["student_flops"] == 3 * 2 * 31 * student and c["teacher_flops"] == 3 * 2 * 31 * teacher
    assert "teacher_flops" not in a and c["wall_sec"] == 60.0 and c["students_in_run"] == 2
    text = (tmp_path / "report" / "README.md").read_text()
    assert "6 students that have a teacher learnt from 3 passes" in text
    assert "Each method had 4 trials" in text and "the first 3 held-out rows, which are not scored" in text
    # the rows that are scored are those after the three that chose
    val = ev.open_rows(cfg.data_dir, "val")[0]
    assert a["rows_sha256"] == ev.rows_hash(val[3:7])

    here.clear()
    assert compare.run(argv) == 0 and here == []  # the same command makes nothing again
    assert (tmp_path / "report" / "README.md").read_text() == text
    more = [word.replace("pretrain,alra", "pretrain,alra,tad") for word in argv]
    assert compare.run(more) == 0  # a method more: its own trials and seeds alone
    assert [name.split("_")[0] for name in here] == ["tune", "main", "main", "eval"]
    made = [json.loads((tmp_path / name / "run.json").read_text())["config"]["methods"] for name in here[:3]]
    assert made == [[f"tad@t{i}" for i in range(4)], ["tad"], ["tad"]]
    here.clear()
    assert compare.run([*more, "--rows=5"]) == 0 and [name[:4] for name in here] == ["eval"]  # only scored anew
    assert {x["n_rows"] for x in read_lines(tmp_path / "report" / "results.jsonl")} == {5}
def test_what_cannot_be_made_stands_alone_in_the_report(rows, here, tmp_path, capsys):
    argv = [*rows, "--methods=pretrain,alra,tad", "--tad.beta=-1", "--seeds=1", f"--out={tmp_path}"]
    assert compare.run(argv) == 1
    said = capsys.readouterr().err
    assert "tad (main, seed 1): no result: tad: beta=-1.0: expected 0 or more" in said
    lines = {x["method"]: x for x in read_lines(tmp_path / "report" / "results.jsonl")}
    assert "stopped" in lines["tad"] and lines["alra"]["ce"] > 0 and lines["pretrain"]["ce"] > 0
    text = (tmp_path / "report" / "README.md").read_text()
    assert "| tad | – | 0 of 1 | – |" in text and "| tad | pretrain | – | – |" in text
    assert "- tad (main, seed 1): tad: beta=-1.0" in text
    argv += ["--tune=lr=1e-3,1e-2"]  # no trial of it has a result either: no seed is tried
    here.clear()
    assert compare.run(argv) == 1 and not any("main" in name and "tad" in name for name in here)
    (x,) = [x for x in read_lines(tmp_path / "report" / "results.jsonl") if x["method"] == "tad"]
    assert "beta=-1.0" in x["stopped"] and x["trials"] == 2


def test_a_student_that_cannot_be_scored_stands_alone_too(rows, here, tmp_path, monkeypatch):
    argv, figures = [*rows, "--methods=pretrain,tad", "--seeds=1", f"--out={tmp_path}"], ev.held_out_figures

    def broken(checkpoints, *more):
        if any(c.name.endswith("tad") for c in checkpoints):
            raise UserError("the weights have diverged")
        return figures(checkpoints, *more)

    monkeypatch.setattr(ev, "held_out_figures", broken)
    assert compare.run(argv) == 1
    lines = {x["method"]: x for x in read_lines(tmp_path / "report" / "results.jsonl")}
    assert lines["tad"]["stopped"] == "the weights have diverged" and lines["pretrain"]["ce"] > 0
    assert [name.split("_")[0] for name in here] == ["main", "eval", "eval", "eval"]


def test_a_student_without_result_and_without_error_is_an_error(tmp_path):
    (student,) = compare.plan(Spec(seeds=1), loaded("--methods=alra"), {"methods"}, {})
    with pytest.raises(UserError, match="alra, seed 1: has neither a result nor an error"):
        compare.collect([student], "updates", {}, {}, {}, {}, tmp_path, tmp_path / "report")


def test_rows_that_choose_must_leave_some_to_score(rows, here, tmp_path):
    with pytest.raises(UserError, match=r"val_max_rows=None: they choose, later rows are scored"):
        compare.run([*rows, "--val_max_rows=None", f"--out={tmp_path}"])
    with pytest.raises(UserError, match=r"--skip_rows 999: .* held-out rows"):
        data = next(word for word in rows if word.startswith("--data_dir=")).partition("=")[2]
        ev.run(["demo/teacher", "--tasks=none", f"--rows={data}", "--skip_rows=999", f"--out={tmp_path}"])


WAITS = """
import pathlib, sys, time
if any(a.endswith("train.py") for a in sys.orig_argv):
    sys.path.insert(0, {root!r})
    import lib.checkpoint as c
    save = c.save
    def slow(*a):
        save(*a)
        pathlib.Path({begun!r}).touch()
        time.sleep(3600)
    c.save = slow
"""


@pytest.mark.slow
def test_a_comparison_that_was_killed_ends_in_the_same_tables(rows, here, tmp_path):
    argv = [*rows, "--methods=pretrain", "--tune=lr=1e-3,1e-2"]
    assert compare.run([*argv, f"--out={tmp_path / 'whole'}"]) == 0
    begun = tmp_path / "begun"
    (tmp_path / "sitecustomize.py").write_text(
        WAITS.format(begun=str(begun), root=str(ROOT))
    )  # Python imports it at its start
    first = subprocess.Popen([sys.executable, "compare.py", *argv, f"--out={tmp_path / 'cut'}"], start_new_session=True, cwd=ROOT,
                             env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    while not begun.exists() and first.poll() is None:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)  # with its children: the trials have one checkpoint, and no end
    first.communicate()
    assert begun.exists() and not list((tmp_path / "cut").glob("*/*/model"))
    assert compare.run([*argv, f"--out={tmp_path / 'cut'}"]) == 0
    one, two = ((tmp_path / name / "report" / "tables.csv").read_bytes() for name in ("whole", "cut"))
    assert one == two and b"pretrain" in one


# --- the report ------------------------------------------------------------------------------------------------------


def made_up(folder: Path, ce: dict[str, list[float]], **more) -> None:
    """Results of these methods, a CE per seed; KL is 1 less, agreement a tenth of it in reverse."""
    lines = []
    for method, values in ce.items():
        for seed, v in enumerate(values, 1):
            lines.append({"settings": "main", "method": method, "lr": 0.003, "seed": seed, "ce": v, "bits_per_byte": v / 3, "kl": v - 1,
                          "top1": 1 - v / 10, "top5": 0.5, "ece": 0.1, "n_rows": 3, "n_targets": 77, "teacher": "t", "teacher_ce": 2.0, "step": 300,
                          "teacher_entropy": 1.5, "init_sha256": f"i{seed}", "data_sha256": "d", "wall_sec": 60.0, "students_in_run": 3,
                          "hardware": "a machine", "git_commit": "abc", "versions": {"python": "3"}})  # fmt: skip
    lines[0] |= more
    write_lines(folder / "results.jsonl", lines)
    cfg = loaded()
    write_json(folder / "settings.json", {"main": {k: getattr(cfg, k) for k in configure.TYPES}, "skip_rows": 256})


def tables_of(folder: Path, spec: Spec | None = None) -> tuple[str, str]:
    spec = spec or compare.arguments(["config/mini.py"])[1]
    reports.report(spec, folder, folder, draw=False)
    return (folder / "README.md").read_text(), (folder / "tables.csv").read_text()


def test_the_report_says_what_the_results_say(tmp_path):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5, 6.0], "alra": [4.0, 3.5, 5.0], "pd": [5.5, 5.5, 6.2], "alra_r": [4.5, 4.5, 4.8]})  # fmt: skip
    tried = [("pd", 1e-3, 5.0, {}), ("pd", 3e-3, None, {}), ("pd", 3e-2, 4.0, {}), ("alra", 3e-3, 4.5, {"gamma": 1})]
    write_lines(
        tmp_path / "rates.jsonl", [{"method": m, "lr": lr, "val_ce": ce, "settings": of} for m, lr, ce, of in tried]
    )
    text, sheet = tables_of(tmp_path)
    # alra less vanilla_kd: -1, -2, -1: mean -4/3, deviation 1/sqrt(3), t = -4, p = 1 - 4 / sqrt(18), the smaller of two
    p, half = 1 - 4 / math.sqrt(18), T975 / 3
    assert (
        f"main,alra,ce,3,,,vanilla_kd,-1.33333,{-4 / 3 - half:.6g},{-4 / 3 + half:.6g},{p:.6g},{2 * p:.6g}\n" in sheet
    )
    assert f"| alra | vanilla_kd | -1.3333 ± {half:.4f} | {2 * p:.4f} |" in text
    assert "| alra_r | alra | +0.4333" in text  # 0.5, 1.0, -0.2: held against alra in its own table
    assert "| pd | 0.003 | 3 | 5.7333 ± 1.0040 |" in text and text.count("**4.1667 ± 1.8973**") == 2
    assert "| pd | 5.0000 | stopped | **4.0000** |" in text and "one beyond might do better: pd, alra." in text
    assert "| alra gamma=1 | – | **4.5000** | – |" in text
    # the paper: vanilla_kd 35.13 < pd 35.60 < alra 36.62; ours: pd, vanilla_kd, alra; only pd is surely behind alra
    assert "| Main results | 200m | CE, nats/token | +0.33 | 1.0000 | 2 (1) | 1 (0) |" in text
    assert "| Main results | vanilla_kd | 3 | 3 | 2 | 2 | 2 |" in text
    assert len(text.splitlines()) > 40 and not (tmp_path / "curves.png").exists()


def test_any_methods_have_a_table_against_a_reference_of_ones_choice(tmp_path):
    made_up(
        tmp_path,
        {"mine": [5.0, 5.5], "mine@x": [4.0, 4.0]},
        chosen={"lr": 0.003, "beta": 2.0},
        trials=4,
        student_flops=3e9,
    )
    text, _ = tables_of(tmp_path, Spec())
    assert "| mine@x | mine | -1.2500 ± 3.1766 |" in text and "ordering" not in text
    assert re.search(r"\| mine \| 0.003, beta 2 \| 2 \| .* \| 20 \| 3e\+09 \| 4 \|", text)
    text, _ = tables_of(tmp_path, Spec(reference="mine@x"))
    assert "| mine | mine@x | +1.2500 ± 3.1766 |" in text


def test_students_that_stopped_are_told_and_counted(tmp_path):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5, 6.0], "alra": [4.0, 3.5, 5.0]}, stopped="step 3: gradient norm inf")
    text, sheet = tables_of(tmp_path)
    assert (
        "- vanilla_kd (main, seed 1): step 3: gradient norm inf" in text and "| vanilla_kd | 0.003 | 2 of 3 |" in text
    )
    assert "main,alra,ce,2,,,vanilla_kd,-1.5," in sheet


def test_nothing_is_reported_where_all_stopped_nor_compared_where_no_seed_is_shared(tmp_path):
    with pytest.raises(UserError, match=r"no results\.jsonl there; first the same command without --report"):
        tables_of(tmp_path)
    made_up(tmp_path, {"alra": [4.0]}, stopped="step 3: gradient norm inf")
    with pytest.raises(UserError, match="no student has a result; alra: step 3"):
        tables_of(tmp_path)
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [4.0, 3.5]})
    lines = read_lines(tmp_path / "results.jsonl")
    for line in lines:
        line["seed"] += 2 * (line["method"] == "alra")
        line["init_sha256"] = str(line["seed"])
    write_lines(tmp_path / "results.jsonl", lines)
    text, sheet = tables_of(tmp_path)
    assert "| alra | 0.003 | 2 |" in text and "| alra | vanilla_kd | – | – |" in text
    assert "main,alra,ce,2," in sheet and "main,alra,ce,0,,,vanilla_kd,,,,,\n" in sheet


@pytest.mark.parametrize(("key", "value"), [("init_sha256", "other"), ("data_sha256", "other"), ("step", 299)])
def test_what_cannot_be_compared_is_refused(key, value, tmp_path):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [4.0, 3.5]}, **{key: value})
    with pytest.raises(UserError, match=f"{key}.*cannot be compared"):
        tables_of(tmp_path)
    if key == "step":  # at equal FLOPs they differ
        lines = [x | {"at": "flops"} for x in read_lines(tmp_path / "results.jsonl")]
        write_lines(tmp_path / "results.jsonl", lines)
        assert tables_of(tmp_path)


def test_the_committed_report_comes_out_of_the_committed_logs(tmp_path):
    spec = compare.arguments(["config/mini.py"])[1]
    reports.report(spec, RESULTS, tmp_path, draw=False)
    for name in ("README.md", "tables.csv"):
        assert (tmp_path / name).read_bytes() == (RESULTS / name).read_bytes(), name
