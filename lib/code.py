"""Hashes of code, by which a result knows whether the code that made it was edited since.

A hash is of syntax trees: comments, layout, docstrings, annotations, and the words of `raise` and
of calls that print do not count. `file_code` is of a whole file. `definitions` is of what an
objective reaches, as it stands in memory: functions and classes in the project's files by their
source, and constants, closures' variables and defaults by their value. So it sees objectives that
are made in a loop, rows of a table, and names that come through any import. It does not see a name
that is looked up by a string, nor the attributes of an object that is not a function or class.
"""

import ast
import functools
import hashlib
import inspect
import marshal
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
PRINTS = ("say(", "print(")
CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Tensor)
# fields of a node that only some versions of Python have, or that change no number
LEFT_OUT = ("annotation", "ctx", "kind", "returns", "type_comment", "type_params")


@functools.cache
def file_code(name: str) -> str:
    """Return the hash of one of the project's files."""
    return text_hash((ROOT / name).read_text(encoding="utf-8"))


def definitions(begin, folders, skip) -> dict[str, str]:
    """Return the hashes of the functions and classes that some of them reach, by dotted path.

    folders  of the files that are followed
    skip     modules that are not followed
    """
    hashes = {}
    waiting = list(begin)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, functools.partial):
            waiting += [thing.func, *thing.args, *thing.keywords.values()]
        thing = inspect.unwrap(thing)
        if not isinstance(thing, types.FunctionType | type) or thing.__module__ in skip:
            continue
        path = f"{thing.__module__}.{thing.__qualname__}"
        if path in hashes or not is_followed(thing, folders):
            continue
        constants = []
        for name, value in sorted(used_values(thing, folders), key=lambda pair: pair[0]):
            for leaf in tree_leaves(value):
                if isinstance(leaf, CONSTANTS):
                    constants.append(f"{name}={leaf!r}")
                else:
                    waiting.append(leaf)
        hashes[path] = text_hash(source_of(thing), *constants)
    return dict(sorted(hashes.items()))


def file_of(thing) -> str:
    """Return the file of a function, class or module; "" for what is built in."""
    if isinstance(thing, types.FunctionType):
        return thing.__code__.co_filename
    if isinstance(thing, type):
        thing = sys.modules.get(thing.__module__)
    return getattr(thing, "__file__", None) or ""


def is_followed(thing, folders) -> bool:
    """Return whether a thing is made in memory, or in a file of the folders, which isn't installed."""
    file = file_of(thing)
    in_folders = any(Path(file).is_relative_to(folder) for folder in folders)
    return file.startswith("<") or (in_folders and "site-packages" not in file)


def source_of(thing) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except OSError:  # made in memory
        return marshal.dumps(thing.__code__).hex()


def used_values(thing, folders) -> Iterator[tuple[str, object]]:
    """Yield the names and values that a function, or the methods of a class, can read."""
    members = [thing] if isinstance(thing, types.FunctionType) else vars(thing).values()
    for function in members:
        if not isinstance(function, types.FunctionType):
            continue
        names = names_in(function.__code__)
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if not isinstance(value, types.ModuleType):
                yield name, value
            elif is_followed(value, folders):
                for member in names & vars(value).keys():
                    yield f"{name}.{member}", vars(value)[member]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield name, cell.cell_contents
        yield "defaults", (function.__defaults__, function.__kwdefaults__)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names that code uses, with the functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def text_hash(text: str, *constants: str) -> str:
    try:
        text = dump(ast.parse(text).body)
    except SyntaxError:  # part of a statement, as for a lambda
        pass
    return hashlib.sha256("\n".join([text, *constants]).encode()).hexdigest()[:8]


def dump(node: object) -> str:
    """Return a text that is equal for equal trees, in every version of Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_print = isinstance(node, ast.Expr) and ast.unparse(node).startswith(PRINTS)
    if isinstance(node, ast.Raise) or is_text or is_print:
        return ""
    fields = [dump(value) for key, value in ast.iter_fields(node) if key not in LEFT_OUT]
    return f"{type(node).__name__}({', '.join(fields)})"
