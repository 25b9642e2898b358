"""Where the time of a training step goes, on one GPU, without engines.

    python tests/bench/training_step.py [--cases 135M 0.6B ...] [--modes eager cold warm]

Weights and samples come from a seed. A case is a shape, how FSDP wraps it if that is not the
default ("135M/root"), and whether logits are kept ("0.6B/root/kept"). Each mode is a process:
"eager" does not compile, "cold" compiles with empty caches and measures no more, "warm" compiles
with those that "cold" has left, and "early" before the first step, as a run does while engines
start. Prints, for each mode and case: the first step; steps of other lengths, with what torch
compiled in them, and their share of the GPU's peak; their parts, with a synchronisation after each,
and the time that Python took to issue the work; and the kernels that took the most time.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportMissingTypeArgument=false

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from qwen3_shapes import SHAPES, make_model

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.rollout.dispatch.trajectory import GroupShape
from umbra.runtime.rollout.manager.batch_answers import plan_batch
from umbra.trainer.algorithms.base import load_loss
from umbra.trainer.checkpoint.run_dir import VersionCounter
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.data.train_batch import MiniBatch, TrainBatch, random_batch
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.train_model import POLICY, PassSettings, PreparedModel, TrainModel
from umbra.trainer.objective import PolicyObjective
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh

PEAK_FLOPS: Final = 989e12
"""Of an H100 or H200 in bfloat16, without sparsity."""
MICRO_BATCH_TOKENS: Final = 32_768
"""The memory plan's choice where there is room."""
NUM_STEPS: Final = 5
NUM_LISTED: Final = 15
TIMEOUT_S: Final = 1800.0
ANY_DIFFERENCE: Final = 1e9


@dataclass(frozen=True, slots=True)
class Work:
    """The samples of a step: completions of about `length` tokens, up to a half more or less."""

    num_groups: int
    group_size: int
    prompt_len: int
    length: int


WORKS: Final = {
    "135M": Work(num_groups=64, group_size=8, prompt_len=40, length=20),
    "0.6B": Work(num_groups=16, group_size=8, prompt_len=64, length=512),
    "8B": Work(num_groups=16, group_size=8, prompt_len=64, length=256),
    "tiny": Work(num_groups=64, group_size=8, prompt_len=40, length=20),
}


def make_batch(work: Work, vocab_size: int, seed: int) -> TrainBatch:
    num_samples = work.num_groups * work.group_size
    longest = work.length * 3 // 2
    lens = np.random.default_rng(seed).integers(work.length // 2, longest, num_samples)
    batch = random_batch(lens, work.prompt_len, work.group_size, vocab_size, seed)
    groups = np.split(lens, work.num_groups)
    shapes = [GroupShape(work.prompt_len, each.tolist()) for each in groups]
    (plan,) = plan_batch(shapes, 1, max_tokens_per_micro_batch=MICRO_BATCH_TOKENS)
    mini_batch = MiniBatch(plan.micro_batches, int(lens.sum()), num_samples)
    return replace(batch, mini_batches=[mini_batch])


class Case:
    """A model, its training step and samples for it."""

    def __init__(self, name: str, mesh: Mesh, *, compiles: bool) -> None:
        self.name, self.device = name, mesh.device
        shape, wrap, kept, *_ = [*name.split("/"), "", ""]
        self._work = WORKS[shape]
        model = make_model(SHAPES[shape], mesh.device, use_cache=False).to(torch.float32).eval()
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)
        self._config = model.config
        dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
        wrapping: Any = wrap or "auto"
        passes = PassSettings(compute_dtype=dtype, wrap=wrapping, compiles=compiles)
        train = TrainSection(steps=100, learning_rate=1e-6)
        self.policy = TrainModel(PreparedModel(model, True), mesh.fsdp, passes, train)
        self.policy.keeps_logits = kept == "kept"
        self.builder = MicroBatchBuilder(
            packed=True,
            dtype=dtype,
            device=mesh.device,
            aggregation=train.loss_aggregation,
            max_new_tokens=self._work.length * 2,
        )
        objective = PolicyObjective(train, load_loss(train.loss))
        versions = VersionCounter(Path("unwritten"), 1, writes=False)
        check = LogprobCheck("bfloat16", ANY_DIFFERENCE, versions, str, print)
        models = {POLICY: self.policy}
        self.train_step = TrainStep(models, self.builder, train, objective, print, check)
        self._num_steps = 0

    def batch(self) -> TrainBatch:
        """The next step's, of other lengths than the last."""
        self._num_steps += 1
        return make_batch(self._work, self._config.vocab_size, self._num_steps)

    def run(self, batch: TrainBatch) -> float:
        """Seconds of a step with all of the GPU's work."""
        began = time.perf_counter()
        self.train_step.run(batch, self._num_steps)
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def flops(self, batch: TrainBatch) -> float:
        """Of the forward and the backward pass; each distinct prompt is computed once."""
        rows, scored, pairs = 0, int(batch.mask.sum()), 0
        prompt_len = self._work.prompt_len
        for lens in np.split(np.diff(batch.offsets) - prompt_len - 1, self._work.num_groups):
            rows += prompt_len + int(lens.sum())  # completions are fed without their last token
            pairs += prompt_len**2 // 2 + int((lens * prompt_len + lens**2 // 2).sum())
        config = self._config
        head = config.vocab_size * config.hidden_size
        num_hidden = self.policy.num_parameters - head
        attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        return 3.0 * (2 * num_hidden * rows + 2 * head * scored + 4 * attention * pairs)


