"""Comparisons: what is run, resuming after a kill, what is on record, the report's numbers."""

import dataclasses
import functools
import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import matplotlib
import numpy as np
import pandas as pd
import pytest

import configure
import eval as ev
import train
from lib.errors import UserError
from lib.files import append_line, read_json, write_json, write_lines
from lib.stats import estimate, holm, with_half
from model import Qwen2Config
from run import provenance
from run.provenance import content_hash, made_by, record_hash
from run.startup import check_config
from study import compare, record
from study import report as reports
from tests import world
from tests.world import ROOT, read_table, refusal

T975 = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # Student's t with two degrees of freedom, closed form
STUDY = configure.load([f"{ROOT}/study/small.py"])
RESULTS = ROOT / "study/results"
STUDIES = ["small", "smollm2_code", "smollm2", "small_surer", "smollm2_calibrated"]
# a study's configs; of others the one beside the results
CONFIGS = {
    "small": ["study/small.py"],
    "small_surer": ["study/small.py", f"{RESULTS}/small_surer/config.py"],
    "smollm2": [f"{RESULTS}/{name}/config.py" for name in ("smollm2_code", "smollm2")],
}
CONFIGS["smollm2_code"] = CONFIGS["smollm2"][:1]
CONFIGS["smollm2_calibrated"] = [
    *CONFIGS["smollm2_code"],
    f"{RESULTS}/smollm2_calibrated/config.py",
]
WHY = "step 3: gradient norm inf"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def Spec(**changes):
    return compare.Spec(**{"out": Path("out")} | changes)


# 0.04 becomes no less than 2 * 0.03
HOLM = """
[0.01, 0.04, 0.03, 0.005] => [0.03, 0.06, 0.06, 0.02]
[NaN, 0.4, 0.7] => [NaN, 0.8, 0.8]
[0.9, 0.6] => [1.0, 1.0]
[] => []
"""


@pytest.mark.parametrize(("ps", "corrected"), read_table(HOLM))
def test_holm(ps, corrected):
    p = pd.Series(json.loads(ps), dtype=float)
    assert [*holm(p)] == pytest.approx(json.loads(corrected), nan_ok=True)


# --- what is planned


def make_folders(out):
    (out / "runs").mkdir(exist_ok=True)


def planned(*argv: str):
    spec, cfg = compare.arguments(["study/small.py", *argv])
    return spec, compare.plan_students(spec, cfg, {})


def test_all_methods_try_the_same_rates_and_own_settings_at_the_best(monkeypatch):
    asked = []

    def try_points(points, cfg, out):
        asked.append(list(points))
        assert (cfg.max_steps, cfg.schedule_steps, cfg.warmup_steps) == (525, 525, 25)
        return [{"method": m, "settings": x, "val_ce": abs(x["lr"] - 1e-2)} for m, x in points]

    monkeypatch.setattr(compare, "try_points", try_points)
    tune = ["--tune=lr=1e-3,1e-2", "--tune=alra.gamma=1,5", "--tune=alra.tau=1,2"]
    # rld has a rate already, so it is not tried
    trials = "study/results/small_trials/config.py"
    argv = [trials, "--methods=alra,pd,rld", "--rld.lr=0.1", *tune]
    spec, cfg = compare.arguments(argv)
    compare.run_trials(spec, cfg, compare.values_to_try(spec, cfg))
    rates = [(m, {"lr": lr}) for m in ("alra", "pd") for lr in (1e-3, 1e-2)]
    own = [("alra", {"lr": 1e-2, "gamma": g, "tau": t}) for g in (1, 5) for t in (1, 2)]
    assert asked == [rates, [*rates, *own, ("pd", {"lr": 1e-2})]]


