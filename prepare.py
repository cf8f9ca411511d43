"""Tokenize text into fixed-length rows, cut at sentence and line boundaries (paper, appendix B).

    python prepare.py config/alra_200m.py [--key=value ...]    goes on where it was stopped or killed
    python prepare.py --verify data/pile                       hash and count everything again
    python prepare.py --show 1000 data/pile                    five rows from row 1000 on, as text

Each document is tokenized with no special tokens added, and one EOS follows it. Where the tokenizer by itself puts a
BOS before a text, so does `bos="auto"`; `bos="none"` does not. What a tokenizer puts after a text is left out, and one
that puts several ids before it is refused. A BOS that is the EOS itself is not added: that of the document before
stands there. BOS and EOS have no text, and are targets like other tokens (a BOS is predicted from an EOS). Text is only
text: a document that spells "<|endoftext|>" gets the ids of those characters, so EOS ids and documents match one to one.
The ids of all documents form one stream. It is cut into rows of at most `row_len` = seq_len + 1 ids; joined, the
rows give the stream back.

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

The three kinds have equal rank: the latest wins. Where there is none, the row keeps all `row_len` ids. A boundary after
the first id of a row is passed over, since a row of one id has no target. What is left when the source ends is the last
row (it may be a lone EOS). A cut depends on `row_len` + 1 ids of the stream and on nothing else: neither on
batches, nor on workers, nor on where a run was killed.

**Several sources.** `source="a:0.7,b:0.3"` interleaves them by shares of documents: record i comes from the source that is
furthest behind its share, so the order depends on the shares alone, and on no kill or number of workers.

**Which rows.** The stream ends with the records, or when `train_rows` (+ `val_rows`) rows exist. Its last `val_rows` rows
are val.bin, all before them train.bin, also where the source ends early, which is said. With `val_share` instead, whole
documents are held out by the hash of their names (of their text where they have none), and cut as a stream of their own.

**Files.** `<data_dir>/train.bin`, `val.bin`: uint32, row-major [rows, row_len], PAD in the unused tail of a row; beside
them `train.json`, `val.json`: where the rows come from, counts and hashes. They get these names when they are whole.
Until then `*.bin.tmp`, `*.ends.tmp` and `prepare.state` hold the work, which the same command takes up.
"""

import contextlib
import errno
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import signal
import sys
import sysconfig
import time
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import tokenizers
from tqdm import tqdm

from configure import Config, guard, load
from lib.files import UserError, locked, read_json, write_json, write_whole
from lib.rows import BLOCK, MANIFEST, PAD, quick_hash
from lib.tokens import token_bytes

RULE_VERSION = 1
PREFIX_ROWS = 67_200 * 16  # rows of the paper's 550M-token setting, which has a hash of its own
COMMIT_SEC = 5.0  # work that a kill can cost
LINE_BYTES = 1 << 28  # of the longest line of a source; it bounds the memory
BATCH_CHARS, BATCH_DOCUMENTS = 1 << 20, 2048  # of one call of the tokenizer; they bound the memory
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
# Bits of a token's class. STOP and OPEN say that it may; the tokens before it decide. `cut` relies on the order.
EOS = 1
LINE = 2  # ends a line
STOP = 4  # ends a sentence if whitespace follows
OPEN = 8  # ends a sentence even if none follows
SPACE = 16  # starts with whitespace
FRESH = 32  # starts with a whole character that is neither a stop nor a closer
GAP = 64  # holds whitespace, beyond which no word reaches back
FILES = {"train.bin", "train.json", "val.bin", "val.json"}
STREAM_KEYS = {
    "rest": list,
    "rows?": int,
    "ends?": str,
    "crc?": int,
    "ends_crc?": int,
}  # older states have `ends`, no `rows`
STATE_KEYS = {"recipe": dict, "records": int, "whole": bool, "streams": {"*": STREAM_KEYS}}
MANIFEST_KEYS = {"split": str, "tokenizer": str, "vocab_size": int, "val_rows": int, "val_share": float, "tokens": int}
MANIFEST_KEYS |= {"documents": int, "padding_share": float, **MANIFEST}
KINDS = {"e": "eos", "l": "line", "s": "sentence", "-": "none"}  # what a row ends at


# --- sources -----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    sha256: str  # of what the records are made from
    records: Callable[[int], Iterator[tuple[str | None, str]]]  # how many to skip -> (name, text), in order
    done: Callable[[], float]  # share that has been read, for the bar; 0 where unknown
    revision: str | None = None  # hub only: the commit


def open_sources(cfg: Config) -> tuple[Source, list[dict]]:
    """The source of `cfg`, or several of them interleaved by their shares -> it, and facts of each where there are several."""
    parts = mixture(cfg.source)
    wanted = {"source_revision": cfg.source_revision, "source_config": cfg.source_config,
              "source_text": cfg.source_text, "source_split": cfg.source_split}  # fmt: skip
    given = {key: (value or "").split(",") for key, value in wanted.items()}
    for key, values in given.items():
        if len(values) not in (1, len(parts)):
            raise UserError(f"{key}={wanted[key]}: expected one for all, or one for each of the {len(parts)} sources")
    local = [is_local(name) for name, _ in parts]
    opened = []
    for i, (name, _) in enumerate(parts):
        own = {key: values[i % len(values)] or None for key, values in given.items()}
        for key in ("source_revision", "source_config", "source_split"):
            if local[i] and own[key] not in (None, "train"):
                if len(given[key]) == len(parts) or all(local):
                    raise UserError(f"{key}={own[key]}: only a hub dataset has one, and source={name} is local")
                own[key] = None
        opened.append(open_source(name, *(own[key] for key in given)))
    if len(parts) == 1:
        return opened[0], []
    facts = [{"source": name, "share": share, "sha256": source.sha256, "revision": source.revision}
             for (name, share), source in zip(parts, opened, strict=True)]  # fmt: skip
    return interleaved(opened, parts), facts


