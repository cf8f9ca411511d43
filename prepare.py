"""Tokenize text into fixed-length rows, cut at sentence and line boundaries (paper, appendix C; what ends a sentence is ours).

    python prepare.py config/alra_200m.py [--key=value ...]    write the rows; after a kill the same command resumes
    python prepare.py --verify data/pile                       hash and count everything again
    python prepare.py --show 1000 data/pile                    print five rows from row 1000 on as text

Each document is tokenized as plain text: one that spells "<|endoftext|>" gets the ids of those characters. An EOS is put
after it, and before it the BOS, if the tokenizer itself adds one to a text (unless that BOS is the EOS, or `bos="none"`). The
ids of all documents form one stream, which is cut into rows of at most `row_len` = seq_len + 1 ids; joined, the rows give
the stream back.

**The boundary rule** (RULE_VERSION 1). The next `row_len` ids of the stream are cut after the latest id that ends at

  1. an EOS; or
  2. a line: the token's text, without trailing spaces and tabs, ends in a line feed (so CR LF counts, a lone CR does
     not, and the two are never parted); or
  3. a sentence: the text up to here ends in STOPS and then any number of CLOSERS, and the next token of the stream (the
     one after the window, if need be) starts with whitespace. Where the last stop is in WIDE no whitespace is needed, as
     those scripts write none: the next token must then start with a whole character that is not in STOPS or CLOSERS.
     One single "." does not end a sentence after a *word* that is one letter or digit ("J. Smith"), two or three
     digits ("12. The", a label or the front of a number), single letters with full stops between them ("U.S.", "e.g."), or in
     ABBREVIATIONS. The word is what stands before the full stop back to the first character that is neither a letter,
     a digit nor a full stop, or to the start of the document or row. "..." and "?!" end sentences.

Where there is none, the row keeps all `row_len` ids. A boundary after the first id of a row is passed over, since a row of
one id has no target. What is left when the source ends is the last row. A cut depends on `row_len` + 1 ids of the stream and
on nothing else: not on batches, workers or kills.

**Which rows.** The stream ends with the documents, or at `train_rows` + `val_rows` rows. Its last `val_rows` rows go to
val.bin, all before them to train.bin. With `val_share` instead, whole documents are held out by the hash of their names (of
their text where they have none) and cut as a second stream.

**Files.** `<data_dir>/train.bin`, `val.bin`: uint32, row-major [rows, row_len], PAD in the unused tail of a row; beside them
the manifests `train.json`, `val.json`: where the rows come from, what was skipped, counts and hashes. Until all are complete, the unfinished
work is in `*.bin.tmp` and `prepare.state`.
"""

import contextlib
import functools
import glob
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tqdm import tqdm

from configure import Config, guard, load
from lib.errors import UserError, first_line, require
from lib.files import atomic_write, locked, read_json, write_json, writing
from lib.rows import PAD, open_rows, quick_hash
from lib.tokens import SAMPLE, check_round_trip, check_tokenizer, leading_bos, token_bytes

RULE_VERSION = 1
COMMIT_SEC = 5.0  # most work that a kill can lose
BATCH_CHARS, BATCH_DOCUMENTS = 1 << 20, 2048  # size of a batch that is tokenized in one call; bounds the memory
CHAT = r"im_end|eot|turn|\|end\|"  # matches an EOS that ends a turn of a chat
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")

STOPS = ".!?…‼⁇⁈⁉؟۔।。！？｡"
WIDE = "。！？｡"
CLOSERS = "\"'”’»›)]}」』】》〉〕）］｝"
UNDECIDED = CLOSERS + "\ufffd"  # what part of a character decodes to
GAPS = re.compile(rb"[ \t\n\r]")
ABBREVIATIONS = {  # lower case, without the last full stop
    word
    for line in (
        "mr mrs ms mx dr prof rev fr hon gen col capt cmdr lt maj sgt gov sen rep pres st sr jr esq messrs mme mlle",
        "vs viz etc al ca cf approx resp incl excl ibid no nos vol vols ch chap sec fig figs eq eqs pp ed eds",
        "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat",
        "inc ltd co corp dept univ assn bros ave blvd rd mt ft ph.d",
    )
    for word in line.split()
}
# Bits of a token's class; `cut` relies on their order.
EOS = 1
LINE = 2  # ends a line
STOP = 4  # may end a sentence if whitespace follows; the tokens before it decide
OPEN = 8  # may end a sentence even if none follows
SPACE = 16  # starts with whitespace
FRESH = 32  # starts with a whole character that is neither a stop nor a closer
GAP = 64  # holds whitespace, beyond which no word reaches back
STATE = ("recipe", "records", "streams", "read", "skipped")
OWN, FINAL = ("train.bin.tmp", "val.bin.tmp"), ("train.bin", "train.json", "val.bin", "val.json")


