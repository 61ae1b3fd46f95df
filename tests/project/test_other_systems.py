"""Nothing that only Linux has keeps the runtime from being imported, or its commands from working.

A process here without it stands for Windows, where the modules and names of `ABSENT` do not exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from shutil import make_archive

from support.missing import need
from support.tiny import Named

ABSENT = """
import asyncio, ctypes, os, signal, sys

for name in ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for module, names in (
    (os, "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK fork geteuid getloadavg getuid mkfifo register_at_fork"
     " sched_getaffinity"),
    (signal, "SIGALRM SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 pthread_sigmask"),
):
    for name in names.split():
        delattr(module, name)

def without_directories(path, *arguments, opened=os.open, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return opened(path, *arguments, **named)

def without_default(name, *arguments, opened=ctypes.CDLL, **named):
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return opened(name, *arguments, **named)

def without_handlers(*_):
    raise NotImplementedError

os.open, ctypes.CDLL = without_directories, without_default
asyncio.SelectorEventLoop.add_signal_handler = without_handlers
"""
IMPORTS = """
import importlib, pkgutil
import mars_export.calibration, mars_export.cli, mars_export.runtime

for package in (mars_export.calibration, mars_export.runtime):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(".ray.application"):  # needs its library
            importlib.import_module(module.name)
            print(module.name)
"""
MACHINE = """
from mars_export.runtime import machine
machine.trim()
print(machine.cores(), machine.load())
"""
INTERRUPTED = """
from mars_export.runtime.serve import server

async def interrupt(models, running, watch=server._watch):
    await watch(models, running)
    signal.raise_signal(signal.SIGINT)

server._watch = interrupt
"""
COMMAND = "from mars_export import cli\ncli.main()"


def elsewhere(code: str, *arguments: object) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", ABSENT + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done.stdout


def test_all_modules_are_imported() -> None:
    names = elsewhere(IMPORTS).split()
    assert {"mars_export.runtime.bundle.files", "mars_export.runtime.serve.server"} < set(names)


def test_the_machine_is_asked_no_more_than_it_says() -> None:
    count, load = elsewhere(MACHINE).split()
    assert int(count) >= 1 and load == "None"


def test_bundles_are_written_read_and_run(bundles: Named, tmp_path: Path) -> None:
    path = bundles("qwen2")
    archive = Path(make_archive(str(tmp_path / path.name), "tar", path.parent, path.name))
    digest = sha256(archive.read_bytes()).hexdigest()
    pulled = tmp_path / "pulled.bundle"
    assert "Usage" in elsewhere(COMMAND, "--help")
    elsewhere(COMMAND, "pull", archive, "-o", pulled, "--sha256", digest)
    elsewhere(COMMAND, "grammar", pulled, "--regex", "a+", "--name", "a")  # replaces the bundle
    elsewhere(COMMAND, "verify", pulled)
    asked = ("generate", pulled, "-p", "hi there", "-n", "8", "--json", "--prefix-dir", tmp_path / "cache")
    first, second = (json.loads(elsewhere(COMMAND, *asked)) for _ in range(2))
    assert first["token_ids"] and first["token_ids"] == second["token_ids"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["cache", archive.name, pulled.name])


def test_a_server_ends_with_an_interrupt(bundles: Named, tmp_path: Path) -> None:
    need("uvicorn", "serve")
    keys = tmp_path / "keys"
    keys.write_text("alpha")
    elsewhere(INTERRUPTED + COMMAND, "serve", bundles("qwen2"), "--port", 0, "--api-key-file", keys)
