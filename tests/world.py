"""One tiny world for all tests: tokenizers, models, text, rows, flags, and runs that are killed."""

import functools
import gc
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import configure
import train
from lib.errors import UserError
from lib.files import read_json, write_json
from lib.hf import load_tokenizer, tokenizer_hash
from lib.rows import PAD, quick_hash
from model import Qwen2Config, init_student

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real weights and texts, which few machines have
DEMO = f"{ROOT}/demo/teacher"
TOKENIZER = f"{ROOT}/tests/tokenizer"  # of all rows here unless another is named
EOS = "<|endoftext|>"
BOS = "<s>"
V = 512  # of a larger vocabulary a run takes longer
SEQ = 13
STUDENT = Qwen2Config(16, 23, 1, 2, 1, vocab_size=V, rope_theta=1e4)
TEACHER = Qwen2Config(24, 31, 2, 2, 2, vocab_size=V, rope_theta=1e4)


def make_tokenizer(texts=(), vocab_size=257, eos=EOS, bos=None, split=None, **trainer):
    """Return a byte-level BPE learnt from `texts` (none: 256 bytes and EOS, which has id 0).

    bos    a token at the end of the vocabulary, which the tokenizer adds before each text
    split  pre-tokenizer; None: byte-level with GPT-2's regex
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    keys = {"special_tokens": [eos], "show_progress": False, "vocab_size": vocab_size}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = trainers.BpeTrainer(initial_alphabet=alphabet, **keys, **trainer)
    backend.train_from_iterator(texts, bpe)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    if bos:
        tokenizer.add_special_tokens({"bos_token": bos})
        ids = [(bos, tokenizer.bos_token_id)]
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def make_model(shape=TEACHER, seed=7, scale=8.0):
    """Return fresh weights times `scale`, whose probabilities are far from uniform."""
    model = init_student(shape, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model.requires_grad_(False)


@functools.cache
def n_params(model) -> int:
    return sum(p.numel() for p in model.parameters())


def write_text(file, n=40, seed=1):
    """Write documents of 30 words with ends of lines and sentences, as jsonl."""
    words = np.random.default_rng(seed).choice(["one", "two ", "a line.\n", "So? "], (n, 30))
    write_jsonl(file, [{"text": " ".join(document)} for document in words])
    return file


def write_rows(folder, name, n=97, seed=1, ids=None, tokenizer=TOKENIZER, **facts):
    """Write NAME.bin and its manifest as prepare.py does. Returns the ids.

    ids    None: n random rows of unequal lengths
    facts  keys of the manifest, over those that fit the rows
    """
    rng = np.random.default_rng(seed)
    if ids is None:
        ids = rng.integers(1, 199, (n, SEQ + 1), dtype=np.uint32)
        ids[rng.random(ids.shape) < 0.1] = 0  # ends of documents
        for row, length in zip(ids, rng.integers(2, SEQ + 2, n), strict=True):
            row[length:] = PAD
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.bin"
    file.write_bytes(ids.astype(np.uint32).tobytes())
    manifest = {"eos_id": 0, "bos": None, "vocab_size": V, "tokenizer": tokenizer}
    manifest |= {"rows": len(ids), "row_len": ids.shape[1]}
    manifest |= {"sha256": f"{name}{seed}", "quick_sha256": quick_hash(file)}
    if not facts.get("tokenizer_sha256"):
        facts["tokenizer_sha256"] = tokenizer_hash(load_tokenizer(str(tokenizer)))
    write_json(folder / f"{name}.json", manifest | facts)
    return ids


def make_world(root):
    """Make what `flags` names: data/ (97 rows and 7), teacher/ with a tokenizer, and student/."""
    write_rows(root / "data", "train", 97, seed=1)
    write_rows(root / "data", "val", 7, seed=2)
    make_model().save_pretrained(root / "teacher", load_tokenizer(TOKENIZER))
    # with a tokenizer its config.json is read without transformers, which is faster
    init_student(STUDENT).save_pretrained(root / "student", load_tokenizer(TOKENIZER))
    return root


RUN = (
    "--methods=pretrain,vanilla_kd,alra --seq_len=13 --max_steps=6 --schedule_steps=6 "
    "--warmup_steps=2 --batch_rows=4 --micro_batch=2 --lr=0.01 --log_every_steps=2 "
    "--val_every_steps=3 --checkpoint_every_steps=2 --device=cpu"
)


def flags(world, out, text="", **changes):
    """Return the command line of a run of six updates, with the flags of `text` and other keys."""
    keys = {"out_dir": out, "data_dir": world / "data"}
    keys |= {"student": world / "student", "teacher": world / "teacher"}
    for flag in f"{RUN} {text}".split():
        key, _, value = flag.removeprefix("--").partition("=")
        keys[key] = value
    keys |= changes
    if "alra" in keys["methods"].split(","):
        keys.setdefault("alra.d_max", 7)
    return [f"--{key}={value}" for key, value in keys.items()]


def config(world, out, text="", **changes):
    return configure.load(flags(world, out, text, **changes))


def distil(world, out, text="", **changes):
    """Make a run to its end."""
    assert train.distil(config(world, out, text, **changes)) == 0


def import_objective(code, folder):
    """Import a block of the pages that goes into losses.py, as a file in a folder."""
    name = f"objective_{hash(str(folder)) % 10**8}"
    (folder / f"{name}.py").write_text(f"from losses import *\n{code}")
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


BALANCED_KL = """
class BalancedKL(nn.Module):
    def __init__(self, *, decay: UnitInterval = 0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("average", torch.ones(()))
        self.register_buffer("of_tokens", torch.zeros(512))

    def forward(self, z_s, z_t, y):
        z_s, z_t, y, valid = enter(z_s, z_t, y)
        kl_u = vocab.full_kl(z_t, z_s, 1.0)
        loss = leave(kl_u / self.average, valid)
        self.average = torch.lerp(valid_mean(kl_u.detach(), valid), self.average, self.decay)
        self.of_tokens = z_t.softmax(-1)[valid].mean(0)
        return loss


METHODS["balanced_kl"] = Method(BalancedKL)
"""


def add_objective_with_state(folder):
    """Add "balanced_kl" to the methods: the KL divided by its running mean over the updates."""
    import_objective(BALANCED_KL, folder)


def state_of(out, step):
    folder = out / f"balanced_kl/checkpoints/step_{step:08d}"
    return float(training(folder)["extras"]["objective.average"])


def write_run(out, students, tokenizer, data_dir, teacher, **facts):
    """Write a finished run without training: run.json, and each student's model, run.json, log."""
    about = {"seed": 1234, "student": "tiny", "overrides": {}, "bos": None, "step": 3}
    about |= {"config": {}, "init_sha256": "i", "made_by": {"data_sha256": "d", "shape": {}}}
    log = [{"step": step, "ce": 5.0 / step, "loss": 1.0} for step in (1, 2, 3)]
    for name, model in students.items():
        model.save_pretrained(out / name / "model", tokenizer)
        names = {"method": name, "made_by_sha256": name}
        write_json(out / name / "run.json", about | names | facts)
        write_jsonl(out / name / "log.jsonl", [*log, {"step": 3, "val_ce": 2.0}])
    keys = {"data_dir": str(data_dir), "teacher": str(teacher), "batch_rows": 4, "seq_len": SEQ}
    keys["methods"] = list(students)
    write_json(out / "run.json", {"config": keys})
    return out


def write_jsonl(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_like_the_hub(folder, rows, part, split):
    """Add a configuration to a dataset in the hub's layout: a split of these rows."""
    import datasets  # a machine with a GPU may lack it

    (folder / part).mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / part / f"{split}.parquet")
    text = "---\nconfigs:\n"
    for path in sorted(folder.glob("*/")):
        file = f"{path.name}/{split}.parquet"
        text += f"- config_name: {path.name}\n  data_files:\n  - split: {split}\n    path: {file}\n"
    (folder / "README.md").write_text(f"{text}---\n")


def read_jsonl(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def records(out, method):
    return read_jsonl(out / method / "log.jsonl")


def untimed(out, method):
    """Return the records without what the clock and the machine decide."""
    lines = records(out, method)
    for record in lines:
        for key in ("tok_per_sec", "eta_sec", "mem_gib", "mfu", "wait_sec", "save_sec", "time"):
            record.pop(key, None)
    return lines


def saved(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir() if "." not in p.name)


def final_bits(out, method, step=6):
    folder = out / method / f"checkpoints/step_{step:08d}"
    model = folder / "model/model.safetensors"
    tensors = moments(folder) | training(folder)["extras"]
    return model.read_bytes(), {key: t.numpy().tobytes() for key, t in tensors.items()}


def training(folder):
    return torch.load(folder / "training.pt", weights_only=True)


def moments(folder) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's optimizers."""
    tensors = {}
    for optimizer in training(folder)["optimizers"]:
        for index, values in optimizer["state"].items():
            for key, value in values.items():
                tensors[f"{index}/{key}"] = value
    return tensors


def assert_same(a, b, method, step=6):
    """Compare the last weights and moments of two runs, and their logs, to the last bit."""
    assert final_bits(a, method, step) == final_bits(b, method, step), method
    assert untimed(a, method) == untimed(b, method)


def edit(file, *changes: str):
    """Set keys of a JSON file: "a.b=3" sets b inside a."""
    value = read_json(Path(file))
    for change in changes:
        keys, _, new = change.partition("=")
        *path, last = keys.split(".")
        inside = value
        for part in path:
            inside = inside[part]
        inside[last] = json.loads(new)
    write_json(Path(file), value)


def tensor(file, key, new):
    """Replace a tensor by an expression of x, which it was, and of all, t; None removes it."""
    t = safetensors.torch.load(Path(file).read_bytes())
    t[key] = eval(new, {"torch": torch, "x": t.get(key), "t": t})
    tensors = {key: value for key, value in t.items() if value is not None}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def read_table(text):
    """Read lines such as "flags => message". One that ends in a backslash goes on in the next."""
    return [line.split(" => ") for line in text.replace("\\\n", "").splitlines() if line]


def refusal(pattern):
    """Expect a `UserError` that has the pattern in it."""
    return pytest.raises(UserError, match=pattern)


# Each process is a fork of one that has imported all this, and done nothing.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOAD = "tests.conftest torch._dynamo pandas scipy.special train prepare eval tests.world"
PROCESSES.set_forkserver_preload(PRELOAD.split())


def start(function, *args, out: Path | str = os.devnull):
    """Start a process with a session of its own that calls a function, and prints into `out`."""
    process = PROCESSES.Process(target=_begin, args=(function, args, out))
    process.start()
    return process


def _begin(function, args, out):
    gc.freeze()
    gc.enable()
    os.setsid()
    os.chdir(ROOT)
    for stream in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    function(*args)
