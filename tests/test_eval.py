"""eval.py and lib/tasks.py: requests scored as by lm-eval's own backend, items checked, figures."""

import copy
import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tokenizers import normalizers, pre_tokenizers

import configure
import eval as ev
from lib import tasks
from lib.files import write_json
from lib.hf import load_tokenizer, tokenizer_hash
from lib.rows import PAD, Rows
from lib.tokens import leading_bos
from model import Qwen2
from run.results import read_results
from run.teacher import Teacher, load_teacher
from tests import world
from tests.test_metrics import STUDENT, TEACHER
from tests.test_prepare import byte_fallback
from tests.test_tables import cells
from tests.test_teacher import FOREIGN, make  # noqa: F401
from tests.world import make_model, read_jsonl, refusal
from tools import sample

SHARED = world.SHARED / "data"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="real weights and benchmark items are not here"
)
WORDS = "the cat saw a dog under old trees while rain on seven boats 13 quiet"
CONFIG = dataclasses.asdict(configure.Config())
NO_ROWS = np.zeros((0, 2), int)

# An item of each task, as in its file, and the requests that lm-eval makes: context|continuation.
PROMPTS = json.loads(r"""{
"arc_easy": [
  {"question": "Why?", "choices": {"text": ["So.", "No way."], "label": ["A", "B"]},
   "answerKey": "B"},
  ["Question: Why?\nAnswer:| So.", "Question: Why?\nAnswer:| No way."]],
"hellaswag": [
  {"activity_label": "Sailing", "ctx_a": "It rains. [title] Go", "ctx_b": "the Dog",
   "endings": ["sits [step]  down.", "runs far away over there."], "label": "1"},
  ["Sailing: It rains.. Go The dog| sits  down.",
   "Sailing: It rains.. Go The dog| runs far away over there."]],
"lambada_openai": [{"text": "a cat saw boats"}, ["a cat saw| boats"]],
"openbookqa": [
  {"question_stem": "Cats like",
   "choices": {"text": ["rain", "old boats"], "label": ["A", "B"]}, "answerKey": " B"},
  ["Cats like| rain", "Cats like| old boats"]],
"piqa": [
  {"goal": "dry", "sol1": "wait", "sol2": "a towel ", "label": 1},
  ["Question: dry\nAnswer:| wait", "Question: dry\nAnswer:| a towel "]],
"social_iqa": [
  {"context": "It fell.", "question": "Why?", "answerA": "a", "answerB": "wind", "answerC": "be",
   "label": "2"},
  ["Q: It fell. Why?\nA:| a", "Q: It fell. Why?\nA:| wind", "Q: It fell. Why?\nA:| be"]],
"storycloze_2016": [
  {"input_sentence_1": "A.", "input_sentence_2": "B.", "input_sentence_3": "C.",
   "input_sentence_4": "D.", "sentence_quiz1": "E.", "sentence_quiz2": "Far.",
   "answer_right_ending": 2},
  ["A. B. C. D.| E.", "A. B. C. D.| Far."]],
"winogrande": [
  {"sentence": "Ann saw Bo so _ ran.", "option1": "Ann", "option2": "Bo", "answer": "1"},
  ["Ann saw Bo so Ann| ran.", "Ann saw Bo so Bo| ran."]]
}""")
PROMPTS["arc_challenge"] = PROMPTS["arc_easy"]


def sentence(rng, n):
    return " ".join(rng.choice(WORDS.split(), n)).capitalize() + "."


def lengthen(value, rng, key=""):
    """Return an item with more words in its texts."""
    if key in ("label", "answerKey", "answer"):
        return value
    if isinstance(value, dict):
        return {k: lengthen(v, rng, k) for k, v in value.items()}
    if isinstance(value, list):
        return [lengthen(v, rng) for v in value]
    if isinstance(value, str):
        return f"{value} {sentence(rng, int(rng.integers(1, 19)))}"
    return value


def write_items(folder, name, items, suite="heldout"):
    """Write local items, those of StoryCloze with the headings of its authors."""
    if name != "storycloze_2016":
        world.write_jsonl(folder / name / f"{tasks.SUITES[suite][name].split}.jsonl", items)
        return
    with (folder / "stories.csv").open("w", newline="", encoding="utf-8-sig") as out:
        writer = csv.writer(out)
        writer.writerow(["InputStoryid", *tasks.STORY_HEADINGS.split()])
        writer.writerows([i, *row.values()] for i, row in enumerate(items))