def mixture(text: str) -> list[tuple[str, float]]:
    """ "a:0.7,b:0.3" -> names and shares, which are scaled to a sum of 1; any other text is one source."""
    parts = [re.fullmatch(r"\s*(.+):(\d*\.?\d+)\s*", part) for part in text.split(",")]
    if Path(text).expanduser().exists() or not any(parts):
        return [(text, 1.0)]
    if not all(parts) or not all(float(part[2]) for part in parts):
        raise UserError(f"source={text}: expected a share above 0 for each, like a:0.7,b:0.3")
    whole = sum(float(part[2]) for part in parts)
    return [(part[1], float(part[2]) / whole) for part in parts]


def interleaved(sources: list[Source], parts: list[tuple[str, float]]) -> Source:
    """Record i of the mixture comes from the source that is furthest behind its share of i + 1 records.

    So the order is a function of the shares alone. The mixture ends where a source is asked for more than it has.
    """
    numbers = range(len(sources))

    def order() -> Iterator[int]:
        taken = [0 for _ in numbers]
        for i in itertools.count(1):
            k = max(numbers, key=lambda k: parts[k][1] * i - taken[k])
            taken[k] += 1
            yield k

    def records(skip: int) -> Iterator[tuple[str | None, str]]:
        chosen = order()
        before = list(itertools.islice(chosen, skip))
        counts = [before.count(k) for k in numbers]
        streams = [source.records(n) for n, source in zip(counts, sources, strict=True)]
        for k in chosen:
            record = next(streams[k], None)
            if record is None:
                read = ", ".join(f"{n:,} of {name}" for n, (name, _) in zip(counts, parts, strict=True))
                print(f"source={parts[k][0]}: at its end, and so the mixture ends; documents: {read}", file=sys.stderr)
                return
            counts[k] += 1
            yield record

    facts = json.dumps([(share, source.sha256) for (_, share), source in zip(parts, sources, strict=True)])
    return Source(hashlib.sha256(facts.encode()).hexdigest(), records, lambda: max(s.done() for s in sources))


def is_local(name: str) -> bool:
    """Whether a source is no hub dataset `owner/name@revision`. What looks like a path is never looked for on the hub."""
    path = Path(name).expanduser()
    hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?", name) and not name.endswith(SUFFIXES)
    return name == "python" or path.exists() or not hub or (len(path.parts) > 1 and path.parent.is_dir())


def open_source(
    name: str,
    revision: str | None = None,
    config: str | None = None,
    column: str | None = None,
    split: str | None = None,
) -> Source:
    """A source by its name: "python" (its own documentation and library), a local file, folder or glob, or a hub dataset.

    column         of parquet files and hub datasets, field of JSON lines, that holds the text; None: "text"
    config, split  of a hub dataset; None: the default one, "train"
    Raises `UserError` where there is nothing to read.
    """
    if not name:
        raise UserError("source=: expected a file, folder, glob or hub dataset")
    if name == "python":
        return _memory_source(python_documents())
    if is_local(name):
        return _file_source(name, column or "text")
    return _hub_source(name, revision, config, column or "text", split or "train")


