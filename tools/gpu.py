"""Run in one call of ten minutes what only a GPU can show, most valuable parts first.

    python prepare.py config/demo.py           on any machine: copy data/demo to that of the GPU
    python tools/gpu.py                        on a GPU
    python tools/gpu.py --tiny --device=cpu    the same, rehearsed on any machine
    python tools/gpu.py 200m                   one part

Each of PARTS is a process with a time limit. None needs a network, `datasets` or lm-eval.

The parts of CASES time updates on random weights and tokens, the same for all cases, in turns.
"wait" is the time in which the host waits for the device; if it is 0, the host is the bottleneck.
"GiB" is peak memory above weights and moments; "loss" the mean of the first three updates; "norm"
that of the third one's gradient.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure

# part, seconds until it is cut off, arguments of Python
PARTS = """
tests    140 -m pytest -q -m gpu tests
200m     180 {gpu} 200m
plain     60 train.py {demo} --out_dir={out}/plain
fill      60 train.py {demo} --out_dir={out}/fill --teacher_cache=True
read      60 train.py {demo} --out_dir={out}/read --teacher_cache=True
eval      60 eval.py {out}/plain --tasks=none --max_rows=64 --device={device}
eval_cpu  60 eval.py {out}/plain --tasks=none --max_rows=64 --device=cpu
500m     110 {gpu} 500m
graph     90 {gpu} graph
whole    150 {gpu} whole
loss     100 tools/bench.py --device={device} {sizes}
"""
# part, student, method, chunk_positions, and what differs from train.py:
#   graph    the teacher's forward pass is a CUDA graph
#   whole    the student's layers are compiled together, not one by one
CASES = """
200m  200m alra       2048 -
200m  200m alra       512  -
200m  200m alra       8192 -
200m  200m vanilla_kd 2048 -
200m  200m vanilla_kd 512  -
500m  500m alra       2048 -
500m  500m vanilla_kd 2048 -
graph 200m alra       2048 -
graph 200m alra       2048 graph
whole 200m alra       2048 -
whole 200m alra       2048 whole
"""


def arguments(argv) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    parts = re.findall(r"^\w+", CASES, re.M)
    parser.add_argument("part", nargs="?", choices=sorted({*parts}))
    return parser.parse_args(argv)


if __name__ == "__main__":
    configure.check_flags(arguments)

import torch
from torch.profiler import profile

import train
from lib.device import machine_facts, pick_device
from model import PRESETS, Qwen2
from run.teacher import Teacher, compile_layers
from tools.bench import measure

clip_gradients = train.clip_gradients
waits = []  # seconds


def run_parts(args):
    with tempfile.TemporaryDirectory() as out:
        places = {
            "gpu": f"{__file__} --device={args.device}{' --tiny' * args.tiny}",
            "demo": "config/demo.py --methods=alra --max_steps=20 --schedule_steps=20 "
            f"--warmup_steps=5 --val_max_rows=8 --device={args.device} --compile={not args.tiny}",
            "device": args.device,
            "sizes": "--teacher=demo_teacher --student=mini --seq_len=13" * args.tiny,
            "out": out,
        }
        # eval.py imports lm-eval, which only tasks need. Python prefers an installed one to this
        stub = Path(out, "lm_eval/api/model.py")
        stub.parent.mkdir(parents=True)
        stub.write_text("TemplateLM = object")
        search_path = f"{out}:{os.environ.get('PYTHONPATH', '')}"
        for line in PARTS.format(**places).strip().splitlines():
            name, limit, *command = line.split()
            began = time.perf_counter()
            limit = "0" if args.tiny else limit  # 0: none, as the machine may be slow
            # `timeout` ends the processes that a part has started too
            command = ["timeout", "-k5", limit, sys.executable, "-u", *command]
            code = subprocess.call(command, env=os.environ | {"PYTHONPATH": search_path})
            print(f"{name}: exit code {code}, {time.perf_counter() - began:.0f} s\n", flush=True)


def time_updates(part, tiny, device):
    """Print a table of the part's cases, and the kernels of one update of each."""
    print(machine_facts(device))
    sizes = "--seq_len=512 --batch_rows=16 --micro_batch=16 --compile=True"
    if tiny:
        sizes = "--seq_len=32 --batch_rows=2 --micro_batch=2"
    torch.manual_seed(0)
    with device:
        model = Qwen2(PRESETS["demo_teacher" if tiny else "1.8b"])
    model.requires_grad_(False)
    if device.type == "cuda":
        model.to(torch.bfloat16)
        compile_layers(model)
    teacher = Teacher(model, device)
    updates = {}
    for line in re.findall(rf"^{part} +(.*)", CASES, re.M):
        student, method, chunk, change = line.split()
        if tiny:
            student = "mini"
            chunk = int(chunk) // 16
        flags = f"--teacher=None --device={device} --methods={method} --chunk_positions={chunk}"
        cfg = configure.load(f"{flags} --student={student} {sizes}".split())
        updates[line] = make_case(cfg, teacher, change)
    print("| case | ms | wait, ms | GiB | loss | norm |\n|---|--:|--:|--:|--:|--:|")
    n_updates = 1 if tiny else 8
    for _ in range(3):
        for line, (update, first) in updates.items():
            update()  # after those of another case
            waits.clear()
            seconds, mib = measure(update, device, n_updates)
            ms = f"{1e3 * seconds:.1f} | {1e3 * sum(waits) / n_updates:.1f}"
            print(f"| {line} | {ms} | {mib / 1024:.1f} | {first} |", flush=True)
    for line, (update, _) in updates.items():
        with profile() as profiled:
            measure(update, device, 1)
        kernels = profiled.key_averages()
        table = kernels.table("self_device_time_total", row_limit=30, max_name_column_width=90)
        print(line, table, sep="\n")


def make_case(cfg, teacher, change):
    """Return a function that makes an update, with loss and norm of the first three updates."""
    s = train.make_student(*cfg.methods, replace(cfg, compile=cfg.compile and change != "whole"))
    if change == "whole":
        s.model.hidden = torch.compile(s.model.hidden, dynamic=False)
    torch.manual_seed(0)
    shape = (cfg.batch_rows, cfg.seq_len + 1)
    ids = torch.randint(s.model.config.vocab_size, shape, device=cfg.device)
    x = ids[:, :-1].contiguous()
    hidden = teacher.hidden
    if change == "graph" and x.is_cuda:
        hidden = torch.cuda.make_graphed_callables(hidden, (x,))
    stream = ((x, ids[:, 1:], hidden(x)) for _ in itertools.count())
    update = partial(train.update, [s], teacher, stream, 0, cfg)
    for _ in range(3):
        update()
    loss = s.totals()["loss"] / (3 * x.numel())
    return update, f"{loss:.6f} | {s.gnorm:.5f}"


def clip(*inputs):
    """Clip as training does, and time how long the host waits for the norm."""
    norm = clip_gradients(*inputs)
    began = time.perf_counter()
    norm.item()
    waits.append(time.perf_counter() - began)
    return norm


def main(argv):
    args = arguments(argv)
    if args.part:
        train.clip_gradients = clip
        time_updates(args.part, args.tiny, pick_device(args.device))
    else:
        run_parts(args)


if __name__ == "__main__":
    configure.run(main)
