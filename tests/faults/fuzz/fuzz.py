"""Fuzzing: malformed messages to an actor's socket, and to everything that reads weight metadata.

A short real session is recorded, and its messages are damaged: bytes and lengths, types, sizes,
nesting, extensions. A tenth of the messages goes through the socket of a real actor process. It
must answer correct calls all the time and count each malformed message, and its memory must not
grow. All others are decoded and read in this process. There, each must be read or refused with a
ProtocolError, at once. Nothing may be unpickled.

    python tests/faults/fuzz/fuzz.py [--seed N] [--frames 10000000] [--run-dir runs/fuzz]

The exit status is 1 if anything is wrong. RUN_DIR/summary.json has the results. The recording
differs between runs by times and addresses, so the message that failed is written to
RUN_DIR/failed.msgpack; `--replay` reads it again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[2] / "shared/runtime"))  # rpc_process is there

import msgpack
import zmq
from frame_mutator import PICKLE, FrameMutator
from message_readers import MessageReader
from raw_socket import RawSocket, receive_result
from recorded_traffic import Message, record_traffic
from rpc_process import ActorProcess, short_folder

from umbra.runtime.rpc.wire import CALL

_PROCESS_SHARE: Final = 0.1
"""A message through the process takes about as long as five read here."""
_WARM_UP_SHARE: Final = 0.2
"""Of the messages, before memory is measured for the first time: allocators reach their size."""
_GROWTH_MAX_NBYTES: Final = 32 << 20
_MESSAGE_LIMIT_S: Final = 0.5
_MIB_LIMIT_S: Final = 1.5
"""Processor time of one message, and of each MiB of it: a MiB may hold a million small lists."""
_WINDOW: Final = 200
"""Messages between two correct calls, and before the hostile peer reconnects."""
_WINDOW_LIMIT_S: Final = 30.0
_CALL_ID: Final = 1 << 40
"""Of correct calls: no recorded call has it."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """Memory is resident, in MiB: after the first fifth of the messages, and at the end."""

    seed: int
    frames: int = 0
    frames_through_process: int = 0
    malformed: int = 0
    values_read: int = 0
    slowest_ms: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_start_mib: float = 0.0
    memory_end_mib: float = 0.0
    process_memory_start_mib: float = 0.0
    process_memory_end_mib: float = 0.0


class Fuzz:
    """One run of given size; raises AssertionError with what is wrong."""

    def __init__(self, seed: int, num_frames: int, run_dir: Path) -> None:
        self.summary = Summary(seed=seed)
        self._num_frames = num_frames
        self._run_dir = run_dir
        self._reader = MessageReader()
        recorded = record_traffic(run_dir)
        self._mutator = FrameMutator(recorded, Random(seed))
        for message in recorded:
            self._reader.read(message)
        assert self._reader.num_read > 0

    def run(self) -> None:
        began, cpu_began = time.monotonic(), time.process_time()
        num_through_process = round(self._num_frames * _PROCESS_SHARE)
        self._in_parts(num_through_process, self._num_frames - num_through_process)
        self.summary.values_read = self._reader.num_read
        self.summary.seconds = round(time.monotonic() - began, 1)
        self.summary.cpu_seconds = round(time.process_time() - cpu_began, 1)

    def _in_parts(self, num_through_process: int, num_here: int) -> None:
        summary = self.summary
        with short_folder() as folder, ActorProcess(
            Path(folder), target="fuzz_target:FuzzTarget", sys_path=Path(__file__).parent
        ) as actor:  # fmt: skip
            target = _Target(actor)
            for share in (_WARM_UP_SHARE, 1 - _WARM_UP_SHARE):
                summary.memory_start_mib = _resident_mib(os.getpid())
                summary.process_memory_start_mib = _resident_mib(actor.pid)
                self._read_here(round(num_here * share))
                self._send(target, round(num_through_process * share))
            summary.memory_end_mib = _resident_mib(os.getpid())
            summary.process_memory_end_mib = _resident_mib(actor.pid)
            report = target.call("report")
            actor.end()
            assert report == {"unpickled": ["builtins.ValueError"], "surprises": []}, report
            _check_log(actor.log(), target.num_malformed)
        summary.malformed += target.num_malformed
        for start, end in (
            (summary.memory_start_mib, summary.memory_end_mib),
            (summary.process_memory_start_mib, summary.process_memory_end_mib),
        ):
            assert (end - start) * (1 << 20) < _GROWTH_MAX_NBYTES, f"{start} MiB became {end} MiB"

    def _read_here(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self._read(self._mutator.draw())

    def _read(self, message: Message) -> bool:
        """Whether the message is well-formed."""
        began = time.thread_time()
        try:
            is_good = self._reader.read(message)
            took_s = time.thread_time() - began
            size_mib = sum(map(len, message)) / (1 << 20)
            limit_s = _MESSAGE_LIMIT_S + _MIB_LIMIT_S * size_mib
            assert took_s < limit_s, f"{took_s:.2f} s for a message of {size_mib:.2f} MiB"
        except BaseException:
            (self._run_dir / "failed.msgpack").write_bytes(msgpack.packb(message))
            raise
        self.summary.frames += 1
        self.summary.malformed += not is_good
        self.summary.slowest_ms = max(self.summary.slowest_ms, round(took_s * 1000, 1))
        return is_good

    def _send(self, target: _Target, num_frames: int) -> None:
        """Each message is first read here, so that it is known which ones must be counted."""
        while num_frames > 0:
            window = [self._mutator.draw() for _ in range(min(_WINDOW, num_frames))]
            malformed = sum(not self._read(message) for message in window)
            self.summary.malformed -= malformed  # the target counts them
            target.send(window, malformed)
            self.summary.frames_through_process += len(window)
            num_frames -= len(window)


class _Target:
    """The actor process, as a hostile and an honest peer see it.

    Attributes:
        num_malformed: messages sent to it that it must have counted.
    """

    def __init__(self, actor: ActorProcess) -> None:
        self._actor = actor
        self.num_malformed = 0
        self._last_call_id = _CALL_ID
        self.call("unpickle", PICKLE)  # proves that unpickling is noticed

    def call(self, method: str, *args: object) -> Any:
        with RawSocket(self._actor.ref) as socket:
            return self._answer(socket, method, *args)

    def send(self, window: Sequence[Message], num_malformed: int) -> None:
        """Sends malformed messages; the same connection and another one are served after them."""
        with RawSocket(self._actor.ref) as socket:
            socket.rcvhwm = socket.sndhwm = 0
            for message in window:
                socket.send_multipart(message)  # pyright: ignore[reportUnknownMemberType]
            began = time.monotonic()
            assert self._answer(socket, "who") == "the target"
            assert time.monotonic() - began < _WINDOW_LIMIT_S
        assert self.call("who") == "the target"
        self.num_malformed += num_malformed

    def _answer(self, socket: zmq.Socket[bytes], method: str, *args: object) -> Any:
        self._last_call_id += 1
        socket.send(msgpack.packb([CALL, self._last_call_id, 1, method, args, {}, 60_000, 0]))
        return receive_result(socket, self._last_call_id)


def _check_log(log: str, num_malformed: int) -> None:
    """Each malformed message was counted, and none was a bug of the server."""
    assert "Traceback" not in log, log[:4000]
    counts = re.findall(r"dropped \d+ more messages from a caller, (\d+) in all", log)
    assert counts, log[:4000]
    assert int(counts[-1]) == num_malformed, f"{counts[-1]} were counted, not {num_malformed}"


def _resident_mib(pid: int) -> float:
    num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(num_pages * os.sysconf("SC_PAGESIZE") / (1 << 20), 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Raises an AssertionError, or the error of the code under test."""
    arguments = _parser().parse_args(argv)
    if arguments.replay:
        is_good = MessageReader().read(msgpack.unpackb(arguments.replay.read_bytes()))
        print("fuzz: well-formed" if is_good else "fuzz: malformed")
        return
    print(f"fuzz: seed {arguments.seed}", flush=True)
    shutil.rmtree(arguments.run_dir, ignore_errors=True)
    arguments.run_dir.mkdir(parents=True)
    fuzz = Fuzz(arguments.seed, arguments.frames, arguments.run_dir)
    gc.collect()
    gc.freeze()  # looking for garbage among the modules would take longer than reading
    fuzz.run()
    summary = json.dumps(asdict(fuzz.summary), indent=2)
    (arguments.run_dir / "summary.json").write_text(summary + "\n")
    print(f"fuzz: {summary}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--frames", type=int, default=10_000_000, help="number of messages")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--replay", type=Path, metavar="FILE", help="read one message again")
    return parser


if __name__ == "__main__":
    main()
