"""A fair comparison on any config: as many trials for each method, several seeds, differences paired by seed.

    python study/compare.py config/tiny.py --methods=vanilla_kd,alra --seeds=3 --tune=lr=1e-3,3e-3,1e-2
    python study/compare.py config/tiny.py --methods=vanilla_kd,alra --tune=lr=1e-3,1e-2 --tune=vanilla_kd.tau=0.5,1,2
    python study/compare.py config/tiny.py --print     the commands of the next stage (trials, seeds, scores), to run elsewhere
    python study/compare.py config/tiny.py --report    tables and figures anew, from the results that are there
    python study/compare.py study/small.py --jobs=2 --per_run=5    a study that its config describes: seeds, trials and tables

The trials of all methods share one run with seed 0, and so one pass of the teacher. The lowest CE over the first
`val_max_rows` held-out rows chooses; the rows after them are scored. Then come seeds 1, 2, ..: a seed gives the student's
initial weights and the order of rows, the same for all methods. A finished student is recognised by what made it
(run/identity.py) and not made again, so after a kill the same command goes on. What breaks in a shared run is
tried alone; a student that fails there too is reported with its error, and the exit code is 1.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import math
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import configure
from configure import Config
from lib import files
from lib.errors import UserError, require
from lib.files import read_json, read_lines
from lib.rows import open_rows
from lib.settings import literal
from lib.stats import FIGURES
from losses import resolve
from model import flops_per_token, load_config
from run.identity import content_hash, made_by, record_hash, student_shape
from run.methods import needs_teacher
from run.tables import read_if_there
from run.foreign import foreign_config
from run.teacher import Teacher, is_native
from study.report import Spec, best_trials, report

ROOT = Path(__file__).resolve().parent.parent
RECORDED = (*FIGURES, "n_rows", "skip_rows", "n_targets", "teacher", "teacher_ce", "teacher_entropy", "uniform_ce", "unigram_ce",
            "step", "valid_tokens", "init_sha256", "data_sha256", "val_sha256", "teacher_sha256", "rows_sha256")  # fmt: skip
STEPS = ("max_steps", "schedule_steps", "warmup_steps")  # fewer in a trial


class PlannedStudent(NamedTuple):
    stage: str  # "tune" or "main"
    name: str  # METHOD or METHOD@LABEL
    cfg: Config  # of a run of it alone

    @property
    def recipe(self) -> str:
        """What makes it, and how far; of a trial also the rows that judge it."""
        judged = f" judged by {self.cfg.val_max_rows} rows" if self.stage == "tune" else ""
        return f"{_record_hash(self.cfg, self.name)} {self.cfg.max_steps}{judged}"


@functools.cache
def _record_hash(cfg: Config, name: str) -> str:
    return record_hash(made_by(cfg, name))


class Job(NamedTuple):
    name: str
    argv: list[str]
    students: list[PlannedStudent]  # that it makes or scores


def student(stage: str, name: str, method: str, cfg: Config, seed: int, settings: dict) -> PlannedStudent:
    """The student `name` with the settings that `cfg` has for `method`, and further ones; histograms are for one seed's figures."""
    hyper, every = {name: cfg.settings_of(method) | settings}, cfg.histogram_every_steps if seed == 1 else None
    return PlannedStudent(stage, name, dataclasses.replace(cfg, methods=(name,), hyper=hyper, seed=seed, histogram_every_steps=every))  # fmt: skip


def trials(tune: tuple[str, ...], methods: tuple[str, ...]) -> dict[str, list[dict]]:
    """Settings to try by method, as many for each: a method with fewer settings to choose gets more rates."""
    rates, choices = [], {m: {} for m in methods}
    for text in tune:
        key, _, values = text.partition("=")
        method, _, setting = key.rpartition(".")
        values = [literal(v) for v in values.split(",")]
        require(len({*map(str, values)}) == len(values), f"--tune={text}: a value twice")
        if key == "lr" and len(values) > 1 and all(isinstance(v, int | float) and v > 0 for v in values):
            rates = [float(v) for v in values]
        elif method in choices and setting != "lr":
            choices[method][setting] = values
        else:
            expected = f"lr=RATE,RATE,.. or METHOD.SETTING=VALUE,.. with a method of {','.join(methods)}"
            raise UserError(f"--tune={text}: expected {expected}")
    says = f"--tune={tune[:1]}: add --tune=lr=RATE,RATE,.., so that all methods can have as many trials"
    require(rates or not tune, says)
    grids = {m: [dict(zip(c, point, strict=True)) for point in itertools.product(*c.values())] for m, c in choices.items()}  # fmt: skip
    n = len(rates) * max(map(len, grids.values()))
    ladders = {m: more_rates(rates, math.ceil(n / len(grid))) for m, grid in grids.items()}
    return {m: [point | {"lr": lr} for lr in ladders[m] for point in grid][:n] for m, grid in grids.items() if n}


