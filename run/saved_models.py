"""What eval.py and tools check before they use a model."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from lib.errors import UserError, note
from lib.hf import find_folder, load_tokenizer, tokenizer_hash, weights_hash
from lib.tokens import leading_bos
from run.provenance import as_in_file
from run.results import training_facts
from run.teacher import check_vocabulary, load_model

read_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)  # a large one takes 1 GB


class Checkpoint(NamedTuple):
    """A saved model of any family."""

    name: str  # as the user gave it
    folder: Path
    results: Path  # folder of what eval.py computes
    run: dict  # facts of its training; {} for a model that is no student
    n_vocab: int
    context: float  # tokens that it takes at most; infinite if its config does not say
    weights_sha256: str  # of the fp32 weights
    tokenizer_sha256: str
    bos: int | None  # before each document in training; of other models, before each text

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return read_tokenizer(self.folder)

    def encode(self, text) -> list[int]:
        """Return the ids of a text, after the token that starts a document."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        for i, token in self.tokenizer.added_tokens_decoder.items():
            if token.special and i in ids:
                note(f"{self.name}: {token.content!r} is one token here, plain text in training")
        first = self.tokenizer.eos_token_id if self.bos is None else self.bos
        return [first, *ids]


def open_checkpoint(name) -> Checkpoint:
    """Open a student's folder, a checkpoint, a model's folder, or a hub id.

    Raises `UserError` if its tokenizer has ids beyond its vocabulary, or if it is not the model
    that the facts of training beside it describe.
    """
    folder = find_folder(name)
    student = folder.parent
    run = training_facts(folder)
    if not run:
        results = Path("out/eval", Path(name).resolve().name)
    elif (student / "run.json").is_file():
        results = student
    else:  # not inside the checkpoint, which training may delete
        run_name = Path(run["config"]["out_dir"]).name
        results = Path(f"out/eval/{run_name}_{run['method']}_{student.resolve().name}")
    model = load_model(folder)
    read_tokenizer.cache_clear()  # the folder may have changed
    tokenizer = read_tokenizer(folder)
    n_vocab = len(model.head)
    check_vocabulary(name, n_vocab, tokenizer)
    context = model.config.max_position_embeddings or math.inf
    sha256 = weights_hash(model)
    shape = as_in_file(dataclasses.asdict(model.config))
    of_training = run.get("made_by", {}).get("shape", {})
    if run.get("weights_sha256", sha256) != sha256 or not of_training.items() <= shape.items():
        raise UserError(
            f"{name}: its model/ is not the one that run.json describes; the train.py command of "
            "that run writes it again"
        )
    bos = run["bos"] if run else leading_bos(tokenizer)
    tokenizer_sha256 = tokenizer_hash(tokenizer)
    return Checkpoint(name, folder, results, run, n_vocab, context, sha256, tokenizer_sha256, bos)


def check_content(name, key: str, sha256: str, run: dict):
    """Raise `UserError` if rows or a teacher have changed since a student was trained with them."""
    facts = run | run.get("made_by", {})
    if facts.get(key, sha256) not in (None, sha256):
        raise UserError(
            f"{name}: its content has changed since the student was trained with it; restore it "
            "(eval.py can score with another: --rows, --teacher)"
        )
