"""Actors for tests of what the supervisor knows about them."""

from __future__ import annotations

from pathlib import Path

import zmq

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.job_stop import JobStop
from umbra.runtime.actor.supervised_actor import NodeSettings, SupervisedActor
from umbra.runtime.rpc.envelopes import ActorRef


def actor_without_process(folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> SupervisedActor:
    """An engine that nobody runs. The test sets its state."""
    supervisor = ActorRef(name="supervisor", incarnation=1, node_id="n", ipc_endpoint="ipc://none")
    node = NodeSettings(
        node_id="n",
        socket_dir=folder,
        log_dir=folder,
        supervisor=supervisor,
        tcp_host="",
        keys=(),
        log_level=20,
    )
    spec = ActorSpec(
        name="judge-0", target="umbra.engines.echo.echo_engine:EchoEngine", role="engine"
    )
    return SupervisedActor(
        spec, node, context, lambda _: None, lambda text, kind, who: None, JobStop()
    )
