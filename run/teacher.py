"""Models of any family, and the frozen teacher: last hidden states, and a head.

The decoder in model.py computes the families of `model.NATIVE`, transformers all others
(run/transformers_models.py). Hidden states travel between devices, not logits: V / D times fewer
bytes.
"""

import functools

import torch
from torch import Tensor, nn

from lib.errors import UserError, note
from lib.head import OutputHead, weight_of
from lib.hf import find_folder, load_tokenizer
from lib.torch_setup import mend_compiler
from model import NATIVE, Qwen2, StudentDecoder, config_file, load_config, read_shape

# What a student's shape inherits from its teacher.
INHERITED = (
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rms_norm_eps",
    "max_position_embeddings",
)


class Teacher:
    """A frozen model. Its head and what it returns are on the students' device."""

    is_stored = False  # True if all hidden states are read from a file (run/teacher_cache.py)

    def __init__(self, model, output_device: torch.device, vocab_size: int | None = None):
        self.model = model
        self.device = next(model.parameters()).device
        # [V, D]; the same memory if teacher and students share a device
        self.head = model.head[:vocab_size].to(output_device)

    @torch.no_grad()
    def hidden(self, idx: Tensor, *rows: object) -> Tensor:
        """Return the last hidden states [B, T, D] of token ids [B, T], which are on any device.

        rows  not used here; `CachedTeacher.hidden` looks the hidden states up by them
        """
        # blocking copies: a CPU could read one before the GPU has finished it
        return self.model.hidden(idx.to(self.device)).to(self.head.device)


def load_teacher(
    name,
    dtype,
    device,
    output_device: torch.device | None = None,
    rows=None,
    shard: int = 1,
) -> Teacher:
    """Load a frozen teacher from a local folder or hub id `owner/name@revision`, or several, "a,b".

    dtype       of its weights and activations
    device      where it computes; `output_device` is the students' device (None: the same)
    rows        the `Rows` that it computes: it masks documents if they ask for it, and its head
                gets their vocabulary (None: all of the head); the rest is padding
    shard       processes over which its layers are sharded; embedding and head stay whole

    Raises `UserError` for a folder without safetensors, a model whose logits are not its last
    hidden states times its head, and one whose hidden states depend on later tokens.
    """
    model = load_model(name, dtype, device, shard)
    if rows and rows.mask_documents:
        mask_documents(model, name, rows.eos)
    return Teacher(model, output_device or device, rows and rows.n_vocab)


def mask_documents(model, name, end: int):
    """Let tokens attend to their own document alone. The id `end` ends each document.

    Raises `UserError` for a model that transformers computes.
    """
    for part in getattr(model, "models", [model]):
        if not isinstance(part, Qwen2):
            raise UserError(
                f"mask_documents=True: {name} is computed by transformers, expected one of "
                f"{', '.join(NATIVE)}; choose another model, or set mask_documents=False"
            )
        part.document_end = end


def compile_layers(model):
    """Run each layer under torch.compile; those of transformers may need graph breaks.

    Layers of one shape are compiled once, forward and backward.
    """
    mend_compiler()
    for part in getattr(model, "models", [model]):
        for layer in part.layers:
            layer.compile(dynamic=False, fullgraph=isinstance(part, Qwen2))


