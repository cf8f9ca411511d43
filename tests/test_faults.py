"""Broken inputs: each script ends in one line that names file or key and changes nothing, or it goes on rightly.

A case is a command, what is broken in a copy of one small world, and a pattern of the one line on stderr.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch

import configure
import prepare
import train
from lib import files
from lib.device import repair_compile_cache
from lib.rows import quick_hash
from model import Qwen2Config, init_student
from tests import world

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
TRAIN, NEW, HALF = "train.py cfg.py", "train.py cfg.py --out_dir=new", "train.py cfg.py --out_dir=half"
PREPARE, GO_ON = "prepare.py cfg.py --data_dir=rows", "prepare.py cfg.py --data_dir=stopped"
EVAL = "eval.py run/alra --tasks none --rows data --max_rows 4 --max_length 32 --device cpu"
SCORE = EVAL.replace("none", "lambada_openai") + " --data_dir items"
SAMPLE = "tools/sample.py run/alra --prompt a --tokens 2"
STEP = "half/alra/checkpoints/step_00000003"
STATE, WEIGHTS, NORM = f"{STEP}/state.json", "teacher/model.safetensors", "model.norm.weight"
EMBED, MODEL = "model.embed_tokens.weight", "model/model.safetensors"
INDEX, ITEMS = "teacher/model.safetensors.index.json", "items/lambada_openai/test.jsonl"


def put(name: str, content):
    def do(w: Path) -> None:
        (w / name).parent.mkdir(parents=True, exist_ok=True)
        (w / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return do


def edit(name: str, **changes):
    """Set keys of a JSON file; `a__b` is b inside a, and `...` removes one."""

    def do(w: Path) -> None:
        value = json.loads((w / name).read_text())
        for key, new in changes.items():
            *path, last = key.split("__")
            inside = value
            for part in path:
                inside = inside[part]
            inside[last] = new
            if new is ...:
                del inside[last]
        (w / name).write_text(json.dumps(value))

    return do


def gone(*names: str):
    return lambda w: [shutil.rmtree(w / n) if (w / n).is_dir() else (w / n).unlink() for n in names]


def cut(name: str, n: int = 100):
    return lambda w: (w / name).write_bytes((w / name).read_bytes()[:-n])


def copy(old: str, new: str):
    return lambda w: (shutil.copytree if (w / old).is_dir() else shutil.copy)(w / old, w / new)


def tensors(name: str, change):
    def do(w: Path) -> None:
        content = safetensors.torch.load((w / name).read_bytes())
        change(content)
        safetensors.torch.save_file(content, w / name)

    return do


def rows(name: str, change, **facts):
    """Change the ids of a rows file; its manifest describes the new ones, and holds `facts`."""

    def do(w: Path) -> None:
        file, manifest = w / "data" / f"{name}.bin", f"data/{name}.json"
        ids = np.fromfile(file, np.uint32).reshape(-1, json.loads((w / manifest).read_text())["row_len"])
        (ids := change(ids)).tofile(file)
        edit(manifest, **{"rows": len(ids), "quick_sha256": quick_hash(file), **facts})(w)

    return do


def add(name: str, text: str):
    return lambda w: put(name, (w / name).read_text() + text)(w)


def many(*breaks):
    return lambda w: [do(w) for do in breaks]


def filled(value: int, column: int = 0):
    def change(ids):
        ids[:, column:] = value
        return ids

    return change


# fmt: off
SETTINGS = {
    "nowhere.py": "nowhere.py: no such config file", "--lr=nan": "lr='?nan'?: expected", "--clip=1e999": "clip=inf: expected",
    "--lr=x": "lr='?x'?: expected float", "--lr": "--lr: expected --lr=VALUE", "--lr=0": "lr=0.0: expected", "--lrr=1": "no such key 'lrr', did you mean '?lr",
    f"--seed={10**30}": "seed=10+: expected", "--seed=-1": "seed=-1: expected int 0 or more", "--batch_rows=1000000000000": "batch_rows=1000000000000: expected at most",
    "--max_steps=0": "max_steps=0: expected int 1 or more", "--methods=": "methods=.*expected at least one", "--methods=alra,alra": "methods: duplicate .*alra",
    "--methods=alra@../x": "expected METHOD or METHOD@LABEL", "--methods=alr": "no such method 'alr', did you mean 'alra'", "--alr.d_max=7": "alr",
    "--alra.d_mx=7": "alra takes no d_mx; it takes anchor, budget, d_max", "--alra.tau=0": "alra.tau=0.*: expected", "--alra.tau=x": "alra.tau='x': expected float",
    "--alra.gamma=1e999": "alra.gamma=inf: expected", "--alra.lr=1e999": "alra.lr=inf: expected", "--alra.pair=prau": "alra.pair='prau': expected 'swpra' or",
    "--alra.d_max=259": "alra: d_max=259: expected 2 <= d_max < V", "--hyper=3": "hyper", "--methods=pretrain": "settings of .*alra",
    "--device=gpu": "device=gpu: expected cpu", "--device=cuda": "device=cuda:0: expected cpu, or cuda", "--seq_len=12": "seq_len=12: data has rows for seq_len=16",
    "--seq_len=0": "seq_len=0: expected", "--max_steps=5000 --schedule_steps=5000": r"max_steps=5000: needs 20,000 rows, data has (\d+); set --max_steps=\d+ --schedule_steps=\d+, or set --repeat_rows=True", "--teacher=none": "teacher=None: .*learns from one",
    "--teacher=none --methods=pretrain --hyper={} --alra.d_max=7": "alra", "--teacher=no/where/at": "no/where/at: no such folder", "--teacher=nowhere": "nowhere: no such folder",
    "--student=demmo": r"student=demmo: expected a preset \(.* or a folder; did you mean 'demo'\?", "--student=16x1x3": "num_attention_heads=3: expected a divisor of hidden_size=16",
    """'--student={"hidden_size": 16, "layers": 1}'""": "expected hidden_size, num_hidden_layers", "--student_weights=./no/such": "no/such: no such folder",
    """'--student={"hidden_size": 16, "num_attention_heads": 2}'""": "num_hidden_layers", "--student_weights=teacher": "student_weights=teacher: not of the shape of student=student",
    "--data_dir=text": "text: no train.bin with train.json", "--micro_batch=3": "micro_batch=3: expected a divisor", "--group=2 --micro_batch=1": "micro_batch=1: expected a multiple",
    "--group=3": "group=3: expected a divisor", "--compile=yes": "compile='?yes'?: expected bool", "--lr_schedule=wds": "lr_schedule='wds': expected 'cosine' or", "--shard=2": "shard=2: expected a divisor",
    "--shard=2 --teacher_device=cpu": "teacher_device=cpu: not supported with shard=2", "--min_lr=1": "min_lr=1.0: expected at most", "--warmup_steps=4": "warmup_steps=4: expected less",
    "--max_steps=5": "max_steps=5: expected at most schedule_steps=4", "--val_share=0.1": "val_rows=5 with val_share=0.1", "--out_dir=cfg.py": "cfg.py",
}
CASES = [(f"{NEW} {arg}", None, says) for arg, says in SETTINGS.items()]
CASES += [(f"{NEW} bad.py", put("bad.py", text), f"bad.py: {says}") for text, says in {
    "import sys; sys.exit(0)": "does not run: SystemExit", "lr = = 1": "does not run: SyntaxError", "raise KeyError(3)": "does not run: KeyError: 3",
    "x = 1": "no such key 'x'", "import nowhere": "does not run: ModuleNotFoundError", b"lr = '\xff'": "does not run",
}.items()]
CASES += [(NEW, *case) for case in (
    (put("data/train.json", "{"), "data/train.json: cannot be used"),
    (put("data/train.json", "[1]"), "data/train.json: expected a JSON object, got list; .*prepare it again"),
    (edit("data/train.json", rows=...), "data/train.json: no ..?rows..? in it; .*prepare it again"),
    (cut("data/train.bin"), "data/train.bin: [0-9,]+ bytes, expected [0-9,]+"),
    (edit("data/train.json", quick_sha256="0"), "data/train.bin: not the bytes that train.json describes"),
    (rows("train", lambda ids: ids[:0]), "data/train.bin: 0 bytes, expected"),
    (gone("data/val.bin"), "data: no val.bin with val.json"),
    *((edit("data/val.json", **{key: value}), f"data: {key} differs in train.json and val.json")
      for key, value in {"tokenizer_sha256": "other", "eos_id": 3, "bos": 3, "vocab_size": 300}.items()),
    (many(copy("data/train.bin", "data/val.bin"), copy("data/train.json", "data/val.json")), "data: val.bin has the rows of train.bin"),
    (many(edit("data/train.json", eos_id=3), edit("data/val.json", eos_id=3)), "data: eos_id=3, the tokenizer has 0; prepare it again"),
    (many(edit("data/train.json", tokenizer_sha256="x"), edit("data/val.json", tokenizer_sha256="x")), "tokenizer teacher: not the one that data was prepared with"),
    (rows("val", lambda ids: ids[:, :9].copy(), row_len=9), "data has rows for seq_len=8"),
    (rows("train", filled(259)), "data/train.bin: an id beyond the vocabulary of 259"),
    (many(gone("data"), put("data", "x")), "data: no train.bin"),
    # models
    *((put(f"{name}/config.json", content), f"{name}.*: .*{says}") for name in ("teacher", "student")
      for content, says in {"{": "cannot be used", "[]": "expected a JSON object", "{}": "model_type"}.items()),
    *((edit("student/config.json", **{key: value}), f"{key}=") for key, value in
      {"hidden_size": "x", "num_key_value_heads": 3, "head_dim": 3, "rope_theta": "x"}.items()),
    (edit("student/config.json", max_position_embeddings=8), "the student supports 8 positions"),
    (edit("teacher/config.json", max_position_embeddings=8), "teacher=teacher supports 8 positions"),
    (edit("student/config.json", vocab_size=100), "student=student: vocabulary of 100, but the tokenizer has 257 tokens"),
    (edit("teacher/config.json", vocab_size=100), "teacher=teacher: vocabulary of 100, but the tokenizer has 257 tokens"),
    (gone("teacher/config.json"), "teacher.*config.json"), (gone(WEIGHTS), "teacher: no model.safetensors"),
    (cut(WEIGHTS), f"{WEIGHTS}: cannot be used"), (put(WEIGHTS, b"\xff" * 99), f"{WEIGHTS}: cannot be used"),
    (many(gone(WEIGHTS), put("teacher/pytorch_model.bin", "x")), "pytorch_model.bin.* is a pickle"),
    (tensors(WEIGHTS, lambda t: t[NORM].fill_(float("nan"))), f"{WEIGHTS}: {NORM} .*finite"),
    (tensors(WEIGHTS, lambda t: t.pop(NORM)), f"teacher: missing tensor {NORM}"),
    (tensors(WEIGHTS, lambda t: t.update(more=t[NORM].clone())), f"{WEIGHTS}: .*more"),
    (tensors(WEIGHTS, lambda t: t.update({NORM: t[NORM][:-1].clone()})), f"{WEIGHTS}: {NORM} is \\(11,\\)"),
    (tensors(WEIGHTS, lambda t: t.update({NORM: t[NORM].int()})), f"{WEIGHTS}: {NORM} is I32; expected weights that are not quantized"),
    (tensors(WEIGHTS, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})), f"{WEIGHTS}: {NORM} is F8_E4M3"),
    *((edit("teacher/config.json", **keys), f"teacher/config.json: {says}") for keys, says in (
        ({"head_dim": 0}, "head_dim=0: expected int 1 or more"), ({"head_dim": 2.0}, "head_dim=2.0: "), ({"hidden_size": "x"}, "hidden_size='x'"), ({"rope_scaling": "x"}, ""),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "rope_scaling.low_freq_factor=None: expected"), ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000, but"))),
    (edit("teacher/config.json", quantization_config={"bits": 4}), "teacher: config.json has a quantization_config"),
    (many(gone(WEIGHTS), put(INDEX, '{"weight_map": {"a": "x"}}')), "teacher/x"), (many(gone(WEIGHTS), put(INDEX, "{}")), "teacher.*weight_map"),
    (gone("teacher/tokenizer.json"), "teacher: no tokenizer.json"), (put("teacher/tokenizer.json", "{}"), "teacher/tokenizer.json"),
    (edit("teacher/tokenizer_config.json", eos_token=...), "teacher: the tokenizer has no eos_token"),
)]
CASES += [(HALF, *case) for case in (  # a run's folder
    (put("half/run.json", "{"), "half/run.json: cannot be used .*move it aside"),
    (gone("half/alra/checkpoints"), "half: its students have no checkpoint in common"), (gone("half/alra"), "half: its students have no checkpoint in common"),
    (put("half/alra/log.jsonl", "x\n"), "half/alra/log.jsonl, line 1: cannot be used"), (put("half/alra/log.jsonl", "{}\n"), "half/alra/log.jsonl, line 1: no ..?step..?"),
    (many(gone("half/run.json"), put("half/run.json/mine", "x")), "half/run.json: cannot be written"),
    (put("half/alra/stopped.json", "{"), "half/alra/stopped.json: cannot be used"),
    *((edit(STATE, **{f"made_by__{key}": "x"}), f"{STEP}: contains a different run .alra: {key} was .x.") for key in ("methods", "data_sha256", "teacher_sha256", "objective")[:3]),
    (many(gone("half/alra/checkpoints"), copy("half/pretrain/checkpoints", "half/alra/checkpoints")), "a different run .alra: methods was .pretrain., now .alra."),
)]
permuted = many(copy("teacher", "other"), edit("other/tokenizer.json", model__vocab__a=66, model__vocab__b=65))
CASES += [
    (f"{NEW} --student=other --student_weights=other", permuted, "student_weights=other: its tokenizer has other ids"),
    (f"{NEW} --teacher=other --tokenizer=teacher", permuted, "teacher=other: its tokenizer gives 'a' id 66, that of the rows 65"), (f"{EVAL} --teacher other", permuted, "teacher=other: its tokenizer gives 'a'"),
    (f"{EVAL} --teacher other", many(copy("teacher", "other"), edit("other/config.json", max_position_embeddings=8)), "seq_len=16: teacher=other supports 8 positions"),
    (f"{HALF} --max_steps=2", None, "max_steps=2: half is at step 3"),
    (f"{TRAIN} --lr=2e-2 --clip=1 --beta1=0.8 --beta2=0.9", None, r"run/pretrain/checkpoints/step_00000004: contains a different run \(pretrain: lr was 0.01, now 0.02; beta1 was 0.9, now 0.8; beta2 was .*\); choose"),
    # scores, figures, samples
    (EVAL, gone("run/alra/model", "run/alra/checkpoints"), "run/alra: no model/ in it"), (EVAL, cut("run/alra/model/model.safetensors"), "run/alra/model/model.safetensors: "),
    (EVAL, tensors("run/alra/model/model.safetensors", lambda t: t[NORM].fill_(float("nan"))), f"{NORM} .*finite"),
    (EVAL, put("run/alra/run.json", "{"), "run/alra/run.json: cannot be used"),
    (EVAL, gone("data/val.bin"), "data: no val.bin"), (EVAL, rows("val", filled(1000)), "data/val.bin: .*id"), (f"{EVAL} --out cfg.py", None, "cfg.py"),
    (f"{EVAL} --max_rows 0", None, "--max_rows 0: expected at least 1"), (EVAL.replace("none", "lambada"), None, "--tasks: no .'lambada'. in the heldout set, which has .*lambada_openai"),
    *((SCORE, put(ITEMS, content), f"{ITEMS}|lambada_openai") for content in ("", "{", "[1]", "{}", '{"text": 3}')),
    ("eval.py --table nowhere", None, "nowhere"), ("tools/plot.py nowhere", None, "nowhere"),
    (SAMPLE, put("run/alra/run.json", "{"), "run/alra/run.json: cannot be used"), (SAMPLE, cut("run/alra/model/model.safetensors"), "run/alra/model.*: cannot be used"),
    ("tools/sample.py nowhere", None, "nowhere: no such folder"), *((f"{SAMPLE} {arg}", None, arg[:5]) for arg in ("--temperature=nan", "--temperature=1e-45", "--prompt=\udcff")),
    (SAMPLE, many(edit("run/alra/model/config.json", vocab_size=99), tensors("run/alra/model/model.safetensors", lambda t: t.update({EMBED: t[EMBED][:99].clone()}))), "vocabulary of 99, but its tokenizer has 257"),
    # sources
    *((f"{PREPARE} --source={source}", None, says) for source, says in {"nowhere": "nowhere", "nowhere/x.jsonl": "source=nowhere/x.jsonl: no such file", "cfg.py": "cfg.py"}.items()),
    *((f"{PREPARE} --source={name}", put(name, content), name) for name, content in
      {"a.jsonl": "{", "b.jsonl": b"\xff", "c.jsonl": "{}", "d.jsonl": '{"text": 3}', "e.jsonl": "", "f.jsonl.zst": "x" * 99, "g.parquet": "x" * 99, "h.txt": b"\xff"}.items()),
    (f"{PREPARE} --teacher=none", None, "tokenizer=None, teacher=None"), (f"{PREPARE} --val_rows=1000", None, "leave no row for train"), ("prepare.py cfg.py --seq_len=8", None, "data: holds data of another recipe"),
    (f"{GO_ON} --seq_len=8", None, "stopped: holds data of another recipe"), (GO_ON, put("stopped/prepare.state", "{"), "stopped/prepare.state: cannot be used"),
    (GO_ON, put("stopped/prepare.state", "{}"), "stopped/prepare.state: no ..?recipe..?"), (GO_ON, cut("stopped/train.bin.tmp", 10**6), "stopped/train.bin.tmp: "),
    ("prepare.py --verify data", cut("data/train.bin", 4), "data/train.bin: [0-9,]+ bytes, expected .*prepare it again"), ("prepare.py --verify data", edit("data/train.json", sha256="x"), "train.bin: sha256 is"),
    ("prepare.py --verify nowhere", None, "nowhere: no train.bin with train.json"), ("prepare.py --verify stopped", None, "stopped: not finished"), ("prepare.py --show 9999 data", None, "--show 9999: expected a row from 0"), ("prepare.py --show x data", None, "--show x data: expected"),
]
GO_ON_RIGHTLY = [  # what has to be so afterwards: half has become what run is
    (HALF, None), (HALF, many(put("half/alra/checkpoints/step_00000006.bak/state.json", "{}"), put("half/alra/checkpoints/step_00000009", ""), gone("half/run.json"))),
    (HALF, many(*(put(f"half/{name}", "mine") for name in ("run.json.new", "alra/model.tmp/x", "alra/model.old/x", "alra/checkpoints/step_00000004.tmp/x", "alra/notes.jsonl")))),
    (HALF, many(put("half/.alra-lock", "process 7 on elsewhere, since today"), cut("half/alra/log.jsonl", 1))),
    (HALF, add("half/alra/log.jsonl", '{"step": 4, "lo')), (HALF, gone(STEP)), (f"{HALF} --val_every_steps=2 --keep_checkpoints=1", None),
    # a broken newest checkpoint is passed over for the one before
    *((HALF, do) for do in (gone(STATE), put(STATE, "{"), edit(STATE, sums=...), copy(STEP.replace("3", "2") + f"/{MODEL}", f"{STEP}/{MODEL}"))),
    *((HALF, do(f"{STEP}/{file}")) for do in (gone, cut) for file in (MODEL, "optimizer.safetensors")),
    *((HALF, tensors(f"{STEP}/{file}", lambda t, k=key: t[k].add_(1))) for file, key in ((MODEL, NORM), ("optimizer.safetensors", f"{NORM}/exp_avg"))),
]
# fmt: on
BEGUN = {"train.py": "new", "prepare.py": "rows"}  # what a refused command may leave behind


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Text, teacher, rows, a run that ended, one that was stopped half-way, and items; a copy for tests; its content."""
    w = tmp_path_factory.mktemp("faults") / "kept"
    tokenizer = world.make_tokenizer()
    shape = Qwen2Config(8, 13, 1, 2, 1, vocab_size=259, rope_theta=1e4, max_position_embeddings=64)
    init_student(shape).save_pretrained(w / "student")
    teacher = Qwen2Config(12, 13, 1, 2, 1, vocab_size=259, rope_theta=1e4, max_position_embeddings=64)
    world.make_model(teacher).save_pretrained(w / "teacher", tokenizer)
    world.write_text(w / "text/a.jsonl", 30)
    world.write_text(w / "text/b.jsonl", 10, seed=2)
    put("cfg.py", CONFIG)(w)
    put(ITEMS, "".join(json.dumps({"text": f"the cat saw {n} old boats"}) + "\n" for n in range(4)))(w)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(w)
        prepare.prepare(configure.load(["cfg.py"]))
        for flags in ([], ["--out_dir=half", "--max_steps=3"]):
            assert train.distil(configure.load(["cfg.py", *flags])) == 0
        patch.setattr(prepare, "finish", stop)  # before the last commit
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(configure.load(["cfg.py", "--data_dir=stopped"]))
    return shutil.copytree(w, w.parent / "w"), contents(w)