def python_documents() -> list[tuple[str, str]]:
    """The text that comes with every Python: its documentation topics and standard library, as (name, text).

    Tests, their data, generated tables and what is not UTF-8 stay out. Documents are ordered by the sha256 of their
    names, which mixes the subjects and does not depend on the file system.
    """
    from pydoc_data import topics

    unwanted = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__", "encodings",
                "pydoc_data", "_bundled", "entities.py", "stringprep.py", "distutils", "__phello__"}  # fmt: skip
    found = {f"topics/{name}": text for name, text in topics.topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in library.rglob("*.py"):
        inside = file.relative_to(library)
        if unwanted.isdisjoint(inside.parts) and not inside.parts[0].startswith(("config-", "_sysconfigdata")):
            with contextlib.suppress(UnicodeDecodeError):
                found[f"lib/{inside.as_posix()}"] = file.read_text("utf-8")
    return sorted(found.items(), key=lambda document: hashlib.sha256(document[0].encode()).digest())


def _memory_source(documents: list[tuple[str, str]]) -> Source:
    digest, at = hashlib.sha256(), [0]
    for name, text in documents:
        digest.update(f"{name}\0{len(text)}\0{text}".encode())

    def records(skip: int) -> Iterator[tuple[str, str]]:
        for at[0] in range(skip, len(documents)):
            yield documents[at[0]]

    return Source(digest.hexdigest(), records, lambda: at[0] / len(documents))


def _file_source(name: str, column: str) -> Source:
    """The records of local files in the order of their names. A folder that contains `train/` gives that part only."""
    root = Path(name).expanduser()
    if root.is_dir():
        root = root / "train" if (root / "train").is_dir() else root
        files = sorted(p for p in root.rglob("*") if p.name.endswith(SUFFIXES) and not p.is_dir())
    else:
        files = [root] if root.exists() else sorted(Path(p) for p in glob.glob(str(root), recursive=True))
        root = root.parent
    if not files:
        raise UserError(f"source={name}: no such file, and no {', '.join(SUFFIXES)} file in it")
    seen: dict = {}
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise UserError(f"{file}: expected a file that ends in one of {', '.join(SUFFIXES)}")
        if not file.is_file():
            raise UserError(f"{file}: expected a regular file; a pipe, a device or a link to nothing is not read")
        first = seen.setdefault((file.stat().st_dev, file.stat().st_ino), file)
        if first is not file:
            raise UserError(f"{file}: the same file as {first}, whose text would count twice; leave one out")
    names = [os.path.relpath(file, root) if len(files) > 1 else file.name for file in files]
    total, at = sum(file.stat().st_size for file in files), {"before": 0, "tell": lambda: 0}

    def records(skip: int) -> Iterator[tuple[str | None, str]]:
        at["before"] = 0
        raw = itertools.chain.from_iterable(_raw_records(f, n, at, column) for f, n in zip(files, names, strict=True))
        return itertools.starmap(
            functools.partial(_parse, column), itertools.islice(raw, skip, None)
        )  # what is skipped is not parsed

    digest = hashlib.sha256()
    for file, inside in zip(files, names, strict=True):
        digest.update(f"{inside}\0{quick_hash(file)}".encode())
    return Source(digest.hexdigest(), records, lambda: (at["before"] + at["tell"]()) / max(total, 1))


def _raw_records(file: Path, name: str, at: dict, column: str) -> Iterator[tuple[str | None, object, int]]:
    """The records of one file as arguments of `_parse`: (name, raw record, file, number). `at` holds the progress."""
    import pyarrow

    with pyarrow.OSFile(str(file)) as raw:
        at["tell"] = lambda: 0 if raw.closed else raw.tell()
        if name.endswith(".txt"):
            yield name, raw.read(), file, None
        elif name.endswith(".parquet"):
            import pyarrow.parquet

            with _readable(file):
                table = pyarrow.parquet.ParquetFile(raw)
            if column not in table.schema_arrow.names:
                raise UserError(
                    f"{file}: expected a column {column!r}, got {', '.join(table.schema_arrow.names)}; set source_text"
                )
            for i, batch in enumerate(_told(table.iter_batches(batch_size=1024, columns=[column]), file)):
                for j, text in enumerate(batch.column(0).to_pylist()):
                    yield None, {column: text}, file, 1024 * i + j + 1
        else:
            kind = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix)
            lines = _lines(pyarrow.CompressedInputStream(raw, kind) if kind else raw, file)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield None, line, file, number
    at.update(before=at["before"] + file.stat().st_size, tell=lambda: 0)


def _parse(
    column: str, name: str | None, raw: bytes | dict, file: object, number: int | None
) -> tuple[str | None, str]:
    """A whole file (no number), a JSON line or a record -> (name, text).

    A lone surrogate in JSON, which is no character and has no UTF-8, becomes U+FFFD.
    """
    where = file if number is None else f"{file}, record {number}"
    try:
        if number is None:
            return name, raw.decode()
        record = json.loads(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected UTF-8{'' if number is None else ' JSON'} ({error})") from error
    text = record.get(column) if isinstance(record, dict) else None
    if not isinstance(text, str):
        got = {k: type(v).__name__ for k, v in record.items()} if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where}: expected a field {column!r} that holds text, got {got}; source_text names it")
    if isinstance(raw, bytes) and not text.isascii() and b"\\u" in raw:
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return name, text


def _lines(stream, file: Path) -> Iterator[bytes]:
    rest = b""
    for block in _told(iter(lambda: stream.read(BLOCK), b""), file):
        *lines, rest = (rest + block).split(b"\n") if b"\n" in block else [rest + block]
        if len(rest) > LINE_BYTES:
            raise UserError(f"{file}: a line of more than {LINE_BYTES >> 20} MiB; expected one record in each line")
        yield from lines
    yield rest


def _told(items: Iterator, file: Path) -> Iterator:
    """The same items. A reading error names the file."""
    while True:
        with _readable(file):
            item = next(items, None)
        if item is None:
            return
        yield item


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # what pyarrow raises is one of them
        raise UserError(f"{file}: cannot be read to its end ({error}); fetch it again") from error


def _hub_source(name: str, revision: str | None, config: str | None, column: str, split: str) -> Source:
    """A hub dataset at one commit, so that a killed preparation resumes with the same bytes."""
    import huggingface_hub

    name, _, at = name.partition("@")
    if at and revision:
        raise UserError(f"source={name}@{at} with source_revision={revision}: name one revision")
    revision = revision or at or None
    try:
        commit = huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:  # each kind of network failure has a class of its own, which changes with the library
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f'source={name}: not "python", no local path, and no such dataset on the hub ({reason})'
        ) from error
    print(f"source: {name}@{commit}", file=sys.stderr)
    digest = hashlib.sha256(f"{name}\0{commit}".encode()).hexdigest()
    return Source(digest, lambda skip: dataset_records(name, commit, skip, config, column, split), lambda: 0.0, commit)