def more_rates(rates: list[float], n: int) -> list[float]:
    """n rates: the given ones, then the geometric middle of the widest gap, again and again."""
    rates = list(rates)
    while len(rates) < n:
        gaps = itertools.pairwise(sorted(rates))
        low, high = max(gaps, key=lambda gap: round(gap[1] / gap[0], 1))
        rates.append(float(f"{math.sqrt(low * high):.3g}"))
    return rates


def plan(spec: Spec, cfg: Config, chosen: dict[str, dict]) -> list[PlannedStudent]:
    """The students of all methods and seeds."""
    return [student("main", name, name, at_equal(spec.at, name, cfg), seed, chosen.get(name, {})) for name in cfg.methods
            for seed in range(1, spec.seeds_of(name) + 1)]  # fmt: skip


def at_equal(what: str, name: str, cfg: Config) -> Config:
    """The config of a method: at equal FLOPs, always so for METHOD@flops, one without a teacher makes more updates."""
    if (what == "updates" and not name.endswith("@flops")) or needs_teacher(name) or cfg.teacher is None:
        return cfg
    of_student, of_teacher = flops(cfg)
    longer = {key: round(getattr(cfg, key) * (1 + of_teacher / of_student)) for key in ("max_steps", "schedule_steps")}
    return dataclasses.replace(cfg, **longer)


def flops(cfg: Config) -> tuple[float, float]:
    """FLOPs of one token: of a student that is trained, and of the teacher's forward pass."""
    of_student = flops_per_token(student_shape(cfg), cfg.seq_len, trained=True)
    if cfg.teacher is None:
        return of_student, 0.0
    if is_native(cfg.teacher):
        return of_student, flops_per_token(load_config(cfg.teacher), cfg.seq_len, trained=False)
    with torch.device("meta") as nowhere:
        teacher = Teacher(transformers.AutoModelForCausalLM.from_config(foreign_config(cfg.teacher)), nowhere)
    return of_student, teacher.flops_per_token(cfg.seq_len)


def shared_runs(students: list[PlannedStudent], out: Path, at_most: int) -> list[Job]:
    """Runs of train.py: students that differ in method and settings alone share one, `at_most` of them."""
    groups: dict[tuple, list[PlannedStudent]] = {}
    for s in {s.recipe: s for s in students}.values():
        shared = dataclasses.replace(s.cfg, methods=("any",), hyper={})
        shared = (shared, "@" in s.name)  # METHOD@LABEL would take over settings of a METHOD beside it
        groups.setdefault(shared, []).append(s)
    return [training(some[at : at + at_most], shared, out) for (shared, _), some in groups.items()
            for at in range(0, len(some), at_most)]  # fmt: skip


def training(students: list[PlannedStudent], shared: Config, out: Path) -> Job:
    """A run of these students, with a config file of its own; named after what it holds."""
    names, hyper = tuple(s.name for s in students), {s.name: s.cfg.hyper[s.name] for s in students}
    cfg = dataclasses.replace(shared, methods=names, hyper=hyper, out_dir="")
    sha = hashlib.sha256(f"{config_text(cfg)}{[s.recipe for s in students]}".encode()).hexdigest()[:8]
    folder = out / f"{students[0].stage}_seed{cfg.seed}_{sha}"
    files.atomic_write(folder.with_suffix(".py"), config_text(dataclasses.replace(cfg, out_dir=str(folder))))
    return Job(folder.name, ["train.py", f"{folder}.py"], students)


def config_text(cfg: Config) -> str:
    """The config as a config file: the methods, and what differs from the defaults."""
    default = dataclasses.asdict(Config()) | {"methods": None}
    return "".join(f"{key} = {value!r}\n" for key, value in dataclasses.asdict(cfg).items() if value != default[key])


def finished(out: Path) -> dict[str, Path]:
    """The students of all runs in a folder that have ended, also of runs that were started by hand: recipe -> folder."""
    folders = {}
    for file in (*sorted(out.glob("*/*/stopped.json")), *sorted(out.glob("*/*/run.json"))):
        run = file.parents[1]  # which resumes as a whole: its students count when all have ended
        names = read_if_there(run / "run.json").get("config", {}).get("methods", ())
        facts = read_json(file, ("made_by_sha256", "config"))
        recipe = f"{facts['made_by_sha256']} {facts['config']['max_steps']}"
        if all((run / name / "run.json").is_file() or (run / name / "stopped.json").is_file() for name in names):
            folders[recipe] = folders[f"{recipe} judged by {facts['config']['val_max_rows']} rows"] = file.parent
    return folders


