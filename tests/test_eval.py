"""eval.py, lib/tasks.py and lib/tables.py: requests scored as by lm-eval's own backend, items checked, figures and tables as defined."""

import csv
import dataclasses
import json
import math
import re
import shutil
import weakref
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

import configure
import eval as ev
from lib import metrics, tables, tasks
from lib.files import UserError
from lib.hf import load_tokenizer, tokenizer_hash
from lib.rows import PAD, Rows
from model import Qwen2, Qwen2Config
from tests import world

SHARED = world.SHARED / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="real weights and benchmark items are not here")
WORDS = [
    "the",
    "cat",
    "saw",
    "a",
    "dog",
    "under",
    "old",
    "trees",
    "while",
    "rain",
    "on",
    "seven",
    "boats",
    "13",
    "quiet",
]
CONFIG = dataclasses.asdict(configure.Config())


def sentence(rng, n, end="."):
    return " ".join(rng.choice(WORDS, n)).capitalize() + end


def row_of(task, rng):
    """A made-up item in the columns of the task's file."""

    def some(lo, hi, end="."):
        return sentence(rng, int(rng.integers(lo, hi)), end)

    labelled = {"text": [some(1, 6) for _ in range(4)], "label": list("ABCD")}
    arc = {"question": some(4, 19, "?"), "choices": labelled, "answerKey": str(rng.choice(list("ABCD")))}
    return {
        "arc_easy": arc,
        "arc_challenge": {**arc, "choices": {"text": labelled["text"][:3], "label": list("123")}, "answerKey": "2"},
        "hellaswag": {"activity_label": "Sailing", "ctx_a": some(3, 12), "ctx_b": "the dog",
                      "endings": [f"{some(2, 9)} [step] and  {some(1, 5)}" for _ in range(4)], "label": str(rng.integers(4))},
        "lambada_openai": {"text": some(9, 40, " boats")},
        "openbookqa": {"question_stem": some(4, 13), "choices": labelled, "answerKey": " B"},
        "piqa": {"goal": some(2, 9), "sol1": "take the " + some(3, 11), "sol2": "take the " + some(3, 11), "label": int(rng.integers(2))},
        "social_iqa": {"context": some(4, 13), "question": some(3, 7, "?"), "answerA": some(1, 5), "answerB": some(1, 5),
                       "answerC": some(1, 5), "label": str(rng.integers(1, 4))},
        "storycloze_2016": {**{f"input_sentence_{i}": some(3, 9) for i in (1, 2, 3, 4)}, "sentence_quiz1": some(3, 9),
                            "sentence_quiz2": some(3, 9), "answer_right_ending": int(rng.integers(1, 3))},
        "winogrande": {"sentence": some(3, 9, " _ was ") + some(2, 5), "option1": "the cat", "option2": "the dog", "answer": "2"},
    }[task]  # fmt: skip


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


# --- the rules of scoring --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "continuation", "head", "whole"), [
    ("", "the cat", "<eos>", "<eos>the cat"),  # an empty context is the prefix token,
    ("", "<eos>the cat", "<eos>", "<eos>the cat"),  # which a continuation that begins with it gives up
    ("Answer:\n", " yes", "Answer:", "Answer:\n yes"),  # whitespace at the end goes to the continuation
    ("the ca", "t saw a dog under", "the ca", "the cat saw a dog under"),  # "cat" is one token: it spans the join
    ("the cat", " saw", "the cat", "the cat saw"),  # nothing is put before a context, and a leading space stays
    ("the cat", "saw", "the cat", "the catsaw"),
])  # fmt: skip
def test_context_and_continuation_become_ids_as_in_lm_eval(student, tokenizer, context, continuation, head, whole):
    head, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (head, whole))
    got = ev.Scorer(student, tokenizer).loglikelihood(ask((context, continuation)), disable_tqdm=True)
    same(got, [naive(student, head, whole[len(head) :])])
    assert (whole[: len(head)] != head) == (context == "the ca")


