"""Passes Ethernet frames between two tap devices, each a while after it came:

    python frame_delay.py DELAY_S DEVICE DEVICE

Prints a line when it has opened the devices.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import sys
from typing import Final

_TUNSETIFF: Final = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MAX_FRAME: Final = 65536


def open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


async def delay_frames(delay_s: float, near: int, far: int) -> None:
    loop = asyncio.get_running_loop()

    def pass_on(source: int, target: int) -> None:
        due = loop.time() + delay_s
        try:
            while True:
                loop.call_at(due, os.write, target, os.read(source, _MAX_FRAME))
                due += 1e-9  # frames of one time would be in no order
        except BlockingIOError:
            return

    loop.add_reader(near, pass_on, near, far)
    loop.add_reader(far, pass_on, far, near)
    print("ready", flush=True)
    await loop.create_future()  # until this process is killed


if __name__ == "__main__":
    asyncio.run(delay_frames(float(sys.argv[1]), *map(open_tap, sys.argv[2:4])))
