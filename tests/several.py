"""Runs of train.py by several processes, which are forks of one that has imported torch.

main({"2": [[flag, ..], ..]})  runs of two processes, one after the other; "{rank}" stands for the number of the process. Where out_dir ends in "cut",
process 1 gets a signal in the second update. "nodes": one run of two nodes, each of the first loses its process twice.
Process 1 prints how many numbers of teacher and students it holds, and the exit codes of runs that fail.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import configure
import train
from lib import parallel

update = train.update


def signalled(students, teacher, stream, step, cfg):
    if cfg.out_dir.endswith("cut") and step == 1 == parallel.rank():
        train.STOP.set()
    return update(students, teacher, stream, step, cfg)


def counted(make):
    def made(*args):
        it = make(*args)
        if parallel.rank() == 1:
            cfg = next(a for a in args if type(a) is configure.Config)
            body = getattr(it, "body", it)  # a teacher whose hidden states are stored may have none
            n = sum(parallel.local(p).numel() for p in body.model.parameters()) if body else 0
            print(f"process 1: {n} of {type(it).__name__} in {Path(cfg.out_dir).name}")
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_on_nodes(flags: list[str]) -> None:
    """Two nodes, each a torchrun with one process. The first one's is killed at work and as it starts; SIGTERM ends all."""
    out, agents = Path(configure.load(flags).out_dir), []
    launch = LaunchConfig(2, 2, 1, run_id="x", rdzv_backend="c10d", rdzv_endpoint=f"localhost:{free_port()}", max_restarts=3,
                          monitor_interval=0.1, start_method="fork")  # fmt: skip

    def worker() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's handler, which a fork inherits, waits for the store
        os._exit(configure.guard(lambda: train.distil(configure.load(flags))))  # elastic_launch would wait for a result

    for _ in range(2):
        if not (pid := os.fork()):
            for stream in (1, 2):
                os.dup2(os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            try:
                elastic_launch(launch, worker)()
            finally:
                os._exit(1)
        agents.append(pid)

    def wait(ready):
        end = time.time() + 120
        while not (value := ready()):
            assert time.time() < end, Path(f"{out}.log").read_text()
            time.sleep(0.05)
        return value

    def past(step: int) -> int:
        return max((n for p in out.glob("*/checkpoints/step_????????") if (n := int(p.name[5:])) > step), default=0)

    def child(other_than: int = 0) -> int:
        said = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agents[0])], capture_output=True, text=True).stdout
        return next((pid for pid in map(int, said.split()) if pid != other_than), 0)

    try:
        step, first = wait(lambda: past(0)), child()
        os.kill(first, signal.SIGKILL)
        os.kill(wait(lambda: child(first)), signal.SIGKILL)
        wait(lambda: past(step + 3))
    finally:
        for agent in agents:
            os.kill(agent, signal.SIGTERM)
    print("nodes end with", [os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]) for agent in agents])


def main(todo: dict) -> None:
    train.make_student, train.open_teacher = counted(train.make_student), counted(train.open_teacher)
    train.update = signalled
    run_on_nodes(todo.pop("nodes"))
    for n, runs in todo.items():
        os.environ |= {"WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        children = []
        for rank in range(int(n)):
            if not (pid := os.fork()):
                os.environ["RANK"] = str(rank)
                code = configure.guard(lambda runs=runs: work(runs))
                os._exit(code)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert not any(codes), codes
