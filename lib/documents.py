"""The documents of local files: JSON lines (also gzip or zstd), parquet, or one text per file.

A document is a dict:

where  file and number of the record; empty for a record of the hub
text   empty if the record cannot be read
bad    why it cannot be read; empty for a good record
"""

import collections
import glob
import gzip
import json
import os
import re
import stat
from collections.abc import Iterator

import zstandard

from lib.errors import UserError, first_line, note
from lib.files import reading

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")
SPLIT = re.compile(r"(train|valid|test)(ation)?(-\d+-of-\d+)?\.")  # the name of a dataset's file
HIDDEN = re.compile(r"\.|__MACOSX$")  # the beginning of a name: copies that programs keep
BLOCK = 1 << 16  # bytes read at a time


def list_files(source: str) -> list[str]:
    """Return the files of a local file, folder or glob. Prints a note on those it leaves out.

    Raises `UserError` if two of the files hold one text: a link, or one packed beside itself.
    """
    path = os.path.expanduser(source)  # leaves the name of an unknown user as it is
    left_out = collections.defaultdict(list)
    if os.path.isdir(path):
        names = walk(path, left_out["hidden files or folders"], set())
    elif os.path.exists(path):
        names = [path]
    else:
        names = glob.glob(path, recursive=True)
    file_of = {}
    for name in sorted(names):
        try:
            facts = os.stat(name)
        except FileNotFoundError:
            left_out["broken links"].append(name)
            continue
        if not stat.S_ISREG(facts.st_mode):
            if "**" not in path:  # which names what is in folders too
                left_out["folders or devices"].append(name)
            continue
        if not name.lower().endswith(SUFFIXES):
            left_out["files with other suffixes"].append(name)
            continue
        unpacked = re.sub(r"(?i)\.(gz|zst)$", "", os.path.realpath(name))
        for text in (unpacked, (facts.st_dev, facts.st_ino)):
            other = file_of.setdefault(text, name)
            if other != name:
                raise UserError(
                    f"source={source}: {other} and {name} hold one text; keep one of them"
                )
    files = sorted(set(file_of.values()))
    splits = {match[1] for file in files if (match := SPLIT.match(os.path.basename(file)))}
    if len(splits) > 1:
        raise UserError(
            f"source={source}: has files of {', '.join(sorted(splits))}; name those of one, as in "
            "FOLDER/train*"
        )
    for kind, skipped in left_out.items():
        if skipped:
            note(f"source={source}: skips {len(skipped)} {kind}, such as {skipped[0]}")
    if not file_of:
        raise UserError(
            f"source={source}: no such file, or no regular file there that ends in "
            f"{', '.join(SUFFIXES)}"
        )
    return files


def walk(folder, hidden: list, seen: set) -> Iterator[str]:
    """Yield the names of the files in a folder and below; adds those of hidden ones to `hidden`.

    seen  folders that were read before: links are followed, but each folder is read once
    """
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    for entry in sorted(os.listdir(folder)):  # every machine takes the same name of a linked one
        name = os.path.join(folder, entry)
        if HIDDEN.match(entry):
            hidden.append(name)
        elif os.path.isdir(name):
            yield from walk(name, hidden, seen)
        else:
            yield name


def read_files(files: list[str], column: str):
    """Yield the documents of local files in their order."""
    for file in files:
        with reading(file, "download or write it again"):
            for number, record in enumerate(read_records(file, column), 1):
                if record != b"":
                    yield read_document(record, column, f"{file}, record {number}: ")


def read_records(file, column) -> Iterator[bytes | dict]:
    """Yield the records of a file as stored: lines of JSON, or rows of a table."""
    import pyarrow.parquet

    suffix = os.path.splitext(file)[1].lower()
    if suffix in (".gz", ".zst") and not os.path.getsize(file):
        raise EOFError("it is empty")
    if suffix == ".txt":
        with open(file, "rb") as stored:
            yield {column: stored.read()}
    elif suffix == ".parquet":
        with open(file, "rb") as stored:
            table = pyarrow.parquet.ParquetFile(stored)
            for batch in table.iter_batches(1024, columns=[column]):
                yield from batch.to_pylist()
    elif suffix == ".zst":
        yield from map(bytes.strip, lines_of(unpack(file)))
    else:
        with (gzip.open if suffix == ".gz" else open)(file, "rb") as lines:
            yield from map(bytes.strip, lines)


def unpack(file) -> Iterator[bytes]:
    """Yield the content of a zstd file in blocks. A frame may have a window of 2 GiB."""
    unpacker = None
    with open(file, "rb") as stored:
        while block := stored.read(BLOCK):
            while block:
                if unpacker is None or unpacker.eof:
                    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
                    unpacker = decompressor.decompressobj()
                yield unpacker.decompress(block)
                block = unpacker.unused_data
    if unpacker and not unpacker.eof:
        raise EOFError("it ends within a frame")


def lines_of(blocks) -> Iterator[bytes]:
    parts = []  # of a line that the blocks before have begun
    for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        for other in others:
            yield b"".join(parts)
            parts = [other]
    yield b"".join(parts)


def read_document(record, column: str, where: str = "") -> dict:
    """Return the document of a record; `bad` says why it has no text."""
    text = bad = ""
    try:
        if isinstance(record, bytes):
            line = decoded(record)
            if not line.startswith("{"):
                raise ValueError(f"expected a JSON object on each line, got {line:.20}")
            record = json.loads(line)
        keys = [column]
        if column not in record:
            keys = column.split(".")  # of "meta.text", a field inside another one
        text = record
        for key in keys:
            text = text[key]
        if isinstance(text, bytes):
            text = decoded(text)
        # replaces lone surrogates, which JSON can spell; raises TypeError unless it is text
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    except LookupError as error:
        bad = f"cannot be read: no {error}; source_text names the field"
    except (ValueError, TypeError, RecursionError) as error:
        bad = f"cannot be read: {first_line(error)}"
    return {"where": where, "text": "" if bad else text, "bad": bad}


def decoded(content: bytes) -> str:
    text = content.decode("utf-8-sig")
    if "\0" in text:
        raise ValueError("contains NUL, as UTF-16 does; write it as UTF-8")
    return text
