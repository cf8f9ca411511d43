"""Tables of results in the paper's form, with its numbers beside ours.

eval.py prints them of what it has scored, `eval.py --table` of earlier results. Several seeds of a method make one row with
mean and 95 % interval. A table only holds rows that can be compared: same initial weights per seed, data, budget,
optimisation and scoring protocol.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lib.errors import require
from lib.files import read_json
from lib.metrics import levels
from lib.stats import FIGURES, differences, estimate, p_text
from lib.tasks import COLUMNS, SUITES
from run.identity import VARIES
from run.paper import LAYOUT, NAMES, PAPER, UPDATES

# Students share a table where what made them is equal but for VARIES, and so are their updates and the protocol of scoring.
TASK_FACTS = ("data_sha256", "prompts_sha256", "version", "n")

# What is read of a student's run.json, and of the files of results.
RUN = ("method", "student", "seed", "overrides", "step", "config", "made_by")
FILE = ("name", "run", "protocol", "weights_sha256")

Figures = dict[
    str, dict[int | None, dict]
]  # method -> seed -> the figures of a student over held-out rows, by name


class Result(NamedTuple):
    """What is known of one checkpoint."""

    folder: Path
    name: str
    run: dict  # facts of the student's training; {} for other models
    scores: dict[str, dict]  # split -> tasks and protocol
    figures: dict  # over held-out rows, with their protocol; {} without


def scores_name(split: str, limit: int | None) -> str:
    """The file that holds the scores of a set of tasks, or of the first `limit` items of each."""
    return f"scores_{split}.json" if limit is None else f"scores_{split}_limit{limit}.json"


def tabulate(
    paths: list[str], reference: str = "pretrain", metric: str = "acc", splits: Iterable[str] = tuple(SUITES),
    limit: int | None = None,
) -> str:  # fmt: skip
    """Folders with results -> Markdown.

    reference  the method that gains are measured from, except in tables of the paper with one of their own
    metric     "acc", or "acc_norm" for the tasks that have it
    splits     which sets of tasks to show
    limit      show the scores of the first `limit` items
    """
    files = {split: scores_name(split, limit) for split in splits}
    names = ("figures.json", *files.values())
    folders, missing = students_of(
        paths, lambda folder: any((folder / name).is_file() for name in names)
    )
    results, lines = load(folders or paths, files), []
    methods = in_order({method_of(r) for r in results})
    known = reference in ("pretrain", *methods)
    require(
        known, f"--reference {reference}: not among the results, which are of {', '.join(methods)}"
    )
    for student in dict.fromkeys(r.run.get("student") for r in results):
        same_size = [r for r in results if r.run.get("student") == student]
        check_comparable(same_size)
        lines += [f"## {student or 'other models'}", ""]
        for split in files:
            rows = by_method([r for r in same_size if split in r.scores])
            for title, base, shown in layouts(split, rows, reference):
                lines += accuracies(
                    title, split, student, {m: rows[m] for m in shown}, base, metric
                )
        rows = by_method([r for r in same_size if r.figures])
        figures = {m: {seed: r.figures for seed, r in rows[m].items()} for m in in_order(rows)}
        if rows:
            facts = next(r.figures for r in same_size if r.figures)
            lines += heldout("### Held-out rows", figures, reference, scored(facts))
    lines += [f"Left out, since not scored: {', '.join(missing)}.", ""] if missing else []
    return "\n".join(lines)


def read_if_there(file: Path, keys: Iterable[str] = ()) -> dict:
    """The object in a JSON file; {} without a file."""
    return read_json(file, keys) if file.is_file() else {}


def run_facts(model: Path, keys: Iterable[str] = ()) -> dict:
    """Facts of the training behind a model's folder: run.json of a finished student, state.json of a checkpoint; {} for others."""
    files = (
        [model.parent / name for name in ("run.json", "state.json")]
        if model.name == "model"
        else []
    )
    return next((read_json(file, keys) for file in files if file.is_file()), {})


