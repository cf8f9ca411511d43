"""Hugging Face folders: finding them, tokenizers, weights in and out.

Only safetensors are read, so that a foreign folder cannot run code.
"""

import functools
import hashlib
import json
import re
import tempfile
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from lib import parallel
from lib.checks import all_finite
from lib.errors import UserError, first_line, require
from lib.files import atomic_folder, read_json, reading

INIT_STD = 0.02  # of a student's first weights
once = functools.cache(lambda function, *args, **keys: function(*args, **keys))  # a process keeps to one commit


def find_folder(name: str) -> Path:
    """A local folder, or the local copy of a hub repository `owner/name@revision`, downloaded if necessary.

    A revision is a branch, tag or commit; without one it is the default branch. A student's folder, as train.py writes
    it, stands for the `model/` inside, before its end for that of its newest checkpoint, and so does a checkpoint.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        newest = sorted(folder.glob("checkpoints/step_*/model"), reverse=True)
        return next((f for f in (folder, folder / "model", *newest) if (f / "config.json").is_file()), folder)
    repository, _, revision = name.partition("@")
    if repository.count("/") != 1 or name[0] in "./~" or folder.parent.is_dir():
        raise UserError(f"{name}: no such folder; expected a local model folder or a hub id 'owner/name[@revision]'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "vocab.json", "merges.txt")
    try:
        return Path(once(snapshot_download, repository, revision=revision or None, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"{name}: no such local folder, and the hub refused it ({first_line(error)})") from error


def pinned(name: str) -> str:
    """A hub id with the commit that is used, `owner/name@commit`, where it names a branch, a tag or nothing."""
    folder = find_folder(name)
    return name if Path(name).expanduser().is_dir() else f"{name.partition('@')[0]}@{folder.name}"  # snapshots/COMMIT


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or hub id, from its tokenizer.json alone.

    `AutoTokenizer` would choose a class by the model's type and rewrite the pre-tokenizer of small vocabularies.
    """
    file = find_folder(name) / "tokenizer.json"
    require(file.is_file(), f"{name}: no tokenizer.json; expected a folder or hub id with a fast tokenizer")
    with reading(file, "download the folder again"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent)
    ends = tokenizer.eos_token_id is not None
    require(ends, f"{name}: the tokenizer has no eos_token, which must end every document")
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of all that decides which ids a text gets."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def weights_hash(model: nn.Module) -> str:
    return tensors_hash(model.state_dict())


