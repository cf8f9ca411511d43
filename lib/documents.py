"""The documents of a source: a dataset on the hub, local files, or a mixture of these.

A source yields stored documents: pickles of (record, column of the text, file and number of the
record). `read_document` takes the text out of one. So the processes that tokenize also decode
JSON, and all parts of a mixture have the same one column.
"""

import glob
import io
import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lib.errors import UserError, did_you_mean_path, first_line, note
from lib.files import reading, text_hash
from lib.rows import quick_hash
from lib.settings import Positive, checked

PLAIN = (".txt", ".md", ".py")  # a file is a document
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", *PLAIN)
CODECS = {".gz": "gzip", ".zst": "zstd"}


def open_source(cfg):
    """Return a stream of the documents of `cfg.source`, and the facts of each of its parts.

    The stream is a `datasets.IterableDataset`, whose state resumes it. A mixture draws from its
    parts with the probabilities of their shares, by a fixed seed.
    """
    import datasets

    parts = cfg.source
    if isinstance(parts, str):
        parts = [{"name": parts}]
    keys = {"text": cfg.source_text, "config": cfg.source_config, "split": cfg.source_split}
    streams = []
    facts = []
    for part in parts:
        try:
            stream, name, content = open_part(**keys | part)
        except TypeError as error:
            raise UserError(
                f"source: {part}: {first_line(error)}; expected a dict of name, share; text, "
                "config, split"
            ) from error
        # else a mixture looks at the first documents of each part, and an empty part ends it
        streams.append(stream.cast(datasets.Features(stored=datasets.Value("binary"))))
        own = {key: part[key] for key in keys if key in part}
        facts.append({"source": name, "sha256": text_hash(json.dumps(content)), **own})
    if len(parts) == 1:
        return stream, facts
    shares = np.array([checked("share", part.get("share"), Positive) for part in parts])
    shares = (shares / shares.sum()).tolist()
    for fact, share in zip(facts, shares, strict=True):
        fact["share"] = share
    end = "first_exhausted"
    if cfg.mixture_end == "all":
        end = "all_exhausted_without_replacement"  # reads no document twice
    return datasets.interleave_datasets(streams, shares, seed=0, stopping_strategy=end), facts


def open_part(name, text, config, split, share=None):
    """Return a stream of documents, the name of their source, and what identifies its content.

    text   the field or column of a record that holds the text
    share  of a mixture; has no effect here
    """
    import datasets
    import huggingface_hub

    path = os.path.expanduser(name)  # leaves the name of an unknown user as it is
    on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@\S+)?", name)
    if os.path.exists(path) or name.endswith(SUFFIXES) or not on_hub:
        if split != "train":
            raise UserError(
                f"source={name}: split={split} is for a dataset on the hub; name the files to "
                f"read, as in {name}/train*"
            )
        files = list_files(path)
        stream = datasets.IterableDataset.from_generator(
            read_files, gen_kwargs={"files": files, "column": text}
        )
        return stream, name, [quick_hash(Path(file)) for file in files]
    dataset, _, revision = name.partition("@")
    remedy = "expected a file or a hub dataset; without a network: --source=demo/text.jsonl.zst"
    with reading(f"source={dataset}", remedy):
        info = huggingface_hub.HfApi().dataset_info(dataset, revision=revision or None)
        rows = datasets.load_dataset(
            dataset, config, split=split, streaming=True, revision=info.sha
        )
    documents = rows.map(lambda row: {"stored": pickle.dumps((row, text, ""))})
    name = f"{dataset}@{info.sha}"
    return documents.select_columns(["stored"]), name, name


def list_files(source: str) -> list[str]:
    """Return the files of a local file, folder or glob. Prints a note on those it leaves out."""
    pattern = source
    if os.path.exists(source):
        pattern = glob.escape(source)
    if os.path.isdir(source):
        pattern = os.path.join(pattern, "**")  # which skips hidden files
    found = glob.glob(pattern, recursive=True)
    names = {name for name in found if not os.path.isdir(name)}
    files = sorted(name for name in names if name.lower().endswith(SUFFIXES))
    others = names.difference(files)
    if others:
        note(f"source={source}: skips {len(others)} with other suffixes, such as {min(others)}")
    if not files:
        hint = did_you_mean_path(source)
        raise UserError(f"source={source}: no such file, or none that ends in {SUFFIXES}{hint}")
    return files


def read_files(files: list[str], column: str) -> Iterator[dict]:
    """Yield the stored documents of local files in their order."""
    for file in files:
        with reading(file, "download or write it again"):
            for number, record in enumerate(read_records(file, column), 1):
                if record != b"":
                    where = f"{file}, record {number}: "
                    yield {"stored": pickle.dumps((record, column, where))}


def read_records(file, column) -> Iterator[bytes | dict]:
    """Yield the records of a file as stored: lines of JSON, or rows of a table."""
    import pyarrow.parquet

    suffix = os.path.splitext(file)[1].lower()
    with open(file, "rb") as stored:
        if suffix in PLAIN:
            yield {column: stored.read()}
        elif suffix == ".parquet":
            table = pyarrow.parquet.ParquetFile(stored)
            for batch in table.iter_batches(1024, columns=[column]):
                yield from batch.to_pylist()
        else:
            stream = pyarrow.input_stream(stored, CODECS.get(suffix))  # refuses a file that was cut
            yield from map(bytes.strip, io.BufferedReader(stream))


def read_document(stored: bytes) -> tuple:
    """Return the text of a stored document, where it is, and why it has no text ("": it has)."""
    record, column, where = pickle.loads(stored)
    bad = ""
    try:
        if isinstance(record, bytes):
            record = json.loads(record.decode("utf-8-sig"))
        text = record
        keys = [column]
        if column not in record:
            keys = column.split(".")  # of "meta.text", a field inside another one
        for key in keys:
            text = text[key]
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        # replaces lone surrogates, which JSON can spell; raises TypeError unless it is text
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
        if "\0" in text:
            raise ValueError("contains NUL, as UTF-16 does; write it as UTF-8")
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        text = ""
        bad = f"cannot be read ({type(error).__name__}: {first_line(error)}), source_text={column}"
    return text, where, bad
