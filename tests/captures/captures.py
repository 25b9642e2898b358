"""Renews the terminal output that pages of docs/ show, from real runs: `make captures`.

    python tests/captures/captures.py [quickstart] [own_run] [killed_engine] [hanging_run]

The runs are those of docs/quickstart.md, in a folder of their own. What a block shows is what the
command printed, with `…` for lines and ends of lines that are left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from documented_examples import files_of, write_captures

ROOT: Final = Path(__file__).resolve().parents[2]
_WIDTH: Final = 130
_LIMIT_S: Final = 300.0
_TRAIN: Final = "torchrun --nproc-per-node 2 -m umbra.trainer"
_HANGING_REWARD: Final = """import time


def never_returns(prompts, completions, **columns):
    time.sleep(3600)
"""
_WAIT: Final = re.compile(r"^ *\w+ing .*( for| took) \d+:\d\d$")
"""A wait that is long only on a busy machine; not shown."""
Lines = Sequence[str]


class Scratch:
    """A folder with the quickstart's files, in which commands run as the pages show them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "launch" / "configs", folder / "launch" / "configs")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "PET_MASTER_PORT": str(port),
        }
        self.output("python -m umbra.trainer.quickstart runs/quickstart-assets")
        shutil.copytree(folder / "runs/quickstart-assets/model", folder / "model")
        for name, content in files_of("quickstart.md").items():
            (folder / name).write_text(content)
        self.output("python make_data.py; wc -l train.jsonl eval.jsonl")

    def begin(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            shell=True,
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self, command: str) -> list[str]:
        """The lines that a command prints. Raises RuntimeError if it prints none."""
        return self.end(self.begin(command))

    def end(self, process: subprocess.Popen[str]) -> list[str]:
        text = process.communicate(timeout=_LIMIT_S)[0]
        if not text:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}, and no output")
        for path, name in (
            (f"{ROOT}/src/", "…/"),
            (self.folder, "/home/me"),
            (sys.prefix, ".venv"),
        ):
            text = text.replace(str(path), name)
        return [line for line in text.splitlines() if not _WAIT.search(line)]

    def wait_for(self, found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not found():
            if time.monotonic() > deadline:
                raise RuntimeError("the run does not get there")
            time.sleep(0.1)

    def num_steps(self, run: str) -> int:
        path = self.folder / run / "metrics.jsonl"
        return path.read_text().count("time/step_s") if path.exists() else 0

    def process_id(self, run: str, name: str) -> int:
        processes: dict[str, Any] = json.loads((self.folder / run / "processes.json").read_text())
        return processes[name]["pid"]


def shown(command: str, lines: Lines) -> str:
    cut = (line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines)
    return "".join(f"{line}\n" for line in (f"$ {command}", *cut))


def some_steps(lines: Lines, steps: Sequence[int]) -> list[str]:
    """A training's console without most of its steps, and without what torchrun adds."""
    kept = list[str]()
    for line in takewhile(lambda line: not re.match(r"[WE]\d{4} |Traceback", line), lines):
        step = re.match(r"step +(\d+)/|  after step (\d+):", line)
        if step is None or int(step[1] or step[2]) in (0, *steps):
            kept.append(line)
        elif kept[-1] != "…":
            kept.append("…")
    return kept


def last_lines(lines: Lines) -> list[str]:
    """What a training learned, and its report."""
    ending = [line for line in lines if re.match(r"  (held-out accuracy|report)", line)]
    return ["…", ending[0], "…", ending[1]]


def lines_with(pattern: str, lines: Lines) -> list[str]:
    """The lines that match, and `…` for those before and between them."""
    kept = list[str]()
    for line in lines:
        if re.search(pattern, line):
            kept.append(line)
        elif not kept or kept[-1] != "…":
            kept.append("…")
    return kept if kept[-1] != "…" else kept[:-1]


def quickstart(scratch: Scratch) -> Mapping[str, str]:
    """A whole quickstart, and what its commands show afterwards."""
    config = "launch/configs/quickstart.toml"
    console = scratch.output(f"{_TRAIN} {config}")
    samples = "umbra samples runs/quickstart --step 30 --worst 2"
    worst = scratch.output(samples)
    greedy = f"umbra eval {config} model.path=runs/quickstart/export"
    sampled = f"umbra eval {config} eval.samples=8 eval.temperature=1"
    wrong = f"umbra doctor {config} model.path=Qwen3"
    failed = [text for text in scratch.output(wrong) if re.search("FAILED|failed", text)]
    return {
        "first-run": shown("make quickstart", last_lines(console)),
        "quickstart": shown("make quickstart", some_steps(console, [1, 20, 60])),
        "samples": shown(samples, worst),
        "eval": shown(greedy, scratch.output(greedy)),
        "eval-sampled": shown(sampled, scratch.output(sampled)),
        "doctor-failed": shown(wrong, failed),
    }


def own_run(scratch: Scratch) -> Mapping[str, str]:
    """The run of one's own in docs/quickstart.md, whole, and then stopped and resumed."""
    doctor = "umbra doctor train.toml"
    other = f"{doctor} train.beta=0.04"
    checked = [f"$ {doctor}", "…", scratch.output(doctor)[-1]]
    refused = scratch.output(other)

    whole = f"{_TRAIN} train.toml"
    console = some_steps(scratch.output(whole), [1, 20, 40])

    resumable = f"{whole} run.dir=runs/stopped run.resume=auto"
    run = scratch.begin(resumable)
    scratch.wait_for(lambda: scratch.num_steps("runs/stopped") >= 10)
    scratch.output("umbra stop runs/stopped")
    scratch.end(run)
    resumed = lines_with("resum|done:", scratch.output(resumable))
    return {
        "own-doctor": shown("python make_data.py", checked),
        "other-name": shown(other, refused),
        "own-run": shown(whole, console),
        "resumed": shown(resumable, resumed),
    }


def killed_engine(scratch: Scratch) -> Mapping[str, str]:
    """A run whose engine is killed: what the console and `umbra top` show."""
    command = f"{_TRAIN} launch/configs/quickstart.toml run.dir=runs/killed"
    run = scratch.begin(command)
    scratch.wait_for(lambda: scratch.num_steps("runs/killed") >= 12)
    os.kill(scratch.process_id("runs/killed", "policy-0"), signal.SIGKILL)
    events = scratch.folder / "runs/killed/events.jsonl"
    scratch.wait_for(lambda: events.exists() and '"restart"' in events.read_text())
    top = "umbra top runs/killed --once"
    frame = scratch.output(top)
    return {
        "killed": shown(command, lines_with("policy-0#|done:", scratch.end(run))),
        "top": shown(top, frame),
    }


def hanging_run(scratch: Scratch) -> Mapping[str, str]:
    """The summary of a run whose reward function never returns."""
    (scratch.folder / "slow_rewards.py").write_text(_HANGING_REWARD)
    hanging = "reward.function=slow_rewards:never_returns data.eval= run.dir=runs/hangs"
    run = scratch.begin(f"{_TRAIN} train.toml {hanging}")
    dump = "umbra dump runs/hangs"
    waiting = re.compile(r"for \d\d\.\d s: answers score")
    summary = list[str]()

    def hangs() -> bool:
        if run.poll() is not None:
            raise RuntimeError("\n".join(scratch.end(run)))
        summary[:] = scratch.output(dump)
        return any(map(waiting.search, summary))

    try:
        scratch.wait_for(hangs)
    finally:
        scratch.output("umbra stop runs/hangs")
        scratch.end(run)
    verdicts = takewhile(lambda line: not line.startswith("===="), summary)
    return {"dump": shown(dump, list(verdicts)[:-1])}


SCENES: Final = {each.__name__: each for each in (quickstart, own_run, killed_engine, hanging_run)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(Path(folder))
        for scene in sys.argv[1:] or SCENES:
            print(f"captures: {scene}", flush=True)
            texts = SCENES[scene](scratch)
            for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
                write_captures(path.name, texts)


if __name__ == "__main__":
    main()