def open_source(cfg: Config):
    """`cfg.source` -> a stream of documents (datasets.IterableDataset, whose state resumes it), and facts of each part.

    Several sources, "a:0.7,b:0.3", are drawn from with these probabilities, by a fixed seed, until one of them ends.
    """
    import datasets

    parts = [re.fullmatch(r"\s*(.+):(\d*\.?\d+)\s*", part) for part in cfg.source.split(",")]
    if Path(cfg.source).expanduser().exists() or not any(parts):
        parts = [(None, cfg.source, 1)]
    if not all(parts) or not all(float(part[2]) for part in parts):
        raise UserError(f"source={cfg.source}: expected a share above 0 for each, like a:0.7,b:0.3")
    streams, facts, inputs = zip(*(open_part(part[1], cfg) for part in parts), strict=True)
    twice = [name for name, n in Counter(map(os.path.realpath, itertools.chain(*inputs))).items() if n > 1]
    require(not twice, f"source={cfg.source}: reads {twice[:1]} twice; name each file once, and no link to it")
    if len(parts) == 1:
        return streams[0], [*facts]
    shares = np.array([float(part[2]) for part in parts])
    shares = (shares / shares.sum()).tolist()
    mixture = datasets.interleave_datasets(list(streams), shares, seed=0, stopping_strategy="first_exhausted")
    return mixture, [{**part, "share": share} for part, share in zip(facts, shares, strict=True)]


def open_part(name: str, cfg: Config):
    """One source: a local file, folder or glob, or a hub dataset at one commit.

    -> a stream of documents, facts, and the files or the name
    """
    import datasets

    path, column, files = Path(name).expanduser(), cfg.source_text, [name]
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?", name) or name.endswith(SUFFIXES):
        files = list_files(name, path)
        root = os.path.commonpath([os.path.dirname(file) for file in files])
        content = [(os.path.relpath(file, root), quick_hash(Path(file))) for file in files]
        arguments = {"files": files, "root": root, "column": column}
        stream = datasets.IterableDataset.from_generator(read_files, gen_kwargs=arguments)
    else:
        import huggingface_hub

        name, _, revision = name.partition("@")
        try:
            commit = huggingface_hub.HfApi().dataset_info(name, revision=revision or None).sha
        except Exception as error:  # a network failure has a class of its own, which changes with the library
            reason = f"no local path, and no such dataset on the hub ({first_line(error)})"
            raise UserError(f"source={name}: {reason}") from error
        stream = datasets.load_dataset(name, cfg.source_config, split=cfg.source_split, streaming=True, revision=commit)
        stream = stream.select_columns([column]).map(lambda row: read_document(lambda: row[column]))
        name = content = f"{name}@{commit}"
        print(f"source: {name}", file=sys.stderr)
    return stream, {"source": name, "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest()}, files


def list_files(name: str, path: Path) -> list[str]:
    """The files of a local source by name; it tells which ones are skipped for their suffixes."""
    walk = os.walk(path, onerror=lambda error: require(False, f"source={name}: {error}"), followlinks=True)
    inside = (os.path.join(folder, file) for folder, _, names in walk for file in names)
    paths = inside if path.is_dir() else [str(path)] if path.exists() else glob.iglob(str(path), recursive=True)
    regular = {file for file in paths if os.path.isfile(file)}
    files = sorted(file for file in regular if file.lower().endswith(SUFFIXES))
    require(files, f"source={name}: no such file, or no regular file there that ends in {', '.join(SUFFIXES)}")
    if others := sorted(regular.difference(files)):
        kinds = sorted({Path(file).suffix for file in others})
        print(f"source={name}: skips {len(others)} files with suffixes {kinds}, such as {others[0]}", file=sys.stderr)
    return files


def read_files(files: list[str], root: str, column: str) -> Iterator[dict]:
    """The documents of local files in this order; only those of text files have names."""
    for file in files:
        name, n = os.path.relpath(file, root) if file.lower().endswith(".txt") else "", 0
        try:
            for n, get in enumerate(records_of(file, column), 1):
                if get:
                    yield read_document(get, f"{file}, record {n}: ") | {"name": name}
        except (OSError, ValueError) as error:
            raise UserError(f"{file}, record {n}: cannot be read: {first_line(error)}") from error


def records_of(file: str, column: str) -> Iterator[Callable[[], object]]:
    """What reads each record of a file; a falsy one for a blank line."""
    import pyarrow.parquet

    suffix = Path(file).suffix.lower()
    if suffix == ".txt":
        content, wide = Path(file).read_bytes(), "contains NUL bytes, as UTF-16 does; expected UTF-8"
        yield lambda: require(b"\0" not in content, wide) or content.decode("utf-8-sig")
    elif suffix == ".parquet":
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024, columns=[column]):
            yield from (lambda row=row: row[column] for row in batch.to_pylist())
    else:
        kind = {".gz": "gzip", ".zst": "zstd"}.get(suffix)
        with io.BufferedReader(pyarrow.input_stream(file, compression=kind)) as lines:
            yield from (line.strip() and (lambda line=line: json.loads(line)[column]) for line in lines)


