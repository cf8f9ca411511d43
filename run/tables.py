"""Results: reading them, and tables of them in the paper's form, with its numbers beside ours.

eval.py appends each result to results.jsonl in the folder of its student, and prints tables of what
it has just scored; `eval.py --table` prints those of earlier results. Several seeds of a method
make one row with mean and 95 % interval. A table only holds rows that can be compared: the same
initial weights per seed, data, updates, optimisation and scoring protocol.
"""

import math
from pathlib import Path

import numpy as np
import pandas as pd

from lib.errors import UserError
from lib.files import read_json, read_lines
from lib.metrics import levels
from lib.stats import FIGURES, MIN_PARTS, Column, estimate, half_interval, holm, with_half
from lib.tasks import COLUMNS, SUITES
from run.identity import record_changes
from run.paper import LAYOUT, NAMES, UPDATES, paper_rows

# The keys, with their kinds, that are read from a student's run.json.
RUN = {
    "method": str,
    "student": str,
    "seed": int,
    "overrides": dict,
    "step": int,
    "config": dict,
    "made_by": {"code": dict, "shape": dict},
}
# Files of records beside log.jsonl, by the key that `read_log` gives to these records.
PARTS = {"histogram": "histograms.jsonl", "teacher": "../teacher.jsonl"}

# keys of a student's record (`made_by`) in which the rows of a table may differ
VARIES = ("methods", "hyper", "moving", "state", "objective", "shape", "seed")
AS_IS = Column("", 0, 1, 0)


# --- reading results


def training_facts(model, kinds=()):
    """Return the facts of the training behind a model's folder, or {} for other models.

    They are in run.json of a finished student, and in state.json of a checkpoint.
    """
    if model.name == "model":
        for name in ("run.json", "state.json"):
            if (model.parent / name).is_file():
                return read_json(model.parent / name, kinds)
    return {}


def read_log(folder):
    """Return the records of log.jsonl, then {"step": .., PART: record} for those of PARTS."""
    log = read_lines(folder / "log.jsonl", {"step": int})
    for part, path in PARTS.items():
        for record in read_lines(folder / path, {"step": int}):
            log.append({"step": record["step"], part: record})
    return log


def students_of(paths, is_done) -> list[str]:
    """Return the folders that paths stand for.

    A path with `is_done(path)` stands for itself, any other one for the done folders inside it. A
    path without any stands for itself too, such as a hub id, unless it is a file.
    """
    folders = []
    for path in paths:
        inside = [f"{folder}" for folder in sorted(Path(path).glob("*/")) if is_done(folder)]
        if is_done(Path(path)) or not (inside or Path(path).is_file()):
            inside = [path]
        folders += inside
    if not folders:
        raise UserError(f"{', '.join(paths)}: expected out/NAME, or a model's folder")
    return list(dict.fromkeys(folders))


def read_results(folder: Path) -> list[dict]:
    """Return a folder's results, the newest of each kind and protocol, tasks of one merged.

    Those of a student's earlier weights are left out.
    """
    current = training_facts(folder / "model").get("weights_sha256")
    results = {}
    for x in read_lines(folder / "results.jsonl", {"kind": str, "values": dict}):
        if current in (None, x["weights_sha256"]):
            key = x["kind"], protocol_text(x)
            earlier = results.pop(key, x)["values"]
            results[key] = x | {"values": earlier | x["values"], "folder": folder}
    return list(results.values())


def protocol_text(result) -> str:
    return ", ".join(f"{key} {x}" for key, x in result["protocol"].items() if x is not None)


def newest_figures(folder) -> dict:
    """Return a folder's newest result over held-out rows, or {}."""
    figures = [x for x in read_results(folder) if x["kind"] == "figures"]
    return figures[-1] if figures else {}


