"""Signals to ranks, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from umbra.trainer.world.signals import StopSignals

pytestmark = pytest.mark.process

PREAMBLE = """
import os, signal, sys, threading, time
from umbra.trainer.world.signals import StopNow, StopRequested, StopSignals
from umbra.trainer.world import signals
from umbra.trainer.world.stop_forecast import StopForecast
def say(text): print(text, flush=True)
class Clock:  # in place of the module's `time`: seconds pass when a test says so
    now, sleep = 1.0, time.sleep
    def monotonic(self): return self.now
def wait_for_request(stop):
    stop.defer()
    say("ready")
    while not stop.requested:
        time.sleep(0.01)
"""
TERMINATED = 128 + signal.SIGTERM


@contextmanager
def rank(code: str) -> Generator[subprocess.Popen[str]]:
    """A process that runs `code`, which has printed "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def rest_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    return output


def ended_by(number: signal.Signals | None, code: str) -> tuple[str, int]:
    """What a process prints after it gets this signal, and its exit status."""
    with rank(code) as process:
        if number:
            process.send_signal(number)
        return rest_of(process), process.returncode


def test_a_signal_behind_a_stop_does_not_change_how_the_process_ends() -> None:
    """torchrun sends one as soon as it sees the end of another rank."""
    code = """
        with StopSignals(grace_s=20) as stop:
            wait_for_request(stop)
            stop.disarm()
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(stop.exit_status)
    """
    assert ended_by(signal.SIGTERM, code) == ("", TERMINATED)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_deferred_signal_is_seen_at_the_step_boundary(number: signal.Signals) -> None:
    code = """
        with StopSignals(grace_s=20) as stop:
            wait_for_request(stop)
            say(stop.name)
            stop.disarm()
    """
    assert ended_by(number, code) == (f"{number.name}\n", 0)


def test_a_signal_while_torch_is_imported_ends_the_rank_after_it() -> None:
    code = """
        with StopSignals(grace_s=20) as stop:
            with stop.importing():
                say("ready")
                while not stop.requested:
                    time.sleep(0.01)
                say("imported")
            say("not reached")
    """
    assert ended_by(signal.SIGINT, code) == ("imported\n", 128 + signal.SIGINT)


def test_a_hangup_stays_ignored_where_it_was_before() -> None:
    """Ignores SIGHUP like nohup, and handles the other signals."""
    code = """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignals(grace_s=20) as stop:
            wait_for_request(stop)
            say(stop.name)
            stop.disarm()
        say(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
    """
    with rank(code) as process:
        process.send_signal(signal.SIGHUP)  # the lower number: it would be delivered first
        process.terminate()

        assert rest_of(process) == "SIGTERM\nTrue\n"


def test_a_signal_ends_an_interruptible_wait() -> None:
    code = """
        with StopSignals(grace_s=20) as stop:
            stop.defer()
            try:
                with stop.interruptible():
                    say("ready")
                    time.sleep(30)
            except StopRequested:
                say("interrupted")
            try:
                with stop.interruptible():
                    say("never")
            except StopRequested:
                say("at once")
    """
    assert ended_by(signal.SIGTERM, code) == ("interrupted\nat once\n", 0)


def test_before_there_is_something_to_save_a_signal_ends_the_process() -> None:
    code = """
        with StopSignals(grace_s=20):
            try:
                say("ready")
                time.sleep(30)
            finally:
                say("cleaned up")
    """
    assert ended_by(signal.SIGTERM, code) == ("cleaned up\n", TERMINATED)


def test_a_step_longer_than_the_grace_is_cut() -> None:
    code = """
        with StopSignals(grace_s=0.2) as stop:
            stop.defer()
            try:
                say("ready")
                time.sleep(30)
            finally:
                say("cleaned up")
    """
    assert ended_by(signal.SIGTERM, code) == ("cleaned up\n", TERMINATED)


def test_a_signal_is_passed_on_once_and_one_that_was_passed_in_is_not() -> None:
    code = """
        for passed_in in (False, True):
            with StopSignals(grace_s=20) as stop:
                stop.defer(lambda received: say(f"told {received.name}"))
                try:
                    with stop.interruptible():
                        if passed_in:
                            threading.Thread(target=stop.pass_in, args=(signal.SIGTERM,)).start()
                        else:
                            say("ready")
                        time.sleep(30)
                except StopRequested:
                    say(f"stopped by {stop.name}")
    """
    assert ended_by(signal.SIGINT, code) == (
        "told SIGINT\nstopped by SIGINT\nstopped by SIGTERM\n",
        0,
    )


def test_a_consequence_of_a_signal_waits_for_its_news() -> None:
    code = """
        say("ready")
        signals._NEWS_LIMIT_S = 30.0
        with StopSignals(grace_s=20) as stop:
            stop.defer()
            try:
                with stop.interruptible(KeyError):
                    threading.Timer(0.1, stop.pass_in, (signal.SIGTERM,)).start()
                    raise KeyError
            except StopRequested:
                say("stopped")
            stop.disarm()
    """
    assert ended_by(None, code) == ("stopped\n", 0)


def test_a_signal_that_is_passed_in_late_is_no_second_request() -> None:
    code = """
        signals.time = clock = Clock()
        with StopSignals(grace_s=20) as stop:
            wait_for_request(stop)
            clock.now += 1.1
            stop.pass_in(signal.SIGTERM)
            say("goes on")
            stop.disarm()
    """
    assert ended_by(signal.SIGTERM, code) == ("goes on\n", 0)


