"""Compare methods fairly on any config: equal trials, several seeds, differences paired by seed.

    python study/compare.py config/tiny.py --methods=vanilla_kd,alra --tune=lr=1e-3,3e-3,1e-2
    python study/compare.py config/tiny.py --tune=lr=1e-3,1e-2 --tune=vanilla_kd.tau=0.5,1 --seeds=5
    python study/compare.py config/tiny.py --report    write tables and pictures anew
    python study/compare.py study/small.py             a study described by its config

Flags, with their defaults. They override `_compare` of a config file:

    --seeds=3           seeds, from 1 on
    --tune=TEXT         lr=RATE,RATE,.. or METHOD.SETTING=VALUE,..; repeated for more, or none
    --trial_steps=N     updates of a trial (as many as of a student)
    --reference=METHOD  differences to this method, in one table (vanilla_kd, else the first)
    --rows=512          held-out rows to score
    --out=FOLDER        folder of runs, students and report (out/compare_CONFIG)

All methods try the same rates; a method's own settings are tried at its best rate. A method whose
`lr` is set in the config (--METHOD.lr=RATE) has no trials. Trials have seed 0, which no student
has. The lowest CE over the first `val_max_rows` held-out rows wins; later rows are scored. Then
come seeds 1, 2, ..: a seed gives the student's initial weights and the order of rows, the same for
all methods. Students of one seed share a run, and so one pass of the teacher.

OUT/runs has a folder for each run, with its weights, and OUT/students.jsonl.zst all students and
trials that have ended; the report is written from it. A student is found there by the record of
what made it (run/identity.py) and not trained again, so after a kill the same command continues,
and a command with some of the methods (such as fit in memory) adds to the same OUT. If students
lack a result, the report names them and the exit code is 1.
"""

import argparse
import functools
import itertools
import runpy
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from configure import Config
from lib.code import ROOT
from lib.errors import UserError
from lib.files import atomic_write, locked, read_json, write_json
from lib.rows import open_rows
from lib.settings import literal
from losses import resolve
from model import flops_per_token, load_config
from run.foreign import foreign_config, foreign_flops_per_token
from run.identity import EDITS, content_hash, made_by, record_hash, student_shape
from run.methods import needs_teacher
from run.preflight import check_config
from run.scoring import scoring_code
from run.tables import newest_figures, read_log
from run.teacher import is_native
from study.report import TRIAL_SEED, best_settings, read_students, report, write_students

KEYS = {  # of `_compare`, and of flags
    "title": "Comparison",
    "summary": "",  # what the tables say, in words
    "tables": (),  # (title, methods, reference), ..
    "reference": None,
    "seeds": 3,
    "fewer_seeds": {},  # number by method
    "rows": 512,
    "tune": (),
    "trial_steps": None,
    "out": "out/compare",
    "report": False,
}
OF_METHODS = ("title", "summary", "reference", "tables", "fewer_seeds")


def main(argv) -> int:
    spec, cfg = arguments(argv)
    if not spec.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends its process
        check_config(cfg)
        choices = values_to_try(spec, cfg)  # mistakes show before anything starts
        with locked(spec.out, f"{spec.out}: another compare.py is at work there"):
            compare(spec, cfg, choices)
    failed, text = report(spec)
    print(f"\n{text}\n{spec.out / 'README.md'}")
    return 1 if failed else 0


