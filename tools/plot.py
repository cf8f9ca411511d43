"""Pictures of runs: curves, the paper's Figures 3 and 4 (budget, anchoring), and a sentence.

    python tools/plot.py out/demo                        every term, budget, anchoring
    python tools/plot.py out/demo out/other --out=compare
    python tools/plot.py out/demo/alra --text="import os"    what ALRA chooses after each token

Pictures go into the first folder given, or into --out. Budget and anchoring need
`histogram_every_steps`. A sentence shows the first and the last checkpoint that the run has kept
(`keep_every_steps` keeps earlier ones). Its data go into sentence.jsonl beside the picture, and
without --text the picture is drawn from them.
"""

import sys
from argparse import ArgumentParser, RawTextHelpFormatter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.errors import UserError
from lib.files import read_json, read_lines, write_lines, writing
from lib.hf import load_tokenizer
from lib.metrics import logits_of
from losses import default_settings, resolve
from run.identity import content_hash
from run.methods import LOGGED
from run.paper import NAMES
from run.results import read_log, training_facts
from run.scoring import check_content
from run.teacher import load_teacher

PANELS = {  # key in log.jsonl -> title; the first has a row for itself; other terms follow
    "val_ce": "held-out cross-entropy, nats/token",
    "ce": "training cross-entropy, nats/token",
    "loss": "training loss, nats/token",
    "val_kl": "held-out KL to the teacher, nats/token",
    "val_agree": "held-out top-1 agreement with teacher",
    "gnorm": "gradient norm before clipping",
    "lr": "learning rate",
    "kd": "each method's distillation term, nats/token",
    "mass": "ALRA: mass term, nats/token",
    "local": "ALRA: local term, nats/token",
    "rest": "ALRA: rest term, nats/token",
    "pair": "ALRA: pair term, nats/token",
    "d_u": "ALRA: mean local budget d_u, tokens",
    "support": "ALRA: mean effective support, tokens",
}
LEVELS = {  # key in log.jsonl -> label
    "val_teacher_ce": "teacher",
    "val_unigram_ce": "unigram",
    "val_uniform_ce": "ln V",
}
UNDRAWN = {*LOGGED, *LEVELS, "val_teacher_entropy"} - {"gnorm", "lr"}
plt.switch_backend("Agg")  # files only, no window
plt.rcParams |= {
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.frameon": False,
    "axes.grid": True,
    "patch.linewidth": 0.3,
    "text.parse_math": False,  # a name or a token may have dollar signs
}


def read_logs(folders) -> dict:
    """Return run.json and log of each student in folders of runs or methods.

    They are named by method, or by folder if several folders are given.
    """
    kinds = {"config": {"batch_rows": int, "seq_len": int}}
    logs = {}
    for top in folders:
        for file in [*top.glob("log.jsonl"), *sorted(top.glob("*/log.jsonl"))]:
            folder = file.parent
            name = folder.name if len(folders) == 1 else str(folder)
            log = read_log(folder)
            if log:
                logs[name] = read_json(folder.parent / "run.json", kinds) | {"log": log}
    if not logs:
        raise UserError(
            f"{', '.join(map(str, folders))}: no log.jsonl; expected a run's folder with records"
        )
    return logs


def records_of(student, part) -> list[dict]:
    """Return the records of a part of a student's log, "histogram" or "teacher" (`read_log`)."""
    return [record[part] for record in student["log"] if part in record]


