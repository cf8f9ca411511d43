"""Comparisons: what is run, that it goes on after a kill, that nothing is left out, and every number of the report."""

import argparse
import dataclasses
import hashlib
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path

import matplotlib
import pytest

import configure
import eval as ev
import train
from lib.errors import UserError
from lib.files import read_json, read_lines, write_json, write_lines
from lib.stats import Estimate, differences, estimate, holm
from study import report as reports
from study.report import Spec
from tests import world
from tools import compare, plot

T975 = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # Student's t of two degrees of freedom, in closed form
STUDY = configure.load([str(world.ROOT / "config" / "study.py")])


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(world.ROOT)


def test_estimates_against_closed_forms_and_differences_are_paired_by_seed_and_corrected_as_one_family():
    assert estimate({1: 1.0, 2: 3.0}).p == pytest.approx(1 - 2 / math.pi * math.atan(2))  # t = 2, one degree of freedom
    t = 2 * math.sqrt(3)  # mean 2, deviation 1, three pairs
    for sign in (1, -1):
        e = estimate({seed: sign * value for seed, value in {1: 3.0, 2: 1.0, 3: 2.0}.items()})
        assert e[:4] == pytest.approx((3, sign * 2.0, T975 / math.sqrt(3), 1 - t / math.sqrt(2 + t * t)))
    assert estimate({5: 0.7}) == Estimate(1, 0.7) and estimate({}) == Estimate(0)
    assert estimate({1: 0.0, 2: 0.0}).p == 1.0 and estimate({1: 0.5, 2: 0.5}).p == 0.0
    assert estimate({1: 1.0, 2: 3.0}).text(1, "+") == "+2.0 ± 12.7" and Estimate(0).text(2) == "–"
    first = {3: 0.3, 1: 0.25}
    (e,) = differences([({1: 0.5, 2: 0.25, 3: 0.1}, first)])
    assert e[:4] == pytest.approx(estimate({1: 0.25, 3: -0.2})[:4]) and e.p_holm == e.p
    a, b, none = differences([({1: 1.0, 3: 1.1}, first), ({1: 0.5, 3: 0.1}, first), ({2: 0.0}, first)])
    assert none == Estimate(0) and a.p < b.p == b.p_holm and a.p_holm == 2 * a.p
    # 4 * 0.005, 3 * 0.01, 2 * 0.03, and 0.04 no smaller than the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([None, 0.4, 0.7]) == [None, 0.8, 0.8] and holm([0.9, 0.6]) == [1.0, 1.0] and holm([]) == []


def study(*argv: str) -> tuple[Spec, list[compare.PlannedStudent]]:
    _, spec, cfg = compare.arguments(["study/small.py", *argv])
    return spec, compare.plan(spec, cfg, {})


def test_every_method_has_as_many_trials_and_fewer_settings_mean_more_rates(tmp_path):
    tried = compare.trials(("lr=1e-3,1e-2", "alra.gamma=1,5,9", "tad.beta=0,2"), ("alra", "tad", "pd"))
    assert [len(points) for points in tried.values()] == [6, 6, 6]
    assert tried["alra"] == [{"gamma": g, "lr": lr} for lr in (1e-3, 1e-2) for g in (1, 5, 9)]
    assert [point["lr"] for point in tried["pd"]] == [1e-3, 1e-2, 3.16e-3, 1.78e-3, 5.62e-3, 1.33e-3]
    assert {x["lr"] for x in tried["tad"]} == {1e-3, 1e-2, 3.16e-3} and {x["beta"] for x in tried["tad"]} == {0, 2}
    tried = compare.trials(("lr=1e-3,1e-2", "alra.gamma=1,5,9", "tad.beta=0,1,2,3"), ("alra", "tad", "pd"))
    assert {len(points) for points in tried.values()} == {8}  # 3 does not divide 8: the last rate has fewer partners
    assert compare.trials((), ("alra",)) == {}
    log = [*({"step": n, "val_ce": ce} for n, ce in ((1, 5.0), (2, 3.0), (3, 4.0))), {"step": 4, "ce": 1.0}]
    write_lines(tmp_path / "log.jsonl", log)  # a trial is chosen by its last validation
    assert compare.last_val_ce(tmp_path) == 4.0 and compare.last_val_ce(None) is None
    write_json(tmp_path / "stopped.json", {"why": "step 3: gradient norm inf"})
    assert compare.last_val_ce(tmp_path) is None


