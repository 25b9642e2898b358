"""Estimates of GPU memory beside what was measured, and beside what torch keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from minimal_config import config_with
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch.profiler import ProfilerActivity, profile
from training_models import save_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from umbra.runtime.cluster.memory_plan import GIB
from umbra.runtime.cluster.placement import Node
from umbra.runtime.engine_api.engine_names import ENGINE_ASLEEP_NBYTES
from umbra.runtime.errors import DataError
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.packing import PackedInputs, Sample, pack
from umbra.trainer.model.train_model import (
    PassSettings,
    _Scorer,  # pyright: ignore[reportPrivateUsage]
)
from umbra.trainer.services.memory_needs import (
    LargestMicroBatch,
    ModelSizes,
    engine_needs,
    layer_nbytes,
    plan_job_memory,
    rank_need,
)
from umbra.trainer.services.pool_placement import plan_pools


def sizes_of(
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    q_size: int,
    kv_size: int,
    vocab_size: int = 151_936,
    is_tied: bool = True,
) -> ModelSizes:
    """Of a Qwen3 model."""
    layer = hidden_size * (2 * (q_size + kv_size) + 3 * intermediate_size + 2)
    embedding = vocab_size * hidden_size * (1 if is_tied else 2)
    num_parameters = num_layers * layer + embedding
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
        is_quantised=False,
        config={},
    )


ROOT = Path(__file__).resolve().parents[3]
MODELS: Any = AutoModelForCausalLM  # untyped
SIZES = {
    "0.6B": sizes_of(
        num_layers=28, hidden_size=1024, intermediate_size=3072, q_size=2048, kv_size=1024
    ),
    "1.7B": sizes_of(
        num_layers=28, hidden_size=2048, intermediate_size=6144, q_size=2048, kv_size=1024
    ),
    "4B": sizes_of(
        num_layers=36, hidden_size=2560, intermediate_size=9728, q_size=4096, kv_size=1024
    ),
    "8B": sizes_of(
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        q_size=4096,
        kv_size=1024,
        is_tied=False,
    ),
}


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
    ("model", "num_ranks", "train", "allocated_gib", "peak_gib"),
    [
        # docs/runs/hybrid-vllm-8b-h200.jsonl, in two micro-batches
        (
            "8B",
            1,
            {"activation_checkpointing": "full", "max_tokens_per_micro_batch": 8450},
            91.60,
            136.03,
        ),
        # docs/runs/hybrid-vllm-8b-2xh200.jsonl
        (
            "8B",
            2,
            {"activation_checkpointing": "full", "max_tokens_per_micro_batch": 8500},
            45.84,
            71.69,
        ),
        # docs/runs/hybrid-vllm-h200.jsonl, in three micro-batches
        ("0.6B", 1, {"max_tokens_per_micro_batch": 11100}, 6.72, 35.71),
    ],
)
def test_a_rank_needs_what_was_measured(
    tmp_path: Path,
    model: str,
    num_ranks: int,
    train: dict[str, Any],
    allocated_gib: float,
    peak_gib: float,
) -> None:
    config = config_of(tmp_path, train=train)

    need = rank_need(config, SIZES[model], num_ranks)

    context = rank_need(config, replace(SIZES[model], num_parameters=0), 1).sync_nbytes
    assert (need.sync_nbytes - context) / GIB == pytest.approx(allocated_gib, rel=0.02)
    peak = need.training_nbytes + need.activations_nbytes - context
    assert peak / GIB == pytest.approx(peak_gib, rel=0.1)


@pytest.mark.parametrize("model", SIZES)
def test_the_page_about_one_gpu_shows_what_is_planned(tmp_path: Path, model: str) -> None:
    def needs(master_dtype: str) -> tuple[float, float]:
        config = config_of(
            tmp_path,
            model={"master_dtype": master_dtype},
            rollout={"groups_per_step": 32, "max_new_tokens": 1024},
            pool={"max_context_len": 2048},
            train={"activation_checkpointing": "full", "max_tokens_per_micro_batch": 8192},
        )
        rank = rank_need(config, SIZES[model], 1)
        peak = rank.training_nbytes + rank.activations_nbytes + ENGINE_ASLEEP_NBYTES
        return rank.training_nbytes / GIB, peak / GIB

    (state, peak), (_, smaller) = needs("float32"), needs("bfloat16")

    row = f"| {model} | {state:.1f} | {peak:.1f} | {smaller:.1f} |"
    assert row in (ROOT / "docs/one-gpu.md").read_text()


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
        return found, memory.activations_fit

    none, full = peak("none"), peak("full")
    assert full < none
    assert chosen("auto", none) == ("none", True)
    assert chosen("auto", none - 1) == ("full", True)
    assert chosen("auto", full - 1) == ("full", False)
    assert chosen("none", none - 1) == ("none", False)
    assert chosen("full", none) == ("full", True)
    assert chosen("auto") == ("none", True), "there is no GPU whose memory is known"


@pytest.mark.parametrize(("offload", "kept"), [("none", 3.0), ("optimizer", 1.0), ("all", 0.0)])
def test_offloading_leaves_so_many_times_the_parameters(
    tmp_path: Path, offload: str, kept: float
) -> None:
    config = config_of(tmp_path, train={"offload": offload})

    need = rank_need(config, SIZES["8B"], 1)

    parameters = 4 * SIZES["8B"].num_parameters
    assert need.sync_nbytes - need.generation_nbytes == (3.0 - kept) * parameters


def test_a_reference_model_is_one_more_copy_of_the_parameters(tmp_path: Path) -> None:
    plain, with_reference = (
        rank_need(config_of(tmp_path, train={"kl_coef": kl_coef}), SIZES["8B"], 1)
        for kl_coef in (0.0, 0.1)
    )

    more = with_reference.training_nbytes - plain.training_nbytes
    assert more == 4 * SIZES["8B"].num_parameters


def test_a_rank_that_sends_what_has_changed_keeps_what_it_sent_at_all_times(tmp_path: Path) -> None:
    plain, keeping = (
        rank_need(config_of(tmp_path, pool={"full_sync_every": every}), SIZES["8B"], 2)
        for every in (1, 16)
    )

    kept = 2 * SIZES["8B"].num_parameters // 2  # bfloat16, over two ranks
    assert keeping.sync_nbytes - plain.sync_nbytes == kept
    assert keeping.generation_nbytes - plain.generation_nbytes == kept
    assert keeping.training_nbytes - plain.training_nbytes == kept


@pytest.mark.parametrize("config_class", [Qwen3Config, LlamaConfig])
def test_a_layer_keeps_what_torch_saves_for_its_backward_pass(config_class: Any) -> None:
    shape = {
        "vocab_size": 16,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    num_tokens = 64

    one, two = (
        saved_nbytes(config_class(**shape, num_hidden_layers=num_layers), num_tokens)
        for num_layers in (1, 2)
    )

    sizes = sizes_of(num_layers=2, hidden_size=256, intermediate_size=640, q_size=512, kv_size=128)
    sizes = replace(sizes, has_qk_norm=config_class is Qwen3Config)
    assert layer_nbytes(sizes, 2) == pytest.approx((two - one) / num_tokens, rel=0.01)


def test_a_prompts_keys_are_kept_once_for_all_of_its_completions() -> None:
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 640}
    prompt, num_completions = list(range(60)) * 2, 16
    samples = [
        Sample(
            tokens=np.asarray([*prompt, *[idx] * 17], np.int32),
            prompt_len=len(prompt),
            generated=np.arange(len(prompt), len(prompt) + 17),
        )
        for idx in range(num_completions)
    ]
    packed = pack(samples, torch.bfloat16, torch.device("cpu"))

    one, two = (
        packed_nbytes(
            LlamaConfig(**shape, num_attention_heads=8, num_hidden_layers=num_layers), packed
        )
        for num_layers in (1, 2)
    )

    sizes = sizes_of(num_layers=2, hidden_size=256, intermediate_size=640, q_size=256, kv_size=256)
    planned = layer_nbytes(replace(sizes, has_qk_norm=False), 2) * packed.token_ids.shape[1]
    assert two - one == pytest.approx(planned, rel=0.06)
    assert num_completions * len(prompt) * 2 * 2 * 256 > 0.4 * planned, "what is not kept"


def packed_nbytes(config: Any, packed: PackedInputs) -> int:
    """Bytes that a decoder's forward pass in bfloat16 leaves allocated."""
    register_packed_attention()
    model: Any = MODELS.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(PACKED_ATTENTION)
    scorer = _Scorer(model, PassSettings(compute_dtype=torch.bfloat16))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocations:
        hidden = scorer._hidden(packed)  # pyright: ignore[reportPrivateUsage]
    assert hidden.requires_grad
    events: Any = allocations.key_averages()
    return sum(event.self_cpu_memory_usage for event in events)


