"""The decoder: its shapes, its forward pass, and students from a seed.

It is Qwen2 (Qwen1.5, 2, 2.5), and Llama without rope scaling, which is the same decoder with zero biases. Modules carry
the names of the Hugging Face checkpoint, so its tensors and ours are the same dictionary (lib/hf.py reads and writes).

Precision, on a GPU (`dtype="auto"`); on the CPU everything is fp32:

    | number                                                            | dtype                             |
    |-------------------------------------------------------------------|-----------------------------------|
    | student's weights, their gradients, AdamW's moments               | fp32                              |
    | teacher's weights                                                 | bf16                              |
    | activations and residual stream; operands of every product        | bf16                              |
    | accumulation inside a product; logits                             | fp32                              |
    | statistics of norms, rotary angles, softmaxes, losses, sums over V | fp32 (fp64 for some sizes [N], [N, k]) |
    | gradient of the logits, as an operand of the head's products      | bf16                              |

`hidden(dtype=...)` sets the dtype of the activations. `Linear`, `RMSNorm` and the rotary angles cast to it.

Dimension key: B batch, T time, D width, H query heads, G key/value heads, K width of a head, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from lib.files import UserError, read_json
from lib.hf import (  # noqa: F401  part of this module's interface
    INIT_STD,
    find_folder,
    load_tokenizer,
    read_weights,
    save_folder,
    tokenizer_hash,
    weights_hash,
)


@dataclass(frozen=True)
class Qwen2Config:
    """The shape of a decoder, in the field names of the Hugging Face config."""

    hidden_size: int  # D
    intermediate_size: int  # width inside the MLP
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # G, a divisor of H
    vocab_size: int = 151_936  # V
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32_768
    head_dim: int | None = None  # K; None: D / H

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, most = getattr(self, f.name), 1000 if f.name == "num_hidden_layers" else 2**31
            if f.type in (int, float) and not (isinstance(value, int | f.type) and 0 < value <= most):
                raise ValueError(f"{f.name}={value!r}: expected {f.type.__name__} above 0 and at most {most}")
            if f.type is bool and not isinstance(value, bool):
                raise ValueError(f"{f.name}={value!r}: expected true or false")
        d, h, g = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None:
            if d % h:
                raise ValueError(f"num_attention_heads={h}: expected a divisor of hidden_size={d}")
            object.__setattr__(self, "head_dim", d // h)
        if h % g:
            raise ValueError(f"num_key_value_heads={g}: expected a divisor of num_attention_heads={h}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: expected an even number, rotary positions turn pairs")


# Rows of the paper's table of architectures, then the demo's own. What the paper does not say (rope, norm epsilon,
# supported context) is taken from the teacher.
PRESETS = {
    "200m": Qwen2Config(768, 2112, 12, 12, 12),  # 203.4M parameters
    "500m": Qwen2Config(1024, 2816, 24, 16, 16),  # 464.0M
    "1.8b": Qwen2Config(2048, 5504, 24, 16, 16, tie_word_embeddings=False),  # the teacher, 1.837B
    "mini": Qwen2Config(64, 172, 2, 2, 2, vocab_size=4096, rope_theta=1e4, max_position_embeddings=1024),  # 0.36M
    "demo": Qwen2Config(128, 344, 3, 4, 4, vocab_size=4096, rope_theta=1e4, max_position_embeddings=1024),  # 1.12M
    "demo_teacher": Qwen2Config(
        256, 688, 6, 4, 4, vocab_size=4096, rope_theta=1e4, max_position_embeddings=1024
    ),  # 5.8M
}


def rotary(positions: Tensor, config: Qwen2Config) -> tuple[Tensor, Tensor]:
    """positions [T] or [B, T] int64 -> cos, sin [.., T, K] fp32, the angles of the two halves side by side."""
    k = config.head_dim
    exponent = torch.arange(0, k, 2, device=positions.device, dtype=torch.float32) / k
    angle = positions[..., None].float() * config.rope_theta**-exponent  # [.., T, K / 2]
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
        d, k = config.hidden_size, config.head_dim
        self.head_dim = k
        self.q_proj = Linear(d, config.num_attention_heads * k)
        self.k_proj = Linear(d, config.num_key_value_heads * k)
        self.v_proj = Linear(d, config.num_key_value_heads * k)
        self.o_proj = Linear(config.num_attention_heads * k, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)  # [B, T, H or G, K]
        q, k, v = (p.view(heads).transpose(1, 2) for p in linears(x, self.q_proj, self.k_proj, self.v_proj))
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
    def from_pretrained(cls, name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> "Qwen2":
        """A Hugging Face `qwen2` or `llama` checkpoint from a local folder or the hub, weights as `dtype`.

        Only safetensors are read, so that a foreign folder cannot run code. Raises `UserError` for another
        architecture, rope scaling, a pickle, and any tensor that is missing, left over or misshapen.
        """
        folder = find_folder(name)
        with torch.device("meta"):
            model = cls(load_config(str(folder / "config.json")))  # never a preset of the same name
        model.to(dtype).to_empty(device=device)
        read_weights(model, folder)
        return model.requires_grad_(False).eval()

    def save_pretrained(self, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        """A folder that transformers' `AutoModelForCausalLM` and `AutoTokenizer` load to the same logits and ids."""
        shape = dataclasses.asdict(self.config)
        if shape["head_dim"] * shape["num_attention_heads"] == shape["hidden_size"]:
            del shape["head_dim"]  # the default; older readers do not know the key
        save_folder(Path(folder), shape, self.state_dict(), tokenizer)