def test_encoding_in_batches_gives_what_lm_eval_gives_pair_by_pair(student, tokenizer):
    rng = np.random.default_rng(2)
    joins = ["", " ", "\n", "  \n"]
    pairs = [(sentence(rng, 5, str(rng.choice(joins))), str(rng.choice(joins)) + sentence(rng, 3)) for _ in range(40)]
    scorer, seen = ev.Scorer(student, tokenizer), []
    scorer._loglikelihood_tokens = lambda requests, *rest, **kw: seen.append(requests)
    requests = ask(*pairs, ("", "cat"), ("", "<eos> cat"), ("the ca", "t saw a dog under"))
    scorer.loglikelihood(requests, disable_tqdm=True)
    TemplateLM.loglikelihood(scorer, requests, disable_tqdm=True)
    assert seen[0] == seen[1]


def test_a_context_begins_as_the_tokenizer_or_the_training_says(student):
    tokenizer = make_tokenizer(bos="<s>")
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    head, tail = (tokenizer.encode(text, add_special_tokens=False) for text in ("the cat", " saw"))
    assert bos not in head and tokenizer.encode("the cat") == [bos, *head]
    for how, before, prefix in (({}, [bos], bos), ({"bos": bos}, [bos], bos), ({"bos": None}, [], eos)):
        scorer, seen = ev.Scorer(student, tokenizer, **how), []
        scorer._loglikelihood_tokens = lambda requests, *rest, seen=seen, **kw: seen.append(requests)
        requests = ask(("the cat", " saw"), ("", " saw"))
        scorer.loglikelihood(requests, disable_tqdm=True)
        TemplateLM.loglikelihood(scorer, requests, disable_tqdm=True)
        assert seen[0] == seen[1]
        assert [r[1:] for r in seen[0]] == [([*before, *head], tail), ([prefix], tail)]


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
            ev.run(argv)
        else:
            with pytest.raises(UserError, match=f"rows with bos={bos}, but .* was trained on rows with bos={wanted}"):
                ev.run(argv)
    assert set(seen) == {wanted} and tokenizer.bos_token_id == 307


def test_what_is_too_long_loses_its_beginning(student, tokenizer):
    head, tail = list(range(3, 40)), [41, 42, 43, 44, 45]
    pair = ("", "")
    scorer = ev.Scorer(student, tokenizer, max_length=13)
    same(scorer._loglikelihood_tokens([(pair, head, tail)], True), [naive(student, head, tail, 13)])
    same(scorer._loglikelihood_tokens([(pair, head, tail * 2)], True), [naive(student, head, tail * 2, 13)])
    short = scorer._loglikelihood_tokens([(pair, head, tail)], True)[0][0]
    assert abs(short - naive(student, head, tail)[0]) > 1e-3  # the cut is felt


@pytest.mark.parametrize("n_logits", [1, 4, 6, 100])
def test_logits_in_blocks_of_the_vocabulary_and_ties_go_to_the_first(n_logits):
    z = torch.tensor([[0.0, 2.0, 2.0, 1.0, -90.0], [5.0, 1.0, 1.0, 5.0, 1.0]])
    row, y = torch.tensor([0, 0, 1, 1, 0, 1]), torch.tensor([1, 2, 3, 0, 4, 4])
    logp, greedy = ev.pick(torch.eye(2), z.T.contiguous(), row, y, n_logits)
    assert greedy.tolist() == [True, False, False, True, False, False]
    torch.testing.assert_close(logp, z.double().log_softmax(-1)[row, y], rtol=1e-6, atol=1e-6)


def test_one_missed_token_is_not_greedy(student, tokenizer):
    scorer, head = ev.Scorer(student, tokenizer), [5, 7, 11]
    best = []
    for _ in range(4):
        best.append(int(student(torch.tensor([head + best]))[0, -1].argmax()))
    wrong = [*best[:1], (best[1] + 1) % 311, *best[2:]]
    got = scorer._loglikelihood_tokens([(("", ""), head, best), (("", ""), head, wrong)], True)
    assert [greedy for _, greedy in got] == [True, False]


