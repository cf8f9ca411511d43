"""Runs of train.py by several processes, which are forks of one that has imported torch: python tests/several.py RUNS.json.

RUNS.json  {"2": [[flag, ..], ..]}: runs of two processes, one after the other; "{rank}" stands for the number of the process. Where out_dir ends in "cut",
process 1 gets a signal in the second update.
Process 1 prints how many numbers of teacher and students it holds, and the exit codes of runs that fail.
"""

import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import configure
import train
from lib import parallel


def signalled(students, teacher, stream, step, cfg):
    if cfg.out_dir.endswith("cut") and step == 1 == parallel.rank():
        train.STOP.set()
    return update(students, teacher, stream, step, cfg)


def counted(make):
    def made(*args):
        it = make(*args)
        if parallel.rank() == 1:
            n, out = sum(parallel.local(p).numel() for p in it.model.parameters()), Path(args[-1].out_dir).name
            print(f"process 1: {n} of {type(it).__name__} in {out}")
        return it

    return made


def work(runs: list[list[str]]) -> None:
    stop, parallel.stop = parallel.stop, lambda: None  # the same processes serve every run
    parallel.start(torch.device("cpu"))
    for flags in runs:
        cfg = configure.load([flag.format(rank=parallel.rank()) for flag in flags])
        codes = parallel.all_gather(configure.guard(lambda cfg=cfg: train.distil(cfg)))
        if any(codes) and parallel.rank() == 1:
            print("exit codes", codes)
    stop()
    sys.stdout.flush()


if __name__ == "__main__":
    train.make_student, train.open_teacher = counted(train.make_student), counted(train.open_teacher)
    update, train.update = train.update, signalled
    for n, runs in json.loads(Path(sys.argv[1]).read_text()).items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        children = []
        for rank in range(int(n)):
            if not (pid := os.fork()):
                os.environ["RANK"] = str(rank)
                code = configure.guard(lambda runs=runs: work(runs))
                os._exit(code)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert not any(codes), codes
