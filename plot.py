"""The paper's figures, each a PNG with its numbers beside it as CSV.

    python plot.py out/demo                            every term of every method; budget and anchoring where logged
    python plot.py out/alra_200m/alra out/other --out=compare
    python plot.py out/alra_200m --figures=budget      this one, or an error that says which log it lacks
    python plot.py --pairs --sets --out=figures        SWPRA's pair scores; sizes of the evaluation sets
    python plot.py --rows data/demo                    row lengths, and what rows end at

OUT is the first folder given, or `out`. Other scripts call `curves`, `budget`, `anchoring`, `pairs`, `sets`,
`row_lengths` and `forest` on data of their own. A method has the same colour, line and marker in every figure, and no
two of the table share both line and marker (forests draw a dot for a numeral): print without colour will do.
"""

import argparse
import csv
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator
from PIL import Image  # matplotlib brings it

import configure
from lib.figures import LOGGED
from lib.files import read_json, read_lines
from lib.stats import estimate
from lib.tasks import TASKS

FIGURES = ("curves", "budget", "anchoring")  # those drawn from a run's logs
LINES = ("-", "--", "-.", ":")
# For methods that STYLE does not list: colours far from all of its own and from each other (CIELAB, 30 at least).
OTHERS = ("#0000ff", "#dd00ff", "#000099", "#550044", "#00dd00", "#334400", "#aacc88", "#00dd99", "#885500", "#00aaff",
          "#ff77cc", "#885577")  # fmt: skip
OTHER_MARKERS = "H1234+x"  # of none in STYLE
STYLE = {  # colour, line and marker of a method, in the paper's order
    "pretrain": ("#8c8c8c", ":", "o"), "vanilla_kd": ("#1f5fa8", "-", "s"), "pd": ("#2bb5c8", "--", "^"),
    "atkd": ("#2c8a2c", "-", "v"), "rld": ("#9467bd", "--", "D"), "ldrld": ("#6b3f2e", "-", "P"),
    "tad": ("#c9b616", "-", "X"), "bild": ("#e9a3cf", "--", "h"), "alra": ("#d62728", "-", "*"),
    "alra_r": ("#f4a261", "--", "<"), "alra_u": ("#e76f00", "-.", ">"),
    "alra_n": ("#7a0c1e", ":", "p"), "alra_ng": ("#ff8f8f", "--", "8"), "alra_g": ("#b5179e", "-.", "d"),
    **{f"fixed_{d}": (color, "-", f"${d}$") for d, color in  # the larger the darker
       ((3, "#a8bccb"), (7, "#86a3b8"), (9, "#668aa4"), (15, "#466f8c"), (19, "#2a5270"), (25, "#123550"))},
    "reverse_kl": ("#17805f", "-.", "o"), "jsd": ("#7fb800", "-.", "s"), "tvd": ("#5e60ce", "-.", "^"),
    "dkd": ("#b08968", "-.", "v"), "mse_logits": ("#4d4d4d", "-.", "D"), "adakd": ("#00a6a6", "-.", "P"),
    "sekd": ("#c77dff", "-.", "X"), "bdl": ("#9a8c00", "-.", "h"),
}  # fmt: skip
TEACHER = {"color": "black", "linestyle": (0, (1, 2)), "linewidth": 1.4}
FIRST, SECOND = {"color": "#1f5fa8", "hatch": "///"}, {"color": "#f4a261"}  # two sets side by side, no methods
NATS = "nats per token"
PANELS = {  # key in log.jsonl -> title, unit
    "loss": ("training loss", NATS),
    "ce": ("training cross-entropy", NATS),
    "kd": ("distillation term, each method's own", NATS),
    "mass": ("ALRA: mass term", NATS),
    "local": ("ALRA: local term", NATS),
    "rest": ("ALRA: rest term", NATS),
    "pair": ("ALRA: pair term", NATS),
    "d_u": ("ALRA: mean local budget $d_u$", "tokens"),
    "support": ("ALRA: mean effective support", "tokens"),
    "val_ce": ("validation cross-entropy", NATS),
    "val_kl": ("validation KL(teacher || student)", NATS),
    "val_agree": ("validation top-1 agreement with teacher", "share of tokens"),
}
LEVELS = {"val_teacher_ce": ("teacher", (0, (1, 2))), "val_teacher_entropy": ("teacher's entropy", (0, (5, 1, 1, 1)))}
ENDS = {"eos": "document", "line": "line", "sentence": "sentence", "none": "anywhere:\nfull length"}  # of a manifest
# What is read of a manifest, of a histogram's record, of a teacher's.
SPLIT = {
    "split": str,
    "rows": int,
    "padding_share": float,
    "length_histogram": list,
    "ends": dict.fromkeys(ENDS, float),
}
D_U = {"d_u_hist": list}
ANCHORS = {"n": int, "p_label": float, "p_top1": float, "agree": float, "p_label_hist": list, "p_top1_hist": list}

