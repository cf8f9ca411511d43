"""A fair comparison on any config: the same number of trials for each method, several seeds, paired differences.

    python tools/compare.py config/demo.py --methods=vanilla_kd,alra --seeds=3 --tune=lr=1e-3,3e-3,1e-2
    python tools/compare.py config/demo.py --methods=vanilla_kd,alra --tune=lr=1e-3,1e-2 --tune=vanilla_kd.tau=0.5,1,2
    python tools/compare.py config/demo.py --report         tables and figures anew, from the results that are there
    python tools/compare.py config/mini.py --jobs=2         the replication, which that config describes: hours on two cores

Trials of all methods with seed 0 share a run, and so one pass of the teacher. The lowest CE over the first `val_max_rows`
held-out rows chooses; the rows after these are scored. Then seeds 1, 2, ..: a seed is the student's initial weights and the
order of rows, the same for all methods. A student that the folder holds already is found by what made it (settings, the
objective's source); the same command goes on after a kill. What a run that fails has not made is in the report without
numbers, and the exit code is 1.
"""

import argparse
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import math
import runpy
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import configure
from configure import Config
from lib.files import UserError, append_line, locked, read_json, read_lines, write_json, write_lines, write_whole
from lib.hf import find_folder
from lib.report import Spec, report
from lib.rows import open_rows
from lib.settings import literal
from lib.teacher import inherited, is_native
from losses import METHODS, needs_teacher, resolve
from model import flops_per_token, load_config, student_config

ROOT = Path(__file__).resolve().parent.parent
AT_A_TIME = 32  # students per process of eval.py, where they share the teacher's pass
FIGURE_SEED = 1  # the only one whose runs count d_u and the teacher's probabilities, for the figures


# --- what is to be run -----------------------------------------------------------------------------------------------


class Student(NamedTuple):
    study: str  # "tune", "main" or a study of the config
    name: str  # METHOD or METHOD@LABEL
    cfg: Config  # of a run of it alone

    @property
    def made_by(self) -> str:
        return made_by(self.cfg, self.name)


class Job(NamedTuple):
    name: str
    argv: list[str]
    students: list[Student]  # that it makes or scores


def made_by(cfg: Config, name: str) -> str:
    """All that a student of a run depends on, as text: its objective, its settings, and the config but for places and speed."""
    keys = [key for key in sorted(configure.LEARNT) if key not in ("methods", "hyper")] + [
        "teacher",
        "data_dir",
        "max_steps",
    ]
    settings = json.dumps([cfg.settings_of(name), *(getattr(cfg, key) for key in keys)])
    return f"{objective(name.partition('@')[0])} {settings}"


@functools.cache
def objective(method: str) -> str:
    """The method with a hash of its row and of its function's source: an edited one is another. Helpers are not seen."""
    fn, *row = METHODS[method]
    return f"{method} {hashlib.sha256(f'{inspect.getsource(fn)}{row}'.encode()).hexdigest()[:16]}"


def alone(study: str, name: str, of: str, cfg: Config, seed: int, settings: dict) -> Student:
    """The student `name` of the method `of`, with further settings."""
    shown = cfg.histogram_every_steps if study == "main" and seed == FIGURE_SEED else None
    hyper = {name: cfg.settings_of(of) | settings}
    return Student(study, name, dataclasses.replace(cfg, methods=(name,), hyper=hyper, seed=seed, histogram_every_steps=shown))  # fmt: skip


def trials(tune: tuple[str, ...], methods: tuple[str, ...]) -> dict[str, list[dict]]:
    """Settings to try by method, as many for each: a method with fewer settings to choose gets more rates."""
    rates, knobs = [], {m: {} for m in methods}
    for text in tune:
        key, _, values = text.partition("=")
        method, _, setting = key.rpartition(".")
        values = [literal(v) for v in values.split(",")]
        if key == "lr" and len(values) > 1 and all(isinstance(v, int | float) and v > 0 for v in values):
            rates = [float(v) for v in values]
        elif method in knobs and setting != "lr":
            knobs[method][setting] = values
        else:
            raise UserError(
                f"--tune={text}: expected lr=RATE,RATE,.. or METHOD.SETTING=VALUE,.. with a method of {','.join(methods)}"
            )
    if tune and not rates:
        raise UserError(f"--tune={tune[0]}: add --tune=lr=RATE,RATE,.., so that all methods can have as many trials")
    points = {
        m: [dict(zip(of, point, strict=True)) for point in itertools.product(*of.values())] for m, of in knobs.items()
    }
    n = len(rates) * max(map(len, points.values()))
    return {
        m: [p | {"lr": lr} for lr in denser(rates, math.ceil(n / len(of))) for p in of][:n]
        for m, of in points.items()
        if n
    }


