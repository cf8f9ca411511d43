"""Tokenize text into fixed-length rows, cut at sentence and line boundaries (paper, appendix B).

    python prepare.py config/alra_200m.py [--key=value ...]    goes on where it was stopped or killed
    python prepare.py --verify data/pile                       hash and count everything again
    python prepare.py --show 1000 data/pile                    five rows from row 1000 on, as text

Each document is tokenized with no special tokens added, and one EOS follows it; before it stands the BOS that the tokenizer
by itself puts before a text (`bos="none"`: none). Text is only text: a document that spells "<|endoftext|>" gets the ids of
those characters. The ids of all documents form one stream, which is cut into rows of at most `row_len` = seq_len + 1 ids;
joined, the rows give the stream back.

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
on nothing else.

**Which rows.** The stream ends with the documents, or when `train_rows` + `val_rows` rows exist. Its last `val_rows` rows are
val.bin, all before them train.bin. With `val_share` instead, whole documents are held out by the hash of their names (of
their text where they have none), and cut as a stream of their own.

**Files.** `<data_dir>/train.bin`, `val.bin`: uint32, row-major [rows, row_len], PAD in the unused tail of a row; beside them
`train.json`, `val.json`: where the rows come from, counts and hashes. Until these are whole, `*.bin.tmp` and `prepare.state`
hold the work, which the same command takes up.
"""

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from configure import Config, guard, load
from lib.files import UserError, locked, read_json, write_json, write_whole
from lib.rows import MANIFEST, PAD, quick_hash
from lib.tokens import token_bytes

RULE_VERSION = 1
COMMIT_SEC = 5.0  # work that a kill can cost
BATCH_CHARS, BATCH_DOCUMENTS = 1 << 20, 2048  # of one call of the tokenizer; they bound the memory
CHAT = r"im_end|eot|turn|\|end\|"  # in an EOS that ends a turn of a chat
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
KINDS = {"e": "eos", "l": "line", "s": "sentence", "-": "none"}  # what a row ends at
STATE = {"recipe": dict, "records": int, "source": dict, "streams": {"*": {"rows": int, "rest": list}}}
MANIFEST_KEYS = {"split": str, "tokenizer": str, "vocab_size": int, "val_rows": int, "val_share": float, "tokens": int}
MANIFEST_KEYS |= {"documents": int, "padding_share": float, **MANIFEST}


# --- sources -----------------------------------------------------------------------------------------------------


def open_source(cfg: Config):
    """`cfg.source` -> a stream of {"name", "text"} (datasets.IterableDataset, whose state resumes it), and facts of each part.

    Several sources, "a:0.7,b:0.3", are drawn from in a fixed random order with these probabilities, until one of them ends.
    """
    import datasets

    parts = [re.fullmatch(r"\s*(.+):(\d*\.?\d+)\s*", part) for part in cfg.source.split(",")]
    if Path(cfg.source).expanduser().exists() or not any(parts):
        stream, fact = open_part(cfg.source, cfg)
        return stream, [fact]
    if not all(parts) or not all(float(part[2]) for part in parts):
        raise UserError(f"source={cfg.source}: expected a share above 0 for each, like a:0.7,b:0.3")
    streams, facts = zip(*(open_part(part[1], cfg) for part in parts), strict=True)
    shares = np.array([float(part[2]) for part in parts])
    shares = (shares / shares.sum()).tolist()
    mixed = datasets.interleave_datasets(list(streams), shares, seed=0, stopping_strategy="first_exhausted")
    return mixed, [fact | {"share": share} for fact, share in zip(facts, shares, strict=True)]


