"""Who may import whom, read from the source itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

FILES = [
    path for part in ("exporter", "runtime", "calibration") for path in sorted((ROOT / part).glob("*.py"))
] + [ROOT / "cli.py"]
OURS = "mars_export"
COMMAND_LINE = {
    "cli",
    "runtime.console",
    "runtime.commands",
    "runtime.bundle_commands",
    "exporter.commands",
    "calibration.commands",
}
TORCH = {"torch", "transformers", "onnx", "safetensors", "peft", "gguf", "ml_dtypes"}


def name_of(path: Path) -> str:
    """`runtime/accept.py` -> `runtime.accept`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module; `from a import b` gives both `a` and `a.b`, for b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_module_level(tree: ast.Module) -> ast.Module:
    """The tree without function bodies and without `if TYPE_CHECKING`."""

    class Outer(ast.NodeTransformer):
        def visit_FunctionDef(self, _: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return Outer().visit(tree)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def ours(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, as `runtime.accept`."""
    known = {name_of(p) for p in FILES}
    return {name.removeprefix(f"{OURS}.") for name in imports(tree_of(path))} & known


def foreign(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(tree_of(path))} - {OURS}


def test_there_is_something_to_look_at() -> None:
    assert {"runtime.accept", "exporter.graph", "cli"} <= {name_of(p) for p in FILES}
    assert ours(ROOT / "runtime" / "session.py") >= {
        "runtime.decode",
        "runtime.text",
        "runtime.ort",
        "runtime.trt",
    }
    assert "onnxruntime" in foreign(ROOT / "runtime" / "ort.py")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_part_imports_what_it_may(path: Path) -> None:
    part = name_of(path).split(".")[0]
    allowed = {
        "runtime": {"runtime"},
        "exporter": {"exporter", "runtime"},
        "calibration": {"calibration", "runtime"},
    }
    if part in allowed:
        assert {name.split(".")[0] for name in ours(path)} <= allowed[part]
    if part in ("runtime", "calibration", "cli"):
        assert not foreign(path) & TORCH


def test_the_rule_and_the_format_stand_alone() -> None:
    alone = {
        f"runtime.{name}" for name in ("accept", "bundle", "chat", "engine_info", "errors", "fields", "files")
    }
    for name in sorted(alone):
        path = ROOT / f"{name.replace('.', '/')}.py"
        assert ours(path) <= alone
        assert foreign(path) <= set(sys.stdlib_module_names), (
            "a runtime in any language needs no more than this"
        )


@pytest.mark.parametrize(
    ("module", "home"),
    [
        ("onnxruntime", {"runtime.ort"}),
        ("tensorrt", {"runtime.trt_engine", "exporter.tensorrt"}),
        ("tensorrt_rtx", {"runtime.trt_engine", "exporter.tensorrt"}),
        ("cuda", {"runtime.cuda"}),
        ("jinja2", {"runtime.text"}),
        ("peft", set()),
        ("typer", COMMAND_LINE),
        ("rich", COMMAND_LINE),
        (
            "matplotlib",
            {"calibration.figure", "calibration.report"},
        ),  # the report only asks whether it is there
        ("lm_eval", {"calibration.lm_eval_model"}),
    ],
)
def test_a_library_has_one_home(module: str, home: set[str]) -> None:
    assert {name_of(path) for path in FILES if module in foreign(path)} <= home


def test_only_text_knows_tokenizers_in_the_runtime() -> None:
    assert {
        name_of(path)
        for path in FILES
        if "tokenizers" in foreign(path) and name_of(path).startswith("runtime")
    } == {"runtime.text"}


def test_the_decoding_core_knows_no_text_and_no_device() -> None:
    for name in ("accept", "backend", "block_commit", "config", "decode", "row", "sample", "stats"):
        assert not ours(ROOT / "runtime" / f"{name}.py") & {
            "runtime.text",
            "runtime.ort",
            "runtime.session",
            "runtime.bundle",
        }, name


def test_the_command_line_imports_inside_its_commands() -> None:
    light = {*COMMAND_LINE, "runtime", "exporter", "calibration", "runtime.errors"}
    for path in FILES:
        if name_of(path) in COMMAND_LINE:
            tree = at_module_level(tree_of(path))
            assert {name.removeprefix(f"{OURS}.") for name in imports(tree)} & {
                name_of(p) for p in FILES
            } <= light, path
            assert {name.split(".")[0] for name in imports(tree)} <= {
                *sys.stdlib_module_names,
                "typer",
                "rich",
                OURS,
            }, path


def test_nothing_prints_but_the_command_line() -> None:
    for path in FILES:
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        printed = [
            call
            for call in calls
            if isinstance(call.func, ast.Name) and call.func.id in ("print", "input", "exit", "quit")
        ]
        assert name_of(path) in COMMAND_LINE or not printed, path


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("mars_export.runtime", {*TORCH, "onnxruntime", "typer", "rich"}),
        ("mars_export.runtime.bundle.manifest", {*TORCH, "onnxruntime", "numpy", "tokenizers", "jinja2"}),
        (
            "mars_export.exporter.tensorrt.engines",
            {
                "torch",
                "transformers",
                "safetensors",
                "gguf",
                "peft",
                "onnxruntime",
                "tensorrt",
                "tensorrt_rtx",
            },
        ),
        ("mars_export.runtime.device.trt", {*TORCH, "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"}),
        ("mars_export.cli", {*TORCH, "onnxruntime", "numpy", "tokenizers", "jinja2"}),
    ],
)
def test_importing_stays_light(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*(name for name in {sorted(absent)!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