def read_document(get: Callable[[], object], where: str = "") -> dict:
    """A record as a document; `bad` says why it has no text. A lone surrogate, which only JSON can spell, becomes U+FFFD."""
    try:
        text = get()
        require(isinstance(text, str), f"expected text, got {type(text).__name__}; source_text names the field")
        return {"name": "", "text": text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text), "bad": ""}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"no {error}; source_text names the field" if isinstance(error, LookupError) else first_line(error)
        return {"name": "", "text": "", "bad": f"{where}cannot be read: {reason}"}


def hash_documents(documents: Iterable[dict], before: str = "") -> str:
    """A hash of these documents and of those before them, one by one: batches do not matter."""
    for document in documents:
        before = hashlib.sha256(f"{before} {document['name']} {document['text']}".encode()).hexdigest()
    return before


class Table(NamedTuple):
    """The properties of every token id that `cut` needs, computed once."""

    flags: np.ndarray  # [V] uint8, bits of the token's class
    pieces: list[bytes]  # [V] the bytes that each token stands for; empty for special tokens


def token_table(tokenizer) -> Table:
    """The class of every token of a fast tokenizer (`transformers`), from its bytes."""
    pieces, flags = token_bytes(tokenizer.backend_tokenizer), []
    for piece in pieces:
        text = piece.decode("utf-8", "replace")
        first, last = text[:1], text[-1:]
        if last in UNDECIDED:  # the end of a character or a closer: what is before it tells, here or in other tokens
            last = text.rstrip(UNDECIDED)[-1:] or WIDE[0]
        flag = FRESH if first not in UNDECIDED and first not in STOPS else 0
        flag |= (SPACE if first.isspace() else 0) | (GAP if GAPS.search(piece) else 0)
        if last and last in STOPS:
            flag |= STOP | OPEN if last in WIDE else STOP
        elif piece.rstrip(b" \t").endswith(b"\n"):
            flag |= LINE
        flags.append(flag if piece else 0)
    flags[tokenizer.eos_token_id] = EOS | GAP
    return Table(np.array(flags, np.uint8), pieces)


