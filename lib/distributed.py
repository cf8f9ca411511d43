"""What only several processes need: joining torchrun's group, and sharding weights (FSDP2)."""

import uuid
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lib.parallel import world


def join(device, timeout: timedelta):
    """Join the other processes of this torchrun. None waits for another longer than `timeout`."""
    backend = "gloo"
    device_id = None
    if device.type == "cuda":
        backend = "nccl"
        device_id = device
    store, rank, n_processes = next(dist.rendezvous("env://", timeout=timeout))
    # After a restart torchrun's store still holds the addresses of processes that have ended.
    store = dist.PrefixStore(name_of_start(store, rank, n_processes), store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=n_processes,
        timeout=timeout,
        device_id=device_id,
    )


def name_of_start(store: dist.Store, rank: int, n_processes: int) -> str:
    """Return a name that the processes of this start share, and that no earlier start had.

    The restart count would not do: each node's torchrun counts its own. So each process queues a
    random word. Process 0 answers every queued word with its own, and waits until all others have
    sent that back. Words that an earlier start has left are answered too, but nobody sends that
    back.
    """
    word = uuid.uuid4().hex
    if rank:
        store.queue_push("words", word)
        name = store.get(word).decode()
        store.queue_push("words", name)
        return name
    missing = n_processes - 1
    while missing:
        received = store.queue_pop("words").decode()
        if received == word:
            missing -= 1
        store.set(received, word)
    return word


def shard(
    root: nn.Module,
    layers: Iterable[nn.Module],
    n: int,
    device,
    layers_only: bool,
    dtype: torch.dtype | None = None,
):
    """Keep 1 / n of the weights on each process; FSDP2 gathers a layer for its computation.

    n            a divisor of the number of processes; every n consecutive processes hold one copy
    layers_only  keep what is outside the layers, such as embedding and head, whole everywhere
    dtype        in which layers are sent to each other (None: their own); gradients in fp32
    """
    from torch.distributed import fsdp  # takes half a second, and few runs need it

    layers = list(layers)
    n_copies = world() // n
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh(device.type, (n_copies, n), mesh_dim_names=names)
    if n_copies == 1:
        mesh = mesh["shard"]
    policy = fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    outside = set(root.parameters())
    for layer in layers:
        outside -= set(layer.parameters())
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(root, mesh=mesh, ignored_params=outside if layers_only else None)
    for module in (root, *layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it sums
    if hasattr(root, "hidden"):
        fsdp.register_fsdp_forward_method(root, "hidden")