def test_a_study_has_methods_with_fewer_seeds_and_flags_beat_it():
    spec, students = study()
    seeds = {name: [s.cfg.seed for s in students if s.name == name] for name in STUDY.methods}
    assert seeds == {m: [*range(1, spec.fewer_seeds.get(m, 8) + 1)] for m in STUDY.methods}
    assert len(students) == 2 * 8 + 9 * 5 + 4 * 3 and spec.paper and spec.layout(["pd"]) == list(spec.tables)
    assert {s.cfg.seed for s in students if s.cfg.histogram_every_steps} == {1}
    assert len(study("--seeds=2")[1]) == 15 * 2
    spec, students = study("--methods=pd,tad", "--tune=none")  # a comparison of one's own
    assert {s.name for s in students} == {"pd", "tad"} and (spec.tables, spec.tune, spec.seeds) == ((), (), 8)
    assert spec.layout(["pd", "tad"]) == [("Methods", ["pd", "tad"], "pd")]


def test_students_that_differ_in_method_and_settings_alone_share_a_run(tiny, tmp_path):
    argv = ["--seeds=2", f"--data_dir={tiny}/data", f"--methods={','.join(STUDY.methods[:-2])}"]
    labelled = ["--methods=alra@x", "--alra.detach_weights=False", "--alra@x.tau=3"]
    students = [*study(*argv)[1], *study(*argv, *labelled)[1]]
    jobs = compare.shared_runs(students, tmp_path, 99)
    assert [(job.students[0].cfg.seed, len(job.students)) for job in jobs] == [(1, 13), (2, 13), (1, 1), (2, 1)]
    cfg = configure.load(jobs[0].argv[1:])
    assert cfg.methods == tuple(s.name for s in jobs[0].students) and cfg.out_dir == str(tmp_path / jobs[0].name)
    labelled = jobs[2]
    assert configure.load(labelled.argv[1:]).settings_of("alra@x") == {"detach_weights": False, "tau": 3}
    folder, (made,) = tmp_path / labelled.name / "alra@x", labelled.students
    folder.mkdir(parents=True)
    facts = {"made_by_sha256": made.recipe.split()[0], "config": {"max_steps": 2100, "val_max_rows": 256}}
    write_json(folder / "run.json", facts)
    trial = made._replace(stage="tune")  # is known by the rows that judge it, too
    assert compare.finished(tmp_path) == dict.fromkeys((made.recipe, trial.recipe), folder)  # the others have not ended
    assert trial._replace(cfg=dataclasses.replace(made.cfg, val_max_rows=9)).recipe not in compare.finished(tmp_path)
    write_json(folder.parent / "run.json", {"config": {"methods": ["alra@x", "pd"]}})
    assert compare.finished(tmp_path) == {}  # its run goes on, as a whole
    (folder.parent / "pd").mkdir()
    write_json(folder.parent / "pd" / "stopped.json", facts | {"made_by_sha256": "another"})
    assert compare.finished(tmp_path)[made.recipe] == folder
    assert sorted(len(job.students) for job in compare.shared_runs(students, tmp_path, 7)) == [1, 1, 6, 6, 7, 7]