def check_comparable(results):
    """Refuse results that differ in a fact that must be equal. A fact that is None does not apply.

    Records (`made_by`) may only differ in VARIES. Steps, first weights of a seed, and all that was
    scored must be equal.
    """
    seen = {}
    for x in results:
        run = x["run"]
        facts = {key: y for key, y in run.get("made_by", {}).items() if key not in VARIES}
        facts["step"] = run.get("step")
        facts[f"init_sha256 of seed {run.get('seed')}"] = run.get("init_sha256")
        facts |= x.get("scored", {})
        tasks = x["values"] if x["kind"] in SUITES else {}
        for task, values in tasks.items():
            for key in ("data_sha256", "prompts_sha256", "version", "n"):
                facts[f"{key} of {task}, {x['kind']}"] = values.get(key)
        for key, value in facts.items():
            first, folder = seen.setdefault(key, (value, x["folder"]))
            if None not in (first, value) and first != value:
                change = record_changes({key: first}, {key: value})[key]
                what = f"{folder} and {x['folder']} cannot be compared: {change}"
                raise UserError(f"{what}; tabulate them apart")


# --- tables


def tabulate(paths, reference="pretrain", metric="acc") -> str:
    """Return the tables of folders with results, as Markdown."""
    results = []
    for folder in students_of(paths, read_results):
        found = read_results(Path(folder))
        if not found:
            raise UserError(f"{folder}: no results in it; first: python eval.py {folder}")
        results += found
    return tables_of(results, reference, metric)


def tables_of(results: list[dict], reference="pretrain", metric="acc") -> str:
    """Return the tables of each shape of students, kind of results, and protocol.

    reference  the method that gains are measured from; some of the paper's tables have their own
    metric     "acc", or "acc_norm" for the tasks that have it
    """
    groups = {}
    for x in results:
        shape = x["run"].get("student", "other models")
        groups.setdefault((shape, x["kind"], protocol_text(x)), []).append(x)
    methods = {method_of(x) for x in results}
    if reference not in ("pretrain", *methods):
        raise UserError(f"--reference {reference}: expected one of {', '.join(sorted(methods))}")
    lines = []
    kinds = ["figures", *SUITES]
    for shape, kind, protocol in sorted(groups, key=lambda x: (x[0], kinds.index(x[1]))):
        group = groups[shape, kind, protocol]
        check_comparable(group)
        rows = by_method(group)
        lines += ["" if f"## {shape}" in lines else f"## {shape}", ""]
        if kind == "figures":
            title = f"### Held-out rows of {group[0]['protocol'].get('rows')}"
            lines += [*heldout(title, rows, reference), *scored_on(group[0]["values"]), ""]
        else:
            for title, start, names in layouts(kind, rows.index.unique(0), reference):
                shown = pd.concat([rows.loc[[m]] for m in names])
                lines += accuracies(f"### {title}", group[0], shown, start, metric)
        lines += [f"Protocol: {protocol}.", ""]
    return "\n".join(lines)


def method_of(result) -> str:
    """Return the method of a result with its overrides, or the name of its model."""
    run = result["run"]
    overrides = [f"{key}={value}" for key, value in run.get("overrides", {}).items()]
    return " ".join([run.get("method", result["name"]), *overrides])


def by_method(results: list[dict]) -> pd.DataFrame:
    """Return values by method and seed, in the order of the paper's tables, others as they come."""
    rows = {}
    for x in results:
        seed = x["run"].get("seed", 0)
        other = rows.setdefault((method_of(x), seed), x)["folder"]
        if other != x["folder"]:
            what = f"{method_of(x)} with seed {seed}"
            raise UserError(f"{other} and {x['folder']} both hold {what}; leave one out")
    order = [*NAMES, *(method for method, _ in rows)]
    keys = sorted(rows, key=lambda key: order.index(key[0]))
    index = pd.MultiIndex.from_tuples(keys, names=["method", "seed"])
    return pd.DataFrame([rows[key]["values"] for key in keys], index)


def grid(table: pd.DataFrame) -> list[str]:
    """Return the lines of a Markdown table."""
    rule = ["---"] + ["--:"] * table.shape[1]
    rows = [["", *table], rule, *table.itertuples()]
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


