"""Every method, variant and study of the paper at a scale that one machine can afford: several seeds, paired.

    python replicate.py --jobs=2                  hours on two cores; started again it goes on where it was
    python replicate.py --quick                   two seeds, short rows, no choice of learning rates: minutes
    python replicate.py --compile=True            --key=value of configure.py goes on to every run
    python replicate.py --report                  tables and figures anew, from the committed logs alone

First the learning rate of each of the nine methods: the lowest held-out CE of seed 0, over a ladder that is climbed until
both neighbours of the best rate have been tried (variants take ALRA's). Then seeds 1, 2, ..: a seed is the student's
initial weights and the order of rows, the same for all methods, so that comparisons are paired. Students with equal
settings share a run and its teacher. Then `eval.py`, and all that counts goes into `results/replication/`.
"""

import argparse
import csv
import dataclasses
import fcntl
import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats
from tqdm import tqdm

import configure
from lib import tables
from lib.figures import FIGURES
from lib.files import append_line, read_lines, write_lines

ROOT = Path(__file__).resolve().parent
STUDIES = {  # name -> what differs from config/mini.py
    "main": (),
    "pair": ("--methods=alra_u,alra_r",),
    "anchor": ("--methods=alra_n,alra_ng,alra_g",),
    "budget": ("--methods=fixed_3,fixed_7,fixed_9,fixed_15,fixed_19,fixed_25",),
    "detach": ("--methods=alra", "--alra.detach_weights=False"),  # a gradient through the SWPRA weights
    "group4": ("--methods=vanilla_kd,atkd,tad,alra", "--group=4"),  # forward batches of 4 rows
    "group16": ("--methods=vanilla_kd,atkd,tad,alra", "--group=16"),
    "long": ("--methods=pretrain,vanilla_kd,tad,alra,fixed_9,alra_n", "--max_steps=600", "--schedule_steps=600",
             "--warmup_steps=60", "--val_every_steps=600"),  # do the differences last?
}  # fmt: skip
NAMES = tuple(STUDIES)
LADDER = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # learning rates, the middle ones first
FIGURE_SEED = 1  # whose logs the figures are drawn from; only its runs count d_u and the teacher's probabilities
QUICK = ("--max_steps=200", "--schedule_steps=200", "--warmup_steps=20", "--val_max_rows=32",
         "--seq_len=32", "--data_dir=data/mini_quick")  # fmt: skip
AT_A_TIME = 32  # students per process of eval.py, where they share the teacher's pass


class ReplicateError(ValueError):
    """Runs that cannot be made, or results that cannot be compared."""


# --- what is to be run -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    folder: Path
    files: tuple[str, ...]  # config files, then flags
    methods: tuple[str, ...]
    lr: float
    seed: int
    steps: int
    settings: str  # the first of NAMES that has these settings

    def argv(self) -> list[str]:
        argv = ["train.py", *self.files, f"--methods={','.join(self.methods)}", f"--lr={self.lr:g}", f"--seed={self.seed}",
                f"--min_lr={self.lr / 10:g}", f"--out_dir={self.folder}"]  # fmt: skip
        return argv + ["--histogram_every_steps=None"] * (self.seed != FIGURE_SEED)

    def ended(self, method: str) -> bool:
        return any((self.folder / method / name).is_file() for name in ("run.json", "stopped.json"))

    def done(self) -> int:
        """The number of updates made so far, summed over students; students of one run advance together."""
        left = [m for m in self.methods if not self.ended(m)]
        log = read_lines(self.folder / left[0] / "log.jsonl") if left else []
        return self.steps * (len(self.methods) - len(left)) + len(left) * (log[-1]["step"] if log else 0)


def files_of(name: str, flags: list[str]) -> tuple[str, ...]:
    return ("config/mini.py", *STUDIES[name], *flags)


def plan(out: Path, flags: list[str], rates: dict[str, float], seeds: range, only: tuple[str, ...]) -> list[Run]:
    """The runs of all studies. Studies that differ only in methods share one run per learning rate."""
    names, shared = {}, {}
    steps = configure.load(files_of("main", flags)).config.max_steps
    for name in NAMES:
        cfg = configure.load(files_of(name, flags)).config
        if name == "long" and cfg.max_steps == steps:  # a flag has set both: no longer runs
            continue
        settings = dataclasses.replace(cfg, methods=("pretrain",), out_dir="")
        first = names.setdefault(settings, name)
        for method in cfg.methods:
            if not only or method in only:
                shared.setdefault((settings, first, rates.get(method, rates.get("alra", cfg.lr))), []).append(method)
    return [Run(out / f"{name}_lr{lr:g}_seed{seed}", files_of(name, flags), tuple(methods), lr, seed, cfg.max_steps, name)
            for (cfg, name, lr), methods in shared.items() for seed in seeds]  # fmt: skip


