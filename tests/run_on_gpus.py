"""The tests and benchmarks that need GPUs, side by side on several of them, within a given time.

    python tests/run_on_gpus.py --seconds 560 --logs DIR 0:sglang,sglang-restart 1:trainer,vllm

A chain is its GPUs (`0`, or `0+1`) and its jobs, done one after the other; chains run side by side.
What a job prints goes to DIR/JOB.log, how it ended to the terminal. When the time is over, jobs are
ended and those that follow are named. Where it may mount (as root), each job has a /dev/shm of its
own, since tests look there for what is left behind. An engine that is not installed where this
Python finds it is given by its folder: `--path vllm=/opt/vllm`. `--list` says what jobs there are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
PLUGIN: Final = (
    "" if entry_points(group="pytest11", name="umbra") else "-p umbra.runtime.testing.plugin"
)
# Where umbra runs from its sources, pytest does not find it.
PYTEST: Final = f"-m pytest {PLUGIN} -q -rA --durations=10 --tb=short -W default -m gpu"
# Engines' modules warn, and more so where nothing of theirs is compiled yet.
SGLANG_KERNELS: Final = {"attention_backend": "triton", "sampling_backend": "pytorch"}
NO_GRAPHS: Final = json.dumps(SGLANG_KERNELS | {"disable_cuda_graph": True})
SHAPE_8B: Final = "--shape 8B --dtype bfloat16"
EAGER: Final = "{enforce_eager=true}"
# vLLM starts in half the time.
STEPS: Final = {
    "135m": "--shape 135M rollout.max_new_tokens=48 pool.max_context_len=128",
    "0.6b": "--shape 0.6B rollout.max_new_tokens=512 pool.max_context_len=640",
    "8b": "--shape 8B rollout.max_new_tokens=256 pool.max_context_len=384",
}
"""256 completions a rank; vLLM has all at once."""
STANDALONE: Final = "pool.mode=standalone rollout.max_staleness="
WITH_OWN_SHM: Final = ("unshare", "--mount", "sh", "-c")
MOUNT_SHM: Final = "mount -t tmpfs tmpfs /dev/shm"
END_LIMIT_S: Final = 12.0
LEAST_S: Final = 15.0
# Nothing that is worth its start ends within less.
MEMORY: Final = "tests/gpu/trainer/test_memory_plan_gpu.py"
OPEN_MEMORY: Final = "tests/gpu/engines/test_open_memory_gpu.py"
FP8: Final = "tests/gpu/engines/test_fp8_gpu.py"
SPANNING: Final = "tests/gpu/engines/test_spanning_engines_gpu.py"
RETRACTION: Final = "whole or logprobs_are or drain_finishes"
# Others compare what two runs sampled, or want requests to run side by side.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`arguments` of Python, where LOG is its log's path without a suffix; `engine`: whose
    folder it needs; `variables`: of its environment."""

    arguments: str
    engine: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def sglang_retracting(interval: int) -> Job:
    """SGLang puts a request back each `interval` steps, as if its KV cache were full."""
    return Job(
        arguments=f"{PYTEST} tests/gpu/engines/test_sglang_gpu.py -k '{RETRACTION}'",
        engine="sglang",
        variables=(
            ("SGLANG_TEST_RETRACT", "1"),
            ("SGLANG_TEST_RETRACT_INTERVAL", str(interval)),
        ),
    )


def restart(engine: str, engine_args: str) -> Job:
    return Job(
        arguments=f"tests/bench/engine_restart.py --engine {engine} --device cuda --kills 2 "
        f"--engine-args '{engine_args}'",
        engine=engine,
    )


def training_run(settings: str, steps: int = 8) -> Job:
    """A run of a Qwen3-0.6B shape with vLLM, whose metrics are kept beside its log."""
    script = "tests/bench/training_run.py --metrics LOG.jsonl"
    return Job(arguments=f"{script} --steps {steps} {settings} pool.engine=vllm", engine="vllm")


