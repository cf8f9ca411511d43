"""Runs of train.py by several processes, which are forks of one that has imported torch.

main(root, {2: [[flag, ..], ..]})  runs of two processes, one after the other

"{rank}" in a flag stands for the number of the process. Where out_dir ends in "cut", process 1 gets
a signal in the second update; where it ends in "..", process 1 reads other tensors. It cannot read
a teacher that transformers computes. It prints how many numbers of teacher and students it holds,
the exit codes of runs that fail, and how long its groups wait.
"""

import multiprocessing
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  (once for all of them)

import configure
import train
from lib import parallel
from run import checkpoints, exits, provenance, transformers_models
from tests import world

FORKS = multiprocessing.get_context("fork")
update = train.update
loop = train.loop


def update_or_signal(students, teacher, stream, step, cfg):
    if cfg.out_dir.endswith("cut") and step == 1 == parallel.rank():
        exits.RECEIVED.append("SIGTERM")
    return update(students, teacher, stream, step, cfg)


def count_and_loop(run, rows, val, teacher, students):
    for part in (teacher, *students):
        n = 0
        if hasattr(part, "model"):  # unless its hidden states are stored
            n = sum(parallel.local(p).numel() for p in part.model.parameters())
        if parallel.rank() == 1:
            print(f"process 1: {n} of {type(part).__name__} in {Path(run.cfg.out_dir).name}")
    loop(run, rows, val, teacher, students)


def work(runs):
    stop = parallel.stop
    parallel.stop = lambda: None  # the same processes serve every run
    cpu = torch.device("cpu")
    parallel.start(cpu, 7)
    if parallel.rank() == 1:
        transformers_models.read_foreign = None
    for flags in runs:
        cfg = configure.load([flag.format(rank=parallel.rank()) for flag in flags])
        if cfg.out_dir.endswith("..") and parallel.rank() == 1:
            checkpoints.file_hash = lambda file: "other"
        code = configure.guard(lambda cfg=cfg: train.distil(cfg))
        checkpoints.file_hash = provenance.file_hash
        codes = parallel.all_gather(code)
        if any(codes) and parallel.rank() == 1:
            print("exit codes", codes)
    groups = dist.distributed_c10d._world.pg_map
    seconds = {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}
    if parallel.rank() == 1:
        print(f"process 1: its {len(groups)} groups wait for {seconds} s")
    stop()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main(root, todo):
    train.loop = count_and_loop
    train.update = update_or_signal
    world.add_objective_with_state(root)
    for n, runs in todo.items():
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ |= {"WORLD_SIZE": str(n), **place}
        children = []
        for rank in range(n):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            children.append(FORKS.Process(target=work, args=(runs,)))
            children[-1].start()
        for child in children:
            child.join()
            assert child.exitcode == 0
