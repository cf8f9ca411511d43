"""Speed and memory, as ratios to what one would have without this project, in one run.

    python tools/bench.py                                         all sections
    python tools/bench.py fused --n=1024 --d_s=1024 --repeats=9   other sizes
    python tools/bench.py steps --teacher=1.8b --student=500m     on a GPU
    python tools/bench.py profile                                 where the time of a step goes, by torch.profiler

    fused    heads and loss, beside their matrix products alone, the obvious eager code, and Liger's fused JSD
    step     a training step of one row, beside a plain transformers loop with the obvious eager loss
    steps    training steps of each method, and of all at once: tokens per second, MFU, peak memory

Cases run in turn, round after round, so that a machine's moods hit all alike; whole steps run one after the other, as few
machines hold two. The table has the median of the rounds, the ratio's round by round, and the range. Memory is the peak
above what stood before: resident memory on the CPU of a Linux machine, allocated memory on a GPU. Writes OUT.json and OUT.md.
"""

import argparse
import ctypes
import dataclasses
import functools
import gc
import itertools
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import configure
import losses
import train
from lib.device import machine_facts, mfu, pick_device
from lib.files import UserError
from lib.fused import head_losses
from lib.teacher import Teacher
from losses import METHODS
from model import PRESETS, flops_per_token, init_student

# --- what one would write at first ---------------------------------------------------------------------------------


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


def bench_profile(args, device: torch.device) -> list[dict]:
    """The kernels of one compiled ALRA step that take most of the time."""
    case = our_step(("alra",), args.student, make_teacher(args, device), args.rows, args.rows, args.n, device)
    case()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profile:
        case()
    say(profile.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=25))
    return []


# --- the table -----------------------------------------------------------------------------------------------------

SECTIONS = {"fused": bench_fused, "step": bench_step, "steps": bench_steps, "profile": bench_profile}
OPTIONS = {  # default, help
    "device": ("auto", "auto, cpu, cuda or cuda:1"),
    "repeats": (5, "rounds"),
    "methods": (",".join(tuple(METHODS)[:9]), "names of losses.METHODS"),
    "n": (512, "positions, and inputs per row"),
    "vocab": (151_936, "tokens"),
    "d_s": (768, "width of the student's head"),
    "d_t": (2048, "width of the teacher's head"),
    "rows": (16, "rows per update, of `steps` and `profile`"),
    "out": ("out/bench", "OUT.json and OUT.md are written"),
}
def provenance(device: torch.device) -> dict:
    facts = machine_facts(device)
    return {"commit": (facts["git_commit"] or "")[:7], "date": time.strftime("%F"), "device": facts["machine"],
            "threads": torch.get_num_threads(), **facts["versions"]}  # fmt: skip


def markdown(lines: list[dict], about: dict, args) -> str:
    said = f"N = {args.n}, V = {args.vocab:,}, heads of {args.d_s} and {args.d_t}; medians of {args.repeats} rounds [range]."
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
    add("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all without a name")
    for name, (default, told) in OPTIONS.items():
        add(f"--{name}", type=str if default is None else type(default), default=default, help=told)
    add("--student", default="200m", choices=PRESETS)
    add("--teacher", choices=PRESETS, help="of steps; 500m without a GPU, 1.8b with one")
    args = parser.parse_args(argv)
    args.sections, args.methods = args.sections or list(SECTIONS), tuple(args.methods.split(","))
    args.teacher = args.teacher or ("1.8b" if torch.cuda.is_available() else "500m")
    for given, known in ((args.sections, SECTIONS), (args.methods, METHODS)):
        for name in given:
            if name not in known:
                raise UserError(f"{name}: expected one of {', '.join(known)}")
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats}: expected at least 1")
    return args


def run(argv: list[str]) -> None:
    args = arguments(argv)
    device = pick_device(args.device)
    about, out, lines = provenance(device), Path(args.out), []
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(args).items() if k != "out"}
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
