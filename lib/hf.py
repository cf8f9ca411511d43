"""Hugging Face folders: finding them, tokenizers, weights in and out.

Only safetensors are read, so that a foreign folder cannot run code.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from lib import parallel
from lib.errors import UserError, did_you_mean_path, first_line
from lib.files import atomic_folder, read_json, reading, text_hash, write_json

MERGE = "merge the adapter with its model, and save that"
HUB_FILES = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
)


download = functools.cache(snapshot_download)  # a branch stays at one commit in a process


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a student's folder by step, oldest first."""
    paths = sorted(folder.glob(f"checkpoints/step_{'[0-9]' * 8}/"))
    return {int(path.name.removeprefix("step_")): path for path in paths}


def find_folder(name) -> Path:
    """Return a local folder, or the local copy of a hub repository `owner/name@revision`.

    A revision is a branch, tag or commit; the default branch if left out. In a student's folder, as
    train.py writes it, the model is `model/`, or that of the newest checkpoint if the run has not
    ended, or goes on. A checkpoint's model is its `model/` too.
    """
    folder = Path(os.path.expanduser(name))  # leaves the name of an unknown user as it is
    if folder.is_dir():
        candidates = [folder, folder / "model"]
        saved = checkpoints_in(folder)
        finished = folder / "run.json"
        if saved and finished.is_file():
            step = read_json(finished, ["step"])["step"]
            if max(saved) > step:  # trained further since
                candidates.pop()
        candidates += [path / "model" for path in reversed(saved.values())]  # the newest first
        for candidate in candidates:
            if (candidate / "config.json").is_file():
                return candidate
        return folder
    repository, _, revision = name.partition("@")
    if repository.count("/") != 1 or folder.parent.is_dir():
        hint = did_you_mean_path(folder, "*/")
        raise UserError(
            f"{name}: no such folder{hint}; a hub id is 'owner/name' or 'owner/name@revision', "
            "where no local folder is called 'owner'"
        )
    try:
        folder = download(repository, revision=revision or None, allow_patterns=HUB_FILES)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name}: no such local folder, and the hub refused it ({first_line(error)}); without "
            "a network: --teacher=demo/teacher --tokenizer=demo/teacher"
        ) from error
    return Path(folder)


def pinned(name) -> str:
    """Return a hub id with the commit in use, `owner/name@commit`, or a local folder as it is."""
    if os.path.isdir(os.path.expanduser(name)):
        return name
    return f"{name.partition('@')[0]}@{find_folder(name).name}"  # snapshots/COMMIT


