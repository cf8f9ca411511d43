"""Tables of results, with the numbers of the paper below ours.

eval.py prints those of what it has just scored; `eval.py --table` prints those of earlier results.
Several seeds of a method make one row with mean and 95 % interval. A table only holds rows that can
be compared: the same initial weights per seed, data, updates, optimisation and scoring protocol.
"""

import itertools
import re
import sys

import numpy as np
import pandas as pd

from configure import Config
from lib.errors import UserError, note
from lib.metrics import reference_text
from lib.source import edited
from lib.stats import FIGURES, MIN_PARTS, Column, estimate, half_interval, holm, with_half
from lib.tasks import COLUMNS, SUITES
from run.paper_numbers import NAMES, UPDATES, paper_rows
from run.provenance import OLDER, as_in_file, record_changes, settings_of_run
from run.results import read_results, students_of

# Keys of a student's record (`made_by`) in which the rows of a table may differ.
VARIES = ("methods", "hyper", "moving", "source", "shape")
PER_SEED = ("seed", "init_sha256", "order_sha256")


def check_comparable(results):
    """Raise `UserError` if results differ in a fact that must be equal; None is no such fact.

    Records (`made_by`) may only differ in VARIES, and those of a method's seeds in PER_SEED alone,
    which must be equal for all methods. Steps and all that was scored must be equal.
    """
    seen = {}
    defaults = as_in_file(settings_of_run(Config()))  # of keys that are newer than a record
    for x in results:
        run = x["run"]
        facts = {"step": run.get("step"), "init_sha256": run.get("init_sha256")}
        if "made_by" in run:
            facts |= defaults | run["made_by"]
        facts |= {f"scored {key}": value for key, value in x["scored"].items()}
        if x["kind"] in SUITES:
            for task, scores in x["values"].items():
                facts[f"data of {task}"] = scores["data_sha256"]
                facts[f"prompts of {task}"] = scores["prompts_sha256"]
        for key, value in facts.items():
            if value is None or key in OLDER:
                continue
            if key in VARIES:
                key = f"{key} of {method_of(x)}"
            elif key in PER_SEED:
                key = f"{key} of seed {run['seed']}"
            first, name = seen.setdefault(key, (value, x["name"]))
            if first != value:
                change = record_changes({key: first}, {key: value})[key]
                raise UserError(
                    f"{name} and {x['name']} cannot be compared: {change}; tabulate them apart"
                )


# --- tables


def tabulate(paths, reference, metric) -> str:
    """Return the tables of folders with results, as Markdown."""
    results = []
    for folder in students_of(paths, read_results):
        found = read_results(folder)
        if not found:
            note(f"{folder}: no results in it")
        results += found
    if not results:
        names = " ".join(map(str, paths))
        raise UserError(f"{names}: no results; first: python eval.py {names}")
    return tables_of(results, reference, metric)


def tables_of(results: list[dict], reference, metric) -> str:
    """Return the tables of each kind of results and protocol.

    reference  the method that differences are measured from
    metric     "acc", or "acc_norm" for the tasks that have it
    """
    methods = {method_of(x) for x in results}
    if reference not in ("pretrain", *methods):
        raise UserError(f"--reference {reference}: expected one of {', '.join(sorted(methods))}")
    lines = []
    results = sorted(results, key=table_of)
    for (kind, protocol), group in itertools.groupby(results, table_of):
        students = by_method(group)
        first, *_ = students.values()
        index = pd.MultiIndex.from_tuples(students, names=["method", "seed"])
        rows = pd.DataFrame([x["values"] for x in students.values()], index)
        if kind == "figures":
            title = f"## Held-out rows {first['protocol'].get('rows')}"
            lines += [*figure_tables(title, rows, reference), *scored_on(first["values"])]
        else:
            lines += accuracies(first, rows, reference, metric)
        lines += ["", f"Protocol: {protocol}.", *edit_lines(students.values(), "run"), ""]
    return for_screen("\n".join(lines))


def table_of(result) -> tuple[str, str]:
    """Return kind and protocol, which the results of a table have in common.

    The shape of the students belongs to the protocol.
    """
    protocol = {"student": result["run"].get("student")} | result["protocol"]
    facts = [f"{key} {x}" for key, x in protocol.items() if x is not None]
    return result["kind"], ", ".join(facts)


