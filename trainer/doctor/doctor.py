"""`umbra doctor CONFIG` checks this node for a run, and with torchrun all nodes and ranks:

    torchrun ... -m umbra.trainer.doctor CONFIG.toml [section.key=value ...]

It is a part of the trainer because it reads the trainer's config and calls the trainer's own
checks, which nothing in `umbra.runtime` may import. The options of torchrun are those of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any, Final

import torch.distributed

from umbra.runtime.cluster.environment import TorchrunEnvironment, bind_to_agent
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.cluster.placement import Node
from umbra.runtime.errors import DataError, UmbraError
from umbra.runtime.process.nvml import gpu_sizes
from umbra.runtime.terminal_text import escape_unprintable
from umbra.trainer.config import setting_rules
from umbra.trainer.config.config_file import load_any_config
from umbra.trainer.config.launch_values import num_ranks
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.hub_paths import with_local_paths
from umbra.trainer.doctor.node_checks import (
    HUB,
    NodeChecks,
    Verdict,
    not_checked,
    open_files,
    verdict_of,
)
from umbra.trainer.doctor.rank_checks import (
    MEETING_LIMIT_S,
    check_clocks,
    check_connections,
    check_cuda_ipc,
    check_nccl,
    check_peer_access,
    nodes_met,
)
from umbra.trainer.services.chosen_settings import with_chosen_settings
from umbra.trainer.sft.row_preparation import read_rows, summary_of
from umbra.trainer.sft.sft_command import check_sft_setup
from umbra.trainer.world.mesh import usable_gpus

_dist: Final[Any] = torch.distributed
_NODE_LIMIT_S: Final = 600.0
"""For the checks of the slowest node, which may import an engine's library from a
network file system."""


def run(arguments: argparse.Namespace) -> int:
    """`umbra doctor`: checks this node, and returns 0 if all is well there. Raises ConfigError
    for wrong settings."""
    given = load_any_config(arguments.config, arguments.overrides)
    config, settled = _settled(given, TorchrunEnvironment.read({}))
    gpus = usable_gpus()
    count = num_ranks(config, len(gpus))
    environment = replace(TorchrunEnvironment.read({}), world_size=count, local_world_size=count)
    made = _alone(config, environment, gpus)
    if isinstance(given, SftConfig):
        made = SftChecks(given, config, environment).make()
    verdicts: list[Verdict] = []
    for verdict in _each_cause_once(chain(settled, made)):
        _print(verdict)
        verdicts.append(verdict)
    print(
        "\nThis node alone was checked. This checks all nodes and the ranks' network, with the "
        "run's own\noptions of torchrun: torchrun ... -m umbra.trainer.doctor CONFIG"
    )
    return _conclude(verdicts)


def _settled(
    given: TrainerConfig | SftConfig, environment: TorchrunEnvironment
) -> tuple[TrainerConfig, list[Verdict]]:
    """The config as the run will have it, with the verdicts on what cannot be downloaded and on
    what is chosen for this machine. Raises JobFailed if another node does not finish in time."""
    config = given.as_trainer_config() if isinstance(given, SftConfig) else given
    verdicts: list[Verdict] = []
    try:
        config = with_local_paths(config, environment)
    except DataError as error:
        verdicts.append(Verdict(HUB, "FAILED", str(error)))
    if isinstance(given, SftConfig):  # its run chooses by the device alone
        return config, verdicts
    config, chosen = with_chosen_settings(config)
    if chosen:
        verdicts.append(Verdict("settings", "ok", chosen))
    return config, verdicts


def _alone(
    config: TrainerConfig, environment: TorchrunEnvironment, gpus: Sequence[str]
) -> Iterator[Verdict]:
    node = Node(gpus=tuple(gpus), num_ranks=environment.local_world_size)
    yield from NodeChecks(config, environment, [node], [gpu_sizes(gpus)]).make()
    yield verdict_of("CUDA IPC", lambda: check_cuda_ipc(config, range(max(1, len(gpus)))))
    yield verdict_of("peer access", lambda: check_peer_access(config))


def main(argv: Sequence[str]) -> int:
    """One rank's part under torchrun. Rank 0 prints, and all return 0 if all is well everywhere."""
    if not argv:
        print("usage: python -m umbra.trainer.doctor CONFIG [section.key=value ...]")
        return 2
    bind_to_agent()
    try:
        environment = TorchrunEnvironment.read()
        given = load_any_config(argv[0], argv[1:])
        config, settled = _settled(given, environment)
    except UmbraError as error:
        print(f"umbra: {escape_unprintable(str(error))}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as meeting:
        made = _checks_of_rank(config, environment, meeting)
        if isinstance(given, SftConfig):
            is_first = environment.local_rank == 0
            made = SftChecks(given, config, environment).make() if is_first else ()
        verdicts = [*settled, *made]
        with _ended_after(_NODE_LIMIT_S, "FAILED  the ranks do not meet: see the output of each"):
            _dist.init_process_group("gloo", timeout=timedelta(seconds=_NODE_LIMIT_S))
            verdicts.append(verdict_of("clocks", lambda: check_clocks(environment.world_size)))
            found = list(_each_cause_once(_gather(verdicts, environment)))
    for verdict in found:
        _print(verdict)
    with _ended_after(
        2 * MEETING_LIMIT_S,
        "FAILED  NCCL: the ranks do not connect: run again with NCCL_DEBUG=INFO, and choose the "
        "network by NCCL_SOCKET_IFNAME",
    ):
        nccl = [verdict_of("NCCL", lambda: check_nccl(config, environment))]
        reported = _gather(nccl, environment)
    for verdict in reported:
        _print(verdict)
    status = _conclude([*found, *reported]) if environment.rank == 0 else 0
    # If one rank alone failed, torchrun on other nodes would wait minutes for its node.
    statuses = [status]
    _dist.broadcast_object_list(statuses, src=0)
    _dist.destroy_process_group()
    return statuses[0]


def _checks_of_rank(
    config: TrainerConfig, environment: TorchrunEnvironment, meeting: contextlib.ExitStack
) -> Iterator[Verdict]:
    """A node's local rank 0 makes the node's checks. `meeting` is closed when
    all ranks have met."""
    if environment.local_rank < max(1, len(usable_gpus())):
        yield verdict_of("CUDA IPC", lambda: check_cuda_ipc(config, [environment.local_rank]))
    if environment.local_rank > 0:
        return
    yield verdict_of("peer access", lambda: check_peer_access(config))
    gpus = usable_gpus()
    nodes = [Node(gpus=gpus, num_ranks=environment.local_world_size)]
    gpu_nbytes: list[Sequence[int]] = [gpu_sizes(gpus)]
    if environment.spans_nodes:
        met: list[JobNode] = []
        yield verdict_of("nodes", lambda: _meet(config, environment, met, meeting))
        if met:
            nodes = [
                Node(gpus=node.gpus, num_ranks=node.num_ranks, address=node.address) for node in met
            ]
            gpu_nbytes = [node.gpu_nbytes for node in met]
    yield from NodeChecks(config, environment, nodes, gpu_nbytes).make()


def _meet(
    config: TrainerConfig,
    environment: TorchrunEnvironment,
    met: list[JobNode],
    meeting: contextlib.ExitStack,
) -> str:
    """Adds the nodes to `met`. They listen until the meeting is closed."""
    met.extend(meeting.enter_context(nodes_met(environment, config.run.dir)))
    return check_connections(met)


@contextlib.contextmanager
def _ended_after(limit_s: float, text: str) -> Generator[None]:
    """Ends this process if the block takes longer: a connecting library cannot be interrupted."""

    def end() -> None:
        print(text, flush=True)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _gather(verdicts: Sequence[Verdict], environment: TorchrunEnvironment) -> list[Verdict]:
    """All ranks' verdicts, on rank 0; the same ones once. Collective. They travel by
    torch.distributed's own gathering of objects between the ranks of this job."""
    is_first = environment.rank == 0
    gathered: list[list[Verdict]] = [[] for _ in range(environment.world_size)]
    _dist.gather_object(list(verdicts), gathered if is_first else None)
    reporters: defaultdict[Verdict, list[int]] = defaultdict(list)
    num_reporters = Counter[str]()
    for rank, reported in enumerate(gathered):
        num_reporters.update({verdict.check for verdict in reported})
        for verdict in reported:
            reporters[verdict].append(rank)
    return [
        verdict
        if len(ranks) == num_reporters[verdict.check]
        else replace(verdict, text=f"rank {', '.join(map(str, ranks))}: {verdict.text}")
        for verdict, ranks in reporters.items()
    ]


def _each_cause_once(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """A check that fails with the message of an earlier one only refers to that."""
    checks: dict[str, str] = {}
    for verdict in verdicts:
        first = verdict.check
        if verdict.state == "FAILED":
            first = checks.setdefault(verdict.text, first)
        yield verdict if first == verdict.check else not_checked(verdict.check, first)


def _print(verdict: Verdict) -> None:
    first, *others = escape_unprintable(verdict.text).splitlines() or [""]
    print(f"{verdict.state:<7} {verdict.check:<14} {first}")
    for line in others:
        print(f"{'':<23}{line}")
    sys.stdout.flush()


def _conclude(verdicts: Sequence[Verdict]) -> int:
    num_failed = sum(verdict.state == "FAILED" for verdict in verdicts)
    if num_failed:
        print("1 check failed" if num_failed == 1 else f"{num_failed} checks failed", flush=True)
    elif any(verdict.state == "warning" for verdict in verdicts):
        print("no check failed; see the warnings", flush=True)
    else:
        print("all is well", flush=True)
    return int(num_failed > 0)


class SftChecks(NodeChecks):
    """The checks of one node for fine-tuning, which has neither engines nor user code. `base` is
    the config as RL training would have it, with local paths."""

    def __init__(
        self, config: SftConfig, base: TrainerConfig, environment: TorchrunEnvironment
    ) -> None:
        on_gpu = base.train.device != "cpu" and bool(usable_gpus())
        if base.model.dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
            base = replace(base, model=replace(base.model, dtype=dtype))
        super().__init__(base, environment, (), ())
        self._sft = config.with_paths_of(base)

    def make(self) -> Iterator[Verdict]:
        yield from self._versions()
        yield self._verdict("setup", self._setup, after=self._hub("model", "data"))
        yield self._verdict("rows", self._rows, after="setup")
        warnings = {"rows": self._data_warnings, "settings": setting_rules.warnings(self._sft)}
        for check, texts in warnings.items():
            yield from (Verdict(check, "warning", text) for text in texts)
        if self._environment.node_rank == 0:
            yield self._verdict("run lock", self._run_lock, after="setup")
        yield self._verdict("disk space", self._disk_space, after="setup")
        yield verdict_of("open files", open_files)
        yield verdict_of("GPUs", self._gpus)

    def _setup(self) -> str:
        """All that a run checks on each rank before it starts anything."""
        check_sft_setup(self._sft, self._environment)
        batch, num_ranks = self._sft.sft.batch_size, self._environment.world_size
        return f"{self._sft.model.path}, {batch} rows a step for {num_ranks} ranks"

    def _rows(self) -> str:
        warnings = list[str]()
        rows = read_rows(self._sft, warnings.append)
        self._data_warnings = warnings
        return summary_of(rows)