def denser(rates: list[float], n: int) -> list[float]:
    """n rates: the given ones, then the geometric middle of the widest gap, again and again."""
    rates = list(rates)
    while len(rates) < n:
        gaps = itertools.pairwise(sorted(rates))
        low, high = max(gaps, key=lambda gap: round(gap[1] / gap[0], 1))
        rates.append(float(f"{math.sqrt(low * high):.3g}"))
    return rates


def plan(spec: Spec, base: Config, given_keys: set[str], chosen: dict[str, dict]) -> list[Student]:
    """The students of all studies and seeds. A study with the settings of an earlier one joins it."""
    students, first = {}, {}
    for study, changes in {"main": {}, **(spec.studies or {})}.items():
        given = {key: value for key, value in changes.items() if key not in given_keys}
        of = changes.get("hyper", {})
        given["hyper"] = {m: base.hyper.get(m, {}) | of.get(m, {}) for m in {**base.hyper, **of}}
        cfg = dataclasses.replace(base, **given)
        study = first.setdefault((made_by(cfg, "pretrain"), json.dumps(cfg.hyper)), study)
        for name, seed in itertools.product(cfg.methods, range(1, spec.seeds + 1)):
            settings, of_method = chosen.get(name, chosen.get(spec.like, {})), at_equal(spec.at, name, cfg)
            students.setdefault((study, name, seed), alone(study, name, name, of_method, seed, settings))
    return [*students.values()]


def at_equal(what: str, name: str, cfg: Config) -> Config:
    """The config of a method: at equal FLOPs one without a teacher makes more updates."""
    if what == "updates" or needs_teacher(name) or cfg.teacher is None:
        return cfg
    student, teacher = flops(cfg)
    longer = 1 + teacher / student
    return dataclasses.replace(cfg, max_steps=round(cfg.max_steps * longer), schedule_steps=round(cfg.schedule_steps * longer))  # fmt: skip


def flops(cfg: Config) -> tuple[float, float]:
    """FLOPs of one token: of a student that is trained, and of the teacher's pass."""
    student = flops_per_token(student_config(cfg.student, inherited(cfg.teacher)), cfg.seq_len, trained=True)
    if not cfg.teacher:
        return student, 0.0
    if not is_native(cfg.teacher):
        files = find_folder(cfg.teacher).glob("*.safetensors")
        return student, float(sum(file.stat().st_size for file in files))  # two for each parameter, which has two bytes
    return student, flops_per_token(load_config(cfg.teacher), cfg.seq_len, trained=False)


def together(students: list[Student], out: Path, at_most: int) -> list[Job]:
    """Runs of train.py: students that differ in method and settings alone share one, `at_most` of them."""
    first, groups = {}, {}
    for s in students:
        first.setdefault(s.made_by, s)
    for s in first.values():
        shared = dataclasses.replace(s.cfg, methods=("any",), hyper={})
        nth = next(i for i in itertools.count() if s.name not in groups.get((shared, i), {}))  # a name has one folder
        groups.setdefault((shared, nth), {})[s.name] = s
    jobs = []
    for (shared, _), of in groups.items():
        some = list(of.values())
        jobs += [job(some[at : at + at_most], shared, out) for at in range(0, len(some), at_most)]
    return jobs


def job(students: list[Student], shared: Config, out: Path) -> Job:
    """A run of these students, with a config file of its own; named after what it holds."""
    names, hyper = tuple(s.name for s in students), {s.name: s.cfg.hyper[s.name] for s in students}
    cfg = dataclasses.replace(shared, methods=names, hyper=hyper, out_dir="")
    made_by = f"_made_by = {[s.made_by for s in students]!r}  # for compare.py\n"
    sha = hashlib.sha256(f"{config_text(cfg)}{made_by}".encode()).hexdigest()[:8]
    folder = out / f"{students[0].study}_seed{cfg.seed}_{sha}"
    write_whole(folder.with_suffix(".py"), config_text(dataclasses.replace(cfg, out_dir=str(folder))) + made_by)
    return Job(folder.name, ["train.py", f"{folder}.py"], students)


