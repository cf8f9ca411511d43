"""Tables of results in the paper's form, with its numbers beside ours.

eval.py prints them of what it has scored, `eval.py --table` of earlier results. Several seeds of a
method make one row with mean and 95 % interval. A table only holds rows that can be compared: the
same initial weights per seed, data, budget, optimisation and scoring protocol.
"""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError
from lib.files import read_json, read_lines
from lib.metrics import levels
from lib.stats import FIGURES, Figure, differences, estimate, p_text
from lib.tasks import COLUMNS, SUITES
from run.identity import VARIES
from run.paper import LAYOUT, NAMES, PAPER, UPDATES

# What is read of a student's run.json, and of the files of results.
RUN = ("method", "student", "seed", "overrides", "step", "config", "made_by")
FILE = ("name", "run", "protocol", "weights_sha256")
# What is logged beside log.jsonl, under its keys in `read_log`.
PARTS = {"histogram": "histograms.jsonl", "teacher": "../teacher.jsonl"}

PERCENT = Figure("accuracy, %", +1, 100, 2)
Figures = dict[str, dict[int | None, dict]]  # method -> seed -> figures over held-out rows, by name


class Result(NamedTuple):
    """What is known of one checkpoint."""

    folder: Path
    name: str
    run: dict  # facts of the student's training; {} for other models
    scores: dict[str, dict]  # split -> tasks and protocol
    figures: dict  # over held-out rows, with their protocol; {} without


def scores_name(split: str, limit: int | None) -> str:
    """Return the file name for scores of a set of tasks, or of the first `limit` items of each."""
    return f"scores_{split}.json" if limit is None else f"scores_{split}_limit{limit}.json"


def tabulate(
    paths: list[str],
    reference: str = "pretrain",
    metric: str = "acc",
    splits: Iterable[str] = tuple(SUITES),
    limit: int | None = None,
) -> str:
    """Return the tables of folders with results, as Markdown.

    reference  the method that gains are measured from, except in tables of the paper with their own
    metric     "acc", or "acc_norm" for the tasks that have it
    splits     which sets of tasks to show
    limit      show the scores of the first `limit` items
    """
    files = {split: scores_name(split, limit) for split in splits}
    names = ["figures.json", *files.values()]

    def has_results(folder: Path) -> bool:
        return any((folder / name).is_file() for name in names)

    folders, missing = students_of(paths, has_results)
    results = [load(Path(folder), files) for folder in folders or paths]
    methods = in_order(dict.fromkeys(map(method_of, results)))
    if reference not in ("pretrain", *methods):
        message = f"not among the results, which are of {', '.join(methods)}"
        raise UserError(f"--reference {reference}: {message}")
    lines = []
    for student in dict.fromkeys(r.run.get("student") for r in results):
        same_size = [r for r in results if r.run.get("student") == student]
        check_comparable(same_size)
        lines += [f"## {student or 'other models'}", ""]
        for split in files:
            rows = by_method([r for r in same_size if split in r.scores])
            for title, base, shown in layouts(split, rows, reference):
                shown_rows = {m: rows[m] for m in shown}
                lines += accuracies(title, split, student, shown_rows, base, metric)
        with_figures = [r for r in same_size if r.figures]
        if with_figures:
            rows = by_method(with_figures)
            figures = {}
            for m in in_order(rows):
                figures[m] = {seed: r.figures for seed, r in rows[m].items()}
            notes = scored(with_figures[0].figures)
            lines += heldout("### Held-out rows", figures, reference, notes)
    if missing:
        lines += [f"Left out, since not scored: {', '.join(missing)}.", ""]
    return "\n".join(lines)


# --- reading results


def read_if_there(file: Path, keys: Iterable[str] = ()) -> dict:
    """Return the object in a JSON file, or {} without a file."""
    return read_json(file, keys) if file.is_file() else {}


def run_facts(model: Path, keys: Iterable[str] = ()) -> dict:
    """Return the facts of the training behind a model's folder, or {} for other models.

    They are in run.json of a finished student, and in state.json of a checkpoint.
    """
    if model.name == "model":
        for name in ("run.json", "state.json"):
            if (model.parent / name).is_file():
                return read_json(model.parent / name, keys)
    return {}


def read_log(folder: Path) -> list[dict]:
    """Return the records of a student's log.jsonl, then {step, key of PARTS} of each histogram."""
    log = read_lines(folder / "log.jsonl", ["step"])
    for part, path in PARTS.items():
        for record in read_lines(folder / path, ["step"]):
            log.append({"step": record["step"], part: record})
    return log


def students_of(paths: list[str], done: Callable[[Path], bool]) -> tuple[list[str], list[str]]:
    """Return the folders that paths stand for, and those of students that are not `done`.

    A folder stands for those inside that are `done`, as a run's for its students, or else for
    itself; a file stands for nothing.
    """
    folders = []
    missing = []
    for name in paths:
        path = Path(name)
        facts = read_if_there(path / "run.json")
        is_run = "config" in facts and "method" not in facts
        students = []
        if is_run:
            students = [path / method for method in facts["config"].get("methods", ())]
        candidates = [*students, *sorted(path.glob("*/"))]
        inside = [str(folder) for folder in candidates if done(folder)]
        folders += inside
        if not (inside or is_run or path.is_file()):
            folders.append(name)  # unchanged, since ./a/b is not a hub id
        missing += [str(folder) for folder in students if not done(folder)]
    return list(dict.fromkeys(folders)), missing


