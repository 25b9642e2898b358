"""All errors that umbra raises on purpose.

UmbraError
├── ConfigError            a setting is wrong; the message names the key and what is allowed
│   └── SettingError       one is out of bounds or does not fit another; a ValueError too
├── DataError              a data set, prompt or model directory is wrong
├── ProtocolError          skew between peers or a bug; never retried
├── TransportError
│   ├── ConnectionLost     the peer went away before it answered
│   └── DeadlineExceeded   no answer within the call's deadline
├── ActorError
│   ├── ActorNotFound      no actor of that name is (or will be) here
│   ├── MailboxClosed      this end was closed while the call was pending
│   └── ActorDied          the actor's process ended: exit status and last log lines
├── RemoteError            the callee raised: its type, message and traceback as text
├── EngineError
│   ├── IllegalTransition  an engine was asked for something its state does not allow
│   ├── EngineUnhealthy    an engine hangs or crashes in a loop
│   └── WeightSyncError    weights did not arrive whole
├── RolloutError
│   ├── RequestRefused     no engine could ever serve the request
│   └── RewardError        a reward function raised or returned something unusable
├── LedgerError            the record of samples is damaged, contradicts itself or cannot be written
└── JobFailed              another rank or an essential process failed; the message names it
"""

from __future__ import annotations

import reprlib
from typing import Final, cast

_BRIEF_MAX_LEN: Final = 200


class UmbraError(Exception):
    """Base of every error umbra raises on purpose."""


class ConfigError(UmbraError):
    """A setting is wrong. The message names the key and what is allowed."""


class SettingError(ConfigError, ValueError):
    """A setting is out of bounds, or does not fit another one. It is a ValueError too, so that
    pydantic reports it with all other wrong settings of a file."""


class DataError(UmbraError):
    """A data set, prompt, tokenizer or model directory cannot be used."""


class ProtocolError(UmbraError):
    """A peer sent something this side does not understand."""


class TransportError(UmbraError):
    """A message did not get through."""


class ConnectionLost(TransportError):
    """The peer went away before it answered; whether it acted is unknown."""


class DeadlineExceeded(TransportError):
    """No answer within the deadline of the call."""


class ActorError(UmbraError):
    """An actor cannot be called."""


class ActorNotFound(ActorError):
    """No actor of that name or incarnation is here."""


class MailboxClosed(ActorError):
    """This end was closed while the call was pending."""


class ActorDied(ActorError):
    """An actor's process ended; the message carries exit status and last log lines."""


class RemoteError(UmbraError):
    def __init__(self, remote_type: str, remote_message: str, remote_traceback: str) -> None:
        self.remote_type = remote_type  # qualified, such as `builtins.ValueError`
        self.remote_message = remote_message  # its `str()`
        self.remote_traceback = remote_traceback  # the formatted remote traceback
        super().__init__(remote_type, remote_message, remote_traceback)

    def __str__(self) -> str:
        text = f"{self.remote_type}: {self.remote_message}"
        if self.remote_traceback:
            text += f"\n--- remote traceback ---\n{self.remote_traceback.rstrip()}"
        return text


class EngineError(UmbraError):
    """An engine cannot do what was asked."""


class IllegalTransition(EngineError):
    """An engine's lifecycle state does not allow the event."""


class WakeError(EngineError):
    """An engine could not take memory again for what slept."""


class EngineUnhealthy(EngineError):
    """An engine hangs or crashes in a loop."""


class WeightSyncError(EngineError):
    """Weights did not arrive whole at an engine."""


class RolloutError(UmbraError):
    """Rollouts cannot be produced."""


class RequestRefused(RolloutError):
    """An engine could never serve a request; the message has the reason."""


class RewardError(RolloutError):
    """A reward function raised, or returned something that is not one finite number a sample."""


class LedgerError(UmbraError):
    """The record of samples is damaged, contradicts itself or cannot be written."""


class JobFailed(UmbraError):
    """Another rank, or a process the job cannot do without, failed; the message names it."""


def first_leaf(error: BaseException) -> BaseException:
    """The first plain exception in a tree of groups; `error` itself where it is one."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return first_leaf(group.exceptions[0])
    return error


def how_to_install(extra: str) -> str:
    """The remedy in an error about missing packages of an extra (see pyproject.toml)."""
    return f"run pip install -e '.[{extra}]' in your clone of umbra"


class _Brief(reprlib.Repr):
    """Reads no more than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = 6
        self.maxstring = self.maxother = _BRIEF_MAX_LEN

    def repr_bytes(self, value: bytes, level: int) -> str:
        """The base class calls it, and would read all of the value."""
        return repr(value[:_BRIEF_MAX_LEN])


def brief(value: object) -> str:
    """Text of at most 200 characters about a value that another process sent. `repr` would take
    long for a large value, and fail for a deeply nested one."""
    return _Brief().repr(value)[:_BRIEF_MAX_LEN]
