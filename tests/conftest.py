"""Settings for all tests: one thread a process, and no inherited torchrun environment."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import preloaded_python
import pytest

with contextlib.suppress(ImportError):  # vLLM's environment and GPU hosts have none
    import hypothesis

    # A busy machine is no failure: how long things take is measured where a test says so.
    hypothesis.settings.register_profile("umbra", deadline=None)
    hypothesis.settings.load_profile("umbra")

# Before anything imports torch, here or in a child: tests share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Engines and ranks choose the number of their threads by the cores, as if each had them to itself.
# Two that wait for each other in the midst of a small product burn a core each.
os.environ["OMP_THREAD_LIMIT"] = "1"

# nohup has it ignored, and so would the programs that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is imported and collected lives to the end: a third of the time would go into looking at it.
gc.disable()

MountDisk = Callable[[str], Path]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def fork_server() -> None:
    """What a `PreloadedProcess` needs. Before the first test, which would seem to leave it
    behind."""
    preloaded_python.start_server()


@pytest.fixture
def mount_disk(tmp_path: Path) -> Generator[MountDisk]:
    """Mounts a file system of its own, such as `mount_disk("size=1m")`; skips where it may not."""
    with contextlib.ExitStack() as stack:

        def mount(options: str) -> Path:
            place = tmp_path / "disk"
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", options, "umbra-test", str(place)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if done.returncode != 0:
                pytest.skip(f"cannot mount: {done.stderr.strip()}")
            unmount = ["umount", "--lazy", str(place)]
            stack.callback(subprocess.run, unmount, check=True, timeout=30)
            return place

        yield mount
