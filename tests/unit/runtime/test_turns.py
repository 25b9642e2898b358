"""Whose turn it is: rules one by one, then any history against what must always hold."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from umbra.runtime.pools.time_slicing import LINGER_S, Decision, SlicingRules, TimeSlicing


def shared(
    max_wait_s: float | None = 5.0, max_turn_s: float = 20.0, guests: tuple[str, ...] = ("judge",)
) -> TimeSlicing:
    turns = TimeSlicing("policy")
    for guest in guests:
        turns.add(guest, SlicingRules(max_wait_s=max_wait_s, max_turn_s=max_turn_s))
    return turns


def test_a_judge_without_requests_gets_no_turn() -> None:
    turns = shared()
    turns.report("policy", False, 0.0)

    assert turns.decide(1000.0) == Decision("policy")


def test_a_judge_gets_its_turn_once_the_policy_has_nothing_to_do() -> None:
    turns = shared(max_wait_s=None)
    turns.report("judge", True, 1.0)
    assert turns.decide(100.0) == Decision("policy")

    turns.report("policy", False, 100.0)

    assert turns.decide(100.0) == Decision("policy", 100.0 + LINGER_S)
    assert turns.decide(100.0 + LINGER_S) == Decision("judge")


def test_a_busy_policy_is_interrupted_after_max_wait() -> None:
    turns = shared(max_wait_s=5.0)
    turns.report("judge", True, 10.0)

    assert turns.decide(14.0) == Decision("policy", 15.0)
    assert turns.decide(15.0) == Decision("judge")


def test_a_turn_ends_when_the_judge_has_answered_everything() -> None:
    turns = shared()
    turns.report("judge", True, 0.0)
    turns.begin("judge", 10.0)
    assert turns.decide(12.0) == Decision("judge", 30.0)

    turns.report("judge", False, 13.0)

    assert turns.decide(13.0) == Decision("judge", 13.0 + LINGER_S)
    assert turns.decide(13.0 + LINGER_S) == Decision("policy")


def test_a_turn_without_an_end_ends_after_max_turn_and_the_judge_waits_again() -> None:
    turns = shared(max_wait_s=5.0, max_turn_s=20.0)
    turns.report("judge", True, 0.0)
    turns.begin("judge", 10.0)
    assert turns.decide(30.0) == Decision("policy")

    turns.begin("policy", 30.0)

    assert turns.decide(30.0) == Decision("policy", 35.0)
    assert turns.decide(35.0) == Decision("judge")


def test_a_judge_keeps_the_memory_that_nobody_else_wants() -> None:
    turns = shared(max_turn_s=20.0)
    turns.report("policy", False, 0.0)
    turns.report("judge", True, 0.0)
    turns.begin("judge", 1.0)
    assert turns.decide(1000.0) == Decision("judge")
    turns.report("judge", False, 1000.0)
    assert turns.decide(2000.0) == Decision("judge")

    turns.report("policy", True, 2000.0)

    assert turns.decide(2000.0) == Decision("policy")


def test_a_turn_that_has_just_begun_without_a_request_lasts_a_moment() -> None:
    turns = shared()

    turns.begin("judge", 50.0)

    assert turns.decide(50.0) == Decision("judge", 50.0 + LINGER_S)


def test_a_reserved_host_ends_a_turn_and_grants_none() -> None:
    turns = shared()
    turns.report("policy", False, 0.0)
    turns.report("judge", True, 0.0)
    turns.begin("judge", 1.0)

    turns.is_reserved = True

    assert turns.decide(2.0) == Decision("policy")
    turns.begin("policy", 2.0)
    assert turns.decide(1000.0) == Decision("policy")


def test_of_two_judges_the_one_that_waited_longer_comes_first() -> None:
    turns = shared(max_wait_s=None, guests=("a", "b"))
    turns.report("policy", False, 0.0)
    turns.report("b", True, 1.0)
    turns.report("a", True, 2.0)
    assert turns.decide(3.0) == Decision("b")
    turns.begin("b", 3.0)

    assert turns.decide(23.0) == Decision("a")
    turns.begin("a", 23.0)
    assert turns.decide(43.0) == Decision("b")


def test_of_judges_that_waited_too_long_the_longest_comes_first() -> None:
    turns = shared(max_wait_s=5.0, guests=("a", "b"))
    turns.report("b", True, 1.0)
    turns.report("a", True, 2.0)

    assert turns.decide(10.0) == Decision("b")


def test_a_busy_policy_has_its_time_between_the_turns_of_two_busy_judges() -> None:
    turns = shared(max_wait_s=5.0, max_turn_s=20.0, guests=("a", "b"))
    turns.report("a", True, 0.0)
    turns.report("b", True, 1.0)
    turns.begin("a", 5.0)
    assert turns.decide(25.0) == Decision("policy")

    turns.begin("policy", 25.0)
    turns.begin("policy", 27.0)  # a sync: it stays its turn

    assert turns.decide(28.0) == Decision("policy", 30.0)
    assert turns.decide(30.0) == Decision("b")


def test_the_judge_that_waited_longest_comes_first_whatever_its_max_wait() -> None:
    turns = shared(max_wait_s=10.0, max_turn_s=20.0)
    turns.add("hasty", SlicingRules(max_wait_s=1.0, max_turn_s=20.0))
    turns.report("judge", True, 0.0)
    turns.report("hasty", True, 0.0)
    assert turns.decide(1.0) == Decision("hasty")
    turns.begin("hasty", 1.0)

    turns.begin("policy", 21.0)

    assert turns.decide(21.0) == Decision("policy", 22.0)
    assert turns.decide(22.0) == Decision("judge")


class TurnMachine(RuleBasedStateMachine):
    """Any reports at any time; who carries decisions out does so at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = shared(max_wait_s=5.0, max_turn_s=20.0, guests=("a", "b"))
        self.work = {"policy": True, "a": False, "b": False}
        self.without_since = dict.fromkeys(self.work, 0.0)
        self.follow()

    def follow(self) -> None:
        while (holder := self.turns.decide(self.now).holder) != self.turns.holder:
            self.turns.begin(holder, self.now)
            self.without_since[holder] = self.now
        for name, has_work in self.work.items():
            if not has_work or name == self.turns.holder:
                self.without_since[name] = self.now

    @rule(pool=st.sampled_from(["policy", "a", "b"]), has_work=st.booleans())
    def report(self, pool: str, has_work: bool) -> None:
        self.turns.report(pool, has_work, self.now)
        self.work[pool] = has_work
        self.follow()

    @rule(reserved=st.booleans())
    def reserve(self, reserved: bool) -> None:
        self.turns.is_reserved = reserved
        self.follow()

    @rule(seconds=st.floats(0.01, 30.0))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(1000):
            look_at = self.turns.decide(self.now).look_again_at
            if look_at is None or look_at > end:
                break
            assert look_at > self.now, "asks to be looked at in the past"
            self.now = look_at
            self.follow()
        else:
            raise AssertionError("changes its mind again and again")
        self.now = end
        self.follow()

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if self.turns.is_reserved:
            assert self.turns.holder == "policy"
            self.without_since = dict.fromkeys(self.work, self.now)
            return
        # A turn of each of the others, and the policy between them until max_wait_s.
        longest = 2 * 20.0 + 2 * 5.0 + 1.0
        for name, has_work in self.work.items():
            if has_work and name != self.turns.holder:
                assert self.now - self.without_since[name] <= longest + 30.0, name

    @invariant()
    def memory_is_not_held_by_the_idle(self) -> None:
        holder = self.turns.holder
        if holder != "policy" and not self.work[holder] and self.work["policy"]:
            assert self.turns.decide(self.now).look_again_at is not None


TestTurnMachine = TurnMachine.TestCase
