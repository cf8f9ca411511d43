"""How a run ends: at its last update, by a signal, or by an error.

train.py exits with one of three codes:

    0   every student has reached the end
    1   an error, or a student that stopped
    75  the same command resumes: after a signal, or if another process was lost

`reported` surrounds a run. It catches signals, and writes OUT/exit.json, {code, step, max_steps,
why}, which a killed process does not. It gives an error its code, and raises it again:
`configure.guard`, which surrounds every script, prints the error and returns the code.
"""

import contextlib
import json
import os
import platform
import shlex
import signal
import time
import traceback
from pathlib import Path

import torch

from configure import TRY_AGAIN
from lib import parallel
from lib.errors import UserError, first_line, naming_files
from run.log import say
from run.students import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
RECEIVED: list[str] = []  # names of the signals that this process has received
TRAINING: list[Run] = []  # the run, once its updates have begun


@contextlib.contextmanager
def reported(cfg):
    """Let a signal or an error inside end the run as this file describes.

    A signal ends the run after the current update. Before the first update is done it ends the run
    at once: there is nothing to save. A `UserError` of one process is raised on all of them if no
    update has begun.
    """
    Path(cfg.out_dir, "exit.json").unlink(missing_ok=True)

    def receive(number, _):
        RECEIVED.append(signal.Signals(number).name)
        if not TRAINING or TRAINING[0].step == TRAINING[0].first_step:
            write_exit(cfg, TRY_AGAIN, RECEIVED[0])
            raise SystemExit(TRY_AGAIN)

    handlers = {}
    for number in SIGNALS:
        # nohup ignores SIGHUP, and a script's `command &` SIGINT: they stay ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = signal.signal(number, receive)
    try:
        with naming_files():
            yield
    except torch.OutOfMemoryError as error:
        message = (
            f"out of memory on {cfg.device}: set --recompute=True, a smaller micro_batch "
            "or chunk_positions, --shard=N, or fewer methods"
        )
        write_exit(cfg, 1, message)
        raise UserError(message) from error
    except Exception as error:
        error.exit_code = code_of(error)
        write_exit(cfg, error.exit_code, f"{type(error).__name__}: {first_line(error)}")
        if not isinstance(error, UserError):
            write_traceback(cfg, error)
        elif not (TRAINING or error.is_shared):
            parallel.all_gather(error)  # raises it here, and on the others at their next all_gather
        raise
    finally:
        RECEIVED.clear()
        TRAINING.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def must_stop(live) -> bool:
    """Return whether a signal has arrived, or the folder of a run is gone: nothing can be saved."""
    for s in live:
        folder = s.folder / "checkpoints"
        if parallel.rank() == 0 and not os.path.isdir(folder):
            RECEIVED.append(f"{folder} is gone")
    return bool(RECEIVED)


def code_of(error: Exception) -> int:
    """Return the exit code of a run that an error ends."""
    # a lost process and a time-out: DistError with NCCL, a RuntimeError with gloo; a lost reader
    is_gloo = type(error) is RuntimeError and "gloo" in str(error)
    is_lost = is_gloo or isinstance(error, torch.distributed.DistError | BrokenPipeError)
    # a card has failed; 710 is an assertion of a kernel, which would fail again
    is_lost |= isinstance(error, torch.AcceleratorError) and error.error_code != 710
    # a scheduler may signal compilers and loggers too, whose failure then ends the run
    return TRY_AGAIN if is_lost or RECEIVED else getattr(error, "exit_code", 1)


def step_reached() -> int | None:
    return TRAINING[0].step if TRAINING else None


def write_exit(cfg, code, why):
    """Write OUT/exit.json, unless another process has already written why the run ends."""
    facts = {"code": code, "step": step_reached(), "max_steps": cfg.max_steps, "why": why}
    with contextlib.suppress(OSError), Path(cfg.out_dir, "exit.json").open("x") as file:
        json.dump(facts, file)


def write_traceback(cfg, error):
    """Add an error's traceback to OUT/traceback_RANK.txt, with time, host, process and step."""
    rank = parallel.rank()
    place = f"{platform.node()}, process {rank}, step {step_reached()}"
    error.add_note(f"{time.strftime('%FT%T%z')}, {place}")  # printed too
    file = Path(cfg.out_dir, f"traceback_{rank}.txt")
    with contextlib.suppress(OSError), file.open("a") as lines:
        traceback.print_exception(error, file=lines)


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
        why = max(parallel.all_gather(RECEIVED or [""]))[0] or "run.stop was set"
    elif not stopped:
        reached += f"; next: python eval.py {shlex.quote(cfg.out_dir)} --tasks none"
    say(reached)
    write_exit(cfg, code, why)
    return code