def dataset_records(
    path: str, revision: str | None, skip: int, config: str | None = None, column: str = "text", split: str = "train"
) -> Iterator[tuple[None, str]]:
    """A split of a dataset repository (hub id, or a folder with its layout), streamed in its own order."""
    import datasets

    stream = datasets.load_dataset(path, config, split=split, streaming=True, revision=revision)
    for number, record in enumerate(stream.skip(skip) if skip else stream, skip + 1):
        yield _parse(column, None, record, path, number)


# --- tokens ------------------------------------------------------------------------------------------------------


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


def cut(ids: np.ndarray, table: Table, row_len: int, last: bool) -> tuple[np.ndarray, str]:
    """Cut a piece of the stream into rows by the boundary rule.

    ids   [n] the stream from the start of a row on; `last`: it ends here
    ->    [rows] where each row ends (exclusive; the next starts there), and one letter of KINDS for each. Without `last`,
          fewer than row_len + 1 ids stay over.
    """
    flags = table.flags[ids]
    hard = np.flatnonzero(flags & (EOS | LINE)).tolist()
    soft = np.flatnonzero(flags[:-1] >> 2 & flags[1:] >> 4 & 3).tolist()  # STOP then SPACE, or OPEN then FRESH
    start, ends, kinds = 0, [], []
    while len(ids) - start > row_len:
        stop = start + row_len
        i = bisect_left(hard, stop) - 1
        end = hard[i] if i >= 0 and hard[i] > start else -1
        kind = "-" if end < 0 else "e" if flags[end] & EOS else "l"
        for j in range(bisect_left(soft, stop) - 1, -1, -1):
            if soft[j] <= max(end, start):
                break
            if _ends_sentence(ids, flags, table.pieces, start, soft[j]):
                end, kind = soft[j], "s"
                break
        start = stop if end < 0 else end + 1
        ends.append(start)
        kinds.append(kind)
    if last and start < len(ids):
        ends.append(len(ids))
        kinds.append("e")
    return np.array(ends, np.int64), "".join(kinds)


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


# --- workers -----------------------------------------------------------------------------------------------------


def batched(records: Iterator[tuple[str | None, str]]) -> Iterator[list[tuple[str | None, str]]]:
    """Records in lists of at most BATCH_DOCUMENTS, and of BATCH_CHARS plus one document."""
    batch, chars = [], 0
    for record in records:
        batch.append(record)
        chars += len(record[1])
        if chars >= BATCH_CHARS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def encode_in_order(
    batches: Iterator[list], tokenizer: tokenizers.Tokenizer, eos: int, workers: int, bos: int | None = None
) -> Iterator[tuple[list, tuple[np.ndarray, np.ndarray]]]:
    """Batches of (name, text) -> (batch, (ids of all its documents [n], length of each [documents])), in order.

    One worker: this process and the tokenizer's own threads. More: that many processes of one thread each.
    """
    # one worker, three threads: while one takes its ids over into numpy, the others keep the cores busy
    pool = ThreadPoolExecutor(3 if workers == 1 else workers)
    ahead = 4 if workers == 1 else workers + 1  # batches; bounds the memory
    waiting: deque = deque()
    with contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)  # after the processes: without them, nothing to wait for
        how = (tokenizer, eos, bos)
        encode = _encoder(*how) if workers == 1 else stack.enter_context(_processes(how, workers))
        for batch in batches:
            waiting.append((batch, pool.submit(encode, [text for _, text in batch])))
            if len(waiting) > ahead:
                batch, future = waiting.popleft()
                yield batch, future.result()
        for batch, future in waiting:
            yield batch, future.result()


def _encoder(
    tokenizer: tokenizers.Tokenizer, eos: int, bos: int | None
) -> Callable[[list[str]], tuple[np.ndarray, np.ndarray]]:
    """A function: texts -> (ids of all documents in one array [n], length of each document [texts])."""
    tokenizer.encode_special_tokens = True  # text is only text
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = array("I"), []
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            n = len(ids)
            if bos is not None:
                ids.append(bos)
            ids.fromlist(encoding.ids)
            ids.append(eos)
            lengths.append(len(ids) - n)
        return np.frombuffer(ids, np.uint32), np.array(lengths, np.int64)

    return encode


@contextlib.contextmanager
def _processes(how: tuple, n: int) -> Iterator[Callable]:
    """`_encoder(*how)` for up to n threads at once. One of n processes does each call, through a pipe."""
    children, idle = [], SimpleQueue()

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        child, pipe = idle.get()
        try:
            pipe.send(texts)
            return pipe.recv()
        except (EOFError, OSError) as error:
            child.join(9)
            raise UserError(f"prepare_workers={n}: one ended early (exit code {child.exitcode}; -9: killed, for want of "
                               "memory perhaps); the same command goes on, also with fewer") from error  # fmt: skip
        finally:
            idle.put((child, pipe))  # a dead one too: the next call is not to wait for it

    resource_tracker.ensure_running()  # starting it would undo what comes next
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of the children for good: Ctrl-C is for their parent
    try:
        for _ in range(n):
            pipe, far_end = get_context("spawn").Pipe()
            child = get_context("spawn").Process(target=_work, args=(far_end,), daemon=True)
            child.start()
            far_end.close()  # the child's death closes the pipe, and so does ours
            children.append((child, pipe))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for child, pipe in children:  # they start up side by side
            with contextlib.suppress(OSError):  # a dead one is told of at its first call
                pipe.send(how)
            idle.put((child, pipe))
        yield encode
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for child, _ in children:
            child.kill()
            child.join()


