"""The report of a comparison: Markdown, CSV and figures from the folder of results that `compare.py` leaves.

`results.jsonl` has a line for each planned student: its figures over held-out rows, or why there are none. `rates.jsonl`
has the trials, `runs.jsonl` the wall times, `settings.json` the config, `logs*/` the logs of a seed each.
"""

import csv
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib import tables
from lib.figures import FIGURES
from lib.files import UserError, read_json, read_lines
from lib.stats import differences, estimate, p_text

COMPARED = ("ce", "kl", "top1")  # of FIGURES: these differences are tested
COSTS = {"student_flops": "student FLOPs", "teacher_flops": "teacher FLOPs", "trials": "trials"}
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
    paper: bool = False  # compare the order of methods with the paper's, draw the figures that need no run

    def layout(self, methods: list[str]) -> list[tuple]:
        """`tables`, or one table of the methods against the reference."""
        ref = self.reference or ("vanilla_kd" if "vanilla_kd" in methods else methods[0])
        return list(self.tables) or [("main", "Methods", [(m, ("main", m), ("main", ref)) for m in methods], ref)]


class Results:
    """What `folder` holds: the lines of all planned students, and those with figures by student and seed."""

    def __init__(self, folder: Path):
        self.folder, self.lines = folder, read_lines(folder / "results.jsonl")
        if not self.lines:
            raise UserError(f"{folder}: no results.jsonl there; first the same command without --report")
        comparable(self.lines)
        self.settings = read_json(folder / "settings.json")
        self.rates = read_lines(folder / "rates.jsonl")
        self.failed = [x for x in self.lines if "stopped" in x]
        self.planned = {(x["settings"], x["method"]): [] for x in self.lines}
        self.students: dict[Key, dict[int, dict]] = {key: {} for key in self.planned}
        for x in self.lines:
            self.planned[x["settings"], x["method"]].append(x)
            if "stopped" not in x:
                self.students[x["settings"], x["method"]][x["seed"]] = x
        if not any(self.students.values()):
            x = self.lines[0]
            raise UserError(f"{folder}: no student has a result; {x['method']}: {x['stopped']}")

    def figure(self, key: Key, name: str) -> dict[int, float]:
        """A figure by seed, in the printed unit; {} for a student without results."""
        return {seed: x[name] * FIGURES[name].factor for seed, x in self.students.get(key, {}).items() if name in x}


def comparable(lines: list[dict]) -> None:
    """One teacher, one text, the same held-out rows for all; the same initial weights for each seed."""
    seen: dict = {}
    for x in lines:
        facts = {k: x.get(k) for k in ("data_sha256", "val_sha256", "teacher_sha256", "rows_sha256")}
        if x.get("at") != "flops":
            facts[f"step of {x['settings']}"] = x.get("step")
        facts[f"init_sha256 of seed {x['seed']}"] = x.get("init_sha256")
        for key, value in facts.items():
            if value is not None and seen.setdefault(key, value) != value:
                there, here = str(seen[key])[:12], str(value)[:12]
                raise UserError(
                    f"{x['method']}, seed {x['seed']}: {key} is {here}, elsewhere {there}; they cannot be compared"
                )


def report(spec: Spec, results: Path, out: Path, draw: bool = True) -> tuple[Results, str]:
    """Write README.md, tables.csv and the figures of `results` into `out` -> what was read, and the first table."""
    found, records = Results(results), []
    layout = spec.layout([m for study, m in found.planned if study == "main"])
    sections = []
    for name, title, rows, _ in layout:
        rows = [row for row in rows if row[1] in found.planned]
        if any(me != ref for _, me, ref in rows) or not spec.tables:
            sections.append(section(name, title, rows, found, records))
    out.mkdir(parents=True, exist_ok=True)
    pictures = figures(spec, layout, results, out, records) if draw else sorted(p.stem for p in results.glob("*.png"))
    text = heading(spec, found) + [line for lines in sections for line in lines] + links(found, pictures)
    text += (ordering(found) if spec.paper else []) + trials(found)
    (out / "README.md").write_text("\n".join(text).rstrip() + "\n")
    with (out / "tables.csv").open("w", newline="") as file:
        keys = ["table", "method", "figure", "n_seeds", "mean", "half", "reference", "difference", "low", "high", "p"]
        sheet = csv.DictWriter(file, [*keys, "p_holm"], restval="", lineterminator="\n")
        sheet.writeheader()
        sheet.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in records)
    return found, "\n".join(line for line in sections[0] if not line.startswith("!")) if sections else ""


