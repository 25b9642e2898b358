"""Computes how long ranks may wait for one of them in a collective.

torch ends a rank, and with it the run, if a collective takes longer than the process group's
timeout. Waits that a setting allows must not end like that:

    pool.sync_timeout_s             rank 0 waits for the first start of the engines, and for the
    pools.NAME.start_timeout_s      manager to begin; pools that share memory start one by one
    rollout.timeout_s               a rank that did not get an answer, because the manager was
                                    killed, asks again; the others have it and wait for this rank

All other waits of a single rank are shorter than the least timeout, or have no limit. Waits of all
ranks outside torch (for a weight sync or a batch) do not count.
"""

from __future__ import annotations

from typing import Final

from umbra.trainer.config.trainer_config import TrainerConfig

_LEAST_S: Final = 1800.0
"""Ranks that fail end the others through the session long before this. It is for a network that
drops packets. Less would be too short for a rank that slowly reads its data or writes the model."""

_MARGIN_S: Final = 240.0
"""A wait may take this much longer than its setting: by the margins of calls, and with auxiliary
pools, by starting the process that handles their requests."""


def collective_timeout_s(config: TrainerConfig) -> float:
    """The timeout of the ranks' process group in seconds."""
    in_turn_s = config.pool.sync_timeout_s + _MARGIN_S
    waits_s = [_LEAST_S, config.rollout.timeout_s + _MARGIN_S]
    for pool in config.pools.values():
        start_s = pool.start_timeout_s + _MARGIN_S
        if pool.mode == "colocated":
            in_turn_s += start_s
        else:
            waits_s.append(start_s)
    return max(in_turn_s, *waits_s)
