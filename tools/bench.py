"""Speed and memory of ALRA's loss, on any machine. tools/gpu.py is for a GPU.

    python tools/bench.py
    python tools/bench.py --methods=tad,bild --n=1024    other methods and sizes

It measures forward and backward of heads and loss: ALRA, compiled, compared with the matrix
products alone, with other methods, and with itself, not compiled. The cases run in turn, round
after round, so that the machine's load affects all alike. The table has medians over --repeats
rounds, and the range of the ratios.

--teacher and --student are presets, which get random weights. A row has --n inputs.
Memory is resident memory on the CPU (Linux), allocated memory on a GPU: the peak above what was in
use before.
"""

import ctypes
import math
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.settings import PositiveInt, checked

OPTIONS = {
    "device": "auto",
    "methods": "vanilla_kd",
    "teacher": "1.8b",
    "student": "200m",
    "n": 512,
    "repeats": 5,
}


def arguments(argv) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args(argv)
    for name in ("n", "repeats"):
        checked(f"--{name}", getattr(args, name), PositiveInt)
    return args


if __name__ == "__main__":
    configure.check_flags(arguments)

import torch

from lib.device import machine_facts, peak_bytes, pick_device
from losses import resolve
from model import student_config
from run.methods import head_losses

PEAK = Path("/proc/self/clear_refs")  # only on Linux; a 5 resets the peak


def make_cases(args) -> dict:
    """Return name -> function that computes both heads and the loss, for one row of n positions."""
    teacher = student_config(args.teacher)
    student = student_config(args.student)
    V = student.vocab_size
    dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    draw = partial(torch.randn, device=args.device, dtype=dtype)
    h_s = (0.02 * draw(1, args.n, student.hidden_size)).requires_grad_()
    w_s = draw(V, student.hidden_size).float().requires_grad_()
    h_t = 0.02 * draw(1, args.n, teacher.hidden_size)
    w_t = draw(V, teacher.hidden_size)
    y = torch.randint(V, (1, args.n), device=args.device)

    @torch.no_grad()
    def products():
        """What every implementation needs: the logits of both, and the student's two gradients."""
        w = w_s.to(dtype)
        z_s = h_s[0] @ w.T
        return h_t[0] @ w_t.T, z_s @ w, z_s.T @ h_s[0]

    def fused(method, compile=True):
        students = [(h_s, w_s, method)]
        results = head_losses(students, h_t, w_t, y, compile=compile, chunk=args.n)
        return torch.autograd.grad(results[0][0], (h_s, w_s))

    cases = {
        "products alone": products,
        "alra, not compiled": partial(fused, resolve("alra"), compile=False),
    }
    for name in ("alra", *args.methods.split(",")):
        cases[name] = partial(fused, resolve(name))
    return cases


def measure(case, device, n_calls) -> tuple[float, float]:
    """Call a case n times. Return the seconds of a call, and its peak memory in MiB."""
    base = memory(device, reset=True)
    begin = time.perf_counter()
    for _ in range(n_calls):
        case()
    peak = memory(device)  # synchronises
    return (time.perf_counter() - begin) / n_calls, peak - base


def memory(device, reset=False) -> float:
    """Return the peak in MiB since the last reset; NaN if the system reports none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
    elif not PEAK.exists():
        return math.nan
    elif reset:
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory
        PEAK.write_text("5")
    return peak_bytes(device) / 2**20


def row(name, rounds, reference) -> str:
    """Return a line of the table: ALRA compared with a case. Rounds are (seconds, MiB)."""
    ratios = [ours[0] / theirs[0] for ours, theirs in zip(reference, rounds, strict=True)]
    mib = median(mib for _, mib in rounds)
    share = median(mib for _, mib in reference) / mib
    spread = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    return f"| {name} | {spread} | {share:.2f} | {median(s for s, _ in rounds):.4f} | {mib:,.0f} |"


def main(argv):
    args = arguments(argv)
    args.device = pick_device(args.device)
    cases = make_cases(args)
    print(f"{machine_facts(args.device)}: {args}\n")
    for case in cases.values():
        case()  # compiles
    n_calls = 20 if args.device.type == "cuda" else 1  # a call takes milliseconds on a GPU
    rounds = {name: [] for name in cases}
    for _ in range(args.repeats):
        for name, case in cases.items():
            rounds[name].append(measure(case, args.device, n_calls))
    print("| case | ALRA's time / its | ALRA's memory / its | seconds | peak MiB |")
    print("|---|---|---|---|---|")
    for name, of_case in rounds.items():
        print(row(name, of_case, rounds["alra"]))


if __name__ == "__main__":
    configure.run(main)
