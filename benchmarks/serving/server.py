"""A server in a separate process: starts it, waits for it, watches its memory, and ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

from serving import wire

READY = 300.0  # seconds to load and to warm up


def family(pid: int) -> Iterator[int]:
    """The process and all its descendants. Linux only."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text(encoding="ascii").split()
        except OSError:  # ended meanwhile
            continue
        for child in children:
            yield from family(int(child))


class Server:
    """`with Server(command, log) as server`; `{port}` in the command is the port it gets."""

    def __init__(self, command: Sequence[str], log: Path, probe: str = "/health") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [part.replace("{port}", str(self.port)) for part in command]
        self.log, self._probe = log, probe

    def __enter__(self) -> Server:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w", encoding="utf-8") as out:
            # Its own session: Ctrl-C is for the clients, which end the server when they have ended.
            self._process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _wait(self) -> None:
        until = monotonic() + READY
        while monotonic() < until:
            if (code := self._process.poll()) is not None:
                raise SystemExit(f"error: the server ended with code {code}; see {self.log}:\n{self._tail()}")
            try:
                if asyncio.run(wire.get(self.port, self._probe))[0] == 200:
                    return
            except (OSError, wire.Broken):
                pass
            sleep(0.2)
        raise SystemExit(f"error: the server was not ready after {READY:g} s; see {self.log}")

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(45)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


def ours(bundle: Path, threads: int, max_rows: int, max_waiting: int) -> list[str]:
    """The command of a server of ours."""
    words = [sys.executable, "-m", "mars_export.cli", "serve", str(bundle), "--port", "{port}"]
    words += ["--threads", str(threads), "--max-rows", str(max_rows), "--max-waiting", str(max_waiting)]
    return words


def llama_server(program: Path, gguf: Path, threads: int, context: int, slots: int) -> list[str]:
    """llama.cpp's own, with a slot of `context` tokens for each client."""
    words = [str(program), "--model", str(gguf), "--port", "{port}", "--host", "127.0.0.1", "--no-webui"]
    words += ["--threads", str(threads), "--threads-batch", str(threads)]
    return [*words, "--parallel", str(slots), "--ctx-size", str(context * slots)]
