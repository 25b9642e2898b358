"""Processes run on the CPU cores near their GPUs, and share them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from actor_specs import actor
from fake_nvml import FakeGpu, FakeNvml

from umbra.runtime.process.cpu_affinity import (
    core_shares,
    cores_near,
    cpu_quota,
    thread_limit,
)
from umbra.runtime.process.nvml import Nvml
from umbra.runtime.session.session import Session

ALLOWED = frozenset(os.sched_getaffinity(0))
FIRST, LAST = min(ALLOWED), max(ALLOWED)
ELSEWHERE = 4000

needs_two_cores = pytest.mark.skipif(FIRST == LAST, reason="needs two CPU cores")


def show_near(fake: FakeNvml, *cores: tuple[int, ...] | None) -> None:
    """Makes GPUs that are near these cores."""
    fake.show(*(FakeGpu(uuid=f"GPU-{idx}", cores=near) for idx, near in enumerate(cores)))


def test_nvml_reports_the_cores_near_a_gpu(fake_nvml: FakeNvml) -> None:
    show_near(fake_nvml, (0, 3, 64, 8191), (63,), None)

    nvml = Nvml.open(fake_nvml.library)

    assert nvml is not None
    assert nvml.near_cores() == [{0, 3, 64, 8191}, {63}, set()]
    nvml.close()


@needs_two_cores
def test_a_process_gets_the_cores_near_its_gpus_that_the_job_has(fake_nvml: FakeNvml) -> None:
    show_near(fake_nvml, (FIRST, ELSEWHERE), (LAST,))

    processes = [("0",), ("GPU-1",), ("0", "GPU-1"), ()]
    found = cores_near(processes, fake_nvml.library)

    assert found == [{FIRST}, {LAST}, {FIRST, LAST}, ALLOWED]


@needs_two_cores
def test_a_process_keeps_all_cores_if_those_near_its_gpus_are_not_known_or_not_the_jobs(
    fake_nvml: FakeNvml,
) -> None:
    show_near(fake_nvml, (FIRST,), None, (ELSEWHERE,))

    def cores(*gpus: str) -> frozenset[int]:
        return cores_near([gpus], fake_nvml.library)[0]

    assert cores("0") == {FIRST}
    assert cores("1") == cores("0", "1") == cores("2") == ALLOWED
    assert cores("0", "7") == ALLOWED  # there is no such GPU


def test_processes_share_the_cores_that_they_have_in_common() -> None:
    left, right = set(range(8)), set(range(8, 12))

    assert core_shares([left, left, right], math.inf) == [4, 4, 4]
    assert core_shares([left | right, left, right], math.inf) == [4, 4, 2]
    assert core_shares([{0}] * 3, math.inf) == [1, 1, 1]


def test_processes_share_the_cpu_quota_of_their_container() -> None:
    cores = [frozenset(range(64))]

    assert core_shares(cores, 4.5) == [4]
    assert core_shares(cores * 2, 4.5) == [2, 2]
    assert core_shares(cores, 0.5) == [1]


@pytest.mark.parametrize(
    ("cgroups", "files", "quota"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "cpu.max": "max 100000"}, 4.0),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "1 1"}, 1.0),
        (
            "4:memory:/m\n1:cpu,cpuacct:/of/the/host",
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1"}, math.inf),
    ],
)
def test_the_cpu_quota_is_the_least_of_the_cgroups_above(
    tmp_path: Path, cgroups: str, files: dict[str, str], quota: float
) -> None:
    assert cpu_quota(*written(tmp_path, cgroups, files)) == quota


@pytest.mark.parametrize(
    ("cgroups", "files", "limit"),
    [
        ("0::/job/step", {}, math.inf),
        ("0::/job/step", {"job/pids.max": "300", "job/step/pids.max": "max"}, 300),
        ("4:cpu:/m\n1:pids:/job", {"pids/job/pids.max": "40", "pids/pids.max": "max"}, 40),
    ],
)
def test_the_limit_of_threads_is_the_least_of_the_cgroups_above(
    tmp_path: Path, cgroups: str, files: dict[str, str], limit: float
) -> None:
    assert thread_limit(*written(tmp_path, cgroups, files)) == limit


def written(folder: Path, cgroups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A process's list of its cgroups, and their file system."""
    own, root = folder / "cgroup", folder / "fs"
    own.write_text(f"{cgroups}\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return own, root


def cores_of_threads(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("nvml_library_path")
@needs_two_cores
def test_all_threads_of_an_engine_run_near_its_gpu(
    fake_nvml: FakeNvml, umbra_session: Session
) -> None:
    show_near(fake_nvml, (FIRST,), (LAST,))

    def cores(gpus: tuple[str, ...] | None) -> list[set[int]]:
        engine = umbra_session.spawn(actor("Engine", role="engine", gpus=gpus))
        return cores_of_threads(int(engine.call("who")["pid"]))

    first, last, on_cpu, anywhere = map(cores, [("0",), ("1",), (), None])

    assert first == [{FIRST}] * len(first)
    assert last == [{LAST}] * len(last)
    assert len(first) > 1  # ZMQ's, for example
    assert on_cpu == anywhere == [ALLOWED] * len(anywhere)


def run_program(program: str) -> str:
    """What it prints, in a process of its own, because it may change which cores it has."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "7"},
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout.strip()


RANK = """
import os, threading, torch
from umbra.trainer.world.mesh import share_cores

end = threading.Event()
other = threading.Thread(target=end.wait)
other.start()
share_cores(1, 2, ("0", "GPU-1", "2"))
print(os.sched_getaffinity(0), os.sched_getaffinity(other.native_id), torch.get_num_threads())
end.set()
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("nvml_library_path")
@needs_two_cores
def test_a_rank_moves_to_the_cores_near_its_gpu_with_threads_that_it_has(
    fake_nvml: FakeNvml,
) -> None:
    show_near(fake_nvml, (FIRST,), (LAST,), (LAST,))

    assert run_program(RANK) == f"{{{LAST}}} {{{LAST}}} 1"


LONE_RANK = """
import torch
from umbra.trainer.world.mesh import share_cores

share_cores(0, 1, ())
print(torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_single_rank_has_the_threads_that_its_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)

    assert run_program(LONE_RANK) == "7"


POOL = """
from pathlib import Path
from umbra.runtime.cluster.placement import Node, PoolRequest, plan_placement
from umbra.runtime.engine_api.pool_settings import PoolSettings
from umbra.trainer.services.pool_specs import pool_spec

request = PoolRequest(name="policy", mode="standalone", num_gpus=1)
plan = plan_placement([Node(gpus=("GPU-1",), num_ranks=0)], [request])
spec = pool_spec(
    "policy", PoolSettings(), plan,
    model_path=Path("m"), dtype="float32", device_type="cuda", max_context_len=8,
)
print(spec.kwargs["num_threads"])
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("nvml_library_path")
@needs_two_cores
def test_an_engine_has_as_many_threads_as_there_are_cores_near_its_gpu(
    fake_nvml: FakeNvml,
) -> None:
    show_near(fake_nvml, tuple(ALLOWED), (FIRST,))

    assert run_program(POOL) == "1"
