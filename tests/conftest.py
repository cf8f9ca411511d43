"""What every test runs with, in this process and in those that it starts.

It is set before torch is imported.
"""

import functools
import gc
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

gc.disable()  # until all is imported, which takes a quarter less time
# An import takes three times as long where modules are compiled anew, as images of containers ask.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Sums are divided among threads, so only runs of equally many have equal bits. Workers share cores.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # no network
os.fsync = lambda fd: None  # what is flushed is lost in a power cut alone
importlib.metadata.version = functools.cache(importlib.metadata.version)  # each run asks for three


def pytest_configure(config):
    """Kernels of the CPU are compiled in seconds: by no pool of compilers, and without vectors."""
    if config.option.markexpr != "gpu":
        os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


def pytest_collectstart():
    """Before any test computes. The process that only hands tests out to workers needs no torch."""
    import lib.torch_setup  # noqa: F401


def pytest_collection_finish():
    gc.freeze()  # no later collection looks at what is imported
    gc.enable()


@pytest.fixture
def printed(capsys):
    """printed() -> what was printed since it was last called."""
    return lambda: capsys.readouterr().out


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """data/, teacher/ and student/ of tests/world.py; a test that changes them takes a copy."""
    from tests import world

    root = world.make_world(tmp_path_factory.mktemp("tiny"))
    before = sorted(root.rglob("*"))
    yield root
    assert sorted(root.rglob("*")) == before


def pytest_collection_modifyitems(items):
    """Slow tests first, so that no worker is left with one of them at the end.

    They all go to the first worker. So it alone starts the server of world.py's processes.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_ignore_collect(collection_path, config):
    """`pytest -m gpu` collects one file: a machine with a GPU may lack what the others import."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return collection_path.name != "test_gpu.py" or None  # None: as without this function
