"""Errors in the format of the OpenAI API: {"error": {message, type, param, code}}."""

from __future__ import annotations

from typing import Any, Final

from umbra.runtime.errors import RequestRefused, RolloutError, UmbraError

_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        status: of HTTP.
        param: the parameter that is wrong, if any.
        code: for programs, such as "model_not_found".
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError | None:
    """The error to send to the client; None for a bug, whose details clients must not see."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return ApiError(400, str(error))
        case RolloutError():
            return ApiError(503, str(error), code="no_engine")
        case UmbraError():
            return ApiError(500, str(error))
        case _:
            return None