def step(name: str, ranks: int, settings: str = "", steps: int = 10) -> Job:
    work = f"{STEPS[name]} --ranks {ranks} rollout.groups_per_step={32 * ranks}"
    return training_run(
        f"--trace LOG.json.gz {work} pool.max_num_seqs=256 {settings}".rstrip(), steps
    )


def weights_to(engine: str, options: str) -> Job:
    script = "tests/bench/weights.py --device cuda"
    return Job(arguments=f"{script} --engine {engine} {options}", engine=engine)


def tests_of(engine: str, what: str) -> Job:
    return Job(arguments=f"{PYTEST} {what}", engine=engine)


JOBS: Final = {
    "versions": Job(
        arguments="-c 'import sys, torch, transformers, zmq; "
        "print(sys.version, torch.__version__, transformers.__version__, zmq.__version__)'"
    ),
    "pinned": tests_of(
        "", "tests/gpu/trainer/test_pinned_memory_gpu.py tests/gpu/trainer/test_offload_gpu.py"
    ),
    "embedded": tests_of(
        "", "tests/gpu/engines/test_gpu.py tests/gpu/engines/test_cuda_ipc_gpu.py"
    ),
    "bucket-deltas": tests_of("", "tests/gpu/weights/test_bucket_deltas_gpu.py"),
    "image-copies": tests_of("", "tests/gpu/engines/test_image_copies_gpu.py"),
    "contexts": tests_of("", "tests/gpu/engines/test_engine_contexts.py"),
    "trainer": tests_of(
        "",
        "tests/gpu/trainer/test_gpu_training.py tests/gpu/trainer/test_packed_attention_gpu.py "
        "tests/unit/trainer/test_scoring.py tests/unit/trainer/test_metric_totals.py "
        "tests/process/trainer/test_sharded_loading.py",
    ),
    "doctor": tests_of("", "tests/gpu/trainer/test_doctor_gpu.py"),
    "release": tests_of("", "tests/process/runtime/test_gpu_release.py"),
    "serving": tests_of("vllm", "tests/gpu/trainer/test_serving_engines.py"),
    "memory": tests_of("", f"{MEMORY} -k embedded"),
    "vllm-memory": tests_of("vllm", f"{MEMORY} -k vllm"),
    "sglang-memory": tests_of("sglang", f"{MEMORY} -k sglang"),
    "colocated": tests_of("vllm", "tests/gpu/engines/test_colocated_engines.py"),
    "vllm": tests_of("vllm", "tests/gpu/engines/test_vllm_gpu.py"),
    "vllm-fp8": tests_of("vllm", f"{FP8} -k 'blocks or arrival'"),
    "vllm-fp8-per-tensor": tests_of("vllm", f"{FP8} -k per_tensor"),
    "recorded-plans": tests_of("vllm", "tests/gpu/engines/test_recorded_plans_gpu.py"),
    "open-memory": tests_of("", f"{OPEN_MEMORY} -k embedded"),
    "vllm-open-memory": tests_of("vllm", f"{OPEN_MEMORY} -k vllm"),
    "vllm-lora": tests_of("vllm", "tests/gpu/engines/test_vllm_lora_gpu.py"),
    "vllm-synced-lora": tests_of("vllm", "tests/gpu/engines/test_synced_lora_gpu.py -k vllm"),
    "sglang-synced-lora": tests_of("sglang", "tests/gpu/engines/test_synced_lora_gpu.py -k sglang"),
    "vllm-killed": tests_of("vllm", "tests/gpu/engines/test_gpu_processes.py -k vllm"),
    "vllm-parallel": tests_of("vllm", "tests/gpu/engines/test_gpu_tensor_parallel.py -k vllm"),
    "vllm-spanning": tests_of("vllm", f"{SPANNING} -k vllm"),
    "vllm-beside-trainer": tests_of("vllm", "tests/gpu/engines/test_vllm_beside_trainer_gpu.py"),
    "vllm-restart": restart("vllm", '{"enforce_eager": true}'),
    "vllm-speed": Job(
        arguments="tests/bench/adapter_speed.py --device cuda --shape 0.6B", engine="vllm"
    ),
    "sglang": tests_of("sglang", "tests/gpu/engines/test_sglang_gpu.py"),
    "sglang-retract-1": sglang_retracting(1),
    "sglang-retract-3": sglang_retracting(3),
    "sglang-killed": tests_of("sglang", "tests/gpu/engines/test_gpu_processes.py -k sglang"),
    "sglang-parallel": tests_of(
        "sglang", "tests/gpu/engines/test_gpu_tensor_parallel.py -k sglang"
    ),
    "sglang-spanning": tests_of("sglang", f"{SPANNING} -k sglang"),
    "sglang-restart": restart("sglang", NO_GRAPHS),
    "hybrid": step("0.6b", 1),
    **{f"hybrid-of-{count}": step("0.6b", count) for count in (2, 4)},
    "lora": step("0.6b", 1, "model.lora.rank=32"),
    "lora-of-2": step("0.6b", 2, "model.lora.rank=32"),
    "lora-alone": step("0.6b", 1, "model.lora.rank=32 model.lora.merge=false"),
    **{
        f"{sleep}-{name}": step(name, ranks, f"pool.sleep={setting} pool.engine_args={EAGER}")
        for name, ranks in (("135m", 1), ("0.6b", 1), ("8b", 4))
        for sleep, setting in (("awake", "auto"), ("asleep", "all"))
    },
    "awake-8b-of-2": step("8b", 2, f"pool.engine_args={EAGER}", 6),
    "hybrid-of-2-killed": training_run(f"--ranks 2 --kill policy-0 pool.engine_args={EAGER}", 16),
    "hybrid-parallel": training_run("--ranks 2 pool.engine_args={tensor_parallel_size=2}"),
    # As many GPUs generate as train. A step over the longer of "in-turn"'s `time/rollout_s` and
    # of `time/train_s` says how well they overlap.
    **{
        f"standalone-{ranks}-{ranks}{name}": step("0.6b", ranks, f"{STANDALONE}{setting}", 14)
        for ranks in (1, 2)
        for name, setting in (
            ("", "2"),
            ("-abort", "2 pool.on_update=abort"),
            ("-in-turn", "0"),
            ("-staged", "2 pool.staged_updates=true"),
        )
    },
    "checksums": tests_of(
        "", "tests/gpu/weights/test_checksum_gpu.py tests/unit/weights/test_verified_parameters.py"
    ),
    "staged-updates": tests_of("", "tests/unit/weights/test_staged_updates.py"),
    "weights-vllm": weights_to("vllm", "--shape 0.6B"),
    "weights-vllm-8b": weights_to("vllm", SHAPE_8B),
    "weights-vllm-8b-masters": weights_to("vllm", "--shape 8B"),
    "weights-of-two": weights_to("vllm", "--shape 0.6B --ranks 2"),
    "weights-of-two-8b": weights_to("vllm", f"{SHAPE_8B} --ranks 2"),
    "weights-of-two-8b-masters": weights_to("vllm", "--shape 8B --ranks 2"),
    "weights-sglang": weights_to("sglang", "--shape 0.6B"),
    "weights-sglang-8b": weights_to("sglang", SHAPE_8B),
    "weights-host": weights_to("vllm", "--shape 0.6B --transport memfd --syncs 8"),
    "weights-host-8b": weights_to("vllm", f"{SHAPE_8B} --transport memfd --syncs 5"),
    "weights-checked": weights_to("vllm", "--shape 0.6B --checksums"),
    "weights-checked-8b": weights_to("vllm", f"{SHAPE_8B} --checksums --syncs 6"),
    "weights-trace": training_run("--ranks 1 --trace LOG.json.gz", 2),
    "verl-protocol": Job(arguments="tests/bench/verl_protocol.py"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    gpus: str
    """As CUDA_VISIBLE_DEVICES has it."""
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    logs: Path
    deadline: float
    """Of time.monotonic()."""
    paths: dict[str, str]

    def run_all(self, chains: list[Chain]) -> bool:
        """Whether all jobs ran and succeeded."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(chains)) as threads:
            return all(list(threads.map(self._run, chains)))

    def _run(self, chain: Chain) -> bool:
        # All of them, whatever becomes of one.
        return all([self._run_job(name, chain.gpus) for name in chain.jobs])

    def _run_job(self, name: str, gpus: str) -> bool:
        if self.deadline - time.monotonic() < LEAST_S:
            print(f"{name}: no time was left", flush=True)
            return False
        log, began = self.logs / f"{name}.log", time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(JOBS[name], log),
                cwd=REPOSITORY,
                env=self._environment(JOBS[name], gpus),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            is_over = wait_or_end(process, self.deadline)
        how = "the time was over" if is_over else f"status {process.returncode}"
        took_s = time.monotonic() - began
        print(f"{name}: {how}, {took_s:.0f} s; ... {last_words(log)}", flush=True)
        return not is_over and process.returncode == 0

    def _command(self, job: Job, log: Path) -> list[str]:
        arguments = job.arguments.replace("LOG.", f"{log.with_suffix('')}.")
        python = [sys.executable, *shlex.split(arguments)]
        if not can_mount():
            return python
        return [*WITH_OWN_SHM, f"{MOUNT_SHM} && exec {shlex.join(python)}"]

    def _environment(self, job: Job, gpus: str) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH", "")
        folders = [str(REPOSITORY / "src"), self.paths.get(job.engine, ""), given]
        return {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpus,
            "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder),
            "PYTHONUNBUFFERED": "1",
            **dict(job.variables),
        }


@cache
def can_mount() -> bool:
    """Mostly root can."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*WITH_OWN_SHM, MOUNT_SHM], capture_output=True, check=False)
    return tried.returncode == 0


def wait_or_end(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether it had to be ended: by SIGINT as from a keyboard, then by SIGKILL."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(deadline - time.monotonic())
        return False
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
            break
    return True


def last_words(log: Path) -> str:
    return " ".join(log.read_text(errors="replace")[-300:].split())


def parse_chain(text: str) -> Chain:
    gpus, _, names = text.partition(":")
    jobs = tuple(names.split(",")) if names else ()
    unknown = [name for name in jobs if name not in JOBS]
    if not jobs or unknown or not all(part.isdecimal() for part in gpus.split("+")):
        what = f"unknown: {', '.join(unknown)}; " if unknown else ""
        raise argparse.ArgumentTypeError(
            f"{text!r}: {what}give GPUS:JOB,JOB such as 0+1:vllm-killed; --list shows the jobs"
        )
    return Chain(gpus=gpus.replace("+", ","), jobs=jobs)


def parse_path(text: str) -> tuple[str, str]:
    engine, _, folder = text.partition("=")
    if engine not in ("vllm", "sglang") or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: give vllm=FOLDER or sglang=FOLDER")
    return engine, folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chains", nargs="*", type=parse_chain, metavar="GPUS:JOB,JOB")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all (default 3600)")
    parser.add_argument("--logs", type=Path, default=REPOSITORY / "runs" / "gpu-logs")
    parser.add_argument("--path", type=parse_path, action="append", default=[], metavar="E=DIR")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list:
        for name, job in JOBS.items():
            print(f"{name:17} {job.arguments}")
        return 0
    if not given.chains:
        parser.error("give GPUS:JOB,JOB, such as 0:sglang 1:vllm; --list shows the jobs")
    # The last jobs have their END_LIMIT_S within the time, too.
    deadline = time.monotonic() + given.seconds - END_LIMIT_S
    runner = Runner(logs=given.logs, deadline=deadline, paths=dict(given.path))
    return 0 if runner.run_all(given.chains) else 1


if __name__ == "__main__":
    sys.exit(main())
