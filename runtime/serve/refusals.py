"""What a server will not do, as it is told to clients: a status, and an error in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import DeviceLost, MarsError, Overloaded

MOST_WORDS = 2000  # characters of a message: what clients sent is quoted in it
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"} | {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CLOSE = {"connection": "close"}  # what was not read of a request is not to be taken for the next one
SAID_OTHERWISE = {"max_new_tokens": "max_tokens", "eos_ids": "ignore_eos", "schema": "response_format"}


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
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: MarsError, param: str | None = None) -> Refused:
        """What a client is told of an error of ours; `param` where the message does not begin with a
        field.
        """
        if isinstance(error, Overloaded):
            words = str(error).partition("; try again")[0]
            return busy(f"{words}; try again in {error.retry_after:.0f} s", error.retry_after)
        message = str(error)
        named, is_of_field, _ = message.partition(" must be ")
        if is_of_field and named.isidentifier():
            param = SAID_OTHERWISE.get(named, named)
            message = message if param == named else param + message[len(named) :]
        if isinstance(error, DeviceLost):
            return cls(500, message, code="failed")
        return cls(400, message, param=param)

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
