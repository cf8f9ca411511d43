"""What a setting may be: kinds for the keys of a config and for the settings of objectives, and the one check of both."""

import ast
import math
import types
import typing
from typing import Annotated, Literal

from lib.errors import require

PositiveInt = Annotated[int, "1 or more", lambda x: 1 <= x < 2**53]
NonNegativeInt = Annotated[int, "0 or more", lambda x: 0 <= x < 2**53]
Positive = Annotated[float, "more than 0", lambda x: 0 < x < math.inf]
NonNegative = Annotated[float, "0 or more", lambda x: 0 <= x < math.inf]
UnitInterval = Annotated[float, "0 to 1", lambda x: 0 <= x <= 1]
Below1 = Annotated[float, "0 to below 1", lambda x: 0 <= x < 1]
PositiveFraction = Annotated[float, "more than 0, at most 1", lambda x: 0 < x <= 1]


def checked(name: str, value: object, kind) -> object:
    """`value` as its kind. An int becomes a float and a list of names a tuple; nothing else converts."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # KIND | None
        if value is None:
            return None
        kind = typing.get_args(kind)[0]
    base, words, fits = (kind, "", None) if typing.get_origin(kind) is not Annotated else typing.get_args(kind)
    if typing.get_origin(base) is Literal:
        ok, words = value in typing.get_args(base), " or ".join(map(repr, typing.get_args(base)))
    elif base == tuple[str, ...]:
        ok, words = isinstance(value, tuple | list) and all(isinstance(x, str) for x in value), "names"
        value = tuple(value) if ok else value
    else:
        value = float(value) if base is float and type(value) is int else value
        ok, words = type(value) is base, f"{base.__name__} {words}".strip()
    require(ok and (fits is None or fits(value)), f"{name}={value!r}: expected {words}")
    return value


def parsed(text: str, kind) -> object:
    """The text after `--key=` as a value: a str where the kind is one, a Python literal elsewhere."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if text in ("None", "none") and type(None) in kinds:
        return None
    if kind == tuple[str, ...]:
        return tuple(filter(None, text.split(",")))
    return text if str in kinds or typing.get_origin(kind) is Literal else literal(text)


def literal(text: str) -> object:
    """The text as a Python literal if it is one, else unchanged."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
