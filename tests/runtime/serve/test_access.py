"""Who may call: keys, the turns of their clients, and pages of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.missing import need
from support.stalling import Paced

need("uvicorn", "serve")

from support.served import digest, serving, talking  # noqa: E402

from mars_export import Batcher, Limits, MarsError, Session  # noqa: E402
from mars_export.runtime.serve import ServeOptions  # noqa: E402
from mars_export.runtime.serve.keys import Keys, read_keys  # noqa: E402

NARROW = Limits(max_rows=1, max_waiting=1)


def test_a_key_opens_all_but_health(session: Session) -> None:
    with serving({"tiny": session}, ServeOptions(keys=("alpha", "beta"))) as server:
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            refused = server.call(path)
            assert refused.status == 401 and refused.json["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer gamma", "Bearer", "alpha", "Basic alpha", "Bearer alphabeta", "Bearer \xe9"):
            headers = {"authorization": wrong}
            refused = server.call("/v1/models", headers=headers)
            assert refused.status == 401, wrong
            assert refused.json["error"]["message"].startswith("wrong API key: "), wrong
        assert server.chat(max_tokens=1).status == 401
        assert server.call("/health").status == 200
        assert server.call("/").headers["content-type"].startswith("text/html")
        for key in ("alpha", "beta"):
            assert server.chat(max_tokens=1, headers={"authorization": f"Bearer {key}"}).status == 200


def test_a_stream_is_steered_by_its_own_key_only(slow: tuple[Session, Paced]) -> None:
    session, pace = slow
    with serving({"tiny": session}, ServeOptions(keys=("alpha", "beta"))) as server:
        pace.hold()
        pace.let(1)
        alpha, beta = ({"authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
        with talking(server, max_tokens=9, headers=alpha) as answer:
            path = "/v1/mars/streams/" + json.loads(answer.readline()[6:])["id"]
            assert server.call(path, {"tau": 0.5}, headers=beta).status == 404
            assert server.call(path, {"tau": 0.5}, headers=alpha).status == 200
            pace.open()
            assert answer.read().endswith(b"[DONE]\n\n")


def test_keys_take_turns_and_without_keys_addresses_do(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[object] = []
    real = Batcher.asubmit

    async def asubmit(self: Batcher, *arguments: Any, **named: Any) -> Any:
        clients.append(named["client"])
        return await real(self, *arguments, **named)

    monkeypatch.setattr(Batcher, "asubmit", asubmit)
    with serving({"tiny": session}, ServeOptions(keys=("alpha", "beta"))) as server:
        for key in ("beta", "alpha"):
            server.chat(max_tokens=1, headers={"authorization": f"Bearer {key}"})
    with serving({"tiny": session}) as server:
        server.chat(max_tokens=1)
    assert clients == [digest("beta"), digest("alpha"), "127.0.0.1"]


def test_keys_are_read_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \nalpha\n")
    keys = Keys(read_keys(file))
    assert [keys.find(f"Bearer {key}") for key in ("alpha", "beta", "gamma", "")] == [
        *(digest("alpha"), digest("beta")), None, None,
    ]  # fmt: skip
    assert keys.find(None) is None and keys.find("bearer beta") == digest("beta")
    for bad in (b"", b"# none\n", b"two words\n", "é\n".encode(), b"\xff\n"):
        file.write_bytes(bad)
        with pytest.raises(MarsError, match="keys"):
            read_keys(file)
    with pytest.raises(MarsError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_a_client_is_the_same_whatever_keys_there_were_before() -> None:
    """Streams and places in the queue belong to it, also in replicas that read the file at other times."""
    keys, later = Keys(("alpha", "beta")), Keys(("beta", "gamma"))
    assert keys.find("Bearer beta") == later.find("Bearer beta") == digest("beta")
    keys.replace(("beta", "gamma"))
    assert keys.find("Bearer alpha") is None
    for key in ("beta", "gamma"):
        assert keys.find(f"Bearer {key}") == later.find(f"Bearer {key}")


def test_pages_of_others_do_not_reach_it(session: Session) -> None:
    options = ServeOptions(
        hosts=frozenset(("localhost", "127.0.0.1")), cors_origins=("https://friend.example",)
    )
    with serving({"tiny": session}, options) as server:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]"):
            refused = server.call("/v1/models", headers={"host": host})
            assert refused.status == 403 and refused.json["error"]["code"] == "wrong_host", host
        for host in ("localhost", "127.0.0.1:9", "LOCALHOST:80"):
            assert server.call("/v1/models", headers={"host": host}).status == 200
        own = {"origin": server.url, "host": server.url.removeprefix("http://")}
        assert server.chat(max_tokens=1, headers=own).status == 200
        for target, status in ((f"{server.url}/health", 200), ("HTTP://evil.example/health", 403)):
            assert server.call(target, headers={"host": "127.0.0.1"}).status == status, "absolute form"
        for origin in ("https://evil.example", "null", "http://[", "https://friend.example.evil"):
            refused = server.chat(max_tokens=1, headers={"origin": origin})
            assert refused.status == 403 and refused.json["error"]["code"] == "wrong_origin", origin
            assert "access-control-allow-origin" not in refused.headers
        friend = {"origin": "https://friend.example"}
        allowed = server.chat(max_tokens=1, headers=friend)
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == "https://friend.example"
        asked = {"access-control-request-headers": "authorization,x-stainless-lang"}
        preflight = server.call("/v1/chat/completions", method="OPTIONS", headers=friend | asked)
        assert preflight.status == 204 and "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
        bad = server.chat(max_tokens=0, headers=friend)
        assert bad.status == 400 and "access-control-allow-origin" in bad.headers, "errors can be read, too"
