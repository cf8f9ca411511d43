"""The replication: what is run, that a killed one goes on, and every number of its report."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import configure
import replicate
from lib import tables

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# --- statistics ------------------------------------------------------------------------------------------------

T975 = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # Student's t of two degrees of freedom, in closed form


def test_paired_t_test_and_interval_against_closed_forms():
    assert replicate.p_value([1.0, 3.0]) == pytest.approx(
        1 - 2 / math.pi * math.atan(2)
    )  # t = 2, one degree of freedom
    t = 2 / (1 / math.sqrt(3))  # mean 2, deviation 1, three pairs
    assert replicate.p_value([3.0, 1.0, 2.0]) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert replicate.p_value([-3.0, -1.0, -2.0]) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert tables.half({1: 3.0, 2: 1.0, 3: 2.0}) == pytest.approx(T975 / math.sqrt(3), rel=1e-9)
    assert replicate.p_value([0.7]) is None
    assert replicate.p_value([0.0, 0.0]) == 1.0 and replicate.p_value([0.5, 0.5]) == 0.0


def test_differences_are_paired_by_seed():
    mine = {1: {"top1": 0.5}, 2: {"top1": 0.25}, 3: {"top1": 0.1}}
    first = {3: {"top1": 0.3}, 1: {"top1": 0.25}}
    assert replicate.paired(mine, first, "top1") == pytest.approx({1: 25.0, 3: -20.0})  # per cent


def test_holm_by_hand():
    # 4 * 0.005, 3 * 0.01, 2 * 0.03, and 0.04 no smaller than the one before
    assert replicate.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert replicate.holm([None, 0.4, 0.7]) == [None, 0.8, 0.8]
    assert replicate.holm([0.9, 0.6]) == [1.0, 1.0] and replicate.holm([]) == []


# --- what is run -----------------------------------------------------------------------------------------------


def test_rates_climb_until_both_neighbours_of_the_best_are_known():
    inf = math.inf
    assert replicate.next_rates({"a": {}, "b": {}}) == {1e-3: ["a", "b"], 3e-3: ["a", "b"], 1e-2: ["a", "b"]}
    found = {"in": {1e-3: 5.0, 3e-3: 4.0, 1e-2: 6.0}, "up": {1e-3: 5.0, 3e-3: 4.0, 1e-2: 3.0},
             "down": {1e-3: 5.0, 3e-3: 6.0, 1e-2: inf}}  # fmt: skip
    assert replicate.next_rates(found) == {3e-2: ["up"], 3e-4: ["down"]}
    found["up"][3e-2], found["down"][3e-4] = 2.0, 7.0
    assert replicate.next_rates(found) == {}  # at the end of the ladder, and between two worse ones


def test_every_method_and_variant_is_run_once_per_seed_and_shares_what_it_can():
    runs = replicate.plan(Path("o"), [], {}, range(1, 4), ())
    students = [(r.seed, r.settings, m) for r in runs for m in r.methods]
    assert len(students) == len(set(students)) == 3 * 35
    assert [(r.settings, len(r.methods)) for r in runs if r.seed == 2] == [("main", 20), ("detach", 1), ("group4", 4), ("group16", 4), ("long", 6)]  # fmt: skip
    wanted = {me for _, _, rows in replicate.layout() for _, *both in rows for me in both}
    assert {(s, m) for _, s, m in students} == wanted
    slow = dict.fromkeys(runs[0].methods[:9], 1e-3) | {"alra": 1e-2, "pd": 3e-3}
    runs = replicate.plan(Path("o"), [], slow, range(2, 3), ())
    of = {m: r.lr for r in runs if r.settings == "main" for m in r.methods}
    assert of == {**slow, **{m: 1e-2 for m in of if m not in slow}} and of["fixed_3"] == 1e-2
    assert {r.lr for r in runs if r.settings == "detach"} == {1e-2} and len({r.folder for r in runs}) == len(runs)
    assert [(r.settings, r.methods) for r in replicate.plan(Path("o"), [], slow, range(1, 2), ("pd", "alra_u"))] == [
        ("main", ("pd",)),
        ("main", ("alra_u",)),
    ]


def test_longer_runs_are_made_only_where_they_are_longer():
    steps = {r.settings: r.steps for r in replicate.plan(Path("o"), [], {}, range(1, 2), ())}
    assert steps["long"] == 4 * steps["main"] and steps["main"] == steps["group16"]
    quick = replicate.plan(Path("o"), list(replicate.QUICK), {}, range(1, 3), ())
    assert {r.settings for r in quick} == {"main", "detach", "group4", "group16"} and {r.steps for r in quick} == {200}


def test_a_run_is_what_its_config_says_and_only_one_seed_counts_histograms():
    first, second = replicate.plan(Path("o"), ["--max_steps=7"], {"pd": 1e-2}, range(1, 3), ("pd",))
    cfg, other = (configure.load(r.argv()[1:]).config for r in (first, second))
    assert (cfg.seed, cfg.lr, cfg.min_lr, cfg.methods, cfg.max_steps) == (1, 1e-2, 1e-3, ("pd",), 7)
    assert cfg.shuffle and cfg.histogram_every_steps and other.histogram_every_steps is None and other.seed == 2
    paper = {"beta1": 0.9, "beta2": 0.98, "adam_eps": 1e-6, "weight_decay": 1e-2, "clip": 0.5, "batch_rows": 16}
    assert {k: getattr(cfg, k) for k in paper} == paper


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed=3"], "--seed=3: this the replication sets itself"),
        (["--lr=1e-3"], "--lr=1e-3: this the replication sets itself"),
        (["config/demo.py"], "config/demo.py: expected --key=value"),
        (["--seeds=-1"], "--seeds -1: expected at least 1"),
        (["--report", "--reslts=x"], "--reslts=x: --report makes no runs"),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(replicate.ReplicateError, match=re.escape(message)):
        replicate.arguments(argv)


def test_a_folder_keeps_to_its_settings(tmp_path):
    for _ in range(2):
        replicate.same_settings(tmp_path, ["--max_steps=7"], 5)
    with pytest.raises(replicate.ReplicateError, match=r"main\.max_steps=7 there, 11 here"):
        replicate.same_settings(tmp_path, ["--max_steps=11"], 5)
    with pytest.raises(replicate.ReplicateError, match=r"rows of eval\.py"):
        replicate.same_settings(tmp_path, ["--max_steps=7"], 3)


# --- the report ------------------------------------------------------------------------------------------------


def made_up(folder: Path, ce: dict[str, list[float]], **more) -> None:
    """Results of these methods, a CE per seed; KL is 1 less, agreement a tenth of it in reverse."""
    lines = []
    for method, values in ce.items():
        for seed, v in enumerate(values, 1):
            lines.append({"settings": "main", "method": method, "lr": 0.003, "seed": seed, "ce": v, "bits_per_byte": v / 3, "kl": v - 1,
                          "top1": 1 - v / 10, "top5": 0.5, "ece": 0.1, "n_rows": 3, "n_targets": 77, "teacher_ce": 2.0, "step": 300,
                          "teacher_entropy": 1.5, "init_sha256": f"i{seed}", "data_sha256": "d", "wall_sec": 60.0, "students_in_run": 3,
                          "hardware": "a machine", "git_commit": "abc", "versions": {"python": "3"}})  # fmt: skip
    lines[0] |= more
    replicate.write_lines(folder / "results.jsonl", lines)
    replicate.same_settings(folder, [], 3)


def test_the_report_says_what_the_results_say(tmp_path):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5, 6.0], "alra": [4.0, 3.5, 5.0], "pd": [5.5, 5.5, 6.2], "alra_r": [4.5, 4.5, 4.8]})  # fmt: skip
    rates = [{"method": "pd", "lr": lr, "val_ce": ce} for lr, ce in ((1e-3, 5.0), (3e-3, None), (3e-2, 4.0))]
    replicate.write_lines(tmp_path / "rates.jsonl", rates)
    replicate.report(tmp_path, tmp_path, draw=False)
    text, sheet = (tmp_path / "README.md").read_text(), (tmp_path / "tables.csv").read_text().splitlines()
    # alra less vanilla_kd: -1, -2, -1: mean -4/3, deviation 1/sqrt(3), t = -4, p = 1 - 4 / sqrt(18), the smaller of two
    p, half = 1 - 4 / math.sqrt(18), T975 / 3
    assert f"main,alra,ce,3,,,vanilla_kd,-1.33333,{-4 / 3 - half:.6g},{-4 / 3 + half:.6g},{p:.6g},{2 * p:.6g}" in sheet
    assert f"| alra | vanilla_kd | -1.3333 ± {half:.4f} | {2 * p:.4f} |" in text
    assert "| alra_r | alra | +0.4333" in text  # 0.5, 1.0, -0.2: held against alra in its own table
    assert "| pd | 0.003 | 3 | 5.7333 ± 1.0040 |" in text and text.count("**4.1667 ± 1.8973**") == 2
    assert "| pd | 5.0000 | stopped | **4.0000** |" in text and "a rate beyond might do better: pd." in text
    # the paper: vanilla_kd 35.13 < pd 35.60 < alra 36.62; ours: pd, vanilla_kd, alra; only pd is surely behind alra
    assert "| Main results | 200m | CE, nats/token | +0.33 | 1.0000 | 2 (1) | 1 (0) |" in text
    assert "| Main results | vanilla_kd | 3 | 3 | 2 | 2 | 2 |" in text
    assert len(text.splitlines()) > 40 and not (tmp_path / "curves.png").exists()


def test_students_that_stopped_are_told_and_left_out(tmp_path):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5, 6.0], "alra": [4.0, 3.5, 5.0]}, stopped="step 3: gradient norm inf")
    replicate.report(tmp_path, tmp_path, draw=False)
    text = (tmp_path / "README.md").read_text()
    assert "- vanilla_kd (main, seed 1): step 3: gradient norm inf" in text and "| vanilla_kd | 0.003 | 2 |" in text
    assert "main,alra,ce,2,,,vanilla_kd,-1.5," in (tmp_path / "tables.csv").read_text()


def test_nothing_is_reported_where_all_stopped_nor_compared_where_no_seed_is_shared(tmp_path):
    made_up(tmp_path, {"alra": [4.0]}, stopped="step 3: gradient norm inf")
    with pytest.raises(replicate.ReplicateError, match="all students stopped, alra since step 3"):
        replicate.report(tmp_path, tmp_path, draw=False)
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [4.0, 3.5]})
    lines = replicate.read_lines(tmp_path / "results.jsonl")
    for line in lines:
        line["seed"] += 2 * (line["method"] == "alra")
        line["init_sha256"] = str(line["seed"])
    replicate.write_lines(tmp_path / "results.jsonl", lines)
    replicate.report(tmp_path, tmp_path, draw=False)
    assert "| alra | 0.003 | 2 |" in (tmp_path / "README.md").read_text()
    sheet = (tmp_path / "tables.csv").read_text()
    assert "main,alra,ce,2," in sheet and ",vanilla_kd," not in sheet.replace("main,vanilla_kd,", "")


@pytest.mark.parametrize(("key", "value"), [("init_sha256", "other"), ("data_sha256", "other"), ("step", 299)])
def test_what_cannot_be_compared_is_refused(key, value, tmp_path):
    made_up(tmp_path, {"vanilla_kd": [5.0, 5.5], "alra": [4.0, 3.5]}, **{key: value})
    with pytest.raises(replicate.ReplicateError, match=f"{key}.*cannot be compared"):
        replicate.report(tmp_path, tmp_path, draw=False)


def test_no_results_no_report(tmp_path):
    with pytest.raises(replicate.ReplicateError, match=r"first: python replicate\.py"):
        replicate.report(tmp_path, tmp_path)


@pytest.mark.skipif(
    not (ROOT / "results" / "replication" / "results.jsonl").is_file(), reason="results/replication/ has no results yet"
)
def test_the_committed_report_comes_out_of_the_committed_logs(tmp_path):
    replicate.report(ROOT / "results" / "replication", tmp_path, draw=False)
    for name in ("README.md", "tables.csv"):
        assert (tmp_path / name).read_bytes() == (ROOT / "results" / "replication" / name).read_bytes(), name


# --- the path --------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_children_and_is_told_by_the_guard(tmp_path, monkeypatch):
    """It goes up to where every script tells it, and leaves nobody at work."""
    (tmp_path / "logs").mkdir()
    children, popen = [], subprocess.Popen
    monkeypatch.setattr(
        replicate.subprocess, "Popen", lambda *a, **kw: children.append(popen(*a, **kw)) or children[-1]
    )

    def ctrl_c(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(replicate.time, "sleep", ctrl_c)
    job = replicate.Job("endless", ["-c", "import signal; signal.pause()"])
    with (tmp_path / "lock").open("w") as lock, pytest.raises(KeyboardInterrupt):
        replicate.work([job, job], tmp_path, 2, None, lock)
    assert [child.returncode for child in children] == [-signal.SIGTERM] * 2
    assert [line["rc"] for line in replicate.read_lines(tmp_path / "runs.jsonl")] == [None, None]


WAITS = """
import pathlib, sys, time
if any(a.endswith("train.py") for a in sys.orig_argv) and "--seed=2" in sys.orig_argv:
    pathlib.Path({begun!r}).touch()
    time.sleep(3600)
