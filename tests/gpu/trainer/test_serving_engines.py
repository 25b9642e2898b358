"""`umbra serve` with engines that not every machine has: vLLM, and GPUs."""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import importlib.util
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import serving
from pool_log import assert_never_both_awake
from safetensors.torch import save_file
from training_models import listed, make_model, save_model

from umbra.runtime.text.model_tokenizer import ModelTokenizer

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROMPT = "12+3="
COMPLETIONS = "/v1/completions"
SHAPE: dict[str, Any] = {
    "head_dim": 32,
    "max_position_embeddings": 1024,
}  # heads that vLLM has kernels for
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where a GPU is, vLLM is not that for the CPU"
)

on_engines = pytest.mark.parametrize(
    ("engine", "device"),
    [
        pytest.param("vllm", "cpu", marks=[needs_vllm, needs_no_gpu]),
        pytest.param("embedded", "cuda", marks=[needs_gpu, pytest.mark.gpu]),
        pytest.param("vllm", "cuda", marks=[needs_vllm, needs_gpu, pytest.mark.gpu]),
    ],
)


def eager(engine: str, device: str) -> list[str]:
    """Without what vLLM compiles and captures on a GPU, which takes longer than all else here."""
    return ["engine_args.enforce_eager=true"] * (engine == "vllm" and device == "cuda")


@on_engines
def test_answers_are_the_models_own_though_the_engine_is_killed(engine: str, device: str) -> None:
    with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as name:
        folder = Path(name)
        model_dir = save_model(folder / "tiny", **SHAPE)
        expected = greedy_text(model_dir, 20)
        settings = [f"pool.engine={engine}", f"pool.device={device}", "model.dtype=float32"]
        settings += [f"pool.{arg}" for arg in eager(engine, device)]
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        long = {"prompt": PROMPT, "max_tokens": 900, "seed": 1, "n": 8, "logprobs": 0}

        with serving(folder, model_dir, settings) as server:
            assert server.complete(**body)["choices"][0]["text"] == expected
            with server.streaming(COMPLETIONS, long) as events:
                chunks = [next(events)]
                os.kill(server.pids()["policy-0"], signal.SIGKILL)
                chunks += list(events)
            assert server.complete(**body)["choices"][0]["text"] == expected
            assert server.end() == 0

        assert chunks.pop() == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(ends) == 8
        assert set(ends) <= {"stop", "length"}
        assert "trajectories keep" in (folder / "stderr.txt").read_text(), "it was in the middle"


@on_engines
def test_a_judge_has_its_turns_on_the_policys_device(
    engine: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBRA_LOG_LEVEL", "DEBUG")
    with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as name:
        folder = Path(name)
        models = {"tiny": 0, "judge": 7}
        expected = {
            model: greedy_text(save_model(folder / model, seed=seed, **SHAPE), 20, seed)
            for model, seed in models.items()
        }
        settings = [
            f"{section}.{setting}"
            for section in ("pool", "pools.judge")
            for setting in (
                f"engine={engine}",
                f"device={device}",
                "kv_cache_num_tokens=4096",
                *eager(engine, device),
            )
        ]
        settings.append("model.dtype=float32")
        judge = [f"pools.judge.model_path={folder}/judge", "pools.judge.max_wait_s=0.2"]

        with serving(folder, folder / "tiny", [*settings, *judge]) as server:
            for model in [*models, *models]:
                body = {"model": model, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
                assert server.complete(**body)["choices"][0]["text"] == expected[model]
            assert server.end() == 0

        assert_never_both_awake(folder / "run/serve/logs/supervisor.log")


@needs_vllm
@needs_no_gpu
def test_an_adapter_of_the_policy_answers_by_its_name() -> None:
    with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as name:
        folder = Path(name)
        model_dir = save_model(folder / "tiny", **SHAPE)
        merged = make_model(seed=0, **SHAPE)
        adapter = save_q_adapter(folder / "critic", merged)
        expected = {
            "tiny": greedy_text(model_dir, 20),
            "critic": greedy_text_of(merged, model_dir, 20),
        }
        assert expected["tiny"] != expected["critic"]
        settings = [
            "pool.engine=vllm",
            "pool.device=cpu",
            "model.dtype=float32",
            f"pool.lora_adapters={{critic = '{adapter}'}}",
        ]
        with serving(folder, model_dir, settings) as server:
            for model, text in expected.items():
                answer = server.complete(model=model, prompt=PROMPT, max_tokens=20, temperature=0)
                assert answer["model"] == model
                assert answer["choices"][0]["text"] == text
            models = server.ask("/v1/models")[1]["data"]
            assert [(entry["id"], entry.get("parent")) for entry in models] == [
                ("tiny", None),
                ("critic", "tiny"),
            ]
            assert server.ask("/v1/models/critic") == (200, models[1])
            assert server.end() == 0


def save_q_adapter(folder: Path, model: Any) -> Path:
    """A LoRA adapter of all query projections, in PEFT's format; it is merged into the model."""
    folder.mkdir()
    draws = torch.Generator().manual_seed(5)
    rank, tensors = 4, dict[str, torch.Tensor]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("q_proj.weight"):
                continue
            first = torch.randn(rank, parameter.shape[1], generator=draws) * 0.3
            second = torch.randn(parameter.shape[0], rank, generator=draws) * 0.3
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second}
            parameter += second @ first
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return folder


def greedy_text(model_dir: Path, num_tokens: int, seed: int = 0) -> str:
    """The completion that transformers generates, on the CPU."""
    return greedy_text_of(make_model(seed=seed, **SHAPE), model_dir, num_tokens)


def greedy_text_of(model: Any, model_dir: Path, num_tokens: int) -> str:
    prompt = ModelTokenizer.open(model_dir).encode_prompt(PROMPT)
    with torch.no_grad():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)[0]
    return ModelTokenizer.open(model_dir).decode(listed(made)[len(prompt) :])
