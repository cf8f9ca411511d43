"""Result files in, the paper's tables out, its numbers beside ours.

`eval.py --table out/*/*` prints them. A method that was run from several seeds is one row, mean and 95 % interval.
Rows stand in one table only where they can be compared: same initial weights per seed, data, budget, optimisation and
protocol of scoring.
"""

import json
import math
from pathlib import Path

import numpy as np

DRAWS = 2_000  # of the paired bootstrap

# The suite in the paper's order, task -> heading, and the tasks of its two sets.
COLUMNS = {"arc_challenge": "ARC-C", "arc_easy": "ARC-E", "hellaswag": "HS", "lambada_openai": "LAMB", "openbookqa": "OBQA",
           "piqa": "PIQA", "social_iqa": "SIQA", "storycloze_2016": "SC16", "winogrande": "WG"}  # fmt: skip
SUITES = {"heldout": list(COLUMNS), "validation": ["arc_easy", "hellaswag", "piqa"]}

# --- the paper's numbers ---------------------------------------------------------------------------------------

# The paper's main table: student -> method -> accuracy by column (in the order of TASKS), average, gain over pretrain.
_MAIN = {
    "200m": {
        "pretrain": (21.84, 32.45, 26.46, 12.92, 23.80, 55.28, 34.03, 51.50, 50.51, 34.31, None),
        "vanilla_kd": (21.50, 32.91, 27.25, 16.69, 24.40, 56.37, 35.21, 52.50, 49.33, 35.13, 0.82),
        "pd": (19.88, 33.80, 26.09, 21.06, 26.00, 56.64, 34.85, 52.10, 49.96, 35.60, 1.29),
        "atkd": (23.46, 34.81, 27.36, 15.97, 24.20, 58.11, 34.85, 52.00, 48.78, 35.50, 1.19),
        "rld": (22.10, 35.06, 27.73, 12.75, 26.00, 57.34, 34.19, 52.30, 51.78, 35.47, 1.16),
        "ldrld": (20.65, 34.30, 27.24, 14.30, 26.80, 57.24, 34.95, 53.10, 49.17, 35.31, 0.99),
        "tad": (21.67, 36.45, 27.37, 13.00, 23.20, 58.76, 35.41, 53.60, 51.62, 35.68, 1.36),
        "bild": (25.60, 26.60, 27.43, 13.02, 29.40, 53.05, 33.11, 45.20, 49.80, 33.69, -0.62),
        "alra": (21.33, 37.71, 28.09, 19.91, 24.20, 58.65, 35.41, 52.40, 51.85, 36.62, 2.31),
    },
    "500m": {
        "pretrain": (21.16, 32.53, 26.74, 10.85, 25.20, 55.50, 34.60, 51.60, 52.17, 34.48, None),
        "vanilla_kd": (20.90, 35.23, 27.26, 15.78, 23.40, 57.34, 35.16, 52.00, 49.01, 35.12, 0.64),
        "pd": (21.84, 34.30, 26.46, 19.10, 26.00, 58.27, 35.01, 51.60, 50.59, 35.91, 1.42),
        "atkd": (22.10, 37.79, 27.93, 17.99, 24.60, 58.65, 35.88, 53.40, 50.83, 36.57, 2.09),
        "rld": (21.50, 35.31, 27.65, 13.24, 26.20, 58.49, 34.75, 52.90, 53.35, 35.93, 1.45),
        "ldrld": (21.33, 35.65, 28.16, 18.59, 25.80, 59.41, 35.93, 52.80, 51.14, 36.54, 2.05),
        "tad": (22.35, 37.96, 27.65, 13.60, 24.60, 57.83, 35.41, 53.40, 51.30, 36.01, 1.53),
        "bild": (25.85, 26.77, 27.67, 13.89, 29.20, 54.08, 33.27, 45.10, 49.96, 33.98, -0.51),
        "alra": (22.61, 38.26, 28.34, 20.59, 26.40, 58.60, 35.41, 53.80, 52.57, 37.40, 2.91),
    },
}  # fmt: skip
# The other tables give averages alone: (title, split, (method, 200m, 500m) ..); gains are over the first row.
_AVERAGES = (
    ("Pairwise weighting", "heldout", (("alra_r", 34.91, 35.77), ("alra_u", 36.56, 37.09), ("alra", 36.62, 37.40))),
    ("Local budget", "validation", (("fixed_3", 37.91, 39.27), ("fixed_7", 38.54, 39.43), ("fixed_9", 38.99, 40.67),
     ("fixed_15", 39.39, 40.67), ("fixed_19", 39.07, 40.73), ("fixed_25", 39.20, 40.69), ("alra", 39.89, 41.09))),
    ("Anchoring", "validation",
     (("alra_n", 38.86, 40.07), ("alra_ng", 38.87, 40.74), ("alra", 39.89, 41.09), ("alra_g", 39.21, 40.52))),
)  # fmt: skip
# (student, split, method) -> {task or "avg": %}
PAPER = {
    **{
        (size, split, method): {"avg": avg[i]}
        for _, split, rows in _AVERAGES
        for method, *avg in rows
        for i, size in enumerate(_MAIN)
    },
    **{
        (size, "heldout", method): dict(zip([*COLUMNS, "avg", "gain"], row, strict=True))
        for size, rows in _MAIN.items()
        for method, row in rows.items()
    },
}
# Tables in the order of the paper: title, set, methods; the first one is what gains are measured from.
LAYOUT = (
    ("Main results", "heldout", tuple(_MAIN["200m"])),
    *((t, split, tuple(r[0] for r in rows)) for t, split, rows in _AVERAGES),
)
NAMES = {
    "pretrain": "Pre-Train w/o KD",
    "vanilla_kd": "Vanilla KD",
    "bild": "BiLD",
    **{f"fixed_{d}": f"Fixed-Budget d={d}" for d in (3, 7, 9, 15, 19, 25)},
}

