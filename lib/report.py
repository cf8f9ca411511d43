"""The report of a comparison: README.md, tables.csv and figures, from the folder of results that tools/compare.py leaves.

`students.csv` has a line for each planned student: its figures over held-out rows, or why there are none. `rates.jsonl`
has the trials, `settings.json` the config, `logs*/` the logs of a seed each.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lib import tables
from lib.files import read_json, read_lines, require
from lib.metrics import levels
from lib.paper import LAYOUT, PAPER
from lib.stats import FIGURES, differences, estimate, p_text

COMPARED = ("ce", "kl", "top1")  # of FIGURES: these differences are tested
COSTS = {"student_flops": "student FLOPs", "teacher_flops": "teacher FLOPs", "trials": "trials"}
COLUMNS = ["table", "method", "figure", "n_seeds", "mean", "half",
           "reference", "difference", "low", "high", "p", "p_holm"]  # fmt: skip
PROVENANCE = ("hardware", "git_commit", "versions")
Key = tuple[str, str]  # study, student


@dataclass(frozen=True)
class Spec:
    """What is compared beside the config: from flags, or from `_compare` in a config file."""

    title: str = "Comparison"
    reference: str | None = None  # the method that differences are taken from; None: vanilla_kd, or else the first
    seeds: int = 3  # from 1 on; seed 0 is the trials'
    rows: int = 512  # held-out rows that are scored: those after the `val_max_rows` of the trials
    tune: tuple[str, ...] = ()  # "lr=1e-3,3e-3", "vanilla_kd.tau=0.5,1"
    like: str | None = None  # methods of the studies that have no trials take the settings chosen for this one
    at: str = "updates"  # what is equal: "updates", or "flops" of student and teacher together
    studies: dict | None = None  # name -> config keys that differ in it
    tables: tuple = ()  # (short name, title, rows of (label, student Key, reference Key), what is subtracted)
    notes: tuple[str, ...] = ()
    paper: bool = False  # put our order of methods beside the paper's

    def layout(self, methods: list[str]) -> list[tuple]:
        """`tables`, or one table of the methods against the reference."""
        ref = self.reference or ("vanilla_kd" if "vanilla_kd" in methods else methods[0])
        return list(self.tables) or [("main", "Methods", [(m, ("main", m), ("main", ref)) for m in methods], ref)]


def read(folder: Path) -> pd.DataFrame:
    """A line for each planned student. `UserError` where none has a result."""
    file = folder / "students.csv"
    require(file.is_file(), f"{file}: not there; run the same command without --report first")
    students = pd.read_csv(file, keep_default_na=False, na_values=[""])
    if "stopped" not in students:
        students["stopped"] = None
    said = f"{folder}: no student has a result; {students.method[0]}: {students.stopped[0]}"
    require(students.stopped.isna().any(), said)
    return students


def figure(students: pd.DataFrame, key: Key, name: str) -> dict[int, float]:
    """A figure by seed, in the printed unit; {} for a student without results."""
    mine = students[(students.study == key[0]) & (students.method == key[1]) & students.stopped.isna()]
    return (mine.set_index("seed")[name].dropna() * FIGURES[name].factor).to_dict() if name in students else {}


def report(spec: Spec, results: Path, draw: bool = True) -> tuple[pd.DataFrame, str]:
    """Write README.md, tables.csv and the figures into `results` -> its students; the first table, and where rates ended."""
    students, records, sections = read(results), [], []
    settings = read_json(results / "settings.json")
    planned = set(zip(students.study, students.method, strict=True))
    layout = spec.layout(list(students.method[students.study == "main"].unique()))
    for name, title, rows, _ in layout:
        rows = [row for row in rows if row[1] in planned]
        if any(me != ref for _, me, ref in rows) or not spec.tables:
            sections.append(section(name, title, rows, students, records))
    sheet = pd.DataFrame(records, columns=COLUMNS)
    sheet["n_seeds"] = sheet["n_seeds"].astype("Int64")
    sheet.to_csv(results / "tables.csv", index=False, float_format="%.6g", lineterminator="\n")
    if draw:
        draw_figures(layout, results, records)
    text = heading(spec, students, settings) + [line for lines in sections for line in lines]
    tried = trials(results, settings)
    text += (beside_the_paper(students) if spec.paper else []) + tried + pictures(results)
    (results / "README.md").write_text("\n".join(text).rstrip() + "\n")
    first = [line for line in sections[0] if not line.startswith("!")] if sections else []
    return students, "\n".join([*first, tried[-2], ""])


def heading(spec: Spec, students: pd.DataFrame, settings: dict) -> list[str]:
    """Who was compared on what, by which machine, and how to read the tables."""
    cfg, some, seeds = settings["main"], students[students.stopped.isna()].iloc[0], sorted(students.seed.unique())
    used = [f"{key}: {', '.join(sorted(students[key].dropna().unique()))}" for key in PROVENANCE if key in students]
    teacher = "no teacher"
    if pd.notna(some.get("teacher_ce")):
        teacher = f"teacher `{cfg['teacher']}` (CE {some.teacher_ce:.4f}, entropy {some.teacher_entropy:.4f})"
    text = [f"# {spec.title}", "", "Written by `compare.py` from the files beside it; do not edit.", "",
            f"{len(students)} students `{cfg['student']}`, {teacher}, seeds {', '.join(map(str, seeds))}: {cfg['max_steps']:,} "
            f"updates of {cfg['batch_rows']} rows of {cfg['seq_len']} inputs. Scored on {some.n_targets:,.0f} targets in "
            f"{some.n_rows:,.0f} held-out rows." + (f" {levels(some.dropna())}." if "uniform_ce" in some else ""), "", "; ".join(used), "",
            "± is half a 95 % t interval over seeds. Differences are paired by seed. p: paired t test, Holm-corrected over a "
            "table's rows, figure by figure. **Best**, *second* of a column. s: wall time of the run over its students, which "
            "share a teacher and the machine: no measure of a method.", ""]  # fmt: skip
    if settings.get("at") == "flops":
        text += ["At equal FLOPs: a method without a teacher makes more updates, until student and teacher have cost "
                 "the same. Left out: validation, the optimizer, the objectives, and that students share a pass of the teacher.", ""]  # fmt: skip
    text += [settings["remark"], ""] if "remark" in settings else []
    stopped = students[students.stopped.notna()].itertuples()
    failed = [f"- {x.method} ({x.study}, seed {x.seed}): {x.stopped}" for x in stopped]
    return text + [*spec.notes, ""] * bool(spec.notes) + (["Without a result:", "", *failed, ""] if failed else [])


def section(name: str, title: str, rows: list[tuple], students: pd.DataFrame, records: list[dict]) -> list[str]:
    """A table's means and its paired differences as Markdown; a record per cell."""
    planned = set(zip(students.study, students.method, strict=True))
    against = [row for row in rows if row[1] != row[2] and row[2] in planned]
    inside = {me: label for label, me, _ in rows}
    labels = {ref: ref[1] for _, _, ref in against if ref not in inside} | inside
    cells = [[figure(students, me, k) for k in FIGURES] for me in labels]
    marked = tables.mark(cells, [f.sense for f in FIGURES.values()], [f.digits for f in FIGURES.values()])
    costs, body = [key for key in COSTS if key in students], []
    for ((study, method), label), line, texts in zip(labels.items(), cells, marked, strict=True):
        mine = students[(students.study == study) & (students.method == method)]
        n, rates = len(line[0]), " ".join(f"{lr:g}" for lr in sorted(mine.lr.dropna().unique())) or "–"
        told = ("chosen", "settings") if "@" in method else ("chosen",)  # what a label stands for, too
        given = [mine[key].dropna() for key in told if key in mine]
        given = {item for text in itertools.chain(*given) for item in json.loads(text).items() if item[0] != "lr"}
        given = sorted(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in given)
        wall = (mine.wall_sec / mine.students_in_run).mean() if "wall_sec" in mine else float("nan")
        spent = [f"{mine[key].dropna().iloc[0]:.3g}" if mine[key].notna().any() else "–" for key in costs]
        body.append([label, ", ".join([rates, *given]), f"{n}" if n == len(mine) else f"{n} of {len(mine)}", *texts,
                     "–" if pd.isna(wall) else f"{wall:.0f}", *spent])  # fmt: skip
        for k, cell in zip(FIGURES, line, strict=True):
            records.append(dict(zip(COLUMNS, (name, label, k, *estimate(cell)[:3]), strict=False)))
    heads = ["", "lr", "n", *(f.heading for f in FIGURES.values()), "s", *(COSTS[key] for key in costs)]
    text = [f"## {title}", "", *tables.grid(heads, body), ""]
    if not against:
        return text
    body = [[label, ref[1]] for label, _, ref in against]
    for k in COMPARED:
        gaps = differences([(figure(students, me, k), figure(students, ref, k)) for _, me, ref in against])
        for line, e in zip(body, gaps, strict=True):
            line += [e.text(FIGURES[k].digits, "+"), p_text(e.p_holm)]
            low, high = (None, None) if e.half is None else (e.mean - e.half, e.mean + e.half)
            cells = (name, line[0], k, e.n, None, None, line[1], e.mean, low, high, e.p, e.p_holm)
            records.append(dict(zip(COLUMNS, cells, strict=True)))
    heads = ["", "less", *(h for k in COMPARED for h in (f"Δ {FIGURES[k].heading}", "p"))]
    return [*text, *tables.grid(heads, body), "", f"![{title}](forest_{name}_ce.png)", ""]


