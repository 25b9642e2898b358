"""Estimates of GPU memory beside what was measured, and beside what torch keeps."""

from __future__ import annotations

import json
import math
import struct
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pytest
import torch
from minimal_config import config_with
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_models import save_model
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3Config

from umbra.runtime.cluster.memory_plan import GIB, RankNeed
from umbra.runtime.cluster.placement import Node
from umbra.runtime.engine_api.engine_names import ENGINE_ASLEEP_NBYTES
from umbra.runtime.errors import ConfigError, DataError
from umbra.trainer.config.trainer_config import TrainerConfig, TrainSection
from umbra.trainer.model import packing
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.packing import Sample, pack
from umbra.trainer.model.train_model import PassSettings, PreparedModel, TrainModel
from umbra.trainer.policy_engines import TrainingRoom
from umbra.trainer.services import memory_needs
from umbra.trainer.services.memory_needs import (
    LargestMicroBatch,
    ModelSizes,
    check_host_memory,
    engine_needs,
    plan_job_memory,
    rank_need,
    trained_size,
    trains_early,
)
from umbra.trainer.services.pool_specs import plan_pools


def sizes_of(
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    q_size: int,
    kv_size: int = 1024,
    vocab_size: int = 151_936,
    *,
    is_tied: bool = True,
) -> ModelSizes:
    """Of a Qwen3 model."""
    layer = hidden_size * (2 * (q_size + kv_size) + 3 * intermediate_size + 2)
    embedding = vocab_size * hidden_size * (1 if is_tied else 2)
    num_parameters = num_layers * layer + embedding
    linears = {
        "q_proj": (q_size, hidden_size),
        "k_proj": (kv_size, hidden_size),
        "v_proj": (kv_size, hidden_size),
        "o_proj": (hidden_size, q_size),
        "gate_proj": (intermediate_size, hidden_size),
        "up_proj": (intermediate_size, hidden_size),
        "down_proj": (hidden_size, intermediate_size),
    }
    return ModelSizes(
        num_parameters=num_parameters,
        stored_nbytes=2 * num_parameters,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        q_size=q_size,
        kv_size=kv_size,
        vocab_size=vocab_size,
        has_qk_norm=True,
        is_tied=is_tied,
        head_size=0 if is_tied else vocab_size * hidden_size,
        is_quantised=False,
        matrices={
            f"layers.{n}.{name}": shape
            for n in range(num_layers)
            for name, shape in linears.items()
        },
        config={},
    )


MIB: Final = 1 << 20
CPU: Final = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
MODELS: Any = AutoModelForCausalLM  # untyped
SIZES = {
    "0.6B": sizes_of(28, 1024, 3072, 2048),
    "1.7B": sizes_of(28, 2048, 6144, 2048),
    "4B": sizes_of(36, 2560, 9728, 4096),
    "8B": sizes_of(36, 4096, 12288, 4096, is_tied=False),
}
SMOLLM2 = sizes_of(30, 576, 1536, 576, 192, 49_152)
MEASURED = {"SmolLM2-135M": replace(SMOLLM2, has_qk_norm=False), **SIZES}
GRANITE = replace(SIZES["0.6B"], has_qk_norm=False, config={"logits_scaling": 4.0})


def config_of(folder: Path, **sections: Any) -> TrainerConfig:
    chosen: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "pool": {"engine": "vllm", "max_context_len": 1024, "max_num_seqs": 128},
        "rollout": {"groups_per_step": 16, "group_size": 8},
    }
    for name, section in sections.items():
        chosen[name] = {**chosen.get(name, {}), **section}
    return config_with(model_dir=folder, **chosen)


@pytest.mark.parametrize(
    ("model", "num_ranks", "checkpointing", "tokens", "allocated_gib", "peak_gib"),
    [
        # docs/runs/hybrid-vllm-8b-h200.jsonl, in two micro-batches
        ("8B", 1, "full", 8450, 91.60, 136.03),
        # docs/runs/hybrid-vllm-8b-2xh200.jsonl
        ("8B", 2, "full", 8500, 45.84, 71.69),
        # docs/runs/hybrid-vllm-h200.jsonl, in three micro-batches
        ("0.6B", 1, "auto", 11100, 6.72, 35.71),
    ],
)
def test_a_rank_needs_what_was_measured(
    tmp_path: Path,
    model: str,
    num_ranks: int,
    checkpointing: str,
    tokens: int,
    allocated_gib: float,
    peak_gib: float,
) -> None:
    train = {"activation_checkpointing": checkpointing, "max_tokens_per_micro_batch": tokens}
    config = config_of(tmp_path, train=train)

    need = rank_need(config, SIZES[model], num_ranks)

    context = rank_need(config, replace(SIZES[model], num_parameters=0), 1).sync_nbytes
    assert (need.sync_nbytes - context) / GIB == pytest.approx(allocated_gib, rel=0.02)
    peak = need.training_nbytes + need.activations_nbytes - context
    assert peak / GIB == pytest.approx(peak_gib, rel=0.1)


