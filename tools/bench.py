"""Speed and memory of ALRA's loss, on any machine. tools/gpu.py is for a GPU.

    python tools/bench.py
    python tools/bench.py --methods=tad,bild --seq_len=1024    other methods and sizes

It measures forward and backward of heads and loss: ALRA, compiled, compared with the matrix
products alone, with other methods, and with itself, not compiled. The cases run in turn, round
after round, so that the machine's load affects all alike. The table has medians over the rounds,
and the range of the ratios.

Of train.py's keys, these count: methods and their settings, teacher and student (the shapes of
presets, which get random weights), seq_len, device and dtype. A case is one row.

Memory is resident memory on the CPU (Linux), allocated memory on a GPU: the peak above what was in
use before.
"""

import ctypes
import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure

TEACHER = "1.8b"
DEFAULTS = (f"--teacher={TEACHER}", "--methods=alra,vanilla_kd")
ROUNDS = 5


def arguments(argv) -> configure.Config:
    return configure.read_config([*DEFAULTS, *argv])


if __name__ == "__main__":
    configure.check_flags(arguments)

import torch

from lib.device import machine_facts, peak_bytes, pick_device
from model import student_config
from run.methods import compute_dtype, head_losses, make_method

PEAK = Path("/proc/self/clear_refs")  # only on Linux; a 5 resets the peak


def make_cases(cfg) -> dict:
    """Return name -> function that computes both heads and the loss, for one row."""
    teacher = student_config(cfg.teacher or TEACHER)
    student = student_config(cfg.student)
    V = student.vocab_size
    n = cfg.seq_len
    dtype = compute_dtype(cfg)
    draw = partial(torch.randn, device=cfg.device, dtype=dtype)
    h_s = (0.02 * draw(1, n, student.hidden_size)).requires_grad_()
    w_s = draw(V, student.hidden_size).float().requires_grad_()
    h_t = 0.02 * draw(1, n, teacher.hidden_size)
    w_t = draw(V, teacher.hidden_size)
    y = torch.randint(V, (1, n), device=cfg.device)

    @torch.no_grad()
    def products():
        """What every implementation needs: the logits of both, and the student's two gradients."""
        w = w_s.to(dtype)
        z_s = h_s[0] @ w.T
        return h_t[0] @ w_t.T, z_s @ w, z_s.T @ h_s[0]

    def fused(method, compile=True):
        students = [(h_s, w_s, method)]
        results = head_losses(students, h_t, w_t, y, compile=compile, chunk=n)
        return torch.autograd.grad(results[0][0], (h_s, w_s))

    cases = {
        "products alone": products,
        "alra, not compiled": partial(fused, make_method("alra", cfg, V), compile=False),
    }
    for name in dict.fromkeys(("alra", *cfg.methods)):
        cases[name] = partial(fused, make_method(name, cfg, V))
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
    cfg = configure.load([*DEFAULTS, *argv])
    device = pick_device(cfg.device)
    cases = make_cases(replace(cfg, device=f"{device}"))
    print(f"{machine_facts(device)}: {argv}\n")
    for case in cases.values():
        case()  # compiles
    n_calls = 20 if device.type == "cuda" else 1  # a call takes milliseconds on a GPU
    rounds = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            rounds[name].append(measure(case, device, n_calls))
    print("| case | ALRA's time / its | ALRA's memory / its | seconds | peak MiB |")
    print("|---|---|---|---|---|")
    for name, of_case in rounds.items():
        print(row(name, of_case, rounds["alra"]))


if __name__ == "__main__":
    configure.run(main)
