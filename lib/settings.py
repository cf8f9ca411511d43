"""The kinds of values that config keys and objectives' settings may have, and their one check."""

import ast
import math
import typing
from typing import Annotated, Literal

from lib.errors import UserError

# Annotated[type, the range in words, whether a value is in it]
PositiveInt = Annotated[int, "1 or more", lambda x: x >= 1]
NonNegativeInt = Annotated[int, "0 or more", lambda x: x >= 0]
Positive = Annotated[float, "more than 0", lambda x: 0 < x < math.inf]
NonNegative = Annotated[float, "0 or more", lambda x: 0 <= x < math.inf]
UnitInterval = Annotated[float, "0 to 1", lambda x: 0 <= x <= 1]
Below1 = Annotated[float, "0 to below 1", lambda x: 0 <= x < 1]
PositiveFraction = Annotated[float, "more than 0, at most 1", lambda x: 0 < x <= 1]


def checked(name, value: object, kind) -> object:
    """Return `value` as its kind. Raises `UserError` if it is not of that kind.

    An int becomes a float, a list of names a tuple, and numpy's numbers Python's; nothing else
    converts.
    """
    value = plain(value)
    if type(None) in typing.get_args(kind):  # KIND | None
        if value is None:
            return None
        kind = typing.get_args(kind)[0]
    words = ""
    in_range = None
    if typing.get_origin(kind) is Annotated:
        kind, words, in_range = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        fits = value in choices
        words = " or ".join(map(repr, choices))
    elif kind == tuple[str, ...]:
        fits = isinstance(value, tuple | list) and all(isinstance(x, str) for x in value)
        if fits:
            value = tuple(value)
        words = "names"
    else:
        if kind is float and type(value) is int:
            value = float(value)
        fits = type(value) in (typing.get_args(kind) or [kind])  # str | list has two types
        words = f"{getattr(kind, '__name__', kind)} {words}".strip()
    if not fits or (in_range and not in_range(value)):
        raise UserError(f"{name}={value!r}: expected {words}")
    return value


def plain(value: object) -> object:
    """Return a value with Python's numbers in place of numpy's."""
    if type(value) is dict:
        return {key: plain(x) for key, x in value.items()}
    is_number = type(value).__module__ == "numpy" and not value.shape
    return value.item() if is_number else value


def check_fields(config: object):
    """Check each field of a frozen dataclass by its kind, and convert it as `checked` does."""
    for name, kind in typing.get_type_hints(type(config), include_extras=True).items():
        object.__setattr__(config, name, checked(name, getattr(config, name), kind))


def parsed(text, kind) -> object:
    """Return the text after `--key=` as a value of a kind, not yet checked."""
    kinds = (kind, *typing.get_args(kind))  # the parts of KIND | None too
    if text in ("None", "none") and type(None) in kinds:
        return None
    if kind == tuple[str, ...]:
        return tuple(filter(None, text.split(",")))
    if str in kinds:
        return text
    return literal(text)


def literal(text) -> object:
    """Return the text as a Python literal if it is one, else unchanged."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError, TypeError):
        return text
