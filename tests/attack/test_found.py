"""What the long forms of `make attack` found, each by its smallest reproduction."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from attack.mutators import rehash
from support.paths import ROOT

from mars_export.runtime import Session, SessionError

BUNDLE = ROOT / "tests" / "runtime" / "bundle" / "written-by-1.1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLE, tmp_path / "foreign.bundle"))


def test_nothing_is_printed_when_a_graph_cannot_be_loaded(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime's fallback printed to the standard output, where programs expect their JSON (seed 2853)."""
    graph = path / "model.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"GatherND", b"Gather\xf9D", 1).replace(b"Add", b"A\xf9d"))
    rehash(path)
    with pytest.raises(SessionError, match="cannot load the graph"):
        Session.open(path, threads=1)
    assert capfd.readouterr().out == ""
