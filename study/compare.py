"""Compare methods fairly on any config: equal trials, several seeds, differences paired by seed.

    python study/compare.py config/tiny.py --methods=vanilla_kd,alra --tune=lr=1e-3,3e-3,1e-2
    python study/compare.py config/tiny.py --tune=lr=1e-3,1e-2 --tune=vanilla_kd.tau=0.5,1 --seeds=5
    python study/compare.py config/tiny.py --report    write tables and pictures anew
    python study/compare.py study/small.py             a study described by its config

Flags, with their defaults. They override `_compare` of a config file:

    --seeds=3           seeds, from 1 on
    --tune=TEXT         lr=RATE,RATE,.. or METHOD.SETTING=VALUE,..; may be repeated; none: no trials
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
what made it (run/provenance.py) and not trained again, so after a kill the same command continues,
and a command with some of the methods (such as fit in memory) adds to the same OUT. If one on
record has the name but another record, it is trained anew, and a line says what differs. If
students lack a result, the report names them and the exit code is 1.
"""

import itertools
import runpy
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, f"{ROOT}")

import configure
from configure import TRY_AGAIN, Config
from lib.errors import UserError
from lib.files import atomic_write, locked, reading, write_json
from lib.rows import open_rows
from lib.settings import PositiveInt, check_fields, literal, parsed
from lib.source import edited, hashes, merged
from run.provenance import record_hash
from run.startup import check_config
from study.record import TRIAL_SEED, changes, find, flops, is_scored, on_record, record_of
from study.report import best_settings, report


@dataclass
class Spec:
    """The keys of `_compare`, which flags override."""

    title: str = "Comparison"
    summary: str = ""  # what the tables say, in words
    tables: tuple = ()  # (title, methods, reference), ..
    reference: str | None = None
    seeds: PositiveInt = 3
    fewer_seeds: dict = field(default_factory=dict)  # number by method
    rows: PositiveInt = 512
    tune: tuple[str, ...] = ()
    trial_steps: PositiveInt | None = None
    out: str = "out/compare"
    report: bool = False


KINDS = get_type_hints(Spec, include_extras=True)
OF_METHODS = ("title", "summary", "reference", "tables", "fewer_seeds")


def arguments(argv) -> tuple:
    """Return settings of the comparison, and the config of all runs.

    With --methods, keys of `_compare` that are about the config's own methods are dropped.
    """
    flags = {}
    rest = []
    for word in argv:
        key, _, text = word.removeprefix("--").partition("=")
        if key not in KINDS or not word.startswith("--"):
            rest.append(word)
        elif key == "tune":
            flags[key] = (*flags.get(key, ()), text)
        else:
            flags[key] = parsed(text or "True", KINDS[key])
    cfg = configure.load(rest)
    keys = {}
    for word in rest:
        if not word.startswith("--"):
            keys["out"] = f"out/compare_{Path(word).stem}"
            keys |= runpy.run_path(word).get("_compare", {})
        elif word.startswith(("--seed=", "--out_dir=")):
            raise UserError(f"{word}: would have no effect; set --seeds=N or --out=FOLDER")
        elif word.startswith("--methods="):
            keys = {key: x for key, x in keys.items() if key not in OF_METHODS}
    if "reference" in flags:  # of one table, with all methods
        keys["tables"] = ()
    with reading("_compare", "correct its keys"):
        spec = Spec(**keys | flags)
    check_fields(spec)
    spec.out = Path(spec.out)
    spec.trial_steps = spec.trial_steps or cfg.max_steps
    if spec.reference not in (None, *cfg.methods):
        raise UserError(f"--reference={spec.reference}: expected one of {', '.join(cfg.methods)}")
    return spec, cfg


def main(argv) -> int:
    spec, cfg = arguments(argv)
    if not spec.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends its process
        check_config(cfg)
        choices = values_to_try(spec, cfg)  # mistakes show before anything starts
        if (spec.out / "README.md").exists() and not (spec.out / "plan.json").exists():
            raise UserError(f"{spec.out}: has another README.md; set --out to a new folder")
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
    held_out, _ = open_rows(cfg.data_dir, "val")
    rows = held_out[cfg.val_max_rows or len(held_out) :][: spec.rows]
    if not len(rows):
        raise UserError(
            f"val_max_rows={cfg.val_max_rows}: trials use these rows, scores the later ones; "
            f"{cfg.data_dir} has {len(held_out)}"
        )
    trials = run_trials(spec, cfg, choices)
    chosen = best_settings(trials)
    failed = {x["method"] for x in trials} - chosen.keys()  # in all trials
    planned = plan_students(spec, cfg, chosen)
    train([s for s in planned if s.methods[0] not in failed], spec.out)
    score(planned, rows, cfg, spec.out)
    found = on_record(spec.out)
    students = []
    codes = []
    for s in planned:
        facts = find(s, found)
        codes.append(facts.get("code", {}))
        name = facts["name"] if is_scored(s, facts, rows) else None
        students.append({"method": s.methods[0], "seed": s.seed, "name": name})
    now = {name: (ROOT / name).read_text() for name in merged(*codes) if (ROOT / name).is_file()}
    files = edited(*codes, hashes(now))
    if files:
        print(
            f"Edited since some of these students were trained: {', '.join(files)}. They count as "
            "they are; --out=ANOTHER_FOLDER trains them anew."
        )
    plan = {"config": asdict(cfg), "trial_steps": spec.trial_steps}
    write_json(spec.out / "plan.json", plan | {"students": students, "trials": trials})


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
    if spec.tune == ("none",):
        return choices
    for text in spec.tune:
        key, _, values = text.partition("=")
        method, _, setting = key.rpartition(".")
        name = method or cfg.methods[0]  # rates are checked with the first method
        tried = choices.setdefault(method, {})[setting] = [*map(literal, values.split(","))]
        for value in tried:
            check_config(plan_student(name, cfg, TRIAL_SEED, {setting: value}))
    if choices and [*choices.get("", ())] != ["lr"]:
        expected = "expected lr=RATE,RATE,.., and beside it METHOD.SETTING=VALUE,.."
        raise UserError(f"--tune={' --tune='.join(spec.tune)}: {expected}")
    return choices