def test_settings_are_those_that_were_chosen_and_equal_flops_mean_more_updates():
    chosen = {"pd": {"lr": 1e-3}, "alra": {"lr": 1e-2, "gamma": 9}}
    _, spec, cfg = compare.arguments(["study/small.py", "--alra.tau=2"])
    settings = {s.name: s.cfg.settings_of(s.name) for s in compare.plan(spec, cfg, chosen)}
    assert settings["pd"] == {"lr": 1e-3} and settings["alra"] == {"tau": 2, "lr": 1e-2, "gamma": 9}
    student, teacher = compare.flops(STUDY)
    longer = compare.at_equal("flops", "pretrain", STUDY)  # no teacher: more updates
    assert longer.schedule_steps == longer.max_steps == pytest.approx(2100 * (student + teacher) / student, rel=0.01)
    assert compare.at_equal("flops", "alra", STUDY) == STUDY == compare.at_equal("updates", "pretrain", STUDY)
    assert compare.at_equal("updates", "pretrain@flops", STUDY) == longer and settings["pretrain@flops"] == {}


def test_a_student_is_known_by_what_made_it_and_how_far_it_came(tiny, tmp_path):
    """That content and code count is in test_train.py and test_identity.py."""
    cfg = world.config(tiny, tmp_path, methods="alra,pd")

    def recipe(name: str, **changes) -> str:
        return compare.PlannedStudent("main", name, dataclasses.replace(cfg, **changes)).recipe

    other = {"hyper": {"pd": {"tau": 2.0}, "alra": {"d_max": 7}}, "val_every_steps": 7, "out_dir": "elsewhere"}
    assert recipe("alra", **other) == recipe("alra") == recipe("alra@x") and recipe("pd", **other) != recipe("pd")
    assert recipe("alra", clip=1.0) != recipe("alra") != recipe("alra", max_steps=5)


@pytest.mark.parametrize(("argv", "message"), [
    *((f"--tune={bad}", f"--tune={bad}: expected lr=RATE,RATE,..") for bad in ("lr=1e-3", "lr=a,b", "pd.tau=1,2", "gamma=1,2", "alra.lr=1,2")),
    ("--tune=alra.gamma=1,5", "--tune=('alra.gamma=1,5',): add --tune=lr=RATE,RATE"),
    ("--tune=lr=1e-3,1e-2 --tune=alra.gama=1,2", "alra takes no gama"),
    ("--reference=tad", "--reference=tad: expected one of pretrain, vanilla_kd, alra"),
    ("--tune=lr=1e-3,1e-3", "--tune=lr=1e-3,1e-3: a value twice"), *((f"{own}--tad.beta=3", "settings of ['tad'], which is not compared") for own in ("", "--methods=pd ")),
    *((f"c.py {text}", says) for text, says in (("'fewer_seeds': {'tad': 1}", "_compare: ['tad'] in tables or fewer_seeds"), ("'at': 'flop'", "_compare: at='flop': expected 'updates' or 'flops'"), ("'tables': (('T', ('pd',), 'alra'),)", "_compare: ['alra'] in tables"))),
    ("--seed=3", "['--seed']: compare.py sets it itself"),
    ("--tunes=x", "--tunes=x: no such key 'tunes'"),
    *((f"--{key}=0", f"--{key}=0: expected at least 1") for key in ("seeds", "jobs", "rows", "per_run", "trial_steps")),
    ("c.py", "_compare: no such key ['seed']"),
])  # fmt: skip
def test_refusals(argv, message, tmp_path):
    file, _, keys = argv.partition(" ")
    given = keys or "'seed': 3"
    (tmp_path / "c.py").write_text(f'methods = ("pd",)\n_compare = {{{given}}}\n')
    with pytest.raises(ValueError, match=re.escape(message)):
        compare.arguments([str(tmp_path / "c.py")] if file == "c.py" else ["config/demo.py", *argv.split()])


@pytest.fixture
def argv(tiny, tmp_path_factory):
    """A tiny comparison on random rows, of which three choose and three are scored; the methods are to be named."""
    tiny = shutil.copytree(
        tiny, tmp_path_factory.mktemp("compare") / "world"
    )  # it stores hidden states beside the rows
    keys = {"max_steps": 3, "schedule_steps": 3, "warmup_steps": 1, "batch_rows": 2, "micro_batch": 1, "val_every_steps": 3,
            "checkpoint_every_steps": 3, "val_max_rows": 3, "log_every_steps": 1}  # fmt: skip
    flags = [f for f in world.flags(tiny, tiny, methods="pd", **keys) if not f.startswith(("--out_dir", "--methods"))]
    return [*flags, "--seeds=2", "--rows=3"]