def compare(spec, cfg, choices: dict):
    """Make trials, students and scores, and write down which students the report shows."""
    (spec.out / "runs").mkdir(exist_ok=True)
    if run("prepare.py", write_config(spec.out / "runs/config.py", cfg)):
        raise UserError("prepare.py: made no rows; see its message above")
    n_held_out = len(open_rows(cfg.data_dir, "val")[0])
    if cfg.val_max_rows is None or cfg.val_max_rows >= n_held_out:
        what = "trials use these rows, scores the later ones"
        raise UserError(f"val_max_rows={cfg.val_max_rows}: {what}; {cfg.data_dir} has {n_held_out}")
    n_rows = min(spec.rows, n_held_out - cfg.val_max_rows)
    trials = run_trials(spec, cfg, choices)
    students = plan_students(spec, cfg, best_settings(trials))
    if trials:  # without the methods whose trials all failed
        students = [s for s in students if "lr" in s.settings_of(s.methods[0])]
    train(students, cfg, spec)
    score(students, n_rows, cfg, spec)
    record = on_record(cfg, spec)
    lines = []
    for s in students:
        facts = record.get(recipe(s), {})
        name = facts["name"] if is_scored(s, facts, n_rows) else None
        lines.append({"method": s.methods[0], "seed": s.seed, "name": name})
    plan = {"config": asdict(cfg), "trial_steps": spec.trial_steps or cfg.max_steps}
    write_json(spec.out / "plan.json", plan | {"students": lines, "trials": trials})


def write_config(file, cfg):
    atomic_write(file, "".join(f"{key} = {value!r}\n" for key, value in asdict(cfg).items()))
    return file


def run(script, *argv) -> int:
    """Run a script of this project. Ctrl-C or SIGTERM ends it with a checkpoint."""
    process = subprocess.Popen([sys.executable, ROOT / script, *argv])
    try:
        return process.wait()
    finally:
        process.terminate()
        process.wait()


# --- trials and students


def values_to_try(spec, cfg) -> dict:
    """Return the values to try by method and setting; those of "" are the rates of all methods."""
    choices = {}
    if [*spec.tune] == ["none"]:
        return choices
    for text in spec.tune:
        key, _, values = text.partition("=")
        method, _, setting = key.rpartition(".")
        name = method or cfg.methods[0]  # rates are tried with the first method
        resolve(name)  # refuses an unknown name
        for value in map(literal, values.split(",")):
            choices.setdefault(method, {}).setdefault(setting, []).append(value)
            if name in cfg.methods:
                check_config(plan_student(name, cfg, TRIAL_SEED, {setting: value}))
    if choices and [*choices.get("", ())] != ["lr"]:
        expected = "expected lr=RATE,RATE,.., and beside it METHOD.SETTING=VALUE,.."
        raise UserError(f"--tune={' --tune='.join(spec.tune)}: {expected}")
    return choices


def run_trials(spec, cfg, choices: dict) -> list[dict]:
    """Try the rates for every method, then its own settings at its best rate."""
    if not choices:
        return []
    share = (spec.trial_steps or cfg.max_steps) / cfg.max_steps
    cfg = scaled(cfg, share, "max_steps", "schedule_steps", "warmup_steps")
    tuned = [m for m in cfg.methods if "lr" not in cfg.settings_of(m)]
    points = [(m, {"lr": lr}) for m in tuned for lr in choices[""]["lr"]]
    for m, best in best_settings(try_points(points, cfg, spec)).items():
        own = choices.get(m, {})
        for values in itertools.product(*own.values()):
            points.append((m, best | dict(zip(own, values, strict=True))))
    return try_points(points, cfg, spec)


def try_points(points: list, cfg, spec) -> list[dict]:
    """Train the trials that are not on record. Return method, settings and CE of each one."""
    students = {}
    for n, (method, settings) in enumerate(points):
        label = f"-t{n}" if "@" in method else f"@t{n}"  # a name has one @
        student = plan_student(method, cfg, TRIAL_SEED, settings, label)
        students.setdefault((method, recipe(student)), (student, settings))
    train([student for student, _ in students.values()], cfg, spec)
    record = on_record(cfg, spec)
    trials = []
    for (method, key), (_, settings) in students.items():
        facts = record.get(key, {"stopped": ""})
        ce = None if "stopped" in facts else facts["val_ce"]
        trials.append({"method": method, "settings": settings, "val_ce": ce})
    return trials


