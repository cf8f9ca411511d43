"""Every command in the scripts' docstrings, run as it stands but for its size; those above configs, checked."""

import ast
import glob
import importlib
import re
import runpy
import shlex
import shutil
import sys
import types
from pathlib import Path

import pytest

import bench
import compare
import configure
import eval as ev
import prepare
from lib import tasks

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(ROOT.glob("config/*.py"))
ROWS = "--source=text.jsonl --n_documents=none --val_share=0 --val_rows=4 --seq_len=16"
TRAIN = (
    "--device=cpu --max_steps=2 --schedule_steps=2 --warmup_steps=1 --val_max_rows=2 --val_every_steps=2 "
    "--compile=false --checkpoint_every_steps=2 --seq_len=16 --batch_rows=2 --micro_batch=1 "
    "--teacher=demo/teacher --student=mini"
)
SCORE = "--tasks none --max_rows 2 --device cpu"
# Each command of a docstring -> what is added so that it ends at once without a hub, in the order of running.
COMMANDS = {
    "python prepare.py config/alra_200m.py": f"{ROWS} --tokenizer=demo/teacher --train_rows=1010",
    "python prepare.py --verify data/pile": "",
    "python prepare.py --show 1000 data/pile": "",
    "python train.py config/alra_200m.py": TRAIN,
    "torchrun --nproc_per_node=2 train.py config/alra_200m.py": TRAIN,
    "python train.py config/alra_200m.py --micro_batch=8 --out_dir=out/try": f"{TRAIN} --batch_rows=8 --micro_batch=8",
    "python prepare.py config/demo.py && python train.py config/demo_teacher.py": None,  # in `small`
    "python sample.py out/demo/alra --prompt 'def ' --tokens 80 --temperature 0.8": "--tokens 3",
    "python eval.py out/alra_200m/alra --data_dir data/eval": SCORE,
    "python eval.py out/demo --tasks none": SCORE,
    "python eval.py --table out/*/*": "--mixed",  # they had different rows
    "python eval.py --table out/alra_200m --metric acc_norm": "",
    "torchrun --nproc_per_node=8 eval.py out/alra_200m/alra": SCORE,
    "python plot.py out/demo": "",
    "python plot.py out/alra_200m/alra out/other --out=compare": "",
    "python plot.py out/alra_200m --figures=budget": "",
    "python plot.py --pairs --sets --out=figures": "",
    "python plot.py --rows data/demo": "",
    "python bench.py loss fused rows step prepare eval": "",
    "python bench.py fused --n=1024 --d_s=1024 --repeats=9": "",
    "python bench.py steps --teacher=1.8b --student=500m": "",
    "python bench.py gpu": "--tiny --device=cpu",
    "python bench.py roofline": "",
    "python compare.py config/demo.py --methods=vanilla_kd,alra --seeds=3 --tune=lr=1e-3,3e-3,1e-2": "",
    "python compare.py config/demo.py --methods=vanilla_kd,alra --tune=lr=1e-3,1e-2 --tune=vanilla_kd.tau=0.5,1,2": "",
    "python compare.py config/demo.py --print": "",
    "python compare.py config/demo.py --report": "",
    "python compare.py config/mini.py --jobs=2": "",
    "python demo/make.py weights out/demo_teacher/pretrain/model": "",
    "python demo/make.py tokenizer": "",
}


def commands(lines: list[str]) -> list[str]:
    """Indented commands; what stands behind two spaces or in brackets explains them."""
    found = (re.match(r" {0,4}((?:python|torchrun|make) .+?)(?: {2,}.*| \[.*)?$", line) for line in lines)
    return [" ".join(map(plain, shlex.split(match[1]))) for match in found if match]


def plain(word: str) -> str:
    return word if re.fullmatch(r"[^\s'\"]+", word) else shlex.quote(word)


def in_docstrings() -> list[str]:
    files = [*sorted(ROOT.glob("*.py")), ROOT / "demo" / "make.py"]
    return [
        c
        for file in files
        for c in commands((ast.get_docstring(ast.parse(file.read_text()), clean=False) or "").splitlines())
    ]


