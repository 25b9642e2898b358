"""How long ranks may wait for one of them in a collective.

torch ends a rank whose collective lasts longer than the process group's time-out, and with it the
run, whatever the others wait for. What a setting allows must not end like that:

    pool.sync_timeout_s             rank 0 waits for the first start of the engines, and for the
    pools.NAME.start_timeout_s      manager to begin; pools that share memory start one by one
    rollout.timeout_s               a rank that an answer did not reach, because the manager was
                                    killed, asks again; the others have it and go on

All other waits of a rank by itself are shorter than the least time-out, or have no limit. What all
ranks wait for outside of torch (a weight sync, a batch) does not count.
"""

from __future__ import annotations

from typing import Final

from umbra.trainer.config.trainer_config import TrainerConfig

_LEAST_S: Final = 1800.0
"""Ranks that fail end the others through the session long before: this is for a network that
swallows packets. Less would not do for a rank that reads its data, or writes the model, slowly."""

_MARGIN_S: Final = 240.0
"""What is waited for takes longer than its setting says: by the calls' own margins, and with a pool
that is asked starts the process that takes its requests."""


def collective_timeout_s(config: TrainerConfig) -> float:
    """The time-out of the ranks' process group."""
    in_turn_s = config.pool.sync_timeout_s + _MARGIN_S
    waits_s = [_LEAST_S, config.rollout.timeout_s + _MARGIN_S]
    for pool in config.pools.values():
        start_s = pool.start_timeout_s + _MARGIN_S
        if pool.mode == "colocated":
            in_turn_s += start_s
        else:
            waits_s.append(start_s)
    return max(in_turn_s, *waits_s)