"""


@pytest.mark.slow
def test_a_killed_replication_goes_on_and_ends_in_a_report(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 40)
    argv = [sys.executable, "replicate.py", "--quick", "--methods=pretrain,pd", "--max_steps=3", "--schedule_steps=3", "--warmup_steps=1",
            f"--source={tmp_path / 'text'}", f"--data_dir={tmp_path / 'data'}", f"--out={tmp_path / 'out'}", "--rows=3", "--val_max_rows=2",
            "--seq_len=31", "--histogram_every_steps=1", "--device=cpu"]  # fmt: skip
    out, runs, begun = tmp_path / "out", tmp_path / "out" / "runs.jsonl", tmp_path / "begun"
    (tmp_path / "sitecustomize.py").write_text(WAITS.format(begun=str(begun)))  # Python imports it at its start
    first = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True)  # fmt: skip
    while not begun.exists() and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)  # the first run has ended, the second has begun and cannot end
    _, said = first.communicate(timeout=600)
    assert first.returncode == 143, said
    before = replicate.read_lines(runs)
    assert [(x["run"], x["rc"]) for x in before] == [("main_lr0.003_seed1", 0), ("main_lr0.003_seed2", None)]
    made = (out / "main_lr0.003_seed1" / "pd" / "run.json").stat().st_mtime_ns
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (out / "main_lr0.003_seed1" / "pd" / "run.json").stat().st_mtime_ns == made  # not run again
    lines = replicate.read_lines(out / "replication" / "results.jsonl")
    kept = [
        ("main", "pretrain", 1),
        ("main", "pd", 1),
        ("main", "pretrain", 2),
        ("main", "pd", 2),
    ]
    assert [(x["settings"], x["method"], x["seed"]) for x in lines] == kept
    a, b, c, d = lines
    assert a["init_sha256"] == b["init_sha256"] != c["init_sha256"] == d["init_sha256"]
    assert all(x["ce"] > 0 and x["kl"] > 0 and x["step"] == 3 for x in lines)
    assert all(x["teacher_sha256"] for x in lines)
    assert len({x["weights_sha256"] for x in lines}) == 4
    assert (out / "replication" / "curves.png").is_file() and "| pd | 0.003 | 2 |" in (out / "replication" / "README.md").read_text()  # fmt: skip
    assert "- Rates: one for all methods" in (out / "replication" / "README.md").read_text()  # none were tried
    cfg = json.loads((out / "main_lr0.003_seed2" / "run.json").read_text())["config"]
    assert cfg["seed"] == 2 and cfg["seq_len"] == 31 and cfg["histogram_every_steps"] is None