def rate_runs(out: Path, flags: list[str], wanted: dict[float, list[str]]) -> list[Run]:
    files = files_of("main", flags)
    steps = configure.load(files).config.max_steps
    return [Run(out / f"rate_{lr:g}", files, tuple(methods), lr, 0, steps, "main") for lr, methods in wanted.items()]


def next_rates(found: dict[str, dict[float, float]]) -> dict[float, list[str]]:
    """Per method the CE of each rate so far -> the rates to try next, with their methods; {} when all are chosen."""
    wanted: dict = {}
    for method, by_rate in found.items():
        best = LADDER.index(min(by_rate, key=by_rate.get)) if by_rate else None
        near = LADDER[1:-1] if best is None else LADDER[max(best - 1, 0) : best + 2]
        for lr in near:
            if lr not in by_rate:
                wanted.setdefault(lr, []).append(method)
    return wanted


def held_out_ce(run: Run, method: str) -> float:
    """The CE of the last validation; infinite where the student was stopped."""
    if (run.folder / method / "stopped.json").is_file():
        return math.inf
    return read_lines(run.folder / method / "log.jsonl")[-1]["val_ce"]


# --- running it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    name: str
    argv: list[str]
    run: Run | None = None  # None: eval.py


def work(jobs: list[Job], out: Path, at_a_time: int, bar: tqdm, lock) -> None:
    """Run the jobs, some at a time, with a line per job in runs.jsonl. If this process ends, they end with a checkpoint."""
    waiting, busy, done = list(jobs), {}, {}
    try:
        while waiting or busy:
            while waiting and len(busy) < at_a_time:
                job = waiting.pop(0)
                done[job.name] = job.run.done() if job.run else 0
                with (out / "logs" / f"{job.name}.txt").open("a") as log:
                    # the lock is theirs too, should this process be killed
                    process = subprocess.Popen([sys.executable, *job.argv], cwd=ROOT, stdout=log, stderr=log, pass_fds=[lock.fileno()])  # fmt: skip
                busy[process] = (job, time.perf_counter())
            time.sleep(0.3)
            for process, (job, begun) in list(busy.items()):
                rc = process.poll()
                if job.run:
                    now = job.run.done()
                    bar.update(now - done[job.name])
                    done[job.name] = now
                if rc is None:
                    continue
                del busy[process]
                line = {"run": job.name, "rc": rc, "wall_sec": round(time.perf_counter() - begun, 1), "ended": time.strftime("%F %T")}  # fmt: skip
                append_line(out / "runs.jsonl", line)
                bar.write(f"{line['ended']}  {job.name}: {line['wall_sec']:.0f} s, exit code {rc}; {bar.n / bar.total:.0%} of all, {to_go(bar)} to go")  # fmt: skip
                if not all(job.run.ended(m) for m in job.run.methods) if job.run else rc:
                    said = (out / "logs" / f"{job.name}.txt").read_text().splitlines()[-1:]
                    raise ReplicateError(f"{job.name}: not at its end, exit code {rc}: {said}; the same command goes on from there")  # fmt: skip
    finally:
        for process in busy:
            process.terminate()
        for process, (job, begun) in busy.items():
            process.wait()
            append_line(
                out / "runs.jsonl", {"run": job.name, "rc": None, "wall_sec": round(time.perf_counter() - begun, 1)}
            )


def to_go(bar: tqdm) -> str:
    """Time left at the pace since this start; eval.py comes on top."""
    made = bar.n - bar.initial
    elapsed = bar.format_dict["elapsed"]
    return tqdm.format_interval(elapsed / made * (bar.total - bar.n)) if made > 0 else "?"


def train(runs: list[Run], out: Path, args, bar: tqdm, lock) -> None:
    left = [r for r in runs if not all(r.ended(m) for m in r.methods)]
    work([Job(r.folder.name, r.argv(), r) for r in left], out, args.jobs, bar, lock)


