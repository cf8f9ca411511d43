"""Speed and memory, as ratios to what one would have without this project, in one run.

    python bench.py loss fused rows step prepare eval       the sections asked for; without a name, these
    python bench.py fused --n=1024 --d_s=1024 --repeats=9   other sizes
    python bench.py steps --teacher=1.8b --student=500m     every method, and all nine at once, on a GPU
    python bench.py gpu                                     all that is to be known of a card, in under eight minutes
    python bench.py roofline                                the MFU to be expected of two cards

    loss     the objective alone, forward and backward from logits, beside the obvious eager implementation
    fused    heads and loss, beside their matrix products alone, and Liger's fused JSD where it is installed
    rows     heads and loss of four rows, beside the same with all their logits at once
    step     a training step of one row, beside a plain transformers loop with the obvious eager loss
    prepare  prepare.py beside its tokenizer alone
    eval     eval.py beside lm-eval's Hugging Face backend
    steps    training steps of each method, and of nine students at once: tokens per second, MFU, peak memory
    gpu      the GPU tests, `fused`, steps of several sizes, and where their time goes; `--tiny` runs the same path anywhere
    roofline time and MFU of a step from counts of bytes, FLOPs and launches, and the rates of two cards

Cases run in turn, round after round, so that a machine's moods hit all alike; whole steps run one after the other, as few
machines hold two. The table has the median of the rounds, the ratio's round by round, and the range. Memory is the peak
above what stood before the call, or before a step's case was made: resident memory on the CPU of a Linux machine,
allocated memory on a GPU. Writes OUT.json and OUT.md.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import gc
import io
import itertools
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F

import configure
import losses
import prepare
import train
from lib.device import device_name, machine_facts, mfu, pick_device
from lib.files import UserError
from lib.fused import head_losses
from lib.hf import load_tokenizer, tokenizer_hash
from lib.roofline import CARDS, COUNTS, estimate
from lib.teacher import Teacher
from losses import METHODS
from model import PRESETS, Qwen2Config, flops_per_token, init_student

# --- what one would write at first ---------------------------------------------------------------------------------


def eager_vanilla_kd(z_s: Tensor, z_t: Tensor, y: Tensor, tau: float = 0.5) -> Tensor:
    """The row `vanilla_kd` of METHODS with torch's own functions  # [N, V], [N, V], [N] -> []"""
    kl = F.kl_div((z_s / tau).log_softmax(-1), (z_t / tau).log_softmax(-1), reduction="batchmean", log_target=True)
    return 0.5 * kl + 0.5 * F.cross_entropy(z_s, y)


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


# --- measuring -----------------------------------------------------------------------------------------------------


def measure(cases: dict[str, Callable], repeats: int, device: torch.device) -> dict[str, dict]:
    """Run each case once for warm-up, then all in turn -> per case its seconds and its peak MiB, by round."""
    for name, case in cases.items():
        say(f"  {name}: warm-up")
        case()
    found = {name: {"sec": [], "mib": []} for name in cases}
    for _, (name, case) in itertools.product(range(repeats), cases.items()):
        before = start_memory(device)
        begun = time.perf_counter()
        case()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found[name]["sec"].append(time.perf_counter() - begun)
        found[name]["mib"].append(peak_memory(device, before))
    return found


def measure_alone(makes: dict[str, Callable], repeats: int, device: torch.device) -> dict[str, dict]:
    """`measure` of cases that are made one after the other; memory counts all that a case holds. What does not fit is left out."""
    found = {}
    for name, make in makes.items():
        before = start_memory(device)
        torch.cuda.empty_cache()  # the pieces of the case before
        try:
            found |= measure({name: make()}, repeats, device)
            found[name]["mib"] = [peak_memory(device, before)]
        except torch.OutOfMemoryError:
            say(f"  {name}: out of memory, left out")
    return found


