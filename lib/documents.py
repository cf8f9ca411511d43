"""The documents of local files: JSON lines (also gzip or zstd), parquet, or one text a file.

A document is {"name", "text", "bad"}: its name, empty unless it is a file of its own; its text; and
why it has none, empty for a good one.
"""

import glob
import io
import json
import os
import re
import sys
from pathlib import Path

from lib.errors import UserError, first_line
from lib.files import reading

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")


def list_files(source: str) -> list[str]:
    """Return the files of a local file, folder or glob. Reports those with other suffixes."""

    def refuse(error):
        raise UserError(f"source={source}: {error}") from error

    path = Path(source).expanduser()
    names = [str(path)]
    seen = set()
    if path.is_dir():
        for folder, subfolders, inside in os.walk(path, onerror=refuse, followlinks=True):
            if os.path.realpath(folder) in seen:  # as links in a circle lead back
                inside.clear()
                subfolders.clear()
            seen.add(os.path.realpath(folder))
            subfolders.sort()  # so that a folder with two names has the same one everywhere
            names.extend(os.path.join(folder, name) for name in inside)
    elif not path.exists():
        names = glob.glob(str(path), recursive=True)
    regular = set(filter(os.path.isfile, names))
    files = sorted(name for name in regular if name.lower().endswith(SUFFIXES))
    others = sorted(regular.difference(files))
    if not files:
        expected = f"no such file, or no regular file there that ends in {', '.join(SUFFIXES)}"
        raise UserError(f"source={source}: {expected}")
    if others:
        kinds = sorted({Path(name).suffix for name in others})
        skips = f"skips {len(others)} files with suffixes {kinds}, such as {others[0]}"
        print(f"source={source}: {skips}", file=sys.stderr)
    return files


def check_each_once(source, files):
    """Raise `UserError` if two of the files hold one text: links, or one packed beside itself."""
    file_of = {}
    for file in files:
        unpacked = re.sub(r"\.(gz|zst)$", "", file)
        inode = os.stat(file)[1:3]  # with the device
        for key in (unpacked, inode):
            if key in file_of:
                both = f"{file_of[key]} and {file}"
                raise UserError(f"source={source}: {both} hold one text; name each file once")
            file_of[key] = file


def read_files(files: list[str], root: str, column: str):
    """Yield the documents of local files in this order. Only those of text files have names."""
    for file in files:
        name = os.path.relpath(file, root) if file.lower().endswith(".txt") else ""
        with reading(file, "download or write it again"):
            for number, record in enumerate(read_records(file, column), 1):
                if record != b"":
                    document = read_document(record, column, f"{file}, record {number}: ")
                    yield document | {"name": name}


def read_records(file, column):
    """Yield the records of a file as stored: lines of JSON, rows of parquet, or the path itself."""
    import pyarrow.parquet

    suffix = Path(file).suffix.lower()
    if suffix == ".txt":
        yield Path(file)
    elif suffix == ".parquet":
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024, columns=[column]):
            yield from batch.to_pylist()
    else:
        compression = {".gz": "gzip", ".zst": "zstd"}.get(suffix)
        with io.BufferedReader(pyarrow.input_stream(file, compression=compression)) as lines:
            yield from map(bytes.strip, lines)


def read_document(record, column: str, where: str = "") -> dict:
    """Return the document of a record; `bad` says why it has no text."""
    text = bad = ""
    try:
        if isinstance(record, Path):
            content = record.read_bytes()
            if b"\0" in content:
                raise ValueError("contains NUL bytes, as UTF-16 does; expected UTF-8")
            record = {column: content.decode("utf-8-sig")}
        if isinstance(record, bytes):
            record = json.loads(record)
        value = record[column]
        if not isinstance(value, str):
            raise TypeError(f"expected text, got {type(value).__name__}")
        text = re.sub("[\ud800-\udfff]", "\ufffd", value)  # lone surrogates, which JSON can spell
    except LookupError as error:
        bad = f"{where}cannot be read: no {error}; source_text names the field"
    except (ValueError, TypeError, RecursionError) as error:
        bad = f"{where}cannot be read: {first_line(error)}"
    return {"name": "", "text": text, "bad": bad}