def open_local(folder, name, suite="heldout"):
    return tasks.open_task(name, suite, str(folder), f"{folder}/stories.csv", any_items=True)


def items_of(task):
    (loaded,) = task.loaded["tasks"].values()
    return loaded.dataset["test"].to_list()


def make_tokenizer(**keys):
    rng = np.random.default_rng(0)
    texts = [sentence(rng, 13) for _ in range(50)] + ["Answer:\n yes"] * 9
    return world.make_tokenizer(texts, 307, "<eos>", **keys)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def student():
    return make_model(STUDENT, 5, 7.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """All nine tasks in the layout of local files, 7 items each and 5 in the validation sets."""
    folder = tmp_path_factory.mktemp("eval")
    rng = np.random.default_rng(1)
    for n, (suite, names) in zip((7, 5), tasks.SUITES.items(), strict=True):
        for name in names:
            item, _ = PROMPTS[name]
            write_items(folder, name, [lengthen(item, rng) for _ in range(n)], suite)
    return folder


def score_pairs(lm, *pairs):
    """Score (context, continuation) pairs, each a document of its own."""
    requests = []
    for i, pair in enumerate(pairs):
        requests.append(Instance("loglikelihood", {}, pair, i, ("task", i, 1)))
    return lm.loglikelihood(requests, disable_tqdm=True)


def assert_close(scores, expected):
    """Compare log-probabilities, and greedy flags as 0 or 1."""
    scores, expected = (np.array(pairs, float) for pairs in (scores, expected))
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def score_ids(lm, requests):
    """Score ids of (context, continuation) pairs."""
    return lm._loglikelihood_tokens([(("", "x"), *pair) for pair in requests])


def score(command):
    ev.main(command.split())


def test_out_of_memory_says_what_to_do(monkeypatch):
    def score(args):
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr(ev, "score", score)
    with refusal("out of memory: set a smaller --batch_tokens"):
        ev.main([str(STUDENT)])


def bench(lm, name, folder):
    """Return the scores of local items, and the log-likelihoods."""
    task = open_local(folder, name)
    scores = ev.benchmark(lm, name, task, ev.arguments(["x"]))
    return scores, [i.resps[0] for i in task.loaded["tasks"][name].instances]


@pytest.mark.parametrize("bos", [None, 307])
def test_contexts_begin_as_in_training(student, bos):
    """Whatever the tokenizer itself puts before a text, which is 307 here."""
    tokenizer = make_tokenizer(bos="<s>")
    asked = []
    scorer = ev.Scorer(student, tokenizer, bos=bos)
    scorer._loglikelihood_tokens = lambda requests, **keys: asked.extend(requests)
    score_pairs(scorer, ("the cat", " saw"), ("", " saw"), ("", "<eos> cat"))
    texts = ("the cat", " saw", " cat")
    head, tail, cat = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    eos = tokenizer.eos_token_id
    if bos is None:
        expected = [(head, tail), ([eos], tail), ([eos], cat)]
    else:
        expected = [([bos, *head], tail), ([bos], tail), ([bos], [eos, *cat])]
    assert [request[1:] for request in asked] == expected


@pytest.mark.parametrize(
    ("facts", "bos"), [(None, 307), ({"bos": None}, None), ({"bos": 307}, 307)]
)
def test_a_student_is_scored_and_sampled_with_its_bos(facts, bos, data, tmp_path, monkeypatch):
    """A model without a run (facts None) has the tokenizer's own BOS, and takes any rows."""
    tokenizer = make_tokenizer(bos="<s>")
    out = tmp_path / "out"
    if facts is None:
        make_model(STUDENT).save_pretrained(out / "alra", tokenizer)
    else:
        students = {"alra": make_model(STUDENT)}
        world.write_run(out, students, tokenizer, tmp_path, tmp_path, config={}, **facts)
    used = []
    scorer = ev.Scorer
    monkeypatch.setattr(ev, "Scorer", lambda *args: used.append(args[4]) or scorer(*args))
    of_tokenizer = {"tokenizer_sha256": tokenizer_hash(tokenizer)}
    flags = f"--tasks=piqa --data_dir={data} --any_items --limit=2 --teacher=none"
    for rows_bos in (None, 307):
        world.write_rows(tmp_path, "val", 3, bos=rows_bos, **of_tokenizer)
        command = f"{out}/alra {flags} --rows={tmp_path} --out={tmp_path}/{rows_bos}"
        if facts is None or rows_bos == bos:
            score(command)
        else:
            problem = f"rows with bos={rows_bos}, but .* was trained on rows with bos={bos}"
            with refusal(problem):
                score(command)
    assert set(used) == {bos}
    first = tokenizer.eos_token_id if bos is None else bos
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert sample.open_checkpoint(f"{out}/alra").encode("the cat") == [first, *ids]


@pytest.mark.parametrize("batch_tokens", [1, 61, 5003])
def test_log_likelihoods_are_those_of_lm_eval_whatever_the_batches_are(
    student, tokenizer, trained, batch_tokens
):
    """Equal requests tie to the last bit. The first four tokens are greedy; one is missed then."""
    rng = np.random.default_rng(3)
    best = []
    for _ in range(4):
        best.append(int(student(torch.tensor([[5, 7, 11, *best]]))[0, -1].argmax()))
    pairs = [([5, 7, 11], best), ([5, 7, 11], [*best[:3], (best[3] + 1) % 311])]
    for length in rng.integers(1, 29, 29):
        tail = rng.integers(1, 311, rng.integers(1, 13))
        pairs.append((rng.integers(1, 311, length).tolist(), tail.tolist()))
    assert sum(len(head + tail) > 32 for head, tail in pairs) > 1  # these lose their beginning
    scorer = ev.Scorer(student, tokenizer, max_length=31, batch_tokens=batch_tokens)
    scores = score_ids(scorer, pairs * 2)
    assert scores[:31] == scores[31:]
    theirs = lm_evals_own(trained / "out/pretrain/model", tokenizer, 31)
    assert_close(scores[:31], score_ids(theirs, pairs))
    assert [greedy for _, greedy in scores[:2]] == [True, False]


def test_scores_are_fp32_whatever_the_backbone(tokenizer):
    half = make_model(STUDENT, 5, 7.0).to(torch.bfloat16)
    ((score, _),) = score_ids(ev.Scorer(half, tokenizer), [([5, 7, 11, 13], [17, 19, 23])])
    h = half.hidden(torch.tensor([[5, 7, 11, 13, 17, 19]]))[0, 3:].double()
    logp = (h @ half.head.double().T).log_softmax(-1)
    expected = sum(logp[i, token] for i, token in enumerate((17, 19, 23)))
    assert score == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    "pair", [("the cat", ""), ("the cat", " "), (" \n", "cat"), ("the cat", " dog" * 13)]
)
def test_requests_without_an_answer_are_refused(student, tokenizer, pair):
    """A blank continuation, a context without a token, and more than fits."""
    problem = re.escape(f"{pair[1]!r} after {pair[0]!r} has no score: expected words of 1 to 7")
    with refusal(problem):
        score_pairs(ev.Scorer(student, tokenizer, max_length=7), ("the cat", " saw"), pair)


