"""Say whether the demo's held-out CEs lie where those of other seeds and machines did.

python demo/check.py out/demo
"""

import sys
from pathlib import Path

sys.path.insert(0, f"{Path(__file__).parents[1]}")

from run.results import newest_figures

# lowest and highest CE of four seeds (KL alone: three), on an AMD EPYC with AVX2 and with AVX-512,
# and (not KL alone) an Intel Xeon; study/LOG.md lists the runs
SEEN = {
    "pretrain": (5.80, 6.21),
    "vanilla_kd": (5.70, 5.96),
    "vanilla_kd@kl": (5.42, 5.60),
    "alra": (5.48, 5.60),
}
MARGIN = 0.1  # another machine may round differently


def main(argv):
    for method, (low, high) in SEEN.items():
        figures = newest_figures(Path(argv[0], method))
        if not figures:
            print(f"{method}: no CE yet; first: python eval.py {argv[0]} --tasks none")
            continue
        ce = figures["values"]["ce"]
        is_near = low - MARGIN <= ce <= high + MARGIN
        verdict = "as expected" if is_near else "NOT as expected; please open an issue"
        print(f"{method}: CE {ce:.2f}, {verdict} (seen: {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
