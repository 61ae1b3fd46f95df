#!/usr/bin/env bash
# Prepares what the C++ runtime is built from, on Debian 12 or 13 or Ubuntu 22.04 or 24.04: compilers and headers from apt, a link to ONNX
# Runtime's library in build/ort. Its headers are in kernels/onnxruntime.
#   setup.sh PYTHON    PYTHON has the onnxruntime wheel whose library is used
# Where ONNXRuntime_ROOT names another directory, that one is left to its owner. Without root it installs nothing and says what is
# missing. Exit code 3: something is missing.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$1
ort=$root/build/ort
. "$root/runtime/cpp/apt.sh"

need_packages "the C++ runtime" cmake ninja-build g++ pkg-config nlohmann-json3-dev doctest-dev

if [ "${ONNXRuntime_ROOT:-$ort}" != "$ort" ]; then
    exit 0 # the caller's own
fi

# libmars loads this library at run time by the name that it calls itself; a wheel's has a versioned name only. ONNX Runtime looks for its
# providers beside that name.
library=$("$python" -c 'import pathlib, onnxruntime; print(*pathlib.Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.1.*"))')
if [ ! -e "$library" ]; then
    echo "no ONNX Runtime library in the onnxruntime wheel of $python; set ONNXRuntime_ROOT (docs/cpp.md)" >&2
    exit 3
fi
mkdir -p "$ort/lib"
ln -sfn "$library" "$ort/lib/libonnxruntime.so.1"
ln -sfn libonnxruntime.so.1 "$ort/lib/libonnxruntime.so"
for provider in "$(dirname "$library")"/libonnxruntime_providers_*.so; do
    if [ -e "$provider" ]; then ln -sfn "$provider" "$ort/lib/"; fi
done
