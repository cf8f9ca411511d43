"""The frozen teacher: its last hidden states and its head are all that a run needs of it.

Hidden states travel between devices, not logits: V / D times fewer bytes.
"""

import torch
from torch import Tensor

from model import Qwen2


class Teacher:
    """A frozen model, on a device of its own if need be; what it returns is on the students' device."""

    def __init__(self, model: Qwen2, home: torch.device):
        self.model, self.home = model, home
        self.head = model.head.to(home)  # [V, D]; the same tensor where teacher and students share a device

    @torch.no_grad()
    def hidden(self, idx: Tensor) -> Tensor:
        """Token ids [B, T] on any device -> last hidden states [B, T, D] on the students' device."""
        return self.model.hidden(idx.to(self.model.head.device, non_blocking=True)).to(self.home, non_blocking=True)


def load_teacher(
    name: str, dtype: torch.dtype, device: torch.device, home: torch.device | None = None, compile: bool = False,
    shard: int = 1,
) -> Teacher:  # fmt: skip
    """A teacher from a local folder or hub id, with weights as `dtype` on `device`; `home` is the students' device.

    compile  run its layers under torch.compile
    shard    processes over which its layers are spread; embedding and head stay whole
    """
    model = Qwen2.from_pretrained(name, dtype, device, shard)
    if compile:
        model.compile_layers()
    return Teacher(model, home or device)
