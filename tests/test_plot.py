"""Pictures and samples: from logs that are there, with the numbers beside them, refused in words."""

import csv
import json
import re

import pytest
import torch

import plot
import sample
from model import Qwen2Config, init_student


@pytest.fixture
def run(tmp_path):
    out = tmp_path / "run"
    for i, method in enumerate(("pretrain", "alra", "mine")):
        (out / method).mkdir(parents=True)
        lines = [{"step": s, "ce": 5.0 / s + i, "loss": 1.0} for s in (1, 2, 3)]
        lines += [{"step": 3, "val_ce": 2.0 + i, "val_kl": 0.5, "val_agree": 0.25, "val_teacher_ce": 1.5}]
        (out / method / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "run.json").write_text(json.dumps({"config": {"batch_rows": 4, "seq_len": 10}}))
    return out


def test_curves_come_with_their_numbers(run, capsys):
    plot.run([str(run)])
    assert capsys.readouterr().out.split() == [str(run / "curves.png"), str(run / "curves.csv")]
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    with (run / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    ce = [
        (r["curve"], int(r["nominal_tokens"]), float(r["value"]))
        for r in rows
        if r["key"] == "ce" and r["curve"] == "alra"
    ]
    assert ce == [("alra", 40, 6.0), ("alra", 80, 3.5), ("alra", 120, pytest.approx(5 / 3 + 1))]
    assert {r["key"] for r in rows} == {"ce", "val_ce", "val_kl", "val_agree"}


def test_one_method_of_two_runs_keeps_both_names(run, tmp_path):
    (tmp_path / "other").mkdir()
    (run / "alra").rename(tmp_path / "other" / "alra")
    (tmp_path / "other" / "run.json").write_text((run / "run.json").read_text())
    (run / "alra").mkdir()
    (run / "alra" / "log.jsonl").write_text((tmp_path / "other" / "alra" / "log.jsonl").read_text())
    curves = plot.read_logs([run, tmp_path / "other" / "alra"])
    assert set(curves) == {"pretrain", "mine", f"alra ({run})", f"alra ({tmp_path / 'other'})"}


def test_the_papers_methods_look_different_in_grey():
    def grey(color):
        r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.3 * r + 0.59 * g + 0.11 * b

    looks = [(grey(color), line) for color, line in plot.STYLE.values()]
    for i, (a, line_a) in enumerate(looks):
        for b, line_b in looks[i + 1 :]:
            assert abs(a - b) > 4 or line_a != line_b


def test_a_folder_without_logs_is_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: no log.jsonl there or one folder below")):
        plot.run([str(tmp_path)])


def test_sampling_is_a_function_of_the_seed_and_0_takes_the_most_likely():
    model = init_student(Qwen2Config(16, 23, 1, 2, 2, vocab_size=31, max_position_embeddings=8))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    a, b, c = (sample.generate(model, [3, 5], 12, 1.0, None, seed) for seed in (1, 1, 2))
    assert a == b != c and len(a) == 14 and a[:2] == [3, 5]
    greedy = sample.generate(model, [3, 5], 5, 0, None, 0)
    with torch.no_grad():
        assert all(int(model(torch.tensor([greedy[:i]]))[0, -1].argmax()) == greedy[i] for i in range(2, 7))
    assert sample.generate(model, [3, 5], 5, 1.0, 1, 0) == greedy  # the only one of the top 1


def test_sample_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="expected --temperature of 0 or more"):
        sample.run(["x", "--temperature=-1"])