def open_part(name: str, cfg: Config):
    """One source: "python" (its own documentation and library), a local file, folder or glob, or a hub dataset at one commit."""
    import datasets

    if name == "python":
        digest = hashlib.sha256(json.dumps(python_documents()).encode())
        return datasets.IterableDataset.from_generator(python_records), {"source": name, "sha256": digest.hexdigest()}
    path = Path(name).expanduser()
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?", name) or name.endswith(SUFFIXES):
        found = path.rglob("*") if path.is_dir() else [path] if path.exists() else glob.iglob(str(path), recursive=True)
        files = sorted(str(file) for file in found if str(file).endswith(SUFFIXES) and Path(file).is_file())
        if not files:
            raise UserError(f"source={name}: no such file, and no {', '.join(SUFFIXES)} file in it")
        top = os.path.commonpath([os.path.dirname(file) for file in files])
        facts = [(os.path.relpath(file, top), quick_hash(Path(file))) for file in files]
        stream = datasets.IterableDataset.from_generator(
            read_files, gen_kwargs={"files": files, "top": top, "column": cfg.source_text}
        )
        return stream, {"source": name, "sha256": hashlib.sha256(json.dumps(facts).encode()).hexdigest()}
    import huggingface_hub

    name, _, revision = name.partition("@")
    try:
        commit = huggingface_hub.HfApi().dataset_info(name, revision=revision or None).sha
    except Exception as error:  # each kind of network failure has a class of its own, which changes with the library
        reason = str(error).strip().split("\n")[0]
        raise UserError(f'source={name}: not "python", no local path, and no such dataset on the hub ({reason})') from error
    print(f"source: {name}@{commit}", file=sys.stderr)
    stream = datasets.load_dataset(name, cfg.source_config, split=cfg.source_split, streaming=True, revision=commit)
    stream = stream.select_columns([cfg.source_text]).map(lambda row: {"name": None, "text": row[cfg.source_text]})
    return stream, {"source": f"{name}@{commit}", "sha256": hashlib.sha256(f"{name}\0{commit}".encode()).hexdigest()}


def read_files(files: list[str], top: str, column: str) -> Iterator[dict]:
    """The documents of local files, in this order. A lone surrogate in JSON, which has no UTF-8, becomes U+FFFD."""
    import pyarrow.parquet

    for file in files:
        n = 0
        try:
            if file.endswith(".txt"):
                yield {"name": os.path.relpath(file, top), "text": Path(file).read_bytes().decode()}
            elif file.endswith(".parquet"):
                for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024, columns=[column]):
                    for text in batch.column(0).to_pylist():
                        n += 1
                        yield {"name": None, "text": whole(text)}
            else:
                with io.BufferedReader(pyarrow.input_stream(file, compression="detect")) as lines:
                    for line in lines:
                        n += 1
                        if line.strip():
                            yield {"name": None, "text": whole(json.loads(line)[column])}
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            told = f"no {column!r}; source_text names the field" if isinstance(error, LookupError) else error
            raise UserError(f"{file}, record {n}: cannot be read: {told}") from error


def whole(text: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"expected text, got {type(text).__name__}; source_text names the field")
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


def python_records() -> Iterator[dict]:
    return ({"name": name, "text": text} for name, text in python_documents())


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


# --- tokens to rows ----------------------------------------------------------------------------------------------


def encoded(stream, tokenizer, eos: int, bos: int | None) -> Iterator[tuple[list[dict], dict, np.ndarray, np.ndarray]]:
    """The stream in batches: documents, the stream's state after them, ids of all of them [n], length of each.

    The tokenizer's own threads do the work; some batches are under way while the caller cuts and writes.
    """
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # text is only text
    backend.no_truncation()
    backend.no_padding()
    front = [] if bos is None else [bos]

    def encode(batch: list[dict]) -> tuple[np.ndarray, np.ndarray]:
        some = backend.encode_batch_fast([document["text"] for document in batch], add_special_tokens=False)
        ids = [np.array([*front, *encoding.ids, eos], np.uint32) for encoding in some]
        return np.concatenate(ids), np.array([len(of) for of in ids])

    def batches() -> Iterator[list[dict]]:
        batch, chars = [], 0
        for document in stream:
            batch.append(document)
            chars += len(document["text"])
            if chars >= BATCH_CHARS or len(batch) == BATCH_DOCUMENTS:
                yield batch
                batch, chars = [], 0
        if batch:
            yield batch

    waiting: deque = deque()
    with ThreadPoolExecutor(3) as pool:
        for batch in batches():
            waiting.append((batch, stream.state_dict(), pool.submit(encode, batch)))
            if len(waiting) > 3:
                *done, future = waiting.popleft()
                yield *done, *future.result()
        for *done, future in waiting:
            yield *done, *future.result()


