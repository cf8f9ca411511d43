"""Every command of README.md, docs/ and docstrings, run as written but for its size; their code.

And what the pages say of files, layers, keys, ratios and data is what is there.
"""

import ast
import glob
import graphlib
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
import torch
import transformers
import zstandard

import configure
import eval as ev
import losses
import train
from demo import check
from lib import tasks
from tests import world
from tests.test_losses import assert_same_loss, case
from tests.world import ROOT
from tools import plot

README = (ROOT / "README.md").read_text()
# docs/compared.md names files of other projects
DOCS = [file for file in sorted(ROOT.glob("docs/*.md")) if file.stem != "compared"]
PAGES = "\n".join([README, *(file.read_text() for file in DOCS)])
SCRIPTS = sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("tools/*.py")) + [ROOT / "demo/make.py"]
CONFIGS = sorted(ROOT.glob("config/*.py"))
# What is added to a command, by its first words, so that it ends in seconds; later flags win.
SHORT = (
    "--student=16x1x2 --seq_len=16 --device=cpu --compile=false --max_steps=2 --schedule_steps=2 "
    "--warmup_steps=1 --batch_rows=2 --micro_batch=2 --group=1 --dtype=float32 "
    "--teacher=demo/teacher "
)
TRAIN = (
    "--tokenizer=none --val_max_rows=2 --val_every_steps=2 --checkpoint_every_steps=2 "
    "--repeat_rows=true --shard=1 --timeout_minutes=1"
)
PREPARE = (
    "--source=text.jsonl --tokenizer=demo/teacher --n_documents=none --train_rows=none "
    "--val_share=0 --val_rows=4"
)
MORE = {
    # other rows than those of the command before it
    "prepare.py config/alra_200m.py --source=pile/2": (
        f"{SHORT} {PREPARE} --n_documents=9 --val_rows=3"
    ),
    "prepare.py": SHORT + PREPARE,
    "train.py": SHORT + TRAIN,
    "eval.py --table": "",
    "eval.py": "--tasks none --max_rows 2 --device cpu",
    "tools/sample.py": "--tokens 3",
}


def commands(text):
    """Return indented commands and those in ```sh blocks.

    A backslash continues a line. What follows two spaces or stands in brackets explains a command.
    """
    text = re.sub(r"\\\n +", "", text)
    script = r"(?:python|torchrun|make) (?=\S*[./]|\w+$|--)"
    lines = re.findall(rf"^ {{0,4}}({script}.+?)(?: {{2,}}.*| \[.*)?$", text, re.M)
    return [command for line in lines for command in line.split(" && ")]


def all_commands():
    makefile = (ROOT / "Makefile").read_text()
    texts = [re.sub("<!-- step 3.*?```.*?```", "", PAGES, flags=re.S)]
    for file in SCRIPTS:
        texts.append(ast.get_docstring(ast.parse(file.read_text()), clean=False) or "")
    texts.append(re.sub(r"^\t\$\(BIN\)/", "    ", makefile, flags=re.M))
    order = ("make.py text", "prepare.py config", "train.py", "eval.py out")  # others read these

    def place(command):
        return next((i for i, start in enumerate(order) if start in command), len(order))

    return sorted(dict.fromkeys(commands("\n".join(texts))), key=place)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A folder with what the scripts read, and a little text, also in place of the demo's."""
    for name in ("config", "demo", "study"):
        shutil.copytree(ROOT / name, tmp_path / name)
    lines = [f"A line of text. Another one, number {i}, which says more!\n" for i in range(40)]
    record = json.dumps({"text": "".join(lines), "meta": {}}) + "\n"  # as in The Pile
    (tmp_path / "text.jsonl").write_text(record * 20)
    (tmp_path / "demo/text.jsonl.zst").write_bytes(zstandard.compress(record.encode() * 20))
    lock = (ROOT / "requirements.lock").read_text()  # a package or two for demo/make.py
    few = re.findall("^(?:#|click==|packaging==).*", lock, re.M)
    (tmp_path / "requirements.lock").write_text("\n".join(few))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(copy, monkeypatch, capfd):
    """run(command) -> what it printed.

    Scripts run in this process, of several processes one. Rows and runs that they need are made
    first.
    """

    def run(command):
        # runs that belong together
        command = command.replace("out/*/*", "out/demo/*").replace("out/*", "out/demo")
        command = re.sub(r"step_\d{8}", "step_00000002", command)
        words = shlex.split(re.sub(r"^(python|torchrun( --\S+)*) ", "", command))
        script, *argv = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        # their own tests run them
        if script in ("study/compare.py", "tools/bench.py", "tools/gpu.py"):
            return str(module.arguments(argv))
        if script == "train.py":
            cfg = configure.load(argv)
            shutil.rmtree(cfg.out_dir, ignore_errors=True)
            provide(cfg.data_dir)
        for word in argv:
            provide(word)
        more = [MORE[start] for start in MORE if " ".join(words).startswith(start)]
        argv += shlex.split(more[0]) if more else []
        if "--resume_from" in command:
            argv += ["--max_steps=3", "--schedule_steps=3"]
        monkeypatch.setattr(sys, "argv", [script, *argv])
        try:
            code = 0
            if script == "demo/make.py":
                runpy.run_path(script, run_name="__main__")
            else:
                code = configure.guard(lambda: module.main(argv))
        except SystemExit as end:
            code = end.code
        captured = capfd.readouterr()
        assert not code, f"{command}\n{captured.out[-2000:]}\n{captured.err[-2000:]}"
        return captured.out

    def provide(word):
        """Make the rows or the run that a word names."""
        name = re.match(r"(out|data)/([\w-]+)", word)
        if name and not Path(name[0]).exists():
            config = f"config/{name[2]}.py"
            if not Path(config).is_file():
                config = "config/demo.py"
            script = {"out": "train.py", "data": "prepare.py"}[name[1]]
            run(f"python {script} {config} --{name[1]}_dir={name[0]}")

    return run


