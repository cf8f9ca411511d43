"""Speed and memory, as ratios to what one would have without this project.

    python tools/bench.py fused step                             on any machine
    python tools/bench.py fused --n=1024 --d_s=1024 --repeats=9  other sizes
    python tools/bench.py gpu                                    on a GPU: all sections

    tests    the tests that need a GPU
    fused    heads and loss, compared with their matrix products alone, the obvious eager code, and Liger's fused JSD
    step     a training step on one row, compared with a plain transformers loop and the obvious eager loss
    steps    training steps of each method and of all at once: tokens per second, MFU, peak memory
    profile  the kernels of one ALRA step, by torch.profiler

The cases of `fused` run in turn, round after round, so that the machine's load affects all alike; whole training steps run one
after the other, as few machines hold two. The table has the median of the rounds, the ratio's round by round, and the range.
Memory is the peak above what was in use before: resident memory on the CPU (Linux), allocated memory on a GPU.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import configure
import train
from lib.device import give_back_memory, machine_facts, mfu, pick_device
from lib.errors import UserError, require
from lib.head import head_losses
from losses import METHODS, method_loss
from model import PRESETS, flops_per_token, init_student
from run.methods import make_loss_fn, needs_teacher
from run.teacher import Teacher

say = functools.partial(print, file=sys.stderr, flush=True)


def eager_alra(z_s: Tensor, z_t: Tensor, y: Tensor) -> Tensor:
    """ALRA equation by equation, with softmaxes and masks of [N, V]. Loses its digits where the teacher is sure."""
    d_min, d_max, gamma, eps = 3, 25, 5.0, 1e-6
    p_s, p_t = z_s.softmax(-1), z_t.softmax(-1)
    tokens, top_1 = z_s.topk(d_max).indices, z_t.argmax(-1, keepdim=True)
    missing = (tokens != top_1).all(-1, keepdim=True)
    tokens = torch.cat([tokens[:, :-1], torch.where(missing, top_1, tokens[:, -1:])], 1)
    tokens = tokens.gather(1, p_t.gather(1, tokens).argsort(dim=-1, descending=True))
    rho = p_t.gather(1, tokens)
    rho = rho / rho.sum(-1, keepdim=True)
    support = torch.exp(-(rho * (rho + 1e-12).log()).sum(-1))
    d_u = (d_min + (d_max - d_min) * support / (support.mean() + eps)).round().clamp(d_min, d_max)
    inside = torch.arange(d_max, device=y.device) < d_u[:, None]  # [N, d_max]
    local = torch.zeros_like(p_t).scatter(1, tokens, inside.to(p_t.dtype))  # [N, V] 1 in the local set
    alpha_s, alpha_t = (p_s * local).sum(-1, keepdim=True), (p_t * local).sum(-1, keepdim=True)

    def kl(a, b):
        return (a * ((a + 1e-12).log() - (b + 1e-12).log())).sum(-1)

    mass = kl(torch.cat([alpha_t, 1 - alpha_t], 1), torch.cat([alpha_s, 1 - alpha_s], 1))
    parts = mass + kl(p_t * local / alpha_t, p_s * local / alpha_s)
    parts = parts + kl(p_t * (1 - local) / (1 - alpha_t + 1e-12), p_s * (1 - local) / (1 - alpha_s + 1e-12))
    x_s, x_t, q = z_s.gather(1, tokens), z_t.gather(1, tokens), p_s.detach().gather(1, tokens)
    r_s, r_t = (torch.sigmoid(x[:, :, None] - x[:, None, :]) for x in (x_s, x_t))
    pair = r_t * (r_t.log() - r_s.log()) + (1 - r_t) * ((1 - r_t + 1e-12).log() - (1 - r_s + 1e-12).log())
    weight = torch.exp(-gamma * (q[:, :, None] - q[:, None, :]).abs()) * (q[:, :, None] + q[:, None, :])
    weight = weight * (inside[:, :, None] & inside[:, None, :]).triu(1)
    weight = weight / (weight.sum((1, 2), keepdim=True) + eps)
    return (parts + (weight * pair).sum((1, 2))).mean()


def measure(cases: dict[str, Callable], repeats: int, device: torch.device) -> dict[str, dict]:
    """Run each case once for warm-up, then all in turn -> per case its seconds and its peak MiB, by round."""
    for name, case in cases.items():
        say(f"  {name}: warm-up")
        case()
    results = {name: {"sec": [], "mib": []} for name in cases}
    for _, (name, case) in itertools.product(range(repeats), cases.items()):
        before = start_memory(device)
        begun = time.perf_counter()
        case()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        results[name]["sec"].append(time.perf_counter() - begun)
        results[name]["mib"].append(peak_memory(device, before))
    return results


def measure_alone(makes: dict[str, Callable], args, device: torch.device) -> dict[str, dict]:
    """`measure` of cases that are made one after the other; memory is all that a case holds. Leaves out what does not fit."""
    results = {}
    for name, make in makes.items():
        before = start_memory(device)
        torch.cuda.empty_cache()  # the pieces of the case before
        try:
            require(time.monotonic() < args.end, f"{args.minutes} minutes are over")
            results |= measure({name: make()}, args.repeats, device)
            results[name]["mib"] = [peak_memory(device, before)]
        except (torch.OutOfMemoryError, UserError) as error:
            say(f"  {name}: left out, {str(error)[:99]}")
    return results


def start_memory(device: torch.device) -> float:
    """Free memory and reset the peak -> MiB in use now; NaN where the system does not report it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    give_back_memory()
    if (clear := Path("/proc/self/clear_refs")).exists():
        clear.write_text("5")
    return status("VmRSS")