def looks(names) -> dict:
    """Return name -> colour, line and marker. The paper's methods always have their own."""
    styles = {}
    for i, name in enumerate(dict.fromkeys([*NAMES, *names])):
        styles[name] = {
            "label": name,
            "color": plt.get_cmap("tab20")(i * 2 % 20 + i // 10 % 2),  # light ones from the 11th on
            "linestyle": ("-", "--", "-.", ":")[(i + i // 20) % 4],
            "marker": "os^vDPX*h<>pd"[i % 13],
        }
    return styles


def save(figure, path):
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


# --- curves


def curves(seeds, path):
    """Draw every term of every student as means over seeds.

    A term that was logged once has no panel, unless all were.

    seeds  what `read_logs` returns, for each seed
    """
    parts = {}
    for seed, logs in enumerate(seeds):
        for name, student in logs.items():
            log = pd.DataFrame(student["log"])
            config = student["config"]
            tokens = log["step"] * config["batch_rows"] * config["seq_len"]
            # a step's last record counts
            parts[name, seed] = log.select_dtypes("number").groupby(tokens).last()
    numbers = pd.concat(parts, names=["name", "seed", "tokens"])
    n_points = numbers.groupby(["name", "seed"]).count().max().drop(UNDRAWN, errors="ignore")
    drawn = n_points[n_points >= min(2, n_points.max())]
    keys = [key for key in {**PANELS, **drawn} if key in drawn]
    n_rows = (len(keys) + 4) // 3  # the first panel has a row for itself
    figure = plt.figure(figsize=(13, 2.7 * n_rows))
    for i, key in enumerate(keys):
        draw_panel(figure.add_subplot(n_rows, 3, i + 3 if i else (1, 3)), key, numbers)
    # of all panels, as a student that has stopped may be missing in the first
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}
    figure.legend(handles=lines.values(), loc="outside right upper")
    save(figure, path)


def draw_panel(axis, key, numbers):
    """Draw one term of all students: its mean over seeds, and their range.

    A panel of CE or KL ends at 1.7 times the lowest one: the first updates, and a student far
    above the others, may lie above. Reference CEs are numbers in the legend.
    """
    points = numbers[key].dropna().groupby(["name", "tokens"]).agg(["mean", "min", "max"])
    for name, look in looks(numbers.index.unique("name")).items():
        if name in points.index:
            line = points.loc[name]
            axis.plot(line["mean"], markevery=len(line) // 6 or 1, **look)
            axis.fill_between(line.index, line["min"], line["max"], color=look["color"], alpha=0.15)
    if key.endswith(("ce", "kl")):
        low = points["mean"].min()
        axis.set_ylim(0.99 * low, 1.01 * min(1.7 * low, points["mean"].max()))
    if key == "val_ce":
        for level, label in LEVELS.items():
            if level in numbers:
                axis.plot([], label=f"{label}: {numbers[level].max():.2f}", color="none")
    axis.set(title=PANELS.get(key, f"term: {key}"), xlabel="nominal tokens seen", ylabel=key)


# --- the paper's Figures 3 and 4


def budget(logs) -> dict:
    """Return the distribution of d_u below d_max by student: early, late, the teacher as student.

    A fixed budget has none.
    """
    panels = {}
    for name, student in logs.items():
        records = records_of(student, "histogram")
        if any(sum(r["d_u_hist"][:-1]) for r in records):
            records = records[1:] or records  # the first is of untrained weights
            tenth = -(-len(records) // 10)  # rounded up
            stages = {"early": records[:tenth], "late": records[-tenth:]}
            teacher = records_of(student, "teacher")
            if teacher and len(teacher[0]["d_u_hist"]) == len(records[0]["d_u_hist"]):
                stages["teacher"] = teacher
            lines = {}
            for stage, of_stage in stages.items():
                counts = np.sum([r["d_u_hist"] for r in of_stage], 0)  # [d_max + 1]
                below = counts[:-1].sum()
                lines[f"{stage}: {below / counts.sum():.1%} below"] = counts[:-1] / max(below, 1)
            title = f"{name}: share of the positions with d_u < d_max = {len(counts) - 1}"
            panels[title] = pd.DataFrame(lines).rename_axis("local budget d_u [tokens]")
    return panels


def anchoring(logs) -> dict:
    """Return the teacher's probability of the label and of its own top-1, and their agreement.

    As a density, and as means over all positions up to an update.
    """
    records = []
    for student in logs.values():
        records = records or records_of(student, "teacher")
    if not records:
        return {}
    r = pd.DataFrame(records).set_index("step")
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
    middles = (np.arange(len(counts)) + 0.5) / len(counts)
    density = pd.DataFrame(densities, middles).rename_axis("teacher's probability")
    return {
        f"density over {n.iloc[-1]:,} positions": density,
        "running means": pd.DataFrame(means),
    }


def draw_histograms(logs, out) -> list[str]:
    """Draw Figures 3 and 4 as far as the logs allow. Return the names of those drawn."""
    drawn = []
    for name, panels in {"budget": budget(logs), "anchoring": anchoring(logs)}.items():
        if panels:
            figure = plt.figure(figsize=(5.2 * len(panels), 3.4))
            for i, (title, lines) in enumerate(panels.items(), 1):
                lines.plot(ax=figure.add_subplot(1, len(panels), i), title=title)
            save(figure, out / f"{name}.png")
            drawn.append(name)
        else:
            print(
                f"no {name}.png: no data; train ALRA with --histogram_every_steps=N",
                file=sys.stderr,
            )
    return drawn


# --- a sentence


@torch.no_grad()
def choices(text, folder) -> list[dict]:
    """Return what ALRA chooses after each token of a text. The text is the forward batch.

    A record each for the first and the last checkpoint that the run has kept. A column has words
    and their shades: the next token, the candidates, and the masses of the local set.
    """
    # step 0 has untrained weights
    kept = sorted(folder.glob("checkpoints/step_*[1-9]*/model"))
    settings = default_settings(resolve(folder.name).fn)
    if not kept or "d_max" not in settings:
        raise UserError(
            f"{folder}: expected a student of ALRA with checkpoints; set --checkpoint_every_steps"
        )
    facts = training_facts(kept[0])
    cfg = configure.Config(**facts["config"])
    method = resolve(folder.name, **cfg.overrides_of(folder.name))
    tau = (settings | method.hyper)["tau"]
    check_content(cfg.teacher, "teacher_sha256", content_hash(cfg.teacher), facts["made_by"])
    tokenizer = load_tokenizer(str(kept[0]))
    first = tokenizer.eos_token_id if facts["bos"] is None else facts["bos"]
    ids = torch.tensor([first, *tokenizer.encode(text, add_special_tokens=False)])
    records = []
    for model in (kept[0], kept[-1]):
        z_s = logits(model, ids)
        z_t = logits(cfg.teacher, ids)[:, : z_s.shape[1]]
        terms = method.fn(z_s, z_t, ids[1:], **method.hyper)
        columns = []
        for u, candidates in enumerate(terms.tokens):
            local = candidates[: int(terms.d_u[u])]
            proposed = z_s[u].topk(len(candidates)).indices
            column = []
            for token in (ids[u + 1], *candidates):
                word = ascii(tokenizer.decode([token]))[:14]
                shade = "khaki" if token in local else "white"
                column.append((word, shade if token in proposed else "salmon"))
            for z in (z_t, z_s):
                mass = (z[u] / tau).softmax(-1)[local].sum()
                column.append((f"{mass:.0%}", "white"))
            columns.append(column)
        records.append({"title": f"{folder.name}, {model.parent.name}", "columns": columns})
    return records


def logits(model, ids):
    """Return a model's logits [N, V], which predict the ids after the first."""
    loaded = load_teacher(str(model), torch.float32, torch.device("cpu"))
    return logits_of(loaded.hidden(ids[None, :-1])[0], loaded.head)


def sentence(records, path):
    """Draw a panel for each record of `choices`, and write the records beside the picture."""
    n, n_rows, _ = np.shape(records[0]["columns"])
    labels = ["next in the text", *range(1, n_rows - 2), "teacher's mass", "student's mass"]
    figure, axes = plt.subplots(1, 2, figsize=(2.4 + 1.6 * n, 1 + 0.2 * n_rows))
    for axis, record in zip(axes, records, strict=True):
        words, shades = np.array(record["columns"]).T  # [n_rows, n]
        table = axis.table(words, shades, "center", rowLabels=labels, bbox=(0, 0, 1, 1))
        table.auto_set_font_size(False)
        axis.set_title(record["title"])
        axis.set_axis_off()
    figure.supxlabel("yellow: local set, its masses below; red: not proposed by the student")
    save(figure, path)
    write_lines(path.with_suffix(".jsonl"), records)


def main(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text")
    args = parser.parse_args(argv)
    out = args.out or args.folders[0]
    records = read_lines(out / "sentence.jsonl")
    if args.text:
        records = choices(args.text, args.folders[0])
    else:
        logs = read_logs(args.folders)
        curves([logs], out / "curves.png")
        draw_histograms(logs, out)
    if records:
        sentence(records, out / "sentence.png")


if __name__ == "__main__":
    configure.run(main)
