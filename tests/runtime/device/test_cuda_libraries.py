"""CUDA's libraries in wheels of any environment are loaded before ONNX Runtime asks for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mars_export.runtime.device.ort.library import library_folders, load_libraries


def test_every_wheels_folder_is_offered_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cu13", "cudnn", "nothing"):
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    for name in ("cu13", "cudnn"):
        (tmp_path / "nvidia" / name / "lib").mkdir()
    folders = library_folders([str(tmp_path / "nvidia")])
    assert folders == [tmp_path / "nvidia" / "cu13" / "lib", tmp_path / "nvidia" / "cudnn" / "lib"]
    asked: list[str | None] = []

    def preload(directory: str | None) -> None:
        asked.append(directory)
        sys.stdout.write("Failed to load libcufft.so.12\n")
        if directory and directory.endswith("cudnn/lib"):
            raise RuntimeError("Invalid parameter")

    load_libraries(SimpleNamespace(preload_dlls=preload), folders)
    assert asked == [None, *map(str, folders)]
    assert capsys.readouterr() == ("", "")


def test_folders_of_this_environment_exist() -> None:
    assert all(folder.is_dir() for folder in library_folders())
