"""CUDA's libraries in wheels of any environment are loaded before ONNX Runtime asks for them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from mars_export.runtime.device.ort.library import library_folders, load_libraries


def shout() -> None:
    print("another thread")  # noqa: T201


def test_every_wheels_folder_is_offered_and_only_other_threads_print(
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
        print("Failed to load libcufft.so.12")  # noqa: T201
        if directory is None:
            other = threading.Thread(target=shout)
            other.start()
            other.join()
        if directory and directory.endswith("cudnn/lib"):
            raise RuntimeError("Invalid parameter")

    load_libraries(SimpleNamespace(preload_dlls=preload), folders)
    assert asked == [None, *map(str, folders)]
    assert capsys.readouterr() == ("another thread\n", "")


def test_folders_of_this_environment_exist() -> None:
    assert all(folder.is_dir() for folder in library_folders())
