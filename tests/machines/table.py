"""Runs check.py and mars-run on other processors or other releases of ONNX Runtime: a table of what held.

    table.py FOLDER NAME="COMMAND"... [--precisions fp32 w8a8] [--mars-run NAME="COMMAND"...]

COMMAND runs Python, such as "qemu-x86_64 -cpu Nehalem .venv/bin/python". FOLDER is that of bundles.py.
Exits with 1 where fp32 does not give the sampler's text, or where exact text of REPRODUCIBLE is not the
one-token text, or their bits depend on saved prefixes or on the width of a step (of two slots or more).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECK = Path(__file__).with_name("check.py")
REPRODUCIBLE = ("fp32", "w8a8", "w4a8", "auto")
HEAD = (
    "| where | ONNX Runtime | precision | one token = sampler | exact = one token | with saved prefixes"
    " | same bits in pieces of | same text as here | mars-run |\n|" + "---|" * 9
)


def run(command: str, *arguments: str) -> Any:
    words = [*shlex.split(command), *arguments]
    # A kernel that somebody chose for this machine may not run on an emulated one.
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def equal(texts: list[Any], others: list[Any]) -> str:
    return f"{sum(a == b for a, b in zip(texts, others, strict=True))}/{len(others)}"


def said_by_cpp(command: str, bundle: Path, questions: dict[str, Any]) -> list[list[int]]:
    settings = ("--threads", "1", "--masks", "full", "--json", "--token-ids", "-n", str(questions["new"]))
    prompts = [" ".join(map(str, prompt)) for prompt in questions["prompts"]]
    return [run(command, str(bundle), *settings, "--prompt", prompt)["token_ids"] for prompt in prompts]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("machines", nargs="*")
    parser.add_argument("--precisions", nargs="+", default=[*REPRODUCIBLE, "int8", "int4", "fp16"])
    parser.add_argument("--mars-run", nargs="*", default=[])
    options = parser.parse_args()
    folder, precisions = options.folder, options.precisions
    questions = json.loads((folder / "questions.json").read_text())
    cpp = dict(item.split("=", 1) for item in options.mars_run)
    here, failures = None, []
    print(HEAD)
    for item in [f"here={sys.executable}", *options.machines]:
        name, command = item.split("=", 1)
        report = run(command, str(CHECK), str(folder), *precisions)
        here = here or report["forms"]
        for precision, form in report["forms"].items():
            count = len(questions["prompts"])
            cells = {
                "sampler": equal(form["one"], questions["texts"]),
                "exact": equal(form["exact"], form["one"]),
                "stored": f"{form['stored']}/{count}",
                "pieces": ", ".join(map(str, form["pieces"])),
                "here": equal(form["exact"], here[precision]["exact"]),
                "mars-run": "-",
            }
            if name in cpp:
                cells["mars-run"] = equal(
                    said_by_cpp(cpp[name], folder / precision, questions), form["exact"]
                )
            print(
                f"| {name} | {report['versions']['onnxruntime']} | {precision} | "
                + " | ".join(cells.values())
                + " |",
                flush=True,
            )
            must = (
                ["exact", "stored", *(["sampler"] if precision == "fp32" else [])]
                if precision in REPRODUCIBLE
                else []
            )
            failures += [
                f"{name}, {precision}: {cell} {cells[cell]}"
                for cell in must
                if cells[cell] != f"{count}/{count}"
            ]
            if precision in REPRODUCIBLE and not {2, 7, 128} <= {*form["pieces"]}:
                failures.append(f"{name}, {precision}: bits depend on the width of a step")
    print("\n".join(["", *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
