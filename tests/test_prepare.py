"""prepare.py: the boundary rule, sources, files, and being killed."""

import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
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
from configure import Config, load
from lib import rows
from lib.files import UserError, locked
from lib.hf import leading_bos
from model import load_tokenizer
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


def test_no_row_has_one_id_and_a_long_document_is_cut_again_and_again(tokenizer_of):
    assert (prepare.RULE_VERSION, prepare.ABBREVIATIONS) == (1, SHORT_FORMS)
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
    stream = prepare.Stream(tmp_path / "x", 29, None)
    while documents:
        n = rng.randrange(5)
        part, documents = documents[:n], documents[n:]
        stream.feed(np.array(joined(part), np.uint32), table)
        if rng.random() < 0.5:
            saved = stream.save()
            with open(tmp_path / "x", "ab") as f:
                f.write(b"not committed")
            stream = prepare.Stream(tmp_path / "x", 29, None, **json.loads(json.dumps(saved)))
    stream.feed(np.empty(0, np.uint32), table, last=True)
    assert stored(tmp_path / "x", 29) == [ids for ids, _ in whole]


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


@pytest.mark.parametrize(("single", "bos", "first"), [
    (f"<s> $A {END}", "auto", "<s>"), (f"<s> $A {END}", "none", None), (f"{END} $A", "auto", None),
])  # fmt: skip
def test_each_document_begins_with_the_bos_that_the_tokenizer_adds(single, bos, first, small, tmp_path, tokenizer_of):
    """But not with one that is the EOS, which stands there already."""
    tokenizer = with_template(single, tokenizer_of)
    tokenizer.save_pretrained(tmp_path / "t")
    source, texts = write_jsonl(tmp_path / "t.jsonl", ["<s> is text. " + t for t in small[1]]), small[1]
    first = [tokenizer.convert_tokens_to_ids(first)] if first else []
    stream = joined([*first, *stream_of(["<s> is text. " + t], tokenizer)] for t in texts)
    prepare.prepare(config(small, tmp_path / "a", source, bos=bos, tokenizer=str(tmp_path / "t")))
    rows = stored(tmp_path / "a/train.bin", 31) + stored(tmp_path / "a/val.bin", 31)
    assert rows == [ids for ids, _ in naive_rows(stream, tokenizer, 31)]
    made = [json.loads((tmp_path / f"a/{split}.json").read_text()) for split in ("train", "val")]
    assert [m["bos"] for m in made] == [first[0] if first else None] * 2


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


def documents(source, **knobs):
    stream, facts = prepare.open_source(Config(source=str(source), **knobs))
    return [document["text"] for document in stream], facts


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
    assert train["tokens"] + val["tokens"] == len(stream) and train["documents"] + val["documents"] == 83
    assert train["valid_targets"] == train["tokens"] - train["rows"]
    assert train["padding_share"] == pytest.approx(1 - train["tokens"] / (31 * train["rows"]))
    assert sum(train["length_histogram"]) == train["rows"] and train["length_histogram"][0] == 0
    assert train["eos_id"] == tokenizer.eos_token_id and train["row_len"] == 31


