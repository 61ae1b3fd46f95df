"""A backend whose steps wait until they are let through: a device that hangs, on demand."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mars_export import Session
from mars_export.runtime.decode.backend import Backend, StepOutput
from mars_export.runtime.serve.models import Models
from support.fake import Recording


class Stalling(Recording):
    """Another backend behind a gate. `entered` is set once a step stands before it."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.gate, self.entered = threading.Event(), threading.Event()

    def step(self, *arguments: Any) -> StepOutput:
        self.entered.set()
        assert self.gate.wait(60), "nobody opened the gate"
        return self.backend.step(*arguments)


class Gate:
    """Calls of a method wait until it is open. `reached` is set by the first one, `begun` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.is_open, self.reached, self.begun = threading.Event(), threading.Event(), 0
        real = getattr(owner, name)

        def late(*arguments: Any) -> Any:
            self.begun += 1
            self.reached.set()
            assert self.is_open.wait(30), "nobody opened the gate"
            return real(*arguments)

        monkeypatch.setattr(owner, name, late)


def behind_a_gate(session: Session) -> tuple[Session, Stalling]:
    """The same bundle, with steps that hang until the gate is set."""
    backend = Stalling(session.backend)
    return Session(session.bundle, session.variant, backend, session.text), backend


class Paced(Recording):
    """Another backend whose steps pass one by one once `hold` was called, as `let` allows; until `open`."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._changed, self._left = threading.Condition(), math.inf
        self.is_waiting = False
        """Whether a step waits to be let through."""

    def hold(self) -> None:
        self._set(0)

    def open(self) -> None:
        self._set(math.inf)

    def let(self, number: int = 1) -> None:
        self._set(self._left + number)

    def _set(self, left: float) -> None:
        with self._changed:
            self._left, self.is_waiting = left, self.is_waiting and left <= 0
            self._changed.notify_all()

    def step(self, *arguments: Any) -> StepOutput:
        with self._changed:
            self.is_waiting = self._left <= 0
            assert self._changed.wait_for(lambda: self._left > 0, 60), "nobody let the step through"
            self._left, self.is_waiting = self._left - 1, False
        return self.backend.step(*arguments)


def paced(session: Session) -> tuple[Session, Paced]:
    """The same bundle, with steps that a test counts out."""
    backend = Paced(session.backend)
    return Session(session.bundle, session.variant, backend, session.text), backend


def close_in_a_step(models: Models, pace: Paced, caplog: pytest.LogCaptureFixture) -> None:
    """Close a server's models while a step waits; the step ends as soon as the requests are cancelled."""
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(models.close, 0)
        while "requests cancelled" not in caplog.text and not closing.done():
            time.sleep(0.01)
        pace.open()