def lm_evals_own(folder, tokenizer, max_length=512):
    """Return lm-eval's Hugging Face backend."""
    pytest.importorskip("accelerate", reason="lm-eval's Hugging Face backend needs accelerate")
    from lm_eval.models.huggingface import HFLM

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=16,
        logits_cache=False,
        device="cpu",
        max_length=max_length,
    )


@pytest.fixture(scope="module")
def joined(tmp_path_factory, student):
    """A folder of a student whose tokenizer makes tokens of several words."""
    folder = tmp_path_factory.mktemp("joined") / "joined"
    tokenizer = make_tokenizer(
        split=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    )
    student.save_pretrained(folder, tokenizer)
    return folder


def test_a_token_that_spans_the_end_of_a_context_is_scored_as_by_lm_eval(joined):
    """What follows that token is the continuation."""
    tokenizer = load_tokenizer(str(joined))
    scorer = ev.Scorer(Qwen2.from_pretrained(str(joined)), tokenizer)
    theirs = lm_evals_own(joined, tokenizer)
    pairs = [("rain on", " seven boats 13 quiet"), ("dog under", " old trees while saw the")]
    for context, continuation in pairs:
        ids = tokenizer.encode(context)
        whole = tokenizer.encode(context + continuation)
        assert whole[: len(ids)] != ids and len(whole) > len(ids)
    assert_close(score_pairs(scorer, *pairs), score_pairs(theirs, *pairs))


