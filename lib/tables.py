"""Tables of results in the paper's form, with its numbers beside ours.

`eval.py --table out/*/*` prints them, and so does `eval.py` on several students. Several seeds of a method make one row with
mean and 95 % interval. A table only holds rows that can be compared: same initial weights per seed, data, budget,
optimisation and scoring protocol.
"""

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from configure import LEARNT
from lib.files import UserError, first_line, read_json
from lib.metrics import FIGURES, bootstrap
from lib.paper import LAYOUT, NAMES, PAPER, UPDATES
from lib.stats import differences as paired
from lib.stats import estimate, p_text
from lib.tasks import COLUMNS, SUITES

# --- one checkpoint --------------------------------------------------------------------------------------------


def row_text(result: dict) -> str:
    """One checkpoint as Markdown: its scores with standard errors and numbers of items, and the paper's row."""
    lines, tasks, run, found = (
        [f"# {result['name']}, {result['split']}"],
        result["tasks"],
        result["run"],
        result["intrinsic"],
    )
    if tasks:
        every, run = SUITES[result["split"]], run or {}
        paper = PAPER.get((run.get("student"), result["split"], run.get("method")), {})
        rows = {
            "acc, %": [100 * tasks[t]["acc"] if t in tasks else None for t in every],
            "± standard error": [100 * tasks[t]["acc_stderr"] if t in tasks else None for t in every],
            "acc_norm, %": [100 * tasks[t]["acc_norm"] if "acc_norm" in tasks.get(t, {}) else None for t in every],
            "paper, acc, %": [paper.get(t) for t in every],
        }
        ends = {"acc, %": sum(100 * v["acc"] for v in tasks.values()) / len(tasks)}
        ends["paper, acc, %"] = paper.get("avg") if len(tasks) == len(every) else None
        body = [
            [key, *("–" if v is None else f"{v:.2f}" for v in (*values, ends.get(key)))] for key, values in rows.items()
        ]
        body.append(["items", *(f"{tasks[t]['n']:,}" if t in tasks else "–" for t in every), ""])
        average = "Avg." if len(tasks) == len(every) else f"Avg. ({len(tasks)} of {len(every)})"
        lines += ["", *grid(["", *(COLUMNS[t] for t in every), average], [b for b in body if set(b[1:]) != {"–"}])]
        if "perplexity" in tasks.get("lambada_openai", {}):
            lam = tasks["lambada_openai"]
            lines += ["", f"LAMBADA perplexity {lam['perplexity']:.2f} ± {lam['perplexity_stderr']:.2f}."]
        for t, v in tasks.items():
            if v["n_rows"] != v["n_paper"]:
                lines += ["", f"{t}: {v['n_rows']:,} items there, the paper has {v['n_paper']:,} ({v['source']})."]
        if any(v["n"] != v["n_rows"] for v in tasks.values()):
            lines += ["", "Not the whole sets: only the first items of each task were scored (--limit)."]
    if found:
        some = {figure: found[key] for key, figure in FIGURES.items() if key in found}
        texts = [f"{value * f.factor:.{f.digits}f}" for f, value in some.items()]
        lines += ["", *grid([f.heading for f in some], [texts])]
        lines += [
            "",
            f"Over {found['n_targets']:,} targets in {found['n_rows']:,} held-out rows; {teacher_text(found)}",
        ]
    return "\n".join(lines) + "\n"


def teacher_text(found: dict) -> str:
    if "teacher" not in found:
        return "no teacher."
    return f"teacher: {found['teacher']} (CE {found['teacher_ce']:.4f}, entropy {found['teacher_entropy']:.4f})."


def grid(head: list[str], body: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] + ["--:"] * (len(head) - 1), *body)]


# --- many results ----------------------------------------------------------------------------------------------