def score(runs: list[Run], out: Path, args, device: str, bar: tqdm, lock) -> None:
    folders = [r.folder / m for r in runs for m in r.methods]
    left = [f for f in folders if (f / "run.json").is_file() and not (f / "eval_heldout.json").is_file()]
    jobs = []
    for some in (left[at : at + AT_A_TIME] for at in range(0, len(left), AT_A_TIME)):
        argv = ["eval.py", *map(str, some), "--tasks=none", f"--max_rows={args.rows}", f"--device={device}"]
        jobs.append(Job(f"eval_{some[0].parent.name}_{some[0].name}", argv))
    work(jobs, out, args.jobs, bar, lock)


def replicate(args, flags: list[str]) -> None:
    out = args.out
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{out}: runs of an earlier start are still at work there; waiting for them to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        same_settings(out, flags, args.rows)
        cfg = configure.load(files_of("main", flags)).config
        subprocess.run([sys.executable, "prepare.py", *files_of("main", flags)], cwd=ROOT, check=True)
        every = [m for name in NAMES for m in configure.load(files_of(name, flags)).config.methods]
        unknown = [m for m in args.methods if m not in every]
        if unknown:
            raise ReplicateError(f"--methods: {unknown[0]} is in none of its studies")
        variants = [m for m in args.methods if m not in cfg.methods]  # they take ALRA's rate
        nine = [m for m in cfg.methods if not args.methods or m in args.methods or (m == "alra" and variants)]
        found, seeds = {m: {} for m in nine}, range(1, args.seeds + 1)
        wanted, rates = {} if args.quick else next_rates(found), {}
        rate = sum(len(m) for m in wanted.values()) * cfg.max_steps
        total = rate + sum(r.steps * len(r.methods) for r in plan(out, flags, {}, seeds, args.methods))
        slow = 0.5 if sys.stderr.isatty() else 60.0
        with tqdm(
            total=total, unit="update", mininterval=slow, maxinterval=slow, dynamic_ncols=True, smoothing=0.05
        ) as bar:
            while wanted:
                runs = rate_runs(out, flags, wanted)
                start(bar, runs)
                train(runs, out, args, bar, lock)
                for run, m in ((r, m) for r in runs for m in r.methods):
                    found[m][run.lr] = held_out_ce(run, m)
                wanted = next_rates(found)
                bar.total += sum(len(m) for m in wanted.values()) * cfg.max_steps
            if not args.quick:
                rates = {m: min(by_rate, key=by_rate.get) for m, by_rate in found.items()}
            runs = plan(out, flags, rates, seeds, args.methods)
            start(bar, runs)
            train(runs, out, args, bar, lock)
            score(runs, out, args, cfg.device, bar, lock)
    collect(runs, found, out, args.results)


def start(bar: tqdm, runs: list[Run]) -> None:
    """Count the updates of earlier starts, but not towards the speed."""
    done = sum(r.done() for r in runs)
    bar.initial += done
    bar.n += done


def same_settings(out: Path, flags: list[str], rows: int) -> None:
    """Save the settings that all runs of the folder share, or check that they are unchanged."""
    every = {name: dataclasses.asdict(configure.load(files_of(name, flags)).config) for name in NAMES}
    now, file = json.loads(json.dumps({"eval_rows": rows, **every})), out / "settings.json"
    before = now | json.loads(file.read_text()) if file.is_file() else now  # a study that is new differs from nothing
    if before != now:
        differs = [f"{name}.{key}={before[name][key]!r} there, {now[name][key]!r} here"
                   for name in NAMES for key in now[name] if before[name].get(key) != now[name][key]]  # fmt: skip
        raise ReplicateError(f"{out}: holds runs of other settings ({(differs or ['rows of eval.py'])[0]}); set another --out")  # fmt: skip
    file.write_text(json.dumps(now, indent=1) + "\n")


# --- what is kept ----------------------------------------------------------------------------------------------