def _work(pipe: Connection) -> None:
    """A worker process: receives texts and returns ids until the other end of the pipe is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes scale where threads do not
    with contextlib.suppress(EOFError, OSError):
        encode = _encoder(*pipe.recv())
        while True:
            pipe.send(encode(pipe.recv()))


# --- files -------------------------------------------------------------------------------------------------------


class Stream:
    """A stream of ids that is being written into a file: the rows written so far, and the start of the next row."""

    def __init__(self, file: Path, row_len: int, max_rows: int | None, saved: dict | None):
        saved = saved or {}
        self.file, self.row_len, self.max_rows = file, row_len, max_rows
        ends = read_ends(file, saved) if saved else ""
        self.rows, self.ends_crc = len(ends), saved.get("ends_crc", 0)
        self.new_ends = ends if "ends" in saved else ""  # what the file of ends lacks
        self.rest = np.array(saved.get("rest", []), np.uint32)
        self.crc, size = 0, self.rows * row_len * 4
        if not size:
            self.file.touch()
        with open(file, "rb") as f:
            for at in range(0, size, BLOCK):
                self.crc = zlib.crc32(f.read(min(BLOCK, size - at)), self.crc)
        if saved.get("crc", self.crc) != self.crc or file.stat().st_size < size:  # older states have no crc
            raise UserError(
                f"{file}: not the rows that prepare.state describes; move {file.parent} aside and start again"
            )

    @property
    def full(self) -> bool:
        return self.rows == self.max_rows

    def feed(self, ids: np.ndarray, lengths: np.ndarray, table: Table, last: bool = False) -> int:
        """Cut and write the complete rows -> the number of documents used.

        That is all of them, or where max_rows is reached, those up to the id that made the last row's cut certain.
        """
        n_rest = len(self.rest)
        ids = np.concatenate([self.rest, ids])
        ends, kinds = cut(ids, table, self.row_len, last)
        room = len(ends) if self.max_rows is None else self.max_rows - self.rows
        ends, kinds = ends[:room], kinds[:room]
        if not len(ends):
            self.rest = ids
            return len(lengths)
        starts = np.append(0, ends[:-1])
        block = np.full((len(ends), self.row_len), PAD, np.uint32)
        block[np.arange(self.row_len) < (ends - starts)[:, None]] = ids[: ends[-1]]
        with open(self.file, "r+b") as f:
            f.seek(self.rows * self.row_len * 4)  # over what a killed run wrote after its last commit
            f.write(block)
        self.crc = zlib.crc32(block, self.crc)
        self.new_ends += kinds
        self.rows += len(ends)
        self.rest = ids[ends[-1] :].copy()
        known = n_rest + np.cumsum(lengths)  # ids of the stream that were there after each document
        certain = np.searchsorted(known, starts[-1] + self.row_len + 1)
        return int(certain) + 1 if self.full and not last else len(lengths)

    def save(self) -> dict:
        """Flush everything to the disk -> the state that `saved` takes."""
        with open(self.file, "r+b") as f:
            f.truncate(self.rows * self.row_len * 4)
            os.fsync(f.fileno())
        letters = self.new_ends.encode()
        with open(ends_file(self.file), "r+b" if ends_file(self.file).exists() else "wb") as f:
            f.seek(self.rows - len(letters))  # over what a killed run wrote after its last commit
            f.write(letters)
            f.truncate()
            os.fsync(f.fileno())
        self.ends_crc, self.new_ends = zlib.crc32(letters, self.ends_crc), ""
        rest = [] if self.full else self.rest.tolist()
        return {"rows": self.rows, "rest": rest, "crc": self.crc, "ends_crc": self.ends_crc}


def ends_file(rows_file: Path) -> Path:
    """Beside unfinished rows: one letter of KINDS for each, so that the state need not hold them all."""
    return rows_file.with_suffix("").with_suffix(".ends.tmp")


def read_ends(rows_file: Path, saved: dict) -> str:
    """The letters of the rows that a state describes. Older states hold them."""
    if "ends" in saved:
        return saved["ends"]
    file = ends_file(rows_file)
    letters = file.read_bytes()[: saved["rows"]] if file.is_file() else b""
    if len(letters) < saved["rows"] or zlib.crc32(letters) != saved["ends_crc"]:
        raise UserError(f"{file}: not the ends that prepare.state describes; move {file.parent} aside and start again")
    return letters.decode()


def prepare(cfg: Config, commit_sec: float = COMMIT_SEC) -> None:
    """Write the rows of `cfg` into `cfg.data_dir`, or resume a killed run of the same recipe.

    Raises `UserError` where the folder holds data, whole or half-made, of another recipe: nothing is overwritten.
    """
    from lib.hf import leading_bos, load_tokenizer, pinned, tokenizer_hash  # not above: workers need no torch

    name = cfg.tokenizer or cfg.teacher
    if name is None:
        raise UserError("tokenizer=None, teacher=None: expected a tokenizer's folder or hub id in one of them")
    tokenizer, used = load_tokenizer(name), pinned(name)
    if used != name:
        print(f"tokenizer: {used}", file=sys.stderr)
    bos = leading_bos(tokenizer) if cfg.bos == "auto" else None
    table = token_table(tokenizer)
    warn_of_chat(name, tokenizer)
    source, parts = open_sources(cfg)
    recipe = {
        "source": cfg.source,
        "source_revision": source.revision,
        "source_sha256": source.sha256,
        **({"sources": parts} if parts else {}),
        "source_config": cfg.source_config,
        "source_text": cfg.source_text,
        "source_split": cfg.source_split,
        "n_documents": cfg.n_documents,
        "train_rows": cfg.train_rows,
        "val_rows": cfg.val_rows,
        "val_share": cfg.val_share,
        "row_len": cfg.seq_len + 1,
        "tokenizer": used,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "vocab_size": len(table.pieces),
        "eos_id": tokenizer.eos_token_id,
        "bos": None if bos == tokenizer.eos_token_id else bos,  # id before each document; data without the key has none
        "rule_version": RULE_VERSION,
    }
    folder = Path(cfg.data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    state_file = folder / "prepare.state"
    with locked(folder, UserError(f"{folder}: another prepare.py is at work there")):
        state = (
            read_json(state_file, STATE_KEYS, f"move {folder} aside and start again") if state_file.exists() else None
        )
        if state and not state["records"]:
            state = None  # nothing was made yet, of whatever recipe
        if not state and any(path.name in FILES for path in folder.iterdir()):
            _remove_ends(folder, _splits(recipe))  # left by a kill at the very end
            for name in _splits(recipe):
                _same_recipe(folder, _manifest(folder, name), recipe)
            print(f"{folder}: made before by the same recipe and left as it is; --verify checks it")
            return
        if state:
            _same_recipe(folder, state["recipe"], recipe)
            print(f"{folder}: going on after {state['records']:,} documents", file=sys.stderr)
        if not state or not state["whole"]:
            state = _write_rows(cfg, source, tokenizer, table, recipe, state, commit_sec)
        for manifest in _finish(folder, state):
            print(_summary(folder, manifest))
        state_file.unlink()
        _remove_ends(folder, state["streams"])


def _remove_ends(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        ends_file(folder / f"{name}.bin.tmp").unlink(missing_ok=True)


def warn_of_chat(name: str, tokenizer) -> None:
    """Say so where documents would end with the token that ends a turn of a conversation."""
    if re.search(r"im_end|eot|turn|\|end\|", tokenizer.eos_token):
        base = re.sub(r"-it\b", "-pt", re.sub(r"-(Instruct|Chat)\b", "", name, flags=re.I))
        base = f"{name}-Base" if base == name else base
        print(
            f"warning: {name}: documents will end with its eos_token {tokenizer.eos_token}, which ends turns of a chat; for "
            f"plain text the base model fits, by its usual name {base}", file=sys.stderr,
        )  # fmt: skip


def _write_rows(
    cfg: Config, source: Source, tokenizer, table: Table, recipe: dict, state: dict | None, commit_sec: float
) -> dict:
    """Read, tokenize, cut and write until all rows exist or the records end -> the final state."""
    folder, saved = Path(cfg.data_dir), state["streams"] if state else {}
    max_rows = cfg.train_rows and cfg.train_rows + cfg.val_rows
    train = Stream(folder / "train.bin.tmp", cfg.seq_len + 1, max_rows, saved.get("train"))
    val = Stream(folder / "val.bin.tmp", cfg.seq_len + 1, None, saved.get("val")) if cfg.val_share else None
    streams = {"train": train} | ({"val": val} if val else {})
    n_records, n_tokens, started = state["records"] if state else 0, 0, time.monotonic()

    def commit(whole: bool = False) -> dict:
        nonlocal committed
        state = {"recipe": recipe, "records": n_records, "whole": whole}
        state["streams"] = {name: stream.save() for name, stream in streams.items()}
        write_json(folder / "prepare.state", state)
        committed = time.monotonic()
        return state

    def share() -> float:
        return min(1.0, max(source.done(), train.rows / (max_rows or 1e18), n_records / (cfg.n_documents or 1e18)))

    def n_rows() -> int:
        return sum(stream.rows for stream in streams.values())

    committed = 0.0
    commit()
    records = itertools.islice(source.records(n_records), cfg.n_documents and cfg.n_documents - n_records)
    batches = encode_in_order(
        batched(records), tokenizer.backend_tokenizer, recipe["eos_id"], cfg.prepare_workers, recipe["bos"]
    )
    bar = tqdm(total=1.0, initial=share(), mininterval=0.5 if sys.stderr.isatty() else 30,
               bar_format="{percentage:5.1f}% |{bar:20}| {elapsed}<{remaining}{postfix}")  # fmt: skip
    with bar, contextlib.closing(batches):
        for batch, (ids, lengths) in batches:
            held = np.array([val is not None and held_out(document, cfg.val_share) for document in batch])
            of_val = np.repeat(held, lengths)
            n = train.feed(ids[~of_val], lengths[~held], table)
            n = int(np.flatnonzero(~held)[n - 1]) + 1 if train.full else len(batch)
            if val:
                of_val[lengths[:n].sum() :] = False
                val.feed(ids[of_val], lengths[:n][held[:n]], table)
            n_records += n
            n_tokens += int(lengths[:n].sum())
            speed = n_tokens / (time.monotonic() - started)
            bar.set_postfix_str(f"{n_records:,} documents, {n_rows():,} rows, {speed:,.0f} tokens/s", refresh=False)
            bar.update(max(share() - bar.n, 0))
            if train.full:
                break
            if time.monotonic() - committed > commit_sec:
                commit()
        for stream in streams.values():
            if not stream.full:
                stream.feed(np.empty(0, np.uint32), np.empty(0, np.int64), table, last=True)
        bar.set_postfix_str(f"{n_records:,} documents, {n_rows():,} rows", refresh=False)
        bar.update(1.0 - bar.n)
    if n_records == 0:
        raise UserError(f"source={cfg.source}: holds no record")
    return commit(whole=True)


def held_out(document: tuple[str | None, str], share: float) -> bool:
    name, text = document
    digest = hashlib.sha256((text if name is None else name).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _finish(folder: Path, state: dict) -> list[dict]:
    """Give the files their final names and manifests. It can be killed and repeated at any point."""
    recipe = state["recipe"]
    ends = {name: read_ends(folder / f"{name}.bin.tmp", stream) for name, stream in state["streams"].items()}
    asked = f"train_rows={recipe['train_rows']}, val_rows={recipe['val_rows']}, val_share={recipe['val_share']}"
    if recipe["val_rows"]:
        n_rows, row_bytes = len(ends["train"]), recipe["row_len"] * 4
        n_train = max(n_rows - recipe["val_rows"], 0)
        if n_train and recipe["train_rows"] != n_train:
            print(f"{folder}: {asked}: the source ended after {n_rows:,} rows; its last {n_rows - n_train:,} are val")
        ends = {"train": ends["train"][:n_train], "val": ends["train"][n_train:]}
        work = folder / "train.bin.tmp"
        if n_train and work.exists() and work.stat().st_size > n_train * row_bytes:
            with open(work, "rb") as f:
                f.seek(n_train * row_bytes)
                write_whole(folder / "val.bin.tmp", f.read())
            os.truncate(work, n_train * row_bytes)
    empty = [name for name in ends if not ends[name]]
    if empty:
        for file in (folder / "prepare.state", *folder.glob("*.tmp")):
            file.unlink()  # of no use to any recipe
        raise UserError(f"{asked}: {state['records']:,} records leave no row for {empty[0]}, and nothing was kept; change one of "
                        "these (of few documents --val_share=0 --val_rows=N holds out the last rows)")  # fmt: skip
    made, first = [], 0  # first record of the split
    for name, kinds in ends.items():
        work, final = folder / f"{name}.bin.tmp", folder / f"{name}.bin"
        file = work if work.exists() else final
        facts = measure(file, recipe)
        last = first + facts["documents"] + (kinds[-1] != "e")
        manifest = {"split": name, **recipe, **facts}
        manifest["ends"] = {kind: kinds.count(letter) / len(kinds) for letter, kind in KINDS.items()}  # share of rows
        manifest["records"] = [0, state["records"]] if recipe["val_share"] else [first, last]
        first += facts["documents"]
        os.replace(file, final)
        write_whole(folder / f"{name}.json", _lines_of_json(manifest))
        made.append(manifest)
    return made


def measure(file: Path, recipe: dict) -> dict:
    """Counts, lengths and hashes of a rows file, in one pass. Raises `UserError` for an impossible row."""
    row_len, size, counted = recipe["row_len"], file.stat().st_size, 1 << 12
    if size == 0 or size % (row_len * 4):
        raise UserError(f"{file}: {size:,} bytes, expected a multiple of a row of {row_len} ids; prepare it again")
    digest, prefix_sha256, n_eos, lengths = hashlib.sha256(), None, 0, np.zeros(row_len + 1, np.int64)
    n_rows = size // (row_len * 4)
    for at in range(0, n_rows, counted):  # read, not mapped: the pages of a map count as this process's memory
        block = np.fromfile(file, np.uint32, counted * row_len, offset=at * row_len * 4).reshape(-1, row_len)
        used = block != PAD
        length = used.sum(1)
        if not length.all() or (used != (np.arange(row_len) < length[:, None])).any():
            raise UserError(f"{file}: rows {at} on: one is empty, or has padding inside; prepare it again")
        if block[used].max() >= recipe["vocab_size"]:
            raise UserError(f"{file}: rows {at} on: id {block[used].max()} of {recipe['vocab_size']}; prepare it again")
        n_eos += int((block == recipe["eos_id"]).sum())
        lengths += np.bincount(length, minlength=row_len + 1)
        if at < PREFIX_ROWS <= at + len(block):
            prefix = digest.copy()
            prefix.update(block[: PREFIX_ROWS - at])
            prefix_sha256 = prefix.hexdigest()
        digest.update(block)
    n_tokens = int(lengths @ np.arange(row_len + 1))
    return {
        "rows": n_rows,
        "tokens": n_tokens,
        "valid_targets": n_tokens - n_rows,
        "padding_share": 1 - n_tokens / (n_rows * row_len),
        "documents": n_eos,  # those that end in these rows
        "length_histogram": lengths.tolist(),  # [row_len + 1] rows of each length
        "sha256": digest.hexdigest(),
        "sha256_67200_steps": prefix_sha256,  # of the first PREFIX_ROWS rows; None where there are fewer
        "quick_sha256": quick_hash(file),
    }


def verify(folder: Path) -> None:
    """Hash and count everything again. `UserError` names the first difference from the manifest."""
    if (folder / "prepare.state").exists():
        raise UserError(f"{folder}: not finished; the command that began it goes on")
    for name in _splits(_manifest(folder, "train")):
        manifest = _manifest(folder, name)
        for key, value in measure(folder / f"{name}.bin", manifest).items():
            if manifest.get(key) != value:
                raise UserError(
                    f"{folder / name}.bin: {key} is {value}, the manifest says {manifest.get(key)}; prepare it again"
                )
        print(f"{_summary(folder, manifest)}: as the manifest says, sha256 {manifest['sha256']}")


def show(folder: Path, first: int, n_rows: int = 5) -> None:
    """Print rows as text, each with its length and the kind of its end. `folder` may be one of its .bin files."""
    from lib.hf import load_tokenizer

    folder, name = (folder.parent, folder.stem) if folder.suffix == ".bin" else (folder, "train")
    manifest = _manifest(folder, name)
    rows = np.memmap(folder / f"{name}.bin", np.uint32, "r").reshape(-1, manifest["row_len"])
    if first >= len(rows):
        raise UserError(f"--show {first}: expected a row from 0 to {len(rows) - 1}")
    tokenizer = load_tokenizer(manifest["tokenizer"])
    table = token_table(tokenizer)
    for i in range(first, min(first + n_rows, len(rows))):
        ids = rows[i][rows[i] != PAD]
        if i + 1 < len(rows):  # the first id of the next row decides on a sentence
            end = KINDS[cut(np.append(ids, rows[i + 1, 0]), table, len(ids), last=False)[1][0]]
        else:
            end = "eos" if ids[-1] == manifest["eos_id"] else "end of the file"
        end = "no boundary" if end == "none" else end
        print(f"⟦row {i}: {len(ids)} ids⟧{tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)}⟦{end}⟧\n")


def _splits(recipe: dict) -> tuple[str, ...]:
    return ("train", "val") if recipe["val_rows"] or recipe["val_share"] else ("train",)


def _manifest(folder: Path, name: str) -> dict:
    for file in (folder / f"{name}.json", folder / f"{name}.bin"):
        if not file.is_file():
            raise UserError(f"{file}: not there; expected a folder that prepare.py has written to its end")
    return read_json(folder / f"{name}.json", MANIFEST_KEYS, f"move {folder} aside and prepare it again")


def _same_recipe(folder: Path, old: dict, new: dict) -> None:
    old = {"source_text": "text", "source_split": "train", **old}  # older data lack the keys
    compared = [
        key for key in new if key not in ("source", "sources", "tokenizer")
    ]  # a place may change, its hash may not
    differ = [key for key in compared if old.get(key) != new[key]]
    for place in [key.removesuffix("_sha256") for key in differ if key.endswith("_sha256")]:
        differ += [place] * (old.get(place) != new[place])
    if differ:
        told = "; ".join(f"{key} was {shortened(old.get(key))}, now {shortened(new[key])}" for key in differ)
        raise UserError(f"{folder}: holds data of another recipe: {told}. Nothing was touched: set another data_dir, or "
                           "move that folder aside")  # fmt: skip


def shortened(value: object) -> str:
    """A value in a message: hashes by their beginning, long paths by their end too."""
    text = repr(value)
    return text if len(text) < 64 else f"{text[:12]}…{'' if re.fullmatch('.[0-9a-f]{64}.', text) else text[-48:]}"


def _summary(folder: Path, manifest: dict) -> str:
    return (f"{folder / manifest['split']}.bin: {manifest['rows']:,} rows, {manifest['tokens']:,} tokens, "
            f"{manifest['documents']:,} documents, padding {manifest['padding_share']:.1%}")  # fmt: skip


def _lines_of_json(record: dict) -> bytes:
    """JSON with one line per key, since people read manifests too."""
    return ("{\n" + ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in record.items()) + "\n}\n").encode()


def main() -> int:
    argv = sys.argv[1:]
    if argv[:1] == ["--verify"] and len(argv) == 2:
        verify(Path(argv[1]))
    elif argv[:1] == ["--show"] and len(argv) == 3 and argv[1].isdigit():
        show(Path(argv[2]), int(argv[1]))
    elif argv[:1] in (["--verify"], ["--show"]):
        raise UserError(f"{' '.join(argv)}: expected --verify DIR, or --show N DIR with the number of a row")
    else:
        cfg = load(argv)
        try:
            prepare(cfg)
        except KeyboardInterrupt:
            print(f"\n{cfg.data_dir}: stopped; the same command goes on", file=sys.stderr)
            return 130
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(f"{cfg.data_dir}: the disk is full; make room, and the same command goes on") from error
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
