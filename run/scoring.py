"""What eval.py and tools check before they use a model, and the hash of the code that scores it."""

import dataclasses

from lib.code import code_reached, files_reached
from lib.errors import UserError
from lib.hf import weights_hash
from run.identity import NOT_FOLLOWED, record_hash

# The functions of eval.py that a score passes through: figures over held-out rows, and tasks.
SCORING = {"figures": ("byte_lengths", "over_rows"), "tasks": ("Scorer", "benchmarks")}
NOT_SCORING = (
    *NOT_FOLLOWED,
    "run.methods",
    "run.paper",
    "run.results",
    "run.scoring",
    "run.tables",
)


def scoring_code(part: str) -> str:
    """Return the hash of the code that a part of SCORING passes through."""
    return record_hash(code_reached(["eval"], SCORING[part], NOT_SCORING))[:8]


def decoder_edits(record: dict) -> list[str]:
    """Return "model" if model.py was edited since a student was trained."""
    decoder = files_reached(["model"], NOT_FOLLOWED)
    return [name for name, sha in decoder.items() if record["code"].get(name) != sha]


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