def test_a_model_with_capped_logits_is_scored_as_by_lm_eval(make):  # noqa: F811
    """test_teacher.py has the logits of other families."""
    folder = make(*FOREIGN["a cap"])
    tokenizer = load_tokenizer(folder)
    scorer = ev.Scorer(load_teacher(folder, torch.float32, torch.device("cpu")), tokenizer)
    pairs = [("rain on", " seven boats 13 quiet"), ("", "dog under old trees"), ("a", " cat")]
    theirs = lm_evals_own(folder, tokenizer)
    assert_close(score_pairs(scorer, *pairs), score_pairs(theirs, *pairs))


def test_a_task_with_an_item_without_a_score_is_named(joined, data, tmp_path):
    items = shutil.copytree(data, tmp_path / "items")
    texts = [{"text": "rain on"}, {"text": "the cat saw the quiet boats"}]  # " on" has no token
    write_items(items, "lambada_openai", texts)
    flags = f"--rows=none --any_items --data_dir={items} --out={tmp_path} --max_length=300"
    with refusal("lambada_openai: ' on' after 'rain' has no score.*--tasks can leave out"):
        score(f"{joined} --tasks=arc_easy,lambada_openai {flags}")
    (line,) = read_jsonl(tmp_path / "results.jsonl")
    assert [*line["values"]] == ["arc_easy"]


class Recorder(TemplateLM):
    """Scores a request by the length of its continuation, longest best; keeps what it was asked."""

    eot_token_id = 0

    def loglikelihood(self, requests, disable_tqdm=False):
        self.asked = [r.args for r in requests]
        return [(float(len(continuation)), False) for _, continuation in self.asked]

    tok_encode = _loglikelihood_tokens = loglikelihood_rolling = generate_until = None


@pytest.mark.parametrize("name", tasks.TASKS)
def test_prompts_are_those_of_lm_eval(name, tmp_path):
    item, asked = PROMPTS[name]
    write_items(tmp_path, name, [item] * 2)
    recorder = Recorder()
    scores, _ = bench(recorder, name, tmp_path)
    assert ["|".join(pair) for pair in recorder.asked] == asked * 2
    # the longest is right, and ties go to the first
    assert scores["acc"] == float(name != "lambada_openai")


def test_two_sets_of_the_protocol(data):
    for split, n in (("heldout", 7), ("validation", 5)):
        names = tasks.SUITES[split]
        assert tasks.choose_tasks("all", split) == [*names]
        assert {len(items_of(open_local(data, name, split))) for name in names} == {n}
    n_paper = {name: items.n_paper for name, items in names.items()}
    assert n_paper == {"arc_easy": 570, "hellaswag": 39905, "piqa": 16113}


@pytest.mark.parametrize("kind", ["made-up", pytest.param("real", marks=needs_shared)])
def test_scores_equal_those_of_lm_evals_own_backend(kind, student, tokenizer, data, tmp_path):
    """Every log-likelihood, greedy flag and score; on real weights and items if they are here."""
    suite = tasks.SUITES["heldout"]
    if kind == "made-up":
        folder = tmp_path
        student.save_pretrained(folder, tokenizer)
        names = [*suite]
    else:
        folder = SHARED / "stories260k"
        names = [name for name in suite if suite[name].sha256 != "-"]
        for name in names:
            file = SHARED / f"eval/{name}/{suite[name].split}.jsonl"
            write_items(tmp_path, name, map(json.loads, file.read_text().splitlines()[:3]))
        data = tmp_path
    tokenizer = load_tokenizer(str(folder))
    theirs = lm_evals_own(folder, tokenizer)
    bos = leading_bos(tokenizer)
    ours = ev.Scorer(Qwen2.from_pretrained(str(folder)), tokenizer, batch_tokens=503, bos=bos)
    for name in names:
        (a, of_a), (b, of_b) = (bench(lm, name, data) for lm in (ours, theirs))
        assert_close(of_a, of_b)
        for key in ("acc", "acc_norm", "prompts_sha256"):
            assert a.get(key) == b.get(key)
        if name == "lambada_openai":
            assert a["perplexity"] == pytest.approx(b["perplexity"], rel=1e-4)


