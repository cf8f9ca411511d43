"""eval.py, lib/tasks.py and run/tables.py: requests scored as by lm-eval's own backend, items checked, figures and tables as defined."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

import configure
import eval as ev
from lib import tasks
from lib.errors import UserError
from lib.hf import load_tokenizer, tokenizer_hash
from lib.rows import PAD, Rows
from model import Qwen2, Qwen2Config
from tests import world
from tests.test_tables import cells

SHARED = world.SHARED / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="real weights and benchmark items are not here")
WORDS = ["the", "cat", "saw", "a", "dog", "under", "old", "trees", "while", "rain", "on", "seven", "boats", "13", "quiet"]  # fmt: skip
CONFIG = dataclasses.asdict(configure.Config())


def sentence(rng, n, end="."):
    return " ".join(rng.choice(WORDS, n)).capitalize() + end


def row_of(task, rng):
    """The item of PROMPTS with more words."""

    def longer(key, value):
        if isinstance(value, dict):
            return {k: longer(k, v) for k, v in value.items()}
        if isinstance(value, list) and key != "label":
            return [longer(key, v) for v in value]
        is_text = isinstance(value, str) and key not in ("label", "answerKey", "answer")
        return f"{value} {sentence(rng, int(rng.integers(1, 19)))}" if is_text else value

    return longer("", PROMPTS[task][0])


def write_items(folder, task, split, rows):
    file = Path(folder) / task / f"{split}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def make_tokenizer(n=307, **keys):
    rng = np.random.default_rng(0)
    return world.make_tokenizer([*(sentence(rng, 13) for _ in range(50)), *["Answer:\n yes"] * 9], n, "<eos>", **keys)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


STUDENT = Qwen2Config(24, 53, 2, 4, 2, vocab_size=311, max_position_embeddings=600)


@pytest.fixture(scope="module")
def student():
    return world.make_model(STUDENT, 5, 7.0)


@pytest.fixture(scope="module")
def teacher():
    return world.make_model(Qwen2Config(36, 61, 3, 3, 1, vocab_size=311, tie_word_embeddings=False), 6, 7.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """All nine tasks in the layout of local files, 7 items each and 5 in the validation sets."""
    folder, rng = tmp_path_factory.mktemp("eval"), np.random.default_rng(1)
    for name, task in tasks.TASKS.items():
        for n, part in ((7, task.heldout), (5, task.validation)):
            if part:
                write_items(folder, name, part[0], [row_of(name, rng) for _ in range(n)])
    return folder


def ask(*pairs):
    """(context, continuation) pairs, each a document of its own unless the contexts are equal."""
    contexts = [c for c, _ in pairs]
    return [Instance("loglikelihood", {}, pair, 0, ("made-up", contexts.index(pair[0]), 1)) for pair in pairs]


def naive(model, head, tail, max_length=512):
    """The rules in plain steps, fp64 after the logits: keep the last tokens, drop the very last one, sum over the tail."""
    inputs = (head + tail)[-(max_length + 1) :][:-1]
    logp = model(torch.tensor([inputs]))[0].double().log_softmax(-1)
    total, greedy = 0.0, True
    for at, token in enumerate(tail, len(inputs) - len(tail)):
        total += float(logp[at, token])
        greedy &= int(logp[at].argmax()) == token
    return total, greedy


def same(got, wanted, rtol=1e-5):
    assert [g for _, g in got] == [bool(g) for _, g in wanted]
    np.testing.assert_allclose([s for s, _ in got], [float(s) for s, _ in wanted], rtol=rtol, atol=1e-5)


def options(*argv):
    return ev.arguments(["x", "--any_items", *map(str, argv)])


def items_of(names, args):
    return tasks.read_items(names, args.split, args.data_dir, args.storycloze, args.any_items)


def bench(lm, names, *argv):
    return ev.benchmarks(lm, items_of(names, options(*argv)), options(*argv))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("bos", ["auto", None, 307])
def test_a_context_begins_as_the_tokenizer_does_by_itself_or_as_training_did(student, adds_bos, bos):
    tokenizer, seen = make_tokenizer(bos="<s>" if adds_bos else None), []
    scorer = ev.Scorer(student, tokenizer, bos=bos)
    scorer._loglikelihood_tokens = lambda requests, **keys: seen.extend(r[1:] for r in requests)
    scorer.loglikelihood(
        ask(("the cat", " saw"), ("", " saw"), ("", "<eos> cat"), ("the cat \n", "saw")), disable_tqdm=True
    )
    head, tail, cat, lines = (
        tokenizer.encode(t, add_special_tokens=False) for t in ("the cat", " saw", " cat", " \nsaw")
    )
    before = [307] if bos == 307 or (adds_bos and bos == "auto") else []
    first, empty = [*before, *head], before or [tokenizer.eos_token_id]
    ended = ([0], cat) if not before else (before, [0, *cat])
    assert seen == [(first, tail), (empty, tail), ended, (first, lines)]


@pytest.mark.parametrize(("facts", "wanted"), [(None, "auto"), ({"bos": None}, None), ({"bos": 307}, 307)])
def test_a_student_is_scored_with_the_bos_of_its_rows(facts, wanted, rows, data, tmp_path, monkeypatch):
    """Facts of the student's run (None: no run) -> the BOS of its contexts; rows with another BOS are refused."""
    tokenizer, seen, out = make_tokenizer(bos="<s>"), [], tmp_path / "out"
    model, scorer = world.make_model(STUDENT), ev.Scorer
    if facts is None:
        model.save_pretrained(out / "alra", tokenizer)
    else:
        world.write_run(out, {"alra": model}, tokenizer, tmp_path, tmp_path, config={}, **facts)
    monkeypatch.setattr(ev, "Scorer", lambda *args: seen.append(args[4]) or scorer(*args))
    for bos in (None, 307):
        world.write_rows(tmp_path, "val", ids=rows.ids[:3], tokenizer_sha256=tokenizer_hash(tokenizer), bos=bos)
        argv = [str(out / "alra"), "--tasks=piqa", f"--data_dir={data}", "--any_items", "--limit=2", f"--rows={tmp_path}", "--teacher=none",
                f"--out={tmp_path / str(bos)}"]  # fmt: skip
        if wanted in (bos, "auto"):
            ev.main(argv)
        else:
            with pytest.raises(UserError, match=f"rows with bos={bos}, but .* was trained on rows with bos={wanted}"):
                ev.main(argv)
    assert set(seen) == {wanted} and tokenizer.bos_token_id == 307


