"""torch's compile cache, which a killed compiler may leave damaged."""

import contextlib
import struct
import sys
import time
from pathlib import Path


def repair_compile_cache():
    """Delete the libraries that a killed compiler left incomplete in torch's cache.

    torch would load them again and again. Those that changed less than 5 seconds ago may be in the
    hands of another process's linker, so this waits for them.
    """
    if sys.platform != "linux":
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes a second

    for file in Path(cache_dir()).rglob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # it was deleted, here or by another process
            while not is_whole_library(file):
                if abs(time.time() - file.stat().st_mtime) < 5:
                    time.sleep(0.2)
                    continue
                file.unlink()
                print(f"torch's compile cache: removed {file}, incomplete", file=sys.stderr)


def is_whole_library(file) -> bool:
    """Return whether a file is an ELF library with its section header table, which comes last."""
    with file.open("rb") as f:
        header = f.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    start, n_entries = struct.unpack_from("=Q12xH", header, 40)
    return file.stat().st_size >= start + 64 * n_entries