@pytest.mark.parametrize("model", SIZES)
def test_the_page_about_one_gpu_shows_what_is_planned(tmp_path: Path, model: str) -> None:
    def needs(**model_settings: Any) -> tuple[float, float]:
        config = config_of(
            tmp_path,
            model=model_settings,
            rollout={"groups_per_step": 32, "max_new_tokens": 1024},
            pool={"max_context_len": 2048},
            train={"activation_checkpointing": "full", "max_tokens_per_micro_batch": 8192},
        )
        rank = rank_need(config, SIZES[model], 1)
        peak = rank.training_nbytes + rank.activations_nbytes + ENGINE_ASLEEP_NBYTES
        return rank.training_nbytes / GIB, peak / GIB

    (state, peak), (_, smaller) = needs(), needs(master_dtype="bfloat16")
    _, with_lora = needs(lora={"rank": 32})

    row = f"| {model} | {state:.1f} | {peak:.1f} | {smaller:.1f} | {with_lora:.1f} |"
    assert row in (ROOT / "docs/one-gpu.md").read_text()


def test_adapters_alone_have_gradients_and_states_and_no_reference_is_kept(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rank": 16, "targets": ["q_proj", "down_proj"]}
    sizes, ranks = SIZES["0.6B"], 2
    plain = config_of(tmp_path, model={"lora": settings})
    with_kl = config_of(tmp_path, model={"lora": settings}, train={"kl_coef": 0.1})

    need = rank_need(plain, sizes, ranks)

    num_trained = 28 * 16 * ((2048 + 1024) + (1024 + 3072))
    assert trained_size(plain, sizes) == num_trained
    context = rank_need(config_of(tmp_path), replace(sizes, num_parameters=0), 1).sync_nbytes
    held = (2 * sizes.num_parameters + 12 * num_trained) // ranks
    assert need.training_nbytes - context == held + 4 * num_trained // ranks
    # Adapters, gathered by way of two buffers, are added to a weight in float32, which is cast.
    assert need.sync_nbytes - context == held + 3 * 4 * num_trained + 6 * 1024 * 3072 // ranks
    alone = config_of(tmp_path, model={"lora": settings | {"merge": False}})
    assert rank_need(alone, sizes, ranks).sync_nbytes - context == held
    assert need == rank_need(with_kl, sizes, ranks)
    whole = rank_need(config_of(tmp_path), sizes, ranks)
    assert need.activations_nbytes < whole.activations_nbytes


def test_activations_are_kept_where_they_fit(tmp_path: Path) -> None:
    save_model(tmp_path)
    own = {"engine": "echo", "engine_args": {"vocab_size": 64}}  # its memory is not planned

    def config_with(setting: str) -> TrainerConfig:
        train = {"activation_checkpointing": setting}
        return config_of(tmp_path, train=train, pool=own)

    def peak(setting: str) -> int:
        need = rank_need(config_with(setting), ModelSizes.read(tmp_path), 1)
        return need.training_nbytes + need.activations_nbytes

    def chosen(setting: str, *gpus: int) -> tuple[str, bool]:
        config, nodes = config_with(setting), [Node(gpus=("0",), num_ranks=1)]
        plan = plan_pools(config, "policy", device_type="cuda", nodes=nodes)
        memory, found = plan_job_memory(config, "policy", plan, [gpus], "cuda")
        return found.train.activation_checkpointing, memory.activations_fit

    none, full = peak("none"), peak("full")
    assert full < none
    assert chosen("auto", none) == ("none", True)
    assert chosen("auto", none - 1) == ("full", True)
    assert chosen("auto", full - 1) == ("full", False)
    assert chosen("none", none - 1) == ("none", False)
    assert chosen("full", none) == ("full", True)
    assert chosen("auto") == ("none", True), "there is no GPU whose memory is known"


def write_headers(folder: Path, sizes: ModelSizes) -> None:
    """A model directory whose weights are a hole in the file."""
    shapes: dict[str, tuple[int, ...]] = {
        f"model.{name}.weight": shape for name, shape in sizes.matrices.items()
    }
    heads = ["model.embed_tokens", *([] if sizes.is_tied else ["lm_head"])]
    shapes |= {f"{name}.weight": (sizes.vocab_size, sizes.hidden_size) for name in heads}
    if sizes.has_qk_norm:
        shapes["model.layers.0.q_norm.weight"] = (64,)
    ends = list(accumulate((2 * math.prod(shape) for shape in shapes.values()), initial=0))
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        for (name, shape), offsets in zip(shapes.items(), pairwise(ends), strict=True)
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + ends[-1])
    config = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "vocab_size": sizes.vocab_size,
        "num_attention_heads": sizes.q_size // 64,
        "num_key_value_heads": sizes.kv_size // 64,
        "head_dim": 64,
        "tie_word_embeddings": sizes.is_tied,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))