def launch(jobs: list[Job], args) -> dict[str, str]:
    """Run the jobs, `--jobs` at a time -> job's name: the last line that it printed. `--print` prints them and exits."""
    if jobs and args.print:
        print("\n".join(shlex.join(["python", *job.argv]) for job in jobs))
        sys.exit(0)
    running, ending = [], threading.Event()

    def run_job(job: Job) -> tuple[str, str]:
        file, begun = args.out / "logs" / f"{job.name}.txt", time.perf_counter()
        with file.open("a") as log:
            process = subprocess.Popen([sys.executable, ROOT / job.argv[0], *job.argv[1:]], stdout=log, stderr=log)
            running.append(process)
            if ending.is_set():  # since it was started
                process.terminate()
            rc = process.wait()
        wall, said = time.perf_counter() - begun, (file.read_text().strip().splitlines() or [""])[-1]
        print(f"{job.name}: {wall:.0f} s, {f'exit code {rc}: {said}' if rc else 'ended'}", flush=True)
        return job.name, said

    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            return dict(pool.map(run_job, jobs))
        finally:  # by Ctrl-C or SIGTERM too: runs of train.py then end with a checkpoint
            ending.set()
            for process in running:
                process.terminate()


def attempt(students: list[PlannedStudent], jobs_of: Callable, done: Callable, args) -> dict[str, str]:
    """Run `jobs_of(missing students, most in a job)` until `done()` has all recipes -> errors by recipe, of those that also fail alone."""
    said: dict[str, str] = {}
    for at_most in (args.per_run, 1):  # what breaks in a shared job is tried alone
        there = done()
        jobs = jobs_of([s for s in students if s.recipe not in there], at_most)
        said |= launch([job for job in jobs if job.name not in said], args)
    there = done()
    return {job.students[0].recipe: said[job.name] for job in jobs if job.students[0].recipe not in there}


def train(students: list[PlannedStudent], args) -> dict[str, str]:
    """Make the students that are missing -> recipe: why one could not be made."""
    return attempt(students, lambda some, n: shared_runs(some, args.out, n), lambda: finished(args.out).keys(), args)


def score(students: list[PlannedStudent], folders: dict[str, Path], n_rows: int, args) -> dict[str, str]:
    """Score students on `n_rows` held-out rows, after those that have chosen -> recipe: why one could not be scored."""

    def scoring(students: list[PlannedStudent], at_most: int) -> list[Job]:
        distinct, jobs = [*{s.recipe: s for s in students}.values()], []
        for some in (distinct[at : at + at_most] for at in range(0, len(distinct), at_most)):
            paths, cfg = [folders[s.recipe] for s in some], some[0].cfg
            rows = [f"--skip_rows={cfg.val_max_rows}", f"--max_rows={n_rows}"]
            argv = ["eval.py", *map(str, paths), "--tasks=none", *rows, f"--device={cfg.device}"]
            jobs.append(Job(f"eval_{paths[0].parent.name}_{paths[0].name}_{len(paths)}", argv, some))
        return jobs

    def scored() -> set[str]:
        return {s.recipe for s in students if is_scored(s, folders[s.recipe], n_rows)}

    return attempt(students, scoring, scored, args)


def is_scored(s: PlannedStudent, folder: Path, n_rows: int) -> bool:
    """Whether its folder has the figures of this very student over the rows that are wanted."""
    wanted = {"skip_rows": s.cfg.val_max_rows, "n_rows": n_rows}
    wanted |= {"teacher_sha256": content_hash(s.cfg.teacher)} if s.cfg.teacher else {}
    scores = read_if_there(folder / "figures.json", ("run", "figures")) or {"figures": {}}
    same = wanted.items() <= scores["figures"].items()
    return same and scores["run"]["made_by_sha256"] == read_json(folder / "run.json")["made_by_sha256"]