def heading(spec: Spec, found: Results) -> list[str]:
    """Who was compared on what, by which machine, and how to read the tables."""
    cfg, lines, of_rows = found.settings["main"], found.lines, found.settings.get("skip_rows")
    some = next(x for x in lines if "stopped" not in x)
    seeds = sorted({x["seed"] for x in lines})
    tokens = cfg["max_steps"] * cfg["batch_rows"] * cfg["seq_len"] / 1e6
    hours = sum(x["wall_sec"] for x in read_lines(found.folder / "runs.jsonl")) / 3600
    versions = sorted({", ".join(f"{k} {v}" for k, v in x["versions"].items()) for x in lines if "versions" in x})
    machines, commits = (
        ", ".join(sorted({str(x[key]) for x in lines if key in x})) for key in ("hardware", "git_commit")
    )
    teacher = " without a teacher"
    if "teacher" in some:
        teacher = f" from `{some['teacher']}` (CE {some['teacher_ce']:.4f}, entropy {some['teacher_entropy']:.4f})"
    text = [
        f"# {spec.title}",
        "",
        "Written by `compare.py` from the `.jsonl` files and logs beside it; do not edit.",
        "",
        f"{len(lines)} students `{cfg['student']}`{teacher}, {len(seeds)} seeds "
        f"({', '.join(map(str, seeds))}): {cfg['max_steps']:,} updates of {cfg['batch_rows']} rows of {cfg['seq_len']} "
        f"inputs, {tokens:.2f}M nominal tokens. Scored on {some['n_targets']:,} targets in {some['n_rows']:,} held-out rows.",
        "",
        f"Hardware: {machines}; device {cfg['device']}, compile {cfg['compile']}. Wall time of all runs, trials and "
        f"scoring too, added up: {hours:.1f} h. Commit: {commits}. Versions: {'; '.join(versions)}.",
        "",
        "± is half a 95 % t interval over seeds. Differences are paired by seed: same initial weights, same rows in the "
        "same order. p: paired t test, Holm-corrected over a table's rows, figure by figure. **Best**, *second* of a "
        "column. lr: learning rate. s: wall time of the run over the students in it, which shared one pass of the teacher "
        "and the cores with other runs: no measure of a method. Less: what a difference is taken from.",
        "",
    ]
    if passes := found.settings.get("passes"):
        each = passes["students"]
        text += [
            f"{each} students that have a teacher learnt from {passes['runs']} passes of it over their rows, not {each}: "
            "the students of a run share one. FLOPs are those of one student, and of its teacher as if nobody shared it.",
            "",
        ]
    if found.settings.get("at") == "flops":
        text += ["At equal FLOPs: a method without a teacher makes more updates, until student and teacher have cost the same.", ""]  # fmt: skip
    if found.rates:
        n = sorted({sum(x["method"] == m for x in found.rates) for m in {x["method"] for x in found.rates}})
        rows = (
            f"the first {of_rows} held-out rows, which are not scored"
            if of_rows
            else "rows that are scored, for all alike"
        )
        text += [f"Each method had {' to '.join(map(str, n))} trials with seed 0, chosen by the CE over {rows}.", ""]
    else:
        text += ["Nothing was tuned: each method has the config's rate and its own settings.", ""]
    seen = read_lines(found.folder / "logs" / "teacher.jsonl")
    if seen:
        taught = sum(x["ce"] * x["n"] for x in seen) / sum(x["n"] for x in seen)
        knows = ": it teaches on text that it knows better" if taught < some["teacher_ce"] - 0.05 else ""
        text += [f"The teacher's CE is {taught:.2f} on rows of training, {some['teacher_ce']:.2f} on held-out ones{knows}.", ""]  # fmt: skip
    text += [*spec.notes, ""] if spec.notes else []
    failed = [f"- {x['method']} ({x['settings']}, seed {x['seed']}): {x['stopped']}" for x in found.failed]
    return text + (["Without a result:", "", *failed, ""] if failed else [])


# --- a table ---------------------------------------------------------------------------------------------------------


def section(name: str, title: str, rows: list[tuple], found: Results, records: list[dict]) -> list[str]:
    """A table's means and its paired differences as Markdown; a record per cell."""
    against = [row for row in rows if row[1] != row[2] and row[2] in found.planned]
    inside = {me: label for label, me, _ in rows}
    labels = {ref: ref[1] for _, _, ref in against if ref not in inside} | inside
    text = [f"## {title}", "", *means(name, labels, found, records), ""]
    if against:
        text += [*compared(name, against, found, records), "", f"![{title}](forest_{name}_ce.png)", ""]
    return text


