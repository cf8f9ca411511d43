"""Speed and memory, as ratios to what one would have without this project.

    python tools/bench.py fused --repeats=3                     on any machine
    python tools/bench.py fused --n=1024 --methods=tad,bild     other sizes and methods
    python tools/bench.py step --teacher=500m                   a step that fits 10 GB of memory
    python tools/bench.py gpu                                   on a GPU: both, in some minutes

    fused  forward and backward of heads and loss: ALRA, compiled, compared with the matrix
           products alone, with other methods (--methods), and with losses.py's function on whole
           logits, not compiled
    step   training steps of --rows rows (8 with `gpu`): ALRA and vanilla KD compared with a
           transformers loop with ALRA, and with each other

The models are the presets --student and --teacher of model.py, with random weights; a row has --n
inputs. The table goes to --out too. It has the median of --repeats rounds, and the range of times.
The cases of `fused` run in turn, round after round, so that the machine's load affects all alike;
steps run one after the other, as few machines hold two. Memory is the peak above what was in use at
the start: resident memory on the CPU (Linux), allocated memory on a GPU.
"""

import argparse
import functools
import gc
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
import train
from lib.device import give_back_memory, machine_facts, mfu, pick_device
from lib.head import head_losses
from losses import method_loss
from model import PRESETS, flops_per_token, init_student
from run.methods import make_loss_fn
from run.teacher import Teacher


def bench_fused(args) -> list[str]:
    """Compare forward and backward of both heads and the loss, for one row of n positions."""
    shape = PRESETS[args.student]
    d_t = PRESETS[args.teacher].hidden_size
    draw = functools.partial(torch.randn, device=args.device, dtype=args.dtype)
    h_s = (0.02 * draw(1, args.n, shape.hidden_size)).requires_grad_()
    w_s = draw(shape.vocab_size, shape.hidden_size).float().requires_grad_()
    h_t = 0.02 * draw(1, args.n, d_t)
    w_t = draw(shape.vocab_size, d_t)
    y = torch.randint(shape.vocab_size, (1, args.n), device=args.device)

    def logits():
        return h_s[0] @ w_s.to(args.dtype).T, h_t[0] @ w_t.T

    @torch.no_grad()
    def products():
        """What every implementation needs: the logits of both, and the student's two gradients."""
        z_s = logits()[0]
        return z_s @ w_s.to(args.dtype), z_s.T @ h_s[0]

    def plain():
        loss, _ = method_loss("alra", *map(Tensor.float, logits()), y[0])  # keeps no logits
        return torch.autograd.grad(loss, (h_s, w_s))

    def fused(loss_fn: Callable):
        results = head_losses([(h_s, w_s, loss_fn)], h_t, w_t, y)
        return torch.autograd.grad(results[0][0], (h_s, w_s))

    cases = {"products alone": products}
    for name in ("alra", *args.methods.split(",")):
        cases[name] = functools.partial(fused, make_loss_fn(name, compile=True))
    cases["plain alra"] = plain
    results = measure(cases, args)
    return [row("fused", "alra", results, name) for name in results if name != "alra"]


def bench_step(args) -> list[str]:
    """Compare training steps with random weights: forward, backward, clipping and AdamW."""
    shape = PRESETS[args.student]
    flops = flops_per_token(shape, args.n, trained=True)
    flops += flops_per_token(PRESETS[args.teacher], args.n, trained=False)
    x, y = torch.randint(shape.vocab_size, (2, args.rows, args.n), device=args.device)
    results = {}
    lines = []
    makers = {"transformers": transformers_step, "vanilla_kd": train_step, "alra": train_step}
    for name, make in makers.items():
        base = start_memory(args.device)
        results |= measure({name: make(name, x, y, args)}, args)
        results[name]["mib"] = [peak_memory(args.device) - base]  # all that a step holds
        rate = x.numel() / median(results[name]["sec"])
        note = f"{rate:,.0f} tokens/s"
        share = mfu(rate * flops, args.device, 1)
        if share:
            note += f", MFU {share:.1%}"
        lines.append(row("step", name, results, "transformers", note))
    return [*lines, row("step", "alra", results, "vanilla_kd")]