def config_text(cfg: Config) -> str:
    """The config as a config file: the methods, and what differs from the defaults."""
    default = dataclasses.asdict(Config()) | {"methods": None}
    return "".join(f"{key} = {value!r}\n" for key, value in dataclasses.asdict(cfg).items() if value != default[key])


def made(out: Path) -> dict[str, Path]:
    """What the folder's runs hold, whoever ran them: what a student that has ended was made by -> its folder."""
    found = {}
    for file in sorted(out.glob("*_seed*.py")):
        run = runpy.run_path(str(file))
        folders = (file.with_suffix("") / name for name in run["methods"])
        found |= {key: of for key, of in zip(run["_made_by"], folders, strict=True) if ended(of)}
    return found


def ended(folder: Path) -> bool:
    return (folder / "run.json").is_file() or (folder / "stopped.json").is_file()


# --- running it ------------------------------------------------------------------------------------------------------


def launch(jobs: list[Job], out: Path, n: int) -> dict[str, str]:
    """Run the jobs, `n` at a time -> by name the last line that each one said."""

    def one(job: Job) -> tuple[str, str]:
        file, begun = out / "logs" / f"{job.name}.txt", time.perf_counter()
        with file.open("a") as log:
            rc = subprocess.run([sys.executable, ROOT / job.argv[0], *job.argv[1:]], stdout=log, stderr=log).returncode
        wall, said = round(time.perf_counter() - begun, 1), (file.read_text().strip().splitlines() or [""])[-1]
        append_line(out / "runs.jsonl", {"run": job.name, "rc": rc, "wall_sec": wall})
        print(f"{job.name}: {wall:.0f} s, {f'exit code {rc}: {said}' if rc else 'ended'}", flush=True)
        return job.name, said

    pool = ThreadPoolExecutor(n)
    try:
        return dict(pool.map(one, jobs))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C goes to the jobs too, which end with a checkpoint


def train(students: list[Student], out: Path, args) -> dict[str, str]:
    """Make the students that are not there yet -> why the others could not be made, by `made_by`."""
    begun = [job for job in together(students, out, args.per_run) if (out / job.name).is_dir()]  # these go on as they are
    there = made(out).keys() | {s.made_by for job in begun for s in job.students}
    jobs = begun + together([s for s in students if s.made_by not in there], out, args.per_run)
    jobs = [job for job in jobs if any(s.made_by not in made(out) for s in job.students)]
    launch(jobs, out, args.jobs)
    there = made(out)
    jobs = together([s for job in jobs for s in job.students if s.made_by not in there], out, 1)  # what broke, alone
    said, there = launch(jobs, out, args.jobs), made(out)
    return {job.students[0].made_by: said[job.name] for job in jobs if job.students[0].made_by not in there}


def score(there: dict[str, Path], students: list[Student], n_rows: int, out: Path, args) -> dict[str, str]:
    """Score students on `n_rows` held-out rows after those that have chosen -> why others could not be scored."""
    said = {}
    for size in (AT_A_TIME, 1):  # what broke, alone
        todo, jobs = [s for s in students if n_scored(there[s.made_by]) != n_rows], []
        for some in (todo[at : at + size] for at in range(0, len(todo), size)):
            folders = list(dict.fromkeys(str(there[s.made_by]) for s in some))
            flags = [f"--skip_rows={some[0].cfg.val_max_rows}", f"--max_rows={n_rows}", f"--device={some[0].cfg.device}"]
            jobs.append(Job(f"eval_{Path(folders[0]).name}_{len(jobs)}", ["eval.py", *folders, "--tasks=none", *flags], some))
        said = launch(jobs, out, args.jobs)
    return {s.made_by: said[job.name] for job in jobs for s in job.students if n_scored(there[s.made_by]) != n_rows}


def n_scored(folder: Path) -> int:
    file = folder / "eval_heldout.json"
    return (read_json(file)["intrinsic"] or {"n_rows": 0})["n_rows"] if file.is_file() else 0


