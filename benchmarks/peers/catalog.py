"""The systems to compare: what each installs, how its model is made from the merged weights, and what it is
asked to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "genai": (TORCH, "onnxruntime-genai", "onnx-ir", "transformers"),
    "openvino": (TORCH, "openvino-genai==2026.4.1.0", "openvino==2026.4.1", "nncf==3.4.0",
     "optimum-intel[openvino]==2.2.0", "transformers==5.5.4"),
    "llama-cpp": ("llama-cpp-python", "gguf", "safetensors"),
}  # fmt: skip
# optimum-intel requires torchvision but exports language models without it. A wheel of torchvision that was
# built for another torch, such as one with CUDA, breaks transformers' imports.
UNUSED: Mapping[str, tuple[str, ...]] = {"openvino": ("torchvision",)}
# Speculation from the text so far, with short drafts that suit short answers. llama-server is asked with its
# default (ngram-mod, drafts of 48 tokens and more), too.
NGRAM = {"ngram_size": 2, "max_draft_tokens": 4}
LOOKUP = {"num_assistant_tokens": 4, "max_ngram_size": 2}
SIMPLE = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4")
PRECISIONS = {"cpu": ("fp32", "int8", "w8a8", "w4a8", "int4"), "cuda": ("fp32", "fp16", "int4")}
AT_SIZE = ("w8a8", "w4a8")  # of ours, and these peers:
PEERS_AT_SIZE = ("genai int4", "openvino int8", "openvino int4")
UNUSED_TOKEN = 300  # of random checkpoints, whose answers shall not end
BLOCK = 8  # what the default checkpoint was trained with, and what its bundles are built for
CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Program:
    """An adapter process: module, environment (None: the driver's own), options, what makes its model.

    `{out}` in the command is where to write; the result is renamed to `model` when it is whole.
    """

    name: str
    environment: str | None
    module: str
    model: Path
    make: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table: what `program` is asked with which settings.

    `kind` is ours or peer (one token a step).
    """

    label: str
    program: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def python_of(venvs: Path, environment: str | None) -> str:
    return sys.executable if environment is None else str(venvs / environment / "bin" / "python")


def setup_commands(venvs: Path, environment: str) -> list[list[str]]:
    """What creates an environment, in order."""
    python = python_of(venvs, environment)
    commands = [
        [sys.executable, "-m", "venv", str(venvs / environment)],
        [python, "-m", "pip", "install", *ENVIRONMENTS[environment]],
    ]
    if unused := UNUSED.get(environment):
        commands.append([python, "-m", "pip", "uninstall", "--yes", *unused])
    return commands


def merged(work: Path) -> Program:
    """The default checkpoint with its adapter, of which all peers' models are made."""
    return Program("merged", None, "", work / "merged", (sys.executable, "-m", "peers.merged", "{out}"))


def programs(work: Path, venvs: Path, server: Path | None = None, device: str = "cpu") -> Iterator[Program]:
    """Everything that can take part, ours first; on a GPU what runs there, in the driver's own environment.
    `server`: llama.cpp's llama-server, with llama-quantize beside it.
    """
    weights, is_gpu = work / "merged", device != "cpu"
    cli = [sys.executable, "-c", "from mars_export.cli import main; main()", "onnx", "-o", "{out}"]
    cli += f"--block {BLOCK} --allow-drift --precision".split()
    for p in PRECISIONS[device]:
        yield Program(f"ours {p}", None, "ours", work / f"{p}.bundle", [*cli, p], {"device": device})

    environment = None if is_gpu else "genai"
    builder = [python_of(venvs, environment), "-m", "onnxruntime_genai.models.builder", "-i", str(weights)]
    builder += ["-o", "{out}", "-e", device, "-c", str(work / "genai-cache")]
    builder += ["--extra_options", "enable_cuda_graph=true"] if is_gpu else []
    for p in ("fp16" if is_gpu else "fp32", "int4"):
        yield Program(f"genai {p}", environment, "genai", work / f"genai-{p}", [*builder, "-p", p])

    if not is_gpu:
        for kind in ("q4_0", "q4_k_m", "q8_0"):
            yield gguf(work, venvs, kind)
        yield from openvino(work, venvs)

    if server is not None:
        ways = {"": (), " default speculation": ("--spec-default",), " ngram-simple": SIMPLE}
        for kind in ("f16", "q4_0") if is_gpu else ("q4_0",):
            model = gguf(work, venvs, kind, server if is_gpu else None)
            for word, flags in ways.items():
                more = {"server": str(server), "flags": (*flags, *(("-ngl", "99") if is_gpu else ()))}
                name = f"llama-server {kind}{word}"
                yield Program(name, None, "llama_server", model.model, model.make, {**model.options, **more})


def random(work: Path, shape: str) -> Program:
    """A checkpoint of random weights in place of the merged ones."""
    return Program(
        "random", None, "", work / "merged", (sys.executable, "-m", "random_checkpoint", shape, "{out}")
    )


def at_size(work: Path, venvs: Path) -> Iterator[Program]:
    """What is compared at real sizes: the bundles are of the random checkpoint, with rounded codes."""
    for program in programs(work, venvs):
        if program.name in PEERS_AT_SIZE:
            yield program
    yield gguf(work, venvs, "q4_k_m")
    cli = [sys.executable, "-c", "from mars_export.cli import main; main()", "onnx", str(work / "merged")]
    cli += f"-o {{out}} --block {BLOCK} --allow-drift --no-reference --quantizer round --precision".split()
    for p in AT_SIZE:
        yield Program(f"ours {p}", None, "ours", work / f"{p}.bundle", [*cli, p], {"device": "cpu"})


def openvino(work: Path, venvs: Path) -> Iterator[Program]:
    intel = [str(venvs / "openvino" / "bin" / "optimum-cli"), "export", "openvino"]
    intel += ["--model", str(work / "merged"), "--task", "text-generation-with-past", "--weight-format"]
    for p, more in (("int8", []), ("int4", ["--group-size", "64", "--ratio", "1.0"])):
        made, place = [*intel, p, *more, "{out}"], work / f"openvino-{p}"
        yield Program(f"openvino {p}", "openvino", "openvino", place, made)
        yield Program(f"openvino {p} lookup", "openvino", "openvino", place, made, {"lookup": LOOKUP})


def gguf(work: Path, venvs: Path, kind: str, server: Path | None = None) -> Program:
    """llama.cpp's model: with vocabulary and chat template, because its server takes chats. It is made by
    llama-cpp-python, or the llama-quantize beside `server`.
    """
    python = python_of(venvs, None if server else "llama-cpp")
    make = [python, "-m", "peers.gguf_file", str(work / "merged"), "{out}"]
    make += ["--quantizer", str(server.with_name("llama-quantize"))] if server else []
    options = {"file": f"{kind}.gguf", "context": CONTEXT}
    place = work / f"gguf-served-{kind}"
    return Program(f"llama.cpp {kind}", "llama-cpp", "llama", place, [*make, "--kinds", kind], options)


def entries(names: Sequence[str]) -> Iterator[Entry]:
    """What is measured, for the programs that are there."""
    for name in names:
        if name.startswith("ours"):
            for tau in (1.0, 0.95):
                yield Entry(f"{name} tau {tau:g}", name, "ours", {"tau": tau})
            yield Entry(f"{name} exact", name, "ours")
        else:
            yield Entry(name, name, "peer")
            if name.startswith("genai"):
                yield Entry(f"{name} n-gram", name, "peer", {"speculative": NGRAM})
