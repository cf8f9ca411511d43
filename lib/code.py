"""The definitions that a computation passes through, found in the source without running it.

`closure` begins with some definitions and follows every name that they use to its definition in the
project's own files, and so on. A name is one of the same file, or one that the file imports, such
as `from lib.vocab import kl`, or `from lib import vocab` with `vocab.split`. A class counts as a
whole. Each definition is identified by a hash of its syntax tree. Comments, layout, docstrings,
annotations, and the words of `raise` and of calls that print do not count; names in these are
followed all the same.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRINTS = ("say(", "print(")
# fields of a node that only some versions of Python have, or that change no number
LEFT_OUT = ("annotation", "ctx", "kind", "returns", "type_comment", "type_params")


class Source(NamedTuple):
    definitions: dict[str, list[ast.stmt]]  # top-level name -> statements that bind or change it
    imports: dict[str, str]  # name -> dotted path, such as "vocab" -> "lib.vocab"


def closure(begin, skip=(), roots=(ROOT,)) -> dict[str, str]:
    """Return the hashes of all definitions that a computation passes through, by dotted path.

    begin  dotted paths of the first definitions, such as "train.update"
    skip   modules and definitions that are not followed, such as "run.log" or "losses.METHODS"
    roots  folders of the files that are followed
    """
    hashes = {}
    waiting = list(begin)
    while waiting:
        file, module, name = find_definition(waiting.pop(), roots)
        path = f"{module}.{name}"
        if file is None or path in hashes or path in skip or module in skip:
            continue
        source = read_source(file)
        if name in source.imports:
            waiting.append(source.imports[name])
        if name in source.definitions:
            hashes[path] = tree_hash(source.definitions[name])
            for statement in source.definitions[name]:
                waiting += used_paths(statement, module, source)
    return dict(sorted(hashes.items()))


@functools.cache
def find_definition(path: str, roots):
    """Return the file, module and name that a dotted path stands for; None if `roots` have none."""
    parts = path.split(".")
    for n in range(1, len(parts)):
        for root in roots:
            file = root.joinpath(*parts[:n]).with_suffix(".py")
            if file.is_file():
                return file, ".".join(parts[:n]), parts[n]
    return None, "", ""


@functools.cache
def read_source(file) -> Source:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    definitions = {}
    for statement in tree.body:
        for name in bound_names(statement):
            definitions.setdefault(name, []).append(statement)
    imports = {}
    for node in ast.walk(tree):  # also inside functions
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                imports[alias.asname or alias.name] = prefix + alias.name
    return Source(definitions, imports)


def bound_names(statement) -> set[str]:
    """Return the names that a top-level statement binds, or whose items or attributes it sets."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            while isinstance(node, ast.Attribute | ast.Subscript):
                node = node.value
            if isinstance(node, ast.Name):
                names.add(node.id)
    return names


def used_paths(statement, module: str, source: Source) -> Iterator[str]:
    """Yield dotted paths of the definitions that a statement names."""
    for node in ast.walk(statement):
        names = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            first = source.imports.get(node.id, f"{module}.{node.id}")
            yield ".".join([first, *names])


def tree_hash(tree: object) -> str:
    return hashlib.sha256(dump(tree).encode()).hexdigest()[:8]


def dump(node: object) -> str:
    """Return a text that is equal for equal trees, in every version of Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    is_print = isinstance(node, ast.Expr) and ast.unparse(node).startswith(PRINTS)
    if isinstance(node, ast.Raise) or is_print:
        return ""
    fields = {key: value for key, value in ast.iter_fields(node) if key not in LEFT_OUT}
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return f"{type(node).__name__}({', '.join(map(dump, fields.values()))})"
