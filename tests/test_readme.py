"""Every command of README.md, docs/ and the scripts' docstrings, run once as written but for its size, and their code."""

import ast
import glob
import importlib
import inspect
import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import zstandard

import configure
import eval as ev
import losses
import train
from lib import tasks
from tests.world import ROOT

README = (ROOT / "README.md").read_text()
DOCS = sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs" / "compared.md"})  # which names files of other projects
PAGES = "\n".join([README, *(file.read_text() for file in DOCS)])
SCRIPTS = [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("tools/*.py")), ROOT / "demo" / "make.py"]
CONFIGS = sorted(ROOT.glob("config/*.py"))
# What is added to a command, by its first words, so that it ends in seconds without the hub; later flags win.
MORE = {
    "prepare.py --": "",
    "prepare.py": "--source=text.jsonl --tokenizer=demo/teacher --n_documents=none --train_rows=none --val_share=0 --val_rows=4 --seq_len=16 "
    "--teacher=demo/teacher --student=16x1x2 --device=cpu --compile=false --max_steps=2 --schedule_steps=2 --warmup_steps=1 --batch_rows=2 --micro_batch=2 --group=1 --dtype=float32",
    "train.py": "--teacher=demo/teacher --tokenizer=none --student=16x1x2 --seq_len=16 --device=cpu --compile=false --max_steps=2 --schedule_steps=2 "
    "--warmup_steps=1 --batch_rows=2 --micro_batch=2 --group=1 --val_max_rows=2 --val_every_steps=2 --checkpoint_every_steps=2 --repeat_rows=true --dtype=float32 --shard=1 --timeout_minutes=1",
    "eval.py --table": "",
    "eval.py": "--tasks none --max_rows 2 --device cpu",
    "tools/sample.py": "--tokens 3",
}  # fmt: skip


def commands(text: str) -> list[str]:
    """Indented commands and those in ```sh blocks; what follows two spaces or stands in brackets explains them."""
    found = re.findall(r"^ {0,4}((?:python|torchrun|make) (?=\S*[./]|\w+$|--).+?)(?: {2,}.*| \[.*)?$", text, re.M)
    return [command for line in found for command in line.split(" && ")]


def in_docstrings() -> list[str]:
    return [c for file in SCRIPTS for c in commands(ast.get_docstring(ast.parse(file.read_text()), clean=False) or "")]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder with what the scripts read, and a little text in the layout of The Pile, which also stands in for the demo's."""
    for name in ("config", "demo", "results"):
        shutil.copytree(ROOT / name, tmp_path / name)
    texts = [f"A line of text. Another one, number {i}, which says more!\n" * 40 for i in range(20)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts))
    compressed = zstandard.compress((tmp_path / "text.jsonl").read_bytes())
    (tmp_path / "demo/text.jsonl.zst").write_bytes(compressed)
    lock = (ROOT / "requirements.lock").read_text().splitlines()  # a package or two for demo/make.py
    few = [lock[0], *(line for line in lock if line.startswith(("click==", "packaging==")))]
    (tmp_path / "requirements.lock").write_text("\n".join(few))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(copy, monkeypatch, capfd):
    """run(command) -> what it printed. Scripts run in this process, of several processes one; rows and runs that they need are made first."""

    def run(command: str) -> str:
        command = command.replace("out/*/*", "out/demo/*").replace("out/*", "out/demo")  # runs that belong together
        command = re.sub(r"step_\d{8}", "step_00000002", command)
        words = shlex.split(re.sub(r"^(python|torchrun( --\S+)*) ", "", command))
        script, *argv = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
        module = script.removesuffix(".py").replace("/", ".")
        if script == "tools/bench.py" or (script == "tools/compare.py" and "results/" not in command):
            argv += ["--tiny"] if "gpu" in argv else []
            return str(importlib.import_module(module).arguments(argv))  # test_bench.py and test_compare.py run them
        if script == "train.py" and argv != ["--help"]:
            cfg = configure.load(argv)
            shutil.rmtree(cfg.out_dir, ignore_errors=True)
            provide(cfg.data_dir)
        for word in argv:
            provide(word)
        more = next((more for start, more in MORE.items() if " ".join(words).startswith(start)), "")
        more += " --max_steps=3 --schedule_steps=3" if "--resume_from" in command else ""
        words = [*argv, *shlex.split(more)]
        monkeypatch.setattr(sys, "argv", [script, *words])
        try:
            code = 0
            if script == "demo/make.py":
                runpy.run_path(script, run_name="__main__")
            else:
                code = configure.guard(lambda: importlib.import_module(module).main(words))
        except SystemExit as end:
            code = end.code
        said = capfd.readouterr()
        assert not code, f"{command}\n{said.out[-2000:]}\n{said.err[-2000:]}"
        return said.out

    def provide(word: str) -> None:
        name = re.match(r"(out|data)/([\w-]+)", word)
        if name and not Path(name[0]).exists():
            config = f"config/{name[2]}.py" if Path(f"config/{name[2]}.py").is_file() else "config/demo.py"
            how = "train.py {} --out_dir={}" if name[1] == "out" else "prepare.py {} --data_dir={}"
            run("python " + how.format(config, name[0]))

    return run


