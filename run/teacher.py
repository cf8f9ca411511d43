"""The frozen teacher, of which a run uses only the last hidden states and the head.

The decoder in model.py computes the families of `model.NATIVE`, transformers every other one.
Hidden states travel between devices, not logits: V / D times fewer bytes.
"""

import torch
import transformers
from torch import Tensor, nn

from lib import parallel
from lib.errors import UserError
from lib.files import read_json, reading
from lib.hf import check_weights, find_folder, load_tokenizer
from model import Qwen2, flops_per_token, load_config, unsupported

# Keys of config.json that scale or cap the logits, with the values that do neither.
LOGIT_SCALES = {
    "final_logit_softcapping": (None, 0.0),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
}
# What a student's shape inherits from its teacher.
INHERITED = (
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rms_norm_eps",
    "max_position_embeddings",
)


class Teacher:
    """A frozen model. What it returns is on the students' device, `home`."""

    is_stored = False  # True if all hidden states are read from a file (run/cache.py)

    def __init__(self, model: nn.Module, home: torch.device, vocab_size: int | None = None):
        self.model = model
        self.home = home
        self.native = isinstance(model, Qwen2)
        if self.native:
            self.whole_head = model.head
        else:
            self.whole_head = model.get_output_embeddings().weight
        # [V, D]; the same memory if teacher and students share a device
        self.head = self.whole_head[:vocab_size].to(home)

    @torch.no_grad()
    def hidden(self, idx: Tensor, *rows: object) -> Tensor:
        """Return the last hidden states [B, T, D] of token ids [B, T], which are on any device.

        rows  further arguments are for the teacher of run/cache.py, which looks the rows up
        """
        idx = idx.to(next(self.model.parameters()).device, non_blocking=True)
        if self.native:
            h = self.model.hidden(idx)
        else:
            h = self.model.base_model(idx, use_cache=False)[0]
        return h.to(self.home, non_blocking=True)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of one token's forward pass.

        For a model that transformers computes: two per weight that multiplies the token, without
        attention scores.
        """
        if self.native:
            return flops_per_token(self.model.config, seq_len, trained=False)
        config = self.model.config.get_text_config()
        n_active = getattr(config, "num_experts_per_tok", None) or 1
        n_weights = 0
        for p in self.model.parameters():
            share = 1
            if p.ndim == 3:  # of a mixture of experts [E, ., .]
                share = min(n_active / len(p), 1)
            n_weights += p.numel() * share
        embedding = self.model.get_input_embeddings().weight
        if embedding is not self.model.get_output_embeddings().weight:
            n_weights -= embedding.numel()  # a look-up
        return 2.0 * n_weights


def load_teacher(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    home: torch.device | None = None,
    vocab_size: int | None = None,
    shard: int = 1,
) -> Teacher:
    """Load a frozen teacher from a local folder or hub id `owner/name@revision`.

    dtype       of its weights and activations
    device      where it computes; `home` is the students' device (None: the same)
    vocab_size  rows of the head to keep (None: all); the others are padding
    shard       processes over which its layers are sharded; embedding and head stay whole

    Raises `UserError` for a folder without safetensors, a model whose logits are not its last
    hidden states times its head, and one whose hidden states depend on later tokens.
    """
    home = home or device
    if is_native(name):
        model = Qwen2.from_pretrained(name, dtype, device, shard)
        return Teacher(model, home, vocab_size)
    model = load_foreign(name, dtype)
    if shard > 1:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers = max(lists, key=count_parameters)  # the decoder layers are the heaviest list
        parallel.shard(model.base_model, layers, shard, device, layers_only=True)
    model.to(device)
    check_logits(name, model)
    return Teacher(model, home, vocab_size)


def load_foreign(name: str, dtype: torch.dtype) -> nn.Module:
    """Load a model that transformers computes, frozen, on the CPU."""
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
    more = info["unexpected_keys"]  # transformers would ignore them
    if more:
        problem = f"config.json has no place for tensor {min(more)} ({len(more)} in all)"
        raise UserError(f"{name}: {problem}")
    return model.requires_grad_(False).eval()


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def is_native(name: str) -> bool:
    return not unsupported(read_json(find_folder(name) / "config.json"))


def foreign_config(name: str) -> transformers.PretrainedConfig:
    """Return the config of a model that transformers computes.

    Raises `UserError` for a model that cannot be a teacher.
    """
    folder = find_folder(name)
    with reading(folder / "config.json", "choose another teacher"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        expected = "expected weights that are not quantized"
        raise UserError(f"{name}: config.json has a quantization_config; {expected}")
    if config.is_encoder_decoder:
        expected = "expected a decoder-only model"
        raise UserError(f"{name}: {config.model_type} is an encoder-decoder; {expected}")
    for key, neutral in LOGIT_SCALES.items():
        value = getattr(config.get_text_config(), key, None)
        if value not in neutral:
            problem = f"{key}={value}: its logits are not hidden states times head"
            raise UserError(f"{name}: {problem}; choose another teacher")
    return config


def check_teacher(name: str, tokenizer: transformers.PreTrainedTokenizerFast, seq_len: int) -> None:
    """Raise `UserError` unless a teacher fits rows of `seq_len` inputs with this tokenizer."""
    shape = inherited(name)
    n_positions = shape.get("max_position_embeddings") or seq_len
    if seq_len > n_positions:
        problem = f"teacher={name} supports {n_positions} positions"
        raise UserError(f"seq_len={seq_len}: {problem}; set a smaller one")
    ids = tokenizer.get_vocab()
    vocab_size = shape["vocab_size"]
    n_tokens = max(ids.values()) + 1
    if n_tokens > vocab_size:
        problem = f"vocabulary of {vocab_size:,}, but the tokenizer has {n_tokens:,} tokens"
        raise UserError(f"teacher={name}: {problem}; logits are matched token by token")
    file = find_folder(name) / "tokenizer.json"
    # the tokenizer of the rows itself needs no check
    if file.is_file() and str(file.parent) != tokenizer.name_or_path:
        check_ids(name, load_tokenizer(name).get_vocab(), ids)


def check_ids(name: str, teacher_ids: dict[str, int], ids: dict[str, int]) -> None:
    """Raise `UserError` unless the teacher's tokenizer has every token under the same id."""
    wrong = [token for token in ids if teacher_ids.get(token) != ids[token]]
    if wrong:
        token = min(wrong)
        theirs = f"its tokenizer gives {token!r} id {teacher_ids.get(token)}"
        raise UserError(f"teacher={name}: {theirs}, that of the rows {ids[token]}")


