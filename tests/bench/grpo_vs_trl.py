"""umbra's GRPO step beside TRL's GRPOTrainer, in one run, alternating.

Same model (0.36 M parameters, float32), prompts, group size, token budget and machine; both
train on 256 completions a step, in groups of 8:

    equal   all completions have 32 tokens
    mixed   those of a tenth of the prompts have 256, the others 32

TRL generates with transformers in one process on all cores. umbra runs two ranks and two engines.
TRL gets an environment of its own, made in ENV_DIR at the first run. One JSON object goes to
standard output: per case and trainer the median seconds of a step over all rounds, and `speedup`.

    python tests/bench/grpo_vs_trl.py ENV_DIR [--rounds 3] [--steps 12] [--cases equal mixed]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chain_model import LONG_LEN, SHORT_LEN, write_model, write_prompts

HERE: Final = Path(__file__).parent
TRL_PACKAGES: Final = ("torch==2.13.0", "transformers==5.23.0", "trl==1.16.0")
GROUPS, GROUP_SIZE = 32, 8
# Steps at the start of a run that are not counted: first calls allocate and load libraries.
_WARMUP_STEPS: Final = 3
_RUN_TIMEOUT_S: Final = 900.0

UMBRA_CONFIG: Final = """
[run]
dir = "{run_dir}"
overwrite = true
[model]
path = "{model}"
[data]
train = "{prompts}"
shuffle = false
[reward]
function = "random_reward:reward"
python_path = ["{here}"]
[rollout]
groups_per_step = {groups}
group_size = {group_size}
max_new_tokens = {max_new_tokens}
[pool]
engine = "embedded"
count = 2
num_threads = 1
max_num_seqs = 128
max_context_len = {max_context_len}
tick_ms = 20.0
[train]
steps = {steps}
learning_rate = 1e-8
export = false
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env_dir", type=Path, help="TRL's environment; made if missing")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer per case")
    parser.add_argument("--steps", type=int, default=12, help="counted steps of a run")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args(argv)
    python = make_trl_environment(arguments.env_dir)
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        write_model(Path(folder) / "model")
        results = {
            case: compare(case, Path(folder), python, arguments.rounds, arguments.steps)
            for case in arguments.cases
        }
    print(json.dumps(results, indent=2))


CASES: Final = {"equal": (0.0, SHORT_LEN), "mixed": (0.1, LONG_LEN)}
"""Case -> share of prompts with long completions, token budget of a completion."""


def make_trl_environment(env_dir: Path) -> Path:
    """TRL's interpreter."""
    python = env_dir / "bin" / "python"
    marker = env_dir / "made.txt"
    wanted = "\n".join(TRL_PACKAGES)
    if not marker.exists() or marker.read_text() != wanted:
        _say(f"installing {', '.join(TRL_PACKAGES)} in {env_dir}")
        venv.create(env_dir, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *TRL_PACKAGES], check=True)
        marker.write_text(wanted)
    return python


def compare(
    case: str, folder: Path, trl_python: Path, rounds: int, steps: int
) -> dict[str, object]:
    """Medians over the steps of all rounds; the trainers take turns."""
    long_share, max_new_tokens = CASES[case]
    prompts = folder / f"{case}.jsonl"
    write_prompts(prompts, GROUPS * (steps + _WARMUP_STEPS + 1), long_share)
    step_s: dict[str, list[float]] = {"umbra": [], "trl": []}
    for number in range(rounds):
        step_s["umbra"] += run_umbra(folder, prompts, max_new_tokens, steps)
        step_s["trl"] += run_trl(trl_python, folder, prompts, max_new_tokens, steps)
        medians = {name: statistics.median(times) for name, times in step_s.items()}
        _say(
            f"{case}, round {number + 1}: "
            + ", ".join(f"{k} {v:.3f} s" for k, v in medians.items())
        )
    medians = {name: statistics.median(times) for name, times in step_s.items()}
    return {
        "umbra_step_s": round(medians["umbra"], 4),
        "trl_step_s": round(medians["trl"], 4),
        "speedup": round(medians["trl"] / medians["umbra"], 3),
        "umbra_best_s": round(min(step_s["umbra"]), 4),
        "trl_best_s": round(min(step_s["trl"]), 4),
        "completions": GROUPS * GROUP_SIZE,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
    }


def run_umbra(folder: Path, prompts: Path, max_new_tokens: int, steps: int) -> list[float]:
    """Seconds from one step's end to the next one's."""
    run_dir = folder / "umbra"
    config = folder / "umbra.toml"
    config.write_text(
        UMBRA_CONFIG.format(
            run_dir=run_dir,
            model=folder / "model",
            prompts=prompts,
            here=HERE,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_new_tokens=max_new_tokens,
            max_context_len=max_new_tokens + 16,
            steps=steps + _WARMUP_STEPS,
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "umbra.trainer", str(config)]
    _run(command, folder, os.environ | {"OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for name in ("step", "rollout", "sync", "sleep", "train"):
        median = statistics.median(row[f"time/{name}_s"] for row in rows[_WARMUP_STEPS:])
        _say(f"  umbra {name} {median:.3f} s")
    ends = [row["time"] for row in rows]
    return _differences(ends)[_WARMUP_STEPS - 1 :]


def run_trl(
    python: Path, folder: Path, prompts: Path, max_new_tokens: int, steps: int
) -> list[float]:
    """The same for TRL."""
    command = [str(python), str(HERE / "trl_steps.py"), str(folder / "model"), str(prompts)]
    command += [str(folder / "trl"), str(steps + _WARMUP_STEPS), str(max_new_tokens)]
    # All cores, whatever the caller's shell says.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    output = _run(command, folder, environment)
    report = json.loads(output.splitlines()[-1])
    return list(report["step_s"])[_WARMUP_STEPS - 1 :]


def _differences(ends: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(ends)]


def _run(command: Sequence[str], folder: Path, env: dict[str, str]) -> str:
    """Standard output; what it printed otherwise is shown where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=env, timeout=_RUN_TIMEOUT_S
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
