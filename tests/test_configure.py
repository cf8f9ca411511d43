"""Config: typed, strict, and every refusal one clear line."""

import re
from pathlib import Path

import pytest

import configure
import train
from configure import Config, UserError, load
from losses import METHODS, settings
from tests.world import ROOT


def write(folder: Path, text: str) -> str:
    path = folder / "c.py"
    path.write_text(text)
    return str(path)


def test_files_then_flags(tmp_path):
    path = write(tmp_path, "import math\n_half = 0.5\nlr = 2 * _half\nmax_steps = schedule_steps = 1_000\n")
    words = (
        "--max_steps=700 --methods=alra,pretrain --teacher=none --val_max_rows=None --compile=true --recompute=false"
    )
    cfg = load([path, *words.split(), "--alra.tau=2", "--alra.anchor=none"])
    assert (cfg.lr, cfg.max_steps, cfg.schedule_steps) == (1.0, 700, 1000) and cfg.methods == ("alra", "pretrain")
    assert cfg.teacher is None and cfg.val_max_rows is None and cfg.compile is True and cfg.recompute is False
    assert cfg.hyper == {"alra": {"tau": 2, "anchor": "none"}}


@pytest.mark.parametrize(("argv", "message"), [
    ([], "no config: expected one, such as config/alra_200m.py, or --KEY=VALUE; --help lists the keys"),
    (["--zzzz=1"], "--zzzz=1: no such key 'zzzz'; a method's"), (["--learning-rate=1"], "no such key 'learning-rate', did you mean lr? --help"),
    *(([f"--{key}=1"], f"no such key {key!r}, did you mean {near}") for key, near in {"kd": "methods=vanilla_kd?", "epochs": "max_steps with repeat_rows?",
      "steps": "max_steps with", "temperature": "METHOD.tau", "resume": "the same command again", "perplexity": "exp(CE)", "batch_size": "batch_rows?"}.items()),
    *(([f"--{key}=1"], f"no such key {key!r}; a method's") for key in ("dropout", "minillm")),
    (["--anchor=top"], "--anchor=top: no such key 'anchor'"), (["--max_steps=1.5"], "max_steps=1.5: expected int"), (["--compile=1"], "compile=1: expected bool"),
    (["--seed=True"], "seed=True: expected int"), (["--dtype=int8"], "dtype='int8': expected 'auto' or 'float32' or 'bfloat16'"),
    (["--methods=alra@a,alra@a"], "duplicate ['alra@a']"), (["--alra@g1.lr=fast"], "alra@g1.lr='fast': expected float more than 0"),
    (["config/alra_200n.py"], "no such config file (*.py), did you mean config/alra_200m.py?"),
    (["lr = '1e-3'\n"], "lr='1e-3': expected float"), (["def lr():\n    return 1\n"], "lr=<function"), (["methods = ('alra', 3)\n"], "methods=('alra', 3): expected names"),
])  # fmt: skip
def test_refusals(argv, message, monkeypatch, tmp_path):
    """Those that tests/test_faults.py does not have; what ends in a newline is a file."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(message)):
        load([write(tmp_path, arg) if arg.endswith("\n") else arg for arg in argv])


ONE = ("max_steps", "schedule_steps", "batch_rows", "micro_batch", "group", "seq_len", "log_every_steps",
       "val_every_steps", "checkpoint_every_steps", "keep_checkpoints", "n_documents", "train_rows", "val_max_rows",
       "histogram_every_steps")  # fmt: skip


BOUNDS = [(ONE, 0, 1), (("lr", "min_lr", "clip", "adam_eps"), 0.0, 1e-9),
          (("weight_decay", "warmup_steps", "val_rows", "seed"), -1, 0), (("beta1", "beta2", "val_share"), -0.1, 0.0)]  # fmt: skip


@pytest.mark.parametrize(("keys", "refused", "taken"), BOUNDS)
def test_each_number_has_its_bound(keys, refused, taken):
    base = {"max_steps": 1, "warmup_steps": 0, "val_rows": 0, "min_lr": 1e-9}  # so that no key contradicts another
    for key in keys:
        with pytest.raises(UserError, match=rf"^{key}=-?[\d.]+: expected "):
            Config(**{**base, key: refused})
        Config(**{**base, key: taken})


def test_help_says_every_key_with_its_comment_and_the_methods(capsys):
    with pytest.raises(SystemExit) as ended:
        load(["config/demo.py", "--help"], lambda: ("alra: gamma=5.0", "beta_kd: no settings"))
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and lines[-2:] == ["alra: gamma=5.0", "beta_kd: no settings"]
    for name in configure.KINDS:
        (line,) = [text for text in lines if text.startswith(f"    {name}: ")]
        assert "  # " in line, line
    assert "    lr: Positive = learnt(6e-4)  # peak learning rate" in lines


def test_train_says_its_methods_and_their_settings(capsys):
    with pytest.raises(SystemExit):
        train.main(["-h"])
    said = capsys.readouterr().out.split("hash=False)")[1]
    assert "        alra_u: w_kd=1.0, w_ce=0.0 {'pair': 'pra_u'}\n" in said and "\n    alra: d_min=3, " in said
    names = set(re.findall(r"\w+", said))
    assert set(METHODS) | {key for name in METHODS for key in settings(name)} <= names


def test_every_field_is_read_somewhere():
    code = "".join((ROOT / name).read_text() for name in ("prepare.py", "train.py", "run/cache.py", "run/preflight.py", "run/students.py", "run/log.py", "run/methods.py", "run/checkpoints.py"))
    unread = [f for f in configure.KINDS if not re.search(rf"\bcfg\.{f}\b", code)]
    assert not unread, unread
    assert "cfg.hyper" in code


def test_a_setting_of_a_method_is_reached_by_its_name_and_no_other():
    for method in METHODS:
        for key in settings(method):
            assert load([f"--{method}.{key}=3"]).hyper == {method: {key: 3}}
            with pytest.raises(UserError, match=re.escape(f"no such key {key!r}")):
                load([f"--{key}=3"])


def test_settings_of_several_sources_add_up(tmp_path):
    path = write(tmp_path, 'hyper = {"alra": {"gamma": 3.0, "d_max": 7}, "tad": {"beta": 1.0}}\n')
    cfg = load([path, "--alra.gamma=9", "--pd.truncate_on=raw", "--alra.detach_weights=false"])
    wanted = {"alra": {"gamma": 9, "d_max": 7, "detach_weights": False}, "tad": {"beta": 1.0}}
    assert cfg.hyper == {**wanted, "pd": {"truncate_on": "raw"}}
    cfg = load([path, "--methods=alra,alra@a.1", "--alra@a.1.gamma=1", "--alra@a.1.lr=3e-4"])
    assert cfg.settings_of("alra@a.1") == {"gamma": 1, "d_max": 7, "lr": 3e-4} and cfg.settings_of("alra")["gamma"] == 3
    assert cfg.overrides_of("alra@a.1") == {"gamma": 1, "d_max": 7} and cfg.lr_factor("alra@a.1") == 3e-4 / 6e-4
    assert cfg.lr_factor("alra") == 1.0
    with pytest.raises(UserError, match=r"hyper\['alra'\]=3: expected a dict of settings"):
        load([write(tmp_path, 'hyper = {"alra": 3}\n')])


def test_guard_turns_what_a_user_can_mend_into_one_line(capsys):
    def main():
        raise UserError("lr=0: expected more than 0")

    assert configure.guard(main) == 1
    assert capsys.readouterr().err == "UserError: lr=0: expected more than 0\n"
    assert configure.guard(lambda: Path("/no/such/file").read_text()) == 1
    assert capsys.readouterr().err == "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'\n"
    assert configure.guard(lambda: None) == 0 and configure.guard(lambda: 3) == 3

    assert configure.guard(lambda: 1 / 0) == 1  # ours to mend: the traceback is in a file
    told = capsys.readouterr().err
    file = re.fullmatch(
        r"ZeroDivisionError: division by zero \(.*test_configure.py, line \d+; all of it in (\S+)\)\n", told
    )[1]
    assert "in guard" in Path(file).read_text()


PAPER = {  # appendices B, C.1 and E.1 of the paper; the commits are ours
    "batch_rows": 16, "seq_len": 512, "group": 1, "lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 512, "clip": 0.5,
    "beta1": 0.9, "beta2": 0.98, "adam_eps": 1e-6, "weight_decay": 1e-2, "schedule_steps": 126_400, "seed": 1234,
    "n_documents": 2_000_000,
    "teacher": "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067",
    "source": "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119",
}  # fmt: skip
MAIN = ("pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra")
TABLES = {  # methods and updates of each table of the paper
    "main": (MAIN, 126_400),
    "pair": (("alra_r", "alra_u", "alra"), 126_400),
    "anchor": (("alra_n", "alra_ng", "alra", "alra_g"), 67_200),
    "budget": (("fixed_3", "fixed_7", "fixed_9", "fixed_15", "fixed_19", "fixed_25", "alra"), 67_200),
}


@pytest.mark.parametrize("size", ["200m", "500m"])
def test_there_is_a_config_for_every_run_of_the_paper_with_its_numbers(size):
    folder, runs = ROOT / "config", {}
    for name in MAIN:
        flags = [f"--methods={name}", f"--out_dir=out/{name}_{size}"] if name != "alra" else []
        runs[f"{name}_{size}"] = (f"alra_{size}", flags, (name,), 126_400)
    for name, (methods, steps) in TABLES.items():
        flags = [f"--student={size}", f"--out_dir=out/table_{name}_{size}"]
        runs[f"table_{name}_{size}"] = (f"table_{name}", flags, methods, steps)
    for name, (file, flags, methods, steps) in runs.items():
        cfg = load([str(folder / f"{file}.py"), *flags])
        assert cfg.methods == methods and cfg.max_steps == steps and cfg.student == size, name
        assert {key: getattr(cfg, key) for key in PAPER} == PAPER, name
        assert cfg.out_dir == f"out/{name}" and not cfg.hyper and cfg.decay_1d and not cfg.shuffle, name
    assert 67_200 * 16 * 512 == 550_502_400 and 126_400 * 16 * 512 == 1_035_468_800  # nominal tokens
    assert Config().train_rows == 126_400 * 16
