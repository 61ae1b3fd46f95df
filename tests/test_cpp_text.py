"""The C++ text layer against the libraries it stands in for: Hugging Face `tokenizers`, jinja2 and runtime/text.py."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import nasty
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
KINDS = sorted(nasty.KINDS)


def driver_path() -> Path:
    """The newest built text_driver, or the one that MARS_TEXT_DRIVER names."""
    if named := os.environ.get("MARS_TEXT_DRIVER"):
        return Path(named)
    built = sorted((ROOT / "build" / "cpp").glob("*/tests/text_driver"), key=lambda path: path.stat().st_mtime)
    if not built:
        pytest.skip("the C++ runtime is not built: cmake --preset release && cmake --build --preset release in runtime/cpp")
    return built[-1]


class Driver:
    """A running text_driver that answers one question at a time."""

    def __init__(self, tokenizer_json: Path) -> None:
        self.process = subprocess.Popen([driver_path(), tokenizer_json], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
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


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driver]]:
    started: list[Driver] = []

    @cache
    def start(kind: str) -> Driver:
        path = tmp_path_factory.mktemp(kind) / "tokenizer.json"
        tokenizer_of(kind).save(str(path))
        started.append(Driver(path))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


def differences(driver: Driver, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """The texts whose ids differ."""
    wanted = [e.ids for e in tokenizer.encode_batch(texts)]
    return [text for text, ids in zip(texts, wanted, strict=True) if driver.ask("encode", text=text) != ids]


@pytest.mark.parametrize("kind", KINDS)
def test_nasty_texts_get_the_same_ids(kind: str, drivers: Callable[[str], Driver]) -> None:
    texts = [*nasty.SAMPLES, *nasty.short_ones(), *nasty.mixtures(2000, seed=1)]
    assert differences(drivers(kind), tokenizer_of(kind), texts) == []


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_gets_the_same_ids(kind: str, drivers: Callable[[str], Driver]) -> None:
    piece = st.sampled_from(nasty.PIECES) | st.text(max_size=4)

    @settings(max_examples=700, deadline=None)
    @given(st.lists(piece, max_size=20).map("".join))
    def check(text: str) -> None:
        assert drivers(kind).ask("encode", text=text) == tokenizer_of(kind).encode(text).ids

    check()
