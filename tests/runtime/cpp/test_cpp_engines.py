"""libmars runs TensorRT engines by a library that it opens, over a stub of TensorRT: no engine of NVIDIA's
runs here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.cabi import build
from support.cpp_service import call, post
from support.fake_engine import engine_info, engine_variant
from support.fixtures import Named
from support.needed import needed
from support.paths import ROOT

from mars_export import Session
from mars_export.runtime.bundle.files import describe
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from mars_export.runtime.bundle.variant_info import this_platform

ORIN = {"capability": 87, "version": [10, 3, 0, 30]}
THOR = {"capability": 110, "version": [10, 16, 2, 10]}
REQUEST = {"prompt": "abc", "tau": 1.0, "max_tokens": 4}


@pytest.fixture
def engine_bundle(bundles: Named, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """A bundle with an engine of 2 rows for a machine of the stub. The engine's file is JSON."""

    def made(machine: dict[str, Any]) -> Path:
        bundle = Path(shutil.copytree(bundles("llama"), tmp_path / f"sm{machine['capability']}.bundle"))
        manifest = open_bundle(bundle).manifest
        model, graph = manifest.model, manifest.variants[0]
        info = replace(
            engine_info(2, manifest.block, 32),
            version=".".join(map(str, machine["version"])),
            platform=this_platform(),
            compute_capabilities=(f"sm{machine['capability']}",),
            graph=graph.file,
        )
        engine = replace(
            engine_variant(info, 128, "appended" if machine is ORIN else "in-place"),
            backend="tensorrt",
            file="stub.engine",
        )
        stub = {
            "layers": model.num_layers,
            "kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "in_place": engine.kv_layout == "in-place",
            "top_k": 0,
            "ranges": [asdict(each) for each in info.ranges],
        }
        file = bundle / engine.file
        file.write_text(json.dumps(stub))
        files = (*manifest.files, describe(file))
        write_manifest(bundle, replace(manifest, variants=(graph, engine), files=files))
        return bundle

    return made


def test_libmars_needs_neither_tensorrt_nor_cuda_its_plugin_does() -> None:
    held = needed(build() / "libmars.so")
    assert not [name for name in held if re.match("libnvinfer|libtensorrt|libcud", name)]
    assert "libnvinfer.so" in needed(build() / "tests/plugins/libmars_tensorrt.so")


ANSWER = """
import sys
from support.cabi import Library
from support.cabi_session import CSession
with CSession(Library(sys.argv[1]), sys.argv[2], threads=1, device=sys.argv[3]) as session:
    print(session.info.device.decode(), file=sys.stderr)
    for _ in range(3):
        print(list(session.generate([1, 2, 3], tau=1.0, max_new_tokens=8, eos_ids=()).token_ids))
"""


def answer(
    bundle: Path, folders: list[Path], here: dict[str, Any], device: str = "cuda"
) -> subprocess.CompletedProcess[str]:
    """What libmars answers on `device` where the loader looks into `folders`."""
    environment = os.environ | {
        "MARS_STUB": json.dumps(here),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders)),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    words = [sys.executable, "-c", ANSWER, build() / "libmars.so", bundle, device]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_engines_run_by_a_library_that_is_opened_when_it_is_needed(
    engine_bundle: Callable[[dict[str, Any]], Path],
) -> None:
    plugins, tensorrt = build() / "tests/plugins", build() / "tests/stub"
    for here in (ORIN, THOR):
        bundle = engine_bundle(here)
        done = answer(bundle, [plugins, tensorrt], here)
        assert done.returncode == 0, done.stderr
        first, *others = done.stdout.splitlines()
        assert len(json.loads(first)) == 8
        assert others == [first, first]
        second = here | {"num_devices": 2, "gpu": 1}  # what is done on the first GPU fails
        done = answer(bundle, [plugins, tensorrt], second, "cuda:1")
        assert (done.returncode, done.stdout.splitlines()) == (0, [first] * 3), done.stderr
        assert done.stderr.strip() == "cuda:1"
        for device, words in (
            ("cuda", "cudaErrorInvalidResourceHandle"),
            ("cuda:2", "no GPU 2 is visible: the last of 2 is 1"),
            ("cuda:x", "the part after the colon must be a GPU number"),
        ):
            done = answer(bundle, [plugins, tensorrt], second, device)
            assert done.returncode != 0 and words in done.stderr, (device, done.stderr)

    other = answer(bundle, [plugins, tensorrt], here | {"capability": 87})
    assert "built for sm110, this GPU is a Stub GPU (sm87)" in other.stderr
    none = answer(bundle, [tensorrt], here)
    assert "libmars_tensorrt.so is not here (libmars_tensorrt.so: cannot open shared object" in none.stderr
    stale = Path(shutil.copytree(plugins, bundle.parent / "stale")) / "libmars_tensorrt.so"
    stale.write_bytes(stale.read_bytes().replace(b", compiled by ", b", compiled at "))
    assert "install both from the same build" in answer(bundle, [stale.parent, tensorrt], here).stderr
    broken = answer(bundle, [plugins], here)
    assert "libmars_tensorrt.so is not here (libnvinfer.so: cannot open shared object file" in broken.stderr
    Session.open(bundle, threads=1)  # the CPU needs none of it


@contextmanager
def service(
    bundle: Path, stub: dict[str, Any], *words: str
) -> Iterator[tuple[subprocess.Popen[str], int | None]]:
    """The service on the stub, and its port; nothing where it did not come up."""
    environment = os.environ | {
        "MARS_STUB": json.dumps(stub),
        "LD_LIBRARY_PATH": os.pathsep.join(str(build() / "tests" / name) for name in ("plugins", "stub")),
    }
    program = [build() / "examples/cpp_service/service", bundle, "0", "1", "--device", "cuda", *words]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)", process.stdout.readline())
        try:
            yield process, int(found[1]) if found else None
        finally:
            process.terminate()


def words_of(process: subprocess.Popen[str]) -> str:
    """What it said on stderr, read to the end."""
    assert process.stderr is not None
    return process.stderr.read()


def test_the_service_says_that_its_gpu_has_failed_for_good(
    engine_bundle: Callable[[dict[str, Any]], Path],
) -> None:
    bundle = engine_bundle(THOR)
    with service(bundle, THOR | {"breaks_after": 40}) as (process, port):
        assert port is not None, words_of(process)

        assert call(port, "/health")[0] == 200
        answers = [post(port, REQUEST) for _ in range(40)]
        assert (answers[0][0], answers[-1][0]) == (200, 503)
        assert "restart it" in answers[-1][1]
        status, text = call(port, "/health")
        assert (status, json.loads(text)["status"]) == (503, "failed")
        assert post(port, REQUEST)[0] == 503
        process.terminate()
        assert process.wait(20) == 0
        said = words_of(process)
    assert said.count("this process cannot use the GPU any more: restart it") == 1


@pytest.mark.parametrize(("words", "batched"), [((), 2), (("--rows", "1"), 1), (("--rows", "8"), None)])
def test_the_service_takes_as_many_rows_as_its_engine_was_built_for(
    words: tuple[str, ...], batched: int | None, engine_bundle: Callable[[dict[str, Any]], Path]
) -> None:
    """The engine has 2 rows; who says another number is taken at his word."""
    bundle = engine_bundle(THOR)
    with service(bundle, THOR, *words) as (process, port):
        if port is None:
            assert process.wait(20) == 1
            assert batched is None
            assert "8 rows, but this engine was built for at most 2" in words_of(process)
            return
        status, text = post(port, REQUEST)
        assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 4)
        process.terminate()
        assert process.wait(20) == 0
    assert batched is not None