def beside_the_paper(students: pd.DataFrame) -> list[str]:
    """Our order of methods beside the order of the paper's averages over tasks: Kendall's tau-b, and ranks."""
    from scipy.stats import kendalltau  # half a second, and only here

    taus, places, sizes = [], [], ("200m", "500m")
    heads = [*(f"paper {size}" for size in sizes), *(f"our {FIGURES[k].heading}" for k in COMPARED)]
    for title, split, methods in LAYOUT:
        methods = [m for m in methods if figure(students, ("main", m), "ce")]
        if len(methods) < 2:
            continue
        ours = [[FIGURES[k].sense * estimate(figure(students, ("main", m), k)).mean for k in COMPARED] for m in methods]
        paper = [[PAPER[size, split, m]["avg"] for size in sizes] for m in methods]
        scores = pd.DataFrame(np.hstack([paper, ours]), methods, heads)  # more is better
        for theirs, mine in itertools.product(heads[:2], heads[2:]):
            tau = kendalltau(scores[theirs], scores[mine])
            taus.append([title, theirs, mine, f"{tau.statistic:+.2f}", p_text(tau.pvalue)])
        ranks = scores.rank(ascending=False, method="min").astype(int).astype(str)
        places += [[title, m, *ranks.loc[m]] for m in methods]
    if not taus:
        return []
    return ["## The paper's ordering and ours", "",
            "Kendall's tau-b between the order of the paper's averages over tasks and the order by our figure:", "",
            *tables.grid(["", "theirs", "ours", "tau", "p"], taus), "",
            "Ranks, 1 is best:", "", *tables.grid(["", "method", *heads], places), ""]  # fmt: skip