def stop(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.fixture
def folder(pristine, monkeypatch):
    """The copy, which may be broken, as the working directory; afterwards what has changed in it is copied anew."""
    w, kept = pristine
    monkeypatch.chdir(w)
    yield w
    now = contents(w)
    for name in {path.split("/")[0] for path in kept | now if kept.get(path, 0) != now.get(path, 0)}:
        if name in now:
            gone(name)(w)
        if name in kept:
            copy(f"../kept/{name}", name)(w)


def run(command: str, monkeypatch) -> int:
    """A script in this process -> its exit code."""
    script, *argv = shlex.split(command)
    try:
        return configure.guard(lambda: importlib.import_module(script.removesuffix(".py").replace("/", ".")).main(argv))
    except SystemExit as end:
        return end.code


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(("command", "breaks", "says"), CASES, ids=[f"{c[0].split(' ')[0]}: {c[2]}" for c in CASES])
def test_a_broken_input_is_one_line_and_nothing_is_lost(command, breaks, says, folder, monkeypatch, capfd):
    if breaks:
        breaks(folder)
    before = contents(folder)
    code = run(command, monkeypatch)
    err = [line for line in re.split(r"[\r\n]+", capfd.readouterr().err) if re.match(r"\w*(Error|Traceback)", line)]
    assert code == 1 and len(err) == 1 and re.search(says, err[0]), err
    after = contents(folder)
    allowed = BEGUN.get(command.split()[0], "-")
    changed = [name for name in before | after if before.get(name, 0) != after.get(name, 0)]
    assert not [name for name in changed if name.split("/")[0] != allowed], changed


def same_end(a: Path, b: Path) -> bool:
    """Whether two runs have ended with the same bits of their models and the same steps in their logs."""
    names = [f"{m}/model/model.safetensors" for m in ("pretrain", "alra")]
    steps = [[line["step"] for line in world.read_jsonl(out / "alra/log.jsonl")] for out in (a, b)]
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names) and steps[0] == steps[1]


