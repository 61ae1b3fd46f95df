"""Steps are handed out as they come, characters that take several steps included."""

from __future__ import annotations

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions

from mars_export import GenerationConfig
from mars_export.runtime.serve.answer.steps import Steps


@pytest.mark.parametrize("tau", [1.0, 0.0])
def test_a_step_waits_for_one_other_at_most(sessions: Sessions, tau: float) -> None:
    """The tiny model babbles half characters; a step behind one must not wait for the answer's end."""
    session = sessions(MAIN)
    steps, given, longest, text = Steps(session.text), 0, 0, ""
    config = GenerationConfig(tau=tau, max_new_tokens=60, eos_ids=(), window="full")
    for number, event in enumerate(session.stream("hi there", config)):
        ready = steps.push(event)
        given += len(ready)
        longest = max(longest, number + 1 - given)
        text += "".join(token.text for step in ready for token in step.tokens)
    assert "\ufffd" in text, "it babbles"
    assert text == session.generate("hi there", config).text
    assert longest <= 4, "a character has four bytes at most"
