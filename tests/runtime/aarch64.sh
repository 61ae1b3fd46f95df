#!/usr/bin/env bash
# The Python package on 64-bit Arm, under qemu-user: the wheel and what it needs for aarch64 are installed, and the
# answer to a request is compared with this machine's.
#   aarch64.sh PYTHON BUNDLE    PYTHON has mars-export installed; BUNDLE is one that runs on the CPU
# Needs root, apt (debootstrap, qemu-user-static) and a Python package index. build/arm64 is Debian's Python for Arm,
# unpacked; what programs see as /proc/cpuinfo is a Cortex-A72, since qemu-user would pass the host's through.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") bundle=$(realpath "$2")
arm=$root/build/arm64
request=(generate "$bundle" --threads 1 --window full --json -n 16 --prompt "turn on the kitchen light")

command -v debootstrap >/dev/null && command -v qemu-aarch64-static >/dev/null || {
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends debootstrap qemu-user-static >/dev/null
}
if [ ! -x "$arm/usr/bin/python3.11" ]; then
    rm -rf "$arm"
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libstdc++6,libgomp1 bookworm "$arm" >/dev/null
    for package in "$arm"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$arm"; done
fi
mkdir -p "$arm/proc"
for core in 0 1; do
    printf '%s\t: %s\n' processor "$core" Features 'fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid' 'CPU implementer' 0x41 \
        'CPU architecture' 8 'CPU variant' 0x0 'CPU part' 0xd08 'CPU revision' 3
    echo
done >"$arm/proc/cpuinfo"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps "$root" -w "$scratch"
platforms=(--platform manylinux2014_aarch64)
for glibc in 17 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
rm -rf "$arm/opt/mars"
"$python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts "${platforms[@]}" --python-version 3.11 --only-binary=:all: \
    --target "$arm/opt/mars" "$(ls "$scratch"/mars_export-*.whl)[cpu,serve,grammar]"

emulated() {
    qemu-aarch64-static -cpu cortex-a72 -L "$arm" -E "PYTHONPATH=$arm/opt/mars" -E "PYTHONHOME=$arm/usr" \
        -E "MARS_EXPORT_CACHE=$scratch" "$arm/usr/bin/python3.11" "$@"
}
cd "$scratch"
emulated -c 'import platform, sys; print("Python", sys.version.split()[0], "on", platform.machine())'
emulated -c 'import llguidance, starlette, uvicorn, mars_export.runtime.serve'
emulated -m mars_export doctor "$bundle" | grep -v "not installed"
there=$(emulated -m mars_export "${request[@]}")
here=$("$python" -m mars_export "${request[@]}")
"$python" - "$here" "$there" <<'CHECK'
import json, sys
here, there = (json.loads(text) for text in sys.argv[1:])
assert here["token_ids"] == there["token_ids"], (here["text"], there["text"])
print(f"the same {len(here['token_ids'])} tokens: {here['text']}")
CHECK
