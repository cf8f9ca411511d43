"""How sure a teacher is on held-out rows, and copies of it that are surer or less sure.

    python study/sureness.py demo/teacher data/demo --skip_rows 256
    python study/sureness.py demo/teacher --factor 1.05 --out data/demo_teacher_surer

A factor multiplies the weight of the final norm, and so all logits. It is the inverse of a
temperature: no token changes its rank. The first command prints CE and entropy at several factors,
the second one writes the teacher in fp32 with one of them. A teacher is surer than right if its
entropy is below its CE.
"""

import sys
from argparse import ArgumentParser, RawTextHelpFormatter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.checks import IGNORE
from lib.hf import load_tokenizer
from lib.metrics import MIN_POSITIONS, N_LOGITS, logits_of
from lib.rows import Rows, open_rows
from model import Qwen2
from run.cache import progress
from run.teacher import load_teacher

FACTORS = np.arange(0.90, 1.151, 0.025)
CPU = torch.device("cpu")


@torch.no_grad()
def sureness(teacher, rows, index) -> tuple:
    """Return CE and entropy of the teacher at each of FACTORS, means over the targets of rows."""
    sums = torch.zeros(2, len(FACTORS), dtype=torch.float64)
    n_targets = 0
    step = max(MIN_POSITIONS, N_LOGITS["cpu"] // len(teacher.head))
    for i in progress(range(len(index)), "held-out rows"):
        x, y, n_valid = rows.batch(index[i : i + 1], CPU)
        h = teacher.hidden(x)[0][y[0] != IGNORE]  # [N, D]
        labels = y[0][y[0] != IGNORE]  # [N]
        n_targets += n_valid
        for states, label in zip(h.split(step), labels.split(step), strict=True):
            z = logits_of(states, teacher.head)  # [n, V]
            for k, factor in enumerate(FACTORS):
                logp = (z * factor).log_softmax(-1)
                sums[0, k] -= logp.gather(1, label[:, None]).sum()
                sums[1, k] -= (logp.exp() * logp).sum()
    return (sums / n_targets).numpy()


def write_copy(name, factor: float, out):
    model = Qwen2.from_pretrained(name)
    model.model.norm.weight.data *= factor
    model.save_pretrained(out, load_tokenizer(name))
    print(out)


def main(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("rows", nargs="?", help="a folder of prepare.py")
    parser.add_argument("--skip_rows", type=int, default=0)
    parser.add_argument("--max_rows", type=int, default=512)
    parser.add_argument("--every", type=int, default=1, help="read every Nth of these rows")
    parser.add_argument("--factor", type=float)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    if args.out:
        write_copy(args.teacher, args.factor, args.out)
    else:
        seq_len = open_rows(args.rows, "val")[1]["row_len"] - 1
        teacher = load_teacher(args.teacher, torch.float32, CPU)
        rows = Rows(args.rows, "val", seq_len, False, len(teacher.head))
        index = np.arange(rows.n)[args.skip_rows :][: args.max_rows][:: args.every]
        for factor, ce, entropy in zip(FACTORS, *sureness(teacher, rows, index), strict=True):
            print(f"{factor:.3f}  CE {ce:.4f}  entropy {entropy:.4f}  surer by {ce - entropy:+.4f}")


if __name__ == "__main__":
    configure.run(main)
