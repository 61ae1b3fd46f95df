"""examples/minimal/run.py, the decoder that integrators copy, against the tokens of the session."""

from __future__ import annotations

import ast
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from support.fixtures import Named, Sessions
from support.imports import foreign
from support.paths import ROOT
from support.shell import call

from mars_export import GenerationConfig

EXAMPLE = ROOT / "examples" / "minimal" / "run.py"


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = spec_from_file_location("minimal_run", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short_and_stands_on_three_libraries() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 120
    assert foreign(ast.parse(source)) - set(sys.stdlib_module_names) == {"numpy", "onnxruntime", "tokenizers"}


@pytest.mark.parametrize("name", ["llama", "qwen3-mixed"])
@pytest.mark.parametrize("tau", [None, 1.0, 0.5, 0.2, 0.0])
def test_its_steps_are_those_of_a_session(
    minimal: ModuleType, bundles: Named, sessions: Sessions, name: str, tau: float | None
) -> None:
    model, session = minimal.Model(bundles(name), capacity=128), sessions(name)
    for start in range(3, 9):
        prompt = [start, 5, start + 2, 4][: 1 + start % 4]
        steps = list(minimal.decode(model, prompt, tau, 40))
        config = GenerationConfig(tau=tau, max_new_tokens=40)
        done = session.generate(prompt, config)
        assert tuple(token for step in steps for token in step) == tuple(done.token_ids)
        if tau is not None:  # in exact mode the session also feeds two masks more
            assert len(steps) == done.stats.forwards


def test_its_command_prints_the_answer(bundles: Named, sessions: Sessions) -> None:
    command = [sys.executable, str(EXAMPLE), str(bundles("llama")), "hello", "-n", "9"]
    shown = call(*command, check=True).stdout
    done = sessions("llama").generate(
        [{"role": "user", "content": "hello"}], GenerationConfig(max_new_tokens=9)
    )
    assert shown.rpartition("\n9 tokens, ")[0] == done.text


def test_a_newer_format_is_refused(minimal: ModuleType, bundles: Named, tmp_path: Path) -> None:
    manifest = json.loads((bundles("llama") / "manifest.json").read_text(encoding="utf-8"))
    (tmp_path / "manifest.json").write_text(
        json.dumps(manifest | {"format_version": "2.0"}), encoding="utf-8"
    )
    with pytest.raises(SystemExit, match=r"format 2\.0"):
        minimal.Model(tmp_path)
