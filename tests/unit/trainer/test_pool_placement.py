"""From a config and the node's GPUs to each engine's environment."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from minimal_config import config_with

from umbra.runtime.cluster.placement import Node, Plan
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.settings import from_wire, to_wire
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig
from umbra.trainer.doctor.node_checks import cores_verdict
from umbra.trainer.services.pool_specs import auxiliary_pool_spec, plan_pools
from umbra.trainer.services.services import POOL, engine_pool_spec

UUIDS = ("GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 64, "max_position_embeddings": 128}')
    return tmp_path


def config_of(model_dir: Path, **sections: Any) -> TrainerConfig:
    if "judge" in sections:
        sections["pools"] = {"judge": {"model_path": str(model_dir), **sections.pop("judge")}}
    return config_with(model_dir=model_dir, **sections)


def plan_of(
    config: TrainerConfig, gpus: tuple[str, ...], ranks: int, device_type: str = "cuda"
) -> Plan:
    nodes = [Node(gpus=gpus, num_ranks=ranks)]
    return plan_pools(config, POOL, device_type=device_type, nodes=nodes)


def policy_spec(config: TrainerConfig, plan: Plan, device_type: str = "cuda") -> PoolSpec:
    """The specification as the supervisor gets it."""
    return from_wire(PoolSpec, to_wire(engine_pool_spec(config, plan, device_type)))


def environments(spec: PoolSpec) -> list[Mapping[str, str]]:
    return [actor.env for actor in spec.engine_specs()]


def own(spec: PoolSpec) -> list[tuple[str, ...] | None]:
    return [actor.gpus for actor in spec.engine_specs()]


def visible(spec: PoolSpec) -> list[str]:
    return [env["CUDA_VISIBLE_DEVICES"] for env in environments(spec)]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(("0", "1"), ["0,1", "1,0"]), (("6", "3"), ["6,3", "3,6"]), (UUIDS[:1], ["GPU-aa"])],
)
def test_each_engine_has_its_own_gpu_first(
    model_dir: Path, gpus: tuple[str, ...], expected: list[str]
) -> None:
    config = config_of(model_dir)

    spec = policy_spec(config, plan_of(config, gpus, ranks=len(gpus)))

    assert spec.count == len(expected)
    assert visible(spec) == expected


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "tensor_parallel_size"), ("sglang", "tp_size")]
)
def test_a_tensor_parallel_engine_has_its_gpus_first(
    model_dir: Path, engine: str, option: str
) -> None:
    config = config_of(model_dir, pool={"engine": engine, "engine_args": {option: 2}})

    spec = policy_spec(config, plan_of(config, UUIDS, ranks=4))

    assert visible(spec) == ["GPU-aa,GPU-bb,GPU-cc,GPU-dd", "GPU-cc,GPU-dd,GPU-aa,GPU-bb"]
    assert own(spec) == [("GPU-aa", "GPU-bb"), ("GPU-cc", "GPU-dd")]


def test_a_faulty_engine_has_the_gpus_of_the_engine_that_it_wraps(model_dir: Path) -> None:
    arguments = {"inner": "vllm", "engine_args": {"tensor_parallel_size": 2}}
    config = config_of(model_dir, pool={"engine": "faulty", "engine_args": arguments})

    spec = policy_spec(config, plan_of(config, UUIDS, ranks=4))

    assert visible(spec) == ["GPU-aa,GPU-bb,GPU-cc,GPU-dd", "GPU-cc,GPU-dd,GPU-aa,GPU-bb"]


def test_a_standalone_engine_is_not_on_the_trainers_gpu_but_sees_it(model_dir: Path) -> None:
    config = config_of(model_dir, pool={"mode": "standalone"})

    spec = policy_spec(config, plan_of(config, ("0", "1"), ranks=1))

    assert visible(spec) == ["1,0"]


@pytest.mark.parametrize(
    ("judge", "gpus", "expected"),
    [
        ({"mode": "standalone"}, ("0", "1"), (1, 1)),
        (
            {"mode": "standalone", "engine": "vllm", "engine_args": {"tensor_parallel_size": 2}},
            tuple(map(str, range(8))),
            (6, 1),
        ),
    ],
)
def test_a_training_runs_config_can_be_served(
    model_dir: Path, judge: dict[str, Any], gpus: tuple[str, ...], expected: tuple[int, int]
) -> None:
    config = config_of(model_dir, job={"trainer_gpus_per_node": 1}, judge=judge)

    trained, served = plan_of(config, gpus, ranks=1), plan_of(config, gpus, ranks=0)

    assert len(trained.engines[POOL]) == 1
    assert (len(served.engines[POOL]), len(served.engines["judge"])) == expected


def test_gpus_by_hand_override_the_mode(model_dir: Path) -> None:
    config = config_of(model_dir, pool={"mode": "standalone", "gpus": [0]})

    spec = policy_spec(config, plan_of(config, ("0",), ranks=1))

    assert visible(spec) == ["0"]


def test_a_judge_keeps_its_own_variables_beside_its_gpus(model_dir: Path) -> None:
    config = config_of(model_dir, judge={"env": {"A": "1"}, "count": 1})

    plan = plan_of(config, ("0", "1"), ranks=2)
    spec = auxiliary_pool_spec("judge", config, plan, "cuda", POOL)

    assert environments(spec) == [{"A": "1", "CUDA_VISIBLE_DEVICES": "0,1"}]


def test_a_judge_waits_for_idle_engines_only_where_the_policys_get_idle(model_dir: Path) -> None:
    hybrid = config_of(model_dir, judge={"count": 1})
    standalone = replace(hybrid, pool=replace(hybrid.pool, mode="standalone"))
    served = ServeConfig(model=hybrid.model, pools=hybrid.pools)
    plan = plan_of(hybrid, ("0", "1"), ranks=2)

    waits_s = [
        auxiliary_pool_spec("judge", config, plan, "cuda", POOL).max_wait_s
        for config in (hybrid, standalone, served)
    ]

    assert waits_s == [None, 10.0, 10.0]


def test_on_the_cpu_an_engine_inherits_its_environment(model_dir: Path) -> None:
    config = config_of(model_dir, judge={"env": {"CUDA_VISIBLE_DEVICES": ""}})

    plan = plan_of(config, ("0", "1"), ranks=2, device_type="cpu")
    judge = auxiliary_pool_spec("judge", config, plan, "cpu", POOL)

    assert plan.table() == []
    assert environments(policy_spec(config, plan, "cpu")) == [{}]
    assert environments(judge) == [{"CUDA_VISIBLE_DEVICES": ""}]
    assert own(judge) == [()]


def test_engines_of_a_pool_without_a_plan_may_be_on_any_gpu() -> None:
    spec = PoolSpec(name="policy", engine="echo", count=2)

    assert own(from_wire(PoolSpec, to_wire(spec))) == [None, None]
    assert environments(spec) == [{}, {}]


def test_an_engine_on_a_gpu_needs_a_gpu(model_dir: Path) -> None:
    config = config_of(model_dir, pool={"device": "cuda"})

    with pytest.raises(ConfigError, match=r"pool.device = 'cuda': a node shows no GPU"):
        plan_of(config, (), ranks=2, device_type="cpu")


def test_ranks_without_a_gpu_are_an_error(model_dir: Path) -> None:
    config = config_of(model_dir)

    with pytest.raises(ConfigError, match=r"^2 ranks are on a node with 1 GPU, .* 'cpu'$"):
        plan_of(config, ("0",), ranks=2)


def test_a_start_again_makes_the_same_specifications(model_dir: Path) -> None:
    config = config_of(model_dir)

    first, again = (policy_spec(config, plan_of(config, UUIDS, ranks=4)) for _ in range(2))

    assert first == again


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"judge": {"env": {"CUDA_VISIBLE_DEVICES": "1"}}},
            r"pools.judge.env sets CUDA_VISIBLE_DEVICES, .* by pools.judge.gpus",
        ),
        (
            {"pool": {"engine": "vllm", "engine_args": {"tensor_parallel_size": 0}}},
            "^pool.engine_args.tensor_parallel_size must be 1 or more, got 0",
        ),
        (
            {"judge": {"engine": "sglang", "engine_args": {"tp_size": "2"}}},
            "^pools.judge.engine_args.tp_size must be 1 or more, got '2'",
        ),
        (
            {"pool": {"engine": "faulty", "engine_args": {"inner": "vllm", "engine_args": 2}}},
            "^pool.engine_args.engine_args: use a table, got 2",
        ),
        ({"pool": {"mode": "standalone"}}, r"start fewer ranks \(job.trainer_gpus_per_node\)"),
        (
            {"job": {"trainer_gpus_per_node": 1}},
            "trainer_gpus_per_node = 1, and torchrun started 2 ranks .* --nproc-per-node 1",
        ),
    ],
)
def test_a_layout_that_is_not_possible_is_an_error_in_words(
    model_dir: Path, sections: dict[str, Any], said: str
) -> None:
    config = config_of(model_dir, **sections)

    with pytest.raises(ConfigError, match=said):
        plan_of(config, ("0", "1"), ranks=2)


ON_TWO_NODES: Final = {
    "engine": "vllm",
    "mode": "standalone",
    "engine_args": {"tensor_parallel_size": 8},
    "allow_engine_pickle": True,
}


def two_nodes(config: TrainerConfig, address: str = "") -> Plan:
    """Two nodes of four GPUs, of which ranks have none."""
    nodes = [Node(gpus=UUIDS, num_ranks=0, address=address)] * 2
    return plan_pools(config, POOL, device_type="cuda", nodes=nodes)


def test_an_engine_on_two_nodes_has_a_follower_that_sees_the_gpus_of_the_second(
    model_dir: Path,
) -> None:
    config = config_of(model_dir, pool=ON_TWO_NODES)

    spec = policy_spec(config, two_nodes(config))

    (leading,) = spec.engine_specs()
    ((follower, node),) = spec.follower_specs(0)
    assert (leading.name, spec.nodes) == ("policy-0", (0,))
    assert leading.kwargs["followers"] == ["policy-0.1"]
    assert (follower.name, node) == ("policy-0.1", 1)
    assert follower.env["CUDA_VISIBLE_DEVICES"] == leading.env["CUDA_VISIBLE_DEVICES"]
    assert follower.gpus == UUIDS
    assert (follower.role, follower.restart) == ("engine", leading.restart)


def test_an_engine_on_one_node_has_no_followers(model_dir: Path) -> None:
    config = config_of(model_dir, pool={"mode": "standalone"})

    spec = policy_spec(config, two_nodes(config))

    assert spec.count == 8
    assert not any(spec.follower_specs(idx) for idx in range(spec.count))
    assert not any("followers" in actor.kwargs for actor in spec.engine_specs())


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"pool": {"engine": "vllm", "engine_args": {"tensor_parallel_size": 8}}},
            r"pool: .* unpickle what arrives, .*: set pool\.allow_engine_pickle = true if",
        ),
        (
            {
                "pool": {"mode": "standalone", "count": 0},
                "judge": {
                    "mode": "standalone",
                    "engine": "vllm",
                    "engine_args": {"tensor_parallel_size": 8},
                },
            },
            r"pools\.judge: .*: set pools\.judge\.allow_engine_pickle = true if",
        ),
        (
            {
                "pool": {
                    "engine": "faulty",
                    "engine_args": {"inner": "sglang", "engine_args": {"tp_size": 8}},
                    "allow_engine_pickle": True,
                }
            },
            "pool: .* several nodes, and engine 'faulty' cannot be on more than one: use",
        ),
        (
            {"pool": {"engine": "sglang", "engine_args": {"tp_size": 8}}},
            r"pool: .* sglang's own connections between them unpickle what arrives, .*: set pool\.",
        ),
    ],
)
def test_engines_are_on_several_nodes_only_if_they_can_and_may(
    model_dir: Path, sections: dict[str, Any], said: str
) -> None:
    sections["pool"].setdefault("mode", "standalone")
    config = config_of(model_dir, **sections)

    with pytest.raises(ConfigError, match=said):
        two_nodes(config)


def test_an_engine_on_several_nodes_is_refused_where_a_node_has_an_ipv6_address(
    model_dir: Path,
) -> None:
    config = config_of(model_dir, pool=ON_TWO_NODES)

    with pytest.raises(ConfigError, match="connections are IPv4, and fd00::1 is an IPv6 address"):
        two_nodes(config, "fd00::1")


@pytest.mark.parametrize(("address", "is_refused"), [("8.8.8.8", True), ("10.1.2.3", False)])
def test_engines_on_several_nodes_need_a_private_network(
    model_dir: Path, address: str, is_refused: bool
) -> None:
    config = config_of(model_dir, pool=ON_TWO_NODES)
    refused = pytest.raises(ConfigError, match=f"{address} is an address of the internet: set ")

    with refused if is_refused else contextlib.nullcontext():
        two_nodes(config, address)


def test_doctor_warns_of_fewer_cores_than_engines_and_ranks_keep_busy(model_dir: Path) -> None:
    config = config_of(model_dir, pool={"engine": "vllm", "mode": "standalone"})
    plan = plan_of(config, UUIDS, ranks=2)

    assert cores_verdict(plan, 0, 8.0).state == "ok"
    few = cores_verdict(plan, 0, 7.5)
    assert few.state == "warning"
    assert few.text.startswith("7.5 for 2 ranks and 2 engines, which can keep 8 busy")
    on_cpu = plan_of(config_of(model_dir), (), ranks=2, device_type="cpu")
    assert cores_verdict(on_cpu, 0, 1.0).state == "-"


def test_a_node_that_only_generates_has_as_many_engines_as_its_gpus_hold(model_dir: Path) -> None:
    config = config_of(
        model_dir,
        pool={"mode": "standalone", "engine": "vllm", "engine_args": {"tensor_parallel_size": 2}},
    )
    spec = policy_spec(config, plan_of(config, UUIDS, ranks=2))

    first, second = spec.engine_specs_on(("0", "1", "2", "3", "4"), first_idx=3)

    assert (first.name, first.gpus, second.name, second.gpus) == (
        *("policy-3", ("0", "1")),
        *("policy-4", ("2", "3")),
    )
    assert second.env["CUDA_VISIBLE_DEVICES"] == "2,3,0,1,4"
    with pytest.raises(ConfigError, match="needs 2 GPUs, and the node has 1"):
        spec.engine_specs_on(("0",), first_idx=3)
    config = config_of(model_dir, pool={"mode": "standalone"})
    on_cpu = policy_spec(config, plan_of(config, (), ranks=2, device_type="cpu"), "cpu")
    assert [actor.gpus for actor in on_cpu.engine_specs_on((), first_idx=3)] == own(on_cpu)
    assert own(on_cpu) == [()]