@pytest.mark.parametrize("batch_tokens", [1, 61, 5003])
def test_sharing_packing_and_batching_change_nothing(student, tokenizer, batch_tokens):
    rng = np.random.default_rng(3)
    requests, documents = [], []
    for document in range(11):
        head = rng.integers(1, 311, rng.integers(1, 29)).tolist()
        common = rng.integers(1, 311, rng.integers(0, 5)).tolist()
        for _ in range(rng.integers(1, 5)):
            requests.append((("", ""), head, common + rng.integers(1, 311, rng.integers(1, 9)).tolist()))
            documents.append(document)
        requests.append(requests[-1])  # the same choice twice
        documents.append(document)
    scorer = ev.Scorer(student, tokenizer, max_length=31, batch_tokens=batch_tokens)
    wanted = [naive(student, head, tail, 31) for _, head, tail in requests]
    got = scorer._loglikelihood_tokens(requests, True)
    same(got, wanted)
    assert all(a == b for r, q, a, b in zip(requests, requests[1:], got, got[1:]) if r == q)  # a tie to the last bit


def test_no_position_looks_nowhere(student, tokenizer, monkeypatch):
    """Padding too: softmax over nothing is NaN, and NaN times a weight of zero is NaN."""
    masks, hidden = [], student.hidden
    monkeypatch.setattr(type(student), "hidden", lambda self, *given: masks.append(given[2]) or hidden(*given))
    requests = [(("", ""), list(range(n)), tail) for n in (20, 9) for tail in ([50, 51], [60])]
    ev.Scorer(student, tokenizer)._loglikelihood_tokens(requests, True)
    assert masks[0].shape[0] == 2 and masks[0].any(-1).all() and not masks[0].tril().ne(masks[0]).any()


def test_the_head_runs_only_where_a_continuation_is_scored(student, tokenizer, monkeypatch):
    seen, pick = [], ev.pick
    monkeypatch.setattr(ev, "pick", lambda h, *rest: seen.append(len(h)) or pick(h, *rest))
    scorer = ev.Scorer(student, tokenizer)
    requests = [(("", ""), list(range(40)), tail) for tail in ([50, 51], [60, 61, 62], [70])]
    scorer._loglikelihood_tokens(requests, True)
    assert seen == [1 + 1 + 2]  # what follows the context stands once


def test_scores_are_fp32_whatever_the_backbone(tokenizer):
    half = world.make_model(STUDENT, 5, 7.0).to(torch.bfloat16)
    head, tail = [5, 7, 11, 13], [17, 19, 23]
    got = ev.Scorer(half, tokenizer)._loglikelihood_tokens([(("", ""), head, tail)], True)[0][0]
    h = half.hidden(torch.tensor([head + tail[:-1]]))[0, 3:].double()
    logp = (h @ half.head.double().T).log_softmax(-1)
    assert got == pytest.approx(float(logp[[0, 1, 2], tail].sum()), rel=1e-6)


@pytest.mark.parametrize("context, continuation", [("the cat", ""), (" \n", "cat"), ("", ""), ("the cat", " dog" * 13)])
def test_requests_without_an_answer_are_refused(student, tokenizer, context, continuation):
    with pytest.raises(UserError, match=r"expected a context|nothing to condition on"):
        ev.Scorer(student, tokenizer, max_length=7).loglikelihood(ask((context, continuation)), disable_tqdm=True)