H200_GIB = 140.4
SMALL_STEP = {"groups": 32, "prompt": 80, "completion": 48}
STEP = {"groups": 32, "prompt": 128, "completion": 512}
LARGE_STEP = {"groups": 64, "prompt": 128, "completion": 256}
LONG_STEP = {"groups": 64, "prompt": 1024, "completion": 1024}


@pytest.mark.parametrize(
    ("model", "num_gpus", "gpu_gib", "engine", "step", "sleep", "wrap", "tokens", "train_gib"),
    [
        ("SmolLM2-135M", 1, H200_GIB, "vllm", SMALL_STEP, "none", "root", 32768, 21.9),
        ("0.6B", 1, H200_GIB, "vllm", STEP, "none", "root", 32768, 108.8),
        ("8B", 4, H200_GIB, "vllm", LARGE_STEP, "none", "auto", 32768, 97.2),
        ("8B", 1, H200_GIB, "vllm", LARGE_STEP, "all", "auto", 0, 142.2),  # it is warned about
        ("0.6B", 1, 24.0, "vllm", STEP, "all", "root", 32768, 20.9),
        ("0.6B", 1, H200_GIB, "vllm", STEP | {"micro_batches": 9}, "none", "root", 0, 70.5),
        # A cache beside training would be too small for the step's samples.
        ("4B", 1, H200_GIB, "vllm", LONG_STEP, "all", "auto", 32768, 91.8),
        ("4B", 1, H200_GIB, "sglang", LONG_STEP, "kv_cache", "auto", 32768, 100.3),
        ("4B", 1, 80.0, "sglang", LONG_STEP, "all", "auto", 0, 74.7),
    ],
)
def test_engines_free_the_least_that_has_room_beside_training(
    tmp_path: Path,
    model: str,
    num_gpus: int,
    gpu_gib: float,
    engine: str,
    step: dict[str, int],
    sleep: str,
    wrap: str,
    tokens: int,
    train_gib: float,
) -> None:
    write_headers(tmp_path, MEASURED[model])
    context_len = step["prompt"] + step["completion"]
    config = config_of(
        tmp_path,
        pool={"engine": engine, "max_context_len": context_len, "max_num_seqs": 256},
        rollout={"groups_per_step": step["groups"], "max_new_tokens": step["completion"]},
        train={"micro_batches": step.get("micro_batches", 0)},
    )
    nodes = [Node(gpus=tuple(map(str, range(num_gpus))), num_ranks=num_gpus)]
    plan = plan_pools(config, "policy", device_type="cuda", nodes=nodes)

    memory, settled = plan_job_memory(
        config, "policy", plan, [[int(gpu_gib * GIB)] * num_gpus], "cuda"
    )

    assert (settled.pool.sleep, settled.model.fsdp_wrap) == (sleep, wrap)
    assert settled.train.max_tokens_per_micro_batch == tokens  # 0 is 16384
    assert memory.expected_nbytes["train"][0, 0] / GIB == pytest.approx(train_gib, abs=0.1)
    assert (memory.logits_nbytes > 0) == (train_gib < 0.85 * gpu_gib)
    if sleep == "none":
        assert trains_early(settled, "policy", memory, "cuda")
        assert memory.shared_nbytes == memory.expected_nbytes["train"][0, 0] - 2816 * MIB
        samples = step["groups"] * 8 // num_gpus
        assert memory.kv_num_tokens["policy"] >= samples * context_len
        assert len(set(map(str, memory.expected_nbytes.values()))) == 1  # in all phases


def test_a_step_needs_what_is_planned_and_a_tenth_more_than_any_step_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, reserved = 0, 0

    def memory(device: torch.device) -> tuple[int, int]:
        return free, 140 * GIB

    def memory_reserved(device: torch.device) -> int:
        return reserved

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "memory_reserved", memory_reserved)
    room = TrainingRoom(torch.device("cuda", 1), 60 * GIB)

    free, reserved = 20 * GIB, 40 * GIB
    assert room.lack() == ""
    free -= 1
    assert room.lack() == (
        "cuda:1 has room for 60.0 GiB beside the engines, and training may need 60.0 GiB"
    )

    free, reserved = 5 * GIB, 60 * GIB
    assert room.lack() == ""
    room.measure()
    assert "training may need 66.0 GiB" in room.lack()
    assert TrainingRoom(CPU, 60 * GIB).lack() == ""


