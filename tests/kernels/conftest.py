"""mars-export-kernels with each instruction set of this processor. `make kernels` builds it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

import pytest
from support.missing import lacking
from support.paths import BUILT_KERNELS

from mars_export import SessionError
from mars_export.runtime.device.ort import kernels

X86 = ("amx_int8", "avx512_vnni", "avx_vnni", "avx2")
SETS = (*(("i8mm", "dotprod") if platform.machine() == "aarch64" else X86), "portable")


@pytest.fixture(params=SETS)
def instructions(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[kernels.Kernels]:
    """The package with an instruction set. Other tests do not find it."""
    monkeypatch.syspath_prepend(BUILT_KERNELS)
    monkeypatch.setenv(kernels.VARIABLE, request.param)
    try:
        try:
            package = kernels.installed()
        except SessionError as error:
            pytest.skip(str(error))  # this processor lacks it
        if package is None:
            lacking("make kernels has not been run")
        yield package
    finally:
        sys.modules.pop("mars_export_kernels", None)