def students_of(paths: list[str], done: Callable[[Path], bool]) -> tuple[list[str], list[str]]:
    """The folders that a command's paths stand for, and those of students that are not `done`.

    A folder stands for those inside that are `done`, as a run's for its students, or else for itself; a file for nothing.
    """
    folders, missing = [], []
    for name in paths:
        path = Path(name)
        facts = read_if_there(path / "run.json")
        of_run = "config" in facts and "method" not in facts
        methods = [path / method for method in facts["config"].get("methods", ())] if of_run else []
        inside = [str(f) for f in dict.fromkeys([*methods, *sorted(path.glob("*/"))]) if done(f)]
        folders += inside or [name] * (
            not path.is_file() and not of_run
        )  # unchanged: ./a/b is not a hub id
        missing += [str(f) for f in methods if not done(f)]
    return list(dict.fromkeys(folders)), missing


def load(folders: list[str], files: dict[str, str]) -> list[Result]:
    """The results in these folders. `files` are the names of files of scores by split."""
    results = []
    for folder in map(Path, folders):
        rows = read_if_there(folder / "figures.json", (*FILE, "figures"))
        scores = {
            s: read_json(folder / f, (*FILE, "tasks"))
            for s, f in files.items()
            if (folder / f).is_file()
        }
        parts = [*scores.values(), *filter(None, [rows])]
        missing = " or ".join(("figures.json", *files.values()))
        require(parts, f"{folder}: no {missing} in it; first: python eval.py {folder}")
        figures = {**rows["figures"], "dtype": rows["protocol"]["dtype"]} if rows else {}
        results.append(Result(folder, parts[-1]["name"], parts[-1]["run"] or {}, scores, figures))
    return results


def method_of(result: Result) -> str:
    """The method with its overrides; a model that is not a student of a run goes by its name."""
    if not result.run:
        return result.name
    return " ".join(
        [result.run["method"], *(f"{k}={v}" for k, v in result.run["overrides"].items())]
    )


def by_method(results: list[Result]) -> dict[str, dict[int | None, Result]]:
    """method -> seed -> result"""
    rows: dict = {}
    for r in results:
        method, seed = method_of(r), r.run.get("seed")
        other = rows.setdefault(method, {}).setdefault(seed, r)
        require(
            other is r,
            f"{other.folder} and {r.folder} both hold {method} with seed {seed}; leave one out",
        )
    return rows


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods in the order of the paper's tables, then the others as they come."""
    known = list(dict.fromkeys(m for _, _, names in LAYOUT for m in names))
    return sorted(methods, key=lambda m: known.index(m) if m in known else len(known))


def check_comparable(results: list[Result]) -> None:
    """Refuse results that differ in a fact that must be equal. A fact that is None does not apply."""
    seen = {}
    for r in results:
        facts = {key: value for key, value in r.run.get("made_by", {}).items() if key not in VARIES}
        facts |= {key: r.run.get(key) for key in ("step", "nominal_tokens")}
        facts |= {
            f"{key} of seed {r.run.get('seed')}": r.run.get(key)
            for key in ("init_sha256", "valid_tokens")
        }
        facts |= {
            f"{key} of figures": r.figures.get(key)
            for key in ("rows_sha256", "teacher_sha256", "dtype")
        }
        for split, scores in r.scores.items():
            facts |= {
                f"{key} of {split} scores": value for key, value in scores["protocol"].items()
            }
            facts |= {
                f"{key} of {t}, {split}": v.get(key)
                for t, v in scores["tasks"].items()
                for key in TASK_FACTS
            }
        for key, value in facts.items():
            first, folder = (
                seen.setdefault(key, (value, r.folder)) if value is not None else (None, None)
            )
            differ = (
                f"{folder} and {r.folder} differ in {key}: {str(first)[:12]} and {str(value)[:12]}"
            )
            require(first == value, f"{differ}; tabulate them apart")


def grid(head: list[str], body: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] + ["--:"] * (len(head) - 1), *body)]


