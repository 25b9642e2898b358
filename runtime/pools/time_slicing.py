"""Decides whose turn it is among pools that share memory: pure, the clock is an argument.

    host   generates with a trainer's weights; has the memory while no guest has its turn
    guest  for example a judge; gets its turn when it has requests and
             - the host is idle, or
             - the guest has waited for `max_wait_s`, and the host has had the memory for the
               shortest `max_wait_s` of all waiting guests: also between turns of several guests

The holder keeps the memory as long as no other pool needs it. Otherwise a guest's turn ends when
it has no requests left, or after `max_turn_s`; it then waits again. While the host is reserved
(the trainer has put it to sleep, or transfers weights to it), no guest gets a turn, and a current
one ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LINGER_S: Final = 0.1
"""A pool is idle once it has had no request for this long. A longer time wastes the end of each
turn; a shorter one hands the memory over between an answer and the request that follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingRules:
    """Limits of a guest's turns: its longest wait while the host has work (None: until the host is
    idle), and its longest turn while other pools have work."""

    max_wait_s: float | None
    max_turn_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The pool that must have the memory, and when to decide again if nothing happens."""

    holder: str
    look_again_at: float | None = None


@dataclass(slots=True)
class _Pool:
    """`since`: when `has_work` last changed or, if later, when its last turn ended."""

    has_work: bool
    since: float


class TimeSlicing:
    """Decides turns; its caller carries them out and reports each by `begin`. The host counts as
    having work until it reports otherwise, because not every host reports."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.holder = host
        self.is_reserved = False
        self._began_at = 0.0
        self._rules: dict[str, SlicingRules] = {}
        self._pools = {host: _Pool(has_work=True, since=0.0)}

    def add(self, guest: str, rules: SlicingRules) -> None:
        self._rules[guest] = rules
        self._pools.setdefault(guest, _Pool(has_work=False, since=0.0))

    def remove(self, guest: str) -> None:
        del self._rules[guest], self._pools[guest]
        if self.holder == guest:
            self.holder = self.host

    def report(self, pool: str, has_work: bool, now: float) -> None:
        """The pool may not be added yet."""
        known = self._pools.setdefault(pool, _Pool(has_work=False, since=0.0))
        if known.has_work != has_work:
            known.has_work, known.since = has_work, now

    def begin(self, pool: str, now: float) -> None:
        if pool == self.holder:
            return
        last = self._pools[self.holder]
        if last.has_work:
            last.since = now
        self.holder, self._began_at = pool, now

    def decide(self, now: float) -> Decision:
        if self.is_reserved:
            return Decision(self.host)
        if self.holder == self.host:
            return self._of_host(now)
        return self._of_guest(self.holder, now)

    def _of_host(self, now: float) -> Decision:
        waiting = {name: self._pools[name].since for name in self._waiting()}
        if not waiting:
            return Decision(self.host)
        longest_first = sorted(waiting, key=waiting.__getitem__)
        times: list[float] = []
        host = self._pools[self.host]
        if not host.has_work:
            times.append(host.since + LINGER_S)
            if times[0] <= now:
                return Decision(longest_first[0])
        limits = {
            name: limit_s
            for name in waiting
            if (limit_s := self._rules[name].max_wait_s) is not None
        }
        hosts_until = self._began_at + min(limits.values(), default=0.0)
        for name in longest_first:
            if name not in limits:
                continue
            due_at = max(waiting[name] + limits[name], hosts_until)
            if due_at <= now:
                return Decision(name)
            times.append(due_at)
        return Decision(self.host, min(times, default=None))

    def _of_guest(self, guest: str, now: float) -> Decision:
        others = {name: self._pools[name].since for name in self._waiting() if name != guest}
        if self._pools[self.host].has_work:
            other = self.host
        elif others:
            other = min(others, key=others.__getitem__)
        else:
            return Decision(guest)
        me = self._pools[guest]
        ends_at = self._began_at + self._rules[guest].max_turn_s
        if not me.has_work:
            ends_at = min(ends_at, max(me.since, self._began_at) + LINGER_S)
        return Decision(other) if ends_at <= now else Decision(guest, ends_at)

    def _waiting(self) -> list[str]:
        return [name for name in self._rules if self._pools[name].has_work]
