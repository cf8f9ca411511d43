"""Broken inputs and faults: each ends in one line that names file or key, or goes on rightly. Nothing is lost.

Every case is a fork of one process that has imported everything (`python -m tests.test_faults FOLDER`). It runs a script on
a copy of one small world, in which one thing is broken. It is judged by its exit code, by the lines on stderr, and by
every byte of the folder before and after.
"""

import contextlib
import dataclasses
import fcntl
import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HUNG_SEC = 20


@dataclasses.dataclass
class Case:
    command: str  # script and arguments
    breaks: Callable[[Path], None] = lambda w: None  # what is broken, in the folder of the case
    says: str = ""  # pattern of the last line on stderr, or with `code` 0 of anything that is printed
    code: int = 1
    changes: str | None = None  # pattern of files that may change; None: nothing where the exit code is not 0
    during: Callable[[], None] = lambda: None  # done inside the process, before the script begins
    then: Callable[[Path], bool] = lambda w: True  # what must be so afterwards

    name: str = ""


CASES: list[Case] = []


def case(*args, **kwargs) -> None:
    CASES.append(Case(*args, **kwargs, name=f"{len(CASES)}: {args[0]}"))


# --- ways to break things


def put(name: str, content: str | bytes) -> Callable[[Path], None]:
    def do(w: Path) -> None:
        (w / name).parent.mkdir(parents=True, exist_ok=True)
        (w / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return do


def edit(name: str, /, **changes) -> Callable[[Path], None]:
    """Set keys of a JSON file; `a__b` is b inside a, and `...` removes one. A checksum goes too: old files have none."""

    def do(w: Path) -> None:
        value = json.loads((w / name).read_text())
        value.pop("checksum", None)
        for key, new in changes.items():
            *path, last = key.split("__")
            inside = value
            for part in path:
                inside = inside[part]
            if new is ...:
                del inside[last]
            else:
                inside[last] = new
        (w / name).write_text(json.dumps(value))

    return do


def sub(name: str, old: str, new: str) -> Callable[[Path], None]:
    def do(w: Path) -> None:
        text = (w / name).read_text()
        assert old in text, (name, old)
        (w / name).write_text(text.replace(old, new, 1))

    return do


def cut(name: str, n: int = 100) -> Callable[[Path], None]:
    return lambda w: (w / name).write_bytes((w / name).read_bytes()[:-n])


def gone(*names: str) -> Callable[[Path], None]:
    def do(w: Path) -> None:
        for name in names:
            shutil.rmtree(w / name) if (w / name).is_dir() else (w / name).unlink()

    return do


def move(old: str, new: str) -> Callable[[Path], None]:
    return lambda w: (w / old).rename(w / new) and None


def copy(old: str, new: str) -> Callable[[Path], None]:
    def do(w: Path) -> None:
        shutil.copytree(w / old, w / new) if (w / old).is_dir() else shutil.copy(w / old, w / new)

    return do


def tensors(name: str, change: Callable[[dict], None], seal: str | None = None) -> Callable[[Path], None]:
    """Change the tensors of a file. `seal`: a state.json that loses its hashes, as older ones have none."""

    def do(w: Path) -> None:
        import safetensors.torch

        of = safetensors.torch.load((w / name).read_bytes())
        change(of)
        safetensors.torch.save_file(of, w / name)
        if seal:
            edit(seal, model_sha256=..., optimizer_sha256=...)(w)

    return do


def both(*breaks: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda w: [do(w) for do in breaks] and None


def rows(name: str, change: Callable, /, **facts) -> Callable[[Path], None]:
    """Change the ids of a rows file; its manifest then describes what is there, and holds `facts`."""

    def do(w: Path) -> None:
        import numpy as np

        from lib.rows import quick_hash

        file, manifest = w / "data" / f"{name}.bin", f"data/{name}.json"
        width = json.loads((w / manifest).read_text())["row_len"]
        ids = change(np.fromfile(file, np.uint32).reshape(-1, width).copy())
        ids.tofile(file)
        edit(manifest, **{"rows": len(ids), "quick_sha256": quick_hash(file), **facts})(w)

    return do


# --- the world


def make_world(w: Path) -> None:
    """Text, a tokenizer, a teacher, rows, a run that ended, one that was stopped half-way, and scores. All small."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    import eval as ev
    import prepare
    import train
    from model import Qwen2Config, init_student

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    shape = Qwen2Config(8, 13, 1, 2, 1, vocab_size=259, rope_theta=1e4, max_position_embeddings=64)
    init_student(shape).save_pretrained(w / "student", tokenizer)
    teacher = init_student(dataclasses.replace(shape, hidden_size=12, head_dim=6), seed=7)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(8.0)
    teacher.save_pretrained(w / "teacher", tokenizer)
    words = np.random.default_rng(1).choice(["one", "two ", "a line.\n", "So? "], (40, 30))
    (w / "text").mkdir()
    put("text/a.jsonl", "".join(json.dumps({"text": " ".join(some)}) + "\n" for some in words[:30]))(w)
    put("text/b.jsonl", "".join(json.dumps({"text": " ".join(some)}) + "\n" for some in words[30:]))(w)
    put("cfg.py", CONFIG)(w)
    items = [{"text": f"the cat saw {n} old boats"} for n in range(4)]
    put("items/lambada_openai/test.jsonl", "".join(json.dumps(item) + "\n" for item in items))(w)
    for script, argv in ((prepare, ["cfg.py"]), (train, ["cfg.py"]), (train, ["cfg.py", "--out_dir=half", "--max_steps=3"]),
                         (ev, ["run", "--tasks", "none", "--rows", "data", "--max_rows", "4", "--max_length", "32", "--device", "cpu"])):  # fmt: skip
        sys.argv = [script.__name__, *argv]
        with contextlib.suppress(SystemExit):
            assert not script.main()
    assert (w / "run/alra/eval_heldout.json").is_file()
    pid = os.fork()
    if not pid:
        stop_early()
        sys.argv = ["prepare.py", "cfg.py", "--data_dir=stopped"]
        prepare.main()
    assert ended(pid) == 77


CONFIG = """
methods = ("pretrain", "alra")
hyper = {"alra": {"d_max": 7}}
student, teacher, source, data_dir, out_dir, device = "student", "teacher", "text", "data", "run", "cpu"
n_documents = train_rows = None
val_rows, seq_len, batch_rows, micro_batch = 5, 16, 4, 2
max_steps = schedule_steps = 4
warmup_steps = 1
lr, min_lr = 1e-2, 1e-3
log_every_steps = val_every_steps = 1
checkpoint_every_steps = 1
val_max_rows = 4
"""
TRAIN = "train cfg.py"
NEW = f"{TRAIN} --out_dir=new"
HALF = f"{TRAIN} --out_dir=half"

# --- cases: settings

for arg, says in {
    "nowhere.py": "nowhere.py: no such config file",
    "--lr=1e999": "lr=inf: expected a finite number",
    "--lr=nan": "--lr=nan: expected float, got 'nan'",
    "--clip=1e999": "clip=inf: expected a finite number",
    "--weight_decay=1e999": "weight_decay=inf: expected a finite number",
    "--lr=x": "--lr=x: expected float",
    "--lr": "--lr: expected --lr=VALUE",
    "--lr=0": "lr=0.0: expected a number above 0",
    "--lrr=1": "no such key 'lrr', did you mean 'lr'",
    f"--seed={10**30}": "seed=10+: expected a finite number",
    "--seed=-1": "seed=-1: expected 0 or more",
    "--batch_rows=1000000000000": "batch_rows=1000000000000: expected at most",
    "--seq_len=0": "seq_len=0: expected at least 1",
    "--max_steps=0": "max_steps=0: expected at least 1",
    "--methods=": r"methods=\(\): expected at least one name",
    "--methods=alra,alra": "stands there twice",
    "--methods=alra@": "expected METHOD or METHOD@LABEL",
    "--methods=alra@../x": "expected METHOD or METHOD@LABEL",
    "--methods=../alra": "no such method '../alra'",
    "--alra.tau=0": "alra: tau=0.*: expected more than 0",
    "--alra.gamma=1e999": "alra: gamma=inf: expected 0 or more",
    "--alra.lr=1e999": "alra.lr=inf: expected a number above 0",
    "--alra.tau=x": "alra.tau='x': expected float",
    "--alra.d_max=259": "alra: d_max=259: expected",
    "--hyper={'alra':3}": "hyper=",
    "--device=gpu": "device gpu: expected cpu",
    "--device=cuda": "device cuda:0: expected cpu, or cuda, of which torch finds none here",
    "--seq_len=12": "seq_len=12: data has rows for seq_len=16",
    "--max_steps=5000 --schedule_steps=5000": "max_steps=5000: needs 20,000 rows",
    "--teacher=none": "teacher=None: alra learns from one",
    "--teacher=no/where/at": "no/where/at: no such folder",
    "--student=300m": r"student=300m: expected a preset \(",
    "--data_dir=text": "text: no train.bin with train.json there",
    "--micro_batch=3": "micro_batch=3: expected a divisor",
    "--compile=yes": "compile=yes: expected bool",
    "--out_dir=cfg.py": "cfg.py",
    "--out_dir=cfg.py/new": "cfg.py",
}.items():
    case(f"{NEW} {arg}", says=says)

for text, says in {
    "import sys; sys.exit()": "bad.py: does not run: SystemExit",
    "import sys; sys.exit(0)": "bad.py: does not run: SystemExit",
    "lr = = 1": "bad.py: does not run: SyntaxError",
    "raise KeyError(3)": "bad.py: does not run: KeyError: 3",
    "x = 1": "bad.py: no such key 'x'",
    "lr = float('nan')": "lr=nan: expected a finite number",
    "lr = float('inf')": "lr=inf: expected a finite number",
    "import nowhere": "bad.py: does not run: ModuleNotFoundError",
    "def f(): f()\nf()": "bad.py: does not run: RecursionError",
    "lr = 1e-2\0": "bad.py: does not run",
    b"lr = '\xff'": "bad.py: does not run: UnicodeDecodeError",
    "hyper = {1: {}}": "hyper=",
    "lr = None": "lr=None: expected float",
}.items():
    case(f"{NEW} bad.py", put("bad.py", text), says)
case(f"{NEW} bad.py", lambda w: (w / "bad.py").mkdir(), "bad.py: no such config file")
case(f"{NEW} bad.py", lambda w: os.mkfifo(w / "bad.py"), "bad.py: no such config file")

# --- cases: rows

for name, breaks in {"no whole": put("data/train.json", "{"), "expected a JSON object": put("data/train.json", "[1]"),
                     "no whole ": put("data/train.json", b"\xff"), "no 'rows'": put("data/train.json", "{}")}.items():  # fmt: skip
    case(NEW, breaks, f"data/train.json: {name.strip().replace('no whole', 'not whole JSON')}")
for key in ("rows", "row_len", "eos_id", "sha256", "quick_sha256", "tokenizer_sha256"):
    case(NEW, edit("data/train.json", **{key: ...}), f"data/train.json: no '{key}' in it")
    case(NEW, edit("data/val.json", **{key: None}), f"data/val.json: {key} is None, expected")
case(NEW, sub("data/train.json", '"padding_share": ', '"padding_share": NaN, "x": '), "data/train.json: .*NaN")
case(NEW, cut("data/train.bin"), "data/train.bin: [0-9,]+ bytes, expected")
case(NEW, rows("train", lambda ids: ids, quick_sha256="0"), "data/train.bin: not the bytes that train.json describes")
case(NEW, rows("train", lambda ids: ids[:0]), "data/train.bin: no rows")
case(NEW, rows("val", lambda ids: ids[:0]), "data/val.bin: no rows")
case(NEW, gone("data/val.bin"), "data: no val.bin with val.json there; .*val_rows or val_share above 0")
case(NEW, edit("data/val.json", tokenizer_sha256="other"), "data: tokenizer_sha256 .*val")
case(NEW, edit("data/val.json", eos_id=3), "data: eos_id .*val")
case(NEW, edit("data/val.json", bos=3), "data: bos .*val")
case(NEW, edit("data/val.json", vocab_size=300), "data: vocab_size .*val")
case(NEW, rows("val", lambda ids: ids[:, :9].copy(), row_len=9), "data has rows for seq_len=8")
case(NEW, rows("train", lambda ids: ids * 0 + 259), "train.bin: id 259 in row 0, with a vocabulary of 259")
case(NEW, rows("train", lambda ids: last_row(ids)), "train.bin: id 259 in row 10, with", changes="new")
case(NEW, rows("val", lambda ids: ids * 0 + 1000), "val.bin: id 1000 in row 0, with a vocabulary of 259")
case(NEW, rows("train", lambda ids: drop_targets(ids)), "data/train.bin: no valid target")
case(NEW, rows("val", lambda ids: drop_targets(ids)), "data/val.bin: no valid target")
case(NEW, both(gone("data"), put("data", "x")), "data: no train.bin")


def last_row(ids):
    ids[10:] = 259
    return ids


def drop_targets(ids):
    ids[:, 1:] = 2**32 - 1
    return ids


# --- cases: models

for folder in ("teacher", "student"):
    config = f"{folder}/config.json"
    for content, says in {
        "{": "not whole JSON",
        "[]": "expected a JSON object",
        "": "not whole JSON",
        "{}": "model_type",
    }.items():
        case(NEW, put(config, content), f"{folder}.*: .*{says}")
    for change, says in {
        "hidden_size='x'": "hidden_size", "hidden_size=0": "hidden_size", "hidden_size=-8": "hidden_size",
        "hidden_size=None": "hidden_size", "num_hidden_layers=1000000": "num_hidden_layers", "num_attention_heads=5": "num_attention_heads",
        "num_key_value_heads=3": "num_key_value_heads", "vocab_size=10**12": "vocab_size", "max_position_embeddings=8": "supports 8 positions",
        "head_dim=3": "head_dim", "rope_theta='x'": "rope_theta", "rms_norm_eps=[1]": "rms_norm_eps", "model_type=3": "model.type",
        "tie_word_embeddings='no'": "tie_word_embeddings", "intermediate_size=1.5": "intermediate_size",
        "rms_norm_eps=float('inf')": "rms_norm_eps|Infinity",
    }.items():  # fmt: skip
        case(NEW, edit(config, **eval(f"dict({change})")), f"{folder}.*({says})")
WEIGHTS = "teacher/model.safetensors"
case(NEW, gone("teacher/config.json"), "teacher")
case(NEW, gone(WEIGHTS), "teacher: no model.safetensors")
case(NEW, cut(WEIGHTS), f"{WEIGHTS}: not a whole safetensors file")
case(NEW, put(WEIGHTS, ""), f"{WEIGHTS}: not a whole safetensors file")
case(NEW, put(WEIGHTS, b"\xff" * 99), f"{WEIGHTS}: not a whole safetensors file")
case(NEW, both(gone(WEIGHTS), lambda w: (w / WEIGHTS).mkdir()), "teacher")
case(NEW, both(gone(WEIGHTS), put("teacher/pytorch_model.bin", "x")), "pytorch_model.bin is a pickle")
NORM = "model.norm.weight"
case(NEW, tensors(WEIGHTS, lambda of: of[NORM].fill_(float("nan"))), f"{WEIGHTS}: {NORM} .*finite")
case(NEW, tensors(WEIGHTS, lambda of: of[NORM].fill_(float("inf"))), f"{WEIGHTS}: {NORM} .*finite")
case(NEW, tensors(WEIGHTS, lambda of: of.pop(NORM)), f"teacher: missing tensor {NORM}")
case(NEW, tensors(WEIGHTS, lambda of: of.update(more=of[NORM].clone())), f"{WEIGHTS}: extra tensor more")
case(NEW, tensors(WEIGHTS, lambda of: of.update({NORM: of[NORM][:-1].clone()})), f"{WEIGHTS}: {NORM} is \\(11,\\)")
case(NEW, tensors(WEIGHTS, lambda of: of.update({NORM: of[NORM].int()})), f"{WEIGHTS}: {NORM} is torch.int32")
INDEX = "teacher/model.safetensors.index.json"
for content, says in {"{": "not whole JSON", "[]": "expected a JSON object", '{"weight_map": []}': "weight_map", "{}": "weight_map",
                      '{"weight_map": {"a": 3}}': "weight_map.a", '{"weight_map": {"a": "x"}}': "shard x",
                      '{"weight_map": {"a": "../x"}}': "shard ../x", '{"weight_map": {}}': "weight_map|missing tensor"}.items():  # fmt: skip
    case(NEW, both(gone(WEIGHTS), put(INDEX, content)), f"teacher.*{says}")
TOKENIZER = "teacher/tokenizer.json"
case(NEW, gone(TOKENIZER), "teacher: no tokenizer.json there")
for content in ("{", "[]", "{}", ""):
    case(NEW, put(TOKENIZER, content), f"{TOKENIZER}")
case(NEW, put("teacher/tokenizer_config.json", "{"), "teacher/tokenizer")
case(NEW, both(gone("teacher"), put("teacher", "x")), "teacher: ")

# --- cases: a run's folder

case(TRAIN, code=0, says="run/alra/model")
case(f"{TRAIN} --micro_batch=4 --log_every_steps=2 --keep_checkpoints=1", code=0)
case(HALF, code=0, says="going on from step 3 of 4", changes=".", then=lambda w: same_end(w))


def same_end(w: Path, out: str = "half") -> bool:
    """Whether a run in `out` has ended as the one in `run` did, with the bits of its model and its whole log."""
    ends = [(w / o / m / "model/model.safetensors").read_bytes() for m in ("pretrain", "alra") for o in ("run", out)]
    steps = [
        [json.loads(line)["step"] for line in (w / o / "alra/log.jsonl").read_text().splitlines()] for o in ("run", out)
    ]
    return ends[0] == ends[1] and ends[2] == ends[3] and steps[0] == steps[1]


CHECKPOINT = "half/alra/checkpoints/step_00000003"
STATE = f"{CHECKPOINT}/state.json"
goes_on = {"code": 0, "says": "going on from step 3 of 4", "changes": ".", "then": same_end}
case(HALF, put("half/alra/checkpoints/step_00000006.bak/state.json", "{}"), **goes_on)
case(HALF, put("half/alra/checkpoints/step_00000009", ""), **goes_on)
case(HALF, put("half/alra/checkpoints/step_00000009.tmp/state.json", ""), **goes_on)
case(HALF, put("half/alra/checkpoints/notes.txt", "x"), **goes_on)
case(HALF, put("half/notes.jsonl", "mine\n"), **goes_on)
case(HALF, put("half/alra/notes.jsonl", '{"step": 99}\n'), **goes_on | {"then": lambda w: same_end(w) and (w / "half/alra/notes.jsonl").read_text() == '{"step": 99}\n'})  # fmt: skip
case(HALF, edit(STATE, model_sha256=..., optimizer_sha256=..., config=...), **goes_on)  # an older checkpoint
case(HALF, lambda w: (w / "half/alra/log.jsonl").open("a").write('{"step": 4, "lo') and None, **goes_on)
case(HALF, gone("half/run.json"), **goes_on)
case(TRAIN, gone("run/alra/model", "run/alra/run.json"), code=0, changes="run/", then=lambda w: same_end(w, "run"))
for content, says in {"{": "not whole JSON", "[1]": "expected a JSON object", "{}": "no 'config'", '{"config": []}': "config is", '{"config": {}}': "config.methods",
                      '{"config": {"methods": 3}}': "config.methods is 3"}.items():  # fmt: skip
    case(HALF, put("half/run.json", content), f"half/run.json: .*{says}")
case(f"{HALF} --micro_batch=none", edit("half/run.json", micro_batch="x"), "half/run.json: micro_batch is 'x'")
case(HALF, edit("half/run.json", config__lr=0.5), "out_dir=half: already contains a different run .lr=0.5 there")
case(f"{HALF} --max_steps=2", says="max_steps=2: half is at step 3")
case(f"{TRAIN} --max_steps=2", says="max_steps=2: run is at step 4")
case(HALF, gone("half/alra"), "half/alra/checkpoints: without these no step is left")
case(HALF, gone("half/alra/checkpoints"), "half/alra/checkpoints: without these no step is left")
case(HALF, gone("half/alra/checkpoints", "half/pretrain/checkpoints"), "checkpoints: without these no step is left")
case(
    HALF, gone("half/alra/checkpoints", "half/pretrain", "half/run.json"), "checkpoints: without these no step is left"
)
case(TRAIN, gone("run/alra"), "run/alra/checkpoints: without these no step is left")
case(HALF, put("half/alra/log.jsonl", "x\n"), "half/alra/log.jsonl, line 1: not JSON")
case(HALF, put("half/alra/log.jsonl", "[1]\n"), "half/alra/log.jsonl, line 1: expected a JSON object")
case(HALF, put("half/alra/log.jsonl", "{}\n"), "half/alra/log.jsonl, line 1: no 'step'")
case(HALF, put("half/alra/log.jsonl", '{"step": "1"}\n'), "half/alra/log.jsonl, line 1: step is '1'")
case(HALF, put("half/alra/stopped.json", "{"), "half/alra/stopped.json: not whole JSON")
case(HALF, put("half/alra/stopped.json", "{}"), "half/alra/stopped.json: no 'why'")
case(TRAIN, put("run/alra/run.json", "{"), "run/alra/run.json: not whole JSON")
case(TRAIN, edit("run/alra/run.json", step="4"), "run/alra/run.json: step is '4'")
case(HALF, gone(STATE), "step_00000003/state.json")
case(HALF, put(STATE, "{"), f"{STATE}: not whole JSON .*move the folder .* aside to go on from the one before")
case(HALF, sub(STATE, '"valid_tokens": ', '"valid_tokens": 1'), f"{STATE}: its checksum is not that of its content")
for key in ("step", "sums", "valid_tokens", "line_steps", "line_valid", "line_sec"):
    case(HALF, edit(STATE, **{key: ...}), f"{STATE}: no '{key}'")
case(HALF, edit(STATE, sums={"ce": "x"}), f"{STATE}: sums.ce is 'x'")
case(HALF, edit(STATE, method="pd"), "step_00000003: method is pd, expected alra")
case(HALF, edit(STATE, init_sha256="x"), "step_00000003: init_sha256 is x")
case(HALF, edit(STATE, config__lr=0.5), "step_00000003: already contains a different run .lr=0.5 there")
case(HALF, edit(STATE, data_sha256="x"), "step_00000003: already contains a different run .data_sha256")
case(HALF, edit(STATE, teacher_sha256="x"), "step_00000003: already contains a different run .teacher_sha256")
case(HALF, both(*(move(f"half/{m}/checkpoints/step_00000003", f"half/{m}/checkpoints/step_00000004") for m in ("alra", "pretrain"))),
     "step_00000004: step is 3, expected 4")  # fmt: skip
for name in ("model", "optimizer"):
    file, part = f"{CHECKPOINT}/{name}.safetensors", NORM if name == "model" else f"{NORM}/exp_avg"
    case(HALF, gone(file), f"{name}.safetensors: not whole")
    case(HALF, cut(file), f"{name}.safetensors: not whole")
    case(HALF, put(file, b"\xff" * 99), f"{name}.safetensors: not whole")
    case(
        HALF,
        tensors(file, lambda of, part=part: of.pop(part)),
        f"{name}.safetensors: its tensors are not this student's",
    )
    case(
        HALF,
        tensors(file, lambda of, part=part: of[part].add_(1)),
        f"{name}.safetensors: not the tensors that were saved",
    )
    case(HALF, tensors(file, lambda of, part=part: of.update({part: of[part][:1].clone()}), STATE), f"{name}.safetensors: its tensors are not this student's")  # fmt: skip
    case(HALF, copy(f"half/alra/checkpoints/step_00000002/{name}.safetensors", file), f"{name}.safetensors: not the tensors that were saved")  # fmt: skip
case(
    HALF,
    both(gone("half/alra/checkpoints"), copy("half/pretrain/checkpoints", "half/alra/checkpoints")),
    "method is pretrain, expected alra",
)


def one_broke(w: Path) -> bool:
    """Whether pretrain alone has stopped, without a model, and alra has ended as without it."""
    why = json.loads((w / "new/pretrain/stopped.json").read_text())["why"]
    weights = [(w / out / "alra/model/model.safetensors").read_bytes() for out in ("run", "new")]
    return "not finite" in why and not (w / "new/pretrain/model").exists() and weights[0] == weights[1]


case(
    f"{NEW} --pretrain.lr=1e39",
    says="pretrain stopped at step 1: its update made weights that are not finite",
    changes="new",
    then=one_broke,
)
case(
    f"{NEW} --pretrain.lr=1e22",
    says="pretrain stopped at step 1: after its update val_ce is not finite",
    changes="new",
    then=one_broke,
)
case(f"{NEW} --methods=pretrain,alra --pretrain.lr=1e39 --alra.lr=1e39", says="alra stopped at step 1", changes="new")


def hold(folder: str) -> Callable[[], None]:
    return lambda: fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)


case(HALF, during=hold("half"), says="out_dir=half: another train.py is at work there")

# --- cases: signals, terminals, the machine


def on_update(do: Callable[[], None]) -> Callable[[], None]:
    def during() -> None:
        import train

        update = train.update
        train.update = lambda *args: do() or update(*args)

    return during


for sign in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
    case(NEW, during=on_update(lambda sign=sign: signal.raise_signal(sign)), code=0, says="alra: stopped by a signal after step 1",
         changes="new", then=lambda w: (w / "new/alra/checkpoints/step_00000001").is_dir())  # fmt: skip


def hang_up() -> None:
    """What a logout does to a run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    on_update(lambda: signal.raise_signal(signal.SIGHUP))()


case(NEW, during=hang_up, code=0, changes="new", then=lambda w: same_end(w, "new"))


def before_update(error: BaseException) -> Callable[[], None]:
    def during() -> None:
        import train

        def refuse(*args):
            raise error

        train.open_teacher = refuse

    return during


case(NEW, during=before_update(KeyboardInterrupt()), code=130, says="stopped")
case(
    NEW,
    during=before_update(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")),
    says="RuntimeError: .*allocate memory",
)
case(NEW, during=before_update(MemoryError("Unable to allocate 8 PiB")), says="MemoryError: Unable to allocate")
case(NEW, during=before_update(RecursionError("maximum recursion depth")), says="RecursionError: maximum")
case(NEW, during=before_update(OverflowError("too large")), says="OverflowError: too large")


def reader_gone(*numbers: int) -> Callable[[], None]:
    """stdout, stderr or both are a pipe that nobody reads."""

    def during() -> None:
        read, write = os.pipe()
        os.close(read)
        for number in numbers:
            os.dup2(write, number)
        sys.stdout, sys.stderr = streams()

    return during


case(NEW, during=reader_gone(1), code=0, changes="new", then=lambda w: same_end(w, "new"))
case(NEW, during=reader_gone(1, 2), code=0, changes="new", then=lambda w: same_end(w, "new"))
case("eval --table run", during=reader_gone(1), code=0)
case("train --help", during=reader_gone(1), code=0)


def no_stdout() -> None:
    sys.stdout = None


case(NEW, during=no_stdout, code=0, changes="new", then=lambda w: same_end(w, "new"))
case(NEW, during=lambda: os.environ.update(PATH="/nowhere"), code=0, changes="new", then=lambda w: same_end(w, "new"))


def ascii_stdout() -> None:
    sys.stdout.reconfigure(encoding="ascii", errors="strict")


case("prepare --show 0 data", during=ascii_stdout, code=0, says="row 0")


def readable_by_all(w: Path) -> bool:
    return all(path.stat().st_mode & 0o044 == 0o044 for path in (w / "new").rglob("*.safetensors"))


case(f"{NEW} --max_steps=1", during=lambda: os.umask(0o022) and None, code=0, changes="new", then=readable_by_all)


# --- cases: scores, tables, figures, samples

EVAL = "eval run/alra --tasks none --rows data --max_rows 4 --max_length 32 --device cpu"
RESULT = "run/alra/eval_heldout.json"
scored = {
    "code": 0,
    "changes": "run/alra/eval",
    "then": lambda w: json.loads((w / RESULT).read_text())["intrinsic"]["ce"] > 0,
}
case(EVAL, **scored)
case(f"{EVAL} --tasks lambada_openai --data_dir items", **scored)
case(EVAL, during=hold("run/alra"), says="run/alra: another eval.py is at work there")
case(EVAL, gone("run/alra/model"), "run/alra: no model/ in it")
case(EVAL, cut("run/alra/model/model.safetensors"), "run/alra/model/model.safetensors: not a whole safetensors file")
case(
    EVAL, tensors("run/alra/model/model.safetensors", lambda of: of[NORM].fill_(float("nan"))), f"{NORM} is not finite"
)
case(EVAL, put("run/alra/run.json", "{"), "run/alra/run.json: not whole JSON")
case(EVAL, put("run/alra/run.json", "{}"), "run/alra/run.json: no 'method'")
case(EVAL, put("run/run.json", "[]"), "run/run.json: expected a JSON object")
case(EVAL, edit("run/run.json", config=3), "run/run.json: config is 3")
case(EVAL, gone("data/val.bin"), "data: no val.bin")
case(EVAL, rows("val", lambda ids: ids[:0]), "data/val.bin: no rows")
case(f"{EVAL} --out new", rows("val", lambda ids: ids * 0 + 1000), "data/val.bin: id 1000", changes="new")
case(EVAL, put(RESULT, "{"), f"{RESULT}: not whole JSON")
case(EVAL, edit(RESULT, weights_sha256="x"), code=0, changes="run/alra/eval")
case(EVAL, edit(RESULT, weights_sha256=...), code=0, changes="run/alra/eval")
case(EVAL, edit(RESULT, protocol__max_length=...), code=0, changes="run/alra/eval")
case(f"{EVAL} --out cfg.py", says="cfg.py")
case(f"{EVAL} --tasks lambada", says="--tasks: no task 'lambada' in the heldout set, did you mean 'lambada_openai'")
ITEMS = "items/lambada_openai/test.jsonl"
SCORE = f"{EVAL} --tasks lambada_openai --data_dir items"
for content, says in {"": "no rows", "{": "row 1: not JSON", "[1]": "row 1: expected an object", "{}": "row 1: no field 'text'",
                      '{"text": 3}': "field 'text': expected words", '{"text": ""}': "field 'text'", b"\xff": "row 1: not JSON",
                      '{"text": "a b"}\n{"text": ' + '"' * 2 + "}": "row 2, field 'text'"}.items():  # fmt: skip
    case(SCORE, put(ITEMS, content), f"{ITEMS}.*{says}")
case(SCORE, put(ITEMS, json.dumps({"text": "a " + "b" * 10**6})), "^UserError: .{1,400}$")
case(SCORE, put(ITEMS, json.dumps({"text": "b" * 10**6})), "^UserError: .{1,400}$")
case(
    SCORE,
    both(gone(ITEMS), put("items/lambada_openai/test.csv", "x")),
    "lambada_openai: no items/lambada_openai/test.jsonl",
)
for name, content in {
    "test.csv": "a,b\n\0,1\n",
    "test.parquet": "PAR1",
    "test.tsv": b"\xff\xfe",
    "test.txt": "x",
}.items():
    case(f"{EVAL} --tasks storycloze_2016 --data_dir items --storycloze {name}", put(name, content), name)
TABLE = "eval --table run"
case(TABLE, code=0, says="Held-out rows")
for content, says in {"{": "not whole JSON", "[]": "expected a JSON object", "{}": "no 'name'"}.items():
    case(TABLE, put(RESULT, content), f"{RESULT}: .*{says}")
for key in (
    "name",
    "split",
    "tasks",
    "protocol",
    "protocol__dtype",
    "run__method",
    "run__seed",
    "run__config",
    "intrinsic__n_rows",
):
    case(TABLE, edit(RESULT, **{key: ...}), f"{RESULT}: no '{key.replace('__', '.')}' in it")
case(TABLE, edit(RESULT, tasks={"lambada_openai": {"acc": "x"}}), f"{RESULT}: tasks.lambada_openai.acc is 'x'")
case(TABLE, edit(RESULT, tasks={"lambada_openai": {"acc": 0.5}}), f"{RESULT}: no 'tasks.lambada_openai.acc_stderr'")
case(TABLE, edit(RESULT, intrinsic__ce=float("nan")), f"{RESULT}: not whole JSON .NaN is not a number")
case(TABLE, edit(RESULT, intrinsic__kl="1"), f"{RESULT}: intrinsic.kl is '1'")
case(TABLE, cut(RESULT.replace(".json", ".npz")), "eval_heldout.npz: not whole")
case(TABLE, gone(RESULT.replace(".json", ".npz")), "eval_heldout.npz: not whole")
case(f"{TABLE} --csv nowhere/x.csv", says="nowhere/x.csv", then=lambda w: True)
case("eval --table nowhere", says="nowhere: no eval_heldout.json")
case("eval --table run --reference x", says="--reference x: none of the results is of it")


def nan_scores() -> None:
    import eval as ev

    ev.benchmarks = lambda *args: {"lambada_openai": {"acc": float("nan")}}


case(SCORE, during=nan_scores, says=f"{RESULT}: its content is not written: a number in it is not finite")
case("plot run", code=0, changes="run/.*(png|csv)")
case("plot run --figures=curves", put("run/run.json", "{"), "run/run.json: not whole JSON")
case("plot run --figures=curves", put("run/run.json", '{"config": {}}'), "run/run.json: no 'config.batch_rows'")
case("plot run --figures=curves", put("run/alra/log.jsonl", "x\n"), "run/alra/log.jsonl, line 1: not JSON")
case("plot run --figures=curves", put("run/alra/log.jsonl", '{"loss": 1}\n'), "run/alra/log.jsonl, line 1: no 'step'")
case(
    "plot run --figures=budget",
    put("run/alra/histograms.jsonl", '{"step": 1}\n'),
    "histograms.jsonl, line 1: no 'd_u_hist'",
)
case("plot run --figures=anchoring", put("run/teacher.jsonl", '{"step": 1}\n'), "teacher.jsonl, line 1: no 'n'")
case("plot run --figures=anchoring", says="run/teacher.jsonl: no such log")
case("plot --rows data", put("data/train.json", "{"), "data/train.json: not whole JSON")
case("plot --rows data", edit("data/train.json", ends__line=...), "data/train.json: no 'ends.line' in it")
case("plot nowhere", says="nowhere: no log.jsonl")
SAMPLE = "sample run/alra --prompt a --tokens 2"
case(SAMPLE, code=0)
case(SAMPLE, during=reader_gone(1), code=0)
case(SAMPLE, put("run/alra/run.json", "{"), "run/alra/run.json: not whole JSON")
case(SAMPLE, edit("run/alra/run.json", bos="x"), "run/alra/run.json: bos is 'x'")
case(SAMPLE, cut("run/alra/model/model.safetensors"), "model.safetensors: not a whole safetensors file")
case("sample nowhere", says="nowhere: no such folder")

# --- cases: sources

PREPARE = "prepare cfg.py --data_dir=rows"
prepared = {"code": 0, "changes": "rows", "then": lambda w: (w / "rows/val.json").is_file()}
case(PREPARE, **prepared)
case("prepare cfg.py", code=0, says="made before by the same recipe")
case("prepare cfg.py --seq_len=8", says="data: holds data of another recipe")
case(f"{PREPARE} --source=", says="source=: ")
case(f"{PREPARE} --source=nowhere", says="nowhere")
case(f"{PREPARE} --source=nowhere/x.jsonl", says="source=nowhere/x.jsonl: no such file")
case(f"{PREPARE} --source=cfg.py", says="cfg.py: expected a file that ends in one of")
case(f"{PREPARE} --source=pipe.jsonl", lambda w: os.mkfifo(w / "pipe.jsonl"), "pipe.jsonl: .*regular file")
case(f"{PREPARE} --source=text/*", lambda w: os.mkfifo(w / "text/c.jsonl"), "text/c.jsonl: .*regular file")
case(
    f"{PREPARE} --source=zero.jsonl", lambda w: (w / "zero.jsonl").symlink_to("/dev/zero"), "zero.jsonl: .*regular file"
)
case(f"{PREPARE} --source=zero.txt", lambda w: (w / "zero.txt").symlink_to("/dev/zero"), "zero.txt: .*regular file")
case(PREPARE, lambda w: (w / "text/c.jsonl").symlink_to("a.jsonl"), "text/c.jsonl: .*text/a.jsonl")
case(PREPARE, lambda w: (w / "text/c.jsonl").hardlink_to(w / "text/a.jsonl"), "text/c.jsonl: .*text/a.jsonl")
case(PREPARE, lambda w: (w / "text/c.jsonl").symlink_to("nowhere"), "text/c.jsonl: .*a link to nothing")
case(f"{PREPARE} --source=text/[1].jsonl", copy("text/a.jsonl", "text/[1].jsonl"), **prepared)
for content, says in {"{": "record 1: expected UTF-8 JSON", b"\xff": "record 1: expected UTF-8", "{}": "record 1: expected a field 'text'",
                      '{"text": 3}': "record 1: expected a field 'text'", "[" * 10**5: "record 1: expected UTF-8 JSON"}.items():  # fmt: skip
    case(f"{PREPARE} --source=bad.jsonl", put("bad.jsonl", content), f"bad.jsonl, {says}", changes="rows")
case(f"{PREPARE} --source=bad.jsonl", put("bad.jsonl", ""), "source=bad.jsonl: holds no record", changes="rows")
for name in ("bad.jsonl.gz", "bad.jsonl.zst", "bad.parquet"):
    case(f"{PREPARE} --source={name}", put(name, "x" * 99), f"{name}: cannot be read", changes="rows")
case(f"{PREPARE} --source=bad.txt", put("bad.txt", b"\xff"), "bad.txt: expected UTF-8", changes="rows")


def short_lines() -> None:
    import prepare

    prepare.LINE_BYTES = 1 << 20


case(
    f"{PREPARE} --source=bad.jsonl",
    put("bad.jsonl", "x" * (3 << 20)),
    "bad.jsonl: a line of more than 1 MiB",
    changes="rows",
    during=short_lines,
)
case(f"{PREPARE} --teacher=none", says="tokenizer=None, teacher=None")
case(f"{PREPARE} --val_rows=1000", says="leave no row for train", changes="rows")
case("prepare cfg.py --data_dir=cfg.py", says="cfg.py")
case("prepare --verify data", code=0, says="as the manifest says")
case("prepare --verify data", cut("data/train.bin", 4), "data/train.bin: [0-9,]+ bytes, expected a multiple")
case("prepare --verify data", edit("data/train.json", sha256="x"), "train.bin: sha256 is")
case("prepare --verify nowhere", says="nowhere/train.json: not there")
case("prepare --show 9999 data", says="--show 9999: expected a row from 0")
case("prepare --show x data", says="--show x data: expected")
for key in ("rows", "tokenizer", "vocab_size", "val_rows"):
    case("prepare --verify data", edit("data/train.json", **{key: ...}), f"data/train.json: no '{key}' in it")


def stop_early() -> None:
    """A killed preparation: one that stops after its first commit."""
    import prepare

    prepare.BATCH_DOCUMENTS, commit, begun = 5, prepare.Stream.save, []

    def save(self):
        begun.append(1)
        if len(begun) == 3:
            os._exit(77)
        return commit(self)

    prepare.Stream.save, prepare.COMMIT_SEC = save, 0.0
    prepare.prepare.__defaults__ = (0.0,)


STOPPED = "stopped/prepare.state"
GO_ON = "prepare cfg.py --data_dir=stopped"


def same_rows(w: Path) -> bool:
    return all(
        (w / "stopped" / f"{name}.bin").read_bytes() == (w / "data" / f"{name}.bin").read_bytes()
        for name in ("train", "val")
    )


case(GO_ON, code=0, says="going on after 5 documents", changes="stopped/", then=same_rows)
case(GO_ON, put(STOPPED, "{"), f"{STOPPED}: not whole JSON")
case(GO_ON, put(STOPPED, "{}"), f"{STOPPED}: no 'recipe'")
case(GO_ON, sub(STOPPED, '"records": 5', '"records": 6'), f"{STOPPED}: its checksum is not that of its content")
case(GO_ON, cut("stopped/train.bin.tmp", 10**6), "stopped/train.bin.tmp: ")
case(
    GO_ON,
    lambda w: flip(w / "stopped/train.bin.tmp"),
    "stopped/train.bin.tmp: not the rows that prepare.state describes",
)
case(GO_ON, gone("stopped/train.bin.tmp"), "stopped/train.bin.tmp")
case(f"{GO_ON} --seq_len=8", says="stopped: holds data of another recipe")
case(GO_ON, during=hold("stopped"), says="stopped: another prepare.py is at work there")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8] ^= 1
    file.write_bytes(data)


# --- running them


SAID = "%|going on after|not those that are published|at a time"  # lines on stderr that are no error


def run_case(it: Case, folder: Path, pristine: dict) -> str:
    """Run one case -> "" where it is as it should be, or what is wrong. The folder is pristine before and after."""
    it.breaks(folder)
    before, told = contents(folder), folder.with_suffix(".told")
    pid = os.fork()
    if not pid:
        os._exit(in_child(it, folder, told))
    code = ended(pid)
    out, err = (told.with_suffix(f".{name}").read_text(errors="replace") for name in ("out", "err"))
    lines = [line for line in re.split(r"[\r\n]+", err) if line.strip() and not re.search(SAID, line)]
    after = contents(folder)
    changed = sorted(p for p in before.keys() | after.keys() if before.get(p, 0) != after.get(p, 0))
    lost = [p for p in changed if not (it.changes and re.match(it.changes, p))]
    wrong = [
        "hung" * (code is None),
        "traceback" * ("Traceback" in err),
        f"exit code {code}, expected {it.code}" * (code != it.code),
        f"changed: {lost[:4]}" * bool(lost),
        f"{len(lines)} lines on stderr" * (it.code == 1 and len(lines) > 1),
        f"does not say {it.says!r}" * (not re.search(it.says, lines[-1] if it.code and lines else out + err)),
    ]
    wrong = [text for text in wrong if text] or [
        text for text in ["the result is wrong" * (not it.then(folder))] if text
    ]
    restore(folder, pristine, after)
    return "; ".join(wrong) + (f"\n{out[-300:]}{err[-1500:]}" if wrong else "")


def restore(folder: Path, pristine: dict, after: dict) -> None:
    """Make the folder pristine again."""
    for name in sorted(after.keys() - pristine.keys(), reverse=True):
        (folder / name).rmdir() if after[name] is None and not (folder / name).is_symlink() else (
            folder / name
        ).unlink()
    for name, content in pristine.items():
        if after.get(name, 0) != content:
            if name in after:
                gone(name)(folder)
            (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)


def streams() -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    return tuple(io.TextIOWrapper(io.BufferedWriter(io.FileIO(n, "w", closefd=False))) for n in (1, 2))


def in_child(it: Case, folder: Path, told: Path) -> int:
    """The script of a case in this process -> its exit code, as the interpreter would give it."""
    import importlib
    import traceback

    os.chdir(folder)
    signal.alarm(HUNG_SEC)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(told.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = streams()
    script, *sys.argv[1:] = it.command.split(" ")
    code = 1
    try:
        import configure

        it.during()
        module = importlib.import_module(script)
        code = configure.guard(module.main) if script == "prepare" else module.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):
            stream.flush()
    return code


def ended(pid: int) -> int | None:
    status = os.waitpid(pid, 0)[1]
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Every path below a folder: the bytes of files, where links point to, None for folders."""
    found = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            what = path.read_bytes() if path.is_file() else None if path.is_dir() else "neither"
            found[str(path.relative_to(folder))] = os.readlink(path) if path.is_symlink() else what
    return dict(sorted(found.items()))


def main(folder: Path, wanted: str = "") -> int:
    """Make the world, run the cases, print what is wrong -> how many are."""
    import eval, plot, prepare, sample, session, train  # noqa: E401, F401, I001  before the first fork

    check = session.check_settings
    of_the_world = [(name, 259, of) for name, of in (("pretrain", {}), ("alra", {"d_max": 7}))]
    for name, n_vocab, of in of_the_world:  # checked here once; in every case it would be most of its time
        check(name, n_vocab, **of)
    session.check_settings = lambda name, n, **of: (name, n, of) in of_the_world or check(name, n, **of)
    world, begun = folder / "world", time.perf_counter()
    world.mkdir(parents=True)
    pid = os.fork()
    if not pid:
        os.chdir(world)
        make_world(world)
        os._exit(0)
    assert ended(pid) == 0
    gc.freeze()  # a collection in a child would copy every page
    pristine, outcomes = contents(world), Counter()
    for it in CASES:
        if wanted in it.name:
            wrong = run_case(it, world, pristine)
            fine = "went on rightly" if it.code == 0 else "one clear line"
            outcomes[re.split("[;:\\n]", wrong)[0] or fine] += 1
            if wrong:
                print(f"--- {it.name} [{it.says}]\n{wrong}")
    assert contents(world) == pristine
    cpu = sum(os.times()[:4])
    print(
        f"{len(CASES)} cases: {dict(outcomes)}; {time.perf_counter() - begun:.0f} s, {cpu:.0f} s of CPU",
        file=sys.stderr,
    )
    return sum(n for what, n in outcomes.items() if what not in ("went on rightly", "one clear line"))


@pytest.mark.slow
def test_faults_end_in_one_line_or_go_on_rightly(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_faults", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  one thread, no hub

    sys.exit(min(main(Path(sys.argv[1]), *sys.argv[2:]), 99))