def load(folder: Path, files: dict[str, str]) -> Result:
    """Return the results in a folder. `files` has the name of the file with scores, by split."""
    scores = {}
    for split, name in files.items():
        if (folder / name).is_file():
            scores[split] = read_json(folder / name, (*FILE, "tasks"))
    rows = read_if_there(folder / "figures.json", (*FILE, "figures"))
    last = rows or next(reversed(scores.values()), None)
    if last is None:
        names = " or ".join(("figures.json", *files.values()))
        raise UserError(f"{folder}: no {names} in it; first: python eval.py {folder}")
    figures = {}
    if rows:
        figures = rows["figures"] | {"dtype": rows["protocol"]["dtype"]}
    return Result(folder, last["name"], last["run"] or {}, scores, figures)


def method_of(result: Result) -> str:
    """Return the method with its overrides, or the name of a model that no run has made."""
    if not result.run:
        return result.name
    overrides = result.run["overrides"].items()
    return " ".join([result.run["method"], *(f"{key}={value}" for key, value in overrides)])


def by_method(results: list[Result]) -> dict[str, dict[int | None, Result]]:
    """Return method -> seed -> result."""
    rows = {}
    for r in results:
        method, seed = method_of(r), r.run.get("seed")
        other = rows.setdefault(method, {}).setdefault(seed, r)
        if other is not r:
            message = f"both hold {method} with seed {seed}; leave one out"
            raise UserError(f"{other.folder} and {r.folder} {message}")
    return rows


def in_order(methods: Iterable[str]) -> list[str]:
    """Return methods in the order of the paper's tables, then the others as they come."""
    known = list(itertools.chain.from_iterable(names for *_, names in LAYOUT))
    return sorted(methods, key=lambda m: known.index(m) if m in known else len(known))


def check_comparable(results: list[Result]) -> None:
    """Refuse results that differ in a fact that must be equal. A fact that is None does not apply.

    What made students may differ in VARIES alone; updates and the protocol of scoring are equal.
    """
    seen = {}
    for r in results:
        for key, value in facts_of(r).items():
            if value is None:
                continue
            first, folder = seen.setdefault(key, (value, r.folder))
            if first != value:
                message = f"differ in {key}: {str(first)[:12]} and {str(value)[:12]}"
                raise UserError(f"{folder} and {r.folder} {message}; tabulate them apart")


def facts_of(r: Result) -> dict:
    """Return the facts that must be equal in all rows of a table."""
    facts = dict(r.run.get("made_by", {}))
    for key in VARIES:
        facts.pop(key, None)
    for key in ("step", "nominal_tokens"):
        facts[key] = r.run.get(key)
    for key in ("init_sha256", "valid_tokens"):
        facts[f"{key} of seed {r.run.get('seed')}"] = r.run.get(key)
    for key in ("rows_sha256", "teacher_sha256", "dtype"):
        facts[f"{key} of figures"] = r.figures.get(key)
    for split, scores in r.scores.items():
        for key, value in scores["protocol"].items():
            facts[f"{key} of {split} scores"] = value
        for task, values in scores["tasks"].items():
            for key in ("data_sha256", "prompts_sha256", "version", "n"):
                facts[f"{key} of {task}, {split}"] = values.get(key)
    return facts


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
        fewest = min(2, max(e.n for e in estimates.values()))
        ranked = [e for e in estimates.values() if e.n and e.n >= fewest]
        means = {round(e.mean, column.digits) for e in ranked}
        order = sorted(means, reverse=column.sense > 0)
        for m, e in estimates.items():
            text = e.text(column.digits, "" if column.sense else "+")
            if e in ranked and column.sense and len(order) > 1:
                place = order.index(round(e.mean, column.digits))
                stars = {0: "**", 1: "*"}.get(place, "")
                text = f"{stars}{text}{stars}"
            texts[m].append(text)
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
    for title, where, names in LAYOUT:
        if where == split:
            tables.append((title, names[0], [m for m in names if m in rows]))
    known = set(itertools.chain.from_iterable(methods for *_, methods in tables))
    others = [m for m in in_order(rows) if m not in known]
    if split == "heldout":
        title, _, methods = tables[0]
        tables[0] = (title, reference, methods + others)
    else:
        alra = ["alra"] if "alra" in rows else []
        tables.append(("Other objectives", reference, others + alra))
    shown = [table for table in tables if set(table[2]) - {"alra"}]
    return shown or tables[: bool(rows)]