@pytest.mark.parametrize("n_logits", [1, 4, 6, 100])
def test_logits_in_blocks_of_the_vocabulary_and_ties_go_to_the_first(n_logits):
    z = torch.tensor([[0.0, 2.0, 2.0, 1.0, -90.0], [5.0, 1.0, 1.0, 5.0, 1.0]])
    row, y = torch.tensor([0, 0, 1, 1, 0, 1]), torch.tensor([1, 2, 3, 0, 4, 4])
    logp, greedy = ev.token_logprobs(torch.eye(2), z.T.contiguous(), row, y, n_logits)
    assert greedy.tolist() == [True, False, False, True, False, False]
    torch.testing.assert_close(logp, z.double().log_softmax(-1)[row, y], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 61, 5003])
def test_sharing_packing_and_batching_change_nothing(student, tokenizer, batch_tokens):
    rng, head, best = np.random.default_rng(3), [5, 7, 11], []
    for _ in range(4):
        best.append(int(student(torch.tensor([head + best]))[0, -1].argmax()))
    requests = [(("", ""), head, tail) for tail in (best, [best[0], (best[1] + 1) % 311, *best[2:]])]
    for _ in range(11):
        head = rng.integers(1, 311, rng.integers(1, 29)).tolist()
        common = rng.integers(1, 311, rng.integers(0, 5)).tolist()
        for _ in range(rng.integers(1, 5)):
            requests.append((("", ""), head, common + rng.integers(1, 311, rng.integers(1, 9)).tolist()))
        requests.append(requests[-1])  # the same choice twice
    scorer = ev.Scorer(student, tokenizer, max_length=31, batch_tokens=batch_tokens)
    wanted = [naive(student, head, tail, 31) for _, head, tail in requests]
    got = scorer._loglikelihood_tokens(requests, True)
    same(got, wanted)
    assert [greedy for _, greedy in got[:2]] == [True, False]  # one missed token is not greedy
    assert sum(len(head + tail) > 32 for _, head, tail in requests) > 1  # these lose their beginning
    twice = [i for i in range(1, len(requests)) if requests[i] == requests[i - 1]]
    assert len(twice) >= 11 and all(got[i] == got[i - 1] for i in twice)  # a tie to the last bit


