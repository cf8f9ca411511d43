"""Decoders that model.py does not know, computed by transformers: teachers and students.

`Foreign` gives them the interface of `model.Qwen2`: last hidden states, and a head. Only
safetensors are read and no remote code is run. Dropout is off, and the losses of a mixture's
routers are left out.

With `dtype="bfloat16"` a student computes under torch.autocast: products in bf16, norms and the
residual stream in fp32. In model.py the residual stream is bf16, which takes less memory.

Dimension key: B batch, T time, D width, V vocabulary.
"""

import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lib import parallel
from lib.errors import UserError
from lib.files import atomic_folder, reading
from lib.head import OutputHead, soft_cap
from lib.hf import (
    all_finite,
    check_weights,
    find_folder,
    generation_ids,
    save_tokenizer,
    special_ids,
)
from model import config_file, is_near

transformers.logging.disable_progress_bar()  # a bar for each file, also of checkpoints

# Causal masks that GPT-2, GPT-Neo and GPT-J used to save; none of them has a bias of that name.
MASKS = (".attn.bias", ".attn.attention.bias", ".masked_bias")
PAD = 8  # columns that a head with a bias has more, since products are fast at multiples of 8


# ----------------------------------------------------------------------------------------------
# shapes


@dataclass(frozen=True)
class ForeignConfig:
    """The shape of a decoder that transformers computes, in the fields of `model.Qwen2Config`."""

    vocab_size: int
    max_position_embeddings: int | None  # None: no limit, as in Mamba
    rms_norm_eps: float | None
    rope_theta: float | None
    config: dict = field(hash=False)  # transformers' own, without the vocabulary

    def build(self, dtype=torch.float32) -> transformers.PreTrainedModel:
        """Return transformers' model, its weights drawn by its own initialisation."""
        config = transformers.AutoConfig.for_model(**copy.deepcopy(self.config))
        config.get_text_config().vocab_size = self.vocab_size
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

    def draw(self, seed: int) -> "Foreign":
        """Return a student with fresh weights, in fp32 on the CPU."""
        torch.manual_seed(seed)
        with reading("student", "choose another shape"):
            return Foreign("student", self.build())

    @functools.cache  # noqa: B019  (a model is built for it, and shapes are few)
    def flops_per_token(self, seq_len) -> float:
        """Return 2 FLOPs per weight that a token uses, without attention scores."""
        with torch.device("meta"):  # without memory for its weights
            model = self.build()
        weights = {*model.parameters()} - {model.get_input_embeddings().weight}  # a look-up
        weights.add(model.get_output_embeddings().weight)  # which may be the embedding's
        n_active = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        used = [p[:n_active] if p.ndim == 3 else p for p in weights]  # experts are [E, ., .]
        return 2.0 * sum(p.numel() for p in used)


def foreign_config(name) -> transformers.PretrainedConfig:
    """Return the config of a model that transformers computes, without dropout.

    Raises `UserError` for a model that can be neither teacher nor student.
    """
    file = config_file(name)
    with reading(file, "choose another model"):
        config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        if quantized.get("quant_method") not in ("fp8", "mxfp4"):
            raise UserError(
                f"{name}: config.json has a quantization_config; "
                "expected weights in fp8 or mxfp4, or not quantized"
            )
        quantized["dequantize"] = True
    if config.is_encoder_decoder:
        raise UserError(
            f"{name}: {config.model_type} is an encoder-decoder; expected a decoder-only model"
        )
    text = config.get_text_config()
    text.pad_token_id = None  # else a student would never train that token's embedding
    for key, value in vars(text).items():
        is_noise = "drop" in key or "jitter" in key
        if (text.model_type, key) == ("phimoe", "router_jitter_noise"):
            is_noise = False  # a threshold of its routers
        if is_noise and isinstance(value, float):
            setattr(text, key, 0.0)
    return config


