"""The blocks of LESSON.md, run as they are printed, and its commands as far as they can be read."""

import re
import shlex

import pytest
import torch
import transformers

import configure
import eval as ev
import losses
from tests.test_readme import commands
from tests.world import ROOT

LESSON = (ROOT / "LESSON.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", LESSON, re.S))


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("n", "v"), [(1, 26), (7, 31), (23, 1009)])
def test_the_losses_on_the_board_are_those_of_losses_py(n, v, ties):
    generator = torch.Generator().manual_seed(n)
    z_s, z_t = (3 * torch.randn(n, v, generator=generator, dtype=torch.float64) for _ in range(2))
    z_s, z_t = (z_s.round(), z_t.round()) if ties else (z_s, z_t)
    y = torch.randint(v, (n,), generator=generator)
    y[1::3] = losses.IGNORE
    names = {"torch": torch, "F": torch.nn.functional}
    for name, n_lines in (("vanilla_kd", 10), ("alra", 35)):
        assert 3 < len(BLOCKS[name].splitlines()) <= n_lines
        exec(BLOCKS[name], names)
        board, own = z_s.clone().requires_grad_(), z_s.clone().requires_grad_()
        loss, expected = names[name](board, z_t, y), losses.method_loss(name, own, z_t, y, w_kd=1.0, w_ce=0.0)[0]
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
        pairs = zip(*(torch.autograd.grad(x, z) for x, z in ((loss, board), (expected, own))), strict=True)
        assert all((a - b).abs().max() < 1e-9 for a, b in pairs)


def test_a_trainer_steps_along_the_gradient_of_alra(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=61, initializer_range=1.0, **shape)
    torch.manual_seed(1)
    student, teacher = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    ids = torch.randint(61, (9,)).tolist()
    rows = [{"input_ids": ids, "labels": [-100, *ids[1:]]}] * 8
    z_s, z_t = (model(torch.tensor([ids] * 2)).logits[:, :-1].flatten(0, 1) for model in (student, teacher))
    loss = losses.method_loss("alra", z_s, z_t.detach(), torch.tensor(ids[1:] * 2))[0]
    norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(student.parameters()))]).norm()
    args = transformers.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    names = {"torch": torch, "transformers": transformers, "losses": losses, "student": student, "teacher": teacher}
    names |= {"args": args, "rows": rows}
    exec(BLOCKS["trainer"], names)
    logged, second, _ = names["trainer"].state.log_history
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-3) and second["loss"] < logged["loss"]
    assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_the_commands_are_read():
    made = [shlex.split(command)[1:] for command in commands(LESSON)]
    assert len(made) > 8
    for script, *argv in made:
        assert (ROOT / script).is_file()
        if script in ("prepare.py", "train.py"):
            configure.load([str(ROOT / argv[0]), *argv[1:]])
        elif script == "eval.py":
            ev.arguments(argv)
