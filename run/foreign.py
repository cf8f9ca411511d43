"""Teachers of an architecture that model.py does not know, computed by transformers.

Only safetensors are read and no remote code is run. The logits must be the product of last hidden
states and head, as a run uses nothing else of a teacher.
"""

import torch
import transformers
from torch import nn

from lib import distributed
from lib.errors import UserError
from lib.files import reading
from lib.hf import check_weights, find_folder


def load_foreign(name, dtype, device, shard: int) -> nn.Module:
    """Load a frozen model on `device`, its layers sharded over `shard` processes."""
    folder = find_folder(name)
    config = foreign_config(name)
    check_weights(folder, getattr(config.get_text_config(), "num_hidden_layers", 0))
    with reading(folder, "choose another teacher"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = info["missing_keys"]  # transformers would draw them
    if missing:
        raise UserError(f"{name}: missing tensor {min(missing)}; the checkpoint is incomplete")
    more = [key for key in info["unexpected_keys"] if not is_mask(key)]  # transformers ignores them
    if more:
        raise UserError(
            f"{name}: config.json has no place for tensor {min(more)} ({len(more)} in all)"
        )
    model.requires_grad_(False).eval()
    if shard > 1:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        # the decoder layers are the heaviest list
        layers = max(lists, key=lambda part: sum(p.numel() for p in part.parameters()))
        distributed.shard(model.base_model, layers, shard, device, layers_only=True)
    model.to(device)
    with reading(folder, "choose another teacher"):
        check_logits(name, model)
    return model


def is_mask(key) -> bool:
    """Return whether a tensor is a causal mask that GPT-2, GPT-Neo and GPT-J used to save.

    None of them has a bias of that name.
    """
    return key.endswith((".attn.bias", ".attn.attention.bias", ".masked_bias"))


def foreign_config(name) -> transformers.PretrainedConfig:
    """Return the config of a model that transformers computes.

    Raises `UserError` for a model that cannot be a teacher.
    """
    folder = find_folder(name)
    with reading(folder / "config.json", "choose another teacher"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"{name}: config.json has a quantization_config; "
            "expected weights that are not quantized"
        )
    if config.is_encoder_decoder:
        raise UserError(
            f"{name}: {config.model_type} is an encoder-decoder; expected a decoder-only model"
        )
    return config


@torch.no_grad()
def check_logits(name, model):
    """Check on a few tokens that a model is causal, its logits last hidden states times head.

    Its head's output is replaced by numbers that must come back as logits. This shows a cap or a
    scale in any dtype, which would change small logits by less than rounding. Raises `UserError`.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(
            f"{name}: {type(model).__name__} has no output embedding; expected a language model"
        )
    n_vocab = len(head.weight)
    idx = torch.arange(2, 16, device=head.weight.device).repeat(2, 1) % n_vocab
    idx[1, -1] = 0  # the rows differ in their last token
    probe = torch.linspace(-99, 99, n_vocab, device=head.weight.device).expand(*idx.shape, -1)
    seen = []

    def replace(module, inputs, output):
        seen.extend((inputs[0], output))
        return probe

    hook = head.register_forward_hook(replace)
    z = model(idx, use_cache=False).logits
    hook.remove()
    h = model.base_model(idx, use_cache=False)[0].to(head.weight.dtype)
    tolerance = 1e-4 if h.dtype == torch.float32 else 2e-2  # relative error of a norm by rounding
    bias = getattr(head, "bias", None)
    if (
        (bias is not None and bias.any())
        or not torch.equal(z, probe)
        or h.shape != seen[0].shape
        or not is_near(h, seen[0], 1e-3)
        or not is_near(seen[0] @ head.weight.T, seen[1], tolerance)
    ):
        raise UserError(
            f"{name}: its head has a bias, or its logits are not hidden states times head; "
            "choose another teacher"
        )
    if not is_near(h[1, :-1], h[0, :-1], tolerance):
        raise UserError(
            f"{name}: its hidden states depend on later tokens; expected a causal language model"
        )


def is_near(x, expected, tolerance) -> bool:
    """Return whether the norm of the error is within `tolerance`; NaN is not."""
    error = (x - expected).float().norm()
    return bool(error <= tolerance * expected.float().norm())


def foreign_shape(name, keys: tuple[str, ...]) -> dict:
    """Return those of `keys` that a model's config has, with their values.

    A model with LayerNorm has no `rms_norm_eps`. `rope_theta` is inside `rope_parameters`, and rope
    scaling is left out.
    """
    config = foreign_config(name).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    values = {}
    for key in keys:
        value = rope.get(key) if "rope" in key else getattr(config, key, None)
        if value is not None:
            values[key] = value
    return values


def foreign_flops_per_token(model) -> float:
    """Return 2 FLOPs per weight that a token uses, without attention scores."""
    config = model.config.get_text_config()
    n_active = getattr(config, "num_experts_per_tok", None) or 1
    n_weights = 0
    for p in model.parameters():
        share = 1
        if p.ndim == 3:  # E experts [E, ., .]
            share = min(n_active / len(p), 1)
        n_weights += p.numel() * share
    embedding = model.get_input_embeddings().weight
    if embedding is not model.get_output_embeddings().weight:
        n_weights -= embedding.numel()  # a look-up
    return 2.0 * n_weights
