"""The report of a comparison: README.md and figures in OUT/report, from plan.json and OUT/logs.

plan.json is written by study/compare.py. It has the config, the trials, and for each student its
method, its seed and the file of OUT/logs that holds it. Such a file has the student's facts and
figures in its first line, then what `read_log` in run/tables.py returns.
"""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lib.errors import UserError
from lib.files import read_json, read_lines, reading
from lib.stats import FIGURES, p_text
from run import tables
from run.paper import LAYOUT, PAPER

INTERVALS = """\
± is half the width of a 95 % t interval over seeds, not over texts: all are scored on the same \
rows. That of two is wide. Differences are paired by seed. p: paired t test, Holm-corrected over a \
table's rows, figure by figure; intervals are not. **Best**, *second* of a column.
"""
EQUAL_FLOPS = """\
At equal FLOPs (@flops): a method without a teacher makes more updates, until student and teacher \
have cost the same. Left out: validation, the optimizer, the objectives, and that students share a \
pass of the teacher.
"""
COSTS = """\
## Settings and costs

FLOPs of a student: its own training, without the objective, and the teacher's forward passes as \
if it shared them with no other.
"""
ORDERING = """\
## The paper's ordering and ours

Kendall's tau-b between the order of the paper's averages over tasks and the order by our figure, \
over the seeds that all methods of the paper's table have here. p is of each alone, and takes all \
averages as exact.
"""
CURVES = """\
## Training

Curves: means over all seeds, with 95 % intervals where there are several. Budget (of adaptive \
ones) and anchoring (of the teacher, whatever the method), where histograms were logged, the \
paper's Figures 3 and 4: seed {}. docs/running.md explains them.
"""


@dataclass(frozen=True)
class Spec:
    """What is compared and how, beside the config: by flags, or `_compare` in a config file."""

    title: str = "Comparison"
    reference: str | None = None  # of differences; None: vanilla_kd, or the first method
    seeds: int = 3  # from 1 on; seed 0 is the trials'
    fewer_seeds: dict[str, int] = field(default_factory=dict)  # by method
    rows: int = 512  # held-out rows that are scored, after the `val_max_rows` that judge trials
    tune: tuple[str, ...] = ()  # "lr=1e-3,3e-3", "vanilla_kd.tau=0.5,1"
    trial_steps: int | None = None  # updates of a trial, its schedule scaled; None: as of a student
    tables: tuple[tuple[str, tuple[str, ...], str], ...] = ()  # title, methods, reference
    paper: bool = False  # put our order of methods beside the paper's
    jobs: int = 1  # runs at a time
    per_run: int = 10**6  # students that share a run, at most
    out: Path = Path("out/compare")  # folder of runs, logs and report
    report: bool = False  # only write the report anew

    def seeds_of(self, name: str) -> int:
        return min(self.seeds, self.fewer_seeds.get(name, self.seeds))

    def layout(self, methods: list[str]) -> list[tuple]:
        """Return `tables`, or one table of all methods against the reference."""
        default = "vanilla_kd" if "vanilla_kd" in methods else methods[0]
        return list(self.tables) or [("Methods", methods, self.reference or default)]


def report(spec: Spec) -> tuple[list[str], str]:
    """Write the report. Return its lines of students without a result, and those for the screen."""
    plan, students = read(spec.out)
    results = {x["method"]: {} for x in students}  # method -> seed -> student
    failed = []
    for x in students:
        if "stopped" in x:
            failed.append(f"- {x['method']} (seed {x['seed']}): {x['stopped']}")
        else:
            results[x["method"]][x["seed"]] = x
    compared = []
    for title, methods, reference in spec.layout(list(results)):
        shown = {m: results[m] for m in dict.fromkeys((*methods, reference)) if m in results}
        if not compared or (reference in shown and len(shown) > 1):
            compared.append(tables.heldout(f"## {title}", shown, reference))
    tried = trials(plan)
    text = heading(spec, plan, students)
    if failed:
        text += ["Without a result:\n", *failed, ""]
    text += itertools.chain(*compared, costs(results))
    if spec.paper:
        text += beside_the_paper(results)
    text += [*tried, *figures(students, spec.out / "report")]
    (spec.out / "report" / "README.md").write_text("\n".join(text).rstrip() + "\n")
    return failed, "\n".join([*compared[0], tried[-2], "", *failed])


def read(out: Path) -> tuple[dict, list[dict]]:
    """Return the plan, and its students with facts, figures and log, or why they "stopped"."""
    remedy = "run the same command without --report"
    plan = read_json(out / "report" / "plan.json", {"students": list}, remedy)
    students = []
    for x in plan["students"]:
        if "file" in x:
            facts, *log = read_lines(out / "logs" / x["file"])
            students.append(facts | x | {"log": log})
        else:
            students.append(x | {"stopped": f"no result; see {out / 'runs'}/*.txt"})
    if all("stopped" in x for x in students):
        raise UserError(f"{out}: no student has a result; the first: {students[0]['stopped']}")
    return plan, students


def first_line(file: Path) -> dict:
    """Return the facts of a student in OUT/logs, with the name of its file."""
    with reading(file), file.open() as lines:
        return json.loads(next(lines)) | {"file": file.name}


