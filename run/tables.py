"""Tables of results in the paper's form, with its numbers beside ours.

eval.py prints them of what it has scored, `eval.py --table` of earlier results. Several seeds of a
method make one row with mean and 95 % interval. A table only holds rows that can be compared: the
same initial weights per seed, data, budget, optimisation and scoring protocol.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError
from lib.files import check_kinds, read_json, read_lines
from lib.metrics import levels
from lib.stats import FIGURES, Figure, differences, estimate, p_text
from lib.tasks import COLUMNS, SUITES
from run.identity import RUN_FILE
from run.paper import LAYOUT, NAMES, PAPER, UPDATES

# What is read of a student's run.json, and of files of results.
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
# What is logged beside log.jsonl, under its keys in `read_log`.
PARTS = {"histogram": "histograms.jsonl", "teacher": "../teacher.jsonl"}

# what made students may differ in this between the rows of a table
VARIES = ("methods", "hyper", "moving", "state", "objective", "shape", "seed")
PERCENT = Figure("accuracy, %", +1, 100, 2)
# method -> seed -> figures over held-out rows by name, or scores by task
Figures = dict[str, dict[int | None, dict]]


class Result(NamedTuple):
    """What is known of one model by one protocol."""

    file: Path  # the newest
    kind: str  # "figures", or the split of scores
    protocol: str
    name: str
    run: dict  # facts of the student's training; {} for other models
    values: dict  # figures over held-out rows, or scores by task


def tabulate(paths: list[str], reference: str = "pretrain", metric: str = "acc") -> str:
    """Return the tables of folders with results, as Markdown.

    reference  the method that gains are measured from, except in tables of the paper with their own
    metric     "acc", or "acc_norm" for the tasks that have it
    """
    folders, missing = students_of(paths, load)
    results = []
    for folder in folders or paths:
        loaded = load(Path(folder))
        if not loaded:
            raise UserError(f"{folder}: no results in it; first: python eval.py {folder}")
        results += loaded
    methods = {method_of(r) for r in results}
    if reference not in ("pretrain", *methods):
        expected = f"expected one of {', '.join(sorted(methods))}"
        raise UserError(f"--reference {reference}: {expected}")
    lines = []
    for student in dict.fromkeys(r.run.get("student") for r in results):
        lines += [f"## {student or 'other models'}", ""]
        for kind in FILES:
            groups = {}
            for r in results:
                if (r.run.get("student"), r.kind) == (student, kind):
                    groups.setdefault(r.protocol, []).append(r)
            for protocol, group in groups.items():
                lines += [*tables_of(group, reference, metric), f"Protocol: {protocol}.", ""]
    if missing:
        lines += [f"Left out, since not scored: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def tables_of(group: list[Result], reference: str, metric: str) -> list[str]:
    """Return the tables of results of one kind and protocol."""
    check_comparable(group)
    first = group[0]
    rows = by_method(group)
    if first.kind == "figures":
        return [*heldout("### Held-out rows", rows, reference), *scored(first.values), ""]
    lines = []
    for title, base, methods in layouts(first.kind, rows, reference):
        shown = {m: rows[m] for m in methods}
        lines += accuracies(f"### {title}", first, shown, base, metric)
    return lines


# --- reading results


def run_facts(model: Path, kinds=()) -> dict:
    """Return the facts of the training behind a model's folder, or {} for other models.

    They are in run.json of a finished student, and in state.json of a checkpoint.
    """
    if model.name == "model":
        for name in ("run.json", "state.json"):
            if (model.parent / name).is_file():
                return read_json(model.parent / name, kinds)
    return {}


def read_log(folder: Path) -> list[dict]:
    """Return the records of a student's log.jsonl, then {step, key of PARTS} of each histogram."""
    log = read_lines(folder / "log.jsonl", {"step": int})
    for part, path in PARTS.items():
        for record in read_lines(folder / path, {"step": int}):
            log.append({"step": record["step"], part: record})
    return log


def students_of(paths: list[str], done: Callable) -> tuple[list[str], list[str]]:
    """Return the folders that paths stand for, and those of students that are not `done`.

    A folder stands for those inside that are `done`, as a run's for its students, or else for
    itself; a file stands for nothing.
    """
    folders = []
    missing = []
    for name in paths:
        path = Path(name)
        facts = run_facts(path / "model", {"config": dict})
        students = []
        if facts and "method" not in facts:
            check_kinds(facts, RUN_FILE, path / "run.json")
            students = [path / name for name in facts["config"]["methods"]]
        candidates = [*students, *sorted(path.glob("*/"))]
        inside = [str(folder) for folder in candidates if done(folder)]
        folders += inside
        if not (inside or students or path.is_file()):
            folders.append(name)  # unchanged, since ./a/b is not a hub id
        missing += [str(folder) for folder in students if not done(folder)]
    return list(dict.fromkeys(folders)), missing