def test_one_command_trains_the_teacher_and_the_students_of_a_card(tmp_path, monkeypatch):
    """Its training runs have right configs. A shell script in Python's place writes them down."""
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$0.$$"\n')
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    subprocess.run(["sh", RESULTS / "card/run.sh", "--seq_len=128"], check=True)
    runs = {}
    for file in tmp_path.glob("python3.*"):
        script, *argv = file.read_text().split("\0")[:-1]
        assert script == "train.py"
        cfg = configure.load(argv)
        runs[cfg.out_dir] = cfg
    teacher = runs.pop("out/card/teacher")
    assert sorted(runs) == ["out/card/seed1", "out/card/seed2"]
    for cfg in runs.values():
        assert cfg.out_dir == f"out/card/seed{cfg.seed}" and len(cfg.methods) == 5
        assert cfg.teacher == f"{teacher.out_dir}/pretrain/model"
        assert {cfg.settings_of(name)["lr"] for name in cfg.methods} == {1.32e-3}
        check_config(dataclasses.replace(cfg, teacher=f"{ROOT}/demo/teacher"))
    for cfg in (teacher, *runs.values()):
        assert cfg.seq_len == 128
    check_config(teacher)


def test_a_trial_that_stopped_has_no_ce(tiny, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(compare, "train", lambda students, *_: trained.extend(students))
    monkeypatch.setattr(compare, "on_record", lambda *_: [])
    ended = {1e-3: {"val_ce": 4.0}, 1e-2: {"val_ce": 4.0, "why": WHY}}
    monkeypatch.setattr(compare, "find", lambda s, _: ended[s.settings_of(s.methods[0])["lr"]])
    points = [{"lr": 1e-3}, {"lr": 1e-2}]
    cfg = world.config(tiny, tmp_path, methods="alra")
    trials = compare.try_points([("alra", settings) for settings in points], cfg, Path("out"))
    assert [s.methods for s in trained] == [("alra@t0",), ("alra@t1",)]
    assert [x["val_ce"] for x in trials] == [4.0, None]


def test_flags_override_a_study():
    assert len(planned("--seeds=2")[1]) == 21 * 2
    assert planned("--reference=pd")[0].tables == ()
    spec, students = planned("--methods=pd,tad", "--tune=none")  # the tables are of other methods
    assert {s.methods for s in students} == {("pd",), ("tad",)}
    assert (spec.tables, compare.values_to_try(spec, STUDY), spec.seeds) == ((), {}, 8)


def test_students_that_differ_only_in_method_and_settings_share_a_run(tiny, tmp_path, monkeypatch):
    plain = tuple(m for m in STUDY.methods if "@" not in m)
    argv = ["--seeds=2", f"--data_dir={tiny}/data", f"--methods={','.join(plain)}"]
    argv += ["--max_steps=30", "--schedule_steps=30", "--warmup_steps=3"]
    labelled = ["--methods=alra@x", "--alra.detach_weights=False", "--alra@x.tau=3"]
    students = [*planned(*argv)[1], *planned(*argv, *labelled)[1]]
    make_folders(tmp_path)
    launched = []
    monkeypatch.setattr(compare, "run", lambda script, file: launched.append(str(file)))
    for _ in range(2):  # a command that was cut goes on with the same runs
        compare.train(students, tmp_path)
    assert launched[:4] == launched[4:]
    runs = [configure.load([file]) for file in launched[:4]]
    assert [(cfg.seed, len(cfg.methods)) for cfg in runs] == [(1, 13), (2, 13), (1, 1), (2, 1)]
    assert runs[0].methods == plain
    assert [f"{cfg.out_dir}.py" for cfg in runs] == launched[:4]
    settings = {"detach_weights": False, "tau": 3, "lr": 1.73e-3, "gamma": 5}
    assert runs[2].settings_of("alra@x") == settings


def on_record_as(student, **facts):
    """Return what a file of students has of this one."""
    about = {"name": "x", "method": student.methods[0], "seed": student.seed, "log": []}
    about |= {"config": vars(student), "made_by": made_by(student, student.methods[0])}
    return json.loads(FACTS) | about | facts


def test_a_student_is_known_by_what_made_it_and_how_far_it_came(tiny, tmp_path):
    """What its record holds is in test_train.py and test_identity.py."""
    base = world.config(tiny, tmp_path, methods="alra,pd")

    def changes(seed=1, rows="val2", **keys):
        student = compare.plan_student("alra", base, seed, {})
        facts = on_record_as(student, val_sha256=rows)
        return {*record.changes(dataclasses.replace(student, **keys), facts)}

    assert changes(methods=("alra@x",), val_max_rows=9, out_dir="elsewhere") == set()
    assert changes(rows="val9") == set()
    assert changes(seed=0, rows="val9", val_max_rows=9) == {"val_max_rows", "val_sha256"}
    assert changes(clip=1.0, max_steps=5) == {"clip", "max_steps"}


def test_students_that_differ_from_those_on_record_are_trained_and_told(
    tiny, tmp_path, monkeypatch, printed
):
    cfg = compare.plan_student("pd", world.config(tiny, tmp_path, "--methods=pd"), 1, {})
    make_folders(tmp_path)
    facts = on_record_as(cfg)
    facts["made_by"]["source"]["losses.pd"] = "edited"
    record.write_students(tmp_path, [facts])
    monkeypatch.setattr(compare, "run", mock.Mock())
    compare.train([cfg], tmp_path)
    assert compare.run.called
    assert printed() == "x is not used: edited since: losses.pd\n"


SCORES = {"name": "x", "run": {}, "protocol": {}, "scored": {"rows_sha256": "r"}}
SCORES |= {"kind": "figures", "weights_sha256": "w"}


def finished_run(run):
    """Write a run of ALRA, which has ended, and pre-training. Returns the facts of the latter."""
    for name in ("alra@x", "pretrain"):
        (run / name).mkdir(parents=True)
    facts = json.loads(FACTS) | {"method": "alra@x", "seed": 1, "nominal_tokens": 10}
    untaught = facts | {"made_by": facts["made_by"] | {"teacher_sha256": None}, "why": WHY}
    write_json(run / "run.json", {"config": {"methods": ["alra@x", "pretrain"]}})
    write_json(run / "alra@x/run.json", facts)
    write_lines(run / "alra@x/log.jsonl", LOG)
    write_lines(run / "alra@x/histograms.jsonl", [{"step": 1, "n": 2}])
    write_lines(run / "teacher.jsonl", [{"step": 1, "n": 7}])
    return untaught


LOG = [{"step": 3, "val_ce": 3.0}, {"step": 6, "val_ce": 4.0}, {"step": 6}]


def test_a_student_is_filed_when_its_whole_run_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "flops", lambda cfg: (2.0, 3.0 * cfg.lr))  # the run's lr of 1
    run = tmp_path / "runs/seed1_ab"
    untaught = finished_run(run)
    assert record.on_record(tmp_path) == []  # the run resumes as a whole
    write_json(run / "pretrain/stopped.json", untaught)
    x, stopped = record.on_record(tmp_path)
    assert (x["name"], x["val_ce"], x["teacher_flops"]) == ("alra@x_seed1_ab", 4.0, 30.0)
    budgets = {"histogram": {"step": 1, "n": 2}}
    teacher = {"teacher": {"step": 1, "n": 7}}
    assert x["log"] == [*LOG, budgets, teacher]
    assert (stopped["name"], stopped["why"]) == ("pretrain_seed1_ab", WHY)
    assert "teacher_flops" not in stopped
    figures = {"ce": 3.5, "n_targets": 2, "n_rows": 7}
    append_line(run / "alra@x/results.jsonl", SCORES | {"values": figures})
    x, stopped = record.on_record(tmp_path)
    assert (x["ce"], x["n_rows"], x["rows_sha256"]) == (3.5, 7, "r")
    assert x["scores"] == {"name": "x", "protocol": {}, "kind": "figures", "weights_sha256": "w"}
    shutil.rmtree(run)
    assert record.on_record(tmp_path) == [x, stopped]


