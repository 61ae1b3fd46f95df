"""The log, as text or JSON lines. It never has prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")


class Lines(logging.Formatter):
    """One line for each record, with the record's `fields`."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields = getattr(record, "fields", {})
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if self._as_json:
            line = {
                "time": when,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": message,
            }
            return json.dumps(line | fields, ensure_ascii=True, default=str)
        pairs = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
        text = f"{when} {record.levelname.lower():7} {message} {pairs}".rstrip()
        return text.replace("\r", "\\r") if record.exc_info else text.encode("unicode_escape").decode()


def _shown(value: object) -> str:
    text = str(value)
    return text if text and " " not in text else repr(text)


def listen(level: str, log_format: str) -> None:
    """Write the log of this package and of the HTTP server to standard error, in one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json=log_format == "json"))
    # The batcher logs each request too, and uvicorn logs invalid HTTP, which any client can send.
    least = {"mars_export.serve": "debug", "mars_export": "warning", "uvicorn": "error", "asyncio": "error"}
    for name, minimum in least.items():
        logger = logging.getLogger(name)
        logger.setLevel((level if level == "debug" else max(minimum, level, key=LEVELS.index)).upper())
        if name != "mars_export.serve":  # it propagates to mars_export
            logger.addHandler(handler)
            logger.propagate = False
