"""Every command and every line of code that the README shows, run as it stands but for its size."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked, plain

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()

TINY = "--device=cpu --max_steps=2 --schedule_steps=2 --warmup_steps=1 --val_every_steps=2 --checkpoint_every_steps=2 --val_max_rows=2"
SMALL = f"{TINY} --batch_rows=2 --micro_batch=2"
QUICK = "--methods=vanilla_kd,alra --tune=none --seeds=1 --rows=4 --source=text.jsonl --val_share=0 --val_rows=8"
REAL = f"{TINY} --teacher=demo/teacher --student=16x1x2 --batch_rows=2 --compile=false"  # the teacher of the paper is on the hub
# Each command of the README -> what is added so that it ends in seconds without a hub; None: it is not run here.
# The commands of one chain need what earlier ones of that chain have made.
CHAINS = {
    "paper": {
        "python prepare.py config/alra_200m.py": "--source=text.jsonl --tokenizer=demo/teacher --n_documents=none --train_rows=40 --val_rows=4",
        "python train.py config/alra_200m.py": REAL,
        "python eval.py out/alra_200m/alra": "--tasks none --max_rows 2 --device cpu",
        "python eval.py --table out/alra_200m/alra": "",
        "python train.py config/table_main.py": REAL,
        "python eval.py out/table_main": "--tasks none --max_rows 2 --device cpu",
        "torchrun --nproc_per_node=2 train.py config/alra_200m.py": f"{REAL} --out_dir=out/two",
        "python train.py config/alra_200m.py --methods=tad --out_dir=out/tad_200m": REAL,
        "python train.py config/alra_200m.py --methods=alra,tad --lr=3e-4 --alra.gamma=3 --out_dir=out/try": REAL,
    },
    "own": {
        "python prepare.py config/demo.py --source=text.jsonl --data_dir=data/mine": "--val_share=0 --val_rows=4",
        "python train.py config/demo.py --data_dir=data/mine --out_dir=out/mine": SMALL,
        "python eval.py out/mine --tasks none": "--max_rows 2 --device cpu",
        "python prepare.py config/smollm2_30m.py --source=texts/": "--source=text.jsonl --teacher=demo/teacher --val_share=0.2",
        "python train.py config/smollm2_30m.py": f"{SMALL} --teacher=demo/teacher --student=16x1x2 --compile=false",
    },
    "demo": {
        "make demo": "",
        "python prepare.py --show 0 data/demo": "",
        "python prepare.py --verify data/demo": "",
        'python sample.py out/demo/alra --prompt "import os" --tokens 60': "",
        "python plot.py out/demo": "",
        "python plot.py --rows data/demo": "",
    },
    "compare": {
        "python compare.py config/tiny.py --methods=vanilla_kd,alra,skew_fkl --seeds=3": f"{QUICK} {SMALL}",
        "python compare.py config/tiny.py --methods=vanilla_kd,alra,skew_fkl --seeds=3 --print": f"{QUICK} {SMALL} --seeds=2",
        "python compare.py config/tiny.py --methods=vanilla_kd,alra,skew_fkl --seeds=3 --report": "",
        "python train.py config/demo.py --methods=alra,alra@g1,alra@g9,alra@slow --alra@g1.gamma=1 --alra@g9.gamma=9 --alra@slow.lr=1e-3 --out_dir=out/gammas": f"{SMALL} --data_dir=data/tiny --seq_len=64",
    },
    "alone": {
        "make test": None,  # this very run
        "make replicate": None,  # hours; tests/test_compare.py plans it
        "python compare.py config/mini.py --report --results=results/replication": "",
        "python plot.py --pairs --sets --out=out": "",
        "python bench.py fused": "--n=13 --vocab=4096 --d_s=24 --d_t=40 --repeats=1 --methods=vanilla_kd,alra --device=cpu",
    },
}  # fmt: skip


def shown() -> list[str]:
    """The indented commands, in order."""
    return re.findall(r"^    ((?:python|torchrun|make) .+)$", README, re.M)


# Nothing is compiled: `bench.py` would take a minute, and test_fused.py compiles.
ENV = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def sh():
    """sh(command, folder) -> what the command prints."""
    scripts = forked.Scripts(ENV)

    def run(command: str, folder: Path) -> str:
        script = command.split()[1]
        if command.startswith("python ") and script in forked.FORKED and "*" not in command:
            done = scripts.run(command, folder)
        else:
            done = subprocess.run(
                command, shell=True, cwd=folder, capture_output=True, text=True, check=False, timeout=900, env=ENV
            )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    yield run
    scripts.end()


@pytest.fixture
def copy(tmp_path):
    """The project as a fresh clone has it, and a little text in the layout of The Pile."""
    folder = tmp_path / "alra"
    ignore = shutil.ignore_patterns(".git", ".venv", "data", "out", "__pycache__", ".*_cache", "*.tmp")
    shutil.copytree(ROOT, folder, ignore=ignore)
    texts = [f"A line of text. Another one, number {i}, which says more!\\n" * 200 for i in range(20)]
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{text}", "meta": {{}}}}\n' for text in texts))
    return folder


def demo_recipe(folder: Path) -> list[str]:
    """The lines that `make demo` runs once it is set up."""
    (folder / ".venv").mkdir(exist_ok=True)
    (folder / ".venv" / "ready").touch()
    lines = subprocess.run(
        ["make", "-n", "--no-print-directory", "demo"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert lines and all(line.startswith(".venv/bin/python ") for line in lines), lines
    return [line.removeprefix(".venv/bin/") for line in lines]


def test_every_command_is_in_a_chain():
    assert sorted(set(shown())) == sorted(command for chain in CHAINS.values() for command in chain)


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_every_command_runs(chain, copy, sh):
    for command in dict.fromkeys(shown()):  # in the README's order
        if command == "make demo" and chain == "demo":
            for line in demo_recipe(copy):
                of = {"prepare.py": "--n_documents=150", "train.py": SMALL, "eval.py": "--max_rows 4"}
                more = of.get(line.split()[1], "")
                said = sh(f"{line} {more}", copy)
                if "eval.py" in line:
                    assert all(name in said for name in ("pretrain", "vanilla_kd", "alra")), said
            assert (copy / "out" / "demo" / "curves.png").stat().st_size > 10_000
        elif CHAINS[chain].get(command) is not None:
            assert sh(f"{command} {CHAINS[chain][command]}", copy).strip(), command


@pytest.mark.slow
def test_an_objective_is_added_in_three_steps_as_the_readme_says(copy, sh):
    """The blocks of code are pasted where the README says, and its commands are run: train, eval, table, plot."""
    steps = dict(re.findall(r"<!-- (step \d|hidden states) -->\n```\w+\n(.*?)```", README, re.S))
    assert list(steps) == ["step 1", "step 2", "step 3", "hidden states"]
    losses, train = copy / "losses.py", copy / "train.py"
    losses.write_text(f"{losses.read_text()}\n\n{steps['step 1']}\n\n{steps['step 2']}")
    sh("python prepare.py config/demo.py --source=text.jsonl", copy)
    for command in steps["step 3"].splitlines():
        more = {"train.py": f"{SMALL} --student=16x1x2", "eval.py": "--max_rows 2"}.get(command.split()[1], "")
        said = sh(f"{command} {'' if '--table' in command else more}", copy)
        if "eval.py" in command:
            assert "| sqrt_kd tau=1.5 |" in said
    assert "sqrt_kd,kd," in (copy / "out" / "sqrt_kd" / "curves.csv").read_text()
    check = (
        "import torch, losses; z = torch.randn(7, 11); y = torch.arange(7); y[2] = -100; "
        "l = losses.sqrt_kd(z, z, y); print(l.abs().max() < 1e-6, l[2] == 0)"
    )
    assert sh(f'{sys.executable} -c "{check}"', copy).split() == ["tensor(True)", "tensor(True)"]
    code, above = train.read_text(), "        for s, (loss, terms) in zip(students, results, strict=True):\n"
    assert code.count(above) == 1
    train.write_text(code.replace(above, steps["hidden states"] + above))
    sh(f"python train.py config/demo.py --methods=vanilla_kd {SMALL} --student=16x1x2 --out_dir=out/alike", copy)
    lines = [
        json.loads((copy / "out" / run / "vanilla_kd" / "log.jsonl").read_text().splitlines()[0])
        for run in ("sqrt_kd", "alike")
    ]
    assert 0 < lines[1]["alike"] < 1 and lines[1]["gnorm"] != lines[0]["gnorm"]


def test_the_replications_table_is_the_reports():
    report = ROOT / "results" / "replication" / "README.md"
    section = README[README.index("<!-- replication -->") : README.index("<!-- end of replication -->")]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 10 and set(rows) <= set(report.read_text().splitlines())


def test_the_file_table_names_what_is_there():
    named = set(re.findall(r"^\| (`[^|]+`) \|", README, re.M))
    files = {name for cell in named for name in re.findall(r"`([^`]+)`", cell)}
    scripts = {p.name for p in ROOT.glob("*.py")} | {f"lib/{p.name}" for p in (ROOT / "lib").glob("[a-z]*.py")}
    assert scripts <= files and {"config/", "demo/", "tests/", "LOG.md"} <= files, scripts - files
    assert all((ROOT / name).exists() for name in files if name.endswith((".py", "/", ".md")))


def cells(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    section = README[README.index(f"\n## {heading}\n") :].split("\n## ")[1]
    rows = [line.strip("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows[2:]]


def test_the_choices_name_real_keys():
    import configure
    import eval as ev

    choices = cells("Choices that the paper leaves open")
    named = [key for *_, others in choices for key in re.findall(r"`(\w+)`", others)]
    assert len(choices) > 20 and len(named) > 5 and all(len(row) == 3 for row in choices)
    for key in named:
        assert key in configure.TYPES, key
    hyper = [pair for *_, others in choices for pair in re.findall(r"`(?!config|eval)(\w+)\.(\w+)`", others)]
    assert len(hyper) > 8 and all(key in plain.keywords(method) for method, key in hyper), hyper
    flags = [key for *_, others in choices for key in re.findall(r"`--(\w+)`", others)]
    assert {"metric", "limit"} == set(flags) <= vars(ev.arguments(["x"])).keys()


def test_every_row_of_the_speed_table_stands_in_the_file_that_it_names():
    speed = cells("Speed")
    assert len(speed) == 7
    for what, _, time, memory, file in speed:
        line = rf"\| {time} \[[^]]*\] \| {memory or '[^|]*'} \||; {time} of the time of all one by one"
        assert re.search(line, (ROOT / file.strip("`")).read_text()), what


def test_data_is_what_the_code_reads():
    from lm_eval.tasks._yaml_loader import load_yaml

    import configure
    from lib import tasks

    named = re.findall(r"hub, `([^`]+)`(?:, commit `(\w{8})`)?", str(cells("Data and licences")))
    files = [load_yaml(tasks.task_file(n), resolve_func=False) for n in tasks.TASKS if n != "storycloze_2016"]
    pinned = [name.split("@") for name in (configure.CORPUS, configure.TEACHER)]
    assert set(named) == {(name, commit[:8]) for name, commit in pinned} | {(f["dataset_path"], "") for f in files}