def mark(rows: list[list[dict]], better: list[int], digits: list[int]) -> list[list[str]]:
    """Cells (seed -> value) as text. The best of a column is bold, the second italic; values that print alike tie.

    One seed alone is not ranked beside means over several.
    better  +1 where more is better, -1 where less is, 0 for a signed difference
    """
    out = [["–"] * len(better) for _ in rows]
    for c, (sign, d) in enumerate(zip(better, digits, strict=True)):
        column = [estimate(row[c]) for row in rows]
        shown = {r: round(e.mean, d) for r, e in enumerate(column) if e.n}
        fewest = min(2, max(e.n for e in column))
        ranks = sorted({v for r, v in shown.items() if column[r].n >= fewest}, reverse=sign > 0)
        for r, value in shown.items():
            text = column[r].text(d, "" if sign else "+")
            place = (
                ranks.index(value) if sign and len(ranks) > 1 and column[r].n >= fewest else None
            )
            out[r][c] = {0: f"**{text}**", 1: f"*{text}*"}.get(place, text)
    return out


def caption(rows: dict) -> str:
    n = sorted({len(seeds) for seeds in rows.values()} - {0})
    seeds = (
        "One seed each"
        if n == [1]
        else f"Mean and 95 % interval over {n[0] if len(n) == 1 else 'n'} seeds"
    )
    return f"{seeds}; **best**, *second*."


def layouts(split: str, rows: dict, reference: str) -> list[tuple[str, str, list[str]]]:
    """Title, reference and methods of the paper's tables that have results; other methods go into the first table."""
    tables = [
        (t, names[0], [m for m in names if m in rows])
        for t, where, names in LAYOUT
        if where == split
    ]
    rest = [m for m in in_order(rows) if not any(m in names for _, _, names in tables)]
    if split == "heldout":
        tables[0] = ("Main results", reference, tables[0][2] + rest)
    else:
        tables.append(
            ("Other objectives", reference, [*rest, *(["alra"] if "alra" in rows else [])])
        )
    shown = [table for table in tables if set(table[2]) - {"alra"}]
    return shown or tables[: bool(rows)]


def accuracies(
    title: str, split: str, student: str | None, rows: dict, base: str, metric: str
) -> list[str]:
    """A column per task, the average over common tasks, and the gain over `base`; the paper's row below ours."""
    scored = {
        (m, seed): r.scores[split]["tasks"]
        for m, seeds in rows.items()
        for seed, r in seeds.items()
    }
    every = SUITES[split]
    columns = [t for t in every if any(t in tasks for tasks in scored.values())]
    common = [t for t in every if all(t in tasks for tasks in scored.values())]
    ours = {m: {t: {} for t in (*columns, "avg", "gain")} for m in rows}
    for (m, seed), tasks in scored.items():
        accs = {t: 100 * v.get(metric, v["acc"]) for t, v in tasks.items()}
        accs |= {"avg": sum(accs[t] for t in common) / len(common)} if common else {}
        for t, acc in accs.items():
            ours[m][t][seed] = acc
    for cells in ours.values():
        reference = ours[base]["avg"] if base in ours else {}
        cells["gain"] = {
            seed: acc - reference[seed] for seed, acc in cells["avg"].items() if seed in reference
        }
    average = "Avg." if common == every else f"Avg. ({len(common)} of {len(every)})"
    heads = ["", *(COLUMNS[t] for t in columns), average, f"Δ {base}"]
    better, n = [+1] * (len(columns) + 1) + [0], len(columns) + 2
    marked, body, papers = (
        mark([list(cells.values()) for cells in ours.values()], better, [2] * n),
        [],
        False,
    )
    for m, texts in zip(rows, marked, strict=True):
        body.append([NAMES.get(m, m), *texts[:-1], "Ref." if m == base else texts[-1]])
        *accs, gain = paper_row(student, split, m, base, columns, common)
        if any(v is not None for v in (*accs, gain)):
            accs, papers = ["–" if v is None else f"{v:.2f}" for v in accs], True
            body.append(
                ["*paper*", *accs, "Ref." if m == base else "–" if gain is None else f"{gain:+.2f}"]
            )
    items = sorted(
        {(t, v["n"], v["n_paper"]) for tasks in scored.values() for t, v in tasks.items()}
    )
    notes = [
        f"{COLUMNS[t]}: {n:,} items, the paper has {n_paper:,}."
        for t, n, n_paper in items
        if n != n_paper
    ]
    steps = sorted({r.run.get("step") for seeds in rows.values() for r in seeds.values()} - {None})
    if steps and papers:
        updates = " or ".join(f"{step:,}" for step in steps)
        notes.append(f"Ours after {updates} updates, the paper's after {UPDATES[split]:,}.")
    if metric != "acc":
        having = [
            COLUMNS[t]
            for t in columns
            if any(metric in tasks.get(t, {}) for tasks in scored.values())
        ]
        named = ", ".join(having) or "no task"
        notes.append(
            f"{metric} for {named}, acc for the others; the paper says accuracy, of neither kind."
        )
    what = "accuracy in %" if metric == "acc" else f"accuracy in %, {metric} where a task has it"
    return [f"### {title}: {what}, {split}", "", *grid(heads, body), "", caption(rows), *notes, ""]


