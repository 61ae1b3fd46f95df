"""The C++ service as an OpenAI server: http.json, and the openai package against it."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.agreement import MAIN
from support.cabi import build
from support.cpp_service import start
from support.exchanges import NAMED, check_stream, content, like, named, sent
from support.fixtures import Named, Sessions
from support.missing import need

from mars_export import GenerationConfig
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import Profile
from mars_export.runtime.bundle.open import open_bundle
from mars_export.runtime.bundle.profiles import store

LACKS = {"structured", "responses", "messages", "logprobs", "steer"}  # docs/cpp.md
GIVEN = [name for name, exchange in NAMED.items() if not LACKS & set(exchange.get("needs", ()))]
HELLO = [{"role": "user", "content": "hi there"}]


@dataclass
class Answer:
    status: int
    type: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def chunks(self) -> list[Any]:
        """What is streamed, and that it ends as it should."""
        *events, done, rest = self.data.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(e.removeprefix("data: ")) for e in events if not e.startswith(":")]

    @property
    def content(self) -> str:
        return content(self.chunks if "event-stream" in self.type else self.json)


class Service:
    def __init__(self, bundle: Path, *options: str, key: str | None = None) -> None:
        self.key = key
        self.process, self.port = start(bundle, *options)
        self.model = self.call("/v1/models", None, "GET").json["data"][0]["id"]

    def call(self, path: str, body: str | None, method: str = "POST") -> Answer:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body.encode() if body is not None else None, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers["content-type"], response.read().decode())

    def exchange(self, exchange: dict[str, Any]) -> Answer:
        return self.call(exchange["path"], sent(exchange, self.model), exchange["method"])

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module")
def service(bundles: Named) -> Iterator[Service]:
    running = Service(bundles(MAIN))
    yield running
    running.stop()


@pytest.mark.parametrize("name", GIVEN)
def test_exchange(name: str, service: Service) -> None:
    exchange = named(name, service.model)
    answer = service.exchange(exchange)
    assert answer.status == exchange["status"], answer.data
    if "reply" in exchange:
        like(answer.json, exchange["reply"])
    if "stream" in exchange:
        check_stream(answer.chunks, exchange["stream"])
    if "same_text_as" in exchange:
        assert answer.content == service.exchange(NAMED[exchange["same_text_as"]]).content


def test_what_it_lacks_is_refused_by_name(service: Service) -> None:
    for fields, param, code in (
        ({"n": 17}, "n", "invalid_value"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "stop"}}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"max_tokens": 10**9}, "max_tokens", "invalid_value"),
        ({"metric": "margin"}, "metric", "invalid_value"),
        ({"tau": 0.9, "prompt_lookup": 2}, "prompt_lookup", "invalid_value"),
        ({"grammar": "none"}, "grammar", "invalid_grammar"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"stop": ["x" * 2000]}, "stop", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"max_tokens": 2**63}, "max_tokens", "invalid_value"),
        ({"exact": 1}, "exact", "invalid_value"),
        ({"masks": ["full"]}, "masks", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages", "invalid_value"),
        ({"messages": HELLO * 999}, "messages", "context_length_exceeded"),
    ):
        answer = service.call("/v1/chat/completions", json.dumps({"messages": HELLO, **fields}))
        error = answer.json["error"]
        assert (answer.status, error["param"], error["code"]) == (400, param, code), answer.data


# --- the openai package ---


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Any]:
    need("openai", "dev")
    import openai

    url = f"http://127.0.0.1:{service.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as made:
        yield made


def chat(client: Any, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": MAIN, "messages": HELLO, "max_tokens": 12, **fields}
    return client.chat.completions.create(**given)


def test_an_answer_is_pythons_own(client: Any, sessions: Sessions) -> None:
    assert [model.id for model in client.models.list()] == [MAIN]
    for setting in ({}, {"tau": 0.4, "masks": "full"}, {"exact": True, "prompt_lookup": 2}):
        alone = sessions(MAIN).generate(HELLO, GenerationConfig(max_new_tokens=12, **setting))  # type: ignore
        answer = chat(client, extra_body=setting)
        assert answer.choices[0].message.content == alone.text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == alone.stats.prompt_tokens
        assert answer.usage.completion_tokens == alone.stats.tokens == 12
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert (answer.mars["exact"], answer.mars["tau"]) == (setting.get("tau") is None, setting.get("tau"))
        chunks = list(chat(client, extra_body=setting, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == alone.text and chunks[-1].usage.completion_tokens == 12
    drawn = GenerationConfig(max_new_tokens=12, temperature=0.9, seed=5)
    answer = chat(client, temperature=0.9, seed=5)
    assert answer.choices[0].message.content == sessions(MAIN).generate(HELLO, drawn).text


def test_steps_are_what_the_decoder_did(client: Any, sessions: Sessions) -> None:
    for setting in ({"masks": "full"}, {"tau": 0.3, "masks": "full"}):
        config = GenerationConfig(max_new_tokens=24, **setting)  # type: ignore[arg-type]
        events = [event for event in sessions(MAIN).stream(HELLO, config) if event.token_ids]
        steps = chat(client, max_tokens=24, extra_body={"return_steps": True, **setting}).choices[0].steps
        assert [[t["id"] for t in step["tokens"]] for step in steps] == [list(e.token_ids) for e in events]
        hows = [[t["how"] for t in step["tokens"]] for step in steps]
        proposed = "accepted" if "tau" in setting else "verified"
        assert all(how == [*[proposed] * (len(how) - 1), "accepted"] for how in hows), hows
        assert any(len(how) > 1 for how in hows)


def test_profiles_are_models_and_stale_ones_are_not(
    bundles: Named, sessions: Sessions, tmp_path: Path
) -> None:
    bundle = tmp_path / "board.bundle"
    shutil.copytree(bundles(MAIN), bundle, ignore=shutil.ignore_patterns(".*"))
    variant = open_bundle(bundle).manifest.variants[0]
    good = Profile(
        "quick", 0.4, "probability", variant.name, describe(bundle / variant.file).sha256, masks="full"
    )
    store(bundle, good)
    store(bundle, replace(good, name="old", variant_sha256="0" * 64))
    service = Service(bundle)
    listed = service.call("/v1/models", None, "GET").json["data"]
    assert [model["id"] for model in listed] == ["board", "board:quick"]
    wanted = sessions(MAIN).generate(HELLO, GenerationConfig(tau=0.4, masks="full", max_new_tokens=12))
    for fields in ({"model": "board:quick"}, {"model": "board", "profile": "quick"}):
        answer = service.call(
            "/v1/chat/completions", json.dumps({"messages": HELLO, "max_tokens": 12, **fields})
        )
        assert answer.content == wanted.text
        assert (answer.json["mars"]["profile"], answer.json["mars"]["tau"]) == ("quick", 0.4)
    stale = service.call("/v1/chat/completions", json.dumps({"messages": HELLO, "profile": "old"}))
    assert stale.status == 400 and "is stale: the graph" in stale.json["error"]["message"]
    assert (
        service.call("/v1/chat/completions", json.dumps({"messages": HELLO, "model": "board:old"})).status
        == 404
    )
    service.stop()


def test_several_answers_are_several_seeds(client: Any, sessions: Sessions) -> None:
    def drawn(seed: int) -> str:
        config = GenerationConfig(max_new_tokens=12, temperature=1.0, seed=seed)
        return sessions(MAIN).generate(HELLO, config).text

    wanted = [drawn(seed) for seed in (5, 6, 7)]
    answer = chat(client, temperature=1.0, seed=5, n=3)
    assert [choice.message.content for choice in answer.choices] == wanted
    assert answer.usage.completion_tokens == 36 and answer.mars["seed"] == 5
    texts = ["", "", ""]
    for chunk in chat(client, temperature=1.0, seed=5, n=3, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == wanted
    one, other = (chat(client, temperature=2.0).mars["seed"] for _ in range(2))
    assert one != other  # a fresh one where none is given


def test_keys_are_needed_where_there_is_a_file_of_them(bundles: Named, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\n first-key \nsecond\n")
    service = Service(bundles(MAIN), "--api-key-file", str(keys), "--client-share", "0.5", key="second")
    body = json.dumps({"messages": HELLO, "max_tokens": 2})
    try:
        for key in ("first-key", "second"):
            service.key = key
            assert service.call("/v1/chat/completions", body).status == 200
        for key in (None, "", "secon", "second2", "# ours", "first-key second"):
            service.key = key
            for path, text in (
                ("/v1/chat/completions", body),
                ("/v1/models", None),
                ("/v1/completions", "{}"),
            ):
                answer = service.call(path, text, "POST" if text else "GET")
                assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key"), (key, path)
            assert service.call("/health", None, "GET").status == 200
    finally:
        service.stop()
    for wrong in ("", "# none\n", "a b\n"):
        keys.write_text(wrong)
        done = subprocess.run(
            [build() / "examples/cpp_service/service", bundles(MAIN), "0", "1", "--api-key-file", keys],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "key" in done.stderr