def means(students: pd.DataFrame, columns: dict) -> pd.DataFrame:
    """Return mean and interval of each method as text, a column for each figure.

    The best is bold, the second italic; values that print alike tie. One seed alone is not ranked,
    and its interval is over documents.
    """
    table = {}
    for key, c in columns.items():
        e = estimate(by_seed(students, key, c))
        if f"{key}_half" in students:
            halves = students[f"{key}_half"].astype(float).groupby("method").first()
            e["half"] = e["half"].fillna(c.factor * halves)
        cells = with_half(e, c.digits)
        if f"{key}_half" in students:
            cells += e["half"].map(lambda half: " ± –" if math.isnan(half) else "")
        shown = e["mean"].where(e["n"] > 1).round(c.digits)
        places = shown.rank(method="dense", ascending=c.sense < 0)
        stars = places.map({1: "**", 2: "*"}).fillna("") if shown.nunique() > 1 else ""
        table[c.heading] = stars + cells + stars
    return pd.DataFrame(table)


def by_seed(students: pd.DataFrame, key, column=AS_IS) -> pd.DataFrame:
    """Return one figure [seeds, methods] in the unit that is printed."""
    return column.factor * students[key].unstack("method", sort=False)


def caption(counts) -> str:
    if counts.max() == 1:
        return "One seed each."
    n = counts.max() if counts.nunique() == 1 else "n"
    return f"Mean and 95 % interval over {n} seeds; **best**, *second*."


def layouts(split, methods, reference) -> list[tuple]:
    """Return title, reference and rows of the paper's tables that have results.

    Other methods go into the main table, or on the validation split into one of their own.
    """
    layout = [(title, names[0], names) for title, where, names in LAYOUT if where == split]
    of_paper = {m for _, _, names in layout for m in names}
    others = ("alra", *(m for m in methods if m not in of_paper))
    layout.append(("Other objectives", reference, others))
    if split == "heldout":
        names = dict.fromkeys((*layout[0][2], *others))
        layout = [("Main results", reference, names), *layout[1:-1]]
    tables = [(title, start, [m for m in names if m in methods]) for title, start, names in layout]
    # a table of ALRA alone only if there is no other
    return [table for table in tables if {*table[2]} - {"alra"}] or tables[:1]


def accuracies(title, first, rows, reference, metric) -> list[str]:
    """Return a table of the tasks that every row has, with their average and its gain.

    The paper's row of a method follows ours.

    first  one of the results; its split, shape and step are those of all
    rows   method, seed -> scores by task
    """
    split = first["kind"]
    tasks = [t for t in SUITES[split] if t in rows and rows[t].notna().all()]
    if not tasks:
        return [f"{title}: no task in common, {split}", ""]
    accs = rows[tasks].map(lambda scores: 100 * scores.get(metric, scores["acc"]))
    accs["avg"] = accs.mean(axis=1)
    average = "Avg." if tasks == SUITES[split] else f"Avg. ({len(tasks)} of {len(SUITES[split])})"
    headings = {t: COLUMNS[t] for t in tasks} | {"avg": average}
    ours = means(accs, {t: Column(heading, +1, 1, 2) for t, heading in headings.items()})
    averages = by_seed(accs, "avg")
    gains = estimate(averages.sub(averages.get(reference, math.nan), axis=0))
    ours[f"Δ {reference}"] = with_half(gains, 2, "+").where(gains.index != reference, "Ref.")
    paper = paper_rows(first["run"].get("student"), split, reference, tasks)
    paper = paper.set_axis(ours.columns, axis=1)[paper.index.isin(ours.index)]
    both = pd.concat([ours, paper], keys=[0, 1]).swaplevel()  # method, whether it is the paper's
    order = [key for m in ours.index for key in ((m, 0), (m, 1)) if key in both.index]
    table = both.loc[order]
    table.index = ["*paper*" if is_paper else NAMES.get(m, m) for m, is_paper in order]
    what = "accuracy in %"
    if metric != "acc":
        what += f", {metric} where a task has it"
    notes = [caption(averages.count())]
    for t in tasks:
        scores = rows[t].iloc[0]  # of as many items as all others
        if scores["n"] != scores["n_paper"]:
            paper_has = f"the paper has {scores['n_paper']:,}"
            notes.append(f"{COLUMNS[t]}: {scores['n']:,} items, {paper_has}.")
    if "*paper*" in table.index:
        step = first["run"]["step"]
        notes.append(f"Ours after {step:,} updates, the paper's after {UPDATES[split]:,}.")
    return [f"{title}: {what}, {split}", "", *grid(table), "", *notes, ""]


