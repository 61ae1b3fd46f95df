"""Many prompts at once: the answers of a session, in their order."""

from __future__ import annotations

import pytest
from support import nasty, tiny
from support.chaos import chaotic
from support.fake import FakeBackend, FakeCache
from support.fixtures import Sessions

from mars_export import GenerationConfig, Session, SessionError


@pytest.fixture(params=["llama", "qwen3-mixed"])
def session(request: pytest.FixtureRequest, sessions: Sessions) -> Session:
    return sessions(request.param)


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_many_prompts_are_answered_in_their_order_a_few_at_a_time(session: Session, batch: int) -> None:
    prompts = [[3 + i] * (1 + 7 * i % 5) for i in range(9)]
    configs = [GenerationConfig(tau=(1.0, 0.5, 0.2)[i % 3], max_new_tokens=1 + 5 * i % 17) for i in range(9)]
    done = list(session.generate_each(prompts, configs, batch=batch))
    alone = [session.generate(prompt, config) for prompt, config in zip(prompts, configs, strict=True)]
    assert [(d.token_ids, d.finish_reason, d.text) for d in done] == [
        (d.token_ids, d.finish_reason, d.text) for d in alone
    ]
    assert [len(d.confidences) for d in done] == [len(d.token_ids) for d in done]


@pytest.mark.parametrize("batch", [1, 4])
def test_drafts_are_verified_in_the_first_step_and_change_no_answer(session: Session, batch: int) -> None:
    prompts, config = [[3 + i] * (1 + 7 * i % 5) for i in range(9)], GenerationConfig(max_new_tokens=20)
    plain = list(session.generate_each(prompts, config, batch=batch))
    for wrong_from in (99, 2, 0):
        drafts = [[*d.token_ids[:wrong_from], *(i ^ 1 for i in d.token_ids[wrong_from:])] for d in plain]
        made = list(session.generate_each(prompts, config, batch=batch, drafts=drafts))
        assert [(d.token_ids, d.text) for d in made] == [(d.token_ids, d.text) for d in plain]
        forwards = [d.stats.forwards for d in made]
        assert max(forwards) == 1 if wrong_from == 99 else max(forwards) > 1
    with pytest.raises(SessionError, match="99999"):
        session.generate_each([[1]], config, drafts=[[99999]])


def test_many_prompts_and_a_failure(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SessionError, match="2 prompts but 1 configs"):
        next(session.generate_each([[1], [2]], [GenerationConfig()]))
    with pytest.raises(SessionError, match="max_rows must be 1 or more"):
        next(session.generate_each([[1]], batch=0))
    assert list(session.generate_each([])) == []
    monkeypatch.setattr(
        session.backend, "step", lambda *_: (_ for _ in ()).throw(SessionError("the device is gone"))
    )
    with pytest.raises(SessionError, match="the device is gone"):
        list(session.generate_each([[1], [2]], batch=2))


def test_a_completion_is_the_same_each_time_it_is_read(sessions: Sessions) -> None:
    prompt, answer = [5, 6, 7], "a😀".encode() + "😀".encode()[:2]

    def next_byte(known: tuple[int, ...], masks: int) -> tuple[int, float]:
        return 3 + answer[min(len(known) + masks - len(prompt), len(answer) - 1)], 1.0

    llama = sessions("llama")
    session = Session(llama.bundle, llama.variant, FakeBackend(next_byte), llama.text)
    session.text = tiny.text(nasty.llama2(), None)  # these ids are its bytes
    stream = session.stream(prompt, GenerationConfig(tau=1.0, max_new_tokens=len(answer), eos_ids=()))
    shown = "".join(event.text for event in stream)
    assert [stream.completion.text for _ in range(3)] == [shown] * 3 == ["a😀\ufffd\ufffd"] * 3


def test_a_row_that_cannot_be_moved_raises_its_error(session: Session) -> None:
    class Torn(FakeCache):
        def move(self, *_: int) -> None:
            raise SessionError("no memory for the copy")

    class Short(FakeBackend):
        def new_cache(self, num_rows: int) -> FakeCache:
            return Torn(num_rows)

    short = Session(session.bundle, session.variant, Short(chaotic, max_capacity=20), session.text)
    config = GenerationConfig(tau=1.0, max_new_tokens=30, eos_ids=())
    with pytest.raises(SessionError, match="no memory for the copy"):  # when the first row's context is full
        short.generate_batch([[1] * 18, [1] * 3], config)
