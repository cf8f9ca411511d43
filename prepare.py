"""Text -> rows of token ids in a memory-mapped file, cut where a reader would pause (paper, appendix B).

    python prepare.py config/alra_200m.py [--key=value ...]
    python prepare.py --verify data/pile          hash and count everything again
    python prepare.py --show 1000 data/pile       five rows from row 1000 on, as text

Every document's text is tokenized with no special tokens added, and one EOS follows it. Text is only text: a
document that spells "<|endoftext|>" gets the ids of those characters, so EOS ids and documents match one to one.
The ids of all documents form one stream. It is cut into rows of at most `row_len` = seq_len + 1 ids; joined, the
rows give the stream back.

**The boundary rule** (RULE_VERSION 1). The next `row_len` ids of the stream are cut after the latest id that ends at

  1. an EOS; or
  2. a line: the token's text, without trailing spaces and tabs, ends in a line feed (so CR LF counts, a lone CR does
     not, and the two are never parted); or
  3. a sentence: the text up to here ends in STOPS and then any number of CLOSERS, and the next token of the stream (the
     one after the window, if need be) starts with whitespace. After the full stops of WIDE no whitespace is needed, as
     those scripts write none: the next token must then start with a whole character that is not in STOPS or CLOSERS.
     One single "." does not end a sentence after a *word* that is one letter or digit ("J. Smith"), one to three digits
     ("12. The", a label or the front of a number), letters with full stops between them ("U.S.", "e.g."), or in
     ABBREVIATIONS. The word is what stands before the full stop back to the first character that is neither a letter,
     a digit nor a full stop, or to the start of the row. "..." and "?!" end sentences.

The three kinds have equal rank: the latest wins. Where there is none, the row keeps all `row_len` ids. A boundary after
the first id of a row is passed over, since a row of one id has no target. What is left when the source ends is the last
row (it may be a lone EOS). A cut depends on `row_len` + 1 ids of the stream and on nothing else: neither on
batches, nor on workers, nor on where a run was killed.

**Files.** `<data_dir>/train.bin`, `val.bin`: uint32, row-major [rows, row_len], PAD in the unused tail of a row; beside
them `train.json`, `val.json`: where the rows come from, counts and hashes. They get these names when they are
whole. Before, `*.bin.tmp` and `prepare.state` hold the work; the same command goes on from there.
"""

import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import os
import re
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tqdm import tqdm

from configure import Config, guard, load

RULE_VERSION = 1
PAD = 0xFFFFFFFF  # in the unused tail of a row; no token id
PREFIX_ROWS = 67_200 * 16  # rows of the paper's 550M-token setting, which has a hash of its own
COMMIT_SEC = 5.0  # work that a kill can cost
BATCH_CHARS, BATCH_DOCUMENTS = 1 << 21, 2048  # of one call of the tokenizer; they bound the memory
BLOCK = 1 << 20  # bytes read at a time
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")

STOPS = ".!?…‼⁇⁈⁉؟۔।。！？｡"
WIDE = "。！？｡"
CLOSERS = "\"'”’»›)]}」』】》〉〕）］｝"
ABBREVIATIONS = """
mr mrs ms mx dr prof rev fr hon gen col capt cmdr lt maj sgt gov sen rep pres st sr jr esq messrs mme mlle
vs viz etc al ca cf approx resp incl excl ibid ave blvd rd mt ft no nos vol vols ch chap sec fig figs eq eqs pp ed eds
jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat
inc ltd co corp dept univ assn bros ph.d
"""

EOS, LINE, STOP, OPEN, SPACE, FRESH, GAP = 1, 2, 4, 8, 16, 32, 64  # bits of a token's class, see `token_table`
KINDS = {"e": "eos", "l": "line", "s": "sentence", "-": "none"}  # what a row ends at


class PrepareError(ValueError):
    """Data that cannot be made or trusted: what, got, expected, what to do."""


