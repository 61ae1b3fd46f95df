"""The C++ service as an OpenAI server: http.json, and the openai package against it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.agreement import MAIN
from support.cabi import ROOT, build
from support.fixtures import Named, Sessions
from support.missing import need

from mars_export.runtime import GenerationConfig
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.manifest import Profile, open_bundle
from mars_export.runtime.bundle.profiles import store

EXCHANGES: list[dict[str, Any]] = json.loads((ROOT / "tests/conformance/http.json").read_text())["exchanges"]
LACKS = {"n", "logprobs", "structured", "completions"}  # docs/cpp.md
GIVEN = {e["name"]: e for e in EXCHANGES if not LACKS & set(e.get("needs", ()))}
HELLO = [{"role": "user", "content": "hi there"}]
KINDS: dict[str, Any] = {"<text>": str, "<count>": int, "<number>": (int, float), "<list>": list}


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
        if "event-stream" not in self.type:
            return str(self.json["choices"][0]["message"]["content"])
        return "".join(c["choices"][0]["delta"].get("content", "") for c in self.chunks if c["choices"])


class Service:
    def __init__(self, bundle: Path) -> None:
        program = build() / "examples/cpp_service/service"
        self.process = subprocess.Popen([program, bundle, "0", "1"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r":(\d+)$", self.process.stdout.readline().strip())
        assert found is not None, "the service did not start"
        self.port = int(found[1])
        self.model = self.call("/v1/models", None, "GET").json["data"][0]["id"]

    def call(self, path: str, body: str | None, method: str = "POST") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body.encode() if body is not None else None)
        response = connection.getresponse()
        answer = Answer(response.status, response.headers["content-type"], response.read().decode())
        connection.close()
        return answer

    def exchange(self, exchange: dict[str, Any]) -> Answer:
        body = exchange.get("raw", exchange.get("body"))
        text = body if isinstance(body, str) or body is None else json.dumps(body)
        text = text.replace("<model>", self.model) if text is not None else None
        return self.call(exchange["path"], text, exchange["method"])

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module")
def service(bundles: Named) -> Iterator[Service]:
    running = Service(bundles(MAIN))
    yield running
    running.stop()


def like(found: Any, pattern: Any, where: str = "reply") -> None:
    """Assert that `found` is as `pattern` says (http.json, "about")."""
    if isinstance(pattern, str) and pattern in KINDS:
        assert isinstance(found, KINDS[pattern]) and not isinstance(found, bool), (where, found)
        assert pattern != "<count>" or found >= 0, where
    elif isinstance(pattern, dict):
        assert isinstance(found, dict), (where, found)
        for name, value in pattern.items():
            assert name in found, f"{where}: no {name} in {found}"
            like(found[name], value, f"{where}.{name}")
    elif isinstance(pattern, list):
        assert isinstance(found, list), (where, found)
        patterns = [pattern[0]] * max(1, len(found)) if pattern[1:] == ["..."] else pattern
        assert len(found) == len(patterns), (where, found)
        for i, value in enumerate(patterns):
            like(found[i], value, f"{where}[{i}]")
    else:
        assert found == pattern and isinstance(found, bool) == isinstance(pattern, bool), (where, found)


def check_stream(chunks: list[Any], pattern: dict[str, Any]) -> None:
    if "usage" in pattern:
        like(chunks.pop(), pattern["usage"], "usage")
    like(chunks[0], pattern["first"], "first")
    like(chunks[-1], pattern["last"], "last")
    for i, chunk in enumerate(chunks):
        like(chunk, pattern["each"], f"chunk {i}")
        assert len(chunk["choices"]) == 1
    if pattern.get("steps"):
        steps = [step for chunk in chunks for step in chunk["choices"][0].get("steps", [])]
        assert [step["step"] for step in steps] == list(range(len(steps))) and steps
        text = "".join(token["text"] for step in steps for token in step["tokens"])
        assert text == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert {t["how"] for step in steps for t in step["tokens"]} <= {"accepted", "verified"}


@pytest.mark.parametrize("name", GIVEN)
def test_exchange(name: str, service: Service) -> None:
    exchange = json.loads(json.dumps(GIVEN[name]).replace("<model>", service.model))
    answer = service.exchange(exchange)
    assert answer.status == exchange["status"], answer.data
    if "reply" in exchange:
        like(answer.json, exchange["reply"])
    if "stream" in exchange:
        check_stream(answer.chunks, exchange["stream"])
    if "same_text_as" in exchange:
        assert answer.content == service.exchange(GIVEN[exchange["same_text_as"]]).content


def test_what_it_lacks_is_refused_by_name(service: Service) -> None:
    for fields, param in (
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "stop"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"metric": "margin"}, "metric"),
    ):
        answer = service.call("/v1/chat/completions", json.dumps({"messages": HELLO, **fields}))
        assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.data


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
    for knob in ({}, {"tau": 0.4, "window": "full"}, {"exact": True, "lookup": 2}):
        alone = sessions(MAIN).generate(HELLO, GenerationConfig(max_new_tokens=12, **knob))  # type: ignore
        answer = chat(client, extra_body=knob)
        assert answer.choices[0].message.content == alone.text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens == alone.stats.prompt_tokens
        assert answer.usage.completion_tokens == alone.stats.tokens == 12
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert (answer.mars["exact"], answer.mars["tau"]) == (knob.get("tau") is None, knob.get("tau"))
        chunks = list(chat(client, extra_body=knob, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == alone.text and chunks[-1].usage.completion_tokens == 12
    drawn = GenerationConfig(max_new_tokens=12, temperature=0.9, seed=5)
    answer = chat(client, temperature=0.9, seed=5)
    assert answer.choices[0].message.content == sessions(MAIN).generate(HELLO, drawn).text


def test_steps_are_what_the_decoder_did(client: Any, sessions: Sessions) -> None:
    for knob in ({"window": "full"}, {"tau": 0.3, "window": "full"}):
        config = GenerationConfig(max_new_tokens=24, **knob)  # type: ignore[arg-type]
        events = [event for event in sessions(MAIN).stream(HELLO, config) if event.token_ids]
        steps = chat(client, max_tokens=24, extra_body={"return_steps": True, **knob}).choices[0].steps
        assert [[t["id"] for t in step["tokens"]] for step in steps] == [list(e.token_ids) for e in events]
        hows = [[t["how"] for t in step["tokens"]] for step in steps]
        proposed = "accepted" if "tau" in knob else "verified"
        assert all(how == [*[proposed] * (len(how) - 1), "accepted"] for how in hows), hows
        assert any(len(how) > 1 for how in hows)


def test_steps_spell_what_a_stop_string_leaves(client: Any) -> None:
    whole = chat(client, max_tokens=40).choices[0].message.content
    stop = whole[9:12]
    for stream in (False, True):
        answer = chat(client, max_tokens=40, stop=[stop], stream=stream, extra_body={"return_steps": True})
        choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
        text = "".join((c.delta if stream else c.message).content or "" for c in choices)
        steps = [step for c in choices for step in getattr(c, "steps", None) or []]
        assert text == whole[: whole.index(stop)] and choices[-1].finish_reason == "stop"
        assert "".join(t["text"] for step in steps for t in step["tokens"]) == text


def test_mistakes_are_the_packages_own_errors(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="gpt-9")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tau must be a number of 0 or more"):
        chat(client, extra_body={"tau": -1})
    with pytest.raises(openai.BadRequestError, match="context holds 512"):
        chat(client, messages=[{"role": "user", "content": "x " * 2000}])


def test_a_running_stream_is_steered(client: Any, service: Service) -> None:
    stream = chat(client, stream=True, max_tokens=400, extra_body={"tau": 1.0, "ignore_eos": True})
    first = next(iter(stream))
    answer = service.call(f"/v1/mars/streams/{first.id}", json.dumps({"tau": 0.0}))
    assert (answer.status, answer.json["mars"]["tau"]) == (200, 0.0)
    bad = service.call(f"/v1/mars/streams/{first.id}", json.dumps({"exact": False}))
    assert bad.status == 400
    *_, last = stream
    assert last.mars["tau"] == 0.0 and last.timings["forwards"] < 400
    assert service.call(f"/v1/mars/streams/{first.id}", json.dumps({"tau": 0.0})).status == 404


def test_several_clients_at_once(client: Any, sessions: Sessions) -> None:
    wanted = sessions(MAIN).generate(HELLO, GenerationConfig(max_new_tokens=12)).text
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(chat(client).choices[0].message.content))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [wanted] * 12


def test_profiles_are_models_and_stale_ones_are_not(
    bundles: Named, sessions: Sessions, tmp_path: Path
) -> None:
    bundle = tmp_path / "board.bundle"
    shutil.copytree(bundles(MAIN), bundle, ignore=shutil.ignore_patterns(".*"))
    variant = open_bundle(bundle).manifest.variants[0]
    good = Profile(
        "quick", 0.4, "probability", variant.name, describe(bundle / variant.file).sha256, window="full"
    )
    store(bundle, good)
    store(bundle, replace(good, name="old", variant_sha256="0" * 64))
    service = Service(bundle)
    listed = service.call("/v1/models", None, "GET").json["data"]
    assert [model["id"] for model in listed] == ["board", "board:quick"]
    wanted = sessions(MAIN).generate(HELLO, GenerationConfig(tau=0.4, window="full", max_new_tokens=12))
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