def shape_of(config: transformers.PretrainedConfig) -> ForeignConfig:
    """Return the shape. It leaves out rope scaling, and what does not change a model."""
    values = config.to_diff_dict()
    parts = [values, *(part for part in values.values() if isinstance(part, dict))]
    others = ("architectures", "dtype", "quantization_config", "transformers_version", "use_cache")
    for key in others:
        for part in parts:
            part.pop(key, None)
    for key in ("vocab_size", "bos_token_id", "eos_token_id"):
        values.get("text_config", values).pop(key, None)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return ForeignConfig(
        vocab_size=text.vocab_size,
        max_position_embeddings=getattr(text, "max_position_embeddings", None),
        rms_norm_eps=getattr(text, "rms_norm_eps", None),
        rope_theta=rope.get("rope_theta"),
        config=values,
    )


# ----------------------------------------------------------------------------------------------
# models


class Foreign(nn.Module):
    """A decoder of transformers with the interface of `model.Qwen2`.

    Hidden states times head are its logits: a scale of the logits is in the hidden states, and a
    bias of the head is a column of it, where hidden states have a 1. A cap needs an `OutputHead`.
    """

    def __init__(self, name, lm):
        super().__init__()
        self.lm = lm
        self.scale, self.cap = check_logits(name, lm)

    def hidden(
        self, idx: Tensor, recompute: bool = False, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the last hidden states, as `model.Qwen2.hidden` does."""
        head = self.lm.get_output_embeddings()
        dtype = dtype or head.weight.dtype
        if recompute:
            with reading("recompute=True", "choose another student, or a smaller micro_batch"):
                self.lm.activation_checkpointing_enable()
        with torch.autocast(idx.device.type, dtype, enabled=dtype != head.weight.dtype):
            h = self.lm.base_model(idx, use_cache=False)[0]
        h = h.to(dtype) * self.scale  # Mamba's are in fp32, whatever its head
        if head.bias is not None:
            h = F.pad(h, (0, PAD), value=self.scale)
        return h

    @property
    def head(self) -> Tensor | OutputHead:
        """The weight of the head, [V, D], or [V, D + PAD] with a bias."""
        head = self.lm.get_output_embeddings()
        weight = head.weight
        if head.bias is not None:
            weight = F.pad(torch.cat((weight, head.bias[:, None]), 1), (0, PAD - 1))
        return OutputHead(weight, (weight.shape[1],), (self.cap,)) if self.cap else weight

    @property
    def config(self) -> ForeignConfig:
        return shape_of(self.lm.config)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, which are the heaviest list of modules."""
        lists = [module for module in self.lm.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()))

    def cut(self, vocab_size: int):
        """Drop the rows of embedding and head beyond `vocab_size`, which no token uses."""
        if vocab_size < self.config.vocab_size:
            self.lm.resize_token_embeddings(vocab_size)

    def save_pretrained(self, folder: Path, tokenizer, weights: dict):
        """Write a folder by transformers' own `save_pretrained`, and a tokenizer beside it.

        weights  the tensors by name, unsharded
        """
        tensors = {name.removeprefix("lm."): p for name, p in weights.items()}
        dtype = next(iter(tensors.values())).dtype
        with torch.device("meta"):  # training may go on with this model in another thread
            model = self.config.build(dtype)
        model.config.get_text_config().update(special_ids(tokenizer))
        model.generation_config.update(**generation_ids(tokenizer))
        with atomic_folder(folder) as new:
            model.save_pretrained(new, state_dict=tensors, max_shard_size="1000TB")
            save_tokenizer(new, tokenizer)


