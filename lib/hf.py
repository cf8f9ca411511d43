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
from transformers import PreTrainedTokenizerFast

from lib import parallel
from lib.checks import all_finite
from lib.files import UserError, first_line, read_json, reading
from lib.settings import require

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
    file = find_folder(name) / "tokenizer.json"
    require(file.is_file(), f"{name}: no tokenizer.json there; expected a folder or hub id with a fast tokenizer")
    with reading(file, "fetch the folder again"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent)
    require(tokenizer.eos_token_id is not None, f"{name}: the tokenizer names no eos_token, which ends every document")
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

    With norms on q and k it is a `qwen3`, else a `llama`; with `attention_bias` that has a bias on the attention's output,
    which is 0. Never a `qwen2`: `AutoTokenizer` reads every tokenizer beside one as Qwen's own.

    shape  the fields of the decoder's config
    """
    new, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    kind = "qwen3" if shape.pop("qk_norm") else "llama"
    facts = {"architectures": [f"{kind.capitalize()}ForCausalLM"], "model_type": kind, "hidden_act": "silu", "torch_dtype": "float32",
             "initializer_range": INIT_STD, **{key: value for key, value in shape.items() if value is not None}}  # fmt: skip
    if shape["attention_bias"]:
        zeros = torch.zeros_like(weights["model.norm.weight"], device="cpu")
        weights = weights | {bias: zeros.clone() for bias in output_biases(weights)}
    if tokenizer is not None:
        tokenizer.save_pretrained(new)
        eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
        facts |= {"bos_token_id": eos if bos is None else bos, "eos_token_id": eos}
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
    """Copy a folder's safetensors into `model`, tensor by tensor: every tensor once, none left over, all finite.

    Where `attention_bias` stands in config.json, so may a bias on the attention's output, which must be zero.
    """
    wanted, twin = dict(model.state_dict()), None
    left, zeros = {*wanted}, output_biases(wanted) if read_json(folder / "config.json").get("attention_bias") else set()
    for file in weight_files(folder):
        with reading(file, "fetch or write it again"), safetensors.safe_open(file, framework="pt") as tensors:
            for name in (name for name in tensors.keys() if not name.endswith("rotary_emb.inv_freq")):  # noqa: SIM118
                source = tensors.get_tensor(name)
                if name in zeros:
                    require(not source.any(), f"{file}: {name} is not zero; this decoder has no such bias")
                elif name == "lm_head.weight" and name not in wanted:
                    twin = source  # some writers store the tied head twice
                else:
                    shape = tuple(wanted[name].shape) if name in left else "no such tensor, or no second one"
                    require(source.shape == shape, f"{file}: {name} is {tuple(source.shape)}, expected {shape}")
                    require(
                        source.is_floating_point() and all_finite(source),
                        f"{file}: {name} is {source.dtype}, or not finite",
                    )
                    parallel.local(wanted[name]).copy_(source[parallel.kept(wanted[name])])
                    left.discard(name)
    require(
        not left, f"{folder}: missing tensor {min(left, default='')} ({len(left)} in all); the checkpoint is not whole"
    )
    embedding = wanted["model.embed_tokens.weight"]
    require(
        twin is None or torch.equal(twin.to(embedding), embedding),
        f"{folder}: lm_head.weight differs from the embedding, but config.json ties them",
    )


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
    require(
        single.is_file(),
        f"{folder}: no model.safetensors there"
        + f"; {pickles[:1]} is a pickle, which can run code: convert it" * bool(pickles),
    )
    return [single]
