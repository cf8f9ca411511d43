"""Files that are whole or not there, the JSON that runs leave behind, and the nearest of several names."""

import contextlib
import difflib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import safetensors


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
            f"{path}: not written ({error}); free space there or check its permissions, and the same command goes on from the last whole "
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


@contextlib.contextmanager
def reading(path: Path, remedy: str = "move it aside, and the command that wrote it makes it again") -> Iterator[None]:
    """Turn whatever goes wrong while `path` is read, or does not have what is looked for, into one clear line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each kind of broken file has an error of its own
        raise UserError(f"{path}: cannot be used ({type(error).__name__}: {first_line(error)}); {remedy}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all: under another name first, flushed to the disk, then renamed."""
    work = path.with_name(path.name + ".new")
    with work.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)


def write_json(path: Path, value: dict) -> None:
    """Write an object as a whole file."""
    text = dump(path, value, indent=1)
    with writing(path):
        write_whole(path, text)


def dump(path: Path, value: dict, **how) -> str:
    """A line of JSON for `path`. `UserError` where a number in it is not finite."""
    try:
        return json.dumps(value, allow_nan=False, **how) + "\n"
    except ValueError as error:
        keys = [key for key, number in value.items() if isinstance(number, float) and not math.isfinite(number)]
        where = f"step {value['step']}" if "step" in value else "its content"
        raise UserError(
            f"{path}: {where} is not written: {', '.join(keys) or 'a number in it'} is not finite; see why, and start again"
        ) from error


AGAIN = "move it aside, and the command that wrote it makes it again"


def read_json(path: Path, keys: dict | None = None, remedy: str = AGAIN) -> dict:
    """The object in a JSON file, which holds `keys` (see `check`). `UserError` names file and key."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not whole JSON ({error}); {remedy}") from error
    check(value, keys or {}, f"{path}: ", remedy)
    return value


def _refuse(constant: str):
    raise ValueError(f"{constant} is not a number")


def check(value, keys: dict, where: str, remedy: str, inside: str = "") -> None:
    """`UserError` unless `value` is an object that holds `keys`: a type for each, or such keys again.

    "*" is any key, and "NAME?" one that may be None or not there.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}expected a JSON object, got {type(value).__name__}; {remedy}")
    for wanted, of in keys.items():
        for key in value if wanted == "*" else [wanted.removesuffix("?")]:
            if wanted.endswith("?") and value.get(key) is None:
                continue
            if key not in value:
                raise UserError(f"{where}no {inside + key!r} in it; {remedy}")
            kind = dict if isinstance(of, dict) else int | float if of is float else of
            if not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind in (int, int | float)):
                name = getattr(kind, "__name__", kind)
                raise UserError(f"{where}{inside}{key} is {value[key]!r:.60}, expected {name}; {remedy}")
            if isinstance(of, dict):
                check(value[key], of, where, remedy, f"{inside}{key}.")


def append_line(path: Path, record: dict) -> None:
    """Add a record to a file of JSON lines."""
    line = dump(path, record)
    with writing(path), path.open("a") as file:
        file.write(line)


def read_lines(path: Path, keys: dict | None = None) -> list[dict]:
    """The records of a file of JSON lines, each with `keys`; none where there is no file. A last line without its end is left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}); mend or remove that line") from error
        check(record, keys or {}, f"{path}, line {number}: ", "mend or remove that line")
        records.append(record)
    return records


def write_lines(path: Path, records: list[dict]) -> None:
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` may have been meant to be."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return near[0] if near else None
