"""The report of a comparison: README.md and pictures in OUT/report, from plan.json and OUT/logs.

plan.json is written by study/compare.py. It has the config, the trials, and for each student its
method, its seed and the file of OUT/logs that holds it. Such a file has the student's facts and
figures (CE, KL, ..) in its first line, then what `read_log` in run/tables.py returns.
"""

import json
import typing
from dataclasses import dataclass, field
from pathlib import Path

from lib.errors import UserError
from lib.files import atomic_write, read_json, read_lines, reading
from lib.settings import PositiveInt
from run import tables

TRIAL_SEEDS = 1000  # seeds of trials are multiples of it, 0 first; those of students are below

INTERVALS = """\
± is half the width of a 95 % t interval over seeds; all students are scored on the same rows. An \
interval "over documents" takes the scored documents as the sample; it needs the sums by document \
of all seeds. Differences are paired. p is of the paired t test, Holm-corrected over \
the rows of a table for each figure by itself; intervals are not corrected. **Best**, *second* of \
a column. †: a student was trained with uncommitted edits; the folder of its run has them in \
`code.diff` (older runs lack that file). Where there are two seeds, p and interval have one degree \
of freedom and say little: train more.
"""
COSTS = """\
## Settings, costs and code

A row has the students of equal settings and code; the settings are all those of the objective, \
with its weights. COMMIT+HASH marks uncommitted edits. Student FLOPs are those of a student's \
training, without the objective. Teacher FLOPs are those of the teacher's forward passes, as if \
for one student alone. With @flops, a method without a teacher makes more updates, until it has \
used as many FLOPs as another student and its teacher together, without validation, optimizer and \
objective.
"""
OTHERS = """\
## Made at other settings

These students in `logs` have other settings, code or rows than those above.
"""
CURVES = """\
## Training

Curves are means over all seeds, with 95 % intervals, or with each seed where there are two or \
three. If histograms were logged, seed {} has the paper's Figures 3 (budgets, of methods with an \
adaptive one) and 4 (anchoring, of the teacher alone). docs/running.md explains them.
"""


@dataclass(frozen=True)
class Spec:
    """What is compared and how, beside the config: by flags, or `_compare` in a config file."""

    title: str = "Comparison"
    summary: str = ""  # what the tables say, in words
    reference: str | None = None  # of one table of all methods, in place of `tables`
    seeds: PositiveInt = 3  # from 1 on
    fewer_seeds: dict = field(default_factory=dict)  # number by method
    rows: PositiveInt = 512  # held-out rows to score, after the `val_max_rows` that judge trials
    tune: tuple[str, ...] = ()  # "lr=1e-3,3e-3", "vanilla_kd.tau=0.5,1"; "none": no trials
    trial_seeds: PositiveInt = 1  # over which a trial is averaged: 0, 1000, ..
    trial_steps: PositiveInt | None = None  # its schedule is scaled; None: as many as of a student
    tables: tuple = ()  # (title, methods, reference), ..
    jobs: PositiveInt = 1  # runs at a time
    per_run: PositiveInt = 10**6  # students that share a run, at most
    out: Path = Path("out/compare")  # folder of runs, logs and report
    report: bool = False  # only write the report anew


KINDS = typing.get_type_hints(Spec, include_extras=True) | {"out": str}  # becomes a Path later


def report(spec) -> tuple:
    """Write the report. Return its lines on students without a result, and text for the screen."""
    plan, students, others, failed = read(spec.out)
    results = {x["method"]: {} for x in plan["students"]}  # method -> seed -> student
    for x in students:
        results[x["method"]][x["seed"]] = x
    edited = {x["method"] for x in students if "+" in f"{x['git_commit']}"}
    compared = []
    default = "vanilla_kd" if "vanilla_kd" in results else next(iter(results))
    layout = spec.tables
    if spec.reference or not layout:
        layout = [("Methods", results, spec.reference or default)]
    for title, methods, reference in layout:
        shown = {m: results[m] for m in (*methods, reference) if m in results}
        # the first table always, and others that compare something
        if not compared or (reference in shown and len(shown) > 1):
            table = "\n".join(tables.heldout(f"## {title}", shown, reference))
            for m in edited:
                table = table.replace(f"| {m} |", f"| {m} † |")
            compared.append(table)
    tried = trial_lines(plan)
    config = plan["config"]
    machines = ", ".join(sorted({x["machine"] for x in students}))
    text = [
        f"# {spec.title}\n",
        f"{spec.summary}\n",
        "Written by `compare.py` from the files beside it and the logs; do not edit.\n",
        f"{len(students)} students of shape `{config['student']}`: "
        f"{config['max_steps']:,} updates of {config['batch_rows']} rows of {config['seq_len']} "
        "inputs. Scored on:\n",
        *tables.scored_on(students[0]),
        f"\nMachine: {machines}. The first line of each student's log has the versions of "
        "packages.\n",
        INTERVALS,
        *failed,
        *compared,
        COSTS,
        *costs(students),
    ]
    if others:
        text += [OTHERS, *costs(others)]
    text += [*tried, *pictures(students, spec.out / "report")]
    atomic_write(spec.out / "report/README.md", "\n".join(text).rstrip() + "\n")
    return failed, "\n".join([compared[0], tried[-1], *failed])


