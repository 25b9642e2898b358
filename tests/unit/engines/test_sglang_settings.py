"""The settings and requests that reach SGLang, and the reading of its answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_runs import make_request
from weight_file import write_weight_file

from umbra.engines.sglang import sglang_worker
from umbra.engines.sglang.sglang_library import SglangLibrary
from umbra.engines.sglang.sglang_orders import (
    ReportFile,
    pack_order,
    unpack_order,
    write_reports,
)
from umbra.engines.sglang.sglang_requests import SglangOutput, check_request, generate_fields
from umbra.engines.sglang.sglang_settings import WEIGHT_LOADER, SglangSettings
from umbra.engines.sglang.sglang_worker import obey
from umbra.runtime.engine_api.engine_names import ENGINE_AWAKE_NBYTES
from umbra.runtime.errors import ConfigError, DataError, EngineError

KNOWN = ["model_path", "tp_size", "mem_fraction_static", "attention_backend", "dtype", "dp_size"]


def settings(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> SglangSettings:
    config = {"max_position_embeddings": 512} if model is None else model
    (folder / "config.json").write_text(json.dumps(config))
    values: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "bfloat16",
        "device": "cuda",
        "max_num_seqs": 4,
        "max_context_len": 200,
        "kv_cache_num_tokens": None,
        "num_threads": 2,
        "load_weights": False,
        "engine_args": {},
    }
    return SglangSettings(**(values | changes))


def chunk(entries: list[Any], reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"meta_info": {"output_token_logprobs": entries, "finish_reason": reason}}


def test_options_are_what_umbra_needs_of_sglang(tmp_path: Path) -> None:
    engine_args = {"tp_size": 2, "log_level": "info", "json_model_override_args": '{"a": 1}'}

    options = settings(tmp_path, engine_args=engine_args).options(
        [*KNOWN, "log_level", "json_model_override_args"]
    )

    assert options["model_path"] == str(tmp_path)
    assert options["context_length"] >= 202  # it ends requests two tokens early
    assert options["max_running_requests"] == 4
    assert options["skip_tokenizer_init"] is True
    assert options["load_format"] == "dummy"
    assert options["custom_weight_loader"] == [WEIGHT_LOADER]
    assert options["enable_memory_saver"] is True
    assert options["watchdog_timeout"] > 1e7  # seconds, which requests may be frozen for
    assert options["tp_size"] == 2
    assert options["log_level"] == "info"
    assert json.loads(options["json_model_override_args"]) == {"a": 1, "eos_token_id": None}
    assert "max_total_tokens" not in options
    assert json.loads(json.dumps(options)) == options  # to followers


def test_sglang_is_told_of_a_head_that_the_config_ties(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": b"12", "lm_head.weight": b"13"}
    write_weight_file(tmp_path / "model.safetensors", weights)

    options = settings(tmp_path).options(KNOWN)

    overrides = json.loads(options["json_model_override_args"])
    assert overrides == {"eos_token_id": None, "tie_word_embeddings": False}
    with pytest.raises(ConfigError, match=r"set tie_word_embeddings to false there, for SGLang"):
        settings(tmp_path, {"text_config": {"max_position_embeddings": 512}}).options(KNOWN)


def test_the_adapter_of_syncs_goes_over_weights_from_the_folder(tmp_path: Path) -> None:
    known = [*KNOWN, "lora_target_modules"]
    options = settings(tmp_path, lora_rank=16).options(known)
    chosen = settings(tmp_path, lora_rank=16, engine_args={"lora_target_modules": ["all"]})

    assert options["load_format"] == "safetensors"
    assert (options["enable_lora"], options["max_lora_rank"]) == (True, 16)
    assert {"q_proj", "down_proj"} < set(options["lora_target_modules"])
    assert chosen.options(known)["lora_target_modules"] == ["all"]


def test_cached_prefixes_are_looked_for_by_their_salts_whatever_the_user_has_set(
    tmp_path: Path,
) -> None:
    assert settings(tmp_path).environment()["SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"] == "0"


def test_logits_of_a_teachers_prompt_stay_within_what_is_planned_for_an_engine(
    tmp_path: Path,
) -> None:
    variables = settings(tmp_path).environment()

    for name in ("LOGPROB", "LOGITS_PROCESSER"):  # as 0.5.23 reads, and older ones
        assert variables[f"SGLANG_ENABLE_{name}_CHUNK"] == "1"
        num_tokens, vocab_size = int(variables[f"SGLANG_{name}_CHUNK_SIZE"]), 152_064
        float32_nbytes = 2 * 4 * num_tokens * vocab_size  # logits and log-probabilities
        assert float32_nbytes < ENGINE_AWAKE_NBYTES


def test_a_chosen_kv_cache_includes_what_sglang_keeps_free(tmp_path: Path) -> None:
    options = settings(tmp_path, kv_cache_num_tokens=1000).options(KNOWN)

    assert 1000 < options["max_total_tokens"] < 1500


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("dtype", "set model.dtype instead"),
        ("max_total_tokens", "set pool.kv_cache_num_tokens instead"),
        ("base_gpu_id", "set pool.gpus instead"),
        ("dp_size", "is set by umbra: .*pool.count"),
        ("enable_dp_attention", "is set by umbra: .*by tcp"),
        ("attn_dp_size", "is set by umbra: .*by tcp"),
        ("dist_init_addr", "is set by umbra: an engine is on several nodes if"),
        ("node_rank", "is set by umbra: an engine is on several nodes if"),
        ("mem_fraction_statik", "did you mean mem_fraction_static"),
        ("frobnicate", "not an option of SGLang; see SGLang's ServerArgs"),
        ("enable_lmcache", "is set by umbra: .*by the tokens alone"),
        ("enable_flexkv", "is set by umbra: .*by the tokens alone"),
        ("hicache_storage_backend", "is set by umbra: .*by the tokens alone"),
        ("radix_cache_backend", "is set by umbra: .*by the tokens alone"),
        ("enable_unified_cache_external_linker", "is set by umbra: .*by the tokens alone"),
        ("enable_watermark", "is set by umbra: logprobs"),
        ("weight_cache_mode", "is set by umbra: .*that other engines share"),
    ],
)
def test_an_option_that_cannot_be_passed_on_is_refused_with_a_hint(
    tmp_path: Path, option: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        settings(tmp_path, engine_args={option: 1}).options(KNOWN)


@pytest.mark.parametrize(
    ("address", "meeting_point"),
    [("10.0.0.1", "10.0.0.1:4711"), ("fd00::1", "[fd00::1]:4711")],
)
def test_the_parts_of_an_engine_on_several_nodes_meet_at_the_leading_one(
    tmp_path: Path, address: str, meeting_point: str
) -> None:
    made = settings(tmp_path, engine_args={"tp_size": 8}, followers=["policy-0.1"])

    assert (made.num_parts, made.num_local_workers) == (2, 4)
    assert made.part_options(1, address, 4711) == {
        "nnodes": 2,
        "node_rank": 1,
        "dist_init_addr": meeting_point,
    }
    with pytest.raises(ConfigError, match=r"tp_size 8 is no multiple of .* 3 nodes"):
        settings(tmp_path, engine_args={"tp_size": 8}, followers=["a", "b"])


@pytest.mark.parametrize(("value", "text"), [("{", "is not JSON"), ("[1]", "not a JSON object")])
def test_overrides_of_the_model_that_are_no_object_are_refused(
    tmp_path: Path, value: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        settings(tmp_path, engine_args={"json_model_override_args": value}).options(
            [*KNOWN, "json_model_override_args"]
        )


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "cuda0"])
def test_a_device_without_a_gpu_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="need a GPU"):
        settings(tmp_path, device=device).options(KNOWN)


def test_a_context_longer_than_the_model_s_is_refused_but_where_it_is_stretched(
    tmp_path: Path,
) -> None:
    plain = {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match="max_context_len=600 exceeds"):
        settings(tmp_path, plain, max_context_len=600).options(KNOWN)
    stretched = {"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    settings(tmp_path, stretched, max_context_len=600).options(KNOWN)


def test_a_dtype_that_sglang_lacks_and_a_missing_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'float64' is not SGLang's"):
        settings(tmp_path, dtype="float64").options(KNOWN)
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        settings(tmp_path, model_path="/nowhere").options(KNOWN)


def test_a_request_asks_for_the_distribution_as_it_is_and_explicit_stops() -> None:
    request = make_request(7, [1, 2], temperature=0.7, stop_token_ids=[5], seed=11)

    fields = generate_fields(request, "000-7", "weights-3", 1)

    params = fields["sampling_params"]
    assert fields["rid"] == "000-7"
    assert fields["input_ids"] == [1, 2]
    assert fields["extra_key"] == "weights-3"
    assert fields["return_logprob"] is True
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 1.0, -1)
    assert params["stop_token_ids"] == [5]
    assert params["ignore_eos"] is False  # which would switch off the stop tokens, too
    assert params["sampling_seed"] == 11
    free = generate_fields(make_request(7, [1]), "000-7", "weights-3", 1)
    assert free["sampling_params"]["ignore_eos"] is True
    some = generate_fields(make_request(7, [1], top_p=0.9, top_k=5), "000-7", "weights-3", 1)
    assert (some["sampling_params"]["top_p"], some["sampling_params"]["top_k"]) == (0.9, 5)


def test_stop_tokens_that_the_request_does_not_name_are_refused() -> None:
    check_request(make_request(1, [1], stop_token_ids=[3, 4]), {3})
    check_request(make_request(1, [1], stop_token_ids=[]), {3})
    with pytest.raises(ValueError, match=r"end-of-text tokens \[9\]"):
        check_request(make_request(1, [1], stop_token_ids=[3]), {3, 9})


def test_an_output_gives_what_has_come_since_it_was_last_asked() -> None:
    output, entries = SglangOutput(), [(-0.5, 11, None)]
    assert output.take() is None

    output.feed(chunk(entries))
    first = output.take()
    entries += [(-0.25, 12, None), (-1.0, 13, None)]  # as the frontend does
    second = output.take()
    output.feed(chunk(entries, {"type": "length", "length": 3}))
    last = output.take()

    assert first is not None
    assert second is not None
    assert last is not None
    assert (first.tokens, first.logprobs, first.finish_reason) == ([11], [-0.5], None)
    assert (second.tokens, second.logprobs, second.num_older) == ([12, 13], [-0.25, -1.0], 0)
    assert (last.tokens, last.finish_reason) == ([], "length")
    assert output.take() is None


def test_what_comes_after_an_output_was_ended_here_is_of_no_interest() -> None:
    output, entries = SglangOutput(), [(-0.5, 11, None)]
    output.feed(chunk(entries))

    output.end("abort")
    entries.append((-0.25, 12, None))
    output.feed(chunk(entries, {"type": "abort", "message": "Aborted", "status_code": None}))

    ended = output.take()
    assert ended is not None
    assert (ended.tokens, ended.finish_reason) == ([11], "abort")
    assert output.take() is None


def test_the_first_token_after_new_weights_may_be_of_the_older_ones() -> None:
    output, entries = SglangOutput(), [(-0.5, 11, None)]
    output.feed(chunk(entries))
    output.take()

    output.expect_older()
    entries += [(-0.25, 12, None), (-1.0, 13, None)]

    new = output.take()
    assert new is not None
    assert (new.tokens, new.num_older) == ([12, 13], 1)
    entries.append((-1.0, 14, None))
    later = output.take()
    assert later is not None
    assert later.num_older == 0


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ({"type": "stop", "matched": 5}, "stop"),
        ({"type": "length", "length": 3}, "length"),
        ({"type": "abort", "message": "Aborted", "status_code": None}, "abort"),
        ({"type": "abort", "message": "no room", "status_code": 503}, "no room"),
        ({"type": "stop", "matched": "NaN happened"}, "NaN happened"),
    ],
)
def test_finish_reasons_are_umbra_s_or_describe_what_went_wrong(
    reason: dict[str, Any], word: str
) -> None:
    output = SglangOutput()

    output.feed(chunk([], reason))

    ended = output.take()
    assert ended is not None
    assert ended.finish_reason == word


def test_an_order_and_its_report_come_as_they_were_sent() -> None:
    manifest = {"entries": [["a.weight", "bfloat16", [2, 3], 0]], "handle": b"\x00\xff"}
    order = {"action": "load", "path": "/proc/1/fd/3", "nbytes": 1 << 40, "manifest": manifest}

    assert unpack_order(pack_order(order)) == order
    with ReportFile() as file:
        with pytest.raises(EngineError, match="wrote no reports"):
            file.read()
        write_reports(file.address, [{"unread": ["a"]}, {"error": "no"}])
        assert file.read() == [{"unread": ["a"]}, {"error": "no"}]


def test_a_report_that_nobody_waits_for_goes_nowhere_and_does_not_end_sglang(
    tmp_path: Path,
) -> None:
    with ReportFile() as file:
        order = {"action": "settle", "report": file.address}
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)  # gets the same descriptor
    try:
        assert order["report"][0] == f"/proc/{os.getpid()}/fd/{other}"

        obey(torch.nn.Linear(1, 1), [(pack_order(order), torch.empty(0))])

        assert (tmp_path / "other").read_bytes() == b""
    finally:
        os.close(other)


def test_sglang_unmaps_memory_only_when_the_gpu_has_nothing_to_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    def unmap(tag: str | None = None) -> None:
        happened.append(f"unmap {tag}")

    saver = SimpleNamespace(pause=unmap)
    module = SimpleNamespace(torch_memory_saver=saver)
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    monkeypatch.setattr(sglang_worker, "_synchronize", lambda: happened.append("wait"))

    sglang_worker._wait_before_pauses()  # pyright: ignore[reportPrivateUsage]
    for tag in ("kv_cache", "weights"):
        saver.pause(tag=tag)

    assert happened == ["wait", "unmap kv_cache", "wait", "unmap weights"]


def test_without_sglang_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)

    with pytest.raises(ConfigError, match="needs SGLang, which is not installed here"):
        SglangLibrary.load()