def heldout(title, students: pd.DataFrame, reference) -> list[str]:
    """Return a table of figures over held-out rows, and one of differences to `reference`.

    students  method, seed -> figures
    """
    known = students.columns[students.notna().all()]
    columns = {key: c for key, c in FIGURES.items() if key in known}
    table = means(students, columns)
    counts = by_seed(students, "ce").count()
    note = caption(counts)
    if counts.nunique() > 1:
        table.insert(0, "n", counts)
    if counts.min() == 1 and "ce_half" in students and students["ce_half"].notna().any():
        note += " ± of one seed is half of a 95 % interval over the documents."
    lines = [title, "", *grid(table), "", note, ""]
    if reference not in counts or len(counts) == 1:
        return lines
    table = pd.DataFrame()
    both = []  # of each difference that excludes 0 over seeds: whether it does over documents
    for key, c in columns.items():
        values = by_seed(students, key, c)
        e = estimate(values.drop(columns=reference).sub(values[reference], axis=0))
        cells = with_half(e, c.digits, "+") + holm(e["p"]).map(p_text)
        for m in e.index:
            half = half_over_documents(students, m, reference, key)
            if not math.isnan(half):
                if e["n"][m] > 1:
                    cells[m] += ","
                cells[m] += f" ± {half:.{c.digits}f} over documents"
                if abs(e["mean"][m]) > e["half"][m]:
                    both.append(abs(e["mean"][m]) > half)
        table[c.heading] = cells
    how = ""
    if counts.max() > 1:
        how = ", with 95 % intervals (over seeds, paired; p by Holm over the methods)"
    lines += [f"{title}: difference to {reference}{how}", "", *grid(table), ""]
    if both:
        lines += [
            f"{len(both)} differences have both intervals, and exclude 0 over seeds (uncorrected); "
            f"{sum(both)} of these exclude 0 over documents, too.",
            "",
        ]
    return lines


def p_text(p: float) -> str:
    if math.isnan(p):
        return ""
    return ", p < 0.0001" if p < 1e-4 else f", p {p:.4f}"


def half_over_documents(students, method, reference, key) -> float:
    """Return half of the 95 % interval of a mean difference over the scored documents.

    NaN unless all seeds that both have come with sums of `key` by document.
    """
    changes = []
    for seed, ours in students.loc[method].iterrows():
        if (reference, seed) in students.index:
            ours = ours.get("documents")
            theirs = students.loc[reference, seed].get("documents")
            if not isinstance(ours, dict) or not isinstance(theirs, dict) or key not in ours:
                return math.nan
            changes.append(np.subtract(ours[key], theirs[key]))
            n = np.array(ours["n"])  # of all seeds
    return half_interval(np.mean(changes, 0), n) if changes else math.nan


def scored_on(facts) -> list[str]:
    """Return what figures were computed on, and what a CE is to be compared with."""
    teacher = "no teacher"
    if "teacher" in facts:
        ce = f"CE {facts['teacher_ce']:.4f}, entropy {facts['teacher_entropy']:.4f}"
        teacher = f"teacher: {facts['teacher']} ({ce})"
    on = f"{facts['n_targets']:,} targets in {facts['n_rows']:,} rows"
    if "documents" in facts:
        n = np.count_nonzero(facts["documents"]["n"])
        on += f" of {n} documents" if n > 1 else " of one document"
        if n < MIN_PARTS:
            on += ", too few for an interval"
    return [f"{on}; {teacher}.", f"{levels(facts)}."]