def accuracies(
    title: str, split: str, student: str | None, rows: dict, base: str, metric: str
) -> list[str]:
    """Return a table of tasks, their average and its gain; the paper's rows stand below ours."""
    every = SUITES[split]
    tasks = [r.scores[split]["tasks"] for seeds in rows.values() for r in seeds.values()]
    columns = [t for t in every if any(t in values for values in tasks)]
    common = [t for t in every if all(t in values for values in tasks)]
    kinds = dict.fromkeys((*columns, "avg"), PERCENT) | {"gain": PERCENT._replace(sense=0)}
    ours = {m: {key: {} for key in kinds} for m in rows}
    for m, cells in ours.items():
        for seed, r in rows[m].items():
            for t, values in r.scores[split]["tasks"].items():
                cells[t][seed] = 100 * values.get(metric, values["acc"])
            if common:
                cells["avg"][seed] = sum(cells[t][seed] for t in common) / len(common)
    references = ours[base]["avg"] if base in ours else {}
    for cells in ours.values():
        for seed, reference in references.items():
            if seed in cells["avg"]:
                cells["gain"][seed] = cells["avg"][seed] - reference
    body = []
    papers = {m: paper_numbers(student, split, m, common) for m in (*rows, base)}
    for m, texts in mark(ours, kinds).items():
        theirs = [papers[m].get(key) for key in (*columns, "avg")]
        theirs = ["–" if number is None else f"{number:.2f}" for number in theirs]
        theirs.append(paper_gain(papers[m], papers[base], base))
        if m == base:
            texts[-1] = theirs[-1] = "Ref."
        body.append([NAMES.get(m, m), *texts])
        if papers[m]:
            body.append(["*paper*", *theirs])
    average = "Avg." if common == every else f"Avg. ({len(common)} of {len(every)})"
    heads = ["", *(COLUMNS[t] for t in columns), average, f"Δ {base}"]
    what = "accuracy in %"
    if metric != "acc":
        what += f", {metric} where a task has it"
    in_paper = any(papers[m] for m in rows)
    notes = accuracy_notes(split, rows, columns, metric, in_paper)
    lines = [f"### {title}: {what}, {split}", "", *grid(heads, body), ""]
    return [*lines, caption(seed_counts(rows)), *notes, ""]


def paper_numbers(student: str | None, split: str, method: str, common: list[str]) -> dict:
    """Return the paper's numbers, with an average over the common tasks where some are missing."""
    numbers = PAPER.get((student, split, method), {})
    if common == SUITES[split]:
        return numbers
    numbers = {t: numbers[t] for t in COLUMNS if t in numbers}
    if numbers and common:
        numbers["avg"] = sum(numbers[t] for t in common) / len(common)
    return numbers


def paper_gain(numbers: dict, reference: dict, base: str) -> str:
    if base == "pretrain" and numbers.get("gain") is not None:
        return f"{numbers['gain']:+.2f}"
    if "avg" in numbers and "avg" in reference:
        return f"{numbers['avg'] - reference['avg']:+.2f}"
    return "–"


def accuracy_notes(
    split: str, rows: dict, columns: list[str], metric: str, in_paper: bool
) -> list[str]:
    """Return what differs from the paper: numbers of items, updates, and the metric."""
    results = [r for seeds in rows.values() for r in seeds.values()]
    items = set()
    having = set()
    for r in results:
        for t, values in r.scores[split]["tasks"].items():
            items.add((t, values["n"], values["n_paper"]))
            if metric in values:
                having.add(t)
    notes = []
    for t, n, n_paper in sorted(items):
        if n != n_paper:
            notes.append(f"{COLUMNS[t]}: {n:,} items, the paper has {n_paper:,}.")
    steps = sorted({r.run["step"] for r in results if "step" in r.run})
    if steps and in_paper:
        updates = " or ".join(f"{step:,}" for step in steps)
        notes.append(f"Ours after {updates} updates, the paper's after {UPDATES[split]:,}.")
    if metric != "acc":
        named = ", ".join(COLUMNS[t] for t in columns if t in having) or "no task"
        message = "acc for the others; the paper says accuracy, of neither kind."
        notes.append(f"{metric} for {named}, {message}")
    return notes


def heldout(title: str, figures: Figures, base: str, notes: Iterable[str] = ()) -> list[str]:
    """Return a table of figures over held-out rows, `notes`, and one of differences to `base`."""
    students = [x for seeds in figures.values() for x in seeds.values()]
    columns = {key: f for key, f in FIGURES.items() if any(key in x for x in students)}
    cells = {m: {} for m in figures}  # method -> column -> seed -> value
    for m, seeds in figures.items():
        for key, f in columns.items():
            having = {seed: x for seed, x in seeds.items() if key in x}
            cells[m][key] = {seed: f.factor * x[key] for seed, x in having.items()}
    heads = [f.heading for f in columns.values()]
    body = [[m, *texts] for m, texts in mark(cells, columns).items()]
    counts = seed_counts(figures)
    head = ["", *heads]
    if len(counts) > 1:
        head.insert(1, "n")
        for row in body:
            row.insert(1, f"{len(figures[row[0]])}")
    lines = [title, "", *grid(head, body), "", caption(counts), *notes, ""]
    others = [m for m in cells if m != base]
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
