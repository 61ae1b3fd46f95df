"""Who may import whom: arrows drawn from relative imports by path alone, held against one table of
packages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from support.imports import Arrows, arrows, at_module_level, circle, foreign, modules
from support.paths import ROOT
from support.shell import call

# Package -> the packages it may import, and those that they may. A package is a folder with all below it, or
# a file that stands alone; the longest name that fits is a file's package. Picture: docs/architecture.md.
PACKAGES: dict[str, tuple[str, ...]] = {
    "runtime/__init__": (),
    "runtime/errors": (),
    "runtime/accept": (),
    "runtime/rules": (),
    "runtime/answer_format": ("runtime/rules",),
    "runtime/machine": ("runtime/errors",),
    "runtime/bundle": ("runtime/errors", "runtime/accept", "runtime/machine", "runtime/rules"),
    "runtime/decode": (  # token ids only
        "runtime/errors",
        "runtime/accept",
        "runtime/rules",
        "runtime/answer_format",
    ),
    "runtime/device": ("runtime/bundle", "runtime/decode"),
    "runtime/text": ("runtime/bundle",),
    "runtime/structured": ("runtime/decode", "runtime/text"),
    "runtime/session": ("runtime/structured", "runtime/device"),
    "runtime/batcher": ("runtime/session",),
    "runtime/serve": ("runtime/batcher",),
    "runtime/terminal": ("runtime/errors", "runtime/machine", "runtime/rules"),
    "runtime/cli": ("runtime/serve", "runtime/terminal"),
    "exporter/__init__": (),
    "exporter/codes": (),
    "exporter/checkpoint": ("exporter/codes", "runtime/bundle"),
    "exporter/export_options": ("exporter/codes", "runtime/rules"),
    "exporter/graph": ("exporter/checkpoint", "exporter/export_options"),
    "exporter/turns": ("exporter/checkpoint", "runtime/text"),
    "exporter/check": ("exporter/graph", "runtime/device"),
    "exporter/quantize": ("exporter/check", "runtime/text"),
    "exporter/option_rules": ("exporter/quantize",),
    "exporter/export": ("exporter/option_rules", "exporter/turns"),
    "exporter/tensorrt": ("exporter/export",),
    "exporter/commands": ("exporter/tensorrt", "runtime/terminal"),
    "calibration/__init__": (),
    "calibration/tasks": ("runtime/decode", "runtime/machine"),
    "calibration/journal": ("runtime/bundle",),
    "calibration/options": ("runtime/decode", "runtime/terminal"),
    "calibration/rows": (
        "calibration/tasks",
        "calibration/journal",
        "calibration/options",
        "runtime/batcher",
    ),
    "calibration/rounds": ("calibration/rows",),
    "calibration/tau": ("calibration/rounds",),
    "calibration/laps": ("calibration/rounds",),
    "calibration/bench": ("calibration/laps",),
    "calibration/commands": ("calibration/tau", "calibration/bench", "runtime/terminal"),
    "cli": ("runtime/cli", "exporter/commands", "calibration/commands", "__init__"),
    "__init__": ("runtime/batcher",),
}
COMMAND_LINE = {"cli"} | {
    "runtime/terminal/console",
    "runtime/terminal/options",
    "runtime/cli/options",
    "runtime/cli/generate",
    "runtime/cli/chat",
    "runtime/cli/bundles",
    "runtime/cli/serve",
    "runtime/cli/serve_options",
    "runtime/cli/grammars",
    "exporter/export_options",
    "exporter/commands",
    "calibration/commands",
    "calibration/options",
    "calibration/tau/options",
}
SHOWN = {"runtime/decode/config", "runtime/decode/limits", "runtime/serve/options"}  # as options of commands
TORCH = {"torch", "transformers", "onnx", "safetensors", "peft", "gguf", "ml_dtypes"}
# Libraries, and the only modules or packages that name them.
HOMES: dict[str, set[str]] = {
    "onnxruntime": {"runtime/device/ort"},
    "tensorrt": {"runtime/device/trt/engine", "exporter/tensorrt"},
    "tensorrt_rtx": {"runtime/device/trt/engine", "exporter/tensorrt"},
    "cuda": {"runtime/device/cuda"},
    "huggingface_hub": {"runtime/cli/pull", "exporter/checkpoint"},
    "llguidance": {"runtime/structured"},
    "jinja2": {"runtime/text", "calibration"},
    "tokenizers": {"runtime/text", "runtime/structured", "exporter"},
    "starlette": {"runtime/serve"},
    "uvicorn": {"runtime/serve/server"},
    "h11": {"runtime/serve/server"},
    "prometheus_client": {"runtime/serve/metrics"},
    "ray": {"runtime/serve/ray"},
    "typer": COMMAND_LINE,
    "rich": COMMAND_LINE,
    **{library: {"exporter"} for library in TORCH},
}


@cache
def source() -> dict[str, ast.Module]:
    return modules(ROOT)


def lies_in(name: str, packages: Iterable[str]) -> str | None:
    """The package of a module: the longest name that fits."""
    return max(
        (package for package in packages if name == package or name.startswith(f"{package}/")),
        key=len,
        default=None,
    )


def complaints(drawn: Arrows, table: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What is wrong with the arrows of a package: modules without a package, strange arrows, circles."""

    def reach(package: str) -> set[str]:
        return {package}.union(*(reach(below) for below in table[package]))

    if ring := circle(table):
        return [f"the table has a circle: {' -> '.join(ring)}"]
    found = []
    for module, aims in drawn.items():
        package = lies_in(module, table)
        if package is None:
            found.append(f"{module}.py lies in no package of the table")
            continue
        for aim in sorted(aims):
            if lies_in(aim, table) not in {None, *reach(package)}:
                found.append(f"{module} imports {aim}: not a package below {package}")
    if ring := circle(drawn):
        found.append(f"a circle: {' -> '.join(ring)}")
    return found


