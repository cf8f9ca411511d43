"""TensorBoard and Weights & Biases, which receive the entries of log.jsonl."""

import functools
from collections.abc import Callable

from lib.files import text_hash
from run.students import student_facts


def services(s, run) -> dict[str, Callable]:
    """Return the logging services that the config asks for, by name.

    Each connects when it is first called, and returns a function that sends an entry.
    """
    chosen = {}
    if run.cfg.tensorboard:
        next_step = run.step + 1
        chosen["TensorBoard"] = functools.cache(lambda: tensorboard(s, next_step))
    if run.cfg.wandb_project:
        chosen["Weights & Biases"] = functools.cache(lambda: wandb_run(s, run))
    return chosen


def tensorboard(s, next_step) -> Callable:
    from torch.utils.tensorboard import SummaryWriter

    # an earlier start may have sent entries after the checkpoint that the run resumes from
    writer = SummaryWriter(s.folder / "tensorboard", purge_step=next_step)

    def send(entry: dict):
        for key, value in entry.items():
            if key != "step" and isinstance(value, int | float):
                writer.add_scalar(key, value, entry["step"])
        writer.flush()

    return send


def wandb_run(s, run) -> Callable:
    import wandb

    facts = student_facts(s, run)
    identity = f"{s.folder.resolve()} {facts['made_by_sha256']}"
    board = wandb.init(
        project=run.cfg.wandb_project,
        group=run.cfg.out_dir,
        name=s.name,
        dir=s.folder,
        id=text_hash(identity)[:12],  # the same after a resume
        config=facts,
        resume="allow",
        reinit="create_new",
    )
    # W&B drops an entry whose own step is not the largest so far, as after a kill
    board.define_metric("*", step_metric="step")
    return board.log
