"""Runs of train.py by several processes, which are forks of one that has imported torch.

main(root, nodes, {2: [[flag, ..], ..]})  a run on two nodes, each of which loses its process twice,
                                          and beside it runs of two processes, one after the other

"{rank}" in a flag stands for the number of the process. Where out_dir ends in "cut", process 1 gets
a signal in the second update. Process 1 prints how many numbers of teacher and students it holds,
and the exit codes of runs that fail.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import configure
import train
from lib import parallel
from run import ending
from tests import world

update = train.update
loop = train.loop


def update_or_signal(students, teacher, stream, step, cfg):
    if cfg.out_dir.endswith("cut") and step == 1 == parallel.rank():
        ending.RECEIVED.append("SIGTERM")
    return update(students, teacher, stream, step, cfg)


def count_and_loop(run, rows, val, teacher, students):
    for part in (teacher, *students):
        loaded = getattr(part, "teacher", part)  # None if its hidden states are stored
        n = sum(parallel.local(p).numel() for p in loaded.model.parameters()) if loaded else 0
        if parallel.rank() == 1:
            print(f"process 1: {n} of {type(part).__name__} in {Path(run.cfg.out_dir).name}")
    loop(run, rows, val, teacher, students)


def work(runs):
    stop = parallel.stop
    parallel.stop = lambda: None  # the same processes serve every run
    parallel.start(torch.device("cpu"))
    for flags in runs:
        cfg = configure.load([flag.format(rank=parallel.rank()) for flag in flags])
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(int(cfg.out_dir.endswith("restarts")))
        code = configure.guard(lambda cfg=cfg: train.distil(cfg))
        del os.environ["TORCHELASTIC_MAX_RESTARTS"]
        codes = parallel.all_gather(code)
        if any(codes) and parallel.rank() == 1:
            print("exit codes", codes)
    stop()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def fork(function, *args):
    """Call a function in a child of this process. Returns the child's id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function(*args)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def exit_codes(pids):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def run_agent(flags, port):
    """Be the torchrun of one node of two, with one process of train.py."""
    log = f"{configure.load(flags).out_dir}.log"
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)

    def worker():
        # a fork inherits the agent's handler, which waits for the store
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # elastic_launch would wait for a result
        os._exit(configure.guard(lambda: train.distil(configure.load(flags))))

    keys = {"rdzv_backend": "c10d", "rdzv_endpoint": f"localhost:{port}", "run_id": "x"}
    keys |= {"max_restarts": 3, "monitor_interval": 0.1, "start_method": "fork"}
    elastic_launch(LaunchConfig(2, 2, 1, **keys), worker)()


def run_on_nodes(flags):
    """Train on two nodes. Kill the first one's process at work, and again as it starts.

    SIGTERM ends both.
    """
    out = Path(configure.load(flags).out_dir)
    port = free_port()
    agents = [fork(run_agent, flags, port) for _ in range(2)]

    def wait(ready):
        end = time.time() + 120
        while not (value := ready()):
            assert time.time() < end, Path(f"{out}.log").read_text()
            time.sleep(0.05)
        return value

    def newest_step():
        steps = [int(p.name[5:]) for p in out.glob("*/checkpoints/step_????????")]
        return max(steps, default=0)

    def child(other_than=0):
        command = ["ps", "-o", "pid=", "--ppid", str(agents[0])]
        pids = subprocess.run(command, capture_output=True, text=True).stdout.split()
        return next((int(pid) for pid in pids if int(pid) != other_than), 0)

    try:
        step = wait(newest_step)
        first = child()
        os.kill(first, signal.SIGKILL)
        os.kill(wait(lambda: child(first)), signal.SIGKILL)
        wait(lambda: newest_step() > step + 3)
    finally:
        for agent in agents:
            os.kill(agent, signal.SIGTERM)
    print("nodes end with", exit_codes(agents))


def main(root, nodes, todo):
    train.loop = count_and_loop
    train.update = update_or_signal
    world.add_objective_with_state(root)
    beside = fork(run_on_nodes, nodes)
    for n, runs in todo.items():
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ |= {"WORLD_SIZE": str(n), **place}
        children = []
        for rank in range(n):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            children.append(fork(work, runs))
        codes = exit_codes(children)
        assert not any(codes), codes
    assert exit_codes([beside]) == [0]
