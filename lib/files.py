"""Files that are whole or not there, the JSON that runs leave behind, and the nearest of several names."""

import contextlib
import difflib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import safetensors

RENAMED = {"kd_schedule": "w_kd_schedule"}  # keys of the config that earlier runs wrote under another name


class UserError(ValueError):
    """What a user can mend: what, got, expected, what to do. The scripts print it as one line."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says while `path` is written, like a full disk, into one clear line.

    safetensors raises an error of its own there, which is no OSError. A folder that was begun is removed, for its room.
    """
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        raise UserError(
            f"{path}: not written ({error}); see to its room and rights, and the same command goes on from the last whole "
            "checkpoint"
        ) from error


@contextlib.contextmanager
def locked(folder: Path, error: Exception) -> Iterator[None]:
    """Keep a folder for this process; `error` where another process has it. The system frees a killed process's lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as busy:
        raise error from busy
    finally:
        os.close(handle)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all: under another name first, flushed to the disk, then renamed."""
    work = path.with_name(path.name + ".new")
    with work.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)


def write_json(path: Path, value: dict) -> None:
    with writing(path):
        write_whole(path, json.dumps(value, indent=1) + "\n")


AGAIN = "remove it, and the command that wrote it makes it again"


def read_json(path: Path, keys: dict[str, type] | None = None, remedy: str = AGAIN) -> dict:
    """The object in a JSON file, which holds `keys` with values of these types. `UserError` names file and key."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not whole JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; {remedy}")
    for key, kind in (keys or {}).items():
        if key not in value:
            raise UserError(f"{path}: no {key!r} in it; {remedy}")
        if not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind is int):
            raise UserError(
                f"{path}: {key} is {value[key]!r:.60}, expected {getattr(kind, '__name__', kind)}; {remedy}"
            )
    return value


def append_line(path: Path, record: dict) -> None:
    """Add a record to a file of JSON lines."""
    with writing(path), path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> list[dict]:
    """The records of a file of JSON lines; none where there is no file. A last line without its end is left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}); mend or remove that line") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object, got {line.decode()!r:.60}")
        records.append(record)
    return records


def write_lines(path: Path, records: list[dict]) -> None:
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` may have been meant to be."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return near[0] if near else None
