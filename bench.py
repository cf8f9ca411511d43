"""Speed and memory, as ratios to what one would have without this project, in one run.

    python bench.py loss fused rows step prepare eval       the sections asked for; without a name, all but `steps`
    python bench.py fused --n=1024 --d_s=1024 --repeats=9   other sizes
    python bench.py steps --teacher=1.8b --student=500m     every method, and all nine at once, on a GPU

    loss     the objective alone, forward and backward from logits, beside the obvious eager implementation
    fused    heads and loss, beside their matrix products alone, and Liger's fused JSD where it is installed
    rows     heads and loss of four rows, beside the same with all their logits at once
    step     a whole training step of one row, beside a plain transformers loop with the obvious eager loss
    steps    training steps of each method, and of nine students at once: tokens per second, MFU, peak memory
    prepare  prepare.py beside its tokenizer alone
    eval     eval.py beside lm-eval's Hugging Face backend

Cases of a section run in turn, round after round, so that a machine's moods hit all alike; what is reported is the
median of the rounds, the ratio's round by round, and the range. Memory is the peak above what stood before the call
(resident memory on the CPU of a Linux machine, allocated memory on a GPU). Writes OUT.json and OUT.md.
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
from torch.nn import functional as F

import configure
import losses
import prepare
import train
from lib.device import device_name, pick_device
from lib.hf import load_tokenizer, tokenizer_hash
from lib.runlog import mfu
from lib.teacher import Teacher
from losses import METHODS, fused_head_loss, method_loss
from model import PRESETS, Qwen2Config, init_student

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
    """Run each case once for warm-up, then all in turn -> per case its seconds by round, and its peak MiB."""
    for name, case in cases.items():
        say(f"  {name}: warm-up")
        case()
    found = {name: {"sec": [], "mib": []} for name in cases}
    for i in range(repeats):
        for name, case in cases.items():
            before = start_memory(device)
            synchronize(device)
            begun = time.perf_counter()
            case()
            synchronize(device)
            found[name]["sec"].append(time.perf_counter() - begun)
            found[name]["mib"].append(peak_memory(device, before))
        say(f"  round {i + 1} of {repeats}")
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_memory(device: torch.device) -> float | None:
    """Free memory and reset the peak -> MiB in use now; None where the system does not report it."""
    gc.collect()
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
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
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith(key + ":"))


def row(section: str, case: str, found: dict, against: str | None, note: str = "") -> dict:
    """One line of the table: a case beside another of its section, by the median over rounds."""
    a, b = found[case], found.get(against)
    line = {"section": section, "case": case, "sec": statistics.median(a["sec"]), "sec_range": [min(a["sec"]), max(a["sec"])],
            "mib": None if None in a["mib"] else statistics.median(a["mib"]), "against": against, "note": note}  # fmt: skip
    if b:
        ratios = [x / y for x, y in zip(a["sec"], b["sec"], strict=True)]
        line |= {"time_ratio": statistics.median(ratios), "time_ratio_range": [min(ratios), max(ratios)]}
        peaks = None not in a["mib"] + b["mib"] and statistics.median(b["mib"]) > 0
        line["memory_ratio"] = line["mib"] / statistics.median(b["mib"]) if peaks else None
    return line


# --- the sections --------------------------------------------------------------------------------------------------


def random_logits(n: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random student and teacher logits that partly agree, and labels."""
    generator = torch.Generator().manual_seed(1234)
    z_t = torch.randn(n, vocab, generator=generator) * 2.5
    z_s = z_t * 0.5 + torch.randn(n, vocab, generator=generator) * 1.5
    return z_s.to(device), z_t.to(device), torch.randint(0, vocab, (n,), generator=generator).to(device)


def bench_loss(args, device: torch.device) -> list[dict]:
    z_s, z_t, y = random_logits(args.n, args.vocab, device)
    torch._dynamo.config.recompile_limit = len(METHODS)  # `both` is one piece of code for all of them

    def compiled(name: str) -> Callable:
        objective = functools.partial(METHODS[name].fn, **METHODS[name].hyper)

        def mean(z_s: Tensor, z_t: Tensor, y: Tensor) -> Tensor:
            found = objective(z_s, z_t, y)
            return (found.loss if isinstance(found, tuple) else found).mean()

        both = torch.func.grad_and_value(mean)
        both = torch.compile(both, dynamic=False, fullgraph=True)
        return lambda: both(z_s, z_t, y)

    def eager(loss: Callable) -> Callable:
        def case():
            z = z_s.detach().requires_grad_()
            torch.autograd.grad(loss(z, z_t, y), z)

        return case

    cases = {name: compiled(name) for name in args.methods}
    cases |= {"eager alra": eager(eager_alra), "eager vanilla_kd": eager(eager_vanilla_kd)}
    cases["alra, not compiled"] = eager(lambda *z: losses.alra(*z).mean())
    found = measure(cases, args.repeats, device)
    lines = [row("loss", "alra", found, "eager alra"), row("loss", "alra", found, "vanilla_kd")]
    lines += [row("loss", "alra, not compiled", found, "eager alra"), row("loss", "eager alra", found, "eager vanilla_kd")]  # fmt: skip
    return lines + [row("loss", name, found, "vanilla_kd") for name in args.methods if name not in ("alra", "vanilla_kd")]  # fmt: skip