def by_method(results) -> dict:
    """Return method, seed -> result, in the order of the paper's tables, others as they come.

    Of a model's results the newest counts, and scores of tasks are merged: eval.py writes a result
    for each task. Raises `UserError` if results cannot be compared.
    """
    rows = {}
    for x in sorted(results, key=place_of):
        key = method_of(x), x["run"].get("seed", 0)
        earlier = rows.get(key, x)
        if earlier["weights_sha256"] == x["weights_sha256"]:
            if x["kind"] in SUITES:
                x = x | {"values": earlier["values"] | x["values"]}
        elif earlier["name"] != x["name"]:
            what = f"{key[0]} with seed {key[1]}"
            raise UserError(f"{earlier['name']} and {x['name']} both hold {what}; leave one out")
        rows[key] = x
    check_comparable(rows.values())
    return rows


def place_of(result) -> int:
    """Return the place of a result's method in the paper's tables; others have the last one."""
    method = method_of(result)
    return [*NAMES, method].index(method)


def method_of(result) -> str:
    """Return the method of a result with its overrides, or the name of its model."""
    run = result["run"]
    overrides = [f"{key}={value}" for key, value in run.get("overrides", {}).items()]
    return " ".join([run.get("method", result["name"]), *overrides])


def edit_lines(results, part: str) -> list[str]:
    """Return a line on the files that were edited between trainings and scorings, if any.

    Of these, a result has the one, and has a dict of facts on the other as `part`.
    """
    files = edited(*(facts.get("code", {}) for x in results for facts in (x, x[part])))
    return [f"Edited between these trainings and scorings: {', '.join(files)}."] if files else []


def grid(table: pd.DataFrame) -> list[str]:
    """Return the lines of a Markdown table."""
    rule = ["---"] + ["--:"] * table.shape[1]
    rows = [["", *table], rule, *table.itertuples()]
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


def for_screen(text: str) -> str:
    """Return text with the columns of its Markdown tables aligned if it goes to a terminal."""
    if not sys.stdout.isatty():
        return text
    return re.sub(r"^\|.*(\n\|.*)*", aligned, text, flags=re.M)


def aligned(table: re.Match) -> str:
    """Return the lines of a Markdown table with cells of one width in each column."""
    cells = pd.DataFrame(line.split(" | ") for line in table[0].split("\n"))
    return "\n".join(cells.apply(padded).agg(" | ".join, axis=1))


def padded(column: pd.Series) -> pd.Series:
    """Return the cells of a column in one width. Those of the first one, 0, begin at the left."""
    return column.str.pad(column.str.len().max(), "left" if column.name else "right")


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
        shown = e["mean"].where(e["n"] > 1).round(c.digits)
        places = shown.rank(method="dense", ascending=c.sense < 0)
        stars = places.map({1: "**", 2: "*"}).fillna("") if shown.nunique() > 1 else ""
        table[c.heading] = stars + cells + stars
    return pd.DataFrame(table)


def by_seed(students: pd.DataFrame, key, column) -> pd.DataFrame:
    """Return one figure [seeds, methods] in the unit that is printed."""
    return column.factor * students[key].unstack("method", sort=False)


def accuracies(first, rows, reference, metric) -> list[str]:
    """Return tables of the tasks that every row has, with their average, and the paper's numbers.

    first  one of the results; its split, shape and step are those of all
    rows   method, seed -> scores by task
    """
    split = first["kind"]
    suite = SUITES[split]
    rows = rows.dropna(axis=1)
    tasks = [task for task in suite if task in rows]
    accs = rows[tasks].map(lambda scores: 100 * scores.get(metric, scores["acc"]))
    accs = accs.rename(columns=COLUMNS)
    headings = [*accs]
    average = "Avg." if len(tasks) == len(suite) else f"Avg. ({len(tasks)} of {len(suite)})"
    accs[average] = accs.mean(axis=1)
    columns = {heading: Column(heading, +1, 1, 2) for heading in accs}
    methods = rows.index.unique(0)
    if reference not in methods:  # ablations, whose differences are to the first one
        reference = methods[0]
    norm = ", acc_norm where a task has it" if metric == "acc_norm" else ""
    lines = figure_tables(f"## Accuracy in %{norm}, {split}", accs, reference, columns)
    for task in tasks:
        scores = rows[task].iloc[0]  # of as many items as all others
        if scores["n"] != scores["n_paper"]:
            items = f"{scores['n']:,} items, the paper has {scores['n_paper']:,}"
            lines.append(f"{COLUMNS[task]}: {items}.")
    paper = paper_rows(first["run"].get("student"), split, headings)
    paper = paper.rename(columns={"avg": average}).reindex(methods).dropna()
    if len(paper):
        updates = f"{UPDATES[split]:,} updates (ours: {first['run']['step']:,})"
        lines += ["", f"The paper's acc, after {updates}:", "", *grid(paper)]
    return lines


