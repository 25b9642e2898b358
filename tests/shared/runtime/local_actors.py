"""Actors without a supervisor."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_rules import JobRules
from umbra.runtime.actor.node_context import NodeContext, NodeSettings
from umbra.runtime.actor.supervised_actor import SupervisedActor
from umbra.runtime.cluster.attached_ranks import AttachedRanks
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.run_requests import supervisor_ref
from umbra.runtime.process import orphans
from umbra.runtime.process.child_process import living_pids
from umbra.runtime.process.descendants import child_pids
from umbra.runtime.rpc.rpc_client import Client


@contextmanager
def lone_node(folder: Path) -> Generator[NodeContext]:
    """A node without a supervisor, whose notes nobody reads. Its actors, which end orphans, spare
    this process's other children: a fork server serves the tests that follow."""
    node = NodeSettings(
        node_id="n",
        socket_dir=folder,
        log_dir=folder,
        supervisor=supervisor_ref("n", folder),
        tcp_host="",
        keys=(),
        log_level=20,
    )
    client = Client("n")
    context = NodeContext(
        node=node,
        client=client,
        rules=JobRules(nodes_may_change=False),
        links=JobLinks(client),
        ranks=AttachedRanks(lambda event: None),
        note=lambda text, kind, who: None,
        record=lambda text, kind, who: None,
    )
    others = frozenset(child_pids(os.getpid()))
    try:
        with patch.object(orphans, "living_pids", lambda: living_pids() | others):
            yield context
    finally:
        client.close()
        context.sockets.destroy(linger=0)


def actor_without_process(context: NodeContext) -> SupervisedActor:
    """An engine that nobody runs. The test sets its state."""
    spec = ActorSpec(
        name="judge-0", target="umbra.engines.echo.echo_engine:EchoEngine", role="engine"
    )
    return SupervisedActor(spec, context, lambda _: None)
