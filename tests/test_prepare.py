"""prepare.py: the boundary rule, sources, files, and being killed."""

import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard
from transformers import PreTrainedTokenizerFast

import configure
import prepare
import train
from configure import Config, load
from lib import hf, rows
from lib.files import UserError, locked
from lib.hf import leading_bos
from model import Qwen2Config, init_student, load_tokenizer
from tests.naive_rows import SHORT_FORMS, naive_rows

SHARED = Path(__file__).resolve().parents[2] / "shared"
PAD = 2**32 - 1
END = "<|endoftext|>"

FRAGMENTS = """
Mr. Smith|Dr. No. 7|e.g. this|i.e. that|etc. and|U.S. law|J. R. R. Tolkien|Ph.D. thesis|vs. them|fig. 3|No. 12. Next|in 1999. Then
3.14|2. 5|$1,000.00 paid.|1.2.3. Done|v2.0.|10. Item|x. y|end.|end. Next|end.  Two spaces|Really? Yes!|What?! No.|wait... what|wait…|. . .
"Quoted." He|'single.' she|“Curly.” It|(Aside.) On|[Note.] Off|“Nested ‘so.’” End|end.)|end.") x|end."x|."|.)|foo(bar). Baz|file.txt is|os.path.join(a)
你好。世界|「引用。」次|真的？！是|句。）后|句。 空|ｗｉｄｅ．全|नमस्ते। फिर|سؤال؟ نعم|naïve café. Über|🙂. 🙃!|日本語|e\u0301. A|İ. x|½. x|²². y|Ⅷ. z
if (x) {\n\treturn a.b;\r\n}\r\n|line\n|line \n|\n\n\n|\r\n\r\n|\r|a\rb|\t|tab\tx|    four|  \n  |\n    x|\u00a0. \u00a0|\u3000|a.\u3000b|a.\tb|a.\nb|a.\r\nb|a.\u2028b
<|endoftext|>|�|\u200b|\x00|.|..|...|?|!|”|’|)|»|。|」|…|_x_.|*bold.*|a-b. c|O'Neil. D|A&B. C|MR. X|Etc. y|ETC.) z|7. a|77. b|777. c|7777. d|a7. e
"""


def nasty_text(rng, n):
    """n fragments of every kind that the rule speaks of, joined in unlikely ways."""
    fragments = [f for line in FRAGMENTS.strip("\n").split("\n") for f in line.split("|")]
    fragments = [f.encode().decode("unicode_escape") if f.isascii() else f for f in fragments]
    words = ["the", "cat", "sat", "Mat", "über", "中", "文", "word", "supercalifragilistic", "0", "42"]
    parts = []
    for _ in range(n):
        parts.append(rng.choice(fragments) if rng.random() < 0.5 else rng.choice(words))
        parts.append(rng.choice([" ", " ", " ", "", "", "\n", ". ", "\t", "  "]))
    return "".join(parts)


