from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import msgpack

from umbra.runtime.rpc.wire import Decoder, Encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldCall:
    """One rank's task in a test's world. `store_path` is the file through which the ranks find each
    other; `sys_path` the caller's, so that test modules can be imported."""

    module: str
    function: str
    args: list[Any]
    kwargs: dict[str, Any]
    store_path: str
    num_ranks: int
    timeout_s: float
    backend: str
    sys_path: list[str]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        store_path: str,
        num_ranks: int,
        timeout_s: float,
        backend: str,
    ) -> Self:
        name = function.__qualname__
        if "<" in name or function.__module__ == "__main__":
            raise ValueError(
                f"{function.__module__}.{name} cannot be imported in another process: define it at "
                "the top of a module"
            )
        return cls(
            module=function.__module__,
            function=name,
            args=list(args),
            kwargs=dict(kwargs),
            store_path=store_path,
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            backend=backend,
            sys_path=sys.path,
        )

    def encode(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(**_unpack(data))

    def run(self) -> Any:
        target: Any = importlib.import_module(self.module)
        for part in self.function.split("."):
            target = getattr(target, part)
        return target(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOutcome:
    """One rank's result: `error` is empty where there is a `value`. `failed_at` is the rank's
    time.monotonic() when the function raised; 0 for other errors."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    failed_at: float = 0.0

    def encode(self) -> bytes:
        return _pack(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(**_unpack(data))


def _pack(value: object) -> bytes:
    header, frames = Encoder().encode(value)
    packed: bytes = msgpack.packb([header, *(bytes(frame) for frame in frames)])
    return packed


def _unpack(data: bytes) -> dict[str, Any]:
    header, *frames = msgpack.unpackb(data)
    value: dict[str, Any]
    (value,) = Decoder().decode(header, frames)
    return value
