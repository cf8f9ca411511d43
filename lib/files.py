"""Files that are whole or not there, and the JSON that runs leave behind."""

import json
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all: under another name first, flushed to the disk, then renamed."""
    work = path.with_name(path.name + ".new")
    with work.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)


def write_json(path: Path, value: dict) -> None:
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict:
    """The object in a JSON file. ValueError where the file is not JSON, or holds something else than an object."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path}: not whole JSON ({error}); remove it, and the command that wrote it makes it again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def append_line(path: Path, record: dict) -> None:
    """Add a record to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> list[dict]:
    """The records of a file of JSON lines; none where there is no file. A last line without its end is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_lines(path: Path, records: list[dict]) -> None:
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
