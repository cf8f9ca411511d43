"""One record for each student, by which the project tells whether two students are the same.

train.py compares records before it resumes a run, study/compare.py finds finished students by them,
and tables check that their rows can be compared. The record is `made_by` in run.json, in
checkpoints and in results. It holds the config keys that affect the weights, and hashes of the
content of teacher, rows and given first weights, and of the code that a step passes through. Paths,
speed and logging are not in it.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import math
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lib.code import (
    ROOT,
    code_reached,
    definitions_reached,
    files_reached,
    names_in,
    read_tree,
)
from lib.errors import UserError
from lib.files import text_hash
from lib.hf import find_folder, tensors_hash, weight_files
from lib.rows import read_manifest
from losses import default_settings, resolve
from model import Qwen2Config, student_config
from run.teacher import inherited, load_shape

# Config keys that a student's record has as they are. Instead of others it has the content of what
# they name or make: rows, models, a method. `max_steps` is not here, as a run may be continued; a
# checkpoint has its step. What is left changes rounding at most.
WEIGHTS = (
    "seed",
    "seq_len",
    "shuffle",
    "mask_after_eos",
    "schedule_steps",
    "batch_rows",
    "group",
    "lr",
    "min_lr",
    "warmup_steps",
    "beta1",
    "beta2",
    "adam_eps",
    "weight_decay",
    "decay_1d",
    "clip",
    "lr_schedule",
    "decay_share",
    "dtype",
)
RUN_FILE = {"config": {"methods": tuple[str, ...]}}  # what is read from a run's run.json
EDITS = ("objective", "code")  # keys of a record that an edit of the code changes
# The functions of train.py that every training step passes through.
STEP = ("make_student", "micro_batches", "update")
STEP_MODULES = ("train", "run.teacher", "lib.vocab")  # the last two through modules below
# Modules that change no number of a step, or that the record identifies otherwise.
NOT_FOLLOWED = (
    "configure",
    "losses",
    "lib.code",
    "lib.device",
    "lib.errors",
    "lib.files",
    "lib.hf",
    "lib.settings",
    "run.cache",
    "run.checkpoints",
    "run.exits",
    "run.histograms",
    "run.identity",
    "run.log",
    "run.preflight",
    "run.students",
    "run.validate",
)


def made_by(cfg, name) -> dict:
    """Return what determines a student's weights up to rounding, and its held-out rows; as JSON."""
    method = resolve(name, **cfg.overrides_of(name))
    train = read_manifest(cfg.data_dir, "train")
    val = read_manifest(cfg.data_dir, "val")
    shape = student_shape(cfg)
    code = code_reached(STEP_MODULES, STEP, NOT_FOLLOWED)
    teachers = [cfg.teacher] if method.has_teacher else []
    if not all(isinstance(x, Qwen2Config) for x in (shape, *map(load_shape, teachers))):
        code["transformers"] = version("transformers")  # which computes one of them
    # of the settings given to a student, `lr` alone is not among the method's
    hyper = default_settings(method.fn) | cfg.settings_of(name) | method.hyper
    moving = {}  # hashes of the values over the whole schedule
    for key, value_at in method.moving.items():
        values = [float(value_at(n / cfg.schedule_steps)) for n in range(cfg.schedule_steps)]
        moving[key] = hashlib.sha256(np.array(values).tobytes()).hexdigest()
    record = {
        "methods": name.partition("@")[0],
        **{key: getattr(cfg, key) for key in WEIGHTS},
        "hyper": hyper | {"w_kd": method.w_kd, "w_ce": method.w_ce},
        "moving": moving,
        "state": tensors_hash(method.state) if method.state else None,
        "objective": objective_code(name),
        "code": code,
        "shape": dataclasses.asdict(shape),
        "student_weights": content_hash(cfg.student_weights),
        "resume_from": content_hash(cfg.resume_from),
        "teacher_sha256": content_hash(cfg.teacher) if method.has_teacher else None,
        "data_sha256": train["sha256"],
        "val_sha256": val["sha256"],
        "tokenizer_sha256": train["tokenizer_sha256"],
    }
    return as_in_file(record)


def as_in_file(record: dict) -> dict:
    """Return a record as JSON holds it: tuples become lists, infinite numbers words."""
    return json.loads(json.dumps(record), parse_constant=str)


def record_hash(record: dict | list) -> str:
    return text_hash(json.dumps(record, sort_keys=True))


def record_changes(earlier: dict, current: dict, prefix="") -> dict[str, str]:
    """Return a phrase for each key in which two records differ; of dicts, the entries that differ.

    prefix  the keys of the dict that these are entries of, each with a dot
    """
    changes = {}
    for key in earlier | current:
        old = earlier.get(key)
        new = current.get(key)
        if old == new:
            continue
        changes[key] = f"{prefix}{key} was {old!r:.80}, now {new!r:.80}"
        if isinstance(old, dict) and isinstance(new, dict):
            inside = record_changes(old, new, f"{prefix}{key}.")
            changes[key] = ", ".join(inside.values())
            if key.partition(" ")[0] in EDITS:  # "objective of METHOD" in tables
                changes[key] = f"edited since: {', '.join(inside)}"
    return changes


def student_shape(cfg):
    """Return the students' shape, with at most as many tokens as the teacher's vocabulary has."""
    teacher_shape = inherited(cfg.teacher)
    shape = student_config(cfg.student, teacher_shape, load_shape)
    n_vocab = teacher_shape.get("vocab_size", math.inf)
    return dataclasses.replace(shape, vocab_size=min(shape.vocab_size, n_vocab))


def content_hash(name: str | None) -> str | None:
    """Return the sha256 of config.json and weights; None without a name.

    name  a model's folder, a hub id, or a checkpoint
    """
    if name is None:
        return None
    folder = find_folder(name)
    hashes = [file_hash(file) for file in (folder / "config.json", *weight_files(folder))]
    return text_hash(" ".join(hashes))


def file_hash(file) -> str:
    """Return the sha256 of a file. A process reads it again only if it has changed since."""
    facts = file.stat()
    return _file_hash(file, (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))


@functools.cache
def _file_hash(file, facts) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def objective_code(name) -> dict[str, str]:
    """Return the hashes of the definitions in losses.py that a method passes through.

    An objective in another file counts with all that this file and the files that it imports have.
    Variables of closures and defaults count by value, as in METHODS[f"x{k}"] = Method(make(k)).
    """
    fn = resolve(name).fn
    fn = getattr(fn, "func", fn)  # of a `partial`, whose arguments are settings
    used = {"mean_loss"}
    values = []
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    for value in (fn, *cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        path = getattr(value, "__qualname__", "")  # of a function
        values.append(path or repr(value))
        used |= {*path.replace("<lambda>", "METHODS").split(".")}  # a lambda stands in that table
    hashes = {"values": record_hash(values)[:8]}
    file = Path(inspect.getsourcefile(fn) or "").resolve()
    if not file.is_file():
        raise UserError(f"{name}: its objective is in no file; define it in losses.py")
    if file != ROOT / "losses.py":
        hashes |= files_reached((file.stem,), NOT_FOLLOWED, file.parent)
        used |= names_in(read_tree(file))
    return hashes | definitions_reached(used, ROOT / "losses.py")
