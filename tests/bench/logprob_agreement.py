"""An engine's logprobs beside the trainer's own, of the same tokens under the same weights.

The engine generates, once it is up, at one temperature after the other; the trainer's policy scores
the tokens as in a training step (packed attention, weights in float32, computation in `--dtype`).
The yardstick is transformers' own attention in float32. All have the weights rounded to `--dtype`,
so that what differs is arithmetic. One line of JSON for each temperature, as soon as it is known;
of the three pairs, over all tokens:

- `mean`, `max` of the absolute difference, `above_0.01`, `above_0.1` the share of tokens beyond it
- `kl` the mean of exp(d) - 1 - d, for engine_trainer what training logs as `train/behaviour_kl`

    python tests/bench/logprob_agreement.py --engine embedded --dtype bfloat16
    .venv-vllm/bin/python tests/bench/logprob_agreement.py --engine vllm --dtype bfloat16
    python tests/bench/logprob_agreement.py --engine sglang --dtype bfloat16 --model FOLDER

`--kind phi3` is a small random model of this type of transformers'. `--data FILE`, with `--model`,
takes prompts from a data set of chats; without it prompts are random tokens.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import asyncio
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "shared"))  # whole_model is there

import numpy as np
import torch
import torch.distributed as dist
from qwen3_shapes import QWEN3_0_6B
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from whole_model import load_whole_model

from umbra.runtime.actor.actor_target import load_target
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.engine_api.kept_tokens import Truncation
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.algorithms.kl_estimators import kl_terms
from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.model.micro_batches import MicroBatchBuilder, RankBatch
from umbra.trainer.model.model_loading import prepare_causal_lm
from umbra.trainer.model.policy import Policy

PROMPT_LEN = 32
GROUP_SIZE = 8
MICRO_BATCH_TOKENS = 8192
START_LIMIT_S = 600.0
# Of a Qwen3-0.6B, with weights so large that logits are far from uniform.
LARGE: dict[str, Any] = QWEN3_0_6B | {
    "initializer_range": 0.05,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# Of any type, wide enough for GPU kernels, and with logits far from uniform.
SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_model(folder: Path, kind: str, dtype: torch.dtype) -> None:
    if kind == "qwen3-0.6b":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**LARGE, bos_token_id=None, eos_token_id=None))
    elif kind in CONFIG_MAPPING:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL))
    else:
        factory = Path(__file__).parents[1] / "shared/engines/model_factory.py"
        model = runpy.run_path(str(factory))["make_model"](kind)
    model.to(dtype).save_pretrained(folder)


class Scorer:
    """The trainer's side: one rank, without an optimizer."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, mesh: DeviceMesh, truncation: Truncation
    ) -> None:
        prepared = prepare_causal_lm(ModelSection(path=folder), torch.float32)
        self.trainer = Policy(
            prepared.model,
            mesh,
            is_packed=prepared.is_packed,
            compute_dtype=dtype,
            truncation=truncation,
            weights=prepared.weights,
        )
        model, _ = load_whole_model(ModelSection(path=folder, attention="padded"), dtype)
        self.yardstick = Policy(
            model.float(),
            mesh,
            is_packed=False,
            compute_dtype=torch.float32,
            truncation=truncation,
        )
        self._device = torch.device(mesh.device_type)

    def score(self, policy: Policy, batch: RankBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs of the policy and of the engine: [M] each, the same tokens in the same order."""
        policy._temperature = temperature
        builder = MicroBatchBuilder(
            packed=policy.is_packed,
            dtype=policy.compute_dtype,
            device=self._device,
            aggregation="token",
            max_new_tokens=1,
        )
        pairs = [
            (policy.reference_logprobs(micro_batch), micro_batch.rollout_logprobs)
            for micro_batch in builder.build(batch)
        ]
        scored, given = zip(*pairs, strict=True)
        return torch.cat(scored).double().cpu(), torch.cat(given).double().cpu()


def make_requests(vocab_size: int, temperature: float, given: argparse.Namespace) -> list[Any]:
    """In groups of one prompt each."""
    rng = np.random.default_rng(0)
    count = -(-given.sequences // GROUP_SIZE)
    prompts: list[Any] = list(rng.integers(0, vocab_size, (count, PROMPT_LEN)))
    stops: list[int] = []
    if given.data:
        tokenizer = ModelTokenizer.open(given.model)
        stops = tokenizer.stop_token_ids()
        rows = [json.loads(line) for line in given.data.read_text().splitlines()[:count]]
        prompts = [tokenizer.encode_chat(row["messages"]) for row in rows]
    return [
        {
            "id": i,
            "tokens": np.asarray(prompts[i // GROUP_SIZE], np.int32),
            "position": 0,
            "seed": i,
            "max_new_tokens": given.new_tokens,
            "temperature": temperature,
            "stop_token_ids": stops,
            "top_p": given.top_p,
            "top_k": given.top_k,
        }
        for i in range(given.sequences)
    ]


async def generate(engine: Any, requests: Sequence[Mapping[str, Any]]) -> RankBatch:
    """The batch that the manager hands to a rank."""
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    num_finished = 0
    async with aclosing(engine.deltas()) as batches:
        await engine.submit(requests)
        while num_finished < len(requests):
            delta = await anext(batches)
            bounds = delta["offsets"].tolist()
            for run, idx in enumerate(delta["ids"].tolist()):
                tokens[idx] += delta["tokens"][bounds[run] : bounds[run + 1]].tolist()
                logprobs[idx] += delta["logprobs"][bounds[run] : bounds[run + 1]].tolist()
            num_finished += len(delta["finished_ids"])
    return _as_batch([request["tokens"] for request in requests], tokens, logprobs)


def _as_batch(
    prompts: Sequence[Any], tokens: Sequence[list[int]], logprobs: Sequence[list[float]]
) -> RankBatch:
    count = len(prompts)
    lens = [len(prompt) + len(new) for prompt, new in zip(prompts, tokens, strict=True)]
    size = max(1, MICRO_BATCH_TOKENS // max(lens))
    return RankBatch(
        tokens=np.concatenate(
            [np.append(p, np.array(t, np.int32)) for p, t in zip(prompts, tokens, strict=True)]
        ),
        offsets=np.cumsum([0, *lens]).astype(np.int32),
        prompt_lens=np.asarray([len(p) for p in prompts], np.int32),
        mask=np.concatenate(
            [np.repeat([0, 1], [len(p), len(t)]) for p, t in zip(prompts, tokens, strict=True)]
        ).astype(np.uint8),
        logprobs=np.concatenate(
            [np.append(np.zeros(len(p)), lp) for p, lp in zip(prompts, logprobs, strict=True)]
        ).astype(np.float32),
        versions=np.ones(sum(lens), np.int64),
        advantages=np.ones(count, np.float32),
        sample_ids=[str(idx) for idx in range(count)],
        micro_batches=[
            list(range(first, min(first + size, count))) for first in range(0, count, size)
        ],
        num_tokens_global=sum(map(len, tokens)),
        num_samples_global=count,
        metrics={},
    )


def compare(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Of tokens that were sampled from `theirs`, or as if they had been."""
    away = (ours - theirs).abs()
    numbers = {
        "mean": away.mean(),
        "max": away.max(),
        "kl": kl_terms(theirs, ours, "k3").mean(),
        "above_0.01": (away > 0.01).double().mean(),
        "above_0.1": (away > 0.1).double().mean(),
    }
    return {name: float(f"{float(value):.3g}") for name, value in numbers.items()}


def measure(scorer: Scorer, batch: RankBatch, temperature: float) -> dict[str, Any]:
    trainer, engine = scorer.score(scorer.trainer, batch, temperature)
    exact, _ = scorer.score(scorer.yardstick, batch, temperature)
    return {
        "num_tokens": len(engine),
        "mean_logprob": round(float(engine.mean()), 3),
        "engine_trainer": compare(trainer, engine),
        "engine_float32": compare(exact, engine),
        "trainer_float32": compare(exact, trainer),
    }


def facts(given: argparse.Namespace) -> dict[str, Any]:
    libraries = {name: version(name) for name in ("torch", "transformers")}
    if given.engine != "embedded":
        # vLLM's distribution has another name on a CPU.
        libraries[given.engine] = import_module(given.engine).__version__
    return {
        "engine": given.engine,
        "dtype": given.dtype,
        "model": str(given.model or given.kind),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "CPU",
        **libraries,
    }


async def run(folder: Path, given: argparse.Namespace) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    context_len = (256 if given.data else PROMPT_LEN) + given.new_tokens
    options: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": given.dtype,
        "device": given.device,
        "max_num_seqs": given.sequences,
        "max_context_len": context_len,
        "kv_cache_num_tokens": given.sequences * context_len,
        "load_weights": True,
    }
    if given.engine != "embedded":
        options["engine_args"] = given.engine_args
    began = time.perf_counter()
    engine = load_target(engine_target(given.engine))(**options)
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(START_LIMIT_S):
            await stack.enter_async_context(engine)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = tasks.create_task(engine.run())
        row = facts(given)
        start_s = time.perf_counter() - began
        mesh, truncation = (
            init_device_mesh(given.device, (1,)),
            Truncation(given.top_p, given.top_k),
        )
        scorer = Scorer(folder, getattr(torch, given.dtype), mesh, truncation)
        for temperature in given.temperatures:
            began = time.perf_counter()
            async with asyncio.timeout(given.timeout_s):
                batch = await generate(
                    engine, make_requests(config["vocab_size"], temperature, given)
                )
            measured = measure(scorer, batch, temperature)
            took = {"start_s": round(start_s, 1), "row_s": round(time.perf_counter() - began, 1)}
            print(json.dumps(row | {"temperature": temperature} | measured | took), flush=True)
        running.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=["embedded", "vllm", "sglang"], default="embedded")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument(
        "--kind", default="qwen3-wide", help="of model_factory or transformers, or qwen3-0.6b"
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face directory instead")
    parser.add_argument("--data", type=Path, help="JSONL of chats, for prompts")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of a row's generation")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    given = parser.parse_args()
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = "cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = given.model or Path(name) / "model"
        if given.model is None:
            save_model(folder, given.kind, getattr(torch, given.dtype))
        dist.init_process_group(backend, f"file://{name}/store", rank=0, world_size=1)
        try:
            asyncio.run(run(folder, given))
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
