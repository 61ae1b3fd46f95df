"""The driver's side of the line protocol: a peer as a child process that computes only during a request."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from peers.protocol import Reply, Request

ROOT = Path(__file__).resolve().parent.parent  # benchmarks/, where `python -m peers.NAME` finds the adapters
LOAD_SECONDS, ANSWER_SECONDS = 300.0, 300.0


class PeerError(Exception):
    """A peer that cannot go on, and why."""


class Process:
    """One adapter. Its stderr goes to `log`.

    Raises PeerError when it does not start, fails, or does not answer in time.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: Mapping[str, Any],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})}
        self._stderr = log.open("w", encoding="utf-8")
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                env=environment,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(f"{command[0]} does not start: {error}") from error
        self._lines: Queue[str | None] = Queue()
        Thread(target=self._read, daemon=True).start()
        try:
            loaded = self._ask(dict(options), LOAD_SECONDS)
            self.versions, self.load_seconds = str(loaded.get("versions", "")), loaded.get("seconds", 0.0)
        except PeerError:
            self.close()
            raise

    def answer(self, request: Request, timeout: float = ANSWER_SECONDS) -> Reply:
        try:
            return Reply(**self._ask(vars(request), timeout))
        except TypeError as error:
            raise PeerError(f"a reply without the fields of a reply ({error})") from error

    def memory(self) -> tuple[float, float]:
        """GB in memory, and how much of it is anonymous (no mapped file). Linux only."""
        lines = Path(f"/proc/{self._child.pid}/smaps_rollup").read_text("ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024e-9 for line in lines[1:]}
        return sizes["Rss"], sizes["Anonymous"]

    def close(self) -> None:
        """End the child: asked politely, then not."""
        if self._child.stdin is not None and not self._child.stdin.closed:
            with suppress(OSError):
                self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._stderr.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except (BrokenPipeError, ValueError):
            line = None
        except Empty:
            raise PeerError(f"no answer within {timeout:g} s; see {self.log}") from None
        if line is None:
            code = self._child.wait()
            raise PeerError(f"ended with exit code {code}; see {self.log}")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise PeerError(f"sent a line that is no JSON object: {line[:80]!r}")
        if "error" in reply:
            raise PeerError(f"{reply['error']}; see {self.log}")
        return reply
