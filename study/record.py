"""The students and trials of a comparison that have ended, with figures and logs.

OUT/students.jsonl.zst has a line for each of them: its facts, its figures (CE, KL, ..) and its
`log`. `pandas.read_json(FILE, lines=True)` reads it.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import zstandard

from configure import Config
from lib.errors import UserError
from lib.files import atomic_write, read_json
from lib.rows import read_manifest
from run.provenance import content_hash, made_by, record_changes, student_changes, student_shape
from run.results import newest_figures, read_log
from run.teacher import teacher_flops

FILE = "students.jsonl.zst"
LEVEL = 12  # of all writes: an unchanged beginning then has the same bytes, which git stores once
TRIAL_SEED = 0  # of all trials; students have seeds from 1 on


def read_students(out) -> list[dict]:
    """Return all students and trials on record, with their logs."""
    file = out / FILE
    if not file.exists():
        return []
    return [json.loads(x) for x in zstandard.decompress(file.read_bytes()).splitlines()]


def write_students(out, students: list[dict]):
    lines = "".join(json.dumps(x) + "\n" for x in students)
    atomic_write(out / FILE, zstandard.compress(lines.encode(), LEVEL))


@cache
def record_of(student: Config) -> dict:
    return made_by(student, student.methods[0])


@cache
def held_out(data_dir) -> str:
    return read_manifest(data_dir, "val")["sha256"]


def changes(student: Config, facts: dict) -> dict[str, str]:
    """Return a phrase for each fact in which a student differs from one on record.

    A trial must also have been judged by the same rows.
    """
    earlier = {"max_steps": facts["config"]["max_steps"]}
    current = {"max_steps": student.max_steps}
    if student.seed == TRIAL_SEED:
        earlier["val_max_rows"] = facts["config"]["val_max_rows"]
        earlier["val_sha256"] = (facts["made_by"] | facts).get("val_sha256")  # older: in made_by
        current |= {"val_max_rows": student.val_max_rows, "val_sha256": held_out(student.data_dir)}
    return student_changes(facts["made_by"], record_of(student)) | record_changes(earlier, current)


def find(student: Config, students: list[dict]) -> dict:
    """Return the facts of a student, or {} if it is not among these."""
    of_seed = [x for x in reversed(students) if x["seed"] == student.seed]
    return next((x for x in of_seed if not changes(student, x)), {})


def on_record(out) -> list[dict]:
    """Return the students on record, after adding those of the runs that ended.

    A run has ended when all its students have, as it resumes with all of them.
    """
    before = read_students(out)
    students = {x["name"]: x for x in before}
    for file in sorted(out.glob("runs/seed*/run.json")):
        run = file.parent
        ends = sorted([*run.glob("*/run.json"), *run.glob("*/stopped.json")])
        if len(ends) == len(read_json(file)["config"]["methods"]):
            students |= {x["name"]: x for x in map(read_student, ends)}
    found = [*students.values()]
    if found != before:
        write_students(out, found)
    return found


def read_student(end: Path) -> dict:
    """Return a student's facts, figures and log from the folder of `end`."""
    folder = end.parent
    scores = newest_figures(folder)
    facts = read_json(end) | scores.pop("values", {}) | scores.pop("scored", {})
    scores.pop("run", None)
    facts |= {"name": f"{folder.name}_{folder.parent.name}", "scores": scores}
    student, teacher = flops(SimpleNamespace(**facts["config"]))
    facts["student_flops"] = student * facts["nominal_tokens"]
    if facts["made_by"].get("teacher_sha256"):
        facts["teacher_flops"] = teacher * facts["nominal_tokens"]
    facts["log"] = read_log(folder)
    entries = [line for line in facts["log"] if "step" in line]
    end = max((line["step"] for line in entries), default=None)
    ces = {line["step"]: line["val_ce"] for line in entries if "val_ce" in line}
    if "why" not in facts and end not in ces:  # a run ends with a validation
        raise UserError(
            f"{folder}/log.jsonl: lacks the last held-out CE; restore it, or delete "
            f"{folder.parent}, and the same command trains it anew"
        )
    facts["val_ce"] = ces.get(end)
    return facts


def flops(cfg) -> tuple:
    """Return the FLOPs per token of a student in training, and of the teacher's forward pass."""
    student = 3 * student_shape(cfg).flops_per_token(cfg.seq_len)  # backward has twice as many
    teacher = teacher_flops(cfg.teacher, cfg.seq_len) if cfg.teacher else 0.0
    return student, teacher


def is_scored(student: Config, facts: dict, rows) -> bool:
    """Return whether a student has stopped, or has fp32 figures over these rows, with this teacher.

    rows  [n_rows, row_len] uint32
    """
    rows_sha256 = hashlib.sha256(rows.tobytes()).hexdigest()
    dtype = facts.get("scores", {}).get("protocol", {}).get("dtype")
    scored = (dtype, facts.get("rows_sha256"), facts.get("teacher_sha256"))
    return "why" in facts or scored == ("float32", rows_sha256, content_hash(student.teacher))