def compare(args, spec: Spec, cfg: Config) -> None:
    """Trials, seeds and scores; what the report needs is written into OUT/report."""
    foreign = [] if (args.out / "logs" / ".compare").exists() else [*args.out.glob("*")]  # files are overwritten there
    require(not foreign, f"--out={args.out}: contains {foreign[:1]}, not of compare.py; choose another folder")
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    (args.out / "logs" / ".compare").touch()
    with files.locked(args.out, f"{args.out}: another compare.py is at work there"):
        if not args.print:
            prepare(cfg, args.out / "config.py")
        n, first = len(open_rows(cfg.data_dir, "val")[0]), cfg.val_max_rows
        says = f"val_max_rows={first}: these rows choose, later ones are scored; {cfg.data_dir} has {n}, set fewer"
        require(first is not None and first < n, says)
        rates, broken = run_trials(spec, cfg, args)
        chosen = {m: trial["settings"] for m, trial in best_trials(rates).items()}
        students = plan(spec, cfg, chosen)
        failed = {s.recipe: broken[s.name] for s in students if s.name in broken and s.name not in chosen}
        failed |= train([s for s in students if s.recipe not in failed], args)
        folders = finished(args.out)
        whole = [s for s in students if s.recipe in folders and not (folders[s.recipe] / "stopped.json").is_file()]
        failed |= score(whole, folders, min(spec.rows, n - first), args)
    write_results(students, failed, rates, args.out)
    files.write_json(args.out / "report" / "settings.json", dataclasses.asdict(cfg) | {"skip_rows": first, "at": spec.at, "trial_steps": spec.trial_steps or cfg.max_steps})  # fmt: skip


def prepare(cfg: Config, file: Path) -> None:
    files.atomic_write(file, config_text(cfg))
    done = subprocess.run([sys.executable, ROOT / "prepare.py", file], check=False)
    require(not done.returncode, "prepare.py: made no rows; see its message above")


def run_trials(spec: Spec, cfg: Config, args) -> tuple[list[dict], dict[str, str]]:
    """Make the trials, with seed 0 -> a record of each, and by method why its first one failed, if it did."""
    share = (spec.trial_steps or cfg.max_steps) / cfg.max_steps
    cfg = dataclasses.replace(cfg, **{key: round(share * getattr(cfg, key)) for key in STEPS})
    tried = [(m, settings, student("tune", f"{m}{'-' if '@' in m else '@'}t{i}", m, at_equal(spec.at, m, cfg), 0, settings))
             for m, points in trials(spec.tune, cfg.methods).items() for i, settings in enumerate(points)]  # fmt: skip
    failed, folders = train([s for _, _, s in tried], args), finished(args.out)
    rates = [{"method": m, "lr": settings["lr"], "settings": settings, "val_ce": last_val_ce(folders.get(s.recipe))}
             for m, settings, s in tried]  # fmt: skip
    return rates, {m: failed.get(s.recipe, "every trial stopped") for m, _, s in reversed(tried)}


def last_val_ce(folder: Path | None) -> float | None:
    """The CE of a trial's last validation; None for one that failed or stopped."""
    if folder is None or (folder / "stopped.json").is_file():
        return None
    return [record["val_ce"] for record in read_lines(folder / "log.jsonl") if "val_ce" in record][-1]


def write_results(students: list[PlannedStudent], failed: dict[str, str], rates: list[dict], out: Path) -> None:
    """rates.jsonl; students.jsonl with a line for each planned student, which names the folder of its logs."""
    folders, lines = finished(out), []
    for s in students:
        line = {"method": s.name, "seed": s.cfg.seed}
        made = s.recipe in failed or s.recipe in folders
        require(made, f"{s.name}, seed {s.cfg.seed}: neither a result nor an error; run the same command again")
        if s.recipe in failed:
            line["stopped"] = failed[s.recipe]
        else:
            line |= outcome(s, folders[s.recipe]) | {"folder": str(folders[s.recipe].relative_to(out))}
        lines.append(line)
    (out / "report").mkdir(exist_ok=True)
    files.write_lines(out / "report" / "students.jsonl", lines)
    files.write_lines(out / "report" / "rates.jsonl", rates)


def outcome(s: PlannedStudent, folder: Path) -> dict:
    """A student's figures, costs and provenance, or why it stopped."""
    run, stopped = read_json(folder.parent / "run.json"), folder / "stopped.json"
    line = {"lr": s.cfg.lr * s.cfg.lr_factor(s.name), "settings": s.cfg.settings_of(s.name)}
    line |= {key: run[key] for key in ("machine", "git_commit", "versions")}
    if stopped.is_file():
        return line | {"stopped": read_json(stopped)["why"]}
    facts = read_json(folder / "run.json")
    facts |= facts["made_by"] | read_if_there(folder / "figures.json").get("figures", {})
    line |= {key: facts[key] for key in RECORDED if facts.get(key) is not None}
    costs = [each * facts["nominal_tokens"] for each in flops(s.cfg)]
    return line | dict(zip(("student_flops", "teacher_flops"), costs[: 1 + needs_teacher(s.name)], strict=False))


