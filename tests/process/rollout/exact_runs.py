"""The same trajectories twice: by one engine in peace, and through a manager whose three engines
are killed, cut off, aborted and given new versions of the same weights at seeded random points.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import os
import random
import sys
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from live_rollouts import LiveRollouts, merged
from numpy.typing import NDArray
from safetensors.torch import load_file

from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.manager.admission import PromptOrder, trajectory_seed
from umbra.runtime.rollout.prompts import write_prompts
from umbra.runtime.session.session import Session

GROUP_SIZE: Final = 5
BUDGET: Final = 80
STOP_TOKEN_IDS: Final = [1, 40]
VOCAB_SIZE: Final = 97  # tokens that prompts are made of; the tiny model knows a few more
ENGINES: Final = ("policy-0", "policy-1", "policy-2")
MAX_STALENESS: Final = 3
MAX_NUM_SEQS: Final = 8
"""Of each interrupted engine. What may be generated ahead takes them two seconds. With more, a busy
machine interrupts them when they have done it."""


@dataclass
class Completion:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, kw_only=True)
class Work:
    """Trajectories, by default 300 in groups of one prompt, and the number of faults."""

    num_steps: int = 12
    groups_per_step: int = 5
    seed: int = 3
    tokens_between_faults: int = 800

    @property
    def num_prompts(self) -> int:
        return self.num_steps * self.groups_per_step

    @property
    def num_samples(self) -> int:
        return self.num_prompts * GROUP_SIZE

    @cached_property
    def prompts(self) -> list[NDArray[np.int32]]:
        rng = np.random.default_rng(self.seed)
        return [
            rng.integers(3, VOCAB_SIZE, rng.integers(2, 13)).astype(np.int32)
            for _ in range(self.num_prompts)
        ]

    @cached_property
    def seeds(self) -> dict[str, tuple[int, int]]:
        """sample id -> index of its prompt, sampling seed."""
        order = PromptOrder(self.num_prompts, self.seed)
        return {
            f"e{epoch}/p{prompt}/{k}": (prompt, trajectory_seed(self.seed, epoch, prompt, k))
            for epoch, prompt in map(order.at, range(self.num_prompts))
            for k in range(GROUP_SIZE)
        }


@dataclass(kw_only=True)
class Interruptions:
    """The trajectories of a run, and what interrupted them.

    Attributes:
        cuts: of trajectories in batches, by whatever.
        cut_trajectories: those with tokens of more than one version.
        segments: runs of tokens of one version, of all trajectories.
        kills, syncs, engine_aborts: as they were done.
        counters: the dispatcher's.
    """

    cuts: int = 0
    cut_trajectories: int = 0
    segments: int = 0
    kills: int = 0
    syncs: int = 0
    engine_aborts: int = 0
    counters: dict[str, int] = field(default_factory=dict[str, int])


async def run_in_peace(model_dir: Path, work: Work) -> dict[str, Completion]:
    """Completions of one undisturbed engine, by sample id."""
    names = list(work.seeds)
    requests: list[dict[str, Any]] = [
        {
            "id": idx,
            "tokens": work.prompts[prompt],
            "position": 0,
            "seed": seed,
            "max_new_tokens": BUDGET,
            "temperature": 1.0,
            "stop_token_ids": STOP_TOKEN_IDS,
        }
        for idx, (prompt, seed) in enumerate(work.seeds.values())
    ]
    completions = [Completion() for _ in requests]
    num_finished = 0
    settings = _engine_settings(max_num_seqs=64)
    engine = EmbeddedEngine(model_path=str(model_dir), load_weights=True, **settings)
    async with engine:
        await engine.submit(requests)
        async with aclosing(engine.deltas()) as batches:
            while num_finished < len(requests):
                batch = await anext(batches)
                bounds = batch["offsets"].tolist()
                for run, idx in enumerate(batch["ids"].tolist()):
                    own = slice(bounds[run], bounds[run + 1])
                    completions[idx].tokens += batch["tokens"][own].tolist()
                    completions[idx].logprobs += batch["logprobs"][own].tolist()
                num_finished += len(batch["finished_ids"])
    return dict(zip(names, completions, strict=True))


def run_interrupted(
    session: Session, folder: Path, model_dir: Path, work: Work
) -> tuple[dict[str, Completion], Interruptions]:
    """Completions in the end by sample id, and the interruptions."""
    live = _start(session, folder, model_dir, work)
    chance = random.Random(work.seed)
    done = Interruptions()
    completions: dict[str, Completion] = {}
    live.publish(1)
    for step in range(work.num_steps):
        batches = live.next_batch(step)
        done.cuts += int(batches[0]["metrics"]["interruptions"])
        for name, sample in merged(batches).items():
            assert name not in completions, "a sample in two batches"
            completions[name] = Completion(
                sample["completion"], sample["logprobs"], sample["versions"]
            )
        # The groups of the next steps are being generated meanwhile.
        if chance.random() < 0.5:
            order = chance.sample(ENGINES, len(ENGINES))
            done.engine_aborts += any(_abort(session, engine) for engine in order)
        live.publish(live.version + 1)
    done.syncs = live.version
    done.counters = live.manager.call("stats")["counters"]
    rows = live.processes()
    done.kills = sum(rows[name]["num_restarts"] for name in ENGINES)
    for completion in completions.values():
        num_cuts = int(np.count_nonzero(np.diff(completion.versions)))
        done.segments += 1 + num_cuts
        done.cut_trajectories += num_cuts > 0
    return completions, done


def _engine_settings(max_num_seqs: int) -> dict[str, Any]:
    return {"dtype": "float64", "max_context_len": 128, "max_num_seqs": max_num_seqs}


def _start(session: Session, folder: Path, model_dir: Path, work: Work) -> LiveRollouts:
    prompts = folder / "exact-prompts.msgpack"
    write_prompts(
        prompts,
        (
            {"id": f"p{idx}", "prompt": "", "tokens": tokens.astype("<i4").tobytes(), "row": {}}
            for idx, tokens in enumerate(work.prompts)
        ),
    )
    faults = [
        {"kind": "kill", "every_tokens": 2 * work.tokens_between_faults, "incarnations": [1, 2]},
        # The stream of deltas breaks: the engine's requests move to the others.
        {"kind": "error", "call": "deltas", "every_tokens": work.tokens_between_faults, "times": 2},
    ]
    weights = load_file(str(model_dir / "model.safetensors"))
    settings = {
        "model_path": str(model_dir),
        "tick_ms": 10.0,
        **_engine_settings(MAX_NUM_SEQS),
    }
    return LiveRollouts(
        session,
        folder,
        num_engines=len(ENGINES),
        pool={
            "engine": "umbra.engines.faulty.faulty_engine:FaultyEngine",
            "env": {"PYTHONPATH": os.pathsep.join(sys.path)},
            "kwargs": {
                "inner": "paced_engine:PacedEngine",
                "seed": work.seed,
                "faults": faults,
                **settings,
            },
        },
        weights={name: tensor.double() for name, tensor in weights.items()},
        config={
            "prompts_path": str(prompts),
            "eval_path": "",
            "groups_per_step": work.groups_per_step,
            "group_size": GROUP_SIZE,
            "max_new_tokens": BUDGET,
            "max_context_len": 128,
            "max_staleness": MAX_STALENESS,
            "stop_token_ids": STOP_TOKEN_IDS,
            "seed": work.seed,
            "engine_timeout_s": 120.0,
            "rank_timeout_s": 60.0,
        },
    )


def _abort(session: Session, name: str) -> bool:
    """Ends all that an engine generates; whether there was anything."""
    try:
        return bool(session.actor(name, timeout_s=0.1).call("abort", None, timeout_s=10.0))
    except UmbraError:
        return False  # it is restarting