def compare(args, spec: Spec, cfg: Config) -> None:
    """Trials, seeds, scores, and what is kept of them."""
    out = args.out
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with locked(out, UserError(f"{out}: another compare.py is at work there")):
        prepare(cfg, out / "config.py")
        n, first = len(open_rows(cfg.data_dir, "val")[0]), cfg.val_max_rows
        if first is None or first >= n:
            raise UserError(
                f"val_max_rows={first}: they choose, later rows are scored; {cfg.data_dir} has {n}, set fewer"
            )
        tried = trials(spec.tune, cfg.methods)
        tune = {(m, i): alone("tune", f"{m}{'-' if '@' in m else '@'}t{i}", m, at_equal(spec.at, m, cfg), 0, settings)
                for m, of in tried.items() for i, settings in enumerate(of)}  # fmt: skip
        failed, there = train([*tune.values()], out, args), made(out)
        ces = {m: [held_out_ce(there.get(tune[m, i].made_by)) for i in range(len(of))] for m, of in tried.items()}
        chosen = {m: of[ces[m].index(min(ces[m]))] for m, of in tried.items() if min(ces[m]) < math.inf}
        students = plan(spec, cfg, args.given, chosen)
        without = {s.made_by: failed.get(tune[s.name, 0].made_by, "every trial stopped")
                   for s in students if s.name in tried and s.name not in chosen}  # fmt: skip
        failed |= without | train([s for s in students if s.made_by not in without], out, args)
        there = made(out)
        whole = [s for s in students if s.made_by in there and not (there[s.made_by] / "stopped.json").is_file()]
        failed |= score(there, whole, min(spec.rows, n - first), out, args)
    collect(students, spec.at, tried, chosen, failed, there, out, args.results)
    settings = {"main": dataclasses.asdict(cfg), "skip_rows": first, "at": spec.at}
    write_json(args.results / "settings.json", settings)
    write_lines(args.results / "rates.jsonl", [
        {"method": m, "lr": settings["lr"], "settings": settings, "val_ce": ce if ce < math.inf else None}
        for m, of in tried.items() for settings, ce in zip(of, ces[m], strict=True)])  # fmt: skip


def prepare(cfg: Config, file: Path) -> None:
    write_whole(file, config_text(cfg))
    if subprocess.run([sys.executable, ROOT / "prepare.py", file], check=False).returncode:
        raise UserError("prepare.py: made no rows; what it says stands above")


def held_out_ce(folder: Path | None) -> float:
    """The CE of a trial's last validation; infinite where it failed or was stopped."""
    if folder is None or (folder / "stopped.json").is_file():
        return math.inf
    return [record["val_ce"] for record in read_lines(folder / "log.jsonl") if "val_ce" in record][-1]


# --- what is kept ----------------------------------------------------------------------------------------------------


def collect(
    students: list[Student],
    at: str,
    tried: dict,
    chosen: dict,
    failed: dict,
    there: dict[str, Path],
    out: Path,
    results: Path,
) -> None:
    """Write what the report needs into `results`: a line for each student, and the logs of the main study."""
    walls, lines = {}, []
    for line in read_lines(out / "runs.jsonl"):
        walls[line["run"]] = round(walls.get(line["run"], 0.0) + line["wall_sec"], 1)
    for old in results.glob("logs*"):
        shutil.rmtree(old)
    results.mkdir(parents=True, exist_ok=True)
    for s in students:
        line = {"settings": s.study, "method": s.name, "seed": s.cfg.seed, "group": s.cfg.group, "at": at}
        line |= {"trials": len(tried[s.name]), "chosen": chosen.get(s.name, {})} if s.name in tried else {}
        if s.made_by in failed:
            line["stopped"] = failed[s.made_by]
        elif s.made_by in there:
            line |= result(s, there[s.made_by], walls)
            if s.study == "main":
                copy_logs(there[s.made_by], s, results)
        else:
            raise UserError(
                f"{s.name}, seed {s.cfg.seed}: has neither a result nor an error; the same command makes it"
            )
        lines.append(line)
    write_lines(results / "results.jsonl", lines)
    write_lines(results / "runs.jsonl", read_lines(out / "runs.jsonl"))


def result(s: Student, folder: Path, walls: dict[str, float]) -> dict:
    """A student's figures, provenance and cost."""
    whole, stopped = read_json(folder.parent / "run.json"), folder / "stopped.json"
    line = {"lr": s.cfg.lr * s.cfg.lr_factor(s.name), "wall_sec": walls.get(folder.parent.name),
            "students_in_run": len(whole["config"]["methods"]), "hardware": whole["machine"],
            **{k: whole[k] for k in ("data_sha256", "val_sha256", "teacher_sha256", "git_commit", "versions")}}  # fmt: skip
    if stopped.is_file():
        return line | {"stopped": read_json(stopped)["why"]}
    facts, scored = read_json(folder / "run.json"), read_json(folder / "eval_heldout.json")
    line |= scored["intrinsic"] | {"weights_sha256": scored["weights_sha256"]}
    line |= {k: facts[k] for k in ("overrides", "step", "valid_tokens", "init_sha256")}
    costs = [each * facts["nominal_tokens"] for each in flops(s.cfg)]
    return line | dict(zip(("student_flops", "teacher_flops"), costs[: 1 + needs_teacher(s.name)], strict=False))


