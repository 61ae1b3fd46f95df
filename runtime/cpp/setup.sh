#!/usr/bin/env bash
# Prepares what the C++ runtime is built from, on Debian 12 or 13: compilers and headers from apt, ONNX Runtime into build/ort.
#   setup.sh PYTHON    PYTHON has the onnxruntime wheel whose library is used
# Debian 12 has no ONNX Runtime; its headers then come from Debian 13's package, unpacked here and not installed.
# Where ONNXRuntime_ROOT names another directory, that one is left to its owner. Without root it installs nothing and says what is
# missing. Exit code 3: something is missing.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$1
packages=(cmake ninja-build g++ pkg-config nlohmann-json3-dev doctest-dev)
ort=$root/build/ort

if ! command -v dpkg-query >/dev/null; then
    echo "the C++ runtime needs (names of Debian): ${packages[*]}, and ONNX Runtime in ONNXRuntime_ROOT; this script only knows apt" >&2
    exit 3
fi
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    if [ "$(id -u)" != 0 ]; then
        echo "the C++ runtime needs: sudo apt-get install ${missing[*]}" >&2
        exit 3
    fi
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ "${ONNXRuntime_ROOT:-$ort}" != "$ort" ]; then
    exit 0 # the caller's own
fi

# The machine's own Debian sources with the suite replaced, so that its mirror and its keys are used.
trixie_sources() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | grep -E '^deb .*/debian/? bookworm ' | sed 's/ bookworm / trixie /' || true
}
trixie_stanzas() {
    awk 'BEGIN { RS = ""; ORS = "\n\n" } /\nSuites: bookworm( |\n)/' /etc/apt/sources.list.d/*.sources 2>/dev/null | sed 's/^Suites: .*/Suites: trixie/' || true
}

if [ ! -e "$ort/include/onnxruntime/onnxruntime_cxx_api.h" ]; then
    mkdir -p "$ort/include"
    if [ -e /usr/include/onnxruntime/onnxruntime_cxx_api.h ]; then
        ln -sfn /usr/include/onnxruntime "$ort/include/onnxruntime"
    else
        scratch=$(mktemp -d)
        trap 'rm -rf "$scratch"' EXIT
        mkdir -p "$scratch"/{lists/partial,cache/archives/partial,parts}
        options=()
        if ! apt-cache show libonnxruntime-dev >/dev/null 2>&1; then
            trixie_sources >"$scratch/parts/trixie.list"
            trixie_stanzas >"$scratch/parts/trixie.sources"
            options=(-o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$scratch/parts" -o "Dir::State::Lists=$scratch/lists"
                -o "Dir::Cache=$scratch/cache" -o APT::Sandbox::User=root)
            if ! apt-get "${options[@]}" update --quiet=2; then
                echo "cannot read Debian trixie's package list for ONNX Runtime's headers; install them and set ONNXRuntime_ROOT (docs/cpp.md)" >&2
                exit 3
            fi
        fi
        (cd "$scratch" && apt-get "${options[@]}" download --quiet=2 libonnxruntime-dev && dpkg-deb -x libonnxruntime-dev_*.deb unpacked)
        cp -r "$scratch/unpacked/usr/include/onnxruntime" "$ort/include/"
    fi
fi

# The wheel's library has a versioned name only; programs look for the name it calls itself.
library=$("$python" -c 'import pathlib, onnxruntime; print(*pathlib.Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.1.*"))')
if [ ! -e "$library" ]; then
    echo "no ONNX Runtime library in the onnxruntime wheel of $python; set ONNXRuntime_ROOT (docs/cpp.md)" >&2
    exit 3
fi
mkdir -p "$ort/lib"
ln -sfn "$library" "$ort/lib/libonnxruntime.so.1"
ln -sfn libonnxruntime.so.1 "$ort/lib/libonnxruntime.so"
