"""A model of the lead's control traffic in a job of many nodes: pure, calibrated by `cluster.py`.

Each node has one engine and one rank. The lead has one event loop: it works on one message at a
time, in the order in which they arrive. All other nodes work side by side, so each of them costs
time only once. What the model leaves out: the network's own limits, the transfer of the weights,
torchrun's rendezvous, and the start of libraries and models.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from umbra.runtime.cluster.lead_link import LOST_AFTER_S

_SYNC_CALLS: Final = (1, 3, 1, 1, 3)
"""Calls in a sync for each engine, one after the other, between which the lead waits for all: the
image of its node; prepare_update, pause and load; verify_update, as in a sync with checksums;
commit_update; the three calls of the rank, which are taken to cost as much."""
_WATCHES_PER_S: Final = 10.0  # `_WATCH_INTERVAL_S` of engine_sync.py
_REPORTS_PER_S: Final = 4.0
"""`_REPORT_INTERVAL_S` of link_sender.py, the calls of a rank; as often comes the state of a node's
image (`_LOOK_INTERVAL_S` of node_images.py), which is taken to cost half a call."""
_SOFT_FILE_LIMIT: Final = 1024  # of a rank, on most systems


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCosts:
    """Costs as `cluster.py` measures them. Processor time is the lead's.

    Attributes:
        ready_s: start of a supervisor, on a machine of its own.
        join_cpu_s: of a node that joins.
        engine_s: start of an engine, from the lead's request to its answer.
        engine_cpu_s: of an engine that starts.
        call_cpu_s: of a call to an engine, half of it before and half of it after the engine.
        call_s: of one call, the lead's processor time included.
        call_nbytes: of one call and its answer.
        manifest_cpu_s, manifest_nbytes: of encoding the layout of the weights for one engine.
        look_cpu_s: of one look at an engine's load.
        link_cpu_s, link_threads, link_fds: of one end of a link for weights. Not the lead's, but
            of the rank or the node's receiver.
        rest_cpu_s: for each node and second at rest.
        rest_nbytes: for each node and second at rest.
    """

    ready_s: float
    join_cpu_s: float
    engine_s: float
    engine_cpu_s: float
    call_cpu_s: float
    call_s: float
    call_nbytes: float
    manifest_cpu_s: float
    manifest_nbytes: float
    look_cpu_s: float
    link_cpu_s: float
    link_threads: float
    link_fds: float
    rest_cpu_s: float
    rest_nbytes: float


def fan_out_s(num_peers: int, num_calls: int, cpu_s: float, away_s: float) -> float:
    """Until each peer has answered so many calls, which the lead makes one after the other to each
    peer and side by side to all.

    Args:
        cpu_s: the lead's processor time for a call: half before it is sent, half for the answer.
        away_s: from sending it to the arrival of its answer.
    """
    half_s, free_at, order = cpu_s / 2, 0.0, num_peers
    # (arrival at the lead, tie-breaker, pieces of work left: sending and answer of each call)
    arrivals = [(0.0, peer, 2 * num_calls) for peer in range(num_peers)]
    while arrivals:
        arrived_at, _, num_left = heapq.heappop(arrivals)
        free_at = max(free_at, arrived_at) + half_s
        if num_left > 1:
            sent = num_left % 2 == 0
            order += 1
            heapq.heappush(arrivals, (free_at + (away_s if sent else 0.0), order, num_left - 1))
    return free_at


def model(num_nodes: int, costs: ClusterCosts) -> dict[str, float]:
    """What a job of so many nodes takes, in seconds, bytes and shares of the lead's core."""
    away_s = max(0.0, costs.call_s - costs.call_cpu_s)
    join_s = fan_out_s(num_nodes, 1, costs.join_cpu_s, away_s)
    engines_s = fan_out_s(num_nodes, 1, costs.engine_cpu_s, costs.engine_s)
    start_s = costs.ready_s + join_s + engines_s
    sync_s = costs.manifest_cpu_s * num_nodes + sum(
        fan_out_s(num_nodes, calls, costs.call_cpu_s, away_s) for calls in _SYNC_CALLS
    )
    news_s = fan_out_s(num_nodes, 1, costs.call_cpu_s, away_s)
    return {
        "start_s": start_s,
        "join_s": join_s,
        "pause_ms": 1e3 * fan_out_s(num_nodes, 1, costs.call_cpu_s, away_s),
        "sync_s": sync_s,
        "sync_mb": num_nodes * (costs.manifest_nbytes + sum(_SYNC_CALLS) * costs.call_nbytes) / 1e6,
        "lead_core_at_rest": costs.rest_cpu_s * num_nodes,
        "lead_core_while_loading": _watching_cpu_s(costs) * num_nodes,
        "lead_kb_per_s": costs.rest_nbytes * num_nodes / 1e3,
        "recovery_s": LOST_AFTER_S + news_s + start_s,
        "links": float(num_nodes * (num_nodes - 1)),
        "links_of_rank_s": costs.link_cpu_s * (num_nodes - 1),
        "threads_of_rank": costs.link_threads * (num_nodes - 1),
        "fds_of_rank": costs.link_fds * (num_nodes - 1),
    }


def _watching_cpu_s(costs: ClusterCosts) -> float:
    """Of watching one engine and one rank for a second."""
    return _WATCHES_PER_S * costs.look_cpu_s + _REPORTS_PER_S * 1.5 * costs.call_cpu_s


def most_nodes(costs: ClusterCosts) -> dict[str, int]:
    """The number of nodes with one engine and one rank each at which each part of the lead is at
    its limit."""
    return {
        "max_nodes_join": int(LOST_AFTER_S / costs.join_cpu_s),
        "max_nodes_rest": int(1 / costs.rest_cpu_s),
        "max_nodes_load": int(1 / _watching_cpu_s(costs)),
        "max_nodes_fds": int(_SOFT_FILE_LIMIT / costs.link_fds),
        "max_nodes_pause": int(
            max(0.0, 0.05 - max(0.0, costs.call_s - costs.call_cpu_s)) / costs.call_cpu_s
        ),
    }
