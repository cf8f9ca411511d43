"""Runs of train.py, one after the other, by the same processes: torchrun .. several.py RUNS.json.

RUNS.json  [[flag, ..], ..]; "{rank}" stands for the number of the process. Where out_dir ends in "late", gradients are summed
after the last backward pass, one by one; where it ends in "cut", process 1 gets a signal in the second update.
Process 1 prints how many numbers of teacher and students it holds, and how runs end that do not end with 0.
"""

import contextlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import configure
import train
from lib import parallel


@contextlib.contextmanager
def late(model, last, under_way):
    yield
    if last:
        parallel.sum_in_place([p.grad for p in model.parameters()])


def signalled(students, teacher, stream, step, cfg):
    if cfg.out_dir.endswith("cut") and step == 1 == parallel.rank():
        train.STOP.set()
    return update(students, teacher, stream, step, cfg)


def counted(make):
    def made(*args):
        found = make(*args)
        if parallel.rank() == 1:
            n, cfg = sum(parallel.local(p).numel() for p in found.model.parameters()), args[-1]
            print(f"process 1: {n} of {type(found).__name__} in {Path(cfg.out_dir).name}")
        return found

    return made


def exit_code(loaded):
    try:
        code = configure.guard(lambda: train.distil(loaded))
    except SystemExit as end:
        return end.code
    if code:
        parallel.everyones(None)  # the others wait for the end of this process
    return code


if __name__ == "__main__":
    stop, parallel.stop = parallel.stop, lambda: None  # processes that were started once serve every run
    train.make_student, train.open_teacher = counted(train.make_student), counted(train.open_teacher)
    early, update, train.update = parallel.summing, train.update, signalled
    parallel.start(torch.device("cpu"))
    for flags in json.loads(Path(sys.argv[1]).read_text()):
        loaded = configure.load([flag.format(rank=parallel.rank()) for flag in flags])
        parallel.summing = late if loaded.out_dir.endswith("late") else early
        codes = parallel.everyones(exit_code(loaded))
        if any(codes) and parallel.rank() == 1:
            print("exit codes", codes)
    stop()