plt.rcParams.update({"font.size": 9, "axes.titlesize": 9.5, "legend.fontsize": 8.5, "legend.frameon": False,
                     "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "axes.spines.top": False,
                     "axes.spines.right": False, "hatch.linewidth": 0.6})  # fmt: skip


class MissingLog(ValueError):
    """The log of a figure is missing: which one, and how to make train.py write it."""


# --- logs ------------------------------------------------------------------------------------------------------


def read_log(path: Path, how: str = "", keys: dict | None = None) -> list[dict]:
    """The records of a log. A last line without its end is still being written. Of duplicates the last one counts.

    how   to get the log: said where it is missing or empty
    keys  that each record holds beside its step
    """
    if not path.is_file():
        raise MissingLog(f"{path}: no such log{how}")
    records = read_lines(path, {"step": int} | (keys or {}))
    if how and not records:
        raise MissingLog(f"{path}: no record yet{how}")
    return list({(r["step"], *sorted(r)): r for r in records}.values())


def find_logs(folders: list[Path]) -> dict[str, Path]:
    """Run or method folders -> {curve's name: method's folder}. A lone method keeps its bare name."""
    found = [f for top in folders for f in ([top] if (top / "log.jsonl").is_file() else sorted(top.glob("*/")))]
    found = [f for f in dict.fromkeys(found) if (f / "log.jsonl").is_file()]
    if not found:
        looked = ", ".join(map(str, folders))
        raise ValueError(f"{looked}: no log.jsonl there or one folder below; expected a run's folder")
    found.sort(key=lambda f: [*STYLE, f.name].index(f.name))  # the paper's order, then the others
    methods = [f.name for f in found]
    return {f.name if methods.count(f.name) == 1 else f"{f.name} ({f.parent})": f for f in found}