def test_head_runs_only_where_a_continuation_is_scored_and_no_position_looks_nowhere(student, tokenizer, monkeypatch):
    """Padding too: softmax over nothing is NaN, and NaN times a weight of zero is NaN."""
    masks, heads, hidden, pick = [], [], student.hidden, ev.token_logprobs
    monkeypatch.setattr(type(student), "hidden", lambda self, *given: masks.append(given[2]) or hidden(*given))
    monkeypatch.setattr(ev, "token_logprobs", lambda h, *rest: heads.append(len(h)) or pick(h, *rest))
    requests = [(("", ""), list(range(n)), tail) for n in (20, 9) for tail in ([50, 51], [60, 61, 62], [70])]
    ev.Scorer(student, tokenizer)._loglikelihood_tokens(requests, True)
    assert masks[0].shape[0] == 2 and masks[0].any(-1).all() and not masks[0].tril().ne(masks[0]).any()
    assert heads == [2 * (1 + 1 + 2)]  # each context's last logits are computed once


def test_scores_are_fp32_whatever_the_backbone(tokenizer):
    half = world.make_model(STUDENT, 5, 7.0).to(torch.bfloat16)
    head, tail = [5, 7, 11, 13], [17, 19, 23]
    got = ev.Scorer(half, tokenizer)._loglikelihood_tokens([(("", ""), head, tail)], True)[0][0]
    h = half.hidden(torch.tensor([head + tail[:-1]]))[0, 3:].double()
    logp = (h @ half.head.double().T).log_softmax(-1)
    assert got == pytest.approx(float(logp[[0, 1, 2], tail].sum()), rel=1e-6)


@pytest.mark.parametrize("context, continuation", [("the cat", ""), (" \n", "cat"), ("the cat", " dog" * 13)])
def test_requests_without_an_answer_are_refused(student, tokenizer, context, continuation):
    with pytest.raises(UserError, match="expected a context"):
        ev.Scorer(student, tokenizer, max_length=7).loglikelihood(ask((context, continuation)), disable_tqdm=True)


class Recorder(TemplateLM):
    """Scores a request by the length of its continuation, longest best; keeps what it was asked."""

    eot_token_id = 0

    def loglikelihood(self, requests, disable_tqdm=False):
        self.asked = [r.args for r in requests]
        return [(float(len(continuation)), False) for _, continuation in self.asked]

    tok_encode = _loglikelihood_tokens = loglikelihood_rolling = generate_until = None