def cut(ids: np.ndarray, table: Table, row_len: int, last: bool) -> np.ndarray:
    """Cut a piece of the stream into rows by the boundary rule.

    ids   [n] the stream from the start of a row on; `last`: it ends here
    ->    [rows] where each row ends (exclusive; the next starts there). Without `last`, fewer than row_len + 1 ids stay over.
    """
    flags = table.flags[ids]
    hard = np.flatnonzero(flags & (EOS | LINE)).tolist()
    soft = np.flatnonzero(flags[:-1] >> 2 & flags[1:] >> 4 & 3).tolist()  # STOP then SPACE, or OPEN then FRESH
    start, ends = 0, []
    while len(ids) - start > row_len:
        stop = start + row_len
        i = bisect_left(hard, stop) - 1
        end = hard[i] if i >= 0 and hard[i] > start else -1
        for j in range(bisect_left(soft, stop) - 1, -1, -1):
            if soft[j] <= max(end, start):
                break
            if _ends_sentence(ids, flags, table.pieces, start, soft[j]):
                end = soft[j]
                break
        start = stop if end < 0 else end + 1
        ends.append(start)
    if last and start < len(ids):
        ends.append(len(ids))
    return np.array(ends, np.int64)


def _ends_sentence(ids: np.ndarray, flags: np.ndarray, pieces: list[bytes], start: int, i: int) -> bool:
    """Part 3 of the boundary rule for a cut after ids[i], in a row that begins at `start`."""
    first = i
    while first > start and not flags[first] & GAP:  # the word cannot reach back beyond whitespace
        first -= 1
    text = b"".join(pieces[j] for j in ids[first : i + 1]).decode("utf-8", "replace").rstrip(CLOSERS)
    before = text.rstrip(STOPS)
    stops = text[len(before) :]
    if not stops or not (flags[i + 1] & SPACE or (stops[-1] in WIDE and flags[i + 1] & FRESH)):
        return False
    if stops != ".":
        return True
    n = len(before)
    while n and (before[n - 1].isalnum() or before[n - 1] == "."):
        n -= 1
    word = before[n:]
    label = len(word) == 1 or (len(word) <= 3 and word.isdecimal())
    initials = all(len(part) == 1 and part.isalpha() for part in word.split("."))
    return not (label or initials or word.lower() in ABBREVIATIONS)


