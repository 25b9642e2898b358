"""Estimates how much GPU memory ranks and engines take, from the config and the model's sizes."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

from umbra.runtime.cluster.memory_plan import GIB, EngineNeed, MemoryPlan, RankNeed, plan_memory
from umbra.runtime.cluster.placement import Plan
from umbra.runtime.engine_api.engine_names import (
    ENGINE_ASLEEP_NBYTES,
    ENGINE_AWAKE_NBYTES,
    engine_kind,
    kv_token_nbytes,
)
from umbra.runtime.engine_api.kept_tokens import Truncation
from umbra.runtime.engine_api.lifecycle import ALL_TAGS, Tag
from umbra.runtime.engine_api.lora import matrix_shapes
from umbra.runtime.engine_api.pool_settings import (
    DEFAULT_NUM_SEQS,
    AuxiliaryPoolSettings,
    EnginePoolSettings,
    PoolSettings,
    Sleep,
)
from umbra.runtime.engine_api.weight_files import is_tied
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.process.host_memory import free_nbytes
from umbra.runtime.text.model_files import default_context_len, read_model_config
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.model.host_offload import Offload
from umbra.trainer.model.stored_weights import StoredWeights
from umbra.trainer.model.token_scoring import kept_logits_nbytes, scoring_nbytes
from umbra.trainer.model.train_model import wraps_layers
from umbra.trainer.services.pool_specs import engine_device
from umbra.trainer.services.services import DEFAULT_MICRO_BATCH_TOKENS

ITEMSIZES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SLEEPING_TAGS: Final[Mapping[Sleep, frozenset[Tag]]] = {
    "auto": ALL_TAGS,  # unless the memory plan chooses another
    "all": ALL_TAGS,
    "kv_cache": frozenset({"kv_cache"}),
    "weights": frozenset({"weights"}),
    "none": frozenset(),
}
_CONTEXT_NBYTES: Final = 2816 << 20
"""CUDA context, libraries, their workspaces (1.5 GiB on an H200), and what torch's allocator cannot
give back between training steps: 1.2 GiB in docs/runs/hybrid-vllm-1xh100.jsonl (reserved less
allocated in generation). A sync with vLLM 0.33 then takes what is planned
(docs/results/memory-plan-h200.json)."""
_WHOLE_MAX_PARAMETERS: Final = 1_000_000_000
"""Up to this size, FSDP gathers and reduces the whole model once a step, where there is memory: by
layers, it does so for each micro-batch, which takes a small model longer than its kernels. Higher
leaves the GPU idle while much is gathered, before a step's first kernel."""
_MOST_NUM_SEQS: Final = {"vllm": 512}
"""An engine's decode steps of more sequences are in no CUDA graph; SGLang's mostly not from 257."""
_LARGE_MICRO_BATCH_TOKENS: Final = 32_768
"""A micro-batch has as many where there is memory: on an H200, a 0.6B step takes 723 ms and 40 GiB
instead of 746 ms and 29 GiB."""
_LOGIT_SETTINGS: Final = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_mup_width_multiplier",
    "final_logit_softcapping",
    "logits_soft_cap",
)
"""Names in config.json of a factor or a cap of logits, in the models of transformers."""
_COMPILED_SHARE: Final = 0.65
"""Share of the activations that torch.compile keeps, measured with Qwen3 shapes on an H200."""


