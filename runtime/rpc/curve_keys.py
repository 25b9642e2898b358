"""Restricts tcp to this job: CURVE keys and the ZAP handler that admits only them.

Every process of a job holds the same key pair, from a secret that travels by file (mode 0600) or
inherited pipe, never by environment, argument or torchrun's store. CURVE alone would admit any
client that knows how to speak it; the ZAP handler refuses every key but the job's own.

Every supervisor of the job holds a shared lock (flock) on the file while it runs. A file whose lock
is free belongs to a dead job, on whichever host that ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from umbra.runtime.errors import ConfigError

_YOUNG_S = 600.0
"""Young files of keys stay: a job's nodes start apart, and no supervisor may hold the lock yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """The job's key pair, Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes

    @classmethod
    def generate(cls) -> Self:
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ConfigError if there is no such file, others may read
        it, or it holds no key pair."""
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"{path} can be read by others: chmod 600 it")
            public, secret = path.read_bytes().split()
            if len(public) != 40 or len(secret) != 40:
                raise ValueError("a key has 40 characters")
        except (OSError, ValueError) as error:
            raise ConfigError(f"no job keys in {path}: {error}") from error
        return cls(public=public, secret=secret)

    def save(self, path: Path) -> None:
        """Writes a new file of mode 0600, whole; raises FileExistsError if there is one."""
        import tempfile  # takes 5 ms, which every actor would wait for

        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # of mode 0600
            file.write(self.public + b"\n" + self.secret + b"\n")
            file.flush()
            os.link(file.name, path)

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` present the job's key and accept only a server that holds it."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = self.public

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` a CURVE server; its context needs `admit_only_job` as well."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_server = True

    def admit_only_job(self, context: zmq.Context[Any]) -> ThreadAuthenticator:
        """Starts the ZAP handler of `context`; the caller stops it before ending the context."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=_OnlyKey(self.public))
        return authenticator


@contextlib.contextmanager
def holding_keys(path: Path) -> Generator[None]:
    """Shows `sweep_keys` that a job uses this file, where the file system has locks."""
    with path.open("rb") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def sweep_keys(folder: Path) -> None:
    """Removes the files of jobs that were killed."""
    for path in folder.glob("*"):
        # One that cannot be locked is in use; another sweep may remove it first.
        with contextlib.suppress(OSError), path.open("rb+") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _YOUNG_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def main() -> None:
    """`python -m umbra.runtime.rpc.curve_keys FILE` writes new keys to a file."""
    CurveKeys.generate().save(Path(sys.argv[1]))


class _OnlyKey:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return (z85.encode(key) if len(key) == 32 else key) == self._public


if __name__ == "__main__":
    main()