def test_nothing_stays_awake_without_a_plan_or_beside_a_judge(umbra_tiny_model_dir: Path) -> None:
    judge = {"judge": {"model_path": str(umbra_tiny_model_dir), "engine": "vllm"}}
    gpu = 80 * GIB
    cases: list[tuple[dict[str, Any], list[int], str]] = [
        ({}, [gpu], "none"),
        (judge, [gpu], "all"),
        ({}, [], "all"),
    ]
    for pools, size, sleep in cases:
        config = config_of(umbra_tiny_model_dir, pools=pools, pool={"max_context_len": 64})
        nodes = [Node(gpus=("0",), num_ranks=1)]
        plan = plan_pools(config, "policy", device_type="cuda", nodes=nodes)

        _, settled = plan_job_memory(config, "policy", plan, [size], "cuda")

        assert settled.pool.sleep == sleep


@pytest.mark.parametrize(
    ("given", "num_groups", "num_gpus", "num_seqs"),
    [
        ({}, 48, 1, 384),
        ({}, 65, 2, 260),
        ({}, 8, 1, 256),
        ({}, 100, 1, 512),
        ({"max_num_seqs": 100}, 48, 1, 100),
        ({"device": "cpu"}, 48, 1, 256),
        ({"engine": "sglang"}, 48, 1, 256),
    ],
)
def test_an_engine_has_all_of_its_part_of_a_step_at_a_time(
    umbra_tiny_model_dir: Path,
    given: dict[str, Any],
    num_groups: int,
    num_gpus: int,
    num_seqs: int,
) -> None:
    pool = {"mode": "standalone", "max_context_len": 64, "max_num_seqs": None, **given}
    rollout = {"groups_per_step": num_groups, "group_size": 8}
    config = config_of(umbra_tiny_model_dir, pool=pool, rollout=rollout)
    gpus = tuple(map(str, range(1 + num_gpus)))
    plan = plan_pools(config, "policy", device_type="cuda", nodes=[Node(gpus=gpus, num_ranks=1)])

    _, settled = plan_job_memory(config, "policy", plan, [[80 * GIB] * len(gpus)], "cuda")

    assert settled.pool.num_seqs == num_seqs


@pytest.mark.parametrize(
    ("engine", "mode", "is_early"),
    [
        ("vllm", "hybrid", True),
        ("embedded", "hybrid", True),
        ("sglang", "hybrid", False),  # it would have a smaller KV cache
        ("sglang", "standalone", True),
    ],
)
def test_ranks_train_while_engines_start_that_do_not_look_at_free_memory(
    umbra_tiny_model_dir: Path, engine: str, mode: str, is_early: bool
) -> None:
    pool = {"engine": engine, "mode": mode, "sleep": "none", "max_context_len": 64}
    config = config_of(umbra_tiny_model_dir, pool=pool)
    gpus = ("0",) if mode == "hybrid" else ("0", "1")

    def is_early_with(config: TrainerConfig) -> bool:
        nodes = [Node(gpus=gpus, num_ranks=1)]
        plan = plan_pools(config, "policy", device_type="cuda", nodes=nodes)
        sizes = [[80 * GIB] * len(gpus)]
        memory, settled = plan_job_memory(config, "policy", plan, sizes, "cuda")
        return trains_early(settled, "policy", memory, "cuda")

    assert is_early_with(config) == is_early
    judge = {"judge": {"model_path": str(umbra_tiny_model_dir), "engine": "vllm"}}
    if mode == "hybrid":
        assert not is_early_with(config_of(umbra_tiny_model_dir, pool=pool, pools=judge))
        own = pool | {"engine_args": {"gpu_memory_utilization": 0.3}}
        assert engine != "vllm" or not is_early_with(config_of(umbra_tiny_model_dir, pool=own))


@pytest.mark.parametrize(("offload", "kept"), [("none", 3.0), ("optimizer", 1.0), ("all", 0.0)])
def test_offloading_leaves_so_many_times_the_parameters(
    tmp_path: Path, offload: str, kept: float
) -> None:
    config = config_of(tmp_path, train={"offload": offload})

    need = rank_need(config, SIZES["8B"], 1)

    parameters = 4 * SIZES["8B"].num_parameters
    assert need.sync_nbytes - need.generation_nbytes == (3.0 - kept) * parameters


