"""The frozen teacher: a run needs its last hidden states and its head, nothing else of it.

The decoder in model.py computes the families of `model.NATIVE`, transformers every other one. Hidden states travel between
devices, not logits: V / D times fewer bytes.
"""

import torch
import transformers
from torch import Tensor, nn

from lib import parallel
from lib.errors import require
from lib.files import read_json, reading
from lib.hf import check_weights, find_folder, load_tokenizer
from model import Qwen2, flops_per_token, load_config, unsupported

# Keys of config.json that scale or cap the logits, with the values that leave them as hidden states times head.
LOGIT_SCALES = {"final_logit_softcapping": (None, 0.0), "logit_scale": (None, 1.0), "logits_scaling": (None, 1.0)}
# What a student's shape inherits from its teacher.
INHERITED = ("vocab_size", "rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings")


class Teacher:
    """A frozen model, on a device of its own if need be; what it returns is on the students' device."""

    def __init__(self, model: nn.Module, home: torch.device, vocab_size: int | None = None):
        self.model, self.home, self.native = model, home, isinstance(model, Qwen2)
        self.whole_head = model.head if self.native else model.get_output_embeddings().weight
        self.head = self.whole_head[:vocab_size].to(home)  # [V, D]; the same memory if they share a device

    @torch.no_grad()
    def hidden(self, idx: Tensor, *rows: object) -> Tensor:
        """Token ids [B, T] on any device -> last hidden states [B, T, D] on the students' device.

        rows  where the ids are from, which only a teacher of lib/cache.py reads
        """
        idx = idx.to(next(self.model.parameters()).device, non_blocking=True)
        h = self.model.hidden(idx) if self.native else self.model.base_model(idx, use_cache=False)[0]
        return h.to(self.home, non_blocking=True)

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's forward pass. By transformers: two per weight that multiplies it, without attention scores."""
        if self.native:
            return flops_per_token(self.model.config, seq_len, trained=False)
        config, embedding = self.model.config.get_text_config(), self.model.get_input_embeddings().weight
        active = getattr(config, "num_experts_per_tok", None) or 1  # of a mixture of experts [E, ., .]
        weights = sum(p.numel() * (min(active / len(p), 1) if p.ndim == 3 else 1) for p in self.model.parameters())
        tied = embedding is self.model.get_output_embeddings().weight
        return 2.0 * (weights - (0 if tied else embedding.numel()))


