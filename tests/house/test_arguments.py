"""Values of an unusual kind given to the Python classes: refused by name, or taken for what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mars_export import Batcher, Session, SessionError


@pytest.mark.parametrize("wrong", [5, None, b"bytes", {"role": "user"}, object()])
def test_a_prompt_of_another_kind_is_an_error_of_ours(plain: Path, wrong: object) -> None:
    session = Session.open(plain, threads=1)
    with pytest.raises(SessionError, match="a prompt is a text, messages or token ids, not"):
        session.generate(wrong)  # type: ignore[arg-type]
    with Batcher(session) as batcher, pytest.raises(SessionError, match="a prompt is a text"):
        batcher.submit(wrong)  # type: ignore[arg-type]
    with (
        Batcher(session) as batcher,
        pytest.raises(SessionError, match="a config is a GenerationConfig, not str"),
    ):
        batcher.submit("x", "y")  # type: ignore[arg-type]


def test_threads_of_another_kind(plain: Path) -> None:
    for wrong in ("2", 0, 1.5):
        with pytest.raises(SessionError, match="threads must be None or an integer of 1 or more"):
            Session.open(plain, threads=wrong)  # type: ignore[arg-type]


def test_an_array_of_ids_is_a_prompt(plain: Path) -> None:
    session = Session.open(plain, threads=1)
    assert session.encode(np.array([1, 2, 3])) == [1, 2, 3]  # type: ignore[arg-type]