# --- figures over held-out rows --------------------------------------------------------------------------------

# key -> heading, +1 where more is better, factor and digits in print
FIGURES = {
    "ce": ("CE, nats/token", -1, 1, 4),
    "bits_per_byte": ("bits/byte", -1, 1, 4),
    "kl": ("KL to teacher, nats", -1, 1, 4),
    "top1": ("top-1 agreement, %", +1, 100, 2),
    "top5": ("top-5 agreement, %", +1, 100, 2),
    "ece": ("ECE, %", -1, 100, 2),
}

TEACHER_KEYS = ("kl", "top1", "top5", "teacher_ce", "teacher_entropy")  # figures that need a teacher


def figures(sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sums over rows -> the figures: [..] each, [.., BINS] for `gap`.

    ce             cross-entropy, nats per target; every target but padding counts
    bits_per_byte  the same over the targets that stand for text, by their bytes: comparable across tokenizers
    kl             KL(teacher || student) at temperature 1, nats per target
    top1, top5     share of the k likeliest tokens of the student that are among the teacher's k
    ece            expected calibration error of the student's likeliest token, 15 bins of equal width (Guo et al. 2017)
    """
    n = sums["n"]
    out = {"ce": sums["ce"] / n, "bits_per_byte": sums["text_ce"] / sums["text_bytes"] / math.log(2)}
    if "kl" in sums:
        out |= {key: sums[key] / n for key in TEACHER_KEYS}
    return out | {"ece": np.abs(sums["gap"]).sum(-1) / n}


def bootstrap(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """95 % interval of each figure's difference a - b: both over the same rows, drawn anew `DRAWS` times."""
    n = len(a["n"])
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=DRAWS)  # [DRAWS, rows]
    drawn = [figures({key: counts @ per_row for key, per_row in sums.items()}) for sums in (a, b)]
    shared = [key for key in FIGURES if key in drawn[0] and key in drawn[1]]
    return {key: tuple(np.quantile(drawn[0][key] - drawn[1][key], (0.025, 0.975)).tolist()) for key in shared}


# --- one checkpoint --------------------------------------------------------------------------------------------


