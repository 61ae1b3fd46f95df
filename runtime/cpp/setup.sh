#!/usr/bin/env bash
# Prepares what the C++ runtime is built from, on Debian 12 or 13 or Ubuntu 22.04 or 24.04: compilers and headers from apt, ONNX Runtime
# into build/ort.
#   setup.sh PYTHON    PYTHON has the onnxruntime wheel whose library is used
# Where apt has no ONNX Runtime, its headers come on Debian 12 from Debian 13's package, and elsewhere from the release archive of the
# wheel's version; either is unpacked here and not installed.
# Where ONNXRuntime_ROOT names another directory, that one is left to its owner. Without root it installs nothing and says what is
# missing. Exit code 3: something is missing.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$1
ort=$root/build/ort
releases=${ONNXRUNTIME_RELEASES:-https://github.com/microsoft/onnxruntime/releases/download}
. "$root/runtime/cpp/apt.sh"

need_packages "the C++ runtime" cmake ninja-build g++ pkg-config nlohmann-json3-dev doctest-dev

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
        by_apt=yes
        if apt-cache show libonnxruntime-dev >/dev/null 2>&1; then
            : # this system's own
        elif [ "$(. /etc/os-release && echo "$ID")" != debian ]; then
            by_apt=
            version=$("$python" -c 'import onnxruntime; print(onnxruntime.__version__)')
            archive=onnxruntime-linux-$(uname -m | sed 's/x86_64/x64/')-$version
            need_packages "the C++ runtime" curl ca-certificates
            if ! curl -fsSL "$releases/v$version/$archive.tgz" | tar -xz -C "$scratch" "$archive/include"; then
                echo "cannot read $releases/v$version/$archive.tgz; unpack an ONNX Runtime release and set ONNXRuntime_ROOT (docs/cpp.md)" >&2
                exit 3
            fi
            cp -r "$scratch/$archive/include" "$ort/include/onnxruntime"
        else
            trixie_sources >"$scratch/parts/trixie.list"
            trixie_stanzas >"$scratch/parts/trixie.sources"
            options=(-o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$scratch/parts" -o "Dir::State::Lists=$scratch/lists"
                -o "Dir::Cache=$scratch/cache" -o APT::Sandbox::User=root)
            if ! apt-get "${options[@]}" update --quiet=2; then
                echo "cannot read Debian trixie's package list for ONNX Runtime's headers; install them and set ONNXRuntime_ROOT (docs/cpp.md)" >&2
                exit 3
            fi
        fi
        if [ -n "$by_apt" ]; then
            (cd "$scratch" && apt-get "${options[@]}" download --quiet=2 libonnxruntime-dev && dpkg-deb -x libonnxruntime-dev_*.deb unpacked)
            cp -r "$scratch/unpacked/usr/include/onnxruntime" "$ort/include/"
        fi
    fi
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
