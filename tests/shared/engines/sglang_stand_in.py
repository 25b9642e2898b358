"""A stand-in for the package `sglang`, for machines without a GPU: what the adapter calls of it.

It keeps what was read in SGLang 0.5.17: lists that grow, answers that come a step late (the next
batch is begun before the last one is looked at), pauses that leave a step half way, aborts by
the beginning of a name, and schedulers that end where they are asked for what they cannot do.
As 0.5.23 it also has updates that must be announced, and weights in another layout between them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import io
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from engine_runs import shared_loop
from torch import Tensor, nn

from umbra.engines.embedded.sampler import uniforms
from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.sglang.sglang_settings import SglangSettings

VERSION = "0.5.17"
LATER_VERSION = "0.5.23"
STEP_S = 0.0005


class ServerArgs(NamedTuple):
    """No dataclass, as in 0.5.23."""

    model_path: str
    dtype: str = "auto"
    device: str = "cuda"
    context_length: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    custom_weight_loader: list[str] | None = None
    custom_sigquit_handler: Callable[..., Any] | None = None
    watchdog_timeout: float = 300
    enable_memory_saver: bool = False
    sleep_on_idle: bool = False
    log_level: str = "info"
    json_model_override_args: str = "{}"
    tp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    lora_target_modules: list[str] | None = None
    max_loras_per_batch: int = 8


def request_class(name: str) -> Any:
    """A request that has whatever it is given."""
    return type(name, (SimpleNamespace,), {})


class Serializer:
    @staticmethod
    def serialize(obj: Any) -> bytes:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(obj)
        return buffer.getvalue()


class Socket:
    """With its context in one: it is the only one there."""

    def __init__(self) -> None:
        self.context = self
        self.is_closed = False
        self.num_too_late = 0

    def send(self) -> None:
        self.num_too_late += self.is_closed

    def destroy(self, linger: int) -> None:
        self.is_closed = True


def _load_snapshot() -> str:
    """A file that the scheduler has open as long as it lives."""
    fd, path = tempfile.mkstemp(dir="/dev/shm", prefix="sglang_loads_", suffix=".shm")
    os.close(fd)
    return path


class SamplingParams:
    stream_interval: int | None = None


@dataclasses.dataclass(eq=False)
class _Request:
    asked: Any
    entries: list[tuple[float, int, None]] = dataclasses.field(
        default_factory=list[tuple[float, int, None]]
    )
    num_sampled: int = 0
    unsent: list[tuple[float, int, None]] = dataclasses.field(
        default_factory=list[tuple[float, int, None]]
    )
    to_abort: bool = False
    reason: dict[str, Any] | None = None
    event: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class Frontend:
    """TokenizerManager and, in its `handle_loop`, one scheduler."""

    def __init__(
        self, args: ServerArgs, model: StandInModel, vocab_size: int, *, has_sessions: bool
    ) -> None:
        self.args = args
        self._has_sessions = has_sessions
        self.model = model
        self.model_config = SimpleNamespace(vocab_size=vocab_size, hf_eos_token_id=None)
        self.event_loop: Any = None
        self.is_pause = False
        self.rid_to_state: dict[str, _Request] = {}
        self._in_flight: list[tuple[_Request, int]] = []
        self._engine_paused = False
        self.released: set[str] = set()
        self.num_wakes = 0
        self.num_messages = 0  # from the scheduler, each of one request
        self._session: str | None = None  # of a weight update: whose weights
        self._is_computing = False  # on the GPU, though the scheduler is paused
        self.load_snapshot_reader = SimpleNamespace(path=_load_snapshot())
        self.send_to_scheduler = Socket()
        self._stepped = asyncio.Event()

    async def handle_loop(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if not self._engine_paused:
                self._step()
                self._stepped.set()

    async def wait_for_step(self) -> None:
        self._stepped.clear()
        await self._stepped.wait()

    def _step(self) -> None:
        done, self._in_flight = self._in_flight, []
        for request in list(self.rid_to_state.values())[: self.args.max_running_requests]:
            max_new_tokens = request.asked.sampling_params["max_new_tokens"]
            if max_new_tokens == 0:
                request.reason = {"type": "length", "length": 0}
                del self.rid_to_state[request.asked.rid]
                request.event.set()
            elif request.num_sampled < max_new_tokens:
                self._in_flight.append((request, self._sample(request)))
                request.num_sampled += 1
        for request, token in done:
            if request.reason is None:
                self._take(request, token)

    def _sample(self, request: _Request) -> int:
        assert "kv_cache" not in self.released, "an illegal memory access"
        params = request.asked.sampling_params
        place = len(request.asked.input_ids) + request.num_sampled
        is_greedy = params["temperature"] == 0 or params["top_k"] == 1 or params["top_p"] < 0.001
        seed = 0 if is_greedy else params["sampling_seed"]
        draw = uniforms(np.array([seed], np.uint64), np.array([place], np.int64))[0]
        return int(draw * self.model_config.vocab_size)

    def _take(self, request: _Request, token: int) -> None:
        params = request.asked.sampling_params
        request.unsent.append((-1.0, token, None))
        num_tokens = len(request.entries) + len(request.unsent)
        if request.to_abort:
            request.reason = {"type": "abort", "message": "Aborted", "status_code": None}
        elif num_tokens >= params["max_new_tokens"]:
            request.reason = {"type": "length", "length": num_tokens}
        elif not params["ignore_eos"] and token in params["stop_token_ids"]:
            request.reason = {"type": "stop", "matched": token}
        if request.reason is not None:
            del self.rid_to_state[request.asked.rid]
        interval = params.get("stream_interval", 1)
        if request.reason is None and num_tokens % interval != (interval > 1):
            return
        self.num_messages += 1
        request.entries += request.unsent
        request.unsent.clear()
        if request.reason is not None or request.asked.stream:
            request.event.set()

    async def generate_request(self, asked: Any) -> AsyncGenerator[dict[str, Any], None]:
        assert not self.is_pause
        assert asked.rid not in self.rid_to_state
        request = self.rid_to_state[asked.rid] = _Request(asked)
        while request.reason is None:
            try:
                await request.event.wait()
            except asyncio.CancelledError:
                self.send_to_scheduler.send()
                raise
            request.event.clear()
            self.num_wakes += 1
            start = request.asked.logprob_start_len
            prompt: list[int] = request.asked.input_ids[start:] if start >= 0 else []
            yield {
                "output_ids": [token for _, token, _ in request.entries],
                "meta_info": {
                    "completion_tokens": len(request.entries),
                    "output_token_logprobs": request.entries,
                    # Each is of the token before, and the last id of the vocabulary is lost.
                    "input_token_logprobs": [
                        (None if idx == 0 else -1.0, token % (self.model_config.vocab_size - 1), "")
                        for idx, token in enumerate(prompt)
                    ],
                    "finish_reason": request.reason,
                },
            }

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        for name, request in self.rid_to_state.items():
            if abort_all or name.startswith(rid):
                request.to_abort = True

    async def pause_generation(self, asked: Any) -> None:
        assert asked.mode == "in_place"
        self.is_pause = self._engine_paused = True
        self._is_computing = bool(self._in_flight)

    async def continue_generation(self, asked: Any) -> None:
        self.is_pause = self._engine_paused = False

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [{"memory_usage": {"kvcache": 0.001}}]

    def _is_fully_idle(self) -> bool:
        return not self.rid_to_state and not self._in_flight

    async def flush_cache(self, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            while not self._is_fully_idle():
                await self.wait_for_step()
        return SimpleNamespace(success=True)

    async def begin_weight_update(self, asked: Any) -> tuple[bool, str]:
        assert self._session is None
        self._check_lock()
        self._session = asked.selector
        if self._session != "draft":
            assert not self._is_computing, "a batch reads the weights"
            assert "weights" not in self.released, "an illegal memory access"
            self.model.is_packed = False
        return True, "Success"

    async def end_weight_update(self, asked: Any) -> tuple[bool, str]:
        assert self._session is not None
        self._check_lock()
        self._session = None
        self.model.is_packed = True
        return True, "Success"

    def _check_lock(self) -> None:
        assert self.is_pause or not self.rid_to_state, "it would wait for all requests"

    async def update_weights_from_tensor(self, asked: Any) -> tuple[bool, str]:
        if self._has_sessions and self._session is None:
            return False, "update_weights_from_tensor must run between begin and end"
        assert asked.load_format in (self.args.custom_weight_loader or [])
        self._check_lock()
        assert not asked.flush_cache
        module, _, name = asked.load_format.rpartition(".")
        loader = getattr(importlib.import_module(module), name)
        named_tensors = pickle.loads(asked.serialized_named_tensors[0])
        with ThreadPoolExecutor(1) as scheduler:  # SGLang's is a process of its own
            await asyncio.get_running_loop().run_in_executor(
                scheduler, loader, self.model, named_tensors
            )
        self._is_computing = False
        return True, "Success"

    async def release_memory_occupation(self, asked: Any) -> None:
        assert self._is_fully_idle()
        tags = set(asked.tags) or {"weights", "kv_cache", "cuda_graph"}  # as SGLang takes none
        self.released |= tags
        if "weights" in tags:
            for tensor in (*self.model.parameters(), self.model.made_of_weights):
                tensor.data.fill_(float("nan"))

    async def resume_memory_occupation(self, asked: Any) -> None:
        for tag in asked.tags:
            self.released.remove(tag)


class StandInModel(nn.Module):
    """Parameters by their names; what it does not know it skips, as SGLang's models do.

    Attributes:
        made_of_weights: no parameter and no buffer, as w_kc in SGLang's models of latent attention.
        is_packed: the weights have the layout of kernels, not that of files.
    """

    def __init__(self, inner: nn.Module, *, is_packed: bool) -> None:
        super().__init__()
        self.inner = inner
        self.is_packed = is_packed
        self.made_of_weights = self.make()

    def make(self) -> Tensor:
        """Derives the tensor from the weights again."""
        first = next(self.inner.parameters()).detach()
        return first.flip(0) * 2

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.named_parameters(*args, **kwargs)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        assert not self.is_packed
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                parameters[name].data.copy_(tensor)
        self.made_of_weights.copy_(self.make())


@dataclasses.dataclass
class LoRARef:
    lora_id: str
    lora_name: str
    lora_path: str
    pinned: bool | None = None


class LoRAManager:
    """Adapters in host memory by their ids, of which some are in the slots of a GPU.

    Attributes:
        slots: the ids of those.
    """

    def __init__(self, base_model: nn.Module, args: ServerArgs) -> None:
        self.base_model = base_model
        self.loras: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {}
        self.slots: set[str] = set()
        self._args = args

    def load_lora_adapter_from_tensors(
        self, ref: LoRARef, tensors: dict[str, Tensor], config: dict[str, Any]
    ) -> Any:
        assert ref.lora_id not in self.loras
        allowed = self._args.lora_target_modules or []
        if not set(config["target_modules"]) <= set(allowed):
            return SimpleNamespace(success=False, error_message="it is incompatible")
        self.loras[ref.lora_id] = tensors, config
        if ref.pinned is None:
            return SimpleNamespace(success=False, error_message="int() of a NoneType")
        return SimpleNamespace(success=True, error_message="")

    def unload_lora_adapter(self, ref: LoRARef) -> Any:
        del self.loras[ref.lora_id]
        self.slots.discard(ref.lora_id)
        return SimpleNamespace(success=True, error_message="")

    def fetch_new_loras(self, ids: set[str]) -> None:
        assert ids <= self.loras.keys()
        self.slots |= ids


@contextmanager
def stand_in_modules(
    make_model: Callable[[], nn.Module], vocab_size: int, version: str = VERSION
) -> Generator[None]:
    """`import sglang` finds the stand-in."""
    modules = make_modules(make_model, vocab_size, version)
    sys.modules.update(modules)
    yield
    for name in modules:
        del sys.modules[name]


@contextmanager
def stand_in_core(folder: Path, **changes: Any) -> Generator[SglangCore]:
    """The adapter's core over the stand-in, on the loop of every `run_async` meanwhile."""
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cuda",
        "max_num_seqs": 256,
        "max_context_len": 512,
        "load_weights": True,
    }
    with shared_loop() as runner:
        core = SglangCore(SglangSettings(**(settings | changes)))
        try:
            runner.run(core.start())
            yield core
        finally:
            runner.run(core.stop())


