"""The error that a user can correct, and what its line is made of."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An error that the user can correct: what, got, expected, what to do. The scripts print it as one line."""


def require(ok: object, message: str) -> None:
    if not ok:
        raise UserError(message)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` may have been meant to be; None where all are far from it."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.65)
    return near[0] if near else None