def init_student(shape: str | Qwen2Config, seed: int = 1234) -> Qwen2:
    """A student with fresh weights: N(0, 0.02) for matrices, 0 for biases, 1 for norms (paper, appendix A and seed).

    Drawn on the CPU in fp32 in the order of the state dict, so that a seed means the same bits on every device.
    """
    config = load_config(shape) if isinstance(shape, str) else shape
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


def load_config(name: str) -> Qwen2Config:
    """A preset's name, a config.json, a model folder or a hub id -> the shape. `UserError` for others."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name) if name.endswith(".json") else find_folder(name) / "config.json"
    if not path.is_file():
        raise UserError(f"{name}: no config.json there (presets are {', '.join(PRESETS)})")
    keys, remedy = {"rope_parameters?": dict, "rope_scaling?": dict}, "expected a config.json of the Hugging Face form"
    hf = read_json(path, keys, remedy)
    kind = hf.get("model_type")
    if kind not in ("qwen2", "llama"):
        raise UserError(f"{path}: model_type={kind!r}, expected 'qwen2' or 'llama'; other architectures are not read")
    rope = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or {}
    for r in (rope, scaling):
        if r.get("rope_type", r.get("type", "default")) != "default":
            raise UserError(f"{path}: rope scaling {r}: expected none; take a checkpoint without it")
    for key, wanted in (("hidden_act", "silu"), ("use_sliding_window", False), ("mlp_bias", False),
                        ("partial_rotary_factor", 1.0)):  # fmt: skip
        if hf.get(key, wanted) != wanted:
            raise UserError(f"{path}: {key}={hf[key]!r}, expected {wanted!r}; this decoder has no such part")
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": hf.get("num_attention_heads"), "head_dim": None,
                "rope_theta": rope.get("rope_theta", 1e4), "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768}  # fmt: skip
    fields = {f.name: hf.get(f.name, defaults.get(f.name)) for f in dataclasses.fields(Qwen2Config)}
    absent = [k for k, v in fields.items() if v is None and k != "head_dim"]
    if absent:
        raise UserError(f"{path}: no {', '.join(absent)}; expected a config.json of the Hugging Face form")
    try:
        return Qwen2Config(**fields)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