# Two students stand in one table where these facts, their initial weights, the protocol of scoring and every config key
# of COMPARED are equal.
RUN_FACTS = ("data_sha256", "tokenizer_sha256", "teacher_sha256", "step", "nominal_tokens")
COMPARED = LEARNT - {
    "methods",
    "student",
    "seed",
    "hyper",
}  # these are rows and tables of their own; initial weights are compared by seed
TASK_FACTS = ("data_sha256", "prompts_sha256", "version", "n")
RUN = {"method": str, "step?": int}  # what a student's run.json says
TASK = {"acc": float, "acc_stderr": float, "acc_norm?": float, "n": int, "n_rows": int, "n_paper": int, "source": str,
        "data_sha256": str, "prompts_sha256": str}  # fmt: skip
RESULT = {"name": str, "split": str, "protocol": {"dtype": str, "limit?": int}, "tasks": {"*": TASK},
          "intrinsic?": {"n_rows": int, "n_targets": int, "rows_sha256": str, **{f"{key}?": float for key in FIGURES}},
          "run?": RUN | {"student": str, "seed": int, "config": dict}}  # fmt: skip


def tabulate(
    paths: list[str],
    reference: str = "pretrain",
    mixed: bool = False,
    metric: str = "acc",
    splits: Iterable[str] = tuple(SUITES),
) -> tuple[str, list[dict]]:
    """Folders with results -> Markdown, and one record per cell for a CSV file.

    reference  the method that gains are measured from, but for tables of the paper with one of their own
    mixed      tabulate what cannot be compared too, and say so
    metric     "acc", or "acc_norm" for the tasks that have it
    splits     whose results to read
    """
    folders, left_out = stand_for(
        paths, lambda folder: any((folder / f"eval_{split}.json").is_file() for split in splits)
    )
    results, lines, records = load(folders or paths, splits), [], []
    made = in_order({method_of(r) for r in results})
    if reference not in ("pretrain", *made):
        raise UserError(f"--reference {reference}: none of the results is of it; there are {', '.join(made)}")
    for student in dict.fromkeys(student_of(r) for r in results):
        mine = [r for r in results if student_of(r) == student]
        apart = differences(mine)
        if apart and not mixed:
            raise UserError(f"{apart[0]}; tabulate them apart, or all the same with --mixed")
        lines += [f"## {student or 'other models'}", ""]
        for split in SUITES:
            rows = by_method([r for r in mine if r["split"] == split and r["tasks"]])
            for title, base, methods in layouts(split, rows, reference):
                lines += accuracies(title, split, student, {m: rows[m] for m in methods}, base, metric, records)
        rows = by_method(list({r["folder"]: r for r in reversed(mine) if r["intrinsic"]}.values()))
        if rows:
            lines += intrinsics(student, {m: rows[m] for m in in_order(rows)}, reference, records)
        if apart:
            lines += ["Not to be compared as they stand:", "", *(f"- {line}" for line in apart), ""]
    if left_out:
        lines += [f"Left out, since not scored: {', '.join(left_out)}.", ""]
    return "\n".join(lines), records


def read_if_there(file: Path, keys: dict[str, type] | None = None) -> dict:
    """The content of a JSON file; {} where there is none."""
    return read_json(file, keys) if file.is_file() else {}


def stand_for(paths: list[str], done: Callable[[Path], bool]) -> tuple[list[str], list[str]]:
    """Paths of a command -> the folders that they stand for, and those of students that are not `done`.

    A run's folder stands for its methods. Files are passed over: RUN/* names them too, and so it stands for RUN. Any
    other path stands for itself.
    """
    whole = {path.parent for path in map(Path, paths) if path.is_file()}
    found, left_out = [], []
    for name, path in zip(paths, map(Path, paths), strict=True):
        run = path if "config" in read_if_there(path / "run.json") and not (path / "model").is_dir() else path.parent
        config = read_if_there(run / "run.json", {"config?": {"methods?": list}}).get("config", {})
        if run == path:
            inside = sorted(folder for folder in path.glob("*/") if done(folder))
            for folder in dict.fromkeys([*(path / method for method in config.get("methods", ())), *inside]):
                (found if done(folder) else left_out).append(str(folder))
        elif path.parent in whole and config and path.is_dir() and not done(path):
            left_out += [name] * (path.name in config.get("methods", ()))  # other folders are not students
        elif not path.is_file():
            found.append(name)  # unchanged: ./a/b is not a hub id
    return found, left_out