@contextmanager
def timed(case: Case, *, synchronizes: bool) -> Generator[dict[str, float]]:
    """Fills the mapping with the seconds of the parts of a step."""
    seconds: dict[str, float] = defaultdict(float)

    def measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            if synchronizes:
                case.synchronize()
            seconds[name] += time.perf_counter() - began
            return result

        return call

    parts = {
        "build": (MicroBatchBuilder, "build"),
        "forward": (TrainModel, "score"),
        "loss": (PolicyObjective, "__call__"),
        "backward": (TrainModel, "backward"),
        "optimizer": (TrainModel, "step"),
    }
    with ExitStack() as patches:
        for name, (owner, attribute) in parts.items():
            function = measured(name, getattr(owner, attribute))
            patches.enter_context(mock.patch.object(owner, attribute, function))
        yield seconds


def print_parts(case: Case) -> None:
    lines: dict[str, dict[str, float]] = {}
    for title, synchronizes in (("with the GPU", True), ("Python alone", False)):
        batch = case.batch()
        with timed(case, synchronizes=synchronizes) as seconds:
            whole = case.run(batch)
        lines[title] = dict(seconds) | {"rest": whole - sum(seconds.values()), "all": whole}
    for title, parts in lines.items():
        listed = "  ".join(f"{name} {each * 1e3:.1f}" for name, each in parts.items())
        print(f"  {title:12}, ms: {listed}")


def print_profile(case: Case) -> None:
    """The kernels of one step that took the most time."""
    from torch.profiler import ProfilerActivity, profile

    batch = case.batch()
    kind = case.device.type
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (kind == "cuda")
    with profile(activities=activities) as recorded:
        wall = case.run(batch)
    print(f"  profiled: wall {wall * 1e3:.1f} ms")
    print(recorded.key_averages().table(f"self_{kind}_time_total", NUM_LISTED))


def num_compiled() -> tuple[int, int]:
    """Graphs that torch has compiled so far, and its graph breaks."""
    counters = torch._dynamo.utils.counters  # pyright: ignore[reportAttributeAccessIssue]
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def measure(name: str, mesh: Mesh, mode: str) -> None:
    case = Case(name, mesh, compiles=mode != "eager")
    if mode == "early":
        began = time.perf_counter()
        case.train_step.warm_up(case.batch(), 0)
        case.synchronize()
        print(f"{mode} {name}: compiled in {time.perf_counter() - began:.2f} s: {num_compiled()}")
    first = case.run(case.batch())
    graphs, breaks = num_compiled()
    print(f"{mode} {name}: first step {first:.2f} s ({graphs} graphs, {breaks} graph breaks)")
    steps: list[float] = []
    shares: list[float] = []
    for _ in range(NUM_STEPS):
        batch = case.batch()
        steps.append(case.run(batch))
        shares.append(case.flops(batch) / PEAK_FLOPS / steps[-1])
    later = num_compiled()[0] - graphs
    print(
        f"  steps: {', '.join(f'{each * 1e3:.0f}' for each in steps)} ms ({later} more graphs), "
        f"median {statistics.median(steps) * 1e3:.1f} ms; "
        f"{statistics.median(shares) * 100:.1f} % of the peak"
    )
    if mesh.device.type == "cuda":
        print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if mode != "cold":
        print_parts(case)
        print_profile(case)
    sys.stdout.flush()


def run_mode(mode: str, cases: list[str]) -> None:
    if mode == "cold":  # cases of a shape compile the same
        cases = [*{name.partition("/")[0]: name for name in reversed(cases)}.values()]
    environment = TorchrunEnvironment.read()
    with Mesh.join(environment, "auto", TIMEOUT_S) as mesh:
        for name in cases:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()  # pyright: ignore[reportAttributeAccessIssue]
            if mesh.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            measure(name, mesh, mode)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=["135M", "0.6B", "135M/root", "0.6B/root"])
    parser.add_argument("--modes", nargs="+", default=["cold", "warm", "eager"])
    parser.add_argument("--in-process", action="store_true", help="of one mode, here")
    options = parser.parse_args()
    if options.in_process:
        run_mode(options.modes[0], options.cases)
        return 0
    print(f"torch {torch.__version__}")
    statuses: list[int] = []
    with tempfile.TemporaryDirectory(prefix="umbra-step-") as caches:
        folders = {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
        for mode in options.modes:
            command = [sys.executable, __file__, "--in-process", "--modes", mode]
            command += ["--cases", *options.cases]
            began = time.perf_counter()
            sys.stdout.flush()
            done = subprocess.run(command, env=os.environ | folders, check=False)
            statuses.append(done.returncode)
            print(f"{mode}: {time.perf_counter() - began:.0f} s in all, with imports", flush=True)
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
