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
    Wait for `under_way` before gradients are read. Weights that are spread take care of their sums by themselves.
    """
    if is_spread(model):
        model.set_requires_gradient_sync(last)
    early = last and world() > 1 and not is_spread(model)

    def begin(p: Tensor) -> None:
        under_way.append(dist.all_reduce(p.grad, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(begin) for p in model.parameters()] if early else []
    yield
    for hook in hooks:
        hook.remove()


# --- weights that are spread over processes --------------------------------------------------------------------------


def spread(root: nn.Module, layers: Iterable[nn.Module], shard: int, device: torch.device, layers_only: bool) -> None:
    """Leave 1 / `shard` of the weights on each process; a layer is whole only while it computes (FSDP2).

    shard        a divisor of the number of processes; each `shard` processes in a row hold one copy of the weights
    layers_only  keep what is outside the layers, like embedding and head, whole on every process
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # half a second, and few runs need it

    mesh = dist.init_device_mesh(device.type, (world() // shard, shard), mesh_dim_names=("copies", "parts"))
    mesh = mesh if world() > shard else mesh["parts"]
    layers = list(layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    inside = {p for layer in layers for p in layer.parameters()}
    fully_shard(
        root, mesh=mesh, ignored_params={p for p in root.parameters() if p not in inside} if layers_only else None
    )
    for module in (root, *layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that is scaled first
    if hasattr(root, "hidden"):
        register_fsdp_forward_method(root, "hidden")


def is_spread(x: Tensor | nn.Module) -> bool:
    """Whether a tensor is a DTensor, or a module FSDP2's, by a method of theirs: to import them takes half a second."""
    return hasattr(x, "to_local") or hasattr(x, "unshard")


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this process holds; all of it where it is not spread."""
    return t.to_local() if is_spread(t) else t


def kept(t: Tensor) -> slice:
    """The rows of the whole tensor that `local` holds."""
    if not is_spread(t):
        return slice(None)
    size = -(-t.shape[0] // t.device_mesh.size(-1))
    first = min(size * t.device_mesh.get_local_rank(-1), t.shape[0])
    return slice(first, min(first + size, t.shape[0]))


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor of the same values, on the device of `like` and spread as that is. A scalar is never spread."""
    if not is_spread(like) or whole.ndim == 0:
        return whole.to(like.device)
    part = torch.empty_like(like, dtype=whole.dtype)
    local(part).copy_(whole[kept(like)])
    return part


def whole(t: Tensor) -> Tensor:
    """All of a tensor, on every process."""
    return t.full_tensor() if is_spread(t) else t


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole copies on the CPU of the first process; none on the others."""
    found = {}
    for name, t in tensors.items():
        t = whole(t)
        if rank() == 0:
            found[name] = t.to("cpu", copy=True)
    return found


def norm_of_parts(norm: Tensor, like: Tensor) -> Tensor:
    """The norm of whole gradients from that of the parts on this process. `like`: one of the parameters."""
    if not is_spread(like):
        return norm
    squares = norm.square()
    dist.all_reduce(squares, group=like.device_mesh.get_group(-1))
    return squares.sqrt()


@contextlib.contextmanager
def whole_roots(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, what stands outside the layers of each model, like its head, is whole."""
    roots = [model for model in models if is_spread(model)]
    for root in roots:
        root.unshard()
    yield
    for root in roots:
        root.reshard()
