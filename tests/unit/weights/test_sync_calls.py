"""The calls of a sync as they cross processes."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from umbra.runtime.errors import DeadlineExceeded, ProtocolError
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.rank_exports import Allocation, RankExports, TensorPart
from umbra.runtime.weights.sync_messages import (
    LinkState,
    SyncAbort,
    SyncAnswer,
    SyncBegin,
    SyncCall,
    SyncEnd,
    SyncFilled,
    SyncGrant,
    SyncMessage,
    SyncProgressed,
    SyncReport,
    decode_answer,
    decode_call,
    encode,
)
from umbra.trainer.policy_engines import sync_metrics

EXPORTS = RankExports(
    allocations=(Allocation(b"\1" * 16, b"\2" * 64, 4096, 7),),
    parts=(TensorPart(0, 0, 512, "float32", (3, 5), (5, 1)),),
)

GRANT = SyncGrant(
    sync_id="policy-1",
    transport="memfd",
    bucket_nbytes=512,
    num_buckets=3,
    has_checksums=True,
    details={"fd_socket": "/tmp/fds", "names": ["a", "b"]},
)
REPORT = SyncReport(
    version=3,
    transport="memfd",
    engines={"policy-0": {"nbytes": 64, "load_s": 0.25}},
    failed={},
    remaining=["policy-1"],
    network_nbytes=100,
    prepare_s=0.5,
    transfer_s=0.25,
    verify_s=0.125,
    resume_s=0.5,
)

FILLED: dict[str, Any] = {
    "kind": "SyncFilled",
    "sync_id": "policy-1",
    "rank": 0,
    "deadline": 1.0,
    "regions": [],
    "network_nbytes": 0,
    "is_released": True,
}
STATE = LinkState(is_aborted=True, gone=[1, 4])

BEGIN = SyncBegin(
    pool="policy",
    version=3,
    rank=0,
    world_size=1,
    manifest=None,
    offers={"cuda_ipc": "", "tcp": ""},
    node_id="first",
    deadline=0.0,
)
PROGRESSED = SyncProgressed(sync_id="policy-1", rank=0, num_filled=4, deadline=0.0)
END = SyncEnd(sync_id="policy-1", rank=0, deadline=0.0)
ABORT = SyncAbort(sync_id="policy-1", rank=0, reason="it was killed", deadline=0.0)


def calls(deadline: float) -> list[SyncCall]:
    regions = [(0, 60, 7), (256, 4, None)]
    return [
        SyncBegin(
            pool="policy",
            version=3,
            rank=0,
            world_size=2,
            manifest=Manifest.layout([]).to_wire(),
            offers={"cuda_ipc": EXPORTS.to_wire(), "tcp": "10.0.0.1:4000"},
            node_id="first",
            deadline=deadline,
        ),
        SyncBegin(
            pool="policy",
            version=3,
            rank=1,
            world_size=2,
            manifest=None,
            offers={"cuda_ipc": "it has no GPU", "tcp": ""},
            node_id="second",
            deadline=deadline,
        ),
        SyncProgressed(sync_id="policy-1", rank=1, num_filled=4, deadline=deadline),
        SyncFilled(
            sync_id="policy-1",
            rank=1,
            regions=regions,
            network_nbytes=5,
            is_released=True,
            deadline=deadline,
        ),
        SyncEnd(sync_id="policy-1", rank=1, deadline=deadline),
        SyncAbort(sync_id="policy-1", rank=1, reason="it was killed", deadline=deadline),
    ]


def over_the_wire(message: SyncCall | SyncAnswer) -> Any:
    return msgpack.unpackb(msgpack.packb(encode(message)))


def test_a_call_arrives_as_it_was_sent() -> None:
    deadline = time.monotonic() + 20.0

    for call in calls(deadline):
        arrived = decode_call(over_the_wire(call))

        assert arrived.deadline == pytest.approx(deadline, abs=1.0)
        assert replace(arrived, deadline=deadline) == call


def test_an_answer_arrives_as_it_was_sent() -> None:
    assert decode_answer(BEGIN, over_the_wire(GRANT)) == GRANT
    assert decode_answer(PROGRESSED, over_the_wire(STATE)) == STATE
    assert decode_answer(END, over_the_wire(REPORT)) == REPORT
    assert decode_answer(ABORT, None) is None


@pytest.mark.parametrize(
    ("message", "answer", "text"),
    [
        (BEGIN, STATE, "answer to SyncBegin must be SyncGrant, got LinkState"),
        (END, None, "answer to SyncEnd must be SyncReport, got NoneType"),
        (ABORT, GRANT, "answer to SyncAbort must be NoneType, got SyncGrant"),
    ],
)
def test_an_answer_to_another_kind_of_message_is_refused(
    message: SyncMessage[Any], answer: SyncAnswer, text: str
) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_answer(message, over_the_wire(answer))


def test_a_pool_whose_name_has_a_dash_is_found_by_its_sync() -> None:
    assert SyncEnd(sync_id="my-judge-12", rank=0, deadline=0.0).pool == "my-judge"


def test_a_call_that_lacks_something_or_has_it_wrong_is_refused() -> None:
    for call in calls(time.monotonic() + 20.0):
        sent = over_the_wire(call)
        for name in sent:
            for raw in ({k: v for k, v in sent.items() if k != name}, sent | {name: object()}):
                with pytest.raises(ProtocolError):
                    decode_call(raw)


@pytest.mark.parametrize(("message", "answer"), [(BEGIN, GRANT), (END, REPORT)])
def test_an_answer_that_lacks_something_or_has_it_wrong_is_refused(
    message: SyncMessage[Any], answer: SyncGrant | SyncReport
) -> None:
    sent = over_the_wire(answer)
    wrong: list[Any] = [[], "text", encode(calls(time.monotonic() + 1.0)[0])]
    wrong += [{k: v for k, v in sent.items() if k != name} for name in sent]
    wrong += [sent | {name: object()} for name in sent]

    for raw in wrong:
        with pytest.raises(ProtocolError):
            decode_answer(message, raw)


def test_an_answer_with_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ProtocolError, match="pigeon"):
        decode_answer(BEGIN, over_the_wire(GRANT) | {"transport": "pigeon"})


@pytest.mark.parametrize("offers", [{"pigeon": ""}, {"tcp": 5}, {b"tcp": ""}, ["tcp"]])
def test_offers_are_texts_or_bytes_of_known_transports(offers: object) -> None:
    with pytest.raises(ProtocolError, match="expected"):
        decode_call(over_the_wire(calls(time.monotonic() + 20.0)[0]) | {"offers": offers})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_a_call_needs_a_finite_time(timeout_s: float) -> None:
    for call in calls(time.monotonic() + 20.0):
        with pytest.raises(ProtocolError, match="time left for a sync"):
            decode_call(over_the_wire(call) | {"deadline": timeout_s})


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 2**40)])
def test_a_rank_must_be_one_of_the_job(rank: int, world_size: int) -> None:
    sent = over_the_wire(calls(time.monotonic() + 20.0)[0])

    with pytest.raises(ProtocolError, match="is not one of"):
        decode_call(sent | {"rank": rank, "world_size": world_size})


def test_values_that_are_nested_too_deeply_for_repr_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]

    for call in calls(time.monotonic() + 20.0):
        sent = over_the_wire(call)
        for name in sent:
            with pytest.raises(ProtocolError):
                decode_call(sent | {name: deep})
    with pytest.raises(ProtocolError):
        decode_call(FILLED | {"regions": [deep]})
    with pytest.raises(ProtocolError):
        Manifest.from_wire(deep)


@pytest.mark.parametrize("region", [[0, 1], [-1, 1, None], [0, -1, None], ["0", 1, None], 5])
def test_a_malformed_region_is_refused(region: object) -> None:
    with pytest.raises(ProtocolError, match=r"\[offset, nbytes, checksum\]"):
        decode_call(FILLED | {"regions": [region]})


def test_a_call_whose_time_is_used_up_is_not_sent() -> None:
    with pytest.raises(DeadlineExceeded, match="used up"):
        encode(SyncEnd(sync_id="policy-1", rank=0, deadline=time.monotonic() - 1.0))


def test_the_metrics_of_a_report_have_the_units_of_their_names() -> None:
    report = replace(REPORT, network_nbytes=3 << 20, failed={"policy-1": "it died"})

    assert sync_metrics(report) == {
        "sync/version": 3.0,
        "sync/prepare_s": 0.5,
        "sync/transfer_s": 0.25,
        "sync/verify_s": 0.125,
        "sync/resume_s": 0.5,
        "sync/network_mib": 3.0,
        "sync/failed_engines": 1.0,
    }
