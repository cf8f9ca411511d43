"""Devices and processes: which device, which of how many processes, sums over them."""

import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` -> an existing device; under torchrun `cuda` is each process's own card."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    n = torch.cuda.device_count()
    if name not in ("cpu", *(f"cuda:{i}" for i in range(n))):
        raise ValueError(f"device {name}: expected cpu, or cuda with one of this machine's {n} CUDA devices")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def start(device: torch.device) -> None:
    """Join the other processes of this torchrun, where there are any."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_in_place(tensors: list[Tensor]) -> None:
    """Add up each tensor over the processes."""
    if world() > 1:
        for handle in [dist.all_reduce(t, async_op=True) for t in tensors]:
            handle.wait()


def wait(device: torch.device) -> None:
    """Until every process is here."""
    sum_in_place([torch.zeros(1, device=device)])