def load_teacher(
    name: str, dtype: torch.dtype, device: torch.device, home: torch.device | None = None, compile: bool = False,
    vocab_size: int | None = None, shard: int = 1,
) -> Teacher:  # fmt: skip
    """A teacher from a local folder or hub id `owner/name@revision`, frozen.

    dtype       of its weights and activations
    device      where it computes; `home` is the students' device (None: the same)
    compile     run the layers of a native one under torch.compile
    vocab_size  rows of the head to keep (None: all); the others are padding
    shard       processes over which its layers are sharded; embedding and head stay whole

    Raises `UserError` for a folder without safetensors, a model whose logits are not its last hidden states times its
    head, and one whose hidden states depend on later tokens.
    """
    folder, home = find_folder(name), home or device
    if is_native(name):
        model = Qwen2.from_pretrained(name, dtype, device, shard)
        if compile:
            model.compile_layers()
        return Teacher(model, home, vocab_size)
    config = foreign_config(name)
    check_weights(folder, getattr(config.get_text_config(), "num_hidden_layers", 0))
    with reading(folder, "choose another teacher"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    missing, more = info["missing_keys"], info["unexpected_keys"]  # transformers would draw, would ignore them
    require(not missing, f"{name}: missing tensor {min(missing, default='')}; the checkpoint is incomplete")
    require(not more, f"{name}: config.json has no place for tensor {min(more, default='')} ({len(more)} in all)")
    model.requires_grad_(False).eval()
    if shard > 1:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers = max(lists, key=lambda some: sum(p.numel() for p in some.parameters()))  # the most parameters
        parallel.shard(model.base_model, layers, shard, device, layers_only=True)
    model.to(device)
    check_logits(name, model)
    return Teacher(model, home, vocab_size)


def is_native(name: str) -> bool:
    return not unsupported(read_json(find_folder(name) / "config.json"))


def foreign_config(name: str) -> transformers.PretrainedConfig:
    """The config of a model that transformers computes. Raises `UserError` for one that cannot be a teacher."""
    with reading(find_folder(name) / "config.json", "choose another teacher"):
        config = transformers.AutoConfig.from_pretrained(find_folder(name), trust_remote_code=False)
    plain = not getattr(config, "quantization_config", None)
    require(plain, f"{name}: config.json has a quantization_config; expected weights that are not quantized")
    encodes = config.is_encoder_decoder
    require(not encodes, f"{name}: {config.model_type} is an encoder-decoder; expected a decoder-only model")
    for key, neutral in LOGIT_SCALES.items():
        value = getattr(config.get_text_config(), key, None)
        plain = value in neutral
        require(plain, f"{name}: {key}={value}: its logits are not hidden states times head; choose another teacher")
    return config


def check_teacher(name: str, tokenizer: transformers.PreTrainedTokenizerFast, seq_len: int) -> None:
    """Raise `UserError` unless a teacher fits rows of `seq_len` inputs with this tokenizer's ids."""
    given, ids, own = inherited(name), tokenizer.get_vocab(), find_folder(name) / "tokenizer.json"
    context, v, n = given.get("max_position_embeddings") or seq_len, given["vocab_size"], max(ids.values()) + 1
    theirs = load_tokenizer(name).get_vocab() if own.is_file() and str(own.parent) != tokenizer.name_or_path else ids
    other = min((token for token in ids if theirs.get(token) != ids[token]), default="")
    for ok, message in (
        (seq_len <= context, f"seq_len={seq_len}: teacher={name} supports {context} positions; set less"),
        (n <= v, f"teacher={name}: vocabulary of {v:,}, but the tokenizer has {n:,} tokens; logits are matched token by token"),
        (not other, f"teacher={name}: its tokenizer gives {other!r} id {theirs.get(other)}, that of the rows {ids.get(other)}"),
    ):  # fmt: skip
        require(ok, message)


@torch.no_grad()
def check_logits(name: str, model: nn.Module) -> None:
    """Check on a few tokens that logits are last hidden states times head, and that no token sees a later one."""
    head = model.get_output_embeddings()
    require(head is not None, f"{name}: {type(model).__name__} has no output embedding; expected a language model")
    message = f"{name}: its head has a bias, or its logits are not hidden states times head; choose another teacher"
    require(getattr(head, "bias", None) is None, message)
    idx = torch.arange(2, 16, device=head.weight.device).repeat(2, 1) % len(head.weight)
    idx[1, -1] = 0  # the rows differ in their last token
    h, z = model.base_model(idx, use_cache=False)[0], model(idx, use_cache=False).logits
    tolerance = 1e-4 if z.dtype == torch.float32 else 2e-2  # relative, in norm: rounding
    require((h @ head.weight.T - z).float().norm() <= tolerance * z.float().norm(), message)
    causal = (h[0, :-1] - h[1, :-1]).float().norm() <= tolerance * h.float().norm()
    require(causal, f"{name}: its hidden states depend on later tokens; expected a causal language model")


def inherited(name: str | None) -> dict | None:
    """The fields INHERITED of a teacher's shape that a student takes over; None without a teacher.

    A model that transformers computes may lack some (LayerNorm has no RMSNorm epsilon): the preset keeps its own.
    """
    if name is None:
        return None
    if is_native(name):
        shape = load_config(str(find_folder(name) / "config.json"))  # never a preset of the same name
        return {key: getattr(shape, key) for key in INHERITED}
    config = foreign_config(name).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    values = {key: rope.get(key) if "rope" in key else getattr(config, key, None) for key in INHERITED}
    return {key: value for key, value in values.items() if value is not None}
