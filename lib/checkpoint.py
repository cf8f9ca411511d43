"""Checkpoints that survive a kill: a checkpoint is complete under its name, or it does not exist.

FOLDER/step_00001000/model.safetensors       weights
                     optimizer.safetensors   AdamW's moments, PARAMETER/exp_avg and so on
                     state.json              step, account, what the run was made of, hashes of the tensors

That of step 0 has no tensors: the first weights come from the run's config. It says that nothing is lost of the run.
"""

import os
import re
import shutil
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from lib import parallel
from lib.files import UserError, first_line, read_json, read_lines, write_json, write_lines, writing
from lib.hf import tensors_hash

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
        tensors = {"model": weights, "optimizer": moments} if state["step"] else {}
        hashes = {f"{name}_sha256": hash_of(of) for name, of in tensors.items()}
        write_json(new / "state.json", state | hashes, sealed=True)
        for name, of in tensors.items():
            safetensors.torch.save_file(of, new / f"{name}.safetensors")
            shutil.copymode(new / "state.json", new / f"{name}.safetensors")  # safetensors keeps others from reading
        for path in (*new.iterdir(), new):
            flush(path)
        os.replace(new, final)
        flush(folder)


def hash_of(tensors: Tensors) -> str:
    return tensors_hash(dict(sorted(tensors.items())))  # a file has an order of its own


def flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename never survives a crash without its content."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def whole(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(
        (p for p in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", p.name) and p.is_dir()), key=step_of
    )


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def prune(folder: Path, keep: int, step: int) -> None:
    """Remove all but the last `keep` up to `step`. Each is renamed before it is deleted, so that a kill leaves no partial one."""
    for old in [p for p in whole(folder) if step_of(p) <= step][:-keep]:
        gone = old.with_name(old.name + ".tmp")
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(old, gone)
        shutil.rmtree(gone)


def load(path: Path, model: nn.Module, optimizer: torch.optim.AdamW, belongs: dict, keys: dict) -> dict:
    """Load a checkpoint into `model` and `optimizer` -> its state, with `keys` (`files.check`).

    belongs  facts of the run that it must hold

    Raises `UserError` where it is broken, renamed or another run's. Older ones have no hashes to compare.
    """
    remedy = f"move the folder {path} aside to go on from the one before"
    state = read_json(path / "state.json", {"step": int, **keys}, remedy)
    for key, value in {"step": step_of(path), **belongs}.items():
        if state.get(key) != value:
            raise UserError(f"{path}: {key} is {state.get(key)}, expected {value}; it belongs to another run")
    if not state["step"]:
        return state
    params = dict(model.named_parameters())
    shapes = {"model": {name: p.shape for name, p in params.items()}}
    shapes["optimizer"] = {f"{name}/{k}": p.shape if k != "step" else () for name, p in params.items() for k in MOMENTS}
    tensors = {}
    for name, wanted in shapes.items():
        file = path / f"{name}.safetensors"
        try:
            tensors[name] = safetensors.torch.load_file(file)
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{file}: not whole ({error}); {remedy}") from error
        if {key: t.shape for key, t in tensors[name].items()} != wanted:
            raise UserError(f"{file}: its tensors are not this student's; it belongs to another run")
        if f"{name}_sha256" in state and state[f"{name}_sha256"] != hash_of(tensors[name]):
            raise UserError(f"{file}: not the tensors that were saved; {remedy}")
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(parallel.part_like(tensors["model"][name], p))
            optimizer.state[p] = {k: parallel.part_like(tensors["optimizer"][f"{name}/{k}"], p) for k in MOMENTS}
    return state


def load_weights(path: Path, model: nn.Module) -> None:
    """The weights alone of a checkpoint of a model of the same shape."""
    file = path / "model.safetensors"
    try:
        model.load_state_dict(safetensors.torch.load_file(file))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise UserError(f"{file}: not the weights of this student's shape ({first_line(error)})") from error


def drop_after(log: Path, step: int) -> None:
    """Remove a log's records of later steps, and a last line that a kill cut short."""
    write_lines(log, [record for record in read_lines(log, {"step": int}) if record["step"] <= step])