@pytest.mark.parametrize(
    ("settings", "num_tokens", "num_repeated_keys"),
    [
        # The whole batch: 2 groups of a prompt of 1000 tokens and 4 completions of 24.
        ({"groups_per_step": 2, "group_size": 4}, 2 * (1000 + 4 * 24), 8 * 1000),
        # At most 15 prompts fit into 16384 tokens, with short completions.
        ({"groups_per_step": 64, "group_size": 16}, 16384, 16 * 16 * 1000),
        # A group whose prompt and completions exceed the cap is split, down to single tokens.
        ({"groups_per_step": 1, "group_size": 32768}, 16384, 15384 * 1000),
        # Completions of an agent loop may fill the context.
        ({"groups_per_step": 2, "group_size": 4, "agent": "a:b"}, 8 * 1024, 8 * 1000),
    ],
)
def test_the_plan_counts_prompts_once_for_each_short_completion(
    tmp_path: Path, settings: dict[str, Any], num_tokens: int, num_repeated_keys: int
) -> None:
    config = config_of(tmp_path, rollout={"max_new_tokens": 24, **settings})

    largest = LargestMicroBatch.of(config, 1)

    assert largest == LargestMicroBatch(num_tokens, num_repeated_keys)
    without = rank_need(config, replace(SIZES["8B"], kv_size=0), 1).activations_nbytes
    own = 36 * (2 * 2 + 6) * 1024 * num_tokens  # those of the rows, with their norm
    repeated = rank_need(config, SIZES["8B"], 1).activations_nbytes - without - own
    assert repeated == 3 * 2 * 2 * 1024 * num_repeated_keys


def test_a_sample_beyond_the_cap_is_planned_for(tmp_path: Path) -> None:
    config = config_of(tmp_path, train={"max_tokens_per_micro_batch": 100})

    assert LargestMicroBatch.of(config, 1).num_tokens == 1024


def saved_nbytes(config: Any, num_tokens: int) -> int:
    """Bytes that a decoder in bfloat16 saves for its backward pass, parameters apart."""
    model: Any = MODELS.from_config(config, dtype=torch.bfloat16).eval()
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is used twice
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


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

    assert sizes == replace(alone, is_quantised=True)


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


def test_staged_updates_take_the_weights_once_more(umbra_tiny_model_dir: Path) -> None:
    pool = {"engine": "vllm", "mode": "standalone"}
    plain, staged = (
        engine_needs(
            config_of(umbra_tiny_model_dir, pool=pool | {"staged_updates": is_staged}),
            "policy",
            "cuda",
        )["policy"]
        for is_staged in (False, True)
    )

    assert staged.weights_nbytes == 2 * plain.weights_nbytes


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
