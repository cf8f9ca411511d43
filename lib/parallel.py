"""Processes: how many there are, which one this is, sums over them."""

import os

import torch
import torch.distributed as dist
from torch import Tensor


def start(device: torch.device) -> None:
    """Make `device` the current one, and join the other processes of this torchrun, where there are any."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # else every process opens a context on card 0 too
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)


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


def everyones(value) -> list:
    """The value that each process gives, by rank."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def wait(device: torch.device) -> None:
    """Until every process is here."""
    sum_in_place([torch.zeros(1, device=device)])
