"""vLLM as an engine actor, `umbra.engines.vllm.vllm_engine:VllmEngine`.

Draws depend on where a trajectory was cut, so only greedy trajectories resume token for token.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import xxhash

from umbra.engines.shell.adapter_engine import AdapterCore, ConfiguredEngine
from umbra.engines.shell.engine_core import Output
from umbra.engines.shell.engine_follower import job_folder
from umbra.engines.vllm.vllm_library import (
    VllmLibrary,
    file_variables,
    unlink_shared_memory,
)
from umbra.engines.vllm.vllm_outputs import ForcedOutput, VllmOutput, gather_outputs
from umbra.engines.vllm.vllm_settings import SYNCED_ADAPTER, VllmSettings
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.errors import ConfigError, EngineError, UmbraError
from umbra.runtime.process import descendants
from umbra.runtime.process.process_end import PidWatch

_T = TypeVar("_T")
_SHUTDOWN_TIMEOUT_S: Final = 0.2
# Time for EngineCore to end by itself, which takes its workers seconds and gains nothing.
_MAX_ERROR_NUM_CHARS: Final = 1000
_MAY_LACK_MEMORY: Final = ("Engine core initialization failed", "max_model_len", "memory")
_MEMORY_TAGS: Final = ("weights", "kv_cache")
_MIN_TEMPERATURE: Final = engine_kind("vllm").min_temperature


class VllmCore(AdapterCore):
    """The core of the vLLM engine: starts, watches and ends AsyncLLM, and translates pauses and
    errors.

        this process (actor)          AsyncLLM, event loop
          └ EngineCore                scheduler, and the worker where there is one
              └ workers               one for each GPU of a tensor-parallel engine

    If an engine spans nodes, the workers elsewhere run below its followers (`vllm_follower`). All
    these processes end with this one, which is their subreaper or the child of one
    (`runtime.process`).
    """

    name = "vLLM"
    truncates = True
    takes_forced = True
    obeys_while_generating = True

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings.lora_base, settings.followers)
        self._settings = settings
        self._watches = ExitStack()
        self._llm: Any = None
        self._library: VllmLibrary | None = None
        self._adapters: dict[str, Any] = {}  # LoRARequests by name; "": of every request
        self.lora_names = tuple(settings.lora_adapters)
        self._asleep: set[str] = set()  # tags

    @property
    def library(self) -> VllmLibrary:
        assert self._library is not None
        return self._library

    @property
    def frees_memory_asleep(self) -> bool:
        """False on the CPU, where vLLM's sleep frees nothing."""
        return not self.library.is_cpu

    def check_options(self) -> str:
        self._read_options()
        return f"vLLM {self.library.version}"

    def _read_options(self) -> dict[str, Any]:
        self._library = library = VllmLibrary.load()
        return self._settings.options(library.option_names(), is_cpu=library.is_cpu)

    async def start(self) -> None:
        options = self._read_options()
        library = self.library
        self._check_adapters()
        variables = self._settings.environment(is_cpu=library.is_cpu)
        if self._settings.followers:
            options |= await self.followers.start_parts(
                "umbra.engines.vllm.vllm_follower",
                options,
                variables,
                host_variable="VLLM_HOST_IP",
                part_options=self._settings.part_options,
            )
        files = file_variables(str(job_folder() or ""), is_cpu=library.is_cpu)
        for name, value in (variables | files).items():
            os.environ.setdefault(name, value)
        began_ticks = descendants.ticks_now()
        try:
            self._llm = library.AsyncLLM.from_engine_args(library.AsyncEngineArgs(**options))
        except Exception as error:
            text = str(error)
            if len(text) > _MAX_ERROR_NUM_CHARS:  # for example a list of all models that it knows
                text = f"{text[:_MAX_ERROR_NUM_CHARS]} ..."
            raise EngineError(
                f"vLLM {library.version} did not start: {text}{_memory_hint(text)}"
            ) from error
        gather_outputs(self._llm.output_processor, self.ended)
        self.vocab_size = int(self._llm.model_config.get_vocab_size())
        # The workers are watched, too: EngineCore reports a dead worker only after all have ended.
        asked = self._llm.collective_rpc("umbra_measure")
        workers: list[Mapping[str, int]] = await self.call(asked)
        here = {worker["pid"] for worker in workers[: self._settings.num_local_workers]}
        for pid in _children_since(began_ticks) | here:
            self._watches.enter_context(PidWatch(pid, self.died.set))
        unlink_shared_memory()
        self.memory = {name: sum(worker[name] for worker in workers) for name in self.memory}
        await self._load_adapters()

    def _check_adapters(self) -> None:
        settings, library = self._settings, self.library
        if not settings.lora_adapters or settings.load_weights:
            return
        if not library.can_update_beneath_adapters():
            raise ConfigError(
                f"vLLM {library.version} cannot take new weights beneath LoRA adapters: leave "
                "lora_adapters to pools that training leaves as they are, or use vLLM 0.32.0"
            )

    async def _load_adapters(self) -> None:
        """Loads the adapters from their folders again: an update removes vLLM's copies."""
        for number, (name, path) in enumerate(self._settings.lora_adapters.items(), start=1):
            request = self.library.LoRARequest(name, number, path, load_inplace=True)
            try:
                await self.call(self._llm.add_lora(request))
            except (EngineError, ValueError) as error:
                raise EngineError(f"LoRA adapter {name!r}, {path}: {error}") from error
            self._adapters[name] = self.library.LoRARequest(name, number, path)

    async def stop(self) -> None:
        self._watches.close()
        await self.followers.close()  # first: without this part, theirs would fail
        if self._llm is not None:
            unlink_shared_memory()
            self._llm.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
            self._llm = None

    async def call(self, awaitable: Awaitable[_T]) -> _T:
        """Turns vLLM's exceptions into EngineError; ValueError and umbra's own pass through."""
        try:
            return await awaitable
        except (UmbraError, ValueError):
            raise
        except Exception as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error

    def check_request(self, request: GenerationRequest) -> None:
        check_request(request)

    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> Output:
        whole = [*request.tokens.tolist(), *request.forced.tolist()]
        prompt = self.library.tokens_input(whole, cache_salt=cache_salt)
        params = sampling_params(self.library, request, self.vocab_size)
        adapter = self._adapters.get(request.lora)
        adding = self._llm.add_request(key, prompt, params, lora_request=adapter)
        collector = await self.call(adding)
        processor = self._llm.output_processor
        if request.forced.size:
            return ForcedOutput(collector, processor, request)
        return VllmOutput(collector, processor)

    async def abort(self, keys: Iterable[str]) -> None:
        """The last tokens, which are on their way from EngineCore, are lost."""
        await self.call(self._llm.abort(list(keys)))

    async def pause(self, *, keep: bool) -> None:
        """Avoids `pause_generation`, which then sleeps for 20 ms: `deliver` takes late tokens."""
        mode = "keep" if keep else "abort"
        await self.call(self._llm.engine_core.pause_scheduler_async(mode, clear_cache=False))
        self.is_paused = True

    async def resume(self) -> None:
        await self.call(self._llm.resume_generation())
        self.is_paused = False

    async def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Wakes what sleeps first: vLLM puts nothing to sleep while one tag sleeps."""
        await self.wake(_MEMORY_TAGS)
        await self.call(self._llm.sleep(level))
        self._asleep.update(_MEMORY_TAGS)
        self.is_paused = True

    async def wake(self, tags: Sequence[str]) -> None:
        """Wakes only tags that sleep: others would keep them asleep. With the
        last, vLLM resumes."""
        sleeping = [tag for tag in tags if tag in self._asleep]
        if sleeping:
            await self.call(self._llm.wake_up(sleeping))
            self._asleep.difference_update(sleeping)
            self.is_paused = bool(self._asleep)

    async def reset_prefix_cache(self) -> None:
        await self.call(self._llm.reset_prefix_cache())

    async def ask_workers(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        asked = self._llm.collective_rpc("umbra_update", args=(order,))
        reports = self.checked(await self.call(asked))
        if order["action"] == "load":
            if self._settings.lora_rank:
                name, number = SYNCED_ADAPTER
                self._adapters[""] = self.library.LoRARequest(name, number, "no folder")
            await self._load_adapters()
        return reports


class VllmEngine(ConfiguredEngine):
    settings_class = VllmSettings
    core_class = VllmCore


def _memory_hint(text: str) -> str:
    if not any(word in text for word in _MAY_LACK_MEMORY):
        return ""
    return (
        "\n(if it lacks memory, lower pool.max_context_len, which is its max_model_len, "
        "pool.max_num_seqs or pool.kv_cache_num_tokens)"
    )


def _children_since(ticks: int) -> set[int]:
    """Children that started since then; not the orphans that this process adopted."""
    found = (
        (pid, descendants.process_stat(pid)) for pid in descendants.working_child_pids(os.getpid())
    )
    return {pid for pid, stat in found if stat is not None and stat.start_ticks >= ticks}


def check_request(request: GenerationRequest) -> None:
    """Raises ValueError for a request that vLLM would silently change."""
    if 0 < request.temperature < _MIN_TEMPERATURE:
        raise ValueError(
            f"request {request.id}: temperature must be 0 (greedy) or at least "
            f"{_MIN_TEMPERATURE} with vLLM, got {request.temperature}"
        )


def sampling_params(library: VllmLibrary, request: GenerationRequest, vocab_size: int) -> Any:
    return library.SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=draw_seed(request.seed, request.position),
        max_tokens=1 if request.forced.size else request.max_new_tokens,
        # vLLM refuses stop tokens outside the vocabulary.
        stop_token_ids=[token for token in request.stop_token_ids if token < vocab_size],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if request.forced.size else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=library.RequestOutputKind.FINAL_ONLY,
    )


def draw_seed(seed: int, position: int) -> int:
    """The seed for resuming a trajectory at `position`, in [0, 2**63). vLLM starts a generator with
    each request: the same seed would repeat the draws of the beginning."""
    if position == 0:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position)) >> 1