def as_fast(backend):
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def byte_level(use_regex, vocab_size=420):
    """A small byte-level tokenizer: characters are split over tokens; without the regex, tokens span words and lines."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False, max_token_length=6
    )
    indented = "if a:\n    b\n  \n\tc\n \td\n" * 99
    backend.train_from_iterator([indented, *(nasty_text(random.Random(i), 40) for i in range(40))], trainer)
    return as_fast(backend)


def byte_fallback():
    """The sentencepiece kind: U+2581 for a space, <0x0A> for bytes that no token has."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?()\"'”。！？「」一二三四"
    vocab = ["<unk>", END, *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁t", "▁the", ".▁"]
    model = tokenizers.models.BPE(
        {token: i for i, token in enumerate(vocab)}, [("▁", "t")], byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    replace = tokenizers.decoders.Replace("▁", " ")
    backend.decoder = tokenizers.decoders.Sequence(
        [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    backend.add_special_tokens([END, "<unk>"])
    return as_fast(backend)


TOKENIZERS = ["byte_level", "no_regex", "byte_fallback", "qwen1.5-1.8b", "stories260k"]


@pytest.fixture(scope="session")
def tokenizer_of():
    made = {}

    def get(name):
        if name in ("qwen1.5-1.8b", "stories260k"):
            if not SHARED.is_dir():
                pytest.skip(f"needs {SHARED}/data/{name}")
            make = lambda: load_tokenizer(str(SHARED / "data" / name))  # noqa: E731
        else:
            make = {"byte_level": lambda: byte_level(True), "no_regex": lambda: byte_level(False),
                    "byte_fallback": byte_fallback}[name]  # fmt: skip
        if name not in made:
            tokenizer = make()
            made[name] = tokenizer, prepare.token_table(tokenizer)
        return made[name]

    return get


def rows_of(stream, table, row_len, last=True):
    ends, kinds = prepare.cut(np.array(stream, np.uint32), table, row_len, last)
    starts = [0, *ends[:-1]][: len(ends)]
    return [(list(stream[a:b]), prepare.KINDS[k]) for a, b, k in zip(starts, ends, kinds, strict=True)]


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def stream_of(texts, tokenizer):
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    return [i for t in texts for i in [*backend.encode(t, add_special_tokens=False).ids, tokenizer.eos_token_id]]


# --- the boundary rule


@pytest.mark.parametrize("row_len", [2, 3, 13, 61])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_rows_equal_the_naive_ones_on_nasty_text(name, row_len, tokenizer_of):
    tokenizer, table = tokenizer_of(name)
    rng = random.Random(row_len)
    texts = [nasty_text(rng, rng.choice([0, 1, 5, 97])) for _ in range(23)]
    stream = stream_of(texts, tokenizer)
    assert rows_of(stream, table, row_len) == naive_rows(stream, tokenizer, row_len)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_rows_equal_the_naive_ones_on_random_ids(name, tokenizer_of):
    tokenizer, table = tokenizer_of(name)
    rng = random.Random(5)
    usable = [i for i, piece in enumerate(table.pieces) if piece]
    pointed = [i for i in usable if set(table.pieces[i].decode(errors="replace")) & set(".。?”)\ufffd ")]
    for _ in range(11):
        stream = [rng.choice(pointed if rng.random() < 0.7 else usable) for _ in range(601)] + [tokenizer.eos_token_id]
        assert rows_of(stream, table, 17) == naive_rows(stream, tokenizer, 17)


CASES = [  # text up to the cut, text after it, kind
    ("One two. Three four.", " Five", "sentence"),
    ("One two.", " Mr. Smith", "sentence"),
    ("One two.", " e.g. Smith", "sentence"),
    ("One two.", " the U.S. army", "sentence"),
    ("One two.", " J. R. Smith", "sentence"),
    ("One two.", " No. 12. The", "sentence"),
    ("It was 1999.", " Then", "sentence"),
    ("It was 3.14.", " Then", "sentence"),
    ("It was", " 3.14", None),
    ("One two...", " Three", "sentence"),
    ("One “two.”", " Three", "sentence"),
    ("One (two.)", " Three", "sentence"),
    ("One (etc.)", " Three", None),
    ("One two?!", " Three", "sentence"),
    ("One two.", "\tThree", "sentence"),
    ("import os.", "path", None),
    ("One two\r\n", "Three", "line"),
    ("One two\n", "    Three", "line"),
    ("一二。", "三四", "sentence"),
    ("「一二。」", "三四", "sentence"),
    ("「一二。", "」三四", None),
    ("一二？！", "三四", "sentence"),
]


@pytest.mark.parametrize(("before", "after", "kind"), CASES)
def test_cut_is_where_a_reader_would_pause(before, after, kind, tokenizer_of):
    tokenizer, table = tokenizer_of("byte_fallback" if "。" in before or "！" in before else "byte_level")
    head, tail = tokenizer.encode(before), tokenizer.encode(after)
    assert tokenizer.decode(head + tail) == before + after
    for extra in range(len(tail)):  # the window ends right after the cut, and at each later place
        first, got = rows_of(head + tail + [table.pieces.index(b"x")] * 2, table, len(head) + extra, last=False)[0]
        assert (first == head and got == kind) if kind else first != head or got == "none", (first, got)


def test_latest_boundary_wins_whatever_its_kind(tokenizer_of):
    tokenizer, table = tokenizer_of("byte_level")
    line, sentence, eos, x = (
        *(tokenizer.encode(t) for t in ("ab\n", " ab.")),
        [tokenizer.eos_token_id],
        tokenizer.encode(" x"),
    )
    for parts in itertools.permutations([(line, "line"), (sentence, "sentence"), (eos, "eos")]):
        ids = [i for part, _ in parts for i in x + part] + x * 9
        whole = sum(len(x) + len(part) for part, _ in parts)
        row, kind = rows_of(ids, table, whole + 3, last=False)[0]
        if parts[-1][1] != "sentence" or parts[-2][1] != "sentence":
            assert (len(row), kind) == (whole, parts[-1][1])


def test_rule_asks_for_one_id_beyond_the_window_and_for_no_word_beyond_the_document(tokenizer_of):
    tokenizer, table = tokenizer_of("byte_level")
    ids = tokenizer.encode("one two.")
    assert rows_of(ids, table, len(ids), last=False) == []
    assert rows_of([*ids, *tokenizer.encode(" x")], table, len(ids), last=False) == [(ids, "sentence")]
    ids = [*tokenizer.encode("see Mr"), tokenizer.eos_token_id, *tokenizer.encode(". Then")]
    assert rows_of(ids, table, len(ids) - 1, last=False)[0][1] == "sentence"


def test_line_may_end_in_spaces_that_its_token_holds(tokenizer_of):
    tokenizer, table = tokenizer_of("no_regex")
    token = next(i for i, piece in enumerate(table.pieces) if piece.endswith(b"\n  "))
    ids = [*tokenizer.encode("ab"), token, *tokenizer.encode("cdefgh")]
    assert rows_of(ids, table, len(ids) - 1, last=False)[0] == (ids[: ids.index(token) + 1], "line")


def test_word_list_is_the_one_of_this_rule_version():
    assert (prepare.RULE_VERSION, prepare.ABBREVIATIONS) == (1, SHORT_FORMS)


def test_no_row_has_one_id_and_a_long_document_is_cut_again_and_again(tokenizer_of):
    tokenizer, table = tokenizer_of("byte_level")
    stream = stream_of(["\n" + "x7" * 500, "", "", "a", "word " * 2000], tokenizer)
    rows = rows_of(stream, table, 13)
    assert joined(ids for ids, _ in rows) == stream
    assert all(2 <= len(ids) <= 13 for ids, _ in rows[:-1])
    assert {kind for _, kind in rows} == {"none", "eos"}


def test_pieces_of_the_stream_give_the_rows_of_the_whole(tmp_path, tokenizer_of):
    tokenizer, table = tokenizer_of("byte_level")
    rng = random.Random(3)
    documents = [stream_of([nasty_text(rng, rng.choice([0, 3, 40]))], tokenizer) for _ in range(60)]
    whole = rows_of(joined(documents), table, 29)
    stream = prepare.Stream(tmp_path / "x", 29, None, None)
    while documents:
        n = rng.randrange(5)
        part, documents = documents[:n], documents[n:]
        stream.feed(np.array(joined(part), np.uint32), np.array([len(d) for d in part], np.int64), table)
        if rng.random() < 0.5:
            saved = stream.save()
            with open(tmp_path / "x", "ab") as f:
                f.write(b"not committed")
            stream = prepare.Stream(tmp_path / "x", 29, None, json.loads(json.dumps(saved)))
    stream.feed(np.empty(0, np.uint32), np.empty(0, np.int64), table, last=True)
    assert [prepare.KINDS[k] for k in prepare.read_ends(stream.file, stream.save())] == [kind for _, kind in whole]
    assert stored(tmp_path / "x", 29) == [ids for ids, _ in whole]


def test_last_document_that_a_full_stream_takes_does_not_depend_on_batches(tmp_path, tokenizer_of):
    tokenizer, table = tokenizer_of("byte_level")
    rng = random.Random(3)
    documents = [stream_of(["x" * rng.choice([0, 1, 2, 7])], tokenizer) for _ in range(60)]
    lengths = np.array([len(d) for d in documents], np.int64)
    for max_rows in range(1, 23):
        taken = set()
        for size in (1, 2, 60):
            stream = prepare.Stream(tmp_path / f"{max_rows}-{size}", 5, max_rows, None)
            for at in range(0, 60, size):
                part = np.array(joined(documents[at : at + size]), np.uint32)
                n = at + stream.feed(part, lengths[at : at + size], table)
                if stream.full:
                    break
            taken.add((n, (tmp_path / f"{max_rows}-{size}").read_bytes()))
        assert len(taken) == 1 and n < 60


# --- BOS


def with_template(single, tokenizer_of, name="byte_level", **named):
    """A tokenizer that adds to a text what `single` says; <s> is a special token of it, and "<" is none."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_of(name)[0].backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": END, "bos_token": "<s>", **named})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in set(single.split()) - {"$A"}]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=ids
    )
    return tokenizer


@pytest.mark.parametrize(("single", "found"), [
    ("$A", None), ("<s> $A", "<s>"), (f"<s> $A {END}", "<s>"), (f"$A {END}", None), (f"{END} $A", END),
    ("<s> <s> $A", "refused"), ("< $A", "refused"),
])  # fmt: skip
def test_the_bos_is_the_one_id_that_a_tokenizer_puts_before_a_text(single, found, tokenizer_of):
    tokenizer = with_template(single, tokenizer_of)
    if found == "refused":
        with pytest.raises(UserError, match=r"expected at most one special token before it: set bos=none"):
            leading_bos(tokenizer)
    else:
        assert leading_bos(tokenizer) == (found and tokenizer.convert_tokens_to_ids(found))


def test_real_tokenizers_add_no_bos(tokenizer_of):
    assert leading_bos(load_tokenizer(str(Path(prepare.__file__).parent / "demo/teacher"))) is None
    assert [leading_bos(tokenizer_of(name)[0]) for name in ("qwen1.5-1.8b", "stories260k")] == [None, None]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_each_document_begins_with_the_bos_that_the_tokenizer_adds(name, small, tmp_path, tokenizer_of):
    tokenizer = with_template(f"<s> $A {END}", tokenizer_of, name)
    tokenizer.save_pretrained(tmp_path / "t")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    source, texts = write_jsonl(tmp_path / "t.jsonl", ["<s> is text. " + t for t in small[1]]), small[1]
    documents = [stream_of(["<s> is text. " + t], tokenizer) for t in texts]
    knobs = {"tokenizer": str(tmp_path / "t")}
    for bos_key, first in (("auto", [bos]), ("none", [])):
        stream = joined([*first, *document] for document in documents)
        prepare.prepare(config(small, tmp_path / bos_key, source, bos=bos_key, **knobs))
        rows = stored(tmp_path / bos_key / "train.bin", 31) + stored(tmp_path / bos_key / "val.bin", 31)
        assert rows == [ids for ids, _ in naive_rows(stream, tokenizer, 31)]
        made = [json.loads((tmp_path / bos_key / f"{split}.json").read_text()) for split in ("train", "val")]
        assert [m["bos"] for m in made] == [bos if first else None] * 2 and made[0]["eos_id"] == eos
        assert sum(m["documents"] for m in made) == len(texts) and sum(m["tokens"] for m in made) == len(stream)
    prepare.prepare(config(small, tmp_path / "two", source, prepare_workers=2, **knobs))
    assert files_of(tmp_path / "two") == files_of(tmp_path / "auto")
    with pytest.raises(prepare.UserError, match=f"bos was {bos}, now None"):
        prepare.prepare(config(small, tmp_path / "auto", source, bos="none", **knobs))


def test_a_bos_that_is_the_eos_is_not_added_again(small, tmp_path, tokenizer_of):
    with_template(f"{END} $A", tokenizer_of, bos_token=END).save_pretrained(tmp_path / "t")
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    prepare.prepare(config(small, tmp_path / "a", source, tokenizer=str(tmp_path / "t")))
    prepare.prepare(config(small, tmp_path / "b", source))
    assert ids_of(tmp_path / "a") == ids_of(tmp_path / "b")
    assert json.loads((tmp_path / "a/train.json").read_text())["bos"] is None


@pytest.mark.parametrize("whole", [True, False])
def test_data_from_before_there_was_a_bos_has_none(whole, small, tmp_path, monkeypatch, capsys, tokenizer_of):
    source, folder = write_jsonl(tmp_path / "t.jsonl", small[1]), tmp_path / "half"
    if whole:
        prepare.prepare(config(small, folder, source))
    else:
        half_made(small, tmp_path, monkeypatch, source)
    for file in [folder / "train.json", folder / "val.json"] if whole else [folder / "prepare.state"]:
        facts = json.loads(file.read_text())
        (facts if whole else facts["recipe"]).pop("bos")
        facts.pop("checksum", None)  # nor was there one
        file.write_text(json.dumps(facts))
    monkeypatch.setattr(hf, "leading_bos", lambda tokenizer: 7)
    with pytest.raises(prepare.UserError, match="bos was None, now 7"):
        prepare.prepare(config(small, folder, source))
    prepare.prepare(config(small, folder, source, bos="none"))
    assert ("left as it is" if whole else "going on") in "".join(capsys.readouterr())


@pytest.mark.parametrize("bos", ["auto", "none"])
def test_a_run_keeps_the_bos_of_its_rows_for_its_scores(bos, small, tmp_path, tokenizer_of):
    tokenizer = with_template("<s> $A", tokenizer_of)
    tokenizer.save_pretrained(tmp_path / "t")
    shape = Qwen2Config(8, 11, 1, 2, 1, vocab_size=421, max_position_embeddings=64)
    init_student(shape).save_pretrained(tmp_path / "shape")
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    prepare.prepare(config(small, tmp_path / "a", source, tokenizer=str(tmp_path / "t"), bos=bos))
    keys = {"methods": "pretrain", "teacher": "None", "tokenizer": tmp_path / "t", "student": tmp_path / "shape", "seq_len": 30,
            "data_dir": tmp_path / "a", "out_dir": tmp_path / "out", "warmup_steps": 0, "device": "cpu", "val_max_rows": 3}  # fmt: skip

    def run(n):
        return train.distil(load([f"--{k}={v}" for k, v in {**keys, "max_steps": n}.items()]))

    assert run(1) == 0
    facts = json.loads((tmp_path / "out/pretrain/run.json").read_text())
    assert facts["bos"] == (tokenizer.bos_token_id if bos == "auto" else None)
    run_file = tmp_path / "out/run.json"
    before = json.loads(run_file.read_text())
    del before["config"]["bos"], before["bos"]  # a run from before there was such a key goes on
    run_file.write_text(json.dumps(before))
    assert run(2) == 0


# --- whole runs


@pytest.fixture(scope="session")
def small(tmp_path_factory, tokenizer_of):
    """A tokenizer's folder, and 83 documents."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("byte_level")[0].save_pretrained(folder)
    rng = random.Random(7)
    texts = [nasty_text(rng, rng.choice([0, 1, 30, 90])) for _ in range(83)]
    texts[5] = "x" + END + "y"
    return str(folder), texts


def config(small, data_dir, source, **knobs):
    return Config(**{"tokenizer": small[0], "data_dir": str(data_dir), "source": str(source), "n_documents": None, "train_rows": None,
                     "val_rows": 7, "seq_len": 30, **knobs})  # fmt: skip


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t, "meta": {"n": i}}) + "\n" for i, t in enumerate(texts)))
    return path


