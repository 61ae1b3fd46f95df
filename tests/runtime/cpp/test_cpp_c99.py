"""A program in C99: it opens a bundle, describes it and answers as Python does."""

from __future__ import annotations

import subprocess

from support.cabi import build
from support.fixtures import Named, Sessions
from support.shell import call

from mars_export import GenerationConfig

PROMPT = [5, 9, 200, 17]


def test_a_c_program_gives_the_tokens_of_python(bundles: Named, sessions: Sessions) -> None:
    wanted = sessions("llama").generate(PROMPT, GenerationConfig(max_new_tokens=24))
    done = call(build() / "tests/mars-c99", bundles("llama"), *map(str, PROMPT))
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == [*wanted.token_ids]


def test_refusals_in_c() -> None:
    assert subprocess.run([build() / "tests/mars-c99"], check=False, timeout=120).returncode == 0
