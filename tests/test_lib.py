"""What lib/ promises: vector functions that are right from their first call on, devices, files."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lib.torch_setup
from tests.world import ROOT

# Prints a function if its first result in a process differs from its second. The processes are
# forks of one that has imported torch and computed nothing: an import takes a second, a fork 20 ms.
FIRST_CALLS = """
import os
import torch

def compare(function, dtype):
    import lib.vocab
    x = torch.linspace(0.01, 0.99, 3 * 4096, dtype=dtype)
    first = function(x)
    if not torch.equal(first, function(x)):
        print(function.__name__, dtype, flush=True)

assert torch.get_num_threads() == 2
for _ in range(3):
    for function in (torch.exp, torch.log, torch.tanh, torch.cos):
        for dtype in (torch.float32, torch.float64):
            child = os.fork()
            if not child:
                compare(function, dtype)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
"""


class Calls(TorchDispatchMode):
    """Records the functions that are called, with the dtype and size of their first argument."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.add((func.overloadpacket.__name__, args[0].dtype, args[0].numel()))
        return func(*args, **kwargs or {})


def test_an_import_calls_every_function_that_torch_takes_from_mkl():
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    names = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.M)
    assert len(names) > 10
    with Calls() as calls:
        importlib.reload(lib.torch_setup)
    for name in names:
        for dtype in (torch.float32, torch.float64):
            assert (name, dtype, 8) in calls.seen


def test_the_first_results_of_a_process_equal_its_second():
    """In 24 processes of two threads. Without lib/torch_setup.py some differ on Intel CPUs."""
    threads = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", "-c", FIRST_CALLS]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