def stored(file, row_len):
    rows = np.fromfile(file, np.uint32).reshape(-1, row_len)
    return [[int(i) for i in row if i != PAD] for row in rows]


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def ids_of(folder):
    return {name: content for name, content in files_of(folder).items() if name.endswith(".bin")}


def test_files_hold_the_stream_and_the_manifest_counts_it(small, tmp_path):
    tokenizer = load_tokenizer(small[0])
    prepare.prepare(config(small, tmp_path / "a", write_jsonl(tmp_path / "t.jsonl", small[1])))
    assert set(files_of(tmp_path / "a")) == {"train.bin", "train.json", "val.bin", "val.json"}
    stream = stream_of(small[1], tokenizer)
    assert stream.count(tokenizer.eos_token_id) == 83  # text that spells the EOS is text
    rows = stored(tmp_path / "a/train.bin", 31) + stored(tmp_path / "a/val.bin", 31)
    assert rows == [ids for ids, _ in naive_rows(stream, tokenizer, 31)]
    train, val = (json.loads((tmp_path / f"a/{name}.json").read_text()) for name in ("train", "val"))
    assert (train["rows"], val["rows"]) == (len(rows) - 7, 7)
    assert train["tokens"] + val["tokens"] == len(stream)
    assert train["documents"] + val["documents"] == 83
    assert train["valid_targets"] == train["tokens"] - train["rows"]
    assert train["padding_share"] == pytest.approx(1 - train["tokens"] / (31 * train["rows"]))
    assert sum(train["length_histogram"]) == train["rows"] and train["length_histogram"][0] == 0
    kinds = [kind for _, kind in naive_rows(stream, tokenizer, 31)][:-7]
    assert train["ends"] == {
        kind: pytest.approx(kinds.count(kind) / len(kinds)) for kind in ("eos", "line", "sentence", "none")
    }
    assert train["records"][0] == 0 and val["records"][1] == 83
    assert val["records"][0] in (train["records"][1], train["records"][1] - 1)  # a document may stand in both
    assert train["eos_id"] == tokenizer.eos_token_id and train["row_len"] == 31 and train["sha256_67200_steps"] is None