def trials(results: Path, settings: dict) -> list[str]:
    """The table of trials: a line for each method and setting beside the rate, a column for each rate; the best is bold."""
    rates = pd.DataFrame(read_lines(results / "rates.jsonl"))
    if rates.empty:
        return ["Nothing was tuned: each method has the config's rate and its own settings.", ""]
    given = rates.get("settings", pd.Series([{}] * len(rates)))
    rates["row"] = rates.method + given.apply(lambda s: "".join(f" {k}={v}" for k, v in s.items() if k != "lr"))
    best = rates.dropna(subset=["val_ce"]).groupby("method", sort=False).val_ce.idxmin()
    rates["text"] = rates.val_ce.map(lambda ce: "stopped" if pd.isna(ce) else f"{ce:.4f}")
    rates.loc[best, "text"] = "**" + rates.text[best] + "**"
    wide = rates.pivot(index="row", columns="lr", values="text").fillna("–").loc[rates.row.unique()]
    body = [[row, *values] for row, values in zip(wide.index, wide.values.tolist(), strict=True)]
    n, ends = sorted(rates.method.value_counts().unique()), rates.groupby("method").lr.agg(["min", "max"])
    at_end = [m for m, i in best.items() if rates.lr[i] in ends.loc[m].tolist()]
    skipped = settings.get("skip_rows")
    rows = f"the first {skipped} held-out rows, which are not scored" if skipped else "rows that are scored too"
    return ["## Trials", "",
            f"Each method had {' to '.join(map(str, n))} trials with seed 0. CE in nats per token over {rows}; the lowest chooses.", "",
            *tables.grid(["", *(f"{lr:g}" for lr in wide)], body), "",
            f"Best at the lowest or highest rate tried, so that one beyond might do better: {', '.join(at_end) or 'none'}.", ""]  # fmt: skip


def pictures(results: Path) -> list[str]:
    """Links to the pictures of training."""
    n = len([*results.glob("logs*")])
    names = [name for name in ("curves", "budget", "anchoring") if (results / f"{name}.png").is_file()]
    if not n or not names:
        return []
    seeds = f"Curves: means over {n} seeds with 95 % intervals; the others: seed 1." if n > 1 else "Seed 1 alone."
    return ["## Training", "", seeds, "", *(f"![{name}]({name}.png)\n" for name in names)]


def draw_figures(layout: list[tuple], results: Path, records: list[dict]) -> None:
    """A forest plot of each table's differences in CE, and the figures that plot.py draws from logs."""
    from tools import plot  # matplotlib only where something is drawn

    for name, title, _, less in layout:
        rows = [{"name": r["method"], "mean": r["difference"], "low": r["low"], "high": r["high"]} for r in records
                if r["table"] == name and r["figure"] == "ce" and r.get("difference") is not None]  # fmt: skip
        if rows:
            unit = f"CE, nats/token, less that of {less}; 95 % interval"
            plot.forest(rows, results / f"forest_{name}_ce.png", title, unit)
    if logs := sorted(results.glob("logs*")):
        shown = {method for _, (_, method), _ in layout[0][2]}
        seeds = [plot.read_curves({m: f for m, f in plot.find_logs([folder]).items() if m in shown}) for folder in logs]
        plot.curves(plot.over_seeds(seeds), results / "curves.png")
        plot.draw_logs(("budget", "anchoring"), plot.find_logs(logs[:1]), results)