def arguments(argv: list[str]) -> tuple[argparse.Namespace, Spec, Config]:
    """-> compare.py's own flags, what is compared, and the config of every run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter,
                                     usage="compare.py CONFIG [--KEY=VALUE ..] [flags]")  # fmt: skip
    add = parser.add_argument
    add("--seeds", type=int, help="how many, from 1 on; default: the config's, or 3")
    add("--tune", action="append", help="lr=RATE,RATE,.. or METHOD.SETTING=VALUE,..; again for more; none: no trials")
    add("--trial_steps", type=int, help="updates of a trial; default: as many as of a student")
    add("--reference", help="the method that differences are taken from; default: vanilla_kd, or else the first")
    add("--at", choices=("updates", "flops"), help="what is equal for all methods; flops: of student and teacher")
    add("--rows", type=int, help="held-out rows to score; default: 512")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--per_run", type=int, default=10**6, help="students that share a run at most, where memory is short")
    add("--out", type=Path, help="folder of the runs, and of the report in OUT/report; default: out/compare_CONFIG")
    add("--print", action="store_true", help="print the commands of the next stage instead of running them")
    add("--report", action="store_true", help="only write tables and figures anew, from OUT")
    args, rest = parser.parse_known_args(argv)
    paths = [word for word in rest if not word.startswith("--")]
    args.flags = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
    cfg, given = configure.load(rest), {}
    for file in paths:
        given |= runpy.run_path(file).get("_compare", {})
    own = ("seeds", "tune", "reference", "rows", "at", "trial_steps")
    if "methods" in args.flags:  # a comparison of one's own, not the file's
        given = {key: value for key, value in given.items() if key in own}
        given["tune"] = [
            x for x in given.get("tune", ()) if x.partition("=")[0].rpartition(".")[0] in ("", *cfg.methods)
        ]
    given |= {key: getattr(args, key) for key in own if getattr(args, key) is not None}
    unknown = [key for key in given if key not in Spec.__dataclass_fields__]
    require(not unknown, f"_compare: no such key {unknown}; study/report.py lists them (Spec)")
    tune = tuple(given.get("tune", ()))
    spec = Spec(**given | {"tune": () if tune == ("none",) else tune})
    args.out = args.out or Path("out", f"compare_{Path(paths[0]).stem if paths else 'flags'}")
    own = [f"--{key}" for key in ("seed", "out_dir") if key in args.flags]
    require(not own, f"{own}: compare.py sets it itself; --seeds=N and --out=FOLDER are its own flags")
    tried = trials(spec.tune, cfg.methods)
    for name in cfg.methods:
        for settings in (cfg.overrides_of(name), *tried.get(name, ())):  # ValueError for one that does not exist
            resolve(name, **{key: value for key, value in settings.items() if key != "lr"})
    named = {m for _, names, ref in spec.tables for m in (*names, ref)} | {*spec.fewer_seeds}
    odd = sorted(named - {*cfg.methods})
    configured = (
        {flag.rpartition(".")[0] for flag in args.flags if "." in flag} if "methods" in args.flags else cfg.hyper
    )
    compared = {m.partition("@")[0] for m in cfg.methods}
    unused = sorted(name for name in configured if name.partition("@")[0] not in compared)
    for ok, message in (
        (spec.reference in (None, *cfg.methods), f"--reference={spec.reference}: expected one of {', '.join(cfg.methods)}"),
        (spec.at in ("updates", "flops"), f"_compare: at={spec.at!r}: expected 'updates' or 'flops'"),
        (not odd, f"_compare: {odd} in tables or fewer_seeds: expected some of {', '.join(cfg.methods)}"),
        (not unused, f"settings of {unused}, which is not compared; add the method, or remove its settings"),
    ):  # fmt: skip
        require(ok, message)
    counts = {"seeds": spec.seeds, "rows": spec.rows, "trial_steps": spec.trial_steps, "jobs": args.jobs, "per_run": args.per_run}  # fmt: skip
    for key, value in counts.items():
        require(value is None or value >= 1, f"--{key}={value}: expected at least 1")
    return args, spec, cfg


def main(argv: list[str]) -> int:
    args, spec, cfg = arguments(argv)
    if not args.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `launch` ends its runs
        compare(args, spec, cfg)
    students, table = report(spec, args.out)
    print(f"\n{table}\n{args.out / 'report' / 'README.md'}")
    failed = [x for x in students if "stopped" in x]
    for x in failed:
        print(f"{x['method']} (seed {x['seed']}): no result: {x['stopped']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(configure.guard(lambda: main(sys.argv[1:])))