def test_asked_rows_are_a_prefix_and_val_comes_right_after(small, tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    prepare.prepare(config(small, tmp_path / "all", source, val_rows=0))
    prepare.prepare(config(small, tmp_path / "some", source, train_rows=41))
    every = (tmp_path / "all/train.bin").read_bytes()
    assert (tmp_path / "some/train.bin").read_bytes() == every[: 41 * 31 * 4]
    assert (tmp_path / "some/val.bin").read_bytes() == every[41 * 31 * 4 : 48 * 31 * 4]
    eos = load_tokenizer(small[0]).eos_token_id
    rows = stored(tmp_path / "some/train.bin", 31)
    train, val = (json.loads((tmp_path / f"some/{name}.json").read_text())["records"] for name in ("train", "val"))
    assert rows[-1][-1] != eos  # so that one document stands in both
    assert train == [0, joined(rows).count(eos) + 1] and val[0] == train[1] - 1
    prepare.prepare(config(small, tmp_path / "few", source, n_documents=17, val_rows=0))
    few = stored(tmp_path / "few/train.bin", 31)
    assert joined(few) == stream_of(small[1][:17], load_tokenizer(small[0]))


def test_prefix_has_a_hash_of_its_own(small, tmp_path, monkeypatch):
    import hashlib

    monkeypatch.setattr(prepare, "PREFIX_ROWS", 23)
    prepare.prepare(config(small, tmp_path / "a", write_jsonl(tmp_path / "t.jsonl", small[1])))
    wanted = hashlib.sha256((tmp_path / "a/train.bin").read_bytes()[: 23 * 31 * 4]).hexdigest()
    assert json.loads((tmp_path / "a/train.json").read_text())["sha256_67200_steps"] == wanted


@pytest.mark.parametrize("train_rows", [None, 53])
def test_held_out_documents_do_not_depend_on_batches(small, tmp_path, monkeypatch, train_rows):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    for chars in (1, 500, 10**9):
        monkeypatch.setattr(prepare, "BATCH_CHARS", chars)
        prepare.prepare(config(small, tmp_path / str(chars), source, val_rows=0, val_share=0.3, train_rows=train_rows))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "500") == files_of(tmp_path / str(10**9))
    tokenizer = load_tokenizer(small[0])
    held = [prepare.held_out((None, text), 0.3) for text in small[1]]
    val = joined(stored(tmp_path / "1/val.bin", 31))
    wanted = stream_of([text for text, h in zip(small[1], held, strict=True) if h], tokenizer)
    assert 10 < sum(held) < 40 and val == wanted[: len(val)]
    assert (len(val) == len(wanted)) == (train_rows is None)
    if train_rows:
        assert len(stored(tmp_path / "1/train.bin", 31)) == 53