def bench_fused(args, device: torch.device) -> list[dict]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(1234)
    h_s = torch.randn(1, args.n, args.d_s, device=device, dtype=dtype).requires_grad_()
    w_s = (torch.randn(args.vocab, args.d_s, device=device) * 0.02).requires_grad_()
    h_t = torch.randn(1, args.n, args.d_t, device=device, dtype=dtype)
    w_t = (torch.randn(args.vocab, args.d_t, device=device) * 0.02).to(dtype)
    y = torch.randint(0, args.vocab, (1, args.n), device=device)

    def products():
        """The products that every implementation needs: the logits of both, and the student's two gradients."""
        with torch.no_grad():
            w = w_s.to(dtype)
            h_t[0] @ w_t.T
            z_s = h_s[0] @ w.T
            return z_s @ w, z_s.T @ h_s[0]

    def fused(name: str) -> Callable:
        def case():
            h_s.grad = w_s.grad = None
            fused_head_loss(h_s, w_s, h_t, w_t, y, name, compile=True)[0].backward()

        return case

    def plain(name: str) -> Callable:
        def case():
            h_s.grad = w_s.grad = None
            z_s, z_t = (h_s[0] @ w_s.to(dtype).T).float(), (h_t[0] @ w_t.T).float()
            method_loss(name, z_s, z_t, y[0])[0].backward()

        return case

    def eager():
        h_s.grad = w_s.grad = None
        eager_alra((h_s[0] @ w_s.to(dtype).T).float(), (h_t[0] @ w_t.T).float(), y[0]).backward()

    cases = {"products alone": products, **{name: fused(name) for name in args.methods}}
    cases |= {"plain alra": plain("alra"), "eager alra": eager}
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        say("  liger-kernel is not installed: its line is left out")
    else:
        liger = LigerFusedLinearJSDLoss(beta=0.0, compiled=True, chunk_size=args.n)

        def case():
            h_s.grad = w_s.grad = None
            liger(h_s[0], w_s.to(dtype), h_t[0], w_t, y[0]).backward()

        cases["Liger, KL + CE"] = case
    found = measure(cases, args.repeats, device)
    lines = [row("fused", "alra", found, b) for b in ("products alone", "vanilla_kd", "Liger, KL + CE", "plain alra", "eager alra") if b in found]  # fmt: skip
    return lines + [row("fused", name, found, "products alone") for name in args.methods if name != "alra"]


def bench_rows(args, device: torch.device) -> list[dict]:
    """Four rows: the fused path holds the logits of one forward batch at a time, the plain one those of all."""
    torch.manual_seed(1234)
    h_s = torch.randn(4, args.n, args.d_s, device=device).requires_grad_()
    w_s = (torch.randn(args.vocab, args.d_s, device=device) * 0.02).requires_grad_()
    h_t, w_t = torch.randn(4, args.n, args.d_t, device=device), torch.randn(args.vocab, args.d_t, device=device) * 0.02
    y = torch.randint(0, args.vocab, (4, args.n), device=device)

    def fused():
        h_s.grad = w_s.grad = None
        fused_head_loss(h_s, w_s, h_t, w_t, y, "alra", compile=True)[0].backward()

    def plain():
        h_s.grad = w_s.grad = None
        logits = zip(h_s @ w_s.T, h_t @ w_t.T, y, strict=True)
        (sum(method_loss("alra", z_s, z_t, labels)[0] for z_s, z_t, labels in logits) / 4).backward()

    found = measure({"fused": fused, "plain": plain}, args.repeats, device)
    return [row("rows", "fused", found, "plain", "ALRA, four forward batches")]


