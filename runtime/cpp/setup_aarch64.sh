#!/usr/bin/env bash
# Prepares the cross build for 64-bit Arm on Debian, after setup.sh: compiler and qemu-user from apt, ONNX Runtime's library for Arm from
# its wheel into build/ort-aarch64.
#   setup_aarch64.sh PYTHON    PYTHON has the onnxruntime wheel whose version is taken
# What programs see as their root is build/qemu-aarch64: Arm's C library, and a processor in /proc/cpuinfo, which qemu-user passes through
# from the host and ONNX Runtime reads when it is loaded.
# Exit code 3: something is missing.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$1
ort=$root/build/ort-aarch64

. "$root/runtime/cpp/apt.sh"
need_packages "the cross build" g++-aarch64-linux-gnu qemu-user-static

if [ ! -e "$ort/lib/libonnxruntime.so" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    version=$("$python" -c 'import onnxruntime; print(onnxruntime.__version__)')
    platforms=()
    for glibc in 17 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: "${platforms[@]}" -d "$scratch" "onnxruntime==$version"
    mkdir -p "$ort/lib"
    "$python" -m zipfile -e "$scratch"/onnxruntime-*.whl "$scratch/wheel"
    cp "$scratch"/wheel/onnxruntime/capi/libonnxruntime.so.1.* "$ort/lib/libonnxruntime.so.1"
    ln -sfn libonnxruntime.so.1 "$ort/lib/libonnxruntime.so"
fi

emulated=$root/build/qemu-aarch64
mkdir -p "$emulated/proc"
ln -sfn /usr/aarch64-linux-gnu/lib "$emulated/lib"
for core in 0 1; do
    printf '%s\t: %s\n' processor "$core" Features 'fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid' 'CPU implementer' 0x41 \
        'CPU architecture' 8 'CPU variant' 0x0 'CPU part' 0xd08 'CPU revision' 3
    echo
done >"$emulated/proc/cpuinfo"