def run_trials(spec, cfg, choices: dict) -> list[dict]:
    """Try the rates for every method, then its own settings at its best rate."""
    if not choices:
        return []
    share = spec.trial_steps / cfg.max_steps
    cfg = scaled(cfg, share, "max_steps", "schedule_steps", "warmup_steps")
    tuned = [m for m in cfg.methods if "lr" not in cfg.settings_of(m)]
    points = [(m, {"lr": lr}) for m in tuned for lr in choices[""]["lr"]]
    for m, best in best_settings(try_points(points, cfg, spec.out)).items():
        own = choices.get(m, {})
        for values in itertools.product(*own.values()):
            points.append((m, best | dict(zip(own, values, strict=True))))
    return try_points(points, cfg, spec.out)


def try_points(points: list, cfg, out) -> list[dict]:
    """Train the trials that are not on record. Return method, settings and CE of each one."""
    students = {}
    for n, (method, settings) in enumerate(points):
        label = f"-t{n}" if "@" in method else f"@t{n}"  # a name has one @
        student = plan_student(method, cfg, TRIAL_SEED, settings, label)
        key = method, record_hash(record_of(student))
        students.setdefault(key, (method, settings, student))
    train([student for _, _, student in students.values()], out)
    found = on_record(out)
    trials = []
    for method, settings, student in students.values():
        facts = find(student, found)
        ce = None if "why" in facts else facts.get("val_ce")
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

    METHOD@flops makes more updates, until its FLOPs are those of a student and the teacher: the
    METHOD should be one without a teacher.
    """
    name = method + label
    hyper = {name: cfg.settings_of(method) | settings}
    student = replace(cfg, methods=(name,), hyper=hyper, seed=seed)
    if method.endswith("@flops"):
        of_student, of_teacher = flops(cfg)
        student = scaled(student, 1 + of_teacher / of_student, "max_steps", "schedule_steps")
    return student


def scaled(cfg, ratio: float, *keys: str) -> Config:
    return replace(cfg, **{key: round(ratio * getattr(cfg, key)) for key in keys})


def train(students: list[Config], out):
    """Train the students that are not on record, and say in what those of their names differ.

    Students that differ only in method and settings share a run. Those with a label share other
    runs, since METHOD@LABEL would take over the settings of a METHOD beside it.
    """
    found = on_record(out)
    missing = {record_hash(record_of(s)): s for s in students if not find(s, found)}
    runs = {}
    for s in missing.values():
        runs.setdefault((s.seed, s.max_steps, "@" in s.methods[0]), []).append(s)
        for x in found:
            if (x["method"], x["seed"]) == (s.methods[0], s.seed):
                print(f"{x['name']} is not used: {'; '.join(changes(s, x).values())}")
    for members in runs.values():
        hyper = {}
        for s in members:
            hyper |= s.hyper  # one key: its name
        sha = record_hash([record_of(s) for s in members])
        folder = out / f"runs/seed{members[0].seed}_{sha[:8]}"
        shared = replace(members[0], methods=tuple(hyper), hyper=hyper, out_dir=f"{folder}")
        code = run("train.py", write_config(folder.with_suffix(".py"), shared))
        is_busy = code == 1 and not (folder / "exit.json").exists()
        if is_busy or code == TRY_AGAIN:
            raise UserError(f"{folder}: not trained; see above, and run the same command later")


def score(students: list[Config], rows, cfg, out):
    """Score the trained students on these held-out rows, those after the rows for trials."""
    found = on_record(out)
    folders = []
    for s in students:
        facts = find(s, found)
        if facts and not is_scored(s, facts, rows):
            run_name = facts["name"].removeprefix(f"{facts['method']}_")
            folders.append(out / f"runs/{run_name}/{facts['method']}")
    flags = [f"--skip_rows={cfg.val_max_rows}", f"--max_rows={len(rows)}", f"--device={cfg.device}"]
    if folders:
        run("eval.py", *folders, "--tasks=none", *flags)


if __name__ == "__main__":
    configure.run(main)