@pytest.mark.parametrize(
    ("train", "lora", "kept", "remedy"),
    [
        ({}, {}, 0.0, ""),
        ({"offload": "optimizer"}, {}, 8.0, "set train.offload = 'none'"),
        ({"offload": "all"}, {}, 12.0, "set train.offload = 'none'"),
        ({}, {"rank": 8}, 2.0, "set model.lora.merge = false"),
        ({}, {"rank": 8, "merge": False}, 0.0, ""),
    ],
)
def test_ranks_that_would_keep_more_in_host_memory_than_is_free_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: dict[str, Any],
    lora: dict[str, Any],
    kept: float,
    remedy: str,
) -> None:
    """`kept`: bytes for each parameter that is trained or has an adapter."""
    monkeypatch.setattr(ModelSizes, "read", {tmp_path: SIZES["8B"]}.get)
    config = config_of(tmp_path, train=train, model={"lora": lora})
    of_layers = sum(map(math.prod, SIZES["8B"].matrices.values()))
    needed = int(kept * (of_layers if lora else SIZES["8B"].num_parameters)) // 2

    monkeypatch.setattr(memory_needs, "free_nbytes", lambda: needed)
    assert check_host_memory(config, num_ranks=4, num_on_host=2) == needed
    monkeypatch.setattr(memory_needs, "free_nbytes", lambda: needed - 1)
    if remedy:
        with pytest.raises(ConfigError, match=f"docker's --memory\\), or {remedy}$"):
            check_host_memory(config, num_ranks=4, num_on_host=2)


def test_muon_keeps_one_number_for_each_of_a_hidden_matrix(tmp_path: Path) -> None:
    adamw, muon = (
        rank_need(config_of(tmp_path, train={"optimizer": optimizer}), SIZES["8B"], 2)
        for optimizer in ("adamw", "muon")
    )

    hidden = SIZES["8B"].num_parameters - SIZES["8B"].embedding_size
    assert adamw.training_nbytes - muon.training_nbytes == 4 * hidden // 2
    assert adamw.generation_nbytes - muon.generation_nbytes == 4 * hidden // 2


def test_moments_of_8_bits_take_two_bytes_and_their_scales(tmp_path: Path) -> None:
    adamw, small = (
        rank_need(config_of(tmp_path, train={"optimizer": optimizer}), SIZES["8B"], 2)
        for optimizer in ("adamw", "adamw_8bit")
    )

    saved = (8 - 2 - 1 / 8) * SIZES["8B"].num_parameters / 2
    assert adamw.training_nbytes - small.training_nbytes == pytest.approx(saved, abs=8)
    assert adamw.generation_nbytes - small.generation_nbytes == pytest.approx(saved, abs=8)


def test_a_moving_average_is_one_more_copy_that_goes_with_the_optimizer(tmp_path: Path) -> None:
    def need(**train: Any) -> RankNeed:
        return rank_need(config_of(tmp_path, train=train), SIZES["8B"], 2)

    average = 4 * SIZES["8B"].num_parameters // 2
    plain, averaging = need(), need(ema=0.9)
    assert averaging.training_nbytes - plain.training_nbytes == average
    assert averaging.generation_nbytes - plain.generation_nbytes == average
    away = need(ema=0.9, offload="optimizer").generation_nbytes
    assert away == need(offload="optimizer").generation_nbytes


def test_a_reference_model_is_one_more_copy_of_the_parameters_in_the_models_dtype(
    tmp_path: Path,
) -> None:
    plain, with_reference = (
        rank_need(config_of(tmp_path, train={"kl_coef": kl_coef}), SIZES["8B"], 1)
        for kl_coef in (0.0, 0.1)
    )

    more = with_reference.training_nbytes - plain.training_nbytes
    assert more == 2 * SIZES["8B"].num_parameters  # in bfloat16


def test_a_critic_takes_as_much_as_the_policy_but_no_head_or_second_gradient(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "small")
    small = ModelSizes.read(tmp_path / "small")

    def need(advantage: str, offload: str = "none", **critic: Any) -> RankNeed:
        train = {"advantage": advantage, "kl_coef": 0.1, "ema": 0.9, "offload": offload}
        return rank_need(config_of(tmp_path, train=train, critic=critic), SIZES["8B"], 2)

    parameters = 4 * (SIZES["8B"].num_parameters - 151_936 * 4096) // 2
    plain, both, own = need("grpo"), need("gae"), need("gae", path=str(tmp_path / "small"))
    assert both.training_nbytes - plain.training_nbytes == 3 * parameters  # no reference, no EMA
    assert both.generation_nbytes - plain.generation_nbytes == 3 * parameters
    assert both.activations_nbytes == plain.activations_nbytes
    assert own.sync_nbytes - plain.sync_nbytes == 3 * 4 * small.num_parameters // 2
    assert own.activations_nbytes == plain.activations_nbytes
    left = need("gae", "optimizer").generation_nbytes - need("grpo", "optimizer").generation_nbytes
    assert left == parameters


