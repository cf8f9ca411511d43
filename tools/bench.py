"""Speed and memory of ALRA's loss, as ratios to what one would have without this project.

    python tools/bench.py                                    on any machine
    python tools/bench.py --methods=tad,bild --n=1024        other methods and sizes
    python tools/bench.py --device=cuda --n=4096             on a GPU

It runs forward and backward of heads and loss: ALRA, compiled, compared with the matrix products
alone, with other methods, and with losses.py's function on whole logits, not compiled. The heads
are those of the presets --student and --teacher of model.py, with random weights. The cases run in
turn, round after round, so that the machine's load affects all alike. The table has medians over
--repeats rounds, and the range of times. Memory is the peak above what was in use at the start:
resident memory on the CPU (Linux), allocated memory on a GPU. train.py prints tokens/s and MFU of
whole steps.
"""

import argparse
import functools
import re
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.device import give_back_memory, machine_facts, pick_device
from losses import method_loss, resolve
from model import PRESETS
from run.methods import head_losses

PROCESS = Path("/proc/self")  # only on Linux


def make_cases(args, device) -> dict:
    """Return name -> function that computes both heads and the loss, for one row of n positions."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = PRESETS[args.student]
    d_t = PRESETS[args.teacher].hidden_size
    draw = functools.partial(torch.randn, device=device, dtype=dtype)
    h_s = (0.02 * draw(1, args.n, shape.hidden_size)).requires_grad_()
    w_s = draw(shape.vocab_size, shape.hidden_size).float().requires_grad_()
    h_t = 0.02 * draw(1, args.n, d_t)
    w_t = draw(shape.vocab_size, d_t)
    y = torch.randint(shape.vocab_size, (1, args.n), device=device)

    def logits():
        return h_s[0] @ w_s.to(dtype).T, h_t[0] @ w_t.T

    @torch.no_grad()
    def products():
        """What every implementation needs: the logits of both, and the student's two gradients."""
        z_s = logits()[0]
        return z_s @ w_s.to(dtype), z_s.T @ h_s[0]

    def plain():
        loss, _ = method_loss("alra", *map(Tensor.float, logits()), y[0])  # keeps no logits
        return torch.autograd.grad(loss, (h_s, w_s))

    def fused(method):
        results = head_losses([(h_s, w_s, method)], h_t, w_t, y, compile=True)
        return torch.autograd.grad(results[0][0], (h_s, w_s))

    cases = {"products alone": products, "plain alra": plain}
    for name in ("alra", *args.methods.split(",")):
        cases[name] = functools.partial(fused, resolve(name))
    return cases


def measure(case, device) -> tuple[float, float]:
    """Run a case. Return its seconds and its peak memory in MiB."""
    base = memory(device, reset=True)
    begin = time.perf_counter()
    case()
    peak = memory(device)  # synchronises
    return time.perf_counter() - begin, peak - base


def memory(device, reset=False) -> float:
    """Return the peak in MiB since the last reset; NaN if the system reports none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    if not PROCESS.exists():
        return float("nan")
    if reset:
        give_back_memory()
        PROCESS.joinpath("clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+)", PROCESS.joinpath("status").read_text())[1]) / 1024


def row(name, rounds, reference) -> str:
    """Return a line of the table: ALRA compared with a case. Rounds are (seconds, MiB)."""
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(reference, rounds, strict=True)]
    mib = median(mib for _, mib in rounds)
    share = median(mib for _, mib in reference) / mib
    spread = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    return f"| {name} | {spread} | {share:.2f} | {median(s for s, _ in rounds):.3f} | {mib:,.0f} |"


def arguments(argv) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    options = {"device": "auto", "methods": "vanilla_kd", "n": 512, "repeats": 5}
    for name, default in (options | {"student": "200m", "teacher": "1.8b"}).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(argv)


def main(argv):
    args = arguments(argv)
    device = pick_device(args.device)
    facts = machine_facts(device)
    print(f"Commit {facts['git_commit']}, {facts['machine']}, {facts['versions']}: {args}.\n")
    torch.manual_seed(1234)
    cases = make_cases(args, device)
    for case in cases.values():
        case()  # compiles
    rounds = {name: [] for name in cases}
    for _ in range(args.repeats):
        for name, case in cases.items():
            rounds[name].append(measure(case, device))
    print("| case | ALRA's time / its | ALRA's memory / its | seconds | peak MiB |")
    print("|---" * 5 + "|")
    for name in cases:
        print(row(name, rounds[name], rounds["alra"]))


if __name__ == "__main__":
    configure.run(main)
