"""Curves, and the paper's Figures 3 and 4 (budget, anchoring), from a run's logs, as PNG.

    python tools/plot.py out/demo                         every term, budget, anchoring
    python tools/plot.py out/alra_200m/alra out/other --out=compare
    python tools/plot.py --sentence "import os" out/demo/alra       ALRA's choices at each token

Pictures go into the first folder given, or into --out. Their numbers are in the logs: log.jsonl,
histograms.jsonl and teacher.jsonl. Budget and anchoring need `histogram_every_steps`; a sentence
needs checkpoints, and shows the first and the last one.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.errors import UserError
from lib.files import read_json
from lib.hf import load_tokenizer
from lib.stats import estimate
from losses import default_settings, resolve
from run.identity import content_hash
from run.methods import LOGGED
from run.paper import NAMES
from run.scoring import check_content
from run.tables import read_log
from run.teacher import load_teacher

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
HELD_OUT = {"ce": "val_ce"}  # drawn in the same panel
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
        files = [*top.glob("log.jsonl"), *sorted(top.glob("*/log.jsonl"))]
        students += [file.parent for file in files]
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


def histograms(student, part):
    """Return the records of one of PARTS in a student's log."""
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
    if not students:
        raise UserError(f"no {path}: nothing is logged yet")
    logged = {"ce": {}}  # also if so far only val_ce is logged
    for terms in students.values():
        logged |= terms
    undrawn = {*LOGGED, *LEVELS, "val_ce"} - {"gnorm", "lr"}
    keys = [key for key in PANELS | logged if key in logged.keys() - undrawn]
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
        for part in (key, HELD_OUT.get(key)):
            if part in terms:
                n, y, half, *_ = zip(*map(estimate, terms[part].values()), strict=True)
                half = [h if count > 3 else 0 for count, h in zip(n, half, strict=True)]
                ys.append(y)
                gap = len(y) // 6 or 1  # between markers
                for tokens, numbers in [*terms[part].items()][::gap]:
                    if len(numbers) in (2, 3):  # too few for an interval
                        x = [tokens] * len(numbers)
                        axis.plot(x, [*numbers.values()], "_", color=styles[name]["color"])
                line, *_ = axis.errorbar(
                    [*terms[part]], y, half, markevery=gap, errorevery=gap, **styles[name]
                )
                line.set_label(name)
                if part == "ce":
                    line.set(marker="", linewidth=0.8)
    top = None
    if key in ("ce", "val_kl"):
        # These may lie above the panel: curves that end far above the others, the first tenth of
        # any curve, and ln V.
        limit = 1.5 * np.median([y[-1] for y in ys])
        top = 1.03 * max(max(y[len(y) // 10 :]) for y in ys if y[-1] <= limit)
    for level, (label, dash) in LEVELS.items():
        if key == "ce" and level in logged:
            *_, last = logged[level].values()
            ce = estimate(last).mean
            if ce > top:
                label += " (above the panel)"
            axis.axhline(ce, color="black", linestyle=dash, label=label)
    values = np.concatenate(ys)
    least = values.min()
    if key != "lr" and values.max() > 20 * least > 0:
        axis.set_yscale("log")
    bottom = max(axis.get_ylim()[0], min(least, 0))  # where error bars and margins end
    axis.set_ylim(bottom, top)
    axis.set(title=PANELS.get(key, f"term: {key}"), xlabel="nominal tokens seen", ylabel=key)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


# ----------------------------------------------------------------------------------------------
# the paper's Figures 3 and 4


def budget(logs, path):
    """Draw the distribution of d_u below d_max, and write down the share of positions below it.

    A student has three curves: early and late in training, and the teacher as its own student.
    """
    parts = {}
    for name, student in logs.items():
        records = histograms(student, "histogram")
        if any(sum(r["d_u_hist"][:-1]) for r in records):
            records = records[1:] or records  # without step 0
            tenth = -(-len(records) // 10)  # rounded up
            parts[name] = {"early": records[:tenth], "late": records[-tenth:]}
            teacher = histograms(student, "teacher")
            if len(teacher[0]["d_u_hist"]) == len(records[0]["d_u_hist"]):  # of an equal d_max
                parts[name]["teacher"] = teacher
    if not parts:
        raise UserError("no d_u below d_max; train ALRA with --histogram_every_steps=N")
    n = len(parts)
    figure, (axes,) = plt.subplots(1, n, figsize=(4.6 * n, 3.0), squeeze=False)
    lines = {"early": "--", "late": "-", "teacher": ":"}
    for axis, (name, records_of) in zip(axes, parts.items(), strict=True):
        for stage, records in records_of.items():
            counts = np.sum([r["d_u_hist"] for r in records], 0)  # [d_max + 1]
            n_below = counts[:-1].sum()
            label = (
                f"{stage}, step {records[0]['step']:,} to {records[-1]['step']:,}: "
                f"{n_below / counts.sum():.1%} below"
            )
            color = "black" if stage == "teacher" else looks(parts)[name]["color"]
            shares = counts[:-1] / max(n_below, 1)
            axis.plot(shares, label=label, color=color, linestyle=lines[stage])
        d_max = len(records_of["early"][0]["d_u_hist"]) - 1
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
        records = records or histograms(student, "teacher")
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
# a sentence


@torch.no_grad()
def sentence(text, folder, path):
    """Draw what ALRA chooses at each token of a text. The text is the forward batch.

    Left is the first checkpoint that the run has kept, right the last one.
    """
    kept = sorted(folder.glob("checkpoints/step_*/model"))
    run = read_json(folder.parent / "run.json", {"config": dict, "made_by": dict})
    overrides = configure.Config(hyper=run["config"]["hyper"]).overrides_of(folder.name)
    method = resolve(folder.name, **overrides)
    settings = default_settings(method.fn) | method.hyper
    if not kept or "d_max" not in settings:
        raise UserError(
            f"{folder}: expected a student of ALRA with checkpoints; set --checkpoint_every_steps"
        )
    teacher = run["config"]["teacher"]
    check_content(
        teacher, "teacher_sha256", content_hash(teacher), run["made_by"].get(folder.name, {})
    )
    tokenizer = load_tokenizer(str(kept[0]))
    first = tokenizer.eos_token_id if run["bos"] is None else run["bos"]
    ids = torch.tensor([first, *tokenizer.encode(text, add_special_tokens=False)])
    d_max = settings["d_max"]
    x = np.arange(len(ids) - 1)
    ticks = {
        -2.5: "token read",
        -1.5: "next in the text",
        d_max + 0.5: "teacher's mass",
        d_max + 1.5: "student's mass",
    }
    ticks |= {rank: rank + 1 for rank in range(0, d_max, 4)}
    figure, axes = plt.subplots(1, 2, figsize=(2.4 + 1.6 * len(x), 1.9 + 0.15 * d_max))
    color = looks([folder.name])[folder.name]["color"]
    logits_t = logits(teacher, ids)
    for axis, model in zip(axes, (kept[0], kept[-1]), strict=True):
        z_s = logits(model, ids)
        z_t = logits_t[:, : z_s.shape[1]]
        terms = method.fn(z_s, z_t, ids[1:], **method.hyper)
        inside = torch.arange(d_max) < terms.d_u[:, None]
        axis.bar(x, terms.d_u.numpy(), 0.94, -0.5, color=color, alpha=0.35)
        for z, y, shade in ((z_t, d_max + 0.5, "0.6"), (z_s, d_max + 1.5, color)):
            p = (z / settings["tau"]).softmax(-1).gather(1, terms.tokens)
            mass = (p * inside).sum(-1).numpy()
            bars = axis.barh(y, 0.64 * mass, left=x - 0.47, color=shade)
            axis.bar_label(bars, [f"{m:.0%}" for m in mass], fontsize=7, padding=1)
        for u in x:
            column = {-2.5: ids[u], -1.5: ids[u + 1], **dict(enumerate(terms.tokens[u]))}
            proposals = z_s[u].topk(d_max).indices
            draw_tokens(axis, u, column, z_t[u].argmax(), proposals, tokenizer)
        axis.set(
            title=f"{folder.name}, update {int(model.parent.name[5:]):,}",
            xlim=(-0.6, len(x) - 0.4),
            ylim=(d_max + 2.1, -3.2),
            xticks=(),
        )
        axis.set_yticks(list(ticks), ticks.values())
        axis.grid(False)
    figure.supxlabel(
        "coloured: local set, its mass below; bold: teacher's top-1; red: no proposal", fontsize=8
    )
    save(figure, path)


def draw_tokens(axis, x, column, top_1, proposals, tokenizer):
    """Write the tokens of a column {y: token}: `top_1` bold, those not in `proposals` red."""
    style = {"size": 7, "family": "monospace", "ha": "center", "va": "center", "parse_math": False}
    for y, token in column.items():
        word = ascii(tokenizer.decode([token]))[1:-1].replace(" ", "␣")[:12]
        cell = axis.text(x, y, word, **style)
        if y < -2:  # the token read
            continue
        if token == top_1:
            cell.set_weight("bold")
        if token not in proposals:
            cell.set_color("red")


def logits(model, ids):
    """Return a model's logits [N, V], which predict the ids after the first."""
    loaded = load_teacher(str(model), torch.float32, torch.device("cpu"))
    return loaded.hidden(ids[None, :-1])[0] @ loaded.head.T


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
    parser.add_argument("--sentence")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    out = args.out or args.folders[0]
    if args.sentence:
        sentence(args.sentence, args.folders[0], out / "sentence.png")
    else:
        logs = read_logs(args.folders)
        curves([logs], out / "curves.png")
        draw_histograms(logs, out)


if __name__ == "__main__":
    configure.run(main)
