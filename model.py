"""The decoder: its shapes, its forward pass, and students from a seed.

It implements `qwen2` (Qwen1.5, 2, 2.5), `qwen3`, `llama` (1 to 3, SmolLM2) and `mistral`: pre-norm
layers of RMSNorm, rotary grouped-query attention and SwiGLU. The families differ in the biases of
q, k and v, in norms on q and k, and in the rotary angles. Modules carry the names of the Hugging
Face checkpoint, so both have the same state dict (lib/hf.py reads and writes it).

Precision of training on a GPU, if configure.py's `dtype` is "auto"; on the CPU all is fp32:

    | number                                                        | dtype                      |
    |---------------------------------------------------------------|----------------------------|
    | student's weights, AdamW's moments, accumulated gradients     | fp32                       |
    | teacher's weights                                             | bf16                       |
    | activations and residual stream; operands of every product    | bf16                       |
    | accumulation inside a product; logits                         | fp32                       |
    | statistics of norms, rotary angles, softmaxes, sums over V    | fp32                       |
    | losses: a few numbers per position                            | fp32, some of them fp64    |
    | gradient of the logits, as an operand of the head's products  | bf16                       |

`hidden(dtype=...)` sets the dtype of the activations. `Linear`, `RMSNorm`, and the cosines and
sines of the rotary angles follow it.

Dimension key: B batch, T time, D width, H query heads, G key/value heads, K width of a head,
V vocabulary.
"""

import copy
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lib import parallel
from lib.errors import UserError, did_you_mean
from lib.files import read_json, reading
from lib.head import Head
from lib.hf import MERGE, check_weights, find_folder, read_weights, save_folder
from lib.settings import Positive, PositiveInt, check_fields, checked

INIT_STD = 0.02  # of a student's first weights
NATIVE = ("qwen2", "qwen3", "llama", "mistral")  # families that this decoder computes
LLAMA3 = (  # parameters of Llama 3's rope scaling
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)

INERT = {  # keys of config.json without effect on the logits of these families in evaluation
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "_model_name_or_path",  # from GGUF
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "max_window_layers",
    "pad_token_id",
    "pretraining_tp",
    "probe",  # of a student that only the classes for students compute
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}

Layers = Annotated[int, "0 to 1,000", lambda n: 0 <= n <= 1000]