def means(name: str, labels: dict[Key, str], found: Results, records: list[dict]) -> list[str]:
    """Mean and interval over seeds of every figure, a line per student, with its rate, seeds and cost."""
    every = FIGURES.values()
    cells = [[found.figure(me, k) for k in FIGURES] for me in labels]
    marked = tables.mark(cells, [f.sense for f in every], [f.digits for f in every])
    costs = [key for key in COSTS if any(key in x for me in labels for x in found.planned[me])]
    body = []
    for (me, label), line, texts in zip(labels.items(), cells, marked, strict=True):
        planned, n = found.planned[me], len(found.students[me])
        shares = [x["wall_sec"] / x["students_in_run"] for x in planned if x.get("wall_sec")]
        seconds = f"{sum(shares) / len(shares):.0f}" if shares else "–"
        rates = sorted({x["lr"] for x in planned if x.get("lr")})
        given = {x["method"]: x.get("overrides", {}) for x in planned if "@" in x["method"]}  # what a label stands for
        given = [*given.values(), *(x.get("chosen", {}) for x in planned)]
        chosen = {
            f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for of in given for k, v in of.items() if k != "lr"
        }
        spent = [next((f"{x[key]:.3g}" for x in planned if key in x), "–") for key in costs]
        settings = ", ".join([" ".join(f"{lr:g}" for lr in rates) or "–", *sorted(chosen)])
        body.append(
            [label, settings, f"{n}" if n == len(planned) else f"{n} of {len(planned)}", *texts, seconds, *spent]
        )
        for k, cell in zip(FIGURES, line, strict=True):
            e = estimate(cell)
            records.append(
                {"table": name, "method": label, "figure": k, "n_seeds": e.n, "mean": e.mean, "half": e.half}
            )
    heads = ["", "lr", "n", *(f.heading for f in every), "s", *(COSTS[key] for key in costs)]
    return tables.grid(heads, body)


def compared(name: str, against: list[tuple], found: Results, records: list[dict]) -> list[str]:
    """Mean, interval and p of each student less its reference, paired by seed; a figure's p are one family."""
    body = [[label, ref[1]] for label, _, ref in against]
    for k in COMPARED:
        gaps = differences([(found.figure(me, k), found.figure(ref, k)) for _, me, ref in against])
        for line, e in zip(body, gaps, strict=True):
            line += [e.text(FIGURES[k].digits, "+"), p_text(e.p_holm)]
            low, high = (None, None) if e.half is None else (e.mean - e.half, e.mean + e.half)
            records.append({"table": name, "method": line[0], "reference": line[1], "figure": k, "n_seeds": e.n,
                            "difference": e.mean, "low": low, "high": high, "p": e.p, "p_holm": e.p_holm})  # fmt: skip
    return tables.grid(["", "less", *(h for k in COMPARED for h in (f"Δ {FIGURES[k].heading}", "p"))], body)


def trials(found: Results) -> list[str]:
    """The table of trials and the choice: a line for each method and setting beside the rate, a column for each rate."""
    if not found.rates:
        return []
    tried: dict[str, dict] = {}  # method -> (other settings, rate) -> CE
    for x in found.rates:
        other = "".join(f" {k}={v}" for k, v in x.get("settings", {}).items() if k != "lr")
        tried.setdefault(x["method"], {})[other, x["lr"]] = math.inf if x["val_ce"] is None else x["val_ce"]
    best = {m: min(of, key=of.get) for m, of in tried.items()}
    rates, body = sorted({x["lr"] for x in found.rates}), []
    for m, of in tried.items():
        for other in dict.fromkeys(other for other, _ in of):
            texts = []
            for lr in rates:
                ce = of.get((other, lr))
                text = "–" if ce is None else "stopped" if ce == math.inf else f"{ce:.4f}"
                texts.append(f"**{text}**" if best[m] == (other, lr) else text)
            body.append([m + other, *texts])
    at_end = [m for m, (_, lr) in best.items() if lr in (min(r for _, r in tried[m]), max(r for _, r in tried[m]))]
    return ["## Learning rates" if all(row[0] in tried for row in body) else "## Trials", "",
            "Held-out CE of seed 0, which is not among the seeds above, in nats per token.", "",
            *tables.grid(["", *(f"{lr:g}" for lr in rates)], body), "",
            f"Best at the lowest or highest rate tried, so that one beyond might do better: {', '.join(at_end) or 'none'}.", ""]  # fmt: skip


# --- beside the paper ------------------------------------------------------------------------------------------------