def test_a_rank_that_sends_what_has_changed_keeps_what_it_sent_at_all_times(tmp_path: Path) -> None:
    plain, keeping = (
        rank_need(config_of(tmp_path, pool={"full_sync_every": every}), SIZES["8B"], 2)
        for every in (1, 16)
    )

    kept = 2 * SIZES["8B"].num_parameters // 2  # bfloat16, over two ranks
    assert keeping.sync_nbytes - plain.sync_nbytes == kept
    assert keeping.generation_nbytes - plain.generation_nbytes == kept
    assert keeping.training_nbytes - plain.training_nbytes == kept


@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize(
    ("model", "checkpointing", "entropy_coef", "work"),
    [  # work: groups, their samples, lengths of prompts and completions
        ("SmolLM2-135M", "none", 0.0, (32, 16, 50, 48)),
        ("SmolLM2-135M", "full", 0.0, (32, 16, 50, 48)),
        ("SmolLM2-135M", "full", 0.1, (2, 8, 50, 48)),  # few logits, which are kept
        ("0.6B", "none", 0.0, (16, 8, 100, 256)),
        ("0.6B", "full", 0.0, (1, 512, 2000, 8)),  # short completions behind a long prompt
        ("0.6B", "full", 0.1, (16, 8, 100, 256)),
        ("8B", "none", 0.0, (16, 8, 100, 256)),
        ("8B", "full", 0.0, (4, 16, 900, 20)),
        ("Granite", "none", 0.0, (16, 8, 100, 256)),
        ("Granite", "full", 0.1, (16, 8, 100, 256)),
    ],
)
def test_the_plan_is_close_to_the_bytes_of_a_pass(
    tmp_path: Path,
    single_rank_mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    checkpointing: Literal["none", "full"],
    entropy_coef: float,
    work: tuple[int, int, int, int],
    keeps_logits: bool,
) -> None:
    num_groups, group_size, prompt_len, completion_len = work
    # Fake tensors have no addresses, by which attention recognises its keys.
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", storage_id)
    monkeypatch.setattr(TrainModel, "_compare", do_nothing)  # reads values
    sizes = first_layers({**MEASURED, "Granite": GRANITE}[model], 3)
    config = config_of(
        tmp_path,
        pool={"max_context_len": prompt_len + completion_len},
        rollout={
            "groups_per_step": num_groups,
            "group_size": group_size,
            "max_new_tokens": completion_len,
        },
        train={
            "max_tokens_per_micro_batch": 1 << 20,
            "activation_checkpointing": checkpointing,
            "entropy_coef": entropy_coef,
        },
    )
    micro_batch = packed_for_gpu(work, monkeypatch)

    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes(monkeypatch) as live:
        trained = train_model(sizes, single_rank_mesh, recomputes=checkpointing == "full")
        trained.keeps_logits = keeps_logits
        trained._scorer.uses_own_logits = sizes.changes_logits  # pyright: ignore[reportPrivateUsage]
        live.peak_nbytes = before_nbytes = live.nbytes
        scores = trained.score(micro_batch, "trained" if entropy_coef else "measured")
        assert scores.entropy is not None
        trained.backward((scores.logprobs + entropy_coef * scores.entropy).sum(), is_last=True)

    need = rank_need(config, sizes, 1)
    planned = need.activations_nbytes + keeps_logits * need.logits_nbytes
    assert 1.0 <= round(planned / (live.peak_nbytes - before_nbytes), 2) <= 1.3


@pytest.fixture
def single_rank_mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def first_layers(sizes: ModelSizes, num_layers: int) -> ModelSizes:
    num_parameters = sizes.embedding_size + num_layers * sizes.layer_size
    return replace(sizes, num_layers=num_layers, num_parameters=num_parameters)


