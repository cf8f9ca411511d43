"""One tiny world for all tests: tokenizers, models, text, rows, the flags of a run, a finished run, and a run that is killed."""

import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import configure
from lib.hf import load_tokenizer, tokenizer_hash
from lib.rows import PAD, quick_hash
from model import Qwen2, Qwen2Config, init_student

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real weights and texts, which few machines have
DEMO = str(ROOT / "demo" / "teacher")  # the tokenizer of all rows here unless another is named
EOS, BOS = "<|endoftext|>", "<s>"
V, SEQ = 4096, 13
STUDENT = Qwen2Config(16, 23, 1, 2, 1, vocab_size=V, rope_theta=1e4)
TEACHER = Qwen2Config(24, 31, 2, 2, 2, vocab_size=V, rope_theta=1e4)


def make_tokenizer(texts: Iterable[str] = (), vocab_size=257, eos=EOS, bos=None, split=None, **trainer) -> PreTrainedTokenizerFast:  # fmt: skip
    """Byte-level BPE learnt from `texts` (none: 256 bytes and EOS, which has id 0).

    bos    a token that is added at the end of the vocabulary, and before each text by the tokenizer itself
    split  pre-tokenizer; None: byte-level with GPT-2's regex
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    keys = {"special_tokens": [eos], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **keys, **trainer))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def make_model(shape: Qwen2Config = TEACHER, seed: int = 7, scale: float = 8.0) -> Qwen2:
    """Fresh weights times `scale`: probabilities far from uniform."""
    model = init_student(shape, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model.requires_grad_(False)


hash_of_tokenizer = functools.cache(lambda name: tokenizer_hash(load_tokenizer(name)))


def write_text(file: Path, n: int = 40, seed: int = 1) -> Path:
    """Documents of 30 words with ends of lines and sentences, as jsonl."""
    words = np.random.default_rng(seed).choice(["one", "two ", "a line.\n", "So? "], (n, 30))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": " ".join(some)}) + "\n" for some in words))
    return file


def write_rows(folder: Path, name: str, n: int = 97, seed: int = 1, ids=None, tokenizer: str = DEMO, **facts) -> np.ndarray:  # fmt: skip
    """NAME.bin and its manifest as prepare.py writes them: `ids`, or n random rows of unequal lengths -> the ids.

    facts  keys of the manifest, over those that fit the rows
    """
    rng = np.random.default_rng(seed)
    if ids is None:
        ids = rng.integers(1, 199, (n, SEQ + 1), dtype=np.uint32)
        ids[rng.random(ids.shape) < 0.1] = 0  # ends of documents
        for row, length in zip(ids, rng.integers(2, SEQ + 2, n), strict=True):
            row[length:] = PAD
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.bin").write_bytes(ids.astype(np.uint32).tobytes())
    manifest = {"rows": len(ids), "row_len": ids.shape[1], "eos_id": 0, "bos": None, "vocab_size": V, "tokenizer": tokenizer,
                "sha256": f"{name}{seed}", "quick_sha256": quick_hash(folder / f"{name}.bin"),
                "tokenizer_sha256": facts.get("tokenizer_sha256") or hash_of_tokenizer(str(tokenizer))}  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(manifest | facts))
    return ids


def make_world(root: Path) -> Path:
    """data/ (97 rows and 7), teacher/ with a tokenizer, student/ with a shape: what `flags` names."""
    write_rows(root / "data", "train", 97, seed=1)
    write_rows(root / "data", "val", 7, seed=2)
    make_model().save_pretrained(root / "teacher", load_tokenizer(DEMO))
    init_student(STUDENT).save_pretrained(root / "student")
    return root


def flags(world: Path, out: Path, **changes) -> list[str]:
    """The command line of a run of six updates; keys may have dots, as {"alra.d_max": 7}."""
    keys = {"methods": "pretrain,vanilla_kd,alra", "student": world / "student", "teacher": world / "teacher",
            "data_dir": world / "data", "out_dir": out, "seq_len": SEQ, "max_steps": 6, "schedule_steps": 6,
            "warmup_steps": 2, "batch_rows": 4, "micro_batch": 2, "lr": 1e-2, "log_every_steps": 2, "val_every_steps": 3,
            "checkpoint_every_steps": 2, "device": "cpu", **changes}  # fmt: skip
    if "alra" in keys["methods"].split(","):
        keys.setdefault("alra.d_max", 7)
    return [f"--{key}={value}" for key, value in keys.items()]


def config(world: Path, out: Path, **changes) -> configure.Config:
    return configure.load(flags(world, out, **changes))


def write_run(out: Path, students: dict[str, Qwen2], tokenizer, data_dir: Path, teacher: Path, **facts) -> Path:
    """A finished run without its training: run.json, and each student with its model, run.json and log."""
    for name, model in students.items():
        model.save_pretrained(out / name / "model", tokenizer)
        made = {"init_sha256": "i", "made_by": {"data_sha256": "d"}, "made_by_sha256": name, "step": 3}
        about = {"method": name, "seed": 1234, "student": "tiny", "overrides": {}, "bos": None, **made}
        (out / name / "run.json").write_text(json.dumps(about | facts))
        lines = [{"step": step, "ce": 5.0 / step, "loss": 1.0} for step in (1, 2, 3)] + [{"step": 3, "val_ce": 2.0}]
        (out / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {"data_dir": str(data_dir), "teacher": str(teacher), "batch_rows": 4, "seq_len": SEQ}
    (out / "run.json").write_text(json.dumps({"config": keys}))
    return out


def read_jsonl(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def records(out: Path, method: str) -> list[dict]:
    return read_jsonl(out / method / "log.jsonl")


def untimed(out: Path, method: str) -> list[dict]:
    """The records without what the clock and the machine decide."""
    timed = ("tok_per_sec", "eta_sec", "time", "mem_gib", "mfu")
    return [{k: v for k, v in r.items() if k not in timed} for r in records(out, method)]


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir() if "." not in p.name)


def final_bits(out: Path, method: str, step: int = 6) -> tuple[bytes, bytes]:
    folder = out / method / "checkpoints" / f"step_{step:08d}"
    return (folder / "model/model.safetensors").read_bytes(), (folder / "optimizer.safetensors").read_bytes()


PROCESSES = multiprocessing.get_context(
    "forkserver"
)  # each is a fork of one that has imported all this, and did nothing
PROCESSES.set_forkserver_preload(["torch._dynamo", "train", "prepare", "eval", "study.compare"])


def start(function: Callable, *args, out: Path | str = os.devnull) -> multiprocessing.Process:
    """A new process that calls a function at the root, in a session of its own, and writes what it says into a file."""
    process = PROCESSES.Process(target=_begin, args=(function, args, out))
    process.start()
    return process


def _begin(function: Callable, args: tuple, out: Path | str) -> None:
    os.setsid()
    os.chdir(ROOT)
    for stream in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    function(*args)


def run_main(script: str, *argv: str) -> None:
    sys.exit(configure.guard(lambda: importlib.import_module(script.removesuffix(".py")).main(argv)))


def kill_when(ready: Callable[[], bool], function: Callable, *args) -> None:
    """Start a process that calls a function, killed with all its children as soon as `ready()`; it must not end before."""
    process = start(function, *args)
    while not ready():
        assert process.is_alive(), f"ended with {process.exitcode} before it was killed"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