def peak_memory(device: torch.device, before: float) -> float:
    """Peak MiB above `before` since `start_memory`."""
    return (torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else status("VmHWM")) - before


def status(key: str) -> float:
    """A line of /proc/self/status, MiB."""
    file = Path("/proc/self/status")
    return int(re.search(rf"{key}:\s+(\d+)", file.read_text())[1]) / 1024 if file.exists() else math.nan


def row(section: str, case: str, results: dict, against: str | None = None, note: str = "") -> str:
    """The table's line of a measured case, compared with another case of its section."""
    a, b, compared = results[case], results.get(against), ["", "", ""]
    if b and case != against:
        ratios = [x / y for x, y in zip(a["sec"], b["sec"], strict=True)]
        memory = statistics.median(a["mib"]) / (statistics.median(b["mib"]) or math.nan)
        compared = [against, spread(ratios, ".2f"), f"{memory:.2f}"]
    cells = [section, case, *compared, spread(a["sec"], ".3f"), f"{statistics.median(a['mib']):,.0f}", note]
    return f"| {' | '.join(cells)} |"


def spread(numbers: list[float], form: str) -> str:
    return f"{statistics.median(numbers):{form}} [{min(numbers):{form}}, {max(numbers):{form}}]"


def bench_fused(args, device: torch.device) -> list[str]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    random = {"generator": torch.Generator(device).manual_seed(1234), "device": device}
    h_s, h_t = (torch.randn(1, args.n, d, **random).to(dtype) for d in (args.d_s, args.d_t))
    w_s, w_t = (torch.randn(args.vocab, d, **random) * 0.02 for d in (args.d_s, args.d_t))
    y = torch.randint(0, args.vocab, (1, args.n), **random)
    h_s, w_s, w_t = h_s.requires_grad_(), w_s.requires_grad_(), w_t.to(dtype)

    @torch.no_grad()
    def products():
        """What every implementation needs: the logits of both, and the student's two gradients."""
        w = w_s.to(dtype)
        h_t[0] @ w_t.T
        z_s = h_s[0] @ w.T
        return z_s @ w, z_s.T @ h_s[0]

    def logits() -> tuple[Tensor, Tensor, Tensor]:
        return (h_s[0] @ w_s.to(dtype).T).float(), (h_t[0] @ w_t.T).float(), y[0]

    evaluate = {name: make_loss_fn(name, compile=True) for name in args.methods}
    loss_of = {name: lambda f=f: head_losses([(h_s, w_s, f)], h_t, w_t, y)[0][0] for name, f in evaluate.items()}
    loss_of["plain alra"] = lambda: method_loss("alra", *logits())[0]
    loss_of["eager alra"] = lambda: eager_alra(*logits())
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        say("  liger-kernel is not installed: its line is left out")
    else:
        liger = LigerFusedLinearJSDLoss(beta=0.0, compiled=True, chunk_size=args.n)
        loss_of["Liger, KL + CE"] = lambda: liger(h_s[0], w_s.to(dtype), h_t[0], w_t, y[0])
    cases = {name: lambda f=f: torch.autograd.grad(f(), (h_s, w_s)) for name, f in loss_of.items()}
    results = measure({"products alone": products, **cases}, args.repeats, device)
    pairs = [("alra", b) for b in ("products alone", "vanilla_kd", "Liger, KL + CE", "plain alra", "eager alra")]
    pairs += [(name, "products alone") for name in args.methods if name != "alra"]
    return [row("fused", a, results, b) for a, b in pairs if a in results and b in results]