# --- the tasks -------------------------------------------------------------------------------------------------


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
    heldout = {name: (task.heldout, task.validation) for name, task in tasks.TASKS.items()}
    assert heldout == {
        "arc_challenge": (("test", 1172), None), "arc_easy": (("test", 2376), ("validation", 570)),
        "hellaswag": (("validation", 10042), ("train", 39905)), "lambada_openai": (("test", 5153), None),
        "openbookqa": (("test", 500), None), "piqa": (("validation", 1838), ("train", 16113)),
        "social_iqa": (("validation", 1954), None), "storycloze_2016": (("test", 1000), None),
        "winogrande": (("validation", 1267), None),
    }  # fmt: skip
    assert list(tasks.TASKS) == list(tables.COLUMNS)
    for split, names in tables.SUITES.items():
        assert tasks.choose_tasks("all", split) == names
        got = bench(Recorder(), names, "--data_dir", data, "--split", split)
        assert {scores["n"] for scores in got.values()} == {7 if split == "heldout" else 5}
        assert [scores["n_paper"] for scores in got.values()] == [getattr(tasks.TASKS[n], split)[1] for n in names]


@pytest.mark.parametrize(
    "split", ["made-up", pytest.param("heldout", marks=needs_shared), pytest.param("validation", marks=needs_shared)]
)
def test_scores_equal_those_of_lm_evals_own_backend(split, student, tokenizer, data, tmp_path):
    """Every log-likelihood, greedy flag and score of ours against those of HFLM; real weights and items where they are there."""
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face backend needs accelerate")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    folder, argv, without = tmp_path, ["--data_dir", data], ()
    if split == "made-up":
        student.save_pretrained(folder, tokenizer)
    else:
        folder, argv = SHARED / "stories260k", ["--data_dir", SHARED / "eval", "--limit", 5, "--split", split]
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
    wanted = bench(Recorder(), list(tasks.TASKS), "--data_dir", data)
    hub, calls = tmp_path / "hub", []
    for name, task in tasks.TASKS.items():
        if name != "storycloze_2016":
            from lm_eval.tasks._yaml_loader import load_yaml

            there = load_yaml(tasks.task_file(name), resolve_func=False)
            folder, split = hub / there["dataset_path"], task.heldout[0]
            rows = [json.loads(line) for line in (data / name / f"{split}.jsonl").read_text().splitlines()]
            part = there.get("dataset_name") or "default"
            (folder / part).mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_list(rows).to_parquet(folder / part / f"{split}.parquet")
            parts = sorted(p.name for p in folder.iterdir() if p.is_dir())
            configs = [
                f'- config_name: {p}\n  data_files:\n  - split: {split}\n    path: "{p}/{split}.parquet"\n'
                for p in parts
            ]
            (folder / "README.md").write_text("---\nconfigs:\n" + "".join(configs) + "---\n")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    story = str(data / "storycloze_2016" / "test.jsonl")
    local = bench(Recorder(), list(tasks.TASKS), "--data_dir", hub, "--storycloze", story)
    load = datasets.load_dataset

    def from_the_hub(path, name=None, **kw):
        calls.append(path)
        return load(path if path == "parquet" else str(hub / path), name, **kw)

    monkeypatch.setattr(datasets, "load_dataset", from_the_hub)
    far = bench(Recorder(), list(tasks.TASKS), "--storycloze", story)
    assert "allenai/ai2_arc" in calls and "Rowan/hellaswag" in calls
    for name in tasks.TASKS:
        for key in ("prompts_sha256", "data_sha256", "task_sha256", "acc", "n"):
            assert wanted[name][key] == local[name][key] == far[name][key]