def load_foreign(name, dtype, device, shard: int) -> Foreign:
    """Load a frozen model on `device`, its layers sharded over `shard` processes.

    If sharded, the first process alone reads it, and sends each tensor to the others.
    """
    if shard == 1:
        return read_foreign(name, dtype, device)
    whole = []

    def read_and_copy():
        whole.append(read_foreign(name, dtype, "cpu"))
        # a copy with the same buffers, whose parameters have shapes alone
        shapes = {id(p): nn.Parameter(p.to("meta"), False) for p in whole[0].parameters()}
        return copy.deepcopy(whole[0], shapes)

    model = parallel.on_first(read_and_copy)
    parallel.shard(model, shard, device)
    model.to_empty(device=device).lm.tie_weights()
    for part in (nn.Module.parameters, nn.Module.buffers):
        for source, target in zip(part(whole[0] if whole else model), part(model), strict=True):
            t = torch.empty(target.shape, dtype=target.dtype, device=device)
            if whole:
                t.copy_(source)
            torch.distributed.broadcast(t, 0)
            target.copy_(parallel.distribute_like(t, target))
    return model


def read_foreign(name, dtype, device):
    """Load a frozen model on `device`. Raises `UserError` if its files do not make one."""
    folder = find_folder(name)
    config = foreign_config(name)
    quantized = getattr(config, "quantization_config", None)
    if not quantized:
        check_weights(folder, getattr(config.get_text_config(), "num_hidden_layers", 0))
    with reading(folder, "choose another model"):
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        # transformers ignores tensors for which it has no place
        more = [key for key in info["unexpected_keys"] if not key.endswith(MASKS)]
        if more:
            raise UserError(
                f"{name}: config.json has no place for tensor {min(more)} ({len(more)} in all)"
            )
        missing = info["missing_keys"]  # transformers would draw them
        if missing:
            raise UserError(f"{name}: missing tensor {min(missing)}; the checkpoint is incomplete")
        for key, p in lm.named_parameters():
            if quantized:  # then transformers leaves some in the dtype of the file
                p.data = p.data.to(dtype)
            if not all_finite(p):
                raise UserError(f"{name}: {key} is not finite; download or write it again")
        return Foreign(name, lm.to(device)).requires_grad_(False).eval()


# ----------------------------------------------------------------------------------------------
# what logits are made of


@torch.no_grad()
def check_logits(name, model) -> tuple[float, float | None]:
    """Return scale and cap of a model's logits.

    They are measured: its head's output is replaced by numbers, and the logits that come back are
    a scale of them, capped by cap * tanh(z / cap), or neither. On a few tokens a model must be
    causal, and its head's input must be its last hidden states. Raises `UserError`.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"{name}: {type(model).__name__} has no output embedding that is an nn.Linear; "
            "expected a language model"
        )
    n_vocab = len(head.weight)
    idx = torch.arange(2, 16, device=head.weight.device).repeat(2, 1) % n_vocab
    idx[1, -1] = 0  # the rows differ in their last token
    probe = torch.linspace(-99, 99, n_vocab, device=head.weight.device)
    probe[0] = 2.0**-10  # so small that a cap does not change it
    probe[-1] = 2.0**20  # so large that a cap is all that is left of it
    seen = []

    def replace(module, inputs, output):
        seen.append(inputs[0])
        return probe.expand_as(output)

    hook = head.register_forward_hook(replace)
    z = model(idx, use_cache=False).logits
    hook.remove()
    scale = float(z[0, 0, 0]) / 2.0**-10
    if abs(scale - 1) < 1e-6:  # rounding of tanh
        scale = 1.0
    expected = scale * probe
    cap = float(z[0, 0, -1])
    if cap < expected[-1] / 2:
        expected = soft_cap(expected, cap)
    else:
        cap = None
    h = model.base_model(idx, use_cache=False)[0].to(head.weight.dtype)
    tolerance = 1e-4 if h.dtype == torch.float32 else 2e-2  # relative error of a norm by rounding
    if (
        not torch.allclose(z.float(), expected, rtol=1e-5)
        or h.shape != seen[0].shape
        or not is_near(h, seen[0], 1e-3)
    ):
        raise UserError(
            f"{name}: its logits are not hidden states times head, but for a bias, a scale and a "
            "cap; choose another model"
        )
    if not is_near(h[1, :-1], h[0, :-1], tolerance):
        raise UserError(
            f"{name}: its hidden states depend on later tokens; expected a causal language model"
        )
    return scale, cap