PROMPTS = {
    "arc_easy": ({"question": "Why?", "choices": {"text": ["So.", "No way."], "label": ["A", "B"]}, "answerKey": "B"},
                 [("Question: Why?\nAnswer:", " So."), ("Question: Why?\nAnswer:", " No way.")]),
    "arc_challenge": ({"question": "Why?", "choices": {"text": ["So.", "No way."], "label": ["1", "2"]}, "answerKey": "2"},
                      [("Question: Why?\nAnswer:", " So."), ("Question: Why?\nAnswer:", " No way.")]),
    "hellaswag": ({"activity_label": "Sailing", "ctx_a": "It rains. [title] Go", "ctx_b": "the Dog",
                   "endings": ["sits [step]  down.", "runs far away over there."], "label": "1"},
                  [("Sailing: It rains.. Go The dog", " sits  down."), ("Sailing: It rains.. Go The dog", " runs far away over there.")]),
    "lambada_openai": ({"text": "a cat saw boats"}, [("a cat saw", " boats")]),
    "openbookqa": ({"question_stem": "Cats like", "choices": {"text": ["rain", "old boats"], "label": ["A", "B"]}, "answerKey": " B"},
                   [("Cats like", " rain"), ("Cats like", " old boats")]),
    "piqa": ({"goal": "dry", "sol1": "wait", "sol2": "a towel ", "label": 1},
             [("Question: dry\nAnswer:", " wait"), ("Question: dry\nAnswer:", " a towel ")]),
    "social_iqa": ({"context": "It fell.", "question": "Why?", "answerA": "a", "answerB": "wind", "answerC": "be", "label": "2"},
                   [("Q: It fell. Why?\nA:", " a"), ("Q: It fell. Why?\nA:", " wind"), ("Q: It fell. Why?\nA:", " be")]),
    "storycloze_2016": ({"input_sentence_1": "A.", "input_sentence_2": "B.", "input_sentence_3": "C.", "input_sentence_4": "D.",
                         "sentence_quiz1": "E.", "sentence_quiz2": "Far.", "answer_right_ending": 2},
                        [("A. B. C. D.", " E."), ("A. B. C. D.", " Far.")]),
    "winogrande": ({"sentence": "Ann saw Bo so _ ran.", "option1": "Ann", "option2": "Bo", "answer": "1"},
                   [("Ann saw Bo so Ann", " ran."), ("Ann saw Bo so Bo", " ran.")]),
}  # fmt: skip


@pytest.mark.parametrize("name", tasks.TASKS)
def test_prompts_are_those_of_lm_eval(name, tmp_path):
    row, wanted = PROMPTS[name]
    write_items(tmp_path, name, tasks.TASKS[name].heldout[0], [row, row])
    recorder = Recorder()
    got = bench(recorder, [name], "--data_dir", tmp_path)
    assert recorder.asked == wanted * 2
    assert got[name]["acc"] == float(name != "lambada_openai")  # the longest is right, and ties go to the first


def test_two_sets_of_the_protocol(data):
    for split, names in tasks.SUITES.items():
        assert tasks.choose_tasks("all", split) == names and tasks.choose_tasks("none", split) == []
        items = tasks.read_items(names, split, str(data), any_items=True)
        assert {len(found.rows) for found in items.values()} == {7 if split == "heldout" else 5}
    got = bench(Recorder(), names, "--data_dir", data, "--split", split)
    assert {name: x["n_paper"] for name, x in got.items()} == {"arc_easy": 570, "hellaswag": 39905, "piqa": 16113}


@pytest.mark.parametrize("split", ["made-up", *(pytest.param(s, marks=needs_shared) for s in tasks.SUITES)])
def test_scores_equal_those_of_lm_evals_own_backend(split, student, tokenizer, data, tmp_path):
    """Every log-likelihood, greedy flag and score of ours against those of HFLM; real weights and items where they are there."""
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face backend needs accelerate")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    folder, argv, without = tmp_path, ["--data_dir", data], ()
    if split == "made-up":
        student.save_pretrained(folder, tokenizer)
    else:
        folder, argv = SHARED / "stories260k", ["--data_dir", SHARED / "eval", "--limit", 3, "--split", split]
        without = ("storycloze_2016", *["hellaswag"] * (split == "validation"))
    tokenizer, args = load_tokenizer(str(folder)), options(*argv, "--log_samples")
    names = [name for name in tasks.SUITES[args.split] if name not in without]
    items = items_of(names, args)
    theirs = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer=tokenizer,
                  max_length=512, batch_size=16, logits_cache=False, device="cpu")  # fmt: skip
    a = ev.benchmarks(ev.Scorer(Qwen2.from_pretrained(str(folder)), tokenizer, batch_tokens=503), items, args)
    b = ev.benchmarks(theirs, items, args)
    for name in names:
        same(*([r[0] for sample in x[name]["samples"] for r in sample["resps"]] for x in (a, b)))
        for key in ("acc", "acc_norm", "prompts_sha256"):
            assert a[name].get(key) == b[name].get(key)
        if name == "lambada_openai":
            assert a[name]["perplexity"] == pytest.approx(b[name]["perplexity"], rel=1e-4)


