"""Files that are complete or do not exist, and the JSON that runs leave behind."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

from lib.errors import UserError, first_line, note, remedy_of

REMEDY = "move it aside, and the command that wrote it makes it again"


@contextlib.contextmanager
def writing(path):
    """Turn any failure to write `path`, such as a full disk, into a one-line `UserError`.

    Deletes what was written so far.
    """
    try:
        yield
    except Exception as error:  # each library has an error of its own
        new = working_name(path)
        shutil.rmtree(new, ignore_errors=True)  # free its space
        with contextlib.suppress(OSError):
            new.unlink()
        if isinstance(error, UserError):
            raise
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise UserError(
            f"{path}: cannot be written ({first_line(cause)}); {remedy_of(cause)}"
        ) from error


def text_hash(text) -> str:
    """Return the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def optional():
    """Go on where a file system does not offer a call. A full or failing disk is an error."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def flush(path):
    """Flush a file or folder to the disk, so that a crash never leaves a renamed file empty."""
    fd = os.open(path, os.O_RDONLY)
    with optional():
        os.fsync(fd)
    os.close(fd)


def working_name(path, kind: str = "new") -> Path:
    """Return the temporary name beside `path` that is used while `path` is being written.

    Only this project gives such names, so whatever has one may be overwritten or deleted.
    """
    return path.with_name(f".{path.name}.alra-{kind}")


def discard(path):
    """Delete a folder written by this project, and what a kill left unfinished beside it.

    The folder is renamed first, so that a kill never leaves half of it under its own name. NFS
    keeps what is still open; the next call deletes that.
    """
    for unfinished in path.parent.glob(working_name(Path("*"), "*").name):
        shutil.rmtree(unfinished, ignore_errors=True)
    with writing(path):
        old = path.rename(working_name(path, "old"))
    shutil.rmtree(old, ignore_errors=True)


def atomic_write(path, content: str | bytes):
    """Write a file completely or not at all: write a temporary file, flush it, rename it."""
    if isinstance(content, str):
        content = content.encode()
    new = working_name(path)
    with writing(path):
        new.write_bytes(content)
        flush(new)
        os.replace(new, path)


@contextlib.contextmanager
def atomic_folder(path):
    """Yield a folder to fill, which then replaces `path`, so that none is ever there in part.

    The folder that `path` is in must be there: a run does not make its own folder again.
    """
    new = working_name(path)
    old = working_name(path, "old")
    shutil.rmtree(new, ignore_errors=True)
    with writing(path):
        new.mkdir()
        yield new
        for file in filter(Path.is_file, new.rglob("*")):
            with optional():  # safetensors hides its files from other users
                file.chmod(new.stat().st_mode & 0o666)
            flush(file)
        flush(new)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(new, path)
        flush(path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(folder, busy: str):
    """Lock a folder for this process, and make it if need be. A killed process loses its lock.

    The lock is on a file, as NFS shows such locks to all hosts. Nothing is written into it.

    busy    the error if another process holds the lock
    """
    lock_file = folder / ".alra-lock"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = lock_file.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(busy) from error
        except OSError as error:  # a file system without locks
            note(
                f"{lock_file}: no lock ({error}); start no second program in {folder} while this "
                "one runs"
            )
        yield


def for_json(values: dict) -> dict:
    """Return the values with None for each number that is not finite, which JSON cannot hold."""
    lost = [key for key, x in values.items() if isinstance(x, float) and not math.isfinite(x)]
    return values | dict.fromkeys(lost)


def write_json(path, value: dict):
    """Write a JSON file. Raises `ValueError`, and writes nothing, if a number is not finite."""
    atomic_write(path, json.dumps(value, allow_nan=False, indent=1) + "\n")


def append_line(path, record: dict):
    """Add a record to a file of JSON lines, whose last line a kill may have cut short."""
    line = json.dumps(record, allow_nan=False) + "\n"
    with writing(path), path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        if file.read(1) not in b"\n":
            write_lines(path, read_lines(path))
    with writing(path), path.open("a") as file:
        file.write(line)


def write_lines(path, records: list[dict]):
    """Write a file of JSON lines. A number that is not finite is written as NaN or Infinity."""
    atomic_write(path, "".join(json.dumps(record) + "\n" for record in records))


@contextlib.contextmanager
def reading(path: Path | str, remedy=REMEDY):
    """Turn any error while reading `path` into a one-line `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each kind of broken file has an error of its own
        raise UserError(
            f"{path}: cannot be used ({type(error).__name__}: {first_line(error):.300}); {remedy}"
        ) from error


def read_json(path, keys=(), remedy=REMEDY) -> dict:
    """Return the object in a JSON file. Raises `UserError` if it is broken, or lacks `keys`."""
    with reading(path, remedy):
        # int("NaN") raises `ValueError`
        return with_keys(json.loads(path.read_text(encoding="utf-8"), parse_constant=int), keys)


def with_keys(value: dict, keys) -> dict:
    """Return a JSON object. Raises `KeyError` if it lacks some of the keys."""
    missing = {*keys} - value.keys()
    if missing:
        raise KeyError(min(missing))
    return value


def read_lines(path, keys=()) -> list[dict]:
    """Return the records of a file of JSON lines, with these keys; none if there is no file.

    Leaves out a last line that was cut short. Raises `UserError` at any other broken line.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    try:
        json.loads(lines[-1])
    except ValueError:
        lines.pop()
    records = []
    for number, line in enumerate(lines, 1):
        with reading(f"{path}, line {number}", "correct or remove that line"):
            records.append(with_keys(json.loads(line), keys))
    return records


def truncate_lines(path, step):
    """Remove the records after `step`, and a last line that a kill cut short."""
    if path.is_file():
        records = read_lines(path, ["step"])
        write_lines(path, [record for record in records if record["step"] <= step])
