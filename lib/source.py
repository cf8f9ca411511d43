"""The project's own code: what a process has loaded, and what a function reaches.

Own is every Python file but those of installed packages, wherever it stands, and whether or not git
tracks it.
"""

import functools
import inspect
import os
import re
import sys
import sysconfig
import types
import zipfile
from pathlib import Path

import numpy as np
import torch

from lib.files import text_hash, writing

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")
# what counts by value where an objective names it; of other values, the text of their file is shown
CONSTANTS = (int, float, str, tuple, list, dict, set, frozenset, np.ndarray, torch.Tensor)
# what holds a function: of torch.compile, functools.cache; a static method, property, or partial
WRAPPED = ("__wrapped__", "__func__", "fget", "func")


def is_own_file(file: str | None) -> bool:
    return f"{file}".endswith(".py") and not any(part in file for part in INSTALLED)


def is_own(value: object) -> bool:
    """Return whether a module, function or class is the project's own."""
    try:
        return is_own_file(inspect.getsourcefile(value))
    except (TypeError, OSError):  # what is built in
        return False


def loaded_sources() -> dict[str, str]:
    """Return the text of all own files that are loaded, by their paths from the project's."""
    # torch's compiler names the modules that it writes torch.X
    modules = [module for name, module in sys.modules.items() if not name.startswith("torch.")]
    named = [getattr(module, "__file__", None) for module in modules]
    files = {os.path.realpath(file) for file in named if is_own_file(file)}
    return {os.path.relpath(file, ROOT): Path(file).read_text() for file in sorted(files)}


def hashes(sources: dict[str, str]) -> dict[str, str]:
    return {name: text_hash(text)[:8] for name, text in sources.items()}


def write_snapshot(folder: Path, sources: dict[str, str]):
    """Write the sources into a zip file that is named by their hashes."""
    file = folder / f"code_{text_hash(str(hashes(sources)))[:8]}.zip"
    with writing(file), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sources.items():
            archive.writestr(name, text)


def merged(*codes: dict[str, str]) -> dict[str, str]:
    """Return all hashes that a file has in these, as one text, by name."""
    found = {}
    for code in codes:
        for name, texts in code.items():
            found.setdefault(name, {}).update(dict.fromkeys(texts.split()))
    return {name: " ".join(versions) for name, versions in found.items()}


def edited(*codes: dict[str, str]) -> list[str]:
    """Return the files that have several hashes. A file that only some have is not among them."""
    return sorted(name for name, versions in merged(*codes).items() if " " in versions)


def reached(*roots: object) -> dict[str, str]:
    """Return the hashes of all own functions and classes that these reach, by name.

    A function reaches the globals that it names, those of own modules that it names, and what its
    closure holds; a class reaches its bases, and what its functions reach. Comments and docstrings
    do not count.
    """
    texts = {}
    waiting = [*roots]
    while waiting:
        value = waiting.pop()
        # not `hasattr`, as some objects make an attribute of any name
        found = [name for name in WRAPPED if inspect.getattr_static(value, name, None)]
        waiting += [getattr(value, name) for name in found]
        if not isinstance(value, types.FunctionType | type) or not is_own(value):
            continue
        constants = []
        if isinstance(value, type):
            named = [*value.__bases__, *vars(value).values()]
        else:
            named = values_named(value)
            constants = [in_order(x) for x in named if isinstance(x, CONSTANTS)]
        text = re.sub(" at 0x[0-9a-f]+", "", f"{source_of(value)} {constants}")
        name = f"{value.__module__}.{value.__qualname__}"
        if text not in texts.setdefault(name, set()):  # closures of one function may differ
            texts[name].add(text)
            waiting += named
    return hashes({name: str(sorted(texts[name])) for name in sorted(texts)})


def in_order(value: object) -> object:
    """Return a constant whose text is the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, dict):
        return {key: in_order(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [*map(in_order, value)]
    return value.tolist() if hasattr(value, "tolist") else value


def values_named(fn) -> list[object]:
    """Return what a function names: globals, attributes of own modules; its closure, defaults."""
    names = names_in(fn.__code__)
    values = [x for name, x in sorted(fn.__globals__.items()) if name in names]
    for module in [x for x in values if isinstance(x, types.ModuleType) and is_own(x)]:
        values += [x for name, x in sorted(vars(module).items()) if name in names]
    values += inspect.getclosurevars(fn).nonlocals.values()
    return [*values, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def names_in(code: types.CodeType) -> set[str]:
    """Return the globals and attributes that code names, and functions inside it."""
    inside = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return {*code.co_names}.union(*map(names_in, inside))


@functools.cache
def source_of(value) -> str:
    """Return the source of a function or class without comments, docstrings and blank lines."""
    source = inspect.getsource(getattr(value, "__code__", value))
    text = re.sub(r'"""[\s\S]*?"""|#.*', "", source)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
