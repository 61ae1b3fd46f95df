#!/usr/bin/env bash
# Installs the wheels of dist/ (`make wheels`) into fresh environments, and uses them: doctor, the quick start on a ready bundle,
# mars-run with the same tokens, uvx; all with no compiler in PATH. Then a C++ program against the package of libmars.
#   wheels.sh PYTHON BUNDLE
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
dist=$root/dist
work=$root/build/wheels-test
rm -rf "$work"
mkdir -p "$work/release"
tar -C "$(dirname "$2")" -cf "$work/release/small.bundle.tar" "$(basename "$2")"
(cd "$work/release" && sha256sum small.bundle.tar >SHA256SUMS)

"$1" -m venv "$work/clean"
# in DIRECTORY COMMAND...: with the programs of that directory only
in() { env -i HOME="$work" PATH="$1" LANG=C.UTF-8 "${@:2}"; }
bin=$work/clean/bin
if in "$bin" bash -c 'command -v cc c++ gcc g++ clang cmake' 2>/dev/null; then exit 1; fi
index=$("$1" -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)
in "$bin" "$bin/python" -m pip install --quiet --disable-pip-version-check --find-links "$dist" mars-export mars-export-cpp uv
cd "$work"
in "$bin" "$bin/mars-export" doctor | tee doctor.txt
grep -q 'mars-export-kernels: .*, with ' doctor.txt
grep -q 'mars-export-cpp: mars-run .*clean/.*onnxruntime/capi/' doctor.txt
in "$bin" "$bin/mars-export" pull release/small.bundle.tar
ask=(small.bundle --system 'Reply with tool calls.' -p 'turn on the kitchen light and set a timer for 12 minutes' --json)
in "$bin" "$bin/mars-export" generate "${ask[@]}" >python.json
in "$bin" "$bin/mars-run" "${ask[@]}" >cpp.json
"$1" -c 'import json; a, b = (json.load(open(f)) for f in ("python.json", "cpp.json")); print(a["text"]); assert a["token_ids"] == b["token_ids"]'

uv=("$bin/uvx" --find-links "$dist" --default-index "$index" --python "$(readlink -f "$1")")
in "$bin" "${uv[@]}" mars-export --version
in "$bin" "${uv[@]}" mars-export generate "${ask[@]}" >uv.json
"$1" -c 'import json; a, b = (json.load(open(f)) for f in ("python.json", "uv.json")); assert a["token_ids"] == b["token_ids"]'

cmake -S "$root/examples/cpp_embed" -B embed -DCMAKE_PREFIX_PATH="$("$bin/python" -m mars_export_cpp)" >/dev/null
cmake --build embed >/dev/null
embed/embed small.bundle 'turn on the kitchen light'
