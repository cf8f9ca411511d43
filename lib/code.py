"""Hashes of the project's code, by which a result knows whether what made it was edited since.

A hash is of a syntax tree: comments, layout, docstrings, annotations, and the words of `raise` and
of calls that print do not count. Files are found by their import statements, also inside functions;
definitions by the names that they use, wherever in the file a name is bound.
"""

import ast
import functools
from pathlib import Path

from lib.files import text_hash

ROOT = Path(__file__).resolve().parent.parent
PRINTS = ("say(", "note(", "print(")
# fields of a node that only some versions of Python have, or that change no number
LEFT_OUT = ("annotation", "ctx", "kind", "returns", "type_comment", "type_params")


@functools.cache
def files_reached(begin, skip=(), root=ROOT) -> dict[str, str]:
    """Return the hashes of modules, and of all that they import from the project, by name.

    begin, skip  names of modules, such as "run.log"; those of `skip` are left out
    """
    hashes = {}
    waiting = list(begin)
    while waiting:
        name = waiting.pop()
        path = root.joinpath(*name.split("."))
        file = next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)
        if file is None or name in hashes or name in skip:
            continue
        hashes[name] = tree_hash(read_tree(file))
        for node in ast.walk(read_tree(file)):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""  # `from . import x` has none
                waiting.append(module)
                waiting += [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
    return dict(sorted(hashes.items()))


def code_reached(modules, names, skip=(), root=ROOT) -> dict[str, str]:
    """Return the hashes of what functions of a script pass through, by name.

    These are definitions in the script, found by `names`, and whole modules that it imports: so an
    edit elsewhere in the script, as of its messages, does not count.

    modules  the script, and modules that it reaches through one of `skip`
    """
    script, *_ = modules
    others = dict(files_reached(modules, skip, root))
    del others[script]
    return others | definitions_reached(names, root / f"{script}.py")


def definitions_reached(begin, file) -> dict[str, str]:
    """Return the hashes of the definitions in a file that names use, and so on, by name."""
    bound = definitions(file)
    hashes = {}
    waiting = list(begin)
    while waiting:
        name = waiting.pop()
        if name in bound and name not in hashes:
            hashes[name] = tree_hash(bound[name])
            for node in bound[name]:
                waiting += names_in(node)
    return dict(sorted(hashes.items()))


@functools.cache
def read_tree(file) -> ast.Module:
    return ast.parse(file.read_bytes())


@functools.cache
def definitions(file) -> dict[str, list[ast.stmt]]:
    """Return the statements that define or change each name, for those at the top of a file.

    A statement such as `if` or `for` counts as a whole for each name inside it.
    """
    bound = {}
    for statement in read_tree(file).body:
        names = {getattr(statement, "name", "")}
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names = names_in(statement, ast.FunctionDef | ast.ClassDef)
            for node in ast.walk(statement):
                if isinstance(getattr(node, "ctx", None), ast.Store):
                    names |= names_in(node)
        for name in names:
            bound.setdefault(name, []).append(statement)
    return bound


def names_in(node, kinds=ast.Name) -> set[str]:
    return {
        getattr(child, "id", None) or child.name
        for child in ast.walk(node)
        if isinstance(child, kinds)
    }


def tree_hash(tree: object) -> str:
    return text_hash(dump(tree))[:8]


def dump(node: object) -> str:
    """Return a text that is equal for equal trees, in every version of Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Raise):
        return ""
    if isinstance(node, ast.Expr) and (
        isinstance(node.value, ast.Constant) or ast.unparse(node).startswith(PRINTS)
    ):
        return ""
    fields = [dump(value) for key, value in ast.iter_fields(node) if key not in LEFT_OUT]
    return f"{type(node).__name__}({', '.join(fields)})"
