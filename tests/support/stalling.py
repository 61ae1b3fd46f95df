"""A backend whose steps wait until they are let through: a device that hangs, on demand."""

from __future__ import annotations

import threading
from typing import Any

from mars_export.runtime import Session
from mars_export.runtime.decode.backend import Backend, StepOutput
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


def behind_a_gate(session: Session) -> tuple[Session, Stalling]:
    """The same bundle, with steps that hang until the gate is set."""
    backend = Stalling(session.backend)
    return Session(session.bundle, session.variant, backend), backend