def row_text(result: dict) -> str:
    """One checkpoint as Markdown: its row of the paper's table, what stands behind each score, and the paper's row."""
    lines, tasks, run = [f"# {result['name']}, {result['split']}"], result["tasks"], result["run"] or {}
    every = SUITES[result["split"]]
    if tasks:
        paper = PAPER.get((run.get("student"), result["split"], run.get("method")), {})
        accs = {name: 100 * scores["acc"] for name, scores in tasks.items()}
        rows = {
            "acc, %": [accs.get(name) for name in every] + [sum(accs.values()) / len(accs)],
            "± standard error": [100 * tasks[n]["acc_stderr"] if n in tasks else None for n in every] + [None],
            "acc_norm, %": [100 * tasks[n]["acc_norm"] if "acc_norm" in tasks.get(n, {}) else None for n in every]
            + [None],
            "paper, acc, %": [paper.get(name) for name in every]
            + [paper.get("avg") if len(accs) == len(every) else None],
        }
        body = [
            [key, *(f"{v:.2f}" if v is not None else "–" for v in values)]
            for key, values in rows.items()
            if any(v is not None for v in values)
        ]
        body.append(["items", *(f"{tasks[n]['n']:,}" if n in tasks else "–" for n in every), ""])
        average = "Avg." if len(accs) == len(every) else f"Avg. ({len(accs)} of {len(every)})"
        lines += ["", *grid(["", *(COLUMNS[name] for name in every), average], body)]
        if "perplexity" in tasks.get("lambada_openai", {}):
            lam = tasks["lambada_openai"]
            lines += ["", f"LAMBADA perplexity {lam['perplexity']:.2f} ± {lam['perplexity_stderr']:.2f}."]
        for name, scores in tasks.items():
            if scores["n_rows"] != scores["n_paper"]:
                lines += [
                    "",
                    f"{name}: {scores['n_rows']:,} items there, the paper has {scores['n_paper']:,} ({scores['source']}).",
                ]
        if any(scores["n"] != scores["n_rows"] for scores in tasks.values()):
            lines += ["", "Not the whole sets: only the first items of each task were scored (--limit)."]
    if result["intrinsic"]:
        found = result["intrinsic"]
        keys = [key for key in FIGURES if key in found]
        lines += [
            "",
            *grid(
                [FIGURES[key][0] for key in keys],
                [[f"{found[key] * FIGURES[key][2]:.{FIGURES[key][3]}f}" for key in keys]],
            ),
        ]
        lines += ["", f"Over {found['n_targets']:,} targets in {found['n_rows']:,} held-out rows; teacher: {found.get('teacher', 'none')}"
                  + (f" (CE {found['teacher_ce']:.4f}, entropy {found['teacher_entropy']:.4f})." if "teacher_ce" in found else ".")]  # fmt: skip
    return "\n".join(lines) + "\n"


def grid(head: list[str], body: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] + ["--:"] * (len(head) - 1), *body)]


# --- many results ----------------------------------------------------------------------------------------------

# 97.5 % quantiles of Student's t, 1 to 30 degrees of freedom
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
# What must be equal for two students to stand in one table, beside the initial weights and the protocol of scoring.
RUN_FACTS = (
    "data_sha256",
    "tokenizer_sha256",
    "teacher_sha256",
    "step",
    "schedule_steps",
    "nominal_tokens",
    "valid_tokens",
)
RUN_CONFIG = ("seq_len", "mask_after_eos", "batch_rows", "group", "shuffle", "lr", "min_lr", "warmup_steps", "beta1", "beta2",
              "adam_eps", "weight_decay", "decay_1d", "clip")  # fmt: skip


class TableError(ValueError):
    """Results that cannot be read or must not stand in one table."""


def tabulate(paths: list[str], reference: str = "pretrain", mixed: bool = False) -> tuple[str, list[dict]]:
    """Folders with results -> Markdown, and one record per cell for a CSV file.

    reference  the method that gains are measured from, where a table of the paper does not name its own
    mixed      tabulate what cannot be compared too, and say so
    """
    results, lines, records = load(paths), [], []
    for student in dict.fromkeys(student_of(r) for r in results):
        mine = [r for r in results if student_of(r) == student]
        apart = differences(mine)
        if apart and not mixed:
            raise TableError(f"{apart[0]}; tabulate them apart, or all the same with --mixed")
        lines += [f"## {student}", ""] if student else ["## other models", ""]
        for split in SUITES:
            rows = by_method([r for r in mine if r["split"] == split and r["tasks"]])
            for title, methods in layouts(split, rows):
                own = LAYOUT[0][2] if title == "Main results" else methods
                base = reference if own is LAYOUT[0][2] or reference in methods else methods[0]
                lines += accuracies(title, split, student, {m: rows[m] for m in methods}, base, records)
        rows = by_method([r for r in mine if r["intrinsic"]], once=True)
        if rows:
            lines += intrinsics(student, {m: rows[m] for m in in_order(rows)}, reference, records)
        if apart:
            lines += ["Not to be compared as they stand:", "", *(f"- {line}" for line in apart), ""]
    return "\n".join(lines), records


