"""The settings of a pool that reach vLLM; vLLM itself is not needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_factory import save_adapter
from engine_runs import make_request
from weight_file import write_weight_file

from umbra.engines.vllm.vllm_engine import check_request, draw_seed
from umbra.engines.vllm.vllm_library import VllmLibrary
from umbra.engines.vllm.vllm_settings import VllmSettings
from umbra.runtime.engine_api.engine_names import kv_token_nbytes
from umbra.runtime.errors import ConfigError, DataError

KNOWN = ["model", "tensor_parallel_size", "gpu_memory_utilization", "dtype", "max_num_seqs"]
MODEL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}


def settings(folder: Path, **changes: Any) -> VllmSettings:
    (folder / "config.json").write_text(json.dumps(MODEL))
    values: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
        "max_context_len": 200,
        "kv_cache_num_tokens": None,
        "num_threads": 2,
        "load_weights": False,
        "engine_args": {},
    }
    return VllmSettings(**(values | changes))


def test_options_are_what_umbra_needs_of_vllm(tmp_path: Path) -> None:
    options = settings(tmp_path, engine_args={"tensor_parallel_size": 2}).options(
        KNOWN, is_cpu=True
    )

    assert options["model"] == str(tmp_path)
    assert options["max_model_len"] == 200
    assert options["skip_tokenizer_init"] is True
    assert options["logprobs_mode"] == "processed_logprobs"
    assert options["generation_config"] == "vllm"
    assert options["load_format"] == "dummy"
    assert options["enforce_eager"] is True
    assert options["enable_chunked_prefill"] is False
    assert options["tensor_parallel_size"] == 2


def test_vllm_is_told_of_a_head_that_the_config_ties(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": b"12", "lm_head.weight": b"13"}
    write_weight_file(tmp_path / "model.safetensors", weights)
    given = {"hf_overrides": {"rope_theta": 5.0}}
    known = [*KNOWN, "hf_overrides"]

    plain = settings(tmp_path).options(KNOWN, is_cpu=True)
    more = settings(tmp_path, engine_args=given).options(known, is_cpu=True)
    write_weight_file(tmp_path / "model.safetensors", weights | {"lm_head.weight": b"12"})
    tied = settings(tmp_path).options(KNOWN, is_cpu=True)

    assert plain["hf_overrides"] == {"tie_word_embeddings": False}
    assert more["hf_overrides"] == {"tie_word_embeddings": False, "rope_theta": 5.0}
    assert "hf_overrides" not in tied


def test_the_kv_cache_on_the_cpu_holds_whole_blocks_for_all_sequences(tmp_path: Path) -> None:
    token_nbytes = 2 * 3 * 2 * 32 * 4

    options = settings(tmp_path).options(KNOWN, is_cpu=True)
    chosen = settings(tmp_path, kv_cache_num_tokens=300).options(KNOWN, is_cpu=True)

    assert kv_token_nbytes(MODEL, 4) == token_nbytes
    assert options["kv_cache_memory_bytes"] == (4 * 256 + 128) * token_nbytes
    assert chosen["kv_cache_memory_bytes"] == (384 + 128) * token_nbytes


@pytest.mark.parametrize("change", [{"max_context_len": 1 << 40}, {"kv_cache_num_tokens": 1 << 40}])
def test_a_kv_cache_beyond_the_machine_s_memory_is_refused_before_a_start(
    tmp_path: Path, change: dict[str, int]
) -> None:
    beyond = settings(tmp_path, **change)

    with pytest.raises(ConfigError, match=r"GB of memory: lower max_context_len or kv_cache_num"):
        beyond.options(KNOWN, is_cpu=True)


def test_on_a_gpu_the_kv_cache_is_vllm_s_choice_unless_asked_for(tmp_path: Path) -> None:
    free = settings(tmp_path, device="cuda").options(KNOWN, is_cpu=False)
    chosen = settings(tmp_path, device="cuda", kv_cache_num_tokens=1).options(KNOWN, is_cpu=False)

    assert "kv_cache_memory_bytes" not in free
    assert chosen["kv_cache_memory_bytes"] > 0
    assert free["enable_sleep_mode"] is True


def test_memory_that_a_trainer_holds_is_not_asked_for_where_the_kv_cache_has_a_size(
    tmp_path: Path,
) -> None:
    chosen, own = (
        settings(tmp_path, device="cuda", kv_cache_num_tokens=1, engine_args=engine_args)
        for engine_args in ({}, {"gpu_memory_utilization": 0.5})
    )
    left_alone = settings(tmp_path, device="cuda").options(KNOWN, is_cpu=False)

    assert chosen.options(KNOWN, is_cpu=False)["gpu_memory_utilization"] <= 0.01
    assert own.options(KNOWN, is_cpu=False)["gpu_memory_utilization"] == 0.5
    assert "gpu_memory_utilization" not in left_alone


def test_the_workers_of_a_tensor_parallel_engine_share_the_kv_heads() -> None:
    whole = kv_token_nbytes(MODEL, 4)

    assert kv_token_nbytes(MODEL, 4, tensor_parallel_size=2) == whole // 2
    assert kv_token_nbytes(MODEL, 4, tensor_parallel_size=64) > 0


def test_latent_attention_has_one_vector_and_one_key_a_layer_in_every_worker() -> None:
    latent = {**MODEL, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

    num_layers = MODEL["num_hidden_layers"]
    for workers in (1, 8):
        size = kv_token_nbytes(latent, 2, tensor_parallel_size=workers)
        assert size == num_layers * (512 + 64) * 2


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("dtype", "set model.dtype instead"),
        ("max_num_seqs", "set pool.max_num_seqs instead"),
        ("logprobs_mode", "is set by umbra"),
        ("tensor_paralel_size", "did you mean tensor_parallel_size"),
        ("frobnicate", "not an option of vLLM; see vLLM's AsyncEngineArgs"),
        ("stream_interval", "is set by umbra: tokens that wait"),
        ("enable_sleep_mode", "is set by umbra: engines free their memory"),
        ("kv_transfer_config", "is set by umbra: .*another engine's weights"),
        ("kv_offloading_backend", "is set by umbra: .*another engine's weights"),
        ("device_ids", "set pool.gpus instead"),
        ("data_parallel_size", "is set by umbra: .*pool.count"),
        ("distributed_executor_backend", "is set by umbra: umbra supervises the processes"),
        ("kv_offloading_size", "is set by umbra: .*another engine's weights"),
        ("speculative_config", "is set by umbra: a draft model would keep its older weights"),
        ("spec_method", "is set by umbra: a draft model would keep its older weights"),
        ("logits_processors", "is set by umbra: .* change the distribution"),
        ("watermark_config", "is set by umbra: .* change the distribution"),
        ("pipeline_parallel_size", "is set by umbra: .*tensor_parallel_size"),
        ("worker_cls", "is set by umbra: .*vLLM's own worker"),
        ("scheduler_cls", "is set by umbra: vLLM's own"),
        ("cpu_offload_gb", "is set by umbra: an update does not reach weights"),
        ("offload_group_size", "is set by umbra: an update does not reach weights"),
        ("enable_eplb", "is set by umbra: .*before vLLM moved them"),
        ("diffusion_config", "is set by umbra: .*logprob given those before it"),
        ("enable_dbo", "is set by umbra: .*pool.count"),
        ("ubatch_size", "is set by umbra: .*pool.count"),
        ("max_num_queued_reqs", "is set by umbra: umbra bounds what an engine holds"),
        ("max_num_queued_tokens", "is set by umbra: umbra bounds what an engine holds"),
        ("disable_log_stats", "is set by umbra: .*last tokens of each request"),
        ("otlp_traces_endpoint", "is set by umbra: .*last tokens of each request"),
    ],
)
def test_an_option_that_cannot_be_passed_on_is_refused_with_a_hint(
    tmp_path: Path, option: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        settings(tmp_path, engine_args={option: 1}).options(KNOWN, is_cpu=True)


def test_experts_that_no_update_reaches_are_refused(tmp_path: Path) -> None:
    args = {"moe_backend": "flashinfer_moe_ep_cutedsl"}
    chosen = settings(tmp_path, device="cuda", engine_args=args)
    with pytest.raises(ConfigError, match=r"moe_backend = 'flashinfer_moe_ep_cutedsl'.*choose"):
        chosen.options([*KNOWN, "moe_backend"], is_cpu=False)


def test_on_the_cpu_prompts_are_not_taken_in_parts(tmp_path: Path) -> None:
    known = [*KNOWN, "enable_chunked_prefill"]
    chosen = {"engine_args": {"enable_chunked_prefill": True}}

    on_gpu = settings(tmp_path, device="cuda", **chosen).options(known, is_cpu=False)

    assert on_gpu["enable_chunked_prefill"] is True
    with pytest.raises(ConfigError, match=r"takes a prompt in parts; leave it out"):
        settings(tmp_path, **chosen).options(known, is_cpu=True)


@pytest.mark.parametrize("number", [0, -1, "two"])
def test_a_number_of_workers_that_cannot_be_is_refused(tmp_path: Path, number: object) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1 or more, got"):
        settings(tmp_path, engine_args={"tensor_parallel_size": number}).options(KNOWN, is_cpu=True)


def test_a_device_that_this_vllm_is_not_built_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="built for the CPU"):
        settings(tmp_path, device="cuda").options(KNOWN, is_cpu=True)


def test_a_dtype_that_vllm_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'float64' is not vLLM's"):
        settings(tmp_path, dtype="float64").options(KNOWN, is_cpu=True)


def test_a_model_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        settings(tmp_path, model_path="/nowhere").options(KNOWN, is_cpu=True)


def with_adapters(folder: Path, *ranks: int, **changes: Any) -> VllmSettings:
    adapters = {f"rank-{rank}": str(folder / f"rank-{rank}") for rank in ranks}
    for rank, path in zip(ranks, adapters.values(), strict=True):
        save_adapter(Path(path), seed=rank, rank=rank)
    return settings(folder, lora_adapters=adapters, **changes)


def test_there_are_slots_for_all_adapters_at_a_time(tmp_path: Path) -> None:
    given = with_adapters(tmp_path, 3, 9)
    on_cpu = given.options(KNOWN, is_cpu=True)
    on_gpu = with_adapters(tmp_path, 3, 9, device="cuda", dtype="bfloat16").options(
        KNOWN, is_cpu=False
    )

    assert on_gpu["enable_lora"] is True
    assert on_gpu["max_lora_rank"] == on_cpu["max_lora_rank"] == 16
    assert (on_gpu["max_loras"], on_gpu["max_cpu_loras"]) == (2, 2)
    assert (on_cpu["max_loras"], on_cpu["max_cpu_loras"]) == (3, 3)
    assert "enable_lora" not in settings(tmp_path).options(KNOWN, is_cpu=True)


def test_the_adapter_of_syncs_has_one_slot_over_weights_from_the_folder(tmp_path: Path) -> None:
    options = settings(tmp_path, lora_rank=9).options(KNOWN, is_cpu=True)

    assert (options["max_lora_rank"], options["max_loras"], options["max_cpu_loras"]) == (16, 1, 1)
    assert options["load_format"] == "safetensors"
    with pytest.raises(ConfigError, match="lora_rank = 9 and lora_adapters exclude each other"):
        with_adapters(tmp_path, 4, lora_rank=9)
    with pytest.raises(ConfigError, match="a LoRA adapter of a sync has rank 600"):
        settings(tmp_path, lora_rank=600).options(KNOWN, is_cpu=True)
    with pytest.raises(ConfigError, match="lora_rank must be at least 0, got -1"):
        settings(tmp_path, lora_rank=-1)


def test_adapters_that_vllm_has_no_slots_or_kernels_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'rank-600' has rank 600; vLLM's limit is 512"):
        with_adapters(tmp_path, 4, 600).options(KNOWN, is_cpu=True)
    with pytest.raises(ConfigError, match="do not support float32"):
        with_adapters(tmp_path, 4, device="cuda").options(KNOWN, is_cpu=False)
    with pytest.raises(ConfigError, match="max_loras is set by umbra on the CPU"):
        with_adapters(tmp_path, 4, engine_args={"max_loras": 2}).options(
            [*KNOWN, "max_loras"], is_cpu=True
        )
    with pytest.raises(ConfigError, match=r"set pool\.lora_adapters instead"):
        settings(tmp_path, engine_args={"enable_lora": True}).options(KNOWN, is_cpu=True)


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    check_request(make_request(1, [1], temperature=0.0))
    check_request(make_request(1, [1], temperature=0.01))
    with pytest.raises(ValueError, match=r"at least 0\.01"):
        check_request(make_request(1, [1], temperature=0.005))


def test_a_cut_trajectory_goes_on_with_draws_of_its_own() -> None:
    seeds = {draw_seed(seed, position) for seed in range(10) for position in range(10)}

    assert draw_seed(7, 0) == 7
    assert len(seeds) == 100
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_without_vllm_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(ConfigError, match=r"pip install -e '\.\[vllm\]' in your clone"):
        VllmLibrary.load()


def test_the_parts_of_an_engine_on_several_nodes_meet_at_the_leading_one(tmp_path: Path) -> None:
    made = settings(
        tmp_path,
        engine_args={"tensor_parallel_size": 8},
        followers=["policy-0.1", "policy-0.2", "policy-0.3"],
    )

    assert (made.num_parts, made.num_local_workers) == (4, 2)
    assert made.part_options(3, "10.0.0.1", 4711) == {
        "nnodes": 4,
        "node_rank": 3,
        "master_addr": "10.0.0.1",
        "master_port": 4711,
    }
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 8 is no multiple of .* 3 nodes"):
        settings(tmp_path, engine_args={"tensor_parallel_size": 8}, followers=["a", "b"])


@pytest.mark.parametrize("option", ["nnodes", "node_rank", "master_addr", "master_port"])
def test_umbra_places_an_engine_on_several_nodes(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is set by umbra: an engine is on several"):
        settings(tmp_path, engine_args={option: 2}).options([*KNOWN, option], is_cpu=True)


def test_engines_on_gpus_have_one_thread_and_no_silent_fallback(tmp_path: Path) -> None:
    on_cpu = settings(tmp_path).environment(is_cpu=True)
    on_gpu = settings(tmp_path, device="cuda").environment(is_cpu=False)

    assert (on_cpu["OMP_NUM_THREADS"], on_gpu["OMP_NUM_THREADS"]) == ("2", "1")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in on_cpu
    assert on_gpu["VLLM_USE_V2_MODEL_RUNNER"] == "1"
