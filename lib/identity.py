"""What made a student: one record, by which all parts of the project tell whether two students are the same.

train.py compares it before it resumes a run, tools/compare.py finds finished students by it, tables hold it against each
other. It is `made_by` in run.json, in checkpoints and in results. Of a config it holds the keys that decide what is learnt, none of places, speed
or log; of teacher, rows and first weights it holds hashes of their content.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import textwrap
import types
from pathlib import Path

from torch import Tensor

from configure import ROLES, Config
from lib.errors import require
from lib.files import read_json
from lib.hf import find_folder, tensors_hash, weight_files
from lib.teacher import inherited
from lib.methods import default_settings, resolve, settings
from model import Qwen2Config, student_config

PLAIN = int | float | complex | str | bytes | None
VARIES = ("methods", "hyper", "objective", "shape", "seed")  # keys that may differ between the rows of one table


def made_by(cfg: Config, name: str) -> dict:
    """All that decides what the student `name` is after some updates, but for rounding, as JSON."""
    method, own = resolve(name, **cfg.overrides_of(name)), cfg.settings_of(name)
    train, val = (read_json(Path(cfg.data_dir, f"{part}.json"), ["sha256", "tokenizer_sha256"]) for part in ("train", "val"))  # fmt: skip
    values = {**own, **default_settings(method.fn), **method.hyper, **method._asdict()}
    record = {key: getattr(cfg, key) for key, role in ROLES.items() if role == "learnt"} | {
        "methods": name.partition("@")[0],
        "hyper": {key: values[key] for key in (*settings(name), *own)},
        "objective": code_hash((method.fn, method.moving)),
        "shape": dataclasses.asdict(student_shape(cfg)),
        "student_weights": content_hash(cfg.student_weights) if cfg.student_weights else None,
        "resume_from": content_hash(cfg.resume_from) if cfg.resume_from else None,
        "teacher_sha256": content_hash(cfg.teacher) if method.has_teacher else None,
        "data_sha256": train["sha256"],
        "val_sha256": val["sha256"],
        "tokenizer_sha256": train["tokenizer_sha256"],
    }
    del record["max_steps"]  # a run may go on: how far it came stands beside the record
    return json.loads(json.dumps(record))


def record_hash(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def differences(before: dict, now: dict) -> list[str]:
    """What differs between two records, in words."""
    words = {"objective": "its objective, or a function that it calls, was edited"}
    differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [words.get(key, f"{key} was {before.get(key)!r:.80}, now {now.get(key)!r:.80}") for key in differ]


def student_shape(cfg: Config) -> Qwen2Config:
    """The students' shape. A vocabulary larger than the teacher's is cut to that."""
    given = inherited(cfg.teacher)
    shape = student_config(cfg.student, given)
    return dataclasses.replace(
        shape, vocab_size=min(shape.vocab_size, (given or {}).get("vocab_size", shape.vocab_size))
    )


def content_hash(name: str) -> str:
    """sha256 of the config.json and the weights of a model's folder, of a hub id or of a checkpoint."""
    folder = find_folder(name)
    require((folder / "config.json").is_file(), f"{name}: no config.json in it; expected a model's folder or a checkpoint")  # fmt: skip
    hashes = [file_hash(file) for file in (folder / "config.json", *weight_files(folder))]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def file_hash(file: Path) -> str:
    """sha256 of a whole file, read once by a process for as long as its size and time stay."""
    require(file.is_file(), f"{file}: no such file")
    return _file_hash(file, file.stat().st_size, file.stat().st_mtime_ns)


@functools.cache
def _file_hash(file: Path, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@functools.cache
def code_hash(fn: object) -> str:
    """sha256 of what a function computes with: its code, closure, `partial` arguments, and all that it names in its own file.

    Comments, docstrings and layout do not count, nor does code of other files.
    """
    return hashlib.sha256("\n".join(_code(fn, {})).encode()).hexdigest()


def _code(x: object, seen: dict) -> list[str]:
    x = inspect.unwrap(x) if callable(x) else x
    x = (x.func, x.args, x.keywords) if isinstance(x, functools.partial) else x
    x = tuple(x.items()) if isinstance(x, dict) else x
    if id(x) in seen:
        return [seen[id(x)]]
    if isinstance(x, list | tuple):
        return [str(len(x)), *(line for part in x for line in _code(part, seen))]
    if isinstance(x, Tensor):
        return [tensors_hash({"": x})]
    if isinstance(x, types.CodeType):
        return [x.co_code.hex(), *_code((x.co_names, x.co_consts), seen)]
    if not isinstance(x, types.FunctionType | type):
        return [repr(x) if isinstance(x, PLAIN) else f"{type(x).__module__}.{type(x).__qualname__}"]
    seen[id(x)] = x.__qualname__  # met again: its name is enough
    cells = ()
    if isinstance(x, types.FunctionType):
        cells = (inspect.getclosurevars(x).nonlocals, x.__defaults__, x.__kwdefaults__)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(x)))
    except (OSError, SyntaxError):  # without a file, or a part of a line
        return _code((x.__code__, cells), seen)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    names, home = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}, vars(sys.modules[x.__module__])
    used = {name: home[name] for name in sorted(names & home.keys()) if _is_part(home[name], x.__module__)}
    return [ast.unparse(tree), *_code((used, cells), seen)]


def _is_part(x: object, module: str) -> bool:
    """Whether something that a function names is a part of it: a constant, or a function or class of its file."""
    x = inspect.unwrap(x) if callable(x) else x
    return isinstance(x, PLAIN | list | tuple | dict | functools.partial) or getattr(x, "__module__", "") == module