def test_storycloze_from_its_own_csv_or_tsv_or_parquet(data, tmp_path):
    rows = [json.loads(line) for line in (data / "storycloze_2016" / "test.jsonl").read_text().splitlines()]
    heads = ["InputStoryid", *(f"InputSentence{i}" for i in (1, 2, 3, 4)), "RandomFifthSentenceQuiz1",
             "RandomFifthSentenceQuiz2", "AnswerRightEnding"]  # fmt: skip
    hashes = []
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        file = tmp_path / f"cloze.{suffix}"
        with file.open("w", newline="", encoding="utf-8-sig") as out:
            lines = csv.writer(out, delimiter=delimiter)
            lines.writerow(heads)
            lines.writerows([i, *row.values()] for i, row in enumerate(rows))
        got = bench(Recorder(), ["storycloze_2016"], "--storycloze", file)["storycloze_2016"]
        assert got["n"] == 7 and got["n_paper"] == 1000
        hashes.append((got["data_sha256"], got["prompts_sha256"]))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "cloze.parquet")
    got = bench(Recorder(), ["storycloze_2016"], "--storycloze", tmp_path / "cloze.parquet")
    hashes.append((got["storycloze_2016"]["data_sha256"], got["storycloze_2016"]["prompts_sha256"]))
    wanted = bench(Recorder(), ["storycloze_2016"], "--data_dir", data)["storycloze_2016"]
    assert hashes == [(wanted["data_sha256"], wanted["prompts_sha256"])] * 3


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
    ("piqa", "piqa/validation.jsonl", b"{\n", "{}: cannot be used .JSONDecodeError"),
    ("piqa", "piqa/validation.jsonl", b"[1]\n", "{}: cannot be used"),
    ("piqa", "piqa/validation.jsonl", b'{"goal": "\xe9"}\n', "{}: cannot be used .UnicodeDecodeError"),
    ("piqa", "piqa/validation.jsonl", b'{"goal": "a"}\n', "{}: cannot be used .KeyError: 'sol1'.*expected items of piqa, with goal, sol1"),
    ("storycloze_2016", "story.csv", b"InputSentence1\n\xe9\n", "{}: cannot be used"),
    ("storycloze_2016", "story.csv", b"InputSentence1,AnswerRightEnding\na,3\n", "{}: .*expected answer_right_ending to be 1 or 2"),
    ("storycloze_2016", "story.xml", b"x", "{}: expected one of .jsonl, .csv, .tsv, .parquet"),
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


@pytest.mark.parametrize(("argv", "said"), [
    (["--tasks=arc_esay"], "no task 'arc_esay' in the heldout set, did you mean 'arc_easy'"),
    (["--tasks=winogrande", "--split=validation"], "no task 'winogrande' in the validation set"),
    (["--limit=1"], "--limit 1"), (["y", "--out=z"], "--out z"), (["--device=gpu"], "device=gpu"),
])  # fmt: skip
def test_slips_on_the_command_line(argv, said, student, tokenizer, tmp_path):
    student.save_pretrained(tmp_path / "x", tokenizer)
    with pytest.raises(UserError, match=said):
        ev.run([str(tmp_path / "x"), *argv])


# --- figures over held-out rows --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tokenizer):
    rng, folder = np.random.default_rng(5), tmp_path_factory.mktemp("data")
    ids = rng.integers(1, 307, (11, 23), dtype=np.uint32)
    for row, n in ((2, 17), (5, 2), (7, 19)):
        ids[row, n:] = PAD
    ids[3, 8] = 0  # <eos> inside
    world.write_rows(folder, "val", ids=ids, tokenizer_sha256=tokenizer_hash(tokenizer))
    return Rows(str(folder), "val", 22, False, 311)


def sums_of(students, teacher, rows, n_bytes, batch_tokens=1000):
    teacher = teacher and ev.Teacher(teacher, torch.device("cpu"))
    return ev.over_rows(students, teacher, rows, np.arange(rows.n), n_bytes, batch_tokens)


def test_figures_equal_plain_loops(student, teacher, tokenizer, rows):
    n_bytes = ev.byte_lengths(tokenizer, 311)
    sums = sums_of([student], teacher, rows, n_bytes, 53)[0]
    got = metrics.figures({key: value.sum(0) for key, value in sums.items()})
    ce = kl = ce_t = top1 = top5 = n = text_ce = text_bytes = 0
    bins = [[] for _ in range(15)]
    for row in rows.ids.astype(np.int64):
        row = row[row != PAD]
        p_s, p_t = (m(torch.tensor(row[None, :-1]))[0].double().softmax(-1).numpy() for m in (student, teacher))
        for s, t, y in zip(p_s, p_t, row[1:], strict=True):
            n, ce, ce_t = n + 1, ce - math.log(s[y]), ce_t - math.log(t[y])
            kl += sum(b * math.log(b / a) for a, b in zip(s, t, strict=True))
            best_s, best_t = np.argsort(-s), np.argsort(-t)
            top1 += best_s[0] == best_t[0]
            top5 += len(set(best_s[:5]) & set(best_t[:5])) / 5
            sure = s[best_s[0]]
            bins[math.ceil(sure * 15) - 1].append(sure - (best_s[0] == y))
            if y:
                text_ce, text_bytes = text_ce - math.log(s[y]), text_bytes + n_bytes[y]
    wanted = {"ce": ce / n, "kl": kl / n, "top1": top1 / n, "top5": top5 / n, "teacher_ce": ce_t / n,
              "bits_per_byte": text_ce / text_bytes / math.log(2), "ece": sum(abs(sum(b)) for b in bins) / n}  # fmt: skip
    assert n == sums["n"].sum()
    for key, value in wanted.items():
        assert got[key] == pytest.approx(value, rel=1e-5), key


