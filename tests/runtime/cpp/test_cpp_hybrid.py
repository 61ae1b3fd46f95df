"""Qwen3.5's recurrent layers: libmars gives Python's text, by the same steps."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.cabi import Library, MarsStatusError
from support.cabi_session import CSession
from support.cpp_service import HEAD, post, start, text_of
from support.exports import export
from support.families import HYBRIDS
from support.twins import SAMPLINGS, same_steps

from mars_export import GenerationConfig, Session
from mars_export.runtime.bundle.manifest import parse_manifest
from mars_export.runtime.bundle.open import write_manifest
from mars_export.runtime.structured.stored_grammars import compile_into

ENDLESS: dict[str, Any] = {"max_new_tokens": 40, "eos_ids": ()}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("hybrids")

    @cache
    def exported(name: str) -> Path:
        target = root / f"{name}.bundle"
        export(tiny.write(HYBRIDS[name], root / name), target, block=6)
        compile_into(target, "few", GenerationConfig(regex="[abc]{60}"))  # texts that can be guessed
        return target

    return exported


def prompts(count: int) -> list[list[int]]:
    """Ragged ones that repeat themselves, so that lookups find guesses, some longer than a chunk."""
    draw = random.Random(7)
    parts = [[draw.randrange(1, 250) for _ in range(draw.randint(1, 30))] for _ in range(count)]
    return [part * draw.randint(1, 14) for part in parts]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    "settings",
    [*SAMPLINGS, {"prompt_lookup": 1}, {"tau": 0.2}, {"masks": 0}, {"grammar": "few", "prompt_lookup": 2}],
    ids=str,
)
def test_libmars_takes_the_steps_of_python(
    settings: dict[str, Any], name: str, bundle: Callable[[str], Path], library: Library
) -> None:
    python, asked = Session.open(bundle(name), threads=1), ENDLESS | {"masks": "full"} | settings
    with CSession(library, bundle(name), threads=1) as session:
        for prompt in prompts(6):
            same_steps(python, session, prompt, asked)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_ragged_batch_has_the_text_of_one_token_a_step(
    name: str, bundle: Callable[[str], Path], library: Library
) -> None:
    asked, plain = prompts(24), GenerationConfig(**ENDLESS, masks=0, grammar="few")
    texts = [a.token_ids for a in Session.open(bundle(name), threads=1).generate_each(asked, plain)]
    settings = [
        # Answers of several lengths: rows end, and others move to their places.
        ENDLESS | {"grammar": "few", "prompt_lookup": 1, "max_new_tokens": 40 - 9 * (i % 4)}
        for i in range(len(asked))
    ]
    with CSession(library, bundle(name), threads=1, prefill_tokens=16) as session:
        made = session.generate_batch(asked, settings)
        assert [m.token_ids for m in made] == [
            tuple(text[: each["max_new_tokens"]]) for text, each in zip(texts, settings, strict=True)
        ]
        assert sum(m.accepted_draft_tokens for m in made) > 100
        assert sum(m.rejected_draft_tokens for m in made) > 100


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_batch_from_a_warm_cache_has_the_text_without_one(
    name: str, bundle: Callable[[str], Path], library: Library
) -> None:
    """Conversations: each prompt goes on where an earlier prompt or answer ended."""
    asked, plain = [p[:150] for p in prompts(40)], GenerationConfig(**ENDLESS, masks=0, grammar="few")
    settings = [ENDLESS | {"grammar": "few", "prompt_lookup": 1}] * len(asked)
    python, cached = Session.open(bundle(name), threads=1, cache_bytes=0), 0
    with CSession(library, bundle(name), threads=1, prefill_tokens=32, cache_bytes=1 << 28) as session:
        for turn in range(3):
            texts = [answer.token_ids for answer in python.generate_each(asked, plain)]
            made = []
            for i in range(0, len(asked), 8):
                made += session.generate_batch(asked[i : i + 8], settings[i : i + 8])
            assert [m.token_ids for m in made] == texts
            cached += turn * sum(m.cached_tokens for m in made)
            asked = [p + list(t)[: 40 - turn] + p[:9] for p, t in zip(asked, texts, strict=True)]
        assert cached > 0.8 * sum(map(len, asked)) and session.prefix_stats["failed"] == 0


def test_a_service_goes_on_while_clients_leave(bundle: Callable[[str], Path]) -> None:
    """Rows of requests that were cancelled are used again."""
    words = ["the onion " * (1 + i % 7) + "xyz"[i % 3] for i in range(24)]
    asked = GenerationConfig(max_new_tokens=40)
    texts = [answer.text for answer in Session.open(bundle("hybrid"), threads=1).generate_each(words, asked)]
    process, port = start(bundle("hybrid"))

    def ask(text: str) -> str:
        leaving = json.dumps({"prompt": text[::-1], "max_tokens": 400, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(leaving), leaving))
            client.recv(1000)
        status, body = post(port, {"prompt": text, "max_tokens": 40})
        assert status == 200, body
        return text_of(body)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, words)) == texts
    process.terminate()
    assert process.wait(60) == 0


def test_sessions_refuse_what_states_lack(
    bundle: Callable[[str], Path], library: Library, tmp_path: Path
) -> None:
    path = bundle("hybrid")
    with pytest.raises(MarsStatusError, match="recurrent layers run on a CPU only; give --device cpu"):
        CSession(library, path, device="cuda")
    shutil.copytree(path, tmp_path / "b")
    values = json.loads((path / "manifest.json").read_text())
    values["model"]["recurrent"]["width"] += 1
    write_manifest(tmp_path / "b", parse_manifest(json.dumps(values)))
    with pytest.raises(MarsStatusError, match=r"the graph and the manifest disagree about .*0\.inputs"):
        CSession(library, tmp_path / "b", threads=1)
    only = pytest.raises(MarsStatusError, match="cursor commit only")
    with CSession(library, path, threads=1) as session, only:
        session.generate([1, 2], tau=0.5, cache_block=4)
