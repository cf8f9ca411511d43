"""The frozen teacher, of which a run uses only the last hidden states and the head.

The decoder in model.py computes the families of `model.NATIVE`, transformers all others.
Hidden states travel between devices, not logits: V / D times fewer bytes.
"""

import functools

import torch
import transformers
from torch import Tensor

from lib.errors import UserError
from lib.files import read_json
from lib.hf import find_folder, load_tokenizer
from model import Qwen2, flops_per_token, load_config, unsupported

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

    def __init__(self, model, home: torch.device, vocab_size: int | None = None):
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

        rows  not used here; `CachedTeacher.hidden` looks the hidden states up by them
        """
        # blocking copies: a CPU could read one before the GPU has finished it
        idx = idx.to(next(self.model.parameters()).device)
        if self.native:
            h = self.model.hidden(idx)
        else:
            h = self.model.base_model(idx, use_cache=False)[0]
        # Mamba's are in fp32, whatever its head
        return h.to(self.home, self.head.dtype)

    def flops_per_token(self, seq_len) -> float:
        """Return the FLOPs of one token's forward pass."""
        if self.native:
            return flops_per_token(self.model.config, seq_len, trained=False)
        from run.foreign import foreign_flops_per_token

        return foreign_flops_per_token(self.model)


def load_teacher(
    name,
    dtype,
    device,
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
    if is_native(name):
        load = Qwen2.from_pretrained
    else:
        from run.foreign import load_foreign as load  # few runs need it

    return Teacher(load(name, dtype, device, shard), home or device, vocab_size)


def is_native(name) -> bool:
    return not unsupported(read_json(find_folder(name) / "config.json"))


def check_teacher(name, tokenizer, seq_len):
    """Raise `UserError` unless a teacher fits rows of `seq_len` inputs with this tokenizer."""
    shape = inherited(name)
    limit = shape.get("max_position_embeddings") or seq_len
    if seq_len > limit:
        raise UserError(
            f"seq_len={seq_len}: teacher={name} supports {limit} positions; set a smaller seq_len"
        )
    check_vocabulary(
        f"teacher={name}", shape["vocab_size"], tokenizer, "logits are matched token by token"
    )
    file = find_folder(name) / "tokenizer.json"
    # the tokenizer of the rows itself needs no check
    if file.is_file() and str(file.parent) != tokenizer.name_or_path:
        teacher_ids = load_tokenizer(name).get_vocab()
        for token, index in sorted(tokenizer.get_vocab().items()):
            theirs = teacher_ids.get(token)
            if theirs != index:
                raise UserError(
                    f"teacher={name}: its tokenizer gives {token!r} id {theirs}, "
                    f"that of the rows {index}"
                )


def check_vocabulary(name, n_vocab: int, tokenizer, remedy="choose a larger one") -> int:
    """Return the number of tokens that texts need. Raises `UserError` if a vocabulary has fewer.

    No text needs special tokens but EOS and BOS: Gemma 3's image token is beyond its vocabulary.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = special - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    n_tokens = max(set(tokenizer.get_vocab().values()) - unused) + 1
    if n_tokens > n_vocab:
        raise UserError(
            f"{name}: vocabulary of {n_vocab:,}, but the tokenizer has {n_tokens:,} tokens; "
            f"{remedy}"
        )
    return n_tokens


def inherited(name: str | None) -> dict | None:
    """Return the fields INHERITED of a teacher's shape; None without a teacher.

    A model that transformers computes may lack some (LayerNorm has no RMSNorm epsilon): the preset
    keeps its own.
    """
    if name is None:
        return None
    if is_native(name):
        shape = load_config(name)
        return {key: getattr(shape, key) for key in INHERITED}
    from run.foreign import foreign_shape

    return foreign_shape(name, INHERITED)


@functools.cache
def teacher_flops(name: str | None, seq_len) -> float:
    """Return the FLOPs of one token's forward pass, without loading the weights."""
    if name is None:
        return 0.0
    if is_native(name):
        return flops_per_token(load_config(name), seq_len, trained=False)
    from run.foreign import foreign_config, foreign_flops_per_token

    with torch.device("meta"):  # without memory for its weights
        model = transformers.AutoModelForCausalLM.from_config(foreign_config(name))
    return foreign_flops_per_token(model)
