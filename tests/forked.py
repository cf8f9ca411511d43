"""Scripts as forks of one process that has imported torch and what else takes seconds; of the project it imports nothing."""

import json
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

IMPORTS = (
    "lm_eval.api.model, matplotlib.pyplot, pyarrow.parquet, safetensors.torch, scipy.special, torch, tqdm, transformers, "
    "torch.distributed.fsdp, torch._inductor.custom_graph_pass"
)
FORKED = ("prepare.py", "train.py", "eval.py", "plot.py", "sample.py")  # the others start processes of their own


class Scripts:
    """`python SCRIPT ...` commands, each in a fork."""

    def __init__(self, env: dict[str, str]):
        command = [sys.executable, "-c", f"import {IMPORTS}; from tests import forked; forked.serve()"]
        self.server = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, command: str, folder: Path) -> subprocess.CompletedProcess:
        with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
            job = {"argv": shlex.split(command)[1:], "folder": str(folder), "out": out.name, "err": err.name}
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
            code = int(self.server.stdout.readline())
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def end(self) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()


def serve() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(_child(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _child(argv: list[str], folder: str, out: str, err: str) -> int:
    """Run a script as the interpreter would -> its exit code."""
    os.chdir(folder)
    for fd, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR), fd)
    sys.argv, sys.path[0] = argv, folder
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
