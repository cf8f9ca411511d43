"""The Qwen2 decoder: Hugging Face weights in and out, and students from a seed.

Modules carry the names of the Hugging Face checkpoint, so its tensors and ours are the same dictionary. Llama
checkpoints without rope scaling are read too: they are the same decoder with zero biases, or (`attention_bias`) with a
bias on the attention's output that must be zero.

Dimension key: B batch, T time, D width, H query heads, G key/value heads, K width of a head, V vocabulary.
"""

import dataclasses
import hashlib
import json
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

INIT_STD = 0.02


class CheckpointError(ValueError):
    """A checkpoint, model folder or tokenizer that cannot be used as asked."""


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
    """Turn each pair (x[i], x[i + K / 2]) by its position's angle. x [B, H, T, K]; cos, sin [(B, 1,) T, K]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Linear(nn.Linear):
    """Multiplies in the input's dtype. The weight stays as it is stored: fp32 master weights, bf16 products on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


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
        q, k, v = (p(x).view(heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
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
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
    """The decoder. Build it by `init_student` or `Qwen2.from_pretrained`; the constructor leaves torch's own init."""

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

    def forward(self, idx: Tensor) -> Tensor:
        """idx [B, T] -> logits [B, T, V]."""
        return F.linear(self.hidden(idx), self.head)

    @property
    def n_params(self) -> int:
        """Parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def _o_biases(self) -> set[str]:
        """Tensors [D] of zeros that a `llama` checkpoint with `attention_bias` has besides ours."""
        return {f"model.layers.{i}.self_attn.o_proj.bias" for i in range(self.config.num_hidden_layers)}

    @classmethod
    def from_pretrained(cls, name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> "Qwen2":
        """A Hugging Face `qwen2` or `llama` checkpoint from a local folder or the hub, weights as `dtype`.

        Only safetensors are read, so that a foreign folder cannot run code. Raises `CheckpointError` for another
        architecture, rope scaling, a pickle, and any tensor that is missing, left over or misshapen.
        """
        folder = find_folder(name)
        with torch.device("meta"):
            model = cls(load_config(str(folder / "config.json")))  # never a preset of the same name
        model.to(dtype).to_empty(device=device)
        read_weights(model, folder)
        return model.requires_grad_(False).eval()

    def save_pretrained(self, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        """A folder that transformers' `AutoModelForCausalLM` and `AutoTokenizer` load to the same logits and ids.

        It appears whole or not at all. `AutoTokenizer` reads every tokenizer beside a `qwen2` model as Qwen's own. With
        another tokenizer the same decoder is therefore written as a `llama` with `attention_bias`, whose bias on the
        attention's output is zero.
        """
        folder = Path(folder)
        new = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        shape = dataclasses.asdict(self.config)
        if shape["head_dim"] * shape["num_attention_heads"] == shape["hidden_size"]:
            del shape["head_dim"]  # the default; older readers do not know the key
        kind, parts = "qwen2", {"use_sliding_window": False}
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
            if not _is_qwens(tokenizer, new):
                kind, parts = "llama", {"attention_bias": True}
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        hf = {"architectures": [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[kind]], "model_type": kind,
              "hidden_act": "silu", "torch_dtype": dtype, "initializer_range": INIT_STD, "attention_dropout": 0.0, **parts, **shape}  # fmt: skip
        if tokenizer is not None:
            eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
            hf |= {"bos_token_id": eos if bos is None else bos, "eos_token_id": eos}
        (new / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
        weights = {name: p.detach().cpu().contiguous() for name, p in self.state_dict().items()}
        if kind == "llama":
            weights |= {name: torch.zeros_like(weights["model.norm.weight"]) for name in self._o_biases}
        safetensors.torch.save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
        shutil.rmtree(old, ignore_errors=True)


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


def weights_hash(model: nn.Module) -> str:
    """sha256 over the names and bytes of every tensor: equal hashes, equal weights."""
    digest = hashlib.sha256()
    for name, p in model.state_dict().items():
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}\n".encode())
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_config(name: str) -> Qwen2Config:
    """A preset's name, a config.json, or a model folder or hub id -> the shape. `CheckpointError` where we can't run it."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name) if name.endswith(".json") else find_folder(name) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{name}: no config.json there (presets are {', '.join(PRESETS)})")
    hf = json.loads(path.read_text())
    kind = hf.get("model_type")
    if kind not in ("qwen2", "llama"):
        raise CheckpointError(
            f"{path}: model_type={kind!r}, expected 'qwen2' or 'llama'; other architectures are not read"
        )
    rope = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or {}
    for r in (rope, scaling):
        if r.get("rope_type", r.get("type", "default")) != "default":
            raise CheckpointError(f"{path}: rope scaling {r}: expected none; take a checkpoint without it")
    for key, wanted in (("hidden_act", "silu"), ("use_sliding_window", False), ("mlp_bias", False),
                        ("partial_rotary_factor", 1.0)):  # fmt: skip
        if hf.get(key, wanted) != wanted:
            raise CheckpointError(f"{path}: {key}={hf[key]!r}, expected {wanted!r}; this decoder has no such part")
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": hf.get("num_attention_heads"), "head_dim": None,
                "rope_theta": rope.get("rope_theta", 1e4), "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768}  # fmt: skip
    fields = {f.name: hf.get(f.name, defaults.get(f.name)) for f in dataclasses.fields(Qwen2Config)}
    absent = [k for k, v in fields.items() if v is None and k != "head_dim"]
    if absent:
        raise CheckpointError(f"{path}: no {', '.join(absent)}; expected a config.json of the Hugging Face form")
    return Qwen2Config(**fields)


def find_folder(name: str) -> Path:
    """A local folder, or the local copy of a hub repository `owner/name` (fetched where it is not there yet)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.count("/") != 1 or name[0] in "./~" or folder.parent.is_dir():
        raise CheckpointError(f"{name}: no such folder; expected a local model folder or a hub id 'owner/name'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "vocab.json", "merges.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{name}: no such local folder, and the hub did not give it ({why})") from error


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` -> a device that is there; under torchrun `cuda` is each process's own card."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    n = torch.cuda.device_count()
    if name not in ("cpu", *(f"cuda:{i}" for i in range(n))):
        raise ValueError(f"device {name}: expected cpu, or cuda with one of this machine's {n} CUDA devices")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or hub id, from its tokenizer.json alone.

    `AutoTokenizer` would choose a class by the model's type and rewrite the pre-tokenizer of small vocabularies.
    """
    folder = find_folder(name)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{name}: no tokenizer.json there; expected a folder or hub id with a fast tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"{name}: the tokenizer names no eos_token, which ends every document")
    return tokenizer


