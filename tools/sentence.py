"""A picture of what ALRA chooses after each token of a text, early and late in training.

    python tools/sentence.py out/demo/alra "import os"

It shows the first and the last checkpoint that the run has kept (`keep_every_steps` keeps earlier
ones). The picture, sentence.png, goes into the student's folder, or into --out.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.errors import UserError
from lib.files import read_json
from lib.hf import load_tokenizer
from losses import default_settings, resolve
from run.identity import content_hash
from run.scoring import check_content
from run.teacher import load_teacher
from tools import plot

READ, NEXT = -2.5, -1.5  # places of the token read and the next one; candidates are at 0, 1, ..


@torch.no_grad()
def sentence(text, folder, path):
    """Draw what ALRA chooses after each token of a text. The text is the forward batch.

    Left is the first checkpoint that the run has kept, right the last one.
    """
    kept = sorted(folder.glob("checkpoints/step_*/model"))
    kinds = {"config": dict, "made_by": dict, "bos": int | None}
    run = read_json(folder.parent / "run.json", kinds)
    cfg = configure.Config(**run["config"])
    method = resolve(folder.name, **cfg.overrides_of(folder.name))
    settings = default_settings(method.fn) | method.hyper
    if not kept or "d_max" not in settings:
        raise UserError(
            f"{folder}: expected a student of ALRA with checkpoints; set --checkpoint_every_steps"
        )
    record = run["made_by"].get(folder.name, {})
    check_content(cfg.teacher, "teacher_sha256", content_hash(cfg.teacher), record)
    tokenizer = load_tokenizer(str(kept[0]))
    first = tokenizer.eos_token_id if run["bos"] is None else run["bos"]
    ids = torch.tensor([first, *tokenizer.encode(text, add_special_tokens=False)])
    d_max = settings["d_max"]
    x = np.arange(len(ids) - 1)
    ticks = {
        READ: "token read",
        NEXT: "next in the text",
        d_max + 0.5: "teacher's mass",
        d_max + 1.5: "student's mass",
    }
    ticks |= {rank: rank + 1 for rank in range(0, d_max, 4)}
    figure, axes = plt.subplots(1, 2, figsize=(2.4 + 1.6 * len(x), 1.9 + 0.15 * d_max))
    color = plot.looks([folder.name])[folder.name]["color"]
    logits_t = logits(cfg.teacher, ids)
    for axis, model in zip(axes, (kept[0], kept[-1]), strict=True):
        step = int(model.parent.name.removeprefix("step_"))
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
            proposals = z_s[u].topk(d_max).indices
            draw_tokens(axis, u, column, z_t[u].argmax(), proposals, tokenizer)
        axis.set(
            title=f"{folder.name}, update {step:,}",
            xlim=(-0.6, len(x) - 0.4),
            ylim=(d_max + 2.1, -3.2),
            xticks=(),
        )
        axis.set_yticks(list(ticks), ticks.values())
        axis.grid(False)
    figure.supxlabel(
        "coloured: local set, its mass below; bold: teacher's top-1; red: not proposed", fontsize=8
    )
    plot.save(figure, path)


def draw_tokens(axis, x, column, top_1, proposals, tokenizer):
    """Write the tokens of a column {y: token}: `top_1` bold, those not in `proposals` red."""
    for y, token in column.items():
        word = ascii(tokenizer.decode([token]))[1:-1].replace(" ", "␣")[:12]
        axis.text(
            x,
            y,
            word,
            size=7,
            family="monospace",
            ha="center",
            va="center",
            parse_math=False,
            weight="bold" if token == top_1 and y != READ else "normal",
            color="black" if token in proposals or y == READ else "red",
        )


def logits(model, ids):
    """Return a model's logits [N, V], which predict the ids after the first."""
    loaded = load_teacher(str(model), torch.float32, torch.device("cpu"))
    return loaded.hidden(ids[None, :-1])[0] @ loaded.head.T


def main(argv):
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    sentence(args.text, args.folder, (args.out or args.folder) / "sentence.png")


if __name__ == "__main__":
    configure.run(main)
