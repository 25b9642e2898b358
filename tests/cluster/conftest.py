"""Hosts, a place for a job's files, and a Slurm, which all tests here share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from network import Hosts
from slurm_cluster import PROGRAMS, SlurmCluster

from umbra.trainer.quickstart.quickstart_command import ensure_assets


@pytest.fixture(scope="session")
def hosts() -> Generator[Hosts]:
    _require(("ip", "iptables"), "iproute2 iptables")
    with Hosts(4) as hosts:
        yield hosts


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Where the job's keys, sockets and files are: a folder with a short name, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="umbra-") as name:
        for variable in ("HOME", "UMBRA_SOCKET_ROOT"):
            folder = Path(name, variable.lower())
            folder.mkdir(mode=0o700)
            monkeypatch.setenv(variable, str(folder))
        yield Path(name)


@pytest.fixture(scope="session")
def slurm() -> Generator[SlurmCluster]:
    _require(PROGRAMS, "slurm-wlm munge")
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data sets."""
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    ensure_assets(folder, seed=0)
    return folder


def _require(programs: Sequence[str], packages: str) -> None:
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.fail(
            f"not installed: {', '.join(missing)}; run: apt-get install -y {packages}",
            pytrace=False,
        )