def bench_step(args, device: torch.device) -> list[dict]:
    """One row, forward, backward, clipping and AdamW; teacher and student with random weights."""
    shape, teacher_shape = PRESETS[args.student], PRESETS[args.teacher]
    x, y = torch.randint(0, shape.vocab_size, (2, 1, args.n), generator=torch.Generator().manual_seed(1234)).to(device)

    def hugging_face() -> Callable:
        teacher, student = (transformers.AutoModelForCausalLM.from_config(hf_config(s)).to(device) for s in (teacher_shape, shape))  # fmt: skip
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

    found = {}
    for name, make in {"ours": lambda: our_step(("alra",), args, x, y, device)[0], "transformers": hugging_face}.items():  # fmt: skip
        # one after the other, as both do not fit a small machine; memory counts all that the case holds
        before, case = start_memory(device), make()
        found |= {name: measure({name: case}, args.repeats, device)[name]}
        found[name]["mib"] = [peak_memory(device, before)]
        del case
        gc.collect()
    return [row("step", "ours", found, "transformers", f"{args.student} student, one row of {args.n}, AdamW; not in turn")]  # fmt: skip


def our_step(methods: tuple[str, ...], args, x: Tensor, y: Tensor, device: torch.device) -> tuple[Callable, Callable]:
    """train.py's own update of fresh students on these rows -> a function that makes one, and MFU by tokens per second."""
    rows = len(x)
    cfg = configure.Config(methods=methods, student=args.student, batch_rows=rows, micro_batch=rows, seq_len=args.n, out_dir="out/bench", warmup_steps=0, compile=True, device=str(device))  # fmt: skip
    env = train.Env(cfg)
    students = [train.make_student(name, cfg, device) for name in methods]
    teacher = None
    if any(map(losses.needs_teacher, methods)):
        teacher = Teacher(init_student(args.teacher, 1).to(device, env.dtype).requires_grad_(False), device)

    def case():
        h_t = teacher.hidden(x) if teacher else None
        train.update(students, teacher, itertools.repeat(train.Batch(x, y, y.numel(), h_t)), 0, cfg, env)

    flops = train.run_flops_per_token(len(methods), teacher, cfg)
    return case, lambda tok_per_sec: mfu(tok_per_sec * flops, env.device, env.world)


def bench_steps(args, device: torch.device) -> list[dict]:
    shape = PRESETS[args.student]
    tokens = (2, args.rows, args.n)
    x, y = torch.randint(0, shape.vocab_size, tokens, generator=torch.Generator().manual_seed(1234)).to(device)
    found, lines = {}, []
    for methods in [(name,) for name in args.methods] + [args.methods]:
        name = methods[0] if len(methods) == 1 else f"all {len(methods)}"
        before = start_memory(device)
        case, used = our_step(methods, args, x, y, device)
        found |= measure({name: case}, args.repeats, device)
        found[name]["mib"] = [peak_memory(device, before)]
        rate = args.rows * args.n / statistics.median(found[name]["sec"])
        share = used(rate)
        note = f"{rate:,.0f} tokens/s, MFU {'not known here' if share is None else f'{share:.1%}'}"
        if len(methods) > 1:
            one_by_one = sum(statistics.median(found[m]["sec"]) for m in methods)
            note += f"; {statistics.median(found[name]['sec']) / one_by_one:.2f} of the time of all one by one"
        lines.append(row("steps", name, found, "vanilla_kd" if "vanilla_kd" in found else None, note))
        del case
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return lines


def hf_config(shape: Qwen2Config) -> transformers.Qwen2Config:
    return transformers.Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, tie_word_embeddings=shape.tie_word_embeddings,
        max_position_embeddings=shape.max_position_embeddings,
    )  # fmt: skip


def bench_prepare(args, device: torch.device) -> list[dict]:
    """All that prepare.py does, with and without its start, beside encode_batch_fast on the same batches."""
    cfg = configure.Config(source=args.source, tokenizer=args.tokenizer, seq_len=args.n, train_rows=None, val_rows=64)
    tokenizer = load_tokenizer(args.tokenizer)
    records = prepare.open_source(args.source, None).records(0)
    texts = [[text for _, text in batch] for batch in prepare.batched(records)]
    n_chars = sum(map(len, itertools.chain(*texts)))

    def whole():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # fmt: skip
            prepare.prepare(dataclasses.replace(cfg, data_dir=folder))

    once = {"lib.hf.load_tokenizer": tokenizer, "lib.hf.tokenizer_hash": tokenizer_hash(tokenizer), "prepare.token_table": prepare.token_table(tokenizer)}  # fmt: skip

    def loaded():
        with contextlib.ExitStack() as stack:
            for name, value in once.items():
                stack.enter_context(mock.patch(name, return_value=value))
            whole()

    def tokenizer_alone():
        for batch in texts:
            tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)

    cases = {"prepare.py, once loaded": loaded, "prepare.py, loading included": whole, "tokenizer alone": tokenizer_alone}  # fmt: skip
    found = measure(cases, args.repeats, torch.device("cpu"))
    return [row("prepare", case, found, "tokenizer alone", f"{n_chars / 1e6:.1f} M characters") for case in list(cases)[:2]]  # fmt: skip


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
    yardstick = HFLM(pretrained=theirs, tokenizer=tokenizer, max_length=512, batch_size=16, logits_cache=False, device=str(device))  # fmt: skip
    scorer = ours.Scorer(model, tokenizer)
    cases = {"eval.py": lambda: ours.benchmarks(scorer, items, options), "HFLM": lambda: ours.benchmarks(yardstick, items, options)}  # fmt: skip
    found = measure(cases, args.repeats, device)
    return [row("eval", "eval.py", found, "HFLM", f"{len(names)} tasks, {args.limit} items each; head of 64 x {args.vocab:,}")]  # fmt: skip


