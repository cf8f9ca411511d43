"""Several processes: sums over them, weights sharded over them, and what they must agree on.

A function that communicates must be called by all processes, in the same order.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_map_only

from lib.errors import UserError, note

# ----------------------------------------------------------------------------------------------
# processes


def start(device, timeout_minutes: float = 30.0):
    """Make `device` the current one, and join the other processes of this torchrun, if any.

    timeout_minutes  how long a process waits for another one before it gives up
    """
    backend = "gloo"
    device_id = None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else every process opens a context on card 0 too
        backend = "nccl"
        device_id = device
    n_processes = int(os.environ.get("WORLD_SIZE", 1))
    if n_processes > 1 and not dist.is_initialized():
        missing = {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
        if missing:
            raise UserError(
                f"WORLD_SIZE={n_processes} without {', '.join(sorted(missing))}: start with "
                "torchrun, or unset WORLD_SIZE"
            )
        if os.environ.get("LOCAL_RANK", "0") == "0":
            note(f"waiting for {n_processes} processes (WORLD_SIZE)")
        timeout = timedelta(minutes=timeout_minutes)
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# ----------------------------------------------------------------------------------------------
# sums and agreement


def sum_in_place(tensors: Iterable[Tensor]):
    """Sum each tensor over the processes."""
    if world() > 1:
        for handle in [dist.all_reduce(t, async_op=True) for t in tensors]:
            handle.wait()


def all_reduce_sum(numbers: Tensor | list[float]) -> list[float]:
    """Return the numbers, each summed over the processes. Waits for the device."""
    sums = torch.as_tensor(numbers, dtype=torch.float64)
    if dist.is_initialized() and dist.get_backend() == "nccl":
        sums = sums.cuda()
    sum_in_place([sums])
    return sums.tolist()


def all_gather(value) -> list:
    """Return the value of each process, by rank.

    Raises the `UserError` that a process passes in place of its value.
    """
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    for value in values:
        if isinstance(value, UserError):
            value.is_shared = True
            raise value
    return values


def on_first(function: Callable, *args):
    """Call a function on the first process. All return its value, or raise its `UserError`."""
    value = None
    if rank() == 0:
        try:
            value = function(*args)
        except UserError as error:
            value = error
    return all_gather(value)[0]


def check_agreement(**facts):
    """Raise `UserError` on every process unless all of them hold the same facts."""
    first, *others = all_gather(facts)
    for process, other in enumerate(others, 1):
        for key, value in first.items():
            if other.get(key) != value:
                raise UserError(
                    f"{key}: {value} on process 0, {other.get(key)} on process {process}; "
                    "expected the same"
                )


def sum_gradients(parameters: Iterable[Tensor]):
    """Sum gradients over the processes, in place; FSDP2 has summed those of sharded weights.

    Small ones are sent as one tensor, as each message takes time.
    """
    grads = [p.grad for p in parameters if p.grad is not None and not is_sharded(p)]
    small = [grad for grad in grads if grad.numel() < 1 << 20]
    large = [grad for grad in grads if grad.numel() >= 1 << 20]
    if not small:
        return sum_in_place(large)
    together = parameters_to_vector(small)
    sum_in_place([together, *large])
    vector_to_parameters(together, small)


# ----------------------------------------------------------------------------------------------
# sharded weights


def shard(root: nn.Module, n: int, device, dtype: torch.dtype | None = None):
    """Keep 1 / n of the weights on each process; FSDP2 gathers a layer for its computation.

    root   a `Qwen2`, or a `Foreign` (run/transformers_models.py)
    n      a divisor of the number of processes; every n consecutive processes hold one copy
    dtype  in which the layers of a student are sent; its gradients are in fp32. None: a frozen
           model, whose layers alone are sharded; embedding and head stay whole everywhere
    """
    from torch.distributed import fsdp  # takes half a second, and few runs need it

    layers = root.layers
    n_copies = world() // n
    names = ("replicate", "shard")
    mesh = dist.init_device_mesh(device.type, (n_copies, n), mesh_dim_names=names)
    limit = dist.group.WORLD._get_backend(device).options._timeout
    for group in mesh.get_all_groups():  # torch gives them its own
        dist.distributed_c10d._set_pg_timeout(limit, group)
    if n_copies == 1:
        mesh = mesh["shard"]
    policy = fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    outside = set(root.parameters())
    for layer in layers:
        outside -= set(layer.parameters())
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(root, mesh=mesh, ignored_params=None if dtype else outside)
    for module in (root, *layers):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it sums
    fsdp.register_fsdp_forward_method(root, "hidden")


def is_sharded(t: Tensor) -> bool:
    """Return whether this is a DTensor. Importing its class would take half a second."""
    return hasattr(t, "to_local")


def local(t: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it unless it is sharded."""
    return t.to_local() if is_sharded(t) else t


def full_tensor(t: Tensor) -> Tensor:
    """Return all of a tensor, on every process."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def distribute_like(t: Tensor, like: Tensor) -> Tensor:
    """Move a whole tensor to where `like` is, and shard it as `like` is if it has its shape."""
    t = t.to(like.device)
    if not is_sharded(like) or t.shape != like.shape:
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)


def whole_on_cpu(tree):
    """Return a copy of nested dicts and lists, with each tensor whole and on the CPU.

    Tensors are gathered one at a time, and only the first process keeps them: None on the others.
    """

    def copy(t: Tensor):
        whole = full_tensor(t)
        return whole.detach().to("cpu", copy=True) if rank() == 0 else None

    return tree_map_only(Tensor, copy, tree)


@contextlib.contextmanager
def gathered_roots(models):
    """Gather the weights outside the layers of each model, such as the head, while inside."""
    roots = [model for model in models if hasattr(model, "unshard")]  # of FSDP2
    for root in roots:
        root.unshard()
    yield
    for root in roots:
        root.reshard()