def make_modules(
    make_model: Callable[[], nn.Module], vocab_size: int, version: str = VERSION
) -> dict[str, ModuleType]:
    """Modules for `sys.modules`."""
    has_sessions = version == LATER_VERSION

    class Engine:
        def __init__(self, **kwargs: Any) -> None:
            self.server_args = ServerArgs(**kwargs)
            signal.signal(signal.SIGQUIT, self.server_args.custom_sigquit_handler)
            # For a scheduler, which has the arguments.
            part = f"{kwargs.get('node_rank', 0)} of {kwargs.get('nnodes', 1)} at "
            part += f"{kwargs.get('dist_init_addr')}"
            environment = {**os.environ, "STAND_IN_PART": part}
            self._scheduler = os.posix_spawnp("sleep", ["sleep", "1000"], environment)
            if self.server_args.node_rank > 0:
                assert os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0", "it would block"
                return
            model = StandInModel(make_model(), is_packed=has_sessions)
            self.lora_manager = LoRAManager(model, self.server_args)
            self.tokenizer_manager = Frontend(
                self.server_args, model, vocab_size, has_sessions=has_sessions
            )
            self.port_args = SimpleNamespace(tokenizer_ipc_name="ipc:///nowhere/at-all")

        def get_all_child_pids(self) -> list[int]:
            return [self._scheduler]

        def shutdown(self) -> None:
            raise AssertionError("it would end all children of this process")

    names = ("Generate", "PauseGeneration", "ContinueGeneration", "UpdateWeightsFromTensor")
    names += ("ReleaseMemoryOccupation", "ResumeMemoryOccupation")
    names += ("BeginWeightUpdate", "EndWeightUpdate") if has_sessions else ()
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": {"Engine": Engine},
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        "sglang.srt.sampling": {},
        "sglang.srt.sampling.sampling_params": {"SamplingParams": SamplingParams},
        "sglang.srt.utils": {"MultiprocessingSerializer": Serializer},
        "sglang.srt.lora": {},
        "sglang.srt.lora.lora_manager": {"LoRAManager": LoRAManager},
        "sglang.srt.lora.lora_registry": {"LoRARef": LoRARef},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {
            f"{name}ReqInput": request_class(f"{name}ReqInput") for name in names
        },
    }
    modules: dict[str, ModuleType] = {}
    for name, attributes in contents.items():
        modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None, origin=__file__)
        vars(modules[name]).update(attributes)
    return modules
