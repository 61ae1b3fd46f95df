"""The public words of both runtimes: what only one side has is named here and in docs/cpp.md."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

import typer.main
from support.cabi import build
from support.cabi_types import PREFIX_COUNTS, REASONS, Config, CStats
from support.paths import ROOT
from support.shell import call

from mars_export import GenerationConfig
from mars_export.cli import ALIASES, app
from mars_export.runtime.decode.event import FinishReason
from mars_export.runtime.decode.prefix import PrefixStats
from mars_export.runtime.decode.stats import Stats

GUIDE = (ROOT / "docs/cpp.md").read_text(encoding="utf-8")
LOGITS = {"logit_bias", "presence_penalty", "frequency_penalty", "top_logprobs"}
GRAMMAR = {"schema", "regex", "choice", "tools", "separators"}


def test_settings_of_a_request() -> None:
    python = {field.name for field in fields(GenerationConfig)}
    # C says exact by MARS_EXACT; a deadline is the Batcher's in Python, `cache_block` an argument of its own.
    here = {name for name, _ in Config._fields_ if not name.startswith("num_")} - {"struct_size"}
    assert python - here == GRAMMAR | LOGITS | {"exact"}
    assert here - python == {"cache_block", "deadline"}
    assert all(f"`{name}`" in GUIDE for name in GRAMMAR | LOGITS)


def test_statistics() -> None:
    python = set(Stats().to_dict())
    here = {name for name, _ in CStats._fields_} - {"struct_size", "num_accepted"}
    assert (python - here, here - python) == (set(), set())
    assert {field.name for field in fields(PrefixStats)} == set(PREFIX_COUNTS)


def test_reasons_to_finish() -> None:
    assert set(get_args(FinishReason)) == set(REASONS.values()) - {None}


def test_options_of_the_command_line() -> None:
    generate = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    python = [{option for option in given.opts if option.startswith("--")} for given in generate.params]
    usage = call(build() / "mars-run", "--help", check=True).stdout
    here = set(re.findall(r"--[a-z][a-z-]+", usage))
    lacks = {"--schema", "--regex", "--choice", "--tools", "--n", "--accuracy-level", "--quiet"}
    lacks |= {"--prefix-dir", "--prefix-bytes", "--strict"}
    assert {min(names) for names in python if names and not names & here} == lacks
    aliases = {f"--{name}" for name in ALIASES}
    assert aliases <= here
    assert here - set().union(*python) - aliases == {"--token-ids", "--version", "--help"}
    assert all(f"`{option}`" in GUIDE for option in lacks)
