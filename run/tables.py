"""Results: reading them, and tables of them in the paper's form, with its numbers beside ours.

eval.py prints tables of what it has just scored, `eval.py --table` of earlier results. Several
seeds of a method make one row with mean and 95 % interval. A table only holds rows that can be
compared: the same initial weights per seed, data, updates, optimisation and scoring protocol.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib.errors import UserError
from lib.files import check_kinds, read_json, read_lines
from lib.metrics import levels
from lib.stats import FIGURES, Column, differences, estimate, half_interval, p_text
from lib.tasks import COLUMNS, SUITES
from run.identity import RUN_FILE, record_changes
from run.paper import LAYOUT, NAMES, UPDATES, paper_row

# The keys, with their kinds, that are read from a student's run.json and from files of results.
RUN = {
    "method": str,
    "student": str,
    "seed": int,
    "overrides": dict,
    "step": int,
    "config": dict,
    "made_by": {"code": dict, "shape": dict},
}
FILE = {"name": str, "run": dict, "protocol": dict, "weights_sha256": str}
TASK = {"acc": float, "n": int, "n_paper": int}
FILES = dict.fromkeys(SUITES, FILE | {"tasks": dict[str, TASK]})
FILES["figures"] = FILE | {"figures": {"ce": float, "n_targets": int, "n_rows": int}}
# Files of records beside log.jsonl, by the key that `read_log` gives to these records.
PARTS = {"histogram": "histograms.jsonl", "teacher": "../teacher.jsonl"}

# keys of a student's record (`made_by`) in which the rows of a table may differ
VARIES = ("methods", "hyper", "moving", "state", "objective", "shape", "seed")
PERCENT = Column("accuracy, %", sense=+1, factor=1, digits=2)


class Result(NamedTuple):
    """What is known of one model by one protocol."""

    file: Path  # the newest of those that are merged here
    kind: str  # "figures", or the split of scores
    protocol: str
    method: str  # with its overrides, or the name of a model that no run has made
    run: dict  # facts of the student's training; {} for other models
    values: dict  # figures over held-out rows, or scores by task


def tabulate(paths, reference="pretrain", metric="acc"):
    """Return the tables of folders with results, as Markdown.

    reference  the method that gains are measured from; some of the paper's tables have their own
    metric     "acc", or "acc_norm" for the tasks that have it
    """
    folders, missing = students_of(paths, load)
    results = []
    for folder in folders or paths:  # without any, the error below names the first
        loaded = load(Path(folder))
        if not loaded:
            raise UserError(f"{folder}: no results in it; first: python eval.py {folder}")
        results += loaded
    methods = {r.method for r in results}
    if reference not in ("pretrain", *methods):
        raise UserError(f"--reference {reference}: expected one of {', '.join(sorted(methods))}")
    lines = []
    for shape in dict.fromkeys(r.run.get("student") for r in results):
        lines += [f"## {shape or 'other models'}", ""]
        for kind in FILES:
            groups = {}
            for r in results:
                if (r.run.get("student"), r.kind) == (shape, kind):
                    groups.setdefault(r.protocol, []).append(r)
            for protocol, group in groups.items():
                lines += [*tables_of(group, reference, metric), f"Protocol: {protocol}.", ""]
    if missing:
        lines += [f"Left out, since not scored: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def tables_of(group, reference, metric):
    """Return the tables of results of one kind and protocol."""
    check_comparable(group)
    first = group[0]
    rows = by_method(group)
    if first.kind == "figures":
        return [*heldout("### Held-out rows", rows, reference), *scored_on(first.values), ""]
    lines = []
    for title, start, shown in layouts(first.kind, rows, reference):
        lines += accuracies(f"### {title}", first, shown, start, metric)
    return lines


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


def students_of(paths, is_done):
    """Return the folders that paths stand for, and those of a run's students that are not done.

    A path with `is_done(path)` stands for itself, any other one for the done folders inside it, as
    a run does for its students. A path without any stands for itself too, such as a hub id, unless
    it is a run or a file.
    """
    folders = []
    missing = []
    for name in paths:
        path = Path(name)
        facts = training_facts(path / "model")  # of path/run.json or path/state.json, if there
        students = []
        if facts and "method" not in facts:  # of a run, not of a student
            check_kinds(facts, RUN_FILE, path / "run.json")
            students = [path / student for student in facts["config"]["methods"]]
        inside = []
        for folder in dict.fromkeys((*students, *sorted(path.glob("*/")))):
            if is_done(folder):
                inside.append(str(folder))
            elif folder in students:
                missing.append(str(folder))
        if is_done(path) or not (inside or students or path.is_file()):
            inside = [name]  # as given: Path would make a/b of ./a/b, and that is a hub id
        folders += inside
    return list(dict.fromkeys(folders)), missing


def load(folder):
    """Return the results in a folder, the newest last.

    Those of a student's earlier weights are left out. Tasks scored by one protocol are merged.
    """
    results = {}
    current = training_facts(folder / "model").get("weights_sha256")
    for file in sorted(folder.glob("*_*.json"), key=os.path.getmtime):
        kind = file.stem.removeprefix("scores_").rpartition("_")[0]
        if kind not in FILES:
            continue
        content = read_json(file, FILES[kind])
        run = content["run"]
        if run:
            check_kinds(run, RUN, file)
        sha256 = content["weights_sha256"]
        if current and current != sha256:  # of earlier weights
            continue
        protocol = ", ".join(
            f"{key} {x!s:.12}" for key, x in content["protocol"].items() if x is not None
        )
        key = kind, protocol, sha256
        values = content.get("figures") or content["tasks"]
        if key in results:
            values = results.pop(key).values | values
        results[key] = Result(file, kind, protocol, method_of(content), run, values)
    return list(results.values())


def newest_figures(folder):
    """Return what the newest file of figures in a folder holds, or {}."""
    files = [r.file for r in load(folder) if r.kind == "figures"]
    return read_json(files[-1]) if files else {}


def method_of(content):
    """Return the method of a file of results with its overrides, or the name of its model."""
    run = content["run"]
    if not run:
        return content["name"]
    overrides = [f"{key}={value}" for key, value in run["overrides"].items()]
    return " ".join([run["method"], *overrides])


def by_method(results):
    """Return method -> seed -> values, in the order of the paper's tables, others as they come.

    Of several results in a folder the newest counts.
    """
    rows = {}
    folders = {}
    for r in results:
        seed = r.run.get("seed")
        folder = r.file.parent
        other = folders.setdefault((r.method, seed), folder)
        if other != folder:
            raise UserError(
                f"{other} and {folder} both hold {r.method} with seed {seed}; leave one out"
            )
        rows.setdefault(r.method, {})[seed] = r.values
    return {m: rows[m] for m in (*NAMES, *rows) if m in rows}


def check_comparable(results):
    """Refuse results that differ in a fact that must be equal. A fact that is None does not apply.

    Records (`made_by`) may only differ in VARIES. Steps, first weights of a seed, and the items of
    tasks must be equal.
    """
    seen = {}
    for r in results:
        record = r.run.get("made_by", {})
        facts = {key: value for key, value in record.items() if key not in VARIES}
        facts["step"] = r.run.get("step")
        facts[f"init_sha256 of seed {r.run.get('seed')}"] = r.run.get("init_sha256")
        if r.kind != "figures":
            for task, values in r.values.items():
                for key in ("data_sha256", "prompts_sha256", "version", "n"):
                    facts[f"{key} of {task}, {r.kind}"] = values.get(key)
        for key, value in facts.items():
            if value is None:
                continue
            first, folder = seen.setdefault(key, (value, r.file.parent))
            if first != value:
                change = record_changes({key: first}, {key: value})[key]
                raise UserError(
                    f"{folder} and {r.file.parent} cannot be compared: {change}; tabulate them "
                    "apart"
                )


# --- tables


def grid(head, body):
    """Return the lines of a Markdown table."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def by_seed(rows, key, column):
    """Return one figure in the unit that is printed: method -> seed -> value."""
    return {m: {s: column.factor * x[key] for s, x in seeds.items()} for m, seeds in rows.items()}


