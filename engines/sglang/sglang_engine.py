"""SGLang as an engine actor, `umbra.engines.sglang.sglang_engine:SglangEngine`.

Sampling follows the requests' seeds only with the option `enable_deterministic_inference`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, Final, TypeVar

import torch

from umbra.engines.sglang import sglang_library
from umbra.engines.sglang.sglang_library import SglangLibrary
from umbra.engines.sglang.sglang_orders import ReportFile, pack_order
from umbra.engines.sglang.sglang_requests import (
    SglangOutput,
    check_request,
    generate_fields,
    stream_interval,
    until_died,
    within,
)
from umbra.engines.sglang.sglang_settings import SYNCED_ADAPTER, WEIGHT_LOADER, SglangSettings
from umbra.engines.shell.adapter_engine import AdapterCore, ConfiguredEngine
from umbra.engines.shell.engine_core import Output
from umbra.engines.shell.engine_follower import job_folder
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.errors import EngineError, UmbraError
from umbra.runtime.process import descendants
from umbra.runtime.process.process_end import PidWatch
from umbra.runtime.process.signal_handling import handle_signals

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_ANSWER_LIMIT_S: Final = 60.0
_END_LIMIT_S: Final = 30.0
# Time for requests to end after an abort, which takes SGLang a step or two.
_CANCEL_LIMIT_S: Final = 5.0
_END_AGAIN_S: Final = 0.2
# Interval between abort messages: one that comes at the wrong moment is lost.
_MEMORY_TAGS: Final = ("weights", "kv_cache")
_NOT_TAKEN: Final = object()


class SglangCore(AdapterCore):
    """The core of the SGLang engine: starts, watches and ends SGLang's Engine, and translates calls
    and errors. Owns its processes, and from `start` to `stop` its tasks.

        this process (actor)      TokenizerManager, event loop
          ├ scheduler             one for each GPU of a tensor-parallel engine, with its worker
          └ detokenizer           idle: tokens come straight from the first scheduler

    If an engine spans nodes, the schedulers elsewhere run below its followers (`sglang_follower`).
    All these processes end with this one, which is their subreaper or the child of one
    (`runtime.process`).
    """

    name = "SGLang"
    truncates = True
    takes_forced = True

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__(settings.lora_base, settings.followers)
        self._settings = settings
        self._watches = ExitStack()
        self._engine: Any = None
        self._frontend: Any = None  # TokenizerManager
        self._library: SglangLibrary | None = None
        self._children: list[int] = []
        self._schedulers: list[int] = []
        self._sigquit: Any = _NOT_TAKEN  # the handler from before the start
        self._handling: asyncio.Task[None] | None = None
        self._live: dict[str, tuple[SglangOutput, asyncio.Task[None]]] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_frozen = False  # the schedulers do nothing until they are resumed
        self._released: set[str] = set()  # of _MEMORY_TAGS
        self._is_saved = False  # the sleeping weights are in host memory
        self._adapter_id = ""  # of every request

    @property
    def library(self) -> SglangLibrary:
        assert self._library is not None
        return self._library

    def check_options(self) -> str:
        self._read_options()
        return f"SGLang {self.library.version}"

    def _read_options(self) -> dict[str, Any]:
        self._library = library = SglangLibrary.load()
        return self._settings.options(library.option_names())

    async def start(self) -> None:
        options = self._read_options()
        library = self.library
        variables = self._settings.environment()
        if self._settings.followers:
            options |= await self.followers.start_parts(
                "umbra.engines.sglang.sglang_follower",
                options,
                variables,
                host_variable="SGLANG_HOST_IP",
                part_options=self._settings.part_options,
            )
        os.environ.update(variables)
        logging.getLogger("sglang").setLevel(str(options["log_level"]).upper())
        self._sigquit = signal.getsignal(signal.SIGQUIT)
        self._launch(library, options)
        for pid in self._children:
            self._watches.enter_context(PidWatch(pid, self.died.set))
        self._take_over_frontend()
        async with until_died(self.died), within(_FIRST_ANSWER_LIMIT_S, "answer"):
            await self._measure()

    def _launch(self, library: SglangLibrary, options: Mapping[str, Any]) -> None:
        before = descendants.working_child_pids(os.getpid())
        # In two steps, so that SGLang's exit handler covers a start that fails half way, too.
        engine = library.Engine.__new__(library.Engine)
        try:
            with (
                sglang_library.keeping_logging(),
                sglang_library.temporary_files_in(job_folder()),
            ):
                handler = sglang_library.ignore_sigquit
                engine.__init__(**options, custom_sigquit_handler=handler)
        except Exception as error:
            raise EngineError(f"SGLang {library.version} did not start: {error}") from error
        finally:
            atexit.unregister(engine.shutdown)  # it would end all children of this process
            self._children = sorted(descendants.working_child_pids(os.getpid()) - before)
        self._engine = engine

    def _take_over_frontend(self) -> None:
        """Replaces SGLang's set-up at the first request, which would take SIGTERM and SIGQUIT."""
        self._frontend = self._engine.tokenizer_manager
        sglang_library.remove_load_snapshot(self._frontend)
        watchdog = getattr(self._frontend, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        loop = asyncio.get_running_loop()
        self._frontend.event_loop = loop
        self._handling = loop.create_task(self._frontend.handle_loop())
        self._handling.add_done_callback(self._on_handling_done)
        # A process of SGLang that fails sends SIGQUIT, and may take long to end, or hang.
        handle_signals([signal.SIGQUIT], lambda _: self.died.set())
        self.vocab_size = int(self._frontend.model_config.vocab_size)
        self._stop_ids = frozenset(self._frontend.model_config.hf_eos_token_id or ())

    def _on_handling_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("SGLang's frontend has ended", exc_info=task.exception())
            self.died.set()

    async def _measure(self) -> None:
        reports = await self._order({"action": "measure"})
        (state, *_) = await self.call(self._frontend.get_internal_state())
        usage: dict[str, float] = state.get("memory_usage") or {}
        self.memory = {
            "weights_nbytes": sum(report["weights_nbytes"] for report in reports),
            # SGLang reports one GPU, in thousandths of a GiB.
            "kv_nbytes": int(usage.get("kvcache", 0.0) * (1 << 30)) * self._settings.num_workers,
        }
        here = reports[: self._settings.num_local_workers]
        self._schedulers = [report["pid"] for report in here]

    async def stop(self) -> None:
        self._watches.close()
        await self.followers.close()  # first: without this part, theirs would fail
        if self._children:
            sglang_library.end_children(self._children)
            self._children = []
        try:
            await self._end_tasks()
        finally:
            if self._engine is not None:
                self._close_sockets()
                self._engine = None
            if self._sigquit is not _NOT_TAKEN:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
                sglang_library.restore_sigquit(self._sigquit)
                self._sigquit = _NOT_TAKEN

    def show_stacks(self) -> None:
        sglang_library.show_stacks(self._schedulers)

    async def _end_tasks(self) -> None:
        """Must run while the sockets exist: a cancelled request notifies its scheduler."""
        tasks = [task for _, task in self._live.values()]
        if self._handling is not None:
            tasks.append(self._handling)
            self._handling = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_LIMIT_S)

    def _close_sockets(self) -> None:
        owned = [
            getattr(self._engine, "send_to_rpc", None),
            getattr(self._frontend, "recv_from_detokenizer", None),
            getattr(self._frontend, "send_to_scheduler", None),
        ]
        for socket in owned:
            if socket is not None:
                socket.context.destroy(linger=0)  # SGLang made a context for these sockets
        for path in sglang_library.socket_files(self._engine.port_args):
            path.unlink(missing_ok=True)

    async def call(self, awaitable: Awaitable[_T]) -> _T:
        """Turns SGLang's exceptions into EngineError; umbra's own errors pass through."""
        try:
            return await awaitable
        except UmbraError:
            raise
        except Exception as error:
            raise EngineError(f"SGLang failed: {type(error).__name__}: {error}") from error

    def check_request(self, request: GenerationRequest) -> None:
        check_request(request, self._stop_ids)

    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> Output:
        interval = stream_interval(num_running) if self.library.has_stream_interval else 1
        fields = generate_fields(request, key, cache_salt, interval, self._adapter_id)
        asked = self.library.GenerateReqInput(**fields)
        output = SglangOutput(interval, request.forced.tolist())
        task = asyncio.get_running_loop().create_task(self._follow(key, asked, output))
        self._live[key] = output, task
        self._is_idle.clear()
        return output

    async def _follow(self, key: str, asked: Any, output: SglangOutput) -> None:
        try:
            async with aclosing(self._frontend.generate_request(asked)) as chunks:
                async for chunk in chunks:
                    output.feed(chunk)
                    # The frontend checks this event for each token; this task wakes
                    # only at the end.
                    asked.stream = False
            output.end("SGLang stopped answering")
        except Exception as error:  # noqa: BLE001 - ends this request alone
            output.end(f"{type(error).__name__}: {error}")
        finally:
            self.ended.set()
            del self._live[key]
            if not self._live:
                self._is_idle.set()

    async def abort(self, keys: Iterable[str]) -> None:
        """The last tokens, which SGLang has not yet sent, are lost."""
        await self._let_begin()
        for key in keys:
            if key in self._live:
                self._live[key][0].end("abort")
                self._frontend.abort_request(key)

    @staticmethod
    async def _let_begin() -> None:
        """Lets new requests reach SGLang, which ignores an abort before that."""
        await asyncio.sleep(0)

    async def pause(self, *, keep: bool) -> None:
        await self._let_begin()
        if keep and self._live:
            await self._freeze()
        elif not keep:
            await self._end_all()
        self.is_paused = True

    async def resume(self) -> None:
        await self._unfreeze()
        self.is_paused = False

    async def _freeze(self) -> None:
        if not self._is_frozen:
            request = self.library.PauseGenerationReqInput(mode="in_place")
            await self.call(self._frontend.pause_generation(request))
            self._is_frozen = True
            await self._order({"action": "settle"})

    async def _unfreeze(self) -> None:
        if self._is_frozen:
            request = self.library.ContinueGenerationReqInput(torch_empty_cache=False)
            await self.call(self._frontend.continue_generation(request))
            self._is_frozen = False

    async def _end_all(self) -> None:
        """Aborts each request: SGLang's pause mode "abort" looks for the end only once a second."""
        if self._is_frozen:
            for output, _ in self._live.values():
                output.end("abort")  # later tokens would come from weights of no version
        async with within(_END_LIMIT_S, "end all requests"):
            while self._live:
                self._frontend.abort_request(abort_all=True)
                await self._unfreeze()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_AGAIN_S):
                        await self._is_idle.wait()
        await self._unfreeze()

    async def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Empties the cache first: SGLang would end if its memory were in use."""
        await self.reset_prefix_cache()
        freed = [tag for tag in tags if tag not in self._released]
        if level == 1 and "weights" in freed:
            await self._order({"action": "save"})
            self._is_saved = True
        if freed:  # SGLang takes no tags for all of them
            request = self.library.ReleaseMemoryOccupationReqInput(tags=freed)
            await self.call(self._frontend.release_memory_occupation(request))
            self._released.update(freed)
        self.is_paused = True

    async def wake(self, tags: Sequence[str]) -> None:
        sleeping = [tag for tag in tags if tag in self._released]
        if not sleeping:
            return
        request = self.library.ResumeMemoryOccupationReqInput(tags=sleeping)
        await self.call(self._frontend.resume_memory_occupation(request))
        self._released.difference_update(sleeping)
        if "weights" in sleeping and self._is_saved:
            await self._order({"action": "restore"})
            self._is_saved = False

    async def reset_prefix_cache(self) -> None:
        result = await self.call(self._frontend.flush_cache(timeout_s=_END_LIMIT_S))
        if not result.success:
            raise EngineError(f"SGLang is still busy after {_END_LIMIT_S} s")

    async def ask_workers(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Freezes requests meanwhile: SGLang would otherwise wait until all have ended."""
        is_load = order["action"] == "load"
        if is_load:
            for output, _ in self._live.values():
                output.expect_older()
        was_frozen = self._is_frozen
        try:
            if self._live:
                await self._freeze()
            reports = await self._order(order, loads=is_load and not self._settings.lora_rank)
        finally:
            if not was_frozen:
                await self._unfreeze()
        if is_load and self._settings.lora_rank:
            self._adapter_id = SYNCED_ADAPTER
        return reports

    async def _order(
        self, order: Mapping[str, Any], *, loads: bool = False
    ) -> list[dict[str, Any]]:
        with ReportFile() as file:
            payload = self._payload({**order, "report": file.address})
            await self._begin_update(loads=loads)
            update = self.library.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * self._settings.num_workers,
                load_format=WEIGHT_LOADER,
                flush_cache=False,  # cached prefixes are salted by their weights
            )
            result = await self.call(self._frontend.update_weights_from_tensor(update))
            await self._end_update()
            _check_done(result)
            return self.checked(file.read())

    def _payload(self, order: Mapping[str, Any]) -> bytes:
        # Empty, so that the tensor is sent by value; torch would share others.
        nothing = torch.empty(0, dtype=torch.uint8)
        serializer = self.library.MultiprocessingSerializer
        payload: bytes = serializer.serialize([(pack_order(order), nothing)])
        return payload

    async def _begin_update(self, *, loads: bool) -> None:
        """Announces an update, which SGLang requires from 0.5.23 on, and which gives weights the
        layout of files. Orders that load nothing may come while a batch reads the weights, so they
        pose as updates of a draft model, which does not exist."""
        if self.library.BeginWeightUpdateReqInput is not None:
            selector = "target" if loads else "draft"
            request = self.library.BeginWeightUpdateReqInput(selector=selector)
            _check_done(await self.call(self._frontend.begin_weight_update(request)))

    async def _end_update(self) -> None:
        if self.library.EndWeightUpdateReqInput is not None:
            request = self.library.EndWeightUpdateReqInput()
            _check_done(await self.call(self._frontend.end_weight_update(request)))


class SglangEngine(ConfiguredEngine):
    settings_class = SglangSettings
    core_class = SglangCore


def _check_done(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise EngineError(f"SGLang failed: {message}")
