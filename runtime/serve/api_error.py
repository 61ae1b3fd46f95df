"""Error responses: a status, and a body in the form of OpenAI's API, to which `/v1/messages` adds a type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import MarsError, Overloaded

MAX_CHARACTERS = 2000  # of a message, which may quote the request
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"} | {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CLOSE = {"connection": "close"}  # so that the unread rest is not parsed as the next request
CODES = {
    "invalid_value": 400,
    "unsupported_parameter": 400,
    "unsupported_by_model": 400,
    "limit_exceeded": 400,
    "context_length_exceeded": 400,
    "invalid_grammar": 400,
    "invalid_api_key": 401,
    "wrong_host": 403,
    "wrong_origin": 403,
    "model_not_found": 404,
    "stream_not_found": 404,
    "overloaded": 429,
    "failed": 500,
    "out_of_memory": 503,
    "closing": 503,
    "timeout": 504,
}
"""Values of `error.code` with their usual status. docs/serving.md explains them."""


class ApiError(Exception):
    """A request that gets an error response. `param` is the wrong field, `details` are of the protocol."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.details = status, param, details
        self.code = code or ("invalid_value" if status == 400 else None)
        self.headers = dict(headers or {})

    @classmethod
    def from_error(cls, error: MarsError, param: str | None = None) -> ApiError:
        """The response to a MarsError. `param` is the wrong field."""
        if isinstance(error, Overloaded):
            return overloaded(str(error), error.retry_after)
        return cls(CODES[error.code], str(error), param=param, code=error.code)

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        text = str(self)
        if len(text) > MAX_CHARACTERS:
            text = text[:MAX_CHARACTERS] + "..."
        error = {"message": text, "type": kind, "param": self.param, "code": self.code}
        return {"error": error if self.details is None else {**error, "details": self.details}}


def overloaded(message: str, retry_after: float, status: int = 429) -> ApiError:
    """The server has no room for the request now."""
    seconds = str(max(1, round(retry_after)))
    return ApiError(status, message, code="overloaded", headers={"retry-after": seconds})


def encoded(value: Any) -> bytes:
    """Compact JSON. Lone surrogates, which a request may contain, are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