def load(paths: list[str], splits: Iterable[str]) -> list[dict]:
    """The results in these folders, or one level below, each with the folder that it came from."""
    files = []
    for path in map(Path, paths):
        names = [f"eval_{split}.json" for split in splits]
        here = [f for name in names for f in (path / name, *sorted(path.glob(f"*/{name}"))) if f.is_file()]
        if (path / "model").is_dir() and not here:
            raise UserError(f"{path}: a student without results; first: python eval.py {path}")
        files += here
    if not files:
        raise UserError(f"{' '.join(paths)}: no eval_heldout.json in there; first: python eval.py out/NAME/METHOD")
    return [read_json(f, RESULT) | {"folder": str(f.parent), "file": f} for f in dict.fromkeys(files)]


def student_of(result: dict) -> str | None:
    return result["run"]["student"] if result["run"] else None


def seed_of(result: dict) -> int | None:
    return result["run"]["seed"] if result["run"] else None


def method_of(result: dict) -> str:
    """The method with its overrides; a model that is not a student of a run goes by its name."""
    run = result["run"]
    if not run:
        return result["name"]
    return " ".join([run["method"], *(f"{k}={v}" for k, v in (run.get("overrides") or {}).items())])


def by_method(results: list[dict]) -> dict[str, dict[int, dict]]:
    """method -> seed -> result."""
    rows: dict = {}
    for r in results:
        method, seed = method_of(r), seed_of(r)
        other = rows.setdefault(method, {}).setdefault(seed, r)
        if other is not r:
            raise UserError(f"{other['folder']} and {r['folder']} both hold {method} from seed {seed}; leave one out")
    return rows


def in_order(methods) -> list[str]:
    """Methods in the order of the paper's tables; other methods follow in their own order."""
    known = list(dict.fromkeys(m for _, _, names in LAYOUT for m in names))
    return sorted(methods, key=lambda m: known.index(m) if m in known else len(known))


def layouts(split: str, rows: dict, reference: str) -> list[tuple[str, str, list[str]]]:
    """Title, reference and methods of the paper's tables that have results; other methods go into the first table."""
    tables = [(t, names[0], [m for m in names if m in rows]) for t, where, names in LAYOUT if where == split]
    rest = [m for m in in_order(rows) if not any(m in names for _, _, names in tables)]
    if split == "heldout":
        tables[0] = ("Main results", reference, tables[0][2] + rest)
    else:
        tables.append(("Other objectives", reference, [*rest, *(["alra"] if "alra" in rows else [])]))
    shown = [table for table in tables if set(table[2]) - {"alra"}]
    return shown or tables[: bool(rows)]


def differences(results: list[dict]) -> list[str]:
    """Facts that must be equal but differ, each with two results as an example. A fact that is None does not apply."""
    seen, out = {}, []
    for r in results:
        run, found = r["run"] or {}, r["intrinsic"] or {}
        protocol = {key: value for key, value in r["protocol"].items() if r["tasks"] or key == "dtype"}
        facts = {f"protocol, {r['split']}: {key}": str(value) for key, value in protocol.items()}
        facts |= {key: run.get(key) for key in RUN_FACTS}
        facts |= {key: str(run["config"][key]) for key in sorted(COMPARED) if run}
        facts |= {f"{key} of seed {seed_of(r)}": run.get(key) for key in ("init_sha256", "valid_tokens")}
        for name, scores in r["tasks"].items():
            facts |= {f"{name}, {r['split']}: {key}": scores[key] for key in TASK_FACTS}
        facts |= {f"held-out rows: {key}": found.get(key) for key in ("rows_sha256", "teacher_sha256")}
        for key, value in facts.items():
            first, where = seen.setdefault(key, (value, r["folder"])) if value is not None else (None, None)
            if first != value:
                out.append(f"{where} and {r['folder']} differ in {key}: {str(first)[:12]} and {str(value)[:12]}")
    return out