def test_every_source_gives_the_same_items(data, tmp_path, monkeypatch):
    """Local JSONL, a folder laid out like the hub, and the hub."""
    from lm_eval.tasks._yaml_loader import load_yaml

    names, calls, load = [name for name in tasks.TASKS if name != "storycloze_2016"], [], datasets.load_dataset
    for name in names:
        config, split = load_yaml(tasks.task_file(name), resolve_func=False), tasks.TASKS[name].heldout[0]
        folder, part = tmp_path / config["dataset_path"], config.get("dataset_name") or "default"
        (folder / part).mkdir(parents=True)
        datasets.Dataset.from_list(world.read_jsonl(data / name / f"{split}.jsonl")).to_parquet(
            folder / part / f"{split}.parquet"
        )
        configs = [f'- config_name: {p.name}\n  data_files:\n  - split: {split}\n    path: "{p.name}/{split}.parquet"\n'
                   for p in sorted(folder.glob("*/"))]  # fmt: skip
        (folder / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    wanted, local = (tasks.read_items(names, "heldout", str(place), any_items=True) for place in (data, tmp_path))
    recorded = lambda path, *a, **k: calls.append(path) or load(str(tmp_path / path), *a, **k)  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", recorded)
    hub = tasks.read_items(names, "heldout", None, any_items=True)
    assert "allenai/ai2_arc" in calls and hub["piqa"].source == "baber/piqa [validation]"
    for name in names:
        assert wanted[name].rows == local[name].rows == hub[name].rows
        assert wanted[name].sha256 == local[name].sha256 == hub[name].sha256


def test_storycloze_from_a_file_of_its_own(data, tmp_path):
    """With the headings and texts of its authors."""
    rows, file = world.read_jsonl(data / "storycloze_2016/test.jsonl"), tmp_path / "cloze.csv"
    heads = ["InputStoryid", *(f"InputSentence{i}" for i in (1, 2, 3, 4)), "RandomFifthSentenceQuiz1", "RandomFifthSentenceQuiz2",
             "AnswerRightEnding"]  # fmt: skip
    with file.open("w", newline="", encoding="utf-8-sig") as out:
        csv.writer(out).writerows([heads, *([i, *row.values()] for i, row in enumerate(rows))])
    sources = ((str(data),), (None, str(file)))
    wanted, got = (tasks.read_items(["storycloze_2016"], "heldout", *how)["storycloze_2016"] for how in sources)
    assert got.rows == wanted.rows == rows and got.sha256 == wanted.sha256


def test_items_that_are_not_the_published_ones_are_refused(data, tmp_path):
    """lm-eval itself takes some of them without a word: piqa with labels as strings has an accuracy of 0."""
    named = rf"{data}/piqa/validation.jsonl: 7 items that are not .*of piqa \(sha256 \w+, expected d82bc2d775ca\); --any_items"
    with pytest.raises(UserError, match=named):
        tasks.read_items(["piqa"], "heldout", str(data))
    assert len(tasks.read_items(["piqa"], "heldout", str(data), any_items=True)["piqa"].rows) == 7
    assert tasks.read_items(["hellaswag"], "validation", str(data))  # whose hash is not known here


@needs_shared
@pytest.mark.parametrize(("name", "split"), list(tasks.PUBLISHED))
def test_the_published_items_are_those_that_are_known(name, split):
    assert tasks.read_items([name], split, str(SHARED / "eval"))


@pytest.mark.parametrize(("name", "file", "content", "said"), [
    ("piqa", "piqa/validation.jsonl", None, "no {}.* and no folder .*baber/piqa"),
    ("piqa", "piqa/validation.jsonl", b"", "{}: no rows"),
    ("piqa", "piqa/validation.jsonl", b'{"goal": "\xe9"}\n', "{}: cannot be used .UnicodeDecodeError"),
    ("piqa", "piqa/validation.jsonl", b'{"goal": "a"}\n', "{}: cannot be used .KeyError: 'sol1'.*expected items of piqa, with goal, sol1"),
    ("storycloze_2016", "story.csv", b"InputSentence1\n\xe9\n", "{}: cannot be used"),
    ("storycloze_2016", "story.csv", b"InputSentence1,AnswerRightEnding\na,3\n", "{}: .*expected answer_right_ending to be 1 or 2"),
    ("storycloze_2016", "story.xml", b"x", "{}: expected one of .jsonl, .csv"),
    ("storycloze_2016", "story.csv", None, "--storycloze {}: no such file"),
    ("storycloze_2016", None, None, "on request"),
])  # fmt: skip
def test_broken_items_are_refused_by_file(name, file, content, said, tmp_path):
    if content is not None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
    story = str(tmp_path / file) if file and "story" in file else None
    with pytest.raises(UserError, match=said.format(tmp_path / str(file))):
        tasks.read_items([name], "heldout", str(tmp_path), story, True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tokenizer):
    rng, folder = np.random.default_rng(5), tmp_path_factory.mktemp("data")
    ids = rng.integers(1, 307, (11, 23), dtype=np.uint32)
    for row, n in ((2, 17), (5, 2), (7, 19)):
        ids[row, n:] = PAD
    ids[3, 8] = 0  # <eos> inside
    world.write_rows(folder, "val", ids=ids, tokenizer_sha256=tokenizer_hash(tokenizer))
    return Rows(str(folder), "val", 22, False, 311)


def test_bytes_of_tokens(tokenizer):
    text = "the cat saw Überraschung — 13 boats"
    lengths = ev.byte_lengths(tokenizer, 311)
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[0] == 0 and not lengths[307:].any()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, teacher, tokenizer, rows):
    """What train.py leaves behind: two finished students and an unfinished one, and the teacher."""
    folder = tmp_path_factory.mktemp("run")
    teacher.save_pretrained(folder / "teacher", tokenizer)
    students = {name: world.make_model(STUDENT, seed, 7.0) for name, seed in (("pretrain", 5), ("alra", 9))}
    keys = {"data_dir": str(Path(rows.file).parent), "teacher": str(folder / "teacher")}
    world.write_run(folder / "out", students, tokenizer, keys["data_dir"], keys["teacher"], config=CONFIG | keys)
    config = CONFIG | keys | {"methods": ["tad", "pretrain", "alra"]}
    (folder / "out" / "run.json").write_text(json.dumps({"config": config}))
    (folder / "out" / "tad").mkdir()
    return folder


