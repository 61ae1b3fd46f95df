"""The README's C++ program, as built."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

from support.cabi import build
from support.fixtures import Named
from support.paths import ROOT
from support.shell import call

from mars_export import GenerationConfig, Session


def test_the_readme_shows_the_program_that_is_built(
    bundles: Named, sessions: Callable[[str], Session]
) -> None:
    (snippet,) = re.findall(
        r"^```cpp\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S | re.M
    )
    assert snippet == (ROOT / "examples/cpp_embed/embed.cpp").read_text(encoding="utf-8")
    program = build() / "examples/cpp_embed/embed"
    config = GenerationConfig(max_new_tokens=32)
    for request in (f"light {i}" for i in range(300)):
        wanted = sessions("llama").generate([{"role": "user", "content": request}], config)
        if len(wanted.text) > 3:
            break
    else:
        raise AssertionError("no request is answered")
    done = call(program, bundles("llama"), request)
    assert done.returncode == 0, done.stderr
    text, figure = done.stdout.rsplit("\n", 2)[:2]
    assert text == wanted.text  # in every number of masks
    assert re.fullmatch(r"[\d.]+ tokens/forward", figure)
    usage = call(program)
    assert (usage.returncode, usage.stderr) == (2, "usage: embed BUNDLE REQUEST\n")
    assert (
        subprocess.run(
            [program, "/no/such/bundle", "x"], capture_output=True, check=False, timeout=60
        ).returncode
        == 1
    )
