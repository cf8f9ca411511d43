"""Files that are complete or do not exist, and the JSON that runs leave behind."""

import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import safetensors

from lib.errors import UserError, first_line, require

REMEDY = "move it aside, and the command that wrote it makes it again"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path`, such as a full disk, into one clear line. safetensors has an error of its own."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        new = working_name(path)  # its space is free again
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
        raise UserError(
            f"{path}: cannot be written ({error}); free some space or check the permissions, then run the same command "
            "again"
        ) from error


def flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename never survives a crash without its content."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def working_name(path: Path, kind: str = "new") -> Path:
    """A name beside `path` that only this program gives: what has it is unfinished, and is overwritten and deleted."""
    return path.with_name(f".{path.name}.alra-{kind}")


def discard(path: Path) -> None:
    """Remove a folder that this program wrote, and what a kill left unfinished beside it. Renamed first: whole or gone."""
    for unfinished in path.parent.glob(working_name(Path("*"), "*").name):
        shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(path.rename(working_name(path, "old")), ignore_errors=True)  # open on NFS: it goes with the next


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all: under another name first, flushed to the disk, then renamed."""
    new = working_name(path)
    with writing(path):
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(new)
        os.replace(new, path)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which then replaces `path`: flushed to the disk, then renamed. Complete or not there."""
    new, old = working_name(path), working_name(path, "old")
    shutil.rmtree(new, ignore_errors=True)
    with contextlib.ExitStack() as stack, writing(path):
        stack.callback(shutil.rmtree, new, ignore_errors=True)  # if it fails, its space is free again
        new.mkdir(parents=True)
        yield new
        for file in filter(Path.is_file, new.rglob("*")):
            file.chmod(new.stat().st_mode & 0o666)  # safetensors keeps its files from other users
            flush(file)
        flush(new)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(new, path)
        flush(path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Lock a folder, made if need be, for this process; `busy` is the error if another holds it. A killed one loses its lock.

    The lock is on a file, not on the folder, as NFS shows locks of files to all hosts; the file says who holds it.
    """
    lock_file, mine = folder / ".alra-lock", False
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        while not mine:
            file = stack.enter_context(open(lock_file, "a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise UserError(f"{busy} ({file.read().strip()})") from error
            # not if the process before has removed it since it was opened
            mine = lock_file.exists() and os.path.samestat(os.fstat(file.fileno()), lock_file.stat())
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%FT%T%z')}\n")
        file.flush()
        stack.callback(lock_file.unlink, missing_ok=True)
        yield


def for_json(values: dict) -> dict:
    """`values`, with None for a number that is not finite: JSON has none."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}


def write_json(path: Path, value: dict) -> None:
    """Raises `ValueError`, and writes nothing, if a number is not finite."""
    atomic_write(path, json.dumps(value, allow_nan=False, indent=1) + "\n")


def append_line(path: Path, record: dict) -> None:
    """Add a record to a file of JSON lines. A last line without its end is ended first, or removed if a kill cut it short."""
    line = json.dumps(record, allow_nan=False) + "\n"
    with writing(path), path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        if path.is_file() and file.read(1) not in b"\n":
            write_lines(path, read_lines(path))
    with writing(path), path.open("a") as file:
        file.write(line)


def write_lines(path: Path, records: list[dict]) -> None:
    atomic_write(path, "".join(json.dumps(record) + "\n" for record in records))


@contextlib.contextmanager
def reading(path: Path | str, remedy: str = REMEDY) -> Iterator[None]:
    """Turn whatever goes wrong while `path` is read, or a part that it lacks, into one clear line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each kind of broken file has an error of its own
        raise UserError(f"{path}: cannot be used ({type(error).__name__}: {first_line(error)}); {remedy}") from error


def read_json(path: Path, keys: Iterable[str] = (), remedy: str = REMEDY) -> dict:
    """The object in a JSON file. Raises `UserError` if it is broken or lacks one of `keys`."""
    with reading(path, remedy):
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=int)  # refuses NaN and Infinity
    return check_keys(value, keys, path, remedy)


def read_lines(path: Path, keys: Iterable[str] = ()) -> list[dict]:
    """The records of a file of JSON lines, each with `keys`; none without a file. A last line that was cut short is left out."""
    records, (*lines, last) = [], path.read_bytes().split(b"\n") if path.is_file() else [b""]
    with contextlib.suppress(ValueError):
        json.loads(last)
        lines.append(last)
    for number, line in enumerate(lines, 1):
        where, remedy = f"{path}, line {number}", "correct or remove that line"
        with reading(where, remedy):
            record = json.loads(line)
        records.append(check_keys(record, keys, where, remedy))
    return records


def truncate_lines(path: Path, step: int) -> None:
    """Remove the records after `step`, and a last line that a kill cut short."""
    if path.is_file():
        write_lines(path, [record for record in read_lines(path, ["step"]) if record["step"] <= step])


def check_keys(value: object, keys: Iterable[str], where: Path | str, remedy: str = REMEDY) -> dict:
    require(isinstance(value, dict), f"{where}: expected a JSON object, got {type(value).__name__}; {remedy}")
    missing = [key for key in keys if key not in value]
    require(not missing, f"{where}: no {missing[:1]} in it; {remedy}")
    return value