def ordering(found: Results) -> list[str]:
    """Agreement of our order of methods with the paper's: by table, by the paper's student, by figure."""
    from scipy.stats import kendalltau  # half a second, and only here

    body, ranks = [], []
    for title, split, names in tables.LAYOUT:
        keys = [("main", m) for m in names if found.students.get(("main", m))]
        if len(keys) < 2:
            continue
        # less is better in all of these
        paper = {size: [-tables.PAPER[size, split, m]["avg"] for _, m in keys] for size in ("200m", "500m")}
        ours = {k: [-FIGURES[k].sense * estimate(found.figure(me, k)).mean for me in keys] for k in COMPARED}
        columns = [*paper.values(), *ours.values()]
        for i, (_, m) in enumerate(keys):
            ranks.append([title if not i else "", m, *(str(1 + sum(v < c[i] for v in c)) for c in columns)])
        for (size, theirs), (k, mine) in itertools.product(paper.items(), ours.items()):
            tau = kendalltau(theirs, mine)
            counts = pairs(theirs, mine, [found.figure(me, k) for me in keys])
            body.append([title, size, FIGURES[k].heading, f"{tau.statistic:+.2f}", p_text(tau.pvalue), *counts])
    if not body:
        return []
    heads = [f"our {FIGURES[k].heading.split(',')[0]}" for k in COMPARED]
    return ["## The paper's ordering and ours", "",
            "Kendall's tau-b between the paper's averages over tasks (more is better) and our figure. Pairs of methods in the same and",
            "in the opposite order; in brackets, those whose paired 95 % interval over our seeds (not corrected) leaves out 0.", "",
            *tables.grid(["", "paper's student", "our figure", "tau", "p", "same", "opposite"], body), "",
            "Ranks, 1 is best:", "", *tables.grid(["", "method", "paper 200m", "paper 500m", *heads], ranks), ""]  # fmt: skip


def pairs(theirs: list[float], mine: list[float], by_seed: list[dict[int, float]]) -> tuple[str, str]:
    """Pairs of methods in the same and in the opposite order; in brackets, those whose paired interval leaves out 0."""
    counts = {+1: [0, 0], -1: [0, 0]}
    for a, b in itertools.combinations(range(len(mine)), 2):
        agree = np.sign((theirs[a] - theirs[b]) * (mine[a] - mine[b]))
        (gap,) = differences([(by_seed[a], by_seed[b])])
        if agree:
            counts[agree][0] += 1
            counts[agree][1] += gap.half is not None and abs(gap.mean) > gap.half
    return tuple(f"{n} ({sure})" for n, sure in counts.values())


# --- pictures --------------------------------------------------------------------------------------------------------

PICTURES = {  # in the report's order
    "curves": ("Curves", "Every term of every method, over the tokens of training; validation at the end."),
    "curves_variants": ("Curves of the variants", "The same of ALRA's variants and fixed budgets."),
    "budget": ("Local budgets", "ALRA's local budgets in the first and the last tenth of training, and by the teacher's own candidates."),
    "anchoring": ("Anchoring", "The teacher's probability of the label and of its own top-1 on the rows of training."),
    "pairs": ("Pair scores", "SWPRA's pair scores before normalisation, by gamma; needs no run."),
    "sets": ("Evaluation sets", "Sizes of the nine tasks' sets; needs no run."),
}  # fmt: skip


def figures(spec: Spec, layout: list[tuple], results: Path, out: Path, records: list[dict]) -> list[str]:
    """Forest plots of the paired differences, and the figures that plot.py draws from logs -> names of the latter."""
    import plot  # matplotlib only where something is drawn

    for (name, title, _, less), k in itertools.product(layout, ("ce", "kl")):
        rows = [{"name": r["method"], "mean": r["difference"], "low": r["low"], "high": r["high"]} for r in records
                if r["table"] == name and r["figure"] == k and r.get("difference") is not None]  # fmt: skip
        if rows:
            unit = f"{FIGURES[k].heading}, less that of {less}; mean and 95 % interval, not corrected"
            plot.forest(rows, out / f"forest_{name}_{k}.png", title, unit)
    logs, names = [f.parent for f in sorted(results.glob("logs*/run.json"))], []
    if logs:
        points = plot.over_seeds([plot.read_curves(plot.find_logs([folder])) for folder in logs])
        first = [me[1] for _, me, _ in layout[0][2]]
        rest = {m: of for m, of in points.items() if m not in first or m == spec.like}
        drawn = {"curves": {m: points[m] for m in points if m in first} or points}
        drawn |= {"curves_variants": rest} if set(rest) - {spec.like} else {}
        for name, of in drawn.items():
            plot.curves(of, out / f"{name}.png")
        names += [*drawn, *plot.draw_logs(("budget", "anchoring"), plot.find_logs(logs[:1]), out)]
    if spec.paper:
        plot.run(["--pairs", "--sets", f"--out={out}"])
        names += ["pairs", "sets"]
    return names


def links(found: Results, names: list[str]) -> list[str]:
    """Links to the pictures of training."""
    if not (found.folder / "logs" / "run.json").is_file():
        return []
    n = len(list(found.folder.glob("logs*/run.json")))
    seeds = f"Mean over {n} seeds, with 95 % intervals as bands" if n > 1 else "Seed 1 alone, from `logs/`"
    text = [f"{seeds}; each picture has its numbers beside it as CSV. Forests above: intervals over seeds, not corrected.", ""]  # fmt: skip
    for name, (title, what) in PICTURES.items():
        if name in names:
            text += [f"![{title}]({name}.png)", "", what, ""]
    return ["## What training looked at", "", *text]