def test_figures_count_by_their_rows_teacher_and_dtype(tiny, tmp_path):
    cfg = world.config(tiny, tmp_path, methods="pd", val_max_rows=4)
    rows = np.arange(12, dtype=np.uint32).reshape(3, 4)
    facts = {
        "rows_sha256": hashlib.sha256(bytes(rows)).hexdigest(),
        "teacher_sha256": content_hash(cfg.teacher),
        "scores": {"protocol": {"dtype": "float32"}},
    }
    assert record.is_scored(cfg, facts, rows)
    for change in ({"scores": {}}, {"rows_sha256": "another"}, {"teacher_sha256": "another"}):
        assert not record.is_scored(cfg, facts | change, rows), change
    assert not record.is_scored(cfg, {}, rows) and record.is_scored(cfg, {"why": WHY}, rows)


# --- runs


TINY = (
    "--methods=pd --max_steps=3 --schedule_steps=3 --warmup_steps=1 --batch_rows=2 --micro_batch=1 "
    "--val_every_steps=3 --checkpoint_every_steps=3 --val_max_rows=3 --log_every_steps=1"
)


@pytest.fixture
def argv(tiny, tmp_path_factory):
    """A tiny comparison on random rows: three choose, three are scored. Tests add the methods."""
    # hidden states are stored beside the rows
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("compare") / "world")
    flags = world.flags(folder, folder, TINY)
    flags = [flag for flag in flags if not flag.startswith(("--out_dir", "--methods"))]
    return ["--seeds=2", "--rows=3", *flags]