def plan_students(spec, cfg, chosen: dict) -> list[Config]:
    """Return the students of all methods and seeds, with the chosen settings."""
    students = []
    for m in cfg.methods:
        n_seeds = min(spec.seeds, spec.fewer_seeds.get(m, spec.seeds))
        students += [plan_student(m, cfg, seed + 1, chosen.get(m, {})) for seed in range(n_seeds)]
    return students


def plan_student(method: str, cfg, seed, settings: dict, label: str = "") -> Config:
    """Return the config that trains this student alone. It stands for the student in this file.

    METHOD@flops, if METHOD has no teacher, makes more updates, until its FLOPs are those of another
    student and the teacher.
    """
    name = method + label
    hyper = {name: cfg.settings_of(method) | settings}
    student = replace(cfg, methods=(name,), hyper=hyper, seed=seed)
    if seed != 1:  # histograms of one seed are drawn
        student = replace(student, histogram_every_steps=None)
    if method.endswith("@flops") and not needs_teacher(method):
        of_student, of_teacher = flops(cfg)
        student = scaled(student, 1 + of_teacher / of_student, "max_steps", "schedule_steps")
    return student


def scaled(cfg, ratio: float, *keys: str) -> Config:
    return replace(cfg, **{key: round(ratio * getattr(cfg, key)) for key in keys})


def flops(cfg) -> tuple:
    """Return the FLOPs per token of a student in training, and of the teacher's forward pass."""
    student = flops_per_token(student_shape(cfg), cfg.seq_len, trained=True)
    return student, teacher_flops(cfg.teacher, cfg.seq_len)


@functools.cache
def teacher_flops(teacher: str | None, seq_len) -> float:
    if teacher is None:
        return 0.0
    if is_native(teacher):
        return flops_per_token(load_config(teacher), seq_len, trained=False)
    with torch.device("meta"):  # without memory for its weights
        model = transformers.AutoModelForCausalLM.from_config(foreign_config(teacher))
    return foreign_flops_per_token(model)


# --- the students on record


@functools.cache
def recipe(student: Config) -> tuple:
    return key_of(made_by(student, student.methods[0]), vars(student), student.accept_edits)


def key_of(record: dict, config: dict, accept_edits: bool) -> tuple:
    """Return what identifies a student: record, updates and, for a trial, the rows that judge it.

    Its code comes last. With `accept_edits` True takes its place, so that all code is equal.
    """
    trial_rows = config["val_max_rows"] if config["seed"] == TRIAL_SEED else None
    others = {key: value for key, value in record.items() if key not in EDITS}
    code = record_hash([record.get(key) for key in EDITS])
    return record_hash(others), config["max_steps"], trial_rows, accept_edits or code


def on_record(cfg, spec) -> dict:
    """Return the students on record by recipe, after adding those of the runs that ended."""
    students = {x["name"]: x for x in read_students(spec.out)}
    before = dict(students)
    for file in sorted(spec.out.glob("runs/*/run.json")):
        ends = [*file.parent.glob("*/run.json"), *file.parent.glob("*/stopped.json")]
        # a run of which some students have not ended resumes with all of them
        if len(ends) == len(read_json(file)["config"]["methods"]):
            for end in ends:
                student = read_student(end)
                students[student["name"]] = student
    if students != before:
        write_students(spec.out, [*students.values()])
    return {key_of(x["made_by"], x["config"], cfg.accept_edits): x for x in students.values()}


def read_student(end: Path) -> dict:
    """Return a student's facts, figures and log from the folder of `end`."""
    folder = end.parent
    scores = newest_figures(folder)
    facts = read_json(end) | scores.pop("values", {}) | scores.pop("scored", {})
    scores = {key: value for key, value in scores.items() if key not in ("run", "folder")}
    facts |= {"name": f"{folder.name}_{folder.parent.name}", "scores": scores}
    if "why" in facts:
        facts["stopped"] = facts.pop("why")
    student, teacher = flops(Config(**facts["config"]))
    facts["student_flops"] = student * facts["nominal_tokens"]
    if needs_teacher(folder.name):
        facts["teacher_flops"] = teacher * facts["nominal_tokens"]
    log = read_log(folder)
    for line in log:
        if "val_ce" in line:
            facts["val_ce"] = line["val_ce"]  # of the last validation
    return facts | {"log": log}


