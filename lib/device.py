"""Devices: which one to compute on, its name, its peak performance and its memory."""

import contextlib
import ctypes
import functools
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from lib import parallel
from lib.errors import UserError, note
from lib.files import text_hash
from lib.source import ROOT

# FLOP/s of dense bf16 products with fp32 accumulation, from the makers' data sheets, by the name
# that torch gives to the card. Other names, such as those of MIG's slices, have no known peak.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}


def pick_device(name, key="device") -> torch.device:
    """Return an existing device for "auto", "cpu", "cuda" or "cuda:1", the value of a key.

    Under torchrun "cuda" is the process's own card: the only one that it can see, or that of its
    rank. A process that computes on the CPU keeps the memory that it frees. Raises `UserError` if
    there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    n = torch.cuda.device_count()
    cards = [f"cuda:{i}" for i in range(n)]
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    is_shared = n_processes > 1 and name in cards
    if name == "cuda":
        if n == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
            name = "cuda:0"
        elif n_processes <= n:
            name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if is_shared or name not in ("cpu", *cards):
        raise UserError(
            f"{key}={name}: expected cpu, or cuda with a card for each process; torch finds {n} "
            f"CUDA devices for {n_processes} processes; without a card, train.py runs with "
            "--device=cpu --compile=False, other scripts with --device=cpu"
        )
    if name == "cpu":
        keep_memory()
    return torch.device(name)


def keep_memory():
    """Let glibc keep freed blocks of any size.

    Otherwise it returns them to the system, and faulting their pages in again takes up to a fifth
    of a step.
    """
    with contextlib.suppress(AttributeError):  # another C library
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
    return platform.machine()


def machine_facts(device) -> dict:
    """Return commit, versions and machine, which belong to every result."""
    versions = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version(), **versions},
        "machine": device_name(device),
        # instructions and threads change how sums are rounded
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


@functools.cache  # later edits are not of the code that runs
def git_commit() -> str | None:
    """Return the commit of the project's own repository, or None without one.

    A commit with uncommitted edits is marked by a hash of these, COMMIT+HASH. Neither untracked
    files nor the results of studies count.
    """
    commit = run_git("rev-parse", "HEAD").strip()
    edits = run_git("diff", "HEAD", "--", ":/", ":(top,exclude)study/results")
    if edits:
        commit += f"+{text_hash(edits)[:12]}"
    if not commit and parallel.rank() == 0:
        note("no commit is recorded: git finds no repository of this project alone")
    return commit or None


def run_git(*arguments: str) -> str:
    """Return the output of a git command here; nothing without git or a checkout."""
    if not shutil.which("git"):
        return ""
    # not a repository around this folder, or one that the environment names
    place = ("-C", ROOT, f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}")
    command = ("git", *place, *arguments)
    return subprocess.run(command, capture_output=True, errors="replace").stdout


def mfu(flops_per_sec: float, device, n_devices: int) -> float | None:
    """Return the model FLOPs utilisation: a share of the peak of all cards.

    None for a CPU or an unknown card.
    """
    peak = PEAK_FLOPS.get(device_name(device))
    return flops_per_sec / (peak * n_devices) if peak else None


def peak_bytes(device) -> int:
    """Return the most memory that this process has had: allocated on its card, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.M)
        if found:
            return int(found[1]) * 1024
    # on Linux at least the peak of the process that started this one
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