def load(folder: Path) -> list[Result]:
    """Return the results in a folder, the newest last.

    A student's are of the weights that its run.json names. Tasks of one protocol are united.
    """
    results = {}
    current = run_facts(folder / "model").get("weights_sha256")
    for file in sorted(folder.glob("*_*.json"), key=lambda file: file.stat().st_mtime_ns):
        kind = file.stem.removeprefix("scores_").rpartition("_")[0]
        if kind not in FILES:
            continue
        content = read_json(file, FILES[kind])
        run = content["run"]
        check_kinds(run, RUN if run else (), file)
        sha256 = content["weights_sha256"]
        if current not in (None, sha256):
            continue
        facts = [f"{key} {x!s:.12}" for key, x in content["protocol"].items() if x is not None]
        key = (kind, ", ".join(facts), sha256)
        values = content.get("figures") or content["tasks"]
        if key in results:
            values = results[key].values | values
        results[key] = Result(file, kind, key[1], content["name"], run, values)
    return list(results.values())


def newest_figures(folder: Path) -> dict:
    """Return what the newest file of figures in a folder holds, or {}."""
    files = [r.file for r in load(folder) if r.kind == "figures"]
    return read_json(files[-1]) if files else {}


def method_of(result: Result) -> str:
    """Return the method with its overrides, or the name of a model that no run has made."""
    if not result.run:
        return result.name
    overrides = result.run["overrides"].items()
    return " ".join([result.run["method"], *(f"{key}={value}" for key, value in overrides)])


def by_method(results: list[Result]) -> Figures:
    """Return method -> seed -> values, in the order of the paper's tables, others as they come.

    The newest one of a folder counts.
    """
    rows = {}
    folders = {}
    for r in results:
        method = method_of(r)
        seed = r.run.get("seed")
        folder = r.file.parent
        other = folders.setdefault((method, seed), folder)
        if other != folder:
            message = f"both hold {method} with seed {seed}; leave one out"
            raise UserError(f"{other} and {folder} {message}")
        rows.setdefault(method, {})[seed] = r.values
    return {m: rows[m] for m in dict.fromkeys((*NAMES, *rows)) if m in rows}


def check_comparable(results: list[Result]) -> None:
    """Refuse results that differ in a fact that must be equal. A fact that is None does not apply.

    What made students may differ in VARIES alone; updates and the items of tasks are equal.
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
                message = f"differ in {key}: {first!s:.12} and {value!s:.12}"
                raise UserError(f"{folder} and {r.file.parent} {message}; tabulate them apart")


# --- tables


def grid(head: list[str], body: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def mark(cells: dict[str, dict], columns: dict[str, Figure]) -> dict[str, list[str]]:
    """Return cells (method -> column -> seed -> value) as text, by method.

    The best of a column is bold, the second italic; values that print alike tie. One seed alone is
    not ranked beside means over several. A column of sense 0 has signed differences.
    """
    texts = {m: [] for m in cells}
    for key, column in columns.items():
        estimates = {m: estimate(cells[m][key]) for m in cells}
        most = max(e.n for e in estimates.values())
        ranked = {}  # method -> mean as printed
        for m, e in estimates.items():
            if column.sense and e.n >= min(most, 2) > 0:
                ranked[m] = round(e.mean, column.digits)
        order = sorted(set(ranked.values()), reverse=column.sense > 0)
        stars = {}
        if len(order) > 1:
            stars = {order[0]: "**", order[1]: "*"}
        for m, e in estimates.items():
            star = stars.get(ranked.get(m), "")
            text = e.text(column.digits, "" if column.sense else "+")
            texts[m].append(f"{star}{text}{star}")
    return texts


def seed_counts(rows: dict) -> list[int]:
    return sorted({len(seeds) for seeds in rows.values()} - {0})


def caption(counts: list[int]) -> str:
    if counts == [1]:
        return "One seed each; **best**, *second*."
    n = counts[0] if len(counts) == 1 else "n"
    return f"Mean and 95 % interval over {n} seeds; **best**, *second*."


def layouts(split: str, rows: dict, reference: str) -> list[tuple[str, str, list[str]]]:
    """Return title, reference and methods of the paper's tables that have results.

    Other methods go into the first table, or into one of their own.
    """
    tables = []
    others = list(rows)
    for title, where, names in LAYOUT:
        if where == split:
            tables.append((title, names[0], [m for m in names if m in rows]))
            others = [m for m in others if m not in names]
    if split == "heldout":
        title, _, methods = tables[0]
        tables[0] = (title, reference, methods + others)
    else:
        tables.append(("Other objectives", reference, others + [m for m in rows if m == "alra"]))
    shown = [table for table in tables if set(table[2]) - {"alra"}]
    return shown or tables[: bool(rows)]


def accuracies(title: str, first: Result, rows: Figures, base: str, metric: str) -> list[str]:
    """Return a table of the tasks that all have, their average and its gain.

    The paper's rows stand below ours.
    """
    students = [scores for seeds in rows.values() for scores in seeds.values()]
    split = first.kind
    run = first.run
    every = SUITES[split]
    tasks = [t for t in every if all(t in scores for scores in students)]
    if not tasks:
        return [f"{title}: no task in common, {split}", ""]
    columns = dict.fromkeys((*tasks, "avg"), PERCENT) | {"gain": PERCENT._replace(sense=0)}
    ours = {m: {key: {} for key in columns} for m in rows}
    for m, cells in ours.items():
        for seed, scores in rows[m].items():
            for t in tasks:
                values = scores[t]
                cells[t][seed] = 100 * values.get(metric, values["acc"])
            cells["avg"][seed] = sum(cells[t][seed] for t in tasks) / len(tasks)
    references = ours.get(base, {"avg": {}})["avg"]
    for cells in ours.values():
        for seed, average in cells["avg"].items():
            if seed in references:
                cells["gain"][seed] = average - references[seed]
    papers = {m: paper_numbers(run.get("student"), split, m, tasks) for m in (*rows, base)}
    body = []
    for m, texts in mark(ours, columns).items():
        theirs = ["–" if t not in papers[m] else f"{papers[m][t]:.2f}" for t in (*tasks, "avg")]
        theirs.append(paper_gain(papers[m], papers[base], base))
        if m == base:
            texts[-1] = theirs[-1] = "Ref."
        body.append([NAMES.get(m, m), *texts])
        if papers[m]:
            body.append(["*paper*", *theirs])
    average = "Avg." if tasks == every else f"Avg. ({len(tasks)} of {len(every)})"
    heads = ["", *(COLUMNS[t] for t in tasks), average, f"Δ {base}"]
    what = "accuracy in %"
    if metric != "acc":
        what += f", {metric} where a task has it"
    notes = [caption(seed_counts(rows))]
    for t in tasks:
        n = students[0][t]["n"]  # equal in all
        n_paper = students[0][t]["n_paper"]
        if n != n_paper:
            notes.append(f"{COLUMNS[t]}: {n:,} items, the paper has {n_paper:,}.")
    if "step" in run and any(papers[m] for m in rows):
        steps = f"{run['step']:,} updates, the paper's after {UPDATES[split]:,}"
        notes.append(f"Ours after {steps}.")
    return [f"{title}: {what}, {split}", "", *grid(heads, body), "", *notes, ""]


def paper_numbers(student: str | None, split: str, method: str, tasks: list[str]) -> dict:
    """Return the paper's numbers, with an average over these tasks where some are missing."""
    numbers = PAPER.get((student, split, method), {})
    if not numbers or tasks == SUITES[split]:
        return numbers
    numbers = {t: numbers[t] for t in tasks if t in numbers}
    if numbers:
        numbers["avg"] = sum(numbers.values()) / len(tasks)
    return numbers