def tensors_hash(tensors: dict[str, Tensor]) -> str:
    """sha256 over the names and bytes of every tensor: equal hashes, equal tensors."""
    digest = hashlib.sha256()
    for name, p in tensors.items():
        p = parallel.full_tensor(p)
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}\n".encode())
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)  # a run saves one tokenizer again and again; Qwen's takes seconds
def is_qwens(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the `Qwen2Tokenizer` that `AutoTokenizer` makes of any files beside a `qwen2` gives the same ids and text."""

    def deciding(tokenizer) -> tuple:
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        decoder = (parts.pop("decoder") or {}).get("type")
        return decoder, re.sub(r"'trim_offsets': \w+|None|''", "", str(parts))

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return deciding(Qwen2Tokenizer.from_pretrained(folder)) == deciding(tokenizer)


def save_folder(
    folder: Path, shape: dict, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast | None
) -> None:
    """Write a decoder as a folder for transformers, completely or not at all.

    With norms on q and k it is a `qwen3`, without biases a `llama`, else a `qwen2`; with another tokenizer than Qwen's a `llama`
    with `attention_bias` instead, whose bias on the attention's output is 0.

    shape  the fields of the decoder's config
    """
    with atomic_folder(folder) as new:
        bias, kind, ends = shape.pop("attention_bias"), "qwen3" if shape.pop("qk_norm") else "llama", {}
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
            eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
            ends = {"bos_token_id": eos if bos is None else bos, "eos_token_id": eos}
        if kind == "llama" and bias and (tokenizer is None or is_qwens(tokenizer)):
            kind = "qwen2"
        if bias and kind != "qwen2":
            zeros = torch.zeros_like(weights["model.norm.weight"], device="cpu")
            weights = weights | {name: zeros.clone() for name in output_biases(weights)}
        facts = {
            "architectures": [f"{kind.capitalize()}ForCausalLM"],
            "model_type": kind,
            "hidden_act": "silu",
            "torch_dtype": str(weights["model.norm.weight"].dtype).removeprefix("torch."),
            "initializer_range": INIT_STD,
        } | ends
        facts |= {key: value for key, value in shape.items() if value is not None}
        facts |= {"attention_bias": bias} if kind != "qwen2" else {}
        (new / "config.json").write_text(json.dumps(facts, indent=1) + "\n")
        weights = {name: p.detach().cpu().contiguous() for name, p in weights.items()}
        safetensors.torch.save_file(weights, new / "model.safetensors", metadata={"format": "pt"})


def read_weights(model: nn.Module, folder: Path) -> None:
    """Copy a folder's safetensors into `model`, tensor by tensor: every tensor once, none left over, all finite.

    With `attention_bias` in config.json there may be biases on the attention's output, which must be zero.
    """
    wanted, twin = dict(model.state_dict()), None
    left, zeros = {*wanted}, output_biases(wanted) if read_json(folder / "config.json").get("attention_bias") else set()
    for file in weight_files(folder):
        with reading(file, "download or write it again"), safetensors.safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if not name.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
        for name in names:
            with reading(file, "download or write it again"), safetensors.safe_open(file, framework="pt") as tensors:
                source = tensors.get_tensor(name)  # opened anew for each tensor, or all that was read stays in memory
            if name in zeros:
                require(not source.any(), f"{file}: {name} is not zero; this decoder has no such bias")
            elif name == "lm_head.weight" and name not in wanted:
                twin = source  # some writers store the tied head twice
            else:
                shape = tuple(wanted[name].shape) if name in left else "no such tensor, or no second one"
                require(source.shape == shape, f"{file}: {name} is {tuple(source.shape)}, expected {shape}")
                usable = source.is_floating_point() and source.element_size() > 1 and all_finite(source)
                require(usable, f"{file}: {name} is {source.dtype}, or not finite; download or write it again")
                wanted[name].copy_(parallel.distribute_like(source, wanted[name]))
                left.discard(name)
    missing = min(left, default="")
    require(not left, f"{folder}: missing tensor {missing} ({len(left)} in all); the checkpoint is incomplete")
    embedding = wanted["model.embed_tokens.weight"]
    same = twin is None or torch.equal(twin.to(embedding), embedding)
    require(same, f"{folder}: lm_head.weight differs from the embedding, but config.json ties them")


def check_weights(folder: Path, n_layers: int) -> None:
    """Check by the headers of its safetensors, before a model is built, that weights are floats and not fewer than layers."""
    n = 0
    for file in weight_files(folder):
        with reading(file, "download or write it again"), safetensors.safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                n, kind = n + 1, tensors.get_slice(name).get_dtype()
                usable = kind in ("F64", "F32", "F16", "BF16") or not name.endswith("weight")
                require(usable, f"{file}: {name} is {kind}; expected weights that are not quantized")
    require(n_layers <= n, f"{folder}/config.json: num_hidden_layers={n_layers}, but its safetensors have {n} tensors")


def output_biases(names) -> set[str]:
    """The biases [D] on the attention's output that a `llama` with `attention_bias` has besides these tensors."""
    return {name.replace("o_proj.weight", "o_proj.bias") for name in names if name.endswith("o_proj.weight")}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: one, or the shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        with reading(index):
            return [folder / Path(shard).name for shard in sorted({*read_json(index)["weight_map"].values()})]
    pickles = [p.name for pattern in ("*.bin", "*.pt*") for p in folder.glob(pattern)]
    hint = f"; {pickles[0]} is a pickle, which can run code: convert it to safetensors" if pickles else ""
    require(single.is_file(), f"{folder}: no model.safetensors{hint}")
    return [single]
