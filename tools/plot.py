"""Curves, and the paper's Figures 3 and 4 (budget, anchoring), from a run's logs, as PNG.

    python tools/plot.py out/demo                         every term, budget, anchoring
    python tools/plot.py out/alra_200m/alra out/other --out=compare

Pictures go into the first folder given, or into --out. Their numbers are in the logs: log.jsonl,
histograms.jsonl and teacher.jsonl. Budget and anchoring need `histogram_every_steps`. Anchoring is
of the teacher of the first run.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.errors import UserError
from lib.files import read_json
from lib.stats import estimate
from run.methods import LOGGED
from run.paper import NAMES
from run.tables import read_log

PANELS = {  # key in log.jsonl -> title; terms of other objectives follow
    "ce": "cross-entropy, nats/token: held-out (marked) and training (thin)",
    "loss": "training loss, nats/token",
    "val_kl": "held-out KL(teacher || student), nats/token",
    "val_agree": "held-out top-1 agreement with teacher",
    "gnorm": "gradient norm before clipping",
    "lr": "learning rate",
    "kd": "each method's distillation term, nats/token",
    "mass": "ALRA: mass term, nats/token",
    "local": "ALRA: local term, nats/token",
    "rest": "ALRA: rest term, nats/token",
    "pair": "ALRA: pair term, nats/token",
    "d_u": "ALRA: mean local budget $d_u$, tokens",
    "support": "ALRA: mean effective support, tokens",
}
LEVELS = {  # key in log.jsonl -> label, line
    "val_teacher_ce": ("teacher", ":"),
    "val_teacher_entropy": ("teacher's entropy", "-."),
    "val_unigram_ce": ("unigram", "--"),
    "val_uniform_ce": ("ln V", (0, (1, 4))),
}
plt.rcParams |= {
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "legend.frameon": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

# ----------------------------------------------------------------------------------------------
# what is in the logs


def read_logs(folders):
    """Return run.json and log of each student in folders of runs or methods, in the paper's order.

    They are named by method, or by folder if several folders are given.
    """
    students = []
    for top in folders:
        for file in (*top.glob("log.jsonl"), *sorted(top.glob("*/log.jsonl"))):
            students.append(file.parent)
    if not students:
        raise UserError(
            f"{', '.join(map(str, folders))}: no log.jsonl there or one folder below; expected a "
            "run's folder"
        )
    # methods that the paper lacks are last
    students.sort(key=lambda folder: [*NAMES, folder.name].index(folder.name))
    logs = {}
    for folder in students:
        name = folder.name if len(folders) == 1 else str(folder)
        run = read_json(folder.parent / "run.json", {"config": dict})
        logs[name] = run | {"log": read_log(folder)}
    return logs


def read_curves(seeds):
    """Return all logged numbers of several seeds, by the tokens of training.

    seeds  what `read_logs` returns, for each seed
    ->     name of a student -> key of log.jsonl -> nominal tokens -> {seed: number}
    """
    curves = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for seed, logs in enumerate(seeds):
        for name, student in logs.items():
            per_step = student["config"]["batch_rows"] * student["config"]["seq_len"]
            for record in student["log"]:
                tokens = record["step"] * per_step
                for key, value in record.items():
                    if isinstance(value, int | float):
                        curves[name][key][tokens][seed] = value  # a step's last record counts
    return curves


def records_of(student, part):
    """Return the records of a part of a student's log, "histogram" or "teacher" (`read_log`)."""
    return [record[part] for record in student["log"] if part in record]


# ----------------------------------------------------------------------------------------------
# how they look