def run(command: str, capsys, monkeypatch) -> str:
    """A command's script in this process -> what it printed. Of several processes, one."""
    words = re.sub(r"^(python|torchrun --\S+) ", "", command)
    words = [name for word in shlex.split(words) for name in (sorted(glob.glob(word)) or [word])]
    monkeypatch.setattr(sys, "argv", words)
    try:
        if words[0] == "demo/make.py":
            code = runpy.run_path(words[0], run_name="__main__") and 0
        else:
            code = configure.guard(importlib.import_module(words[0].removesuffix(".py")).main)
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr()
    assert not code, f"{command}\n{told.out[-2000:]}\n{told.err[-2000:]}"
    return told.out


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with what the scripts read, a little text, and stand-ins for what takes hours."""
    for name in ("config", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "demo", tmp_path / "demo")
    text = "A line of text. Another one, which says more!\\n" * 200
    (tmp_path / "text.jsonl").write_text(f'{{"text": "{text}", "meta": {{}}}}\n' * 20)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "SECTIONS", {name: lambda args, device: [] for name in bench.SECTIONS})
    monkeypatch.setattr(compare, "compare", lambda args, spec, loaded: compare.trials(spec.tune, loaded.methods))
    monkeypatch.setattr(compare, "report", lambda spec, source, to: (types.SimpleNamespace(failed=[]), ""))
    monkeypatch.setattr(prepare, "python_documents", lambda: iter([("a", text), ("b", text)]))
    return tmp_path


@pytest.mark.slow
def test_every_command_of_a_docstring_runs(small, capsys, monkeypatch):
    assert set(in_docstrings()) == set(COMMANDS), "docstrings and this test name different commands"
    run(f"python prepare.py config/demo.py {ROWS}", capsys, monkeypatch)
    for config in ("demo", "demo_teacher"):
        run(f"python train.py config/{config}.py {TRAIN} --repeat_rows=true --student={config}", capsys, monkeypatch)
    for command, more in COMMANDS.items():
        if "out/other" in command:
            shutil.copytree("out/alra_200m", "out/other")
        if more is not None:
            assert run(f"{command} {more}", capsys, monkeypatch).strip(), command


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_commands_above_a_config_are_of_that_config(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    header = [line.removeprefix("#") for line in file.read_text().splitlines() if line.startswith("#")]
    found, name = (
        [shlex.split(re.sub(r"^torchrun (--\S+ )+", "python ", c)) for c in commands(header)],
        f"config/{file.name}",
    )
    cfg = configure.load([name])
    assert cfg.out_dir == f"out/{file.stem}"
    assert any(words[1:] == ["train.py", name] for words in found) or file.stem == "demo"
    for words in found:
        script, argv = words[1], words[2:]
        if words[0] == "make":
            assert f"\n{script}:" in (ROOT / "Makefile").read_text()
        elif script in ("train.py", "prepare.py"):
            assert configure.load(argv).data_dir == cfg.data_dir and (name in argv or script == "prepare.py")
        elif script == "compare.py":
            compare.arguments(argv)
        else:
            assert script == "eval.py"
            args = ev.arguments(argv)
            assert args.paths[0] in (cfg.out_dir, *(f"{cfg.out_dir}/{method}" for method in cfg.methods)), args.paths
            tasks.choose_tasks(args.tasks, args.split)
            if not args.table:  # the paper's studies of 550M tokens are scored on the validation sets
                assert args.split == ("validation" if cfg.max_steps == 67_200 else "heldout")


def test_the_runs_of_figures_3_and_4_log_what_they_show():
    for name in ("alra_200m", "alra_500m", "table_main"):
        cfg = configure.load([str(ROOT / "config" / f"{name}.py")])
        n = -(-cfg.max_steps // cfg.histogram_every_steps)
        assert "alra" in cfg.methods and n == 506 and n * cfg.batch_rows == pytest.approx(8_000, rel=0.02)