# --- sources -----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    sha256: str  # of what the records are made from
    records: Callable[[int], Iterator[tuple[str | None, str]]]  # how many to skip -> (name, text), in order
    done: Callable[[], float]  # share that has been read, for the bar; 0 where unknown
    revision: str | None = None  # hub only: the commit


def open_source(name: str, revision: str | None) -> Source:
    """ "python", a local file, folder or glob, or a hub dataset. Raises `PrepareError` where there is nothing to read."""
    near_path = name.startswith((".", "/", "~")) or name.endswith(SUFFIXES) or "*" in name or name.count("/") > 1
    local = name == "python" or Path(name).expanduser().exists() or near_path or Path(name).parts[:1] == ("data",)
    if local and revision is not None:
        raise PrepareError(f"source_revision={revision}: only a hub dataset has revisions, and source={name} is local")
    if name == "python":
        return _memory_source(python_documents())
    return _file_source(name) if local else _hub_source(name, revision)


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


def _file_source(name: str) -> Source:
    """The records of local files, in the order of their names. A folder with `train/` in it gives that part only."""
    root = Path(name).expanduser()
    if root.is_dir():
        root = root / "train" if (root / "train").is_dir() else root
        files = sorted(p for p in root.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
    else:
        files = sorted(Path(p) for p in glob.glob(str(root), recursive=True))
        root = root.parent
    if not files:
        raise PrepareError(f"source={name}: no such file, and no {', '.join(SUFFIXES)} file in it")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise PrepareError(f"{file}: expected a file that ends in one of {', '.join(SUFFIXES)}")
    names = [os.path.relpath(file, root) if len(files) > 1 else file.name for file in files]
    total, at = sum(file.stat().st_size for file in files), {"before": 0, "tell": lambda: 0}

    def records(skip: int) -> Iterator[tuple[str | None, str]]:
        raw = itertools.chain.from_iterable(_raw_records(f, n, at) for f, n in zip(files, names, strict=True))
        return (parse(value) for parse, value in itertools.islice(raw, skip, None))

    digest = hashlib.sha256()
    for file, inside in zip(files, names, strict=True):
        digest.update(f"{inside}\0{_content_hash(file)}".encode())
    return Source(digest.hexdigest(), records, lambda: (at["before"] + at["tell"]()) / max(total, 1))


def _content_hash(file: Path) -> str:
    """sha256 of the size and of 64 blocks spread over the file: of all of it up to 64 MiB."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as f:
        for i in range(64):
            f.seek(max(i * BLOCK, i * (size - BLOCK) // 63))
            digest.update(f.read(BLOCK))
    return digest.hexdigest()


def _raw_records(file: Path, name: str, at: dict) -> Iterator[tuple[Callable, object]]:
    """What one file holds, as (parser, value): records that are skipped are never parsed."""
    import pyarrow

    with pyarrow.OSFile(str(file)) as raw:
        at["tell"] = lambda: 0 if raw.closed else raw.tell()
        if name.endswith(".txt"):
            yield lambda f: (name, f.read_text("utf-8")), file
        elif name.endswith(".parquet"):
            import pyarrow.parquet

            table = pyarrow.parquet.ParquetFile(raw)
            if "text" not in table.schema_arrow.names:
                raise PrepareError(f"{file}: expected a column 'text', got {', '.join(table.schema_arrow.names)}")
            for batch in table.iter_batches(batch_size=1024, columns=["text"]):
                for value in batch.column(0).to_pylist():
                    yield lambda text: (None, _text({"text": text}, str(file))), value
        else:
            kind = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix)
            stream = pyarrow.CompressedInputStream(raw, kind) if kind else raw
            lines = (line for line in enumerate(_lines(stream, file), 1) if line[1].strip())
            for line in lines:
                yield lambda line: (None, _json_text(line[1], f"{file}, line {line[0]}")), line
        size = raw.size()
    at.update(before=at["before"] + size, tell=lambda: 0)


def _lines(stream, file: Path) -> Iterator[bytes]:
    rest = b""
    try:
        while block := stream.read(BLOCK):
            *lines, rest = (rest + block).split(b"\n") if b"\n" in block else [rest + block]
            yield from lines
    except OSError as error:
        raise PrepareError(f"{file}: cannot be read to its end ({error}); fetch it again") from error
    yield rest


def _json_text(line: bytes, where: str) -> str:
    try:
        return _text(json.loads(line), where)
    except ValueError as error:
        if isinstance(error, PrepareError):
            raise
        raise PrepareError(f"{where}: not a JSON record ({error})") from error


def _text(record: dict, where: str) -> str:
    """The text field; a lone surrogate, which is no character and has no UTF-8, becomes U+FFFD."""
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        got = ", ".join(f"{k}: {type(v).__name__}" for k, v in record.items()) if isinstance(record, dict) else record
        raise PrepareError(f"{where}: expected a field 'text' that holds text, got {got}")
    text = record["text"]
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def _hub_source(name: str, revision: str | None) -> Source:
    """A hub dataset at one commit, so that a preparation which is killed goes on in the same bytes."""
    import huggingface_hub

    try:
        commit = huggingface_hub.HfApi().dataset_info(name, revision=revision).sha
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise PrepareError(
            f"source={name}: no such local file, and the hub did not give a dataset of that name ({reason}); "
            'expected "python", a local path or a hub id'
        ) from error
    digest = hashlib.sha256(f"{name}\0{commit}".encode()).hexdigest()
    return Source(digest, lambda skip: dataset_records(name, commit, skip), lambda: 0.0, commit)


def dataset_records(path: str, revision: str | None, skip: int) -> Iterator[tuple[None, str]]:
    """The train split of a dataset repository (hub id, or a folder with its layout), streamed in its own order."""
    import datasets

    stream = datasets.load_dataset(path, split="train", streaming=True, revision=revision)
    for i, record in enumerate(stream.skip(skip) if skip else stream, skip):
        yield None, _text(record, f"{path}, record {i}")


# --- tokens ------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """What `cut` needs to know of every token id, found once."""

    flags: (
        np.ndarray
    )  # [V] uint8: EOS; ends a LINE; may end a sentence (STOP), even with no space after (OPEN); starts with
    #   whitespace (SPACE); starts with a whole character that may follow a wide stop (FRESH); holds whitespace (GAP)
    pieces: list[bytes]  # [V] the bytes that each token stands for; empty for special tokens


def token_table(tokenizer) -> Table:
    """The class of every token of a fast tokenizer (`transformers`), from the bytes that it stands for."""
    pieces = token_bytes(tokenizer.backend_tokenizer)
    flags = np.zeros(len(pieces), np.uint8)
    for i, piece in enumerate(pieces):
        text = piece.decode("utf-8", "replace")
        last, first = text.rstrip(CLOSERS).rstrip("\ufffd"), text[:1]
        # Only closers, or bytes that end a character begun elsewhere: the tokens before must tell.
        unknown = bool(piece) and not last
        flags[i] |= LINE * piece.rstrip(b" \t").endswith(b"\n")
        flags[i] |= STOP * (unknown or last[-1:] in tuple(STOPS)) | OPEN * (unknown or last[-1:] in tuple(WIDE))
        flags[i] |= SPACE * first.isspace() | FRESH * (first not in ("", "\ufffd", *STOPS, *CLOSERS))
        flags[i] |= GAP * bool(set(piece) & set(b" \t\n\r"))
    flags[tokenizer.eos_token_id] = EOS | GAP
    return Table(flags, pieces)


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every id. Reads byte-level vocabularies and those that write a space as U+2581."""
    spec = json.loads(backend.to_str())
    decoder = spec["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    if "ByteLevel" in kinds:
        shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
        hidden = [b for b in range(256) if b not in shown]
        byte_of = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}

        def as_bytes(token: str) -> bytes:
            return bytes(byte_of[c] for c in token)

    elif kinds & {"Metaspace", "ByteFallback"}:

        def as_bytes(token: str) -> bytes:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    else:
        raise PrepareError(f"tokenizer: decoder {sorted(kinds)}: expected a byte-level one, or one with byte fallback")
    added = {token["id"]: b"" if token["special"] else token["content"].encode() for token in spec["added_tokens"]}
    vocab = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        pieces[i] = added[i] if i in added else as_bytes(token)
    return pieces


def cut(ids: np.ndarray, table: Table, row_len: int, last: bool) -> tuple[np.ndarray, str]:
    """Rows of a piece of the stream, by the boundary rule.

    ids   [n] the stream from the start of a row on; `last`: it ends here
    ->    [rows] where each row ends (exclusive; the next starts there), and one letter of KINDS for each. Without `last`,
          fewer than row_len + 1 ids stay over.
    """
    flags = table.flags[ids]
    hard = np.flatnonzero(flags & (EOS | LINE))
    here, after = flags[:-1], flags[1:]
    soft = np.flatnonzero(((here & STOP > 0) & (after & SPACE > 0)) | ((here & OPEN > 0) & (after & FRESH > 0)))
    start, ends, kinds = 0, [], []
    while len(ids) - start > row_len:
        stop = start + row_len
        i = np.searchsorted(hard, stop) - 1
        end = hard[i] if i >= 0 and hard[i] > start else -1
        kind = "-" if end < 0 else "e" if flags[end] & EOS else "l"
        for j in range(np.searchsorted(soft, stop) - 1, -1, -1):
            if soft[j] <= max(end, start):
                break
            if _ends_sentence(ids, flags, table.pieces, start, int(soft[j])):
                end, kind = soft[j], "s"
                break
        start = stop if end < 0 else int(end) + 1
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
    if not stops or not (flags[i + 1] & SPACE or (set(stops) & set(WIDE) and flags[i + 1] & FRESH)):
        return False
    if stops != ".":
        return True
    n = len(before)
    while n and (before[n - 1].isalnum() or before[n - 1] == "."):
        n -= 1
    word = before[n:].lower()
    label = len(word) == 1 or (len(word) <= 3 and word.isdigit())
    initials = all(len(part) == 1 and part.isalpha() for part in word.split("."))
    return not (label or initials or word in ABBREVIATIONS.split())


_TOKENIZER: tokenizers.Tokenizer | None = None  # of this process: what a pool's initializer leaves for its calls


def _start_worker(tokenizer_json: str, process: bool) -> None:
    global _TOKENIZER
    if process:
        import signal
        import threading

        def follow() -> None:
            connection.wait([parent_process().sentinel])
            os._exit(1)

        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: processes scale where threads do not
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=follow, daemon=True).start()  # a killed parent leaves nobody behind
    _TOKENIZER = tokenizers.Tokenizer.from_str(tokenizer_json)
    _TOKENIZER.encode_special_tokens = True  # text is only text
    _TOKENIZER.no_truncation()
    _TOKENIZER.no_padding()