def plan_job_memory(
    config: TrainerConfig,
    host: str,
    plan: Plan,
    gpu_nbytes: Sequence[Sequence[int]],
    device_type: str,
) -> tuple[MemoryPlan, TrainerConfig]:
    """Plans the job's memory, and settles five settings that may be open. `pool.max_num_seqs` is
    vLLM's part of a step's completions, from 256 to 512: those that wait take as many steps
    again. `train.activation_checkpointing` is "full" if training may not fit otherwise, then
    `pool.sleep` is the least with which it still fits, and engines lack no KV cache for a step's
    samples. Then micro-batches are larger, and `model.fsdp_wrap` is "root" for a model that is not
    large, each if that changes nothing else.

    The plan is empty where sizes are not known: engines then choose their KV caches' sizes, and
    sleep. `gpu_nbytes` has the memory of the GPUs by node, none on the CPU. Raises ConfigError if a
    phase does not fit a GPU.
    """
    config = _with_num_seqs(config, host, plan)
    memory, settled = _plan_by_layers(config, host, plan, gpu_nbytes, device_type)
    for candidate in _fewer_passes(settled) if memory.expected_nbytes else ():
        needs = job_needs(candidate, host, len(plan.ranks), device_type)
        found = plan_memory(plan, gpu_nbytes, *needs)
        if found.activations_fit and found.kv_num_tokens == memory.kv_num_tokens:
            return found, candidate
    return memory, settled


def _with_num_seqs(config: TrainerConfig, host: str, plan: Plan) -> TrainerConfig:
    if config.pool.max_num_seqs or not any(place.gpus for place in plan.engines[host]):
        return config
    most = _MOST_NUM_SEQS.get(config.pool.engine, DEFAULT_NUM_SEQS)
    num_seqs = min(max(_samples_each(config, host, plan), DEFAULT_NUM_SEQS), most)
    return replace(config, pool=replace(config.pool, max_num_seqs=num_seqs))


