"""The error that a user can correct, and helpers for its message."""

import contextlib
import difflib
import re
import sys
from pathlib import Path


class UserError(ValueError):
    """An error that the user can correct.

    Its message says in one line what is wrong, what was expected and what to do.
    """

    is_shared = False  # whether all processes of a run raise it (lib/parallel.py)
    exit_code = 1


def note(text):
    """Print a line on stderr."""
    print(text, file=sys.stderr)


@contextlib.contextmanager
def naming_files():
    """Turn an error of the file system that names a file, wherever it is, into a `UserError`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename}: {error.strerror}; {remedy_of(error)}") from error


def remedy_of(error) -> str:
    """Return what to do about an error of the file system."""
    # ENOSPC and EDQUOT, as Python and safetensors write them
    is_full = re.search(r"(Errno|os error) (28|122)\b", str(error))
    return "free some space" if is_full else "check that path and its permissions"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none.

    A line that ends in a colon goes on with the next one.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]


def did_you_mean(name, names, hints=()) -> str:
    """Return ", did you mean X?" with the one of `names` that is closest, or "" if none is close.

    hints  what people may mean by names that are close to none
    """
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    if name in hints:
        near = [hints[name]]
    return f", did you mean {near[0]}?" if near else ""


def did_you_mean_path(path, pattern="*") -> str:
    """Return `did_you_mean` for a path, with those beside it that fit a glob pattern."""
    path = Path(path)
    return did_you_mean(str(path), map(str, path.parent.glob(pattern)))