def load_tokenizer(name) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a local folder or hub id, from its tokenizer.json alone.

    Every text gets all of its ids, and always the same ones: truncation, padding and dropout, which
    the file may hold from an earlier training, are switched off. `AutoTokenizer` would choose a
    class by the model's type, and rewrite the pre-tokenizer of small vocabularies.
    """
    file = find_folder(name) / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{name}: no tokenizer.json; expected a folder with a fast tokenizer")
    with reading(file, "download the folder again"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: the tokenizer has no eos_token, which must end every document; "
            "in a local copy, add it to tokenizer_config.json"
        )
    check_tokenizer(tokenizer, file.parent)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if hasattr(backend.model, "dropout"):  # a BPE
        backend.model.dropout = None
    return tokenizer


def check_tokenizer(tokenizer, folder):
    """Raise `UserError` for a tokenizer that lacks its EOS, or gives an added token another id.

    folder  of its tokenizer.json and tokenizer_config.json
    """
    # the library numbers added tokens in their order, whatever the files say
    stored = read_json(folder / "tokenizer.json")["added_tokens"]
    added = {token["content"]: token["id"] for token in stored}
    # transformers adds an eos_token that the file lacks, with an id that no model knows
    eos = tokenizer.eos_token
    vocab = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    if eos not in added and eos not in vocab:
        raise UserError(f"tokenizer: lacks its eos_token {eos!r}; take another tokenizer")
    for i, token in config_of(folder).get("added_tokens_decoder", {}).items():
        added[token["content"]] = int(i)
    for token, i in added.items():
        got = tokenizer.convert_tokens_to_ids(token)
        if got != i:
            raise UserError(
                f"{folder}: its files give {token!r} the id {i}, but it is loaded with {got}; "
                "correct the ids of the added tokens"
            )


def config_of(folder) -> dict:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def save_tokenizer(folder, tokenizer):
    """Write what transformers 4 and 5 both read: the tokenizer, and its special tokens by name.

    An EOS stands for a BOS and a padding token that it lacks, as in `special_ids`.
    """
    tokenizer.backend_tokenizer.save(f"{folder}/tokenizer.json")
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
    }
    for key, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str):  # not a list of further ones, whose key is another in each
            facts[key] = token
    write_json(Path(folder) / "tokenizer_config.json", facts)


def generation_ids(tokenizer) -> dict[str, int]:
    """Return the ids that generation needs, by the keys of generation_config.json."""
    return special_ids(tokenizer) | {"pad_token_id": tokenizer.eos_token_id}


def special_ids(tokenizer) -> dict[str, int]:
    """Return the ids of the tokenizer's BOS and EOS, by the keys of config.json."""
    eos = tokenizer.eos_token_id
    bos = tokenizer.bos_token_id
    return {"bos_token_id": eos if bos is None else bos, "eos_token_id": eos}


def tokenizer_hash(tokenizer) -> str:
    """Return the sha256 of everything that determines the ids of a text."""
    return text_hash(tokenizer.backend_tokenizer.to_str())


def weights_hash(model) -> str:
    """Return the hash of a model's tensors."""
    return tensors_hash(model.state_dict())


def tensors_hash(tensors) -> str:
    """Return the sha256 of the names and bytes of tensors. Equal hashes mean equal tensors."""
    digest = hashlib.sha256()
    for name, p in tensors.items():
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}\n".encode())
        flat = p.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)  # a run saves one tokenizer many times; Qwen's takes seconds
def survives_as_qwen2(tokenizer) -> bool:
    """Return whether this tokenizer, saved beside a `qwen2`, would keep its ids and texts.

    `AutoTokenizer` makes a `Qwen2Tokenizer` of any tokenizer that stands beside a `qwen2`.
    """

    def essence(tokenizer):
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        decoder = (parts.pop("decoder") or {}).get("type")
        # differences without effect on ids and texts
        return decoder, re.sub(r"'trim_offsets': \w+|None|''", "", str(parts))

    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder, tokenizer)
        return essence(Qwen2Tokenizer.from_pretrained(folder)) == essence(tokenizer)


def save_folder(folder, shape: dict, weights, tokenizer):
    """Write a decoder as a folder for transformers, completely or not at all.

    A decoder with norms on q and k is a `qwen3`, one without biases a `llama`, any other a `qwen2`.
    A `qwen2` whose tokenizer would not survive becomes a `llama` with `attention_bias`. Then, and
    in a `qwen3` with biases, the attention's output has a bias too, which is 0.

    shape   a dict of the fields of the decoder's config, which is changed
    """
    norm = weights["model.norm.weight"]
    with atomic_folder(folder) as new:
        bias = shape.pop("attention_bias")
        kind = "qwen3" if shape.pop("qk_norm") else "llama"
        if kind == "llama" and bias and (tokenizer is None or survives_as_qwen2(tokenizer)):
            kind = "qwen2"
        elif bias:
            weights = weights | {
                name.replace("weight", "bias"): torch.zeros_like(norm)
                for name in weights
                if name.endswith("o_proj.weight")
            }
        facts = {
            "architectures": [f"{kind.capitalize()}ForCausalLM"],
            "model_type": kind,
            "hidden_act": "silu",
            "torch_dtype": str(norm.dtype).removeprefix("torch."),
        }
        if tokenizer is not None:
            save_tokenizer(new, tokenizer)
            facts |= special_ids(tokenizer)
            write_json(new / "generation_config.json", generation_ids(tokenizer))
        facts |= {key: value for key, value in shape.items() if value is not None}
        if kind != "qwen2":
            facts["attention_bias"] = bias
        write_json(new / "config.json", facts)
        weights = {name: p.contiguous() for name, p in weights.items()}
        safetensors.torch.save_file(weights, new / "model.safetensors", {"format": "pt"})


