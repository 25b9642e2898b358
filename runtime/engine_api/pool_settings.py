"""The settings of a pool, and facts about transports, the ways of weights to engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from umbra.runtime.engine_api.engine_names import EngineName, check_lora_engine, engine_kind
from umbra.runtime.errors import SettingError
from umbra.runtime.settings import (
    Checked,
    Count,
    CountOrAuto,
    Dtype,
    FilePath,
    Positive,
    PositiveOrAuto,
    Seconds,
    Settings,
    Variables,
)

DEFAULT_NUM_SEQS: Final = 256

TransportName = Literal["cuda_ipc", "memfd", "tcp"]
TransportSetting = Literal["auto", TransportName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Facts about a transport.

    Attributes:
        plan: `module:Class` of the supervisor's part, see `TransportPlan`.
        sender: `module:Class` of a rank's part, see `Sender`.
        reads_ranks: engines read the memory of the ranks, instead of an image on their node.
        crosses_nodes: it reaches engines on other nodes, and may send changes alone.
    """

    name: TransportName
    plan: str
    sender: str
    reads_ranks: bool = False
    crosses_nodes: bool = False


_WEIGHTS: Final = "umbra.runtime.weights"

TRANSPORTS: Final[Mapping[TransportName, Transport]] = {
    transport.name: transport
    for transport in (
        Transport(
            name="cuda_ipc",
            plan=f"{_WEIGHTS}.exports.export_plan:ExportPlan",
            sender=f"{_WEIGHTS}.exports.ipc_memory:ExportSender",
            reads_ranks=True,
        ),
        Transport(
            name="memfd",
            plan=f"{_WEIGHTS}.image.image_memory:ImagePlan",
            sender=f"{_WEIGHTS}.image.image_sender:ImageSender",
        ),
        Transport(
            name="tcp",
            plan=f"{_WEIGHTS}.links.link_plan:LinkPlan",
            sender=f"{_WEIGHTS}.links.link_sender:LinkSender",
            crosses_nodes=True,
        ),
    )
}
"""The fastest first, in which order "auto" tries them."""


def allowed_transports(setting: TransportSetting) -> list[Transport]:
    """The transports that a pool with this setting may use."""
    if setting != "auto":
        return [TRANSPORTS[setting]]
    return list(TRANSPORTS.values())


_MAX_TURN_S: Final = 60.0

OnUpdate = Literal["abort", "keep", "drain"]
Sleep = Literal["auto", "all", "kv_cache", "weights", "none"]


def _check_adapter_names(adapters: Mapping[str, Path]) -> None:
    if "" in adapters:
        raise ValueError("a LoRA adapter needs a name")


def check_full_sync_every(full_sync_every: int, transport: TransportSetting) -> None:
    """Raises SettingError for a pool whose weights never travel over the network."""
    if full_sync_every > 1 and not any(t.crosses_nodes for t in allowed_transports(transport)):
        names = " or ".join(repr(t.name) for t in TRANSPORTS.values() if t.crosses_nodes)
        raise SettingError(
            f"full_sync_every {full_sync_every} is for transport {names}, not {transport!r}: set "
            "full_sync_every to 1, or transport to 'auto'"
        )


def check_staged_updates(mode: str, engine: str, transport: TransportSetting) -> None:
    """Raises SettingError for a pool whose engines cannot read weights while they generate."""
    if mode != "standalone":
        raise SettingError(
            f"staged_updates is for mode 'standalone': {mode} engines generate nothing while "
            "weights travel; leave it out, or set mode to 'standalone'"
        )
    if engine not in ("auto", "vllm"):
        raise SettingError(
            f"staged_updates is for engine 'vllm', and engine {engine!r} reads weights when it is "
            "paused; leave it out, or set engine to 'vllm'"
        )
    if not any(t.reads_ranks for t in allowed_transports(transport)):
        raise SettingError(
            f"staged_updates is for weights that engines read on the trainer's GPUs, and transport "
            f"{transport!r} does not let them; leave it out, or set transport to 'auto'"
        )


