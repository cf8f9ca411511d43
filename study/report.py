"""The report of a comparison: README.md and pictures in OUT, from OUT/plan.json and its students.

plan.json, written by study/compare.py, has the config, the trials, and the method, seed and name of
each student of the tables.
"""

import math

import pandas as pd

from lib.errors import UserError
from lib.files import atomic_write, read_json
from run import tables
from study.record import TRIAL_SEED, read_students

INTERVALS = """\
± is half the width of a 95 % t interval over seeds; all students are scored on the same rows. An \
interval "over documents" takes the scored documents as the sample (a jackknife: each is left out \
in turn); it needs the sums by document of all seeds. Differences are paired. p is of the paired \
t test, Holm-corrected over the rows of a table for each figure by itself; intervals are not \
corrected. **Best**, *second* of a column. †: a student was trained with uncommitted edits, which \
are in `code.diff` in the folder of its run, not beside this report (older runs lack that file). \
Where there are two seeds, p and interval have one degree of freedom and say little: train more.
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
## Other students on record

The last command did not name these students, or they have other settings, code or rows than those
above.
"""
CURVES = """\
## Training

Curves are means over all seeds, with the range of the seeds. If histograms were logged, seed {} \
has the paper's Figures 3 (budgets, of methods with an adaptive one) and 4 (anchoring, of the \
teacher alone). docs/running.md explains them.
"""


def read(out) -> tuple:
    """Return the plan, its students and others; lines on those without a result, or shorter."""
    remedy = "run the same command without --report"
    plan = read_json(out / "plan.json", remedy=remedy)
    others = {x["name"]: x for x in read_students(out) if x["seed"] != TRIAL_SEED}
    found = dict(others)
    students = []
    failed = []
    shorter = []
    for x in plan["students"]:
        others.pop(x["name"], None)
        facts = found.get(x["name"], {"why": "no result; see what its runs have printed"})
        student = f"- {x['method']} (seed {x['seed']})"
        if "why" in facts:
            failed.append(f"{student}: {facts['why']}")
        else:
            students.append(facts | x)
            end = facts["config"]["max_steps"]
            if facts["step"] < end:  # by an edit
                shorter.append(f"{student}: ended after {facts['step']:,} of {end:,} updates")
    if not students:
        raise UserError(f"{out}: no student has a result {failed[:1]}; {remedy}")
    return plan, students, [*others.values()], failed, shorter


def report(spec) -> tuple:
    """Write the report. Return its lines on students without a result, and text for the screen."""
    plan, students, others, failed, shorter = read(spec.out)
    results = pd.DataFrame(students).set_index(["method", "seed"])
    methods = [*results.index.unique("method")]
    start = spec.reference or ("vanilla_kd" if "vanilla_kd" in methods else methods[0])
    compared = []
    for title, names, reference in spec.tables or [("Methods", methods, start)]:
        shown = [m for m in dict.fromkeys((*names, reference)) if m in methods]
        # the first table always, and others that compare something
        if not compared or (reference in shown and len(shown) > 1):
            table = "\n".join(tables.figure_tables(f"## {title}", results.loc[shown], reference))
            for x in students:
                if "+" in f"{x['git_commit']}":  # trained with uncommitted edits
                    table = table.replace(f"| {x['method']} |", f"| {x['method']} † |")
            compared.append(table)
    trials = trial_lines(plan)
    config = plan["config"]
    machines = ", ".join(sorted({x["machine"] for x in students}))
    intervals = INTERVALS
    if all("code" in x for x in students):
        intervals = intervals.replace("`code.diff`", "a `code_HASH.zip`")
    text = [
        f"# {spec.title}\n\n{spec.summary}\n",
        "Written by `compare.py` from the files beside it; do not edit.\n",
        f"{len(students)} students of shape `{config['student']}`: "
        f"{config['max_steps']:,} updates of {config['batch_rows']} rows of {config['seq_len']} "
        "inputs. Scored on:\n",
        *tables.scored_on(students[0]),
        f"\nMachine: {machines}. Each student's line has the versions of packages.\n",
        intervals,
        *failed,
        *shorter,
        *compared,
        *(f"{line}\n" for line in tables.edit_lines(students, "scores")),
        COSTS,
        *costs(students),
    ]
    if others:
        text += [OTHERS, *costs(others)]
    text += trials + pictures(students, spec.out)
    atomic_write(spec.out / "README.md", "\n".join(text).rstrip() + "\n")
    return failed, "\n".join([compared[0], trials[-1], *failed, *shorter])