@pytest.fixture
def quiet(monkeypatch):
    for name in ("study.compare.signal.signal", "study.report.pictures"):
        monkeypatch.setattr(name, lambda *a: [])


BEGUN = []


def run(script, *argv):
    """Run a script in this process, which saves the imports. BEGUN has the names of runs."""
    argv = [*map(str, argv)]
    if script == "prepare.py":
        return 0
    BEGUN.append("eval" if script == "eval.py" else Path(argv[0]).stem)
    try:
        if script == "train.py":
            train.distil(configure.load(argv))
        else:
            ev.main(argv)
    except ValueError as error:
        print(f"exit code 1: {error}")


@pytest.fixture
def compared(quiet, monkeypatch):
    """compared(argv, code) -> the kinds of the runs that a comparison with this end has begun."""
    monkeypatch.setattr(compare, "run", run)

    def compared(argv, code=0):
        BEGUN.clear()
        assert compare.main(argv) == code
        return [name.split("_")[0] for name in BEGUN]

    return compared


def students_of(out):
    """Return the planned students with their facts and figures."""
    return reports.read(out)[1]


def test_a_comparison_from_trials_to_report_and_nothing_is_made_twice(
    argv, compared, tmp_path, monkeypatch
):
    tune = ["--tune=lr=1e-2,1e-1", "--tune=alra.tau=1,4", "--trial_steps=2"]
    argv = [*argv, "--methods=pretrain,alra", f"--out={tmp_path}", *tune]
    monkeypatch.setattr("lib.device.git_commit", lambda: "a+b")
    assert compared(argv) == ["seed0", "seed0", "seed1", "seed2", "eval"]
    students = students_of(tmp_path)
    made = [(x["method"], x["seed"], x["n_rows"]) for x in students]
    assert made == [(m, seed, 3) for m in ("pretrain", "alra") for seed in (1, 2)]
    trials = read_json(tmp_path / "plan.json")["trials"]
    # alra's default is a tau of 1
    assert [x["method"] for x in trials] == ["pretrain", "pretrain", "alra", "alra", "alra"]
    assert len({x["val_ce"] for x in trials}) == 5
    best = reports.best_settings(trials)["alra"]
    a, b, c, d = students
    assert c["overrides"] == d["overrides"] == best
    assert a["init_sha256"] == c["init_sha256"] != b["init_sha256"] == d["init_sha256"]
    cfg = compare.arguments(argv)[1]
    text = (tmp_path / "README.md").read_text()
    assert "| alra † | " in text
    scored = compare.open_rows(cfg.data_dir, "val")[0][3:6]  # those after the three that chose
    assert a["rows_sha256"] == hashlib.sha256(scored.tobytes()).hexdigest()
    assert compared(argv) == []  # the same command makes nothing again
    assert (tmp_path / "README.md").read_text() == text
    # others: trials of tad alone, as pd has a rate
    more = [*argv, "--methods=pretrain,alra,tad,pd", "--pd.lr=0.01"]
    assert compared(more) == ["seed0", "seed1", "seed2", "eval"]
    runs = [read_json(tmp_path / "runs" / name / "run.json") for name in BEGUN[:3]]
    assert [run["config"]["seed"] for run in runs] == [0, 1, 2]
    assert [run["config"]["methods"] for run in runs[1:]] == [["tad", "pd"]] * 2
    assert compared([*more, "--rows=4"]) == ["eval"]  # only scored anew
    assert {x["n_rows"] for x in students_of(tmp_path)} == {4}


