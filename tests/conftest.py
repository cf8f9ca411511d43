"""What every test runs with, in this process and in those that it starts. Set before torch is imported."""

import os
import signal
from pathlib import Path

import pytest

# One thread: sums are cut by threads, so that only runs of equal threads have equal bits; and workers share the cores.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of compilers takes longer to start than it saves here
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # no network, whatever is in the user's caches
os.fsync = lambda fd: None  # what is flushed is lost in a power cut alone

import lib  # noqa: E402, F401  (before any test computes: lib/__init__.py)


@pytest.fixture(autouse=True)
def handlers():
    """A run in this process leaves its signal handlers behind."""
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    yield
    for sign, handler in before.items():
        signal.signal(sign, handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """data/, teacher/ and student/, as tests/world.py makes them; a test that changes them takes a copy."""
    from tests import world

    root = world.make_world(tmp_path_factory.mktemp("tiny"))
    before = sorted(root.rglob("*"))
    yield root
    assert sorted(root.rglob("*")) == before


def pytest_collection_modifyitems(items):
    """Slow tests first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_ignore_collect(collection_path, config):
    """`pytest -m gpu` collects one file: a machine with a GPU may lack what the others import."""
    gpu = config.option.markexpr == "gpu" and collection_path.suffix == ".py"
    return True if gpu and collection_path.name != "test_gpu.py" else None
