"""The report of a comparison: Markdown, CSV and figures from the folder of results that `compare.py` leaves.

`results.jsonl` has a line for each planned student: its figures over held-out rows, or why there are none. `rates.jsonl`
has the trials, `settings.json` the config, `logs*/` the logs of a seed each.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lib import tables
from lib.files import UserError, read_json, read_lines
from lib.metrics import FIGURES
from lib.stats import differences, estimate, p_text

COMPARED = ("ce", "kl", "top1")  # of FIGURES: these differences are tested
FACTS = ("data_sha256", "val_sha256", "teacher_sha256", "rows_sha256")  # the same for all
SHOWN = {"student_flops": "student FLOPs", "teacher_flops": "teacher FLOPs", "trials": "trials"}
Key = tuple[str, str]  # study, student


@dataclass(frozen=True)
class Spec:
    """What is compared beside the config: from flags, or from `_compare` in a config file."""

    title: str = "Comparison"
    reference: str | None = None  # the method that differences are taken from; None: vanilla_kd, or else the first
    seeds: int = 3  # from 1 on; seed 0 is the trials'
    rows: int = 512  # held-out rows that are scored: those after the `val_max_rows` of the trials
    tune: tuple[str, ...] = ()  # "lr=1e-3,3e-3", "vanilla_kd.tau=0.5,1"
    like: str | None = None  # methods of the studies that have no trials take the settings chosen for this one
    at: str = "updates"  # what is equal: "updates", or "flops" of student and teacher together
    studies: dict | None = None  # name -> config keys that differ in it
    tables: tuple = ()  # (short name, title, rows of (label, student Key, reference Key), what is subtracted)
    notes: tuple[str, ...] = ()

    def layout(self, methods: list[str]) -> list[tuple]:
        """`tables`, or one table of the methods against the reference."""
        ref = self.reference or ("vanilla_kd" if "vanilla_kd" in methods else methods[0])
        return list(self.tables) or [("main", "Methods", [(m, ("main", m), ("main", ref)) for m in methods], ref)]


def read(folder: Path) -> pd.DataFrame:
    """A line for each planned student. `UserError` where none has a result, or some cannot be compared."""
    lines = read_lines(folder / "results.jsonl")
    if not lines:
        raise UserError(f"{folder}: no results.jsonl there; first the same command without --report")
    of = pd.DataFrame(lines)
    of["stopped"] = of.get("stopped")
    if of.stopped.notna().all():
        raise UserError(f"{folder}: no student has a result; {of.method[0]}: {of.stopped[0]}")
    by = dict.fromkeys(FACTS, lambda x: 0) | {"init_sha256": lambda x: x["seed"]}
    by |= {} if any(x.get("at") == "flops" for x in lines) else {"step": lambda x: x["settings"]}
    seen: dict = {}
    for x, (key, group) in ((x, fact) for x in lines for fact in by.items() if x.get(fact[0]) is not None):
        if seen.setdefault((key, group(x)), x[key]) != x[key]:
            raise UserError(f"{x['method']}, seed {x['seed']}: {key} is {x[key]}, elsewhere {seen[key, group(x)]}; they "
                            "cannot be compared")  # fmt: skip
    return of


def figure(of: pd.DataFrame, key: Key, name: str) -> dict[int, float]:
    """A figure by seed, in the printed unit; {} for a student without results."""
    mine = of[(of.settings == key[0]) & (of.method == key[1]) & of.stopped.isna()]
    return (mine.set_index("seed")[name].dropna() * FIGURES[name].factor).to_dict() if name in of else {}


def report(spec: Spec, results: Path, out: Path, draw: bool = True) -> tuple[pd.DataFrame, str]:
    """Write README.md, tables.csv and the figures of `results` into `out` -> what was read, and the first table."""
    of, records, sections = read(results), [], []
    planned = set(zip(of.settings, of.method, strict=True))
    layout = spec.layout(list(of.method[of.settings == "main"].unique()))
    for name, title, rows, _ in layout:
        rows = [row for row in rows if row[1] in planned]
        if any(me != ref for _, me, ref in rows) or not spec.tables:
            sections.append(section(name, title, rows, of, planned, records))
    out.mkdir(parents=True, exist_ok=True)
    keys = ["table", "method", "figure", "n_seeds", "mean", "half", "reference", "difference", "low", "high", "p", "p_holm"]
    sheet = pd.DataFrame(records, columns=keys)
    sheet["n_seeds"] = sheet["n_seeds"].astype("Int64")
    sheet.to_csv(out / "tables.csv", index=False, float_format="%.6g", lineterminator="\n")
    pictures = draw_figures(spec, layout, results, out, records) if draw else []
    text = heading(spec, of, results) + [line for lines in sections for line in lines] + trials(results)
    text += [f"![{name}]({name}.png)\n" for name in pictures]
    (out / "README.md").write_text("\n".join(text).rstrip() + "\n")
    return of, "\n".join(line for line in sections[0] if not line.startswith("!")) if sections else ""


def heading(spec: Spec, of: pd.DataFrame, results: Path) -> list[str]:
    """Who was compared on what, by which machine, and how to read the tables."""
    settings = read_json(results / "settings.json")
    cfg, some, seeds = settings["main"], of[of.stopped.isna()].iloc[0], sorted(of.seed.unique())
    said = {key: ", ".join(sorted({str(x) for x in of[key].dropna()})) for key in ("hardware", "git_commit", "versions") if key in of}
    text = [f"# {spec.title}", "", "Written by `compare.py` from the `.jsonl` files and logs beside it; do not edit.", "",
            f"{len(of)} students `{cfg['student']}`, teacher `{cfg['teacher']}`, seeds {', '.join(map(str, seeds))}: {cfg['max_steps']:,} "
            f"updates of {cfg['batch_rows']} rows of {cfg['seq_len']} inputs. Scored on {some.n_targets:,.0f} targets in "
            f"{some.n_rows:,.0f} held-out rows.", "", "; ".join(f"{key}: {value}" for key, value in said.items()), "",
            "± is half a 95 % t interval over seeds. Differences are paired by seed. p: paired t test, Holm-corrected over a "
            "table's rows, figure by figure. **Best**, *second* of a column. s: wall time of the run over its students.", ""]  # fmt: skip
    if settings.get("at") == "flops":
        text += ["At equal FLOPs: a method without a teacher makes more updates, until student and teacher have cost the same.", ""]  # fmt: skip
    failed = [f"- {x.method} ({x.settings}, seed {x.seed}): {x.stopped}" for x in of[of.stopped.notna()].itertuples()]
    return text + [*spec.notes, ""] * bool(spec.notes) + (["Without a result:", "", *failed, ""] if failed else [])


def section(name: str, title: str, rows: list[tuple], of: pd.DataFrame, planned: set[Key], records: list[dict]) -> list[str]:
    """A table's means and its paired differences as Markdown; a record per cell."""
    against = [row for row in rows if row[1] != row[2] and row[2] in planned]
    inside = {me: label for label, me, _ in rows}
    labels = {ref: ref[1] for _, _, ref in against if ref not in inside} | inside
    cells = [[figure(of, me, k) for k in FIGURES] for me in labels]
    marked = tables.mark(cells, [f.sense for f in FIGURES.values()], [f.digits for f in FIGURES.values()])
    shown, body = [key for key in SHOWN if key in of], []
    for ((study, method), label), line, texts in zip(labels.items(), cells, marked, strict=True):
        mine = of[(of.settings == study) & (of.method == method)]
        n, rates = len(line[0]), " ".join(f"{lr:g}" for lr in sorted(mine.lr.dropna().unique())) or "–"
        chosen = {f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for given in mine.get("chosen", pd.Series(dtype=object)).dropna()
                  for k, v in given.items() if k != "lr"}  # fmt: skip
        wall = (mine.wall_sec / mine.students_in_run).mean() if "wall_sec" in of else float("nan")
        spent = [f"{mine[key].dropna().iloc[0]:.3g}" if mine[key].notna().any() else "–" for key in shown]
        body.append([label, ", ".join([rates, *sorted(chosen)]), f"{n}" if n == len(mine) else f"{n} of {len(mine)}", *texts,
                     "–" if pd.isna(wall) else f"{wall:.0f}", *spent])  # fmt: skip
        for k, cell in zip(FIGURES, line, strict=True):
            e = estimate(cell)
            records.append({"table": name, "method": label, "figure": k, "n_seeds": e.n, "mean": e.mean, "half": e.half})
    heads = ["", "lr", "n", *(f.heading for f in FIGURES.values()), "s", *(SHOWN[key] for key in shown)]
    text = [f"## {title}", "", *tables.grid(heads, body), ""]
    if not against:
        return text
    body = [[label, ref[1]] for label, _, ref in against]
    for k in COMPARED:
        gaps = differences([(figure(of, me, k), figure(of, ref, k)) for _, me, ref in against])
        for line, e in zip(body, gaps, strict=True):
            line += [e.text(FIGURES[k].digits, "+"), p_text(e.p_holm)]
            low, high = (None, None) if e.half is None else (e.mean - e.half, e.mean + e.half)
            records.append({"table": name, "method": line[0], "reference": line[1], "figure": k, "n_seeds": e.n,
                            "difference": e.mean, "low": low, "high": high, "p": e.p, "p_holm": e.p_holm})  # fmt: skip
    heads = ["", "less", *(h for k in COMPARED for h in (f"Δ {FIGURES[k].heading}", "p"))]
    return [*text, *tables.grid(heads, body), "", f"![{title}](forest_{name}_ce.png)", ""]