def figure_tables(title, students: pd.DataFrame, reference, columns=FIGURES) -> list[str]:
    """Return a table of figures, and one of differences to `reference`.

    students  method, seed -> figures
    """
    known = students.dropna(axis=1)
    incomplete = [c.heading for key, c in columns.items() if key in students.columns.drop(known)]
    columns = {key: c for key, c in columns.items() if key in known}
    table = means(students, columns)
    counts = students.groupby("method", sort=False).size()
    n = counts.max()
    if counts.nunique() > 1:
        table.insert(0, "n", counts)
        n = "n"
    note = f"Mean and 95 % interval over {n} seeds; **best**, *second*."
    if n == 1:
        note = "One seed each."
    if counts.min() == 1 and "ce_half" in known:
        note += " ± of one seed is half of a 95 % interval over the documents."
    if incomplete:
        note += f" Not all rows have {', '.join(incomplete)}."
    lines = [title, "", *grid(table), "", note, ""]
    if reference in counts and len(counts) > 1 and columns:
        lines += differences(title, students, columns, reference)
    return lines


def differences(title, students: pd.DataFrame, columns: dict, reference) -> list[str]:
    """Return a table of differences to `reference`, each with its intervals and p."""
    table = pd.DataFrame()
    both = []  # of each difference that excludes 0 over seeds: whether it does over documents
    for key, c in columns.items():
        values = by_seed(students, key, c)
        e = estimate(values.drop(columns=reference).sub(values[reference], axis=0))
        cells = with_half(e, c.digits, "+") + holm(e["p"]).map(p_text)
        for m, (n, mean, half, _) in e.iterrows():
            over_documents = half_over_documents(students, m, reference, key)
            if not np.isnan(over_documents):
                cells[m] += "," * (n > 1) + f" ± {over_documents:.{c.digits}f} over documents"
                if abs(mean) > half:
                    both.append(abs(mean) > over_documents)
            if n == 1 and abs(mean) <= over_documents:  # over seeds, p says it
                cells[m] += ", within noise"
        table[c.heading] = cells
    how = ""
    if e["n"].max() > 1:
        how = ", with 95 % intervals (over seeds, paired; p by Holm over the methods)"
    lines = [f"{title}: difference to {reference}{how}", "", *grid(table), ""]
    if both:
        lines.append(
            f"Of the differences with both intervals, {len(both)} exclude 0 over seeds "
            f"(uncorrected), and {sum(both)} of these also over documents.\n"
        )
    return lines


def p_text(p: float) -> str:
    if np.isnan(p):
        return ""
    return ", p < 0.0001" if p < 1e-4 else f", p {p:.4f}"


def half_over_documents(students, method, reference, key) -> float:
    """Return half of the 95 % interval of a mean difference over the scored documents.

    NaN unless all seeds that both have come with sums of `key` by document.
    """
    if key not in ("ce", "kl") or "documents" not in students:
        return np.nan
    documents = [students.loc[m]["documents"] for m in (method, reference)]
    pairs = pd.concat(documents, axis=1, join="inner")  # [seeds, 2]
    if pairs.empty or pairs.isna().any(axis=None):
        return np.nan
    changes = [np.subtract(ours[key], theirs[key]) for ours, theirs in pairs.values]
    n = pairs.iloc[0, 0]["n"]  # of all seeds
    return half_interval(np.mean(changes, 0), np.array(n))


def scored_on(facts) -> list[str]:
    """Return what figures were computed on, and what a CE is to be compared with."""
    teacher = "no teacher"
    if "teacher" in facts:
        ce = f"CE {facts['teacher_ce']:.4f}, entropy {facts['teacher_entropy']:.4f}"
        teacher = f"teacher: {facts['teacher']} ({ce})"
    on = f"{facts['n_targets']:,} targets in {facts['n_rows']:,} rows"
    if "documents" in facts:
        n_documents = np.count_nonzero(facts["documents"]["n"])
        on += f" of {n_documents} documents"
        if n_documents < MIN_PARTS:
            on += ", too few for an interval"
    return [f"{on}; {teacher}.", f"{reference_text(facts)}."]