def test_what_cannot_be_made_is_in_the_report(argv, compared, tmp_path, monkeypatch, capsys):
    def open_teacher(cfg, *more):
        if "tad" in cfg.methods[0]:
            raise UserError("no teacher")
        return opened(cfg, *more)

    opened = train.open_teacher
    monkeypatch.setattr(train, "open_teacher", open_teacher)
    argv = [*argv, "--seeds=1", f"--out={tmp_path}", "--methods=pretrain,tad@x"]
    argv += ["--tune=lr=1e-2", "--pretrain.lr=0.01"]
    # the second time after the others of all trials; then tad has no rate
    assert compared(argv, 1) == ["seed0", "seed0", "seed1", "eval"]
    _, (student,), _, failed, _ = reports.read(tmp_path)
    assert student["method"] == "pretrain"
    why = "- tad@x (seed 1): no result; see what its runs have printed"
    assert failed == [why]
    facts = record.read_students(tmp_path)
    for x in facts:
        x["config"]["max_steps"] = 99
    record.write_students(tmp_path, facts)
    shorter = f"- pretrain (seed 1): ended after {student['step']} of 99 updates"
    assert reports.read(tmp_path)[-1] == [shorter]
    text, trials = (tmp_path / "README.md").read_text().split("## Trials")
    assert "| tad@x |" not in text and why in text
    assert "| tad@x | stopped |" in trials
    screen = capsys.readouterr()
    assert "exit code 1: no teacher" in screen.out and why in screen.out
    with refusal(r"val_max_rows=None: trials use these rows, scores the later ones"):
        compare.main([*argv, "--val_max_rows=None"])


def test_a_signal_ends_the_run(tmp_path, monkeypatch):
    """It ends its process, and waits for it. Python itself raises an error at Ctrl-C."""

    def wait():
        if not process.terminate.called:
            signal.raise_signal(signal.SIGTERM)

    process = mock.Mock()
    process.wait.side_effect = wait
    monkeypatch.setattr(compare.subprocess, "Popen", lambda command: process)
    with pytest.raises(SystemExit):
        compare.main(["config/demo.py", f"--out={tmp_path}/out"])
    assert process.mock_calls == [mock.call.wait(), mock.call.terminate(), mock.call.wait()]


# --- the report


FACTS = """{
"teacher": "demo/teacher", "teacher_ce": 2.0, "teacher_entropy": 1.5, "n_rows": 3, "n_targets": 77,
"uniform_ce": 8.3, "unigram_ce": 6.1, "top5": 0.5, "ece": 0.1, "step": 300,
"machine": "a machine", "git_commit": "abc", "scores": {"git_commit": "def"}, "student_flops": 0,
"config": {"lr": 1.0, "batch_rows": 4, "seq_len": 8, "seed": 1, "max_steps": 9, "val_max_rows": 2},
"overrides": {"lr": 0.003}, "val_ce": 4.5, "made_by": {"lr": 0.01, "teacher_sha256": "t",
"hyper": {"w_kd": 0.5, "pair": "none", "lr": 0.003}}
}"""


TRIALS = """[
{"method": "pd", "settings": {"lr": 0.001}, "val_ce": 5.0},
{"method": "pd", "settings": {"lr": 0.003}, "val_ce": null},
{"method": "pd", "settings": {"lr": 0.03}, "val_ce": 4.0},
{"method": "alra", "settings": {"gamma": 1, "lr": 0.03}, "val_ce": 4.5}
]"""


def made_up(out, ces, trials=(), **first):
    """Write results of these methods, a CE per seed. `first` overrides facts of the first student.

    KL is 1 less than CE; agreement is 1 less a tenth of it.
    """
    facts = json.loads(FACTS)
    make_folders(out)
    students = []
    lines = []
    first = {"git_commit": None} | first  # as without git
    for method, values in ces.items():
        for seed, ce in enumerate(values, 1):
            name = f"{method}_seed{seed}"
            figures = {"ce": ce, "bits_per_byte": ce / 3, "kl": ce - 1, "top1": 1 - ce / 10}
            about = {"method": method, "seed": seed, "name": name}
            students.append(facts | about | figures | first | {"log": []})
            lines.append(about)
            first = {}
    record.write_students(out, students)
    plan = {"config": dataclasses.asdict(STUDY), "trial_steps": 150}
    write_json(out / "plan.json", plan | {"students": lines, "trials": list(trials)})