def accuracies(
    title: str, split: str, student: str | None, rows: dict, base: str, metric: str, records: list
) -> list[str]:
    """A column per task, the average over common tasks, and the gain over `base`; the paper's row below ours."""
    every, have = SUITES[split], [set(r["tasks"]) for seeds in rows.values() for r in seeds.values()]
    columns = [t for t in every if t in set.union(*have)]
    common = [t for t in every if t in set.intersection(*have)]
    ours, paper = {}, {}
    for method, seeds in rows.items():
        accs = {s: {t: 100 * v.get(metric, v["acc"]) for t, v in r["tasks"].items()} for s, r in seeds.items()}
        cells = {t: {s: a[t] for s, a in accs.items() if t in a} for t in columns}
        cells["avg"] = {s: sum(a[t] for t in common) / len(common) for s, a in accs.items() if common}
        ours[method], paper[method] = cells, paper_row(student, split, method, base, columns, common)
    first = ours[base]["avg"] if base in ours else {}
    for cells in ours.values():
        cells["gain"] = {s: a - first[s] for s, a in cells["avg"].items() if s in first}
    average = "Avg." if common == every else f"Avg. ({len(common)} of {len(every)})"
    heads = {t: COLUMNS[t] for t in columns} | {"avg": average, "gain": f"Δ {base}"}
    body, better = [], [+1] * (len(heads) - 1) + [0]
    for method, marked in zip(
        rows, mark([list(c.values()) for c in ours.values()], better, [2] * len(heads)), strict=True
    ):
        body.append([NAMES.get(method, method), *marked[:-1], "Ref." if method == base else marked[-1]])
        if any(v is not None for v in paper[method].values()):
            *shown, gain = paper[method].values()
            shown = ["–" if v is None else f"{v:.2f}" for v in shown]
            body.append(["*paper*", *shown, "Ref." if method == base else "–" if gain is None else f"{gain:+.2f}"])
        records += [record(title, student, split, method, c, ours[method][c], paper[method][c], metric) for c in heads]
    odd = {(t, v["n"], v["n_paper"]) for seeds in rows.values() for r in seeds.values() for t, v in r["tasks"].items()}
    notes = [f"{COLUMNS[t]}: {n:,} items, the paper has {n_paper:,}." for t, n, n_paper in sorted(odd) if n != n_paper]
    steps = sorted({r["run"]["step"] for seeds in rows.values() for r in seeds.values() if r["run"]})
    if steps and any(v is not None for row in paper.values() for v in row.values()):
        n = " or ".join(f"{step:,}" for step in steps)
        notes.append(f"Ours after {n} updates, the paper's after {UPDATES[split]:,}.")
    if metric != "acc":
        having = {t for seeds in rows.values() for r in seeds.values() for t, v in r["tasks"].items() if metric in v}
        named = ", ".join(COLUMNS[t] for t in columns if t in having) or "no task"
        notes.append(f"{metric} for {named}, acc for the others; the paper says that its numbers are acc.")
    return [
        f"### {title}: accuracy in %{', ' + metric + ' where a task has it' if metric != 'acc' else ''}, {split}",
        "",
        *grid(["", *heads.values()], body),
        "",
        caption(rows),
        *notes,
        "",
    ]


def paper_row(student: str | None, split: str, method: str, base: str, columns: list[str], common: list[str]) -> dict:
    """The paper's numbers for the columns of a table: its own average and gain where all tasks are there."""
    known, first = (PAPER.get((student, split, m), {}) for m in (method, base))
    whole = common == SUITES[split]
    avg, ref = (k.get("avg") if whole else sum(map(k.get, common)) / len(common) if common and common[0] in k else None
                for k in (known, first))  # fmt: skip
    gain = known.get("gain") if whole and base == "pretrain" else None if avg is None or ref is None else avg - ref
    return {t: known.get(t) for t in columns} | {"avg": avg, "gain": gain}