def collect(runs: list[Run], found: dict, out: Path, results: Path) -> None:
    """Copy what the report needs from the runs' folders into `results`: a line per student, and the logs of one seed."""
    walls: dict = {}
    for line in read_lines(out / "runs.jsonl"):
        walls[line["run"]] = round(walls.get(line["run"], 0.0) + line["wall_sec"], 1)
    lines, shown = [], []
    for run, m in ((r, m) for r in runs for m in r.methods):
        folder, whole = run.folder / m, json.loads((run.folder / "run.json").read_text())
        line = {"settings": run.settings, "method": m, "lr": run.lr, "seed": run.seed, "group": whole["config"]["group"]}  # fmt: skip
        if (folder / "stopped.json").is_file():
            line["stopped"] = json.loads((folder / "stopped.json").read_text())["why"]
        else:
            facts, scored = (json.loads((folder / f).read_text()) for f in ("run.json", "eval_heldout.json"))
            line |= scored["intrinsic"] | {"weights_sha256": scored["weights_sha256"]}
            line |= {k: facts[k] for k in ("overrides", "step", "valid_tokens", "init_sha256")}
        line |= {"wall_sec": walls.get(run.folder.name), "students_in_run": len(run.methods), "hardware": whole["machine"]}  # fmt: skip
        lines.append(line | {k: whole[k] for k in ("data_sha256", "val_sha256", "teacher_sha256", "git_commit", "versions")})  # fmt: skip
        if run.seed == FIGURE_SEED and run.settings == "main":
            shown.append((run, m))
    shutil.rmtree(results / "logs", ignore_errors=True)  # now that all is read
    for run, m in shown:
        copy_logs(run, m, results / "logs")
    results.mkdir(parents=True, exist_ok=True)
    write_lines(results / "results.jsonl", sorted(lines, key=lambda x: (NAMES.index(x["settings"]), x["seed"])))
    write_lines(results / "rates.jsonl", [{"method": m, "lr": lr, "val_ce": ce if ce < math.inf else None}
                                          for m, by_rate in found.items() for lr, ce in sorted(by_rate.items())])  # fmt: skip
    write_lines(results / "runs.jsonl", read_lines(out / "runs.jsonl"))
    shutil.copy(out / "settings.json", results)


def copy_logs(run: Run, method: str, to: Path) -> None:
    """The logs behind curves, budgets and anchoring, in the layout of a run."""
    (to / method).mkdir(parents=True, exist_ok=True)
    shutil.copy(run.folder / method / "log.jsonl", to / method)
    others = ("run.json", "teacher.jsonl", "alra/histograms.jsonl") if method == "alra" else ("run.json",)
    for name in others:
        if (run.folder / name).is_file() and (method == "alra" or not (to / name).is_file()):
            shutil.copy(run.folder / name, to / name)


# --- the report ------------------------------------------------------------------------------------------------

ALRA, KD = ("main", "alra"), ("main", "vanilla_kd")
PAPERS = ("main", "pair", "budget", "anchor")  # short names of tables.LAYOUT
COMPARISONS = (
    ("detach", "Gradient through the SWPRA weights", [("alra (through weights)", ("detach", "alra"), ALRA)]),
    ("group", "Forward batches of 4 and 16 sequences, each method against itself at one",
     [(f"{m} ({n})", (f"group{n}", m), ("main", m)) for m in ("vanilla_kd", "atkd", "tad", "alra") for n in (4, 16)]),
    ("long", "Four times the updates, at the same learning rates",
     [(m, ("long", m), ("long", ref)) for ref, methods in (("vanilla_kd", ("pretrain", "vanilla_kd", "tad", "alra")), ("alra", ("fixed_9", "alra_n")))
      for m in methods]),
)  # fmt: skip
COMPARED = ("ce", "kl", "top1")  # of FIGURES: these differences are tested


def layout() -> list[tuple[str, str, list[tuple[str, tuple, tuple]]]]:
    """Short name, title and rows (label, student, reference) of each table; the paper's tables first, in its order."""
    paper = [
        (name, title, [(m, ("main", m), KD if name == "main" else ALRA) for m in methods])
        for name, (title, _, methods) in zip(PAPERS, tables.LAYOUT, strict=True)
    ]
    return [*paper, *COMPARISONS]


def p_value(diffs: list[float]) -> float | None:
    """Two-sided p of the paired t test: that the differences' mean is 0. None for one pair."""
    n = len(diffs)
    error = float(np.std(diffs, ddof=1)) / math.sqrt(n) if n > 1 else None
    if not error:
        return None if error is None else float(np.mean(diffs) == 0)
    return 2 * float(stats.t.sf(abs(np.mean(diffs)) / error, n - 1))


def holm(ps: list[float | None]) -> list[float | None]:
    """p-values of one family -> corrected by Holm's steps (1979), in the same order; None stays out of the family."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    out, least = list(ps), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - place) * ps[i]))
        out[i] = least
    return out


def paired(mine: dict, first: dict, key: str) -> dict[int, float]:
    """A figure's difference by seed, in the printed unit."""
    return {s: FIGURES[key].factor * (mine[s][key] - first[s][key]) for s in mine if s in first}


