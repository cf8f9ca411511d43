"""TensorBoard and Weights & Biases, which receive the records of log.jsonl."""

import functools
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path

from run.students import Run, Student, student_facts


def services(s: Student, run: Run) -> dict[str, Callable]:
    """Return the logging services that the config asks for: name -> function that sends a record.

    A service connects when it gets its first record.
    """
    chosen = {}
    if run.cfg.tensorboard:
        chosen["TensorBoard"] = tensorboard(s.folder / "tensorboard")
    if run.cfg.wandb_project:
        chosen["Weights & Biases"] = wandb_logger(s, run)
    return chosen


def tensorboard(folder: Path) -> Callable:
    @functools.cache
    def writer():
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(folder)

    def send(record: dict) -> None:
        for key, value in record.items():
            if key != "step" and value is not None:
                writer().add_scalar(key, value, record["step"])
        writer().flush()

    return send


def wandb_logger(s: Student, run: Run) -> Callable:
    cfg = run.cfg
    facts = student_facts(s, run)
    place = f"{platform.node()} {s.folder.resolve()}"
    keys = {"project": cfg.wandb_project, "group": cfg.out_dir, "name": s.name, "dir": s.folder}
    keys["id"] = hashlib.sha256(place.encode()).hexdigest()[:12]  # the same after a resume

    @functools.cache
    def opened():
        import wandb

        return wandb.init(**keys, config=facts, resume="allow", reinit="create_new")

    return lambda record: opened().log(record, step=record["step"])