# --- the table -----------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict:
    """The machine and the versions behind the numbers."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)  # fmt: skip
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "commit": git.stdout.strip() or None, "date": time.strftime("%F"),
    }  # fmt: skip


def markdown(lines: list[dict], about: dict, args) -> str:
    head = ", ".join(f"{k} {v}" for k, v in about.items())
    sizes = f"N = {args.n}, V = {args.vocab:,}, heads of {args.d_s} and {args.d_t}"
    columns = ("section", "case", "beside", "time ratio", "memory ratio", "seconds", "peak MiB", "note")
    text = [f"{head}.", "", f"{sizes}; medians of {args.repeats} rounds, range in brackets.", ""]
    text += ["| " + " | ".join(columns) + " |", "|---|---|---|--:|--:|--:|--:|---|"]

    def cell(line, key, form):
        value = line.get(key)
        if value is None:
            return ""
        low, high = line.get(f"{key}_range", (None, None))
        return f"{value:{form}}" + (f" [{low:{form}}, {high:{form}}]" if low is not None else "")

    for x in lines:
        cells = (x["section"], x["case"], x["against"] or "", cell(x, "time_ratio", ".2f"), cell(x, "memory_ratio", ".2f"),
                 cell(x, "sec", ".3f"), cell(x, "mib", ",.0f"), x["note"])  # fmt: skip
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


SECTIONS = {"loss": bench_loss, "fused": bench_fused, "rows": bench_rows, "step": bench_step, "steps": bench_steps, "prepare": bench_prepare, "eval": bench_eval}  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all but `steps` without a name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--methods", default=",".join(tuple(METHODS)[:9]), help="names of losses.METHODS")
    parser.add_argument("--n", type=int, default=512, help="positions, and inputs per row")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--d_s", type=int, default=768, help="width of the student's head")
    parser.add_argument("--d_t", type=int, default=2048, help="width of the teacher's head")
    parser.add_argument("--student", default="200m", choices=PRESETS)
    parser.add_argument("--teacher", default="500m", choices=PRESETS, help="of `step` and `steps`; 1.8b on a GPU")
    parser.add_argument("--rows", type=int, default=16, help="rows per update, of `steps`")
    parser.add_argument("--source", default="python", help="of `prepare`")
    parser.add_argument("--tokenizer", default="demo/teacher", help="of `prepare` and `eval`")
    parser.add_argument("--data_dir", help="of `eval`: JSONL files, as for eval.py")
    parser.add_argument("--limit", type=int, default=60, help="of `eval`: items per task")
    parser.add_argument("--out", default="out/bench", help="OUT.json and OUT.md are written")
    args = parser.parse_args(argv)
    args.sections = args.sections or [name for name in SECTIONS if name != "steps"]
    args.methods = tuple(args.methods.split(","))
    for given, known in ((args.sections, SECTIONS), (args.methods, METHODS)):
        for name in given:
            if name not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}")
    for need in ("alra", "vanilla_kd"):
        if need not in args.methods and {"loss", "fused"} & set(args.sections):
            raise ValueError(f"--methods={','.join(args.methods)}: `loss` and `fused` compare with {need}; add it")
    if args.repeats < 1:
        raise ValueError(f"--repeats={args.repeats}: expected at least 1")
    return args


def run(argv: list[str]) -> None:
    args = arguments(argv)
    device = pick_device(args.device)
    about, lines = machine(device), []
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "data_dir", "source", "tokenizer")}  # no paths
    for name in args.sections:
        say(name)
        torch.manual_seed(1234)
        lines += SECTIONS[name](args, device)
        out.with_suffix(".json").write_text(json.dumps({"machine": about, "settings": settings, "lines": lines}, indent=1) + "\n")  # fmt: skip
        out.with_suffix(".md").write_text(markdown(lines, about, args))
    print(out.with_suffix(".md").read_text())


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
