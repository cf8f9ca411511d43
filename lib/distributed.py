"""Weights sharded over several processes (FSDP2)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from lib.parallel import world


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
