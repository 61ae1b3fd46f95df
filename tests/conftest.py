"""Tiny checkpoints and bundles, written once for a whole test run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from support import tiny
from support.exports import export
from support.fixtures import Exported
from support.oracle import Oracle
from support.tiny import Named

from mars_export import Session
from mars_export.exporter.checkpoint.vocabulary import Vocabulary
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.turns import derive_chat_turns
from mars_export.runtime.bundle.turns import ChatTurns
from mars_export.runtime.decode.speculation.cost import Cost, LearnedCost

BLOCK = 6
pytest_plugins = ["support.selection"]

# No test depends on how fast this machine is, or on luck: what hypothesis draws has no deadline, and is the
# same in each run.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _interrupts_arrive() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _graphs_run_their_standard_nodes() -> Iterator[None]:
    """Whether mars-export-kernels is installed or not; tests/kernels compares both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARS_EXPORT_KERNELS", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def _every_step_costs_the_same() -> Iterator[None]:
    """No test depends on how fast this machine is: with steps that all cost the same, windows are always
    full.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mars_export.runtime.session.session.built_in", lambda *_: Cost(((1, 1.0),)))
        patch.setattr(LearnedCost, "record", lambda *_: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _turns_are_derived_once() -> Iterator[None]:
    """Most tiny checkpoints have one chat template, and its 2,600 renderings are most of an export."""

    @cache
    def derived(
        template: str | None, tokens: tuple[tuple[str, str], ...], *ends: str | None
    ) -> ChatTurns | None:
        vocabulary = SimpleNamespace(
            chat_template=template, bos_token=ends[0], eos_token=ends[1], special_tokens=dict(tokens)
        )
        return derive_chat_turns(cast(Vocabulary, vocabulary))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mars_export.exporter.export.derive_chat_turns",
            lambda v: derived(v.chat_template, (*v.special_tokens.items(),), v.bos_token, v.eos_token),
        )
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """Directory of the tiny checkpoint with a given name, written at its first use.

    Read only: copy before changing it.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: tiny.write(tiny.TINIES[name], root / name))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Exported:
    """The bundle of a checkpoint, by its name, its description or its directory, with these options or
    fields of ExportOptions, exported at its first use. Read only.
    """
    made: dict[str, Path] = {}

    def bundle(of: str | tiny.Tiny | Path, options: ExportOptions | None = None, **fields: Any) -> Path:
        key = repr((of, options, sorted(fields.items())))
        if key not in made:
            root = tmp_path_factory.mktemp("exported")
            directory = checkpoints(of) if isinstance(of, str) else of
            if isinstance(directory, tiny.Tiny):
                directory = tiny.write(directory, root / "checkpoint")
            made[key] = root / (of if isinstance(of, str) else "bundle")  # a server calls the model so
            export(directory, made[key], options, **{"block": BLOCK, **fields})
        return made[key]

    return bundle


@pytest.fixture(scope="session")
def bundles(exported: Exported) -> Named:
    """Directory of the bundle of that checkpoint, fp32 with all metrics and logits. Read only."""
    return lambda name: exported(name, metrics=True, logits=True)


@pytest.fixture(scope="session")
def sessions(bundles: Named) -> Callable[[str], Session]:
    # Without saved prefixes: no test depends on what ran before it.
    return cache(lambda name: Session.open(bundles(name), threads=1, cache_bytes=0))


@pytest.fixture(scope="session")
def oracles(checkpoints: Named) -> Callable[[str], Oracle]:
    return cache(lambda name: Oracle(tiny.load(tiny.TINIES[name], checkpoints(name)), tiny.MASK, BLOCK))
