"""Deposits descriptors and then waits to be killed: `python depositor.py SOCKET NAME NUM`."""

from __future__ import annotations

import os
import sys

from umbra.runtime.weights.image.fd_server import MAX_FDS, FdDeposit


def main() -> None:
    path, name, num = sys.argv[1], sys.argv[2], int(sys.argv[3])
    deposit = FdDeposit(path, name, 5.0)
    for first in range(0, num, MAX_FDS):
        fds: list[int] = []
        for idx in range(first, min(first + MAX_FDS, num)):
            fds.append(os.memfd_create(f"{idx}"))
            os.ftruncate(fds[-1], idx)
        deposit.add(fds)
        for fd in fds:
            os.close(fd)
    print("deposited", flush=True)
    sys.stdin.read()
    deposit.close()


if __name__ == "__main__":
    main()