@pytest.fixture
def out(trained, tmp_path):
    """A copy of its own for each test that writes results."""
    return shutil.copytree(trained / "out", tmp_path / "run")


def read(folder, name="figures.json"):
    return json.loads((folder / name).read_text())


def test_from_checkpoints_to_tables(out, data, capsys):
    """A run's folder stands for its students; those that are not finished are named."""
    (out / "tad" / "stopped.json").write_text('{"step": 3, "why": "step 3: gradient norm nan"}')
    ev.main([str(out), "--tasks=none"])
    said = capsys.readouterr()
    assert f"there is no model yet: {out / 'tad'} (stopped at step 3: gradient norm nan)\n" in said.err
    text = said.out[said.out.index("## tiny") :]
    assert "accuracy" not in text and cells(text, "")[1] == "CE, nats/token"
    ce = {method: read(out / method)["figures"]["ce"] for method in ("pretrain", "alra")}
    best, second = sorted(ce, key=ce.get)
    assert cells(text, best)[1] == f"**{ce[best]:.4f}**" and cells(text, second)[1] == f"*{ce[second]:.4f}*"
    assert cells(text, "alra", 1)[1] == f"{ce['alra'] - ce['pretrain']:+.4f}"
    ev.main(["--table", str(out)])
    assert capsys.readouterr().out.split() == [*text.split(), *f"Left out, since not scored: {out / 'tad'}.".split()]
    argv = [str(out / "pretrain"), str(out / "alra/model"), f"--data_dir={data}", "--any_items", "--rows=none"]
    ev.main([*argv, "--tasks=arc_easy,piqa", "--limit=3", "--log_samples", "--metric=acc_norm"])
    text, scores = capsys.readouterr().out, read(out / "alra", "scores_heldout_limit3.json")
    assert list(scores["tasks"]) == ["arc_easy", "piqa"] and scores["protocol"]["limit"] == 3
    assert scores["tasks"]["piqa"]["n"] == 3 and scores["tasks"]["piqa"]["n_rows"] == 7
    assert scores["run"]["method"] == "alra"
    assert len((out / "alra" / "scores_heldout_limit3.jsonl").read_text().splitlines()) == 6
    assert "Avg. (2 of 9)" in text and "acc_norm for ARC-E, PIQA" in text and "bits/byte" in text  # figures stay
    facts = read(out / "alra", "run.json")
    (out / "alra" / "run.json").write_text(json.dumps(facts | {"made_by": {"data_sha256": "other"}}))
    ev.main([str(out), "--tasks=none"])  # students that cannot be compared
    said = capsys.readouterr().out
    assert said.count("### Held-out rows") == 2 and "differ in data_sha256: d and other" in said