class Stream:
    """A stream of ids that is being written into a file: the rows written so far, and the start of the next row."""

    def __init__(self, file: Path, row_len: int, max_rows: int | None, rows: int = 0, rest=()):
        self.file, self.row_len, self.max_rows = file, row_len, max_rows
        self.rows, self.rest = rows, np.array(rest, np.uint32)
        self.file.touch()
        if self.file.stat().st_size < rows * row_len * 4:
            raise UserError(f"{file}: not the rows that prepare.state describes; move {file.parent} aside and start again")

    @property
    def full(self) -> bool:
        return self.rows == self.max_rows

    def feed(self, ids: np.ndarray, table: Table, last: bool = False) -> None:
        """Cut and write the complete rows, max_rows at most."""
        ids = np.concatenate([self.rest, ids])
        ends = cut(ids, table, self.row_len, last)[0][: None if self.max_rows is None else self.max_rows - self.rows]
        if len(ends):
            starts = np.append(0, ends[:-1])
            block = np.full((len(ends), self.row_len), PAD, np.uint32)
            block[np.arange(self.row_len) < (ends - starts)[:, None]] = ids[: ends[-1]]
            with open(self.file, "r+b") as f:
                f.seek(self.rows * self.row_len * 4)  # over what a killed run wrote after its last commit
                f.write(block)
            self.rows += len(ends)
        self.rest = ids[ends[-1] if len(ends) else 0 :].copy()

    def save(self) -> dict:
        """Flush everything to the disk -> the state that a new `Stream` takes."""
        with open(self.file, "r+b") as f:
            f.truncate(self.rows * self.row_len * 4)
            os.fsync(f.fileno())
        return {"rows": self.rows, "rest": [] if self.full else self.rest.tolist()}


