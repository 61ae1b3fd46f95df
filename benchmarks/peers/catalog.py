"""The systems to compare: what each installs, how its model is made from the merged weights, and what it is
asked to do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "transformers": (TORCH, "transformers>=5"),
    "genai": (TORCH, "onnxruntime-genai", "onnx-ir", "transformers"),
    "optimum": (TORCH, "optimum-onnx[onnxruntime]"),
    "openvino": (TORCH, "openvino-genai", "optimum-intel[openvino]"),
    "llama-cpp": ("llama-cpp-python[server]", "gguf", "safetensors"),
    "authors": (TORCH, "transformers==4.57.0"),
}
# Speculation from the text so far, with short drafts that suit short answers. llama-server is asked with its
# default (ngram-mod, drafts of 48 tokens and more), too.
NGRAM = {"ngram_size": 2, "max_draft_tokens": 4}
LOOKUP = {"num_assistant_tokens": 4, "max_ngram_size": 2}
SIMPLE = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4")
PRECISIONS = ("fp32", "int8", "w8a8", "int4")
BATCHES, CACHE_BLOCKS = (4, 8, 16), (8, 16, 32)
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
    make: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table: what `program` is asked with which settings.

    `kind` is ours, peer (one token a step) or authors.
    """

    label: str
    program: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1


def python_of(venvs: Path, environment: str | None) -> str:
    return sys.executable if environment is None else str(venvs / environment / "bin" / "python")


def setup_commands(venvs: Path, environment: str) -> list[list[str]]:
    """What creates an environment, in order."""
    python = python_of(venvs, environment)
    return [
        [sys.executable, "-m", "venv", str(venvs / environment)],
        [python, "-m", "pip", "install", *ENVIRONMENTS[environment]],
    ]


def programs(work: Path, venvs: Path, authors: Path | None, server: Path | None = None) -> list[Program]:
    """Everything that can take part, ours first. `server`: llama.cpp's llama-server."""
    merged = work / "merged"
    cli = (
        sys.executable,
        "-c",
        "from mars_export.cli import main; main()",
        "onnx",
        "-o",
        "{out}",
        "--block",
        str(BLOCK),
        "--allow-drift",
    )
    found = [
        Program(f"ours {p}", None, "ours", work / f"{p}.bundle", (*cli, "--precision", p)) for p in PRECISIONS
    ]
    builder = (
        python_of(venvs, "genai"),
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        str(merged),
        "-o",
        "{out}",
        "-e",
        "cpu",
    )
    cache = ("-c", str(work / "genai-cache"))
    found += [
        Program(f"genai {p}", "genai", "genai", work / f"genai-{p}", (*builder, *cache, "-p", p))
        for p in ("fp32", "int4")
    ]
    optimum = (
        str(venvs / "optimum" / "bin" / "optimum-cli"),
        "export",
        "onnx",
        "--model",
        str(merged),
        "--task",
        "text-generation-with-past",
    )
    found.append(
        Program(
            "optimum fp32",
            "optimum",
            "huggingface",
            work / "optimum",
            (*optimum, "{out}"),
            {"runtime": "onnx"},
        )
    )
    intel = (
        str(venvs / "openvino" / "bin" / "optimum-cli"),
        "export",
        "openvino",
        "--model",
        str(merged),
        "--task",
        "text-generation-with-past",
        "--weight-format",
    )
    openvino = {
        "int8": (*intel, "int8", "{out}"),
        "int4": (*intel, "int4", "--group-size", "64", "--ratio", "1.0", "{out}"),
    }
    llama = (python_of(venvs, "llama-cpp"), "-m", "peers.gguf_file", str(merged), "{out}")
    for kind in ("q4_0", "q8_0"):
        make = (*llama, "--kinds", kind)
        found.append(
            Program(
                f"llama.cpp {kind}",
                "llama-cpp",
                "llama",
                work / f"gguf-{kind}",
                make,
                {"file": f"{kind}.gguf", "context": CONTEXT},
            )
        )
    found += [
        Program(f"openvino {p}{word}", "openvino", "openvino", work / f"openvino-{p}", make, options)
        for p, make in openvino.items()
        for word, options in (("", {}), (" lookup", {"lookup": LOOKUP}))
    ]
    if server is not None:
        found += [
            Program(
                f"llama-server q4_0{word}",
                None,
                "llama_server",
                work / "gguf-served-q4_0",
                (*llama, "--kinds", "q4_0", "--vocabulary"),
                {"file": "q4_0.gguf", "context": CONTEXT, "server": str(server), "flags": flags},
            )
            for word, flags in (
                ("", ()),
                (" default speculation", ("--spec-default",)),
                (" ngram-simple", SIMPLE),
            )
        ]
    found.append(Program("transformers fp32", "transformers", "huggingface", merged, ()))
    if authors is not None:
        found.append(Program("authors fp32", "authors", "authors", merged, (), {"path": str(authors)}))
    return found


def served_gguf(work: Path, venvs: Path, kind: str) -> Program:
    """llama.cpp's model for its server: with vocabulary and chat template, since prompts are chats."""
    python = python_of(venvs, "llama-cpp")
    make = (python, "-m", "peers.gguf_file", str(work / "merged"), "{out}", "--kinds", kind, "--vocabulary")
    options = {"file": f"{kind}.gguf"}
    return Program(f"llama.cpp's server {kind}", "llama-cpp", "", work / f"gguf-served-{kind}", make, options)


def single_entries(names: Sequence[str]) -> list[Entry]:
    """What is measured with one row at a time, for the programs that are there."""
    found = []
    for name in names:
        if name.startswith("ours"):
            found += [Entry(f"{name} tau {tau:g}", name, "ours", {"tau": tau}) for tau in (1.0, 0.95)]
            found.append(Entry(f"{name} exact", name, "ours"))
        elif name.startswith("authors"):
            for sampler in ("MARSCachedSampler", "MARSBlockCachedSampler"):
                found.append(
                    Entry(
                        f"{sampler} tau 0.95",
                        name,
                        "authors",
                        {"tau": 0.95, "sampler": sampler, "block": BLOCK},
                    )
                )
        else:
            found.append(Entry(name, name, "peer"))
            if name.startswith("genai"):
                found.append(Entry(f"{name} n-gram", name, "peer", {"speculative": NGRAM}))
    return found


def batch_entries(names: Sequence[str]) -> list[Entry]:
    """Our two cache loops, one-token mode and exact mode, at each batch, for these bundles of ours."""
    found = []
    for name in names:
        for batch in BATCHES:
            found.append(Entry(f"{name} tau 1", name, "ours", {"tau": 1.0}, batch))
            found.append(Entry(f"{name} exact", name, "ours", batch=batch))
            found.append(Entry(f"{name} tau 0.95 cursor", name, "ours", {"tau": 0.95}, batch))
            found.append(
                Entry(
                    f"{name} tau 0.95 cursor, full window",
                    name,
                    "ours",
                    {"tau": 0.95, "window": BLOCK},
                    batch,
                )
            )
            for size in CACHE_BLOCKS:
                settings = {"tau": 0.95, "commit": "block", "cache_block": size}
                found.append(Entry(f"{name} tau 0.95 block {size}", name, "ours", settings, batch))
    return found
