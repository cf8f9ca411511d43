"""Pictures from the logs of one or more runs, each with its numbers beside it as CSV.

    python plot.py out/demo                      every method of a run
    python plot.py out/alra_200m/alra out/other --out=compare

Writes OUT/curves.png and OUT/curves.csv (OUT: the first folder). A method has the same colour in every picture.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt

import configure

# Colours that differ in hue and, in grey, in lightness; line styles tell the rest apart.
STYLE = {
    "pretrain": ("#8c8c8c", ":"),
    "vanilla_kd": ("#1f5fa8", "-"),
    "pd": ("#2bb5c8", "--"),
    "atkd": ("#2c8a2c", "-"),
    "rld": ("#9467bd", "--"),
    "ldrld": ("#6b3f2e", "-"),
    "tad": ("#c9b616", "-"),
    "bild": ("#e9a3cf", "--"),
    "alra": ("#d62728", "-"),
}
PANELS = (  # key in log.jsonl, title, unit
    ("ce", "training cross-entropy", "nats per token"),
    ("val_ce", "validation cross-entropy", "nats per token"),
    ("val_kl", "validation KL(teacher || student)", "nats per token"),
    ("val_agree", "validation top-1 agreement with the teacher", "share of tokens"),
)


def read_logs(folders: list[Path]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Run or method folders -> {curve's name: {key: [(nominal tokens, value), ..]}}. A lone method keeps its bare name."""
    logs = [
        log
        for f in folders
        for log in ([f / "log.jsonl"] if (f / "log.jsonl").is_file() else sorted(f.glob("*/log.jsonl")))
    ]
    if not logs:
        raise ValueError(
            f"{', '.join(map(str, folders))}: no log.jsonl there or one folder below; expected a run's folder"
        )
    logs.sort(key=lambda log: [*STYLE, log.parent.name].index(log.parent.name))  # the paper's order, then the others
    methods = [log.parent.name for log in logs]
    curves = {}
    for log in logs:
        run = json.loads((log.parent.parent / "run.json").read_text())["config"]
        per_step = run["batch_rows"] * run["seq_len"]
        name = log.parent.name if methods.count(log.parent.name) == 1 else f"{log.parent.name} ({log.parent.parent})"
        points = curves.setdefault(name, {})
        for line in log.read_text().splitlines():
            record = json.loads(line)
            for key, value in record.items():
                if isinstance(value, int | float):
                    points.setdefault(key, []).append((record["step"] * per_step, value))
    return curves


def style(name: str, i: int) -> dict:
    """A curve's looks: its method's own, or the next of a fixed cycle."""
    color, line = STYLE.get(name.split(" (")[0], (f"C{i % 10}", "-."))
    return {"color": color, "linestyle": line, "linewidth": 1.8 if name.startswith("alra") else 1.3}


def curves_picture(curves: dict, path: Path) -> None:
    """Training and validation curves of every student, and the teacher as a level where it was measured."""
    panels = [p for p in PANELS if any(p[0] in points for points in curves.values())]
    cols = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // cols)
    figure, axes = plt.subplots(rows, cols, figsize=(5.4 * cols, 3.6 * rows), squeeze=False, layout="constrained")
    for axis, (key, title, unit) in zip(axes.flat, panels, strict=False):
        for i, (name, points) in enumerate(curves.items()):
            if key in points:
                x, y = zip(*points[key], strict=True)
                few = {"marker": "o", "markersize": 3} if len(x) < 20 else {}
                axis.plot([t / 1e6 for t in x], y, label=name, **style(name, i), **few)
        level = [points["val_teacher_ce"][-1][1] for points in curves.values() if "val_teacher_ce" in points]
        if key == "val_ce" and level:
            axis.axhline(level[0], color="black", linestyle=(0, (1, 2)), linewidth=1.2, label="teacher")
        axis.set(title=title, xlabel="nominal tokens seen [millions]", ylabel=unit)
        axis.grid(alpha=0.25)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 6), frameon=False
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_csv(curves: dict, path: Path) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(("curve", "key", "nominal_tokens", "value"))
        for name, points in curves.items():
            for key, _, _ in PANELS:
                out.writerows((name, key, tokens, value) for tokens, value in points.get(key, []))


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="runs' or methods' folders")
    parser.add_argument("--out", type=Path, help="folder for the pictures; default: the first one given")
    args = parser.parse_args(argv)
    out = args.out or args.folders[0]
    curves = read_logs(args.folders)
    out.mkdir(parents=True, exist_ok=True)
    curves_picture(curves, out / "curves.png")
    write_csv(curves, out / "curves.csv")
    print(f"{out / 'curves.png'}\n{out / 'curves.csv'}")


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
