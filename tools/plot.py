"""Pictures of runs: curves, the paper's Figures 3 and 4 (budget, anchoring), and a sentence.

    python tools/plot.py out/demo                        every term, budget, anchoring
    python tools/plot.py out/demo out/other --out=compare
    python tools/plot.py out/demo/alra --text="import os"    what ALRA chooses at three tokens

Pictures go into the first folder given, or into --out. Budget and anchoring need
`histogram_every_steps`. A sentence shows the last three tokens of a text. The data of all its
tokens go into sentence.jsonl beside the picture; without --text the picture is drawn from them.
"""

import sys
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from pathlib import Path

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure


def arguments(argv) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text")
    return parser.parse_args(argv)


if __name__ == "__main__":
    configure.check_flags(arguments)

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from lib.errors import UserError
from lib.files import read_lines, write_lines
from lib.head import Head
from losses import default_settings, resolve
from run.log import LOGGED
from run.paper_numbers import NAMES
from run.provenance import content_hash
from run.results import read_log, students_of
from run.saved_models import check_content, open_checkpoint
from run.teacher import load_model

# key in log.jsonl, title and unit; the first has a row for itself; other terms follow
_PANELS = """\
val_ce     held-out cross-entropy, nats/token
ce         training cross-entropy, nats/token
loss       training loss, nats/token
val_kl     held-out KL to the teacher, nats/token
val_agree  held-out top-1 agreement with the teacher, share
gnorm      gradient norm before clipping
lr         learning rate
kd         each method's distillation term, nats/token
mass       ALRA: mass term, nats/token
local      ALRA: local term, nats/token
rest       ALRA: rest term, nats/token
pair       ALRA: pair term, nats/token
d_u        ALRA: mean local budget d_u, tokens
support    ALRA: mean effective support, tokens
"""
PANELS = dict(line.split(maxsplit=1) for line in _PANELS.splitlines())
REFERENCES = {  # key in log.jsonl -> label
    "val_teacher_ce": "teacher",
    "val_unigram_ce": "unigram",
    "val_uniform_ce": "ln V",
}
N_DRAWN = 8  # students; more lines than these cannot be told apart
COMPARED = ("pretrain", "vanilla_kd", "alra")  # are drawn in any case
UNDRAWN = {*LOGGED, *REFERENCES, "val_teacher_entropy", "checkpoint_sec"} - {*PANELS}
plt.rcParams |= {
    "backend": "Agg",  # files only, no window
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.frameon": False,
    "patch.linewidth": 0.3,
    "axes.grid": True,
    "axes.formatter.limits": (-3, 4),
    "text.parse_math": False,  # a name or a token may have dollar signs
}


def read_logs(folders) -> dict:
    """Return the log of each student in folders of runs or methods.

    They are named by method, or by folder if several folders are given.
    """
    logs = {}
    for folder in students_of(folders, read_log):
        log = read_log(folder)
        if not log:
            raise UserError(f"{folder}: no log.jsonl with entries; expected a run's folder")
        logs[folder.name if len(folders) == 1 else f"{folder}"] = log
    return logs