def test_a_dtype_is_that_of_the_whole_command(out, data, teacher, tokenizer, rows):
    """Of student and teacher, for figures and scores: equal to the last bit in that dtype, and unequal in another."""
    argv = ["--tasks=piqa", f"--data_dir={data}", "--any_items", "--log_samples"]
    ev.main([str(out / "pretrain"), *argv, "--dtype=bfloat16"])
    figures, scores = read(out / "pretrain"), read(out / "pretrain", "scores_heldout.json")
    lines = world.read_jsonl(out / "pretrain" / "scores_heldout.jsonl")
    assert figures["protocol"]["dtype"] == scores["protocol"]["dtype"] == "bfloat16"
    for dtype in (torch.bfloat16, torch.float32):
        student = world.make_model(STUDENT, 5, 7.0).to(dtype)
        cast = ev.Teacher(world.make_model(teacher.config, 6, 7.0).to(dtype), torch.device("cpu"))
        (wanted,) = ev.over_rows([student], cast, rows, np.arange(rows.n), ev.byte_lengths(tokenizer, 311), 4096)
        for key in ("ce", "kl", "teacher_ce"):
            assert (figures["figures"][key] == wanted[key]) == (dtype == torch.bfloat16), key
        samples = bench(ev.Scorer(student, tokenizer), ["piqa"], *argv[1:2], "--log_samples")["piqa"]["samples"]
        equal = [x["resps"] for x in lines] == json.loads(json.dumps([x["resps"] for x in samples]))
        assert equal == (dtype == torch.bfloat16)


@pytest.mark.parametrize(("argv", "said"), [
    ("tad", "tad: no model/ in it, and no checkpoint; has its training begun?"), ("alra tad", "tad: no model/ in it"), ("run.json", "no finished student: .*run.json"),
    ("gone", "gone: no such folder"), ("../gone", "gone: no such folder"), ("alra --limit=1", "--limit 1"), ("alra pretrain --out=z", "--out z"),
    ("alra --tasks=winogrande --split=validation", "no .'winogrande'. in the validation set"), ("alra --device=gpu", "device=gpu"),
])  # fmt: skip
def test_slips_on_the_command_line_are_told_before_the_hub_is_asked(argv, said, out, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **keys: asked.append(args) or str(out))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **keys: asked.append(args) or [])
    with pytest.raises(UserError, match=said):
        ev.main([arg if arg.startswith("--") else str(out / arg) for arg in argv.split()])
    assert not asked


def test_a_model_that_is_no_student(trained, rows, tmp_path, monkeypatch):
    """Its results have a place of their own, which another model of that name does not get."""
    monkeypatch.chdir(tmp_path)
    argv = ["--tasks=none", f"--rows={Path(rows.file).parent}", "--teacher=none"]
    ev.main([str(trained / "teacher"), *argv])
    assert [str(file) for file in Path().glob("out/**/*.json")] == ["out/eval/teacher/figures.json"]
    figures = read(Path("out/eval/teacher"))
    assert figures["run"] is None and "kl" not in figures["figures"]
    world.make_model(STUDENT, 3).save_pretrained(tmp_path / "teacher", load_tokenizer(str(trained / "teacher")))
    with pytest.raises(UserError, match=r"out/eval/teacher/figures.json: results of other weights than teacher"):
        ev.main(["teacher", *argv])
    with pytest.raises(UserError, match="results of both would go to out/eval/teacher"):
        ev.main(["teacher", str(trained / "teacher"), *argv])


