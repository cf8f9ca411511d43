"""How a run ends: by signals, by errors, or at its last update; and what a scheduler is told.

OUT/exit.json has {code, step, max_steps, why} of the last start:

    0   every student has reached the end
    1   an error, or a student that stopped
    75  a signal ended the run early: the same command resumes
"""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import NoReturn

import configure
from lib import parallel
from lib.errors import UserError, first_line
from run.log import say

RECEIVED: list[str] = []  # names of the signals that this process has received
TRY_AGAIN = 75  # exit code of a run that a signal ended early (EX_TEMPFAIL in sysexits.h)


def signals_anywhere() -> list[str]:
    """Return the signals that some process has received: the same list on all processes."""
    return max(parallel.all_gather(RECEIVED))  # an empty list is the least


def catch_signals():
    """From now on, SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the run.

    It ends before the first update, after the current one, or between two batches of a validation.
    """
    RECEIVED.clear()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not under_nohup:
            signal.signal(number, lambda n, _: RECEIVED.append(signal.Signals(n).name))


def fail(error: Exception, cfg) -> NoReturn:
    """Raise an error that ends a run, after writing it into exit.json.

    A `UserError` of one process is raised on all of them if training has not begun.
    """
    write_exit(cfg, 1, f"{type(error).__name__}: {first_line(error)}")
    if isinstance(error, UserError) and not error.is_shared:
        if parallel.world() > 1 and "step" in configure.PROGRESS:
            # the others are in the middle of an update: torchrun ends them
            raise RuntimeError("an error of this process alone") from error
        parallel.all_gather(error)  # raises it here, and on the others at their next all_gather
    raise error


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
    if run.signals and len(stopped) < len(students):
        reached += "; the same command resumes"
        code = TRY_AGAIN
        why = run.signals[0]
    say(reached)
    if parallel.rank() == 0:
        write_exit(cfg, code, why)
    n_nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    if code == TRY_AGAIN and n_nodes > 1 and os.environ["LOCAL_RANK"] == "0":
        # otherwise this node's torchrun waits five minutes for that of the signalled node
        os.kill(os.getppid(), signal.SIGTERM)
    return code
