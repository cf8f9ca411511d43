"""The documents of local files: JSON lines (also gzip or zstd), parquet, or one text per file.

A document is a dict:

name   path of a text file; empty if the document is a record of a larger file
text   empty if the record cannot be read
bad    why it cannot be read; empty for a good record
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
    """Return the files of a local file, folder or glob. Prints a note on those it leaves out.

    Raises `UserError` if two of the files hold one text: a link, or one packed beside itself.
    """

    def refuse(error):
        raise UserError(f"source={source}: {error}")

    path = Path(source).expanduser()
    names = [str(path)]
    seen = set()
    if path.is_dir():
        for folder, subfolders, inside in os.walk(path, onerror=refuse, followlinks=True):
            if os.path.realpath(folder) in seen:  # reached before, by another name
                inside.clear()
                subfolders.clear()
            seen.add(os.path.realpath(folder))
            subfolders.sort()  # every machine takes the same name of a linked folder
            names.extend(os.path.join(folder, name) for name in inside)
    elif not path.exists():
        names = glob.glob(str(path), recursive=True)
    regular = set(filter(os.path.isfile, names))
    files = sorted(name for name in regular if name.lower().endswith(SUFFIXES))
    others = sorted(regular.difference(files))
    if not files:
        raise UserError(
            f"source={source}: no such file, or no regular file there that ends in "
            f"{', '.join(SUFFIXES)}"
        )
    if others:
        print(
            f"source={source}: skips {len(others)} files with other suffixes, such as {others[0]}",
            file=sys.stderr,
        )
    file_of = {}
    for file in files:
        unpacked = re.sub(r"(?i)\.(gz|zst)$", "", os.path.realpath(file))
        other = file_of.setdefault(unpacked, file)
        if other != file:
            raise UserError(f"source={source}: {other} and {file} hold one text; keep one of them")
    return files


def read_files(files: list[str], root: str, column: str):
    """Yield the documents of local files in their order. Only those of text files have names."""
    for file in files:
        with reading(file, "download or write it again"):
            for number, record in enumerate(read_records(file, column), 1):
                if record == b"":
                    continue
                document = read_document(record, column, f"{file}, record {number}: ")
                if isinstance(record, Path):
                    document["name"] = os.path.relpath(file, root)
                yield document


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
        packing = {".gz": "gzip", ".zst": "zstd"}.get(suffix)
        with io.BufferedReader(pyarrow.input_stream(file, packing)) as lines:
            yield from map(bytes.strip, lines)


def read_document(record, column: str, where: str = "") -> dict:
    """Return the document of a record; `bad` says why it has no text."""
    text = bad = ""
    try:
        if isinstance(record, Path):
            record = {column: record.read_bytes().decode("utf-8-sig")}
        if isinstance(record, bytes):
            record = json.loads(record)
        # replaces lone surrogates, which JSON can spell; raises TypeError unless it is text
        text = re.sub("[\ud800-\udfff]", "\ufffd", record[column])
    except LookupError as error:
        bad = f"{where}cannot be read: no {error}; source_text names the field"
    except (ValueError, TypeError, RecursionError) as error:
        bad = f"{where}cannot be read: {first_line(error)}"
    return {"name": "", "text": text, "bad": bad}
