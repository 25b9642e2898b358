"""The check that tests leave nothing behind, run by pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.process, pytest.mark.alone]

LEAKY_TESTS = """
import mmap
import os
import subprocess
import sys
import threading

import pytest

SLEEP = [sys.executable, "-ISc", "import signal; signal.pause()"]
KEPT = []


def test_process():
    KEPT.append(subprocess.Popen(SLEEP))


def test_daemon():
    script = "import os; os.setsid(); os.fork() or os.execv(os.sys.executable, %r)" % SLEEP
    subprocess.run([sys.executable, "-ISc", script], check=True)


def test_descriptor():
    KEPT.append(open(__file__))


def test_thread():
    thread = threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True)
    thread.start()


def test_shared_memory():
    open(f"/dev/shm/umbra-leak-{os.getpid()}", "w").close()


def test_mapped_memory():
    fd = os.memfd_create("bucket")
    os.ftruncate(fd, 4096)
    KEPT.append(mmap.mmap(fd, 4096))
    os.close(fd)


@pytest.mark.umbra_allow_leaks("it is what this test is about")
def test_allowed():
    KEPT.append(open(__file__))


@pytest.mark.umbra_allow_leaks
def test_allowed_without_reason():
    pass


def test_clean():
    subprocess.run([sys.executable, "-ISc", "pass"], check=True)


def test_ends_soon():
    subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(0.3)"]).returncode = 0
    threading.Timer(0.3, print).start()


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_module_fixture(server):
    assert server.poll() is None
"""
REPORTED = {
    "test_process": "process * (child of this process): *signal.pause()*",
    "test_daemon": "process * (child of this process): *signal.pause()*",
    "test_descriptor": "descriptor * -> *test_leaky.py",
    "test_thread": "daemon thread 'forgotten' (in wait, *threading.py:*)",
    "test_shared_memory": "shared memory /dev/shm/umbra-leak-*",
    "test_mapped_memory": "mapped memory /memfd:bucket (deleted)",
    "test_allowed_without_reason": "*umbra_allow_leaks needs a reason*",
}


@pytest.mark.slow
def test_a_leaking_test_is_reported_and_a_clean_one_passes(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\numbra_check_leaks = true\numbra_leak_grace_s = 0.6\n")
    pytester.makepyfile(test_leaky=LEAKY_TESTS)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist")

    for name in os.listdir("/dev/shm"):
        if name.startswith("umbra-leak-"):
            os.unlink(f"/dev/shm/{name}")
    for name, line in REPORTED.items():
        result.stdout.fnmatch_lines([f"*ERROR at * of {name} *", f"*{line}*"])
    result.assert_outcomes(passed=10, errors=len(REPORTED))


@pytest.mark.slow
def test_a_clean_check_takes_milliseconds() -> None:
    """In a process of its own: how much this one has mapped depends on the tests before."""
    script = """
import time, torch
from umbra.runtime.testing.leak_check import LeakCheck

took_s = []
for _ in range(20):
    start = time.process_time()
    assert LeakCheck().finish(grace_s=0.0) == []
    took_s.append(time.process_time() - start)
print(min(took_s))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )

    assert float(done.stdout) < 0.005