def check_sleep(mode: str, engine: str, sleep: Sleep) -> None:
    """Raises SettingError for a pool whose engines free nothing, or all at once."""
    if mode != "hybrid" and sleep not in ("auto", "none"):
        raise SettingError(
            f"sleep is for mode 'hybrid': {mode} engines never sleep; leave it out, or set mode to "
            "'hybrid'"
        )
    frees_part = engine == "auto" or engine_kind(engine).sleeps_by_part
    if sleep in ("kv_cache", "weights") and not frees_part:
        raise SettingError(
            f"sleep {sleep!r} is for engines that free one part alone, and engine {engine!r} frees "
            "both or neither: set sleep to 'all' or 'none'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePoolSettings(Settings):
    """Settings of both `[pool]` and `[pools.NAME]`.

    Attributes:
        engine: "embedded", "vllm" or "sglang" (docs/engines.md), "echo" (no model, for tests: give
            it the model's vocab_size in `engine_args`), "faulty" (docs/troubleshoot.md), or the
            "module:Class" of another. "auto" is, on a GPU, the first of "vllm" and "sglang" that is
            installed, else "embedded".
        count: Number of engines in the job. "auto" starts one for every t GPUs of the pool, where t
            is the tensor-parallel size, or one for each node on the CPU. See docs/engines.md for
            several pools. `[pool]` may have 0: its engines are then on machines that only generate
            (docs/cluster.md).
        nodes: Nodes of the engines by hand, as numbers from 0, which is rank 0's. Default: all.
        gpus: GPUs of the engines by hand, on each of these nodes, in the order of
            CUDA_VISIBLE_DEVICES from 0 and of the engines. A number that is repeated, or in two
            pools, is shared. Default: `mode` decides.
        device: Device of the engines. "auto" is cuda where the trainer runs on it.
        max_num_seqs: Completions an engine works on at a time. More use its device better and take
            more KV cache. Default: 256; for `[pool]` with vLLM on GPUs, what a step needs up to
            512.
        max_context_len: Longest prompt + completion in tokens. Longer contexts take more KV cache.
            Default: the model's limit, at most 4096.
        kv_cache_num_tokens: Size of an engine's KV cache, in tokens of all its sequences. Smaller
            ones let fewer sequences run at a time. Default, in training on GPUs: what other memory
            leaves (docs/engines.md); otherwise the engine's choice.
        tick_ms: Interval at which engines report new tokens. Longer ones cost less; an engine that
            dies loses the tokens of one.
        num_threads: CPU threads of an engine. Default: the cores near its GPUs, or all on the CPU,
            at most the CPU quota of the container, divided by the pool's engines there.
        engine_args: Options passed to the engine unchanged: of vLLM's AsyncEngineArgs, such as
            tensor_parallel_size, or SGLang's ServerArgs, such as tp_size.
        lora_adapters: LoRA adapters by name, as folders that PEFT saved, which a request may choose
            (docs/engines.md). For engine "vllm".
        allow_engine_pickle: Whether an engine that needs more GPUs than a node has may be on
            several nodes, whose connections unpickle what arrives (docs/cluster.md).
        max_restarts: How often one engine may be restarted within ten minutes. More fail the run.
        memory_limit_mib: Host memory of an engine's processes, above which it is killed and
            restarted. 0 is no limit.
        hung_limit_s: How long an engine's process may not react before it is killed and restarted.
            Too low, and an overloaded machine loses healthy engines.
    """

    engine: EngineName = "auto"
    count: PositiveOrAuto = "auto"
    nodes: tuple[Count, ...] = ()
    gpus: tuple[Count, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_seqs: Positive | None = None
    max_context_len: Positive | None = None
    kv_cache_num_tokens: Positive | None = None
    tick_ms: Seconds = 50.0
    num_threads: Positive | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lora_adapters: Annotated[Mapping[str, FilePath], Checked(_check_adapter_names)] = field(
        default_factory=dict[str, Path]
    )
    allow_engine_pickle: bool = False
    max_restarts: Count = 5
    memory_limit_mib: Count = 0
    hung_limit_s: Seconds = 15.0

    @property
    def num_seqs(self) -> int:
        return self.max_num_seqs or DEFAULT_NUM_SEQS

    @property
    def max_inflight_per_engine(self) -> int:
        """Completions that an engine holds at a time. A quarter may wait there, so that each end
        lets the next one begin at once: the rollout manager learns of ends a tick later. More move
        work away from engines that become free earlier."""
        return self.num_seqs + self.num_seqs // 4

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.engine != "auto":
            check_lora_engine(self.engine, self.lora_adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings(EnginePoolSettings):
    """`[pool]`: the inference engines.

    Attributes:
        mode: "hybrid" engines share the trainer's GPUs by time-slicing, and pause while it
            computes. "standalone" engines get GPUs without ranks and never pause, which
            `rollout.max_staleness` above 0 makes use of.
        sleep: What hybrid engines free while the trainer computes. Less makes a step shorter.
            "auto" is the least that the memory plan has room for (docs/engines.md), and "all"
            without a plan.
        on_update: What new weights do to completions in progress (docs/asynchronous.md). Hybrid
            engines always abort, because they pause before the trainer computes.
        staged_updates: Whether engines of a standalone pool read new weights into spare memory
            while they generate, so that an update interrupts them for a copy within their GPU
            alone. It takes the memory of the weights once more. For engine "vllm"; without effect
            where weights do not travel by "cuda_ipc".
        transport: How weights travel to the engines. "cuda_ipc" lets engines read them on the
            trainer's GPUs, "memfd" sends them through host memory, "tcp" over the network to each
            node. "auto" is the first of these that every rank and engine can use.
        sync_bucket_mib: Part of the weights that a rank writes before engines load it, unless the
            transport is "cuda_ipc". With larger ones, engines begin later and read what has left
            the cache; with smaller ones, they wake each other more often.
        full_sync_every: With transport "tcp", every n-th update sends all weights over the network,
            the others only the values that have changed, bit for bit: few at usual learning rates.
            From 2 on, each rank keeps a copy of its part of the weights in `model.dtype`, on its
            GPU.
        sync_timeout_s: Limit for one weight update; the first also covers engine start-up. An
            engine that makes no progress for most of it is replaced.
        stall_limit_s: How long an engine that has requests may generate no token before it is
            killed and restarted. Set it above the longest time to a first token, which may be
            minutes on a CPU.
    """

    count: CountOrAuto = "auto"
    mode: Literal["hybrid", "standalone"] = "hybrid"
    sleep: Sleep = "auto"
    on_update: OnUpdate = "keep"
    staged_updates: bool = False
    transport: TransportSetting = "auto"
    sync_bucket_mib: Positive = 2
    full_sync_every: Positive = 1
    sync_timeout_s: Seconds = 600.0
    stall_limit_s: Seconds = 100.0

    @property
    def max_inflight_per_engine(self) -> int:
        """An update that drains engines waits for all that they hold, so none waits there."""
        extra = 0 if self.on_update == "drain" else self.num_seqs // 4
        return self.num_seqs + extra

    def __post_init__(self) -> None:
        EnginePoolSettings.__post_init__(self)
        check_full_sync_every(self.full_sync_every, self.transport)
        if self.staged_updates:
            check_staged_updates(self.mode, self.engine, self.transport)
        check_sleep(self.mode, self.engine, self.sleep)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryPoolSettings(EnginePoolSettings):
    """`[pools.NAME]`: auxiliary models beside the policy, such as a judge. Agent loops and reward
    functions call them by `ctx.pool("NAME")`; the name has letters, digits and `_`.

    Attributes:
        model_path: Model directory or name on the hub, as in `model.path`. Training does not change
            it.
        mode: "colocated" pools share the GPUs of the policy's engines by time-slicing. "standalone"
            pools have GPUs of their own, and are always awake.
        dtype: Data type of computation. Default: `model.dtype`.
        chat_template_kwargs: Further variables of the model's chat template.
        env: Variables for the engines' processes. On GPUs, `gpus` takes the place of
            CUDA_VISIBLE_DEVICES. Files of the run, loggers and the web page show their names only.
        max_wait_s: How long requests of a colocated pool wait before they interrupt the policy's
            generation, which continues later. Between turns of several pools it has at least the
            shortest of their waits. Default: 10 for a standalone policy, and in `umbra serve`;
            otherwise until the policy is idle.
        max_turn_s: Longest turn of a colocated pool while the policy has something to generate.
            Longer turns switch less often and delay the policy more.
        start_timeout_s: Limit for an engine's start.
        request_timeout_s: Limit for one answer, including time spent waiting for the pool's turn.
    """

    model_path: FilePath
    mode: Literal["colocated", "standalone"] = "colocated"
    dtype: Dtype | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Variables = field(default_factory=dict[str, str])
    max_wait_s: Seconds | None = None
    max_turn_s: Seconds = _MAX_TURN_S
    start_timeout_s: Seconds = 600.0
    request_timeout_s: Seconds = 1800.0

    def __post_init__(self) -> None:
        EnginePoolSettings.__post_init__(self)
        given = [
            name
            for name, default in (("max_turn_s", _MAX_TURN_S), ("max_wait_s", None))
            if getattr(self, name) != default
        ]
        if self.mode == "standalone" and given:
            raise SettingError(
                f"{' and '.join(given)} is for mode 'colocated': a standalone pool is always "
                "awake; leave it out, or set mode to 'colocated'"
            )
