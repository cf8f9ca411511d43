"""Config: typed and strict; what it refuses is in test_faults.py too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import configure
import train
from configure import Config, UserError, load
from losses import METHODS, default_settings
from tests.world import ROOT, read_table, refusal


def write(folder, text):
    path = folder / "c.py"
    path.write_text(text)
    return str(path)


def test_files_then_flags(tmp_path):
    text = "import math\n_half = 0.5\nlr = 2 * _half\nmax_steps = schedule_steps = 1_000\n"
    words = "--max_steps=700 --methods=alra,pretrain --teacher=none --val_max_rows=None"
    words += " --compile=true --recompute=false --alra.tau=2 --alra.anchor=none"
    cfg = load([write(tmp_path, text), *words.split()])
    assert (cfg.lr, cfg.max_steps, cfg.schedule_steps) == (1.0, 700, 1000)
    assert cfg.methods == ("alra", "pretrain")
    assert cfg.teacher is None and cfg.val_max_rows is None
    assert cfg.compile is True and cfg.recompute is False
    assert cfg.hyper == {"alra": {"tau": 2, "anchor": "none"}}


# keys => a number that is refused => one that is taken
BOUNDS = """
max_steps schedule_steps batch_rows micro_batch group seq_len log_every_steps => 0 => 1
val_every_steps checkpoint_every_steps keep_checkpoints n_documents train_rows => 0 => 1
val_max_rows histogram_every_steps => 0 => 1
lr min_lr clip adam_eps => 0.0 => 1e-9
weight_decay warmup_steps val_rows seed => -1 => 0
beta1 beta2 val_share => -0.1 => 0.0
lr min_lr clip => NaN => 1e-9
"""


@pytest.mark.parametrize(("keys", "refused", "taken"), read_table(BOUNDS))
def test_each_number_has_its_bound(keys, refused, taken):
    # so that no key contradicts another
    base = {"max_steps": 1, "warmup_steps": 0, "val_rows": 0, "min_lr": 1e-9}
    for key in keys.split():
        with refusal(rf"^{key}=-?[\d.na]+: expected "):
            Config(**{**base, key: json.loads(refused)})
        Config(**{**base, key: json.loads(taken)})


def test_help_says_every_key_with_its_comment_and_the_methods(printed):
    with pytest.raises(SystemExit) as ended:
        train.main(["config/demo.py", "--help"])
    lines = printed().splitlines()
    assert ended.value.code == 0
    assert "        alra_u: w_kd=1.0, w_ce=0.0 {'pair': 'pra_u'}" in lines
    assert "  --methods=alra" in lines
    assert lines[lines.index("  --lr=0.0006") + 1] == "      peak learning rate"
    for name in configure.KINDS:
        (n,) = [n for n, line in enumerate(lines) if line.startswith(f"  --{name}=")]
        assert re.fullmatch(r" {6}\S.+", lines[n + 1]), name


def test_every_field_is_read_somewhere():
    files = [*ROOT.glob("*.py"), *ROOT.glob("run/*.py")]
    code = "".join(path.read_text() for path in files if path.name != "configure.py")
    for key in configure.KINDS:
        assert re.search(rf"\bcfg\.{key}\b|\"{key}\"", code), key


def test_a_setting_of_a_method_is_reached_by_its_name_and_no_other():
    for method, row in METHODS.items():
        for key, value in ({"w_kd": 1.0} | default_settings(row.fn, row.term)).items():
            cfg = load([f"--methods={method}", f"--{method}.{key}={value}"])
            assert cfg.hyper == {method: {key: value}}
            with refusal(re.escape(f"no such key {key!r}")):
                load([f"--{key}=3"])


def test_settings_of_several_sources_add_up(tmp_path):
    text = 'hyper = {"alra": {"gamma": 3.0, "d_max": 7}, "tad": {"beta": 1.0}}\n'
    path = write(tmp_path, text)
    methods = "--methods=alra,tad"
    cfg = load([path, "--alra.gamma=9", methods, "--alra.detach_weights=false"])
    alra = {"gamma": 9, "d_max": 7, "detach_weights": False}
    assert cfg.hyper == {"alra": alra, "tad": {"beta": 1.0}}
    # those of methods that are not run are left out
    assert load([path, "--methods=tad"]).hyper == {"tad": {"beta": 1.0}}
    assert load([path, "--methods=alra@a"]).hyper.keys() == {"alra"}
    cfg = load([path, "--methods=alra,alra@a.1", "--alra@a.1.gamma=1", "--alra@a.1.lr=3e-4"])
    assert cfg.settings_of("alra@a.1") == {"gamma": 1, "d_max": 7, "lr": 3e-4}
    assert cfg.settings_of("alra")["gamma"] == 3
    assert cfg.overrides_of("alra@a.1") == {"gamma": 1, "d_max": 7}
    assert (cfg.lr_of("alra@a.1"), cfg.lr_of("alra")) == (3e-4, 6e-4)


def test_guard_says_in_one_line_what_the_user_can_correct(capsys, monkeypatch):
    def ends(error, code, line, rank="0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert configure.guard(mock.Mock(side_effect=error)) == code
        assert capsys.readouterr().err == line

    error = UserError("lr=0: expected more than 0")
    message = "/no/file: No such file or directory; check that path and its permissions"
    ends(error, 1, f"UserError: {error}\n", rank="1")
    error.is_shared = True
    error.exit_code = 75
    ends(error, 75, f"UserError: {error}\n")
    ends(error, 75, "", rank="1")
    ends(lambda: Path("/no/file").read_text(), 1, f"UserError: {message}\n")
    ends(KeyboardInterrupt, 75, "\nstopped\n")


def test_guard_returns_a_code_and_prints_the_traceback_of_what_nobody_foresaw(capsys):
    assert configure.guard(lambda: 3) == 3
    assert configure.guard(lambda: 1 / 0) == 1
    text = capsys.readouterr().err
    assert "in guard" in text and text.endswith("\nZeroDivisionError: division by zero\n")


def start(arguments, **keys):
    """Run Python on a shell's words, and return how it ended."""
    command = f"{sys.executable} {arguments}"
    keys = {"cwd": ROOT, "capture_output": True, "text": True} | keys
    return subprocess.run(command, shell=True, check=False, **keys)