def start_memory(device: torch.device) -> float | None:
    """Free memory and reset the peak -> MiB in use now; None where the system does not report it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    clear.write_text("5")
    return status("VmRSS")


def peak_memory(device: torch.device, before: float | None) -> float | None:
    """Peak MiB above `before` since `start_memory`."""
    if before is None:
        return None
    return (torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else status("VmHWM")) - before


def status(key: str) -> float:
    """A line of /proc/self/status, MiB."""
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def line(section: str, case: str, note: str = "", **numbers) -> dict:
    """One line of the table."""
    return {"section": section, "case": case, "against": None, "note": note, **numbers}


def row(section: str, case: str, found: dict, against: str | None, note: str = "") -> dict:
    """The line of a measured case beside another of its section, by the median over rounds."""
    a, b = found[case], found.get(against)
    mib = None if None in a["mib"] else statistics.median(a["mib"])
    new = line(section, case, note, sec=statistics.median(a["sec"]), sec_range=[min(a["sec"]), max(a["sec"])], mib=mib)
    if b:
        ratios = [x / y for x, y in zip(a["sec"], b["sec"], strict=True)]
        new |= {"against": against, "time_ratio": statistics.median(ratios)}
        new["time_ratio_range"] = [min(ratios), max(ratios)]
        peaks = None not in a["mib"] + b["mib"] and statistics.median(b["mib"]) > 0
        new["memory_ratio"] = mib / statistics.median(b["mib"]) if peaks else None
    return new


# --- the objective, and heads with objective -----------------------------------------------------------------------


def random_logits(n: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random student and teacher logits that partly agree, and labels."""
    generator = torch.Generator().manual_seed(1234)
    z_t = torch.randn(n, vocab, generator=generator) * 2.5
    z_s = z_t * 0.5 + torch.randn(n, vocab, generator=generator) * 1.5
    return z_s.to(device), z_t.to(device), torch.randint(0, vocab, (n,), generator=generator).to(device)


def learn(*and_loss) -> Callable:
    """A case: the gradients of `loss()`, the last argument, in the tensors before it."""
    *inputs, loss = and_loss
    return lambda: torch.autograd.grad(loss(), inputs)


def bench_loss(args, device: torch.device) -> list[dict]:
    z_s, z_t, y = random_logits(args.n, args.vocab, device)

    z = z_s.clone().requires_grad_()
    evaluate = {name: torch.no_grad()(losses.evaluator(name, compile=True)) for name in args.methods}
    cases = {name: functools.partial(f, torch.float32, z_s, z_t, y) for name, f in evaluate.items()}
    cases["eager alra"] = learn(z, lambda: eager_alra(z, z_t, y))
    cases["eager vanilla_kd"] = learn(z, lambda: eager_vanilla_kd(z, z_t, y))
    cases["alra, not compiled"] = learn(z, lambda: losses.alra(z, z_t, y).mean())
    found = measure(cases, args.repeats, device)
    pairs = [("alra", "eager alra"), ("alra, not compiled", "eager alra"), ("eager alra", "eager vanilla_kd")]
    pairs += [(name, "vanilla_kd") for name in args.methods if name != "vanilla_kd"]
    return [row("loss", case, found, against) for case, against in pairs]


