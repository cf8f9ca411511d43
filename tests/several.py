"""Runs of train.py one after the other within one torchrun: torchrun .. tests/several.py RUNS.json.

RUNS.json  [[flag, ..], ..]. Exit code 0 where all runs end with 0.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configure
import train
from lib import parallel

if __name__ == "__main__":
    stop, parallel.stop = parallel.stop, lambda: None  # processes that were started once serve every run
    for run in json.loads(Path(sys.argv[1]).read_text()):
        assert configure.guard(lambda: train.run(configure.load(run))) == 0, run  # noqa: B023
    stop()