MISTYPED = """
train.py --lrr=1 => UserError: --lrr=1: no such key 'lrr', did you mean lr? --help
prepare.py --warmup_steps=999 --schedule_steps=999 --max_steps=9 => UserError: warmup_
eval.py x --tasks=foo => UserError: --tasks: no ['foo'] in
tools/sample.py x --temperature=-1 => UserError: --temperature=-1.0: expected float 0 or more
tools/plot.py x --outt=y => usage: plot.py
tools/bench.py --n=9 => UserError: --n=9: no such key 'n'
tools/gpu.py 20m => usage: gpu.py
-c 'import sys; sys.modules["fcntl"] = None; import train' => Windows is not supp
train.py config/tiny.py => train.py: loading torch
"""
CODES = {"usage": 2, "train": 7}  # of argparse, and of the torch that is found here; else 1


@pytest.mark.parametrize(("arguments", "message"), read_table(MISTYPED))
def test_a_mistyped_command_ends_before_torch_is_imported(arguments, message, tmp_path):
    """A right one first says what it does."""
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = start(arguments, env=environment)
    code = CODES.get(re.match(r"\w*", message)[0], 1)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith(message)
    assert code == 2 or ended.stderr.count("\n") == 1


def test_a_script_whose_output_nobody_reads_ends_without_a_word():
    code = "import configure; configure.run(lambda _: [print(i) for i in range(99999)])"
    ended = start(f"-c '{code}' | head -1")
    assert (ended.stdout, ended.stderr) == ("0\n", "")


# appendices B, C.1 and E.1 of the paper; the commits are ours
PAPER = json.loads("""{
"batch_rows": 16, "seq_len": 512, "group": 1,
"lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 512, "schedule_steps": 126400, "clip": 0.5,
"beta1": 0.9, "beta2": 0.98, "adam_eps": 1e-6, "weight_decay": 1e-2, "decay_1d": true,
"seed": 1234, "shuffle": false, "n_documents": 2000000, "train_rows": 2022400, "hyper": {},
"teacher": "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067",
"source": "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119"
}""")
MAIN = "pretrain,vanilla_kd,pd,atkd,rld,ldrld,tad,bild,alra"
TABLES = {  # methods and updates of each table of the paper
    "main": (MAIN, 126_400),
    "pair": ("alra_r,alra_u,alra", 126_400),
    "anchor": ("alra_n,alra_ng,alra,alra_g", 67_200),
    "budget": ("fixed_3,fixed_7,fixed_9,fixed_15,fixed_19,fixed_25,alra", 67_200),
}


@pytest.mark.parametrize("size", ["200m", "500m"])
def test_there_is_a_config_for_every_run_of_the_paper_with_its_numbers(size):
    runs = {}
    for name in MAIN.split(","):
        flags = [f"--methods={name}", f"--student={size}", f"--out_dir=out/{name}_{size}"]
        runs[f"{name}_{size}"] = ("alra_200m", flags, name, 126_400)
    for name, (methods, steps) in TABLES.items():
        flags = [f"--student={size}", f"--out_dir=out/table_{name}_{size}"]
        runs[f"table_{name}_{size}"] = (f"table_{name}", flags, methods, steps)
    for name, (file, flags, methods, steps) in runs.items():
        cfg = load([f"{ROOT}/config/{file}.py", *flags])
        assert (",".join(cfg.methods), cfg.max_steps, cfg.student) == (methods, steps, size), name
        assert cfg.out_dir == f"out/{name}"
        assert {key: getattr(cfg, key) for key in PAPER} == PAPER, name


def test_a_config_file_may_have_helpers_and_numbers_of_numpy(tmp_path):
    text = (
        "import os, numpy as np\nfrom pathlib import Path\ndef f(x): return x\nlr = np.float32(1)\n"
        "seed = f(np.int64(3))\nhyper = {'alra': {'d_max': np.int64(9)}}\nshuffle = np.bool_(True)"
    )
    cfg = load([write(tmp_path, text)])
    values = json.dumps([cfg.lr, cfg.seed, cfg.hyper, cfg.shuffle])
    assert values == '[1.0, 3, {"alra": {"d_max": 9}}, true]'
    for text, message in (
        ("for i in range(3): pass", "no such key 'i'.* a helper's name begins with _; --help"),
        ("lr = max", "lr=.*: expected float"),
    ):
        with refusal(message):
            load([write(tmp_path, text)])
