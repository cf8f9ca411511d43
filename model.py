"""The decoder: its shapes, its forward pass, and students from a seed.

It reads `qwen2` (Qwen1.5, 2, 2.5), `qwen3`, `llama` (1 to 3, SmolLM2) and `mistral`, which differ in the biases of q, k
and v, in the norms on q and k, and in the rotary angles. Modules carry the names of the Hugging Face checkpoint, so its
tensors and ours are the same dictionary (lib/hf.py reads and writes).

Precision, on a GPU (`dtype="auto"`); on the CPU everything is fp32:

    | number                                                            | dtype                             |
    |-------------------------------------------------------------------|-----------------------------------|
    | student's weights, AdamW's moments, accumulated gradients         | fp32                              |
    | teacher's weights                                                 | bf16                              |
    | activations and residual stream; operands of every product        | bf16                              |
    | accumulation inside a product; logits                             | fp32                              |
    | statistics of norms, rotary angles, softmaxes, losses, sums over V | fp32 (fp64 for some sizes [N], [N, k]) |
    | gradient of the logits, as an operand of the head's products      | bf16                              |

`hidden(dtype=...)` sets the dtype of the activations. `Linear`, `RMSNorm` and the rotary angles cast to it.

Dimension key: B batch, T time, D width, H query heads, G key/value heads, K width of a head, V vocabulary.
"""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from lib import parallel
from lib.errors import UserError, nearest, require
from lib.files import read_json, reading
from lib.hf import INIT_STD, check_weights, find_folder, load_tokenizer, read_weights, save_folder  # noqa: F401  load_tokenizer: for users
from lib.settings import NonNegativeInt, Positive, PositiveInt, checked

NATIVE = ("qwen2", "qwen3", "llama", "mistral")  # families that this decoder computes
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # its rope scaling


@dataclass(frozen=True)
class Qwen2Config:
    """The shape of a decoder, in the field names of the Hugging Face config."""

    hidden_size: PositiveInt  # D
    intermediate_size: PositiveInt  # width inside the MLP
    num_hidden_layers: NonNegativeInt
    num_attention_heads: PositiveInt  # H
    num_key_value_heads: PositiveInt  # G, a divisor of H
    vocab_size: PositiveInt = 151_936  # V
    tie_word_embeddings: bool = True
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 1e6
    max_position_embeddings: PositiveInt = 32_768
    head_dim: PositiveInt | None = None  # K; None: D / H
    attention_bias: bool = True  # on q, k and v
    qk_norm: bool = False  # RMSNorm on q and k of each head, before rotation (Qwen3)
    rope_scaling: dict | None = None  # Llama 3's, by the names of its config.json

    def __post_init__(self):
        for key, kind in typing.get_type_hints(Qwen2Config, include_extras=True).items():
            object.__setattr__(self, key, checked(key, getattr(self, key), kind))
        d, h, g = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", d // h)
            require(d % h == 0, f"num_attention_heads={h}: expected a divisor of hidden_size={d}")
        require(h % g == 0, f"num_key_value_heads={g}: expected a divisor of num_attention_heads={h}")
        for key in LLAMA3 if self.rope_scaling else ():
            checked(f"rope_scaling.{key}", self.rope_scaling.get(key), Positive)
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: expected an even number, RoPE rotates pairs")


# The paper's table of architectures, then the demo's own. The paper does not print rope base, norm epsilon and context:
# `student_config` takes them, and the vocabulary, from the teacher. Those here are Qwen1.5's and the demo's.
_DEMO = {"vocab_size": 4096, "rope_theta": 1e4, "max_position_embeddings": 1024}
PRESETS = {
    "200m": Qwen2Config(768, 2112, 12, 12, 12),  # 203.4M parameters
    "500m": Qwen2Config(1024, 2816, 24, 16, 16),  # 464.0M
    "1.8b": Qwen2Config(2048, 5504, 24, 16, 16, tie_word_embeddings=False),  # the teacher, 1.837B
    "mini": Qwen2Config(64, 172, 2, 2, 2, **_DEMO),  # 0.36M
    "demo": Qwen2Config(128, 344, 3, 4, 4, **_DEMO),  # 1.12M
    "demo_teacher": Qwen2Config(192, 512, 4, 3, 3, **_DEMO),  # 2.6M
}


def flops_per_token(shape: Qwen2Config, seq_len: int, trained: bool) -> float:
    """FLOPs of one token.

    Two per weight of every matrix that multiplies it (the head, but not the embedding look-up), and 2 * 2 * H * K * T / 2
    per layer for causal attention; three times that where a backward pass follows.
    """
    d, k = shape.hidden_size, shape.head_dim
    attention = d * k * (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads)
    matrices = shape.num_hidden_layers * (attention + 3 * d * shape.intermediate_size) + shape.vocab_size * d
    scores = shape.num_hidden_layers * 2 * shape.num_attention_heads * k * seq_len
    return (2 * matrices + scores) * (3 if trained else 1)