def _samples_each(config: TrainerConfig, host: str, plan: Plan) -> int:
    """The part of a step's completions that an engine gets."""
    return -(-config.samples_per_step // len(plan.engines[host]))


def _fewer_passes(settled: TrainerConfig) -> list[TrainerConfig]:
    """Settings by which a step launches fewer kernels, the best first, and those given."""
    found, train = [settled], settled.train
    if settled.model.fsdp_wrap == "auto":
        size = ModelSizes.read(settled.model.path).num_parameters
        if size <= _WHOLE_MAX_PARAMETERS:
            found = [replace(settled, model=replace(settled.model, fsdp_wrap="root")), settled]
    if train.micro_batches or train.max_tokens_per_micro_batch:
        return found
    larger = replace(train, max_tokens_per_micro_batch=_LARGE_MICRO_BATCH_TOKENS)
    return [replace(found[0], train=larger), *found]


def _plan_by_layers(
    config: TrainerConfig,
    host: str,
    plan: Plan,
    gpu_nbytes: Sequence[Sequence[int]],
    device_type: str,
) -> tuple[MemoryPlan, TrainerConfig]:
    option, sleep = config.train.activation_checkpointing, config.pool.sleep
    options: list[Literal["none", "full"]] = ["none", "full"] if option == "auto" else [option]
    most = sleep
    if sleep == "auto":
        most = "all" if config.pool.mode == "hybrid" else "none"
    settled, memory = _settled(config, options[0], most), MemoryPlan()
    for option in options if any(gpu_nbytes) else ():
        settled = _settled(config, option, most)
        try:
            needs = job_needs(settled, host, len(plan.ranks), device_type)
        except (ConfigError, DataError) as error:
            return MemoryPlan(notes=(f"GPU memory is not planned: {error}",)), settled
        memory = plan_memory(plan, gpu_nbytes, *needs)
        if memory.activations_fit:
            break
    if sleep != "auto" or host not in memory.kv_num_tokens or not memory.activations_fit:
        return memory, settled
    enough = _samples_each(config, host, plan) * _context_len(config.pool, config.model.path)
    enough = min(enough, memory.kv_num_tokens[host])
    for less in _less_sleep(config):
        candidate = _settled(config, option, less)
        needs = job_needs(candidate, host, len(plan.ranks), device_type)
        with suppress(ConfigError):  # it does not fit
            found = plan_memory(plan, gpu_nbytes, *needs)
            if found.activations_fit and found.kv_num_tokens[host] >= enough:
                return found, candidate
    return memory, settled


def planned_settings(config: TrainerConfig) -> str:
    """The values that a plan has settled, for the user."""
    values = {
        "train.activation_checkpointing": config.train.activation_checkpointing,
        "pool.sleep": config.pool.sleep,
        "pool.max_num_seqs": config.pool.num_seqs,
        "model.fsdp_wrap": config.model.fsdp_wrap,
        "train.max_tokens_per_micro_batch": config.train.max_tokens_per_micro_batch or "auto",
    }
    return ", ".join(f"{name} = {value!r}" for name, value in values.items() if value != "auto")


def _settled(
    config: TrainerConfig, checkpointing: Literal["auto", "none", "full"], sleep: Sleep
) -> TrainerConfig:
    train = replace(config.train, activation_checkpointing=checkpointing)
    return replace(config, train=train, pool=replace(config.pool, sleep=sleep))


def _less_sleep(config: TrainerConfig) -> Sequence[Sleep]:
    """Values of `pool.sleep` that free less than "all", the best first. A colocated pool needs what
    the policy's engines free."""
    if config.pool.mode != "hybrid" or any(p.mode == "colocated" for p in config.pools.values()):
        return ()
    by_part = engine_kind(config.pool.engine).sleeps_by_part
    return ("none", "kv_cache", "weights") if by_part else ("none",)


def trains_early(config: TrainerConfig, host: str, memory: MemoryPlan, device_type: str) -> bool:
    """Whether ranks may train while engines start that then stay awake: `memory`, of these
    settings, has room for all, and no engine beside a rank looks at what is free."""
    is_planned, kind = memory.shared_nbytes > 0, engine_kind(config.pool.engine)
    if config.pool.mode == "hybrid":
        is_planned = host in memory.kv_num_tokens
        if kind.measures_free_memory or any(p.mode == "colocated" for p in config.pools.values()):
            return False
    return memory.activations_fit and (is_planned or device_type == "cpu")


def job_needs(
    config: TrainerConfig, host: str, num_ranks: int, device_type: str
) -> tuple[RankNeed | None, dict[str, EngineNeed]]:
    """The GPU memory of a rank, one of `num_ranks` with a GPU, and of an engine of each pool;
    see `engine_needs`."""
    rank = None
    if num_ranks:
        rank = rank_need(config, ModelSizes.read(config.model.path), num_ranks)
    return rank, engine_needs(config, host, device_type)


def engine_needs(config: TrainerConfig, host: str, device_type: str) -> dict[str, EngineNeed]:
    """The GPU memory of an engine of each pool. Left out are pools on the CPU, engines that nobody
    measured, those with LoRA adapters, and those whose share of a GPU is in `engine_args`.

    `host` is the policy's pool, `device_type` the trainer's. Raises ConfigError if the model's
    config.json lacks a size, DataError without readable safetensors.
    """
    pools: dict[str, PoolSettings | AuxiliaryPoolSettings] = {host: config.pool, **config.pools}
    return {
        name: _engine_need(pool, config, host)
        for name, pool in pools.items()
        if engine_device(pool, device_type) == "cuda" and _is_known(pool)
    }


def rank_need(config: TrainerConfig, sizes: ModelSizes, num_ranks: int) -> RankNeed:
    """The GPU memory of a rank: the policy and the critic, which have gradients and activations in
    turn, and the last sent weights if `pool.full_sync_every` has them kept."""
    needs = _learner_needs(config, sizes, num_ranks)
    held = sum(need.parameters_nbytes + need.optimizer_nbytes for need in needs)
    left = held - sum(need.offloaded_nbytes(config.train.offload) for need in needs)
    num_scored = LargestMicroBatch.of(config, num_ranks).num_scored
    itemsize = ITEMSIZES[config.model.dtype]
    kept_nbytes = kept_logits_nbytes(num_scored, sizes.vocab_size, itemsize)
    always = _CONTEXT_NBYTES
    if config.pool.full_sync_every > 1:  # what was sent
        always += itemsize * _synced_size(config, sizes) // num_ranks
    return RankNeed(
        context_nbytes=_CONTEXT_NBYTES,
        sync_nbytes=always + held + _merging_nbytes(config, sizes, num_ranks),
        generation_nbytes=always + left,
        training_nbytes=always + held + max(need.gradients_nbytes for need in needs),
        activations_nbytes=max(need.activations_nbytes for need in needs),
        logits_nbytes=kept_nbytes * (not sizes.changes_logits),
        keeps_cache=config.pool.mode != "hybrid" or config.pool.sleep == "none",
    )


def check_host_memory(config: TrainerConfig, num_ranks: int, num_on_host: int) -> int:
    """The bytes that the ranks on this host, which have a GPU each, keep in its memory: what
    `train.offload` moves there, and the frozen weights into which syncs merge adapters. Raises
    ConfigError if less is free, and as `ModelSizes.read` does."""
    sizes, changes = ModelSizes.read(config.model.path), list[str]()
    each = 0
    if config.train.offload != "none":
        needs = _learner_needs(config, sizes, num_ranks)
        each += sum(need.offloaded_nbytes(config.train.offload) for need in needs)
        changes.append("train.offload = 'none'")
    if config.model.lora.rank and config.model.lora.merge:
        num_frozen = sum(map(math.prod, _adapted(config, sizes).values()))
        each += ITEMSIZES[config.model.dtype] * num_frozen // num_ranks
        changes.append("model.lora.merge = false")
    needed, free = num_on_host * each, free_nbytes()
    if needed > free:
        raise ConfigError(
            f"{num_on_host} ranks keep {needed / GIB:.1f} GiB in the memory of "
            f"{socket.gethostname()}, where {free / GIB:.1f} GiB are free: give the job more "
            f"(Slurm's --mem, docker's --memory), or set {' and '.join(changes)}"
        )
    return needed


def _learner_needs(config: TrainerConfig, sizes: ModelSizes, num_ranks: int) -> list[_LearnerNeed]:
    needs = [_LearnerNeed.of(config, sizes, num_ranks)]
    if config.has_critic:
        path = config.critic.path
        of_critic = (sizes if path is None else ModelSizes.read(path)).without_head()
        needs.append(_LearnerNeed.of(config.of_critic, of_critic, num_ranks))
    return needs


@dataclass(frozen=True, slots=True, kw_only=True)
class _LearnerNeed:
    """The memory that a model in training takes on a rank, with its reference: trained parameters,
    gradients and optimizer state in `master_dtype`, sharded over the ranks, frozen parameters and
    what FSDP gathers in `model.dtype`."""

    parameters_nbytes: int
    optimizer_nbytes: int
    gradients_nbytes: int
    activations_nbytes: int

    @classmethod
    def of(cls, config: TrainerConfig, sizes: ModelSizes, num_ranks: int) -> Self:
        train, has_lora = config.train, config.model.lora.rank > 0
        num_trained = trained_size(config, sizes)
        master = ITEMSIZES[config.master_dtype] * num_trained // num_ranks
        parameters = master
        if has_lora or train.kl_coef:  # the model below adapters is its own reference
            parameters += ITEMSIZES[config.model.dtype] * sizes.num_parameters // num_ranks
        optimizer = 2 * master  # AdamW's moments
        if train.optimizer == "muon":  # which has one for hidden matrices
            num_others = 0 if has_lora else sizes.embedding_size
            optimizer = master + ITEMSIZES[config.master_dtype] * num_others // num_ranks
        if train.optimizer == "adamw_8bit":  # 2 codes, and 2 scales for each 64 elements
            optimizer = (2 * num_trained + num_trained // 8) // num_ranks
        if train.ema:
            optimizer += max(4, ITEMSIZES[config.master_dtype]) * num_trained // num_ranks
        return cls(
            parameters_nbytes=parameters,
            optimizer_nbytes=optimizer,
            gradients_nbytes=master,
            activations_nbytes=_activations_nbytes(config, sizes, num_ranks),
        )

    def offloaded_nbytes(self, offload: Offload) -> int:
        both = self.parameters_nbytes + self.optimizer_nbytes
        return {"none": 0, "optimizer": self.optimizer_nbytes, "all": both}[offload]


def trained_size(config: TrainerConfig, sizes: ModelSizes) -> int:
    """Elements of the parameters that are trained: the adapters', or all."""
    rank = config.model.lora.rank
    return rank * sum(map(sum, _adapted(config, sizes).values())) if rank else sizes.num_parameters


def _adapted(config: TrainerConfig, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    """The shapes of the matrices that have adapters, by name."""
    lora, path = config.model.lora, str(config.model.path)
    names = lora.chosen(sizes.matrices, path, is_tied=sizes.is_tied) if sizes.matrices else []
    return {name: sizes.matrices[name] for name in names}


def _synced_size(config: TrainerConfig, sizes: ModelSizes) -> int:
    """Elements of what engines get: the adapters, or the model."""
    is_whole = not config.model.lora.synced_rank
    return sizes.num_parameters if is_whole else trained_size(config, sizes)


def _merging_nbytes(config: TrainerConfig, sizes: ModelSizes, num_ranks: int) -> int:
    """The bytes that a merge of adapters takes: all of them, gathered by way of two buffers, and
    one layer in float32 and once more as it is stored."""
    if not config.model.lora.rank or not config.model.lora.merge:
        return 0
    layers = Counter[str]()
    for name, shape in _adapted(config, sizes).items():
        layers[name.partition(".experts.")[0]] += math.prod(shape)
    gathered = 3 * ITEMSIZES[config.master_dtype] * trained_size(config, sizes)
    each_nbytes = 4 + ITEMSIZES[config.model.dtype]
    return gathered + each_nbytes * max(layers.values(), default=0) // num_ranks


def _activations_nbytes(config: TrainerConfig, sizes: ModelSizes, num_ranks: int) -> int:
    """The most that the largest micro-batch takes besides sharded parameters and gradients: what
    the root of FSDP gathers and its gradient, and the most of three moments. These are the scoring
    of the tokens, the backward pass of a block, and the reduction of the root's gradient."""
    itemsize, largest = ITEMSIZES[config.model.dtype], LargestMicroBatch.of(config, num_ranks)
    root_size, block_size = sizes.num_parameters, 0
    if wraps_layers(config.model.fsdp_wrap, sizes.num_parameters):
        root_size, block_size = sizes.embedding_size, sizes.layer_size
    trained_root, trained_block = root_size, block_size
    if config.model.lora.rank:
        in_block = trained_size(config, sizes) // sizes.num_layers
        trained_root = 0 if block_size else in_block * sizes.num_layers
        trained_block = in_block if block_size else 0
        root_size, block_size = root_size + trained_root, block_size + trained_block
    master_itemsize = ITEMSIZES[config.master_dtype]
    reduced = master_itemsize + master_itemsize / num_ranks  # a whole gradient, and its shard
    layer = layer_nbytes(sizes, itemsize) * largest.num_tokens
    layer *= _COMPILED_SHARE if config.train.compile is True else 1
    repeated = 2 * itemsize * sizes.kv_size * largest.num_repeated_keys
    kept = sizes.num_layers * layer
    if config.train.activation_checkpointing == "full":
        kept = sizes.num_layers * itemsize * sizes.hidden_size * largest.num_tokens
    elif config.train.compile is True:
        kept += sizes.num_layers * repeated
    truncation = Truncation(config.rollout.top_p, config.rollout.top_k)
    scoring = scoring_nbytes(
        largest.num_scored,
        sizes.vocab_size,
        sizes.hidden_size,
        itemsize,
        truncation,
        trains_entropy=config.train.entropy_coef > 0,
        is_chunked=not sizes.changes_logits,
    )
    # Keys and values of prompts exist once for each completion, and so do their gradients: first
    # for every head of the queries (the flash kernel's `dk_expanded`), then for those of the keys.
    attention = repeated * (2 + sizes.q_size / sizes.kv_size)
    # A block and the next one are gathered; the gradient is whole, once more to be reduced.
    block = layer + attention + 2 * itemsize * block_size + trained_block * (itemsize + reduced)
    # Without layers of its own, the root adds its gradient up in float32 over micro-batches.
    root = root_size * itemsize + trained_root * max(itemsize, 0 if block_size else 4)
    return int(root + max(kept + scoring, kept + block, reduced * trained_root))


def layer_nbytes(sizes: ModelSizes, itemsize: int) -> int:
    """Bytes per token that a decoder layer of transformers keeps for its backward pass, counted by
    `torch.autograd.graph.saved_tensors_hooks` for Llama and Qwen3.

    A norm keeps its input in float32, the normalised input and its output; attention its queries,
    keys, values and output; the MLP its two projections, the activation and the product.
    """
    norms = 2 * (4 + 2 * itemsize) * sizes.hidden_size
    attention = 2 * itemsize * (sizes.q_size + sizes.kv_size)
    if sizes.has_qk_norm:
        attention += (4 + itemsize) * (sizes.q_size + sizes.kv_size)
    return norms + attention + 4 * itemsize * sizes.intermediate_size


@dataclass(frozen=True, slots=True)
class LargestMicroBatch:
    """The most that a micro-batch of packed samples may have. `num_tokens` counts each distinct
    prompt once, as in `plan_batch`. `num_scored` are those of completions. `num_repeated_keys` are
    rows of keys that attention gathers for completions from their prompts, most where many short
    completions follow long prompts."""

    num_tokens: int
    num_scored: int
    num_repeated_keys: int

    @classmethod
    def of(cls, config: TrainerConfig, num_ranks: int) -> Self:
        """Takes the longest prompts and completions that the settings allow."""
        train, rollout = config.train, config.rollout
        context_len = _context_len(config.pool, config.model.path)
        prompt_len = max(1, context_len - rollout.max_new_tokens)
        num_samples = -(-config.samples_per_step // (train.mini_batches * num_ranks))
        whole = num_generated = num_samples * context_len
        if not rollout.agent:  # whose completions may fill the context
            num_generated = num_samples * rollout.max_new_tokens
            num_groups = -(-num_samples // rollout.group_size)
            whole = num_groups * prompt_len + num_generated
        if train.micro_batches:
            num_tokens = -(-whole // train.micro_batches)
        else:
            cap = train.max_tokens_per_micro_batch or DEFAULT_MICRO_BATCH_TOKENS["cuda"]
            num_tokens = min(whole, max(cap, context_len))  # a sample beyond the cap is alone
        shortest_group = prompt_len + rollout.group_size  # completions of one token
        num_completions = rollout.group_size * (num_tokens // shortest_group)
        num_completions = num_completions or max(1, num_tokens - prompt_len)
        return cls(
            num_tokens=num_tokens,
            num_scored=min(num_tokens, num_generated),
            num_repeated_keys=prompt_len * min(num_samples, num_completions),
        )


def _is_known(pool: EnginePoolSettings) -> bool:
    """Whether the needs of its engines are known, and the user did not set their share of a GPU."""
    kind = engine_kind(pool.engine)
    has_own_share = kind.share_option in pool.engine_args
    return kind.has_known_memory and not has_own_share and not pool.lora_adapters


def _engine_need(
    pool: PoolSettings | AuxiliaryPoolSettings, config: TrainerConfig, host: str
) -> EngineNeed:
    path, dtype, is_updated = config.model.path, config.model.dtype, True
    if isinstance(pool, AuxiliaryPoolSettings):
        path, dtype, is_updated = pool.model_path, pool.dtype or dtype, False
    sizes, itemsize = ModelSizes.read(path), ITEMSIZES[dtype]
    num_gpus = engine_kind(pool.engine).tensor_parallel_size(pool.engine_args)
    weights = sizes.stored_nbytes if sizes.is_quantised else sizes.num_parameters * itemsize
    update = weights
    if is_updated and config.model.lora.synced_rank:
        update = _synced_size(config, sizes) * itemsize
        weights += update
    if isinstance(pool, PoolSettings) and pool.staged_updates:
        weights += update  # it is in spare memory before it is in the parameters
    context_len = _context_len(pool, path)
    return EngineNeed(
        mode=pool.mode,
        shares_with=host if pool.mode == "colocated" else "",
        is_updated=is_updated,
        weights_nbytes=weights // num_gpus,
        kv_token_nbytes=kv_token_nbytes(sizes.config, itemsize, tensor_parallel_size=num_gpus),
        overhead_nbytes=ENGINE_AWAKE_NBYTES,
        asleep_nbytes=ENGINE_ASLEEP_NBYTES,
        kv_num_tokens=pool.kv_cache_num_tokens,
        least_kv_num_tokens=context_len,
        most_kv_num_tokens=pool.num_seqs * context_len,
        sleeps=SLEEPING_TAGS[pool.sleep if isinstance(pool, PoolSettings) else "all"],
    )


def _context_len(pool: EnginePoolSettings, path: Path) -> int:
    return pool.max_context_len or default_context_len(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder, from config.json and the headers of its weight files."""

    num_parameters: int  # tied embeddings count once
    stored_nbytes: int  # of the weights' files
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of the MLP; in a mixture of experts, of those that a token uses
    q_size: int  # heads times head size, of queries
    kv_size: int  # the same of keys
    vocab_size: int
    has_qk_norm: bool  # queries and keys have norms of their own
    is_tied: bool  # embeddings and head are one tensor
    head_size: int  # elements of a head that is a tensor of its own, else 0
    is_quantised: bool  # in the files
    matrices: Mapping[str, tuple[int, ...]]  # shapes of the layers' weights, by name
    config: dict[str, Any]  # config.json, or its text part

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises DataError without readable safetensors, ConfigError if
        config.json lacks a size."""
        whole = config = read_model_config(folder)
        if isinstance(config.get("text_config"), dict):
            config = cast("dict[str, Any]", config["text_config"])
        weights = StoredWeights(folder)
        ties = is_tied(folder, whole)
        try:
            num_heads = int(config["num_attention_heads"])
            hidden_size, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
            head_dim = int(config.get("head_dim") or hidden_size // num_heads)
            embedding_size = vocab_size * hidden_size
            is_repeated = ties and "lm_head.weight" in weights.names
            return cls(
                num_parameters=weights.num_elements - is_repeated * embedding_size,
                stored_nbytes=weights.nbytes,
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden_size,
                intermediate_size=_intermediate_size(config),
                q_size=num_heads * head_dim,
                kv_size=int(config.get("num_key_value_heads") or num_heads) * head_dim,
                vocab_size=vocab_size,
                has_qk_norm=any(".q_norm." in name for name in weights.names),
                is_tied=ties,
                head_size=0 if ties else embedding_size,
                is_quantised="quantization_config" in whole or "quantization_config" in config,
                matrices=matrix_shapes(folder),
                config=config,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}/config.json does not give {error}") from None

    @property
    def embedding_size(self) -> int:
        """Elements of the embeddings and the head."""
        return self.vocab_size * self.hidden_size + self.head_size

    @property
    def changes_logits(self) -> bool:
        """Whether the model does more than apply its head, and so computes all logits at once."""
        return any(self.config.get(name, 1.0) not in (None, 1.0) for name in _LOGIT_SETTINGS)

    @property
    def layer_size(self) -> int:
        """Elements of one decoder layer."""
        return max(0, self.num_parameters - self.embedding_size) // self.num_layers

    def without_head(self) -> Self:
        """The sizes of a critic that starts with the model."""
        return replace(self, num_parameters=self.num_parameters - self.head_size, head_size=0)


def _intermediate_size(config: dict[str, Any]) -> int:
    num_experts = config.get("num_experts_per_tok")
    if num_experts and config.get("moe_intermediate_size"):
        return int(num_experts) * int(config["moe_intermediate_size"])
    return int(config["intermediate_size"])
