"""One record for each student, by which the project tells whether two students are the same.

train.py compares records before it resumes a run, study/compare.py finds finished students by them,
and tables check that their rows can be compared. The record is `made_by` in run.json, in
checkpoints and in results. It holds the config keys that affect the weights, and hashes of the
content of teacher, rows and first weights. Paths, speed and logging are not in it.
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

from configure import AFFECTS, Config
from lib.errors import UserError
from lib.files import read_json
from lib.hf import find_folder, tensors_hash, weight_files
from losses import default_settings, resolve, settings
from model import Qwen2Config, student_config
from run.teacher import inherited

PLAIN = int | float | complex | str | bytes | None
VARIES = ("methods", "hyper", "objective", "shape", "seed")  # may differ between rows of one table


def made_by(cfg: Config, name: str) -> dict:
    """Return everything that determines a student's weights, up to rounding, as a JSON object."""
    method = resolve(name, **cfg.overrides_of(name))
    train = read_manifest(cfg, "train")
    val = read_manifest(cfg, "val")
    record = {key: getattr(cfg, key) for key, affects in AFFECTS.items() if affects == "weights"}
    del record["max_steps"]  # a run may be continued; its step is stored beside the record
    record["methods"] = name.partition("@")[0]
    record["hyper"] = all_settings(cfg, name)
    record["objective"] = code_hash((method.fn, method.moving))
    record["shape"] = dataclasses.asdict(student_shape(cfg))
    record["student_weights"] = content_hash(cfg.student_weights)
    record["resume_from"] = content_hash(cfg.resume_from)
    record["teacher_sha256"] = content_hash(cfg.teacher) if method.has_teacher else None
    record["data_sha256"] = train["sha256"]
    record["val_sha256"] = val["sha256"]
    record["tokenizer_sha256"] = train["tokenizer_sha256"]
    return json.loads(json.dumps(record))  # tuples become lists, as in a file


def read_manifest(cfg: Config, part: str) -> dict:
    return read_json(Path(cfg.data_dir, f"{part}.json"), ["sha256", "tokenizer_sha256"])


def all_settings(cfg: Config, name: str) -> dict:
    """Return all settings of a student: its objective's, its weights, and `lr` if it was set."""
    chosen = cfg.settings_of(name)
    method = resolve(name, **cfg.overrides_of(name))  # with the chosen settings, except lr
    values = chosen | default_settings(method.fn) | method.hyper
    values |= {"w_kd": method.w_kd, "w_ce": method.w_ce}
    return {key: values[key] for key in (*settings(name), *chosen)}


def record_hash(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def differences(earlier: dict, current: dict) -> list[str]:
    """Return a phrase for each difference between two records."""
    phrases = []
    for key in {**earlier, **current}:
        old = earlier.get(key)
        new = current.get(key)
        if old != new and key == "objective":
            phrases.append("its objective, or a function that it calls, was edited")
        elif old != new:
            phrases.append(f"{key} was {old!r:.80}, now {new!r:.80}")
    return phrases


def student_shape(cfg: Config) -> Qwen2Config:
    """Return the students' shape, with at most as many tokens as the teacher's vocabulary has."""
    teacher_shape = inherited(cfg.teacher)
    shape = student_config(cfg.student, teacher_shape)
    if not teacher_shape:
        return shape
    vocab_size = min(shape.vocab_size, teacher_shape["vocab_size"])
    return dataclasses.replace(shape, vocab_size=vocab_size)


def content_hash(name: str | None) -> str | None:
    """Return the sha256 of config.json and weights; None without a name.

    name  a model's folder, a hub id, or a checkpoint
    """
    if name is None:
        return None
    folder = find_folder(name)
    if not (folder / "config.json").is_file():
        expected = "expected a model's folder or a checkpoint"
        raise UserError(f"{name}: no config.json in it; {expected}")
    hashes = [file_hash(file) for file in (folder / "config.json", *weight_files(folder))]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def file_hash(file: Path) -> str:
    """Return the sha256 of a file. A process reads it again only if its size or time changes."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    return _file_hash(file, file.stat().st_size, file.stat().st_mtime_ns)


@functools.cache
def _file_hash(file: Path, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------
# the code of an objective


@functools.cache
def code_hash(fn: object) -> str:
    """Return the sha256 of what a function computes with.

    That is its code, closure and `partial` arguments, and everything that it names in its own file.
    Comments, docstrings and layout do not count, nor does code of other files.
    """
    return hashlib.sha256("\n".join(_describe(fn, {})).encode()).hexdigest()


def _describe(x: object, seen: dict) -> list[str]:
    """Return lines that describe an object, functions and classes by their code.

    seen  names of the functions and classes that are described already, by id
    """
    if callable(x):
        x = inspect.unwrap(x)
    if isinstance(x, functools.partial):
        x = (x.func, x.args, x.keywords)
    if isinstance(x, dict):
        x = tuple(x.items())
    if id(x) in seen:
        return [seen[id(x)]]
    if isinstance(x, list | tuple):
        lines = [str(len(x))]
        for part in x:
            lines += _describe(part, seen)
        return lines
    if isinstance(x, Tensor):
        return [tensors_hash({"": x})]
    if isinstance(x, types.CodeType):
        return [x.co_code.hex(), *_describe((x.co_names, x.co_consts), seen)]
    if isinstance(x, types.FunctionType | type):
        seen[id(x)] = x.__qualname__
        return _describe_definition(x, seen)
    if isinstance(x, PLAIN):
        return [repr(x)]
    return [f"{type(x).__module__}.{type(x).__qualname__}"]


def _describe_definition(x: types.FunctionType | type, seen: dict) -> list[str]:
    """Return a function's or class's code, and what it takes from its closure and its file."""
    closure = ()
    if isinstance(x, types.FunctionType):
        closure = (inspect.getclosurevars(x).nonlocals, x.__defaults__, x.__kwdefaults__)
    try:
        tree = ast.parse(_source(x))
    except (OSError, SyntaxError):  # without a file, or a part of a line
        return _describe((x.__code__, closure), seen)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_definition and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    module = vars(sys.modules[x.__module__])
    parts = {}
    for name in sorted(names & module.keys()):
        if _is_part(module[name], x.__module__):
            parts[name] = module[name]
    return [ast.unparse(tree), *_describe((parts, closure), seen)]


def _source(x: types.FunctionType | type) -> str:
    """Return the source of a function or class. Raises `OSError` for code that `exec` has made.

    Since Python 3.13 `inspect` takes such code for a part of what `python -c` runs, if anything.
    """
    if inspect.getfile(x) == "<string>":
        raise OSError("made by exec")
    return textwrap.dedent(inspect.getsource(x))


def _is_part(x: object, module: str) -> bool:
    """Whether an object is a constant, or a function or class of this module."""
    if callable(x):
        x = inspect.unwrap(x)
    is_constant = isinstance(x, PLAIN | list | tuple | dict | functools.partial)
    return is_constant or getattr(x, "__module__", "") == module