def test_the_hub_gives_the_same_items(data, tmp_path, monkeypatch):
    load = datasets.load_dataset
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda path, *args, **keys: load(f"{tmp_path}/{path}", *args, **keys),
    )
    expected = open_local(data, "arc_easy")
    repository = "allenai/ai2_arc"
    world.write_like_the_hub(tmp_path / repository, items_of(expected), "ARC-Easy", "test")
    task = tasks.open_task("arc_easy", "heldout", None, any_items=True)
    assert task.facts == expected.facts | {"source": f"{repository} [test]"}
    assert items_of(task) == items_of(expected)


@needs_shared
@pytest.mark.parametrize(
    ("split", "name"),
    [(s, x) for s, suite in tasks.SUITES.items() for x in suite if suite[x].sha256 != "-"],
)
def test_the_published_items_are_those_that_are_known(split, name):
    assert tasks.open_task(name, split, f"{SHARED}/eval")


# a task, what replaces fields of its item, how many good ones stand before and after, and the
# problem; lm-eval fails at some, and scores others wrongly
BAD_ITEMS = r"""
arc_easy => "answerKey": "E" => 1 => item 1: .*.E. is not in list.*expected an item of arc_easy
arc_easy => "choices": {"text": ["a"], "label": ["A", "B"]} => 1 => answer 1 .from 0. of 1 choices
arc_easy => "question": null => 1 => item 1: .*a field is null
openbookqa => "answerKey": "" => 1 => item 1: .*.. is not in list
hellaswag => "label": "-1" => 1 => item 1: .*answer .-1. .from 0. of 2 choices
piqa => "label": 0.5 => 1 => answer 0.5 .from 0. of 2 choices
piqa => "label": "1" => 0 => item 0: .*answer '1' .from 0. of 2 choices
social_iqa => "label": "0" => 1 => answer .-1. .from 0. of 3 choices
winogrande => "sentence": "Ann ran." => 1 => substring not found
winogrande => "answer": "" => 1 => KeyError
hellaswag => "label": "" => 1 => cannot be used .*invalid literal for int
hellaswag => "ctx_b": 3 => 1 => cannot be used .*ArrowTypeError
storycloze_2016 => "answer_right_ending": "" => 1 => cannot be used .*invalid literal for int
"""


@pytest.mark.parametrize(("name", "fields", "n_good", "problem"), world.read_table(BAD_ITEMS))
def test_items_without_a_right_answer_are_named(name, fields, n_good, problem, tmp_path):
    good, _ = PROMPTS[name]
    bad = good | json.loads(f"{{{fields}}}")
    goods = [good] * int(n_good)
    write_items(tmp_path, name, [*goods, bad, *goods])
    with refusal(f"{tmp_path}/.*{problem}"):
        open_local(tmp_path, name)


@pytest.fixture(scope="module")
def rows(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("data")
    world.write_rows(folder, "val", 11, tokenizer_sha256=tokenizer_hash(tokenizer))
    return Rows(str(folder), "val", world.SEQ, False, 311)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer, rows):
    """What train.py leaves: two finished students, an unfinished one, and the teacher."""
    folder = tmp_path_factory.mktemp("run")
    make_model(TEACHER, 6, 7.0).save_pretrained(folder / "teacher", tokenizer)
    students = {"pretrain": make_model(STUDENT, 5, 7.0)}
    students["alra"] = make_model(STUDENT, 9, 7.0)
    keys = {"data_dir": str(Path(rows.file).parent), "teacher": f"{folder}/teacher"}
    config = CONFIG | keys
    world.write_run(folder / "out", students, tokenizer, *keys.values(), config=config)
    config["methods"] = ["tad", "pretrain", "alra"]
    write_json(folder / "out/run.json", {"config": config})
    (folder / "out/tad").mkdir()
    return folder


