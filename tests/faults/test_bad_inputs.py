"""Rewards, engines, folders and settings that cannot be used: cause and remedy are named."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from whole_runs import BAD_INPUT_LIMIT_S, END_LIMIT_S, start_run

from umbra.trainer.checkpoint.run_dir import RunLock
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_every_rank_reports_what_the_reward_raised_and_where(folder: Path) -> None:
    with start_run(folder, "reward.function=failing_rewards:raises", is_forked=False) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "RewardError: reward function failing_rewards:raises raised ValueError: no digit",
        "failing_rewards.py:",
        "let it return a number",
    )
    by_torchrun = ended.output.splitlines()[-1]
    assert re.match(r"torchrun: rank \d: RewardError: reward function failing_rewards", by_torchrun)


def test_a_failed_evaluation_is_named_with_the_log_that_has_more(
    folder: Path, assets: Path
) -> None:
    held_out = f"data.eval={assets}/train.jsonl"
    loop = "rollout.agent=failing_rewards:loop_that_fails_for_3_and_5"

    with start_run(folder, loop, held_out, "rollout.max_failed_share=0.9", num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "RolloutError: the evaluation after step 0 failed",
        "raised ValueError: no tool for",
        *("for sample", "eval/", "logs/rollouts.log has the earlier failures"),
    )
    assert "the evaluation after step 0 failed" in (run.run_dir / "logs/rollouts.log").read_text()


def test_a_function_that_cannot_be_imported_ends_the_run_before_an_engine_starts(
    folder: Path,
) -> None:
    (folder / "needy.py").write_text("import no_such_module\n\ndef reward(**columns): ...\n")

    with start_run(folder, "reward.function=needy:reward", num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "ConfigError: reward.function 'needy:reward': importing 'needy' raised ",
        "No module named 'no_such_module'",
        "name its folder in reward.python_path",
    )
    assert not (run.run_dir / "logs/policy-0.log").exists()


def test_an_engine_that_dies_in_every_sync_fails_the_run_on_every_rank(folder: Path) -> None:
    engine = "pool.engine=failing_rewards:DiesInSync"

    with start_run(folder, engine, "pool.max_restarts=1") as run:
        ended = run.wait()

    ended.check_failed(
        "policy-0 failed: policy-0#2",
        "exited with status 6",
        "after 1 restarts within 600 s (allowed: 1)",
    )
    # The engine's end is reported as such, not as an error of the sync.
    note = r"policy-0#1 \(pid \d+\) exited with status 6; restarting it in [\d.]+ s$"
    assert re.search(note, ended.output, re.MULTILINE), ended.output


def test_an_engine_that_cannot_start_ends_ranks_that_compile_meanwhile(folder: Path) -> None:
    settings = ("pool.engine=failing_rewards:DiesInStart", "pool.sleep=none", "pool.max_restarts=0")
    environ = {"HELD": "1", "COMPILING": str(folder / "compiling")}

    with start_run(
        folder, *settings, "train.compile=true", program="compiling_trainer", environ=environ
    ) as run:
        ended = run.wait()

    ended.check_failed("policy-0#1 failed to start", "exited with status 6")
    assert run.num_steps() == 0


def test_a_run_directory_in_which_another_run_works_is_refused(folder: Path) -> None:
    (folder / "run").mkdir()
    with RunLock(folder / "run"), start_run(folder, "run.overwrite=true") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        f"ConfigError: run.dir: run is in use by process {os.getpid()} on {socket.gethostname()}",
        "wait for its end, or choose another directory",
        ranks=[0],
    )
    assert {path.name for path in run.run_dir.iterdir()} == {".lock"}


def test_every_rank_ends_when_the_disk_fills_up_in_the_middle(
    folder: Path, mount_disk: Callable[[str], Path]
) -> None:
    """Any file may be written next: the ledger, the metrics, TensorBoard's or the versions."""
    (folder / "run").symlink_to(mount_disk("size=8m"))
    with start_run(folder, "train.steps=100000") as run:
        run.wait_for_step(2)
        with contextlib.suppress(OSError):
            (run.run_dir / "junk").write_bytes(bytes(8 << 20))
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("the disk is full (0 bytes free on ", "free some space")


def test_a_ledger_that_is_removed_ends_the_run_with_the_cause(folder: Path) -> None:
    with start_run(folder, "train.steps=1000", num_ranks=1) as run:
        run.wait_for_step(2)
        shutil.rmtree(run.run_dir / "ledger")
        ended = run.wait(END_LIMIT_S)

    ended.check_failed("LedgerError: cannot write", "it was removed while this run wrote to it")


def test_a_run_directory_that_is_moved_has_all_files_of_its_run(folder: Path, assets: Path) -> None:
    moved, best = folder / "moved", (f"data.eval={assets}/train.jsonl", "data.eval_limit=2")
    best += ("train.eval_every=20", "train.eval_at_start=false", "train.keep_best_by=accuracy")
    with start_run(folder, "train.steps=40", "train.export=true", *best, num_ranks=1) as run:
        run.wait_for_step(2)
        run.run_dir.rename(moved)
        ended = run.wait()

    assert ended.status == 0, ended.output
    assert read_metrics(moved / "metrics.jsonl")[-1]["step"] == 40
    for name in ("step-000040/COMPLETE", "best/COMPLETE"):
        assert (moved / "checkpoints" / name).exists(), name
    for name in ("export/config.json", "summary.json"):
        assert (moved / name).exists(), name
    with start_run(folder, "run.dir=moved", "run.resume=auto", "train.steps=41") as resumed:
        assert resumed.wait().status == 0


def test_torchrun_names_a_master_port_that_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = ("--master-addr", "127.0.0.1", "--master-port", str(port))
        with start_run(folder, torchrun=options) as run:
            ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    assert f"port: {port}" in ended.output
    assert "EADDRINUSE" in ended.output
    assert not run.run_dir.exists()


def test_more_ranks_than_completions_is_an_error_of_every_rank(folder: Path) -> None:
    settings = ["rollout.groups_per_step=1", "rollout.group_size=2"]
    with start_run(folder, *settings, num_ranks=3) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("is 2 completions a step for 3 ranks", "start 2 ranks or fewer")
    assert not run.run_dir.exists()


def test_a_job_without_engines_that_none_can_join_is_an_error_of_every_rank(folder: Path) -> None:
    with start_run(folder, "pool.count=0") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed("pool.count = 0", "set UMBRA_HOST_ADDRESS")