def test_a_student_is_scored_alike_alone_and_in_company(student, teacher, tokenizer, rows):
    n_bytes = ev.byte_lengths(tokenizer, 311)
    other = world.make_model(STUDENT, 8, 7.0)
    alone = sums_of([student], teacher, rows, n_bytes)[0]
    both = sums_of([other, student], teacher, rows, n_bytes)[1]
    bare = sums_of([student], None, rows, n_bytes, 29)[0]
    for key in alone:
        np.testing.assert_array_equal(alone[key], both[key])
        if key not in metrics.TEACHER_KEYS:
            np.testing.assert_allclose(alone[key], bare[key], rtol=1e-5, atol=1e-5)
    assert set(metrics.TEACHER_KEYS).isdisjoint(bare)


def test_a_certain_student_falls_into_the_last_bin(tokenizer, rows):
    certain = world.make_model(STUDENT, 5, 900.0)
    gap = sums_of([certain], None, rows, ev.byte_lengths(tokenizer, 311))[0]["gap"]
    z = certain(torch.from_numpy(rows.ids[:1, :-1].astype(np.int64)))[0]
    assert (z.softmax(-1).amax(-1) == 1).any()  # exactly, in fp32
    wrong = (z.argmax(-1).numpy() != rows.ids[0, 1:]).sum()
    assert gap[0].sum() == pytest.approx(wrong, abs=0.5) and gap[0, -1] > 0.9 * wrong


def test_bytes_of_tokens(tokenizer):
    text = "the cat saw Überraschung — 13 boats"
    lengths = ev.byte_lengths(tokenizer, 311)
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[0] == 0 and not lengths[307:].any()


@needs_shared
@pytest.mark.parametrize("name", ["stories260k", "qwen1.5-1.8b"])
def test_bytes_of_real_tokens(name):
    tokenizer = load_tokenizer(str(SHARED / name))
    text = (SHARED / "stories260k" / "sample.txt").read_text()[:997].replace("<|endoftext|>", "") + " naïve — 你好"
    ids = tokenizer.encode(text, add_special_tokens=False)
    added = 1 if name == "stories260k" else 0  # sentencepiece puts a space before the text
    assert ev.byte_lengths(tokenizer, 151_936)[ids].sum() == len(text.encode()) + added


def test_paired_bootstrap():
    rng = np.random.default_rng(6)
    ones = np.full(97, 30.0)
    base = {
        "n": ones,
        "ce": rng.normal(90, 20, 97),
        "text_ce": ones,
        "text_bytes": ones,
        "gap": rng.normal(0, 1, (97, 15)),
    }
    better = {**base, "ce": base["ce"] - rng.normal(3, 1, 97)}
    low, high = metrics.bootstrap(better, base)["ce"]
    assert -0.115 < low < -0.1 < high < -0.085  # the rows' own spread, 20 / 30, cancels
    assert metrics.bootstrap(base, base)["ce"] == (0, 0) and metrics.bootstrap(better, base)["ce"] == (low, high)
    assert metrics.bootstrap(better, base)["ece"] == (0, 0) and "kl" not in metrics.bootstrap(better, base)
