"""What eval.py and tools check before they use a model, and the hash of the code that scores it."""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from lib.code import code_reached, files_reached
from lib.errors import UserError
from lib.hf import find_folder, load_tokenizer, weights_hash
from run.identity import NOT_FOLLOWED, as_in_file, record_hash
from run.results import training_facts
from run.teacher import Teacher, check_vocabulary, inherited, load_teacher

# The functions of eval.py that a score passes through: figures over held-out rows, and tasks.
SCORING = {"figures": ("byte_lengths", "over_rows"), "tasks": ("Scorer", "benchmark")}
NOT_SCORING = (
    *NOT_FOLLOWED,
    "run.methods",
    "run.paper",
    "run.results",
    "run.scoring",
    "run.tables",
)
read_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)  # a large one takes 1 GB


class Opened(NamedTuple):
    """A model of any family, in fp32 on the CPU."""

    folder: Path
    run: dict  # facts of its training; {} for a model that is no student
    model: Teacher
    tokenizer: PreTrainedTokenizerFast
    context: int | None  # tokens that it takes at most, if its config says so
    weights_sha256: str


def open_model(name, kinds) -> Opened:
    """Open a student's folder, a checkpoint, a model's folder, a link to one, or a hub id.

    kinds  of the facts of training that are read

    Raises `UserError` if its tokenizer has ids beyond its vocabulary, or if it is not the model
    that the facts describe.
    """
    folder = find_folder(name)
    if not (folder / "config.json").is_file():
        raise UserError(f"{name}: no model/ in it, and no checkpoint; has its training begun?")
    if folder.name != "model" and folder.resolve().name == "model":
        folder = folder.resolve()  # the facts of training stand beside it, not beside a link
    run = training_facts(folder, kinds)
    tokenizer = read_tokenizer(str(folder))
    model = load_teacher(str(folder), torch.float32, torch.device("cpu"))
    check_vocabulary(name, len(model.head), tokenizer)
    context = inherited(str(folder)).get("max_position_embeddings")
    sha256 = check_model(name, model.model, run)
    return Opened(folder, run, model, tokenizer, context, sha256)


def scoring_code(part: str) -> str:
    """Return the hash of the code that a part of SCORING passes through."""
    return record_hash(code_reached(("eval",), SCORING[part], NOT_SCORING))[:8]


def decoder_edits(record: dict) -> list[str]:
    """Return "model" if model.py was edited since a student was trained."""
    decoder = files_reached(("model",), NOT_FOLLOWED)
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
    if not facts:
        return sha256
    shape = as_in_file(dataclasses.asdict(model.config))
    same_shape = facts["made_by"]["shape"].items() <= shape.items()
    if not same_shape or facts.get("weights_sha256", sha256) != sha256:
        raise UserError(
            f"{name}: its model/ is not the one that run.json describes; the train.py command of "
            "that run writes it again"
        )
    return sha256