@torch.no_grad()
def check_logits(name: str, model: nn.Module) -> None:
    """Check on a few tokens that logits are last hidden states times head, and the model causal.

    Raises `UserError`.
    """
    head = model.get_output_embeddings()
    if head is None:
        problem = f"{type(model).__name__} has no output embedding"
        raise UserError(f"{name}: {problem}; expected a language model")
    problem = "its head has a bias, or its logits are not hidden states times head"
    message = f"{name}: {problem}; choose another teacher"
    if getattr(head, "bias", None) is not None:
        raise UserError(message)
    idx = torch.arange(2, 16, device=head.weight.device).repeat(2, 1) % len(head.weight)
    idx[1, -1] = 0  # the rows differ in their last token
    h = model.base_model(idx, use_cache=False)[0]
    z = model(idx, use_cache=False).logits
    tolerance = 1e-4 if z.dtype == torch.float32 else 2e-2  # relative, in norm: rounding
    error = (h @ head.weight.T - z).float().norm()
    if not error <= tolerance * z.float().norm():  # NaN is refused too
        raise UserError(message)
    change = (h[0, :-1] - h[1, :-1]).float().norm()
    if not change <= tolerance * h.float().norm():
        problem = "its hidden states depend on later tokens"
        raise UserError(f"{name}: {problem}; expected a causal language model")


def inherited(name: str | None) -> dict | None:
    """Return the fields INHERITED of a teacher's shape; None without a teacher.

    A model that transformers computes may lack some (LayerNorm has no RMSNorm epsilon): the preset
    keeps its own.
    """
    if name is None:
        return None
    if is_native(name):
        shape = load_config(str(find_folder(name) / "config.json"))  # a name could be a preset
        return {key: getattr(shape, key) for key in INHERITED}
    config = foreign_config(name).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    values = {}
    for key in INHERITED:
        if "rope" in key:
            value = rope.get(key)
        else:
            value = getattr(config, key, None)
        if value is not None:
            values[key] = value
    return values
