"""Curves, and the paper's Figures 3 and 4 (budget, anchoring), from a run's logs, as PNG.

    python tools/plot.py out/demo                         every term of every method; budget and anchoring where logged
    python tools/plot.py out/alra_200m/alra out/other --out=compare
    python tools/plot.py --sentence "import os" out/demo/alra       ALRA's choices at each token, early and late in training

Pictures go into the first folder given. Their numbers are in the logs: log.jsonl, histograms.jsonl, teacher.jsonl. A method
of the paper looks the same in every figure.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter, MaxNLocator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import configure
from lib.errors import UserError, require
from lib.files import read_json, read_lines
from lib.hf import load_tokenizer
from lib.stats import estimate
from losses import default_settings, resolve
from run.paper import NAMES
from run.teacher import load_teacher

NATS = "nats per token"
# What a record of log.jsonl has beside an objective's terms. Those of validation begin with val_.
LOGGED = ("step", "nominal_tokens", "valid_tokens", "lr", "gnorm", "tok_per_sec", "mfu", "mem_gib", "eta_sec", "time")
PANELS = {  # key in log.jsonl -> title, unit; terms of other objectives follow
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
LEVELS = {"val_teacher_ce": ("teacher", ":"), "val_teacher_entropy": ("teacher's entropy", "-."),
          "val_unigram_ce": ("unigram", "--"), "val_uniform_ce": ("ln V", (0, (1, 4)))}  # fmt: skip
Points = dict[str, dict[str, list[tuple]]]  # curve's name -> key of the log -> [(nominal tokens, value[, half])]

plt.rcParams.update({"font.size": 9, "axes.titlesize": 9.5, "legend.frameon": False, "axes.grid": True, "grid.alpha": 0.25,
                     "axes.spines.top": False, "axes.spines.right": False})  # fmt: skip


def find_logs(folders: list[Path]) -> dict[str, Path]:
    """Folders of runs or methods -> {curve's name: method's folder}. A method of one run keeps its bare name."""
    logs = [f for top in folders for f in (top, *sorted(top.glob("*/"))) if (f / "log.jsonl").is_file()]
    require(logs, f"{', '.join(map(str, folders))}: no log.jsonl there or one folder below; expected a run's folder")
    order = list(NAMES)
    logs = sorted(dict.fromkeys(logs), key=lambda f: order.index(f.name) if f.name in order else len(order))
    methods = [f.name for f in logs]
    return {f.name if methods.count(f.name) == 1 else f"{f.name} ({f.parent})": f for f in logs}


def read_curves(logs: dict[str, Path], settings: bool = True) -> Points:
    """The logs by curve, whose name tells the settings given to its student if `settings`."""
    points: Points = {}
    for name, folder in logs.items():
        own = folder / "run.json"  # of the student, once it has ended
        run = read_json(own if own.is_file() else folder.parent / "run.json", ["config"])["config"]
        given = configure.Config(hyper=run.get("hyper", {})).settings_of(folder.name)
        given = ", ".join(f"{key}={value}" for key, value in given.items())
        points[name := f"{name} ({given})" if given and settings else name] = {}
        for record in read_lines(folder / "log.jsonl", ["step"]):
            tokens = record["step"] * run["batch_rows"] * run["seq_len"]
            for key, value in record.items():
                if isinstance(value, int | float):
                    points[name].setdefault(key, {})[tokens] = value  # of a step that is logged twice the last counts
    return {name: {key: list(at.items()) for key, at in terms.items()} for name, terms in points.items()}


def over_seeds(seeds: list[Points]) -> Points:
    """Several of `read_curves`, one per seed -> the same with means (tokens, mean, half the 95 % interval)."""
    values: dict = {}  # (name, key, tokens) -> value by seed
    for seed, points in enumerate(seeds):
        for name, terms in points.items():
            for key, pairs in terms.items():
                for tokens, value in pairs:
                    values.setdefault((name, key, tokens), {})[seed] = value
    means: Points = {}
    for (name, key, tokens), by_seed in values.items():
        e = estimate(by_seed)
        means.setdefault(name, {}).setdefault(key, []).append((tokens, e.mean, e.half or 0.0))
    return means


def looks(names: Sequence[str]) -> dict[str, dict]:
    """Colour, line and marker by curve. No two methods share all three; a method's second run has another line and is hollow.

    The paper's methods have looks of their own; others take the next ones in the order in which they are drawn.
    """
    methods, styles = [name.split(" (")[0] for name in names], {}
    places = list(dict.fromkeys([*NAMES, *methods]))
    for at, (name, method) in enumerate(zip(names, methods, strict=True)):
        i, nth = places.index(method), methods[:at].count(method)
        color = plt.get_cmap("tab20").colors[i * 2 % 20 + i // 10 % 2]
        styles[name] = {"color": color, "linestyle": ("-", "--", "-.", ":")[(i + i // 20 + nth) % 4], "linewidth": 1.4, "markersize": 4.5,
                        "marker": "os^vDPX*h<>pd"[i % 13], "markerfacecolor": "white" if nth else color}  # fmt: skip
    return styles


def grid(rows: int, cols: int, width: float, height: float):
    """A figure of equal panels; width and height in inches per panel -> figure, axes [rows, cols]"""
    return plt.subplots(rows, cols, figsize=(width * cols, height * rows), squeeze=False, layout="constrained")


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(points: Points, path: Path) -> None:
    """Every term of every student over the tokens of training, the teacher as a level; intervals over seeds as error bars."""
    logged = dict.fromkeys(key for terms in points.values() for key in terms)
    panels = [key for key in PANELS if key in logged]
    panels += [key for key in logged if key not in (*PANELS, *LEVELS, *LOGGED)]
    require(panels, f"{', '.join(points)}: no term logged yet; wait for the first --log_every_steps")
    cols = min(len(panels), 3)
    (figure, axes), styles = grid(-(-len(panels) // cols), cols, 3.9, 2.7), looks([*points])
    for axis, key in zip(axes.flat, panels, strict=False):
        for name, terms in points.items():
            if key in terms:
                x, y, *half = np.array(terms[key]).T
                every = max(1, len(x) // 6)
                axis.plot(x, y, label=name, markevery=every, **styles[name])
                if half:
                    axis.errorbar(x, y, half[0], fmt="none", ecolor=styles[name]["color"], elinewidth=0.9, capsize=2.5,
                                  errorevery=every)  # fmt: skip
        for level, (label, line) in LEVELS.items() if key == "val_ce" else ():
            for y in sorted({round(terms[level][-1][1], 4) for terms in points.values() if level in terms}):
                axis.axhline(y, color="black", linestyle=line, label=label)
        title, unit = PANELS.get(key, (f"term: {key}", None))
        axis.set(title=title, ylabel=f"{key} [{unit}]" if unit else key, xlabel="nominal tokens seen")
        axis.xaxis.set(major_locator=MaxNLocator(5), major_formatter=EngFormatter(sep=""))
        values = [y for terms in points.values() for _, y, *_ in terms.get(key, ())]
        if min(values) > 0 and max(values) > 20 * min(values):
            axis.set_yscale("log")
        elif min(values) >= 0:  # an error bar or a margin may reach below
            axis.set_ylim(bottom=max(axis.get_ylim()[0], 0))
        if key in ("val_ce", "val_kl"):  # a student that stays far above the others leaves through the top, as may ln V
            ends = {name: terms[key][-1][1] for name, terms in points.items() if key in terms}
            near = [name for name, y in ends.items() if y <= 1.5 * np.median([*ends.values()])]
            axis.set_ylim(top=1.03 * max(y for name in near for _, y, *_ in points[name][key]))
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = int(figure.get_figwidth() / (0.6 + 0.075 * max(map(len, handles))))  # a label's inches, about
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=max(1, columns))
    save(figure, path)


def stages(records: list[dict]) -> dict[str, list[dict]]:
    """Early and late: the records of the first and of the last tenth of the updates. Step 0 is in neither."""
    records = [r for r in records if r["step"] > 0] or records
    first, last = records[0]["step"], records[-1]["step"]
    early = [r for r in records if r["step"] <= first + (last - first) / 10]
    return {"early": early, "late": [r for r in records if r["step"] >= last - (last - first) / 10]}


def budget(logs: dict[str, Path], path: Path) -> None:
    """The distribution of d_u below d_max, and the shares below and at it, early and late, with the teacher's own."""
    how = "run train.py with --histogram_every_steps=N and an ALRA method whose budget adapts"
    counted = {name: read_lines(folder / "histograms.jsonl", ["d_u_hist"]) for name, folder in logs.items()}
    counted = {name: records for name, records in counted.items() if any(sum(r["d_u_hist"][:-1]) for r in records)}
    require(counted, f"{', '.join(map(str, logs.values()))}: no histograms.jsonl with a d_u below d_max; {how}")
    (figure, axes), styles = grid(len(counted), 2, 4.6, 3.0), looks([*counted])
    for (name, records), (below, shares) in zip(counted.items(), axes, strict=True):
        teacher = read_lines(logs[name].parent / "teacher.jsonl", ["d_u_hist"])
        parts = {**stages(records), **({"teacher": teacher} if teacher else {})}
        d_max = len(records[0]["d_u_hist"]) - 1
        for i, (stage, some) in enumerate(parts.items()):
            counts = np.sum([r["d_u_hist"] for r in some], 0)  # [d_max + 1]
            n_below = counts[:-1].sum()
            color = "black" if stage == "teacher" else styles[name]["color"]
            line, alpha = (("--", 0.4), ("-", 1), (":", 0.7))[i]
            steps = " to ".join(f"{n:,}" for n in dict.fromkeys((some[0]["step"], some[-1]["step"])))
            label = f"{stage}, step {steps}"
            below.plot(range(len(counts) - 1), counts[:-1] / max(n_below, 1), label=label, color=color, linestyle=line)
            height = 100 * np.array([n_below, counts[-1]]) / counts.sum()
            bars = shares.bar(np.arange(2) + 0.27 * (i - 1), height, 0.25, label=stage, color=color, alpha=alpha)
            shares.bar_label(bars, fmt="%.1f", fontsize=8)
        below.set(title=f"{name}: positions with $d_u$ < $d_{{max}}$ = {d_max}", xlabel="local budget $d_u$ [tokens]",
                  ylabel="share of these positions")  # fmt: skip
        shares.set(
            title=f"{name}: all positions", ylabel="share of positions [%]", ylim=(0, 140), yticks=range(0, 101, 20)
        )
        shares.set_xticks((0, 1), (f"$d_u$ < {d_max}", f"$d_u$ = {d_max}"))
        below.legend()
        shares.legend(ncols=3)
    save(figure, path)


