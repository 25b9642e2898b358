"""Only a job's own nodes may talk to it: two nodes over tcp, and nobody else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import zmq
from actor_specs import PROGRAMS, actor
from raw_socket import receive_result
from rpc_process import ActorProcess, short_folder
from watching import tree

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ActorNotFound, ConfigError, ConnectionLost, UmbraError
from umbra.runtime.rpc.curve_keys import CurveKeys, holding_keys, sweep_keys
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.wire import CALL, ActorRef
from umbra.runtime.session.launch import NodeLaunch, SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Session, ActorRef]]:
    """This process as node `a`, and an actor of node `b`, another process's own node."""
    folder = tmp_path_factory.mktemp("nodes")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        SessionFactory(folder, monkeypatch) as factory,
    ):
        here = factory(node_id="a", tcp_host="127.0.0.1")
        there = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "node.py"), str(folder / "there"), "b"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with there:
            assert there.stdout is not None
            ref = ActorRef(**json.loads(there.stdout.readline()))
            # Here already, or the connection would count as the first caller's leak.
            here.connect(ref).call("who", timeout_s=30.0)
            yield here, ref
            there.communicate(b"\n", timeout=60.0)


@pytest.fixture
def remote(nodes: tuple[Session, ActorRef]) -> ActorRef:
    """An actor of node `b` that offers tcp."""
    return nodes[1]


@pytest.fixture
def keys() -> CurveKeys:
    """The job's, as its processes read them."""
    return CurveKeys.load(Path(os.environ["UMBRA_SECRET_FILE"]))


def call_from_node_a(
    keys: CurveKeys | None, ref: ActorRef, timeout_s: float = 5.0, call: Sequence[str] = ("who",)
) -> object:
    async def make() -> object:
        async with Client("a", keys) as client:
            return await client.handle(ref).call(*call, timeout_s=timeout_s)

    return asyncio.run(make())


# -- two nodes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_actor_calls_an_actor_of_another_node(nodes: tuple[Session, ActorRef]) -> None:
    here, remote = nodes
    local = here.spawn(actor("Echo"))

    who = local.call("ask", remote, "who", timeout_s=30.0)

    assert (who["node_id"], who["name"]) == ("b", "remote")
    assert local.call("who")["node_id"] == "a"
    assert remote.tcp_endpoint.startswith("tcp://127.0.0.1:")
    here.stop(local.ref.name)


def test_an_actor_without_tcp_is_an_error(remote: ActorRef, keys: CurveKeys) -> None:
    with pytest.raises(ActorNotFound, match="no endpoint reachable from node a"):
        call_from_node_a(keys, replace(remote, tcp_endpoint=""))


def test_a_stranger_that_knows_the_public_key_gets_a_refusal(
    remote: ActorRef, keys: CurveKeys
) -> None:
    class Impostor(CurveKeys):
        def secure_client(self, socket: zmq.Socket[bytes]) -> None:
            super().secure_client(socket)
            socket.curve_serverkey = keys.public

    fresh = CurveKeys.generate()

    with pytest.raises(ConnectionLost, match="refused this job's key"):
        call_from_node_a(Impostor(public=fresh.public, secret=fresh.secret), remote)


# -- strangers -----------------------------------------------------------------------------


GARBAGE = b"\xc1"
"""Each message of it that a server reads is counted in the server's log."""