def trials(results: Path) -> list[str]:
    """The table of trials: a line for each method and setting beside the rate, a column for each rate; the best is bold."""
    rates = pd.DataFrame(read_lines(results / "rates.jsonl"))
    if rates.empty:
        return []
    of = rates.get("settings", pd.Series([{}] * len(rates))).apply(lambda s: "".join(f" {k}={v}" for k, v in s.items() if k != "lr"))
    best = rates.dropna(subset=["val_ce"]).groupby("method", sort=False).val_ce.idxmin()
    rates["text"] = rates.val_ce.map(lambda ce: "stopped" if pd.isna(ce) else f"{ce:.4f}")
    rates.loc[best, "text"] = "**" + rates.text[best] + "**"
    wide = rates.assign(row=rates.method + of).pivot(index="row", columns="lr", values="text").fillna("–")
    wide = wide.loc[(rates.method + of).unique()]
    body = [[row, *values] for row, values in zip(wide.index, wide.values.tolist(), strict=True)]
    ends = rates.groupby("method").lr.agg(["min", "max"])
    at_end = [m for m, i in best.items() if rates.lr[i] in ends.loc[m].tolist()]
    beyond = f"Best at the lowest or highest rate tried, so that one beyond might do better: {', '.join(at_end) or 'none'}."
    return ["## Trials", "", "Held-out CE of seed 0, in nats per token.", "", *tables.grid(["", *(f"{lr:g}" for lr in wide)], body), "", beyond, ""]  # fmt: skip


def draw_figures(spec: Spec, layout: list[tuple], results: Path, out: Path, records: list[dict]) -> list[str]:
    """A forest plot of each table's differences, and the figures that plot.py draws from logs -> names of the latter."""
    import plot  # matplotlib only where something is drawn

    for name, title, _, less in layout:
        rows = [{"name": r["method"], "mean": r["difference"], "low": r["low"], "high": r["high"]} for r in records
                if r["table"] == name and r["figure"] == "ce" and r.get("difference") is not None]  # fmt: skip
        if rows:
            plot.forest(rows, out / f"forest_{name}_ce.png", title, f"CE, nats/token, less that of {less}; 95 % interval")
    logs = [f.parent for f in sorted(results.glob("logs*/run.json"))]
    if not logs:
        return []
    plot.curves(plot.over_seeds([plot.read_curves(plot.find_logs([folder])) for folder in logs]), out / "curves.png")
    return ["curves", *plot.draw_logs(("budget", "anchoring"), plot.find_logs(logs[:1]), out)]