def change_plan(out, change):
    """Replace the students of plan.json by what `change` makes of them."""
    plan = read_json(out / "plan.json")
    write_json(out / "plan.json", plan | {"students": change(plan["students"])})


def report_of(out, spec=None):
    spec = spec or compare.arguments(["study/small.py"])[0]
    _, screen = reports.report(SimpleNamespace(**vars(spec) | {"out": out}))
    assert "Chosen:" in screen or "No trials are on record" in screen
    return (out / "README.md").read_text()


def test_the_report_says_what_the_results_say(tmp_path, quiet):
    ces = {
        "vanilla_kd": [5.0, 5.5, 6.0, 9.0],
        "alra": [4.0, 3.5, 5.0],
        "pd": [5.5, 5.5, 6.2],
        "alra_u": [4.5, 4.5],
    }
    made_up(tmp_path, ces, json.loads(TRIALS))
    text = report_of(tmp_path)
    teacher = "teacher: demo/teacher (CE 2.0000, entropy 1.5000)"
    assert f"77 targets in 3 rows; {teacher}.\nCE to compare with: uniform over" in text
    # alra less vanilla_kd: -1, -2, -1: mean -4/3, deviation 1/sqrt(3), t = -4; least p of three
    p, half = 1 - 4 / math.sqrt(18), T975 / 3
    assert f"| alra | -1.3333 ± {half:.4f}, p {3 * p:.4f} |" in text
    assert "| alra_u | +0.7500 ± 3.1766, p 0.2048 |" in text  # against alra in its own table
    assert f"| vanilla_kd | +1.3333 ± {half:.4f}, p " in text  # and the other methods in another
    assert "| pd | 3 | 5.7333 ± 1.0040 |" in text
    row = "| lr 0.003, pair none, w_kd 0.5 | 0 | 0 | abc | def | 1, 2, 3 | 5.5000, 5.5000, 6.2000 |"
    assert f"| pd {row} pd_seed1, pd_seed2, pd_seed3 |" in text
    assert "seeds, p and interval have one degree of freedom" in text  # alra_u
    assert text.count("**4.1667 ± 1.8973**") == 3
    assert "over n seeds; **best**, *second*." in text
    assert "| pd | 5.0000 | stopped | **4.0000** |" in text
    assert "- pd: lr 0.03 (3 trials)\n" in text
    assert "The rate of pd, alra is the lowest or highest tried" in text
    assert "| alra gamma 1 | – | – | **4.5000** |" in text
    assert "150 updates. CE in nats per token over the first 256 held-out rows" in text


def test_any_methods_have_a_table_against_a_reference_of_ones_choice(tmp_path, quiet):
    made_up(tmp_path, {"mine": [5.0, 5.5], "mine@flops": [4.0, 4.0]}, git_commit="a+b")
    text = report_of(tmp_path, Spec())
    assert "| mine@flops | -1.2500 ± 3.1766, p 0.1257 |" in text
    other = report_of(tmp_path, Spec(reference="mine@flops"))
    assert "| mine † | +1.2500 ± 3.1766, p 0.1257 |" in other


def test_a_report_needs_a_result(tmp_path, quiet):
    message = r"plan\.json: cannot be used .*; run the same command without --report"
    with refusal(message):
        report_of(tmp_path)
    made_up(tmp_path, {"alra": [4.0]}, why=WHY)
    with refusal(r"no student has a result .*alra .seed 1.: step 3"):
        report_of(tmp_path)


def test_students_without_a_result_are_listed_and_left_out(tmp_path, quiet):
    """ALRA's and its reference's have seeds 2 and 3 in common."""
    ces = {"vanilla_kd": [5.0, 5.5, 6.0, 9.0], "alra": [4.0, 3.5, 5.0, 1.0]}
    made_up(tmp_path, ces, why=WHY)
    change_plan(tmp_path, lambda students: [*students[:-1], students[-1] | {"name": None}])
    text = report_of(tmp_path)
    assert f"- vanilla_kd (seed 1): {WHY}" in text
    assert "- alra (seed 4): no result; see what its runs have printed" in text
    assert "| 2, 3, 4 | 5.5000, 6.0000, 9.0000 | vanilla_kd_seed2, " in text
    assert "| alra | -1.5000 ± " in text


