"""Devices: which one to compute on, its name, its peak and its free memory."""

import contextlib
import ctypes
import hashlib
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from lib.errors import UserError

# Dense bf16 products with fp32 accumulation, FLOP/s, as the makers' data sheets give them.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12,
              "RTX 3090": 71e12}  # fmt: skip


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` -> an existing device; under torchrun `cuda` is each process's own card.

    A process that computes on the CPU keeps the memory that it frees.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    n = torch.cuda.device_count()
    if name not in ("cpu", *(f"cuda:{i}" for i in range(n))):
        hint = f" with one of this machine's {n} CUDA devices" if n else ", but torch finds no CUDA device"
        raise UserError(f"device={name}: expected cpu, or cuda{hint}")
    if name == "cpu":
        keep_memory()
    return torch.device(name)


def keep_memory() -> None:
    """Have the C library (glibc) keep freed blocks of any size: to fault their pages in again took up to a fifth of a step."""
    with contextlib.suppress(AttributeError, TypeError):
        for option, value in {-4: 0, -1: 2**31 - 1, -2: 2**26}.items():  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            ctypes.CDLL(None).mallopt(option, value)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's if the system knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_facts(device: torch.device) -> dict:
    """Commit, versions and machine: what a result must be read with."""

    def git(*command: str) -> str:
        line = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout if shutil.which("git") else ""

    commit, edits = git("rev-parse", "HEAD").strip(), git("diff", "HEAD", "--", ":/", ":(top,exclude)study/results")
    commit += f"+{hashlib.sha256(edits.encode()).hexdigest()[:12]}" if edits else ""  # edited since
    versions = {"python": platform.python_version(), **{m.__name__: m.__version__ for m in (torch, transformers, np)}}
    return {"git_commit": commit or None, "versions": versions, "machine": device_name(device)}


def mfu(flops_per_sec: float, device: torch.device, world: int) -> float | None:
    """Model FLOPs utilisation: these FLOP/s as a share of the peak of all cards; None for an unknown card."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_name(device)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    return flops_per_sec / (peak * world) if peak else None


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held, of the card or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def repair_compile_cache() -> None:
    """Remove the empty libraries that a killed compiler left in torch's cache, which torch would load again and again.

    Not those that another process may be linking now: they are younger than 5 seconds.
    """
    from torch._inductor.runtime.cache_dir_utils import (
        cache_dir,  # a second, and only compiled runs need it
    )

    for file in Path(cache_dir()).rglob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process was first
            if not file.stat().st_size and time.time() - file.stat().st_mtime > 5:
                file.unlink()
                print(f"torch's compile cache: removed {file}, which is empty", file=sys.stderr)


def give_back_memory() -> None:
    """Return freed memory to the system if the C library can (glibc): it keeps what lies below newer allocations."""
    with contextlib.suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