@pytest.mark.parametrize("part", ["runtime", "exporter", "calibration", ""])
def test_every_arrow_runs_downward(part: str) -> None:
    drawn = {name: aims for name, aims in arrows(source()).items() if name.startswith(part)}
    assert sum(map(len, drawn.values())) > 30, "hardly anything was drawn"
    assert complaints(drawn, PACKAGES) == []


def test_tests_import_helpers_from_support_only() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "support"]
    assert len(tests) > 40
    beside = {path.stem for path in tests}
    borrowed = {path.name: foreign(ast.parse(path.read_text(encoding="utf-8"))) & beside for path in tests}
    assert {name: names for name, names in borrowed.items() if names} == {}


def test_the_page_shows_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = text.split("```")[1].split()
    for package in PACKAGES:
        top, _, name = package.rpartition("/")
        shown = f"{name}/" if (ROOT / package).is_dir() else name if top else f"{name}.py"
        assert shown in picture or name == "__init__", package
    text += (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:runtime|exporter|calibration|tests|docs|benchmarks)/[\w./]*)`", text)
    assert len(paths) > 8
    paths += [
        f"runtime/{p}"
        for p in re.findall(r"`((?:serve|batcher|session|text|structured|decode)/[\w./]*)`", text)
    ]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_page_names_what_there_is() -> None:
    """Each `Class.method` is one of the runtime."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([A-Z]\w+)\.(\w+)[`(]", text)
    classes: dict[str, set[str]] = defaultdict(set)
    for module, tree in source().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and module.startswith("runtime/"):
                classes[node.name] |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    assert len(named) > 15
    assert [f"{name}.{method}" for name, method in named if method not in classes[name]] == []


WRONG = {
    "": {},
    "low/rule imports high/loop: not a package below low": {"low/rule.py": "from ..high.loop import run"},
    "a circle: low/other -> low/rule -> low/other": {"low/rule.py": "from . import other"},
    "attic/box.py lies in no package of the table": {"attic/__init__.py": "", "attic/box.py": ""},
}


@pytest.mark.parametrize(("complaint", "changes"), WRONG.items())
def test_a_wrong_arrow_is_found(tmp_path: Path, complaint: str, changes: Mapping[str, str]) -> None:
    right = {
        "__init__.py": "from .high.loop import run", "low/__init__.py": "", "low/rule.py": "import json",
        "low/other.py": "from .rule import a", "high/__init__.py": "",
        "high/loop.py": "from ..low import rule\nfrom ..low.other import b",
    }  # fmt: skip
    for name, text in {**right, **changes}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = complaints(arrows(modules(tmp_path)), {"low": (), "high": ("low",), "__init__": ("high",)})
    assert (complaint in found) if complaint else (found == [])


def test_a_library_has_one_home() -> None:
    named = defaultdict(set)
    for module, tree in source().items():
        for library in foreign(tree):
            named[library].add(module)
    strays = {
        library: sorted(module for module in named[library] if lies_in(module, homes) is None)
        for library, homes in HOMES.items()
    }
    assert {library: names for library, names in strays.items() if names} == {}
    assert named["onnxruntime"] == {"runtime/device/ort/library"}
    assert "mars_export" not in named, "imports inside the package are relative"
    # A runtime in any language needs no more than this to read what lies on disk and to accept a token.
    alone = {"runtime/errors", "runtime/accept", "runtime/rules", "runtime/bundle"}
    needed = {library for library, names in named.items() if any(lies_in(name, alone) for name in names)}
    assert needed <= set(sys.stdlib_module_names)


def test_the_command_line_imports_inside_its_commands_and_alone_prints() -> None:
    at_once = {module: at_module_level(tree) for module, tree in source().items()}
    drawn = arrows(at_once)
    for module, tree in source().items():
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if module not in COMMAND_LINE:
            assert not called & {"print", "input", "exit", "quit"}, module
            continue
        assert foreign(at_once[module]) <= {*sys.stdlib_module_names, "typer", "rich"}, module
        assert drawn[module] <= COMMAND_LINE | SHOWN | {
            "__init__", "runtime/accept", "runtime/errors", "runtime/rules", "runtime/text/toolcalls",
        }, module  # fmt: skip


HEAVY = {*TORCH, "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda", "numpy", "tokenizers", "jinja2"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("mars_export", HEAVY | {"typer", "rich"}),
        ("mars_export.runtime", HEAVY | {"typer", "rich"}),
        ("mars_export.runtime.bundle.open", HEAVY),
        ("mars_export.runtime.device.trt.backend", HEAVY - {"numpy"}),
        (
            "mars_export.exporter.tensorrt.engines",
            HEAVY - {"numpy", "onnx", "ml_dtypes", "tokenizers", "jinja2"},
        ),
        ("mars_export.cli", HEAVY),
    ],
)
def test_importing_stays_light(module: str, absent: set[str]) -> None:
    # cuda-bindings 12 imports `cuda` when Python starts.
    program = (
        f"import sys; before = set(sys.modules); import {module};"
        f" print(*(name for name in {sorted(absent)!r} if name in sys.modules.keys() - before))"
    )
    done = call(sys.executable, "-c", program, check=True)
    assert done.stdout.split() == []