@pytest.mark.slow
@pytest.mark.parametrize("passed_in", [False, True])
def test_a_rank_that_hangs_outside_python_is_ended(passed_in: bool) -> None:
    """A mutex locked twice waits in C, where no handler runs: the last resort's thread acts."""
    by_itself = "threading.Timer(0.1, stop.pass_in, (signal.SIGTERM,)).start()"
    code = f"""
        import ctypes
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        with StopSignals(grace_s=0.2, on_last_resort=say) as stop:
            stop.defer()
            lock(mutex)
            {by_itself if passed_in else ""}
            say("ready")
            lock(mutex)
    """
    with rank(code) as process:
        started = time.monotonic()
        if not passed_in:
            process.terminate()

        assert rest_of(process) == "the step in progress did not end within 0.2 s of SIGTERM\n"
        assert process.returncode == 128 + signal.SIGTERM
        assert time.monotonic() - started < 25


def test_a_second_signal_a_second_later_is_immediate() -> None:
    """torchrun passes on what the terminal sent, too: within a second, it is the same request."""
    code = """
        signals.time = clock = Clock()
        with StopSignals(grace_s=20) as stop:
            wait_for_request(stop)
            clock.now += 0.9
            signal.raise_signal(signal.SIGTERM)
            say("the same request")
            clock.now += 0.2
            signal.raise_signal(signal.SIGTERM)
            say("not reached")
    """
    assert ended_by(signal.SIGTERM, code) == ("the same request\n", TERMINATED)


@pytest.mark.slow
def test_ctrl_c_cuts_nothing_until_it_comes_again() -> None:
    """The second one even ends a rank that waits in C, where no handler runs."""
    code = """
        import ctypes
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        with StopSignals(grace_s=0.2, on_last_resort=say) as stop:
            stop.defer(forecast=StopForecast(4, 0.2, say))
            lock(mutex)
            say("ready")
            lock(mutex)
    """
    with rank(code) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("SIGINT: ending what is in progress")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3.0)  # longer than the grace of other signals

        process.send_signal(signal.SIGTERM)  # torchrun passes a second SIGINT on so

        assert rest_of(process) == "a second signal came before the step in progress had ended\n"
        assert process.returncode == 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("waits_in_c", [False, True])
def test_umbra_stop_limits_the_time_that_ctrl_c_has_left_open(waits_in_c: bool) -> None:
    wait = "lock(mutex)" if waits_in_c else "time.sleep(30)"
    code = f"""
        import ctypes
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        def stop_twice(stop):
            for after_s, grace_s in [(1.5, 60.0), (0.5, 0.5)]:
                time.sleep(after_s)
                stop.pass_in(signal.SIGTERM, grace_s)
        try:
            with StopSignals(grace_s=20, on_last_resort=say) as stop:
                stop.defer()
                os.kill(os.getpid(), signal.SIGINT)
                threading.Thread(target=stop_twice, args=(stop,)).start()
                say("ready")
                {wait}
        except StopNow as error:
            say(error)
            raise
    """
    started = time.monotonic()
    with rank(code) as process:
        assert rest_of(process) == "the step in progress did not end within 0.5 s of umbra stop\n"
        assert process.returncode == 128 + signal.SIGINT
        assert 2.5 < time.monotonic() - started < 25.0  # without a limit the wait takes 30 s


def test_after_umbra_stop_only_ctrl_c_shortens_the_step() -> None:
    """torchrun sends SIGTERM when the ranks of another node have left first."""
    code = """
        with StopSignals(grace_s=20) as stop:
            stop.defer()
            threading.Thread(target=stop.pass_in, args=(signal.SIGTERM, 20.0)).start()
            while not stop.requested:
                time.sleep(0.01)
            time.sleep(1.1)
            say("ready")
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(2.5)  # longer than the last resort waits
                say("the step continued")
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except StopNow as now:
                say(now)
    """
    with rank(code) as process:
        text = "a second signal came before the step in progress had ended"
        assert rest_of(process) == f"the step continued\n{text}\n"


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with StopSignals(grace_s=1.0) as stop:
        assert signal.getsignal(signal.SIGTERM) not in before
        assert not stop.requested

    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_does_not_interrupt_the_wait_that_has_just_begun_is_sent_again() -> None:
    code = """
        send = signal.pthread_kill
        def come_just_before_the_wait(thread, number):
            signal.pthread_kill = send
            os.write(wakeup, bytes([number]))
        with StopSignals(grace_s=20) as stop:
            stop.defer()
            wakeup = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
            signal.pthread_kill = come_just_before_the_wait
            threading.Timer(0.1, stop.pass_in, [signal.SIGTERM]).start()
            lock = threading.Lock()
            lock.acquire()
            say("ready")
            try:
                with stop.interruptible():
                    say(lock.acquire(timeout=10.0))
            except StopRequested:
                say(stop.name)
            stop.disarm()
    """
    assert ended_by(None, code) == ("SIGTERM\n", 0)


def test_a_stop_that_gets_lost_in_a_destructor_is_repeated() -> None:
    """An exception of a handler there is only printed."""
    code = """
        class Swallows:
            def __del__(self):
                say("ready")
                time.sleep(60)
        sys.unraisablehook = lambda it: say("lost")
        with StopSignals(grace_s=60) as stop:
            stop.defer()
            try:
                with stop.interruptible():
                    Swallows()
                    time.sleep(60)
            except StopRequested:
                say("interrupted")
            stop.disarm()
    """
    assert ended_by(signal.SIGTERM, code) == ("lost\ninterrupted\n", 0)