def read_curves(logs: dict[str, Path]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """-> {curve's name: {key of the log: [(nominal tokens, value), ..]}}"""
    out = {name: {} for name in logs}
    for name, folder in logs.items():
        run = read_json(folder.parent / "run.json", {"config": {"batch_rows": int, "seq_len": int}})["config"]
        for record in read_log(folder / "log.jsonl"):
            tokens = record["step"] * run["batch_rows"] * run["seq_len"]
            for key, value in record.items():
                if isinstance(value, int | float):
                    out[name].setdefault(key, []).append((tokens, value))
    return out


def over_seeds(seeds: list[dict]) -> dict[str, dict[str, list[tuple]]]:
    """Several of `read_curves`, one per seed -> the same with means (tokens, mean, half the 95 % interval).

    One seed is returned as it is. A point that only one seed has is without interval.
    """
    if len(seeds) == 1:
        return seeds[0]
    found = {}  # name -> key -> tokens -> value by seed
    for seed, points in enumerate(seeds):
        for name, of in points.items():
            for key, values in of.items():
                for tokens, value in values:
                    found.setdefault(name, {}).setdefault(key, {}).setdefault(tokens, {})[seed] = value
    return {
        name: {
            key: [(tokens, e.mean, e.half or 0.0) for tokens, e in ((t, estimate(v)) for t, v in at.items())]
            for key, at in of.items()
        }
        for name, of in found.items()
    }


def read_budgets(logs: dict[str, Path]) -> dict[str, tuple[list[dict], list[dict]]]:
    """-> {curve's name: (the student's histograms, its teacher's)} for every method with an adaptive local budget"""
    how = "; run train.py with --histogram_every_steps=N and an ALRA method whose budget adapts"
    out = {}
    for name, folder in logs.items():
        records = read_log(file, keys=D_U) if (file := folder / "histograms.jsonl").is_file() else []
        if any(sum(r["d_u_hist"][:-1]) for r in records):  # a fixed budget has nothing below d_max
            out[name] = records, read_log(folder.parent / "teacher.jsonl", how, D_U)
    if not out:
        raise MissingLog(f"{', '.join(map(str, logs.values()))}: no histograms.jsonl with a d_u below d_max{how}")
    return out


# --- what figures have in common -------------------------------------------------------------------------------


def looks(names: Iterable[str]) -> dict[str, dict]:
    """The look of each curve; a method looks the same in all figures. Its second run gets another line, hollow markers.

    A method that STYLE does not list looks as its name says, alike in every figure. Only where two such names in one
    figure say the same colour, line and marker, the later of them in the alphabet takes the next free look.
    """
    out, seen, names = {}, [], list(names)
    methods = {name: name.split(" (")[0] for name in names}
    style, n = dict(STYLE), len(OTHERS) * len(OTHER_MARKERS) * len(LINES)
    for method in sorted(set(methods.values()) - STYLE.keys()):
        place = zlib.crc32(method.encode())
        every = (other_look((place + i) % n) for i in range(n))
        style[method] = next((look for look in every if look not in style.values()), other_look(place % n))
    for name in names:
        method = methods[name]
        color, line, marker = style[method]
        nth = seen.count(method)
        seen.append(method)
        line = LINES[(LINES.index(line) + nth) % len(LINES)]
        out[name] = {"color": color, "linestyle": line, "linewidth": 1.8 if method == "alra" else 1.3, "marker": marker,
                     "markersize": 7 if marker[0] in "*$" else 4.5, "markerfacecolor": "white" if nth else color}  # fmt: skip
    return out


def other_look(place: int) -> tuple[str, str, str]:
    """Colour, line and marker number `place` of those that no method of STYLE has."""
    place, color = divmod(place, len(OTHERS))
    line, marker = divmod(place, len(OTHER_MARKERS))
    return OTHERS[color], LINES[line], OTHER_MARKERS[marker]


def grid(rows: int, cols: int, width: float, height: float):
    """A figure of equal panels; width and height in inches per panel -> figure, axes [rows, cols]"""
    return plt.subplots(rows, cols, figsize=(width * cols, height * rows), squeeze=False, layout="constrained")


def save(figure, path: Path, header: str, lines: Iterable[Sequence]) -> None:
    """Write the PNG, and its numbers as CSV under the same name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    few_colours(path)
    with path.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([header.split(), *lines])


def few_colours(path: Path) -> None:
    """Rewrite a PNG with 256 colours, for a third of the bytes. Methods' colours stay exact; shades of edges may change."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(np.int64)  # [H, W, 3]
    codes, where, counts = np.unique(pixels @ (1 << 16, 1 << 8, 1), return_inverse=True, return_counts=True)
    colors = np.stack((codes >> 16, codes >> 8 & 255, codes & 255), 1)
    ours = [
        tuple(round(255 * part) for part in to_rgb(color)) for color in (*(c for c, _, _ in STYLE.values()), *OTHERS)
    ]
    common = colors[np.argsort(-counts, kind="stable")[:256]].tolist()
    palette = np.array([*dict.fromkeys([*ours, *map(tuple, common)])][:256])
    nearest = ((palette**2).sum(1) - 2 * colors @ palette.T).argmin(1).astype(np.uint8)
    image = Image.fromarray(nearest[where].reshape(pixels.shape[:2]))
    image.putpalette(palette.astype(np.uint8).tobytes())
    image.save(path, optimize=True)


# --- from logs -------------------------------------------------------------------------------------------------


def curves(points: dict[str, dict[str, list[tuple[int, float]]]], path: Path) -> None:
    """Every term of every student over the tokens of training, the teacher as a level.

    points  as of `read_curves`; or of `over_seeds`, whose intervals are drawn as bands

    A term with one value for each student is drawn by student, in the legend's order; one that spans a factor of more
    than 20 gets a logarithmic axis.
    """
    there = dict.fromkeys(key for of in points.values() for key in of)
    panels = [key for key in PANELS if key in there]
    panels += [key for key in there if key not in (*PANELS, *LEVELS, *LOGGED)]  # terms of other objectives
    if not panels:
        raise MissingLog(f"{', '.join(points)}: no term logged yet; wait for the first --log_every_steps")
    cols = min(len(panels), 3)
    figure, axes = grid(-(-len(panels) // cols), cols, 3.9, 2.7)
    style = looks(points)
    for axis, key in zip(axes.flat, panels, strict=False):
        once = all(len(of[key]) == 1 for of in points.values() if key in of)
        for i, (name, of) in enumerate(points.items()):
            if key in of:
                x, y, *half = np.array(of[key]).T
                x = [i] if once else x
                every = max(1, len(x) // 6)
                axis.plot(x, y, label=name, markevery=(i * every // len(points), every), **style[name])
                if half:
                    axis.fill_between(x, y - half[0], y + half[0], color=style[name]["color"], alpha=0.15, linewidth=0)
        for level, (label, line) in LEVELS.items() if key == "val_ce" else ():
            for y in sorted({round(of[level][-1][1], 4) for of in points.values() if level in of}):
                axis.axhline(y, **TEACHER | {"linestyle": line}, label=label)
        title, unit = PANELS.get(key, (f"term: {key}", None))
        axis.set(title=title, ylabel=f"{key} [{unit}]" if unit else key)
        values = [y for of in points.values() for _, y, *_ in of.get(key, ())]
        if min(values) > 0 and max(values) > 20 * min(values):
            axis.set_yscale("log")
        if once:
            axis.set(xlabel="students, as in the legend", xticks=[])
        else:
            axis.set(xlabel="nominal tokens seen")
            axis.xaxis.set(major_locator=MaxNLocator(5), major_formatter=EngFormatter(sep=""))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 2 * cols))
    lines = [(name, key, *p) for name, of in points.items() for key in (*panels, *LEVELS) for p in of.get(key, ())]
    save(figure, path, "curve key nominal_tokens value" + " half" * (len(lines[0]) > 4), lines)


def stages(records: list[dict]) -> dict[str, list[dict]]:
    """Early and late: the records of the first and of the last tenth of the updates between the first and last record.

    Step 0, before any update, is in neither, unless fewer than two others are there. One step alone has no stages.
    """
    trained = [r for r in records if r["step"] > 0]
    records = trained if len(trained) > 1 else records
    first, last = records[0]["step"], records[-1]["step"]
    early = [r for r in records if r["step"] <= first + (last - first) / 10]
    late = [r for r in records if r["step"] >= last - (last - first) / 10]
    return {"early": early, "late": late} if first < last else {"student": records}


def budget(histograms: dict[str, tuple[list[dict], list[dict]]], path: Path) -> None:
    """The distribution of d_u below d_max, and the shares below and at it, early and late, with the teacher's own.

    histograms  {curve's name: (records of the student, of its teacher)}, each {"step", "d_u_hist": positions by d_u}

    Not smoothed: d_u is a whole number. The CSV has one line for each stage and d_u.
    """
    figure, axes = grid(len(histograms), 2, 4.6, 3.0)
    lines = []
    for (name, look), (below, shares) in zip(looks(histograms).items(), axes, strict=True):
        student, teacher = histograms[name]
        parts = {**stages(student), "teacher": teacher}
        for i, (stage, records) in enumerate(parts.items()):
            counts = np.sum([r["d_u_hist"] for r in records], 0)  # [d_max + 1]
            d_max, n, n_below, steps = len(counts) - 1, counts.sum(), counts[:-1].sum(), [r["step"] for r in records]
            density = counts[:-1] / max(n_below, 1)  # of those below d_max
            when = f"steps {steps[0]:,} to {steps[-1]:,}" if steps[0] < steps[-1] else f"step {steps[0]:,}"
            line, fill = look | {"linestyle": "-"}, {"color": look["color"]}
            if stage == "early":
                line |= {"linestyle": "--", "markerfacecolor": "white"}
                fill = {"facecolor": "white", "edgecolor": look["color"], "hatch": "////"}
            elif stage == "teacher":
                line, fill = TEACHER | {"marker": "x", "markersize": 4}, {"color": "0.25"}
            start = max(int(counts.nonzero()[0][0]) - 1, 0)
            below.plot(range(start, d_max), density[start:], label=f"{stage}, {when}", **line)
            at = np.arange(2) + (i - (len(parts) - 1) / 2) * 0.27
            bars = shares.bar(at, [100 * n_below / n, 100 * counts[-1] / n], 0.25, label=stage, **fill)
            shares.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
            lines += [(name, stage, steps[0], steps[-1], d, counts[d], counts[d] / n, density[d] if d < d_max else "")
                      for d in range(d_max + 1)]  # fmt: skip
        below.set(title=f"{name}: positions with $d_u$ < $d_{{max}}$ = {d_max}", xlabel="local budget $d_u$ [tokens]",
                  ylabel="share of these positions per token", ylim=(0, 1.45 * below.get_ylim()[1]))  # fmt: skip
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        shares.set(title=f"{name}: all positions", ylabel="share of positions [%]", ylim=(0, 140), yticks=range(0, 101, 20))  # fmt: skip
        shares.set_xticks((0, 1), (f"$d_u$ < {d_max}", f"$d_u$ = {d_max}"))
        shares.grid(False, axis="x")
        below.legend(loc="upper left")
        shares.legend(loc="upper center", ncols=3)
    save(figure, path, "curve stage first_step last_step d_u count share share_below_d_max", lines)


def anchoring(records: list[dict], path: Path) -> None:
    """The teacher's probability of the label and of its own top-1: density, mean of each step, and how often they agree.

    records  of `teacher.jsonl`: {"step", "n", "p_label", "p_top1", "agree", "p_label_hist", "p_top1_hist"}

    A running mean is over all positions so far. CSV: x is the middle of a bin, or a step.
    """
    steps, n = (np.array([r[key] for r in records]) for key in ("step", "n"))
    figure, ((density, means, agree),) = grid(1, 3, 4.1, 3.1)
    lines = []
    for key, axis, label, color, line, marker in (
        ("p_label", means, "label", "0.5", "--", "o"),
        ("p_top1", means, "teacher's top-1", "black", "-", "^"),
        ("agree", agree, "top-1 is the label", "black", "-.", "s"),
    ):
        values = np.array([r[key] for r in records])
        running = np.cumsum(n * values) / np.cumsum(n)
        axis.plot(steps, values, ".", color=color, markersize=4, alpha=0.5, label=f"{label}, each step")
        axis.plot(steps, running, color=color, linestyle=line, marker=marker, markersize=4.5,
                  markevery=max(1, len(steps) // 6), label=f"{label}, running mean: {running[-1]:.3f}")  # fmt: skip
        lines += [("step", key, *point) for point in zip(steps, values, strict=True)]
        lines += [("running_mean", key, *point) for point in zip(steps, running, strict=True)]
        if key != "agree":
            counts = np.sum([r[f"{key}_hist"] for r in records], 0)
            edges, heights = np.linspace(0, 1, len(counts) + 1), counts / counts.sum() * len(counts)
            density.stairs(heights, edges, label=label, color=color, linestyle=line, linewidth=1.5)
            lines += [("density", key, *point) for point in zip((edges[1:] + edges[:-1]) / 2, heights, strict=True)]
    unit = "teacher's probability"
    density.set(title=f"density over {n.sum():,} positions", xlabel=unit, ylabel="density [per unit of probability]")
    means.set(title="mean over positions", xlabel="step [updates]", ylabel=unit, ylim=(0, 1.02))
    agree.set(title="agreement", xlabel="step [updates]", ylabel="share of positions", ylim=(0, 1.02))
    for axis in (density, means, agree):
        axis.legend()
    for axis in (means, agree):
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True) if len(steps) > 1 else FixedLocator(steps))
    save(figure, path, "panel series x value", lines)


# --- without a run ---------------------------------------------------------------------------------------------


def pair_score(p_i, p_j, gamma: float):
    """Eq. 19: the pair's mass p_i + p_j, the gap factor exp(-gamma |p_i - p_j|), and the score, their product."""
    mass, factor = p_i + p_j, np.exp(-gamma * np.abs(p_i - p_j))
    return mass, factor, mass * factor


def pairs(path: Path, gammas: Sequence[float] = (0.0, 1.0, 5.0, 20.0)) -> None:
    """SWPRA's weighting before it is normalised, over the student's probabilities of two tokens, p_i + p_j <= 1.

    gammas  5 is the paper's; at 0 the score is the pair's mass. The CSV goes in steps of 0.05.
    """
    figure, axes = grid(2, len(gammas), 2.9, 2.7)
    p_i, p_j = np.meshgrid(np.linspace(0, 1, 201), np.linspace(0, 1, 201))
    for gamma, column in zip(gammas, axes.T, strict=True):
        _, factor, score = pair_score(p_i, p_j, gamma)
        for axis, surface, title in zip(column, (factor, score), ("gap factor", "pair score"), strict=True):
            filled = axis.contourf(p_i, p_j, surface, np.linspace(0, 1, 11), cmap="viridis")
            filled.set_clip_path(plt.Polygon([(0, 0), (1, 0), (0, 1)], transform=axis.transData))
            axis.plot((0, 0.5), (0, 0.5), color="#d62728", linestyle="--", linewidth=0.9)
            axis.plot((1, 0), (0, 1), color="black", linewidth=0.8)
            title = "pair mass" if axis is column[1] and not gamma else title  # all that is left of the score
            axis.set(title=f"{title}, $\\gamma$ = {gamma:g}", aspect="equal", xlabel="$p_i$ [probability]",
                     ylabel="$p_j$ [probability]")  # fmt: skip
            axis.grid(False)
    for row, label in zip(axes, (r"$\exp(-\gamma\,|p_i - p_j|)$", r"$s_{ij}$, before normalisation"), strict=True):
        figure.colorbar(filled, ax=row, label=label, aspect=25)
    marks = [(a / 20, b / 20) for a in range(21) for b in range(21 - a)]
    save(figure, path, "gamma p_i p_j mass gap_factor score",
         ((gamma, *p, *map(float, pair_score(*p, gamma))) for gamma in gammas for p in marks))  # fmt: skip


def sets(path: Path) -> None:
    """The sizes of the validation and held-out sets of the nine tasks."""
    figure, ((axis,),) = grid(1, 1, 9.0, 3.3)
    lines = []
    for role, label, at, look in (("validation", "validation", -0.2, FIRST), ("heldout", "held-out", 0.2, SECOND)):
        sizes = {i: getattr(t, role) for i, t in enumerate(TASKS.values()) if getattr(t, role)}
        bars = axis.bar(
            [i + at for i in sizes], [n for _, n in sizes.values()], 0.38, label=label, edgecolor="white", **look
        )
        axis.bar_label(bars, [f"{n:,}" for _, n in sizes.values()], fontsize=8, padding=1)
        lines += [([*TASKS][i], role, split, n) for i, (split, n) in sizes.items()]
    axis.set(yscale="log", ylabel="size of the set [examples]", ylim=(100, 100_000))
    axis.set_xticks(range(len(TASKS)), [name.replace("_", "\n", 1) for name in TASKS])
    axis.grid(False, axis="x")
    axis.legend(ncols=2, loc="upper right")
    save(figure, path, "task role split examples", lines)


def row_lengths(manifests: list[dict], path: Path) -> None:
    """Lengths of the rows and what they end at, by split, from the manifests of prepare.py.

    CSV: of kind `length` the key is the number of ids in a row, the value a number of rows; of kind `end` a share of rows.
    """
    figure, ((lengths, ends),) = grid(1, 2, 4.8, 3.1)
    lines = []
    for i, (m, look, line) in enumerate(zip(manifests, (FIRST, SECOND), ("-", "--"), strict=False)):
        share = np.array(m["length_histogram"]) / m["rows"]
        lengths.stairs(100 * share, np.arange(len(share) + 1) - 0.5, color=look["color"], linestyle=line,
                       label=f"{m['split']}: {m['rows']:,} rows, padding {m['padding_share']:.1%}")  # fmt: skip
        at = np.arange(len(ENDS)) + (i - (len(manifests) - 1) / 2) * 0.4
        bars = ends.bar(at, [100 * m["ends"][end] for end in ENDS], 0.38, label=m["split"], edgecolor="white", **look)
        ends.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
        lines += [(m["split"], "length", n, count) for n, count in enumerate(m["length_histogram"]) if count]
        lines += [(m["split"], "end", end, m["ends"][end]) for end in ENDS]
    lengths.set(title="length of a row", xlabel="token ids in a row", ylabel="share of rows [%]", yscale="log")
    ends.set(title="what a row ends at", ylabel="share of rows [%]", ylim=(0, 112))
    ends.set_xticks(range(len(ENDS)), ENDS.values())
    ends.grid(False, axis="x")
    lengths.legend(loc="upper left")
    ends.legend()
    save(figure, path, "split kind key value", lines)


def forest(rows: list[dict], path: Path, title: str, unit: str) -> None:
    """Forest plot: differences to a reference method, with intervals.

    rows  {"name", "mean", "low", "high"} in the order of the table; low and high None where there is no interval
    """
    for row in rows:
        low, high = row["low"], row["high"]
        if (low, high) != (None, None) and (None in (low, high) or not low <= row["mean"] <= high):
            raise ValueError(f"{row}: expected low <= mean <= high, or None for both ends")
    figure, ((axis,),) = grid(1, 1, 7.2, 0.9 + 0.27 * len(rows))
    style = looks(dict.fromkeys(row["name"] for row in rows))
    for i, row in enumerate(rows):
        mean, low, high, look = row["mean"], row["low"], row["high"], style[row["name"]]
        text = f"{mean:+.4f}"
        if low is not None:
            axis.plot((low, high), (i, i), color=look["color"], linewidth=1.6, solid_capstyle="butt")
            text += f"  [{low:+.4f}, {high:+.4f}]"
        marker = "o" if look["marker"].startswith("$") else look["marker"]  # a numeral is not seen on a line
        axis.plot(mean, i, color=look["color"], marker=marker, markersize=9 if marker == "*" else 6)
        axis.text(1.02, i, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8, family="monospace")
    axis.axvline(0, color="black", linewidth=1)
    axis.set(xlabel=unit, ylim=(len(rows) - 0.4, -0.6))
    axis.set_title(title, loc="left")
    axis.set_yticks(range(len(rows)), [r["name"] for r in rows])
    save(figure, path, "name mean low high", ([r[k] for k in ("name", "mean", "low", "high")] for r in rows))


# --- command ---------------------------------------------------------------------------------------------------


def from_logs(figure: str, logs: dict[str, Path], path: Path) -> None:
    """Draw one figure from a run's logs. `MissingLog` where they lack its records."""
    if figure == "curves":
        curves(read_curves(logs), path)
    elif figure == "budget":
        budget(read_budgets(logs), path)
    else:
        runs = list(dict.fromkeys(folder.parent for folder in logs.values()))
        if len(runs) > 1:
            raise MissingLog(f"{', '.join(map(str, runs))}: one figure shows one run's teacher; name one run")
        how = "; run train.py with --histogram_every_steps=N and a method that has a teacher"
        anchoring(read_log(runs[0] / "teacher.jsonl", how, ANCHORS), path)


def draw_logs(
    names: Iterable[str], logs: dict[str, Path], out: Path, missing: Literal["say", "skip", "raise"] = "skip"
) -> list[str]:
    """Draw those of FIGURES that the logs allow -> their names. `missing`: what to do about the others."""
    done = []
    for figure in names:
        try:
            from_logs(figure, logs, out / f"{figure}.png")
            done.append(figure)
        except MissingLog as error:
            if missing == "raise":
                raise
            if missing == "say":
                print(f"no {figure}.png: {error}", file=sys.stderr)
    return done


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="runs' or methods' folders")
    parser.add_argument("--figures", help=f"of {','.join(FIGURES)}; default: those that the logs allow")
    parser.add_argument("--pairs", action="store_true", help="SWPRA's pair scores")
    parser.add_argument("--sets", action="store_true", help="sizes of the evaluation sets")
    parser.add_argument("--rows", type=Path, metavar="DATA_DIR", help="lengths and ends of prepared rows")
    parser.add_argument("--out", type=Path, help="folder for the pictures; default: the first one given, or out")
    args = parser.parse_args(argv)
    asked = args.figures.split(",") if args.figures else []
    unknown = [figure for figure in asked if figure not in FIGURES]
    if unknown:
        raise ValueError(f"--figures: no figure {unknown[0]!r}, there are {', '.join(FIGURES)}")
    if (asked and not args.folders) or not (args.folders or args.pairs or args.sets or args.rows):
        raise ValueError("nothing to draw: expected a run's folder, --pairs, --sets or --rows DATA_DIR")
    out = args.out or [*args.folders, args.rows or Path("out")][0]
    logs = find_logs(args.folders) if args.folders else {}
    done = draw_logs(asked or FIGURES, logs, out, "raise" if asked else "say") if logs else []
    if args.pairs:
        pairs(out / "pairs.png")
    if args.sets:
        sets(out / "sets.png")
    if args.rows:
        files = [args.rows / f"{split}.json" for split in ("train", "val")]
        if not files[0].is_file():
            raise ValueError(f"{files[0]}: not there; expected a folder that prepare.py has written to its end")
        row_lengths([read_json(file, SPLIT) for file in files if file.is_file()], out / "rows.png")
    for name in [*done, *(name for name in ("pairs", "sets", "rows") if getattr(args, name))]:
        print(f"{out / name}.png\n{out / name}.csv")


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
