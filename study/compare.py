"""Compare methods fairly on any config: equal trials, several seeds, differences paired by seed.

    python study/compare.py config/tiny.py --methods=vanilla_kd,alra --tune=lr=1e-3,3e-3,1e-2
    python study/compare.py config/tiny.py --tune=lr=1e-3,1e-2 --tune=vanilla_kd.tau=0.5,1 --seeds=5
    python study/compare.py config/tiny.py --report    write tables and pictures anew
    python study/compare.py study/small.py --jobs=2 --per_run=5    a study described by its config

Flags, with their defaults. They override `_compare` of a config file:

    --seeds=3           seeds, from 1 on
    --tune=TEXT         lr=RATE,RATE,.. or METHOD.SETTING=VALUE,..; repeated for more, or none
    --trial_steps=N     updates of a trial (as many as of a student)
    --trial_seeds=1     seeds over which the CE of a trial is averaged: 0, 1000, 2000, ..
    --reference=METHOD  differences to this method, in one table (vanilla_kd, else the first)
    --rows=512          held-out rows to score
    --jobs=1            runs at a time
    --per_run=N         students that share a run, at most (all)
    --out=FOLDER        folder of runs, logs and report (out/compare_CONFIG)

All methods try the same rates; a method's own settings are tried at its best rate. A method whose
`lr` is set in the config (--METHOD.lr=RATE) has no trials. Trials have seed 0, and with more seeds
1000, 2000, .., which no student has. The lowest CE over the first `val_max_rows` held-out rows
wins; later rows are scored. Then come seeds 1, 2, ..: a seed gives the student's initial weights
and the order of rows, the same for all methods. Students of one seed share a run, and so one pass
of the teacher.

OUT/runs has a folder for each run, with its weights. OUT/logs has a file for each student and each
trial: facts and figures in the first line, then the log. The report is written from these files.
A finished student is found there by the record of what made it (run/identity.py) and not trained
again, so after a kill the same command continues. If students lack a result, the report names them
and the exit code is 1.
"""

import functools
import itertools
import runpy
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from configure import Config
from lib.code import ROOT
from lib.errors import UserError
from lib.files import atomic_write, locked, read_json, read_lines, write_json, write_lines
from lib.rows import open_rows
from lib.settings import checked, literal, parsed
from losses import resolve
from model import flops_per_token, load_config
from run.foreign import foreign_config, foreign_flops_per_token
from run.identity import EDITS, content_hash, made_by, record_hash, student_shape
from run.methods import needs_teacher
from run.preflight import check_config
from run.scoring import scoring_code
from run.tables import newest_figures, read_log
from run.teacher import is_native
from study.report import KINDS, TRIAL_SEEDS, Spec, best_settings, read_students, report


def main(argv) -> int:
    spec, cfg = arguments(argv)
    if not spec.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `launch` ends its runs
        try:
            compare(spec, cfg)
        except (KeyboardInterrupt, SystemExit):
            print("stopped; the same command resumes")
            raise
    failed, text = report(spec)
    print(f"\n{text}\n{spec.out / 'report/README.md'}")
    return 1 if failed else 0


def compare(spec, cfg):
    """Make trials, students and scores, and write down which files of OUT/logs the report reads."""
    try_objectives(spec, cfg)
    with locked(spec.out, f"{spec.out}: another compare.py is at work there"):
        for folder in ("logs", "runs", "report"):
            (spec.out / folder).mkdir(exist_ok=True)
        prepare(cfg, spec.out / "runs/config.py")
        n_held_out = len(open_rows(cfg.data_dir, "val")[0])
        n_rows = min(spec.rows, n_held_out - (cfg.val_max_rows or n_held_out))
        if n_rows < 1:
            raise UserError(
                f"val_max_rows={cfg.val_max_rows}: trials use these rows, scores the later ones; "
                f"{cfg.data_dir} has {n_held_out}: set --val_max_rows={n_held_out // 2}"
            )
        trials = run_trials(spec, cfg)
        students = plan_students(spec, cfg, best_settings(trials))
        # a method whose trials all failed has no rate, and is not trained
        train([s for s in students if "lr" in s.settings_of(s.methods[0]) or not trials], cfg, spec)
        score(students, n_rows, cfg, spec)
        record = on_record(cfg, spec)
    lines = []
    for s in students:
        facts = record.get(recipe(s), {})
        file = facts["file"] if is_scored(s, facts, n_rows) else None
        lines.append({"method": s.methods[0], "seed": s.seed, "file": file})
    plan = {
        "config": asdict(cfg),
        "trial_steps": spec.trial_steps or cfg.max_steps,
        "trial_seeds": spec.trial_seeds,
        "students": lines,
        "trials": trials,
    }
    write_json(spec.out / "report/plan.json", plan)


