"""The curl lines of README.md and docs/serving.md, run as printed against the command, on a tiny bundle."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import pytest
from support.agreement import MAIN
from support.fixtures import Sessions
from support.missing import lacking, need
from support.paths import ROOT
from support.shell import call

need("uvicorn", "serve")
need("openai", "dev")

from support.served import Serving, serving  # noqa: E402

from mars_export import cli  # noqa: E402
from mars_export.runtime.serve.api_error import CODES  # noqa: E402

PAGES = ("README.md", "docs/serving.md")


@pytest.fixture(scope="module")
def server(sessions: Sessions) -> Iterator[Serving]:
    with serving({"mars": sessions(MAIN)}) as running:
        yield running


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.S | re.M)


def test_the_page_lists_every_code() -> None:
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    cells = re.findall(
        r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", page.split("| code |")[1].split("\n\n")[0], flags=re.M
    )
    listed = [code for cell in cells for code in re.findall("[a-z_]+", cell)]
    assert sorted(listed) == sorted(CODES)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "runtime").rglob("*.py"))
    assert set(re.findall(r"\bcode ?= ?\"(\w+)\"", sources)) <= set(CODES)


@pytest.mark.parametrize("page", PAGES)
def test_curl_lines(page: str, server: Serving) -> None:
    if shutil.which("curl") is None:
        lacking("curl is not installed")
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("curl ")]
    assert len(lines) >= 3
    for line in lines:
        command = line.replace("localhost:8000", f"127.0.0.1:{server.port}").replace(
            "curl ", "curl --fail-with-body ", 1
        )
        done = call("bash", "-c", command)
        assert done.returncode == 0, (line, done.stdout)
        if '"stream": true' in line:
            assert done.stdout.endswith("data: [DONE]\n\n")
        elif "/metrics" not in line:
            assert "error" not in json.loads(done.stdout)


def test_the_python_of_the_page(server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = [block for block in blocks("docs/serving.md", "python") if "openai" in block]
    exec(
        snippet.replace("localhost:8000", f"127.0.0.1:{server.port}").replace(
            "stream=True,", "stream=True, max_tokens=8,"
        )
    )
    assert capsys.readouterr().out


def test_the_options_of_the_page_exist() -> None:
    from typer.main import get_command

    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    section = (ROOT / "docs/serving.md").read_text(encoding="utf-8").partition("## Running it")[2]
    named = set(re.findall(r"`(--[a-z-]+)", section.partition("\n## ")[0]))
    assert len(named) >= 15
    assert named - {"--batch", "--revision"} <= known, "of `trt` and `pull`"