def read_weights(model, folder):
    """Copy a folder's safetensors into `model`: every tensor once, none left over, all finite.

    A bias that the decoder lacks must be zero. A `llama` with `attention_bias` has one on the
    attention's output. Some writers store a tied head in place of the embedding, or as well: then
    both must be equal. A decoder that was saved without its head lacks the prefix `model.`.
    """
    targets = model.state_dict()
    missing = set(targets)
    embedding = "model.embed_tokens.weight"
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            keys = tensors.keys()
        for key in keys:
            with open_tensors(file) as tensors:  # opened anew, or all that was read stays in memory
                source = tensors.get_tensor(key)
            name = f"model.{key}" if f"model.{key}" in targets else key
            if name == "lm_head.weight" and name not in targets:  # tied
                name = embedding
            if name in missing:
                copy_weight(source, targets[name], f"{file}: {key}")
                missing.remove(name)
            elif name == embedding:
                if not torch.equal(source.to(targets[name]), targets[name]):
                    raise UserError(
                        f"{file}: {key}: a second embedding or tied head, which differs"
                    )
            elif name.endswith(".bias") and name not in targets and not source.any():
                continue
            elif not name.endswith("rotary_emb.inv_freq"):
                raise UserError(
                    f"{file}: {name}: expected no such tensor, or no second one; only biases of "
                    "zeros may be more"
                )
    if missing:
        raise UserError(f"{folder}: missing tensor {min(missing)} ({len(missing)} in all)")


def copy_weight(source: Tensor, target: Tensor, name):
    if source.shape != target.shape:
        raise UserError(f"{name} is {tuple(source.shape)}, expected {tuple(target.shape)}")
    if not source.is_floating_point() or not all_finite(source):
        raise UserError(
            f"{name} ({source.dtype}): expected floats, all finite; download or write it again"
        )
    target.copy_(parallel.distribute_like(source, target))


def check_weights(folder, n_layers: int):
    """Check the headers of a folder's safetensors before a model is built.

    Raises `UserError` for weights that are not floats, and for fewer tensors than layers.
    """
    n = 0
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                n += 1
                kind = tensors.get_slice(name).get_dtype()
                if name.endswith("weight") and kind not in ("F64", "F32", "F16", "BF16"):
                    raise UserError(
                        f"{file}: {name} is {kind}; expected weights that are not quantized"
                    )
    if n < n_layers:
        raise UserError(
            f"{folder}: num_hidden_layers={n_layers}, but its safetensors have {n} tensors"
        )


@contextlib.contextmanager
def open_tensors(file):
    with reading(file, "download or write it again"):
        file.open("rb").close()  # safetensors calls every failure to open "no such file"
        with safetensors.safe_open(file, "pt") as tensors:
            yield tensors


def weight_files(folder) -> list[Path]:
    """Return the safetensors files of a model folder: one, or the shards that its index names."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with reading(index, "download it again"):
            shards = set(read_json(index)["weight_map"].values())
            return [folder / Path(shard).name for shard in sorted(shards)]
    remedy = "expected it, or model.safetensors.index.json with the shards that it names"
    if (folder / "adapter_config.json").exists():
        remedy = MERGE
    elif any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        remedy = "convert the pickle, which can run code, to safetensors"
    raise UserError(f"{folder}: no model.safetensors; {remedy}")


def all_finite(z) -> bool:
    """Return whether every element is finite: one pass and no mask. Waits for the device."""
    return not z.numel() or all(end.isfinite() for end in z.detach().aminmax())
