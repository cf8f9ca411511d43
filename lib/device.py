"""Devices: which one to compute on, its name, its peak performance and its memory."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
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

# FLOP/s of dense bf16 products with fp32 accumulation, from the makers' data sheets. A card's name
# contains the key as words; the first match counts.
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def pick_device(name) -> torch.device:
    """Return an existing device for "auto", "cpu", "cuda" or "cuda:1".

    Under torchrun "cuda" is the process's own card. A process that computes on the CPU keeps the
    memory that it frees. Raises `UserError` if there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    n = torch.cuda.device_count()
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if name == "cuda" and n_processes <= n:
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if name not in ("cpu", *(f"cuda:{i}" for i in range(n))):
        raise UserError(
            f"device={name}: expected cpu, or cuda with a card for each process; "
            f"torch finds {n} CUDA devices for {n_processes} processes"
        )
    if name == "cpu":
        keep_memory()
    return torch.device(name)


def keep_memory():
    """Let glibc keep freed blocks of any size.

    Otherwise it returns them to the system, and faulting their pages in again takes up to a fifth
    of a step.
    """
    with contextlib.suppress(AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-2, 2**26)  # M_TOP_PAD


def device_name(device) -> str:
    """Return the name of the GPU or, if the system knows it, of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*:(.*)", info.read_text(), re.M)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def machine_facts(device) -> dict:
    """Return commit, versions and machine, which belong to every result.

    A commit with uncommitted edits is marked by a hash of these, COMMIT+HASH.
    """
    commit = run_git("rev-parse", "HEAD").strip()
    edits = uncommitted_edits()
    if edits:
        commit += f"+{hashlib.sha256(edits.encode()).hexdigest()[:12]}"
    versions = {"python": platform.python_version()}
    for module in (torch, transformers, np):
        versions[module.__name__] = module.__version__
    return {
        "git_commit": commit or None,
        "versions": versions,
        "machine": device_name(device),
        # instructions and threads change how sums are rounded
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def uncommitted_edits() -> str:
    """Return `git diff HEAD` without the results of studies. Untracked files are not in it."""
    return run_git("diff", "HEAD", "--", ":/", ":(top,exclude)study/results")


def run_git(*arguments: str) -> str:
    """Return the output of a git command in this checkout; nothing without git or a checkout."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, errors="replace", check=False).stdout


def mfu(flops_per_sec: float, device, n_devices: int) -> float | None:
    """Return the model FLOPs utilisation: a share of the peak of all cards.

    None for a CPU or an unknown card.
    """
    name = device_name(device)
    for key, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{key}\b", name):
            return flops_per_sec / (peak * n_devices)
    return None


def peak_bytes(device) -> int:
    """Return the most memory that this process has had: allocated on its card, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def repair_compile_cache():
    """Delete the empty libraries that a killed compiler left in torch's cache.

    torch would try to load them again and again. Those younger than 5 seconds stay, as another
    process may be linking them.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes a second

    for file in Path(cache_dir()).rglob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process was first
            facts = file.stat()
            if not facts.st_size and time.time() - facts.st_mtime > 5:
                file.unlink()
                print(f"torch's compile cache: removed {file}, which is empty", file=sys.stderr)


def give_back_memory():
    """Make glibc return freed memory to the system, also from between blocks in use."""
    with contextlib.suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
