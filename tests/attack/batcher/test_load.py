"""The load in a short form: it sees what is wrong, tells last bits from it, and goes on where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attack import load
from support.paths import BUNDLE

from mars_export import GenerationConfig, Request, Session
from mars_export.runtime.batcher.places import Places
from mars_export.runtime.decode.backend import StepOutput


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_load(session: Session, seed: int) -> None:
    tally = load.play(session, seed, 120, num_threads=6, num_tasks=4)
    assert tally.wrong == []
    assert tally.whole >= 40
    assert tally.begun >= 10
    assert tally.refused >= 3


def test_the_load_sees_what_is_wrong(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batcher that gives other answers, and one that keeps its requests."""
    deliver = Request.deliver

    def other(self: Request, accepted: Any) -> None:
        deliver(self, accepted)
        if self._token_ids:
            self._token_ids[0] = -1

    with monkeypatch.context() as patch:
        patch.setattr(Request, "deliver", other)
        assert any("instead of" in words for words in load.play(session, 0, 20, 2, 2).wrong)
    with monkeypatch.context() as patch:
        patch.setattr(Places, "accept", lambda self: setattr(self, "num_entering", self.num_entering - 1))
        assert any("Counts" in words for words in load.play(session, 0, 20, 2, 2).wrong)


class Equal:
    """A backend to whose model another token is always as likely as its choice."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, *arguments: Any) -> StepOutput:
        output = self._backend.step(*arguments)
        ids = np.stack([output.token_ids, output.token_ids // 2], -1)
        return replace(output, topk_ids=ids, topk_logprobs=np.zeros(ids.shape, np.float32))


def test_last_bits_are_told_from_other_answers(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig(tau=1.0, max_new_tokens=1, eos_ids=())
    asked = load.Asked([1, 2, 3], config, "read", 0, None, False)
    (alone,) = session.generate(asked.prompt, config).token_ids
    assert {other.token_ids for other in load.in_other_bits(session, asked)} == {(alone,)}
    backend = Equal(session.backend)
    monkeypatch.setattr(session, "backend", backend)
    assert {other.token_ids for other in load.in_other_bits(session, asked)} == {(alone,), (alone // 2,)}
    assert session.backend is backend


def test_the_load_goes_on_where_it_stopped(tmp_path: Any) -> None:
    state, figures = tmp_path / "state", tmp_path / "figures"
    program = [sys.executable, "-m", "attack.soak", "--requests", "20", "--bundle", str(BUNDLE)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for rounds in ("1", "2"):
        arguments = ["--rounds", rounds, "--state", str(state), "--figures", str(figures)]
        subprocess.run([*program, *arguments], env=env, timeout=300, check=True, capture_output=True)
    lines = state.read_text().splitlines()
    assert len(lines) == 2
    assert '"rounds": 2' in figures.read_text()
    assert '"wrong": 0' in figures.read_text()
