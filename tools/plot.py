"""Pictures of runs: curves, the paper's Figures 3 and 4 (budget, anchoring), and a sentence.

    python tools/plot.py out/demo                        every term, budget, anchoring
    python tools/plot.py out/demo out/other --out=compare
    python tools/plot.py out/demo/alra --text="import os"    what ALRA chooses after each token

Pictures go into the first folder given, or into --out. Budget and anchoring need
`histogram_every_steps`. A sentence shows the first and the last checkpoint that the run has kept
(`keep_every_steps` keeps earlier ones).
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
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
from run.results import read_log
from run.scoring import check_content
from run.teacher import load_teacher

PANELS = {  # key in log.jsonl -> title; the first has a row for itself; other terms follow
    "val_ce": "held-out cross-entropy, nats/token",
    "ce": "training cross-entropy, nats/token",
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
LEVELS = {  # key in log.jsonl -> label
    "val_teacher_ce": "teacher",
    "val_unigram_ce": "unigram",
    "val_uniform_ce": "ln V",
}
UNDRAWN = {*LOGGED, *LEVELS, "val_teacher_entropy", "step"} - {"gnorm", "lr"}
READ, NEXT = -2.5, -1.5  # places of the token read and the next one; candidates are at 0, 1, ..
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


def read_logs(folders) -> dict:
    """Return run.json and log of each student in folders of runs or methods, in the paper's order.

    They are named by method, or by folder if several folders are given.
    """
    files = []
    for top in folders:
        files += [*top.glob("log.jsonl"), *sorted(top.glob("*/log.jsonl"))]
    if not files:
        raise UserError(f"{', '.join(map(str, folders))}: no log.jsonl; expected a run's folder")
    order = [*NAMES, *(file.parent.name for file in files)]
    logs = {}
    for file in sorted(files, key=lambda file: order.index(file.parent.name)):
        folder = file.parent
        name = folder.name if len(folders) == 1 else str(folder)
        run = read_json(folder.parent / "run.json", {"config": dict})
        logs[name] = run | {"log": read_log(folder)}
    return logs


def records_of(student, part) -> list[dict]:
    """Return the records of a part of a student's log, "histogram" or "teacher" (`read_log`)."""
    return [record[part] for record in student["log"] if part in record]


def looks(names) -> dict:
    """Return name -> colour, line and marker. The paper's methods always have their own."""
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


# --- curves


def read_curves(seeds) -> pd.DataFrame:
    """Return all logged numbers [student, tokens, seed; key].

    seeds  what `read_logs` returns, for each seed
    """
    parts = []
    for seed, logs in enumerate(seeds):
        for name, student in logs.items():
            part = pd.DataFrame(student["log"]).select_dtypes("number")
            per_step = student["config"]["batch_rows"] * student["config"]["seq_len"]
            parts.append(part.assign(tokens=part["step"] * per_step, name=name, seed=seed))
    keys = ["name", "tokens", "seed"]
    return pd.concat(parts).groupby(keys, sort=False).last()  # a step's last record counts


def curves(seeds, path):
    """Draw every term of every student as means over seeds.

    A term that was logged once has no panel, unless all were.
    """
    numbers = read_curves(seeds)
    n_points = numbers.groupby(["name", "seed"]).count().max().drop(UNDRAWN, errors="ignore")
    drawn = n_points.index[n_points >= min(2, n_points.max())]
    keys = [key for key in PANELS | dict.fromkeys(drawn) if key in drawn]
    if not keys:
        raise UserError(f"no {path}: no term is logged yet")
    n_rows = (len(keys) + 4) // 3  # the first panel has a row for itself
    figure = plt.figure(figsize=(13, 2.7 * n_rows))
    for i, key in enumerate(keys):
        axis = figure.add_subplot(n_rows, 3, i + 3 if i else (1, 3))
        draw_panel(axis, key, numbers)
        if i == 0:
            figure.legend(loc="outside right upper")
    save(figure, path)