def one_section(name: str, title: str, rows: list, students: dict, records: list) -> list[str]:
    """A table's means and its paired differences as Markdown; a record per cell."""
    rows = [row for row in rows if students.get(row[1])]
    against = [(label, me, ref) for label, me, ref in rows
               if ref != me and students[me].keys() & students.get(ref, {}).keys()]  # fmt: skip
    inside = {me: label for label, me, _ in rows}
    labels = {ref: ref[1] for _, _, ref in against if ref not in inside} | inside
    text = [f"## {title}", "", *means(name, labels, students, records), ""]
    if against:
        text += [*differences(name, against, students, records), "", f"![{title}](forest_{name}_ce.png)", ""]
    return text


def means(name: str, labels: dict, students: dict, records: list) -> list[str]:
    """Mean and interval over seeds of every figure, a line per student, with its rate, seeds and time."""
    every = FIGURES.values()
    cells = [[{s: x[k] * f.factor for s, x in students[me].items()} for k, f in FIGURES.items()] for me in labels]
    marked = tables.mark(cells, [f.sense for f in every], [f.digits for f in every])
    body = []
    for (me, label), line, texts in zip(labels.items(), cells, marked, strict=True):
        runs = students[me].values()
        rates = " ".join(f"{lr:g}" for lr in sorted({x["lr"] for x in runs}))
        shares = [x["wall_sec"] / x["students_in_run"] for x in runs if x["wall_sec"]]
        seconds = f"{sum(shares) / len(shares):.0f}" if shares else "–"
        body.append([label, rates, str(len(runs)), *texts, seconds])
        for k, cell in zip(FIGURES, line, strict=True):
            records.append({"table": name, "method": label, "figure": k, "n_seeds": len(cell),
                            "mean": tables.mean(cell), "half": tables.half(cell)})  # fmt: skip
    return tables.grid(["", "lr", "n", *(f.heading for f in every), "s"], body)