def heading(spec: Spec, plan: dict, students: list[dict]) -> list[str]:
    """Say who was compared on what, by which machine, and how to read the tables."""
    config = plan["config"]
    seeds = ", ".join(map(str, sorted({x["seed"] for x in students})))
    finished = [x for x in students if "stopped" not in x]
    machines = {x["machine"] for x in finished}
    commits = {x["git_commit"] or "none" for x in finished}
    text = [
        f"# {spec.title}\n",
        "Written by `compare.py` from the files beside it and the logs; do not edit.\n",
        f"{len(students)} students of shape `{config['student']}`, seeds {seeds}: "
        f"{config['max_steps']:,} updates of {config['batch_rows']} rows of {config['seq_len']} "
        "inputs. Scored on:\n",
        *tables.scored(finished[0]),
        f"\nMachine: {', '.join(sorted(machines))}. Commits: {', '.join(sorted(commits))}. The "
        "first line of each student's log has its own, with the versions of packages.\n",
        INTERVALS,
    ]
    if any(x["method"].endswith("@flops") for x in students):
        text.append(EQUAL_FLOPS)
    return text


def costs(results: tables.Figures) -> list[str]:
    """Return a table of each method's settings, its number of students, and the cost of one."""
    body = []
    for method, students in results.items():
        if not students:
            continue
        x = next(iter(students.values()))
        settings = []
        for key, value in ({"lr": x["config"]["lr"]} | x["overrides"]).items():
            settings.append(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}")
        flops = [f"{x[key]:.3g}" if key in x else "–" for key in ("student_flops", "teacher_flops")]
        body.append([method, ", ".join(settings), f"{len(students)}", *flops])
    head = ["", "settings", "n", "student FLOPs", "teacher FLOPs"]
    return [COSTS, *tables.grid(head, body), ""]


def beside_the_paper(results: tables.Figures) -> list[str]:
    """Return Kendall's tau-b between our order and that of the paper's averages, and the ranks."""
    from scipy.stats import kendalltau, rankdata  # half a second, and only here

    heads = []
    taus = []
    ranks = []
    for title, split, names in LAYOUT:
        methods = [m for m in names if results.get(m)]
        common = set.intersection(*(set(results[m]) for m in methods)) if methods else set()
        if len(methods) < 3 or not common:
            continue
        columns = {}  # heading -> scores of the methods, of which more is better
        for size in ("200m", "500m"):
            columns[f"paper {size}"] = [PAPER[size, split, m]["avg"] for m in methods]
        for key in ("ce", "kl", "top1"):
            figure = FIGURES[key]
            means = [np.mean([results[m][seed][key] for seed in common]) for m in methods]
            columns[f"our {figure.heading}"] = [figure.sense * mean for mean in means]
        heads = list(columns)
        for theirs, ours in itertools.product(heads[:2], heads[2:]):
            pair = np.array([columns[theirs], columns[ours]])
            inner = np.argsort(pair[0])[1:-1]
            cells = []
            for scores in (pair, pair[:, inner]):
                text = "–"
                if scores.shape[1] > 1:
                    tau = kendalltau(*scores)
                    text = f"{tau.statistic:+.2f}, p {p_text(tau.pvalue)}"
                cells.append(text)
            taus.append([title, theirs, ours, *cells])
        places = [rankdata(np.negative(column), "min") for column in columns.values()]
        for method, *row in zip(methods, *places, strict=True):
            ranks.append([title, method, *(f"{place:.0f}" for place in row)])
    if not taus:
        return []
    head = ["", "theirs", "ours", "tau", "without their best and worst"]
    text = [ORDERING, *tables.grid(head, taus), "", "Ranks, 1 is best:", ""]
    return [*text, *tables.grid(["", "method", *heads], ranks), ""]


def best_trials(trials: list[dict]) -> dict[str, dict]:
    """Return by method the trial with the lowest CE, the first of equal ones."""
    best = {}
    for x in trials:
        m = x["method"]
        if x["val_ce"] is not None and (m not in best or x["val_ce"] < best[m]["val_ce"]):
            best[m] = x
    return best


def trials(plan: dict) -> list[str]:
    """Return the table of trials: a line for a method and its settings, a column for each rate."""
    if not plan["trials"]:
        message = "No table of trials, as none or not all are on record"
        return [f"{message}; the table of costs has rates and settings.", ""]
    rates = sorted({x["settings"]["lr"] for x in plan["trials"]})
    best = best_trials(plan["trials"])
    rows = {}  # method and settings -> rate -> cell
    for x in plan["trials"]:
        settings = [f" {key}={value}" for key, value in x["settings"].items() if key != "lr"]
        text = "stopped" if x["val_ce"] is None else f"{x['val_ce']:.4f}"
        if x is best.get(x["method"]):
            text = f"**{text}**"
        row = rows.setdefault(x["method"] + "".join(settings), dict.fromkeys(rates, "–"))
        row[x["settings"]["lr"]] = text
    at_end = [m for m, x in best.items() if x["settings"]["lr"] in (rates[0], rates[-1])]
    return [
        "## Trials\n",
        f"Trials have {plan['trial_steps']:,} updates and seed 0. CE in nats per token over the "
        f"first {plan['config']['val_max_rows']} held-out rows, which are not scored; the lowest "
        "chooses.\n",
        *tables.grid(
            ["", *(f"{lr:g}" for lr in rates)],
            [[name, *cells.values()] for name, cells in rows.items()],
        ),
        "",
        "Best at the lowest or highest rate tried, so that one beyond might do better: "
        f"{', '.join(at_end) or 'none'}.",
        "",
    ]


def figures(students: list[dict], folder: Path) -> list[str]:
    """Draw the curves over all seeds, and one seed's budget and anchoring."""
    from tools import plot  # matplotlib only where something is drawn

    seeds = {}  # seed -> method -> student
    for x in students:
        if "log" in x:
            seeds.setdefault(x["seed"], {})[x["method"]] = x
    plot.curves(list(seeds.values()), folder / "curves.png")
    drawn = ["curves", *plot.draw_histograms(seeds[min(seeds)], folder)]
    return [CURVES.format(min(seeds)), *(f"![{name}]({name}.png)\n" for name in drawn)]