def test_methods_of_equal_settings_may_share_a_student(tmp_path, quiet):
    made_up(tmp_path, {"alra": [4.0, 3.5]})
    change_plan(tmp_path, lambda x: [x[0], x[0] | {"method": "alra@same"}])
    assert "\n| alra@same | 4.0000 | " in report_of(tmp_path, Spec())


def test_what_has_no_pair_is_not_compared_and_one_seed_is_not_ranked(tmp_path, quiet):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [5.0, 5.1], "pd": [4.0]})
    text = report_of(tmp_path)
    assert "| pd | 1 | 4.0000 | " in text
    assert "| alra | 2 | **5.0500 ± " in text
    change_plan(tmp_path, lambda x: [*x[:2], x[2] | {"seed": 3}, x[3] | {"seed": 4}])
    assert "| alra | – | – | – | – | – | – |" in report_of(tmp_path)


# --- the committed studies


@pytest.mark.parametrize("study, search", [("small", "small"), ("smollm2_code", "smollm2")])
def test_the_search_of_a_study_tries_the_rates_on_record(study, search, monkeypatch):
    monkeypatch.setattr(compare, "check_config", lambda _: None)
    spec, cfg = compare.arguments([f"{RESULTS}/{search}_trials/config.py"])
    rates = compare.values_to_try(spec, cfg)[""]["lr"]
    tuned = [m for m in cfg.methods if "lr" not in cfg.settings_of(m)]
    for x in read_json(RESULTS / study / "plan.json")["trials"]:
        assert x["method"] in tuned
        assert x["settings"]["lr"] in rates


@pytest.mark.parametrize("study", STUDIES)
def test_a_committed_study_is_what_its_command_makes_which_trains_nothing(study, monkeypatch):
    """On the rows and with the teacher that its students had."""
    out = RESULTS / study
    plan = read_json(out / "plan.json")
    planned = compare.plan_students(*compare.arguments(CONFIGS[study]), {})
    named = {(x["method"], x["seed"]) for x in plan["students"]}
    assert {(x.methods[0], x.seed) for x in planned} == named
    facts = record.read_students(out)
    tried = sorted(x["val_ce"] for x in facts if x["seed"] == 0)
    assert tried == sorted(x["val_ce"] for x in plan["trials"])
    keys = {(record_hash(x["made_by"]), x["step"]) for x in facts}
    assert len(keys) == len(facts)  # no student is there twice

    teacher = {x["made_by"]["teacher_sha256"] for x in facts} - {None}
    made = facts[0]["made_by"]
    # without `train_rows`, as many as study A has; older records have no order of rows
    n_rows = plan["config"]["train_rows"] or 18_180
    rows = {"sha256": made["data_sha256"], "rows": n_rows}
    rows |= {"tokenizer_sha256": made["tokenizer_sha256"]}
    monkeypatch.setattr(provenance, "read_manifest", lambda *_: rows)
    monkeypatch.setattr(provenance, "content_hash", lambda name: name and max(teacher))
    monkeypatch.setattr(provenance, "student_shape", lambda _: Qwen2Config(**made["shape"]))
    record_of = functools.cache(lambda student: made_by(student, student.methods[0]))
    for module in (record, compare):
        monkeypatch.setattr(module, "record_of", record_of)
    monkeypatch.setattr(compare, "check_config", lambda _: None)
    trained = mock.Mock()
    monkeypatch.setattr(compare, "run", trained)
    spec, cfg = compare.arguments([*CONFIGS[study], f"--out={out}", "--seeds=1"])
    trials = compare.run_trials(spec, cfg, compare.values_to_try(spec, cfg))
    compare.train(compare.plan_students(spec, cfg, reports.best_settings(trials)), out)
    trained.assert_not_called()


@pytest.mark.parametrize("study", STUDIES)
def test_a_committed_study_is_written_anew_byte_for_byte(study, tmp_path):
    out = shutil.copytree(RESULTS / study, tmp_path / study)
    locked = f"matplotlib=={matplotlib.__version__}\n" in (ROOT / "requirements.lock").read_text()
    before = {}
    for file in (*out.glob("*.md"), *out.glob("*.png")):
        if file.suffix == ".md" or locked:  # another matplotlib draws other pixels
            before[file] = file.read_bytes()
        file.unlink()
    assert compare.main([*CONFIGS[study], "--report", f"--out={out}"]) == 0
    assert {file: file.read_bytes() for file in before} == before


