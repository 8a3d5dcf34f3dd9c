"""The refusal of a request, in the shape of OpenAI's API."""

from __future__ import annotations

SHOWN = 1000
"""Characters of a message, at most: it quotes the request, which may have megabytes."""


class ApiError(Exception):
    """A refusal in the shape in which OpenAI's API tells it. Status 400 is not tried again by its clients."""

    def __init__(self, message: str, *, code: str, status: int = 400, param: str | None = None):
        message, param = _cut(message), param if param is None else _cut(param)
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid(param: str, what: str) -> ApiError:
    """The refusal of field `param`, of which `what` says what is wrong."""
    return ApiError(f"{param} {what}", code="invalid_value", param=param)


def unsupported(param: str, what: str) -> ApiError:
    """The refusal of field `param` with a value that the API has and this server does not."""
    return ApiError(f"{param} {what}", code="unsupported_value", param=param)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 100]} ... {text[-80:]}"
