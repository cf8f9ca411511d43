"""Which device a run computes on, what it needs there, and the micro-batch that fits."""

import contextlib
import ctypes
import dataclasses
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import torch

from lib.files import UserError
from model import Qwen2, Qwen2Config

ROOM = 0.9  # the share of a card's free memory that a run counts on


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` -> an existing device; under torchrun `cuda` is each process's own card."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    n = torch.cuda.device_count()
    if name not in ("cpu", *(f"cuda:{i}" for i in range(n))):
        there = f" with one of this machine's {n} CUDA devices" if n else ", of which torch finds none here"
        raise UserError(f"device {name}: expected cpu, or cuda{there}")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def require_compiler(device: torch.device) -> None:
    """`UserError` where torch.compile has no compiler to work with: a C++ one on the CPU, a C one for Triton on a GPU."""
    if device.type == "cuda":
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))) or not header.is_file():
            raise UserError(
                f"compile=True: Triton needs a C compiler and {header}; install gcc and Python's headers (python3-dev), or "
                "set compile=False"
            )
        return
    from torch._inductor import cpp_builder  # imported here: it takes a second, and few runs need it
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            "compile=True: no C++ compiler works here; install g++, name one in CXX, or set compile=False"
        ) from error


# --- memory ----------------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Memory that is free now, on the card or in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def give_back_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc): it keeps what lies below anything newer."""
    with contextlib.suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def run_bytes(
    student: Qwen2Config, n_students: int, teacher: tuple | None, seq_len: int, group: int, width: int, recompute: bool,
    shard: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Peak memory of a run on one device -> (bytes at any micro_batch, bytes more for each row of a micro-batch).

    teacher  its parameters, D and F (`lib.teacher.teacher_size`), or None
    width    bytes of an activation: 2 for bfloat16

    With P parameters, L layers, T inputs per row, D width, F width inside the MLP, HK and GK widths of queries and keys:

        fixed    16 P for each student (weights, gradients and two moments, fp32), width * P of the teacher; for the head
                 (width + 4) V D for each student and five fp32 matrices of logits [group * T, V]
        per row  for each student width * T * (L (6 D + 4 HK + 3 GK + 4 F) + 5 D); for the teacher width * T * (9 D + 4 F).
                 With `recompute`, L D and one layer's share instead of L layers' share

    With `shard` = K > 1 what lies in layers is spread, 1 / K of it on each process, and two layers are whole at a time. Of a
    student all is spread, at 16 P / K; its gradients (4 P) and what is outside its layers are whole until an update's end.

    The share of a layer is what autograd keeps of it in eager mode; compiled layers keep about half.
    """
    fixed = 5 * 4 * group * seq_len * student.vocab_size
    fixed += n_students * (width + 4) * student.vocab_size * student.hidden_size
    total, outside, layer = count(student), count(student, 0), count(student, 1) - count(student, 0)
    fixed += n_students * (16 * total // shard + (shard > 1) * 4 * (total + outside + 2 * layer))
    c, k = student, student.head_dim
    layer = 6 * c.hidden_size + 4 * c.num_attention_heads * k + 3 * c.num_key_value_heads * k + 4 * c.intermediate_size
    kept = c.num_hidden_layers * (c.hidden_size if recompute else layer) + recompute * layer + 5 * c.hidden_size
    per_row = n_students * width * seq_len * kept
    if teacher:
        n_params, wide, inner, n_layers, inside = teacher
        fixed += width * (n_params - inside + inside // shard + (shard > 1) * 2 * inside // n_layers)
        per_row += width * seq_len * (9 * wide + 4 * inner)
    return fixed, per_row


def count(shape: Qwen2Config, n_layers: int | None = None) -> int:
    """Parameters of a decoder of this shape, or of one with `n_layers` layers, a tied head counted once."""
    if n_layers is not None:
        shape = dataclasses.replace(shape, num_hidden_layers=n_layers)
    with torch.device("meta"):
        return Qwen2(shape).n_params


def fitting_micro_batch(rows: int, group: int, room: int, fixed: int, per_row: int) -> int:
    """The largest divisor of `rows` that is a multiple of `group` and fits `room` bytes; `group` where nothing fits."""
    sizes = [m for m in range(group, rows + 1, group) if rows % m == 0]
    return max((m for m in sizes if fixed + m * per_row <= room), default=group)
