"""Hugging Face folders: finding them, tokenizers, weights in and out.

Only safetensors are read, so that a foreign folder cannot run code. What a refusal says: what, got, expected, what to do.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from lib import parallel
from lib.checks import all_finite
from lib.files import UserError, first_line, read_json

INIT_STD = 0.02  # of a student's first weights


def find_folder(name: str, download: bool = True) -> Path:
    """A local folder, or the local copy of a hub repository `owner/name@revision` (downloaded if need be).

    A revision is a branch, tag or commit; without one it is the default branch.
    The folder of a student, as train.py makes it, stands for the `model/` inside.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        inside = folder / "model"
        return inside if (inside / "config.json").is_file() and not (folder / "config.json").is_file() else folder
    repository, _, revision = name.partition("@")
    if repository.count("/") != 1 or name[0] in "./~" or folder.parent.is_dir():
        raise UserError(
            f"{name}: no such folder; expected a local model folder or a hub id 'owner/name' or 'owner/name@revision'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "vocab.json", "merges.txt"]
    try:
        return Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=wanted, local_files_only=not download
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"{name}: no such local folder, and the hub did not give it ({first_line(error)})") from error


def pinned(name: str) -> str:
    """A hub id with the commit that is used, `owner/name@commit`, where it names a branch, a tag or nothing."""
    folder = find_folder(name)
    return name if Path(name).expanduser().is_dir() else f"{name.partition('@')[0]}@{folder.name}"  # snapshots/COMMIT


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a local folder or hub id, from its tokenizer.json alone.

    `AutoTokenizer` would choose a class by the model's type and rewrite the pre-tokenizer of small vocabularies.
    """
    folder = find_folder(name)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{name}: no tokenizer.json there; expected a folder or hub id with a fast tokenizer")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # each kind of broken file has an error of its own there
        raise UserError(f"{folder}/tokenizer.json: not read ({first_line(error)}); fetch the folder again") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer names no eos_token, which ends every document")
    return tokenizer


def leading_bos(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The id that the tokenizer by itself puts before a text (its BOS); None where it puts nothing there.

    What it puts after a text is not followed. Raises `UserError` for a tokenizer that puts several ids before a
    text, or one that is no special token: who trains on them must see them in the text.
    """
    backend = tokenizer.backend_tokenizer
    bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    n_before = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), None)
    added, special = whole[:n_before], [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    if not added:
        return None
    if len(added) > 1 or n_before is None or added[0] not in special:
        raise UserError(
            f"tokenizer: turns 'a', {bare}, into {whole} by itself; expected at most one special token before it: set "
            "bos=none, or take another tokenizer"
        )
    return added[0]


def is_qwens(tokenizer: PreTrainedTokenizerFast, folder: Path) -> bool:
    """Whether a `Qwen2Tokenizer` made of this tokenizer's files in `folder` gives the same ids and text."""
    return _deciding(Qwen2Tokenizer.from_pretrained(folder)) == _deciding(tokenizer)


def _deciding(tokenizer: PreTrainedTokenizerFast) -> dict:
    """The parts of a tokenizer that decide on ids and text. Empty settings are left out."""

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


def weights_hash(model: nn.Module) -> str:
    return tensors_hash(model.state_dict())


def tensors_hash(tensors: dict[str, Tensor]) -> str:
    """sha256 over the names and bytes of every tensor: equal hashes, equal tensors."""
    digest = hashlib.sha256()
    for name, p in tensors.items():
        p = parallel.whole(p)
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}\n".encode())
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_folder(
    folder: Path, shape: dict, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast | None
) -> None:
    """Write a decoder as a folder for transformers. It appears whole or not at all.

    With norms on q and k it is a `qwen3`, without biases a `llama`, else a `qwen2`. But `AutoTokenizer` reads every tokenizer
    beside a `qwen2` model as Qwen's own. With another tokenizer the same decoder is therefore written as a `llama` with
    `attention_bias`, with a zero bias on the attention's output.

    shape  the fields of the decoder's config
    """
    new, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    bias, qk_norm, ends, qwens = shape.pop("attention_bias"), shape.pop("qk_norm"), {}, True
    if tokenizer is not None:
        tokenizer.save_pretrained(new)
        eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        ends, qwens = {"bos_token_id": eos if bos is None else bos, "eos_token_id": eos}, is_qwens(tokenizer, new)
    kind = "qwen3" if qk_norm else "qwen2" if bias and qwens else "llama"
    parts = {"attention_bias": bias} if kind != "qwen2" else {}
    parts |= {"use_sliding_window": False} if kind != "llama" else {}
    if bias and kind != "qwen2":
        zeros = torch.zeros_like(weights["model.norm.weight"], device="cpu")
        weights = weights | {bias: zeros.clone() for bias in output_biases(weights)}
    if shape["head_dim"] * shape["num_attention_heads"] == shape["hidden_size"] and kind != "qwen3":
        del shape["head_dim"]  # the default; older readers do not know the key
    if shape["rope_scaling"] is None:
        del shape["rope_scaling"]
    dtype = str(weights["model.norm.weight"].dtype).removeprefix("torch.")
    facts = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "initializer_range": INIT_STD,
        "attention_dropout": 0.0,
        **parts,
        **shape,
        **ends,
    }
    (new / "config.json").write_text(json.dumps(facts, indent=1) + "\n")
    weights = {name: p.detach().cpu().contiguous() for name, p in weights.items()}
    safetensors.torch.save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(new / "config.json", new / "model.safetensors")  # safetensors keeps others from reading it
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_weights(model: nn.Module, folder: Path) -> None:
    """Copy a folder's safetensors into `model`, tensor by tensor: every tensor once, none left over.

    Where `attention_bias` stands in config.json, so does a bias on the attention's output, which must be zero.
    """
    wanted = dict(model.state_dict())
    zeros = output_biases(wanted) if read_json(folder / "config.json").get("attention_bias") else set()
    absent, twin, tied = wanted.keys() | zeros, None, "lm_head.weight" not in wanted
    for file in weight_files(folder):
        for name in tensor_names(file):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a constant that old checkpoints carry
            # opened for each tensor: whatever was read of an open file counts as memory
            with safetensors.safe_open(file, framework="pt") as tensors:
                stored = tensors.get_slice(name)
                shape = tuple(stored.get_shape())
                source = stored[parallel.kept(wanted[name])] if name in wanted and shape else tensors.get_tensor(name)
            if name == "lm_head.weight" and tied:
                twin = source  # some writers store the tied head twice
                continue
            if name in zeros:
                if source.any():
                    raise UserError(f"{file}: {name} is not zero, as expected; this decoder has no such bias")
                absent.discard(name)
                continue
            if name not in wanted:
                raise UserError(f"{file}: extra tensor {name} {shape}; config.json has no place for it")
            if shape != wanted[name].shape:
                raise UserError(f"{file}: {name} is {shape}, expected {tuple(wanted[name].shape)} by config.json")
            if name not in absent:
                raise UserError(f"{file}: {name} is in another file of that folder too; remove one of them")
            if not source.is_floating_point():
                raise UserError(
                    f"{file}: {name} is {source.dtype}, expected floating point; take the weights as they were trained"
                )
            if not all_finite(source):
                raise UserError(f"{file}: {name} is not finite; the weights are broken or have diverged, take others")
            parallel.local(wanted[name]).copy_(source)
            absent.discard(name)
            del source
    if absent:
        raise UserError(f"{folder}: missing tensor {min(absent)} ({len(absent)} in all); the checkpoint is not whole")
    embedding = wanted["model.embed_tokens.weight"]
    if twin is not None and not torch.equal(twin.to(embedding), embedding):
        raise UserError(f"{folder}: lm_head.weight differs from the embedding, but config.json ties them")


def output_biases(names) -> set[str]:
    """The biases [D] on the attention's output that a `llama` with `attention_bias` has besides these tensors."""
    return {name.replace("o_proj.weight", "o_proj.bias") for name in names if name.endswith("o_proj.weight")}


def tensor_names(file: Path) -> list[str]:
    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except safetensors.SafetensorError as error:
        raise UserError(f"{file}: not a whole safetensors file ({error}); fetch or write it again") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: one, or the shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = sorted(set(read_json(index, {"weight_map": {"*": str}})["weight_map"].values()))
        gone = [s for s in shards if Path(s).name != s or not (folder / s).is_file()]
        if gone:
            raise UserError(f"{folder}: shard {gone[0]} is named in the index but not there")
        return [folder / s for s in shards]
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickles:
        raise UserError(
            f"{folder}: {pickles[0]} is a pickle, which can run code; expected model.safetensors: convert it first"
        )
    raise UserError(f"{folder}: no model.safetensors there; expected a Hugging Face model folder")