def _encode(texts: list[str]) -> list[np.ndarray]:
    from array import array

    encodings = _TOKENIZER.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(array("I", encoding.ids), np.uint32) for encoding in encodings]


def _pool(tokenizer_json: str, workers: int) -> Executor:
    """One worker: this process, and the tokenizer's own threads. More: that many processes of one thread each."""
    if workers == 1:
        return ThreadPoolExecutor(1, initializer=_start_worker, initargs=(tokenizer_json, False))
    return ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer_json, True))


def _encode_in_order(pool: Executor, workers: int, batches: Iterator[list]) -> Iterator[tuple[list, list[np.ndarray]]]:
    """Batches of (name, text) -> (batch, ids of each document), in order; at most workers + 1 are under way."""
    waiting: deque = deque()
    for batch in batches:
        waiting.append((batch, pool.submit(_encode, [text for _, text in batch])))
        if len(waiting) > workers + 1:
            batch, future = waiting.popleft()
            yield batch, future.result()
    for batch, future in waiting:
        yield batch, future.result()


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


# --- the run -----------------------------------------------------------------------------------------------------


class Stream:
    """One stream of ids on its way into a file: what is cut, written and still in the buffer."""

    def __init__(self, folder: Path, name: str, max_rows: int | None, saved: dict | None):
        saved = saved or {"ends": "", "rest": []}
        self.file = folder / f"{name}.bin.tmp"
        self.max_rows = max_rows
        self.ends: list[str] = [saved["ends"]]  # one letter of KINDS for each row written
        self.rows = len(saved["ends"])
        self.rest = np.array(saved["rest"], np.uint32)  # the start of the next row

    def open(self, row_len: int) -> None:
        """Drop what was written after the last commit, and go on from there."""
        self.out = open(self.file, "r+b" if self.rows else "wb")  # noqa: SIM115
        size = self.rows * row_len * 4
        if self.out.seek(0, os.SEEK_END) < size:
            raise PrepareError(f"{self.file}: shorter than prepare.state says; delete the folder and start again")
        self.out.truncate(size)
        self.out.seek(size)

    def feed(self, parts: list[np.ndarray], table: Table, row_len: int, last: bool = False) -> int:
        """Cut and write what is whole -> how many of `parts` it took to fill max_rows; all of them where it is not full."""
        ids = np.concatenate([self.rest, *parts])
        ends, kinds = cut(ids, table, row_len, last)
        full = self.max_rows is not None and self.rows + len(ends) >= self.max_rows
        if full:
            ends = ends[: self.max_rows - self.rows]
            kinds = kinds[: len(ends)]
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
        if len(ends):
            block = np.full((len(ends), row_len), PAD, np.uint32)
            block[np.arange(row_len) < (ends - starts)[:, None]] = ids[: ends[-1]]  # [rows, row_len]
            self.out.write(block)
            self.ends.append(kinds)
            self.rows += len(ends)
        n_used = len(parts)
        if full and not last:  # the last row could be cut once the id after its window was there
            seen = len(self.rest) + np.cumsum([len(part) for part in parts])
            n_used = int(np.searchsorted(seen, starts[-1] + row_len + 1)) + 1
        self.rest = ids[ends[-1] if len(ends) else 0 :].copy()
        return n_used

    @property
    def full(self) -> bool:
        return self.rows == self.max_rows

    def save(self) -> dict:
        self.out.flush()
        os.fsync(self.out.fileno())
        self.ends = ["".join(self.ends)]
        return {"ends": self.ends[0], "rest": self.rest.tolist()}