def load(paths: list[str]) -> list[dict]:
    """The results in these folders, or one level below, each with the folder that it came from."""
    files, bare = [], []
    for path in map(Path, paths):
        here = [
            f for split in SUITES for f in (path / f"eval_{split}.json", *sorted(path.glob(f"*/eval_{split}.json")))
        ]
        here = [f for f in here if f.is_file()]
        files += here
        if (path / "model").is_dir() and not here:
            bare.append(path)
    if bare:
        raise TableError(f"{bare[0]}: a student without results; first: python eval.py {' '.join(map(str, bare))}")
    if not files:
        raise TableError(f"{' '.join(paths)}: no eval_*.json in there; first: python eval.py out/NAME/METHOD")
    return [
        json.loads(f.read_text()) | {"folder": str(f.parent), "stem": str(f.with_suffix(""))}
        for f in dict.fromkeys(files)
    ]


def student_of(result: dict) -> str | None:
    return result["run"]["student"] if result["run"] else None


def method_of(result: dict) -> str:
    """The method, with what was overridden in its objective; a model that is no student of a run goes by its name."""
    if not result["run"]:
        return result["name"]
    return " ".join([result["run"]["method"], *(f"{k}={v}" for k, v in (result["run"].get("overrides") or {}).items())])


def seed_of(result: dict) -> int | None:
    return result["run"]["seed"] if result["run"] else None


def by_method(results: list[dict], once: bool = False) -> dict[str, dict[int, dict]]:
    """method -> seed -> result; `once` takes one of a student's two sets, for what does not depend on it."""
    rows: dict = {}
    for r in results:
        before = rows.setdefault(method_of(r), {}).setdefault(seed_of(r), r)
        if before["folder"] != r["folder"]:
            raise TableError(
                f"{before['folder']} and {r['folder']} both hold {method_of(r)} from seed {seed_of(r)}; leave one out"
            )
        assert once or before is r
    return rows


def in_order(methods) -> list[str]:
    """Methods as the paper's tables list them, others behind in their own order."""
    known = list(dict.fromkeys(m for _, _, names in LAYOUT for m in names))
    return sorted(methods, key=lambda m: known.index(m) if m in known else len(known))


def layouts(split: str, rows: dict) -> list[tuple[str, list[str]]]:
    """The paper's tables for which there is something to show, with their methods; what stands in none gets into the first."""
    tables = [(title, [m for m in names if m in rows]) for title, where, names in LAYOUT if where == split]
    rest = [m for m in in_order(rows) if not any(m in names for _, names in tables)]
    if split == "heldout":
        tables[0][1].extend(rest)
    else:
        tables.append(("Other objectives", rest + ["alra"] * ("alra" in rows)))
    shown = [(title, names) for title, names in tables if set(names) - {"alra"}]
    return shown or ([tables[0]] if rows else [])


def differences(results: list[dict]) -> list[str]:
    """Why results must not be compared: each fact that differs, with two that differ in it. None stands for "has no such"."""
    seen: dict = {}
    out = []
    for r in results:
        run, facts = r["run"] or {}, {f"protocol: {k}": str(v) for k, v in r["protocol"].items()}
        facts |= {key: run.get(key) for key in RUN_FACTS} | {key: run.get("config", {}).get(key) for key in RUN_CONFIG}
        facts[f"init_sha256 of seed {seed_of(r)}"] = run.get("init_sha256")
        for name, scores in r["tasks"].items():
            facts |= {
                f"{name}, {r['split']}: {key}": scores[key] for key in ("data_sha256", "prompts_sha256", "version", "n")
            }
        facts |= {f"held-out rows: {key}": (r["intrinsic"] or {}).get(key) for key in ("rows_sha256", "teacher_sha256")}
        for key, value in facts.items():
            other, where = seen.setdefault(key, (value, r["folder"])) if value is not None else (None, None)
            if other != value:
                out.append(f"{where} and {r['folder']} differ in {key}: {str(other)[:12]} and {str(value)[:12]}")
    return out


