"""Mistakes in what happens to a sample, each of which `make chaos` has to notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mutant import Mutant

_CHAOS: Final = (
    *("tests/faults/chaos/chaos.py", "--seed", "42"),
    *("--trajectories", "384", "--kills", "8", "--updates", "4"),
)

CHAOS_MUTANTS: Final[Sequence[Mutant]] = (
    Mutant(
        name="token lost",
        path="runtime/rollout/dispatch/trajectory.py",
        old="return position - self.completion_len",
        new="return min(0, position - self.completion_len)",
        command=_CHAOS,
        says=r"lost_tokens is \d+",
    ),
    Mutant(
        name="token repeated",
        path="runtime/rollout/dispatch/dispatcher.py",
        old="                start = min(stop, start - missing)\n",
        new="",
        command=_CHAOS,
        says=r"repeated_tokens is \d+",
    ),
    Mutant(
        name="wrong version",
        path="runtime/rollout/dispatch/trajectory.py",
        old="if first and then and first[-1].version == then[0].version:",
        new="if first and then:",
        command=_CHAOS,
        says=r"wrong_version is \d+, .* made it",
    ),
    Mutant(
        name="wrong context on resume",
        path="runtime/rollout/dispatch/trajectory.py",
        old="return np.concatenate([self.prompt_tokens, self.tokens])",
        new="return np.concatenate([self.prompt_tokens, self.tokens[:-1]])",
        command=_CHAOS,
        says=r"wrong_tokens is \d+",
    ),
    Mutant(
        name="logprob of another token",
        path="runtime/rollout/dispatch/trajectory.py",
        old="self._logprobs = np.concatenate([self._logprobs, logprobs])",
        new="self._logprobs = np.concatenate([self._logprobs, np.roll(logprobs, 1)])",
        command=_CHAOS,
        says=r"wrong_logprobs is \d+, .* is that of token \d+",
    ),
    Mutant(
        name="sample trained twice",
        path="runtime/rollout/manager/group_recovery.py",
        old="recovered.leases.setdefault(step, []).append(group)",
        new="recovered.ready[account.order_idx] = group",
        command=_CHAOS,
        says=r"duplicated is \d+",
    ),
    # Not of the product: what a run leaves behind is found by chaos itself.
    Mutant(
        name="folder left behind",
        path="tests/faults/chaos/chaos_reward.py",
        old="    time.sleep(_TAKES_S)\n",
        new=(
            "    from umbra.runtime.cluster.environment import socket_root\n"
            '    (socket_root() / "left").mkdir(exist_ok=True)\n'
        ),
        command=_CHAOS,
        says=r"left behind: socket folder \S+/left",
    ),
)
