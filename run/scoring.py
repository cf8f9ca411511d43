"""What eval.py and tools check before they use a model, and the hash of the code that scores it."""

import dataclasses

from lib.code import file_code
from lib.errors import UserError
from lib.hf import weights_hash
from run.identity import record_hash

# The files that a score passes through: figures over held-out rows, and tasks.
SCORING = {
    "figures": (
        "eval.py",
        "model.py",
        "lib/metrics.py",
        "lib/rows.py",
        "lib/tokens.py",
        "lib/vocab.py",
        "run/foreign.py",
        "run/teacher.py",
    ),
    "tasks": ("eval.py", "model.py", "lib/tasks.py", "lib/vocab.py"),
}


def scoring_code(part: str) -> str:
    """Return the hash of the files that a part of SCORING passes through."""
    return record_hash([file_code(file) for file in SCORING[part]])[:8]


def decoder_edits(record: dict) -> list[str]:
    """Return model.py if it was edited since a student was trained."""
    is_edited = record["code"].get("model.py") != file_code("model.py")
    return ["model.py"] * is_edited


def check_content(name, key: str, sha256: str, record: dict):
    """Raise `UserError` if rows or a teacher have changed since a student was trained with them."""
    if record.get(key) not in (None, sha256):
        raise UserError(
            f"{name}: its content has changed since the student was trained with it; restore it "
            "(eval.py can score with another: --rows, --teacher)"
        )


def check_model(name, model, facts: dict) -> str:
    """Return the hash of a model's weights.

    Raises `UserError` if the facts of training that stand beside it are those of another model.
    """
    sha256 = weights_hash(model)
    shape = facts["made_by"]["shape"] if facts else {}
    same_shape = shape.items() <= dataclasses.asdict(model.config).items()
    if not same_shape or facts.get("weights_sha256", sha256) != sha256:
        raise UserError(
            f"{name}: its model/ is not the one that run.json describes; the train.py command of "
            "that run writes it again"
        )
    return sha256