def all_commands() -> list[str]:
    order = ("make.py text", "prepare.py config", "train.py", "eval.py out")  # what others read comes first
    made = re.sub(r"^\t\$\(BIN\)/", "    ", (ROOT / "Makefile").read_text(), flags=re.M)
    found = re.sub("<!-- step 3.*?```.*?```", "", PAGES, flags=re.S)
    found = dict.fromkeys([*commands(found), *in_docstrings(), *commands(made)])
    return sorted(found, key=lambda c: next((i for i, start in enumerate(order) if start in c), len(order)))


@pytest.mark.slow
def test_every_command_runs(run, monkeypatch):
    for slow in ("matplotlib.figure.Figure.set_layout_engine", "lib.report.figures"):  # tested elsewhere
        monkeypatch.setattr(slow, lambda *_, **__: ())
    made = all_commands()
    scripts = ("prepare.py --verify", "torchrun", "tools/plot.py", "make demo")
    assert len(made) > 40 and all(any(script in c for c in made) for script in scripts)
    for command in made:
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in (ROOT / "Makefile").read_text()
        else:
            assert run(command).strip(), command


@pytest.mark.slow
def test_an_objective_is_added_in_three_steps_as_the_readme_says(run, copy, monkeypatch):
    """The blocks of code are run where the README says, and its commands after them: train, eval, table, plot."""
    steps = dict(re.findall(r"<!-- (step \d|extras|hidden states) -->\n```\w+\n(.*?)```", PAGES, re.S))
    assert list(steps) == ["step 1", "step 2", "step 3", "extras", "hidden states"]
    monkeypatch.setattr(losses, "sqrt_kd", None, raising=False)
    monkeypatch.setitem(losses.METHODS, "sqrt_kd", None)
    exec(steps["step 1"] + steps["step 2"], losses.__dict__)
    said = {command.split()[1]: run(command) for command in steps["step 3"].splitlines()}
    assert "sqrt_kd tau=1.5" in said["eval.py"] and (copy / "out/sqrt_kd/curves.png").is_file()
    z, y = torch.randn(7, 11), torch.arange(7).where(torch.arange(7) != 2, losses.IGNORE)
    assert losses.sqrt_kd(z, z, y).abs().max() < 1e-6 and losses.sqrt_kd(z, -z, y)[2] == 0
    names = dict(train.__dict__)
    places = {"hidden states": "        for s, (loss, terms) in zip(students", "extras": "    if cfg.compile:\n"}
    for name, place in places.items():
        function = inspect.getsource(getattr(train, "accumulate" if name == "hidden states" else "make_student"))
        assert function.count(place) == 1
        exec(function.replace(place, steps[name] + place), names)

    def frozen(name, cfg, tokenizer):
        """With its first layer frozen and another optimizer."""
        s = names["make_student"](name, cfg, tokenizer)
        s.model.model.layers[0].requires_grad_(False)
        s.optimizer = torch.optim.SGD([p for p in s.parameters().values() if p.requires_grad], momentum=0.9)
        return s

    run("python prepare.py config/demo.py")
    runs = {name: copy / "out" / name / "vanilla_kd" for name in ("plain", "whole", "cut")}
    for name, n in (("plain", 1), ("whole", 3), ("cut", 1), ("cut", 3)):  # one that is cut goes on with the same bits
        if name == "whole":
            monkeypatch.setattr(train, "accumulate", names["accumulate"])
            monkeypatch.setattr(train, "make_student", frozen)
        keys = f"--methods=vanilla_kd --log_every_steps=1 --schedule_steps=3 --max_steps={n} --out_dir=out/{name}"
        assert train.distil(configure.load(["config/demo.py", *shlex.split(f"{MORE['train.py']} {keys}")])) == 0
    first, line = (json.loads((runs[name] / "log.jsonl").read_text().splitlines()[0]) for name in ("plain", "whole"))
    assert line["far"] > 0 and line["ce"] == first["ce"] and line["gnorm"] != first["gnorm"]
    for file in ("model/model", "extras", "optimizer"):
        one, two = (runs[name] / f"checkpoints/step_00000003/{file}.safetensors" for name in ("whole", "cut"))
        assert one.read_bytes() == two.read_bytes()
    assert "vanilla_kd" in run("python eval.py out/whole --tasks none")
    saved = safetensors.torch.load_file(runs["cut"] / "model/model.safetensors")
    assert saved and not any("up" in name.split(".") for name in saved)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_commands_above_a_config_are_of_that_config(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, cfg = f"config/{file.name}", configure.load([f"config/{file.name}"])
    made = [shlex.split(c) for c in commands(re.sub(r"^#", "", file.read_text(), flags=re.M))]
    assert cfg.out_dir == f"out/{file.stem}" and made
    for words in made:
        script = next((word for word in words if word.endswith(".py")), None)
        argv = words[words.index(script) + 1 :] if script else []
        if script in ("train.py", "prepare.py"):
            assert configure.load(argv).data_dir == cfg.data_dir and (name in argv or script == "prepare.py")
        elif script == "eval.py":
            args = ev.arguments(argv)
            assert args.paths[0] in (cfg.out_dir, *(f"{cfg.out_dir}/{method}" for method in cfg.methods)), args.paths
            tasks.choose_tasks(args.tasks, args.split)
            if not args.table:  # the paper's studies of 550M tokens are scored on the validation sets
                assert args.split == ("validation" if cfg.max_steps == 67_200 else "heldout")


def section(heading: str) -> str:
    return PAGES[PAGES.index(f"\n## {heading}\n") :].split("\n## ")[1]


def cells(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    rows = [line.strip("|") for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows[2:]]


def test_the_files_that_are_named_are_there():
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.md|/))`", PAGES))
    made = re.compile(r"out/|data/|texts/|model/|config\.json")
    assert all(
        made.match(name) or any((ROOT / at / name).exists() for at in ("", "lib", "tools", "tests", "config"))
        for name in named
    ), named
    links = {file.parent / name for file in (ROOT / "README.md", *DOCS) for name in re.findall(r"\]\(([\w./]+)[)#]", file.read_text())}  # fmt: skip
    assert all(path.exists() for path in links), links
    folders = {"config/", "lib/", "tools/", "demo/", "tests/", "results/", "docs/"}
    assert {path.name for path in ROOT.glob("*.py")} | folders <= named


def test_imports_in_lib_point_one_way():
    first, second = re.findall(r"^\|.*\| what (?:knows|does)(.*)", README, re.M)
    early, later = re.findall(r"`(\w+)`", first), re.findall(r"`(\w+)`", second)
    every = {file.stem for file in (ROOT / "lib").glob("*.py")} - {"__init__"}
    assert sorted([*early, *later]) == sorted([*every, "configure", "losses", "model"])
    files = {name: (ROOT / "lib" / f"{name}.py").read_text() for name in early}
    assert not [n for n, text in files.items() if re.search(rf"^from (lib\.)?({'|'.join(later)})\b", text, re.M)]


def test_the_choices_name_real_keys():
    choices = cells("Choices that the paper leaves open")
    named = re.findall(r"`(\w+)`", " ".join(row[-1] for row in choices))
    assert len(choices) > 20 and len(named) > 5 and set(named) - {"eval.py"} <= configure.KINDS.keys()
    hyper = re.findall(r"`(?!config|eval)(\w+)\.(\w+)`", " ".join(row[-1] for row in choices))
    assert len(hyper) > 8 and all(key in losses.settings(method) for method, key in hyper), hyper
    flags = set(re.findall(r"`--(\w+)`", " ".join(row[-1] for row in choices)))
    assert flags and flags <= vars(ev.arguments(["x"])).keys()


def test_every_ratio_of_speed_is_in_the_file_that_is_named():
    speed = section("Memory and speed")
    files = "".join((ROOT / name).read_text() for name in re.findall(r"(results/bench/\w+\.md)", speed))
    assert files and all(ratio in files for ratio in re.findall(r"\b\d\.\d\d\b(?!\.)", speed))


def test_data_is_what_the_code_reads():
    from lm_eval.tasks._yaml_loader import load_yaml

    named = re.findall(r"hub, `([^`]+)`(?:, commit `(\w{8})`)?", PAGES)
    files = [load_yaml(tasks.task_file(n), resolve_func=False) for n in tasks.TASKS if n != "storycloze_2016"]
    pinned = [name.split("@") for name in (configure.CORPUS, configure.TEACHER)]
    assert set(named) == {(name, commit[:8]) for name, commit in pinned} | {(f["dataset_path"], "") for f in files}
