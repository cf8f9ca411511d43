"""eval.py, tasks.py and tables.py: requests scored as lm-eval's own backend scores them, rows checked, figures and tables as defined."""

import csv
import functools
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import datasets
import numpy as np
import pytest
import safetensors.torch
import session
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import configure
import eval as ev
from lib import figures, tables, tasks
from lib.rows import quick_hash
from model import Qwen2, Qwen2Config, init_student, load_tokenizer, tokenizer_hash

tabulate = functools.partial(tables.tabulate, defaults=ev.DEFAULTS)
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
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


def write_rows(folder, task, split, rows):
    file = Path(folder) / task / f"{split}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(n=307):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rng = np.random.default_rng(0)
    trainer = trainers.BpeTrainer(vocab_size=n, special_tokens=["<eos>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator([sentence(rng, 13) for _ in range(50)] + ["Answer:\n yes"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sharp(model, scale=7.0):
    """Fresh weights, made large enough for likelihoods that differ."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(scale)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def student():
    return sharp(init_student(Qwen2Config(24, 53, 2, 4, 2, vocab_size=311, max_position_embeddings=600), 5))


@pytest.fixture(scope="module")
def teacher():
    return sharp(init_student(Qwen2Config(36, 61, 3, 3, 1, vocab_size=311, tie_word_embeddings=False), 6))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """All nine tasks in the layout of local files, 7 items each and 5 in the validation sets."""
    folder, rng = tmp_path_factory.mktemp("eval"), np.random.default_rng(1)
    for name, task in tasks.TASKS.items():
        for n, part in ((7, task.heldout), (5, task.validation)):
            if part:
                write_rows(folder, name, part[0], [row_of(name, rng) for _ in range(n)])
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
    return ev.arguments(["x", *argv])


# --- the rules of scoring --------------------------------------------------------------------------------------


def test_an_empty_context_is_the_prefix_token(student, tokenizer):
    scorer, eos = ev.Scorer(student, tokenizer), tokenizer.eos_token_id
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    got = scorer.loglikelihood(ask(("", "the cat"), ("", "<eos>the cat")), disable_tqdm=True)
    same(got, [naive(student, [eos], plain)] * 2)  # a continuation that begins with the prefix gives it up


def test_whitespace_at_the_end_of_a_context_goes_to_the_continuation(student, tokenizer):
    whole, context = tokenizer.encode("Answer:\n yes"), tokenizer.encode("Answer:")
    got = ev.Scorer(student, tokenizer).loglikelihood(ask(("Answer:\n", " yes")), disable_tqdm=True)
    same(got, [naive(student, context, whole[len(context) :])])


def test_the_input_is_context_plus_tail_even_where_a_token_spans_the_join(student, tokenizer):
    context, whole = tokenizer.encode("the ca"), tokenizer.encode("the cat")
    assert whole[: len(context)] != context  # "cat" is one token
    got = ev.Scorer(student, tokenizer).loglikelihood(ask(("the ca", "t saw a dog under")), disable_tqdm=True)
    tail = tokenizer.encode("the cat saw a dog under")[len(context) :]
    same(got, [naive(student, context, tail)])


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


def adds_bos(vocab=307):
    tokenizer = make_tokenizer(vocab)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def test_a_context_begins_as_the_tokenizer_or_the_training_says(student):
    tokenizer = adds_bos()
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


@pytest.mark.parametrize(("facts", "wanted"), [(None, "auto"), ({}, None), ({"bos": None}, None), ({"bos": 307}, 307)])
def test_a_student_is_scored_with_the_bos_of_its_rows(facts, wanted, rows, tmp_path, monkeypatch):
    """Facts of the student's run (None: no run) -> the BOS of its contexts; rows with another BOS are refused."""
    tokenizer, seen, folder = adds_bos(), [], tmp_path / "out" / "alra"
    model = init_student(Qwen2Config(24, 53, 1, 4, 2, vocab_size=311))
    model.save_pretrained(folder / "model" if facts is not None else folder, tokenizer)
    if facts is not None:
        (folder / "run.json").write_text(json.dumps({"method": "alra"} | facts))
        (folder.parent / "run.json").write_text(json.dumps({"config": {"data_dir": None, "teacher": None}}))
    monkeypatch.setattr(ev, "Scorer", lambda *args: seen.append(args[4]))
    (tmp_path / "data").mkdir()
    rows[:3].tofile(tmp_path / "data" / "val.bin")
    manifest = {"rows": 3, "row_len": rows.shape[1], "tokenizer_sha256": tokenizer_hash(tokenizer)}
    manifest |= {"eos_id": 0, "sha256": "x"}
    manifest["quick_sha256"] = quick_hash(tmp_path / "data" / "val.bin")
    for bos in (None, 307):
        (tmp_path / "data" / "val.json").write_text(json.dumps(manifest | {"bos": bos}))
        argv = [str(folder), "--tasks", "none", "--rows", str(tmp_path / "data"), "--out", str(tmp_path / f"{bos}")]
        if wanted in (bos, "auto"):
            ev.run(argv)
        else:
            with pytest.raises(
                ev.UserError, match=f"rows with bos={bos}, but .* was trained on rows with bos={wanted}"
            ):
                ev.run(argv)
    assert set(seen) == {wanted} and tokenizer.bos_token_id == 307


def test_nothing_is_put_before_a_context(student, tokenizer):
    seen = []
    scorer = ev.Scorer(student, tokenizer)
    scorer._loglikelihood_tokens = lambda requests, *rest: seen.extend(requests)
    scorer.loglikelihood(ask(("the cat", " saw")), disable_tqdm=True)
    assert seen[0][1] == tokenizer.encode("the cat", add_special_tokens=False)


def test_what_is_too_long_loses_its_beginning(student, tokenizer):
    head, tail = list(range(3, 40)), [41, 42, 43, 44, 45]
    pair = ("", "")
    scorer = ev.Scorer(student, tokenizer, max_length=13)
    same(scorer._loglikelihood_tokens([(pair, head, tail)], True), [naive(student, head, tail, 13)])
    same(scorer._loglikelihood_tokens([(pair, head, tail * 2)], True), [naive(student, head, tail * 2, 13)])
    short = scorer._loglikelihood_tokens([(pair, head, tail)], True)[0][0]
    assert abs(short - naive(student, head, tail)[0]) > 1e-3  # the cut is felt


def test_a_score_is_a_sum_over_tokens(student, tokenizer):
    scorer = ev.Scorer(student, tokenizer)
    (one, _), (two, _) = scorer.loglikelihood(ask(("the cat saw", " a"), ("the cat saw", " a dog")), disable_tqdm=True)
    assert two < one < 0


def test_a_leading_space_stays(student, tokenizer):
    a, b = ev.Scorer(student, tokenizer).loglikelihood(ask(("the cat", " saw"), ("the cat", "saw")), disable_tqdm=True)
    assert a[0] != b[0]
    same([a], [naive(student, tokenizer.encode("the cat"), tokenizer.encode(" saw"))])


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
    same(scorer._loglikelihood_tokens(requests, True), wanted)


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


def test_scores_are_fp32_whatever_the_backbone(student, tokenizer):
    half = sharp(init_student(student.config, 5)).to(torch.bfloat16)
    head, tail = [5, 7, 11, 13], [17, 19, 23]
    got = ev.Scorer(half, tokenizer)._loglikelihood_tokens([(("", ""), head, tail)], True)[0][0]
    h = half.hidden(torch.tensor([head + tail[:-1]]))[0, 3:].double()
    logp = (h @ half.head.double().T).log_softmax(-1)
    assert got == pytest.approx(float(logp[[0, 1, 2], tail].sum()), rel=1e-6)


@pytest.mark.parametrize("context, continuation", [("the cat", ""), (" \n", "cat"), ("", ""), ("the cat", " dog" * 13)])
def test_requests_without_an_answer_are_refused(student, tokenizer, context, continuation):
    with pytest.raises(tasks.UserError, match=r"expected a context|nothing to condition on"):
        ev.Scorer(student, tokenizer, max_length=7).loglikelihood(ask((context, continuation)), disable_tqdm=True)


def bench(lm, names, args):
    return ev.benchmarks(lm, tasks.read_items(names, args.split, args.data_dir, args.storycloze), args)


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
    write_rows(tmp_path, name, tasks.TASKS[name].heldout[0], [row, row])
    recorder = Recorder()
    got = bench(recorder, [name], options("--data_dir", str(tmp_path)))
    assert recorder.asked == wanted * 2
    assert got[name]["acc"] == (
        0.0 if name == "lambada_openai" else 1.0
    )  # the longest is right, and ties go to the first


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
        got = bench(Recorder(), names, options("--data_dir", str(data), "--split", split))
        assert {scores["n"] for scores in got.values()} == {7 if split == "heldout" else 5}
        assert [scores["n_paper"] for scores in got.values()] == [getattr(tasks.TASKS[n], split)[1] for n in names]


def test_scores_equal_those_of_lm_evals_own_backend(student, tokenizer, data, tmp_path):
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face backend needs accelerate")
    student.save_pretrained(tmp_path / "model", tokenizer)
    compare(tmp_path / "model", tokenizer, options("--data_dir", str(data), "--log_samples"))


@needs_shared
@pytest.mark.parametrize("split", ["heldout", "validation"])
def test_scores_of_real_weights_on_real_items_equal_those_of_lm_evals_own_backend(split):
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face backend needs accelerate")
    folder = SHARED / "stories260k"
    argv = ("--data_dir", str(SHARED / "eval"), "--log_samples", "--limit", "5", "--split", split)
    compare(
        folder,
        load_tokenizer(str(folder)),
        options(*argv),
        ["storycloze_2016"] + ["hellaswag"] * (split == "validation"),
    )


def compare(folder, tokenizer, args, without=()):
    """Every log-likelihood, greedy flag and score of ours against those of HFLM."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    names = [name for name in tasks.choose_tasks("all", args.split) if name not in without]
    theirs = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer=tokenizer,
                  max_length=512, batch_size=16, logits_cache=False, device="cpu")  # fmt: skip
    a = bench(ev.Scorer(Qwen2.from_pretrained(str(folder)), tokenizer, batch_tokens=503), names, args)
    b = bench(theirs, names, args)
    for name in names:
        pairs = [[r[0] for sample in x[name]["samples"] for r in sample["resps"]] for x in (a, b)]
        same(*pairs)
        assert {k: a[name][k] for k in ("acc", "acc_norm") if k in a[name]} == {
            k: b[name][k] for k in ("acc", "acc_norm") if k in b[name]
        }
        assert a[name]["prompts_sha256"] == b[name]["prompts_sha256"]
        if name == "lambada_openai":
            assert a[name]["perplexity"] == pytest.approx(b[name]["perplexity"], rel=1e-4)


def test_every_source_gives_the_same_items(data, tmp_path, monkeypatch):
    wanted = bench(Recorder(), list(tasks.TASKS), options("--data_dir", str(data)))
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
    local = bench(Recorder(), list(tasks.TASKS), options("--data_dir", str(hub), "--storycloze", story))
    load = datasets.load_dataset

    def from_the_hub(path, name=None, **kw):
        calls.append(path)
        return load(path if path == "parquet" else str(hub / path), name, **kw)

    monkeypatch.setattr(datasets, "load_dataset", from_the_hub)
    far = bench(Recorder(), list(tasks.TASKS), options("--storycloze", story))
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
        got = bench(Recorder(), ["storycloze_2016"], options("--storycloze", str(file)))["storycloze_2016"]
        assert got["n"] == 7 and got["n_paper"] == 1000
        hashes.append((got["data_sha256"], got["prompts_sha256"]))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "cloze.parquet")
    got = bench(Recorder(), ["storycloze_2016"], options("--storycloze", str(tmp_path / "cloze.parquet")))
    hashes.append((got["storycloze_2016"]["data_sha256"], got["storycloze_2016"]["prompts_sha256"]))
    wanted = bench(Recorder(), ["storycloze_2016"], options("--data_dir", str(data)))["storycloze_2016"]
    assert hashes == [(wanted["data_sha256"], wanted["prompts_sha256"])] * 3


BAD = [
    ("piqa", {"label": "1"}, r"piqa.validation\.jsonl, row 3, field 'label': expected 0 or 1, got '1'"),
    ("piqa", {"label": True}, "field 'label': expected 0 or 1, got True"),
    ("winogrande", {"answer": 2}, r"winogrande.validation\.jsonl, row 3, field 'answer': expected '1' or '2', got 2"),
    ("winogrande", {"sentence": "no gap"}, "field 'sentence': expected a string with a gap"),
    ("storycloze_2016", {"answer_right_ending": "2"}, "field 'answer_right_ending': expected 1 or 2, got '2'"),
    ("hellaswag", {"label": ""}, "field 'label': expected an index into endings"),
    ("hellaswag", {"endings": "abc"}, "field 'endings': expected a list of strings"),
    ("arc_easy", {"answerKey": "E"}, "field 'answerKey': expected one of the labels"),
    ("openbookqa", {"choices": {"text": ["a", "b"], "label": ["A"]}}, "field 'choices': expected"),
    ("hellaswag", {"label": 1}, "field 'label': 1, and '[0-3]' in row 1; expected one type throughout"),
    ("arc_easy", {"choices": {"text": "abcd", "label": "ABCD"}}, "field 'choices': expected"),
    ("arc_challenge", {"choices": {"text": [1, 2], "label": ["1", "2"]}}, "field 'choices': expected"),
    ("openbookqa", {"choices": {"text": ["", "b"], "label": ["A", "B"]}}, "field 'choices': expected"),
    ("openbookqa", {"question_stem": " "}, "field 'question_stem': expected a string that is not blank"),
    ("piqa", {"sol2": ""}, "field 'sol2': expected a string that is not blank"),
    ("winogrande", {"sentence": "a gap at the end _ "}, "field 'sentence': expected a string with a gap '_' and words"),
    ("lambada_openai", {"text": "alone"}, "field 'text': expected words, a space and the last word"),
    ("lambada_openai", {"text": "a cat saw "}, "field 'text': expected words, a space and the last word"),
    ("lambada_openai", {"text": " boats"}, "field 'text': expected words, a space and the last word"),
    ("social_iqa", {"label": "0"}, "field 'label': expected '1' or '2' or '3'"),
]


@pytest.mark.parametrize("name, change, message", BAD)
def test_bad_items_are_refused_with_file_row_and_field(name, change, message, tmp_path):
    rng, split = np.random.default_rng(4), tasks.TASKS[name].heldout[0]
    rows = [row_of(name, rng) for _ in range(5)]
    rows[2] = {**rows[2], **change}
    write_rows(tmp_path, name, split, rows)
    with pytest.raises(tasks.UserError, match=message):
        bench(Recorder(), [name], options("--data_dir", str(tmp_path)))
    del rows[2][next(iter(change))]
    write_rows(tmp_path, name, split, rows)
    with pytest.raises(tasks.UserError, match=f"row 3: no field '{next(iter(change))}'"):
        bench(Recorder(), [name], options("--data_dir", str(tmp_path)))
    write_rows(tmp_path, name, split, [])
    with pytest.raises(tasks.UserError, match="no rows"):
        bench(Recorder(), [name], options("--data_dir", str(tmp_path)))


def test_files_that_are_no_files_are_refused(tmp_path):
    def tried(*argv, name="piqa"):
        with pytest.raises(tasks.UserError) as error:
            bench(Recorder(), [name], options(*argv))
        return str(error.value)

    assert f"no {tmp_path / 'piqa' / 'validation.jsonl'}" in tried("--data_dir", str(tmp_path))
    write_rows(tmp_path, "piqa", "validation", [])
    (tmp_path / "piqa" / "validation.jsonl").write_text('{"goal": 1}\n{')
    assert "row 1, field 'goal'" in tried("--data_dir", str(tmp_path))
    (tmp_path / "piqa" / "validation.jsonl").write_text("[1]\n")
    assert "row 1: expected an object" in tried("--data_dir", str(tmp_path))
    (tmp_path / "piqa" / "validation.jsonl").write_text("{\n")
    assert "row 1: not JSON" in tried("--data_dir", str(tmp_path))
    (tmp_path / "piqa" / "validation.jsonl").write_bytes(b'{"goal": "\xe9"}\n')
    assert "row 1: not JSON in UTF-8" in tried("--data_dir", str(tmp_path))
    (tmp_path / "story.csv").write_bytes(b"InputSentence1\n\xe9\n")
    assert "story.csv: expected UTF-8" in tried("--storycloze", str(tmp_path / "story.csv"), name="storycloze_2016")
    assert "on request" in tried("--data_dir", str(tmp_path), name="storycloze_2016")
    assert "no such file" in tried("--storycloze", str(tmp_path / "gone.csv"), name="storycloze_2016")
    (tmp_path / "story.xml").write_text("x")
    assert "expected .jsonl, .csv, .tsv or .parquet" in tried(
        "--storycloze", str(tmp_path / "story.xml"), name="storycloze_2016"
    )


def test_slips_on_the_command_line():
    for asked, split, message in (
        ("arc_esay", "heldout", "no task 'arc_esay' in the heldout set, did you mean 'arc_easy'"),
        ("winogrande", "validation", "no task 'winogrande' in the validation set"),
    ):
        with pytest.raises(tasks.UserError, match=message):
            tasks.choose_tasks(asked, split)
    for argv in (("--limit", "1"), ("--max_rows", "0"), ("--csv", "x.csv"), ("y", "--out", "z")):
        with pytest.raises(tasks.UserError, match=argv[-2]):
            ev.run(["x", *argv])
    for name in ("cuda:97", "meta", "gpu"):
        with pytest.raises(ValueError, match=f"device {name}"):
            ev.pick_device(name)


# --- figures over held-out rows --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(5)
    ids = rng.integers(1, 307, (11, 23), dtype=np.uint32)
    for row, n in ((2, 17), (5, 2), (7, 19)):
        ids[row, n:] = ev.PAD
    ids[3, 8] = 0  # <eos> inside
    return ids


def test_figures_equal_plain_loops(student, teacher, tokenizer, rows):
    n_bytes = ev.byte_lengths(tokenizer, 311)
    sums = ev.over_rows([student], teacher, rows, n_bytes, 53)[0]
    got = figures.figures({key: value.sum(0) for key, value in sums.items()})
    ce = kl = ce_t = top1 = top5 = n = text_ce = text_bytes = 0
    bins = [[] for _ in range(15)]
    for row in rows.astype(np.int64):
        row = row[row != ev.PAD]
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
    other = sharp(init_student(student.config, 8))
    alone = ev.over_rows([student], teacher, rows, n_bytes, 1000)[0]
    both = ev.over_rows([other, student], teacher, rows, n_bytes, 1000)[1]
    bare = ev.over_rows([student], None, rows, n_bytes, 29)[0]
    for key in alone:
        np.testing.assert_array_equal(alone[key], both[key])
        if key not in figures.TEACHER_KEYS:
            np.testing.assert_allclose(alone[key], bare[key], rtol=1e-5, atol=1e-5)
    assert set(figures.TEACHER_KEYS).isdisjoint(bare)


def test_a_certain_student_falls_into_the_last_bin(student, tokenizer, rows):
    certain = sharp(init_student(student.config, 5), 900.0)
    gap = ev.over_rows([certain], None, rows, ev.byte_lengths(tokenizer, 311), 1000)[0]["gap"]
    z = certain(torch.from_numpy(rows[:1, :-1].astype(np.int64)))[0]
    assert (z.softmax(-1).amax(-1) == 1).any()  # exactly, in fp32
    wrong = (z.argmax(-1).numpy() != rows[0, 1:]).sum()
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


@needs_shared
def test_the_readme_says_how_many_requests_are_cut():
    """512 inputs and the last target; a token is a character or more, so that only long texts need to be counted."""
    tokenizer, long = load_tokenizer(str(SHARED / "qwen1.5-1.8b")), {}
    for split in ("train", "validation"):
        lines = (SHARED / "eval" / "piqa" / f"{split}.jsonl").read_text().splitlines()
        texts = [f"Question: {r['goal']}\nAnswer: {r[s]}" for r in map(json.loads, lines) for s in ("sol1", "sol2")]
        texts = [text for text in texts if len(text) > 513]
        long[split] = sum(len(ids) > 513 for ids in tokenizer(texts)["input_ids"])
    assert long == {"train": 4, "validation": 0}
    assert "cuts four requests of PIQA's training set" in " ".join((ROOT / "README.md").read_text().split())


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
    low, high = tables.bootstrap(better, base)["ce"]
    assert -0.115 < low < -0.1 < high < -0.085  # the rows' own spread, 20 / 30, cancels
    assert tables.bootstrap(base, base)["ce"] == (0, 0) and tables.bootstrap(better, base)["ce"] == (low, high)
    assert tables.bootstrap(better, base)["ece"] == (0, 0) and "kl" not in tables.bootstrap(better, base)


# --- tables ----------------------------------------------------------------------------------------------------


def test_the_papers_numbers_agree_with_themselves():
    for (size, split, method), row in tables.PAPER.items():
        accs = [row[t] for t in tables.COLUMNS if t in row]
        if accs:
            assert len(accs) == 9 and split == "heldout"
            assert sum(accs) / 9 == pytest.approx(row["avg"], abs=0.0101)
            if method != "pretrain":
                assert row["gain"] == pytest.approx(
                    row["avg"] - tables.PAPER[size, split, "pretrain"]["avg"], abs=0.0101
                )
    assert [m for _, _, names in tables.LAYOUT for m in names].count("alra") == 4
    assert len(tables.PAPER) == 2 * (9 + 2 + 10)  # main table, weighting; budget and anchoring with one alra in common


def fake(folder, method, accs, seed=1234, split="heldout", student="200m", run=(), protocol=(), intrinsic=None, **task):
    """A result file of a made-up student; accs by task, in %."""
    facts = {"method": method, "seed": seed, "student": student, "init_sha256": f"init{seed}", "data_sha256": "data", "step": 7,
             "teacher_sha256": None if method == "pretrain" else "teacher", "overrides": {}, "config": {"lr": 6e-4}, **dict(run)}  # fmt: skip
    scores = {t: {"acc": a / 100, "acc_stderr": 0.01, "n": 500, "n_rows": 500, "n_paper": getattr(tasks.TASKS[t], split)[1], "source": "here",
                 "data_sha256": t, "prompts_sha256": t, "version": 1.0, **task} for t, a in accs.items()}  # fmt: skip
    result = {"name": str(folder), "split": split, "run": facts, "tasks": scores, "intrinsic": intrinsic, "weights_sha256": "w",
              "protocol": {"lm_eval": "0.4.13", "dtype": "float32", "max_length": 512, "limit": None, **dict(protocol)}}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"eval_{split}.json").write_text(json.dumps(result))
    return result


ALL = {t: 20.0 + i for i, t in enumerate(tables.COLUMNS)}


def cells(text, start):
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [c.strip() for c in line.strip("|").split("|")]


def test_table_in_the_papers_rows_order_and_marks(tmp_path):
    fake(tmp_path / "a" / "alra", "alra", {**ALL, "piqa": 58.654, "arc_easy": 37.0})
    fake(tmp_path / "a" / "pretrain", "pretrain", ALL)
    fake(tmp_path / "a" / "tad", "tad", {**ALL, "piqa": 58.649, "arc_easy": 36.0})
    fake(tmp_path / "a" / "bdl", "bdl", {**ALL, "arc_easy": 35.0})
    (tmp_path / "a" / "run.json").write_text("{}")
    text, records = tabulate([str(p) for p in sorted((tmp_path / "a").iterdir())])
    firsts = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert firsts == ["", "---", "Pre-Train w/o KD", "*paper*", "TAD", "*paper*", "ALRA", "*paper*", "bdl"]
    assert cells(text, "")[1:] == [
        "ARC-C",
        "ARC-E",
        "HS",
        "LAMB",
        "OBQA",
        "PIQA",
        "SIQA",
        "SC16",
        "WG",
        "Avg.",
        "Δ pretrain",
    ]
    alra, tad = cells(text, "ALRA"), cells(text, "TAD")
    assert alra[2] == "**37.00**" and tad[2] == "*36.00*"
    assert alra[6] == tad[6] == "**58.65**"  # equal as printed, marked alike
    assert alra[1] == "20.00"  # nothing to choose between
    gain = (58.654 - 25 + 37 - 21) / 9
    assert alra[10:] == [f"**{24 + gain:.2f}**", f"{gain:+.2f}"] and cells(text, "Pre-Train w/o KD")[10:] == [
        "24.00",
        "Ref.",
    ]
    paper = [cells(line, "*paper*") for line in text.splitlines() if line.startswith("| *paper*")]
    assert paper[2][1:] == [
        "21.33",
        "37.71",
        "28.09",
        "19.91",
        "24.20",
        "58.65",
        "35.41",
        "52.40",
        "51.85",
        "36.62",
        "+2.31",
    ]
    assert "SC16: 500 items, the paper has 1,000." in text and "OBQA" not in text.split("One seed each")[1]
    cell = next(r for r in records if r["method"] == "tad" and r["column"] == "piqa")
    assert cell == {"table": "Main results", "student": "200m", "split": "heldout", "method": "tad", "column": "piqa",
                    "metric": "acc", "value": pytest.approx(58.649), "plus_minus": None, "n_seeds": 1, "paper": 58.76}  # fmt: skip


def test_acc_norm_where_a_task_has_it(tmp_path):
    for method, norm in (("pretrain", 0.5), ("alra", 0.6)):
        result = fake(tmp_path / method, method, ALL)
        result["tasks"]["piqa"]["acc_norm"] = result["tasks"]["arc_easy"]["acc_norm"] = norm
        (tmp_path / method / "eval_heldout.json").write_text(json.dumps(result))
    text, records = tabulate([str(tmp_path)], metric="acc_norm")
    assert "### Main results: accuracy in %, acc_norm where a task has it, heldout" in text
    assert "acc_norm for ARC-E, PIQA, acc for the others" in text
    mean = (sum(ALL.values()) - ALL["piqa"] - ALL["arc_easy"] + 120) / 9
    alra = cells(text, "ALRA")
    assert [alra[i].strip("*") for i in (1, 2, 6, 10, 11)] == [
        "20.00",
        "60.00",
        "60.00",
        f"{mean:.2f}",
        f"+{20 / 9:.2f}",
    ]
    assert {r["metric"] for r in records} == {"acc_norm"} and "acc_norm" not in tabulate([str(tmp_path)])[0]


def test_averages_over_fewer_tasks_say_so_on_both_sides(tmp_path):
    eight = {t: a for t, a in ALL.items() if t != "storycloze_2016"}
    fake(tmp_path / "alra", "alra", eight)
    fake(tmp_path / "pretrain", "pretrain", ALL)
    text, _ = tabulate([str(tmp_path)])
    assert cells(text, "")[10] == "Avg. (8 of 9)" and cells(text, "ALRA")[8] == "–"
    assert float(cells(text, "ALRA")[10].strip("*")) == pytest.approx(sum(eight.values()) / 8, abs=0.005)
    paper = tables.PAPER["200m", "heldout", "alra"]
    shown = [cells(line, "*paper*") for line in text.splitlines() if line.startswith("| *paper*")][1]
    assert float(shown[10]) == pytest.approx(sum(paper[t] for t in eight) / 8, abs=0.005)


def test_ablations_have_tables_of_their_own(tmp_path):
    three = dict.fromkeys(tables.SUITES["validation"], 40.0)
    for method in ("alra", "fixed_3", "fixed_25", "alra_n"):
        fake(tmp_path / method, method, three, split="validation", student="500m")
    fake(tmp_path / "alra_r", "alra_r", ALL, student="500m")
    text, _ = tabulate([str(tmp_path)])
    titles = [line for line in text.splitlines() if line.startswith("###")]
    assert titles == ["### Pairwise weighting: accuracy in %, heldout", "### Local budget: accuracy in %, validation",
                      "### Anchoring: accuracy in %, validation"]  # fmt: skip
    assert cells(text, "Fixed-Budget d=25")[1:] == ["40.00"] * 4 + ["+0.00"]
    budget = [cells(line, "*paper*") for line in text.splitlines() if line.startswith("| *paper*")]
    assert budget[2][-2:] == ["40.69", "+1.42"] and budget[1][-2:] == ["39.27", "Ref."] and budget[0][-1] == "Ref."


def test_several_seeds_become_mean_and_interval(tmp_path):
    for seed, more in ((1, 0.0), (2, 3.0), (3, 6.0)):
        fake(tmp_path / f"s{seed}" / "alra", "alra", {t: a + more for t, a in ALL.items()}, seed=seed)
        fake(tmp_path / f"s{seed}" / "pretrain", "pretrain", {t: a + more - 1 for t, a in ALL.items()}, seed=seed)
    text, records = tabulate([str(tmp_path / f"s{s}" / m) for s in (1, 2, 3) for m in ("alra", "pretrain")])
    half = 4.303 * 3 / math.sqrt(3)
    assert cells(text, "ALRA")[1] == f"**23.00 ± {half:.2f}**" and "over 3 seeds" in text
    assert cells(text, "ALRA")[-1] == "+1.00 ± 0.00"  # seed by seed, not mean by mean
    assert next(r for r in records if r["column"] == "avg")["n_seeds"] == 3


@pytest.mark.parametrize("change, named", [
    ({"run": {"init_sha256": "other"}}, "init_sha256 of seed 1234"),
    ({"run": {"data_sha256": "other"}}, "data_sha256"),
    ({"run": {"step": 8}}, "step: 7 and 8"),
    ({"run": {"config": {"lr": 1e-3}}}, "lr: 0.0006 and 0.001"),
    ({"run": {"config": {"kd_schedule": "wsd"}}}, "w_kd_schedule: constant and wsd"),
    ({"run": {"config": {"clip": 1.0}}}, "clip: 0.5 and 1.0"),  # one of them does not have it: made at the default
    ({"run": {"config": {"of_tomorrow": None}}}, "of_tomorrow: not there and None"),
    ({"protocol": {"dtype": "bfloat16"}}, "protocol, heldout: dtype"),
    ({"protocol": {"limit": 60}}, "protocol, heldout: limit: None and 60"),
    ({"prompts_sha256": "other"}, "arc_challenge, heldout: prompts_sha256"),
])  # fmt: skip
def test_runs_that_differ_are_not_tabulated_unless_asked_for(tmp_path, change, named):
    fake(tmp_path / "x" / "pretrain", "pretrain", ALL)
    fake(tmp_path / "y" / "alra", "alra", ALL, **change)
    paths = [str(tmp_path / "x" / "pretrain"), str(tmp_path / "y" / "alra")]
    with pytest.raises(tables.UserError, match=named) as error:
        tabulate(paths)
    assert all(path in str(error.value) for path in paths)
    text, _ = tabulate(paths, mixed=True)
    assert "Not to be compared" in text and named.split(":")[0] in text
    fake(tmp_path / "y" / "alra", "alra", ALL)  # pretrain has no teacher, which is no difference
    tabulate(paths)


def test_seeds_that_differ_in_a_setting_are_not_averaged(tmp_path):
    for seed, schedule in ((1, "constant"), (2, "wsd")):
        fake(tmp_path / str(seed), "pd", ALL, seed=seed, run={"config": {"kd_schedule": schedule}})
    with pytest.raises(tables.UserError, match="differ in w_kd_schedule: constant and wsd"):
        tabulate([str(tmp_path)])


def test_results_that_lack_a_newer_key_are_compared_as_made_at_its_default(tmp_path):
    fake(tmp_path / "x" / "pretrain", "pretrain", ALL, run={"config": {"clip": 0.5}})
    fake(tmp_path / "y" / "alra", "alra", ALL, run={"config": {}})
    text = ev.together([tmp_path / "x" / "pretrain", tmp_path / "y" / "alra"], ["one", "two"], ev.arguments(["x"]))
    assert "Each by itself" not in text and "| ALRA |" in text


def test_what_may_differ_is_named_and_all_else_is_compared(tmp_path):
    assert set(configure.TYPES) >= tables.MAY_DIFFER >= session.FREE_KEYS
    fake(tmp_path / "pretrain", "pretrain", ALL, run={"config": dict(ev.DEFAULTS)})
    fake(tmp_path / "alra", "alra", ALL, run={"config": ev.DEFAULTS | dict.fromkeys(tables.MAY_DIFFER, "other")})
    tabulate([str(tmp_path)])
    for key in set(ev.DEFAULTS) - tables.MAY_DIFFER:
        fake(tmp_path / "alra", "alra", ALL, run={"config": ev.DEFAULTS | {key: "other"}})
        with pytest.raises(tables.UserError, match=f"differ in {key}: "):
            tabulate([str(tmp_path)])


def test_one_place_for_each_student(tmp_path):
    fake(tmp_path / "a" / "alra", "alra", ALL)
    fake(tmp_path / "b" / "alra", "alra", ALL)
    with pytest.raises(tables.UserError, match="both hold alra from seed 1234"):
        tabulate([str(tmp_path / "a"), str(tmp_path / "b")])
    fake(tmp_path / "b" / "alra", "alra", ALL, run={"overrides": {"d_max": 9}})
    text, _ = tabulate([str(tmp_path / "a"), str(tmp_path / "b")])
    assert cells(text, "alra d_max=9")[1] == "20.00"
    with pytest.raises(tables.UserError, match="no eval_"):
        tabulate([str(tmp_path)])
    (tmp_path / "c" / "tad" / "model").mkdir(parents=True)
    with pytest.raises(tables.UserError, match="tad: a student without results"):
        tabulate([str(tmp_path / "a" / "alra"), str(tmp_path / "c" / "tad")])


# --- end to end ------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of its own for each test that writes results there."""
    folder = tmp_path / "finished"
    shutil.copytree(trained / "out", folder / "out")
    for name in ("data", "teacher"):  # run.json names these by their own place
        (folder / name).symlink_to(trained / name)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, student, teacher, tokenizer, rows):
    """What train.py leaves behind: two students, their facts, the rows and the teacher."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    rows.tofile(folder / "data" / "val.bin")
    manifest = {"rows": len(rows), "row_len": rows.shape[1], "tokenizer_sha256": tokenizer_hash(tokenizer)}
    manifest |= {"quick_sha256": quick_hash(folder / "data" / "val.bin"), "eos_id": 0, "sha256": "val"}
    (folder / "data" / "val.json").write_text(json.dumps(manifest))
    teacher.save_pretrained(folder / "teacher", tokenizer)
    for method, seed in (("pretrain", 5), ("alra", 9)):
        sharp(init_student(student.config, seed)).save_pretrained(folder / "out" / method / "model", tokenizer)
        facts = {
            "method": method,
            "seed": 1234,
            "student": "tiny",
            "init_sha256": "i",
            "data_sha256": "d",
            "overrides": {},
        }
        (folder / "out" / method / "run.json").write_text(json.dumps(facts))
    config = {"data_dir": str(folder / "data"), "teacher": str(folder / "teacher")}
    (folder / "out" / "run.json").write_text(json.dumps({"config": config}))
    return folder


def test_from_checkpoints_to_tables(finished, data, tmp_path, capsys):
    students = [str(finished / "out" / m) for m in ("pretrain", "alra")]
    ev.run([*students, "--tasks", "none"])
    ev.run(["--table", str(finished / "out"), "--csv", str(tmp_path / "t.csv")])
    text = capsys.readouterr().out
    assert "accuracy" not in text and cells(text, "")[1] == "CE, nats/token"
    low, high = (float(v) for v in text.split("| alra |")[2].split("[")[1].split("]")[0].split(","))
    ce = [json.loads((Path(s) / "eval_heldout.json").read_text())["intrinsic"]["ce"] for s in students]
    best, second = ("pretrain", "alra") if ce[0] < ce[1] else ("alra", "pretrain")
    assert cells(text, best)[1] == f"**{min(ce):.4f}**" and cells(text, second)[1] == f"*{max(ce):.4f}*"
    assert low < ce[1] - ce[0] < high
    assert len(list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))) == 2 * len(tables.FIGURES)
    ev.run([students[1], "--data_dir", str(data), "--tasks", "arc_easy,piqa", "--limit", "3", "--log_samples"])
    found = json.loads((finished / "out" / "alra" / "eval_heldout.json").read_text())
    assert (
        found["intrinsic"]["ce"] == ce[1]
        and list(found["tasks"]) == ["arc_easy", "piqa"]
        and found["protocol"]["limit"] == 3
    )
    assert (
        found["tasks"]["piqa"]["n"] == 3 and found["tasks"]["piqa"]["n_rows"] == 7 and found["run"]["method"] == "alra"
    )
    assert len((finished / "out" / "alra" / "samples_heldout_piqa.jsonl").read_text().splitlines()) == 3
    ev.run([students[1], "--data_dir", str(data), "--tasks", "winogrande", "--limit", "3", "--rows", "none"])
    found = json.loads((finished / "out" / "alra" / "eval_heldout.json").read_text())
    assert list(found["tasks"]) == ["arc_easy", "piqa", "winogrande"]  # same weights, same protocol: one more task
    text = (finished / "out" / "alra" / "eval_heldout.md").read_text()
    assert "Avg. (3 of 9)" in text and "the paper has 1,267" in text and "(--limit)" in text and "bits/byte" in text
    # rows know no length: the scores stay, as they were made
    ev.run([students[1], "--tasks", "none", "--max_length", "511"])
    kept = json.loads((finished / "out" / "alra" / "eval_heldout.json").read_text())
    assert kept["tasks"] == found["tasks"] and kept["protocol"]["max_length"] == 512
    ev.run([f"{students[1]}/model", "--data_dir", str(data), "--tasks", "piqa", "--limit", "2", "--rows", "none"])
    # the student's own, by its weights
    found = json.loads((finished / "out" / "alra" / "eval_heldout.json").read_text())
    assert list(found["tasks"]) == ["piqa"] and found["protocol"]["limit"] == 2 and found["intrinsic"]["ce"] == ce[1]
    model = ["--tasks", "none", "--rows", str(finished / "data"), "--teacher", "none", "--out", str(tmp_path / "model")]
    ev.run([str(finished / "teacher"), *model])
    found = json.loads((tmp_path / "model" / "eval_heldout.json").read_text())
    assert found["run"] is None and "kl" not in found["intrinsic"]
    with pytest.raises(tasks.UserError, match=r"model: holds results of other weights than .*pretrain"):
        ev.run([students[0], *model])
    copy = shutil.copytree(finished / "teacher", tmp_path / "copy" / "teacher")
    with pytest.raises(tasks.UserError, match="would go to out/eval/teacher, like another's"):
        ev.run([str(copy), str(finished / "teacher"), *model[:-2]])


@pytest.fixture
def unended(finished, tmp_path):
    """A run of which two students have ended and one has not."""
    shutil.copytree(finished / "out", tmp_path / "out")
    (tmp_path / "out" / "tad").mkdir()
    (tmp_path / "out" / "pictures").mkdir()
    file = tmp_path / "out" / "run.json"
    run = json.loads(file.read_text())
    run["config"]["methods"] = ["tad", "pretrain", "alra"]
    file.write_text(json.dumps(run))
    for old in (tmp_path / "out").glob("*/eval_*"):
        old.unlink()
    return tmp_path / "out"


@pytest.mark.parametrize("whole", [True, False])
def test_a_runs_folder_stands_for_its_students(unended, capsys, whole):
    paths = [str(unended)] if whole else [str(p) for p in sorted(unended.iterdir())]
    if whole:
        (unended / "tad" / "stopped.json").write_text('{"step": 3, "why": "step 3: gradient norm nan"}')
    ev.run([*paths, "--tasks", "none"])
    told, why = capsys.readouterr(), " (stopped at step 3: gradient norm nan)" if whole else ""
    assert f"left out, as training has not ended there: {unended / 'tad'}{why}\n" in told.err
    rows = [line.split(" | ")[0] for line in told.out.splitlines()[:10] if line.startswith("| ")]
    assert rows == ["| ", "| ---", "| pretrain", "| alra"]  # one table, of both
    ev.run(["--table", *paths])
    again = capsys.readouterr().out
    assert again.splitlines()[:6] == told.out[told.out.index("## tiny") :].splitlines()[:6]
    assert f"Left out, since not scored: {unended / 'tad'}." in again


def test_an_unfinished_student_that_is_named_is_an_error(unended):
    for paths, said in ((["tad"], "has its training ended?"), (["alra", "tad"], "tad: no model/ in it"),
                        (["run.json"], "no finished student: ")):  # fmt: skip
        with pytest.raises(tasks.UserError, match=re.escape(said)):
            ev.run([*(str(unended / p) for p in paths), "--tasks", "none"])
    for method in ("alra", "pretrain"):
        shutil.rmtree(unended / method / "model")
    with pytest.raises(tasks.UserError, match="no finished student: "):
        ev.run([str(unended), "--tasks", "none"])
    with pytest.raises(tables.UserError, match=r"no eval_heldout\.json in there"):
        ev.run(["--table", str(unended)])


def test_students_that_cannot_be_compared_are_shown_each_by_itself(unended, capsys):
    for method, lr in (("alra", 1e-3), ("pretrain", 1e-4)):
        folder = unended.parent / f"lr{lr}"
        shutil.copytree(unended / method, folder / method)
        run = json.loads((unended / "run.json").read_text())
        run["config"] |= {"lr": lr, "methods": [method]}
        (folder / "run.json").write_text(json.dumps(run))
    ev.run([str(unended.parent / f"lr{lr}") for lr in (1e-3, 1e-4)] + ["--tasks", "none"])
    told = capsys.readouterr().out
    assert told.count("# ") == 2 and re.search(r"Each by itself: .* differ in lr: 0.001 and 0.0001", told)


def test_a_model_that_is_no_student_is_scored_where_no_run_can_be(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [str(finished / "teacher"), "--tasks", "none", "--rows", str(finished / "data"), "--teacher", "none"]
    ev.run(argv)
    assert [str(file) for file in Path().glob("out/**/*.json")] == ["out/eval/teacher/eval_heldout.json"]
    (tmp_path / "out" / "eval" / "run.json").write_text("{}")
    with pytest.raises(tasks.UserError, match="would go to out/eval/teacher, which is a run's"):
        ev.run(argv)


def test_what_is_not_there_is_told_before_the_hub_is_asked(tmp_path, monkeypatch):
    def far(*args, **kw):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", far)
    monkeypatch.setattr(datasets, "load_dataset", far)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "run").mkdir(parents=True)
    for name, said in (("out/none", "no such folder"), ("./x/y", "no such folder"), ("/none", "no such folder"),
                       ("out/a/b", "no such folder"), ("none", "no such folder"), ("out/run", "no model/")):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: {said}"):
            ev.run([name])
    with pytest.raises(AssertionError, match="the hub was asked"):
        ev.run(["owner/name"])


def test_storycloze_is_left_out_with_a_word(finished, data, tmp_path, capsys):
    for file in data.glob("*/*.jsonl"):
        if "storycloze" not in str(file):
            write_rows(tmp_path / "eval", file.parent.name, file.stem, map(json.loads, file.read_text().splitlines()))
    argv = [
        str(finished / "out" / "alra"),
        "--data_dir",
        str(tmp_path / "eval"),
        "--rows",
        "none",
        "--limit",
        "2",
        "--out",
        str(tmp_path),
    ]
    ev.run(argv)
    told = capsys.readouterr()
    assert "on request" in told.err and "Avg. (8 of 9)" in told.out
    assert "1,871 items; the paper scored 1,000" in told.err
    with pytest.raises(tasks.UserError, match="on request"):
        ev.run([*argv, "--tasks", "storycloze_2016"])


def test_scores_of_whole_sets_are_not_lost_to_a_trial(finished, data, tmp_path):
    argv = [str(finished / "out" / "pretrain"), "--data_dir", str(data), "--tasks", "piqa", "--rows", "none"]
    ev.run(argv)
    with pytest.raises(tasks.UserError, match="pretrain holds scores of whole sets"):
        ev.run([*argv, "--limit", "3"])
    ev.run([*argv, "--limit", "3", "--out", str(tmp_path)])


def test_neither_scores_nor_figures_are_lost_to_another_dtype(finished, data, tmp_path):
    scores = [
        str(finished / "out" / "alra"),
        "--data_dir",
        str(data),
        "--out",
        str(tmp_path),
        "--tasks",
        "piqa",
        "--rows",
        "none",
    ]
    figures = [scores[0], "--tasks", "none", "--teacher", "none"]
    ev.run(scores)
    with pytest.raises(tasks.UserError, match=r"holds scores of whole sets \(dtype float32 there, bfloat16 here\)"):
        ev.run([*figures, "--out", str(tmp_path), "--dtype", "bfloat16"])
    ev.run([*figures, "--out", str(tmp_path / "rows")])
    with pytest.raises(
        tasks.UserError, match=r"holds figures over held-out rows \(dtype float32 there, bfloat16 here\)"
    ):
        ev.run([*scores, "--out", str(tmp_path / "rows"), "--dtype", "bfloat16"])
    ev.run([*scores, "--out", str(tmp_path / "rows")])
    both = json.loads((tmp_path / "rows" / "eval_heldout.json").read_text())
    assert both["tasks"]["piqa"]["n"] and both["intrinsic"]["ce"] > 0


def test_figures_are_not_lost_to_fewer_rows_or_another_teacher(finished, tmp_path):
    teacher = ["--teacher", str(finished / "teacher")]
    argv = [str(finished / "out" / "alra"), "--tasks", "none", "--out", str(tmp_path), *teacher, "--max_rows", "3"]
    ev.run(argv)
    for worse, said in (
        (["--max_rows", "2"], "of 3 rows that are not among the 2 here"),
        (["--teacher", "none"], "there, None here"),
        (["--dtype", "bfloat16"], "dtype float32 there, bfloat16 here"),
    ):
        with pytest.raises(tasks.UserError, match=f"holds figures over held-out rows .*{said}"):
            ev.run([*argv, *worse])
    ev.run([*argv, "--max_rows", "4"])  # more of the same rows
    assert json.loads((tmp_path / "eval_heldout.json").read_text())["intrinsic"]["n_rows"] == 4


def test_checkpoints_that_do_not_fit_together_are_scored_one_after_another(
    finished, data, tmp_path, monkeypatch, capsys
):
    """The same figures; at any time only those at work are in memory."""
    shutil.copytree(finished / "out", tmp_path / "out")
    for name in ("a", "b"):
        shutil.copytree(finished / "out" / "alra", tmp_path / "out" / name)
    load, load_tokens, alive, tokenizers = ev.Qwen2.from_pretrained, ev.load_tokenizer, [], []
    most = [0]

    def counted_tokenizer(name):
        tokenizers[:] = [ref for ref in tokenizers if ref() is not None]
        assert len(tokenizers) <= 1  # all share one
        tokenizer = load_tokens(name)
        tokenizers.append(weakref.ref(tokenizer))
        return tokenizer

    def counted(*args, **kwargs):
        model = load(*args, **kwargs)
        alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(model)]
        most[0] = max(most[0], len(alive))
        return model

    monkeypatch.setattr(ev.Qwen2, "from_pretrained", counted)
    monkeypatch.setattr(ev, "load_tokenizer", counted_tokenizer)
    argv = [str(tmp_path / "out" / name) for name in ("alra", "a", "b")]
    argv += ["--teacher", str(finished / "teacher"), "--tasks", "piqa", "--data_dir", str(data), "--limit", "3"]
    found = {}
    for room, at_a_time in ((10**9, 3), (0, 1)):
        most[0] = 0
        monkeypatch.setattr(ev, "free_bytes", lambda device, room=room: room)
        ev.run(argv)
        assert f"held-out rows: {at_a_time} of 3 checkpoints at a time" in capsys.readouterr().err
        assert most[0] == at_a_time + 1  # and the teacher
        found[room] = [
            json.loads((tmp_path / "out" / n / "eval_heldout.json").read_text())["intrinsic"]
            for n in ("alra", "a", "b")
        ]
    assert found[10**9] == found[0]


def test_nothing_of_older_weights_stays_beside_new_results(finished, data, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    folder = tmp_path / "out" / "alra"
    argv = [str(folder), "--data_dir", str(data), "--tasks"]
    ev.run([*argv, "piqa", "--log_samples"])
    beside = [folder / "eval_heldout.npz", folder / "samples_heldout_piqa.jsonl"]
    assert all(file.is_file() for file in beside)
    ev.run([*argv, "arc_easy", "--rows", "none"])  # the same weights: all is kept
    assert all(file.is_file() for file in beside)
    shutil.rmtree(folder / "model")
    shutil.copytree(finished / "out" / "pretrain" / "model", folder / "model")
    ev.run([*argv, "arc_easy", "--rows", "none"])
    found = json.loads((folder / "eval_heldout.json").read_text())
    assert list(found["tasks"]) == ["arc_easy"] and not found["intrinsic"] and not any(f.exists() for f in beside)


def test_a_student_that_diverged_and_rows_too_long_are_told(finished, tmp_path):
    shutil.copytree(finished / "out" / "alra", tmp_path / "alra")
    file = tmp_path / "alra" / "model" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["model.norm.weight"][0] = math.nan
    safetensors.torch.save_file(weights, file)
    config = json.loads((finished / "out" / "run.json").read_text())["config"]
    argv = ["--tasks", "none", "--rows", config["data_dir"]]
    with pytest.raises(
        tasks.UserError, match=r"model\.norm\.weight is not finite; the weights are broken or have diverged"
    ):
        ev.run([str(tmp_path / "alra" / "model"), *argv, "--out", str(tmp_path / "a")])
    shape = json.loads((finished / "out" / "alra" / "model" / "config.json").read_text())
    shutil.copytree(finished / "out" / "alra" / "model", tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4}))
    with pytest.raises(tasks.UserError, match=r"rows of .* inputs, .*short takes 4 at most"):
        ev.run([str(tmp_path / "short"), *argv, "--max_length", "4", "--out", str(tmp_path / "b")])


def test_runs_with_different_rows_are_scored_apart(finished, tmp_path):
    shutil.copytree(finished / "out", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "run.json").read_text())["config"]
    config = {"config": {**config, "data_dir": "elsewhere"}}
    (tmp_path / "out" / "run.json").write_text(json.dumps(config))
    both = [str(folder / "out" / "alra") for folder in (finished, tmp_path)]
    with pytest.raises(tasks.UserError, match=r"data_dir: .* in one run, elsewhere in another"):
        ev.run([*both, "--tasks", "none"])


def test_checkpoints_that_cannot_be_scored(finished, tokenizer, tmp_path, student):
    def tried(*argv):
        with pytest.raises(ValueError) as error:
            ev.run([*argv, "--tasks", "none"])
        return str(error.value)

    assert "no such folder" in tried(str(tmp_path / "gone"))
    assert "no model/ in it" in tried(str(tmp_path))
    assert "nothing to score" in tried(str(finished / "teacher"))
    assert "no val.bin" in tried(str(finished / "out" / "alra"), "--rows", str(tmp_path))
    assert "takes 600 at most" in tried(str(finished / "out" / "alra"), "--max_length", "601")
    small = init_student(Qwen2Config(24, 53, 1, 4, 2, vocab_size=293))
    small.save_pretrained(tmp_path / "small", tokenizer)
    assert "vocabulary of 293, but its tokenizer has ids up to 306" in tried(str(tmp_path / "small"))
    assert "vocabulary of 293" in tried(
        str(finished / "out" / "alra"), "--teacher", str(tmp_path / "small"), "--out", str(tmp_path / "o")
    )
    student.save_pretrained(tmp_path / "other", make_tokenizer(283))
    assert "another tokenizer" in tried(str(tmp_path / "other"), "--rows", str(finished / "data"))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "val.json").write_text((finished / "data" / "val.json").read_text())
    (tmp_path / "cut" / "val.bin").write_bytes((finished / "data" / "val.bin").read_bytes()[:-4])
    assert "prepare it again" in tried(str(finished / "out" / "alra"), "--rows", str(tmp_path / "cut"))


@pytest.mark.parametrize("name", ["eval", "plot", "sample", "bench", "compare"])
def test_every_script_runs_under_the_guard(name, monkeypatch):
    """What ends with Ctrl-C or with a user's slip is told in one place."""
    script, ran = importlib.import_module(name), []
    monkeypatch.setattr(sys, "argv", [name, "--x"])
    monkeypatch.setattr(script, "run", ran.append)
    monkeypatch.setattr(configure, "guard", lambda main: main() or 130)
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 130 and ran == [["--x"]]


def test_errors_are_one_line_and_an_exit_code(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "eval.py"), "--table", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith("UserError: ") and "Traceback" not in done.stderr


def test_items_that_are_not_the_published_ones_are_told(data):
    items = tasks.read_items(["piqa"], "heldout", str(data), None)
    (line,) = tasks.differing(items, "heldout")
    assert line.startswith("piqa: 7 items of ") and "expected d82bc2d775ca); scores do not compare" in line
    assert not tasks.differing({"hellaswag": items["piqa"]}, "validation")  # not known here


@needs_shared
@pytest.mark.parametrize(("name", "split"), list(tasks.KNOWN))
def test_the_published_items_are_those_that_are_known(name, split):
    assert not tasks.differing(tasks.read_items([name], split, str(SHARED / "eval"), None), split)