@pytest.mark.slow
def test_every_command_runs(run, monkeypatch):
    # tested elsewhere
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    found = all_commands()
    assert len(found) > 40
    for script in ("torchrun", "tools/plot.py", "make demo"):
        assert any(script in command for command in found)
    for command in found:
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in (ROOT / "Makefile").read_text()
        else:
            assert run(command).strip(), command


@pytest.mark.slow
def test_an_objective_is_added_in_three_steps(run, copy, monkeypatch):
    """The blocks run where the pages say, and the commands after them: train, eval, plot."""
    steps = dict(re.findall(r"<!-- (step \d|optimizers) -->\n```\w+\n(.*?)```", PAGES, re.S))
    assert list(steps) == ["step 1", "step 2", "step 3", "optimizers"]
    monkeypatch.setitem(losses.METHODS, "sqrt_kd", None)
    world.import_objective(steps["step 1"] + steps["step 2"], copy)
    printed = [run(command) for command in steps["step 3"].splitlines()]
    assert "sqrt_kd tau=1.5" in printed[2] and (copy / "out/sqrt_kd/curves.png").is_file()

    edited = dict(train.__dict__)
    make_student = inspect.getsource(train.make_student)
    line = "    return Student("
    assert make_student.count(line) == 1
    exec(make_student.replace(line, steps["optimizers"] + line), edited)
    monkeypatch.setattr(train, "make_student", edited["make_student"])
    cfg = configure.load(f"config/demo.py {SHORT} {TRAIN} --out_dir=out/muon".split())
    muon, adamw = train.make_student("alra", cfg).optimizers
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (20 * cfg.lr, cfg.lr)
    assert train.distil(cfg) == 0


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_commands_above_a_config_are_of_that_config(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = f"config/{file.name}"
    cfg = configure.load([config])
    assert cfg.out_dir == f"out/{file.stem}"
    found = commands(re.sub(r"^#", "", file.read_text(), flags=re.M))
    assert found
    for command in found:
        script, *argv = re.sub(r"^.*?(?=\w+\.py)", "", command).split()
        if script in ("train.py", "prepare.py"):
            assert configure.load(argv).data_dir == cfg.data_dir
            assert config in argv or script == "prepare.py"
        elif script == "eval.py":
            args = ev.arguments(argv)
            assert args.paths[0].removeprefix(cfg.out_dir) in ("", f"/{cfg.methods[0]}")
            tasks.choose_tasks(args.tasks, args.split)
            # the paper's studies of 550M tokens are scored on the validation sets
            split = "validation" if cfg.max_steps == 67_200 else "heldout"
            assert args.table or args.split == split


def cells(heading):
    """The rows of the first table under a heading, without its head."""
    section = PAGES[PAGES.index(f"\n## {heading}\n") :].split("\n## ")[1]
    rows = [line.strip("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows[2:]]


def test_the_demo_is_checked_against_the_table_of_readme():
    for method, ce in check.EXPECTED.items():
        assert re.search(rf"\| {method} [^|]*\| {ce:.4f} ±", README)


def test_the_files_that_are_named_are_there():
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.md|/))`", PAGES))
    folders = ("", "lib", "run", "tools", "study", "tests", "config")
    for name in named:
        made_by_a_run = re.match(r"out/|data/|texts/|modules/|model/", name)
        assert made_by_a_run or any((ROOT / at / name).exists() for at in folders), name
    for file in (ROOT / "README.md", ROOT / "study/README.md", *DOCS):
        for name in re.findall(r"\]\(([\w./]+)[)#]", file.read_text()):
            assert (file.parent / name).exists(), name


# The only ones that import a script; study/compare.py starts train.py and eval.py as processes.
DRIVERS = """
tools.gpu train
tools.gpu tools.bench
study.compare study.record
study.compare study.report
study.report study.record
study.report tools.plot
""".splitlines()


def imports(module, indent):
    """What a module imports in lines with this indentation, such as train or lib.files."""
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    lines = re.findall(rf"^{indent}(?:from (.+) )?import (.+)", text, re.M)
    paths = [f"{start}.{name}" for start, names in lines for name in names.split(", ")]
    names = set()
    for path in paths:
        top, *rest = re.findall(r"\w+", path)
        names.add(f"{top}.{rest[0]}" if (ROOT / top).is_dir() else top)
    return names


def test_imports_point_down_the_five_layers():
    """Those inside functions too. None runs up, none into a script, and there are no cycles."""
    layers = {name.strip("`/"): int(layer) for layer, name, _ in cells("Files") if layer}
    assert sorted(set(layers.values())) == [1, 2, 3, 4, 5]
    graph = {}
    for name in layers:
        for file in [*ROOT.glob(f"{name}/*.py"), *ROOT.glob(name)]:
            if file.suffix == ".py":
                module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
                graph[module] = imports(module, "")
                for other in imports(module, " *"):
                    top = other.split(".")[0]
                    layer = layers.get(top, layers.get(f"{top}.py", 0))
                    assert layer <= layers[name], f"{module} imports {other}"
                    if layer >= 4:
                        assert f"{module} {other}" in DRIVERS
    assert len(graph) > 35
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_choices_name_real_keys():
    choices = [row[-1] for row in cells("Choices that the paper leaves open")]
    text = " ".join(choices)
    keys = set(re.findall(r"`(\w+)`", text))
    assert len(choices) > 20 and len(keys) > 5 and keys <= configure.KINDS.keys()
    settings = re.findall(r"`(?!config|eval)(\w+)\.(\w+)`", text)
    assert len(settings) > 8
    for method, key in settings:
        assert key in losses.default_settings(losses.METHODS[method].fn)
    flags = set(re.findall(r"`--(\w+)`", text))
    assert flags and flags <= vars(ev.arguments(["x"])).keys()


def test_the_glossary_has_every_word_of_the_log():
    page = (ROOT / "docs/learning.md").read_text()
    for word in (*plot.LOGGED, *plot.PANELS):
        assert f"`{word}`" in page


# --- LESSON.md

LESSON = (ROOT / "LESSON.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", LESSON, re.S))


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("n", "v"), [(1, 26), (7, 31), (23, 1009)])
@pytest.mark.parametrize("name", ["vanilla_kd", "alra"])
def test_the_losses_on_the_board_are_those_of_losses_py(name, n, v, ties):
    z_s, z_t, y = case(n, n, v, student=3.0, ignored=range(1, n, 3))
    if ties:
        z_s = z_s.round()
        z_t = z_t.round()
    assert_same_loss(run_blocks(name)[name], name, z_s, z_t, y, w_kd=1.0, w_ce=0.0)