def ranked(rows, columns):
    """Return the rows of a table as text: a method, and a cell for each column.

    The best of a column is bold, the second italic; values that print alike tie. One seed alone is
    not ranked, and its interval is over the scored documents.

    rows  method -> seed -> figures
    """
    body = [[m] for m in rows]
    for key, column in columns.items():
        estimates = [estimate(values) for values in by_seed(rows, key, column).values()]
        means = {round(e.mean, column.digits) for e in estimates if e.n > 1}
        order = sorted(means, reverse=column.sense > 0)
        stars = {}
        if len(order) > 1:
            stars = {order[0]: "**", order[1]: "*"}
        for row, e, seeds in zip(body, estimates, rows.values(), strict=True):
            star = ""
            if e.n > 1:
                star = stars.get(round(e.mean, column.digits), "")
            else:
                for figures in seeds.values():  # one at most
                    if f"{key}_half" in figures:
                        e = e._replace(half=column.factor * figures[f"{key}_half"])
            row.append(f"{star}{e.text(column.digits)}{star}")
    return body


def seed_counts(rows):
    """Return the different numbers of seeds that methods have, rising."""
    return sorted({len(seeds) for seeds in rows.values()} - {0})


def caption(counts):
    if counts == [1]:
        return "One seed each."
    n = counts[0] if len(counts) == 1 else "n"
    return f"Mean and 95 % interval over {n} seeds; **best**, *second*."