def prepare(cfg, file):
    write_config(file, cfg)
    if subprocess.call([sys.executable, ROOT / "prepare.py", file]):
        raise UserError("prepare.py: made no rows; see its message above")


def write_config(file, cfg):
    atomic_write(file, "".join(f"{key} = {value!r}\n" for key, value in asdict(cfg).items()))


# --- what is tried, and what is trained


def try_objectives(spec, cfg):
    """Try every objective on three positions, with all of its settings, before anything starts."""
    check_config(cfg)
    for method, values_of in values_to_try(spec.tune).items():
        name = method or cfg.methods[0]  # rates are tried with the first method
        resolve(name)  # refuses an unknown name; a study may tune methods that --methods leaves out
        if name in cfg.methods:
            for settings in combinations(values_of):
                check_config(plan_student(name, cfg, 0, settings))


def combinations(values_of: dict) -> list:
    """Return all combinations of the values of some settings."""
    products = itertools.product(*values_of.values())
    return [dict(zip(values_of, values, strict=True)) for values in products]


def run_trials(spec, cfg) -> list[dict]:
    """Try the rates for every method, then its own settings at its best rate."""
    share = (spec.trial_steps or cfg.max_steps) / cfg.max_steps
    cfg = scaled(cfg, share, "max_steps", "schedule_steps", "warmup_steps")
    choices = values_to_try(spec.tune)
    if not choices:
        return []
    tuned = [m for m in cfg.methods if "lr" not in cfg.settings_of(m)]
    points = list(itertools.product(tuned, combinations(choices[""])))
    for method, best in best_settings(try_points(points, cfg, spec)).items():
        for settings in combinations(choices.get(method, {})):  # {}: the best one again
            points.append((method, best | settings))
    return try_points(points, cfg, spec)


def try_points(points: list, cfg, spec) -> list[dict]:
    """Train the trials that are not on record. Return method, settings and mean CE of each one."""
    students = []
    trials = {}  # method, and a recipe for each seed -> trial
    for n, (method, settings) in enumerate(points):
        label = f"-t{n}" if "@" in method else f"@t{n}"  # a name has one @
        seeds = range(0, TRIAL_SEEDS * spec.trial_seeds, TRIAL_SEEDS)
        members = [plan_student(method, cfg, seed, settings, label) for seed in seeds]
        students += members
        trial = {"method": method, "settings": settings, "val_ce": None}
        trials.setdefault((method, *map(recipe, members)), trial)
    train(students, cfg, spec)
    record = on_record(cfg, spec)
    ces = {key: facts["val_ce"] for key, facts in record.items() if "stopped" not in facts}
    for (_, *recipes), trial in trials.items():
        values = [ces.get(key) for key in recipes]
        if None not in values:
            trial["val_ce"] = sum(values) / len(values)
    return list(trials.values())


def values_to_try(tune: tuple) -> dict:
    """Return the values to try by method and setting; those of "" are the rates of all methods."""
    if tune in ((), ("none",)):
        return {}
    choices = {"": {}}
    for text in tune:
        key, _, values = text.partition("=")
        method, _, setting = key.rpartition(".")
        known = choices.setdefault(method, {}).setdefault(setting, [])
        known += map(literal, values.split(","))
    if choices[""].keys() != {"lr"}:
        raise UserError(
            f"--tune={' --tune='.join(tune)}: expected lr=RATE,RATE,.., and beside it "
            "METHOD.SETTING=VALUE,.."
        )
    return choices


