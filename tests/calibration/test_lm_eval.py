"""examples/lm_eval/mars_lm.py: the harness's settings and requests, with the two names that it takes from
lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.paths import ROOT
from support.tiny import Named

from mars_export import CalibrationError, GenerationConfig, MarsError, SessionError

EXAMPLE = ROOT / "examples" / "lm_eval" / "mars_lm.py"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, bundles: Named) -> Any:
    """A function that makes the model of some arguments."""
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["lm_eval.api.model"], "LM", object, raising=False)
    monkeypatch.setattr(
        sys.modules["lm_eval.api.registry"], "register_model", lambda _: lambda kind: kind, raising=False
    )
    spec = importlib.util.spec_from_file_location("mars_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    defaults = {"bundle": str(bundles("qwen2")), "max_gen_toks": 12, "threads": 1, "batch_size": 2}
    return lambda **arguments: module.MarsLM(**defaults | arguments)


def ask(model: Any, *contexts: str) -> list[str]:
    requests = [SimpleNamespace(args=(context, {"until": []})) for context in contexts]
    texts: list[str] = model.generate_until(requests)
    return texts


def test_answers_are_those_of_the_session(model: Any) -> None:
    contexts = ("hello", "the cat", "one two")
    for config in ({"tau": 0.5}, {}):
        lossy = model(**config)
        settings = GenerationConfig(max_new_tokens=12, **config)
        assert ask(lossy, *contexts) == [lossy.session.generate(c, settings).text for c in contexts]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {}),
        ({"until": "\n"}, {"stop": ("\n",)}),
        ({"until": ["\n", "", "Q:"], "max_gen_toks": 5}, {"stop": ("\n", "Q:"), "max_new_tokens": 5}),
        ({"do_sample": False, "temperature": 0.0, "top_p": 0.5}, {}),
        ({"temperature": 0.7, "top_p": 0.5, "seed": 3}, {"temperature": 0.7, "top_p": 0.5, "seed": 3}),
    ],
)
def test_generation_settings(model: Any, settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    lm = model()
    assert lm.with_settings(settings) == lm.config.with_values(**wanted)


def test_what_is_not_known_or_does_not_fit_is_refused(model: Any) -> None:
    with pytest.raises(CalibrationError, match="unknown generation settings: num_beams"):
        model().with_settings({"num_beams": 4})
    with pytest.raises(SessionError, match="this bundle's context holds 512"):
        ask(model(), "a " * 600)
    with pytest.raises(CalibrationError, match="evaluate the checkpoint itself"):
        model().loglikelihood([])
    for arguments, message in [
        ({"bundle": ""}, "bundle=PATH is missing"),
        ({"bundel": "x"}, "unknown model_args: bundel"),
        ({"batch_size": "auto"}, "batch_size must be"),
        ({"tau": "fast"}, "tau must be a number of 0 or more, not 'fast'"),
        ({"profile": "sums", "tau": 0.5}, "use either the profile or tau"),
        ({"bundle": "nowhere"}, "nowhere: no such bundle"),
    ]:
        with pytest.raises(MarsError, match=message):
            model(**arguments)


def test_the_chat_template_brings_its_own_special_tokens(model: Any) -> None:
    lm, messages = model(), [{"role": "user", "content": "hello"}]
    assert lm.encode(lm.apply_chat_template(messages)) == lm.session.encode(messages)


def test_without_the_harness_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise ImportError('not here')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    assert "pip install 'mars-export[lm-eval]'" in done.stderr
    assert "Traceback" not in done.stderr