def copy_logs(folder: Path, s: Student, results: Path) -> None:
    """The logs behind the curves, budgets and anchoring, in the layout of a run for each seed."""
    to = results / ("logs" if s.cfg.seed == FIGURE_SEED else f"logs_seed{s.cfg.seed}")
    (to / s.name).mkdir(parents=True)
    for path in (folder / "log.jsonl", folder / "histograms.jsonl"):
        if path.is_file():
            shutil.copy(path, to / s.name)
    for path in (folder.parent / "run.json", folder.parent / "teacher.jsonl"):
        if path.is_file():
            shutil.copy(path, to)


# --- command ---------------------------------------------------------------------------------------------------------


def arguments(argv: list[str]) -> tuple[argparse.Namespace, Spec, Config]:
    """-> compare.py's own flags, what is compared, and the config of every run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter,
                                     usage="compare.py CONFIG [--KEY=VALUE ..] [flags]")  # fmt: skip
    add = parser.add_argument
    add("--seeds", type=int, help="how many, from 1 on; default: the config's, or 3")
    add("--tune", action="append", help="lr=RATE,RATE,.. or METHOD.SETTING=VALUE,..; again for more; none: no trials")
    add("--reference", help="the method that differences are taken from; default: vanilla_kd, or else the first")
    add(
        "--at",
        choices=("updates", "flops"),
        help="what is equal for all methods; flops: of student and teacher together",
    )
    add("--rows", type=int, help="held-out rows to score; default: 512")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--per_run", type=int, default=10**6, help="students of a run at most, where the memory does not hold all")
    add("--out", type=Path, help="folder of the runs; default: out/compare_CONFIG")
    add("--results", type=Path, help="folder of the report; default: OUT/report")
    add("--report", action="store_true", help="only write tables and figures anew, from --results")
    args, rest = parser.parse_known_args(argv)
    files = [word for word in rest if not word.startswith("--")]
    cfg, given = configure.load(rest), {}
    args.given = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
    for file in files:
        given |= runpy.run_path(file).get("_compare", {})
    if "methods" in args.given:  # a comparison of one's own, not the file's studies
        given = {k: v for k, v in given.items() if k in ("seeds", "tune", "reference", "rows", "at")}
    flags = {k: getattr(args, k) for k in ("seeds", "tune", "reference", "rows", "at")}
    given |= {k: tuple(v) if k == "tune" else v for k, v in flags.items() if v is not None}
    unknown = given.keys() - {f.name for f in dataclasses.fields(Spec)}
    if unknown:
        raise UserError(f"_compare: no such key {min(unknown)!r}; lib/report.py lists them (Spec)")
    spec = Spec(**given)
    spec = dataclasses.replace(spec, tune=()) if spec.tune == ("none",) else spec
    args.out = args.out or Path("out", f"compare_{Path(files[0]).stem if files else 'flags'}")
    args.results = args.results or args.out / "report"
    for key in ("seed", "out_dir"):
        if key in args.given:
            raise UserError(f"--{key}: compare.py sets it itself; --seeds=N and --out=FOLDER are its own flags")
    for name in cfg.methods:  # ValueError for a method or a setting that does not exist
        resolve(name, **cfg.overrides_of(name))
    for name, of in trials(spec.tune, cfg.methods).items():
        for settings in of:
            resolve(name, **{key: value for key, value in settings.items() if key != "lr"})
    if spec.reference not in (None, *cfg.methods):
        raise UserError(f"--reference={spec.reference}: expected one of {', '.join(cfg.methods)}")
    for key, value in {"seeds": spec.seeds, "jobs": args.jobs, "rows": spec.rows, "per_run": args.per_run}.items():
        if value is not None and value < 1:
            raise UserError(f"--{key}={value}: expected at least 1")
    return args, spec, cfg


def run(argv: list[str]) -> int:
    args, spec, cfg = arguments(argv)
    if not args.report:
        compare(args, spec, cfg)
    found, table = report(spec, args.results, args.results)
    print(f"\n{table}\n{args.results / 'README.md'}")
    failed = found[found.stopped.notna()]
    for x in failed.itertuples():
        print(f"{x.method} ({x.settings}, seed {x.seed}): no result: {x.stopped}", file=sys.stderr)
    return 1 if len(failed) else 0


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
