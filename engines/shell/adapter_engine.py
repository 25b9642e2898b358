from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, ClassVar, Final, Protocol, TypeVar

import numpy as np

from umbra.engines.loading.weight_source import Regions, image_tensors
from umbra.engines.shell.adapter_settings import AdapterSettings
from umbra.engines.shell.engine_core import PolledCore, WeightUpdates
from umbra.engines.shell.engine_follower import FollowerGroup
from umbra.engines.shell.engine_shell import EngineShell
from umbra.engines.shell.polled_requests import PolledRequests
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.lora import LoraBase
from umbra.runtime.errors import EngineError, WeightSyncError
from umbra.runtime.waiting import first_of
from umbra.runtime.weights.image.destinations import Destinations
from umbra.runtime.weights.image.mapped_image import KeptImage
from umbra.runtime.weights.links.image_source import ImageSource
from umbra.runtime.weights.manifest import Manifest

logger = logging.getLogger(__name__)

_REPORT_AFTER_S: Final = 60.0  # without the end of the warm-up
# The warm-up's request.
_REQUEST: Final = GenerationRequest(
    id=0,
    tokens=np.zeros(1, np.int32),
    position=0,
    seed=0,
    max_new_tokens=2,  # one by prefill, one by decoding
    temperature=1.0,
    stop_token_ids=(),
)
_T = TypeVar("_T")
_OPEN_TIMEOUT_S: Final = 10.0
_MAX_MISMATCHES: Final = 32
# Mismatches named in a report; the rest are counted.


