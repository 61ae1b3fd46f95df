"""Lets zig compile with GCC's C++ library, for the C++ interface of libmars's wheel.

    libstdcxx.py ZIG ARCHITECTURE FOLDER    needs Debian's g++ for the architecture (x86_64, aarch64)

manylinux_2_28 has the libstdc++ of GCC 8. FOLDER gets stubs of the libraries with the symbols of that version
only, and libnewer.a with the newer functions, which are linked statically. Red Hat's newer compilers for the
same system do it in this way, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TARGET = "{}-linux-gnu.2.28"
NEWEST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# Of libstdc++.a: std::filesystem, and what it and new templates call.
NEWER = (
    "cow-stdexcept.o", "eh_ptr.o", "fs_dir.o", "fs_ops.o", "fs_path.o", "functexcept.o", "snprintf_lite.o",
    "sso_string.o", "sstream-inst.o",
)  # fmt: skip
# Functions of newer versions of glibc, which Debian's libstdc++ was configured with.
CONFIG = """#include_next <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK
"""
# Whether the process has one thread, which saves atomic operations; here always false.
SINGLE_THREADED = '__attribute__((visibility("hidden"))) char __libc_single_threaded;\n'
# `__cxxabiv1::__terminate`, which libstdc++ does not export.
TERMINATE = """#include <stdlib.h>
__attribute__((visibility("hidden"))) void _ZN10__cxxabiv111__terminateEPFvvE(void (*handler)(void)) {
    handler();
    abort();
}
"""
SYMBOL = re.compile(
    r"(?P<size>\d+) (?P<kind>FUNC|OBJECT|TLS) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+"
    r" (?P<name>\S+?)@@?(?P<family>GLIBCXX|CXXABI|GCC)_(?P<number>[\d.]+)$"
)
SECTIONS = {"FUNC": ".text", "OBJECT": ".data", "TLS": '.section .tdata,"awT",%progbits'}
MARKS = {"FUNC": "function", "OBJECT": "object", "TLS": "tls_object"}


def run(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def write_stub(library: Path, source: Path) -> None:
    """Assembler code, and a version script beside it, for a library with the older symbols of `library`."""
    newest: dict[str, tuple[tuple[int, ...], re.Match[str]]] = {}
    for line in run("readelf", "--dyn-syms", "--wide", library).splitlines():
        if found := SYMBOL.search(line):
            version = tuple(map(int, found["number"].split(".")))
            if newest.get(found["name"], ((), found))[0] < version <= NEWEST[found["family"]]:
                newest[found["name"]] = version, found
    code: list[str] = []
    versions: dict[str, list[str]] = {}
    for name, (_, found) in newest.items():
        kind, size = found["kind"], found["size"]
        versions.setdefault(f"{found['family']}_{found['number']}", []).append(name)
        code += [SECTIONS[kind], f".globl {name}", f".type {name}, %{MARKS[kind]}", f".size {name}, {size}"]
        code += [f"{name}: .zero {max(1, int(size))}"]
    source.write_text("\n".join(code) + "\n")
    nodes = [f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items()]
    source.with_suffix(".map").write_text("".join(nodes))


def main(zig: str, architecture: str, folder: Path) -> None:
    gxx, target = f"{architecture}-linux-gnu-g++", TARGET.format(architecture)
    (folder / "bits").mkdir(parents=True, exist_ok=True)
    (folder / "sys").mkdir(exist_ok=True)
    (folder / "bits/c++config.h").write_text(CONFIG)
    (folder / "sys/single_threaded.h").write_text(f'extern "C" {SINGLE_THREADED}')
    for name in ("libstdc++.so.6", "libgcc_s.so.1"):
        source = folder / f"{name.partition('.')[0]}.s"
        write_stub(Path(run(gxx, f"-print-file-name={name}").strip()), source)
        run(zig, "cc", "-target", target, "-shared", "-nostdlib", f"-Wl,-soname,{name}",
            f"-Wl,--version-script={source.with_suffix('.map')}", source, "-o", folder / name)  # fmt: skip
    (folder / "own.c").write_text(TERMINATE + SINGLE_THREADED)
    run(zig, "cc", "-target", target, "-O2", "-fPIC", "-c", folder / "own.c", "-o", folder / "own.o")
    archive = Path(run(gxx, "-print-file-name=libstdc++.a").strip())
    for name in NEWER:
        (folder / name).write_bytes(
            subprocess.run(["ar", "p", archive, name], capture_output=True, check=True).stdout
        )
    members = [folder / name for name in (*NEWER, "own.o")]
    (folder / "libnewer.a").unlink(missing_ok=True)
    run(zig, "ar", "rcs", folder / "libnewer.a", *members)
    searched = subprocess.run(
        [gxx, "-E", "-v", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True
    )
    places = [
        line.strip() for line in searched.stderr.splitlines() if line.startswith(" /") and "c++" in line
    ]
    (folder / "include.txt").write_text(" ".join(f"-I{place}" for place in [folder, *places]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve())