def costs(students: list[dict]) -> list[str]:
    """Return a table of what made the students, and what each one cost."""
    table = pd.DataFrame(
        {
            "": x["method"],
            "settings": settings_text(  # a student's own lr, if it was set, is among them
                {"lr": x["made_by"]["lr"]} | dict(sorted(x["made_by"]["hyper"].items()))
            ),
            "student FLOPs": f"{x['student_flops']:.3g}",
            "teacher FLOPs": f"{x.get('teacher_flops', 0):.3g}",
            "trained by": short(x["git_commit"]),
            "scored by": short(x["scores"].get("git_commit")),
            "seeds": f"{x['seed']}",
            "CE": f"{x.get('ce', math.nan):.4f}",
            "names": x["name"],
        }
        for x in students
    )
    table = table.groupby([*table][:6], sort=False, as_index=False).agg(", ".join)
    return [*tables.grid(table.set_index("")), ""]


def short(commit: str | None) -> str:
    """Return a commit without the rest of its hash, but with +EDITS."""
    return f"{commit}"[:12] + f"{commit}"[40:]


def settings_text(settings: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def best_settings(trials: list[dict]) -> dict:
    """Return by method the settings of the trial with the lowest CE, the first of equal ones."""
    ended = pd.DataFrame(trials, columns=["method", "settings", "val_ce"]).dropna()
    first = ended.groupby("method", sort=False)["val_ce"].idxmin()
    return ended.loc[first].set_index("method")["settings"].to_dict()


def trial_lines(plan: dict) -> list[str]:
    """Return the table of trials: a line for a method and its settings, a column for each rate.

    The last element says what was chosen, and what to try next.
    """
    trials = plan["trials"]
    if not trials:
        return ["No trials are on record; the table of settings has what was chosen.\n"]
    best = best_settings(trials)
    cells = {}
    for x in trials:
        text = "stopped" if x["val_ce"] is None else f"{x['val_ce']:.4f}"
        stars = "**" if x["settings"] == best.get(x["method"]) else ""
        own = dict(x["settings"])
        rate = own.pop("lr")
        cells[f"{x['method']} {settings_text(own)}".strip(), rate] = stars + text + stars
    table = pd.Series(cells).unstack(sort=False).sort_index(axis=1).fillna("–")
    tried = [x["method"] for x in trials]
    chosen = [f"- {m}: {settings_text(x)} ({tried.count(m)} trials)" for m, x in best.items()]
    at_an_end = [m for m, x in best.items() if x["lr"] in table.columns[[0, -1]]]
    advice = "No chosen rate is the lowest or highest tried."
    if at_an_end:
        advice = f"The rate of {', '.join(at_an_end)} is the lowest or highest tried: try others."
    return [
        "## Trials\n",
        f"Trials have {plan['trial_steps']:,} updates. CE in nats per token over the first "
        f"{plan['config']['val_max_rows']} held-out rows, which are not scored, with seed "
        f"{TRIAL_SEED}; the lowest chooses.\n",
        *tables.grid(table.rename(columns="{:g}".format)),
        "",
        "\n".join(["Chosen:\n", *chosen, "", advice, ""]),
    ]


def pictures(students: list[dict], folder) -> list[str]:
    """Draw the curves over all seeds, and one seed's budget and anchoring. Return Markdown."""
    from tools import plot  # matplotlib only where something is drawn

    seeds = {}  # seed -> method -> student
    for x in students:
        seeds.setdefault(x["seed"], {})[x["method"]] = x["log"]
    plot.curves(seeds.values(), folder / "curves.png")
    first = min(seeds)
    drawn = ["curves", *plot.draw_histograms(seeds[first], folder)]
    return [CURVES.format(first), *(f"![{name}]({name}.png)\n" for name in drawn)]