def leading_bos(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The id that the tokenizer by itself puts before a text (its BOS); None where it puts nothing there.

    What it puts after a text is not followed. Raises `CheckpointError` for a tokenizer that puts several ids before a
    text, or one that is no special token: who trains on them must see them in the text.
    """
    backend = tokenizer.backend_tokenizer
    bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    n_before = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), None)
    added, special = whole[:n_before], [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    if not added:
        return None
    if len(added) > 1 or n_before is None or added[0] not in special:
        raise CheckpointError(
            f"tokenizer: turns 'a', {bare}, into {whole} by itself; expected at most one special token before it: set "
            "bos=none, or take another tokenizer"
        )
    return added[0]


def _is_qwens(tokenizer: PreTrainedTokenizerFast, folder: Path) -> bool:
    """Whether a `Qwen2Tokenizer` made of this tokenizer's files in `folder` gives the same ids and text."""
    return _deciding(Qwen2Tokenizer.from_pretrained(folder)) == _deciding(tokenizer)


def _deciding(tokenizer: PreTrainedTokenizerFast) -> dict:
    """The parts of a tokenizer that decide on ids and text; an empty setting is an absent one."""

    def plain(part):
        if isinstance(part, list):
            return [plain(x) for x in part]
        if not isinstance(part, dict):
            return part
        return {key: plain(value) for key, value in part.items() if key != "trim_offsets" and value not in (None, "")}

    parts = plain(json.loads(tokenizer.backend_tokenizer.to_str()))
    if parts.get("decoder", {}).get("type") == "ByteLevel":
        parts["decoder"] = "ByteLevel"  # its settings do nothing
    return parts


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of all that decides which ids a text gets."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def read_weights(model: Qwen2, folder: Path) -> None:
    """Copy a folder's safetensors into `model`, tensor by tensor; every tensor once, none left over."""
    facts, zeros, wanted = json.loads((folder / "config.json").read_text()), set(), dict(model.state_dict())
    if facts["model_type"] == "llama" and facts.get("attention_bias"):
        zeros = model._o_biases
    elif facts["model_type"] == "llama":
        for name in [n for n in wanted if n.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias"))]:
            wanted.pop(name).zero_()
    absent, twin = wanted.keys() | zeros, None
    for file in weight_files(folder):
        for name in tensor_names(file):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a constant that old checkpoints carry
            # opened anew each time: all that was read of an open file counts as memory
            with safetensors.safe_open(file, framework="pt") as tensors:
                source = tensors.get_tensor(name)
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                twin = source  # some writers store the tied head twice
                continue
            if name in zeros:
                if source.any():
                    raise CheckpointError(f"{file}: {name} is not zero, as expected; this decoder has no such bias")
                absent.discard(name)
                continue
            if name not in wanted:
                raise CheckpointError(
                    f"{file}: extra tensor {name} {tuple(source.shape)}; config.json has no place for it"
                )
            if source.shape != wanted[name].shape:
                raise CheckpointError(
                    f"{file}: {name} is {tuple(source.shape)}, expected {tuple(wanted[name].shape)} by config.json"
                )
            if name not in absent:
                raise CheckpointError(f"{file}: {name} is in another file of that folder too; remove one of them")
            if not source.is_floating_point():
                raise CheckpointError(
                    f"{file}: {name} is {source.dtype}, expected floating point; take the weights as they were trained"
                )
            wanted[name].copy_(source)
            absent.discard(name)
            del source
    if absent:
        raise CheckpointError(
            f"{folder}: missing tensor {min(absent)} ({len(absent)} in all); the checkpoint is not whole"
        )
    if twin is not None and not torch.equal(twin.to(model.head), model.head):
        raise CheckpointError(f"{folder}: lm_head.weight differs from the embedding, but config.json ties them")


def tensor_names(file: Path) -> list[str]:
    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error}); fetch or write it again") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: one, or the shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        gone = [s for s in shards if Path(s).name != s or not (folder / s).is_file()]
        if gone:
            raise CheckpointError(f"{folder}: shard {gone[0]} is named in the index but not there")
        return [folder / s for s in shards]
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickles:
        raise CheckpointError(
            f"{folder}: {pickles[0]} is a pickle, which can run code; expected model.safetensors: convert it first"
        )
    raise CheckpointError(f"{folder}: no model.safetensors there; expected a Hugging Face model folder")