def test_asked_rows_are_a_prefix_and_val_comes_right_after(small, tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    prepare.prepare(config(small, tmp_path / "all", source, val_rows=0))
    prepare.prepare(config(small, tmp_path / "some", source, train_rows=41))
    every = (tmp_path / "all/train.bin").read_bytes()
    assert (tmp_path / "some/train.bin").read_bytes() == every[: 41 * 31 * 4]
    assert (tmp_path / "some/val.bin").read_bytes() == every[41 * 31 * 4 : 48 * 31 * 4]
    prepare.prepare(config(small, tmp_path / "few", source, n_documents=17, val_rows=0))
    assert joined(stored(tmp_path / "few/train.bin", 31)) == stream_of(small[1][:17], load_tokenizer(small[0]))


def test_held_out_documents_do_not_depend_on_batches(small, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    for chars in (1, 10**9):
        monkeypatch.setattr(prepare, "BATCH_CHARS", chars)
        prepare.prepare(config(small, tmp_path / str(chars), source, val_rows=0, val_share=0.3))
    assert files_of(tmp_path / "1") == files_of(tmp_path / str(10**9))
    held = [prepare.held_out((None, text), 0.3) for text in small[1]]
    wanted = stream_of([text for text, h in zip(small[1], held, strict=True) if h], load_tokenizer(small[0]))
    assert 10 < sum(held) < 40 and joined(stored(tmp_path / "1/val.bin", 31)) == wanted


# --- sources


def test_every_kind_of_source_gives_the_same_documents(small, tmp_path):
    texts = [t.replace("\x00", "") for t in small[1]]
    raw = "\n".join(json.dumps({"text": t, "meta": [{"n": 1}, 3, "x"][i % 3]}, ensure_ascii=False) for i, t in enumerate(texts)).encode()
    press = zstandard.ZstdCompressor().compress
    (tmp_path / "txt").mkdir()
    (tmp_path / "a.jsonl").write_bytes(raw.replace(b"\n", b"\r\n\n"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw[:999]) + gzip.compress(raw[999:]))  # two members
    (tmp_path / "b.jsonl.zst").write_bytes(press(raw[:999]) + press(raw[999:]))  # two frames
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), tmp_path / "a.parquet", row_group_size=10)
    for i, text in enumerate(texts):
        (tmp_path / f"txt/{i:03}.txt").write_bytes(text.encode())
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl.zst", "a.parquet", "txt", "txt/*.txt"):
        assert documents(tmp_path / name)[0] == texts, name
    (tmp_path / "s.jsonl").write_text('{"body": "a\\ud800b \\ud83d\\ude42 \\\\ud800"}\n')
    assert documents(tmp_path / "s.jsonl", source_text="body")[0] == ["a\ufffdb 🙂 \\ud800"]


def test_a_hub_dataset_is_read_at_one_commit(monkeypatch, capsys):
    import datasets
    import huggingface_hub

    asked = []
    info = type("Info", (), {"sha": "c0ffee"})
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, revision: asked.append((name, revision)) or info)

    def load_dataset(*args, **keys):
        asked.append((args, keys))
        return datasets.IterableDataset.from_generator(lambda: iter([{"content": "one", "text": "two"}]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    knobs = {"source_config": "sample-10BT", "source_text": "content", "source_split": "dev"}
    texts, facts = documents("someone/corpus@v1.0", **knobs)
    assert texts == ["one"] and facts[0]["source"] == "someone/corpus@c0ffee"
    assert asked[0] == ("someone/corpus", "v1.0") and "source: someone/corpus@c0ffee\n" in capsys.readouterr().err
    assert asked[1] == (("someone/corpus", "sample-10BT"), {"split": "dev", "streaming": True, "revision": "c0ffee"})


def test_several_sources_are_mixed_by_their_shares(small, tmp_path):
    one, two = small[1][:60], [text + " two" for text in small[1]]
    a, b = write_jsonl(tmp_path / "a.jsonl", one), write_jsonl(tmp_path / "b.jsonl", two)
    records, facts = documents(f"{a}:7,{b}:3")
    assert [t for t in records if t in one] == one and [t for t in records if t in two] == two[: len(records) - 60]
    assert 0.5 < 60 / len(records) < 0.9 and [(f["source"], f["share"]) for f in facts] == [(str(a), 0.7), (str(b), 0.3)]
    assert documents(f"{a}:0.7,{b}:0.3")[0] == records
    for mixed in (f"{a}:0.7,{b}", f"{a}:0,{b}:1"):
        with pytest.raises(UserError, match="expected a share above 0"):
            documents(mixed)


@pytest.mark.parametrize(("eos", "warned"), [("<|im_end|>", True), ("<|eot_id|>", True), ("<end_of_turn>", True), ("</s>", False)])
def test_an_eos_that_ends_a_turn_of_a_chat_is_warned_of(eos, warned):
    assert bool(re.search(prepare.CHAT, eos)) == warned


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


# --- killed and started again


class Crash(BaseException):
    pass


@pytest.mark.parametrize("split", [{"val_rows": 7}, {"val_rows": 0, "val_share": 0.3}, {"val_rows": 7, "train_rows": 30}])
def test_a_crash_at_every_step_costs_nothing(split, small, tmp_path, monkeypatch):
    a, b = write_jsonl(tmp_path / "a.jsonl", small[1][:9]), write_jsonl(tmp_path / "b.jsonl", small[1][::-1][:9])
    source = f"{a}:2,{b}:1"
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 4)
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
        folder, left[0] = tmp_path / str(crash_at), crash_at
        try:
            prepare.prepare(config(small, folder, source, **split), commit_sec=-1.0)
            break  # no step is left to crash at
        except Crash:
            state = folder / "prepare.state"
            for work in folder.glob("*.bin.tmp"):
                if state.exists() and not json.loads(state.read_text()).get("whole"):
                    with open(work, "ab") as f:
                        f.write(b"torn")  # a page that reached the disk after the last commit
            left[0] = 10**9
            prepare.prepare(config(small, folder, source, **split), commit_sec=-1.0)
            assert files_of(folder) == files_of(tmp_path / "whole"), crash_at
    assert crash_at > 20


KILLED = """
import sys, prepare
from configure import load
prepare.BATCH_CHARS = 3000
plain = prepare.Stream.feed
def asking(self, *args, **kwargs):
    plain(self, *args, **kwargs)
    print("fed", flush=True)
    sys.stdin.readline()  # rows are written that no commit has counted: go on?
prepare.Stream.feed = asking
prepare.prepare(load(sys.argv[1:]).config, commit_sec=-1.0)
"""


def test_kill_9_and_start_again_gives_the_same_bytes(small, tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", small[1] * 3)
    prepare.prepare(config(small, tmp_path / "whole", source))
    knobs = [f"--{k}={v}" for k, v in {"tokenizer": small[0], "source": source, "n_documents": None, "train_rows": None,
                                       "val_rows": 7, "seq_len": 30, "data_dir": tmp_path / "a"}.items()]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(Path(prepare.__file__).parent), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", KILLED, *knobs], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, env=environment) as run:  # fmt: skip
        for _ in range(4):
            assert run.stdout.readline() == "fed\n"
            print(file=run.stdin, flush=True)
        assert run.stdout.readline() == "fed\n"
        run.send_signal(signal.SIGKILL)
    assert 0 < json.loads((tmp_path / "a/prepare.state").read_text())["records"] < 83 * 3
    prepare.prepare(config(small, tmp_path / "a", source))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "whole")


# --- slips


def half_made(small, folder, monkeypatch, source, **knobs):
    """A folder that a killed run left behind."""
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "BATCH_CHARS", 1000)
        plain, n = prepare.Stream.feed, itertools.count()
        patch.setattr(prepare.Stream, "feed", lambda *a, **k: plain(*a, **k) if next(n) < 3 else pytest.fail("crash"))
        with pytest.raises(pytest.fail.Exception):
            prepare.prepare(config(small, folder, source, **knobs), commit_sec=-1.0)


@pytest.mark.parametrize("whole", [True, False])
def test_another_recipe_is_refused_by_name_and_nothing_is_touched(whole, small, tmp_path, monkeypatch, tokenizer_of, capsys):
    tokenizer_of("no_regex")[0].save_pretrained(tmp_path / "other")
    source, folder = write_jsonl(tmp_path / "t.jsonl", small[1]), tmp_path / "a"
    if whole:
        prepare.prepare(config(small, folder, source))
    else:
        half_made(small, folder, monkeypatch, source)
    before = files_of(folder)
    for knobs, named in (
        ({"seq_len": 29}, "row_len was 31, now 30"), ({"val_rows": 8}, "val_rows was 7, now 8"), ({"train_rows": 9}, "train_rows was None"),
        ({"n_documents": 80}, "n_documents"), ({"source": "python"}, "sources was"), ({"tokenizer": str(tmp_path / "other")}, "tokenizer_sha256 was"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=named):
            prepare.prepare(config(small, folder, **{"source": source, **knobs}))
    content = source.read_bytes()
    source.write_bytes(content.replace(b"cat", b"dog", 1))  # same size
    with pytest.raises(UserError, match="sources was"):
        prepare.prepare(config(small, folder, source))
    assert files_of(folder) == before
    source.write_bytes(content)
    capsys.readouterr()
    prepare.prepare(config(small, folder, source))
    assert ("left as it is" if whole else "going on after") in "".join(capsys.readouterr())


def test_two_at_once_are_refused(small, tmp_path):
    (tmp_path / "a").mkdir()
    with locked(tmp_path / "a", RuntimeError()), pytest.raises(UserError, match="is at work there"):
        prepare.prepare(config(small, tmp_path / "a", write_jsonl(tmp_path / "t.jsonl", small[1])))


GOOD = b'{"text": "a"}\n'
BAD = {
    "column.jsonl": (GOOD + b'{"content": "a"}\n', "record 2: .* no 'text'; source_text names the field"),
    "number.jsonl": (b'{"text": 7}\n', "record 1: .* got int"),
    "list.jsonl": (b"[1]\n", "record 1"),
    "torn.jsonl": (GOOD + b'{"text": "a\n', "record 2: cannot be read"),
    "deep.jsonl": (GOOD + b'{"text":' + b"[" * 200_000 + b"\n", "record 2: cannot be read"),
    "latin.jsonl": (b'{"text": "\xe9"}\n', "record 1: cannot be read"),
    "latin.txt": (b"\xe9", "cannot be read"),
    "empty.jsonl": (b"\n\n", "holds no record"),
    "torn.jsonl.gz": (gzip.compress(json.dumps({"text": os.urandom(9999).hex()}).encode())[:5000], "cannot be read"),
    "torn.parquet": (b"PAR1", "cannot be read"),
    "notes.md": (b"x", "no such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_sources_that_cannot_be_are_named(name, small, tmp_path):
    (tmp_path / name).write_bytes(BAD[name][0])
    with pytest.raises(UserError, match=f"{name}.*{BAD[name][1]}"):
        prepare.prepare(config(small, tmp_path / "out", tmp_path / name))


def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(monkeypatch, tmp_path):
    import huggingface_hub

    def unknown(self, name, revision):
        raise RuntimeError("404: Not Found\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unknown)
    monkeypatch.chdir(tmp_path)
    for name in ("./x", "/no/where", "~/x", "a/b/c", "x.jsonl", "a/x.parquet", "x*"):
        with pytest.raises(UserError, match="no such file"):
            documents(name)
    with pytest.raises(UserError, match=r'not "python", no local path, and no such dataset on the hub \(404: Not Found\)'):
        documents("pyhton")


def test_too_little_text_for_a_split_is_said(small, tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", ["a", "b"])
    for split, said in (({}, "2 records leave no row for train"), ({"val_rows": 0, "val_share": 1e-6}, "no row for val")):
        with pytest.raises(UserError, match=said):
            prepare.prepare(config(small, tmp_path / "a", source, **split))
        assert not list((tmp_path / "a").glob("[!.]*"))  # free for another recipe


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
    with pytest.raises(UserError, match="tokenizer=None, teacher=None"):
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

    for size in (1, 3, 97):
        flipped = [bytes(i == at for i in range(size)) for at in range(size)]
        assert len({hash_of(content) for content in [bytes(size), bytes(size + 1), *flipped]}) == size + 2
    large = bytearray(7919)
    for at in (0, 3, -4, -1):
        changed = large.copy()
        changed[at] = 1
        assert hash_of(changed) != hash_of(large)


def test_verify_finds_a_changed_byte_and_a_short_file(small, tmp_path, capsys):
    folder = tmp_path / "a"
    with pytest.raises(UserError, match=r"train\.json: not there"):
        prepare.verify(folder)
    prepare.prepare(config(small, folder, write_jsonl(tmp_path / "t.jsonl", small[1])))
    prepare.verify(folder)
    assert capsys.readouterr().out.count("as the manifest says") == 2
    for name, gone, said in (("prepare.state", False, "not finished"), ("val.json", True, r"val\.json: not there")):
        saved = (folder / "val.json").read_bytes()
        (folder / name).unlink() if gone else (folder / name).write_text("{}")
        with pytest.raises(UserError, match=said):
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
        with pytest.raises(UserError, match=said):
            prepare.verify(folder)


def test_command_line(small, tmp_path, monkeypatch, capsys):
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    knobs = [f"--tokenizer={small[0]}", f"--source={source}", f"--data_dir={tmp_path / 'a'}", "--val_rows=3", "--seq_len=30"]
    for argv, said in ((knobs, "train.bin: "), (["--verify", str(tmp_path / "a")], "as the manifest says"),
                       (["--show", "0", str(tmp_path / "a")], "⟦row 4: "), (["--show", "2", str(tmp_path / "a/val.bin")], f"{END}\n")):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["prepare.py", *argv])
        assert prepare.main() == 0 and said in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--show", "9999", str(tmp_path / "a")])
    assert configure.guard(prepare.main) == 1 and "expected a row from 0" in capsys.readouterr().err


def test_a_full_disk_is_told_in_one_line(small, tmp_path, monkeypatch):
    import errno

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare.os, "fsync", full)
    source = write_jsonl(tmp_path / "t.jsonl", small[1])
    monkeypatch.setattr(
        sys, "argv", ["prepare.py", f"--tokenizer={small[0]}", f"--source={source}", f"--data_dir={tmp_path / 'a'}"]
    )
    with pytest.raises(UserError, match="the disk is full; make room"):
        prepare.main()