def packed_for_gpu(work: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> MicroBatch:
    """Equal samples, packed for the kernel that takes sequences of any length."""
    num_groups, group_size, prompt_len, completion_len = work
    samples = [
        Sample(
            tokens=np.full(prompt_len + completion_len, group, np.int32),
            prompt_len=prompt_len,
            generated=np.arange(prompt_len, prompt_len + completion_len),
        )
        for group in range(num_groups)
        for _ in range(group_size)
    ]
    untyped: Any = packing
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_blocks", same)
        packed: Any = pack(samples, torch.bfloat16, CPU)
    prompts, completions, *_ = packed.blocks
    varlen = untyped._varlen(prompts, completions, CPU)
    num_scored = len(packed.predicting)
    return MicroBatch(
        inputs=replace(packed, varlen=varlen, blocks=()),
        targets=torch.zeros(num_scored, dtype=torch.int64),
        columns={},
        weights=torch.zeros(num_scored),
        sample_lens=torch.full((len(samples),), completion_len),
        places=np.zeros(num_scored, np.int64),
    )


def train_model(sizes: ModelSizes, mesh: DeviceMesh, *, recomputes: bool) -> TrainModel:
    """A model of these sizes with gradients of zero."""
    head_size = 64 if sizes.kv_size == 192 else 128
    config_class: Any = Qwen3Config if sizes.has_qk_norm else LlamaConfig
    if sizes.config:
        config_class = GraniteConfig
    config = config_class(
        **sizes.config,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.q_size // head_size,
        num_key_value_heads=sizes.kv_size // head_size,
        head_dim=head_size,
        tie_word_embeddings=sizes.is_tied,
    )
    register_packed_attention()
    model = MODELS.from_config(config).eval()
    model.set_attn_implementation(PACKED_ATTENTION)
    passes = PassSettings(compute_dtype=torch.bfloat16, wrap="layer", recomputes=recomputes)
    trained = TrainModel(PreparedModel(model, is_packed=True), mesh, passes, TrainSection())
    for parameter in trained.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    return trained


def do_nothing(*_: Any) -> None: ...


def same(*arguments: Any) -> Any:
    return arguments


def storage_id(storage: Any) -> int:
    return storage._cdata


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive, with the flash kernel's own: its backward pass
    has gradients of keys and values for every head of the queries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.nbytes = self.peak_nbytes = 0
        self._nbytes_of: dict[int, int] = {}
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, nbytes: int) -> None:
            resize(storage, nbytes)  # FSDP frees what it gathered
            self._note(storage)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_and_note)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func) == "torch_attn._varlen_attn_backward.default":
            _, query, key, *_ = args
            expanded = key.nbytes // key.shape[1] * query.shape[1]
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes + 2 * (key.nbytes + expanded))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, DTensor):
                leaf = leaf.to_local()
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage_id(storage), storage.nbytes()
        if key not in self._nbytes_of:
            weakref.finalize(storage, self._free, key)
        self.nbytes += nbytes - self._nbytes_of.get(key, 0)
        self._nbytes_of[key] = nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _free(self, key: int) -> None:
        self.nbytes -= self._nbytes_of.pop(key)


@pytest.mark.parametrize(
    ("settings", "num_tokens", "num_scored", "num_repeated_keys"),
    [
        # The whole batch: 2 groups of a prompt of 1000 tokens and 4 completions of 24.
        ({"groups_per_step": 2, "group_size": 4}, 2 * (1000 + 4 * 24), 8 * 24, 8 * 1000),
        # At most 15 prompts fit into 16384 tokens, with short completions.
        ({"groups_per_step": 64, "group_size": 16}, 16384, 16384, 16 * 16 * 1000),
        # A group whose prompt and completions exceed the cap is split, down to single tokens.
        ({"groups_per_step": 1, "group_size": 32768}, 16384, 16384, 15384 * 1000),
        # Completions of an agent loop may fill the context.
        ({"groups_per_step": 2, "group_size": 4, "agent": "a:b"}, 8 * 1024, 8 * 1024, 8 * 1000),
    ],
)
def test_the_plan_counts_prompts_once_for_each_short_completion(
    tmp_path: Path,
    settings: dict[str, Any],
    num_tokens: int,
    num_scored: int,
    num_repeated_keys: int,
) -> None:
    config = config_of(tmp_path, rollout={"max_new_tokens": 24, **settings})

    largest = LargestMicroBatch.of(config, 1)

    assert largest == LargestMicroBatch(num_tokens, num_scored, num_repeated_keys)


def test_a_sample_beyond_the_cap_is_planned_for(tmp_path: Path) -> None:
    config = config_of(tmp_path, train={"max_tokens_per_micro_batch": 100})

    assert LargestMicroBatch.of(config, 1).num_tokens == 1024


