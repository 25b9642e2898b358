"""Launch scripts, example configs, the lock file and CI's entry are well formed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from umbra.trainer.config.config_file import load_any_config

REPOSITORY = Path(__file__).parents[3]
SCRIPTS = [*REPOSITORY.glob("launch/**/*.sh"), *REPOSITORY.glob("launch/**/*.sbatch")]
SCRIPTS.append(REPOSITORY / ".ci/run")
CONFIGS = sorted(REPOSITORY.glob("launch/**/*.toml"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_fails_on_errors(script: Path) -> None:
    parsed = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)

    assert parsed.returncode == 0, parsed.stderr
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("script", SCRIPTS[:-1], ids=lambda path: path.name)
def test_a_launch_script_without_a_config_says_how_to_call_it(script: Path) -> None:
    command = ["bash", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)

    assert done.returncode == 2
    assert "usage:" in done.stderr


@pytest.mark.parametrize(
    "script", ["torchrun_single_node.sh", "torchrun_multi_node.sh", "slurm/train.sbatch"]
)
def test_a_launch_script_starts_the_ranks_that_the_config_asks_for(
    script: str, tmp_path: Path
) -> None:
    show = 'echo "$0" "$@"'
    # The trainer has three GPUs.
    asked = (
        'case "$*" in '
        '"-m umbra.trainer.config.launch_values num_ranks $CONFIG train.steps=1") echo 3;; '
        '"-m umbra.trainer.config.launch_values run_dir $CONFIG train.steps=1") echo runs/this;; '
        "*) exit 1;; esac"
    )
    # In the place of the programs, these show what they were given.
    for name, command in {"torchrun": show, "srun": show, "python": asked}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)

    done = subprocess.run(
        ["bash", REPOSITORY / "launch" / script, CONFIGS[0], "train.steps=1"],
        env={
            **os.environ,
            **{"NUM_NODES": "2", "RDZV_ENDPOINT": "node1:29400", "RDZV_ID": "job"},
            **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG": str(CONFIGS[0])},
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert f"--nproc-per-node 3 -m umbra.trainer {CONFIGS[0]} train.steps=1" in done.stdout
    assert done.returncode == 0, done.stderr


def test_a_launch_script_ends_with_the_configs_error(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    done = subprocess.run(
        [REPOSITORY / "launch/torchrun_single_node.sh", CONFIGS[0], "train.stepz=1"],
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 1
    assert "umbra: train.stepz=1 (command line): train.stepz is unknown" in done.stderr


@pytest.mark.parametrize("template", ["train.sbatch", "standalone.sbatch"])
def test_a_slurm_template_asks_for_one_task_a_node(template: str) -> None:
    lines = (REPOSITORY / "launch/slurm" / template).read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(idx for idx, line in enumerate(lines) if line and not line.startswith("#"))

    options = {
        name: value
        for name, _, value in (
            line.removeprefix("#SBATCH --").partition("=") for line in directives
        )
    }

    assert options["ntasks-per-node"] == "1", "torchrun starts the ranks itself"
    assert options["signal"].startswith("B:"), "torchrun dies of the signal"
    assert options["open-mode"] == "append", "a requeued job would overwrite its output"
    # sbatch reads no directive after the first command.
    assert all(lines.index(line) < first_command for line in directives)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_an_example_config_is_valid(config: Path) -> None:
    load_any_config(str(config), [])


def test_scripts_are_executable() -> None:
    scripts = [script for script in SCRIPTS if script.suffix != ".sbatch"]

    assert all(os.access(script, os.X_OK) for script in scripts)


def test_the_lock_pins_every_declared_requirement() -> None:
    pins = {
        match["name"].lower().replace("_", "-"): match["version"]
        for match in re.finditer(
            r"^(?P<name>[\w.-]+)==(?P<version>\S+)$",
            (REPOSITORY / "constraints.txt").read_text(),
            re.MULTILINE,
        )
    }
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        Requirement(line) for line in [*project["dependencies"], *extras["train"], *extras["dev"]]
    ]

    missing = [item.name for item in wanted if item.name.lower() not in pins]
    outdated = [
        str(item)
        for item in wanted
        if not item.specifier.contains(pins.get(item.name.lower(), "0"))
    ]

    assert missing == []
    assert outdated == []
    assert pins["torch"] == "2.13.0"
