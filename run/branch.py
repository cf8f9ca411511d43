"""A new run that begins with a checkpoint of another one, which `resume_from` names."""

from lib.errors import UserError
from lib.hf import find_folder
from run.checkpoints import read_checkpoint
from run.identity import record_changes


def branch_point(name):
    """Return the checkpoint `resume_from` and its state. The counts for a log begin anew."""
    checkpoint = find_folder(name).parent  # find_folder returns CHECKPOINT/model
    if not (checkpoint / "state.json").is_file():
        raise UserError(
            f"resume_from={name}: no checkpoint; expected out/NAME/METHOD/checkpoints/step_.."
        )
    _, state = read_checkpoint(checkpoint)
    return checkpoint, state | {"sums": {}, "since_log_tokens": 0}


def begin_branch(name, run):
    """Return the checkpoint and its state, for a student of `run` to begin with.

    Raises `UserError` unless the student has its shape, tokenizer and rows per update.
    """
    checkpoint, state = branch_point(run.cfg.resume_from)
    changes = record_changes(state["made_by"], run.facts["made_by"][name])
    for key in ("shape", "tokenizer_sha256", "batch_rows"):
        if key in changes:
            raise UserError(f"resume_from={checkpoint}: {changes[key]}; expected the same")
    return checkpoint, state


def first_row_step(rows, cfg) -> int:
    """Return the update that reads row 0.

    A branch goes on with the rows of the run that it leaves; other rows begin at row 0.
    """
    _, state = branch_point(cfg.resume_from)
    has_same_rows = state["made_by"].get("data_sha256") == rows.manifest["sha256"]
    return state["first_row_step"] if has_same_rows else state["step"]