def make_teacher(args, device: torch.device) -> Teacher:
    """A compiled teacher with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = init_student(args.teacher, 1).to(device, dtype).requires_grad_(False)
    model.compile_layers()
    return Teacher(model, device)


def our_step(methods, micro_batch: int, compile: bool, teacher: Teacher | None, rows: int, args, device) -> Callable:
    """train.py's own update of fresh students on random rows of n inputs."""
    cfg = configure.Config(
        methods=methods, student=args.student, batch_rows=rows, micro_batch=micro_batch, seq_len=args.n, out_dir="out/bench",
        warmup_steps=0, compile=compile, device=str(device), teacher=None,  # a preset's own shape
    )  # fmt: skip
    students = [train.make_student(name, cfg) for name in methods]
    x, y = torch.randint(0, PRESETS[args.student].vocab_size, (2, rows, args.n)).to(device)
    teacher = teacher if any(map(needs_teacher, methods)) else None

    def case():
        micro_batches = zip(x.split(micro_batch), y.split(micro_batch), strict=True)
        stream = ((a, b, b.numel(), teacher.hidden(a) if teacher else None) for a, b in micro_batches)
        train.update(students, teacher, stream, 0, cfg)

    return case


def bench_step(args, device: torch.device) -> list[str]:
    """One row, forward, backward, clipping and AdamW; teacher and student with random weights."""
    x, y = torch.randint(0, PRESETS[args.student].vocab_size, (2, 1, args.n)).to(device)

    def hugging_face() -> Callable:
        shapes = [dataclasses.asdict(PRESETS[name]) for name in (args.teacher, args.student)]
        teacher, student = (transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**s)).to(device) for s in shapes)
        teacher.requires_grad_(False).eval()
        if device.type == "cuda":
            teacher.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(student.parameters(), lr=6e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=1e-2)

        def case():
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                with torch.no_grad():
                    z_t = teacher(x).logits
                z_s = student(x).logits
            eager_alra(z_s[0].float(), z_t[0].float(), y[0]).backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        return case

    makes = {"ours": lambda: our_step(("alra",), 1, True, make_teacher(args, device), 1, args, device)}
    results = measure_alone(makes | {"transformers": hugging_face}, args, device)
    return [row("step", name, results, "transformers", f"{args.student} student, one row") for name in results]


def bench_steps(args, device: torch.device) -> list[str]:
    together = f"all {len(args.methods)}"
    cases = {name: ((name,), args.rows, True) for name in ("vanilla_kd", "alra")}
    cases |= {"alra, not compiled": (("alra",), args.rows, False), "alra, row by row": (("alra",), 1, True)}
    cases |= {together: (args.methods, args.rows, True), **{name: ((name,), args.rows, True) for name in args.methods}}
    teacher = make_teacher(args, device)
    makes = {name: functools.partial(our_step, *case, teacher, args.rows, args, device) for name, case in cases.items()}
    results, lines = measure_alone(makes, args, device), []
    for name, (methods, _, _) in cases.items():
        if name in results:
            flops = len(methods) * flops_per_token(PRESETS[args.student], args.n, trained=True)
            if any(map(needs_teacher, methods)):  # once for all students
                flops += flops_per_token(PRESETS[args.teacher], args.n, trained=False)
            rate = args.rows * args.n / statistics.median(results[name]["sec"])
            used = mfu(rate * flops, device, 1)
            note = f"{rate:,.0f} tokens/s" + (f", MFU {used:.1%}" if used else "")
            lines.append(row("steps", name, results, "vanilla_kd", note))
    return lines


