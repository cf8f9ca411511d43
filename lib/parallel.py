"""Several processes: sums over them, weights sharded over them, and what they must agree on.

A function that communicates is called by all processes, in the same order.
"""

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.errors import UserError


def start(device: torch.device, timeout_minutes: float = 30.0) -> None:
    """Make `device` the current one, and join the other processes of this torchrun, if any.

    Each start has its own keys in torchrun's store (`name_start`): after a restart the store still holds the addresses of
    the previous processes, and nobody answers there.

    timeout_minutes  how long a process waits for another one before it gives up
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)  # else every process opens a context on card 0 too
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(name_start(store, rank, world), store)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=timeout, device_id=device if cuda else None
        )  # fmt: skip


def name_start(store: dist.Store, rank: int, world: int) -> str:
    """A name that the processes of this start share, and no start before it.

    Each node's torchrun counts restarts by itself. So each process sends a word of its own, gets process 0's in answer, and
    sends that back. By then the previous start's processes have ended: process 0 answers some of them too, but only the
    living send its word back.
    """
    mine, missing = uuid.uuid4().hex, world - 1
    if rank:
        store.queue_push("words", mine)
        store.queue_push("words", name := store.get(mine).decode())
        return name
    while missing:
        word = store.queue_pop("words").decode()
        missing -= word == mine
        store.set(word, mine)
    return mine


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_in_place(tensors: Iterable[Tensor]) -> None:
    """Sum each tensor over the processes."""
    if world() > 1:
        for handle in [dist.all_reduce(t, async_op=True) for t in tensors]:
            handle.wait()


def all_reduce_sum(*numbers: Tensor | float) -> list[float]:
    """Numbers, summed over the processes. Waits for the device."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    device = next((n.device for n in numbers if isinstance(n, Tensor)), torch.device("cuda" if nccl else "cpu"))
    sums = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers])
    sum_in_place([sums])
    return sums.tolist()


def all_gather(value) -> list:
    """The value of each process, by rank."""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def check_agreement(**facts) -> None:
    """Raise `UserError` on every process unless all of them hold the same facts."""
    for other, theirs in enumerate(every := all_gather(facts)):
        for key in (key for key in facts if theirs[key] != every[0][key]):
            raise UserError(f"{key}: {every[0][key]} on process 0, {theirs[key]} on process {other}; expected the same")


@contextlib.contextmanager
def summing_gradients(model: nn.Module, extras: nn.Module, last: bool, handles: list) -> Iterator[None]:
    """Around a backward pass: if it is the `last` of an update, gradients are summed over the processes.

    Each sum starts as soon as its gradient is ready, beside the rest of the backward pass and that of the next model.
    Wait for `handles` before reading gradients. Sharded weights are summed by FSDP2 itself.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(last)
    summed = (extras,) if is_sharded(model) else (model, extras)
    summed = [p for m in summed for p in m.parameters() if p.requires_grad] if last and world() > 1 else []

    def begin(p: Tensor) -> None:
        handles.append(dist.all_reduce(p.grad, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(begin) for p in summed]
    yield
    for hook in hooks:
        hook.remove()


def shard(
    root: nn.Module, layers: Iterable[nn.Module], n: int, device: torch.device, layers_only: bool, dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Keep 1 / n of the weights on each process; a layer is gathered while it computes (FSDP2).

    n            a divisor of the number of processes; each n consecutive processes hold one copy of the weights
    layers_only  keep what is outside the layers, such as embedding and head, whole on every process
    dtype        in which the layers' weights travel; None: their own. Gradients travel and add up in fp32
    """
    from torch.distributed import fsdp  # half a second, and few runs need it

    mesh = dist.init_device_mesh(device.type, (world() // n, n), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if world() > n else mesh["shard"]
    layers, policy = list(layers), fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy)
    inside = {p for layer in layers for p in layer.parameters()}
    outside = {p for p in root.parameters() if p not in inside}
    fsdp.fully_shard(root, mesh=mesh, ignored_params=outside if layers_only else None)
    for module in (root, *layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that is scaled first
    if hasattr(root, "hidden"):
        fsdp.register_fsdp_forward_method(root, "hidden")


def is_sharded(x: Tensor | nn.Module) -> bool:
    """Whether this is a DTensor or an FSDP2 module, told by a method of theirs: importing them takes half a second."""
    return hasattr(x, "to_local") or hasattr(x, "unshard")


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it unless it is sharded."""
    return t.to_local() if is_sharded(t) else t


def full_tensor(t: Tensor) -> Tensor:
    """All of a tensor, on every process."""
    return t.full_tensor() if is_sharded(t) else t


def distribute_like(t: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of `like`, and sharded as that is. A scalar never is."""
    if not is_sharded(like) or t.ndim == 0:
        return t.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def to_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of the first process, gathered one at a time; none on the other processes."""
    gathered = ((name, full_tensor(t)) for name, t in tensors.items())
    return {name: t.cpu() for name, t in gathered if rank() == 0}


def reduce_norm(norm: Tensor, like: Tensor) -> Tensor:
    """The norm of whole gradients from that of this process's parts. `like`: one of the parameters."""
    if not is_sharded(like):
        return norm
    squares = norm.square()
    dist.all_reduce(squares, group=like.device_mesh.get_group(-1))
    return squares.sqrt()


@contextlib.contextmanager
def gathered_roots(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the weights outside the layers of each model, such as the head, are whole."""
    roots = [model for model in models if is_sharded(model)]
    for root in roots:
        root.unshard()
    yield
    for root in roots:
        root.reshard()