@pytest.mark.parametrize(("command", "breaks"), GO_ON_RIGHTLY)
def test_what_is_broken_without_loss_goes_on_rightly(command, breaks, folder, monkeypatch):
    if breaks:
        breaks(folder)
    mine = {name for name, content in contents(folder).items() if content == b"mine"}
    assert run(command, monkeypatch) == 0 and same_end(folder / "half", folder / "run")
    assert all((folder / name).read_bytes() == b"mine" for name in mine)  # the files of the user are his
    assert not [*folder.rglob("*.alra-*")]


@pytest.mark.parametrize(
    ("text", "n"), [('{"a": 1}\n{"a": {"b": 2}}', 2), ('{"a": 1}\n{"a": {"b": 2}', 1), ('{"a"', 0)]
)
def test_a_last_line_without_its_end_is_read_if_complete_and_the_next_has_a_line_of_its_own(text, n, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    records = [{"a": 1}, {"a": {"b": 2}}][:n]
    assert files.read_lines(file) == records
    files.append_line(file, {"c": 3})
    assert world.read_jsonl(file) == files.read_lines(file) == [*records, {"c": 3}]


def test_finished_runs_and_rows_are_left_alone_or_mended(folder, monkeypatch, capsys):
    before = contents(folder / "data")
    assert run("prepare.py cfg.py", monkeypatch) == 0 and contents(folder / "data") == before
    assert run(GO_ON, monkeypatch) == 0 and run("prepare.py --verify stopped", monkeypatch) == 0
    assert all((folder / f"stopped/{n}.bin").read_bytes() == before[f"{n}.bin"] for n in ("train", "val"))
    gone("run/alra/model", "run/alra/run.json")(folder)
    assert run(TRAIN, monkeypatch) == 0 and run(EVAL, monkeypatch) == 0 and run(SAMPLE, monkeypatch) == 0


def test_a_run_that_goes_on_is_scored_and_sampled_by_its_newest_checkpoint(folder, monkeypatch, capsys):
    """Or by the one that is named; nothing is written into its folder, where checkpoints are removed."""
    gone(*(f"half/{method}/{name}" for method in ("pretrain", "alra") for name in ("model", "run.json")))(folder)
    before = contents(folder / "half")
    for name, steps in (("half", [3, 3]), ("half/alra", [3]), ("half/alra/checkpoints/step_00000002", [2])):
        assert run(EVAL.replace("run/alra", name), monkeypatch) == 0
        told = re.findall(
            r"scoring (\S+)/checkpoints/step_0000000(\d), of a training that goes on", capsys.readouterr().err
        )
        assert [int(step) for _, step in told] == steps
        for out, step in told:
            file = folder / "out/eval" / f"{out.replace('/', '_')}_step_0000000{step}" / "figures.json"
            assert json.loads(file.read_text())["run"]["step"] == int(step)
        if name != "half":
            assert run(SAMPLE.replace("run/alra", name), monkeypatch) == 0
    assert contents(folder / "half") == before


@pytest.mark.parametrize(("command", "place"), [(HALF, "half"), (EVAL, "run/alra"), (GO_ON, "stopped")])
def test_a_folder_at_which_another_process_is_at_work_is_refused(command, place, folder, monkeypatch, capsys):
    before = contents(folder)
    with files.locked(folder / place, RuntimeError()):
        assert run(command, monkeypatch) == 1
    assert f"another {command.split()[0]} is" in capsys.readouterr().err and contents(folder) == before


def test_an_empty_library_in_the_compile_cache_is_removed_unless_it_is_being_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name, content in (("aa/empty.so", ""), ("aa/whole.so", "x"), ("ab/new.so", ""), ("ab/a.py", "")):
        put(name, content)(tmp_path)
        os.utime(tmp_path / name, (0, 0) if name != "ab/new.so" else None)
    repair_compile_cache()
    assert {p.name for p in tmp_path.glob("*/*")} == {"whole.so", "new.so", "a.py"}
    assert "empty.so, which is empty" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code", "says"), [
    (MemoryError("Unable to allocate 8 PiB"), 1, "MemoryError: Unable to allocate 8 PiB"), (KeyboardInterrupt(), 130, "\nstopped"),
    (torch.OutOfMemoryError("CUDA"), 1, "UserError: out of memory on cpu: set a micro_batch below 2, --recompute=True, or fewer methods"),
])  # fmt: skip
def test_a_run_that_ends_while_it_loads_is_one_line_and_leaves_nothing(error, code, says, folder, monkeypatch, capsys):
    monkeypatch.setattr(train, "open_teacher", mock.Mock(side_effect=error))
    assert run(NEW, monkeypatch) == code and capsys.readouterr().err == f"{says}\n" and not (folder / "new").exists()


def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(folder, monkeypatch, capsys):
    """As `| head -1` leaves it, or Ctrl-C with `| tee`, before the checkpoint."""
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, open(write, "w") as unread:
        patch.setattr(sys, "stdout", unread)
        assert run(NEW, patch) == 0
        print("Python's own last words", flush=True)
    assert not capsys.readouterr().err and same_end(folder / "new", folder / "run")
