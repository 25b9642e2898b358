"""The built distributions hold all that is umbra, although the sources lie behind links."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PARTS = ("runtime", "engines", "trainer")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the last commit, and the wheel made from that."""
    work = tmp_path_factory.mktemp("distributions")
    archive, sources = work / "sources.tar", work / "sources"
    with archive.open("wb") as file:
        subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, stdout=file, check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(sources, filter="tar")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", sources],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return work / "dist"


def committed_modules() -> set[str]:
    """Paths that the committed Python files of the three parts, and what a server sends as it is,
    should have in a wheel."""
    listing = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", *PARTS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        f"umbra/{path}"
        for path in listing.stdout.splitlines()
        if path.endswith(".py") or "/static/" in path
    }


@pytest.mark.slow
def test_the_wheel_holds_every_committed_module(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert committed_modules() <= names
    assert {"umbra/__init__.py", "umbra/py.typed"} <= names


@pytest.mark.slow
def test_the_sdist_holds_every_committed_module(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")

    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {f"src/{module}" for module in committed_modules()} <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "src/umbra/py.typed"} <= names


@pytest.mark.slow
def test_an_installed_wheel_works_outside_the_repository(
    distributions: Path, tmp_path: Path
) -> None:
    (wheel,) = distributions.glob("*.whl")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", target, wheel], check=True, timeout=120)
    code = "import umbra.trainer.quickstart.quickstart_task as task; print(task.__file__)"

    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert Path(done.stdout.strip()).is_relative_to(target)