def accuracies(title: str, split: str, student: str | None, rows: dict, base: str, records: list) -> list[str]:
    """One table of accuracies: a column per task, the average over the tasks that all rows have, and its gain over `base`."""
    every = SUITES[split]
    common = [t for t in every if all(t in r["tasks"] for seeds in rows.values() for r in seeds.values())]
    columns = [t for t in every if any(t in r["tasks"] for seeds in rows.values() for r in seeds.values())]
    ours, paper = {}, {}
    for method, seeds in rows.items():
        ours[method] = {
            t: {s: 100 * r["tasks"][t]["acc"] for s, r in seeds.items() if t in r["tasks"]} for t in columns
        }
        if common:
            ours[method]["avg"] = {
                s: sum(100 * r["tasks"][t]["acc"] for t in common) / len(common) for s, r in seeds.items()
            }
        known = PAPER.get((student, split, method), {})
        paper[method] = {t: known.get(t) for t in columns}
        whole = [known.get(t) for t in common]
        paper[method]["avg"] = (
            known.get("avg") if common == every else sum(whole) / len(whole) if whole and None not in whole else None
        )
    for method, cells in ours.items():
        if common and base in ours:
            first, mine = ours[base]["avg"], cells["avg"]
            shared = {s: mine[s] - first[s] for s in mine if s in first}
            cells["gain"] = shared or {None: mean(mine) - mean(first)}
        stated = (
            PAPER.get((student, split, method), {}).get("gain") if title == "Main results" and common == every else None
        )
        ends = paper[method]["avg"], paper.get(base, {}).get("avg")
        paper[method]["gain"] = stated if stated is not None else ends[0] - ends[1] if None not in ends else None
    heads = {t: COLUMNS[t] for t in columns} | {
        "avg": "Avg." if common == every else f"Avg. ({len(common)} of {len(every)})",
        "gain": f"Δ {base}",
    }
    body = []
    for method, marked in zip(
        ours,
        mark([[cells.get(c) for c in heads] for cells in ours.values()], [+1] * (len(heads) - 1) + [0], 2),
        strict=True,
    ):
        if method == base:
            marked[-1] = "Ref."
        body.append([NAMES.get(method, method if " " in method else method.upper().replace("_", "-")), *marked])
        if any(v is not None for v in paper[method].values()):
            gain = (
                "Ref." if method == base else "–" if paper[method]["gain"] is None else f"{paper[method]['gain']:+.2f}"
            )
            body.append(
                [
                    "*paper*",
                    *("–" if paper[method][c] is None else f"{paper[method][c]:.2f}" for c in list(heads)[:-1]),
                    gain,
                ]
            )
        for c in heads:
            records.append(record(title, student, split, method, c, ours[method].get(c), paper[method].get(c)))
    text = [f"### {title}: accuracy in %, {split}", "", *grid(["", *heads.values()], body), "", caption(rows)]
    odd = {
        f"{COLUMNS[t]}: {s['n']:,} items, the paper has {s['n_paper']:,}"
        for seeds in rows.values()
        for r in seeds.values()
        for t, s in r["tasks"].items()
        if s["n"] != s["n_paper"]
    }
    return text + [f"{line}." for line in sorted(odd)] + [""]