def draw_panel(axis, key, numbers):
    """Draw one term of all students, with intervals over seeds, or their range if they are few.

    The panel shows the curves; a reference CE that lies outside is in the legend alone.
    """
    styles = looks(numbers.index.unique("name"))
    lows = []
    highs = []
    ends = []
    for name, by_seed in numbers[key].groupby("name", sort=False):
        values = by_seed.droplevel("name").unstack("seed").dropna(how="all")  # [tokens, seeds]
        e = estimate(values.T)
        if e.empty:
            continue
        few = e["n"] < 4
        low = (e["mean"] - e["half"]).where(~few, values.min(axis=1))
        high = (e["mean"] + e["half"]).where(~few, values.max(axis=1))
        axis.plot(e["mean"], markevery=len(e) // 6 or 1, label=name, **styles[name])
        axis.fill_between(e.index, low, high, color=styles[name]["color"], alpha=0.15, linewidth=0)
        late = e["mean"][len(e) // 10 :]  # the first updates may lie above the panel
        lows.append(late.min())
        highs.append(late.max())
        ends.append(late.iloc[-1])
    if key != "lr" and max(highs) > 20 * min(lows) > 0:
        axis.set_yscale("log")
    elif key.endswith(("ce", "kl")):
        # so may a student that ends far above the others
        top = max(high for high, end in zip(highs, ends, strict=True) if end <= 1.5 * min(ends))
        margin = 0.05 * (top - min(lows)) or 0.1
        axis.set_ylim(min(lows) - margin, top + margin)
    for level, label in LEVELS.items():
        if key == "val_ce" and level in numbers:
            ce = numbers[level].dropna().groupby("tokens").mean().iloc[-1]
            axis.plot([], label=f"{label}: {ce:.2f}", color="none")
    axis.set(title=PANELS.get(key, f"term: {key}"), xlabel="nominal tokens seen", ylabel=key)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


# --- the paper's Figures 3 and 4


def budget(logs, path):
    """Draw the distribution of d_u below d_max, early and late, and of the teacher as student."""
    stages = {}  # student -> stage -> records
    for name, student in logs.items():
        records = records_of(student, "histogram")
        if any(sum(r["d_u_hist"][:-1]) for r in records):
            records = records[1:] or records  # the first is of untrained weights
            tenth = -(-len(records) // 10)  # rounded up
            stages[name] = {"early": records[:tenth], "late": records[-tenth:]}
            teacher = records_of(student, "teacher")
            if teacher and len(teacher[0]["d_u_hist"]) == len(records[0]["d_u_hist"]):
                stages[name]["teacher"] = teacher
    if not stages:
        raise UserError("no d_u below d_max; train ALRA with --histogram_every_steps=N")
    n = len(stages)
    figure, (axes,) = plt.subplots(1, n, figsize=(4.6 * n, 3.0), squeeze=False)
    for axis, (name, by_stage) in zip(axes, stages.items(), strict=True):
        for (stage, records), line in zip(by_stage.items(), ("--", "-", ":"), strict=False):
            counts = np.sum([r["d_u_hist"] for r in records], 0)  # [d_max + 1]
            n_below = counts[:-1].sum()
            steps = f"step {records[0]['step']:,} to {records[-1]['step']:,}"
            label = f"{stage}, {steps}: {n_below / counts.sum():.1%} below"
            color = "black" if stage == "teacher" else looks(stages)[name]["color"]
            axis.plot(counts[:-1] / max(n_below, 1), line, label=label, color=color)
        axis.set(
            title=f"{name}: positions with $d_u$ < $d_{{max}}$ = {len(counts) - 1}",
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
    labels = {"p_label": "label", "p_top1": "teacher's top-1", "agree": "top-1 is the label"}
    for (key, label), color in zip(labels.items(), ("0.5", "black", "tab:blue"), strict=True):
        if key != "agree":
            counts = values[f"{key}_hist"].sum(0)
            height = counts / counts.sum() * len(counts)
            edges = np.linspace(0, 1, len(counts) + 1)
            density.stairs(height, edges, label=label, color=color, linewidth=1.5)
        running = (n * values[key]).cumsum() / n.cumsum()
        label += f", running mean: {running[-1]:.3f}"
        means.plot(values["step"], values[key], ".", color=color, markersize=4, alpha=0.5)
        means.plot(values["step"], running, color=color, label=label)
    title = f"density over {n.sum():,} positions"
    density.set(title=title, xlabel="teacher's probability", ylabel="density")
    means.set(title="means over positions", xlabel="step [updates]", ylim=(0, 1.3))
    density.legend()
    means.legend()
    save(figure, path)


def draw_histograms(logs, out) -> list[str]:
    """Draw Figures 3 and 4 as far as the logs allow. Return the names of those drawn."""
    drawn = []
    for draw in (budget, anchoring):
        try:
            draw(logs, out / f"{draw.__name__}.png")
            drawn.append(draw.__name__)
        except UserError as error:
            print(f"no {draw.__name__}.png: {error}", file=sys.stderr)
    return drawn


# --- a sentence


@torch.no_grad()
def sentence(text, folder, path):
    """Draw what ALRA chooses after each token of a text. The text is the forward batch.

    Left is the first checkpoint that the run has kept, right the last one.
    """
    kept = sorted(folder.glob("checkpoints/step_*/model"))
    run = read_json(folder.parent / "run.json", {"config": dict, "made_by": dict})
    cfg = configure.Config(**run["config"])
    method = resolve(folder.name, **cfg.overrides_of(folder.name))
    settings = default_settings(method.fn) | method.hyper
    if not kept or "d_max" not in settings:
        problem = "expected a student of ALRA with checkpoints; set --checkpoint_every_steps"
        raise UserError(f"{folder}: {problem}")
    record = run["made_by"].get(folder.name, {})
    check_content(cfg.teacher, "teacher_sha256", content_hash(cfg.teacher), record)
    tokenizer = load_tokenizer(str(kept[0]))
    first = tokenizer.eos_token_id if run["bos"] is None else run["bos"]
    ids = torch.tensor([first, *tokenizer.encode(text, add_special_tokens=False)])
    d_max = settings["d_max"]
    x = np.arange(len(ids) - 1)
    figure, axes = plt.subplots(1, 2, figsize=(2.4 + 1.6 * len(x), 1.9 + 0.15 * d_max))
    color = looks([folder.name])[folder.name]["color"]
    logits_t = logits(cfg.teacher, ids)
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
            column = {READ: ids[u], NEXT: ids[u + 1], **dict(enumerate(terms.tokens[u]))}
            for y, token in column.items():
                word = ascii(tokenizer.decode([token]))[1:-1].replace(" ", "␣")[:12]
                is_new = y != READ and token not in z_s[u].topk(d_max).indices
                is_top_1 = y != READ and token == z_t[u].argmax()
                look = {"color": "red" if is_new else "black", "family": "monospace", "size": 7}
                look["weight"] = "bold" if is_top_1 else "normal"
                axis.text(u, y, word, ha="center", va="center", parse_math=False, **look)
        step = int(model.parent.name.removeprefix("step_"))
        limits = {"xlim": (-0.6, len(x) - 0.4), "ylim": (d_max + 2.1, -3.2)}
        axis.set(title=f"{folder.name}, update {step:,}", xticks=(), **limits)
        ticks = {READ: "token read", NEXT: "next in the text"}
        ticks |= {d_max + 0.5: "teacher's mass", d_max + 1.5: "student's mass"}
        ticks |= {rank: rank + 1 for rank in range(0, d_max, 4)}
        axis.set_yticks(list(ticks), ticks.values())
        axis.grid(False)
    legend = "coloured: local set, its mass below; bold: teacher's top-1; red: not proposed"
    figure.supxlabel(legend, fontsize=8)
    save(figure, path)


def logits(model, ids):
    """Return a model's logits [N, V], which predict the ids after the first."""
    loaded = load_teacher(str(model), torch.float32, torch.device("cpu"))
    return loaded.hidden(ids[None, :-1])[0] @ loaded.head.T


def main(argv):
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text")
    args = parser.parse_args(argv)
    out = args.out or args.folders[0]
    if args.text:
        sentence(args.text, args.folders[0], out / "sentence.png")
    else:
        logs = read_logs(args.folders)
        curves([logs], out / "curves.png")
        draw_histograms(logs, out)


if __name__ == "__main__":
    configure.run(main)
