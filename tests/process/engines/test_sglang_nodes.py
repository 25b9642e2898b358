"""An SGLang engine on several nodes: its parts with a stand-in for SGLang, and what its workers do
with gloo."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from actor_specs import PROGRAMS
from process_runs import assert_ended
from rank_processes import poll
from watching import tree

from umbra.engines.loading.worker_updates import WorkerMemory
from umbra.engines.sglang.sglang_worker import gather_reports
from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.cluster.placement import EngineGpus, FollowerPlace
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session.session import Session
from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.runtime.testing.factories import SessionFactory
from umbra.runtime.weights.manifest import Manifest

pytestmark = [pytest.mark.process, pytest.mark.slow]

SHARED = Path(__file__).parents[2] / "shared"


class SpanningSglang:
    """One engine with a follower, both on this node."""

    def __init__(self, session: Session, model: Path) -> None:
        self._session = session
        paths = (PROGRAMS / "stand_in_sglang", SHARED / "engines", SHARED)
        self._pool = session.create_pool(
            PoolSpec(
                name="pool",
                engine="sglang",
                count=1,
                mode="standalone",
                load_weights=True,
                kwargs={
                    "model_path": str(model),
                    "dtype": "float32",
                    "max_context_len": 512,
                    "engine_args": {"tp_size": 2},
                },
                env={"PYTHONPATH": os.pathsep.join(map(str, [*paths, *sys.path]))},
                engine_followers=((FollowerPlace(node=0, gpus=EngineGpus(own=())),),),
                restart=RestartPolicy(backoff_initial_s=0.01),
            )
        )

    def schedulers(self, incarnation: int) -> list[tuple[str, int]]:
        """Those of the stand-in, the leading part's first, with their arguments, once the engine
        serves."""
        return sorted(poll(lambda: self._found(incarnation), 2, "an engine of two parts").items())

    def _found(self, incarnation: int) -> dict[str, int]:
        (state,) = self._pool.states()
        if (state["incarnation"], state["state"]) != (incarnation, "SERVING"):
            return {}
        pids = {str(a["name"]): int(a["pid"]) for a in self._session.supervisor_call("list_actors")}
        below = [pid for name in ("pool-0", "pool-0.1") for pid in tree(pids[name])]
        return {part: pid for pid in below if (part := variables(pid).get("STAND_IN_PART"))}


def variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


@pytest.fixture
def spanning(
    umbra_session_factory: SessionFactory, model_folder: Callable[[str], Path]
) -> Generator[SpanningSglang]:
    session = umbra_session_factory(tcp_host="127.0.0.1")
    spanning = SpanningSglang(session, model_folder("qwen3"))
    yield spanning
    pids = [pid for _, pid in spanning.schedulers(3)]
    umbra_session_factory.close()
    assert_ended(pids)


def test_the_parts_of_an_engine_on_two_nodes_are_started_to_meet_and_die_together(
    spanning: SpanningSglang,
) -> None:
    (leading, leading_pid), (follower, follower_pid) = spanning.schedulers(1)

    assert leading.startswith("0 of 2 at 127.0.0.1:")
    assert follower == leading.replace("0", "1", 1)
    for pid in (leading_pid, follower_pid):
        assert variables(pid)["SGLANG_HOST_IP"] == "127.0.0.1"
        assert variables(pid)["GLOO_SOCKET_IFNAME"] == "lo"
        assert variables(pid)["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"

    os.kill(follower_pid, signal.SIGKILL)
    assert_ended([leading_pid, follower_pid])

    (_, leading_pid), (_, follower_pid) = spanning.schedulers(2)
    program = int(Path(f"/proc/{follower_pid}/stat").read_text().split()[3])  # its parent
    os.kill(program, signal.SIGQUIT)  # as a scheduler does that fails, and may not end
    assert_ended([program, leading_pid, follower_pid])
    assert spanning.schedulers(3)


def gather() -> list[dict[str, Any]]:
    rank = torch.distributed.get_rank()
    group = torch.distributed.new_group(backend="gloo")
    return gather_reports({"pid": rank, "unread": ["a"] * 100 * rank}, group)


def test_the_first_worker_gets_the_reports_of_all(
    umbra_distributed_world: DistributedWorld,
) -> None:
    reports = [{"pid": rank, "unread": ["a"] * 100 * rank} for rank in range(3)]

    assert umbra_distributed_world(gather, num_ranks=3) == [reports, [], []]


def read_image(paths: list[str], manifest: dict[str, Any]) -> list[float]:
    description = {"path": paths[0], "paths": paths, "nbytes": 4096, "manifest": manifest}
    with WorkerMemory().reading(description, torch.device("cpu")) as source:
        return [float(value) for value in dict(source.tensors())["a"]]


def test_every_worker_reads_the_image_of_its_own_node(
    umbra_distributed_world: DistributedWorld, tmp_path: Path
) -> None:
    paths = [tmp_path / f"image{node}" for node in range(2)]
    for node, path in enumerate(paths):
        values = torch.full((1024,), float(node))
        path.write_bytes(values.numpy().tobytes())
    manifest = Manifest.layout([("a", "float32", (2,))]).to_wire()

    read = umbra_distributed_world(read_image, [str(path) for path in paths], manifest, num_ranks=4)

    assert read == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
