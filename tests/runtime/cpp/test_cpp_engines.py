"""mars-build-engine over a stub of TensorRT: it puts into a bundle what Python would have, whole or not
at all. No engine is built by NVIDIA's libraries here, and none runs.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.cabi import build
from support.fixtures import Named
from support.needed import needed
from support.paths import ROOT

from mars_export import GenerationConfig, Session
from mars_export.exporter.checkpoint.open import open_checkpoint
from mars_export.exporter.export_options import ExportOptions
from mars_export.exporter.tensorrt.engines import add_engine, export_engine
from mars_export.exporter.tensorrt.plan import EngineOptions
from mars_export.runtime.bundle.engine_info import this_platform
from mars_export.runtime.bundle.open import open_bundle, rewrite

ORIN = EngineOptions("jetson-orin", "6.2", batch=2, capacity=128, prefill=32)
THOR = replace(ORIN, target="jetson-thor", jetpack="7.2")
RTX = EngineOptions("rtx", batch=2, capacity=128, prefill=32, build=False)
ORIN_HERE = {"capability": 87, "version": [10, 3, 0, 30]}
THOR_HERE = {"capability": 110, "version": [10, 16, 2, 10]}
NO_GPU = {"num_devices": 0, "version": [1, 7, 1, 116]}
MACHINES = {
    "jetson-orin": (ORIN, "tensorrt", ORIN_HERE),
    "jetson-thor": (THOR, "tensorrt", THOR_HERE),
    "rtx": (RTX, "tensorrt_rtx", NO_GPU),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoints: Named) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("recipes")

    @cache
    def export(machine: str) -> Path:
        options = ExportOptions(block=6, precision="fp32", logits=False)
        done = export_engine(
            open_checkpoint(str(checkpoints("llama"))), root / machine, options, MACHINES[machine][0]
        )
        assert done.variant is None
        return root / machine

    return export


@pytest.fixture
def recipe(exported: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copied(machine: str) -> Path:
        return Path(shutil.copytree(exported(machine), tmp_path / f"{machine}.bundle"))

    return copied


def run(machine: str, *words: Any, **changes: Any) -> subprocess.CompletedProcess[str]:
    _, flavor, here = MACHINES[machine]
    program = build() / "tests" / f"mars-build-{flavor}"
    files = {path.name: graph_of(path) for word in words for path in Path(str(word)).glob("*.onnx")}
    environment = os.environ | {"MARS_STUB": json.dumps(here | changes | {"files": files})}
    return subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, env=environment, timeout=60, check=False
    )


@cache
def graph_of(path: Path) -> dict[str, Any]:
    """What the stub's parser is told of an ONNX file: inputs, and the operators that TensorRT may refuse."""
    graph = onnx.load(path, load_external_data=False).graph
    inputs = [
        {"name": value.name, "type": tensor.elem_type, "shape": [d.dim_value or -1 for d in tensor.shape.dim]}
        for value in graph.input
        for tensor in [value.type.tensor_type]
    ]
    nodes = [
        {"name": node.name, "operation": node.op_type, "inputs": list(node.input)}
        for node in graph.node
        if node.op_type in ("TensorScatter", "Attention")
    ]
    return {"inputs": inputs, "nodes": nodes}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_entry_is_the_one_that_python_writes(machine: str, recipe: Callable[[str], Path]) -> None:
    bundle = recipe(machine)
    before = open_bundle(bundle).manifest
    done = run(machine, bundle)
    assert done.returncode == 0, done.stderr
    after = open_bundle(bundle, full=True).manifest
    options, flavor, here = MACHINES[machine]
    name = "rtx" if machine == "rtx" else f"tensorrt-{machine}"
    graph, engine = after.variants
    assert (graph, engine.name, engine.backend) == (before.variants[0], name, flavor)
    assert replace(after, variants=before.variants, files=before.files) == before
    assert engine.engine is not None
    assert [r.name for r in engine.engine.ranges] == ["decode", "prefill"]
    assert engine.engine.version == ".".join(map(str, here["version"]))
    assert engine.engine.platform == this_platform()
    gpus = ("sm80", "sm86", "sm89", "sm120", "sm121") if machine == "rtx" else (f"sm{here['capability']}",)
    assert engine.engine.compute_capabilities == gpus
    assert engine.engine.graph_sha256 == next(f.sha256 for f in after.files if f.path == engine.engine.graph)
    assert (engine.capacity, engine.slots, engine.outputs) == (128, None, graph.outputs)
    assert (engine.drift, engine.kv_dtype, engine.weights) == (graph.drift, graph.kv_dtype, None)

    # What the stub was told to build: the manifest's ranges, one by one.
    built = json.loads((bundle / engine.file).read_text())
    for said, range_ in zip(built["ranges"], engine.engine.ranges, strict=True):
        for dimension in ("batch", "slots", "outputs"):
            extent = getattr(range_, dimension)
            assert said[dimension] == {"min": extent.min, "opt": extent.opt, "max": extent.max}
        assert said["capacity"] == dict.fromkeys(("min", "opt", "max"), 128)
    assert (built["tf32"], built["workspace"]) == (False, 0)
    assert built["in_place"] == (engine.kv_layout == "static") == (options is not ORIN)
    assert built["allocates"] == (machine != "rtx")  # RTX was told that no step may
    assert not [path for path in bundle.parent.iterdir() if path != bundle], "nothing is left beside it"

    # The rest of the project takes it for one of its own.
    answer = Session.open(bundle, threads=1).generate([1, 2, 3], GenerationConfig(max_new_tokens=4))
    assert answer.token_ids
    rewrite(bundle, lambda manifest: manifest)
    assert open_bundle(bundle).manifest == after