def read(out: Path) -> tuple:
    """Return the plan, its students with figures and log, other students, and lines on failures.

    The others are those of OUT/logs that the plan lacks. A line names a planned student without a
    result, and why.
    """
    remedy = "run the same command without --report"
    plan = read_json(out / "report/plan.json", {"students": list}, remedy)
    record = {x["file"]: x for x in read_students(out)}
    others = dict(record)
    students = []
    failed = []
    for x in plan["students"]:
        file = x["file"]
        others.pop(file, None)
        facts = record.get(file, {"stopped": f"no result; see {out / 'runs'}/*.txt"})
        if "stopped" in facts:
            failed.append(f"- {x['method']} (seed {x['seed']}): {facts['stopped']}")
        else:
            log = read_lines(out / "logs" / file)[1:]
            students.append(facts | x | {"log": log})
    if not students:
        raise UserError(f"{out}: no student has a result; the first: {failed[0]}")
    return plan, students, [x for x in others.values() if x["seed"] % TRIAL_SEEDS], failed


def read_students(out: Path) -> list[dict]:
    """Return the facts of each student in OUT/logs, and the name of its `file`.

    compare.py gives each student and each trial a file. In a committed study one file has all
    trials of a method, one after another.
    """
    students = []
    for file in sorted(out.glob("logs/*.jsonl")):
        with reading(file), file.open() as lines:
            for line in lines:
                if '"made_by": {' in line:  # a student's first line
                    students.append(json.loads(line) | {"file": file.name})
    return students


def costs(students: list[dict]) -> list[str]:
    """Return a table of what made the students, and what each one cost."""
    rows = {}  # what students have in common -> seed, CE and log of each
    for x in students:
        record = x["made_by"]
        # a student's own lr, if it was set, is among its settings
        settings = {"lr": record["lr"]} | dict(sorted(record["hyper"].items()))
        trained = f"{x['git_commit']}"
        scored = f"{x['scores'].get('git_commit')}"
        common = (
            x["method"],
            settings_text(settings),
            f"{x['student_flops']:.3g}",
            f"{x.get('teacher_flops', 0):.3g}",
            f"{trained[:12]}{trained[40:]}",  # without the rest of the hash, but with +EDITS
            f"{scored[:12]}{scored[40:]}",
        )
        cells = f"{x['seed']}", f"{x.get('ce', float('nan')):.4f}", x["file"]
        rows.setdefault(common, []).append(cells)
    body = []
    for common, members in rows.items():
        columns = zip(*members, strict=True)
        body.append([*common, *map(", ".join, columns)])
    head = ["", "settings", "student FLOPs", "teacher FLOPs", "trained by", "scored by"]
    return [*tables.grid([*head, "seeds", "CE", "logs"], body), ""]


def settings_text(settings: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def best_settings(trials: list[dict]) -> dict:
    """Return by method the settings of the trial with the lowest CE, the first of equal ones."""
    finished = {}  # method -> trials
    for x in trials:
        if x["val_ce"] is not None:
            finished.setdefault(x["method"], []).append(x)
    return {m: min(group, key=lambda x: x["val_ce"])["settings"] for m, group in finished.items()}


def trial_lines(plan: dict) -> list[str]:
    """Return the table of trials: a line for a method and its settings, a column for each rate.

    The last element says what was chosen, and what to try next.
    """
    trials = plan["trials"]
    if not trials:
        return ["No trials are on record; the table of settings has what was chosen.\n"]
    rates = sorted({x["settings"]["lr"] for x in trials})
    best = best_settings(trials)
    rows = {}  # method and settings -> rate -> cell
    for x in trials:
        method = x["method"]
        settings = dict(x["settings"])
        lr = settings.pop("lr")
        text = "stopped" if x["val_ce"] is None else f"{x['val_ce']:.4f}"
        if x["settings"] == best.get(method):
            text = f"**{text}**"
        name = f"{method} {settings_text(settings)}".strip()
        rows.setdefault(name, dict.fromkeys(rates, "–"))[lr] = text
    body = [[name, *cells.values()] for name, cells in rows.items()]
    chosen = []
    at_an_end = []
    for method, settings in best.items():
        n_trials = sum(x["method"] == method for x in trials)
        chosen.append(f"- {method}: {settings_text(settings)} ({n_trials} trials)")
        if settings["lr"] in (rates[0], rates[-1]):
            at_an_end.append(method)
    advice = "No chosen rate is the lowest or highest tried."
    if at_an_end:
        wider = [f"{lr:.3g}" for lr in (rates[0] / 3, *rates, 3 * rates[-1])]
        advice = (
            f"The rate of {', '.join(at_an_end)} is the lowest or highest tried, and one beyond "
            f"may be better: --tune=lr={','.join(wider)}"
        )
    return [
        "## Trials\n",
        f"Trials have {plan['trial_steps']:,} updates. CE in nats per token over the first "
        f"{plan['config']['val_max_rows']} held-out rows, which are not scored; mean over the "
        f"first {plan['trial_seeds']} of the seeds 0, 1000, 2000, ..; the lowest chooses.\n",
        *tables.grid(["", *(f"{lr:g}" for lr in rates)], body),
        "",
        "\n".join(["Chosen:\n", *chosen, "", advice, ""]),
    ]


def pictures(students: list[dict], folder) -> list[str]:
    """Draw the curves over all seeds, and one seed's budget and anchoring. Return Markdown."""
    from tools import plot  # matplotlib only where something is drawn

    seeds = {}  # seed -> method -> student
    for x in students:
        seeds.setdefault(x["seed"], {})[x["method"]] = x
    plot.curves(list(seeds.values()), folder / "curves.png")
    first = min(seeds)
    drawn = ["curves", *plot.draw_histograms(seeds[first], folder)]
    return [CURVES.format(first), *(f"![{name}]({name}.png)\n" for name in drawn)]
