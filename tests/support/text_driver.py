"""The C++ text layer by its text_driver, and the tokenizers that it is compared with."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from support import nasty
from support.missing import lacking
from support.paths import ROOT

KINDS = sorted(nasty.KINDS)


def driver_path() -> Path:
    """The built text_driver, if possible without sanitizers, or the one that MARS_TEXT_DRIVER names."""
    if named := os.environ.get("MARS_TEXT_DRIVER"):
        return Path(named)
    built = [
        ROOT / "build" / "cpp" / preset / "tests" / "text_driver"
        for preset in ("release", "debug", "asan", "tsan")
    ]
    found = next((path for path in built if path.is_file()), None)
    return found or lacking("the C++ runtime is not built: make cpp")


class Driver:
    """A running text_driver that answers one question at a time."""

    def __init__(self, tokenizer_json: Path) -> None:
        self.process = subprocess.Popen(
            [driver_path(), tokenizer_json],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self.greeting = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"text_driver died with {self.process.wait()}"
        return dict(json.loads(line))

    def ask(self, op: str, **values: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **values}) + "\n")
        self.process.stdin.flush()
        line = self._read()
        return line.get("answer", line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return nasty.KINDS[kind]()


def differences(driver: Driver, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """The texts whose ids differ."""
    wanted = [e.ids for e in tokenizer.encode_batch(texts)]
    return [text for text, ids in zip(texts, wanted, strict=True) if driver.ask("encode", text=text) != ids]
