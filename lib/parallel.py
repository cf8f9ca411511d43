"""Processes: sums over them, weights spread over them, what they must agree on, and one that is lost.

A function that sends anything is called by all processes, in the same order.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.files import UserError

# --- start and end ---------------------------------------------------------------------------------------------------


def start(device: torch.device, timeout_minutes: float = 30.0) -> None:
    """Make `device` the current one, and join the other processes of this torchrun, where there are any.

    Each start has keys of its own in torchrun's store: after a restart the store still holds the addresses of the
    processes before, and nobody answers there.

    timeout_minutes  how long a process waits for another one before it gives up
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # else every process opens a context on card 0 too
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=timeout, device_id=device if cuda else None
        )  # fmt: skip


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# --- what all processes know -----------------------------------------------------------------------------------------


def sum_in_place(tensors: Iterable[Tensor]) -> None:
    """Add up each tensor over the processes."""
    if world() > 1:
        for handle in [dist.all_reduce(t, async_op=True) for t in tensors]:
            handle.wait()


def total(*numbers: Tensor | float) -> list[float]:
    """Numbers, summed over the processes."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    device = next((n.device for n in numbers if isinstance(n, Tensor)), torch.device("cuda" if nccl else "cpu"))
    sums = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers])
    sum_in_place([sums])
    return sums.tolist()


def everyones(value) -> list:
    """The value that each process gives, by rank."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def from_first(make: Callable[[], Any]) -> Any:
    """What `make` gives on the first process, on all of them. Its error is raised there alone; the others exit."""
    if world() == 1:
        return make()
    sent, error = [None, True], None  # the value, whether there is none
    if rank() == 0:
        try:
            sent = [make(), False]
        except (ValueError, OSError) as slip:
            error = slip
    dist.broadcast_object_list(sent, src=0)
    if sent[1]:
        raise error or SystemExit(1)
    return sent[0]


def wait(device: torch.device) -> None:
    """Until every process is here."""
    sum_in_place([torch.zeros(1, device=device)])


def agree(**facts) -> None:
    """Check that all processes hold the same facts; each of them ends with the difference."""
    for other, there in enumerate(every := everyones(facts)):
        for key in (key for key in facts if there[key] != every[0][key]):
            raise UserError(
                f"{key}: {every[0][key]} on process 0, {there[key]} on process {other}; give all processes the same"
            )


# --- sums of gradients that start early ------------------------------------------------------------------------------


@contextlib.contextmanager
def summing(model: nn.Module, last: bool, under_way: list) -> Iterator[None]:
    """Around a backward pass: where it is the `last` of an update, gradients are summed over the processes.

    Each sum starts as soon as its gradient is ready, beside the rest of the backward pass and that of the next model.
    Wait for `under_way` before gradients are read.
    """

    def begin(p: Tensor) -> None:
        under_way.append(dist.all_reduce(p.grad, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(begin) for p in model.parameters()] if last and world() > 1 else []
    yield
    for hook in hooks:
        hook.remove()