def layouts(split, rows, reference):
    """Return title, reference and rows of the paper's tables that have results.

    Other methods go into the main table, or on the validation split into one of their own.
    """
    layout = []
    others = list(rows)
    for title, where, names in LAYOUT:
        if where == split:
            layout.append((title, names[0], names))
            others = [m for m in others if m not in names]
    if split == "heldout":
        title, _, names = layout[0]
        layout[0] = (title, reference, (*names, *others))
    else:
        layout.append(("Other objectives", reference, (*others, "alra")))
    tables = [
        (title, start, {m: rows[m] for m in names if m in rows}) for title, start, names in layout
    ]
    # a table of ALRA alone only if there is no other
    return [table for table in tables if table[2].keys() - {"alra"}] or tables[:1]


def accuracies(title, first, rows, reference, metric):
    """Return a table of the tasks that every row has, with their average and its gain.

    The paper's row of a method follows ours.

    first  one of the results; its split, shape and step are those of all
    """
    split = first.kind
    every = SUITES[split]
    students = [scores for seeds in rows.values() for scores in seeds.values()]
    tasks = [t for t in every if all(t in scores for scores in students)]
    if not tasks:
        return [f"{title}: no task in common, {split}", ""]
    ours = {m: {} for m in rows}
    for m, seeds in rows.items():
        for seed, scores in seeds.items():
            values = {t: 100 * scores[t].get(metric, scores[t]["acc"]) for t in tasks}
            ours[m][seed] = values | {"avg": sum(values.values()) / len(tasks)}
    columns = dict.fromkeys((*tasks, "avg"), PERCENT)
    averages = by_seed(ours, "avg", PERCENT)
    gains = differences([(values, averages.get(reference, {})) for values in averages.values()])
    body = []
    for (m, *cells), e in zip(ranked(ours, columns), gains, strict=True):
        gain = "Ref." if m == reference else e.text(2, "+")
        body.append([NAMES.get(m, m), *cells, gain])
        cells = paper_row(first.run.get("student"), split, m, reference, tasks)
        if cells:
            body.append(["*paper*", *cells])
    average = "Avg." if tasks == every else f"Avg. ({len(tasks)} of {len(every)})"
    heads = ["", *(COLUMNS[t] for t in tasks), average, f"Δ {reference}"]
    what = "accuracy in %"
    if metric != "acc":
        what += f", {metric} where a task has it"
    notes = [caption(seed_counts(rows))]
    for t in tasks:
        scores = students[0][t]  # of as many items as all others
        if scores["n"] != scores["n_paper"]:
            notes.append(
                f"{COLUMNS[t]}: {scores['n']:,} items, the paper has {scores['n_paper']:,}."
            )
    if len(body) > len(rows):  # some are the paper's
        notes.append(
            f"Ours after {first.run['step']:,} updates, the paper's after {UPDATES[split]:,}."
        )
    return [f"{title}: {what}, {split}", "", *grid(heads, body), "", *notes, ""]