@contextmanager
def peer(endpoint: str, own: CurveKeys | None, server: CurveKeys) -> Generator[zmq.Socket[bytes]]:
    """A plain ZMQ client; `own` None: without CURVE."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if own is not None:
            socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
            socket.curve_serverkey = server.public
        socket.connect(endpoint)
        yield socket


def append_call(call_id: int) -> bytes:
    return msgpack.packb([CALL, call_id, 1, "append", [1], {}, 5000, 0])


@pytest.mark.slow
def test_strangers_get_nothing_and_cost_no_parsed_message() -> None:
    ours, theirs = CurveKeys.generate(), CurveKeys.generate()
    with (
        short_folder() as folder,
        ActorProcess(Path(folder), keys=ours, tcp_host="127.0.0.1") as actor,
        peer(actor.ref.tcp_endpoint, None, ours) as without_curve,
        peer(actor.ref.tcp_endpoint, theirs, ours) as with_a_random_key,
        peer(actor.ref.tcp_endpoint, theirs, theirs) as of_another_job,
        peer(actor.ref.tcp_endpoint, ours, ours) as of_the_job,
    ):
        strangers = (without_curve, with_a_random_key, of_another_job)
        for stranger in strangers:
            # Once the server has refused the connection, a send would wait for ever.
            with suppress(zmq.Again):
                for call_id in range(100):
                    stranger.send(append_call(call_id), zmq.DONTWAIT)
                    stranger.send(GARBAGE, zmq.DONTWAIT)
        for _ in range(3):
            of_the_job.send(GARBAGE)
        of_the_job.send(append_call(7))
        assert receive_result(of_the_job, 7) == 0

        assert not any(stranger.poll(500) for stranger in strangers)
        of_the_job.send(append_call(8))
        assert receive_result(of_the_job, 8) == 1  # no stranger has called it meanwhile
        actor.end()
        log = actor.log()

    assert "dropped 2 more messages from a caller, 3 in all" in log


def test_tcp_is_bound_to_the_chosen_address_only() -> None:
    with (
        short_folder() as folder,
        ActorProcess(Path(folder), keys=CurveKeys.generate(), tcp_host="127.0.0.1") as actor,
    ):
        port = int(actor.ref.tcp_endpoint.rpartition(":")[2])

        with socket.create_connection(("127.0.0.1", port), timeout=60.0):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=60.0)


@needs_ipv6
def test_an_actor_of_a_node_with_an_ipv6_address_is_called_under_the_jobs_keys() -> None:
    own = CurveKeys.generate()
    with (
        short_folder() as folder,
        ActorProcess(Path(folder), keys=own, tcp_host="::1") as actor,
    ):
        assert actor.ref.tcp_endpoint.startswith("tcp://[::1]:")
        assert call_from_node_a(own, actor.ref, call=("echo", "here")) == "here"
        with pytest.raises(ConnectionLost):
            call_from_node_a(CurveKeys.generate(), actor.ref)


@needs_ipv6
def test_a_job_whose_host_has_an_ipv6_address_meets_its_nodes(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory(tcp_host="::1")

    assert [node.address for node in session.nodes] == ["::1"]


# -- secrets -------------------------------------------------------------------------------


def test_the_secret_is_in_no_environment_and_on_no_command_line(
    nodes: tuple[Session, ActorRef], keys: CurveKeys
) -> None:
    for pid in tree(os.getpid()):
        for name in ("environ", "cmdline"):
            assert keys.secret not in Path(f"/proc/{pid}/{name}").read_bytes()
    mode = nodes[0].socket_dir.stat().st_mode
    assert stat.S_IMODE(mode) == 0o700
    assert stat.S_IMODE(Path(os.environ["UMBRA_SECRET_FILE"]).stat().st_mode) == 0o600


def test_keys_are_saved_for_their_owner_only_and_shown_to_nobody(tmp_path: Path) -> None:
    made = CurveKeys.generate()
    path = tmp_path / "jobs" / "keys"

    made.save(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert CurveKeys.load(path) == made
    assert made.secret.decode() not in repr(made)
    with pytest.raises(FileExistsError):
        made.save(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others: chmod 600"):
        CurveKeys.load(path)


@pytest.mark.parametrize("content", [b"", b"one", b"a b c", b"short keys"])
def test_a_file_that_holds_no_keys_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o600)

    with pytest.raises(ConfigError, match=r"no job keys in .*keys"):
        CurveKeys.load(path)


def test_only_keys_need_a_home_directory(
    tmp_path: Path, socket_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBRA_SOCKET_ROOT", str(socket_root))
    monkeypatch.delenv("UMBRA_SECRET_FILE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # as by docker run --user

    node = NodeLaunch(SessionConfig(run_dir=tmp_path), TorchrunEnvironment.read({}))

    with pytest.raises(ConfigError, match=r"user 54321 has no home .*: set HOME, or UMBRA_SECRET"):
        _ = node.secret_file


def test_the_keys_a_job_made_for_itself_go_with_it(
    umbra_session_factory: SessionFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    umbra_session_factory(tcp_host="127.0.0.1", environ={"UMBRA_SECRET_FILE": ""})
    made = list((tmp_path / ".config" / "umbra" / "jobs").iterdir())

    umbra_session_factory.close()

    assert len(made) == 1
    assert not made[0].exists()


@pytest.mark.slow
def test_an_address_this_host_does_not_have_is_named(
    umbra_session_factory: SessionFactory,
) -> None:
    with pytest.raises(UmbraError, match=r"on '203\.0\.113\.7': .*set UMBRA_HOST_ADDRESS"):
        umbra_session_factory(tcp_host="203.0.113.7")


def test_the_keys_of_a_dead_job_are_swept_and_those_of_a_running_one_are_not(
    tmp_path: Path,
) -> None:
    dead, alive, young = (tmp_path / name for name in ("dead", "alive", "young"))
    for path in (dead, alive, young):
        CurveKeys.generate().save(path)
    for path in (dead, alive):
        os.utime(path, (0.0, 0.0))

    with holding_keys(alive):
        sweep_keys(tmp_path)
        assert sorted(tmp_path.iterdir()) == [alive, young]

    sweep_keys(tmp_path)
    assert list(tmp_path.iterdir()) == [young]