def random_heads(n_rows: int, args, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random h_s [B, N, D_s], w_s [V, D_s] in fp32, h_t [B, N, D_t], w_t [V, D_t] and labels [B, N]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    like = {"generator": torch.Generator(device).manual_seed(1234), "device": device}
    h_s, h_t = (torch.randn(n_rows, args.n, d, **like).to(dtype) for d in (args.d_s, args.d_t))
    w_s, w_t = (torch.randn(args.vocab, d, **like) * 0.02 for d in (args.d_s, args.d_t))
    y = torch.randint(0, args.vocab, (n_rows, args.n), **like)
    return h_s.requires_grad_(), w_s.requires_grad_(), h_t, w_t.to(dtype), y


def all_logits(h_s, w_s, h_t, w_t, _) -> tuple[Tensor, Tensor]:
    """Of all rows at once, fp32  # [B, N, V]"""
    return (h_s @ w_s.to(h_s.dtype).T).float(), (h_t @ w_t.T).float()


def fused_head_loss(h_s, w_s, h_t, w_t, y, name: str) -> tuple[Tensor, dict]:
    return head_losses([(h_s, w_s, losses.evaluator(name, compile=True))], h_t, w_t, y)[0]


def method_loss(name: str, *z) -> Tensor:
    return losses._mean_loss(losses.resolve(name), *z)[0]


def bench_fused(args, device: torch.device) -> list[dict]:
    heads = h_s, w_s, h_t, w_t, y = random_heads(1, args, device)

    @torch.no_grad()
    def products():
        """What every implementation needs: the logits of both, and the student's two gradients."""
        w = w_s.to(h_s.dtype)
        h_t[0] @ w_t.T
        z_s = h_s[0] @ w.T
        return z_s @ w, z_s.T @ h_s[0]

    of = {name: lambda name=name: fused_head_loss(*heads, name)[0] for name in args.methods}
    of["plain alra"] = lambda: method_loss("alra", *(z[0] for z in all_logits(*heads)), y[0])
    of["eager alra"] = lambda: eager_alra(*(z[0] for z in all_logits(*heads)), y[0])
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        say("  liger-kernel is not installed: its line is left out")
    else:
        liger = LigerFusedLinearJSDLoss(beta=0.0, compiled=True, chunk_size=args.n)
        of["Liger, KL + CE"] = lambda: liger(h_s[0], w_s.to(h_s.dtype), h_t[0], w_t, y[0])
    cases = {"products alone": products} | {name: learn(h_s, w_s, loss) for name, loss in of.items()}
    found = measure(cases, args.repeats, device)
    beside = [b for b in ("products alone", "vanilla_kd", "Liger, KL + CE", "plain alra", "eager alra") if b in found]
    lines = [row("fused", "alra", found, b) for b in beside]
    return lines + [row("fused", name, found, "products alone") for name in args.methods if name != "alra"]


def bench_rows(args, device: torch.device) -> list[dict]:
    """Four rows: the fused path holds the logits of one forward batch at a time, the plain one those of all."""
    heads = h_s, w_s, _, _, y = random_heads(4, args, device)

    def plain():
        return sum(method_loss("alra", *z) for z in zip(*all_logits(*heads), y, strict=True)) / 4

    cases = {"fused": learn(h_s, w_s, lambda: fused_head_loss(*heads, "alra")[0])}
    found = measure(cases | {"plain": learn(h_s, w_s, plain)}, args.repeats, device)
    return [row("rows", "fused", found, "plain", "ALRA, four forward batches")]


# --- training steps ------------------------------------------------------------------------------------------------


def make_teacher(args, device: torch.device, compile: bool = True) -> Teacher:
    """A teacher with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = init_student(args.teacher, 1).to(device, dtype).requires_grad_(False)
    if compile:
        model.compile_layers()
    return Teacher(model, device)


def our_step(
    methods: tuple[str, ...], student: str, teacher: Teacher | None, rows: int, micro_batch: int, n: int,
    device: torch.device, compile: bool = True,
) -> Callable:  # fmt: skip
    """train.py's own update of fresh students on random rows of n inputs."""
    cfg = configure.Config(
        methods=methods, student=student, batch_rows=rows, micro_batch=micro_batch, seq_len=n, out_dir="out/bench",
        warmup_steps=0, compile=compile, device=str(device), teacher=None,  # a preset's own shape
    )  # fmt: skip
    students = [train.make_student(name, cfg) for name in methods]
    x, y = random_rows(student, rows, n, device)
    teacher = teacher if any(map(losses.needs_teacher, methods)) else None

    def case():
        cut = zip(x.split(micro_batch), y.split(micro_batch), strict=True)
        stream = (train.Batch(a, b, b.numel(), teacher.hidden(a) if teacher else None) for a, b in cut)
        train.update(students, teacher, stream, 0, cfg)

    return case


def random_rows(student: str, rows: int, n: int, device: torch.device) -> Tensor:
    """Inputs and labels  # [2, rows, n]"""
    generator = torch.Generator().manual_seed(1234)
    return torch.randint(0, PRESETS[student].vocab_size, (2, rows, n), generator=generator).to(device)


def step_lines(section: str, cases: dict, student: str, teacher, args, device, against=None) -> list[dict]:
    """Lines of training steps; a case is (methods, micro_batch, compile)."""
    makes = {}
    for name, (methods, m, compile) in cases.items():
        makes[name] = functools.partial(our_step, methods, student, teacher, args.rows, m, args.n, device, compile)
    found = measure_alone(makes, args.repeats, device)
    return [
        row(section, name, found, against, speed(found[name], *cases[name], student, args, device)) for name in found
    ]


def speed(found: dict, methods: tuple[str, ...], micro_batch: int, compile: bool, student: str, args, device) -> str:
    """Tokens per second, and MFU where the card is known; the teacher counts once for all students."""
    rate = args.rows * args.n / statistics.median(found["sec"])
    flops = len(methods) * flops_per_token(PRESETS[student], args.n, trained=True)
    if any(map(losses.needs_teacher, methods)):
        flops += flops_per_token(PRESETS[args.teacher], args.n, trained=False)
    used, said = mfu(rate * flops, device, 1), f"{rate:,.0f} tokens/s"
    said += f", MFU {used:.1%}" if used else ""
    for card in CARDS:
        if card in device_name(device) and len(methods) == 1:
            said += f", estimated {estimate(card, student, micro_batch, compile, args.rows, args.n)[1]:.1%}"
    return said


def bench_step(args, device: torch.device) -> list[dict]:
    """One row, forward, backward, clipping and AdamW; teacher and student with random weights."""
    x, y = random_rows(args.student, 1, args.n, device)

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

    def ours() -> Callable:
        return our_step(("alra",), args.student, make_teacher(args, device), 1, 1, args.n, device)

    found = measure_alone({"ours": ours, "transformers": hugging_face}, args.repeats, device)
    note = f"{args.student} student, one row of {args.n}, AdamW; not in turn"
    return [row("step", "ours", found, "transformers", note)]


def bench_steps(args, device: torch.device) -> list[dict]:
    cases = {name: ((name,), args.rows, True) for name in args.methods}
    cases[f"all {len(args.methods)}"] = (args.methods, args.rows, True)
    lines = step_lines("steps", cases, args.student, make_teacher(args, device), args, device, "vanilla_kd")
    *single, last = (x["sec"] for x in lines)
    if len(lines) == len(cases):
        lines[-1]["note"] += f"; {last / sum(single):.2f} of the time of all one by one"
    return lines


# --- all of a card ---------------------------------------------------------------------------------------------------


def bench_gpu(args, device: torch.device) -> list[dict]:
    """What a card does, until --minutes are over: each part is begun only before."""
    end, lines = time.monotonic() + 60 * args.minutes, [gpu_tests()]
    teacher = make_teacher(args, device, compile=False)
    small, big = args.students
    steps = functools.partial(step_lines, teacher=teacher, args=args, device=device)
    nine = {"alra": (("alra",), args.rows, True), f"all {len(args.methods)}": (args.methods, args.rows, True)}
    pair = {name: ((name,), args.rows, True) for name in ("vanilla_kd", "alra")}

    def sizes(compile: bool) -> list[dict]:
        how, lines = "compiled" if compile else "eager", []
        for student in args.students:
            cases = {f"{student}, micro_batch {m}, {how}": (("alra",), m, compile) for m in args.sizes}
            lines += steps("gpu step", cases, student)
        return lines

    parts = {
        "fused": lambda: bench_fused(args, device),
        "eager steps": lambda: sizes(False),
        "compiled steps": lambda: teacher.model.compile_layers() or sizes(True),
        "ALRA beside vanilla KD": lambda: steps("gpu pair", pair, big, against="vanilla_kd"),
        "profile": lambda: profile_step(big, teacher, args, device),
        "nine students": lambda: steps("gpu nine", nine, small, against="alra"),
    }
    for name, part in parts.items():
        say(f" {name}")
        late = time.monotonic() >= end
        lines += [line("gpu", name, f"left out: {args.minutes} minutes are over")] if late else part()
    return lines + bench_roofline(args, device)


def bench_roofline(args, device: torch.device) -> list[dict]:
    """Nothing is measured."""
    lines = []
    for card, student, m, compile in itertools.product(CARDS, ("500m", "200m"), (args.rows, 1), (False, True)):
        sec, used, parts = estimate(card, student, m, compile, args.rows, args.n)
        note = f"estimated MFU {used:.1%}; ms: " + ", ".join(f"{k} {1e3 * v:.1f}" for k, v in parts.items())
        case = f"{card}, {student}, micro_batch {m}, layers {'compiled' if compile else 'eager'}"
        lines.append(line("roofline", case, note, sec=sec))
    return lines


def gpu_tests() -> dict:
    """The tests with the marker `gpu`: their last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1].strip("= ")
    return line("gpu tests", "pytest -m gpu", last, sec=time.perf_counter() - begun)


def profile_step(student: str, teacher: Teacher, args, device: torch.device) -> list[dict]:
    """Where the time of a compiled ALRA step goes: shares of the wall time."""
    case = our_step(("alra",), student, teacher, args.rows, args.rows, args.n, device)
    with mock.patch.object(train, "head_losses", wraps=head_losses) as called:
        case()
    (heads, *others), _ = called.call_args
    wall, step = kernel_seconds(case, device)
    _, loss = kernel_seconds(lambda: head_losses(heads, *others), device)
    shares = {"products": step["products"], "attention": step["attention"], "objective": loss["other"]}
    shares |= {"element-wise, norms, AdamW": step["other"] - loss["other"], "idle": wall - sum(step.values())}
    case = f"{student}, {args.rows} rows: "
    return [line("gpu profile", case + name, f"{sec / wall:.1%} of the time", sec=sec) for name, sec in shares.items()]


def kernel_seconds(case: Callable, device: torch.device) -> tuple[float, dict[str, float]]:
    """Run a case under the profiler -> its wall time, and the seconds of its kernels (operators on the CPU) by kind."""
    cuda = device.type == "cuda"
    case()  # the gradients that are accumulated exist
    start_memory(device)  # waits for them
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profile:
        begun = time.perf_counter()
        case()
        if cuda:
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - begun
    sums = {"products": 0.0, "attention": 0.0, "other": 0.0}
    for e in profile.key_averages():
        if (e.device_type == DeviceType.CUDA) == cuda and not e.is_user_annotation:
            attention = re.search("attention|flash|fmha|sdpa", e.key, re.I)
            product = re.search(r"gemm|nvjet|cutlass|xmma|cublas|::(add|b)?mm", e.key, re.I)
            kind = "attention" if attention else "products" if product else "other"
            sums[kind] += (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e6
    return wall, sums


# --- preparing and scoring -------------------------------------------------------------------------------------------


def bench_prepare(args, device: torch.device) -> list[dict]:
    """All that prepare.py does, with and without loading its tokenizer, beside encode_batch_fast on the same batches."""
    cfg = configure.Config(source=args.source, tokenizer=args.tokenizer, seq_len=args.n, train_rows=None, val_rows=64)
    tokenizer = load_tokenizer(args.tokenizer)
    records = prepare.open_source(args.source, None).records(0)
    texts = [[text for _, text in batch] for batch in prepare.batched(records)]
    n_chars = sum(map(len, itertools.chain(*texts)))

    def whole():
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), tempfile.TemporaryDirectory() as to:
            prepare.prepare(dataclasses.replace(cfg, data_dir=to))

    once = {"lib.hf.load_tokenizer": tokenizer, "lib.hf.tokenizer_hash": tokenizer_hash(tokenizer),
            "prepare.token_table": prepare.token_table(tokenizer)}  # fmt: skip

    def loaded():
        with contextlib.ExitStack() as stack:
            for name, value in once.items():
                stack.enter_context(mock.patch(name, return_value=value))
            whole()

    def tokenizer_alone():
        for batch in texts:
            tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)

    ours = {"prepare.py, once loaded": loaded, "prepare.py, loading included": whole}
    found = measure({**ours, "tokenizer alone": tokenizer_alone}, args.repeats, torch.device("cpu"))
    return [row("prepare", case, found, "tokenizer alone", f"{n_chars / 1e6:.1f} M characters") for case in ours]


def bench_eval(args, device: torch.device) -> list[dict]:
    """A random model of two layers with the whole head, on the first items of every task in --data_dir."""
    from lm_eval.models.huggingface import HFLM

    import eval as ours
    from lib import tasks

    if args.data_dir is None:
        say("  no --data_dir with the tasks' items: left out")
        return []
    tokenizer = load_tokenizer(args.tokenizer)
    options = ours.arguments(["bench", f"--data_dir={args.data_dir}", f"--limit={args.limit}"])
    if len(tokenizer) > args.vocab:
        raise ValueError(f"--vocab={args.vocab}: {args.tokenizer} has {len(tokenizer):,} tokens; take as many")
    names = [name for name in tasks.choose_tasks("all", "heldout") if name != "storycloze_2016"]
    items = tasks.read_items(names, "heldout", args.data_dir, None)
    model = init_student(Qwen2Config(64, 172, 2, 2, 2, vocab_size=args.vocab), 1234).to(device)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, tokenizer)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    like = {"max_length": 512, "batch_size": 16, "logits_cache": False, "device": str(device)}
    scorers = {"eval.py": ours.Scorer(model, tokenizer), "HFLM": HFLM(pretrained=theirs, tokenizer=tokenizer, **like)}
    cases = {name: functools.partial(ours.benchmarks, scorer, items, options) for name, scorer in scorers.items()}
    found = measure(cases, args.repeats, device)
    note = f"{len(names)} tasks, {args.limit} items each; head of 64 x {args.vocab:,}"
    return [row("eval", "eval.py", found, "HFLM", note)]


# --- the table -----------------------------------------------------------------------------------------------------

SECTIONS = {
    "loss": bench_loss, "fused": bench_fused, "rows": bench_rows, "step": bench_step, "prepare": bench_prepare,
    "eval": bench_eval, "steps": bench_steps, "gpu": bench_gpu, "roofline": bench_roofline,
}  # fmt: skip
BY_NAME = ("steps", "gpu", "roofline")  # run only where they are asked for
OPTIONS = {  # default, help
    "device": ("auto", "auto, cpu, cuda or cuda:1"),
    "repeats": (5, "rounds"),
    "methods": (",".join(tuple(METHODS)[:9]), "names of losses.METHODS"),
    "n": (512, "positions, and inputs per row"),
    "vocab": (151_936, "tokens"),
    "d_s": (768, "width of the student's head"),
    "d_t": (2048, "width of the teacher's head"),
    "rows": (16, "rows per update, of `steps`, `gpu` and `roofline`"),
    "minutes": (7.0, "of `gpu`: nothing is begun later"),
    "source": ("python", "of `prepare`"),
    "tokenizer": ("demo/teacher", "of `prepare` and `eval`"),
    "data_dir": (None, "of `eval`: JSONL files, as for eval.py"),
    "limit": (60, "of `eval`: items per task"),
    "out": (None, "OUT.json and OUT.md are written; out/bench, for `gpu` results/bench/gpu"),
}
TINY = {"n": 13, "vocab": 4096, "d_s": 24, "d_t": 40, "rows": 2, "sizes": (1, 2), "student": "mini", "repeats": 1,
        "students": ("mini", "mini"), "teacher": "demo_teacher", "methods": ("vanilla_kd", "alra")}  # fmt: skip


def provenance(args, device: torch.device) -> dict:
    """Commit and date, and where something is measured the machine and its versions."""
    facts = machine_facts(device)
    found = {"commit": (facts["git_commit"] or "")[:7], "date": time.strftime("%F")}
    if args.sections != ["roofline"]:
        found |= {"device": facts["machine"], "threads": torch.get_num_threads(), **facts["versions"]}
    return found


def markdown(lines: list[dict], about: dict, args) -> str:
    said = f"N = {args.n}, V = {args.vocab:,}, heads of {args.d_s} and {args.d_t}; medians of {args.repeats} rounds [range]."
    if args.sections == ["roofline"]:
        counts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in COUNTS.items())
        said = (
            f"Nothing is measured: {args.rows} rows of {args.n} per update, {counts}. `lib/roofline.py` says what these count, "
            "and has the cards' rates."
        )
    numbers = {"time_ratio": ".2f", "memory_ratio": ".2f", "sec": ".3f", "mib": ",.0f"}
    text = [", ".join(f"{k} {v}" for k, v in about.items()) + ".", "", said, ""]
    text += ["| section | case | beside | time ratio | memory ratio | seconds | peak MiB | note |"]
    text += ["|---|---|---|--:|--:|--:|--:|---|"]
    for x in lines:
        cells = [x["section"], x["case"], x["against"] or ""]
        for key, form in numbers.items():
            spread = ", ".join(f"{end:{form}}" for end in x.get(f"{key}_range", ()))
            cells.append(f"{x[key]:{form}}" + f" [{spread}]" * bool(spread) if x.get(key) is not None else "")
        text.append("| " + " | ".join([*cells, x["note"]]) + " |")
    return "\n".join(text) + "\n"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all but {', '.join(BY_NAME)} without a name")
    for name, (default, told) in OPTIONS.items():
        add(f"--{name}", type=str if default is None else type(default), default=default, help=told)
    add("--student", default="200m", choices=PRESETS)
    add("--teacher", choices=PRESETS, help="of steps; 500m without a GPU, 1.8b with one")
    add("--tiny", action="store_true", help="sizes for a try on a CPU")
    args = parser.parse_args(argv)
    args.sections = args.sections or [name for name in SECTIONS if name not in BY_NAME]
    args.methods, args.sizes, args.students = tuple(args.methods.split(",")), (1, 4, args.rows), ("200m", "500m")
    args.teacher = args.teacher or ("1.8b" if torch.cuda.is_available() else "500m")
    args.out = args.out or ("results/bench/gpu" if "gpu" in args.sections and not args.tiny else "out/bench")
    vars(args).update(TINY if args.tiny else {})
    for given, known in ((args.sections, SECTIONS), (args.methods, METHODS)):
        for name in given:
            if name not in known:
                raise UserError(f"{name}: expected one of {', '.join(known)}")
    for need in ("alra", "vanilla_kd"):
        if need not in args.methods and {"loss", "fused", "gpu"} & set(args.sections):
            raise UserError(f"--methods={','.join(args.methods)}: `loss` and `fused` compare with {need}; add it")
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats}: expected at least 1")
    return args


def run(argv: list[str]) -> None:
    args = arguments(argv)
    device = pick_device(args.device)
    if "gpu" in args.sections and device.type != "cuda" and not args.tiny:
        raise UserError(f"gpu: expected a CUDA device, got {device}; run it where one is, or add --tiny for its path")
    about, out, lines = provenance(args, device), Path(args.out), []
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "data_dir", "source", "tokenizer")}  # no paths
    for name in args.sections:
        say(name)
        torch.manual_seed(1234)
        lines += SECTIONS[name](args, device)
        found = {"machine": about, "settings": settings, "lines": lines}
        out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(lines, about, args))
    print(out.with_suffix(".md").read_text())


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