@dataclass(frozen=True)
class Qwen2Config:
    """The shape of a decoder, in the field names of the Hugging Face config."""

    hidden_size: PositiveInt  # D
    intermediate_size: PositiveInt  # width inside the MLP
    num_hidden_layers: Layers
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
    # Llama 3's, by the names of its config.json
    rope_scaling: dict | None = field(default=None, hash=False)
    # A field of your own, with a default, goes here, and in no other place.

    def __post_init__(self):
        check_fields(self)
        d = self.hidden_size
        h = self.num_attention_heads
        g = self.num_key_value_heads
        if self.head_dim is None:
            if d % h:
                raise UserError(f"num_attention_heads={h}: expected a divisor of hidden_size={d}")
            object.__setattr__(self, "head_dim", d // h)
        if h % g:
            raise UserError(
                f"num_key_value_heads={g}: expected a divisor of num_attention_heads={h}"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim={self.head_dim}: expected an even number, RoPE rotates pairs"
            )
        if self.rope_scaling:
            for key in LLAMA3:
                checked(f"rope_scaling.{key}", self.rope_scaling.get(key), Positive)
            scaling = self.rope_scaling | {"rope_type": "llama3"}  # as transformers needs it
            object.__setattr__(self, "rope_scaling", scaling)

    def draw(self, seed: int) -> "Qwen2":
        """Return a student with fresh weights, in fp32 on the CPU."""
        return init_student(self, seed)

    def flops_per_token(self, seq_len) -> float:
        """Return the FLOPs of one token in a forward pass; a backward pass has twice as many.

        They are 2 per weight of every matrix (the head's, but not the embedding's, which is a
        look-up), and 2 * H * K * T per layer for attention: two products of 2 * H * K * T each, of
        which causality needs half.
        """
        d = self.hidden_size
        k = self.head_dim
        h = self.num_attention_heads
        attention = d * k * (2 * h + 2 * self.num_key_value_heads)
        mlp = 3 * d * self.intermediate_size
        weights = self.num_hidden_layers * (attention + mlp) + self.vocab_size * d
        scores = self.num_hidden_layers * 2 * h * k * seq_len
        return 2 * weights + scores


FIELDS = {field.name for field in dataclasses.fields(Qwen2Config)}

# The paper's table of architectures, then the demo's. If there is a teacher, `student_config`
# replaces vocabulary, rope base and scaling, norm epsilon and context by the teacher's. Of these
# the paper states the vocabulary alone; the defaults of the others are Qwen1.5's.
_DEMO = {"vocab_size": 4096, "rope_theta": 1e4, "max_position_embeddings": 1024}
PRESETS = {
    # D, width of the MLP, layers, H, G
    "200m": Qwen2Config(768, 2112, 12, 12, 12),  # 203.4M parameters
    "500m": Qwen2Config(1024, 2816, 24, 16, 16),  # 464.0M
    "1.8b": Qwen2Config(2048, 5504, 24, 16, 16, tie_word_embeddings=False),  # the teacher, 1.837B
    "mini": Qwen2Config(64, 172, 2, 2, 2, **_DEMO),  # 0.36M
    "demo": Qwen2Config(128, 344, 3, 4, 4, **_DEMO),  # 1.12M
    "demo_teacher": Qwen2Config(192, 512, 4, 3, 3, **_DEMO),  # 2.6M
}

# ----------------------------------------------------------------------------------------------
# the decoder, from its parts to the whole


class Linear(nn.Linear):
    """Casts its weights to the input's dtype, so that fp32 weights can multiply bf16 inputs."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.RMSNorm):
    """Computes in fp32, and multiplies by its weight in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * x32.to(x.dtype)


def rotary(positions: Tensor, config) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the K / 2 rotary angles, repeated for the second half of a head.

    positions  [T] int64
    ->         [T, K] fp32 each
    """
    k = config.head_dim
    exponent = torch.arange(0, k, 2, device=positions.device, dtype=torch.float32) / k
    frequency = config.rope_theta**-exponent  # [K / 2] radians per position
    if config.rope_scaling:
        frequency = scaled_frequency(frequency, config.rope_scaling)
    angle = torch.outer(positions.float(), frequency).repeat(1, 2)  # [T, K]
    return angle.cos(), angle.sin()


def scaled_frequency(frequency, scaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend between (Llama 3), [K / 2]."""
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    turns = frequency * scaling["original_max_position_embeddings"] / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling["factor"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + K / 2]) by its position's angle.

    x         [B, H, T, K]
    cos, sin  [T, K]
    """
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


# attention of queries, keys and values, each to all earlier tokens
causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def within_documents(idx: Tensor, end: int) -> Callable:
    """Return an attention like `causal`, but to the earlier tokens of the same document alone.

    Positions go on in the next document: with rotary angles, only their differences matter.

    idx  [B, T] int64 token ids
    end  the id that ends each document
    """
    is_end = (idx == end).long()
    document = is_end.cumsum(1) - is_end  # [B, T] number of documents that ended before

    def is_seen(b, h, q, k):
        return (q >= k) & (document[b, q] == document[b, k])

    n_rows, n = idx.shape
    if idx.is_cuda:  # compiled, so that no [T, T] is in memory
        mask = torch.compile(create_block_mask)(is_seen, n_rows, None, n, n, idx.device)
        return functools.partial(torch.compile(flex_attention), block_mask=mask)
    b = torch.arange(n_rows)[:, None, None, None]
    t = torch.arange(n)
    mask = is_seen(b, 0, t[:, None], t)  # [B, 1, T, T]
    return functools.partial(F.scaled_dot_product_attention, attn_mask=mask)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, [B, T, D] -> [B, T, D]."""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        k = config.head_dim
        d_q = config.num_attention_heads * k
        d_kv = config.num_key_value_heads * k
        self.head_dim = k
        self.q_proj = Linear(d, d_q, bias=config.attention_bias)
        self.k_proj = Linear(d, d_kv, bias=config.attention_bias)
        self.v_proj = Linear(d, d_kv, bias=config.attention_bias)
        self.o_proj = Linear(d_q, d, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(k, config.rms_norm_eps)
            self.k_norm = RMSNorm(k, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend=causal) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        # [B, H, T, K], and k and v [B, G, T, K]
        q, k, v = (
            project(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for project in projections
        )
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        out = attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU, [B, T, D] -> [B, T, D]."""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        f = config.intermediate_size
        self.gate_proj = Linear(d, f, bias=False)
        self.up_proj = Linear(d, f, bias=False)
        self.down_proj = Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention, then MLP, each added onto the residual stream, [B, T, D] -> [B, T, D]."""

    def __init__(self, config, attention=Attention, mlp=MLP):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp(config)

    def forward(self, x, *inputs) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    """The decoder; a student's is `StudentDecoder`.

    Build it with `init_student` or `Qwen2.from_pretrained`: the constructor keeps torch's own
    initialisation.
    """

    layer = Layer
    document_end: int | None = None  # see `within_documents`; None: documents see earlier ones

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()  # all but the head, under the names of the checkpoint
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (self.layer(config) for _ in range(config.num_hidden_layers))
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden(
        self, idx: Tensor, recompute: bool = False, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the last hidden states, after the final norm.

        idx        [B, T] int64 token ids
        recompute  keep only each layer's input for the backward pass: less memory, a third more
                   arithmetic
        dtype      of activations and products (default: that of the weights)
        ->         [B, T, D] in `dtype`
        """
        x = self.model.embed_tokens(idx).to(dtype=dtype)  # [B, T, D]
        positions = torch.arange(idx.shape[1], device=idx.device)
        inputs = [table.to(x.dtype) for table in rotary(positions, self.config)]  # [T, K] each
        if self.document_end is not None:
            inputs.append(within_documents(idx, self.document_end))
        for layer in self.model.layers:
            if recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, *inputs, use_reentrant=False)
            else:
                x = layer(x, *inputs)
        return self.model.norm(x)

    @property
    def head(self) -> Tensor:
        """The weight [V, D] of the head, which is the embedding's if they are tied."""
        return (self.lm_head or self.model.embed_tokens).weight

    def forward(self, idx: Tensor) -> Tensor:
        """Return the logits, in the dtype of the weights unless they are capped, [B, T, V]."""
        h = self.hidden(idx)
        if isinstance(self.head, Tensor):
            return F.linear(h, self.head)
        return Head(h, self.head).logits().unflatten(0, idx.shape)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def cut(self, vocab_size: int):
        """Drop the rows of embedding and head beyond `vocab_size`, which no token uses."""
        for table in filter(None, (self.model.embed_tokens, self.lm_head)):
            table.weight = nn.Parameter(table.weight[:vocab_size].clone())
        self.config = dataclasses.replace(self.config, vocab_size=len(self.head))

    @classmethod
    def from_pretrained(
        cls, name, dtype=torch.float32, device: str = "cpu", shard: int = 1
    ) -> "Qwen2":
        """Load a frozen model of one of the NATIVE families.

        name   local folder, or hub id `owner/name@revision`
        dtype  of the weights
        shard  number of processes over which the layers are sharded; each keeps its own part only

        Only safetensors are read, so a foreign folder cannot run code. Raises `UserError` for
        another architecture, a pickle, and any missing, unexpected or misshapen tensor; and if this
        decoder no longer computes the model, after an edit of this file.
        """
        folder = find_folder(name)
        config = load_config(name)
        expected = read_json(folder / "config.json").get("probe")
        check_weights(folder, config.num_hidden_layers)
        with torch.device("meta"):
            model = StudentDecoder(config) if expected else cls(config)
        model.to(dtype)
        if shard > 1:
            parallel.shard(model, shard, torch.device(device))
        model.to_empty(device=device)
        restore = f"{folder}: restore the classes for students in model.py that it was trained with"
        try:
            read_weights(model, folder)
        except UserError as error:
            raise UserError(f"{restore} ({error})" if expected else error) from error
        check_decoder()
        if expected:
            weights = {key: parallel.full_tensor(p) for key, p in model.state_dict().items()}
            logits = probe(StudentDecoder, config, weights)
            tolerance = 1e-4 if dtype == torch.float32 else 3e-2  # weights are rounded
            # an older version saved 18
            check_probe(logits[-len(expected) :], expected, restore, tolerance)
        return model.requires_grad_(False).eval()

    def save_pretrained(self, folder: str | Path, tokenizer=None, weights: dict | None = None):
        """Write a folder that transformers' `AutoModelForCausalLM` and `AutoTokenizer` load.

        The loaded model gives the same logits, and the loaded tokenizer the same ids.

        tokenizer  a `PreTrainedTokenizerFast` to write beside the model
        weights    the unsharded tensors by name, if this model's are sharded; then the folder that
                   `folder` is in must be there, as a run makes none of its own twice
        """
        if weights is None:
            Path(folder).parent.mkdir(parents=True, exist_ok=True)
            weights = self.state_dict()
        shape = dataclasses.asdict(self.config) | {"initializer_range": INIT_STD}
        if type(self) is not Qwen2:
            logits = probe(type(self), self.config, weights)
            try:
                check_probe(probe(Qwen2, self.config, weights), logits, "", 1e-6)
            except (UserError, RuntimeError):  # other logits, or other tensors
                shape["probe"] = logits  # of an edited student
        save_folder(Path(folder), shape, weights, tokenizer)


# ----------------------------------------------------------------------------------------------
# A student's own decoder: edit it here. Teachers, and all other models, have the classes above.


class StudentAttention(Attention):
    """A student's attention."""


class StudentMLP(MLP):
    """A student's MLP."""


class StudentLayer(Layer):
    """A student's layer."""

    def __init__(self, config):
        super().__init__(config, StudentAttention, StudentMLP)


class StudentDecoder(Qwen2):
    """A student's decoder. Training calls `hidden` and `head`."""

    layer = StudentLayer


def init_student(shape: str | Qwen2Config, seed=1234) -> Qwen2:
    """Return a student with fresh weights: N(0, 0.02), biases 0, norms 1.

    This is our choice: the paper does not say. Weights are drawn on the CPU in fp32, in the order
    of the state dict, so a seed gives the same bits on every device.
    """
    config = student_config(shape) if isinstance(shape, str) else shape
    check_decoder()
    model = StudentDecoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0.0, INIT_STD, generator=generator)
            else:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


# ----------------------------------------------------------------------------------------------
# refusing a model whose decoder was edited since

# A small decoder with all that families may have, and two of its logits as transformers has them.
SMALL = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 64,
}
REFERENCE_SHAPE = Qwen2Config(
    **SMALL,
    qk_norm=True,
    tie_word_embeddings=False,
    rope_scaling=dict(zip(LLAMA3, (8.0, 1.0, 4.0, 16), strict=True)),
)
REFERENCE = [-0.455345, -0.353871]


def probe(decoder, config, weights) -> list[float]:
    """Return what tells an edited decoder from another: 32 of its logits, and 2 of a small one.

    decoder  class of the model that has these weights, tensors by name
    """
    weights = {name: p.float() for name, p in weights.items()}
    logits = logits_of(decoder, config, 16, weights)
    try:
        return logits + small_logits(decoder, dataclasses.replace(config, **SMALL))
    except Exception:  # an edit that such a size does not fit
        return [*logits, 1.0, 1.0]


@functools.cache  # each checkpoint asks for it
def small_logits(decoder, config) -> list[float]:
    """Return the last two logits after 1,024 tokens."""
    return logits_of(decoder, config, 1024)[-2:]


@torch.no_grad()
def logits_of(decoder, config, n: int, weights=None) -> list[float]:
    """Return the largest logits after each of n tokens, then those of token 0, in evaluation.

    weights  tensors by name; None: sines, which need no random numbers
    """
    with torch.device("meta"):
        model = decoder(config).eval()
    if not weights:
        tensors = model.state_dict()
        weights = {name: torch.arange(p.numel()).sin().view(p.shape) for name, p in tensors.items()}
    model.load_state_dict(weights, assign=True)
    idx = torch.arange(n, device=model.head.device) % config.vocab_size
    z = model(idx[None])[0]
    return [*z.amax(-1).tolist(), *z[:, 0].tolist()]


def check_decoder():
    """Raise `UserError` unless `Qwen2` computes a small decoder as transformers does.

    And for an edit that would have no effect.
    """
    if StudentDecoder.forward is not Qwen2.forward:
        raise UserError("model.py: training calls `hidden` and `head`, not `forward`; edit these")
    check_probe(
        small_logits(Qwen2, REFERENCE_SHAPE),
        REFERENCE,
        "model.py: an edit changes teachers too; edit StudentAttention, StudentMLP, StudentLayer "
        "or StudentDecoder instead",
    )


def check_probe(logits: list[float], expected: list[float], message, tolerance=1e-4):
    """Raise `UserError` unless the logits of a `probe`, or those of a small model, are near.

    tolerance  relative error of a norm; at most 1e-4 in the small model, the last two logits, whose
               weights are never rounded
    """
    for part, limit in ((slice(-2), tolerance), (slice(-2, None), min(tolerance, 1e-4))):
        # NaN, of a student that has diverged, is no edit
        z, z_expected = torch.tensor([logits[part], expected[part]]).nan_to_num()
        if not is_near(z, z_expected, limit):
            error = (z - z_expected).norm() / z_expected.norm()
            raise UserError(f"{message} (relative error of its logits: {error:.0e})")


def is_near(x, expected, tolerance) -> bool:
    """Return whether the norm of the error is within `tolerance`; NaN is not."""
    error = (x - expected).float().norm()
    return bool(error <= tolerance * expected.float().norm())


# ----------------------------------------------------------------------------------------------
# shapes, from a config.json and from the command line


def config_file(name) -> Path:
    """Return the config.json of a model's folder, of a hub id, or itself."""
    path = Path(name)
    if path.suffix != ".json":
        path = find_folder(name) / "config.json"
    if not path.is_file():
        expected = "expected a model's folder, such as out/NAME/METHOD, or its config.json"
        if path.with_name("adapter_config.json").is_file():
            expected = MERGE
        raise UserError(f"{name}: no model/ in it, and no config.json; {expected}")
    return path


def load_config(name) -> Qwen2Config:
    """Return the shape in a config.json, a model's folder, or a hub id.

    A Mistral with a sliding window becomes a decoder whose context is that window: on shorter rows
    the two are the same. Raises `UserError` for what this decoder does not compute.
    """
    path = config_file(name)
    values, reason = read_shape(path)
    if reason:
        raise UserError(
            f"{path}: {reason}; this decoder does not support it; if it was edited for this model, "
            "restore the edit"
        )
    kind = values["model_type"]
    rope = values.get("rope_parameters", values)  # a student has its base among the other keys
    fields = {key: values[key] for key in FIELDS if key in values}
    fields["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type") == "llama3":
        fields["rope_scaling"] = {key: rope[key] for key in LLAMA3}
    if kind in ("qwen2", "mistral"):  # without a choice
        fields["attention_bias"] = kind == "qwen2"
    fields["qk_norm"] = kind == "qwen3"
    if kind == "mistral" and values["sliding_window"]:
        context = values["max_position_embeddings"]
        fields["max_position_embeddings"] = min(context, values["sliding_window"])
    try:
        return Qwen2Config(**fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_shape(path) -> tuple[dict, str | None]:
    """Return the values of a config.json, and which of them this decoder does not compute, or None.

    Values that the file leaves out are transformers' defaults. A key that is not read here, and not
    in INERT, must be without effect on transformers' config object.
    """
    with reading(path, "correct config.json"):
        hf = json.loads(path.read_bytes())
        kind = hf.get("model_type")
        if kind not in NATIVE:
            return hf, f"model_type={kind!r}, expected one of {', '.join(NATIVE)}"
        values = {key: value for key, value in hf.items() if key not in INERT}
        of_student = FIELDS - {"qk_norm", "rope_scaling"} | {"model_type", "hidden_act"}  # as saved
        has_saved_keys = values.keys() == of_student and None not in values.values()
        # a mistral without the key has a sliding window of 4,096
        if has_saved_keys and kind != "mistral" and values["hidden_act"] == "silu":
            # transformers' class takes seconds to import for a `llama`, and would change nothing
            return values, None
        from transformers import AutoConfig

        read = FIELDS - {"qk_norm"} | {"model_type", "rope_parameters", "sliding_window"}
        known = {key: value for key, value in values.items() if key in read}
        # the class lists the kind of each layer, and changes what it is given
        checked("num_hidden_layers", values.get("num_hidden_layers", 0), Layers)
        complete = AutoConfig.for_model(**copy.deepcopy(values)).to_dict()
        ours = AutoConfig.for_model(**known).to_dict()
    for key, value in complete.items():
        expected = ours.get(key)
        # False is the default of every other key
        if value != expected and (value or expected or key == "is_causal"):
            return hf, f"{key}={value!r}, expected {expected!r}"
    rope = complete["rope_parameters"]
    known_rope = {"rope_theta", "rope_type", "type", *LLAMA3}
    if rope.get("rope_type") not in ("default", "llama3") or not rope.keys() <= known_rope:
        return hf, f"rope scaling {rope}, expected none or Llama 3's"
    return complete, None


def student_config(shape: str, teacher: dict | None = None, load=load_config) -> Qwen2Config:
    """Return the shape of a student.

    shape    a preset, WIDTHxLAYERSxHEADS, a JSON object, or what `load_config` takes
    teacher  the fields that a student takes from its teacher (`run.teacher.inherited`): vocabulary,
             rope base and scaling, norm epsilon, context. They replace a preset's. They are the
             defaults of WIDTHxLAYERSxHEADS and of a JSON object. A config.json ignores them
    load     returns the shape in a folder; `run.teacher.load_shape` knows other decoders too
    """
    teacher = teacher or {}
    if shape in PRESETS:
        return dataclasses.replace(PRESETS[shape], **teacher)
    sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape)
    if not sizes and not shape.startswith("{"):
        if "/" in shape or Path(shape).exists():
            return load(shape)
        expected = f"expected a preset ({', '.join(PRESETS)}), 512x8x8, or a folder"
        raise UserError(f"student={shape}: {expected}{did_you_mean(shape, PRESETS)}")
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    expected = f"expected {', '.join(keys)}, and other keys of config.json"
    with reading(f"student={shape}", expected):
        if sizes:
            fields = dict(zip(keys, map(int, sizes.groups()), strict=True))
        else:
            fields = json.loads(shape)
        if not teacher and "vocab_size" not in fields:
            raise UserError(f"student={shape}: expected a vocab_size, or a teacher that has one")
        # 8 / 3 * D, rounded up to a multiple of 64; 192 is 3 * 64
        mlp = 64 * math.ceil(fields["hidden_size"] * 8 / 192)
        heads = fields["num_attention_heads"]
        defaults = {"intermediate_size": mlp, "num_key_value_heads": heads}
        return Qwen2Config(**defaults | teacher | fields)
