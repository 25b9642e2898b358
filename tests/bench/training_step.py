"""Where the time of a training step goes, on one GPU, without engines.

    python tests/bench/training_step.py [--cases SmolLM2 0.6B ...] [--modes eager cold warm]

Weights and samples come from a seed. A case is a shape, how FSDP wraps it if that is not the
default ("SmolLM2/root"), and whether logits are kept ("0.6B/root/kept"). Each mode is a process:
"eager" does not compile, "cold" compiles with empty caches and measures no more, "warm" compiles
with those that "cold" has left. Prints, for each mode and case: the first step; steps of other
lengths, with what torch compiled in them, and their share of the GPU's peak; their parts, with a
synchronisation after each, and the time that Python took to issue the work; the places that make
the host wait; the kernels and operators that took the most time; and how long a step waits for a
checkpoint, alone and in the background ("--saves 3").
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
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from qwen3_shapes import SHAPES, qwen3_config

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.rollout.dispatch.trajectory import GroupShape
from umbra.runtime.rollout.manager.batch_plan import plan_batch
from umbra.trainer.algorithms.base import load_loss
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.run_dir import VersionCounter
from umbra.trainer.checkpoint.trainer_state import TrainerState, is_complete
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.data.train_batch import (
    ADVANTAGES,
    ROLLOUT_LOGPROBS,
    MiniBatch,
    RewardGroups,
    TrainBatch,
)
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


NO_GROUPS: Final = RewardGroups(
    np.zeros((1, 0), np.float32), np.zeros(1, np.int32), np.zeros(0, np.int32)
)
# The samples have their advantages.
WORKS: Final = {
    "SmolLM2": Work(num_groups=64, group_size=8, prompt_len=40, length=20),
    "0.6B": Work(num_groups=16, group_size=8, prompt_len=64, length=512),
    "8B": Work(num_groups=16, group_size=8, prompt_len=64, length=256),
    "tiny": Work(num_groups=64, group_size=8, prompt_len=40, length=20),
}


def make_model(shape: str, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        if shape == "SmolLM2":
            model: Any = LlamaForCausalLM(LlamaConfig(**SHAPES["135M"], tie_word_embeddings=True))
        else:
            model = Qwen3ForCausalLM(qwen3_config(SHAPES[shape]))
    model.config.use_cache = False
    register_packed_attention()
    model.set_attn_implementation(PACKED_ATTENTION)
    return model.to(torch.float32).eval()


def make_batch(work: Work, vocab_size: int, seed: int) -> TrainBatch:
    generator = np.random.default_rng(seed)
    num_samples = work.num_groups * work.group_size
    lens = generator.integers(work.length // 2, work.length * 3 // 2, num_samples)
    prompts = generator.integers(0, vocab_size, (work.num_groups, work.prompt_len))
    rows = [
        np.concatenate([prompts[idx // work.group_size], generator.integers(0, vocab_size, size)])
        for idx, size in enumerate(lens)
    ]
    shapes = [GroupShape(work.prompt_len, each.tolist()) for each in np.split(lens, len(prompts))]
    (plan,) = plan_batch(shapes, 1, max_tokens_per_micro_batch=MICRO_BATCH_TOKENS)
    masks = [np.arange(len(row)) >= work.prompt_len for row in rows]
    num_tokens = sum(map(len, rows))
    return TrainBatch(
        tokens=np.concatenate(rows).astype(np.int32),
        offsets=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        prompt_lens=np.full(num_samples, work.prompt_len, np.int32),
        mask=np.concatenate(masks).astype(np.uint8),
        versions=np.ones(num_tokens, np.int64),
        columns={
            ROLLOUT_LOGPROBS: np.full(num_tokens, -np.log(vocab_size), np.float32),
            ADVANTAGES: generator.standard_normal(num_tokens).astype(np.float32),
        },
        groups=NO_GROUPS,
        sample_ids=[str(idx) for idx in range(num_samples)],
        mini_batches=[MiniBatch(plan.micro_batches, int(lens.sum()), num_samples)],
        metrics={},
    )


class Case:
    """A model, its training step and samples for it."""

    def __init__(self, name: str, mesh: Mesh, *, compiles: bool) -> None:
        self.name, self.device = name, mesh.device
        shape, wrap, kept, *_ = [*name.split("/"), "", ""]
        self._work = WORKS[shape]
        model = make_model(shape, mesh.device)
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
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        head = config.vocab_size * config.hidden_size
        num_hidden = self.policy.num_parameters - head
        attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_size * pairs
        return 3.0 * (2 * num_hidden * rows + 2 * head * scored + attention)


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
    originals = {name: getattr(*where) for name, where in parts.items()}
    for name, (owner, attribute) in parts.items():
        setattr(owner, attribute, measured(name, originals[name]))
    try:
        yield seconds
    finally:
        for name, (owner, attribute) in parts.items():
            setattr(owner, attribute, originals[name])


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


def print_waits(case: Case) -> None:
    """Counts what makes the host wait for the GPU in a step."""
    places: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [each for each in traceback.extract_stack() if "/trainer/" in each.filename]
        own = frames[-1] if frames else traceback.extract_stack()[-3]
        places[f"{own.filename.rpartition('/')[2]}:{own.lineno} {own.line}"] += 1

    batch, shown = case.batch(), warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            case.train_step.run(batch, 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
    print(f"  host synchronisations: {sum(places.values())}")
    for place, count in places.most_common():
        print(f"    {count:4} {place}")


def print_profile(case: Case) -> None:
    """The kernels and operators of one step that took the most time."""
    from torch.profiler import ProfilerActivity, profile

    batch = case.batch()
    is_cuda = case.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with profile(activities=activities) as recorded:
        wall = case.run(batch)
    kernels: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for event in recorded.events() or []:
        # Annotations, such as FSDP's, are no kernels.
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            kernels[event.name] += event.time_range.elapsed_us() / 1e3
            numbers[event.name] += 1
    busy, launched = sum(kernels.values()), sum(numbers.values())
    print(
        f"  profiled: wall {wall * 1e3:.1f} ms, kernels {busy:.1f} ms ({busy / wall / 10:.0f} %), "
        f"{launched} of them"
    )
    for name, milliseconds in kernels.most_common(NUM_LISTED):
        print(f"    {milliseconds:8.2f} ms {numbers[name]:6} x {name[:110]}")
    averages: Any = recorded.key_averages()
    operators = {each.key: each for each in averages if each.device_type.name == "CPU"}
    own = Counter({key: each.self_cpu_time_total / 1e3 for key, each in operators.items()})
    print("  operators, by the host's own time:")
    for key, milliseconds in own.most_common(NUM_LISTED):
        print(f"    {milliseconds:8.2f} ms {operators[key].count:6} x {key[:110]}")


def print_saves(case: Case, mesh: Mesh, num_saves: int) -> None:
    """Checkpoints of a step each, and the steps beside those that are written meanwhile."""
    models = {POLICY: case.policy}
    with tempfile.TemporaryDirectory(prefix="umbra-saves-", dir=".") as folder:
        store = CheckpointStore(Path(folder) / "checkpoints", mesh, keep=1)
        for number in range(num_saves + 1):
            state = TrainerState(step=number, version=number, world_size=1, seed=0)
            alone = [case.run(case.batch()) for _ in range(NUM_STEPS)]
            began = time.perf_counter()
            path = store.save(state, models, in_background=number > 0)
            waited, beside = time.perf_counter() - began, list[float]()
            while not is_complete(path):
                beside.append(case.run(case.batch()))
            store.finish()
            nbytes = sum(each.stat().st_size for each in path.iterdir())
            print(
                f"  checkpoint of {nbytes / 1e9:.2f} GB {'in the background' * (number > 0)}: "
                f"training waits {waited * 1e3:.0f} ms; steps of "
                f"{statistics.median(alone) * 1e3:.0f} ms take beside it, ms: "
                f"{', '.join(f'{each * 1e3:.0f}' for each in beside)}"
            )


def num_compiled() -> tuple[int, int]:
    """Graphs that torch has compiled so far, and its graph breaks."""
    counters = torch._dynamo.utils.counters  # pyright: ignore[reportAttributeAccessIssue]
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def measure(name: str, mesh: Mesh, mode: str, num_saves: int) -> None:
    case = Case(name, mesh, compiles=mode != "eager")
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
        if mesh.device.type == "cuda":
            print_waits(case)
        print_profile(case)
        if num_saves:
            print_saves(case, mesh, num_saves)
    sys.stdout.flush()


def run_mode(mode: str, cases: list[str], num_saves: int) -> None:
    environment = TorchrunEnvironment.read()
    with Mesh.join(environment, "auto", TIMEOUT_S) as mesh:
        for name in cases:
            if mode == "cold" and "/" in name:
                continue  # compiles the same
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()  # pyright: ignore[reportAttributeAccessIssue]
            if mesh.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                measure(name, mesh, mode, num_saves)
            except Exception:  # noqa: BLE001  (the others shall be measured all the same)
                traceback.print_exc(file=sys.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cases", nargs="+", default=["SmolLM2", "0.6B", "SmolLM2/root", "0.6B/root"]
    )
    parser.add_argument("--modes", nargs="+", default=["cold", "warm", "eager"])
    parser.add_argument("--saves", type=int, default=0, help="checkpoints in the background")
    parser.add_argument("--in-process", action="store_true", help="of one mode, here")
    options = parser.parse_args()
    if options.in_process:
        run_mode(options.modes[0], options.cases, options.saves)
        return 0
    print(f"torch {torch.__version__}")
    statuses: list[int] = []
    with tempfile.TemporaryDirectory(prefix="umbra-step-") as caches:
        folders = {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
        for mode in options.modes:
            command = [sys.executable, __file__, "--in-process", "--modes", mode]
            command += ["--saves", str(options.saves), "--cases"]
            began = time.perf_counter()
            sys.stdout.flush()
            statuses.append(
                subprocess.run(
                    [*command, *options.cases], env=os.environ | folders, check=False
                ).returncode
            )
            print(f"{mode}: {time.perf_counter() - began:.0f} s in all, with imports", flush=True)
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