def test_sizes_are_those_of_the_model_in_the_folder(umbra_tiny_model_dir: Path) -> None:
    model: Any = MODELS.from_pretrained(umbra_tiny_model_dir)

    sizes = ModelSizes.read(umbra_tiny_model_dir)

    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes.embedding_size == model.get_input_embeddings().weight.numel()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert sizes.layer_size == pytest.approx(layer, rel=0.01)
    assert (sizes.q_size, sizes.kv_size, sizes.has_qk_norm) == (64, 32, True)


def test_of_a_model_with_several_parts_the_text_part_counts(
    umbra_tiny_model_dir: Path, tmp_path: Path
) -> None:
    text = json.loads((umbra_tiny_model_dir / "config.json").read_text())
    whole = {"text_config": text, "quantization_config": {}, "vision_config": {"hidden_size": 9}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "model.safetensors").symlink_to(umbra_tiny_model_dir / "model.safetensors")

    sizes, alone = ModelSizes.read(tmp_path), ModelSizes.read(umbra_tiny_model_dir)

    assert sizes == replace(alone, is_quantised=True, matrices={})


def test_a_folder_without_safetensors_has_no_sizes(
    umbra_tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((umbra_tiny_model_dir / "config.json").read_text())

    with pytest.raises(DataError, match=r"model\.safetensors"):
        ModelSizes.read(tmp_path)


def test_a_tensor_parallel_engine_has_its_share_on_each_gpu(umbra_tiny_model_dir: Path) -> None:
    whole = engine_needs(config_of(umbra_tiny_model_dir), "policy", "cuda")["policy"]
    args = {"engine_args": {"tensor_parallel_size": 2}}
    half = engine_needs(config_of(umbra_tiny_model_dir, pool=args), "policy", "cuda")["policy"]

    sizes = ModelSizes.read(umbra_tiny_model_dir)
    assert whole.weights_nbytes == 2 * sizes.num_parameters
    assert whole.kv_token_nbytes == 2 * 2 * sizes.num_layers * sizes.kv_size
    assert (half.weights_nbytes, half.kv_token_nbytes) == (
        whole.weights_nbytes // 2,
        whole.kv_token_nbytes // 2,
    )
    assert (whole.least_kv_num_tokens, whole.most_kv_num_tokens) == (1024, 128 * 1024)


@pytest.mark.parametrize("lora", [{}, {"rank": 4}, {"rank": 4, "merge": False}])
def test_staged_updates_take_what_is_sent_once_more(
    umbra_tiny_model_dir: Path, lora: dict[str, Any]
) -> None:
    pool = {"engine": "vllm", "mode": "standalone"}
    sizes = ModelSizes.read(umbra_tiny_model_dir)
    configs = [
        config_of(
            umbra_tiny_model_dir,
            model={"lora": lora},
            pool=pool | {"staged_updates": is_staged},
        )
        for is_staged in (False, True)
    ]
    plain, staged = (engine_needs(each, "policy", "cuda")["policy"] for each in configs)

    adapters_nbytes = 0 if lora.get("merge", True) else 2 * trained_size(configs[0], sizes)
    sent_nbytes = adapters_nbytes or 2 * sizes.num_parameters
    assert plain.weights_nbytes == 2 * sizes.num_parameters + adapters_nbytes
    assert staged.weights_nbytes == plain.weights_nbytes + sent_nbytes


def test_quantised_weights_count_as_they_are_stored(
    umbra_tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = json.loads((umbra_tiny_model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    (tmp_path / "model.safetensors").symlink_to(umbra_tiny_model_dir / "model.safetensors")
    judge = {"judge": {"model_path": str(tmp_path), "engine": "sglang"}}

    needs = engine_needs(config_of(umbra_tiny_model_dir, pools=judge), "policy", "cuda")

    stored = (umbra_tiny_model_dir / "model.safetensors").stat().st_size
    assert needs["judge"].weights_nbytes == stored
    assert needs["judge"].mode == "colocated"


def test_a_head_that_a_tied_model_s_files_repeat_counts_once(
    umbra_tiny_model_dir: Path, tmp_path: Path
) -> None:
    tensors = load_file(umbra_tiny_model_dir / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((umbra_tiny_model_dir / "config.json").read_text())

    assert (
        ModelSizes.read(tmp_path).num_parameters
        == ModelSizes.read(umbra_tiny_model_dir).num_parameters
    )


@pytest.mark.parametrize(
    "pool",
    [
        {"engine": "echo", "engine_args": {"vocab_size": 64}},
        {"device": "cpu"},
        {"engine_args": {"gpu_memory_utilization": 0.5}},
    ],
)
def test_engines_that_are_not_planned(umbra_tiny_model_dir: Path, pool: dict[str, Any]) -> None:
    assert engine_needs(config_of(umbra_tiny_model_dir, pool=pool), "policy", "cuda") == {}
