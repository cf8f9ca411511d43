"""How a run ends: by signals, by errors, or at its last update; and what a scheduler is told.

OUT/exit.json has {code, step, max_steps, why} of the last start, unless it was killed:

    0   every student has reached the end
    1   an error, or a student that stopped
    75  the same command resumes: after a signal, or if another process was lost

A killed process writes none. So a scheduler that finds no exit.json may start the command again.
"""

import contextlib
import json
import signal
from pathlib import Path

import torch

import configure
from lib import parallel
from lib.errors import UserError, first_line, naming_files
from run.log import say

RECEIVED: list[str] = []  # names of the signals that this process has received in its updates
TRY_AGAIN = 75  # exit code of a run that may go on (EX_TEMPFAIL in sysexits.h)


def catch_signals(cfg):
    """From now on, a signal ends the run at once: until its first update nothing is lost."""
    RECEIVED.clear()

    def end(number, _):
        write_exit(cfg, TRY_AGAIN, signal.Signals(number).name)
        raise SystemExit(TRY_AGAIN)

    handle_signals(end)


def finish_updates():
    """From now on, a signal ends the run after the current update."""
    handle_signals(lambda number, _: RECEIVED.append(signal.Signals(number).name))


def handle_signals(handler):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not under_nohup:
            signal.signal(number, handler)


@contextlib.contextmanager
def reported(cfg):
    """Write an error that ends a run into exit.json.

    A `UserError` of one process is raised on all of them if training has not begun.
    """
    out = Path(cfg.out_dir)
    configure.PROGRESS = {"out": out}  # the folder where a crash leaves its traceback
    (out / "exit.json").unlink(missing_ok=True)
    try:
        with naming_files():
            yield
    except torch.OutOfMemoryError as error:
        message = (
            f"out of memory on {cfg.device}: set --recompute=True, a smaller micro_batch, "
            "--shard=N, or fewer methods"
        )
        write_exit(cfg, 1, message)
        configure.PROGRESS.setdefault("step", None)  # so that this process prints it
        raise UserError(message) from error
    except Exception as error:
        # a lost process and a time-out: DistError with NCCL, a RuntimeError with gloo
        is_gloo = type(error) is RuntimeError and "gloo" in str(error)
        is_lost = is_gloo or isinstance(error, torch.distributed.DistError)
        # a card has failed; 710 is an assertion of a kernel, which would fail again
        is_lost |= isinstance(error, torch.AcceleratorError) and error.error_code != 710
        # a scheduler may signal compilers and loggers too, whose failure then ends the run
        configure.PROGRESS["code"] = TRY_AGAIN if is_lost or RECEIVED else 1
        write_exit(cfg, configure.PROGRESS["code"], f"{type(error).__name__}: {first_line(error)}")
        is_own = isinstance(error, UserError) and not error.is_shared
        if is_own and "step" not in configure.PROGRESS:
            parallel.all_gather(error)  # raises it here, and on the others at their next all_gather
        raise


def write_exit(cfg, code, why):
    """Write OUT/exit.json, unless another process has already written why the run ends."""
    facts = {
        "code": code,
        "step": configure.PROGRESS.get("step"),
        "max_steps": cfg.max_steps,
        "why": why,
    }
    with contextlib.suppress(OSError), Path(cfg.out_dir, "exit.json").open("x") as file:
        json.dump(facts, file)


def exit_code(students, run) -> int:
    """Print the step that the run has reached, write exit.json, and return the exit code."""
    stopped = [f"{s.name} stopped at {s.stopped}" for s in students if s.stopped]
    cfg = run.cfg
    reached = f"{cfg.out_dir}: step {run.step} of {cfg.max_steps}"
    code = 1 if stopped else 0
    why = "; ".join(stopped) or "finished"
    if run.stop and len(stopped) < len(students):
        reached += "; the same command resumes"
        code = TRY_AGAIN
        why = max(parallel.all_gather(RECEIVED))[0]  # an empty list is the least
    say(reached)
    write_exit(cfg, code, why)
    return code
