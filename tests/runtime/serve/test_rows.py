"""How many requests run at once: of an engine as many as it has rows, unless the operator says a number."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from support.fixtures import Sessions
from support.manifests import ENGINE
from support.missing import need
from typer.testing import CliRunner

from mars_export import Limits, MarsError, Session
from mars_export.cli import app
from mars_export.runtime.bundle.engine_info import Extent

need("starlette", "serve")

from mars_export.runtime.serve import ServeOptions  # noqa: E402
from mars_export.runtime.serve.models.open_model import OpenModel  # noqa: E402


def engine(session: Session, rows: int) -> Session:
    """The same graph, said to be an engine of so many rows."""
    ranges = tuple(
        replace(each, batch=Extent(1, 1, rows), outputs=Extent(1, 4, 64)) for each in ENGINE.ranges
    )
    variant = replace(
        session.variant, backend="tensorrt", capacity=512, engine=replace(ENGINE, ranges=ranges)
    )
    made = Session(session.bundle, variant, session.backend)
    made.cost = session.cost
    return made


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (2, ServeOptions(fits_rows=True), 2),
        (16, ServeOptions(fits_rows=True), 8),
        (2, ServeOptions(Limits(max_rows=3)), 3),
        (None, ServeOptions(fits_rows=True), 8),
    ],
)
def test_rows_of_an_engine(
    rows: int | None,
    options: ServeOptions,
    expected: int,
    sessions: Sessions,
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = sessions("llama") if rows is None else engine(sessions("llama"), rows)
    model = OpenModel("m", session, options)
    with caplog.at_level(logging.INFO, "mars_export.serve"):
        model.warm()
    assert model.fault is None and model.batcher is not None
    model.batcher.close()
    assert model.batcher.limits == replace(options.limits, max_rows=expected)
    said = [
        record.getMessage() for record in caplog.records if "the rows of its engine" in record.getMessage()
    ]
    assert len(said) == (1 if rows == expected == 2 else 0)


def test_only_the_default_gives_way(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ServeOptions] = []

    def new_app(_: Any, options: ServeOptions) -> None:
        given.append(options)
        raise MarsError("enough")

    monkeypatch.setattr("mars_export.runtime.serve.app", new_app)
    for words in ((), ("--max-rows", "8"), ("--max-rows", "3")):
        CliRunner().invoke(app, ["serve", str(sessions("llama").bundle.path), "--port", "0", *words])
    assert [(o.limits.max_rows, o.fits_rows) for o in given] == [(8, True), (8, False), (3, False)]