@pytest.fixture
def quiet(monkeypatch):
    for name in ("study.compare.prepare", "study.compare.signal.signal", "study.report.draw_figures"):
        monkeypatch.setattr(name, lambda *a: [])
    monkeypatch.setattr(train, "catch_signals", lambda: None)


BEGUN = []


def launch(jobs, args) -> dict[str, str]:
    """Runs are made in this process, without the seconds that an import takes; BEGUN has the names of those that began."""
    said = {}
    for job in jobs:
        BEGUN.append(job.name)
        try:
            train.distil(configure.load(job.argv[1:])) if job.argv[0] == "train.py" else ev.main(job.argv[1:])
        except ValueError as error:
            said[job.name] = str(error)
    return said


@pytest.fixture
def begun(quiet, monkeypatch):
    BEGUN.clear()
    monkeypatch.setattr(compare, "launch", launch)
    return BEGUN


def kinds(names: list[str]) -> list[str]:
    return [name.split("_")[0] for name in names]


def lines_of(folder: Path) -> list[dict]:
    return read_lines(folder / "report" / "students.jsonl")


def test_a_comparison_from_trials_to_report_and_nothing_is_made_twice(argv, begun, tmp_path):
    tune = ["--tune=lr=1e-2,1e-1", "--tune=alra.tau=1,4", "--trial_steps=2"]
    argv = [*argv, "--methods=pretrain,alra", f"--out={tmp_path}", *tune]
    assert compare.main(argv) == 0 and kinds(begun) == ["tune", "main", "main", "eval"]
    lines, rates = lines_of(tmp_path), read_lines(tmp_path / "report" / "rates.jsonl")
    assert [(x["method"], x["seed"], x["n_rows"]) for x in lines] == [(m, s, 3) for m in ("pretrain", "alra") for s in (1, 2)]  # fmt: skip
    best = min((x for x in rates if x["method"] == "alra"), key=lambda x: x["val_ce"])
    assert len(rates) == 8 and len({x["val_ce"] for x in rates}) == 8
    a, b, c, d = lines
    assert c["settings"] == d["settings"] == best["settings"] and c["lr"] == best["lr"]
    assert a["init_sha256"] == c["init_sha256"] != b["init_sha256"] == d["init_sha256"]
    cfg = compare.arguments(argv)[2]
    assert [c["student_flops"], c["teacher_flops"]] == [3 * 2 * cfg.seq_len * n for n in compare.flops(cfg)]
    assert "teacher_flops" not in a
    text = (tmp_path / "report" / "README.md").read_text()
    says = "the first 3 held-out rows, which are not scored; the lowest chooses."
    assert "Each method had 4 trials of 2 updates with seed 0." in text and says in text
    scored = ev.open_rows(cfg.data_dir, "val")[0][3:6]  # those after the three that chose
    assert a["rows_sha256"] == hashlib.sha256(scored.tobytes()).hexdigest()
    folder = tmp_path / d["folder"]
    assert (folder / "log.jsonl").is_file() and read_json(folder / "run.json")["seed"] == 2
    begun.clear()
    assert compare.main(argv) == 0 and begun == []  # the same command makes nothing again
    assert (tmp_path / "report" / "README.md").read_text() == text
    more = [word.replace("pretrain,alra", "pretrain,alra,tad") for word in argv]
    # a method more: its own trials and seeds alone
    assert compare.main(more) == 0 and kinds(begun) == ["tune", "main", "main", "eval"]
    made = [read_json(tmp_path / name / "run.json")["config"]["methods"] for name in begun[:3]]
    assert made == [[f"tad@t{i}" for i in range(4)], ["tad"], ["tad"]]
    begun.clear()
    assert compare.main([*more, "--rows=4"]) == 0 and kinds(begun) == ["eval"]  # only scored anew
    assert {x["n_rows"] for x in lines_of(tmp_path)} == {4}