def differences(name: str, against: list, students: dict, records: list) -> list[str]:
    """Mean, interval and p of each student less its reference, paired by seed; a figure's p are one family."""
    body = [[label, ref[1]] for label, _, ref in against]
    for k in COMPARED:
        digits, gaps = FIGURES[k].digits, [paired(students[me], students[ref], k) for _, me, ref in against]
        plain = [p_value(list(gap.values())) for gap in gaps]
        for line, gap, p, p_holm in zip(body, gaps, plain, holm(plain), strict=True):
            mid, half = tables.mean(gap), tables.half(gap)
            low, high = (None, None) if half is None else (mid - half, mid + half)
            line += [f"{mid:+.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else ""), p_text(p_holm)]
            records.append({"table": name, "method": line[0], "reference": line[1], "figure": k, "n_seeds": len(gap),
                            "difference": mid, "low": low, "high": high, "p": p, "p_holm": p_holm})  # fmt: skip
    return tables.grid(["", "less", *(h for k in COMPARED for h in (f"Δ {FIGURES[k].heading}", "p"))], body)


def p_text(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def ordering(students: dict) -> list[str]:
    """Agreement of our order of methods with the paper's: by table, by the paper's student, by figure."""
    body, ranks = [], []
    for title, split, names in tables.LAYOUT:
        seeds = {m: students["main", m] for m in names if students.get(("main", m))}
        if len(seeds) < 2:
            continue
        # less is better in all of these
        paper = {size: [-tables.PAPER[size, split, m]["avg"] for m in seeds] for size in ("200m", "500m")}
        ours = {k: [-FIGURES[k].sense * tables.mean({s: x[k] for s, x in runs.items()}) for runs in seeds.values()]
                for k in COMPARED}  # fmt: skip
        columns = [*paper.values(), *ours.values()]
        for i, m in enumerate(seeds):
            ranks.append([title if not i else "", m, *(str(1 + sum(v < c[i] for v in c)) for c in columns)])
        for (size, theirs), (k, mine) in itertools.product(paper.items(), ours.items()):
            tau = stats.kendalltau(theirs, mine)
            body.append([title, size, FIGURES[k].heading, f"{tau.statistic:+.2f}", p_text(tau.pvalue),
                         *pairs(theirs, mine, list(seeds.values()), k)])  # fmt: skip
    if not body:
        return []
    figures = [f"our {FIGURES[k].heading.split(',')[0]}" for k in COMPARED]
    return ["## The paper's ordering and ours", "",
            "Kendall's tau-b between the paper's averages over tasks (more is better) and our figure. Pairs of methods in the same and",
            "in the opposite order; in brackets, those whose paired 95 % interval over our seeds (not corrected) leaves out 0.", "",
            *tables.grid(["", "paper's student", "our figure", "tau", "p", "same", "opposite"], body), "",
            "Ranks, 1 is best:", "", *tables.grid(["", "method", "paper 200m", "paper 500m", *figures], ranks), ""]  # fmt: skip


def pairs(theirs: list[float], mine: list[float], seeds: list[dict], key: str) -> tuple[str, str]:
    """Pairs of methods in the same and in the opposite order; in brackets, those whose paired interval leaves out 0."""
    counts = {+1: [0, 0], -1: [0, 0]}
    for a, b in itertools.combinations(range(len(seeds)), 2):
        agree = np.sign((theirs[a] - theirs[b]) * (mine[a] - mine[b]))
        gaps = paired(seeds[a], seeds[b], key)
        half = tables.half(gaps) if gaps else None
        if agree:
            counts[agree][0] += 1
            counts[agree][1] += half is not None and abs(tables.mean(gaps)) > half
    return tuple(f"{n} ({sure})" for n, sure in counts.values())


def learning_rates(lines: list[dict]) -> list[str]:
    """The table of learning rates and the choice."""
    if not lines:
        return []
    rates, tried = sorted({x["lr"] for x in lines}), {}
    for x in lines:
        tried.setdefault(x["method"], {})[x["lr"]] = math.inf if x["val_ce"] is None else x["val_ce"]
    best = {m: min(by_rate, key=by_rate.get) for m, by_rate in tried.items()}

    def cell(m: str, lr: float) -> str:
        if lr not in tried[m]:
            return "–"
        text = f"{tried[m][lr]:.4f}" if tried[m][lr] < math.inf else "stopped"
        return f"**{text}**" if lr == best[m] else text

    at_end = [m for m, lr in best.items() if lr in (LADDER[0], LADDER[-1])]
    return ["## Learning rates", "",
            "Held-out CE of seed 0, which is not among the seeds above, in nats per token, over the first `val_max_rows` of the rows that are scored.", "",
            *tables.grid(["", *(f"{lr:g}" for lr in rates)], [[m, *(cell(m, lr) for lr in rates)] for m in tried]), "",
            f"Best at an end of the ladder, so that a rate beyond might do better: {', '.join(at_end) or 'none'}.", ""]  # fmt: skip


PICTURES = (
    ("curves", "Curves", "Every term of the nine methods, over the tokens of training; validation at the end."),
    ("curves_variants", "Curves of the variants", "The same of ALRA's variants and fixed budgets."),
    (
        "budget",
        "Local budgets",
        "ALRA's local budgets in the first and the last tenth of training, and by the teacher's own candidates.",
    ),
    ("anchoring", "Anchoring", "The teacher's probability of the label and of its own top-1 on the rows of training."),
    ("pairs", "Pair scores", "SWPRA's pair scores before normalisation, by gamma; needs no run."),
    ("sets", "Evaluation sets", "Sizes of the nine tasks' sets; needs no run."),
)


def pictures(folder: Path) -> list[str]:
    """Links to those of PICTURES that exist in `folder`."""
    text = [f"Seed {FIGURE_SEED} alone, from `logs/`; each picture has its numbers beside it as CSV. Forests above: intervals over seeds, not corrected.", ""]  # fmt: skip
    for name, title, what in PICTURES:
        if (folder / f"{name}.png").is_file():
            text += [f"![{title}]({name}.png)", "", what, ""]
    return ["## What training looked at", "", *text] if (folder / "logs" / "run.json").is_file() else []


def report(results: Path, out: Path, draw: bool = True) -> None:
    """The committed logs in `results` -> README.md, tables.csv and the figures in `out`; it links those that `results` has."""
    lines = read_lines(results / "results.jsonl")
    if not lines:
        raise ReplicateError(f"{results}: no results.jsonl there; first: python replicate.py")
    comparable(lines)
    students: dict = {}
    for x in lines:
        if "stopped" not in x:
            students.setdefault((x["settings"], x["method"]), {})[x["seed"]] = x
    if not students:
        raise ReplicateError(
            f"{results}: all students stopped, {lines[0]['method']} since {lines[0]['stopped']}; nothing to report"
        )
    cfg = json.loads((results / "settings.json").read_text())["main"]
    some, records = next(iter(next(iter(students.values())).values())), []
    seeds = sorted({x["seed"] for x in lines})
    rates, seen = read_lines(results / "rates.jsonl"), read_lines(results / "logs" / "teacher.jsonl")
    taught = sum(x["ce"] * x["n"] for x in seen) / sum(x["n"] for x in seen) if seen else None  # on rows of training
    hours = sum(x["wall_sec"] for x in read_lines(results / "runs.jsonl")) / 3600

    def every(key):
        return ", ".join(sorted({str(x[key]) for x in lines}))

    text = [
        "# Replication at a small scale", "",
        "Written by `python replicate.py --report` from `results.jsonl`, `rates.jsonl` and `logs/`; do not edit.", "",
        f"{len(lines)} students `{cfg['student']}` from `{cfg['teacher']}` (CE {some['teacher_ce']:.4f}, entropy {some['teacher_entropy']:.4f}), "
        f"{len(seeds)} seeds ({', '.join(map(str, seeds))}): {cfg['max_steps']:,} updates of {cfg['batch_rows']} rows of {cfg['seq_len']} inputs, "
        f"{cfg['max_steps'] * cfg['batch_rows'] * cfg['seq_len'] / 1e6:.2f}M nominal tokens. Scored on {some['n_targets']:,} targets in "
        f"{some['n_rows']:,} held-out rows.", "",
        f"Hardware: {every('hardware')}; device {cfg['device']}, compile {cfg['compile']}. Wall time of all runs, choice of rates and scoring too, added up: "
        f"{hours:.1f} h. Commit: {every('git_commit')}. "
        f"Versions: {'; '.join(sorted({', '.join(f'{k} {v}' for k, v in x['versions'].items()) for x in lines}))}.", "",
        "± is half a 95 % t interval over seeds. Differences are paired by seed: same initial weights, same rows in the same order. "
        "p: paired t test, Holm-corrected over a table's rows, figure by figure. **Best**, *second* of a column. lr: learning rate. "
        "s: wall time of the run over the students in it, which shared one pass of the teacher and the cores with other runs: no measure of a "
        "method. Less: what a difference is taken from.", "",
        "How far this is from the paper, beside the sizes (`config/mini.py` has the rest):", "",
        "- The paper scores benchmarks; these students are at chance there, so text and teacher are what they are scored on.",
        *([f"- On the rows of training the teacher's CE is {taught:.2f}, on the held-out ones {some['teacher_ce']:.2f}"
            f"{': it teaches on text that it knows better' if taught < some['teacher_ce'] - 0.05 else ''}."] if taught else []),
        "- Rates: the best of seed 0 for each of the nine methods, threefold steps; variants and studies take ALRA's or their method's. The rows that "
        "chose them are among those scored, for all methods alike." if rates else "- Rates: one for all methods, the config's, without a choice.",
        "- The paper stops its budget and anchor studies at 67,200 of 126,400 updates of a schedule; here the cosine ends with the run.",
        "- `fixed_d` is, as in the paper, a fixed budget with neither anchor nor teacher's ranking, and PRA-U: its neighbour is `alra_n`, not `alra`.", "",
    ]  # fmt: skip
    stopped = [f"{x['method']} ({x['settings']}, seed {x['seed']}): {x['stopped']}" for x in lines if "stopped" in x]
    text += ["Stopped, and in no table:", "", *(f"- {s}" for s in stopped), ""] if stopped else []
    for name, title, rows in layout():
        if any(students.get(me) for _, me, ref in rows if me != ref):
            text += one_section(name, title, rows, students, records)
    out.mkdir(parents=True, exist_ok=True)
    if draw:
        figures(results, out, records)
    text += pictures(results) + ordering(students) + learning_rates(rates)
    (out / "README.md").write_text("\n".join(text).rstrip() + "\n")
    with (out / "tables.csv").open("w", newline="") as file:
        keys = ("table", "method", "figure", "n_seeds", "mean", "half", "reference", "difference", "low", "high", "p", "p_holm")  # fmt: skip
        sheet = csv.DictWriter(file, keys, restval="", lineterminator="\n")
        sheet.writeheader()
        sheet.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in records)


def comparable(lines: list[dict]) -> None:
    """One teacher, one text, the same held-out rows for all; one set of initial weights for each seed."""
    seen: dict = {}
    for x in lines:
        facts = {k: x.get(k) for k in ("data_sha256", "val_sha256", "teacher_sha256", "rows_sha256")}
        facts[f"step of {x['settings']}"] = x.get("step")
        facts[f"init_sha256 of seed {x['seed']}"] = x.get("init_sha256")
        for key, value in facts.items():
            if value is not None and seen.setdefault(key, value) != value:
                raise ReplicateError(f"{x['method']}, seed {x['seed']}: {key} is {str(value)[:12]}, elsewhere {str(seen[key])[:12]}; "
                                     "these students cannot be compared")  # fmt: skip


def figures(results: Path, out: Path, records: list[dict]) -> None:
    """Forest plots of the paired differences, and the figures that plot.py draws from a run's logs."""
    import plot  # matplotlib only where something is drawn

    titles = {name: title for name, title, _ in layout()}
    for name, k in itertools.product(titles, ("ce", "kl")):
        rows = [{"name": r["method"], "mean": r["difference"], "low": r["low"], "high": r["high"]}
                for r in records if r["table"] == name and r["figure"] == k and "difference" in r]  # fmt: skip
        if rows:
            less = {"main": "vanilla_kd", "group": "the same at one sequence", "long": "vanilla_kd, of ALRA for its variants"}.get(name, "alra")  # fmt: skip
            plot.forest(rows, out / f"forest_{name}_{k}.png", titles[name], f"{FIGURES[k].heading}, less that of {less}; mean and 95 % interval, not corrected")  # fmt: skip
    if (results / "logs" / "run.json").is_file():
        plot.run([str(results / "logs"), f"--out={out}"])
        points = plot.read_curves(plot.find_logs([results / "logs"]))
        main = tables.LAYOUT[0][2]
        plot.curves({m: of for m, of in points.items() if m in main} or points, out / "curves.png")
        variants = {m: of for m, of in points.items() if m not in main or m == "alra"}
        if len(variants) > 1:
            plot.curves(variants, out / "curves_variants.png")
    plot.run(["--pairs", "--sets", f"--out={out}"])


# --- command ---------------------------------------------------------------------------------------------------


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """-> the driver's own flags, and those for train.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     epilog="Other --key=value flags go on to every run; configure.py lists them.")  # fmt: skip
    add = parser.add_argument
    add("--quick", action="store_true", help="two seeds, 200 updates of rows of 32, one learning rate for all: minutes")
    add("--report", action="store_true", help="only write the tables and figures anew, from --results")
    add("--seeds", type=int, help="how many, from 1 on; default: 5, quick 2")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--methods", type=lambda text: tuple(text.split(",")), default=(), help="only these, with commas")
    add("--rows", type=int, help="held-out rows that eval.py reads; default: 512, quick 64")
    add("--out", type=Path, help="folder of the runs; default: out/replicate, quick out/replicate_quick")
    add(
        "--results",
        type=Path,
        help="folder of results and report; default: results/replication, of a part OUT/replication",
    )
    args, rest = parser.parse_known_args(argv)
    args.out = args.out or Path("out/replicate_quick" if args.quick else "out/replicate")
    part = args.quick or args.methods or args.seeds or args.rows  # never over the whole
    args.results = args.results or (args.out / "replication" if part else Path("results/replication"))
    args.seeds, args.rows = args.seeds or (2 if args.quick else 5), args.rows or (64 if args.quick else 512)
    if args.report and rest:
        raise ReplicateError(
            f"{rest[0]}: --report makes no runs; it takes --results, or what says which runs these were"
        )
    for flag in rest:
        if not flag.startswith("--"):
            raise ReplicateError(f"{flag}: expected --key=value")
        if flag[2:].partition("=")[0] in ("seed", "out_dir", "min_lr", *(() if args.quick else ("lr",))):
            raise ReplicateError(f"{flag}: this the replication sets itself")
    for key in ("seeds", "jobs", "rows"):
        if getattr(args, key) < 1:
            raise ReplicateError(f"--{key} {getattr(args, key)}: expected at least 1")
    return args, [*QUICK, *rest] if args.quick else rest


def run(argv: list[str]) -> None:
    args, flags = arguments(argv)
    if not args.report:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `work` ends its jobs
        replicate(args, flags)
    report(args.results, args.results)
    print(args.results / "README.md")


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
