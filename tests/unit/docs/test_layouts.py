"""docs/engines.md shows the plans that the planner makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from umbra.runtime.cluster.placement import Node, PoolMode, PoolRequest, plan_placement

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "engines.md"


def node(num_gpus: int, num_ranks: int) -> Node:
    return Node(gpus=tuple(map(str, range(num_gpus))), num_ranks=num_ranks)


def pool(mode: PoolMode, num_gpus: int = 1, count: int | None = None) -> PoolRequest:
    name, host = ("judge", "policy") if mode == "colocated" else ("policy", "")
    return PoolRequest(name=name, mode=mode, num_gpus=num_gpus, count=count, shares_with=host)


LAYOUTS = [
    ("2 GPUs, standalone, 1 for the trainer", [node(2, 1)], [pool("standalone")]),
    (
        "8 GPUs, hybrid, engines of 2 GPUs, a judge of 4 GPUs",
        [node(8, 8)],
        [pool("hybrid", 2), pool("colocated", 4)],
    ),
    (
        "1 + 2 nodes of 8 GPUs, standalone, engines of 8 GPUs",
        [node(8, 8)] + [node(8, 0)] * 2,
        [pool("standalone", 8)],
    ),
]


@pytest.mark.parametrize(("title", "nodes", "pools"), LAYOUTS)
def test_a_layout_is_the_planners(title: str, nodes: list[Node], pools: list[PoolRequest]) -> None:
    shown = re.search(
        rf"^{re.escape(title)}:\n\n```\n(.*?)\n```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    )
    table = "\n".join(plan_placement(nodes, pools).table())

    assert shown is not None, f"docs/engines.md has no layout {title!r}"
    assert shown[1] == table


def test_every_layout_of_the_document_is_checked() -> None:
    shown = re.findall(r"^GPUs  ranks  engines$|^node  GPUs", DOCUMENT.read_text(), re.MULTILINE)

    assert len(shown) == len(LAYOUTS)
