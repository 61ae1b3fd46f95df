"""The prefix cache of a model with recurrent layers: copies of their states at a few positions of a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from support import tiny
from support.exports import export
from support.families import HYBRIDS

from mars_export import Batcher, GenerationConfig, Limits, Session
from mars_export.runtime.decode.prefix import LEAST, TAIL
from mars_export.runtime.decode.schedule import run

from .test_hybrid import Guesses, greedy

NEW = 40
Open = Callable[..., Session]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def opened(root: Path) -> Open:
    """A session of its own with these options."""

    @cache
    def bundle(name: str, precision: str) -> Path:
        rounded = {"precision": precision, "allow_drift": precision != "fp32"}
        target = root / f"{name}-{precision}.bundle"
        export(tiny.write(HYBRIDS[name], root / name), target, block=6, **rounded)
        return target

    def of(name: str = "hybrid", precision: str = "fp32", cache_bytes: int = 64 << 20) -> Session:
        return Session.open(bundle(name, precision), threads=1, cache_bytes=cache_bytes)

    return of


def answers(
    session: Session,
    prompts: Sequence[list[int]],
    texts: Sequence[Sequence[int]],
    mark: Callable[[int], int] = lambda _: 0,
) -> int:
    """Checks the answers to `prompts` in a batch of 8, with guesses of which some are wrong; how many of the
    prompts' tokens were in the cache.
    """
    seqs = []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        config = GenerationConfig(max_new_tokens=NEW - 7 * (i % 3), eos_ids=())
        seqs.append(session.new_sequence(i, prompt, config))
        seqs[-1].prefix_handle = session._prefixes.handle("", (mark(i),))
        seqs[-1].prompt_lookup = Guesses(text, len(prompt), i)  # type: ignore[assignment]
    for _ in run(session.schedule(Limits(max_rows=8, prefill_tokens=32)), seqs):
        pass
    for seq, prompt, text in zip(seqs, prompts, texts, strict=True):
        assert seq.tokens[len(prompt) :] == list(text[: seq.config.max_new_tokens])
    return sum(seq.stats.cached_tokens for seq in seqs)


@pytest.mark.parametrize(
    ("name", "precision"), [("hybrid", "fp32"), ("hybrid-tied", "fp32"), ("hybrid", "w8a8")]
)
def test_exact_text_from_a_warm_cache_is_that_of_transformers(
    name: str, precision: str, opened: Open, root: Path
) -> None:
    """200 ragged texts: what earlier ones began with, and what they ended with. w8a8: of one token a step."""
    draw, plain = random.Random(4), GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks=0)

    def some(low: int, high: int) -> list[int]:
        return [draw.randrange(1, 250) for _ in range(draw.randint(low, high))]

    session, other = opened(name, precision), opened(name, precision, 0)
    systems = [some(33, 90) for _ in range(5)]
    first = [systems[i % 5] + some(1, 60) for i in range(100)]
    texts = [list(answer.token_ids) for answer in other.generate_each(first, plain)]
    second = [
        prompt + text[: draw.choice([0, 5, NEW - 7 * (i % 3)])] + some(1, 30)
        for i, (prompt, text) in enumerate(zip(first, texts, strict=True))
    ]
    texts += [answer.token_ids for answer in other.generate_each(second, plain)]
    if precision == "fp32":
        assert all(greedy(tiny.load(HYBRIDS[name], root / name), first + second, texts))
    num_shared = answers(session, first, texts[:100], lambda i: len(systems[i % 5]))
    num_continued = answers(session, second, texts[100:], lambda i: len(systems[i % 5]))
    assert num_shared > 2000 and num_continued > 5000
    assert session.prefix_stats.failed == 0


def test_copies_are_kept_where_a_text_may_go_on(opened: Open) -> None:
    session, draw = opened(), random.Random(2)
    system, question, other = ([draw.randrange(1, 250) for _ in range(n)] for n in (60, 50, 40))
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), masks="full")

    def ask(prompt: list[int], mark: int = len(system)) -> tuple[int, list[int]]:
        seq = session.new_sequence(0, prompt, config)
        seq.prefix_handle = session._prefixes.handle("", (mark,))
        for _ in run(session.schedule(Limits()), [seq]):
            if len(seq.tokens) > len(prompt) + 25:
                seq.end("cancelled")  # before a step of one slot, whose entries are not cached
        assert seq.stats.prefill_forwards <= 2
        return seq.stats.cached_tokens, seq.tokens

    prompt = system + question
    none, tokens = ask(prompt)
    assert none == 0
    assert ask(prompt)[0] == len(prompt) - TAIL  # the same again
    assert ask(prompt[: -TAIL + 2] + other)[0] == len(prompt) - TAIL  # the answer began in another way
    assert ask(system + other)[0] == len(system)
    assert len(tokens) - 16 < ask(tokens + other)[0] < len(tokens)  # the conversation goes on
    assert (
        ask(tokens[:-15] + other)[0] == len(prompt) - TAIL
    )  # the answer was cut, for example at a stop string
    assert ask(system[:-1] + other, 0)[0] == 0
    session.forget_prefixes()
    ask(other[: LEAST + TAIL - 1])
    assert session.prefix_stats.entries == 1  # that of the answer: of the prompt it would be too few tokens


def test_the_bytes_of_states_count(opened: Open) -> None:
    session = opened(cache_bytes=200_000)
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), prompt_lookup=1)
    for i in range(12):
        session.generate([1 + i] * 50 + list(range(40, 80)), config)
    entries = session._prefixes.entries
    assert 1 < len(entries) < 20
    for entry in entries:
        own_bytes = sum(part.nbytes for part in entry.saved.data)
        assert entry.num_bytes == own_bytes - 8  # without the number of its tokens
    assert session.prefix_stats.num_bytes == sum(entry.num_bytes for entry in entries) <= 200_000
    assert session.prefix_stats.evicted > 0


def test_clients_share_a_system_message_and_leave_in_the_middle(opened: Open) -> None:
    session, other = opened(), opened(cache_bytes=0)
    system = "The onion is a vegetable of many layers, and all of them are good to eat."
    chats = [
        [{"role": "system", "content": system}, {"role": "user", "content": f"{'Why? ' * (1 + i % 5)}{i}"}]
        for i in range(30)
    ]
    config = GenerationConfig(max_new_tokens=NEW, eos_ids=(), prompt_lookup=2)
    plain = config.with_values(masks=0, prompt_lookup=0)
    expected = [answer.token_ids for answer in other.generate_each(chats, plain)]
    with Batcher(session, Limits(max_rows=4, prefill_tokens=32)) as batcher:
        requests = [batcher.submit(chat, config, client=i % 2) for i, chat in enumerate(chats * 2)]
        for request in requests[1::3]:
            next(iter(request))
            request.cancel()
        for i, request in enumerate(requests):
            if i % 3 != 1:
                assert request.result(60).token_ids == expected[i % 30]
    stats = session.prefix_stats
    assert stats.hits > 40 and stats.hit_tokens > 0.7 * stats.query_tokens and stats.failed == 0


@pytest.mark.parametrize("stop", [(), ("e",), ("a", "o")])
def test_conversations_are_those_without_a_cache(stop: tuple[str, ...], opened: Open) -> None:
    config = GenerationConfig(max_new_tokens=NEW, stop=stop, prompt_lookup=2)
    talks = [
        opened(cache_bytes=n).conversation("Answer as a poet would, in one line.") for n in (64 << 20, 0)
    ]
    cached = 0
    for question in ("What is an onion?", "And a leek?", "Why?", "Is it so?"):
        warm, cold = [talk.send(question, config) for talk in talks]
        texts = ["".join(event.text for event in stream) for stream in (warm, cold)]
        assert texts[0] == texts[1]
        cached += warm.stats.cached_tokens
    assert cached > 200
