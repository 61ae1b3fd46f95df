"""mars-export-kernels as a session finds it: broken and damaged packages, and devices that do not use it. The
products of the real package: tests/kernels.
"""

from __future__ import annotations

import hashlib
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.manifests import GOOD

from mars_export import SessionError
from mars_export.runtime.cli import doctor
from mars_export.runtime.device.ort import kernels

CODE = """
from pathlib import Path

__version__, PORTABLE = "0.1.0", "portable"
LIBRARY = Path(__file__).with_name("lib.so")

def instructions():
    (Path(__file__).parent / "loaded").touch()
    return "avx2"
"""
LIBRARY = b"a library" * 100


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package that reports AVX2, as pip records it."""
    folder, info = tmp_path / "mars_export_kernels", tmp_path / "mars_export_kernels-0.1.0.dist-info"
    folder.mkdir()
    info.mkdir()
    (folder / "__init__.py").write_text(CODE)
    (folder / "lib.so").write_bytes(LIBRARY)
    digest = urlsafe_b64encode(hashlib.sha256(LIBRARY).digest()).rstrip(b"=").decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mars-export-kernels\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(f"mars_export_kernels/lib.so,sha256={digest},{len(LIBRARY)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    sys.modules.pop("mars_export_kernels", None)
    yield folder
    sys.modules.pop("mars_export_kernels", None)


def test_a_whole_package_is_used(package: Path) -> None:
    assert kernels.installed() == kernels.Kernels("0.1.0", "avx2", package / "lib.so")


@pytest.mark.parametrize(
    "why", ["turned off", "not installed", "built without a compiler", "without code for this"]
)
def test_why_the_package_is_not_used(package: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "turned off":
        monkeypatch.setenv(kernels.VARIABLE, kernels.OFF)
    elif why == "not installed":
        monkeypatch.setitem(sys.modules, "mars_export_kernels", None)
    elif why == "built without a compiler":
        (package / "lib.so").unlink()
    else:  # a Raspberry Pi 4
        (package / "__init__.py").write_text(CODE.replace('"avx2"', '"portable"'))
    assert kernels.installed() is None
    assert kernels.absence().startswith(why)
    found = doctor._kernels()
    assert (found.state, why in found.detail) == ("absent", True)


@pytest.mark.parametrize("data", [LIBRARY[:500], b"", LIBRARY.replace(b"a", b"b")])
def test_a_damaged_library_is_an_error_before_it_is_loaded(package: Path, data: bytes) -> None:
    (package / "lib.so").write_bytes(data)
    with pytest.raises(SessionError, match=rf"lib.so is damaged: {len(data)} of 900 bytes.*install it again"):
        kernels.installed()
    assert not (package / "loaded").exists()
    assert doctor._kernels().state == "bad"


@pytest.mark.parametrize(
    "code", ["raise ImportError('broken')", "import no_such_module", "1 / 0", "LIBRARY = 'nowhere'"]
)
def test_a_broken_package_is_an_error_where_it_is_used(
    package: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "__init__.py").write_text(code)
    with pytest.raises(SessionError, match=r"is installed, but does not load .*MARS_EXPORT_KERNELS=0"):
        kernels.used(replace(GOOD.variants[0], precision="w8a8"), Path("g"))
    assert kernels.used(GOOD.variants[0], Path("g")) is None
    monkeypatch.setenv(kernels.VARIABLE, kernels.OFF)
    assert kernels.installed() is None