def intrinsics(student: str | None, rows: dict, base: str, records: list) -> list[str]:
    """The figures over held-out rows, and their differences to `base` with 95 % intervals."""
    keys = [key for key in FIGURES if any(key in r["intrinsic"] for seeds in rows.values() for r in seeds.values())]
    ours = [
        [{s: r["intrinsic"][k] * FIGURES[k][2] for s, r in seeds.items() if k in r["intrinsic"]} for k in keys]
        for seeds in rows.values()
    ]
    for method, cells in zip(rows, ours, strict=True):
        records += [
            record("Held-out rows", student, None, method, key, cell, None)
            for key, cell in zip(keys, cells, strict=True)
        ]
    marked = mark(ours, [FIGURES[k][1] for k in keys], [FIGURES[k][3] for k in keys])
    heads = [FIGURES[k][0] for k in keys]
    found = next(iter(next(iter(rows.values())).values()))["intrinsic"]
    text = [
        "### Held-out rows",
        "",
        *grid(["", *heads], [[m, *cells] for m, cells in zip(rows, marked, strict=True)]),
        "",
        caption(rows),
    ]
    text.append(
        f"{found['n_targets']:,} targets in {found['n_rows']:,} rows; teacher {found.get('teacher', 'none')}"
        + (f", whose CE is {found['teacher_ce']:.4f}." if "teacher_ce" in found else ".")
    )
    body = (
        [[m, *(gap(seeds, rows[base], key) for key in keys)] for m, seeds in rows.items() if m != base]
        if base in rows
        else []
    )
    if body:
        text += [
            "",
            f"### Held-out rows: difference to {base}, with 95 % intervals (paired bootstrap over rows; over seeds where there are several)",
        ]
        text += ["", *grid(["", *heads], body)]
    return [*text, ""]


def gap(mine: dict[int, dict], first: dict[int, dict], key: str) -> str:
    """A figure's difference between two methods, seed by seed."""
    _, _, factor, digits = FIGURES[key]
    seeds = [s for s in mine if s in first and key in mine[s]["intrinsic"] and key in first[s]["intrinsic"]]
    if not seeds:
        return "–"
    diffs = {s: factor * (mine[s]["intrinsic"][key] - first[s]["intrinsic"][key]) for s in seeds}
    if len(seeds) > 1:
        return f"{mean(diffs):+.{digits}f} ± {half(diffs):.{digits}f}"
    a, b = (dict(np.load(f"{r[seeds[0]]['stem']}.npz")) for r in (mine, first))
    low, high = (factor * v for v in bootstrap(a, b)[key])
    return f"{diffs[seeds[0]]:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def mean(by_seed: dict) -> float:
    return sum(by_seed.values()) / len(by_seed)


def half(by_seed: dict) -> float | None:
    """Half the 95 % interval of the mean over seeds, None for one seed (more than 31 count as 31: a little wide)."""
    n = len(by_seed)
    return T975[min(n - 1, 30) - 1] * float(np.std(list(by_seed.values()), ddof=1)) / math.sqrt(n) if n > 1 else None


def mark(rows: list[list[dict | None]], better: list[int], digits) -> list[list[str]]:
    """Cells as text: the best of a column bold, the second in italics, as printed; ties alike. `better` 0: a signed difference."""
    out = [[""] * len(better) for _ in rows]
    for c, sign in enumerate(better):
        d = digits if isinstance(digits, int) else digits[c]
        shown = [None if not row[c] else round(mean(row[c]), d) for row in rows]
        ranks = sorted({v for v in shown if v is not None}, reverse=sign > 0)
        for r, (row, value) in enumerate(zip(rows, shown, strict=True)):
            if value is None:
                out[r][c] = "–"
                continue
            text = f"{value:{'+' if not sign else ''}.{d}f}" + (f" ± {half(row[c]):.{d}f}" if len(row[c]) > 1 else "")
            place = ranks.index(value) if sign and len(ranks) > 1 else None
            out[r][c] = f"**{text}**" if place == 0 else f"*{text}*" if place == 1 else text
    return out


def caption(rows: dict) -> str:
    n = sorted({len(seeds) for seeds in rows.values()})
    seeds = "One seed each" if n == [1] else f"Mean and 95 % interval over {' or '.join(map(str, n))} seeds"
    return f"{seeds}; **best**, *second*."


def record(table: str, student, split, method: str, column: str, cell: dict | None, paper: float | None) -> dict:
    value, pm, n = (mean(cell), half(cell), len(cell)) if cell else (None, None, 0)
    return {"table": table, "student": student, "split": split, "method": method, "column": column, "value": value,
            "plus_minus": pm, "n_seeds": n, "paper": paper}  # fmt: skip