def encoded(stream, n_documents: int | None, encode: Callable, workers: int) -> Iterator[tuple]:
    """The stream's first documents in batches, each with what follows; the next ones are tokenized meanwhile.

    -> documents, state of the stream after them, and what `encode` makes of the texts that could be read
    """
    pool, waiting = start_pool(workers, encode), deque()
    try:
        for batch in batches(itertools.islice(stream, n_documents)):
            texts = [document["text"] for document in batch if not document["bad"]]
            waiting.append((batch, stream.state_dict(), pool.submit(encode_batch, texts)))
            if len(waiting) > 2 * workers + 1:  # bounds the memory
                *about, future = waiting.popleft()
                yield *about, *future.result()
        for *about, future in waiting:
            yield *about, *future.result()
    except BrokenProcessPool as error:
        reason = "a worker was killed, possibly out of memory; the same command resumes, with fewer workers if you like"
        raise UserError(f"prepare_workers={workers}: {reason}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def batches(documents: Iterator[dict]) -> Iterator[list[dict]]:
    batch, n_chars = [], 0
    for document in documents:
        batch.append(document)
        n_chars += len(document["text"])
        if n_chars >= BATCH_CHARS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, n_chars = [], 0
    if batch:
        yield batch


def start_pool(workers: int, encode: Callable) -> Executor:
    """What runs `encode_batch`: three threads beside the tokenizer's own, or processes of one thread each."""
    if workers == 1:
        set_encoder(encode)
        return ThreadPoolExecutor(3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # lib.rows imports it; so it is loaded once, and workers share its memory
    return ProcessPoolExecutor(workers, context, start_worker, (encode,))


def start_worker(encode: Callable) -> None:
    """Set up a worker process. It ignores Ctrl-C, which its parent handles, and exits when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    set_encoder(encode)


def set_encoder(encode: Callable) -> None:
    global encode_texts
    encode_texts = encode


def encode_batch(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return encode_texts(texts)


def encode_with(tokenizer: tokenizers.Tokenizer, bos: int | None, eos: int, texts: list[str]):
    """-> the ids of all texts [n] uint32, each with its BOS and EOS, and the length of each [texts]."""
    tokenizer.encode_special_tokens = True  # text is only text; a process that was sent a tokenizer lacks this
    encodings, before = tokenizer.encode_batch_fast(texts, add_special_tokens=False), [] if bos is None else [bos]
    ids = [array("I", [*before, *encoding.ids, eos]) for encoding in encodings]
    return np.concatenate([np.empty(0, np.uint32), *ids]), np.array([len(part) for part in ids], np.int64)


class Stream:
    """A stream of ids as it is written to a file: the number of rows written so far, and the start of the next row."""

    def __init__(self, file: Path, row_len: int, rows: int = 0, rest=()):
        self.file, self.row_len, self.rows, self.rest = file, row_len, rows, np.array(rest, np.uint32)
        self.file.touch()
        written = file.stat().st_size >= rows * row_len * 4
        require(written, f"{file}: too short for prepare.state; move {file.parent} aside and start again")

    def feed(self, ids: np.ndarray, table: Table, last: bool = False) -> None:
        """Cut and write the complete rows; the `last` ids end the last row."""
        ids = np.concatenate([self.rest, ids])
        ends = cut(ids, table, self.row_len, last)
        if len(ends):
            starts = np.append(0, ends[:-1])
            block = np.full((len(ends), self.row_len), PAD, np.uint32)
            block[np.arange(self.row_len) < (ends - starts)[:, None]] = ids[: ends[-1]]
            with writing(self.file), open(self.file, "r+b") as f:
                f.seek(self.rows * self.row_len * 4)  # over what a killed run wrote after its last commit
                f.write(block)
            self.rows += len(ends)
        self.rest = ids[ends[-1] if len(ends) else 0 :].copy()

    def save(self) -> dict:
        """Flush everything to the disk -> the state from which a new `Stream` goes on."""
        with writing(self.file), open(self.file, "r+b") as f:
            f.truncate(self.rows * self.row_len * 4)
            os.fsync(f.fileno())
        return {"rows": self.rows, "rest": self.rest.tolist()}


def held_out(document: dict, share: float) -> bool:
    """Whether val.bin gets this document: a function of its name, or of its text where it has no name."""
    digest = hashlib.sha256((document["name"] or document["text"]).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def prepare(cfg: Config, commit_sec: float = COMMIT_SEC) -> None:
    """Write the rows of `cfg` into `cfg.data_dir`, or resume a killed run of the same recipe.

    Raises `UserError` where the folder holds data of another recipe, complete or not: nothing is overwritten.
    """
    from lib.hf import (  # here, as workers need no transformers
        find_folder,
        load_tokenizer,
        pinned,
        tokenizer_hash,
    )

    name = cfg.tokenizer or cfg.teacher
    require(name, "tokenizer=None, teacher=None: expected a tokenizer's folder or hub id in one of them")
    tokenizer, used = load_tokenizer(name), pinned(name)
    print(f"tokenizer: {used}", file=sys.stderr)
    bos, eos = leading_bos(tokenizer) if cfg.bos == "auto" else None, tokenizer.eos_token_id
    if re.search(CHAT, tokenizer.eos_token):
        print(f"warning: {name}: documents will end with its eos_token {tokenizer.eos_token}, which ends turns of a chat; "
              "for plain text take the base model", file=sys.stderr)  # fmt: skip
    check_tokenizer(tokenizer, tokenizers.Tokenizer.from_file(str(find_folder(name) / "tokenizer.json")))
    table = token_table(tokenizer)
    stream, sources = open_source(cfg)
    keys = ("source_config", "source_text", "source_split", "n_documents", "train_rows", "val_rows", "val_share")
    recipe = {"sources": sources, **{key: getattr(cfg, key) for key in keys}, "row_len": cfg.seq_len + 1}
    recipe |= {"rule_version": RULE_VERSION, "tokenizer": used, "tokenizer_sha256": tokenizer_hash(tokenizer)}
    recipe |= {"vocab_size": len(table.pieces), "bos": None if bos == eos else bos, "eos_id": eos}
    folder = Path(cfg.data_dir)
    file = folder / "prepare.state"
    with locked(folder, f"{folder}: another prepare.py is at work there"):
        state = read_json(file, STATE, f"move {folder} aside and start again") if file.exists() else None
        if state and state["records"]:
            old = state["recipe"]
            same = [part["source"] for part in old["sources"]] == [part["source"] for part in sources]
            mended = same and old["sources"] != sources
            if mended and state["read"] == hash_documents(itertools.islice(stream, state["records"])):
                old["sources"] = sources  # what has changed was not read yet
            check_recipe(folder, old, recipe)
            state["recipe"] = recipe
            print(f"{folder}: resuming after {state['records']:,} documents", file=sys.stderr)
        elif not state and (folder / "train.json").exists():
            for split in splits(recipe):
                check_recipe(folder, open_rows(folder, split)[1], recipe)
            print(f"{folder}: already prepared with the same settings; --verify checks it")
            return
        else:
            foreign = [] if state else [name for name in (*FINAL, *OWN) if (folder / name).exists()]
            remedy = "not of prepare.py; move it aside, or set another data_dir"
            require(not foreign, f"{folder}: contains {foreign}, {remedy}")
            for name in OWN:
                (folder / name).unlink(missing_ok=True)
            state = {"recipe": recipe, "records": 0, "streams": {}, "read": "", "skipped": []}
            write_json(file, state)  # first: it tells whose the other files are
        if "complete" not in state:
            state = write_rows(cfg, stream, tokenizer, table, state, commit_sec)
        for manifest in finish(folder, state):
            print(summary(folder, manifest))
        file.unlink()


def write_rows(cfg: Config, source, tokenizer, table: Table, state: dict, commit_sec: float) -> dict:
    """Read, tokenize, cut and write until all rows exist or the documents end -> the final state."""
    folder, most = Path(cfg.data_dir), cfg.max_bad_records
    recipe, n_records, skipped = state["recipe"], state["records"], state["skipped"]
    max_rows = cfg.train_rows + cfg.val_rows if cfg.train_rows else None
    streams = {name: Stream(folder / f"{name}.bin.tmp", recipe["row_len"], **state["streams"].get(name, {}))
               for name in (("train", "val") if cfg.val_share else ("train",))}  # fmt: skip
    if "source" in state:
        source.load_state_dict(state["source"])
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True  # text is only text
    backend.no_truncation()
    backend.no_padding()
    check_round_trip(backend, SAMPLE)
    encode = functools.partial(encode_with, backend, recipe["bos"], recipe["eos_id"])
    left = cfg.n_documents and cfg.n_documents - n_records
    n_tokens, started, committed = 0, time.monotonic(), time.monotonic()
    bar = tqdm(total=max_rows, unit="row", mininterval=0.5 if sys.stderr.isatty() else 30)
    with bar, contextlib.closing(encoded(source, left, encode, cfg.prepare_workers)) as encoded_batches:
        for documents, position, ids, lengths in encoded_batches:
            skipped += [f"document {n_records + i}: {d['bad']}" for i, d in enumerate(documents) if d["bad"]]
            says = f"{''.join(skipped[most:][:1])}; correct it, or set max_bad_records above {most}"
            require(len(skipped) <= most, says)
            state["read"], n_records = hash_documents(documents, state["read"]), n_records + len(documents)
            documents = [d for d in documents if not d["bad"]]
            plain = (ids == recipe["eos_id"]).sum() == len(documents)
            require(plain, f"tokenizer {recipe['tokenizer']}: a text contains its eos_token; take another tokenizer")
            for document in documents[:1]:
                check_round_trip(backend, document["text"][:2000])
            is_val = np.repeat([cfg.val_share > 0 and held_out(d, cfg.val_share) for d in documents], lengths)
            for name, stream in streams.items():
                stream.feed(ids[is_val == (name == "val")], table)
            n_tokens += len(ids)
            bar.update(sum(stream.rows for stream in streams.values()) - bar.n)
            speed = n_tokens / (time.monotonic() - started)
            bar.set_postfix_str(f"{n_records:,} documents, {speed:,.0f} tokens/s", refresh=False)
            if max_rows and streams["train"].rows >= max_rows:
                break
            if time.monotonic() - committed > commit_sec:
                commit(folder, state | {"records": n_records, "source": position}, streams)
                committed = time.monotonic()
    require(n_records, f"source={cfg.source}: holds no record")
    for stream in streams.values():
        stream.feed(np.empty(0, np.uint32), table, last=True)
    streams["train"].rows = min(streams["train"].rows, max_rows or sys.maxsize)
    return commit(folder, state | {"records": n_records, "complete": True}, streams)


def commit(folder: Path, state: dict, streams: dict[str, Stream]) -> dict:
    """Flush the rows, then write the state that counts them -> that state."""
    state = state | {"streams": {name: stream.save() for name, stream in streams.items()}}
    write_json(folder / "prepare.state", state)
    return state


def finish(folder: Path, state: dict) -> list[dict]:
    """Give the files their final names, and write their manifests. It can be killed at any point and repeated."""
    recipe = state["recipe"] | {"skipped": state["skipped"]}
    rows = {name: stream["rows"] for name, stream in state["streams"].items()}
    if recipe["val_rows"]:
        n, size = max(rows["train"] - recipe["val_rows"], 0), recipe["row_len"] * 4
        work, rows = folder / "train.bin.tmp", {"train": n, "val": rows["train"] - n}
        if n and work.exists() and work.stat().st_size > n * size:
            with open(work, "rb") as f:
                f.seek(n * size)
                atomic_write(folder / "val.bin.tmp", f.read())
            os.truncate(work, n * size)
    empty = [name for name in rows if not rows[name]]
    if empty:
        for name in (*OWN, "prepare.state"):
            (folder / name).unlink(missing_ok=True)  # of no use to any recipe
        raise UserError(f"train_rows={recipe['train_rows']}, val_rows={recipe['val_rows']}, val_share={recipe['val_share']}: "
                        f"{state['records']:,} records leave no row for {empty[0]}, and nothing was kept; change one of these "
                        "(for few documents, --val_share=0 --val_rows=N holds out the last rows)")  # fmt: skip
    manifests = []
    for name in rows:
        work, final = folder / f"{name}.bin.tmp", folder / f"{name}.bin"
        manifests.append({"split": name, **recipe, **measure(work if work.exists() else final, recipe)})
        if work.exists():
            os.replace(work, final)
        manifests[-1] |= measure_unigram(folder, recipe) if name == "val" else {}
        lines = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in manifests[-1].items())  # easy to read
        atomic_write(folder / f"{name}.json", f"{{\n{lines}\n}}\n")
    return manifests


def read_blocks(file: Path, row_len: int, n: int = 1 << 12) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the first row, ids [n, row_len]): read, not mapped, as the pages of a map count as this process's memory."""
    for at in range(0, file.stat().st_size // (row_len * 4), n):
        yield at, np.fromfile(file, np.uint32, n * row_len, offset=at * row_len * 4).reshape(-1, row_len)


def measure_unigram(folder: Path, recipe: dict) -> dict:
    """CE of the held-out targets under the training targets' frequencies, plus one each; half its 95 % interval over rows.

    What a model reaches that knows how often each token occurs, and nothing of the text before it.
    """
    counts, rows = np.ones(recipe["vocab_size"], np.int64), []
    for _, block in read_blocks(folder / "train.bin", recipe["row_len"]):
        counts += np.bincount(block[:, 1:][block[:, 1:] != PAD], minlength=len(counts))
    nats = math.log(counts.sum()) - np.log(counts)  # [V]
    for _, block in read_blocks(folder / "val.bin", recipe["row_len"]):
        y, used = block[:, 1:], block[:, 1:] != PAD
        rows.append([(nats[np.where(used, y, 0)] * used).sum(1), used.sum(1)])
    ce, n = np.hstack(rows)  # [rows]
    mean, bessel = ce.sum() / n.sum(), len(n) / max(len(n) - 1, 1)
    return {"unigram_ce": mean, "unigram_half": 1.96 * math.sqrt(bessel * ((ce - mean * n) ** 2).sum()) / n.sum()}


def measure(file: Path, recipe: dict) -> dict:
    """Counts and hashes of a rows file, in one pass."""
    row_len, size = recipe["row_len"], file.stat().st_size
    fits = size > 0 and size % (row_len * 4) == 0
    require(fits, f"{file}: {size:,} bytes, expected a multiple of a row of {row_len} ids; prepare it again")
    digest, n_eos, n_tokens, n_rows = hashlib.sha256(), 0, 0, size // (row_len * 4)
    for _, block in read_blocks(file, row_len):
        n_tokens += int((block != PAD).sum())
        n_eos += int((block == recipe["eos_id"]).sum())
        digest.update(block)
    return {
        "rows": n_rows,
        "tokens": n_tokens,
        "valid_targets": n_tokens - n_rows,
        "padding_share": 1 - n_tokens / (n_rows * row_len),
        "documents": n_eos,  # that end in these rows
        "sha256": digest.hexdigest(),
        "quick_sha256": quick_hash(file),
    }


def verify(folder: Path) -> None:
    """Hash and count everything again. `UserError` names the first difference from the manifest."""
    complete = not (folder / "prepare.state").exists()
    require(complete, f"{folder}: not finished; the command that began it resumes it")
    for name in splits(open_rows(folder, "train")[1]):
        manifest = open_rows(folder, name)[1]
        for key, value in measure(folder / f"{name}.bin", manifest).items():
            told = manifest.get(key)
            require(value == told, f"{folder / name}.bin: {key} is {value}, expected {told}; prepare it again")
        print(f"{summary(folder, manifest)}: as the manifest says, sha256 {manifest['sha256']}")


def show(folder: Path, first: int, n_rows: int = 5) -> None:
    """Print rows as text, each with its length. Instead of the folder, one of its .bin files may be given."""
    from lib.hf import load_tokenizer

    folder, name = (folder.parent, folder.stem) if folder.suffix == ".bin" else (folder, "train")
    rows, manifest = open_rows(folder, name)
    require(first < len(rows), f"--show {first}: expected a row from 0 to {len(rows) - 1}")
    tokenizer = load_tokenizer(manifest["tokenizer"])
    for i in range(first, min(first + n_rows, len(rows))):
        ids = rows[i][rows[i] != PAD].tolist()
        print(f"⟦row {i}: {len(ids)} ids⟧{tokenizer.decode(ids, clean_up_tokenization_spaces=False)}\n")


def splits(recipe: dict) -> tuple[str, ...]:
    return ("train", "val") if recipe["val_rows"] or recipe["val_share"] else ("train",)


def check_recipe(folder: Path, old: dict, new: dict) -> None:
    """`UserError` that names what differs. Tokenizer and sources may move as long as their hashes stay."""

    def content(recipe: dict) -> dict:
        return recipe | {"tokenizer": None, "sources": [part | {"source": None} for part in recipe["sources"]]}

    keys = [key for key in new if content(old).get(key) != content(new)[key]]
    if keys:
        changes = "; ".join(f"{key} was {old.get(key)!r:.200}, now {new[key]!r:.200}" for key in keys)
        remedy = "Nothing was touched: set another data_dir, or move that folder aside"
        raise UserError(f"{folder}: holds data of another recipe: {changes}. {remedy}")


def summary(folder: Path, manifest: dict) -> str:
    ends = "documents" if manifest["documents"] else "documents end in these rows: one long document"
    words = ", unigram CE {unigram_ce:.4f} ± {unigram_half:.4f} (95 % over rows)" if "unigram_ce" in manifest else ""
    return (f"{folder / manifest['split']}.bin: {manifest['rows']:,} rows, {manifest['tokens']:,} tokens, "
            f"{manifest['documents']:,} {ends}, padding {manifest['padding_share']:.1%}{words.format(**manifest)}")  # fmt: skip


def main(argv: list[str]) -> int:
    match argv:
        case ["--verify", folder]:
            verify(Path(folder))
        case ["--show", row, folder] if row.isdigit():
            show(Path(folder), int(row))
        case ["--verify" | "--show", *_]:
            raise UserError(f"{' '.join(argv)}: expected --verify DIR, or --show N DIR with the number of a row")
        case _:
            cfg = load(argv)
            prepare(cfg)
    return 0


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