@pytest.fixture
def out(trained, tmp_path):
    """A copy of its own for each test that writes results."""
    return shutil.copytree(trained / "out", tmp_path / "run")


def read(folder, kind="figures"):
    """Return the newest result of a kind."""
    return [x for x in read_jsonl(folder / "results.jsonl") if x["kind"] == kind][-1]


def test_from_checkpoints_to_tables(out, capsys):
    """A run's folder stands for its students; those that are not finished are named."""
    (out / "tad/log.jsonl").touch()
    score(f"{out} --tasks=none")
    output = capsys.readouterr()
    assert f"{out}/tad: left out (it stopped, or has no checkpoint yet)\n" in output.err
    text = output.out
    assert "Accuracy" not in text and cells(text, "")[1] == "CE, nats/token"
    assert re.search(r"targets in 11 rows of \d+ documents; teacher: ", text)
    figures = {method: read(out / method)["values"] for method in ("pretrain", "alra")}
    ce = {method: values["ce"] for method, values in figures.items()}
    assert cells(text, "alra")[1] == f"{ce['alra']:.4f} ± {figures['alra']['ce_half']:.4f}"
    difference, _, _ = cells(text, "alra", 1)[1].partition(" ± ")
    assert difference == f"{ce['alra'] - ce['pretrain']:+.4f}"
    score(f"--table {out}")
    assert capsys.readouterr().out == text
    world.edit(out / "alra/run.json", 'made_by.data_sha256="other"')
    score(f"{out} --tasks=none")  # students that cannot be compared
    text = capsys.readouterr().out
    assert "no table: " in text and "data_sha256 was 'd', now 'other'" in text


def test_sums_by_document_are_those_of_a_plain_loop(out, rows):
    score(f"{out}/alra --tasks=none --max_rows=6 --skip_rows=2 --batch_tokens=50")
    documents = read(out / "alra")["values"]["documents"]
    student = make_model(STUDENT, 9, 7.0)
    sums = [[0, 0.0]]
    for stored in rows.read(np.arange(2, 8)).astype(int):
        ids = torch.from_numpy(stored[stored != PAD])
        logp = student(ids[None, :-1])[0].log_softmax(-1)
        for t, token in enumerate(ids.tolist()):
            if t > 0:
                sums[-1][0] += 1
                sums[-1][1] -= float(logp[t - 1, token])
            if token == 0:
                sums.append([0, 0.0])
    n, ce = np.transpose(sums[: len(documents["n"])])
    assert documents["n"] == n.tolist() and documents["kl"][0] > 0
    assert documents["ce"] == pytest.approx(ce, rel=1e-5)


def test_scores_of_a_few_items(out, data, tmp_path, printed):
    flags = f"--data_dir={data} --any_items --limit=3 --metric=acc_norm --rows=none"
    score(f"{out}/pretrain {out}/alra/model --tasks=arc_easy,piqa {flags}")
    text = printed()
    results = read_results(out / "alra")
    assert {x["protocol"]["limit"] for x in results} == {3}
    n_scored = {task: scores["n"] for x in results for task, scores in x["values"].items()}
    assert n_scored == {"arc_easy": 3, "piqa": 3}
    assert "Avg. (2 of 9)" in text and "acc_norm where a task has it" in text
    with refusal("--max_length 601: .*alra takes 600 at most"):
        score(f"{out}/alra --max_length=601 {flags}")
    score(f"{out}/alra {flags}")
    assert "Avg. (8 of 9)" in printed()  # all tasks, without StoryCloze


def test_bytes_of_tokens_add_up_to_those_of_the_text(tokenizer):
    text = "the cat saw Überraschung — 13 boats"
    lengths = ev.byte_lengths(tokenizer, 311, NO_ROWS)
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "a"})  # of the vocabulary; it still is a letter
    lengths = ev.byte_lengths(tokenizer, 311, NO_ROWS)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[0] == 0 and not lengths[307:].any()


def test_a_space_that_the_tokenizer_adds_is_no_byte_of_a_text():
    spaced = byte_fallback()
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    spaced.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    texts = ["the cat sat", " the", "no", "the the", ""]
    eos = spaced.eos_token_id
    ids = [eos]
    for text in texts:
        ids += [*spaced.encode(text, add_special_tokens=False), eos]
    ids = np.array(ids, np.uint32)
    n_bytes = ev.byte_lengths(spaced, len(spaced), ids[None])
    assert float(n_bytes[ids[1:]].sum()) == pytest.approx(len("".join(texts)))