def rotary(positions: Tensor, config: Qwen2Config) -> tuple[Tensor, Tensor]:
    """positions [T] or [B, T] int64 -> cos, sin [.., T, K] fp32, the angles of the two halves side by side."""
    k = config.head_dim
    exponent = torch.arange(0, k, 2, device=positions.device, dtype=torch.float32) / k
    frequency = config.rope_theta**-exponent  # [K / 2] radians per position
    if scaling := config.rope_scaling:  # low frequencies are divided by `factor`, high ones kept, linear between
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = frequency * scaling["original_max_position_embeddings"] / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling["factor"])
    angle = positions[..., None].float() * frequency  # [.., T, K / 2]
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + K / 2]) by its position's angle. x [B, H, T, K]; cos, sin [(B, 1,) T, K]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Linear(nn.Linear):
    """Multiplies in the input's dtype. The weight stays as stored: fp32 master weights, bf16 products on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def linears(x: Tensor, *layers: Linear) -> Sequence[Tensor]:
    """Each layer's product with x. A compiled layer that casts its weights makes one product of them: fewer launches."""
    if not torch.compiler.is_compiling() or layers[0].weight.dtype == x.dtype:
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight.to(x.dtype) for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.to(x.dtype) for layer in layers])
    return F.linear(x, weight, bias).split([layer.out_features for layer in layers], -1)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * x32.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Qwen2Config):
        super().__init__()
        d, k, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = k
        self.q_proj = Linear(d, config.num_attention_heads * k, bias=bias)
        self.k_proj = Linear(d, config.num_key_value_heads * k, bias=bias)
        self.v_proj = Linear(d, config.num_key_value_heads * k, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * k, d, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(k, config.rms_norm_eps), RMSNorm(k, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)  # [B, T, H or G, K]
        q, k, v = (p.view(heads).transpose(1, 2) for p in linears(x, self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Qwen2Config):
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(d, f, bias=False)
        self.up_proj = Linear(d, f, bias=False)
        self.down_proj = Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linears(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen2(nn.Module):
    """The decoder. Build it with `init_student` or `Qwen2.from_pretrained`; the constructor keeps torch's own init."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        """The head's weight [V, D]: the embedding's where they are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def cut(self, vocab_size: int) -> None:
        """Leave out the rows of embedding and head from `vocab_size` on: padding beyond the tokenizer's ids."""
        if vocab_size < self.config.vocab_size:
            self.config = dataclasses.replace(self.config, vocab_size=vocab_size)
            for part in (self.model.embed_tokens, *([] if self.config.tie_word_embeddings else [self.lm_head])):
                part.weight = nn.Parameter(part.weight[:vocab_size].clone())

    def hidden(
        self, idx: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, recompute: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Last hidden states, after the final norm.

        idx        [B, T] int64 token ids
        positions  [T] or [B, T] int64 rotary positions; None: 0, 1, .. T - 1
        mask       [B, 1, T, T] bool, True where a query (row) may look at a key (column); None: causal
        recompute  keep only each layer's input for the backward pass: less memory, a third more arithmetic
        dtype      of activations and products; None: the weights'. Statistics of norms, angles and softmaxes are fp32
        ->         [B, T, D] in `dtype`
        """
        x = self.model.embed_tokens(idx)  # [B, T, D]
        x = x if dtype is None else x.to(dtype)
        if positions is None:
            positions = torch.arange(idx.shape[1], device=idx.device)
        cos, sin = (t.to(x.dtype).unsqueeze(-3) for t in rotary(positions, self.config))  # [(B,) 1, T, K]
        for layer in self.model.layers:
            if recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, mask, use_reentrant=False)
            else:
                x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def compile_layers(self) -> None:
        """Run each layer under torch.compile. Layers of one shape share one compilation for each direction."""
        for layer in self.model.layers:
            layer.compile(dynamic=False, fullgraph=True)

    def forward(self, idx: Tensor) -> Tensor:
        """idx [B, T] -> logits [B, T, V]."""
        return F.linear(self.hidden(idx), self.head)

    @property
    def n_params(self) -> int:
        """Parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    @classmethod
    def from_pretrained(
        cls, name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", shard: int = 1
    ) -> "Qwen2":
        """A checkpoint of a family of NATIVE from a local folder or the hub (`owner/name@revision`), weights as `dtype`.

        With `shard` > 1 its layers are sharded over that many processes, and each keeps its own part alone.

        Only safetensors are read, so that a foreign folder cannot run code. Raises `UserError` for another
        architecture, a pickle, and any tensor that is missing, left over or misshapen.
        """
        folder = find_folder(name)
        shape = load_config(str(folder / "config.json"))  # never a preset of the same name
        check_weights(folder, shape.num_hidden_layers)
        with torch.device("meta"):
            model = cls(shape)
        model.to(dtype)
        if shard > 1:
            parallel.shard(model, model.model.layers, shard, torch.device(device), layers_only=True)
        model.to_empty(device=device)
        read_weights(model, folder)
        return model.requires_grad_(False).eval()

    def save_pretrained(
        self, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None, weights: dict | None = None
    ) -> None:
        """A folder that transformers' `AutoModelForCausalLM` and `AutoTokenizer` load to the same logits and ids.

        weights  whole tensors by name, if this model's own are sharded
        """
        save_folder(Path(folder), dataclasses.asdict(self.config), weights or self.state_dict(), tokenizer)


def init_student(shape: str | Qwen2Config, seed: int = 1234) -> Qwen2:
    """A student with fresh weights: N(0, 0.02) for matrices, 0 for biases, 1 for norms, our choice: the paper is silent.

    Drawn on the CPU in fp32 in the order of the state dict, so that a seed means the same bits on every device.
    """
    config = student_config(shape) if isinstance(shape, str) else shape
    with torch.device("meta"):
        model = Qwen2(config)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0.0, INIT_STD, generator=generator)
            else:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def student_config(shape: str, teacher: dict | None = None) -> Qwen2Config:
    """A student's shape: a preset's name, WIDTHxLAYERSxHEADS, a JSON object, or what `load_config` takes.

    teacher  the fields of `Qwen2Config` that presets and shapes without them take from the teacher: vocabulary, rope
             base and scaling, norm epsilon, context (`run.teacher.inherited`). None: the preset's own
    """
    if shape in PRESETS:
        return dataclasses.replace(PRESETS[shape], **(teacher or {}))
    sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape)
    if not sizes and shape[:1] != "{":
        near, is_path = nearest(shape, PRESETS), "/" in shape or Path(shape).exists()
        hint = f"; did you mean {near!r}?" if near else ""
        require(is_path, f"student={shape}: expected a preset ({', '.join(PRESETS)}), 512x8x8, or a folder{hint}")
        return load_config(shape)
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    with reading(f"student={shape}", f"expected {', '.join(keys)}, and other keys of config.json"):
        given = dict(zip(keys, map(int, sizes.groups()), strict=True)) if sizes else json.loads(shape)
        require(teacher or "vocab_size" in given, f"student={shape}: expected a vocab_size, or a teacher that has one")
        mlp = {"intermediate_size": -(-given["hidden_size"] * 8 // 3 // 64) * 64}  # 8 / 3 of the width, in steps of 64
        return Qwen2Config(**{**mlp, "num_key_value_heads": given["num_attention_heads"], **(teacher or {}), **given})


def unsupported(hf: dict) -> str | None:
    """What a config.json asks for that this decoder does not compute; None if it computes everything."""
    if hf.get("model_type") not in NATIVE:
        return f"model_type={hf.get('model_type')!r}, expected one of {', '.join(NATIVE)}"
    rope = rope_of(hf)
    if rope["rope_type"] not in ("default", "llama3"):
        return f"rope scaling {rope}, expected none or Llama 3's"
    for key, wanted in (("hidden_act", "silu"), ("use_sliding_window", False), ("mlp_bias", False),
                        ("partial_rotary_factor", 1.0), ("quantization_config", None)):  # fmt: skip
        if hf.get(key, wanted) != wanted:
            return f"{key}={hf[key]!r}, expected {wanted!r}"
    return None


def rope_of(hf: dict) -> dict:
    """The rope base and scaling of a config.json; of several places for them the one that transformers reads."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {"type": rope}
    return {"rope_theta": hf.get("rope_theta", 1e4), "rope_type": rope.get("type", "default"), **rope}


def load_config(name: str) -> Qwen2Config:
    """A config.json, a model folder or a hub id -> the shape. Raises `UserError` for a family that is not in NATIVE.

    A Mistral with a sliding window is this decoder for rows up to the window, which becomes its context.
    """
    path = Path(name) if name.endswith(".json") else find_folder(name) / "config.json"
    require(path.is_file(), f"{name}: no config.json; expected a model's folder or its config.json")
    hf = read_json(path)
    if reason := unsupported(hf):
        raise UserError(f"{path}: {reason}; this decoder does not support it")
    kind, rope = hf["model_type"], rope_of(hf)
    hf = hf | {
        "rope_theta": rope["rope_theta"],
        "attention_bias": kind == "qwen2" or hf.get("attention_bias", False),
        "qk_norm": kind == "qwen3",
        "rope_scaling": None if rope["rope_type"] == "default" else {k: rope.get(k) for k in ("rope_type", *LLAMA3)},
    }
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": hf.get("num_attention_heads"),
                "head_dim": 128 if kind == "qwen3" else None, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768}  # fmt: skip
    fields = {f.name: hf.get(f.name, defaults.get(f.name)) for f in dataclasses.fields(Qwen2Config)}
    try:
        if kind == "mistral" and (window := hf.get("sliding_window", 4096)):
            fields["max_position_embeddings"] = min(fields["max_position_embeddings"], window)
        return Qwen2Config(**fields)
    except (UserError, TypeError) as error:
        raise UserError(f"{path}: {error}") from error