def paper_row(
    student: str | None, split: str, method: str, base: str, columns: list[str], common: list[str]
) -> list:
    """The paper's numbers for the columns, then its average and its gain over `base`; over the common tasks where some lack."""
    known, first = (PAPER.get((student, split, m), {}) for m in (method, base))
    whole = common == SUITES[split]
    avg, ref = (k.get("avg") if whole else sum(map(k.get, common)) / len(common) if common and common[0] in k else None
                for k in (known, first))  # fmt: skip
    gain = (
        known.get("gain")
        if whole and base == "pretrain"
        else None
        if avg is None or ref is None
        else avg - ref
    )
    return [*(known.get(t) for t in columns), avg, gain]


def heldout(title: str, figures: Figures, base: str, notes: Iterable[str] = ()) -> list[str]:
    """A table of the figures over held-out rows, `notes` below it, and one of their differences to `base`, paired by seed."""
    keys = [
        key
        for key in FIGURES
        if any(key in one for seeds in figures.values() for one in seeds.values())
    ]
    heads, senses, factors, digits = zip(*(FIGURES[key] for key in keys), strict=True)
    cells = {m: [{seed: f * one[k] for seed, one in seeds.items() if k in one} for k, f in zip(keys, factors, strict=True)]
             for m, seeds in figures.items()}  # fmt: skip
    body = [
        [m, *texts] for m, texts in zip(cells, mark([*cells.values()], senses, digits), strict=True)
    ]
    differ = len({len(seeds) for seeds in figures.values()} - {0}) > 1
    for row in body if differ else ():
        row.insert(1, f"{len(figures[row[0]])}")
    lines = [
        title,
        "",
        *grid(["", *(["n"] if differ else []), *heads], body),
        "",
        caption(figures),
        *notes,
        "",
    ]
    body = [[m] for m in cells if m != base]
    if not body or not figures.get(base):
        return lines
    for i, d in enumerate(digits):
        for line, e in zip(
            body, differences([(cells[m][i], cells[base][i]) for m, *_ in body]), strict=True
        ):
            line.append(e.text(d, "+") + (f", p {p_text(e.p_holm)}" if e.p is not None else ""))
    several = any(len(seeds) > 1 for seeds in figures.values())
    how = (
        ", with 95 % intervals (over seeds, paired; p by Holm over the methods)" if several else ""
    )
    return [*lines, f"{title}: difference to {base}{how}", "", *grid(["", *heads], body), ""]


def scored(facts: dict) -> list[str]:
    """What figures were computed on, and what a CE is to be compared with."""
    teacher = "no teacher"
    if "teacher" in facts:
        teacher = f"teacher: {facts['teacher']} (CE {facts['teacher_ce']:.4f}, entropy {facts['teacher_entropy']:.4f})"
    lines = [f"{facts['n_targets']:,.0f} targets in {facts['n_rows']:,.0f} rows; {teacher}."]
    return [*lines, f"{levels(facts)}."] if "uniform_ce" in facts else lines
