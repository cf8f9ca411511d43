"""Say whether the demo's held-out CEs lie where those of other seeds and machines did.

python demo/check.py out/demo
"""

import sys
from pathlib import Path

sys.path.insert(0, f"{Path(__file__).parents[1]}")

from run.results import newest_figures

# lowest and highest CE of two seeds, on an AMD EPYC with AVX2; study/LOG.md lists the runs. 0.1
# wider on both sides, as another machine may round differently
EXPECTED = {
    "pretrain": (5.52, 5.73),
    "vanilla_kd": (5.52, 5.77),
    "vanilla_kd@kl": (5.18, 5.44),
    "alra": (5.23, 5.45),
}


def main(argv):
    for method, (low, high) in EXPECTED.items():
        figures = newest_figures(Path(argv[0], method))
        if not figures:
            print(f"{method}: no CE yet; first: python eval.py {argv[0]} --tasks none")
            continue
        ce = figures["values"]["ce"]
        verdict = "as expected" if low <= ce <= high else "NOT as expected; please open an issue"
        print(f"{method}: CE {ce:.2f}, {verdict} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
