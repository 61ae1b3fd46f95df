#!/usr/bin/env bash
# Builds the wheels of mars-export-kernels and mars-export-cpp for manylinux_2_28 on x86_64 and aarch64, on Debian x86_64.
#   wheels.sh PYTHON FOLDER
# The compiler is zig, of the package ziglang: it compiles for a chosen glibc, so no container is needed. The C++ library is that of GCC's
# programs, which takes Debian's g++ for both processors (cmake/libstdcxx.py).
# `wheels.sh PYTHON FOLDER elsewhere` compiles the kernels for macOS instead. They have not run anywhere.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$2"
folder=$(cd "$2" && pwd)
work=$root/build/wheels

if [ ! -e "$work/bin/zig" ]; then
    "$1" -m venv "$work"
    "$work/bin/python" -m pip install --quiet --disable-pip-version-check ziglang auditwheel twine
    ln -sfn "$("$work/bin/python" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent)')/zig" "$work/bin/zig"
fi

# build SOURCE TARGET PLATFORM: one wheel, for zig's target and the wheel's platform.
build() {
    echo "$1 for $3"
    MARS_ZIG=$work/bin/zig MARS_TARGET=$2 "$work/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" \
        -C build-dir="$work/build/$1/$3" -C cmake.args="-DCMAKE_TOOLCHAIN_FILE=$root/runtime/cpp/cmake/zig.cmake" -C wheel.tags="py3-none-$3" "$root/$1"
}

if [ "${3:-}" = elsewhere ]; then
    build kernels aarch64-macos.11.0 macosx_11_0_arm64
    exit
fi

. "$root/runtime/cpp/apt.sh"
need_packages "the wheel of libmars" g++ g++-aarch64-linux-gnu nlohmann-json3-dev
# Not from /usr/include, where the headers of another glibc are.
mkdir -p "$work"/json/{include,share/cmake}
cp -r /usr/include/nlohmann "$work/json/include/"
cp -r /usr/share/cmake/nlohmann_json "$work/json/share/cmake/"
export nlohmann_json_ROOT=$work/json
for processor in x86_64 aarch64; do
    "$work/bin/python" "$root/runtime/cpp/cmake/libstdcxx.py" "$work/bin/zig" "$processor" "$work/gcc-$processor"
    for package in kernels runtime/cpp; do
        MARS_LIBSTDCXX=$work/gcc-$processor build "$package" "$processor-linux-gnu.2.28" "manylinux_2_28_$processor"
    done
done
"$work/bin/python" -m twine check --strict "$folder"/mars_export_{kernels,cpp}-*.whl
for wheel in "$folder"/mars_export_{kernels,cpp}-*manylinux*.whl; do
    oldest=$("$work/bin/python" -m auditwheel show "$wheel" | tr '\n' ' ' | grep -o 'following platform tag: "[^"]*' | cut -d'"' -f2)
    echo "$(basename "$wheel"): runs on $oldest"
    if [ "$(cut -d_ -f3 <<<"$oldest")" -gt 28 ]; then exit 1; fi
done
