"""The edits that docs/editing.md shows, each applied to a copy of the code that then runs."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import world
from tests.world import ROOT, flags, read_jsonl

PAGE = (ROOT / "docs/editing.md").read_text()
EDITS = dict(re.findall(r"<!-- edit: (\w+) -->\n```diff\n(.*?)```", PAGE, re.S))
METHODS = "alra,vanilla_kd"
# edit => flags => students with the bits that they have without it => what the run that was there
# before says to it: it goes on, or is refused (!)
CASES = """
gate =>  =>  => !restore the edit of model, extras or optimizer
gelu =>  =>  => began: model.py
init =>  =>  => began: model.py
hidden => --methods=alra,alra_h --alra_h.w_hidden=0.5 => alra => began: losses.py
temperature => --methods=alra,learned_tau => alra => began: losses.py
weight =>  =>  => !losses.position_weight
log =>  => alra,vanilla_kd => began: losses.py
lion =>  =>  => !restore the edit of model, extras or optimizer
schedule => --lr_schedule=sqrt =>  => !lr_schedule was 'cosine', now 'sqrt'
average =>  =>  => began: train.py
order =>  =>  => !order_sha256 was
"""
CASES = world.read_table(CASES)


def test_every_edit_of_the_page_is_tried():
    assert {*EDITS} == {name for name, *_ in CASES}


def copy_of_code(folder):
    """Copy with the times of files, by which Python knows what it has compiled."""
    for name in ("lib", "run"):
        shutil.copytree(ROOT / name, folder / name)
    for file in ROOT.glob("*.py"):
        shutil.copy2(file, folder)
    return folder


def run_all(folder, commands):
    """Run scripts of the code in `folder` in a new process, and return what they print.

    commands  (script, arguments, exit code to expect)
    """
    process = world.start(_run_all, folder, commands, out=folder / "printed")
    process.join()
    printed = (folder / "printed").read_text()
    assert process.exitcode == 0, printed
    return printed


def _run_all(folder, commands):
    own = {"lib", "run", *(file.stem for file in ROOT.glob("*.py"))}
    for name in [*sys.modules]:
        if name.partition(".")[0] in own:
            del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    os.chdir(folder)
    configure = importlib.import_module("configure")
    for script, argv, code in commands:
        main = importlib.import_module(script).main
        assert configure.guard(lambda main=main, argv=argv: main([*map(str, argv)])) == code


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """The folder of a copy without edits, and of its run of three updates, stopped after two."""
    folder = copy_of_code(tmp_path_factory.mktemp("plain"))
    run_all(folder, commands(tiny, folder / "out", ""))
    return folder


def commands(tiny, out, more, *scored):
    keys = f"--methods={METHODS} --schedule_steps=3 --log_every_steps=1 --val_every_steps=9 {more}"
    train = [("train", flags(tiny, out, f"{keys} --max_steps={n}"), 0) for n in (2, 3)]
    return [*train, ("eval", [out, *scored, "--tasks=none"], 0)]


def figures(out, student):
    return read_jsonl(out / student / "results.jsonl")[-1]["values"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more", "same", "then"), CASES, ids=[case[0] for case in CASES])
def test_an_edit_of_the_page(name, more, same, then, tiny, plain, tmp_path):
    """It trains, resumes and is scored; the teacher, and students that lack it, are as before.

    An earlier run goes on with a line, or is refused; an earlier student has the scores it had.
    """
    if not shutil.which("git"):
        pytest.skip("needs git to apply a diff")
    folder = copy_of_code(tmp_path)
    apply = ["git", "apply", "--unidiff-zero", "-"]
    subprocess.run(apply, cwd=folder, input=EDITS[name], text=True, check=True)
    scores = np.random.default_rng(0).random(97)
    np.save(folder / "scores.npy", scores)
    earlier = shutil.copytree(plain / "out", folder / "earlier")
    for student in METHODS.split(","):
        shutil.rmtree(earlier / student / "checkpoints/step_00000003")
    key = more if "lr_schedule" in more else ""
    goes_on = flags(tiny, earlier, f"--methods={METHODS} --schedule_steps=3 --max_steps=3 {key}")
    last = ("train", goes_on, int(then.startswith("!")))
    printed = run_all(folder, [*commands(tiny, folder / "out", more, earlier), last])
    assert then.removeprefix("!") in printed
    expected = figures(plain / "out", "alra")
    assert figures(earlier, "alra") == expected
    for student in [path.name for path in folder.glob("out/*/")]:
        assert figures(folder / "out", student)["teacher_ce"] == expected["teacher_ce"]
        of = student if student in METHODS.split(",") else "alra"
        is_same = world.final_bits(folder / "out", student, 3) == world.final_bits(
            plain / "out", of, 3
        )
        assert is_same == (student in same.split(","))