def held_out(document: tuple[str | None, str], share: float) -> bool:
    name, text = document
    digest = hashlib.sha256((text if name is None else name).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


# --- the folder --------------------------------------------------------------------------------------------------


def prepare(cfg: Config, commit_sec: float = COMMIT_SEC) -> None:
    """Write the rows of `cfg` into `cfg.data_dir`, or resume a killed run of the same recipe.

    Raises `UserError` where the folder holds data, whole or half-made, of another recipe: nothing is overwritten.
    """
    from lib.hf import leading_bos, load_tokenizer, pinned, tokenizer_hash

    name = cfg.tokenizer or cfg.teacher
    if name is None:
        raise UserError("tokenizer=None, teacher=None: expected a tokenizer's folder or hub id in one of them")
    tokenizer, used = load_tokenizer(name), pinned(name)
    bos, eos = leading_bos(tokenizer) if cfg.bos == "auto" else None, tokenizer.eos_token_id
    if re.search(CHAT, tokenizer.eos_token):
        print(f"warning: {name}: documents will end with its eos_token {tokenizer.eos_token}, which ends turns of a chat; "
              "for plain text take the base model", file=sys.stderr)  # fmt: skip
    table = token_table(tokenizer)
    stream, facts = open_source(cfg)
    keys = ("source_config", "source_text", "source_split", "n_documents", "train_rows", "val_rows", "val_share", "row_len")
    recipe = {"sources": facts, **{key: getattr(cfg, key) for key in keys}, "tokenizer": used, "rule_version": RULE_VERSION}
    recipe |= {"tokenizer_sha256": tokenizer_hash(tokenizer), "vocab_size": len(table.pieces), "eos_id": eos}
    recipe["bos"] = None if bos == eos else bos  # id before each document; a BOS that is the EOS stands there already
    folder = Path(cfg.data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    file, made = folder / "prepare.state", folder / "train.json"
    with locked(folder, UserError(f"{folder}: another prepare.py is at work there")):
        state = read_json(file, STATE, f"move {folder} aside and start again") if file.exists() else None
        if not state and made.exists():
            for split in splits(recipe):
                same_recipe(folder, read_manifest(folder, split), recipe)
            print(f"{folder}: made before by the same recipe and left as it is; --verify checks it")
            return
        if state:
            same_recipe(folder, state["recipe"], recipe)
            print(f"{folder}: going on after {state['records']:,} documents", file=sys.stderr)
        if not state or not state.get("whole"):
            state = write_rows(cfg, stream, tokenizer, table, recipe, state or {}, commit_sec)
        for manifest in finish(folder, state):
            print(summary(folder, manifest))
        file.unlink()


def write_rows(cfg: Config, source, tokenizer, table: Table, recipe: dict, state: dict, commit_sec: float) -> dict:
    """Read, tokenize, cut and write until all rows exist or the documents end -> the final state."""
    folder, saved, n_records = Path(cfg.data_dir), state.get("streams", {}), state.get("records", 0)
    most = cfg.train_rows and cfg.train_rows + cfg.val_rows
    streams = {"train": Stream(folder / "train.bin.tmp", cfg.row_len, most, **saved.get("train", {}))}
    if cfg.val_share:
        streams["val"] = Stream(folder / "val.bin.tmp", cfg.row_len, None, **saved.get("val", {}))
    if state:
        source.load_state_dict(state["source"])
    if cfg.n_documents:
        source = source.take(cfg.n_documents - n_records)
    n_tokens, begun, committed = 0, time.monotonic(), time.monotonic()
    bar = tqdm(total=most, unit="row", mininterval=0.5 if sys.stderr.isatty() else 30)
    with bar, contextlib.closing(encoded(source, tokenizer, recipe["eos_id"], recipe["bos"])) as batches:
        for batch, place, ids, lengths in batches:
            held = [cfg.val_share > 0 and held_out((x["name"], x["text"]), cfg.val_share) for x in batch]
            of_val = np.repeat(held, lengths)
            streams["train"].feed(ids[~of_val], table)
            if cfg.val_share:
                streams["val"].feed(ids[of_val], table)
            n_records, n_tokens = n_records + len(batch), n_tokens + len(ids)
            bar.update(sum(s.rows for s in streams.values()) - bar.n)
            bar.set_postfix_str(f"{n_records:,} documents, {n_tokens / (time.monotonic() - begun):,.0f} tokens/s", False)
            if streams["train"].full:
                break
            if time.monotonic() - committed > commit_sec:
                commit(folder, {"recipe": recipe, "records": n_records, "source": place}, streams)
                committed = time.monotonic()
    if n_records == 0:
        raise UserError(f"source={cfg.source}: holds no record")
    for s in streams.values():
        if not s.full:
            s.feed(np.empty(0, np.uint32), table, last=True)
    return commit(folder, {"recipe": recipe, "records": n_records, "source": {}, "whole": True}, streams)


def commit(folder: Path, state: dict, streams: dict[str, Stream]) -> dict:
    state = state | {"streams": {name: stream.save() for name, stream in streams.items()}}
    write_json(folder / "prepare.state", state, sealed=True)
    return state


def finish(folder: Path, state: dict) -> list[dict]:
    """Give the files their final names and manifests. It can be killed and repeated at any point."""
    recipe, rows = state["recipe"], {name: stream["rows"] for name, stream in state["streams"].items()}
    if recipe["val_rows"]:
        n, size = max(rows["train"] - recipe["val_rows"], 0), recipe["row_len"] * 4
        work, rows = folder / "train.bin.tmp", {"train": n, "val": rows["train"] - n}
        if n and work.exists() and work.stat().st_size > n * size:
            with open(work, "rb") as f:
                f.seek(n * size)
                write_whole(folder / "val.bin.tmp", f.read())
            os.truncate(work, n * size)
    empty = [name for name in rows if not rows[name]]
    if empty:
        for file in (folder / "prepare.state", *folder.glob("*.tmp")):
            file.unlink()  # of no use to any recipe
        raise UserError(f"train_rows={recipe['train_rows']}, val_rows={recipe['val_rows']}, val_share={recipe['val_share']}: "
                        f"{state['records']:,} records leave no row for {empty[0]}, and nothing was kept; change one of these "
                        "(of few documents --val_share=0 --val_rows=N holds out the last rows)")  # fmt: skip
    made = []
    for name in rows:
        work, final = folder / f"{name}.bin.tmp", folder / f"{name}.bin"
        made.append({"split": name, **recipe, **measure(work if work.exists() else final, recipe)})
        if work.exists():
            os.replace(work, final)
        lines = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in made[-1].items())  # people read it too
        write_whole(folder / f"{name}.json", f"{{\n{lines}\n}}\n")
    return made


def measure(file: Path, recipe: dict) -> dict:
    """Counts, lengths and hashes of a rows file, in one pass. Raises `UserError` for an impossible row."""
    row_len, size, counted = recipe["row_len"], file.stat().st_size, 1 << 12
    if size == 0 or size % (row_len * 4):
        raise UserError(f"{file}: {size:,} bytes, expected a multiple of a row of {row_len} ids; prepare it again")
    digest, n_eos, lengths, n_rows = hashlib.sha256(), 0, np.zeros(row_len + 1, np.int64), size // (row_len * 4)
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
        "quick_sha256": quick_hash(file),
    }