def bench_profile(args, device: torch.device) -> list[str]:
    """One compiled ALRA step under the profiler; its table goes to OUT.txt."""
    case = our_step(("alra",), args.rows, True, make_teacher(args, device), args.rows, args, device)
    case()
    with torch.profiler.profile() as profile:
        results = measure({"alra": case}, 1, device)
    table = profile.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=40)
    Path(args.out).with_suffix(".txt").write_text(table)
    return [row("profile", "alra", results, note="with the profiler's own time")]


def run_tests(args, device: torch.device) -> list[str]:
    """The tests with the marker `gpu`: their last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    say(text := (done.stdout + done.stderr)[-9000:])
    return [f"| tests | pytest -m gpu | | | | | | {text.strip().splitlines()[-1].strip('= ')} |"]


SECTIONS = {"tests": run_tests, "fused": bench_fused, "step": bench_step, "steps": bench_steps, "profile": bench_profile}  # fmt: skip
OPTIONS = {  # default, help
    "device": ("auto", "auto, cpu, cuda or cuda:1"),
    "repeats": (5, "rounds"),
    "methods": (",".join(tuple(METHODS)[:9]), "names of losses.METHODS"),
    "n": (512, "positions, and inputs per row"),
    "vocab": (151_936, "tokens"),
    "d_s": (768, "width of the student's head"),
    "d_t": (2048, "width of the teacher's head"),
    "rows": (16, "rows per update, in `steps` and `profile`"),
    "minutes": (8.0, "no case of `step` and `steps` starts later"),
    "student": ("200m", "a preset of model.py"),
    "teacher": ("1.8b" if torch.cuda.is_available() else "500m", "a preset of model.py"),
    "out": ("out/bench", "writes OUT.md, and OUT.txt in `profile`"),
}
TINY = {"n": 13, "vocab": 4096, "d_s": 24, "d_t": 40, "rows": 2, "repeats": 1, "student": "mini", "teacher": "demo_teacher",
        "methods": "vanilla_kd,alra"}  # fmt: skip


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "gpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a rehearsal")
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    args = parser.parse_args(argv)
    if args.tiny:
        vars(args).update(TINY)
    args.methods, args.end = tuple(args.methods.split(",")), time.monotonic() + 60 * args.minutes
    if "gpu" in args.sections:
        fits = args.tiny or pick_device(args.device).type == "cuda"
        require(fits, "gpu: expected a CUDA device; run it on such a machine, or add --tiny")
        args.sections = list(SECTIONS)
    return args


def main(argv: list[str]) -> None:
    args = arguments(argv)
    device, out = pick_device(args.device), Path(args.out).with_suffix(".md")
    facts = machine_facts(device)
    machine = [f"commit {facts['git_commit'] or '':.7}", time.strftime("%F"), facts["machine"], f"{torch.get_num_threads()} threads",
               *(f"{name} {version}" for name, version in facts["versions"].items())]  # fmt: skip
    sizes = f"N = {args.n}, V = {args.vocab:,}, heads of {args.d_s} and {args.d_t}; medians of {args.repeats} rounds [range]."
    head = "| section | case | compared with | time ratio | memory ratio | seconds | peak MiB | note |"
    lines = [", ".join(machine) + ".", "", sizes, "", head, "|---" * 8 + "|"]
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in args.sections:
        say(name)
        torch.manual_seed(1234)
        lines += SECTIONS[name](args, device)
        out.write_text("\n".join(lines) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    sys.exit(configure.guard(lambda: main(sys.argv[1:])))
