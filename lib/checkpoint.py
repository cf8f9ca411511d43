"""Checkpoints that survive a kill: a checkpoint is complete under its name, or it does not exist.

FOLDER/step_00001000/model.safetensors       weights
                     optimizer.safetensors   AdamW's moments, PARAMETER/exp_avg and so on
                     state.json              step, account, and what the run was made of
"""

import json
import os
import shutil
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from lib import parallel
from lib.files import UserError, read_lines, write_lines, writing

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


Tensors = dict[str, torch.Tensor]


def copied(model: nn.Module, optimizer: torch.optim.AdamW) -> tuple[Tensors, Tensors]:
    """Whole copies on the CPU of the weights and of the moments, by name; on processes but the first, nothing."""
    names = {p: name for name, p in model.named_parameters()}
    moments = {f"{names[p]}/{k}": v for p, kept in optimizer.state.items() for k, v in kept.items()}
    return parallel.copies(model.state_dict()), parallel.copies(moments)


def save(folder: Path, weights: Tensors, moments: Tensors, state: dict) -> None:
    """Write weights, moments and `state` (with `step`) under another name, flush them to the disk, then rename."""
    final = folder / f"step_{state['step']:08d}"
    if final.exists():
        return
    new = final.with_name(final.name + ".tmp")
    shutil.rmtree(new, ignore_errors=True)
    with writing(new):
        new.mkdir(parents=True)
        safetensors.torch.save_file(weights, new / "model.safetensors")
        safetensors.torch.save_file(moments, new / "optimizer.safetensors")
        (new / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        for path in (*new.iterdir(), new):
            flush(path)
        os.replace(new, final)
        flush(folder)


def flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename never survives a crash without its content."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def whole(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step_*") if not p.name.endswith(".tmp"))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep`. Each is renamed before it is deleted, so that a kill leaves no partial one."""
    for old in whole(folder)[:-keep]:
        gone = old.with_name(old.name + ".tmp")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(old, gone)
        shutil.rmtree(gone)


def load(path: Path, model: nn.Module, optimizer: torch.optim.AdamW, belongs: dict) -> dict:
    """Load a checkpoint into `model` and `optimizer` -> its state. `belongs`: facts of the run that it must hold.

    Raises `UserError` where it is broken or another run's.
    """
    try:
        state = json.loads((path / "state.json").read_text())
        weights = safetensors.torch.load_file(path / "model.safetensors")
        moments = safetensors.torch.load_file(path / "optimizer.safetensors")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: not a whole checkpoint ({error}); remove it to go on from the one before") from error
    for key, value in belongs.items():
        if state.get(key) != value:
            raise UserError(f"{path}: {key} is {state.get(key)}, expected {value}; it belongs to another run")
    params = dict(model.named_parameters())
    if weights.keys() != params.keys() or moments.keys() != {f"{name}/{k}" for name in params for k in MOMENTS}:
        raise UserError(f"{path}: its tensors are not this student's; it belongs to another run")
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(parallel.part_like(weights[name], p))
            optimizer.state[p] = {k: parallel.part_like(moments[f"{name}/{k}"], p) for k in MOMENTS}
    return state


def drop_after(log: Path, step: int) -> None:
    """Remove a log's records of later steps, and a last line that a kill cut short."""
    write_lines(log, [record for record in read_lines(log) if record["step"] <= step])
