"""Socket directories: private, short, and never left by the dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.cluster import socket_dir
from umbra.runtime.cluster.socket_dir import (
    MAX_SOCKET_PATH_NBYTES,
    SocketDir,
    default_root,
    is_in_use,
    socket_dir_path,
    sweep,
)
from umbra.runtime.errors import ConfigError

DEADLINE_S = 60.0
HOLDER = """
import sys
from pathlib import Path
from umbra.runtime.cluster.socket_dir import SocketDir
held = SocketDir.create("held", "node", Path(sys.argv[1]))
(held.path / "a.sock").touch()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path, because one of pytest's may be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="umbra-") as folder:
        yield Path(folder) / "root"


def make_dead(root: Path, job: str) -> Path:
    """The directory of a job that ended without removing it."""
    left = SocketDir.create(job, "node", root)
    (left.path / "a.sock").touch()
    left.release()
    return left.path


def test_a_directory_is_private_and_removed_with_what_it_holds(root: Path) -> None:
    with SocketDir.create("job", "node", root) as made:
        path = made.path / "engine-0#1.sock"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
        modes = [folder.stat().st_mode & 0o777 for folder in (root, made.path)]
        assert modes == [0o700, 0o700]
        assert made.path == socket_dir_path("job", "node", root) == root / "job-node"

    assert list(root.iterdir()) == []


def test_the_default_root_is_the_users_own() -> None:
    assert default_root() == Path(f"/tmp/umbra-{os.getuid()}")


@pytest.mark.process
def test_a_living_owner_is_left_alone_and_a_killed_one_swept(root: Path) -> None:
    path = socket_dir_path("held", "node", root)
    argv = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"

        assert is_in_use(path)
        assert sweep(root) == []
        with pytest.raises(ConfigError, match=f"made by pid {holder.pid} .* still running"):
            SocketDir.create("held", "node", root)
        assert [entry.name for entry in root.iterdir()] == ["held-node"]
        holder.kill()
        holder.wait(DEADLINE_S)

    assert not is_in_use(path)
    with SocketDir.create("other", "node", root):
        assert not path.exists()


def test_a_job_replaces_its_dead_namesake(root: Path) -> None:
    path = make_dead(root, "job")

    with SocketDir.create("job", "node", root) as made:
        assert made.path == path
        assert [entry.name for entry in path.iterdir()] == ["owner"]


def test_a_look_at_a_dead_directory_does_not_keep_a_job_from_starting(root: Path) -> None:
    path = make_dead(root, "job")
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_in_use(path)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        made = SocketDir.create("job", "node", root)
    finally:
        stop.set()
        looker.join(DEADLINE_S)
    made.remove()


def test_a_lock_handed_on_keeps_the_directory(root: Path) -> None:
    made = SocketDir.create("job", "node", root)
    kept_fd = os.dup(made.lock_fd)
    made.release()

    assert is_in_use(made.path)
    assert sweep(root) == []
    os.close(kept_fd)
    assert not is_in_use(made.path)
    assert sweep(root) == [made.path]


def test_a_sweep_leaves_what_it_does_not_know(root: Path) -> None:
    make_dead(root, "job")
    (root / "file").touch()
    (root / ".hidden").mkdir()
    (root / "folder").mkdir()
    (root / "link").symlink_to(root / "folder")

    assert sweep(root) == [root / "job-node"]
    assert sorted(entry.name for entry in root.iterdir()) == [".hidden", "file", "folder", "link"]


def test_a_sweep_removes_half_made_directories_only_when_they_are_old(root: Path) -> None:
    SocketDir.create("job", "node", root).remove()
    for name in (".new-young", ".new-old", ".dead-old"):
        (root / name).mkdir()
    (root / ".dead-old" / "owner").touch()
    long_ago = time.time() - 3600
    for name in (".new-old", ".dead-old"):
        os.utime(root / name, (long_ago, long_ago))

    sweep(root)

    assert [entry.name for entry in root.iterdir()] == [".new-young"]


def test_a_root_that_is_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "target")

    with pytest.raises(ConfigError, match="symbolic link is refused"):
        SocketDir.create("job", "node", root)
    assert list((tmp_path / "target").iterdir()) == []


def test_a_root_that_is_a_file_or_that_others_can_reach_is_refused(root: Path) -> None:
    root.touch()
    with pytest.raises(ConfigError, match=r"cannot make socket root .* set another"):
        SocketDir.create("job", "node", root)
    root.unlink()
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(ConfigError, match=f"mode 755.*chmod 700 {root}"):
        SocketDir.create("job", "node", root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_root_of_another_user_is_refused(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)

    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        SocketDir.create("job", "node", root)


def test_a_root_that_cannot_be_made_or_is_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set another socket root"):
        SocketDir.create("job", "node", tmp_path / "missing" / "root")
    with pytest.raises(ConfigError, match="use a shorter root"):
        socket_dir_path("job", "node", tmp_path / ("x" * MAX_SOCKET_PATH_NBYTES))


@given(names=st.tuples(st.text(), st.text()), others=st.tuples(st.text(), st.text()))
def test_names_of_any_kind_give_short_and_different_paths(
    names: tuple[str, str], others: tuple[str, str]
) -> None:
    root = Path("/tmp/umbra-4294967295")

    path = socket_dir_path(*names, root)

    assert path.parent == root
    assert not path.name.startswith(".")
    assert len(os.fsencode(path)) < MAX_SOCKET_PATH_NBYTES - 20
    assert (path == socket_dir_path(*others, root)) == (names == others)
    assert socket_dir.socket_dir_path(*names, root) == path
