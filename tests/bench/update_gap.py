"""How long a weight update keeps a busy pool of embedded engines from generating."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from gap_manager import gap_manager_spec
from torch import Tensor

from umbra.runtime.collective import SessionSync
from umbra.runtime.pools.pool_settings import OnUpdate
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session import Session, SessionConfig
from umbra.runtime.weights.weight_publisher import WeightPublisher

_NUM_ENGINES: Final = 2
_NUM_TRAJECTORIES: Final = 32
_PROMPT_LEN: Final = 32
_COMPLETION_LEN: Final = 128
_TIMEOUT_S: Final = 60.0
_BUSY_S: Final = 0.4  # of generation between two updates
_MODEL: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def run(num_updates: int, on_update: OnUpdate) -> dict[str, float]:
    """Updates two engines that generate for 32 trajectories; a supervisor, a manager, real syncs.

    Args:
        on_update: see `PoolSpec`.

    Returns:
        Medians over the updates: `update_gap_ms` from the call of `publish` to the first token of
        the new version at the manager, the slower engine's, less the transfer (`transfer_s` of the
        sync's report); `update_gap_first_ms`, the faster engine's; `update_silence_ms`, the longest
        time without tokens of either engine; `transfer_ms`; `update_ms`, of the whole `publish`.
        `update_gap_max_ms` is the longest.
    """
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_MODEL))
        with Session.from_torchrun(
            SessionConfig(run_dir=folder / "run"), on_note=lambda text: None
        ) as session:
            rows += _updates(session, folder, num_updates, on_update)
    facts = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    facts["update_gap_max_ms"] = max(row["update_gap_ms"] for row in rows)
    return facts


def _updates(
    session: Session, folder: Path, num_updates: int, on_update: OnUpdate
) -> list[dict[str, float]]:
    session.create_pool(
        PoolSpec(
            name="policy",
            engine="umbra.engines.embedded.embedded_engine:EmbeddedEngine",
            count=_NUM_ENGINES,
            mode="standalone",
            on_update=on_update,
            kwargs={"model_path": str(folder), "max_context_len": _PROMPT_LEN + _COMPLETION_LEN},
            env={"OMP_NUM_THREADS": "1"},
        )
    )
    manager = session.spawn(gap_manager_spec("policy", _PROMPT_LEN, _COMPLETION_LEN))
    publisher = WeightPublisher(SessionSync(session), 0, 1, _weights())
    publisher.publish("policy", 0, _TIMEOUT_S)
    manager.call("keep_in_flight", _NUM_TRAJECTORIES)
    manager.call("first_tokens", 0, _NUM_ENGINES, timeout_s=_TIMEOUT_S)
    rows: list[dict[str, float]] = []
    for version in range(1, num_updates + 2):
        time.sleep(_BUSY_S)
        began = time.monotonic()
        report = publisher.publish("policy", version, _TIMEOUT_S)
        ended = time.monotonic()
        came_at = manager.call("first_tokens", version, _NUM_ENGINES, timeout_s=_TIMEOUT_S)
        rows.append(
            {
                "update_gap_ms": (max(came_at) - began - report.transfer_s) * 1e3,
                "update_gap_first_ms": (min(came_at) - began - report.transfer_s) * 1e3,
                "update_silence_ms": manager.call("longest_silence", began, max(came_at)) * 1e3,
                "transfer_ms": report.transfer_s * 1e3,
                "update_ms": (ended - began) * 1e3,
            }
        )
    return rows[1:]  # the first update makes what later ones use


def _weights() -> dict[str, Tensor]:
    hidden, inner = _MODEL["hidden_size"], _MODEL["intermediate_size"]
    heads, kv_heads = _MODEL["num_attention_heads"], _MODEL["num_key_value_heads"]
    dim = _MODEL["head_dim"]
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    weights = {
        "model.embed_tokens.weight": torch.randn(_MODEL["vocab_size"], hidden) * 0.1,
        "model.norm.weight": torch.ones(hidden),
    }
    shapes = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for idx in range(_MODEL["num_hidden_layers"]):
        layer = f"model.layers.{idx}"
        for name, shape in shapes.items():
            weights[f"{layer}.{name}.weight"] = torch.randn(shape) * 0.1
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden)
    return weights
