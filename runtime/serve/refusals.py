"""What a server will not do, as it is told to clients: a status, and an error in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import MarsError, Overloaded

MOST_WORDS = 2000  # characters of a message: what clients sent is quoted in it
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"} | {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CLOSE = {"connection": "close"}  # what was not read of a request is not to be taken for the next one
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
    "replica_lost": 503,
    "timeout": 504,
}
"""What `error.code` may be, with its usual status; docs/serving.md says what each means."""


class Refused(Exception):
    """A request that gets an error instead of an answer. `param` is the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = code or ("invalid_value" if status == 400 else None)
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: MarsError, param: str | None = None) -> Refused:
        """What a client is told of an error of ours. `param` is the field that is to blame."""
        if isinstance(error, Overloaded):
            return busy(str(error), error.retry_after)
        return cls(CODES[error.code], str(error), param=param, code=error.code)

    @property
    def body(self) -> dict[str, Any]:
        return error_body(str(self), self.status, self.param, self.code)


def busy(message: str, retry_after: float, status: int = 429) -> Refused:
    """There is no room now."""
    seconds = str(max(1, round(retry_after)))
    return Refused(status, message, code="overloaded", headers={"retry-after": seconds})


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    words = message if len(message) <= MOST_WORDS else message[:MOST_WORDS] + "..."
    return {"error": {"message": words, "type": kind, "param": param, "code": code}}


def encoded(value: Any) -> bytes:
    """JSON as it is sent; half a character, which a client may have sent, is written out."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
