"""What the tests of libmars share: the library, built once, a session of it, its text layer, the example of a
service, and bundles: of a test's own to change, of every output, with answers that never end.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.agreement import MAIN
from support.cabi import Library, build
from support.cabi_session import CSession
from support.cpp_service import start
from support.fixtures import Exported, Named
from support.text_driver import Driver, tokenizer_of

from mars_export.runtime.bundle.open import open_bundle, write_manifest


@pytest.fixture(scope="session")
def library() -> Library:
    return Library(build() / "libmars.so")


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "mars.bundle")


@pytest.fixture(scope="session")
def graphs(exported: Exported) -> Callable[[str], Path]:
    """A bundle of every output, by its precision."""
    return lambda precision: exported(MAIN, precision=precision, metrics=True, logits=True, top_k=4)


@pytest.fixture(scope="module")
def twin(library: Library, bundles: Named) -> Iterator[CSession]:
    """The session beside Python's `sessions("llama")`."""
    with CSession(library, bundles("llama"), threads=1) as session:
        yield session


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driver]]:
    """A running text_driver, by the kind of its tokenizer."""
    started: list[Driver] = []

    @cache
    def start(kind: str) -> Driver:
        path = tmp_path_factory.mktemp(kind) / "tokenizer.json"
        tokenizer_of(kind).save(str(path))
        started.append(Driver(path))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.fixture(scope="module")
def service(bundles: Named) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The running C++ example of a service, and its port."""
    process, number = start(bundles("llama"))
    yield process, number
    process.terminate()
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def port(service: tuple[subprocess.Popen[str], int]) -> int:
    return service[1]


@pytest.fixture(scope="module")
def endless(bundles: Named, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a long context, whose answers never end by themselves."""
    directory = tmp_path_factory.mktemp("endless") / "bundle"
    shutil.copytree(bundles("llama"), directory, ignore=shutil.ignore_patterns(".*"))
    manifest = open_bundle(directory).manifest
    write_manifest(
        directory,
        replace(
            manifest,
            model=replace(manifest.model, context_length=8192),
            tokens=replace(manifest.tokens, eos=()),
        ),
    )
    return directory