def paper_gain(numbers: dict, reference: dict, base: str) -> str:
    if base == "pretrain" and "gain" in numbers:
        return f"{numbers['gain']:+.2f}"
    if "avg" in numbers and "avg" in reference:
        return f"{numbers['avg'] - reference['avg']:+.2f}"
    return "–"


def heldout(title: str, figures: Figures, base: str) -> list[str]:
    """Return a table of figures over held-out rows, and one of differences to `base`."""
    students = [x for seeds in figures.values() for x in seeds.values()]
    columns = {key: f for key, f in FIGURES.items() if any(key in x for x in students)}
    cells = {m: {key: {} for key in columns} for m in figures}  # method -> column -> seed -> value
    for m, seeds in figures.items():
        for seed, x in seeds.items():
            for key in columns.keys() & x.keys():
                cells[m][key][seed] = columns[key].factor * x[key]
    counts = seed_counts(figures)
    heads = [f.heading for f in columns.values()]
    head = ["", *heads]
    body = [[m, *texts] for m, texts in mark(cells, columns).items()]
    if len(counts) > 1:
        head.insert(1, "n")
        for row in body:
            row.insert(1, f"{len(figures[row[0]])}")
    lines = [title, "", *grid(head, body), "", caption(counts), ""]
    others = [m for m in figures if m != base]
    if not others or not figures.get(base):
        return lines
    body = [[m] for m in others]
    for key, f in columns.items():
        pairs = [(cells[m][key], cells[base][key]) for m in others]
        for row, e in zip(body, differences(pairs), strict=True):
            p = "" if e.p is None else f", p {p_text(e.p_holm)}"
            row.append(e.text(f.digits, "+") + p)
    how = ""
    if counts[-1] > 1:
        how = ", with 95 % intervals (over seeds, paired; p by Holm over the methods)"
    return [*lines, f"{title}: difference to {base}{how}", "", *grid(["", *heads], body), ""]


def scored(facts: dict) -> list[str]:
    """Return what figures were computed on, and what a CE is to be compared with."""
    teacher = "no teacher"
    if "teacher" in facts:
        ces = f"CE {facts['teacher_ce']:.4f}, entropy {facts['teacher_entropy']:.4f}"
        teacher = f"teacher: {facts['teacher']} ({ces})"
    lines = [f"{facts['n_targets']:,.0f} targets in {facts['n_rows']:,.0f} rows; {teacher}."]
    if "uniform_ce" in facts:
        lines.append(f"{levels(facts)}.")
    return lines