def verify(folder: Path) -> None:
    """Hash and count everything again. `UserError` names the first difference from the manifest."""
    if (folder / "prepare.state").exists():
        raise UserError(f"{folder}: not finished; the command that began it goes on")
    for name in splits(read_manifest(folder, "train")):
        manifest = read_manifest(folder, name)
        for key, value in measure(folder / f"{name}.bin", manifest).items():
            if manifest.get(key) != value:
                raise UserError(f"{folder / name}.bin: {key} is {value}, the manifest says {manifest.get(key)}; prepare it again")
        print(f"{summary(folder, manifest)}: as the manifest says, sha256 {manifest['sha256']}")


def show(folder: Path, first: int, n_rows: int = 5) -> None:
    """Print rows as text, each with its length. `folder` may be one of its .bin files."""
    from lib.hf import load_tokenizer

    folder, name = (folder.parent, folder.stem) if folder.suffix == ".bin" else (folder, "train")
    manifest = read_manifest(folder, name)
    rows = np.memmap(folder / f"{name}.bin", np.uint32, "r").reshape(-1, manifest["row_len"])
    if first >= len(rows):
        raise UserError(f"--show {first}: expected a row from 0 to {len(rows) - 1}")
    tokenizer = load_tokenizer(manifest["tokenizer"])
    for i in range(first, min(first + n_rows, len(rows))):
        ids = rows[i][rows[i] != PAD].tolist()
        print(f"⟦row {i}: {len(ids)} ids⟧{tokenizer.decode(ids, clean_up_tokenization_spaces=False)}\n")


def splits(recipe: dict) -> tuple[str, ...]:
    return ("train", "val") if recipe["val_rows"] or recipe["val_share"] else ("train",)


def read_manifest(folder: Path, name: str) -> dict:
    for file in (folder / f"{name}.json", folder / f"{name}.bin"):
        if not file.is_file():
            raise UserError(f"{file}: not there; expected a folder that prepare.py has written to its end")
    return read_json(folder / f"{name}.json", MANIFEST_KEYS, f"move {folder} aside and prepare it again")


def same_recipe(folder: Path, old: dict, new: dict) -> None:
    def content(recipe: dict) -> dict:  # a place may change, its hash may not
        return recipe | {"tokenizer": None, "sources": [of | {"source": None} for of in recipe["sources"]]}

    differ = [key for key, value in content(new).items() if content(old).get(key) != value]
    if differ:
        told = "; ".join(f"{key} was {old.get(key)!r:.200}, now {new[key]!r:.200}" for key in differ)
        raise UserError(f"{folder}: holds data of another recipe: {told}. Nothing was touched: set another data_dir, or "
                        "move that folder aside")  # fmt: skip


def summary(folder: Path, manifest: dict) -> str:
    return (f"{folder / manifest['split']}.bin: {manifest['rows']:,} rows, {manifest['tokens']:,} tokens, "
            f"{manifest['documents']:,} documents, padding {manifest['padding_share']:.1%}")  # fmt: skip


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