def test_readme_quotes_the_reports():
    readme = (ROOT / "README.md").read_text()
    for study in STUDIES:
        assert f"](results/{study}/README.md)" in (ROOT / "study/README.md").read_text()
    methods = ("pretrain", "vanilla_kd@kl", "pd", "alra", "alra@ce", "fixed_9")
    rows = readme[readme.index("| held-out CE minus") :].splitlines()[2 : 2 + len(methods)]
    for at, study in zip((2, 4), STUDIES[:2], strict=True):
        _, students, others, *_ = reports.read(RESULTS / study)
        ces = {}  # method -> seed -> CE
        for x in (*others, *students):  # the second one of a method and seed counts
            ces.setdefault(x["method"], {})[x["seed"]] = x["ce"]
        for method, row in zip(methods, rows, strict=True):
            cells = [cell.strip() for cell in row.split("|")[1:-1]]
            if method in ces:
                ours, theirs = (pd.Series(ces[name]) for name in (method, "vanilla_kd"))
                e = estimate(pd.DataFrame({"": ours - theirs}))
                assert cells[at - 1 : at + 1] == [str(e["n"][""]), with_half(e, 2, "+")[""]]


def test_numbers_of_the_prose_come_from_records():
    """From the tables of the reports, or from students of two.

    A number without an interval may be among theirs by chance.
    """
    ces = {}  # by study, method and gamma: seed -> CE
    for study in STUDIES:
        _, students, others, *_ = reports.read(RESULTS / study)
        for x in (*others, *students):
            key = study, x["method"], x["made_by"]["hyper"].get("gamma")
            ces.setdefault(key, {})[x["seed"]] = x["ce"]

    def lead(study, seeds, gamma=5.0):
        """Return vanilla KD's CE less ALRA's, by seed."""
        plain = ces[study, "vanilla_kd", None]
        return pd.Series({n: plain[n] - ces[study, "alra", gamma][n] for n in seeds})

    planned = range(1, 6)
    seeds = (1, 2, 3)
    as_it_is = lead("small", seeds), lead("smollm2_code", seeds)
    changed = lead("small_surer", seeds), lead("smollm2_calibrated", seeds)
    computed = [lead("small", planned), lead("small", planned, gamma=1.0), *as_it_is]
    computed += [new - old for new, old in zip(changed, as_it_is, strict=True)]
    cells = [f"{with_half(estimate(x.to_frame()), 6)[0]}" for x in computed]
    texts = [(RESULTS / study / "README.md").read_text() for study in STUDIES]
    pairs = []
    for text in (*texts, *cells):
        pairs += re.findall(r"(\d+\.\d+) ± (\d+\.\d+)", text)
    alone = [x for text in texts for x in re.findall(r"\d+\.\d+", text.partition("\n| ")[2])]
    readme = (ROOT / "README.md").read_text()
    prose = [readme[readme.index("## Results") :], (ROOT / "study/README.md").read_text()]
    for text in (*prose, *(text.partition("\nWritten by")[0] for text in texts)):
        for value, half in re.findall(
            r"(?<![\w.])(\d+\.\d\d+)(?: ± (\d+\.\d+))?(?![\w.]*\d)", text
        ):
            n = len(value.partition(".")[2])
            rounded = [
                [round(float(x), n) for x in pair] for pair in (pairs if half else zip(alone))
            ]
            assert [float(x) for x in (value, half) if x] in rounded, f"{value} ± {half}"


@pytest.mark.parametrize("log", [[], [{"step": 3, "val_ce": 3.0}, {"step": 6}]])
def test_a_trial_whose_log_is_cut_or_gone_has_not_stopped(log, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "flops", lambda cfg: (2.0, 3.0))
    finished_run(tmp_path / "seed1_ab")
    write_lines(tmp_path / "seed1_ab/alra@x/log.jsonl", log)
    with refusal("log.jsonl: lacks the last held-out CE; restore it, or delete .*seed1_ab"):
        record.read_student(tmp_path / "seed1_ab/alra@x/run.json")