def train_step(method: str, x: Tensor, y: Tensor, args):
    """Return train.py's update of a fresh student on random rows, compiled."""
    cfg = configure.Config(
        methods=(method,),
        student=args.student,
        teacher=None,  # the student keeps its preset's vocabulary
        batch_rows=len(x),
        micro_batch=len(x),
        compile=True,
        device=str(args.device),
    )
    model = init_student(args.teacher, 1).requires_grad_(False)
    model.to(args.device, args.dtype).compile_layers()
    teacher = Teacher(model, args.device)
    student = train.make_student(method, cfg)

    def step():
        stream = iter([(x, y, y.numel(), teacher.hidden(x))])
        train.update([student], teacher, stream, 0, cfg)

    return step


def transformers_step(_: str, x: Tensor, y: Tensor, args):
    """Return a step of ALRA as one would write it with transformers, in eager code."""
    models = []
    for preset in (args.teacher, args.student):
        config = Qwen2Config(**vars(PRESETS[preset]))
        models.append(Qwen2ForCausalLM(config).to(args.device))
    teacher, student = models
    teacher.to(args.dtype).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)

    def step():
        with torch.autocast(args.device.type, args.dtype, args.dtype != torch.float32):
            z_t = teacher(x).logits.float()
            z_s = student(x).logits.float()
        loss, _ = method_loss("alra", z_s.flatten(0, 1), z_t.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ----------------------------------------------------------------------------------------------
# time and memory

PROCESS = Path("/proc/self")  # only on Linux


def measure(cases: dict, args) -> dict[str, dict]:
    """Run each case once for warm-up, then all in turn. Returns seconds and peak MiB by round."""
    results = {}
    for name, case in cases.items():
        print(name, file=sys.stderr)
        case()
        results[name] = {"sec": [], "mib": []}
    for _ in range(args.repeats):
        for name, case in cases.items():
            base = start_memory(args.device)
            begin = time.perf_counter()
            case()
            if args.device.type == "cuda":
                torch.cuda.synchronize(args.device)
            results[name]["sec"].append(time.perf_counter() - begin)
            results[name]["mib"].append(peak_memory(args.device) - base)
    return results


def start_memory(device) -> float:
    """Free memory, reset the peak to what is in use, and return that in MiB."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        give_back_memory()
        if PROCESS.exists():
            PROCESS.joinpath("clear_refs").write_text("5")
    return peak_memory(device)


def peak_memory(device) -> float:
    """Return the peak in MiB since `start_memory`; NaN if the system reports none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if not PROCESS.exists():
        return math.nan
    status = PROCESS.joinpath("status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def row(section: str, case: str, results: dict, other: str, note: str = "") -> str:
    """Return the table's line of a case, compared with another one of its section."""
    a = results[case]
    b = results[other]
    ratios = [x / y for x, y in zip(a["sec"], b["sec"], strict=True)]
    mib = median(a["mib"])
    memory = mib / (median(b["mib"]) or math.nan)
    return (
        f"| {section} | {case} | {other} | {spread(ratios, '.2f')} | {memory:.2f} | "
        f"{spread(a['sec'], '.3f')} | {mib:,.0f} | {note} |"
    )


def spread(numbers: list[float], form: str) -> str:
    return f"{median(numbers):{form}} [{min(numbers):{form}}, {max(numbers):{form}}]"


# ----------------------------------------------------------------------------------------------
# the command

SECTIONS = {"fused": bench_fused, "step": bench_step}
OPTIONS = {
    "device": "auto",
    "repeats": 5,
    "methods": "vanilla_kd",
    "n": 512,
    "rows": 1,
    "student": "200m",
    "teacher": "1.8b",
    "out": "out/bench.md",
}
HEAD = "| section | case | compared with | time ratio | memory ratio | seconds | peak MiB | note |"


def arguments(argv) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "gpu"])
    parser.add_argument("--tiny", action="store_true")
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    if "gpu" in argv:
        parser.set_defaults(rows=8, device="cuda")
    if "--tiny" in argv:
        parser.set_defaults(n=13, rows=2, repeats=1, student="mini", teacher="demo_teacher")
    args = parser.parse_args(argv)
    if "gpu" in args.sections:
        args.sections = list(SECTIONS)
    args.device = pick_device(args.device)
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    return args


def main(argv):
    args = arguments(argv)
    facts = machine_facts(args.device)
    lines = [
        f"Commit {facts['git_commit']}, {facts['machine']}, {torch.get_num_threads()} threads, "
        f"{facts['versions']}: `bench.py {' '.join(argv)}`."
    ]
    lines += ["", HEAD, "|---" * 8 + "|"]
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.sections:
        torch.manual_seed(1234)
        lines += SECTIONS[name](args)
        out.write_text("\n".join(lines) + "\n")
        print(out.read_text(), flush=True)


if __name__ == "__main__":
    configure.run(main)