def test_a_dtype_is_that_of_the_whole_command(out, tokenizer, rows):
    """Of student and teacher: the figures are equal to the last bit in that dtype alone."""
    score(f"{out}/pretrain --tasks=none --dtype=bfloat16 --max_length=601")  # of tasks alone
    results = read(out / "pretrain")
    assert results["protocol"]["dtype"] == "bfloat16"
    assert results["scored"]["vocabulary"] == rows.n_vocab
    n_bytes = ev.byte_lengths(tokenizer, 311, NO_ROWS)
    for dtype in (torch.bfloat16, torch.float32):
        student = make_model(STUDENT, 5, 7.0).to(dtype)
        model = make_model(TEACHER, 6, 7.0).to(dtype)
        teacher = Teacher(model, torch.device("cpu"))
        (expected,) = ev.over_rows([student], teacher, rows, np.arange(rows.n), n_bytes, 4096)
        for key in ("ce", "kl", "teacher_ce"):
            assert (results["values"][key] == expected[key]) == (dtype == torch.bfloat16), key


def test_samples_of_several_models(out, trained, tmp_path, capsys):
    """A function of the seed. A text ends where the context is full."""
    (tmp_path / "link").symlink_to(out / "alra/model")
    names = f"{out}/alra {tmp_path}/link {trained}/teacher"
    sample.main(f"{names} --prompt=the --tokens=9 --temperature=1e-300".split())
    parts = capsys.readouterr().out.split("--- ")
    alra, link, teacher = (part.partition("\n")[2] for part in parts[1:])
    tokenizer = load_tokenizer(f"{trained}/teacher")
    model = make_model(STUDENT, 9, 7.0)
    ids = [0, *tokenizer.encode("the")]
    for _ in range(9):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == 0:
            break
    assert alra == link == f"{tokenizer.decode(ids[1:])}\n" != teacher
    sample.main([f"{out}", "--prompt=the\n", "--tokens=0"])  # a run
    assert capsys.readouterr().out == f"--- {out}/alra\nthe\n\n--- {out}/pretrain\nthe\n\n"
    texts = []
    for flag in ("--temperature=0", "--seed=1", "--seed=1", "--seed=2"):
        sample.main([f"{out}/alra", "--prompt=the", "--tokens=9", flag])
        texts.append(capsys.readouterr().out)
    assert texts[0] == alra and texts[1] == texts[2] != texts[3]
    short = dataclasses.replace(STUDENT, max_position_embeddings=4)
    make_model(short).save_pretrained(tmp_path / "short", tokenizer)
    opened = sample.open_checkpoint(str(tmp_path / "short"))
    args = SimpleNamespace(tokens=99, temperature=0)
    assert len(sample.generate(opened, [5, 7], args)) == 4 + 1


def test_a_model_that_is_no_student(trained, rows, tmp_path, monkeypatch, capsys):
    """Its results have a folder of their own; another model of that name replaces none."""
    monkeypatch.chdir(tmp_path)
    flags = f"--tasks=none --teacher=none --rows={Path(rows.file).parent}"
    score(f"{trained}/teacher {flags}")
    (file,) = Path().glob("out/**/*.jsonl")
    figures = read(file.parent)
    assert file.parent == Path("out/eval/teacher")
    assert figures["run"] == {} and "kl" not in figures["values"]
    tokenizer = load_tokenizer(f"{trained}/teacher")
    make_model(STUDENT, 3).save_pretrained(tmp_path / "teacher", tokenizer)
    capsys.readouterr()
    score(f"teacher {flags}")
    assert capsys.readouterr().out.count("| teacher | ") == 1  # the one that was scored last
    assert len(read_jsonl(file)) == 2


def test_results_of_other_weights_do_not_count(out):
    score(f"{out}/alra --tasks=none --teacher=none")
    world.edit(out / "alra/run.json", 'weights_sha256="of another model"')
    with refusal("alra: no results; first: python eval.py"):
        score(f"--table {out}/alra")