def test_all_tasks_are_eight_without_a_file_of_storycloze(out, data, tmp_path, capsys):
    copy = shutil.copytree(data, tmp_path / "eval", ignore=lambda _, names: [n for n in names if "storycloze" in n])
    ev.main([str(out / "alra"), f"--data_dir={copy}", "--any_items", "--rows=none", "--limit=2"])
    said = capsys.readouterr()
    assert "on request" in said.err and "Avg. (8 of 9)" in said.out


def test_results_are_not_lost_to_a_smaller_command(out, data):
    """What a command would make again it may replace; more weights make all results of a student old."""
    scores = [str(out / "alra"), "--rows=none", f"--data_dir={data}", "--any_items"]
    figures, file = [str(out / "alra"), "--tasks=none"], out / "alra" / "scores_heldout.json"
    ev.main([*scores, "--tasks=piqa,arc_easy"])
    ev.main(figures)
    before = file.read_bytes()
    for argv, said in (([*scores, "--tasks=piqa"], "scores_heldout.json: holds results with arc_easy, which this command would lose"),
                       ([*scores, "--tasks=piqa,arc_easy", "--max_length=99"], "holds results with max_length=512"),
                       ([*scores, "--tasks=piqa,arc_easy", "--dtype=bfloat16"], "holds results with dtype=float32"),
                       ([*figures, "--dtype=bfloat16"], "figures.json: holds results with dtype=float32")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            ev.main(argv)
    ev.main([*figures, "--max_rows=3"])
    assert file.read_bytes() == before and read(out / "alra")["figures"]["n_rows"] == 3
    ev.main([*scores, "--tasks=piqa,arc_easy,winogrande"])
    ev.main([*scores, "--tasks=piqa", "--limit=3", "--log_samples"])
    assert len(read(out / "alra", "scores_heldout.json")["tasks"]) == 3
    shutil.copytree(out / "pretrain" / "model", out / "alra" / "model", dirs_exist_ok=True)
    ev.main([*scores, "--tasks=arc_easy"])
    there = {f.name for f in (out / "alra").iterdir()} - {".alra-lock"}
    assert there == {"model", "run.json", "log.jsonl", "scores_heldout.json"}


def test_rows_and_students_that_do_not_fit_are_refused(out, trained, rows, data, tokenizer, tmp_path):
    def said(*argv):
        with pytest.raises(UserError) as error:
            ev.main([*map(str, argv), "--tasks=none"])
        return str(error.value)

    data_dir, alra = Path(rows.file).parent, out / "alra"
    assert "nothing to score" in said(trained / "teacher")
    assert "--skip_rows 11: " in said(alra, "--skip_rows=11")
    small = world.make_model(dataclasses.replace(STUDENT, vocab_size=293))
    small.save_pretrained(tmp_path / "small", tokenizer)
    assert "vocabulary of 293, but its tokenizer has ids up to 306" in said(tmp_path / "small")
    assert "small: vocabulary of 293" in said(alra, f"--teacher={tmp_path / 'small'}")
    world.make_model(STUDENT).save_pretrained(tmp_path / "other", make_tokenizer(283))
    assert "rows of another tokenizer than that of" in said(tmp_path / "other", f"--rows={data_dir}")
    short = dataclasses.replace(STUDENT, max_position_embeddings=4)
    world.make_model(short).save_pretrained(tmp_path / "short", tokenizer)
    assert "rows of 22 inputs" in said(tmp_path / "short", f"--rows={data_dir}")
    facts = read(alra, "run.json")
    (alra / "run.json").write_text(json.dumps(facts | {"config": facts["config"] | {"data_dir": "elsewhere"}}))
    assert f"data_dir: {data_dir} in one run, elsewhere in another; score them apart, or set --rows" in said(out)
    ev.main([str(alra), f"--rows={data_dir}", "--tasks=none", "--max_length=601"])  # which matters to tasks alone
    with pytest.raises(UserError, match=r"--max_length 601: .*alra takes 600 at most"):
        ev.main([str(alra), "--tasks=piqa", f"--data_dir={data}", "--any_items", "--max_length=601"])
