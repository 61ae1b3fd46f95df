"""Pieces arrive in any order, damaged or twice, and the files are right or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.pieces import LIST, PiecesError, cut, join, piece_name


def make(folder: Path, sizes: list[int]) -> list[tuple[str, Path]]:
    folder.mkdir()
    sources = []
    for i, size in enumerate(sizes):
        path = folder / f"file{i}"
        path.write_bytes(bytes((j * 7 + i) % 251 for j in range(size)))
        sources.append((f"inner{i % 2}/file{i}", path))
    return sources


@settings(max_examples=40)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(1, 120), st.randoms())
def test_any_order_gives_the_files(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], size: int, random: object
) -> None:
    root = tmp_path_factory.mktemp("pieces")
    if not sum(sizes):
        sizes = [*sizes, 1]
    sources = make(root / "sources", sizes)
    contents = cut(sources, root / "cut", size)
    arrived, target = root / "arrived", root / "target"
    arrived.mkdir()
    (arrived / LIST).write_bytes((root / "cut" / LIST).read_bytes())
    numbers = list(range(len(contents.hashes)))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    for left, number in enumerate(numbers):
        name = piece_name(number)
        (arrived / name).write_bytes((root / "cut" / name).read_bytes())
        state = join(arrived, target)
        assert len(state.missing) == len(numbers) - left - 1
        (arrived / name).unlink()  # as if the next call brought the next piece only
    assert state.waiting == () and state.missing == ()
    for name, source in sources:
        assert (target / name).read_bytes() == source.read_bytes()
    assert not list(target.rglob("*.part"))


def test_a_damaged_piece_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    sources = make(tmp_path / "sources", [100, 100])
    cut(sources, tmp_path / "cut", 64)
    good = (tmp_path / "cut" / piece_name(2)).read_bytes()
    (tmp_path / "cut" / piece_name(2)).write_bytes(b"x" + good[1:])
    with pytest.raises(PiecesError, match="send again: piece-002"):
        join(tmp_path / "cut", tmp_path / "target")
    (tmp_path / "cut" / piece_name(2)).write_bytes(good)
    for number in (0, 1, 3):
        (tmp_path / "cut" / piece_name(number)).unlink()
    assert join(tmp_path / "cut", tmp_path / "target").missing == ()


def test_a_list_that_leads_out_of_the_target_is_refused(tmp_path: Path) -> None:
    cut(make(tmp_path / "sources", [10]), tmp_path / "cut")
    listed = json.loads((tmp_path / "cut" / LIST).read_text())
    for path in ("../x", "/x", "a/../../x"):
        listed["files"][0]["path"] = path
        (tmp_path / "cut" / LIST).write_text(json.dumps(listed))
        with pytest.raises(PiecesError, match="does not lie where it should"):
            join(tmp_path / "cut", tmp_path / "target")


def test_a_folder_with_something_in_it_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(PiecesError, match="not empty"):
        cut([], make(tmp_path / "sources", [1])[0][1].parent)