class Ensemble(nn.Module):
    """Several frozen models as one. Its probabilities are the mean of theirs."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def hidden(self, idx: Tensor) -> Tensor:
        """Return the last hidden states of all models side by side, [B, T, sum of D]."""
        return torch.cat([model.hidden(idx) for model in self.models], -1)

    @property
    def head(self) -> OutputHead:
        heads = [model.head for model in self.models]
        n_vocab = min(map(len, heads))
        weights = [weight_of(head)[:n_vocab] for head in heads]
        widths = tuple(weight.shape[1] for weight in weights)
        caps = [cap for head in heads for cap in getattr(head, "caps", (0.0,))]
        return OutputHead(torch.cat(weights, 1), widths, tuple(caps))


def load_model(name, dtype=torch.float32, device="cpu", shard: int = 1, as_student: bool = False):
    """Load a frozen model: a `Qwen2`, or a `Foreign` of any other family; "a,b": an `Ensemble`."""
    several = f"{name}".split(",")
    if len(several) > 1:
        return Ensemble(load_model(each, dtype, device, shard) for each in several)
    if is_native(name):
        decoder = StudentDecoder if as_student else Qwen2
        return decoder.from_pretrained(name, dtype, device, shard)
    from run.transformers_models import load_foreign  # few runs need it

    return load_foreign(name, dtype, device, shard)


def load_shape(name):
    """Return the shape of a model of any family, from its config.json."""
    if is_native(name):
        return load_config(name)
    from run.transformers_models import foreign_config, shape_of

    return shape_of(foreign_config(name))


def is_native(name) -> bool:
    """Return whether model.py computes a model. An edited student is left to nothing else."""
    values, reason = read_shape(config_file(name))
    return reason is None or "probe" in values


@functools.cache
def teacher_flops(name, seq_len) -> float:
    """Return the FLOPs of one token, forward, of a teacher, or of several."""
    return sum(load_shape(each).flops_per_token(seq_len) for each in name.split(","))


def check_teacher(name, tokenizer, seq_len):
    """Raise `UserError` unless teachers fit rows of `seq_len` inputs with this tokenizer."""
    for each in name.split(","):
        shape = load_shape(each)
        check_context(f"teacher={each}", shape.max_position_embeddings, seq_len)
        check_vocabulary(f"teacher={each}", shape.vocab_size, tokenizer)
        check_ids("teacher", each, tokenizer)


def check_ids(key, name, tokenizer, may_lack=False):
    """Raise `UserError` unless a tokenizer beside a model gives tokens the ids of the rows.

    key       of the config, whose value is `name`
    may_lack  whether it may lack some of the tokens
    """
    folder = find_folder(name)
    if str(folder) == tokenizer.name_or_path:
        return  # the tokenizer of the rows itself
    if not (folder / "tokenizer.json").is_file():
        note(f"{key}={name}: no tokenizer.json to compare with that of the rows")
        return
    ids = load_tokenizer(name).get_vocab()
    for token, index in sorted(tokenizer.get_vocab().items()):
        theirs = ids.get(token)
        if theirs != index and not (may_lack and theirs is None):
            raise UserError(
                f"{key}={name}: its tokenizer gives {token!r} id {theirs}, that of the rows {index}"
            )


def check_context(name, limit: int | None, seq_len):
    """Raise `UserError` if a model takes fewer positions than rows have."""
    if limit and seq_len > limit:
        raise UserError(
            f"seq_len={seq_len}: {name} supports {limit} positions; set a smaller seq_len"
        )


def check_vocabulary(name, n_vocab: int, tokenizer):
    """Raise `UserError` if a vocabulary has fewer tokens than texts need.

    No text needs special tokens but EOS and BOS: Gemma 3's image token is beyond its vocabulary.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = special - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    n_tokens = max(set(tokenizer.get_vocab().values()) - unused) + 1
    if n_tokens > n_vocab:
        raise UserError(
            f"{name}: vocabulary of {n_vocab:,}, but the tokenizer has {n_tokens:,} tokens; choose "
            "a larger one"
        )


def inherited(name: str | None) -> dict:
    """Return the fields INHERITED of a teacher's shape; none without a teacher.

    A model may lack some (LayerNorm has no RMSNorm epsilon): the preset keeps its own. Of several
    teachers, that with the smallest vocabulary counts.
    """
    if not name:
        return {}
    shapes = map(load_shape, f"{name}".split(","))
    values = vars(min(shapes, key=lambda shape: shape.vocab_size))
    return {key: values[key] for key in INHERITED if values.get(key) is not None}
