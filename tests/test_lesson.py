"""The blocks of LESSON.md, run as they are printed, and its commands as far as they can be read."""

import re
import shlex
import shutil

import pytest
import torch
import transformers
from torch.testing import assert_close

import configure
import eval as ev
import losses
from tests.test_losses import case
from tests.test_readme import commands
from tests.world import ROOT

LESSON = (ROOT / "LESSON.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", LESSON, re.S))


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("n", "v"), [(1, 26), (7, 31), (23, 1009)])
@pytest.mark.parametrize(("name", "n_lines"), [("vanilla_kd", 10), ("alra", 35)])
def test_the_losses_on_the_board_are_those_of_losses_py(name, n_lines, n, v, ties):
    z_s, z_t, y = case(n, n, v, student=3.0, ignored=range(1, n, 3))
    if ties:
        z_s = z_s.round()
        z_t = z_t.round()
    z_s.requires_grad_()
    assert 3 < len(BLOCKS[name].splitlines()) <= n_lines
    names = {"torch": torch, "F": torch.nn.functional}
    exec(BLOCKS[name], names)
    board = names[name](z_s, z_t, y)
    loss, _ = losses.method_loss(name, z_s, z_t, y, w_kd=1.0, w_ce=0.0)
    assert_close(board, loss, rtol=0, atol=1e-9)
    expected = torch.autograd.grad(loss, z_s)
    assert_close(torch.autograd.grad(board, z_s), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_answers_to_the_exercises_run(n, capsys):
    """They hold the assertions that matter."""
    names = {"torch": torch, "F": torch.nn.functional}
    for block in ("vanilla_kd", "alra", f"exercise_{n}"):
        exec(BLOCKS[block], names)
    assert re.search(r"\d\.\d\d", capsys.readouterr().out)


def test_a_trainer_steps_along_the_gradient_of_alra(tiny, tmp_path):
    load = transformers.AutoModelForCausalLM.from_pretrained
    student = load(tiny / "student")
    teacher = load(tiny / "teacher")
    ids = [*range(9)]
    x = torch.tensor([ids, ids])
    z_s = student(x).logits[:, :-1].flatten(0, 1)
    z_t = teacher(x).logits[:, :-1].flatten(0, 1)
    loss, _ = losses.method_loss("alra", z_s, z_t.detach(), x[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(student.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    args = transformers.TrainingArguments(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    rows = [{"input_ids": ids, "labels": [losses.IGNORE, *ids[1:]]}] * 8
    names = globals() | locals()
    exec(BLOCKS["trainer"], names)
    first, second, _ = names["trainer"].state.log_history
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert second["loss"] < first["loss"]


def test_the_tables_of_the_demo_are_those_of_one_run(tmp_path, capsys):
    """Of `make demo`: runs.zip has run.json, log.jsonl and results.jsonl of its students.

    And results.jsonl of the students of three temperatures, in the folder tau.
    """
    shutil.unpack_archive(ROOT / "docs/lesson/runs.zip", tmp_path)
    readme = (ROOT / "README.md").read_text().replace("\n    |", "\n|")
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