def anchoring(logs: dict[str, Path], path: Path) -> None:
    """The teacher's probability of the label and of its own top-1: density, mean of each step, and how often they agree."""
    of_runs = [folder.parent / "teacher.jsonl" for folder in logs.values()]
    file = next(filter(Path.is_file, of_runs), of_runs[0])
    records = read_lines(file, ("n", "p_label", "p_top1", "agree", "p_label_hist", "p_top1_hist"))
    require(records, f"{file}: no record; run train.py with --histogram_every_steps=N and a teacher")
    steps, n = (np.array([r[key] for r in records]) for key in ("step", "n"))
    figure, ((density, means, agree),) = grid(1, 3, 4.1, 3.1)
    for key, axis, label, color in (("p_label", means, "label", "0.5"), ("p_top1", means, "teacher's top-1", "black"),
                                    ("agree", agree, "top-1 is the label", "black")):  # fmt: skip
        values = np.array([r[key] for r in records])
        running = np.cumsum(n * values) / np.cumsum(n)
        axis.plot(steps, values, ".", color=color, markersize=4, alpha=0.5)
        axis.plot(steps, running, color=color, label=f"{label}, running mean: {running[-1]:.3f}")
        if key != "agree":
            counts = np.sum([r[f"{key}_hist"] for r in records], 0)
            edges = np.linspace(0, 1, len(counts) + 1)
            density.stairs(counts / counts.sum() * len(counts), edges, label=label, color=color, linewidth=1.5)
    unit = "teacher's probability"
    density.set(title=f"density over {n.sum():,} positions", xlabel=unit, ylabel="density")
    means.set(title="mean over positions", xlabel="step [updates]", ylabel=unit, ylim=(0, 1.02))
    agree.set(title="agreement", xlabel="step [updates]", ylabel="share of positions", ylim=(0, 1.02))
    for axis in (density, means, agree):
        axis.legend()
    save(figure, path)