def plan_students(spec, cfg, chosen: dict) -> list[Config]:
    """Return the students of all methods and seeds, with the chosen settings."""
    students = []
    for name in cfg.methods:
        n_seeds = min(spec.seeds, spec.fewer_seeds.get(name, spec.seeds))
        for seed in range(1, n_seeds + 1):
            students.append(plan_student(name, cfg, seed, chosen.get(name, {})))
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
    trial_rows = None if config["seed"] % TRIAL_SEEDS else config["val_max_rows"]
    others = {key: value for key, value in record.items() if key not in EDITS}
    code = record_hash([record.get(key) for key in EDITS])
    return record_hash(others), config["max_steps"], trial_rows, accept_edits or code


def on_record(cfg, spec) -> dict:
    """Return the facts of the students in OUT/logs by recipe, after filing the runs that ended."""
    for run in spec.out.glob("runs/*/run.json"):
        ends = [*run.parent.glob("*/run.json"), *run.parent.glob("*/stopped.json")]
        # a run of which some students have not ended resumes with all of them
        if len(ends) == len(read_json(run)["config"]["methods"]):
            for end in ends:
                file_student(end, spec.out)
    record = {}
    for facts in read_students(spec.out):
        record[key_of(facts["made_by"], facts["config"], cfg.accept_edits)] = facts
    return record


def file_student(end: Path, out: Path):
    """Write a student's file in OUT/logs: facts and figures in a line, its log, its histograms."""
    folder = end.parent
    file = out / f"logs/{folder.name}_{folder.parent.name}.jsonl"
    scores = newest_figures(folder)
    figures = scores.pop("figures", {})
    if file.is_file() and figures.items() <= read_lines(file)[0].items():
        return
    scores.pop("run", None)
    facts = read_json(end) | figures
    facts |= {"folder": f"{folder.parent.name}/{folder.name}", "scores": scores}
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
    write_lines(file, [facts, *log])


def is_scored(student: Config, facts: dict, n_rows: int) -> bool:
    """Return whether a student has stopped, or has figures over these rows with this teacher."""
    expected = {"skip_rows": student.val_max_rows, "n_rows": n_rows}
    if "code" in facts:  # committed studies have figures without it
        expected |= {"code": scoring_code("figures"), "dtype": "float32"}
    if student.teacher:
        expected["teacher_sha256"] = content_hash(student.teacher)
    return "stopped" in facts or expected.items() <= facts.items()


# --- runs


def train(students: list[Config], cfg, spec):
    """Train the students that are not on record.

    Students that differ only in method and settings share a run. Those with a label share other
    runs, since METHOD@LABEL would take over the settings of a METHOD beside it.
    """
    record = on_record(cfg, spec)
    missing = {recipe(s): s for s in students if recipe(s) not in record}
    aside = {key[:-1] for key in record} & {key[:-1] for key in missing}
    if aside:
        print(
            f"{len(aside)} finished students of other code are left aside; --accept_edits=True "
            "takes them as they are"
        )
    groups = {}
    for s in missing.values():
        key = (s.seed, s.max_steps, "@" in s.methods[0])
        groups.setdefault(key, []).append(s)
    jobs = {}
    for members in groups.values():
        for part in chunks(members, spec.per_run):
            hyper = {}
            for s in part:
                hyper |= s.hyper  # one key: its name
            sha = record_hash([recipe(s) for s in part])
            name = f"seed{part[0].seed}_{sha[:8]}"
            file = spec.out / f"runs/{name}.py"
            out_dir = f"{spec.out}/runs/{name}"
            write_config(file, replace(part[0], methods=tuple(hyper), hyper=hyper, out_dir=out_dir))
            jobs[name] = [ROOT / "train.py", f"{file}"]
    launch(jobs, spec)


