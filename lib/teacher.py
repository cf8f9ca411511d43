"""The frozen teacher: its last hidden states and its head are all that a run needs of it.

Families of `model.NATIVE` are computed by our own decoder, every other one by transformers. Hidden states travel between
devices, not logits: V / D times fewer bytes.
"""

import torch
import transformers
from torch import Tensor, nn

from lib.files import CheckpointError, read_json
from lib.hf import find_folder, weight_files
from model import Qwen2, foreign, load_config

# Keys of config.json by which logits are more than hidden states times head, with the values that do nothing.
BENT = {"final_logit_softcapping": (None, 0.0), "logit_scale": (None, 1.0), "logits_scaling": (None, 1.0)}


class Teacher:
    """A frozen model, on a device of its own if need be; what it returns is on the students' device."""

    def __init__(self, model: nn.Module, home: torch.device, vocab_size: int | None = None):
        self.model, self.home, self.native = model, home, isinstance(model, Qwen2)
        head = model.head if self.native else model.get_output_embeddings().weight
        self.head = head[:vocab_size].to(home)  # [V, D]; the same tensor where teacher and students share a device

    @torch.no_grad()
    def hidden(self, idx: Tensor) -> Tensor:
        """Token ids [B, T] on any device -> last hidden states [B, T, D] on the students' device."""
        idx = idx.to(next(self.model.parameters()).device, non_blocking=True)
        h = self.model.hidden(idx) if self.native else self.model.base_model(idx, use_cache=False).last_hidden_state
        return h.to(self.home, non_blocking=True)

    @property
    def shape(self) -> dict:
        """What a run's folder keeps of the teacher's shape."""
        return self.model.config.facts() if self.native else self.model.config.to_diff_dict()


def load_teacher(
    name: str, dtype: torch.dtype, device: torch.device, home: torch.device | None = None, vocab_size: int | None = None
) -> Teacher:
    """A teacher from a local folder or hub id `owner/name@revision`, frozen.

    dtype       of its weights and activations
    device      where it computes; `home` is the students' device (None: the same)
    vocab_size  rows of the head to keep (None: all); what is left out is padding

    Raises `CheckpointError` for a folder without safetensors, a model whose logits are not its last hidden states times
    its head, and one whose hidden states depend on later tokens.
    """
    folder, home = find_folder(name), home or device
    if not foreign(read_json(folder / "config.json")):
        return Teacher(Qwen2.from_pretrained(name, dtype=dtype, device=device), home, vocab_size)
    config = foreign_config(name)
    weight_files(folder)  # refuses a pickle and a missing shard
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise CheckpointError(f"{name}: transformers does not load it ({_first_line(error)})") from error
    model = model.to(device).requires_grad_(False).eval()
    check_logits(name, model)
    return Teacher(model, home, vocab_size)


def foreign_config(name: str) -> transformers.PretrainedConfig:
    """The config of a model that transformers computes. `CheckpointError` for one that cannot be a teacher."""
    try:
        config = transformers.AutoConfig.from_pretrained(find_folder(name), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{name}: transformers does not know it ({_first_line(error)})") from error
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{name}: {config.model_type} is an encoder-decoder; expected a decoder that reads left to right"
        )
    for key, idle in BENT.items():
        if getattr(config.get_text_config(), key, None) not in idle:
            raise CheckpointError(
                f"{name}: {key}={getattr(config.get_text_config(), key)}: its logits are not hidden states times head; take another teacher"
            )
    return config


@torch.no_grad()
def check_logits(name: str, model: nn.Module) -> None:
    """Check on a few tokens that logits are last hidden states times head, and that no token looks ahead."""
    head = model.get_output_embeddings()
    if head is None:
        raise CheckpointError(f"{name}: {type(model).__name__} has no output embedding; expected a language model")
    if getattr(head, "bias", None) is not None:
        raise CheckpointError(
            f"{name}: its head has a bias, which logits need besides hidden states and head; take another teacher"
        )
    idx = torch.arange(2, 16, device=head.weight.device).repeat(2, 1) % head.weight.shape[0]
    idx[1, -1] = 0  # the rows differ in their last token
    h, z = model.base_model(idx, use_cache=False).last_hidden_state, model(idx, use_cache=False).logits
    most = 1e-4 if z.dtype == torch.float32 else 2e-2  # of their norm, by rounding
    if (h @ head.weight.T - z).float().norm() > most * z.float().norm():
        raise CheckpointError(
            f"{name}: its logits are not hidden states times head, but scaled, bent or shifted; take another teacher"
        )
    if (h[0, :-1] - h[1, :-1]).float().norm() > most * h.float().norm():
        raise CheckpointError(
            f"{name}: its hidden states depend on later tokens; expected a decoder that reads left to right"
        )


def for_students(name: str) -> dict:
    """What a student's shape takes from its teacher: vocabulary, rope base and scaling, norm epsilon, context.

    A teacher without one of them (a LayerNorm has no epsilon of an RMSNorm) leaves it to the preset.
    """
    keys = ("vocab_size", "rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings")
    folder = find_folder(name)
    if not foreign(read_json(folder / "config.json")):
        shape = load_config(str(folder / "config.json"))
        return {key: getattr(shape, key) for key in keys}
    config = foreign_config(name).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # where kinds of layers have a base each
    found = {"rope_theta": rope.get("rope_theta")} | {
        key: getattr(config, key, None) for key in keys if "rope" not in key
    }
    return {key: value for key, value in found.items() if value is not None}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