def is_scored(student: Config, facts: dict, n_rows: int) -> bool:
    """Return whether a student has stopped, or has figures over these rows with this teacher."""
    expected = {"skip_rows": student.val_max_rows, "n_rows": n_rows}
    if "scoring_code" in facts:  # committed studies have figures without it
        expected["scoring_code"] = scoring_code("figures")
    if student.teacher:
        expected["teacher_sha256"] = content_hash(student.teacher)
    return "stopped" in facts or expected.items() <= facts.items()


def train(students: list[Config], cfg, spec):
    """Train the students that are not on record.

    Students that differ only in method and settings share a run. Those with a label share other
    runs, since METHOD@LABEL would take over the settings of a METHOD beside it.
    """
    record = on_record(cfg, spec)
    missing = {recipe(s): s for s in students if recipe(s) not in record}
    aside = {key[:-1] for key in record} & {key[:-1] for key in missing}
    if aside:
        print(f"{len(aside)} finished students of other code are left aside; see --accept_edits")
    groups = {}
    for s in missing.values():
        groups.setdefault((s.seed, s.max_steps, "@" in s.methods[0]), []).append(s)
    for (seed, *_), members in groups.items():
        hyper = {}
        for s in members:
            hyper |= s.hyper  # one key: its name
        sha = record_hash([recipe(s) for s in members])
        out = spec.out / f"runs/seed{seed}_{sha[:8]}"
        shared = replace(members[0], methods=tuple(hyper), hyper=hyper, out_dir=f"{out}")
        run("train.py", write_config(out.with_suffix(".py"), shared))


def score(students: list[Config], n_rows: int, cfg, spec):
    """Score the trained students on `n_rows` held-out rows, those after the rows for trials."""
    record = on_record(cfg, spec)
    folders = []
    for s in students:
        facts = record.get(recipe(s))
        if facts and not is_scored(s, facts, n_rows):
            run_name = facts["name"].removeprefix(f"{facts['method']}_")
            folders.append(spec.out / "runs" / run_name / facts["method"])
    flags = [f"--skip_rows={cfg.val_max_rows}", f"--max_rows={n_rows}", f"--device={cfg.device}"]
    flags += ["--accept_edits"] * cfg.accept_edits
    if folders:
        run("eval.py", *folders, "--tasks=none", *flags)


# --- flags


def arguments(argv) -> tuple:
    """Return settings of the comparison, and the config of all runs.

    With --methods, keys of `_compare` that are about the config's own methods are dropped.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    for key, kind in {"seeds": int, "rows": int, "trial_steps": int, "reference": str}.items():
        parser.add_argument(f"--{key}", type=kind)
    parser.add_argument("--tune", action="append")
    parser.add_argument("--out")
    parser.add_argument("--report", action="store_true", default=None)
    flags, rest = parser.parse_known_args(argv)
    cfg = configure.load(rest)
    keys = dict(KEYS)
    for word in rest:
        if not word.startswith("--"):
            keys |= {"out": f"out/compare_{Path(word).stem}"}
            keys |= runpy.run_path(word).get("_compare", {})
        elif word.startswith(("--seed=", "--out_dir=")):
            raise UserError(f"{word}: would have no effect; set --seeds=N or --out=FOLDER")
        elif word.startswith("--methods="):
            keys |= {key: KEYS[key] for key in OF_METHODS}
    keys |= {key: value for key, value in vars(flags).items() if value is not None}
    spec = SimpleNamespace(**keys)
    spec.out = Path(spec.out)
    if spec.reference not in (None, *cfg.methods):
        raise UserError(f"--reference={spec.reference}: expected one of {', '.join(cfg.methods)}")
    return spec, cfg


if __name__ == "__main__":
    configure.run(main)