def test_every_kind_of_source_gives_the_same_rows(small, tmp_path):
    texts = [t.replace("\x00", "") for t in small[1]]
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    raw = "\n".join(lines).encode()  # no line feed at the end
    pile, press = tmp_path / "pile/train", zstandard.ZstdCompressor().compress
    for folder in (pile, tmp_path / "txt"):
        folder.mkdir(parents=True)
    (tmp_path / "a.jsonl").write_bytes(raw.replace(b"\n", b"\r\n\n"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw[:999]) + gzip.compress(raw[999:]))  # two members
    (tmp_path / "b.jsonl.zst").write_bytes(press(raw[:999]) + press(raw[999:]))  # two frames
    pyarrow.parquet.write_table(
        pyarrow.table({"n": range(len(texts)), "text": texts}), tmp_path / "a.parquet", row_group_size=10
    )
    for i in range(3):
        (pile / f"0{i}.jsonl.zst").write_bytes(press("\n".join(lines[i * 30 : i * 30 + 30]).encode() + b"\n"))
    (tmp_path / "pile/test.jsonl.zst").write_bytes(press(b'{"text": "not for training"}\n'))
    for i, text in enumerate(texts):
        (tmp_path / f"txt/{i:03}.txt").write_bytes(text.encode())
    sources = [
        tmp_path / name
        for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl.zst", "a.parquet", "pile", "pile/train/*.zst", "txt")
    ]
    for source in sources:
        records = prepare.open_source(str(source), None).records
        assert [text for _, text in records(0)] == texts, source
        assert [text for _, text in records(37)] == texts[37:], source
    names = [name for name, _ in prepare.open_source(str(tmp_path / "txt"), None).records(0)]
    assert names[:2] == ["000.txt", "001.txt"]


def test_a_folder_like_the_pile_streams_through_datasets_alike(small, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pile/train").mkdir(parents=True)
    for i in range(3):
        lines = "".join(
            json.dumps({"text": t, "meta": {"pile_set_name": "X"}}) + "\n" for t in small[1][i * 30 : i * 30 + 30]
        )
        (tmp_path / f"pile/train/0{i}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    assert [text for _, text in prepare.dataset_records(str(tmp_path / "pile"), None, 0)] == small[1]
    assert [text for _, text in prepare.dataset_records(str(tmp_path / "pile"), None, 37)] == small[1][37:]


def test_a_hub_dataset_is_read_at_one_commit(small, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    asked = []

    class Info:
        sha = "c0ffee"

    def streamed(path, revision, skip, config, column, split):
        asked.append((path, revision, skip, config, column, split))
        return iter([(None, text) for text in small[1][skip:]])

    wanted = []
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name, revision: wanted.append((name, revision)) or Info
    )
    monkeypatch.setattr(prepare, "dataset_records", streamed)
    prepare.prepare(config(small, tmp_path / "a", "someone/corpus", source_revision="main"))
    assert asked == [("someone/corpus", "c0ffee", 0, None, "text", "train")]
    assert "source: someone/corpus@c0ffee\n" in capsys.readouterr().err
    of = {"source_config": "sample-10BT", "source_text": "content", "source_split": "validation"}
    prepare.prepare(config(small, tmp_path / "c", "someone/corpus@v1.0", **of))
    assert wanted == [("someone/corpus", "main"), ("someone/corpus", "v1.0")]
    assert asked[1] == ("someone/corpus", "c0ffee", 0, "sample-10BT", "content", "validation")
    assert of.items() <= json.loads((tmp_path / "c/train.json").read_text()).items()
    with pytest.raises(UserError, match="set another data_dir"):
        prepare.prepare(config(small, tmp_path / "c", "someone/corpus@v1.0", **{**of, "source_text": "body"}))
    with pytest.raises(UserError, match="someone/corpus@v1 with source_revision=v2: name one revision"):
        prepare.open_source("someone/corpus@v1", "v2")
    assert json.loads((tmp_path / "a/train.json").read_text())["source_revision"] == "c0ffee"
    prepare.prepare(config(small, tmp_path / "b", write_jsonl(tmp_path / "t.jsonl", small[1])))
    assert ids_of(tmp_path / "a") == ids_of(tmp_path / "b")


def test_config_split_and_column_reach_the_dataset(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **keys):
        asked.append((args, keys))
        return iter([{"content": "one", "text": "two"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(prepare.dataset_records("o/n", "c0ffee", 0, "sample-10BT", "content", "dev")) == [(None, "one")]
    assert asked == [(("o/n", "sample-10BT"), {"split": "dev", "streaming": True, "revision": "c0ffee"})]


def test_several_sources_are_interleaved_by_their_shares(small, tmp_path, capsys):
    one, two = small[1][:60], [text + " two" for text in small[1]]
    a, b = write_jsonl(tmp_path / "a.jsonl", one), tmp_path / "b.jsonl"
    b.write_text("".join(json.dumps({"content": text}) + "\n" for text in two))
    cfg = config(small, tmp_path / "m", f"{a}:0.7,{b}:0.3", source_text="text,content")
    source, parts = prepare.open_sources(cfg)
    records = [text for _, text in source.records(0)]
    said = f"source={a}: at its end, and so the mixture ends; documents: 60 of {a}, {len(records) - 60} of {b}\n"
    assert capsys.readouterr().err == said
    for n in range(1, len(records) + 1):
        k = sum(text in one for text in records[:n])
        assert abs(k - 0.7 * n) < 1
    assert records[:10] == [one[0], two[0], *one[1:4], two[1], *one[4:6], two[2], one[6]]
    assert [t for t in records if t in one] == one and [t for t in records if t in two] == two[: len(records) - 60]
    for skip in (1, 2, 37, len(records)):
        assert [text for _, text in source.records(skip)] == records[skip:]
    assert [(p["source"], p["share"]) for p in parts] == [(str(a), 0.7), (str(b), 0.3)]
    assert prepare.mixture("a:7, b/c@v1:3") == [("a", 0.7), ("b/c@v1", 0.3)] and prepare.mixture("x,y") == [("x,y", 1)]
    prepare.prepare(cfg)
    prepare.prepare(config(small, tmp_path / "whole", write_jsonl(tmp_path / "c.jsonl", records)))
    assert ids_of(tmp_path / "m") == ids_of(tmp_path / "whole")
    assert json.loads((tmp_path / "m/val.json").read_text())["sources"] == parts
    prepare.prepare(cfg)
    assert "made before by the same recipe" in capsys.readouterr().out
    for mixed, knobs, message in (
        (f"{a}:0.6,{b}:0.4", {}, "source_sha256 was"),
        (f"{a}:0.7,{b}", {}, "expected a share above 0 for each, like a:0.7,b:0.3"),
        (f"{a}:0,{b}:1", {}, "expected a share above 0"),
        (f"{a}:1,{b}:1", {"source_text": "a,b,c"}, "source_text=a,b,c: expected one for all, or one for each of the 2"),
        (f"{a}:1,{b}:1", {"source_config": "x"}, "source_config=x: only a hub dataset has one"),
        (str(a), {"source_split": "test"}, "source_split=test: only a hub dataset has one"),
        (str(a), {"source_text": "body"}, "expected a field 'body' that holds text"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            prepare.prepare(config(small, tmp_path / ("m" if "sha" in message else "n"), mixed, **{"source_text": "text,content"}
                                   | ({} if "," in mixed else {"source_text": "text"}) | knobs))  # fmt: skip


def test_a_mixture_goes_on_with_the_same_bytes_after_a_kill_and_with_any_workers(small, tmp_path, monkeypatch):
    a, b = write_jsonl(tmp_path / "a.jsonl", small[1]), write_jsonl(tmp_path / "b.jsonl", small[1][::-1])
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)
    mixed = f"{a}:2,{b}:1"
    prepare.prepare(config(small, tmp_path / "whole", mixed))

    class Killed(Exception):
        pass

    times, feed = [], prepare.Stream.feed

    def stop(self, *args, **keys):
        times.append(1)
        if len(times) == 5:
            raise Killed
        return feed(self, *args, **keys)

    monkeypatch.setattr(prepare.Stream, "feed", stop)
    with pytest.raises(Killed):
        prepare.prepare(config(small, tmp_path / "killed", mixed), commit_sec=0.0)
    assert json.loads((tmp_path / "killed/prepare.state").read_text())["records"] == 28
    prepare.prepare(config(small, tmp_path / "killed", mixed, prepare_workers=2), commit_sec=0.0)
    assert ids_of(tmp_path / "killed") == ids_of(tmp_path / "whole")


@pytest.mark.parametrize(("eos", "name", "base"), [
    ("<|im_end|>", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base"), ("<|eot_id|>", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
    ("<end_of_turn>", "google/gemma-3-1b-it", "google/gemma-3-1b-pt"), ("<|endoftext|>", "EleutherAI/pythia-410m", None), ("</s>", "a/b", None),
])  # fmt: skip
def test_an_eos_that_ends_a_turn_of_a_chat_is_warned_of(eos, name, base, capsys):
    prepare.warn_of_chat(name, types.SimpleNamespace(eos_token=eos))
    told = capsys.readouterr().err
    assert told.startswith(f"warning: {name}: documents will end with its eos_token {eos}") == bool(base)
    assert told.endswith(f"usual name {base}\n") if base else not told


def test_the_text_of_python_itself():
    documents = prepare.python_documents()
    names = [name for name, _ in documents]
    assert "lib/argparse.py" in names and "topics/assert" in names
    assert not [n for n in names if "/test" in n or "site-packages" in n or "lib2to3" in n or "encodings" in n]
    assert 4e6 < sum(len(text) for _, text in documents) < 4e7
    assert names != sorted(names) and len(set(names)) == len(names)
    held = [name for name, text in documents if prepare.held_out((name, text + "changed"), 0.1)]
    assert held == [name for name, text in documents if prepare.held_out((name, text), 0.1)]
    assert 0.05 < len(held) / len(names) < 0.15


def test_lone_surrogates_become_the_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude42 \\\\ud800"}\n')
    assert list(prepare.open_source(str(tmp_path / "a.jsonl"), None).records(0)) == [(None, "a\ufffdb 🙂 \\ud800")]


def test_any_number_of_workers_gives_the_same_bytes(small, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARS", 700)
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    for workers in (1, 2, 3):
        prepare.prepare(config(small, tmp_path / str(workers), source, prepare_workers=workers))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "3")


# --- killed and started again


class Crash(BaseException):
    pass


@pytest.mark.parametrize(
    "split", [{"val_rows": 7}, {"val_rows": 0, "val_share": 0.3}, {"val_rows": 7, "train_rows": 60}]
)
def test_a_crash_at_every_step_costs_nothing(split, small, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "t.jsonl", small[1][:17])
    monkeypatch.setattr(prepare, "BATCH_CHARS", 1500)
    monkeypatch.setattr(prepare, "COMMIT_SEC", 0.0)
    prepare.prepare(config(small, tmp_path / "whole", source, **split))
    left = [10**9]

    def crashing(function):
        def step(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            return function(*args, **kwargs)

        return step

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "truncate"), (Path, "unlink"), (prepare.Stream, "feed"),
                        (prepare, "measure"), (prepare, "cut")):  # fmt: skip
        monkeypatch.setattr(owner, name, crashing(getattr(owner, name)))
    for crash_at in range(1, 1000):
        folder = tmp_path / str(crash_at)
        left[0] = crash_at
        try:
            prepare.prepare(config(small, folder, source, **split), commit_sec=0.0)
            break  # no step is left to crash at
        except Crash:
            for work in folder.glob("*.bin.tmp"):
                if (folder / "prepare.state").exists() and not json.loads((folder / "prepare.state").read_text())[
                    "whole"
                ]:
                    with open(work, "ab") as f:
                        f.write(b"torn")  # a page that reached the disk after the last commit
            left[0] = 10**9
            prepare.prepare(config(small, folder, source, **split), commit_sec=0.0)
            assert files_of(folder) == files_of(tmp_path / "whole"), crash_at
    assert crash_at > 20


KILLED = """
import sys, prepare
from configure import load
prepare.BATCH_CHARS = 3000
plain = prepare.Stream.feed
def asking(self, *args, **kwargs):
    taken = plain(self, *args, **kwargs)
    print("fed", flush=True)
    sys.stdin.readline()  # rows are written that no commit has counted: go on?
    return taken
prepare.Stream.feed = asking
if __name__ == "__main__":
    prepare.prepare(load(sys.argv[1:]), commit_sec=-1.0)
"""


def test_kill_9_and_start_again_gives_the_same_bytes(small, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    source = write_jsonl(tmp_path / "t.jsonl", small[1] * 3)
    prepare.prepare(config(small, tmp_path / "whole", source))
    knobs = [f"--{k}={v}" for k, v in {"tokenizer": small[0], "source": source, "n_documents": None, "train_rows": None,
                                       "val_rows": 7, "seq_len": 30, "data_dir": tmp_path / "a"}.items()]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(Path(prepare.__file__).parent), "OMP_NUM_THREADS": "1"}
    rng = random.Random(11)
    for workers in (1, 2):
        command = [sys.executable, str(tmp_path / "killed.py"), *knobs, f"--prepare_workers={workers}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
                              start_new_session=True) as run:  # fmt: skip
            for _ in range(rng.randrange(1, 6)):
                assert run.stdout.readline() == "fed\n"
                print(file=run.stdin, flush=True)
            assert run.stdout.readline() == "fed\n"
            run.send_signal(signal.SIGKILL)
        assert run.returncode == -signal.SIGKILL and (tmp_path / "a/prepare.state").exists()
        deadline = time.monotonic() + 600
        while _alive(run.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(run.pid), "a worker outlives its parent"
    state = json.loads((tmp_path / "a/prepare.state").read_text())
    assert 0 < state["records"] < 83 * 3
    prepare.prepare(config(small, tmp_path / "a", source))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "whole")


def _alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# --- slips


def half_made(small, tmp_path, monkeypatch, source, **knobs):
    """A folder that a killed run left behind."""
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "BATCH_CHARS", 1000)
        plain, n = prepare.Stream.feed, itertools.count()
        patch.setattr(prepare.Stream, "feed", lambda *a, **k: plain(*a, **k) if next(n) < 3 else pytest.fail("crash"))
        with pytest.raises(pytest.fail.Exception):
            prepare.prepare(config(small, tmp_path / "half", source, **knobs), commit_sec=0.0)
    return tmp_path / "half"


def test_ends_of_rows_are_appended_compared_and_read_of_older_states(small, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    prepare.prepare(config(small, tmp_path / "whole", source))
    half = half_made(small, tmp_path, monkeypatch, source)
    cfg, state, ends = config(small, half, source), half / "prepare.state", half / "train.ends.tmp"
    letters, facts = ends.read_bytes(), json.loads(state.read_text())
    assert "ends" not in facts["streams"]["train"] and len(letters) == facts["streams"]["train"]["rows"] > 0
    ends.write_bytes(letters[:-1] + b"?")
    with pytest.raises(
        prepare.UserError, match=rf"{ends}: not the ends that prepare.state describes; move {half} aside"
    ):
        prepare.prepare(cfg)
    ends.unlink()
    del facts["checksum"]
    facts["streams"]["train"] = {"ends": letters.decode(), "rest": facts["streams"]["train"]["rest"]}
    state.write_text(json.dumps(facts))
    prepare.prepare(cfg)
    assert files_of(half) == files_of(tmp_path / "whole")


def test_finished_data_of_the_same_recipe_is_left_alone(small, tmp_path, capsys):
    cfg = config(small, tmp_path / "a", write_jsonl(tmp_path / "t.jsonl", small[1]))
    prepare.prepare(cfg)
    for path in (tmp_path / "a").iterdir():
        os.utime(path, ns=(0, 0))  # so that a file written again within one tick of the clock is seen
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    prepare.prepare(cfg)
    assert "left as it is" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}


@pytest.mark.parametrize(("knobs", "named"), [
    ({"seq_len": 29}, "row_len was 31, now 30"), ({"val_rows": 8}, "val_rows was 7, now 8"), ({"train_rows": 9}, "train_rows was None"),
    ({"n_documents": 80}, "n_documents"), ({"source": "python"}, "source was"), ({"tokenizer": "other"}, "tokenizer was"),
])  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_another_recipe_is_refused_by_name_and_nothing_is_touched(
    whole, knobs, named, small, tmp_path, monkeypatch, tokenizer_of
):
    tokenizer_of("no_regex")[0].save_pretrained(tmp_path / "other")
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    folder = tmp_path / "half"
    if whole:
        prepare.prepare(config(small, folder, source))
    else:
        half_made(small, tmp_path, monkeypatch, source)
    before = files_of(folder)
    if "tokenizer" in knobs:
        knobs = {"tokenizer": str(tmp_path / "other")}
    with pytest.raises(prepare.UserError, match=named):
        prepare.prepare(config(small, folder, **{"source": source, **knobs}))
    assert files_of(folder) == before


def test_a_changed_source_or_rule_is_refused(small, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    half_made(small, tmp_path, monkeypatch, source)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "RULE_VERSION", 2)
        with pytest.raises(prepare.UserError, match="rule_version was 1, now 2"):
            prepare.prepare(config(small, tmp_path / "half", source))
    content = source.read_bytes()
    source.write_bytes(content.replace(b"cat", b"dog", 1))  # same size
    with pytest.raises(prepare.UserError, match="source_sha256 was"):
        prepare.prepare(config(small, tmp_path / "half", source))
    source.write_bytes(content)
    moved = source.rename(tmp_path / "t2.jsonl").rename(source)  # a move and back is no change
    prepare.prepare(config(small, tmp_path / "half", moved))


@pytest.mark.parametrize("fed", [0, 1, 5])
def test_a_worker_that_is_killed_is_told(fed, tokenizer_of):
    def batches():
        for n in range(9):
            if n == fed:
                multiprocessing.active_children()[0].kill()
            yield [(None, "a")]

    tokenizer = tokenizer_of("byte_level")[0].backend_tokenizer
    with pytest.raises(prepare.UserError, match=r"prepare_workers=2: one ended early \(exit code -9;"):
        list(prepare.encode_in_order(batches(), tokenizer, 0, 2))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("content", "said"), [
    (b'{"recipe": {"row_', "not whole JSON (Unterminated string"), (b"", "not whole JSON (Expecting value"), (b"\xff\xfe", "not whole JSON ("),
    (b"{}", "no {key!r} in it"), (b"[1, 2]", "expected a JSON object, got list"), (b"null", "expected a JSON object, got NoneType"),
    (b'{"streams": {}, "split": "train"}', "no {second!r} in it"),
])  # fmt: skip
def test_damaged_records_are_told_by_their_path_with_the_remedy(content, said, small, tmp_path, monkeypatch, capsys):
    source, folder = write_jsonl(tmp_path / "t.jsonl", small[1]), tmp_path / "half"
    half_made(small, tmp_path, monkeypatch, source)
    whole = tmp_path / "whole"
    prepare.prepare(config(small, whole, source))
    capsys.readouterr()

    def told(call, file, keys, remedy):
        file.write_bytes(content)
        before = files_of(file.parent)
        assert configure.guard(call) == 1
        line = capsys.readouterr().err
        assert line.startswith(f"UserError: {file}: {said.format(key=keys[0], second=keys[1])}"), line
        assert line.endswith(f"; {remedy}\n") and files_of(file.parent) == before and line.count("\n") == 1

    call = lambda: prepare.prepare(config(small, folder, source))  # noqa: E731
    told(call, folder / "prepare.state", ("recipe", "recipe"), f"move {folder} aside and start again")
    for call in (
        lambda: prepare.prepare(config(small, whole, source)),
        lambda: prepare.verify(whole),
        lambda: prepare.show(whole, 0),
    ):
        told(call, whole / "train.json", ("split", "tokenizer"), f"move {whole} aside and prepare it again")


def test_two_at_once_are_refused(small, tmp_path):
    (tmp_path / "a").mkdir()
    with locked(tmp_path / "a", RuntimeError()), pytest.raises(prepare.UserError, match="is at work there"):
        prepare.prepare(config(small, tmp_path / "a", write_jsonl(tmp_path / "t.jsonl", small[1])))


def test_sources_that_cannot_be_are_named(small, tmp_path):
    good = '{"text": "a"}\n'
    (tmp_path / "column.jsonl").write_text(good + '{"content": "a"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 7}\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "torn.jsonl").write_text(good + '{"text": "a\n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.md").write_text("x")
    whole = zstandard.ZstdCompressor().compress(np.random.default_rng(0).bytes(99_999))
    (tmp_path / "torn.jsonl.zst").write_bytes(whole[:5000])
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "column.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "null.parquet").read_bytes()[:-9])
    (tmp_path / "deep.jsonl").write_text(good + '{"text":' + "[" * 200_000 + "\n")
    for name, said in (
        ("column.jsonl", "record 2: expected a field 'text' that holds text, got {'content': 'str'}"), ("number.jsonl", "got {'text': 'int'}"),
        ("list.jsonl", "got list"), ("torn.jsonl", "record 2: expected UTF-8 JSON"), ("latin.jsonl", "record 1: expected UTF-8 JSON"),
        ("latin.txt", "expected UTF-8"), ("empty.jsonl", "holds no record"), ("folder", "no .jsonl"), ("notes.md", "expected a file that ends in"),
        ("torn.jsonl.zst", "cannot be read to its end"), ("column.parquet", "expected a column 'text', got body"), ("gone.jsonl", "no such file"),
        ("null.parquet", "null.parquet, record 2: .* got {'text': 'NoneType'}"), ("torn.parquet", "torn.parquet: cannot be read to its end"),
        ("deep.jsonl", "record 2: expected UTF-8 JSON"), ("gone", "no such file"), ("gone/*.txt", "no such file"),
    ):  # fmt: skip
        with pytest.raises(prepare.UserError, match=said.replace("{", r"\{").replace("/*", r"/\*")):
            prepare.prepare(config(small, tmp_path / "out" / name.replace("*", "x"), tmp_path / name))
    with pytest.raises(prepare.UserError, match="only a hub dataset has one"):
        prepare.prepare(config(small, tmp_path / "out/r", tmp_path / "column.jsonl", source_revision="main"))


def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare, "_hub_source", lambda *a: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    for name in ("./x", "/no/where", "~/x", "a/b/c", "x.jsonl", "a/x.parquet", "x*", "corpora/x"):
        with pytest.raises(prepare.UserError, match="no such file"):
            prepare.open_source(name, None)


def test_a_name_that_the_hub_does_not_know(monkeypatch):
    import huggingface_hub

    def unknown(self, name, revision):
        raise RuntimeError("404: Not Found\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unknown)
    with pytest.raises(
        prepare.UserError, match=r'not "python", no local path, and no such dataset on the hub \(404: Not Found\)'
    ):
        prepare.open_source("pyhton", None)


def test_too_little_text_for_a_split_is_said(small, tmp_path, capsys):
    source = write_jsonl(tmp_path / "t.jsonl", ["a", "b"])
    with pytest.raises(prepare.UserError, match="2 records leave no row for train"):
        prepare.prepare(config(small, tmp_path / "a", source))
    with pytest.raises(prepare.UserError, match="2 records leave no row for val"):
        prepare.prepare(config(small, tmp_path / "b", source, val_rows=0, val_share=1e-6))
    assert [file.name for name in "ab" for file in (tmp_path / name).glob("[!.]*")] == []  # free for another recipe
    prepare.prepare(config(small, tmp_path / "a", write_jsonl(source, small[1]), train_rows=5000))
    said = capsys.readouterr()
    n = [json.loads((tmp_path / "a" / f"{split}.json").read_text())["rows"] for split in ("train", "val")]
    assert "the source ended after" in said.out and said.err.strip().endswith(f"documents, {sum(n):,} rows")
    with pytest.raises(prepare.UserError, match=r"source was '\S+…\S+/t.jsonl', now '\S+…\S+/other_texts.jsonl'"):
        prepare.prepare(
            config(small, tmp_path / "a", write_jsonl(tmp_path / "other_texts.jsonl", ["c"]), train_rows=5000)
        )


def test_the_readmes_flags_for_ones_own_text_hold_out_documents_from_everywhere(small, tmp_path):
    readme = (Path(prepare.__file__).parent / "README.md").read_text()
    flags = re.search(r"`(--train_rows=None [^`]+)`", readme)[1].split()
    (tmp_path / "texts").mkdir()
    for i in range(300):
        (tmp_path / f"texts/{i:03}.txt").write_text(f"Document {i}.")
    places = [f"--source={tmp_path / 'texts'}", f"--data_dir={tmp_path / 'a'}", f"--tokenizer={small[0]}"]
    prepare.prepare(load([*flags, *places]))
    text = load_tokenizer(small[0]).decode(joined(stored(tmp_path / "a/val.bin", 513)))
    numbers = [int(n) for n in re.findall(r"Document (\d+)", text)]
    assert 1 <= len(numbers) <= 9 and numbers != list(range(300 - len(numbers), 300))


def test_no_tokenizer(small, tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", ["a"])
    with pytest.raises(prepare.UserError, match="tokenizer=None, teacher=None"):
        prepare.prepare(config(small, tmp_path / "a", source, tokenizer=None, teacher=None))
    with pytest.raises(ValueError, match="nowhere"):
        prepare.prepare(config(small, tmp_path / "a", source, tokenizer=str(tmp_path / "nowhere")))
    assert not (tmp_path / "a").exists()


def test_a_tokenizer_that_does_not_give_its_text_back_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        prepare.token_bytes(backend)


# --- verify and show


def test_quick_hash_sees_every_byte_of_a_small_file_and_both_ends_of_a_large_one(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 4)
    file = tmp_path / "x"

    def hash_of(content):
        file.write_bytes(content)
        return rows.quick_hash(file)

    for size in (1, 3, 97, 256):
        flipped = [bytes(i == at for i in range(size)) for at in range(size)]
        assert len({hash_of(content) for content in [bytes(size), bytes(size + 1), *flipped]}) == size + 2
    large = bytearray(7919)
    for at in (0, 3, -4, -1):
        changed = large.copy()
        changed[at] = 1
        assert hash_of(changed) != hash_of(large)


def test_verify_finds_a_changed_byte_and_a_short_file(small, tmp_path, capsys):
    folder = tmp_path / "a"
    with pytest.raises(prepare.UserError, match=r"train\.json: not there"):
        prepare.verify(folder)
    prepare.prepare(config(small, folder, write_jsonl(tmp_path / "t.jsonl", small[1])))
    prepare.verify(folder)
    assert capsys.readouterr().out.count("as the manifest says") == 2
    for name, gone, said in (("prepare.state", False, "not finished"), ("val.json", True, r"val\.json: not there")):
        saved = (folder / "val.json").read_bytes()
        (folder / name).unlink() if gone else (folder / name).write_text("{}")
        with pytest.raises(prepare.UserError, match=said):
            prepare.verify(folder)
        (folder / name).write_bytes(saved) if gone else (folder / name).unlink()
    content = (folder / "train.bin").read_bytes()
    one, other = np.frombuffer(content[:8], np.uint32)
    changes = {
        "sha256": np.array([other, one], np.uint32).tobytes() + content[8:],
        "rows": content[31 * 4 :],
        "multiple of a row": content[:-4],
        "padding inside": b"\xff" * 4 + content[4:],
        "id 70000": np.array([70000], np.uint32).tobytes() + content[4:],
    }
    for said, changed in changes.items():
        (folder / "train.bin").write_bytes(changed)
        with pytest.raises(prepare.UserError, match=said):
            prepare.verify(folder)


def test_show_prints_rows_as_text_with_what_they_end_at(small, tmp_path, capsys):
    cfg = config(
        small, tmp_path / "a", write_jsonl(tmp_path / "t.jsonl", ["One two.\nThree. " * 9, "four " * 90]), val_rows=1
    )
    prepare.prepare(cfg)
    capsys.readouterr()
    prepare.show(tmp_path / "a", 0)
    shown = capsys.readouterr().out
    assert shown.startswith("⟦row 0: ") and "One two.\nThree." in shown and shown.count("⟦row") == 5
    assert "⟦line⟧" in shown or "⟦sentence⟧" in shown
    prepare.show(tmp_path / "a/val.bin", 0)
    assert capsys.readouterr().out.endswith(f"{END}⟦eos⟧\n\n")
    with pytest.raises(prepare.UserError, match="expected a row from 0 to 0"):
        prepare.show(tmp_path / "a/val.bin", 1)


def test_show_names_the_boundary_that_the_rule_chose(small, tmp_path, capsys):
    tokenizer = load_tokenizer(small[0])
    prepare.prepare(config(small, tmp_path / "a", write_jsonl(tmp_path / "t.jsonl", small[1]), val_rows=0))
    wanted = naive_rows(stream_of(small[1], tokenizer), tokenizer, 31)
    assert any(len(ids) == 31 and kind == "sentence" for ids, kind in wanted)
    capsys.readouterr()
    prepare.show(tmp_path / "a", 0, len(wanted))
    shown = re.findall("⟦([a-z ]+)⟧\n\n(?=⟦row|$)", capsys.readouterr().out)
    assert shown == ["no boundary" if kind == "none" else kind for _, kind in wanted]


def test_command_line(small, tmp_path, monkeypatch, capsys):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    knobs = [f"--tokenizer={small[0]}", f"--source={source}", f"--data_dir={tmp_path / 'a'}", "--val_rows=3"]
    for argv, code in ((knobs, 0), (["--verify", str(tmp_path / "a")], 0), (["--show", "0", str(tmp_path / "a")], 0)):
        monkeypatch.setattr(sys, "argv", ["prepare.py", *argv])
        assert prepare.main() == code
    assert "as the manifest says" in capsys.readouterr().out


def test_a_full_disk_is_told_in_one_line(small, tmp_path, monkeypatch):
    import errno

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare.os, "fsync", full)
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    monkeypatch.setattr(
        sys, "argv", ["prepare.py", f"--tokenizer={small[0]}", f"--source={source}", f"--data_dir={tmp_path / 'a'}"]
    )
    with pytest.raises(prepare.UserError, match="the disk is full; make room"):
        prepare.main()