def test_a_folder_of_something_else_is_left_alone(argv, begun, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"--out=.*: contains .*README.md.*, not of compare.py; choose another"):
        compare.main([*argv, "--methods=pretrain", f"--out={tmp_path}"])
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"] and not begun


def test_what_cannot_be_made_or_scored_is_alone_in_the_report(argv, begun, tmp_path, monkeypatch, capsys):
    figures = ev.held_out_figures

    def broken(checkpoints, *more):
        if any(c.name.endswith("alra") for c in checkpoints):
            raise UserError("the weights have diverged")
        return figures(checkpoints, *more)

    monkeypatch.setattr(ev, "held_out_figures", broken)
    argv = [*argv, "--methods=pretrain,alra,tad", "--tad.top_k=9999", "--seeds=1", f"--out={tmp_path}"]
    assert compare.main(argv) == 1 and kinds(begun) == ["main"] * 4 + ["eval"] * 3  # together, then each alone
    lines = {x["method"]: x for x in lines_of(tmp_path)}
    assert lines["alra"]["stopped"] == "the weights have diverged" and lines["pretrain"]["ce"] > 0
    text = (tmp_path / "report" / "README.md").read_text()
    assert "| tad | – | 0 of 1 | – |" in text and text.count("| tad | – | – |") == 2
    told = capsys.readouterr().err
    assert "- tad (seed 1): tad: top_k=9999" in text and "tad (seed 1): no result: tad: top_k=9999" in told
    begun.clear()
    assert compare.main([*argv, "--tune=lr=1e-3,1e-2"]) == 1  # no trial of it has a result either: no seed is tried
    assert not [job for job in begun if job.startswith("main") and "tad" in (tmp_path / f"{job}.py").read_text()]
    tad = lines_of(tmp_path)[-1]
    assert tad["method"] == "tad" and "top_k=9999" in tad["stopped"]
    with pytest.raises(UserError, match=r"val_max_rows=None: these rows choose, later ones are scored"):
        compare.main([*argv, "--val_max_rows=None"])
    with pytest.raises(UserError, match="pretrain, seed 1: neither a result nor an error"):
        compare.write_results(study(*argv)[1], {}, [], tmp_path)