def heldout(title, rows, reference):
    """Return a table of figures over held-out rows, and one of differences to `reference`."""
    students = [figures for seeds in rows.values() for figures in seeds.values()]
    columns = {key: f for key, f in FIGURES.items() if all(key in x for x in students)}
    heads = [f.heading for f in columns.values()]
    counts = seed_counts(rows)
    head = ["", *heads]
    body = ranked(rows, columns)
    if len(counts) > 1:
        head.insert(1, "n")
        for row, seeds in zip(body, rows.values(), strict=True):
            row.insert(1, f"{len(seeds)}")
    note = caption(counts)
    if 1 in counts and any("ce_half" in x for x in students):
        note += " ± of one seed is half of a 95 % interval over the documents."
    lines = [title, "", *grid(head, body), "", note, ""]
    others = [m for m in rows if m != reference]
    if not others or not rows.get(reference):
        return lines
    body = [[m] for m in others]
    # of each difference that excludes 0 over seeds: whether it also does over documents
    also_over_documents = []
    for key, f in columns.items():
        values = by_seed(rows, key, f)
        pairs = [(values[m], values[reference]) for m in others]
        for row, e in zip(body, differences(pairs), strict=True):
            cell = e.text(f.digits, "+") + p_text(e.p_holm)
            half = half_over_documents(rows[row[0]], rows[reference], key)
            if half:
                if e.half is not None:
                    cell += ","
                    if abs(e.mean) > e.half:
                        also_over_documents.append(abs(e.mean) > half)
                cell += f" ± {half:.{f.digits}f} over documents"
            row.append(cell)
    how = ""
    if counts != [1]:
        how = ", with 95 % intervals (over seeds, paired; p by Holm over the methods)"
    lines += [f"{title}: difference to {reference}{how}", "", *grid(["", *heads], body), ""]
    if also_over_documents:
        lines += [
            f"{len(also_over_documents)} differences have both intervals, and exclude 0 over seeds "
            f"(uncorrected); {sum(also_over_documents)} of these exclude 0 over documents, too.",
            "",
        ]
    return lines


def half_over_documents(students, references, key):
    """Return half of the 95 % interval of a mean difference over the scored documents.

    None unless all seeds that both have come with sums of `key` by document.

    students, references  seed -> figures
    """
    changes = []
    for seed in sorted(students.keys() & references.keys()):
        ours = students[seed].get("documents", {})
        theirs = references[seed].get("documents", {})
        if key not in ours or key not in theirs:
            return None
        changes.append(np.subtract(ours[key], theirs[key]))
    if not changes:
        return None
    return half_interval(np.mean(changes, 0), np.array(ours["n"]))  # n: of all seeds


def scored_on(facts):
    """Return what figures were computed on, and what a CE is to be compared with."""
    teacher = "no teacher"
    if "teacher" in facts:
        teacher = (
            f"teacher: {facts['teacher']} (CE {facts['teacher_ce']:.4f}, entropy "
            f"{facts['teacher_entropy']:.4f})"
        )
    return [
        f"{facts['n_targets']:,} targets in {facts['n_rows']:,} rows; {teacher}.",
        f"{levels(facts)}.",
    ]