def intrinsics(student: str | None, rows: dict, base: str, records: list) -> list[str]:
    """The figures over held-out rows, and their differences to `base` with 95 % intervals."""
    results = [r for seeds in rows.values() for r in seeds.values()]
    keys = [key for key in FIGURES if any(key in r["intrinsic"] for r in results)]
    cells = []
    for method, seeds in rows.items():
        cells.append(
            [{s: r["intrinsic"][k] * FIGURES[k].factor for s, r in seeds.items() if k in r["intrinsic"]} for k in keys]
        )
        records += [
            record("Held-out rows", student, None, method, *cell, None) for cell in zip(keys, cells[-1], strict=True)
        ]
    marked = mark(cells, [FIGURES[k].sense for k in keys], [FIGURES[k].digits for k in keys])
    heads, found = ["", *(FIGURES[k].heading for k in keys)], results[0]["intrinsic"]
    lines = ["### Held-out rows", "", *grid(heads, [[m, *texts] for m, texts in zip(rows, marked, strict=True)]), ""]
    lines += [caption(rows), f"{found['n_targets']:,} targets in {found['n_rows']:,} rows; {teacher_text(found)}", ""]
    against = [m for m in rows if m != base and base in rows]
    if against:
        single = all(len(seeds) == 1 for seeds in rows.values())
        what = "bootstrap over rows, the same for both" if single else "over seeds, paired; p by Holm over the methods"
        columns = zip(*(gaps(k, rows, base, against) for k in keys), strict=True)
        body = [[m, *texts] for m, texts in zip(against, columns, strict=True)]
        lines += [f"### Held-out rows: difference to {base}, with 95 % intervals ({what})", "", *grid(heads, body), ""]
    return lines


def gaps(key: str, rows: dict, base: str, against: list[str]) -> list[str]:
    """A figure's difference to `base` by method: paired by seed, or by row where two methods share one seed alone."""
    figure = FIGURES[key]
    values = {m: {s: r["intrinsic"][key] * figure.factor for s, r in seeds.items() if key in r["intrinsic"]}
              for m, seeds in rows.items()}  # fmt: skip
    texts = []
    for m, e in zip(against, paired([(values[m], values[base]) for m in against]), strict=True):
        text = e.text(figure.digits, "+") + (f", p {p_text(e.p_holm)}" if e.p is not None else "")
        if e.n == 1:
            seed = next(s for s in values[m] if s in values[base])
            a, b = (read_sums(rows[name][seed]["file"].with_suffix(".npz")) for name in (m, base))
            low, high = (figure.factor * v for v in bootstrap(a, b)[key])
            text += f" [{low:+.{figure.digits}f}, {high:+.{figure.digits}f}]"
        texts.append(text)
    return texts


def read_sums(file: Path) -> dict[str, np.ndarray]:
    """The summands per row beside a result."""
    try:
        return dict(np.load(file))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file}: not whole ({first_line(error)}); score it again") from error


def mark(rows: list[list[dict]], better: list[int], digits: list[int]) -> list[list[str]]:
    """Cells (seed -> value) as text. The best of a column is bold, the second italic; values that print alike tie.

    better  +1 where more is better, -1 where less is, 0 for a signed difference
    """
    out = [["–"] * len(better) for _ in rows]
    for c, (sign, d) in enumerate(zip(better, digits, strict=True)):
        column = [estimate(row[c]) for row in rows]
        shown = {r: round(e.mean, d) for r, e in enumerate(column) if e.n}
        ranks = sorted(set(shown.values()), reverse=sign > 0)
        for r, value in shown.items():
            text = column[r].text(d, "" if sign else "+")
            place = ranks.index(value) if sign and len(ranks) > 1 else None
            out[r][c] = {0: f"**{text}**", 1: f"*{text}*"}.get(place, text)
    return out


def caption(rows: dict) -> str:
    n = sorted({len(seeds) for seeds in rows.values()})
    seeds = "One seed each" if n == [1] else f"Mean and 95 % interval over {' or '.join(map(str, n))} seeds"
    return f"{seeds}; **best**, *second*."


def record(table, student, split, method, column, cell, paper, metric=None) -> dict:
    """A cell for the CSV file, unrounded; `cell` by seed."""
    e = estimate(cell)
    return {"table": table, "student": student, "split": split, "method": method, "column": column, "metric": metric,
            "value": e.mean, "plus_minus": e.half, "n_seeds": e.n, "paper": paper}  # fmt: skip
