"""libmars beside Python: the store of KV entries, and talks in turns, over real graphs."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.cabi import Library, MarsStatusError, build
from support.cabi_conversation import CConversation, CStream
from support.cabi_session import CSession
from support.families import HYBRIDS
from support.fixtures import Exported, Named
from support.shell import call

from mars_export import GenerationConfig, Session, SessionError
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.bundle.profiles import store

PLENTY = 1 << 30
CONFIG: dict[str, Any] = {"max_new_tokens": 10, "masks": "full"}
Both = Callable[..., tuple[Session, CSession]]


@pytest.fixture(scope="module", params=[tiny.WIDE, HYBRIDS["hybrid"]], ids=["wide", "hybrid"])
def bundle(exported: Exported, request: pytest.FixtureRequest) -> Callable[[int], Path]:
    made: tiny.Tiny = request.param
    return lambda context: exported(
        replace(made, rewritten={"max_position_embeddings": context}), metrics=True, logits=True
    )


@pytest.fixture
def both(library: Library, bundle: Callable[[int], Path]) -> Iterator[Both]:
    """A session of Python and one of libmars, each with a store of its own."""
    with ExitStack() as stack:

        def opened(cache_bytes: int = PLENTY, context: int = 512) -> tuple[Session, CSession]:
            session = Session.open(bundle(context), threads=1, cache_bytes=cache_bytes)
            twin = CSession(library, bundle(context), threads=1, cache_bytes=cache_bytes)
            return session, stack.enter_context(twin)

        yield opened


def drained(stream: Any) -> Any:
    for _ in iter(stream.next, None) if isinstance(stream, CStream) else stream:
        pass
    return stream.completion() if isinstance(stream, CStream) else stream.completion


def check_twins(session: Session, twin: CSession) -> None:
    """Both stores were asked, had, kept and let go the same."""
    assert {name: twin.prefix_stats[name] for name in asdict(session.prefix_stats)} == asdict(
        session.prefix_stats
    )


def same(one: Any, other: Any) -> None:
    assert (other.text, other.token_ids) == (one.text, one.token_ids)
    assert other.finish_reason == one.finish_reason
    assert other.cached_tokens == one.stats.cached_tokens


@pytest.mark.parametrize("cache_bytes", [PLENTY, 120_000, 0])
def test_requests_find_and_leave_the_same_in_both(cache_bytes: int, both: Both) -> None:
    session, twin = both(cache_bytes)
    draw, texts = random.Random(7), ["the man"]
    for i in range(24):
        system = draw.choice([None, "be the inner man", "an error is on the net " * 12])
        question = draw.choice(texts) + draw.choice([" a", " the error", " x y z"])
        prompt: Any = question if i % 3 else [{"role": "user", "content": question}]
        if i % 3 == 0 and system is not None:
            prompt = [{"role": "system", "content": system}, *prompt]
        setting = {
            **CONFIG,
            **draw.choice([{}, {"tau": 0.5}, {"tau": 1.0}, {"temperature": 0.8, "min_p": 0.05}]),
        }
        setting["cache_salt"] = draw.choice(["", "", "tenant"])
        done = session.generate(prompt, GenerationConfig(**setting))
        same(done, twin.generate(prompt, **setting))
        texts.append(question + done.text)
        check_twins(session, twin)
    stats = twin.prefix_stats
    assert (stats["hits"] > 1) == (cache_bytes > 0) and (stats["evicted"] > 0) == (cache_bytes == 120_000)
    assert stats["num_bytes"] <= cache_bytes
    twin.forget_prefixes()
    assert twin.prefix_stats["num_bytes"] == 0


def talks(
    both: Both, system: str | None = None, *, drop_oldest: bool = False, **options: Any
) -> tuple[Any, CConversation]:
    session, twin = both(**options)
    return session.conversation(system, drop_oldest=drop_oldest), twin.conversation(
        system, drop_oldest=drop_oldest
    )


def say(pair: tuple[Any, CConversation], text: str, **changes: Any) -> tuple[Any, Any]:
    setting = {**CONFIG, **changes}
    wanted = drained(pair[0].send(text, GenerationConfig(**setting)))
    made = drained(pair[1].send(text, **setting))
    same(wanted, made)
    assert pair[1].messages == [dict(m) for m in pair[0].messages]
    assert pair[1].dropped == pair[0].dropped
    return wanted, made


def test_talks_are_the_same_turn_by_turn(both: Both) -> None:
    pair = talks(both, "the man")
    for question in ("a", "the error", "x é 🙂"):
        for changes in ({}, {"tau": 0.5}, {"tau": 1.0, "stop": ("e",)}, {"temperature": 1.2, "seed": 5}):
            say(pair, question, **changes)
    for talk in pair:
        talk.undo()
    say(pair, "and now?")
    wanted = drained(pair[0].edit("new", GenerationConfig(**CONFIG)))
    same(wanted, drained(pair[1].edit("new", **CONFIG)))
    wanted = drained(pair[0].edit("first", GenerationConfig(**CONFIG), turn=1))
    same(wanted, drained(pair[1].edit("first", 1, **CONFIG)))
    messages = pair[1].messages
    assert [m["content"] for m in messages if m["role"] == "user"] == ["a", "first"]
    for changed in (
        messages,
        [*messages[:3], {"role": "user", "content": "n"}, {"role": "assistant", "content": "ha"}],
    ):
        for talk in pair:
            talk.resume(changed)
        say(pair, "go on")
    for talk in pair:
        talk.reset()
    assert [m["role"] for m in pair[1].messages] == ["system"]


def test_the_contexts_end(both: Both) -> None:
    pair = talks(both, "the", context=96)
    say(pair, "the", max_new_tokens=12)
    with pytest.raises(SessionError, match="remove turns") as wanted:
        pair[0].send("the error is on the net " * 3)
    with pytest.raises(MarsStatusError, match="the conversation has .* remove turns") as made:
        pair[1].send("the error is on the net " * 3)
    assert str(made.value).split(";")[0] == str(wanted.value).split(";")[0]
    assert pair[1].messages == [dict(m) for m in pair[0].messages], "it is as it was"
    with pytest.raises(MarsStatusError, match="the question and the system message have"):
        pair[1].edit("the error " * 90, 0, **CONFIG)
    rolling = talks(both, "the", drop_oldest=True, context=96)
    dropped = 0
    for i in range(12):
        say(rolling, f"{i} the error is on the net", max_new_tokens=12)
        dropped += rolling[1].dropped
    assert dropped > 4 and rolling[1].messages[0]["role"] == "system"


# --- profiles, deadlines ---


def test_profiles_and_stale_ones(library: Library, bundles: Named, tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    variant = open_bundle(directory).manifest.variants[0]
    evidence = {"task": "my task.jsonl", "max_drop": 0.01}
    graph = describe(directory / variant.file).sha256
    good = Profile("quick", 0.4, "margin", variant.name, graph, evidence, masks=3)
    stale = (
        replace(good, name="graph", variant_sha256="0" * 64),
        replace(good, name="weights", weights_sha256="0" * 64),
        replace(good, name="precision", precision="int4"),
        replace(good, name="level", accuracy_level=0),
    )
    for profile in (good, *stale):
        store(directory, profile)
    session = Session.open(directory, threads=1)
    with CSession(library, directory, threads=1) as twin:
        wanted = session.profile("quick")
        assert twin.profile("quick") == {
            "tau": wanted.tau, "metric": 1, "masks": wanted.masks,
        }  # fmt: skip
        for name in ("graph", "weights", "precision", "level", "none"):
            with pytest.raises(Exception, match="stale|no profile") as python:
                session.profile(name)
            with pytest.raises(MarsStatusError) as error:
                twin.profile(name)
            problem, _, advice = str(error.value).partition(". Renew it with ")
            assert (error.value.status, problem) == (2, str(python.value).partition(". Renew it with")[0])
            assert name == "none" or advice == "`mars-export calibrate`"
    for name, code in (("quick", 0), ("weights", 1)):
        command = [build() / "mars-run", directory, "-p", "x", "--json", "--max-new-tokens", "4"]
        done = call(*command, "--profile", name)
        assert done.returncode == code, done.stderr
        if code:
            assert "profile `weights` is stale: the weights are not those" in done.stderr
        else:
            assert (json.loads(done.stdout)["exact"], json.loads(done.stdout)["tau"]) == (False, 0.4)