def looks(names):
    """Return name -> colour, line and marker; no two curves share all three.

    The paper's methods have looks of their own; other curves take the next ones in their order.
    """
    styles = {}
    for i, name in enumerate(dict.fromkeys([*NAMES, *names])):
        styles[name] = {
            # ten colours, then their light versions, then both again with other lines
            "color": plt.get_cmap("tab20").colors[i * 2 % 20 + i // 10 % 2],
            "linestyle": ("-", "--", "-.", ":")[(i + i // 20) % 4],
            "marker": "os^vDPX*h<>pd"[i % 13],
            "markersize": 4.5,
        }
    return styles


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


# ----------------------------------------------------------------------------------------------
# curves


def curves(seeds, path):
    """Draw every term of every student over the tokens of training, as means over seeds."""
    students = read_curves(seeds)
    if not any({"ce", "val_ce"} & terms.keys() for terms in students.values()):
        raise UserError(f"no {path}: no cross-entropy is logged yet")
    logged = {"ce": {}}  # its panel is drawn even if only val_ce is logged
    for terms in students.values():
        logged |= terms
    undrawn = {*LOGGED, *LEVELS, "val_ce"} - {"gnorm", "lr"}
    keys = [key for key in PANELS | logged if key in logged and key not in undrawn]
    n_rows = (len(keys) + 4) // 3  # CE has the first row for itself
    figure = plt.figure(figsize=(13, 2.7 * n_rows))
    handles = {}
    for i, key in enumerate(keys):
        axis = figure.add_subplot(n_rows, 3, i + 3 if i else (1, 3))
        draw_panel(axis, key, students, logged)
        lines, labels = axis.get_legend_handles_labels()
        handles |= zip(labels, lines, strict=True)
    figure.legend(handles.values(), handles, loc="outside right upper")
    save(figure, path)


def draw_panel(axis, key, students, logged):
    """Draw one term of all students, with intervals over seeds, or the seeds if they are few.

    The panel of CE also has the reference CEs in `logged`.
    """
    ys = []  # of each curve
    styles = looks(students)
    for name, terms in students.items():
        for term in ("ce", "val_ce") if key == "ce" else (key,):
            if term in terms:
                points = terms[term]
                estimates = [estimate(numbers) for numbers in points.values()]
                y = [e.mean for e in estimates]
                half = [e.half if e.n > 3 else 0 for e in estimates]
                ys.append(y)
                gap = len(y) // 6 or 1  # between markers
                for tokens, numbers in [*points.items()][::gap]:
                    if len(numbers) in (2, 3):  # too few for an interval
                        x = [tokens] * len(numbers)
                        axis.plot(x, [*numbers.values()], "_", color=styles[name]["color"])
                line, *_ = axis.errorbar(
                    [*points], y, half, markevery=gap, errorevery=gap, **styles[name]
                )
                line.set_label(name)  # of the line alone: the legend has no error bars
                if term == "ce":
                    line.set(marker="", linewidth=0.8)
    top = None
    if key in ("ce", "val_kl"):
        # These may lie above the panel: curves that end far above the others, the first tenth of
        # any curve, and the reference CEs.
        limit = 1.5 * np.median([y[-1] for y in ys])
        top = 1.03 * max(max(y[len(y) // 10 :]) for y in ys if y[-1] <= limit)
    for level, (label, dash) in LEVELS.items():
        if key == "ce" and level in logged:
            *_, last = logged[level].values()  # of the last validation
            ce = estimate(last).mean
            if ce > top:
                label += " (above the panel)"
            axis.axhline(ce, color="black", linestyle=dash, label=label)
    values = np.concatenate(ys)
    least = values.min()
    if key != "lr" and values.max() > 20 * least > 0:
        axis.set_yscale("log")
    bottom = max(axis.get_ylim()[0], min(least, 0))  # not the ends of error bars and margins
    axis.set_ylim(bottom, top)
    axis.set(title=PANELS.get(key, f"term: {key}"), xlabel="nominal tokens seen", ylabel=key)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


# ----------------------------------------------------------------------------------------------
# the paper's Figures 3 and 4


def budget(logs, path):
    """Draw the distribution of d_u below d_max, and write down the share of positions below it.

    A student has three curves: early and late in training, and the teacher as its own student.
    """
    stages = {}  # student -> stage -> records
    for name, student in logs.items():
        records = records_of(student, "histogram")
        if any(sum(r["d_u_hist"][:-1]) for r in records):
            records = records[1:] or records  # the first is of untrained weights
            tenth = -(-len(records) // 10)  # rounded up
            stages[name] = {"early": records[:tenth], "late": records[-tenth:]}
            teacher = records_of(student, "teacher")
            # of an equal d_max
            if teacher and len(teacher[0]["d_u_hist"]) == len(records[0]["d_u_hist"]):
                stages[name]["teacher"] = teacher
    if not stages:
        raise UserError("no d_u below d_max; train ALRA with --histogram_every_steps=N")
    n = len(stages)
    figure, (axes,) = plt.subplots(1, n, figsize=(4.6 * n, 3.0), squeeze=False)
    lines = {"early": "--", "late": "-", "teacher": ":"}
    for axis, (name, by_stage) in zip(axes, stages.items(), strict=True):
        for stage, records in by_stage.items():
            counts = np.sum([r["d_u_hist"] for r in records], 0)  # [d_max + 1]
            n_below = counts[:-1].sum()
            label = (
                f"{stage}, step {records[0]['step']:,} to {records[-1]['step']:,}: "
                f"{n_below / counts.sum():.1%} below"
            )
            color = "black" if stage == "teacher" else looks(stages)[name]["color"]
            shares = counts[:-1] / max(n_below, 1)
            axis.plot(shares, label=label, color=color, linestyle=lines[stage])
        d_max = len(shares)
        axis.set(
            title=f"{name}: positions with $d_u$ < $d_{{max}}$ = {d_max}",
            xlabel="local budget $d_u$ [tokens]",
            ylabel="share of these positions",
        )
        axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # room for the legend
        axis.legend()
    save(figure, path)


def anchoring(logs, path):
    """Draw the teacher's probability of the label and of its own top-1, and how often they agree.

    As a density, and as means of each step.
    """
    records = []
    for student in logs.values():
        records = records or records_of(student, "teacher")
    if not records:
        raise UserError("no record of a teacher; train with --histogram_every_steps=N")
    values = {key: np.array([r[key] for r in records]) for key in records[0]}
    n = values["n"]
    figure, (density, means) = plt.subplots(1, 2, figsize=(10.4, 3.4))
    lines = (
        ("p_label", "label", "0.5"),
        ("p_top1", "teacher's top-1", "black"),
        ("agree", "top-1 is the label", "tab:blue"),
    )
    for key, label, color in lines:
        if key != "agree":
            counts = values[f"{key}_hist"].sum(0)
            height = counts / counts.sum() * len(counts)
            density.stairs(
                height, np.linspace(0, 1, len(counts) + 1), label=label, color=color, linewidth=1.5
            )
        running = (n * values[key]).cumsum() / n.cumsum()
        label += f", running mean: {running[-1]:.3f}"
        means.plot(values["step"], values[key], ".", color=color, markersize=4, alpha=0.5)
        means.plot(values["step"], running, color=color, label=label)
    density.set(
        title=f"density over {n.sum():,} positions",
        xlabel="teacher's probability",
        ylabel="density",
    )
    means.set(
        title="means over positions",
        xlabel="step [updates]",
        ylabel="teacher's probability, or share",
        ylim=(0, 1.3),
        yticks=np.linspace(0, 1, 6),
    )
    density.legend()
    means.legend()
    save(figure, path)


# ----------------------------------------------------------------------------------------------
# the command


def draw_histograms(logs, out):
    """Draw Figures 3 and 4 as far as the logs allow. Return the names of those drawn."""
    drawn = []
    for draw in (budget, anchoring):
        name = draw.__name__
        try:
            draw(logs, out / f"{name}.png")
            drawn.append(name)
        except UserError as error:
            print(f"no {name}.png: {error}", file=sys.stderr)
    return drawn


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    out = args.out or args.folders[0]
    logs = read_logs(args.folders)
    curves([logs], out / "curves.png")
    draw_histograms(logs, out)


if __name__ == "__main__":
    configure.run(main)