@pytest.mark.parametrize(
    ("machine", "changes", "words"),
    [
        ("jetson-orin", {"num_devices": 0}, "no NVIDIA GPU is visible"),
        (
            "jetson-orin",
            {"capability": 86},
            "builds on the GPU it is for (sm87); this machine has Stub GPU (sm86)",
        ),
        ("jetson-thor", {"version": [10, 13, 3, 9]}, "TensorScatter"),
        ("jetson-thor", {"loses_masks": True}, "attentions lost their mask"),
        ("rtx", {"version": [1, 4, 0, 1]}, "cannot build for sm121"),
    ],
)
def test_what_cannot_be_built_is_said_and_nothing_changes(
    machine: str, changes: dict[str, Any], words: str, recipe: Callable[[str], Path]
) -> None:
    bundle = recipe(machine)
    before = contents(bundle)
    done = run(machine, bundle, **changes)
    assert done.returncode == 1
    assert words in done.stderr
    assert contents(bundle) == before
    assert os.listdir(bundle.parent) == [bundle.name]


def test_there_are_a_dry_run_a_refusal_to_replace_and_help(recipe: Callable[[str], Path]) -> None:
    bundle = recipe("jetson-orin")
    before = contents(bundle)
    dry = run("jetson-orin", bundle, "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "dry run: nothing was built\n")
    assert "prefill: batch to 2, slots to 32" in dry.stderr
    assert contents(bundle) == before
    assert run("jetson-orin", bundle).returncode == 0
    again = run("jetson-orin", bundle)
    assert again.returncode == 1
    assert "give --force" in again.stderr
    inode = bundle.stat().st_ino
    assert run("jetson-orin", bundle, "--force").returncode == 0
    assert bundle.stat().st_ino != inode, "a new directory takes the old one's place"
    assert len(open_bundle(bundle, full=True).manifest.variants) == 2
    assert run("jetson-orin").returncode == 2
    assert run("jetson-orin", bundle, "--nonsense").returncode == 2
    assert "usage" in run("jetson-orin", "--help").stdout
    assert run("jetson-orin", "--version").stdout == "tensorrt 10.3.0.30\n"


def test_a_recipe_is_chosen_by_name_or_by_what_this_program_builds(recipe: Callable[[str], Path]) -> None:
    bundle = recipe("jetson-thor")
    add_engine(open_bundle(bundle), bundle, replace(RTX, target="sm86"))
    assert "no recipe `x`" in run("jetson-thor", bundle, "--recipe", "x").stderr
    assert "is for tensorrt_rtx" in run("jetson-thor", bundle, "--recipe", "rtx-sm86").stderr
    assert run("jetson-thor", bundle).returncode == 0
    assert run("rtx", bundle).returncode == 0
    names = [v.name for v in open_bundle(bundle, full=True).manifest.variants]
    assert names == ["model", "tensorrt-jetson-thor", "rtx-sm86"]
    add_engine(open_bundle(bundle), bundle, replace(RTX, target="sm89"))
    several = run("rtx", bundle)
    assert several.returncode == 1
    assert (
        "more than one recipe; give --recipe NAME (there: rtx-sm86, rtx-sm89, tensorrt-jetson-thor)"
        in several.stderr
    )


def test_a_recipe_that_was_tampered_with_is_refused(recipe: Callable[[str], Path]) -> None:
    """A bundle may be somebody else's: its hashes agree, its recipe asks for what a manifest may not say."""
    whole = recipe("jetson-orin")
    for field, value, words in (
        ("file", "../../outside.engine", "not a plain file name"),
        ("capacity", -1, "capacity"),
        ("graph", "build-on-device.sh", "is not the graph"),
    ):
        bundle = Path(shutil.copytree(whole, whole.with_name(field)))
        file = bundle / "tensorrt-jetson-orin.build.json"
        steps = json.loads(file.read_text())
        if field == "graph":
            steps["variant"]["engine"]["graph"] = value
        else:
            steps["variant"][field] = value
        file.write_text(json.dumps(steps))
        _describe_again(bundle, file)
        done = run("jetson-orin", bundle)
        if field == "file":  # the name is the program's own
            assert done.returncode == 0
            assert not (whole.parent.parent / "outside.engine").exists()
            assert open_bundle(bundle, full=True).manifest.variants[1].file == "tensorrt-jetson-orin.engine"
        else:
            assert done.returncode == 1
            assert words in done.stderr


def _describe_again(bundle: Path, file: Path) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    for entry in manifest["files"]:
        if entry["path"] == file.name:
            data = file.read_bytes()
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (bundle / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_is_no_tf32_unless_the_recipe_says_so(tf32: bool, recipe: Callable[[str], Path]) -> None:
    bundle = recipe("jetson-orin")
    (path,) = bundle.glob("*.build.json")
    said = json.loads(path.read_text())
    said["variant"]["engine"]["tf32"] = tf32
    path.write_text(json.dumps(said))
    _describe_again(bundle, path)
    done = run("jetson-orin", bundle, "--workspace", 512)
    assert done.returncode == 0, done.stderr
    entry = json.loads((bundle / "manifest.json").read_text())["variants"][-1]
    built = json.loads((bundle / entry["file"]).read_text())
    assert (entry["engine"]["tf32"], built["tf32"], built["workspace"]) == (tf32, tf32, 512 << 20)
    assert "a whole number of MiB" in run("jetson-orin", bundle, "--workspace", "much").stderr


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


def test_engines_run_by_a_library_that_is_opened_when_it_is_needed(recipe: Callable[[str], Path]) -> None:
    plugins, tensorrt = build() / "tests/plugins", build() / "tests/stub"
    for machine, here in (("jetson-orin", ORIN_HERE), ("jetson-thor", THOR_HERE)):
        bundle = recipe(machine)
        assert run(machine, bundle).returncode == 0
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
    mark = b" with headers "
    content = stale.read_bytes()
    at = content.index(mark) + len(mark)
    stale.write_bytes(content[:at] + bytes(reversed(content[at : at + 16])) + content[at + 16 :])
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


def test_the_service_says_that_its_gpu_has_failed_for_good(recipe: Callable[[str], Path]) -> None:
    bundle = recipe("jetson-thor")
    assert run("jetson-thor", bundle).returncode == 0
    with service(bundle, THOR_HERE | {"breaks_after": 40}) as (process, port):
        assert port is not None, words_of(process)

        def call(path: str, body: str | None = None) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET" if body is None else "POST", path, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        request = json.dumps({"prompt": "abc", "tau": 1.0, "max_tokens": 4})
        assert call("/health")[0] == 200
        answers = [call("/v1/completions", request) for _ in range(40)]
        assert (answers[0][0], answers[-1][0]) == (200, 500)
        assert "start it again" in answers[-1][1]
        status, text = call("/health")
        assert (status, json.loads(text)["status"]) == (503, "failed")
        assert call("/v1/completions", request)[0] == 500
        process.terminate()
        assert process.wait(20) == 0
        said = words_of(process)
    assert said.count("nothing computes on the GPU in this process any more: start it again") == 1


@pytest.mark.parametrize(("words", "batched"), [((), 2), (("--rows", "1"), 1), (("--rows", "8"), None)])
def test_the_service_takes_as_many_rows_as_its_engine_was_built_for(
    words: tuple[str, ...], batched: int | None, recipe: Callable[[str], Path]
) -> None:
    """The engine has 2 rows; who says another number is taken at his word."""
    bundle = recipe("jetson-thor")
    assert run("jetson-thor", bundle).returncode == 0
    with service(bundle, THOR_HERE, *words) as (process, port):
        if port is None:
            assert process.wait(20) == 1
            assert batched is None
            assert "8 rows, but this engine was built for at most 2" in words_of(process)
            return
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        request = {"prompt": "abc", "tau": 1.0, "max_tokens": 4}
        connection.request("POST", "/v1/completions", json.dumps(request))
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 4)
        process.terminate()
        assert process.wait(20) == 0
    assert batched is not None
