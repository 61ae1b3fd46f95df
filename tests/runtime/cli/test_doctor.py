"""What doctor says of a device: the same checks on the CPU, and a device that computes something else."""

from __future__ import annotations

from support.agreement import MAIN
from support.fixtures import Sessions

from mars_export.runtime.cli.doctor import proof


def test_a_right_device(sessions: Sessions) -> None:
    findings = proof(sessions(MAIN), sessions(MAIN), "variant model")
    assert [(f.subject.removeprefix("variant model, "), f.state) for f in findings] == [
        ("KV rows", "good"),
        ("tokens", "good"),
        ("exact", "good"),
        ("steps", "good"),
    ]
    assert findings[1].detail == "8 of 8 answers as on the CPU"
    assert proof(sessions(MAIN), None, "x")[1].state == "absent"


def test_a_device_with_other_tokens_or_rows_elsewhere(sessions: Sessions) -> None:
    session = sessions(MAIN)
    session.device = "cuda"
    try:
        kv, tokens, *_ = proof(session, sessions("llama"), "x")
    finally:
        session.device = "cpu"
    assert (kv.state, kv.detail) == ("bad", "in cpu memory")
    assert tokens.state == "bad"
