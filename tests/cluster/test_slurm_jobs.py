"""The templates of launch/slurm, submitted to a real Slurm of three nodes, all on one host."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from run_traces import RunTraces, command_of
from slurm_cluster import SlurmCluster

from umbra.runtime.dash.sample_texts import open_ledger
from umbra.runtime.rollout.ledger.sample_accounts import SampleState
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.cluster, pytest.mark.process]

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = REPOSITORY / "launch/slurm/train.sbatch"
STANDALONE = REPOSITORY / "launch/slurm/standalone.sbatch"
GENERATE = REPOSITORY / "launch/slurm/generate.sbatch"
CONFIG = REPOSITORY / "launch/configs/quickstart.toml"
SAMPLES_PER_STEP = 32 * 8
START_LIMIT_S = 90.0
RUN_LIMIT_S = 400.0
GONE_WITHIN_S = 10.0


class Submission:
    """A job made from the template, with the quickstart's config, in a folder of its own."""

    def __init__(self, slurm: SlurmCluster, folder: Path, assets: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.run_dir = folder / "run"
        self.traces = RunTraces()
        self._settings = (
            f"model.path={assets}/model",
            f"data.train={assets}/train.jsonl",
            "data.eval=",
            f"run.dir={self.run_dir}",
            "train.export=false",
        )

    def submit(
        self, *settings: str, options: tuple[str, ...] = (), template: Path = TEMPLATE
    ) -> str:
        """Submits a template with sbatch's `options`; returns the job's id."""
        return self._submit(*options, template, CONFIG, *self._settings, *settings)

    def submit_generation(self) -> str:
        """Submits a node that generates for this job; returns its id."""
        return self._submit(GENERATE, self.run_dir)

    def _submit(self, *arguments: str | Path) -> str:
        bin_folder = str(Path(sys.executable).parent)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        environ = kept | self.traces.environment
        environ["PATH"] = os.pathsep.join([bin_folder, environ["PATH"]])
        return self.slurm.submit(*arguments, folder=self.folder, environ=environ)

    @property
    def supervisor_log(self) -> Path:
        return self.run_dir / "logs" / "supervisor.log"

    def output(self, job: str) -> Path:
        return self.folder / f"umbra-{job}.log"

    def num_steps(self, run_dir: Path | None = None) -> int:
        rows = read_metrics((run_dir or self.run_dir) / "metrics.jsonl")
        return max((int(row["step"]) for row in rows), default=0)

    def wait_for_step(self, job: str, step: int, run_dir: Path | None = None) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while self.num_steps(run_dir) < step:
            state = self.slurm.field(job, "JobState")
            assert state in ("PENDING", "RUNNING"), f"{state}\n{self.output(job).read_text()}"
            assert time.monotonic() < deadline, self.output(job).read_text()
            time.sleep(0.1)

    def wait_for_state(self, job: str, state: str) -> None:
        self.slurm.wait_for_state(job, state, RUN_LIMIT_S, self.output(job))

    def wait_for_text(self, path: Path, pattern: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not re.search(pattern, path.read_text()):
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.1)

    def wait_for_trap(self, job: str) -> None:
        """Waits until the batch script handles USR1, which is among the first things it does."""
        deadline = time.monotonic() + START_LIMIT_S
        while not any(map(_traps_usr1, self.traces.pids())):
            assert time.monotonic() < deadline, self.slurm.field(job, "JobState")
            time.sleep(0.02)

    def check_nothing_is_left(self) -> None:
        left = self.traces.find(GONE_WITHIN_S)
        assert not left, "left behind:\n" + "\n".join(left)

    def check_each_sample_is_trained_once(
        self, num_steps: int, run_dir: Path | None = None
    ) -> None:
        run_dir = run_dir or self.run_dir
        rows, _ = open_ledger(run_dir).newest(None, SampleState.TRAINED)
        assert len({row.sample_id for row in rows}) == len(rows)
        assert Counter(row.step for row in rows) == dict.fromkeys(
            range(num_steps), SAMPLES_PER_STEP
        )
        steps = [row["step"] for row in read_metrics(run_dir / "metrics.jsonl")]
        assert sorted(set(steps)) == list(range(1, num_steps + 1))


def _traps_usr1(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has ended
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    is_script = any(word.endswith("slurm_script") for word in command_of(pid))
    return is_script and bool(caught & 1 << (signal.SIGUSR1 - 1))


@pytest.fixture
def submission(slurm: SlurmCluster, tmp_path: Path, assets: Path) -> Generator[Submission]:
    submission = Submission(slurm, tmp_path, assets)
    with submission.traces:
        yield submission


def test_a_job_of_two_nodes_that_gets_usr1_is_requeued_and_appends_to_the_output_of_each_node(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_OUTPUT", "%x-%j-%n.log")  # not %N: these nodes share a host's name
    job = submission.submit("train.steps=12", options=("--nodes=2",))
    submission.wait_for_step(job, 2)
    assert len(list((submission.run_dir / "logs").rglob("supervisor.log"))) == 2

    submission.slurm.run("scancel", "--signal=USR1", "--batch", job)
    submission.wait_for_state(job, "COMPLETED")

    of_nodes = [submission.folder / f"umbra-{job}-{idx}.log" for idx in range(2)]
    texts = "".join(path.read_text() for path in of_nodes)
    of_job = submission.output(job).read_text()
    assert submission.slurm.field(job, "Restarts") == "1", of_job
    for part in (" 1/12 ", "stopped by SIGUSR1", "resuming after step", " 12/12 "):
        assert part in texts, texts  # of rank 0, which may be on the other node after the restart
    assert "USR1: preempting job" in of_job
    assert " 1/12 " not in of_job
    submission.check_each_sample_is_trained_once(12)
    submission.check_nothing_is_left()


@pytest.mark.umbra_allow_leaks("the cluster, which other tests share, starts a node again")
def test_a_job_that_loses_a_node_is_requeued_and_finishes_on_others(
    submission: Submission,
) -> None:
    job = submission.submit("train.steps=12", "train.checkpoint_every=2", options=("--nodes=2",))
    submission.wait_for_step(job, 3)

    with submission.slurm.without("node-b"):
        submission.wait_for_text(submission.output(job), "node-a: task 0: Exited with exit code 1")
        # srun still waits for node-b. Slurm would find after SlurmdTimeout, 300 s, that it is gone.
        submission.slurm.run("scontrol", "update", "NodeName=node-b", "State=DOWN", "Reason=gone")
        submission.wait_for_state(job, "COMPLETED")

    output = submission.output(job).read_text()
    assert submission.slurm.field(job, "Restarts") == "1", output
    assert re.search(r"node [01] \(|because its node was", output), output  # torchrun numbers them
    assert "resuming after step" in output
    assert submission.slurm.field(job, "NodeList") == "node-a,node-c"
    submission.check_each_sample_is_trained_once(12)
    submission.check_nothing_is_left()


def test_a_job_that_gets_usr1_before_it_trains_is_requeued_and_finishes(
    submission: Submission,
) -> None:
    job = submission.submit("train.steps=2")
    submission.wait_for_trap(job)

    submission.slurm.run("scancel", "--signal=USR1", "--batch", job)
    submission.wait_for_state(job, "COMPLETED")

    assert submission.slurm.field(job, "Restarts") == "1"
    submission.check_each_sample_is_trained_once(2)
    submission.check_nothing_is_left()


def test_a_job_of_two_nodes_asks_a_judge(submission: Submission, assets: Path) -> None:
    job = submission.submit(
        "train.steps=3",
        f"pools.judge.model_path={assets}/model",
        "reward.function=cluster_rewards:judged",
        f"reward.python_path=['{Path(__file__).parent}']",
        options=("--nodes=2",),
    )

    submission.wait_for_state(job, "COMPLETED")

    logs = {path.name for path in (submission.run_dir / "logs").rglob("judge-[0-9].log")}
    assert logs == {"judge-0.log", "judge-1.log"}
    submission.check_each_sample_is_trained_once(3)
    submission.check_nothing_is_left()


def test_scancel_leaves_nothing(submission: Submission) -> None:
    job = submission.submit("train.steps=1000")
    submission.wait_for_step(job, 1)

    submission.slurm.run("scancel", job)
    submission.wait_for_state(job, "CANCELLED")

    submission.check_nothing_is_left()
    assert not (submission.run_dir / "preempted").exists()


def test_a_preemption_of_an_array_task_concerns_no_other(submission: Submission) -> None:
    array = submission.submit("train.steps=12", options=("--array=0-1",))
    dirs = [submission.run_dir / str(task) for task in range(2)]
    for task, run_dir in enumerate(dirs):
        submission.wait_for_step(f"{array}_{task}", 1, run_dir)
    # Slurm takes the id of one of the tasks, which is the array's, for all of them.
    leader = [submission.slurm.field(f"{array}_{task}", "JobId") for task in range(2)].index(array)

    submission.slurm.run("scancel", "--signal=USR1", "--batch", f"{array}_{leader}")
    for task in range(2):
        submission.wait_for_state(f"{array}_{task}", "COMPLETED")

    restarts = [submission.slurm.field(f"{array}_{task}", "Restarts") for task in range(2)]
    assert restarts == [str(int(task == leader)) for task in range(2)]
    for run_dir in dirs:
        submission.check_each_sample_is_trained_once(12, run_dir)
    submission.check_nothing_is_left()


def test_a_chain_of_jobs_continues_where_jobs_are_not_requeued(submission: Submission) -> None:
    first = submission.submit("train.steps=12", options=("--no-requeue",))
    options = ("--no-requeue", f"--dependency=afternotok:{first}")
    second = submission.submit("train.steps=12", options=options)
    submission.wait_for_step(first, 1)

    submission.slurm.run("scancel", "--signal=USR1", "--batch", first)
    submission.wait_for_state(first, "FAILED")
    submission.wait_for_state(second, "COMPLETED")

    assert submission.slurm.field(first, "ExitCode") == "75:0"
    submission.check_each_sample_is_trained_once(12)
    submission.check_nothing_is_left()


def test_a_wrong_config_fails_and_is_not_requeued(submission: Submission) -> None:
    submission.run_dir.mkdir()
    (submission.run_dir / "preempted").touch()  # an earlier job's
    job = submission.submit("train.stepz=2")

    submission.wait_for_state(job, "FAILED")

    assert submission.slurm.field(job, "ExitCode") == "1:0"
    assert "train.stepz is unknown" in submission.output(job).read_text()


def test_a_job_of_training_and_generating_nodes_that_gets_usr1_is_requeued_and_finishes(
    submission: Submission,
) -> None:
    job = submission.submit("train.steps=12", template=STANDALONE)
    submission.wait_for_step(job, 2)

    submission.slurm.run("scancel", "--signal=USR1", "--batch", job)
    submission.slurm.wait_for_restart(job, RUN_LIMIT_S, submission.output(job))
    submission.wait_for_state(job, "COMPLETED")

    output = submission.output(job).read_text()
    assert "resuming after step" in output
    assert output.count("has joined to generate") == 2, output
    submission.check_each_sample_is_trained_once(12)
    submission.check_nothing_is_left()


def test_two_nodes_train_and_another_one_generates(submission: Submission) -> None:
    job = submission.submit(
        "train.steps=3", options=("--nodes=2", ":", "--nodes=1"), template=STANDALONE
    )

    submission.wait_for_state(job, "COMPLETED")

    assert "node 2 (" in submission.output(job).read_text()
    engines = {path.name for path in (submission.run_dir / "logs").rglob("policy-[0-9].log")}
    assert engines == {"policy-0.log"}
    submission.check_each_sample_is_trained_once(3)
    submission.check_nothing_is_left()


def test_a_node_that_generates_for_a_job_is_cancelled(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBRA_HOST_ADDRESS", "127.0.0.1")
    job = submission.submit("train.steps=100")
    submission.wait_for_step(job, 1)
    generation = submission.submit_generation()
    submission.wait_for_text(submission.supervisor_log, "version .* is on .*policy-2")

    submission.slurm.run("scancel", generation)
    submission.wait_for_state(generation, "CANCELLED")
    submission.wait_for_state(job, "COMPLETED")

    output = (submission.folder / f"umbra-generate-{generation}.log").read_text()
    assert "left the job after SIGTERM" in output
    assert "which only generated, has left" in submission.output(job).read_text()
    submission.check_each_sample_is_trained_once(100)
    submission.check_nothing_is_left()