def run_blocks(*blocks):
    names = {"torch": torch, "F": torch.nn.functional}
    for block in blocks:
        exec(BLOCKS[block], names)
    return names


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_answers_to_the_exercises_run(n, capsys):
    """They hold the assertions that matter."""
    run_blocks("vanilla_kd", "alra", f"exercise_{n}")
    assert re.search(r"\d\.\d\d", capsys.readouterr().out)


def test_the_example_prints_what_the_page_says(capsys):
    run_blocks("alra", "example")
    assert f"```text\n{capsys.readouterr().out}```" in LESSON


@pytest.mark.slow  # its imports are those of the example, in the same process
def test_a_trainer_has_the_loss_of_alra(tiny, tmp_path):
    load = transformers.AutoModelForCausalLM.from_pretrained
    student = load(tiny / "student")
    teacher = load(tiny / "teacher")
    ids = [*range(9)]
    x = torch.tensor([ids, ids])
    z_s = student(x).logits[:, :-1].flatten(0, 1)
    z_t = teacher(x).logits[:, :-1].flatten(0, 1)
    loss, _ = losses.method_loss("alra", z_s, z_t.detach(), x[:, 1:].flatten())
    args = transformers.TrainingArguments(
        tmp_path,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    rows = [{"input_ids": ids, "labels": [losses.IGNORE, *ids[1:]]}] * 8
    names = globals() | locals()
    exec(BLOCKS["trainer"], names)
    first, *_ = names["trainer"].state.log_history
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-3)


def test_the_tables_of_the_demo_are_those_of_one_run(tmp_path, capsys):
    """Of `make demo`: runs.zip has run.json, log.jsonl and results.jsonl of its students.

    And results.jsonl of the students of three temperatures, in the folder tau.
    """
    shutil.unpack_archive(ROOT / "docs/lesson/runs.zip", tmp_path)
    readme = README.replace("\n    |", "\n|")
    for folder, pages in (("", (readme, LESSON)), ("/tau", (LESSON,))):
        ev.main(["--table", f"{tmp_path}{folder}"])
        (table, *_) = re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.M)
        assert table.count("\n") > 4
        assert all(table in page for page in pages)
    ces = re.findall(r"^\| alra \| ([\d.]+)", LESSON, re.M)
    assert re.findall(r"ALRA's student above.* ([\d.]+) \|", LESSON) == [f"{float(ces[0]):.3f}"]


def test_the_commands_are_read():
    lines = [shlex.split(command)[1:] for command in commands(LESSON)]
    assert len(lines) > 8
    for script, *argv in lines:
        assert (ROOT / script).is_file()
        if script in ("prepare.py", "train.py"):
            configure.load([f"{ROOT}/{argv[0]}", *argv[1:]])
        elif script == "eval.py":
            ev.arguments(argv)
