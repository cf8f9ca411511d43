"""prepare.py: the boundary rule, sources, files, and being killed."""

import contextlib
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
import signal
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard
from transformers import PreTrainedTokenizerFast

import prepare
from configure import Config
from lib import rows
from lib.errors import UserError
from lib.hf import load_tokenizer
from lib.rows import PAD
from lib.tokens import SAMPLE, check_round_trip, check_tokenizer, leading_bos
from tests.naive_rows import SHORT_FORMS, naive_rows
from tests.world import EOS, ROOT, SHARED, make_tokenizer

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


def byte_level(use_regex):
    """A small byte-level tokenizer: characters are split over tokens; without the regex, tokens span words and lines."""
    indented = "if a:\n    b\n  \n\tc\n \td\n" * 99
    texts = [indented, *(nasty_text(random.Random(i), 40) for i in range(40))]
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return make_tokenizer(texts, 420, split=split, max_token_length=6)


def byte_fallback():
    """The sentencepiece kind: U+2581 for a space, <0x0A> for bytes that no token has."""
    letters = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?()\"'”。！？「」一二三四"
    vocab = ["<unk>", EOS, *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁t", "▁the", ".▁"]
    ids, decoders = {token: i for i, token in enumerate(vocab)}, tokenizers.decoders
    model = tokenizers.models.BPE(ids, [("▁", "t")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([EOS, "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


MADE = {"byte_level": lambda: byte_level(True), "no_regex": lambda: byte_level(False), "byte_fallback": byte_fallback}
REAL = ("qwen1.5-1.8b", "stories260k")


@pytest.fixture(scope="session")
def tokenizer_of():
    """By name: a tokenizer and its table. The real ones are not on every machine."""

    @functools.cache
    def get(name):
        if name in REAL and not SHARED.is_dir():
            pytest.skip(f"needs {SHARED}/data/{name}")
        tokenizer = MADE[name]() if name in MADE else load_tokenizer(str(SHARED / "data" / name))
        return tokenizer, prepare.token_table(tokenizer)

    return get


def rows_of(stream, table, row_len, last=True):
    ends = prepare.cut(np.array(stream, np.uint32), table, row_len, last)
    return [list(stream[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=False)]


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def stream_of(texts, tokenizer):
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    parts = [[*backend.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id] for text in texts]
    backend.encode_special_tokens = False
    return joined(parts)


@pytest.mark.parametrize("name", [*MADE, *REAL])
def test_rows_equal_the_naive_ones(name, tokenizer_of):
    """On nasty text, and on random ids with more than their share of pointed ones."""
    assert (prepare.RULE_VERSION, prepare.ABBREVIATIONS) == (1, SHORT_FORMS)
    tokenizer, table = tokenizer_of(name)
    usable = [i for i, piece in enumerate(table.pieces) if piece]
    pointed = [i for i in usable if set(table.pieces[i].decode(errors="replace")) & set(".。?”)\ufffd ")]
    for row_len in (2, 3, 13, 61, 17):
        rng = random.Random(row_len)
        stream = stream_of([nasty_text(rng, rng.choice([0, 1, 5, 97])) for _ in range(23)], tokenizer)
        if row_len == 17:
            stream = [*rng.choices(pointed, k=3500), *rng.choices(usable, k=1500)]
            rng.shuffle(stream)
            stream.append(tokenizer.eos_token_id)
        assert rows_of(stream, table, row_len) == naive_rows(stream, tokenizer, row_len)


CASES = [  # text up to the cut, text after it, whether it is cut there
    ("One two. Three four.", " Five", True), ("One two.", " Mr. Smith", True), ("One two.", " e.g. Smith", True),
    ("One two.", " the U.S. army", True), ("One two.", " J. R. Smith", True), ("One two.", " No. 12. The", True),
    ("It was 1999.", " Then", True), ("It was 3.14.", " Then", True), ("It was", " 3.14", False),
    ("One two...", " Three", True), ("One “two.”", " Three", True), ("One (two.)", " Three", True),
    ("One (etc.)", " Three", False), ("One two?!", " Three", True), ("One two.", "\tThree", True),
    ("import os.", "path", False), ("One two\r\n", "Three", True), ("One two\n", "    Three", True),
    ("一二。", "三四", True), ("「一二。」", "三四", True), ("「一二。", "」三四", False), ("一二？！", "三四", True),
]  # fmt: skip


def test_cut_is_where_a_reader_would_pause(tokenizer_of):
    for before, after, is_cut in CASES:
        tokenizer, table = tokenizer_of("byte_fallback" if "。" in before or "！" in before else "byte_level")
        head, tail = tokenizer.encode(before), tokenizer.encode(after)
        assert tokenizer.decode(head + tail) == before + after
        for extra in range(1, len(tail) + 1):  # the window ends at each place after the cut
            first = rows_of(head + tail + [table.pieces.index(b"x")] * 2, table, len(head) + extra, last=False)[0]
            assert (first == head) == is_cut, (before, after, first)


def test_rule_reads_one_id_beyond_the_window_no_word_beyond_the_document_and_spaces_after_a_line(tokenizer_of):
    tokenizer, table = tokenizer_of("byte_level")
    ids = tokenizer.encode("one two.")
    assert rows_of(ids, table, len(ids), last=False) == []
    first = [*tokenizer.encode("see Mr"), tokenizer.eos_token_id, *tokenizer.encode(".")]
    ids = first + tokenizer.encode(" Then")
    assert rows_of(ids, table, len(ids) - 1, last=False)[0] == first
    tokenizer, table = tokenizer_of("no_regex")
    first = [*tokenizer.encode("ab"), next(i for i, piece in enumerate(table.pieces) if piece.endswith(b"\n  "))]
    ids = first + tokenizer.encode("cdefgh")
    assert rows_of(ids, table, len(ids) - 1, last=False)[0] == first


def with_template(single, tokenizer_of):
    """A tokenizer that adds to a text what `single` says; <s> is a special token of it, and "<" is none."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_of("byte_level")[0].backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token="<s>")
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in set(single.split()) - {"$A"}]
    template = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


@pytest.mark.parametrize(("single", "bos", "key"), [
    ("$A", None, None), ("<s> $A", "<s>", None), (f"<s> $A {EOS}", "<s>", "auto"), (f"<s> $A {EOS}", "<s>", "none"), (f"$A {EOS}", None, None),
    (f"{EOS} $A", EOS, "auto"), ("<s> <s> $A", "refused", None), ("< $A", "refused", None),
])  # fmt: skip
def test_each_document_begins_with_the_one_id_that_the_tokenizer_puts_before_a_text(single, bos, key, small, tmp_path, tokenizer_of):  # fmt: skip
    """But not with one that is the EOS, which ends the document before."""
    tokenizer = with_template(single, tokenizer_of)
    if bos == "refused":
        with pytest.raises(UserError, match=r"expected at most one special token before it: set bos=none"):
            leading_bos(tokenizer)
        return
    assert leading_bos(tokenizer) == (bos and tokenizer.convert_tokens_to_ids(bos))
    if key is None:
        return
    tokenizer.save_pretrained(tmp_path / "t")
    texts = ["<s> is text. " + text for text in small.texts]
    first = [tokenizer.convert_tokens_to_ids(bos)] if key == "auto" and bos != EOS else []
    source = write_jsonl(tmp_path / "t.jsonl", texts)
    prepare.prepare(config(small, tmp_path / "a", source=source, bos=key, tokenizer=str(tmp_path / "t")))
    assert joined(rows_in(tmp_path / "a")) == joined([*first, *stream_of([text], tokenizer)] for text in texts)
    made = [json.loads((tmp_path / f"a/{split}.json").read_text()) for split in ("train", "val")]
    assert [m["bos"] for m in made] == [first[0] if first else None] * 2


@pytest.fixture(scope="session")
def small(tmp_path_factory, tokenizer_of):
    """A tokenizer's folder, 83 documents, them as JSON lines, and prepared by the default `config`."""
    folder, rng = tmp_path_factory.mktemp("small"), random.Random(7)
    tokenizer_of("byte_level")[0].save_pretrained(folder / "tokenizer")
    texts = [nasty_text(rng, rng.choice([0, 1, 30, 90])) for _ in range(83)]
    texts[5] = "x" + EOS + "y"
    source, whole = write_jsonl(folder / "t.jsonl", texts), folder / "whole"
    made = types.SimpleNamespace(tokenizer=str(folder / "tokenizer"), texts=texts, source=source, whole=whole)
    prepare.prepare(config(made, whole))
    return made


def config(small, data_dir, **keys):
    return Config(**{"tokenizer": small.tokenizer, "data_dir": str(data_dir), "source": str(small.source), "n_documents": None,
                     "train_rows": None, "val_rows": 7, "seq_len": 30, **{k: str(v) if isinstance(v, Path) else v for k, v in keys.items()}})  # fmt: skip


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t, "meta": {"n": i}}) + "\n" for i, t in enumerate(texts)))
    return path


def stored(file, row_len):
    ids = np.fromfile(file, np.uint32).reshape(-1, row_len)
    return [row[row != PAD].tolist() for row in ids]


def rows_in(folder):
    return stored(folder / "train.bin", 31) + stored(folder / "val.bin", 31)


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".alra-lock"}


def documents(source, **keys):
    stream, facts = prepare.open_source(Config(source=str(source), **keys))
    return [document["text"] for document in stream], facts


def test_files_hold_the_stream_and_the_manifest_counts_it(small):
    tokenizer = load_tokenizer(small.tokenizer)
    assert set(files_of(small.whole)) == {"train.bin", "train.json", "val.bin", "val.json"}
    stream = stream_of(small.texts, tokenizer)
    assert stream.count(tokenizer.eos_token_id) == 83  # text that spells the EOS is text
    assert rows_in(small.whole) == naive_rows(stream, tokenizer, 31)
    train, val = (json.loads((small.whole / f"{name}.json").read_text()) for name in ("train", "val"))
    assert (train["rows"], val["rows"]) == (len(rows_in(small.whole)) - 7, 7)
    assert train["tokens"] + val["tokens"] == len(stream) and train["documents"] + val["documents"] == 83
    assert train["valid_targets"] == train["tokens"] - train["rows"]
    assert train["padding_share"] == pytest.approx(1 - train["tokens"] / (31 * train["rows"]))
    assert train["eos_id"] == tokenizer.eos_token_id and train["row_len"] == 31
    counts = Counter(i for row in stored(small.whole / "train.bin", 31) for i in row[1:])
    log_n = math.log(counts.total() + train["vocab_size"])
    nats = [[log_n - math.log(counts[i] + 1) for i in row[1:]] for row in stored(small.whole / "val.bin", 31)]
    assert val["unigram_ce"] == pytest.approx(np.concatenate(nats).mean())
    spread = np.std([sum(row) - val["unigram_ce"] * len(row) for row in nats], ddof=1) * math.sqrt(len(nats))
    assert val["unigram_half"] == pytest.approx(1.96 * spread / sum(map(len, nats)))
    said = prepare.summary(small.whole, val | {"documents": 0})
    assert "0 documents end in these rows: one long document" in said and f"{val['unigram_ce']:.4f} ± " in said


def test_asked_rows_are_a_prefix_and_val_comes_right_after(small, tmp_path):
    prepare.prepare(config(small, tmp_path / "all", val_rows=0))
    prepare.prepare(config(small, tmp_path / "some", train_rows=41))
    every = (tmp_path / "all/train.bin").read_bytes()
    assert (tmp_path / "some/train.bin").read_bytes() == every[: 41 * 31 * 4]
    assert (tmp_path / "some/val.bin").read_bytes() == every[41 * 31 * 4 : 48 * 31 * 4]
    prepare.prepare(config(small, tmp_path / "few", n_documents=17, val_rows=0))
    stream = stream_of(small.texts[:17], load_tokenizer(small.tokenizer))
    assert joined(stored(tmp_path / "few/train.bin", 31)) == stream


def test_held_out_documents_do_not_depend_on_batches(small, tmp_path, monkeypatch):
    for chars in ("1", "1_000_000"):
        monkeypatch.setattr(prepare, "BATCH_CHARS", int(chars))
        prepare.prepare(config(small, tmp_path / chars, val_rows=0, val_share=0.3))
    assert files_of(tmp_path / "1") == files_of(tmp_path / chars)
    held = [text for text in small.texts if prepare.held_out({"name": "", "text": text}, 0.3)]
    assert 10 < len(held) < 40
    assert joined(stored(tmp_path / "1/val.bin", 31)) == stream_of(held, load_tokenizer(small.tokenizer))


def test_every_kind_of_source_gives_the_same_documents(small, tmp_path):
    texts = [t.replace("\x00", "") for t in small.texts]
    records = [{"text": text, "meta": [{"n": 1}, 3, "x"][i % 3]} for i, text in enumerate(texts)]
    raw = "\n".join(json.dumps(record, ensure_ascii=False) for record in records).encode()
    press = zstandard.ZstdCompressor().compress
    (tmp_path / "txt").mkdir()
    (tmp_path / "a.jsonl").write_bytes(raw.replace(b"\n", b"\r\n\n"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw[:999]) + gzip.compress(raw[999:]))  # two members
    (tmp_path / "b.jsonl.zst").write_bytes(press(raw[:999]) + press(raw[999:]))  # two frames
    table = pyarrow.table({"n": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    for i, text in enumerate(texts):
        (tmp_path / f"txt/{i:03}.txt").write_bytes(text.encode())
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl.zst", "a.parquet", "txt", "txt/*.txt"):
        assert documents(tmp_path / name)[0] == texts, name
    (tmp_path / "s.jsonl").write_text('{"body": "a\\ud800b \\ud83d\\ude42 \\\\ud800"}\n')
    assert documents(tmp_path / "s.jsonl", source_text="body")[0] == ["a\ufffdb 🙂 \\ud800"]


def test_a_hub_dataset_is_read_at_one_commit_and_a_path_is_not_looked_for_there(monkeypatch, tmp_path, capsys):
    asked = []

    def dataset_info(self, name, revision):
        if name == "pyhton":
            raise RuntimeError("404: Not Found\nmore")
        asked.append((name, revision))
        return huggingface_hub.DatasetInfo(id=name, sha="c0ffee")

    def load_dataset(*args, **keys):
        asked.append((args, keys))
        return datasets.IterableDataset.from_generator(lambda: iter([{"content": "one", "text": "two"}]))

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    keys = {"source_config": "sample-10BT", "source_text": "content", "source_split": "dev"}
    texts, facts = documents("someone/corpus@v1.0", **keys)
    assert texts == ["one"] and facts[0]["source"] == "someone/corpus@c0ffee"
    assert asked[0] == ("someone/corpus", "v1.0") and "source: someone/corpus@c0ffee\n" in capsys.readouterr().err
    assert asked[1] == (("someone/corpus", "sample-10BT"), {"split": "dev", "streaming": True, "revision": "c0ffee"})
    for name in ("./x", "/no/where", "~/x", "a/b/c", "x.jsonl", "a/x.parquet", "x*"):
        with pytest.raises(UserError, match="no such file"):
            documents(name)
    with pytest.raises(UserError, match=r"no local path, and no such dataset .* \(404: Not Found\)"):
        documents("pyhton")
    assert len(asked) == 2


def test_several_sources_are_mixed_by_their_shares(small, tmp_path):
    one, two = small.texts[:60], [text + " two" for text in small.texts]
    a, b = write_jsonl(tmp_path / "a.jsonl", one), write_jsonl(tmp_path / "b.jsonl", two)
    records, facts = documents(f"{a}:7,{b}:3")
    assert [t for t in records if t in one] == one and [t for t in records if t in two] == two[: len(records) - 60]
    assert 0.5 < 60 / len(records) < 0.9
    assert [(part["source"], part["share"]) for part in facts] == [(str(a), 0.7), (str(b), 0.3)]
    assert documents(f"{a}:0.7,{b}:0.3")[0] == records
    for mixed in (f"{a}:0.7,{b}", f"{a}:0,{b}:1"):
        with pytest.raises(UserError, match="expected a share above 0"):
            documents(mixed)


def test_an_eos_that_ends_a_turn_of_a_chat_is_warned_of():
    warned = [eos for eos in ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", EOS) if re.search(prepare.CHAT, eos)]
    assert warned == ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"]


class Crash(BaseException):
    pass


def crash(*args):
    raise Crash


@pytest.mark.parametrize("split", [{"val_rows": 0, "val_share": 0.3, "n_documents": 11}, {"train_rows": 30}])
def test_a_crash_at_every_step_costs_nothing(split, small, tmp_path, monkeypatch):
    a, b = write_jsonl(tmp_path / "a.jsonl", small.texts[:9]), write_jsonl(tmp_path / "b.jsonl", small.texts[::-1][:9])
    source = f"{a}:2,{b}:1"
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    prepare.prepare(config(small, tmp_path / "whole", source=source, **split))
    left = [10**9]

    def crashing(function):
        def step(*args, **kwargs):
            left[0] -= 1
            return function(*args, **kwargs) if left[0] else crash()

        return step

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "truncate"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, crashing(getattr(owner, name)))
    for crash_at in range(1, 1000):
        folder, left[0] = tmp_path / str(crash_at), crash_at
        try:
            prepare.prepare(config(small, folder, source=source, **split), commit_sec=-1.0)
            break  # no step is left to crash at
        except Crash:
            state = folder / "prepare.state"
            if state.exists() and "complete" not in json.loads(state.read_text()):
                for work in folder.glob("*.bin.tmp"):  # a page that reached the disk after the last commit
                    work.write_bytes(work.read_bytes() + b"torn")
            left[0] = 10**9
            prepare.prepare(config(small, folder, source=source, **split), commit_sec=-1.0)
            assert files_of(folder) == files_of(tmp_path / "whole"), crash_at
    assert crash_at > 15


ASKING = """
import multiprocessing, sys, prepare
from configure import load
prepare.BATCH_CHARS = 1000
plain = prepare.Stream.feed
def asking(self, *args, **keys):
    plain(self, *args, **keys)
    print(len(multiprocessing.active_children()), flush=True)
    sys.stdin.readline()  # rows are written that no commit has counted: go on?
prepare.Stream.feed = asking
if __name__ == "__main__":
    prepare.prepare(load(sys.argv[1:]), commit_sec=-1.0)
"""


def test_kill_9_leaves_no_worker_and_the_same_command_gives_the_same_bytes(small, tmp_path):
    (tmp_path / "asking.py").write_text(ASKING)
    cfg = config(small, tmp_path / "a", prepare_workers=2)
    keys = ("tokenizer", "data_dir", "source", "n_documents", "train_rows", "val_rows", "seq_len", "prepare_workers")
    command = [sys.executable, tmp_path / "asking.py", *(f"--{key}={getattr(cfg, key)}" for key in keys)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}) as run:  # fmt: skip
        for _ in range(4):
            run.stdout.readline()
            print(file=run.stdin, flush=True)
        assert int(run.stdout.readline()) > 0
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)  # returns when the last worker has closed the pipe
    assert 0 < json.loads((tmp_path / "a/prepare.state").read_text())["records"] < 83
    prepare.prepare(config(small, tmp_path / "a"))  # one worker
    assert files_of(tmp_path / "a") == files_of(small.whole)


def test_a_killed_worker_ends_the_run_in_one_line_and_the_same_command_resumes(small, tmp_path, monkeypatch):
    cfg, plain = config(small, tmp_path / "a", prepare_workers=2), prepare.Stream.feed

    def killing(self, *args, **keys):
        plain(self, *args, **keys)
        for worker in multiprocessing.active_children():
            worker.kill()

    monkeypatch.setattr(prepare, "BATCH_CHARS", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(prepare.Stream, "feed", killing)
        with pytest.raises(UserError, match=r"prepare_workers=2: a worker was killed.*with fewer workers"):
            prepare.prepare(cfg, commit_sec=-1.0)
    assert 0 < json.loads((tmp_path / "a/prepare.state").read_text())["records"] < 83
    prepare.prepare(cfg)
    assert files_of(tmp_path / "a") == files_of(small.whole) and not multiprocessing.active_children()


@pytest.mark.parametrize("complete", [True, False])
def test_another_recipe_is_refused_by_name(complete, small, tmp_path, monkeypatch, tokenizer_of, capsys):
    tokenizer_of("no_regex")[0].save_pretrained(tmp_path / "other")
    for name in ("moved", "changed"):
        (tmp_path / name).mkdir()
    source, folder = write_jsonl(tmp_path / "t.jsonl", small.texts), tmp_path / "a"
    changed = tmp_path / "changed/t.jsonl"  # same name, same size
    changed.write_bytes(source.read_bytes().replace(b"cat", b"dog", 1))
    with monkeypatch.context() as patch, contextlib.suppress(Crash):
        patch.setattr(prepare, "finish", prepare.finish if complete else crash)
        prepare.prepare(config(small, folder, source=source))
    before = files_of(folder)
    for keys, named in (
        ({"seq_len": 29}, "row_len was 31, now 30"), ({"val_rows": 8}, "val_rows was 7, now 8"), ({"train_rows": 9}, "train_rows was None"),
        ({"n_documents": 80}, "n_documents"), ({"tokenizer": tmp_path / "other"}, "tokenizer_sha256 was"),
        ({"source": changed}, "sources was"), ({"source": f"{source}:1,{changed}:2"}, "sources was"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=named):
            prepare.prepare(config(small, folder, **{"source": source, **keys}))
    assert files_of(folder) == before
    prepare.prepare(config(small, folder, source=source.rename(tmp_path / "moved/t.jsonl")))
    assert ("already prepared" if complete else "resuming after") in "".join(capsys.readouterr())


GOOD = b'{"text": "a"}\n'
BAD = {
    "column.jsonl": (GOOD + b'{"content": "a"}\n', "record 2: .* no 'text'; source_text names the field"),
    "list.jsonl": (b"[1]\n", "record 1"),
    "deep.jsonl": (GOOD + b'{"text":' + b"[" * 200_000 + b"\n", "record 2: cannot be read"),
    "null.JSONL": (GOOD + b'{"text": null}\n', "record 2: cannot be read: expected text, got NoneType"),
    "wide.txt": ("a".encode("utf-16-le"), "record 1: cannot be read: contains NUL bytes, as UTF-16 does"),
    "torn.jsonl.gz": (gzip.compress(json.dumps({"text": os.urandom(9999).hex()}).encode())[:5000], "cannot be read"),
}


def test_sources_that_cannot_be_are_named(small, tmp_path):
    for name, (content, says) in BAD.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.*{says}"):
            prepare.prepare(config(small, tmp_path / "a", source=tmp_path / name))
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="record 1: cannot be read: no 'text'; source_text names"):
        prepare.prepare(config(small, tmp_path / "a", source=tmp_path / "x.parquet"))


def test_records_that_cannot_be_read_are_skipped_up_to_a_number_and_named(small, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARS", 100)
    lines, source = small.source.read_bytes().splitlines(keepends=True), tmp_path / "t.jsonl"
    lines[20:20], lines[60:60] = [b"{\n"], [b'{"text": "\xff"}\n', b'{"n": 1}\n']
    source.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"t.jsonl, record 62: .*no 'text'.*set max_bad_records above 2"):
        prepare.prepare(config(small, tmp_path / "a", source=source, max_bad_records=2), commit_sec=-1.0)
    assert 20 < json.loads((tmp_path / "a/prepare.state").read_text())["records"] < 62
    prepare.prepare(config(small, tmp_path / "a", source=source, max_bad_records=3))  # resumes
    made = files_of(tmp_path / "a")
    assert made["train.bin"] == files_of(small.whole)["train.bin"]
    skipped = [re.search(r"record (\d+)", one)[1] for one in json.loads(made["train.json"])["skipped"]]
    assert skipped == ["21", "61", "62"]


def test_a_mended_file_goes_on_unless_what_was_read_has_changed(small, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARS", 100)
    (tmp_path / "texts").mkdir()
    keys = {"source": tmp_path / "texts"}
    whole = write_jsonl(tmp_path / "texts/a.jsonl", small.texts[:9])
    part = write_jsonl(tmp_path / "texts/b.jsonl", small.texts[9:])
    right = {file: file.read_bytes() for file in (whole, part)}
    part.write_bytes(right[part][: len(right[part]) // 2] + b"\xff")
    with pytest.raises(UserError, match=r"b.jsonl, record \d+: cannot be read"):
        prepare.prepare(config(small, tmp_path / "a", **keys), commit_sec=-1.0)
    for file in (whole, part):
        part.write_bytes(right[part])
        file.write_bytes(right[file].replace(b"e", b"f", 9))
        with pytest.raises(UserError, match="sources was"):
            prepare.prepare(config(small, tmp_path / "a", **keys))
        file.write_bytes(right[file])
    prepare.prepare(config(small, tmp_path / "a", **keys))
    prepare.prepare(config(small, tmp_path / "b", **keys))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_folder_is_read_whole_and_what_is_skipped_is_told(tmp_path, monkeypatch, capsys):
    for name, content in {"t/B.JSONL": GOOD, "t/sub/c.TXT": b"\xef\xbb\xbfc", "t/x.md": b"", "t/y.csv": b"", "d/d.txt": b"d"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "t/link").symlink_to("../d")
    assert documents(tmp_path / "t")[0] == ["a", "d", "c"]
    assert re.search(r"skips 2 files with suffixes \['.csv', '.md'\], such as .*/t/x.md\n", capsys.readouterr().err)
    for source in (f"{tmp_path}/t:1,{tmp_path}/d/d.txt:1", f"{tmp_path}/d:1,{tmp_path}/d:1"):
        with pytest.raises(UserError, match=r"reads \['.*d/d.txt'\] twice; name each file once, and no link"):
            documents(source)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scandir(path if path[-3:] != "sub" else "/no permission"))
    with pytest.raises(UserError, match=r"source=.*t: .*/no permission"):
        documents(tmp_path / "t")


@pytest.mark.parametrize("name", ["train.bin.tmp", "val.bin.tmp", "train.bin", "val.bin", "val.json", "other.tmp"])
def test_files_of_something_else_are_left_alone(name, small, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(b"mine")
    says = "leave no row" if name == "other.tmp" else rf"contains \['{name}'\], not of prepare.py"
    with pytest.raises(UserError, match=says):
        prepare.prepare(config(small, tmp_path / "a", n_documents=1))
    assert files_of(tmp_path / "a") == {name: b"mine"}


@pytest.mark.parametrize(("name", "split"), [("train", {}), ("val", {"val_rows": 0, "val_share": 1e-6})])
def test_too_little_text_for_a_split_leaves_the_folder_free(name, split, small, tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", ["a", "b"])
    with pytest.raises(UserError, match=f"2 records leave no row for {name}"):
        prepare.prepare(config(small, tmp_path / "a", source=source, **split))
    assert not files_of(tmp_path / "a")


def only(characters, **parts):
    """A vocabulary of these characters alone."""
    vocab = {c: i for i, c in enumerate([EOS, *characters])}
    return lambda facts: facts.update(**parts, model=facts["model"] | {"vocab": vocab, "merges": []})


ASCII = "ĠĊĉč" + "".join(map(chr, range(33, 127)))
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
STRIPS = {"id": 420, "content": "foo", "single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": False}  # fmt: skip
LOSSY = {  # by what is lost: a change of a good tokenizer.json, and the eos_token
    "dropout=0.5 draws other ids": (lambda facts: facts["model"].update(dropout=0.5), EOS), "loses '.*ï.*你": (only(ASCII), EOS),
    "loses '.*ï.*你.* of": (only("▁\n\t\r" + ASCII, pre_tokenizer=META, decoder=META), EOS), "lacks its eos_token '</s>'": (len, "</s>"),
    r"blanks around \['foo'\]": (lambda facts: facts["added_tokens"].append(STRIPS), EOS),
    "t: a text contains its eos_token": (len, "a"), "t: a text contains its eos": (len, "Ġthe"),
}  # fmt: skip


@pytest.mark.parametrize("says", LOSSY)
def test_a_tokenizer_that_loses_text_is_refused_by_what_is_lost(says, small, tmp_path):
    change, eos = LOSSY[says]
    shutil.copytree(small.tokenizer, tmp_path / "t")
    for name, edit in (("tokenizer.json", change), ("tokenizer_config.json", lambda facts: facts.update(eos_token=eos))):  # fmt: skip
        facts = json.loads((tmp_path / "t" / name).read_text())
        edit(facts)
        (tmp_path / "t" / name).write_text(json.dumps(facts))
    with pytest.raises(UserError, match=says):
        prepare.prepare(config(small, tmp_path / "a", tokenizer=tmp_path / "t"))


@pytest.mark.parametrize("name", [*MADE, "stories260k", "NFKC"])
def test_tokenizers_that_keep_text_are_taken(name, tokenizer_of):
    tokenizer = tokenizer_of("byte_level" if name == "NFKC" else name)[0]
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if name == "NFKC":
        backend.normalizer = tokenizers.normalizers.NFKC()
    check_tokenizer(tokenizer, backend)
    check_round_trip(backend, SAMPLE + "e\u0301 ﬁ ℡ \u200b")


def test_a_tokenizer_that_does_not_give_its_text_back_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        prepare.token_bytes(backend)


def test_quick_hash_sees_every_byte_of_a_small_file_and_both_ends_of_a_large_one(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 4)

    def hash_of(size, at=()):
        (tmp_path / "x").write_bytes(bytes(i in at for i in range(size)))
        return rows.quick_hash(tmp_path / "x")

    for size in (1, 3, 97):
        assert len({hash_of(size), hash_of(size + 1), *(hash_of(size, [i]) for i in range(size))}) == size + 2
    assert len({hash_of(7919), *(hash_of(7919, [i]) for i in (0, 3, 7915, 7918))}) == 5


def test_command_line(small, tmp_path, monkeypatch, capsys):
    folder = str(tmp_path / "a")
    flags = [f"--tokenizer={small.tokenizer}", f"--source={small.source}", "--val_rows=3", f"--data_dir={folder}"]
    for argv, says in ((flags, "train.bin: "), (["--show", "0", folder], "⟦row 4: "), (["--show", "2", f"{folder}/val.bin"], f"{EOS}\n")):  # fmt: skip
        assert prepare.main(argv) == 0 and says in capsys.readouterr().out


def test_the_demos_text_is_the_one_that_was_measured():
    """Its documents are none of the teacher's, and the licence of each is beside it."""
    content = (ROOT / "demo/text.jsonl.zst").read_bytes()
    assert hashlib.sha256(content).hexdigest() == "fc363d571717340c9e7a310314287590c62ae2922c6b43f09b3a5a233c560a0b"
    lines = pyarrow.input_stream(ROOT / "demo/text.jsonl.zst", compression="zstd").read().decode().splitlines()
    own = [json.loads(line) for line in lines]
    licences, others = (ROOT / "demo/LICENSES.txt").read_text(), (ROOT / "demo/teacher.sha256").read_text().splitlines()
    assert {f"{d['package']}: " in licences for d in own} == {True} and "GPL" not in "".join(d["package"] for d in own)
    hashes, names = zip(*(line.split("  ") for line in others), strict=True)
    assert not {d["name"] for d in own} & {*names} and len(own) > 800 and len(others) > 6000
    assert not {hashlib.sha256(d["text"].encode()).hexdigest() for d in own} & {*hashes}