def test_print_gives_commands_that_a_shell_runs(argv, quiet, tmp_path, capsys):
    """Also from a folder with a blank in its name; what they made is found by the next call."""
    argv = [*argv, "--methods=pretrain,tad", "--seeds=1", f"--out={tmp_path / 'a b'}", "--print"]
    for wanted in ("train.py", "eval.py"):
        with pytest.raises(SystemExit) as ending:
            compare.main(argv)
        (line,) = capsys.readouterr().out.splitlines()
        _, script, *words = shlex.split(line)
        assert script == wanted and ending.value.code == 0 and str(tmp_path / "a b") in line
        train.distil(configure.load(words)) if script == "train.py" else ev.main(words)
        capsys.readouterr()
    assert compare.main(argv) == 0 and {x["method"] for x in lines_of(tmp_path / "a b")} == {"pretrain", "tad"}


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_runs(sign, tmp_path, monkeypatch, capsys):
    """The first job would take an hour; the second waits for its turn, and never begins."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "sleep.py").write_text("import sys, time\nopen(sys.argv[1], 'w').close()\ntime.sleep(3600)")
    begun, args = [tmp_path / "first", tmp_path / "second"], argparse.Namespace(out=tmp_path, jobs=1, print=False)
    jobs = [compare.Job(file.name, ["sleep.py", str(file)], []) for file in begun]
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "arguments", lambda argv: (argparse.Namespace(report=False), None, None))
    monkeypatch.setattr(compare, "compare", lambda *a: compare.launch(jobs, args))

    def interrupt():
        while not begun[0].exists():
            time.sleep(0.02)
        os.kill(os.getpid(), sign)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    with pytest.raises(SystemExit if sign == signal.SIGTERM else KeyboardInterrupt):
        compare.main([])
    assert not begun[1].exists()
    assert f"exit code {-signal.SIGTERM}" in capsys.readouterr().out  # ended, and waited for


def compare_here(argv: list[str]) -> None:
    compare.prepare, compare.launch = (lambda *a: None), launch
    compare.main(argv)


@pytest.mark.slow
def test_a_comparison_that_was_killed_ends_in_the_same_tables(argv, begun, tmp_path):
    """Killed in a run, as soon as that one has a checkpoint: scores are seconds away."""
    argv = [*argv, "--methods=pretrain,tad", "--seeds=1", "--checkpoint_every_steps=1"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    world.kill_when(lambda: any(cut.glob("*/*/checkpoints/step_*[1-9]")), compare_here, [*argv, f"--out={cut}"])
    assert not (cut / "report").exists()
    for out in (whole, cut):
        begun.clear()
        assert compare.main([*argv, f"--out={out}"]) == 0
        assert kinds(begun) == ["main", "eval"] and len([*out.glob("main_*.py")]) == 1  # the run that was cut went on
    assert lines_of(cut) == lines_of(whole)


def made_up(folder: Path, ce: dict[str, list[float]], at: str = "updates", **more) -> None:
    """Results of these methods, a CE per seed; KL is 1 less, agreement a tenth of it in reverse. `more` is of the first."""
    same = {"lr": 0.003, "settings": {}, "top5": 0.5, "ece": 0.1, "n_rows": 3, "n_targets": 77, "teacher_ce": 2.0, "step": 300,
            "teacher": "demo/teacher", "teacher_entropy": 1.5, "data_sha256": "d",
            "machine": "a machine", "git_commit": "abc", "versions": {"python": "3"}, "uniform_ce": 8.3, "unigram_ce": 6.1}  # fmt: skip
    lines = [{"method": method, "seed": n, "ce": v, "bits_per_byte": v / 3, "kl": v - 1, "top1": 1 - v / 10, "init_sha256": f"i{n}", **same}
             for method, values in ce.items() for n, v in enumerate(values, 1)]  # fmt: skip
    lines[0] |= more | {"git_commit": None}  # as without git
    results = folder / "report"
    results.mkdir(exist_ok=True)
    write_lines(results / "students.jsonl", lines)
    write_json(results / "settings.json", dataclasses.asdict(STUDY) | {"skip_rows": 256, "at": at, "trial_steps": 150})


def report_of(folder: Path, spec: Spec | None = None) -> str:
    _, said = reports.report(spec or compare.arguments(["study/small.py"])[1], folder)
    assert "one beyond might do better: " in said or "No table of trials" in said  # on the screen too
    return (folder / "report" / "README.md").read_text()


def test_the_report_says_what_the_results_say(tmp_path, quiet):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5, 6.0, 9.0], "alra": [4.0, 3.5, 5.0], "pd": [5.5, 5.5, 6.2], "alra_u": [4.5, 4.5]})  # fmt: skip
    tried = [("pd", 1e-3, 5.0, {}), ("pd", 3e-3, None, {}), ("pd", 3e-2, 4.0, {}), ("alra", 3e-3, 4.5, {"gamma": 1})]
    rates = [{"method": m, "lr": lr, "val_ce": ce, "settings": settings} for m, lr, ce, settings in tried]
    write_lines(tmp_path / "report" / "rates.jsonl", rates)
    text = report_of(tmp_path)
    assert (
        "77 targets in 3 rows; teacher: demo/teacher (CE 2.0000, entropy 1.5000).\nCE to compare with: uniform over"
        in text
    )
    # alra less vanilla_kd: -1, -2, -1: mean -4/3, deviation 1/sqrt(3), t = -4, p = 1 - 4 / sqrt(18), the smallest of three
    p, half = 1 - 4 / math.sqrt(18), T975 / 3
    assert f"| alra | -1.3333 ± {half:.4f}, p {3 * p:.4f} |" in text
    assert "| alra_u | +0.7500 ± 3.1766, p 0.2048 |" in text  # 0.5 and 1.0: held against alra in its own table
    assert f"| vanilla_kd | +1.3333 ± {half:.4f}, p " in text  # and the other methods in another
    assert "| pd | 3 | 5.7333 ± 1.0040 |" in text and "| pd | lr 0.003 | 3 | – | – |" in text
    assert text.count("**4.1667 ± 1.8973**") == 3 and "over n seeds; **best**, *second*." in text
    assert "| pd | 5.0000 | stopped | **4.0000** |" in text and "one beyond might do better: pd, alra." in text
    assert (
        "| alra gamma=1 | – | **4.5000** | – |" in text
        and "150 updates with seed 0. CE in nats per token over the first 256 held-out rows" in text
    )
    # the paper: vanilla_kd 35.13 < pd 35.60 < alra 36.62; ours, over the seeds of all three: pd, vanilla_kd, alra
    assert "| Main results | paper 200m | our CE, nats/token | +0.33, p 1.0000 | – |" in text
    assert "| Main results | vanilla_kd | 3 | 3 | 2 | 2 | 2 |" in text


def test_any_methods_have_a_table_against_a_reference_of_ones_choice(tmp_path, quiet):
    more = {"settings": {"beta": 2.0}, "student_flops": 3e9}
    made_up(tmp_path, {"mine": [5.0, 5.5], "mine@x": [4.0, 4.0]}, at="flops", **more)
    text = report_of(tmp_path, Spec())
    assert "| mine@x | -1.2500 ± 3.1766, p 0.1257 |" in text and "ordering" not in text and "No table of trials" in text
    assert "| mine | lr 0.003, beta 2 | 2 | 3e+09 | – |" in text and "At equal FLOPs" in text
    assert "| mine | +1.2500 ± 3.1766, p 0.1257 |" in report_of(tmp_path, Spec(reference="mine@x"))


def test_stopped_students_are_listed_and_what_has_no_pair_is_not_compared(tmp_path, quiet):
    with pytest.raises(UserError, match=r"students\.jsonl: not there; run the same command without --report first"):
        report_of(tmp_path)
    why = "step 3: gradient norm inf"
    made_up(tmp_path, {"alra": [4.0]}, stopped=why)
    with pytest.raises(UserError, match="no student has a result; alra: step 3"):
        report_of(tmp_path)
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5, 6.0], "alra": [4.0, 3.5, 5.0]}, stopped=why)
    text = report_of(tmp_path)
    assert f"- vanilla_kd (seed 1): {why}" in text and "| vanilla_kd | lr 0.003 | 2 of 3 |" in text
    assert "| alra | -1.5000 ± " in text  # over seeds 2 and 3
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [4.0, 3.5]})
    students = read_lines(file := tmp_path / "report" / "students.jsonl")
    write_lines(file, [x | {"seed": x["seed"] + 2 * (x["method"] == "alra")} for x in students])
    assert "| alra | – | – | – | – | – | – |" in report_of(tmp_path)
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [5.0, 5.1], "pd": [4.0]})
    text = report_of(tmp_path)
    assert "| pd | 1 | 4.0000 | " in text and "| alra | 2 | **5.0500 ± " in text  # one seed is not ranked
    made_up(
        tmp_path, {"vanilla_kd": [5.0], "alra": [4.0], "pd": [6.0], "pretrain": [9.0]}
    )  # theirs: pd before vanilla_kd
    assert "our CE, nats/token | +0.67, p 0.3333 | -1.00, p 1.0000 |" in report_of(tmp_path)


def test_a_report_is_written_anew_byte_for_byte_with_its_figures(tmp_path, monkeypatch):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [4.0, 3.5]})
    students = read_lines(file := tmp_path / "report" / "students.jsonl")
    write_lines(file, [x | {"folder": f"a/{x['method']}@t{x['seed']}"} for x in students])  # a trial made it
    for seed, method in itertools.product((1, 2), ("vanilla_kd", "alra")):
        folder = tmp_path / "a" / f"{method}@t{seed}"
        folder.mkdir(parents=True)
        write_json(folder / "run.json", {"config": {"batch_rows": 4, "seq_len": 8}})
        last = 4.5 - (method == "alra" and seed == 2)
        write_lines(folder / "log.jsonl", [{"step": 1, "ce": 5.0 + seed, "val_ce": 6.0}, {"step": 2, "ce": 4.0, "val_ce": last}])  # fmt: skip
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    argv, before = ["study/small.py", "--report", f"--out={tmp_path}"], []
    for _ in range(2):
        assert compare.main(argv) == 0
        before.append({file.name: file.read_bytes() for file in file.parent.iterdir()})
        for name in ("curves.png", "README.md"):
            file.with_name(name).unlink()
    assert before[0] == before[1] and {"curves.png", "README.md"} <= before[0].keys()
    assert re.findall(r"\]\((.*)\)", before[0]["README.md"].decode()) == ["curves.png"]
    assert "| alra | +0.0000 ± 0.0000 | -0.5000 ± 6.3531 |" in before[0]["README.md"].decode()  # 0 and 0, then 0 and -1
    curves = plot.plt.gcf().axes[0]
    assert list(zip(*curves.get_lines()[0].get_data(), strict=True)) == [(32, 6.5), (64, 4.0)]
    plot.plt.close("all")


@pytest.mark.parametrize("study", ["study", "smollm2"])
def test_the_figures_of_a_committed_study_are_those_of_its_logs(study, monkeypatch):
    monkeypatch.setattr(compare, "flops", lambda cfg: ())  # they need the teacher, which may not be here
    out = world.ROOT / "study" / "results" / study
    for x in lines_of(out):
        cfg = configure.Config(**read_json(out / x["folder"] / "run.json")["config"])
        found = compare.outcome(compare.PlannedStudent("main", x["method"], cfg), out / x["folder"])
        costs = {key: x[key] for key in ("student_flops", "teacher_flops") if key in x}
        assert {"method": x["method"], "seed": cfg.seed, "folder": x["folder"], **found, **costs} == x
    made = [read_json(file) | {"ce": compare.last_val_ce(file.parent)} for file in out.glob("tune_*/*/run.json")]
    rates = read_lines(out / "report" / "rates.jsonl")
    assert len(made) == len(rates)
    for x in rates:
        of_method = [run for run in made if re.sub("[@-]t[0-9]$", "", run["method"]) == x["method"]]
        (ce,) = (run["ce"] for run in of_method if x["settings"].items() <= run["overrides"].items())
        assert ce == x["val_ce"]


@pytest.mark.parametrize(("config", "study"), [("study", "study"), ("study_smollm2", "smollm2")])
def test_a_committed_study_is_written_anew_byte_for_byte_and_readme_quotes_it(config, study, tmp_path):
    out = shutil.copytree(world.ROOT / "study" / "results" / study, tmp_path / study)
    before = {file: file.read_bytes() for file in (out / "report").iterdir()}
    for file in before:
        if file.suffix in (".md", ".png"):
            file.unlink()
    assert compare.main([f"config/{config}.py", "--report", f"--out={out}"]) == 0
    locked = f"matplotlib=={matplotlib.__version__}\n" in (world.ROOT / "requirements.lock").read_text()
    kinds = (".md", ".jsonl", ".json", *((".png",) if locked else ()))  # another matplotlib draws other pixels
    assert {f: f.read_bytes() for f in before if f.suffix in kinds} == {f: b for f, b in before.items() if f.suffix in kinds}  # fmt: skip
    said, report = (world.ROOT / "README.md").read_text(), (out / "report" / "README.md").read_text()
    assert f"](study/results/{study}/report/README.md)" in said
    if study == "study":
        quoted = re.findall(r"^ *(\|.*±.*\|)$", said, re.M)
        assert len(quoted) > 8 and all(line in report for line in quoted)