@torch.no_grad()
def sentence(text: str, folder: Path, path: Path) -> None:
    """What ALRA chooses at each token of a text, its forward batch, by a student's first and last kept checkpoint."""
    kept = sorted(folder.glob("checkpoints/step_*/model"))
    run = read_json(folder.parent / "run.json", ["config", "bos"])
    method = resolve(folder.name, **configure.Config(hyper=run["config"]["hyper"]).overrides_of(folder.name))
    settings = {**default_settings(method.fn), **method.hyper}
    fits = kept and "d_max" in settings
    require(fits, f"{folder}: expected a student of ALRA with checkpoints; set --checkpoint_every_steps")
    tokenizer, names = load_tokenizer(str(kept[0])), (kept[0], kept[-1], run["config"]["teacher"])
    first = tokenizer.eos_token_id if run["bos"] is None else run["bos"]
    ids = torch.tensor([first, *tokenizer.encode(text, add_special_tokens=False)])
    loaded = [load_teacher(str(name), torch.float32, torch.device("cpu")) for name in names]
    *of_students, z_t = [(model.hidden(ids[None, :-1]) @ model.head.T)[0] for model in loaded]  # [N, V] each
    z_t, n, k = z_t[:, : of_students[0].shape[1]], len(z_t), settings["d_max"]
    (figure, (axes,)), color = grid(1, 2, 1.2 + 0.8 * n, 1.9 + 0.15 * k), looks([folder.name])[folder.name]["color"]
    for axis, z_s, name in zip(axes, of_students, names, strict=False):
        terms, proposed = method.fn(z_s, z_t, ids[1:], **method.hyper), z_s.topk(k).indices
        axis.bar(range(n), terms.d_u.tolist(), 0.94, -0.5, color=color, alpha=0.35)
        for z, y, shade in ((z_t, k + 0.5, "0.6"), (z_s, k + 1.5, color)):
            p = (z / settings["tau"]).softmax(-1).gather(1, terms.tokens)
            mass = (p * (torch.arange(k) < terms.d_u[:, None])).sum(-1).numpy()
            bars = axis.barh([y] * n, 0.64 * mass, 0.8, np.arange(n) - 0.47, color=shade)
            axis.bar_label(bars, [f"{m:.0%}" for m in mass], fontsize=7, padding=1)
        for u, column in enumerate(terms.tokens):
            for y, token in ((-2.5, ids[u]), (-1.5, ids[u + 1]), *enumerate(column)):
                word, best = ascii(tokenizer.decode([token]))[1:-1].replace(" ", "␣")[:12], token == z_t[u].argmax()
                axis.text(u, y, word, ha="center", va="center", fontsize=7, family="monospace", parse_math=False,
                          weight="bold" if best else None, color="black" if y < -2 or token in proposed[u] else "red")  # fmt: skip
        axis.set(xlim=(-0.6, n - 0.4), ylim=(k + 2.1, -3.2), xticks=())
        axis.set_title(f"{folder.name}, update {int(name.parent.name[5:]):,}")
        labels = "token read", "next in the text", *range(1, k + 1, 4), "teacher's mass", "student's mass"
        axis.set_yticks((-2.5, -1.5, *range(0, k, 4), k + 0.5, k + 1.5), labels)
        axis.grid(False)
    figure.supxlabel("coloured: local set, its mass below; bold: teacher's top-1; red: no proposal", fontsize=8)
    save(figure, path)


FIGURES = {"curves": lambda logs, path: curves(read_curves(logs), path), "budget": budget, "anchoring": anchoring}


def draw_logs(names: Iterable[str], logs: dict[str, Path], out: Path, quiet: bool = True) -> list[str]:
    """Draw those of FIGURES that the logs allow -> their names; what the others lack is said unless `quiet`."""
    drawn = []
    for name in names:
        try:
            FIGURES[name](logs, out / f"{name}.png")
            drawn.append(name)
        except UserError as error:
            if not quiet:
                print(f"no {name}.png: {error}", file=sys.stderr)
    return drawn


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, help="folders of runs or methods")
    add("--sentence", metavar="TEXT", help="ALRA's choices at each token of it")
    add("--out", type=Path, help="folder for the pictures; default: the first one given")
    args = parser.parse_args(argv)
    out = args.out or args.folders[0]
    if args.sentence:
        sentence(args.sentence, args.folders[0], out / "sentence.png")
    drawn = ["sentence"] if args.sentence else draw_logs(FIGURES, find_logs(args.folders), out, quiet=False)
    print("\n".join(f"{out / name}.png" for name in drawn))


if __name__ == "__main__":
    sys.exit(configure.guard(lambda: main(sys.argv[1:])))
