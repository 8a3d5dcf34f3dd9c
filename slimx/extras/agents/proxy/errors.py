"""Error responses of the proxy, in the format of OpenAI's API."""

from __future__ import annotations

SHOWN = 1000
"""Length in characters to which an error message is truncated, because it quotes the request and could be megabytes
long."""


class ApiError(Exception):
    """Error response in the format of OpenAI's API. The API's clients do not retry a request after status 400."""

    def __init__(self, message: str, *, code: str, status: int = 400, param: str | None = None):
        message = _shortened(message)
        if param is not None:
            param = _shortened(param)
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(param: str, problem: str) -> ApiError:
    """Returns the error for a field `param` with an invalid value. `problem`: rest of the message after the field's
    name."""
    return ApiError(f"{param} {problem}", code="invalid_value", param=param)


def unsupported(param: str, problem: str) -> ApiError:
    """Returns the error for a value of the field `param` that the API allows but this server does not support.

    `problem`: rest of the message after the field's name.
    """
    return ApiError(f"{param} {problem}", code="unsupported_value", param=param)


def _shortened(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN - 100]} ... {text[-80:]}"
