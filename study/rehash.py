"""Move the records of committed students to today's code, once it is shown to train the same.

    git worktree add ../before COMMIT
    python study/rehash.py ../before            compare with the code of that checkout
    python study/rehash.py ../before --write    then also rewrite the records

Every method is trained for six updates by both checkouts, on the same rows. If the weights agree
within TOLERANCE, `made_by` of each student in study/results gets the hashes of today's code. The
earliest known hash of its record stays in `original_sha256`, and `same_as` names the commits whose
code was compared, with the largest difference.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector

sys.path.insert(0, f"{Path(__file__).resolve().parent.parent}")

import configure
from lib.code import ROOT, code_reached
from lib.device import run_git
from lib.errors import UserError
from losses import METHODS
from run.identity import NOT_FOLLOWED, STEP, STEP_MODULES, objective_code, record_hash
from study.record import FILE, read_students, write_students

TOLERANCE = 2e-7  # of the weights, relative, in norm: sums in another order may differ by less
# the rate is low, as a larger one lets rounding decide which of two nearly equal tokens ALRA takes
FLAGS = (
    "--lr=1e-3 --min_lr=1e-4 --adam_eps=1e-3 "
    "--max_steps=6 --schedule_steps=9 --warmup_steps=2 --histogram_every_steps=None "
    "--teacher_cache=False --val_max_rows=8 --checkpoint_every_steps=None --device=cpu"
)


def train(checkout, data, out):
    """Train all methods with the code of a checkout, one thread."""
    flags = [f"--methods={','.join(METHODS)}", f"--data_dir={data}", f"--out_dir={out}"]
    command = [sys.executable, "train.py", ROOT / "config/tiny.py", *FLAGS.split(), *flags]
    subprocess.run(command, check=True, cwd=checkout, env=os.environ | {"OMP_NUM_THREADS": "1"})


def compare(before) -> dict[str, float]:
    """Return, by method, the distance of the weights of both checkouts after six updates.

    The distance is relative, in norm.
    """
    differences = {}
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/rows"
        prepare = [sys.executable, "prepare.py", "config/tiny.py", f"--data_dir={data}"]
        subprocess.run(prepare, check=True, cwd=ROOT)
        train(before, data, f"{folder}/before")
        train(ROOT, data, f"{folder}/now")
        for name in METHODS:
            file = f"{name}/model/model.safetensors"
            x, y = (
                parameters_to_vector(load_file(f"{folder}/{out}/{file}").values()).double()
                for out in ("before", "now")
            )
            differences[name] = float((x - y).norm() / x.norm())
    return differences


def rehash(students: list[dict], proof: str):
    """Give records the hashes of today's code, and keep the earliest known ones."""
    step = code_reached(STEP_MODULES, STEP, NOT_FOLLOWED)
    for x in students:
        record = x["made_by"]
        x.setdefault("original_sha256", record_hash(record))
        x["same_as"] = [*x.get("same_as", []), proof]
        record |= {"objective": objective_code(record["methods"]), "code": step}
        x["made_by_sha256"] = record_hash(record)


def main(argv):
    if not argv or not Path(argv[0], "train.py").is_file():
        raise UserError("expected the folder of another checkout")
    differences = compare(argv[0])
    worst = max(differences, key=differences.get)
    largest = f"{differences[worst]:.1e}"
    n_equal = sum(not x for x in differences.values())
    print(
        f"{n_equal} of {len(METHODS)} methods have equal bits; {worst} differs most, by {largest}"
    )
    if differences[worst] > TOLERANCE:
        raise UserError(f"{worst}: {largest} exceeds {TOLERANCE:.0e}")
    if "--write" in argv:
        commits = [run_git("rev-parse", "--short", "HEAD", folder=c) for c in (argv[0], ROOT)]
        proof = f"{' and '.join(map(str.strip, commits))}: {largest}"
        for file in ROOT.glob(f"study/results/*/{FILE}"):
            students = read_students(file.parent)
            rehash(students, proof)
            write_students(file.parent, students)
            print(f"{file}: {len(students)} records")


if __name__ == "__main__":
    configure.run(main)