def score(students: list[Config], n_rows: int, cfg, spec):
    """Score the trained students on `n_rows` held-out rows, those after the rows for trials."""
    record = on_record(cfg, spec)
    folders = []
    for s in students:
        facts = record.get(recipe(s))
        if facts and not is_scored(s, facts, n_rows):
            folders.append(f"{spec.out}/runs/{facts['folder']}")
    flags = [f"--skip_rows={cfg.val_max_rows}", f"--max_rows={n_rows}", f"--device={cfg.device}"]
    if cfg.accept_edits:
        flags.append("--accept_edits")
    jobs = {}
    for part in chunks(folders, spec.per_run):
        jobs[f"eval_{len(jobs)}"] = [ROOT / "eval.py", *part, "--tasks=none", *flags]
    launch(jobs, spec)


def chunks(items: list, size: int) -> list:
    return [items[at : at + size] for at in range(0, len(items), size)]


def launch(jobs: dict, spec):
    """Run the commands, `--jobs` at a time, and say how far they are and how each one ended."""
    for part in chunks([*enumerate(jobs, 1)], spec.jobs):
        running = {}  # process -> its name, and the file that it prints to
        try:
            for number, name in part:
                file = spec.out / f"runs/{name}.txt"
                with file.open("a") as log:
                    command = [sys.executable, *jobs[name]]
                    process = subprocess.Popen(command, stdout=log, stderr=log)
                label = f"run {number} of {len(jobs)}, {name}"
                running[process] = label, file
            watch(running)
        finally:  # also at Ctrl-C or SIGTERM: runs of train.py then end with a checkpoint
            for process in running:
                process.terminate()
            for process, (name, file) in running.items():
                print(f"{name}: exit code {process.wait()}: {last_line(file)}", flush=True)


def watch(running: dict):
    """Wait for processes, and say twice a minute how far they are."""
    for process in running:
        while process.poll() is None:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                for name, file in running.values():
                    print(f"{name}: {last_line(file)}", flush=True)


def last_line(file) -> str:
    """Return the last line that a run has printed; train.py's have step and remaining time."""
    return file.read_text().strip().rpartition("\n")[2]


# --- flags


def arguments(argv) -> tuple:
    """Return the `Spec`, from config files' `_compare` and flags, and the config of all runs.

    With --methods, keys of `_compare` that are about the config's own methods are dropped.
    """
    flags = {}
    rest = []
    for word in argv:
        key, equals, text = word.removeprefix("--").partition("=")
        if key not in KINDS or not word.startswith("--"):
            rest.append(word)
        elif key == "tune":
            flags[key] = (*flags.get(key, ()), text)
        else:
            flags[key] = parsed(text if equals else "True", KINDS[key])
    cfg = configure.load(rest)
    keys = {}
    for word in rest:
        if not word.startswith("--"):
            keys.setdefault("out", f"out/compare_{Path(word).stem}")
            keys |= runpy.run_path(word).get("_compare", {})
        elif word.startswith(("--seed=", "--out_dir=")):
            raise UserError(f"{word}: would have no effect; set --seeds=N or --out=FOLDER")
        elif word.startswith("--methods="):
            for key in ("title", "summary", "reference", "tables", "fewer_seeds"):
                keys.pop(key, None)
    unknown = keys.keys() - KINDS.keys()
    if unknown:
        raise UserError(f"_compare: no such keys {sorted(unknown)}; expected {', '.join(KINDS)}")
    keys |= flags
    values = {key: checked(key, value, KINDS[key]) for key, value in keys.items()}
    spec = Spec(**values)
    spec = replace(spec, out=Path(spec.out))
    if spec.reference not in (None, *cfg.methods):
        raise UserError(f"--reference={spec.reference}: expected one of {', '.join(cfg.methods)}")
    return spec, cfg


if __name__ == "__main__":
    configure.run(main)