def prepare(cfg: Config, commit_sec: float = COMMIT_SEC) -> None:
    """Write the rows of `cfg` into `cfg.data_dir`, or go on where a killed run of the same recipe stopped.

    Raises `PrepareError` where the folder holds data, or half-made data, of another recipe: nothing is overwritten.
    """
    from model import load_tokenizer, tokenizer_hash

    name = cfg.tokenizer or cfg.teacher
    if name is None:
        raise PrepareError("tokenizer=None, teacher=None: expected a tokenizer's folder or hub id in one of them")
    tokenizer = load_tokenizer(name)
    folder = Path(cfg.data_dir)
    source = open_source(cfg.source, cfg.source_revision)
    recipe = {
        "source": cfg.source,
        "source_revision": source.revision,
        "source_sha256": source.sha256,
        "n_documents": cfg.n_documents,
        "train_rows": cfg.train_rows,
        "val_rows": cfg.val_rows,
        "val_share": cfg.val_share,
        "row_len": cfg.row_len,
        "tokenizer": name,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "vocab_size": len(tokenizer),
        "eos_id": tokenizer.eos_token_id,
        "rule_version": RULE_VERSION,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        state_file = folder / "prepare.state"
        state = json.loads(state_file.read_text()) if state_file.exists() else None
        made = [json.loads((folder / f"{s}.json").read_text()) for s in SPLITS if (folder / f"{s}.json").exists()]
        for old in [state["recipe"]] if state else made:
            _same_recipe(folder, old, recipe)
        if made and not state:
            print(f"{folder}: made before by the same recipe, left as it is: {_summary(made)}")
            return
        if not state and any((folder / f"{s}.bin").exists() for s in SPLITS):
            raise PrepareError(
                f"{folder}: holds a .bin file without its manifest; move it away or set another data_dir"
            )
        if not state or not state["whole"]:
            state = _write_rows(cfg, source, tokenizer, recipe, folder, state, commit_sec)
        made = _finish(folder, state, cfg)
        state_file.unlink()
    print(f"{folder}: {_summary(made)}")


SPLITS = ("train", "val")


def _write_rows(cfg, source, tokenizer, recipe, folder: Path, state: dict | None, commit_sec: float) -> dict:
    """Read, tokenize, cut and write until the rows or the records are all there -> the state, whole."""
    state = state or {"recipe": recipe, "records": 0, "whole": False, "streams": {}}
    by_hash = cfg.val_share > 0
    max_rows = cfg.train_rows if by_hash or cfg.train_rows is None else cfg.train_rows + cfg.val_rows
    train = Stream(folder, "train", max_rows, state["streams"].get("train"))
    streams = {"train": train} | ({"val": Stream(folder, "val", None, state["streams"].get("val"))} if by_hash else {})
    for stream in streams.values():
        stream.open(cfg.row_len)
    table, n_records, n_tokens = token_table(tokenizer), state["records"], 0
    records = itertools.islice(source.records(n_records), cfg.n_documents and cfg.n_documents - n_records)

    def commit(whole: bool) -> dict:
        saved = {name: stream.save() for name, stream in streams.items()}
        state = {"recipe": recipe, "records": n_records, "whole": whole, "streams": saved}
        _write_whole(folder / "prepare.state", json.dumps(state).encode())
        return state

    def share() -> float:
        return max(source.done(), train.rows / max_rows if max_rows else 0, n_records / (cfg.n_documents or 1e18))

    started = committed = time.monotonic()
    commit(whole=False)
    bar = tqdm(total=1.0, initial=min(share(), 1.0), mininterval=0.5 if sys.stderr.isatty() else 30,
               bar_format="{percentage:5.1f}% |{bar:20}| {elapsed}<{remaining}{postfix}")  # fmt: skip
    with bar, contextlib.ExitStack() as stack:
        pool = stack.enter_context(_pool(tokenizer.backend_tokenizer.to_str(), cfg.prepare_workers))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for batch, ids in _encode_in_order(pool, cfg.prepare_workers, batched(records)):
            parts = [np.append(part, np.uint32(tokenizer.eos_token_id)) for part in ids]
            is_val = np.array([by_hash and _held_out(document, cfg.val_share) for document in batch])
            to_train = np.flatnonzero(~is_val)
            n_used = train.feed([parts[i] for i in to_train], table, cfg.row_len)
            n_batch = to_train[n_used - 1] + 1 if train.full else len(batch)
            if by_hash:
                streams["val"].feed([parts[i] for i in np.flatnonzero(is_val[:n_batch])], table, cfg.row_len)
            n_records += int(n_batch)
            n_tokens += sum(len(part) for part in parts[:n_batch])
            now = time.monotonic()
            bar.set_postfix_str(f"{n_records:,} documents, {sum(s.rows for s in streams.values()):,} rows, "
                                f"{n_tokens / (now - started) / 1e3:,.0f}k tokens/s", refresh=False)  # fmt: skip
            bar.update(max(min(share(), 1.0) - bar.n, 0))
            if train.full:
                break
            if now - committed > commit_sec:
                commit(whole=False)
                committed = now
        else:
            for stream in streams.values():
                stream.feed([], table, cfg.row_len, last=True)
        if by_hash and train.full:
            streams["val"].feed([], table, cfg.row_len, last=True)
    if n_records == 0:
        raise PrepareError(f"source={cfg.source}: holds no record")
    return commit(whole=True)


def _held_out(document: tuple[str | None, str], share: float) -> bool:
    """Whether a document goes to val: by the hash of its name, or of its text where it has none."""
    digest = hashlib.sha256((document[0] or document[1]).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _finish(folder: Path, state: dict, cfg: Config) -> list[dict]:
    """Whole rows -> the files under their names, and their manifests. May be killed and repeated at any point."""
    recipe, row_bytes = state["recipe"], state["recipe"]["row_len"] * 4
    ends = {name: saved["ends"] for name, saved in state["streams"].items()}
    if cfg.val_rows:
        n = len(ends["train"])
        n_val = min(cfg.val_rows, n)
        if n == n_val:
            raise PrepareError(
                f"source={cfg.source}: gave {n:,} rows, which leaves none for training beside val_rows={cfg.val_rows:,}; "
                f"give more text, lower val_rows, or set val_rows=0; then delete {folder} and start again"
            )
        if cfg.train_rows and n < cfg.train_rows + cfg.val_rows:
            print(
                f"the source ended after {n:,} rows, {cfg.train_rows + cfg.val_rows:,} were asked: the last {n_val:,} are val"
            )
        work = folder / "train.bin.tmp"
        if work.exists() and work.stat().st_size == n * row_bytes:
            with open(work, "rb") as f:
                f.seek((n - n_val) * row_bytes)
                _write_whole(folder / "val.bin.tmp", f.read())
            os.truncate(work, (n - n_val) * row_bytes)
        ends = {"train": ends["train"][: n - n_val], "val": ends["train"][n - n_val :]}
    made, first = [], 0
    for name in ends:
        work, final = folder / f"{name}.bin.tmp", folder / f"{name}.bin"
        if not ends[name]:
            raise PrepareError(f"val_share={cfg.val_share}: left no document in {name} of {state['records']:,}; change it, then "
                               f"delete {folder} and start again")  # fmt: skip
        file = work if work.exists() else final
        facts = measure(file, recipe)
        share = {kind: ends[name].count(letter) / len(ends[name]) for letter, kind in KINDS.items()}
        n_begun = facts["documents"] + (ends[name][-1] != "e")
        span = [0, state["records"]] if cfg.val_share else [first, first + n_begun]
        first += facts["documents"]
        made.append({"split": name, **recipe, **facts, "ends": share, "records": span})
        os.replace(file, final)
        _write_whole(folder / f"{name}.json", _lines_of_json(made[-1]))
    return made


def measure(file: Path, manifest: dict) -> dict:
    """What one pass over a rows file shows: counts, lengths and hashes. Raises `PrepareError` for an impossible row."""
    row_len, vocab_size = manifest["row_len"], manifest["vocab_size"]
    size = file.stat().st_size
    n_rows = size // (row_len * 4)
    if n_rows * row_len * 4 != size:
        raise PrepareError(f"{file}: {size:,} bytes is no multiple of a row of {row_len} ids")
    digest, prefix_sha256, n_eos, lengths = hashlib.sha256(), None, 0, np.zeros(row_len + 1, np.int64)
    rows = np.memmap(file, np.uint32, "r", shape=(n_rows, row_len))
    step = 1 << 12
    for at in range(0, n_rows, step):
        block = np.array(rows[at : at + step])
        used = block != PAD
        length = used.sum(1)
        if (length == 0).any() or (used != (np.arange(row_len) < length[:, None])).any():
            raise PrepareError(f"{file}: an empty row, or padding inside one, at rows {at} to {at + step}")
        if block[used].max() >= vocab_size:
            raise PrepareError(
                f"{file}: an id of {block[used].max()} at rows {at} to {at + step}, vocabulary {vocab_size}"
            )
        n_eos += int((block == manifest["eos_id"]).sum())
        lengths += np.bincount(length, minlength=row_len + 1)
        if at < PREFIX_ROWS <= at + len(block):
            prefix = digest.copy()
            prefix.update(block[: PREFIX_ROWS - at])
            prefix_sha256 = prefix.hexdigest()
        digest.update(block)
    n_tokens = int((lengths * np.arange(row_len + 1)).sum())
    return {
        "rows": n_rows,
        "tokens": n_tokens,
        "valid_targets": n_tokens - n_rows,
        "padding_share": 1 - n_tokens / (n_rows * row_len),
        "documents": n_eos,
        "length_histogram": lengths.tolist(),  # [row_len + 1] rows of each length
        "sha256": digest.hexdigest(),
        "sha256_67200_steps": prefix_sha256,  # of the first PREFIX_ROWS rows, where there are as many
    }


def verify(folder: Path) -> None:
    """Hash and count everything again; `PrepareError` names the first thing that differs from its manifest."""
    manifests = [folder / f"{name}.json" for name in SPLITS if (folder / f"{name}.json").is_file()]
    if not manifests:
        raise PrepareError(f"{folder}: no train.json there; expected a folder that prepare.py has written")
    for path in manifests:
        manifest = json.loads(path.read_text())
        for key, value in measure(path.with_suffix(".bin"), manifest).items():
            if manifest[key] != value:
                raise PrepareError(f"{path}: {key} is {manifest[key]}, the file has {value}; prepare it again")
        print(f"{path.with_suffix('.bin')}: as its manifest says, {_summary([manifest])}, sha256 {manifest['sha256']}")


def show(folder: Path, first: int, n_rows: int = 5) -> None:
    """Print rows as text, each with its length and what it ends at."""
    from model import load_tokenizer

    name = "train"
    if folder.suffix == ".bin":
        folder, name = folder.parent, folder.stem
    manifest = json.loads((folder / f"{name}.json").read_text())
    row_len = manifest["row_len"]
    rows = np.memmap(folder / f"{name}.bin", np.uint32, "r", shape=(manifest["rows"], row_len))
    if not 0 <= first < len(rows):
        raise PrepareError(f"--show {first}: expected a row from 0 to {len(rows) - 1}")
    tokenizer = load_tokenizer(manifest["tokenizer"])
    table = token_table(tokenizer)
    for i in range(first, min(first + n_rows, len(rows))):
        ids = rows[i][rows[i] != PAD]
        after = rows[i + 1][rows[i + 1] != PAD] if i + 1 < len(rows) else ids[:0]
        _, kinds = cut(np.concatenate([ids, after, ids])[: row_len + 1], table, row_len, last=False)
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        print(f"=== row {i}: {len(ids)} ids\n{text}⟦{KINDS[kinds[0]]}⟧")


def _same_recipe(folder: Path, old: dict, new: dict) -> None:
    compared = [key for key in new if key not in ("source", "tokenizer")]  # names of what has a hash
    differ = [f"{key} was {old.get(key)!r}, now {new[key]!r}" for key in compared if old.get(key) != new[key]]
    if differ:
        raise PrepareError(f"{folder}: holds data of another recipe: {'; '.join(differ)}. Nothing was touched: set another "
                           "data_dir, or delete that folder first")  # fmt: skip


def _summary(manifests: list[dict]) -> str:
    parts = [f"{m['split']} {m['rows']:,} rows, {m['tokens']:,} tokens, {m['documents']:,} documents, padding "
             f"{m['padding_share']:.1%}" for m in manifests]  # fmt: skip
    return "; ".join(parts)


def _lines_of_json(record: dict) -> bytes:
    """One line for each key: a manifest is read by people too."""
    return ("{\n" + ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in record.items()) + "\n}\n").encode()


def _write_whole(path: Path, content: bytes) -> None:
    """A file that is there in full or not at all, whatever happens."""
    work = path.with_name(path.name + ".new")
    with open(work, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(work, path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise PrepareError(f"{folder}: another prepare.py is at work there") from error
    finally:
        os.close(handle)


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] == ["--verify"] and len(argv) == 2:
        verify(Path(argv[1]))
    elif argv[:1] == ["--show"] and len(argv) == 3 and argv[1].isdigit():
        show(Path(argv[2]), int(argv[1]))
    else:
        prepare(load(argv).config)


if __name__ == "__main__":
    sys.exit(guard(main))
