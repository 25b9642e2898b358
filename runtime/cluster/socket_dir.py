"""The node-local directory of a job's Unix sockets: /tmp/umbra-UID/JOB-NODE, mode 0700.

It is local and short, because a socket's path is limited to 107 bytes and network file systems hold
no sockets. One of its files is `owner`, whose lock (flock) shows that the job is alive: the kernel
drops the lock with the last process that has the file open. A directory whose lock is free belongs
to a dead job, even one of another container that shares /tmp. Rules:

- The process that holds the lock of DIR/owner owns DIR, and nobody else removes or renames it.
- A new directory is made under a hidden name, locked, then renamed: nobody sees it unlocked.
- A dead one is locked, renamed to a hidden name, then removed: nobody sees half of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path

from umbra.runtime.errors import ConfigError

FD_SOCKET = "fds"
"""Name of the socket at which the supervisor serves descriptors."""

MAX_SOCKET_PATH_NBYTES = 100
"""The kernel's limit of sockets' paths is 107, and libraries may add to names."""

_MAX_SLUG_CHARS = 24
"""Characters kept of a job's and of a node's name. With more, few bytes remain for actors' names;
with fewer, people cannot distinguish directories. A digest replaces the rest."""

_YOUNG_S = 60.0
"""Hidden directories are left alone this long, because their maker may not hold the lock yet."""

_LOOK_S = 0.2
"""How long another process may inspect a dead directory, which locks it for a moment."""

_OWNER, _NEW, _DEAD = "owner", ".new-", ".dead-"


class SocketDir:
    """A job's socket directory on this node, owned through its lock. The lock is held as long as
    any process has `lock_fd` open: pass it to the guardian, which removes the directory at the end,
    then `release` it here."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    @classmethod
    def create(cls, job: str, node: str, root: Path | None = None) -> SocketDir:
        """Makes and locks the directory, after sweeping the directories of dead jobs. Raises
        ConfigError if the root is unsafe or a running job of that name has the directory."""
        root = default_root() if root is None else root
        _secure_root(root)
        sweep(root)
        path = socket_dir_path(job, node, root)
        fresh = root / f"{_NEW}{secrets.token_hex(8)}"
        try:
            fresh.mkdir(mode=0o700)
            lock_fd = _write_owner(fresh / _OWNER)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise ConfigError(f"cannot make a socket directory in {root}: {error}") from error
        try:
            _rename_when_free(fresh, path)
        except OSError as error:
            os.close(lock_fd)
            shutil.rmtree(fresh, ignore_errors=True)
            raise ConfigError(
                f"cannot lock socket directory {path} ({error.strerror}); {_describe_owner(path)}: "
                "end that job, or give this one another job id"
            ) from error
        return cls(path, lock_fd)

    def release(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def __enter__(self) -> SocketDir:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def default_root() -> Path:
    """/tmp/umbra-UID. Not $TMPDIR, which may be long, or differ between a job's processes."""
    return Path(f"/tmp/umbra-{os.getuid()}")


def socket_dir_path(job: str, node: str, root: Path | None = None) -> Path:
    """The directory of `job` on `node`, a function of the names, so everyone can find it."""
    root = default_root() if root is None else root
    path = root / f"{_slug(job)}-{_slug(node)}"
    length = len(os.fsencode(path))
    if length >= MAX_SOCKET_PATH_NBYTES - 20:
        raise ConfigError(
            f"socket root {root} is too long: {path} has {length} bytes, which leaves no bytes for "
            f"names below {MAX_SOCKET_PATH_NBYTES} bytes; use a shorter root, such as /tmp/umbra"
        )
    return path


def is_in_use(path: Path) -> bool:
    lock_fd = _lock_dead(path)
    if lock_fd is None:
        return (path / _OWNER).exists()
    os.close(lock_fd)
    return False


def sweep(root: Path) -> list[Path]:
    removed: list[Path] = []
    for path in sorted(root.iterdir()):
        is_hidden = path.name.startswith((_NEW, _DEAD))
        if is_hidden and _age_s(path) < _YOUNG_S:
            continue
        lock_fd = _lock_dead(path)
        if lock_fd is None:
            if is_hidden and not (path / _OWNER).exists():
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
            continue
        try:
            grave = root / f"{_DEAD}{secrets.token_hex(8)}"
            path.rename(grave)
            shutil.rmtree(grave, ignore_errors=True)
            removed.append(path)
        except OSError:
            continue  # another sweep of this user was faster
        finally:
            os.close(lock_fd)
    return removed


def _rename_when_free(fresh: Path, path: Path) -> None:
    """Replaces a dead job's directory by `fresh`. Raises OSError if the job is alive."""
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            fresh.rename(path)
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        # Either that job is alive, or a process briefly inspects or sweeps its dead directory.
        time.sleep(_LOOK_S / 10)
        sweep(fresh.parent)


def _lock_dead(path: Path) -> int | None:
    """The lock of the directory at `path` if no running process has it; else None."""
    try:
        lock_fd = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock_fd), os.lstat(path / _OWNER)):
            return lock_fd
    except OSError:
        pass  # locked by a running process, or removed by another sweep meanwhile
    os.close(lock_fd)
    return None


def _write_owner(path: Path) -> int:
    """Makes the owner file, locked; its text is for people only."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    lock_fd = os.open(path, flags, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    text = f"made by pid {os.getpid()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"
    os.write(lock_fd, text.encode())
    return lock_fd


def _describe_owner(path: Path) -> str:
    try:
        return f"it was {(path / _OWNER).read_text()} by a job that is still running"
    except OSError:
        return "its owner is unknown"


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _secure_root(root: Path) -> None:
    """Makes the root, or checks that nobody else can access it."""
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot make socket root {root}: {error.strerror}; set another socket root"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"socket root {root} is not a directory (a symbolic link is refused)")
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"socket root {root} belongs to uid {status.st_uid}, not {os.getuid()}: "
            "remove it, or set another socket root"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"socket root {root} has mode {stat.S_IMODE(status.st_mode):o}, others could reach "
            f"the sockets: chmod 700 {root}"
        )


def _slug(name: str) -> str:
    """A short name safe in a path; different names give different slugs."""
    kept = re.sub(r"[^A-Za-z0-9_.]", "_", name).lstrip(".")
    if kept == name and 0 < len(name) <= _MAX_SLUG_CHARS:
        return kept
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{kept[: _MAX_SLUG_CHARS - 9]}_{digest}"
