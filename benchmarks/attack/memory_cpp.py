"""mars-run under limits of memory that stand before it starts, from where it starts at all to where it needs
no more: every run gives the right answer or an error of ours.
"""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

KINDS = {"address space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}
LENGTH, TOKENS = 450, 24  # of the prompt and of the answer
LONGEST = 300.0  # seconds of a run
MARGIN = 1.1  # times a limit under which it answers: the last
SAYS = re.compile(r"^error: .*not enough memory", re.MULTILINE)
MB, MOST = 1 << 20, 1 << 40


class Program:
    """libmars's program and a bundle, and what it answers without a limit."""

    def __init__(self, program: Path, bundle: Path) -> None:
        model = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["model"]
        draw = random.Random(0)
        ids = [draw.randrange(model["vocab_size"]) for _ in range(LENGTH)]
        settings = ("--threads", "1", "--cache-bytes", "0", "--window", "full", "--json")
        asked = ("--token-ids", "--prompt", " ".join(map(str, ids)), "--max-new-tokens", str(TOKENS))
        self._program, self._asked = str(program), (str(bundle), *asked, *settings)
        self._wanted = json.loads(self._run(*self._asked).stdout)["token_ids"]
        self._first = {kind: self._least(kind) for kind in KINDS}
        self._last = {kind: self._first[kind] + int(MARGIN * self._takes(kind)) for kind in KINDS}

    def run(self, seed: int, runs: int) -> dict[str, Any]:
        """A run: of each kind of limit the same number, evenly from the first to the last."""
        kind = list(KINDS)[seed % 2]
        first, last = self._first[kind], self._last[kind]
        most = first + (last - first) * (seed // 2) // max(1, (runs + 1) // 2 - 1)
        line: dict[str, Any] = {"seed": seed, "limit": kind, "opened before": False, "bytes": most}
        try:
            done = self._run(*self._asked, kind=kind, most=most)
        except subprocess.TimeoutExpired:
            return line | {"counts": {}, "wrong": ["hang"]}
        if self._is_right(done):
            return line | {"counts": {"right": 1}, "wrong": []}
        if done.returncode == 1 and SAYS.search(done.stderr):
            return line | {"counts": {"errors": 1}, "wrong": []}
        return line | {"counts": {}, "wrong": [f"ended with {done.returncode}: {done.stderr[:300]}"]}

    def _run(self, *arguments: str, kind: str = "", most: int = 0) -> subprocess.CompletedProcess[str]:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if kind:
                resource.setrlimit(KINDS[kind], (most, most))

        return subprocess.run(
            [self._program, *arguments],
            preexec_fn=limit,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST,
            check=False,
        )

    def _is_right(self, done: subprocess.CompletedProcess[str]) -> bool:
        return done.returncode == 0 and json.loads(done.stdout)["token_ids"] == self._wanted

    def _least(self, kind: str) -> int:
        """The limit under which the program says its version, and one megabyte: below, the system's loader
        speaks.
        """
        sizes = (n * MB for n in range(1, 1024))
        least = next(size for size in sizes if self._run("--version", kind=kind, most=size).returncode == 0)
        return least + MB

    def _takes(self, kind: str) -> int:
        """The least limit under which it answers, of those that double."""
        size = 8 * MB
        while not self._is_right(self._run(*self._asked, kind=kind, most=self._first[kind] + size)):
            size *= 2
            if size > MOST:
                raise SystemExit(f"{self._program} does not answer under any limit of {kind}")
        return size