class AdapterCore(PolledCore):
    """The core of an adapter: its library loads weights by itself, mostly in worker processes. If
    the engine spans nodes, the core starts and closes its `followers`.

    Attributes:
        obeys_while_generating: whether workers take orders between two steps, so that they can open
            an update before the engine is paused for it.
    """

    obeys_while_generating: bool = False

    def __init__(self, lora_base: LoraBase | None = None, followers: Sequence[str] = ()) -> None:
        super().__init__(lora_base)
        self.followers = FollowerGroup(followers)

    def show_stacks(self) -> None:
        return

    @abstractmethod
    async def ask_workers(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Makes each worker carry out an order, see `WorkerUpdates.obey`; returns their `checked`
        reports. After "load", requests get the new weights. Raises EngineError if a worker failed:
        after "load" the weights are undefined."""

    def checked(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for worker, report in enumerate(reports):
            if "error" in report:
                raise EngineError(f"{self.name}'s worker {worker} failed: {report['error']}")
        return reports


class AdapterEngine(EngineShell[AdapterCore]):
    def __init__(
        self,
        core: AdapterCore,
        *,
        max_num_seqs: int,
        max_context_len: int,
        tick_ms: float,
        load_weights: bool,
    ) -> None:
        super().__init__(
            core,
            PolledRequests(core, max_num_seqs=max_num_seqs, tick_ms=tick_ms),
            AdapterUpdates(core),
            max_context_len=max_context_len,
            load_weights=load_weights,
        )

    async def _start_core(self) -> None:
        await super()._start_core()
        await warm_up(self._core)
        # The library's objects stay. Each search for garbage among them would stop the event loop
        # for up to half a second.
        gc.collect()
        gc.freeze()


class MakeCore(Protocol):
    def __call__(self, settings: Any, /) -> AdapterCore: ...


class ConfiguredEngine(AdapterEngine):
    """An adapter that accepts the fields of `settings_class` by name."""

    settings_class: ClassVar[type[AdapterSettings]]
    core_class: ClassVar[MakeCore]

    def __init_subclass__(cls) -> None:
        cls.__signature__ = inspect.signature(cls.settings_class)

    def __init__(self, **settings: Any) -> None:
        made = self.settings_class(**settings).with_local_model()
        super().__init__(
            type(self).core_class(made),
            max_num_seqs=made.max_num_seqs,
            max_context_len=made.max_context_len,
            tick_ms=made.tick_ms,
            load_weights=made.load_weights,
        )


async def warm_up(core: AdapterCore) -> None:
    """Runs a two-token request before the engine reports ready, so that it compiles during its
    start. Compiling takes many seconds with vLLM on the CPU. From then on, callers and the stall
    watchdog can expect tokens promptly. The start's own deadline applies."""
    started = time.monotonic()
    output = await core.add("warm-up", _REQUEST, "warm-up", 1)
    while True:
        try:
            new = output.take()
        except Exception as error:  # of the engine's library; the log has the cause
            raise EngineError(f"{core.name} failed at its first request: {error}") from error
        if new is not None and new.finish_reason is not None:
            break
        if core.died.is_set():
            raise EngineError(f"a process of {core.name} ended at its first request")
        try:
            async with asyncio.timeout(_REPORT_AFTER_S):
                await first_of(output.changed, core.died)
        except TimeoutError:
            took_s = time.monotonic() - started
            logger.warning("%s has not ended its first request in %.0f s", core.name, took_s)
            core.show_stacks()
    if new.finish_reason != "length":
        raise EngineError(f"{core.name} ended its first request: {new.finish_reason}")


class AdapterUpdates(WeightUpdates):
    """The engine process's side of weight updates. Owns its mapping of the image, and the thread
    that checks it. The workers' side is `WorkerUpdates`.

    shared memory   ranks ──fill──▶ image of the node ◀──read── workers     ImageUpdate
    CUDA IPC        ranks ──exports──────────────────▶ read by  workers     ExportsUpdate
    """

    def __init__(self, core: AdapterCore) -> None:
        self._core = core
        self._opens_early = core.obeys_while_generating and not core.followers.names
        self._image = KeptImage()
        self._update: ExportsUpdate | ImageUpdate | None = None
        self._is_staged = True  # by all workers
        self._holds_memory = False  # the workers may have memory of ranks or an image open
        self._ways: set[str] = set()  # logged
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-image")

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        if self._core.followers.names:
            return "its workers are on several nodes"
        reports = await self._core.ask_workers({"action": "probe", "allocations": allocations})
        return next((report["problem"] for report in reports if report["problem"]), "")

    async def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        """Opens the update in the workers, if they can while the engine generates."""
        await self.end()
        if "exports" in buckets:
            self._update = ExportsUpdate(manifest, buckets)
        else:
            self._update = await self._in_thread(
                lambda: ImageUpdate(self._image, manifest, buckets)
            )
        self._holds_memory = True
        if self._opens_early:
            await self._ask_staged({"action": "open", "weights": self._update.description})

    async def is_prepared(self) -> bool:
        """Asks the workers again instead of waiting in them: they generate meanwhile."""
        if not self._is_staged:
            await self._ask_staged({"action": "is_staged"})
        return self._is_staged

    async def _ask_staged(self, order: Mapping[str, Any]) -> None:
        reports = await self._core.ask_workers(order)
        self._is_staged = all(report["is_staged"] for report in reports)

    async def load(self) -> int:
        update = self._open_update()
        order: dict[str, Any] = {"action": "load"}
        with nullcontext() if update.source is None else update.source.receiving():
            if not self._opens_early:
                order["weights"] = await self._core.followers.send_image(update.description)
            reports = await self._core.ask_workers(order)
            self._check_all_read(report.get("unread", ()) for report in reports)
            self._log(report["way"] for report in reports)
            return update.take_reports([report["regions"] for report in reports])

    def _check_all_read(self, unread: Iterable[Collection[str]]) -> None:
        """Raises WeightSyncError if every worker left one of the trainer's tensors unread."""
        names = sorted(set[str].intersection(*map(set, unread)))
        if names:
            hint = ""
            if any(name.endswith("lm_head.weight") for name in names):
                hint = ". Set tie_word_embeddings to false in the model's config.json"
            raise WeightSyncError(
                f"{self._core.name}'s model lacks {len(names)} of the trainer's weights: "
                f"{', '.join(names[:5])}{hint}"
            )

    def _log(self, ways: Iterable[str]) -> None:
        for way in dict.fromkeys(ways):
            level = logging.DEBUG if way in self._ways else logging.INFO
            logger.log(level, "%s: %s", self._core.name, way)
            self._ways.add(way)

    async def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        update = self._open_update()
        return await self._in_thread(lambda: update.verify(regions))

    def stop(self) -> None:
        if self._update is not None and self._update.source is not None:
            self._update.source.end_of_sync.stop()  # else an abort ends the workers' waits

    async def end(self) -> None:
        update, self._update = self._update, None
        self._is_staged = True
        if update is not None and update.source is not None:
            await self._in_thread(update.source.close)

    async def abort(self) -> None:
        await self.end()
        await self._in_thread(self._image.close)
        if self._holds_memory:
            await self._core.ask_workers({"action": "close"})
            self._holds_memory = False

    async def release(self) -> None:
        """The image and the ranks' memory stay open: neither is the engine's."""
        await self.end()
        await self._core.followers.close_images()

    async def close(self) -> None:
        self.stop()
        try:
            await self.end()
            await self._in_thread(self._image.close)
        finally:
            self._thread.shutdown()

    def _open_update(self) -> ExportsUpdate | ImageUpdate:
        if self._update is None:
            raise WeightSyncError("no update is in progress; prepare_update comes first")
        return self._update

    async def _in_thread(self, job: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)


class ExportsUpdate:
    """One update, with prepare_update's arguments, whose workers read the ranks' GPUs themselves.

    ranks ──exports──▶ supervisor ──▶ engine process ──description──▶ worker: its loader or its plan
                                    compares checksums ◀──regions── what it has loaded
    """

    source = None  # only the workers hold anything

    def __init__(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        kept = ("exports", "fd_socket", "progress", "has_checksums", "is_staged")
        self.description: dict[str, Any] = {name: buckets[name] for name in kept}
        self.description["manifest"] = manifest
        self._nbytes = Manifest.from_wire(manifest).payload_nbytes
        self._read: list[dict[tuple[int, int], int]] = []  # checksums, by worker

    def take_reports(self, per_worker: Sequence[Regions]) -> int:
        if not per_worker:
            raise WeightSyncError("no worker of the engine has read the weights")
        self._read = [
            {(offset, nbytes): checksum for offset, nbytes, checksum in regions}
            for regions in per_worker
        ]
        return self._nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        mismatches: list[str] = []
        for offset, nbytes, sent in regions:
            for worker, read in enumerate(self._read):
                arrived = read.get((int(offset or 0), int(nbytes or 0)))
                if arrived != sent:
                    mismatches.append(
                        f"worker {worker}, {nbytes} image bytes from {offset}: sent with checksum "
                        f"{sent}, arrived with {arrived}"
                    )
        if len(mismatches) > _MAX_MISMATCHES:
            more = len(mismatches) - _MAX_MISMATCHES
            mismatches = [*mismatches[:_MAX_MISMATCHES], f"and {more} more"]
        return mismatches


class ImageUpdate:
    """One update, with prepare_update's arguments, which workers read from their node's image.

    ranks ──fill──▶ image of the node ◀──read── every worker: its own loader, or its plan
                         └──▶ engine process: compares checksums
    """

    def __init__(self, kept: KeptImage, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        self._layout = Manifest.from_wire(manifest)
        self._bucket_nbytes: int = buckets["bucket_nbytes"]
        self.source = ImageSource(kept, self._layout.nbytes, buckets, _OPEN_TIMEOUT_S)
        known = ("fd_socket", "image", "bucket_nbytes", "progress")
        self.description: dict[str, Any] = {name: buckets[name] for name in known}
        self.description["manifest"] = manifest

    def take_reports(self, per_worker: Sequence[Regions]) -> int:
        return self._layout.payload_nbytes

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        tensors = image_tensors(self._layout, self.source.memory)
        return Destinations(self._layout, tensors, self._bucket_nbytes).verify(regions)
