"""Prometheus reads the state of a running job, and its last step."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from live_rollouts import LiveRollouts

from umbra.runtime.errors import ConfigError
from umbra.runtime.reports.job_state import job_state
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"
LABEL = rf'{NAME}="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (NaN|[+-]Inf|-?\d\S*)")


def parse(text: str) -> dict[str, float]:
    """The samples by series. Refuses what version 0.0.4 of the format does not allow."""
    values: dict[str, float] = {}
    families: list[str] = []
    assert text.endswith("\n")
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in families, f"the lines of {name} are not together"
            families.append(name)
            kind = next(lines).removeprefix(f"# TYPE {name} ")
            assert kind in ("gauge", "counter"), kind
            assert (kind == "counter") == name.endswith("_total"), name
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        assert found[1] == families[-1], line
        series = line.rpartition(" ")[0]
        assert series not in values, series
        values[series] = float(found[3])
    return values


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return answer.read().decode()


def test_the_values_are_those_of_the_jobs_state_and_the_last_step(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    session = umbra_session_factory()
    run_dir = umbra_session_factory.run_dirs[0]
    live = LiveRollouts(session, tmp_path, world_size=1)
    live.publish(3)
    live.next_batch(0)
    row = {"step": 1, "time": 1e9, "time/step_s": 0.1, "rollout/staleness_0_share": float("nan")}
    (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")

    url = session.lead_call("serve_metrics", "127.0.0.1:0")
    values = parse(get(url))
    state = asyncio.run(job_state(run_dir))

    assert state is not None
    assert state.rollouts is not None
    assert session.lead_call("serve_metrics", "127.0.0.1:0") == url
    assert values['umbra_engines{pool="policy",state="serving"}'] == len(state.engines) == 2
    assert values['umbra_engines{pool="policy",state="dead"}'] == 0
    assert values['umbra_pool_version{pool="policy"}'] == state.pools[0].version == 3
    assert values['umbra_groups{state="leased"}'] == state.rollouts.groups_leased == 4
    assert values['umbra_groups_total{outcome="admitted"}'] == state.rollouts.groups_admitted
    assert values['umbra_rank_wait_seconds{rank="0"}'] == 0
    for pool, engine in state.engines:
        labels = f'pool="{pool}",engine="{engine.name}"'
        assert values[f"umbra_engine_version{{{labels}}}"] == engine.version
    for actor in state.nodes[0].actors:
        node = state.nodes[0].node_id
        labels = f'actor="{actor.name}",role="{actor.role}",node="{node}"'
        assert values[f"umbra_restarts_total{{{labels}}}"] == 0
    assert values["umbra_step"] == 1
    assert values["umbra_step_timestamp_seconds"] == 1e9
    assert values["umbra_step_time_step_s"] == 0.1
    assert values["umbra_step_rollout_staleness_0_share"] != 0  # not a number
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 port 0 .*metrics_address"):
        session.lead_call("serve_metrics", "192.0.2.1:0")
    text = get(url)
    first, url = url, session.lead_call("serve_metrics", "localhost:0")
    assert get(url)
    with pytest.raises(urllib.error.URLError):
        get(first)
    document = (ROOT / "docs" / "watch.md").read_text()
    names = set(re.findall(r"# TYPE (umbra_(?!step_)\w+) ", text))
    assert [name for name in names if f"`{name}`" not in document] == []
    umbra_session_factory.close()
    with pytest.raises(urllib.error.URLError):
        get(url)