def looks(names) -> dict:
    """Return name -> colour, line and marker. The paper's methods always have their own.

    Other names take those of the paper's methods that are not among `names`, then further ones.
    """
    others = iter([name for name in names if name not in NAMES])
    slots = [name if name in names else next(others, None) for name in NAMES]
    styles = {}
    for i, name in enumerate([*slots, *others]):
        styles[name] = {
            "label": name,
            "color": plt.get_cmap("tab20")(i * 2 % 20 + i // 10 % 2),  # light ones from the 11th on
            "linestyle": ("-", "--", "-.", ":")[(i + i // 20) % 4],
            "marker": "os^vDPX*h<>pd"[i % 13],
        }
    return styles


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


# --- curves


def curves(seeds, path):
    """Draw every term as means over seeds, of at most `N_DRAWN` students.

    seeds  what `read_logs` returns, for each seed
    """
    parts = {}
    for seed, logs in enumerate(seeds):
        for name, entries in logs.items():
            log = pd.DataFrame(entries)
            tokens = log["step"] * (log.get("nominal_tokens", np.nan) / log["step"]).max()
            # a step's last entry counts
            parts[name, seed] = log.select_dtypes("number").groupby(tokens).last()
    numbers = pd.concat(parts, names=["name", "seed", "tokens"])
    names = by_interest(numbers)
    numbers = numbers[numbers.index.isin(names[:N_DRAWN], level="name")]
    drawn = numbers.dropna(axis=1, how="all").drop(columns=UNDRAWN, errors="ignore")
    keys = [key for key in {**PANELS, **drawn} if key in drawn]
    n_rows = (len(keys) + 4) // 3  # the first panel has a row for itself
    figure = plt.figure(figsize=(13, 2.7 * n_rows))
    for i, key in enumerate(keys):
        draw_panel(figure.add_subplot(n_rows, 3, i + 3 if i else (1, 3)), key, numbers)
    if len(names) > N_DRAWN:
        figure.axes[0].plot([], label=f"not drawn: {len(names) - N_DRAWN}", color="none")
    # of all panels, as a student that has stopped may be missing in the first
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(handles=lines.values(), loc="outside right upper")
    save(figure, path)


def by_interest(numbers) -> list[str]:
    """Return the students: COMPARED, then by rising held-out CE, METHOD@LABEL last."""
    ces = numbers.get("val_ce", numbers["step"]).groupby(["name", "seed"]).last()
    best_first = ces.groupby("name").mean().sort_values().index
    return sorted(best_first, key=lambda name: (name not in COMPARED, "@" in name))


def draw_panel(axis, key, numbers):
    """Draw one term of all students: its mean over seeds, and their range.

    A panel of CE or KL ends at 1.7 times the lowest one: the first updates, and a student far
    above the others, may lie above. Reference CEs are numbers in the legend, and dotted lines if
    the panel reaches them.
    """
    points = numbers[key].dropna().groupby(["name", "tokens"]).agg(["mean", "min", "max"])
    for name, look in looks(numbers.index.unique("name")).items():
        if name in points.index:
            line = points.loc[name]
            axis.plot(line["mean"], markevery=len(line) // 6 or 1, **look)
            axis.fill_between(line.index, line["min"], line["max"], color=look["color"], alpha=0.15)
    if key in ("val_ce", "ce", "val_kl"):
        low = points["mean"].min()
        axis.set_ylim(0.97 * low, 1.01 * min(1.7 * low, points["mean"].max()))
    if key == "val_ce":
        at_the_right = {"transform": axis.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        for name, label in REFERENCES.items():
            if name in numbers:
                ces = numbers[name]
                for ce in ces.groupby(ces.round(2)).max():  # runs may have several teachers
                    axis.axhline(ce, linestyle=":", color="black", label=f"{label}: {ce:.2f}")
                    axis.text(0.99, ce, label, clip_on=True, **at_the_right)
    title, *unit = PANELS.get(key, f"term: {key}").split(", ")
    if points.index.unique("tokens").size == 1:
        title += " (at one step)"
    axis.set(title=title, xlabel="nominal tokens seen", ylabel=", ".join([key, *unit]))


# --- the paper's Figures 3 and 4


def budgets_of(log, part, key="d_u_hist") -> np.ndarray:
    """Return the histograms of d_u in a part of a student's log, [updates, d_max + 1]."""
    return np.array([entry[part][key] for entry in log if key in entry.get(part, {})])


def budget(logs) -> dict:
    """Return the distribution of d_u below d_max by student: early, late, the teacher as student.

    A fixed budget has none. Panels are title -> (label of the y-axis, lines), as for `anchoring`.
    """
    panels = {}
    for name, log in logs.items():
        own = budgets_of(log, "histogram")
        if own[..., :-1].any():
            own = own[1:] if len(own) > 1 else own  # the first is of untrained weights
            tenth = -(-len(own) // 10)  # rounded up
            stages = {"early": own[:tenth], "late": own[-tenth:]}
            note = ""
            if len(own) == 1:
                stages = {"student": own}
                note = "\none histogram: too few to compare early and late"
            teacher = budgets_of(log, "histogram", "teacher_d_u_hist")
            if not len(teacher):  # an older run has one for all students, of alra's settings
                teacher = budgets_of(log, "teacher")
            if teacher.shape[1:] == own.shape[1:]:
                stages["teacher"] = teacher
            lines = {}
            for stage, histograms in stages.items():
                counts = histograms.sum(0)
                below = counts[:-1].sum()
                lines[f"{stage}: {below / counts.sum():.1%} below"] = counts[:-1] / max(below, 1)
            lines = pd.DataFrame(lines).rename_axis(f"local budget d_u, tokens{note}")
            panels[name] = f"share of positions with d_u < {len(counts) - 1}", lines
    return panels


def anchoring(logs) -> dict:
    """Return the teacher's probability of the label and of its own top-1, and their agreement.

    As a density, and as means over all positions up to an update.
    """
    logged = [[x["teacher"] for x in log if "teacher" in x] for log in logs.values()]
    r = pd.DataFrame(max(logged, key=len))
    if r.empty:
        return {}
    r = r.set_index("step")
    n = r["n"].cumsum()
    labels = {"p_label": "label", "p_top1": "teacher's top-1", "agree": "top-1 is the label"}
    densities = {}
    means = {}
    for key, label in labels.items():
        running = (r["n"] * r[key]).cumsum() / n
        means[f"{label}: {running.iloc[-1]:.3f}"] = running
        if key != "agree":
            counts = np.sum([*r[f"{key}_hist"]], 0)
            densities[label] = counts / counts.mean()
    middles = np.arange(0.5, len(counts)) / len(counts)
    density = pd.DataFrame(densities, middles).rename_axis("teacher's probability")
    return {
        f"{n.iloc[-1]:,} positions": ("density", density),
        "means up to an update": ("probability or share", pd.DataFrame(means)),
    }


def draw_histograms(logs, out) -> list[str]:
    """Draw Figures 3 and 4 as far as the logs allow. Return the names of those drawn."""
    drawn = []
    for name, panels in {"budget": budget(logs), "anchoring": anchoring(logs)}.items():
        if panels:
            n_columns = min(len(panels), 3)
            n_rows = -(-len(panels) // 3)
            figure = plt.figure(figsize=(5.2 * n_columns, 3.4 * n_rows))
            for i, (title, (label, lines)) in enumerate(panels.items(), 1):
                axis = figure.add_subplot(n_rows, n_columns, i)
                # a single point has no line
                marker = "o" * (len(lines) == 1)
                lines.plot(ax=axis, title=title[-40:], ylabel=label, marker=marker)
            save(figure, out / f"{name}.png")
            drawn.append(name)
    return drawn


# --- a sentence


@torch.no_grad()
def choices(text, folder) -> list[dict]:
    """Return what ALRA chooses after each token of a text. The text is the forward batch.

    An entry for each token: the text before it, the token that came next, the words of its
    candidates and which of them came next, the probabilities that teacher and student give them,
    how many are local, and whether the first was an anchor that the student had not proposed.
    """
    c = open_checkpoint(str(folder))
    hyper = c.run["made_by"]["hyper"] if c.run else {}
    if "d_max" not in hyper:
        raise UserError(f"{folder}: expected a student of ALRA")
    teacher = c.run["config"]["teacher"]
    check_content(teacher, "teacher_sha256", content_hash(teacher), c.run)
    ids = torch.tensor(c.encode(text))
    models = load_model(c.folder), load_model(teacher)
    heads = [Head(model.hidden(ids[None, :-1]), model.head) for model in models]
    z_s, z_t = (head.logits()[:, : c.n_vocab] for head in heads)
    fn = resolve(c.run["method"]).fn
    terms = fn(z_s, z_t, ids[1:], **{key: hyper[key] for key in default_settings(fn)})
    p_s, p_t = ((z / hyper["tau"]).softmax(-1) for z in (z_s, z_t))
    decode = c.tokenizer.decode
    entries = []
    for u, candidates in enumerate(terms.tokens):
        proposed = z_s[u].topk(len(candidates)).indices
        entries.append(
            {
                "before": decode(ids[1 : u + 1]),
                "next": ascii(decode([ids[u + 1]])),
                "candidates": [ascii(decode([token])) for token in candidates],
                "is_next": (candidates == ids[u + 1]).tolist(),
                "teacher": p_t[u, candidates].tolist(),
                "student": p_s[u, candidates].tolist(),
                "d_u": int(terms.d_u[u]),
                "added": [bool(token not in proposed) for token in candidates],
            }
        )
    return entries


def sentence(entries, path):
    """Draw the last three entries of `choices`, and write all of them beside the picture."""
    shown = entries[-3:]
    figure, axes = plt.subplots(1, len(shown), figsize=(10, 5.5), squeeze=False)
    for axis, entry in zip(axes[0], shown, strict=True):
        bars = pd.DataFrame(entry)[["teacher", "student"]]
        bars.plot.barh(ax=axis, width=0.8, legend=False)
        d_u = entry["d_u"]
        shade = axis.axhspan(-0.5, d_u - 0.5, color="lemonchiffon", zorder=0)
        words = [word[:11] for word in entry["candidates"]]
        which = ", no candidate"
        for i in np.flatnonzero(entry["is_next"]):
            words[i] = f"→ {words[i]}"
            which = ""
        axis.set_yticks(range(len(words)), words, size=7)
        for i in np.flatnonzero(entry["added"]):
            axis.get_yticklabels()[i].set_color("red")
        axis.invert_yaxis()
        axis.grid(False)
        axis.locator_params(axis="x", nbins=5)
        before = ascii(entry["before"])
        if len(before) > 22:
            before = f"..{before[-21:]}"
        axis.set_title(
            f"after {before}\ncame next: {entry['next'][:20]}{which}\n"
            f"local set: {d_u} of {len(words)} candidates"
        )
        masses = bars[:d_u].sum()
        axis.set_xlabel(
            f"probability\nmass of the local set:\n"
            f"teacher {masses['teacher']:.0%}, student {masses['student']:.0%}"
        )
    figure.legend(
        [*axis.containers, shade], [*bars, "local set"], loc="outside upper center", ncols=3
    )
    figure.supxlabel(
        "red: the anchor, where the student had not proposed it; →: the token that came next",
        size=10,
    )
    save(figure, path)
    write_lines(path.with_suffix(".jsonl"), entries)


def main(argv):
    args = arguments(argv)
    out = args.out or args.folders[0]
    if args.text:
        entries = choices(args.text, args.folders[0])
    else:
        logs = read_logs(args.folders)
        curves([logs], out / "curves.png")
        draw_histograms(logs, out)
        # older ones lack some of these keys
        entries = read_lines(out / "sentence.jsonl", ["next", "is_next", "added"])
    if entries:
        sentence(entries, out / "sentence.png")


if __name__ == "__main__":
    configure.run(main)
