"""One record for each student, by which the project tells whether two students are the same.

train.py compares records before it resumes a run, study/compare.py finds finished students by them,
and tables check that their rows can be compared. The record is `made_by` in run.json, in
checkpoints and in results. It holds every config key but those of FREE, the content of teacher,
training rows and given first weights, and the source of the objective. Other code is not in it:
edits of that are shown where a run resumes, and under tables (lib/source.py).
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from pathlib import Path

import numpy as np

from configure import KINDS, Config
from lib.files import text_hash
from lib.head import OutputHead
from lib.hf import find_folder, weight_files
from lib.rows import read_manifest, row_order
from lib.source import reached
from losses import cross_entropy, default_settings, position_weight, resolve
from model import Qwen2Config, student_config
from run.teacher import inherited, load_shape

# Config keys that do not identify a student as they are. Any other key does, also one of your own.
# Line 1: the record has what they name. Lines 2 and 3: it has a hash of the training rows.
# Others: they change rounding at most, how far a run goes, or what it writes.
FREE = """
    methods hyper student student_weights teacher tokenizer resume_from data_dir
    source mixture_end source_config source_split source_text n_documents train_rows val_rows
    val_share workers max_bad_records bos repeat_rows
    micro_batch device teacher_device teacher_cache recompute chunk_positions compile shard
    timeout_minutes max_steps max_skipped_updates
    out_dir log_every_steps histogram_every_steps tensorboard wandb_project val_every_steps
    val_max_rows checkpoint_every_minutes checkpoint_every_steps keep_checkpoints keep_every_steps
    save_dtype
"""
KNOWN = ("fn", "hyper", "w_kd", "w_ce", "moving", "term", "in_chunks")  # fields of `Method`
OLDER = ("code", "objective", "state", "val_sha256")  # in records of older versions


def made_by(cfg, name) -> dict:
    """Return what determines a student's weights up to rounding, as JSON."""
    method = resolve(name, **cfg.overrides_of(name))
    train = read_manifest(cfg.data_dir, "train")
    # of the settings given to a student, `lr` alone is not among the method's
    hyper = default_settings(method.fn, method.term) | cfg.settings_of(name) | method.hyper
    hyper = {key: by_content(value) for key, value in hyper.items()}
    shuffle_seed = cfg.seed if cfg.shuffle else None
    moving = {}  # hashes of the values over the whole schedule
    for key, value_at in method.moving.items():
        values = [float(value_at(n / cfg.schedule_steps)) for n in range(cfg.schedule_steps)]
        moving[key] = hashlib.sha256(np.array(values).tobytes()).hexdigest()
    weights = {"w_kd": method.w_kd, "w_ce": method.w_ce}
    fields = {}  # of your own, unless they are as in a row without them
    for key, x in method._asdict().items():
        if not (key in KNOWN or callable(x) or x == method._field_defaults.get(key)):
            fields[key] = x
    mean_of_teachers = method.has_teacher and "," in f"{cfg.teacher}" and OutputHead.logits
    record = {
        "methods": name.partition("@")[0],
        **settings_of_run(cfg),
        "hyper": hyper | weights | fields,
        "moving": moving,
        # hashes of all own code that the loss reaches, by name
        "source": reached(*method, cross_entropy, position_weight, mean_of_teachers),
        "shape": dataclasses.asdict(student_shape(cfg)),
        "student_weights": content_hash(cfg.student_weights),
        "resume_from": content_hash(cfg.resume_from),
        "teacher_sha256": content_hash(cfg.teacher) if method.has_teacher else None,
        "data_sha256": train["sha256"],
        "order_sha256": order_hash(shuffle_seed, cfg.batch_rows, train["rows"], cfg.schedule_steps),
        "tokenizer_sha256": train["tokenizer_sha256"],
    }
    return as_in_file(record)


def settings_of_run(cfg) -> dict:
    """Return the config keys that identify a student. A file that one names counts by content."""
    keys = KINDS.keys() - FREE.split()
    return {key: by_content(value) for key, value in vars(cfg).items() if key in keys}


def by_content(value) -> object:
    """Return a setting, or the hash of the file that it names."""
    is_path = isinstance(value, str) and ("/" in value or "." in value)  # a bare word is none
    if is_path and os.path.isfile(value):
        return file_hash(Path(value))
    return value


@functools.cache  # students of a seed share it
def order_hash(shuffle_seed: int | None, batch_rows: int, n_rows: int, end: int) -> str:
    """Return a hash of the rows of the updates before `end`: of all, or of 2,000 spread over them.

    The other arguments are those of `row_order`.
    """
    steps = np.linspace(0, end - 1, min(end, 2000)).astype(int).tolist()
    rows = [row_order(step, batch_rows, n_rows, shuffle_seed) for step in steps]
    return hashlib.sha256(np.concatenate(rows).tobytes()).hexdigest()


def as_in_file(record: dict) -> dict:
    """Return a record as JSON holds it: tuples become lists, infinite numbers and objects words."""
    text = json.dumps(record, default=lambda x: re.sub(" at 0x[0-9a-f]+", "", repr(x)))
    return json.loads(text, parse_constant=str)


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
            if key.partition(" ")[0] == "source":  # "source of METHOD" in tables
                changes[key] = f"edited since: {', '.join(inside)}"
    return changes


def student_changes(earlier: dict, current: dict) -> dict[str, str]:
    """Return `record_changes` from the record of an earlier start, or of an older version.

    A config key, and a field of the shape, that is newer than the record had its default. Other
    keys that the record lacks, and those of OLDER and FREE that it has alone, are not compared. A
    student without a rate of its own has the run's.
    """
    fields = {field.name: field.default for field in dataclasses.fields(Qwen2Config)}
    shape = {key: value for key, value in fields.items() if key in current["shape"]}
    known = as_in_file(settings_of_run(Config())) | earlier | {"shape": shape | earlier["shape"]}
    ignored = {*OLDER, *FREE.split()}
    compared = []
    for record in (known, current):
        common = {key: record.get(key) for key in known if key in current or key not in ignored}
        if "lr" in known.get("hyper", {}) | current.get("hyper", {}):
            common["hyper"] = {"lr": record["lr"]} | record["hyper"]
        compared.append(common)
    return record_changes(*compared)


def student_shape(cfg):
    """Return the students' shape, with at most as many tokens as the teacher's vocabulary has."""
    teacher_shape = inherited(cfg.teacher)
    shape = student_config(cfg.student, teacher_shape, load_shape)
    n_vocab = teacher_shape.get("vocab_size", math.inf)
    return dataclasses.replace(shape, vocab_size=min(shape.vocab_size, n_vocab))


def content_hash(name: str | None) -> str | None:
    """Return the sha256 of config.json and weights; None without a name.

    name  a model's folder, a hub id, or a checkpoint; or several teachers, "a,b"
    """
    if name is None:
        return None
    folders = map(find_folder, f"{name}".split(","))
    files = [file for x in folders for file in (x / "config.json", *weight_files(x))]
    return text_hash(" ".join(map(file_hash, files)))


def file_hash(file) -> str:
    """Return the sha256 of a file. A process reads it again only if it has changed since."""
    facts = file.stat()
    return _file_hash(file, (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))


@functools.cache
def _file_hash(file, facts) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
