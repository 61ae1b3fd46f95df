#!/usr/bin/env bash
# Installs the wheels of dist/ (`make wheels`) into fresh environments, and uses them: doctor, the quick start on a ready bundle,
# mars-run with the same tokens, uvx; all with no compiler in PATH. Then a C++ program against the package of libmars.
#   wheels.sh PYTHON BUNDLE
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
dist=$root/dist
work=$root/build/wheels-test
rm -rf "$work"
mkdir -p "$work/release"
tar -C "$(dirname "$2")" -cf "$work/release/small.bundle.tar" "$(basename "$2")"
(cd "$work/release" && sha256sum small.bundle.tar >SHA256SUMS)

"$python" -m venv "$work/clean"
# with DIRECTORY COMMAND...: with the programs of that directory only
with() { env HOME="$work" PATH="$1" "${@:2}"; }
bin=$work/clean/bin
if with "$bin" "$BASH" -c 'command -v cc c++ gcc g++ clang cmake'; then exit 1; fi
with "$bin" "$bin/python" -m pip install --quiet --disable-pip-version-check --find-links "$dist" mars-export mars-export-cpp uv
cd "$work"
with "$bin" "$bin/mars-export" doctor | tee doctor.txt
grep -q 'mars-export-kernels: .*, with ' doctor.txt
grep -q 'mars-export-cpp: mars-run .*clean/.*onnxruntime/capi/' doctor.txt
with "$bin" "$bin/mars-export" pull release/small.bundle.tar
ask=(small.bundle --system 'Reply with tool calls.' -p 'turn on the kitchen light and set a timer for 12 minutes' --json)
with "$bin" "$bin/mars-export" generate "${ask[@]}" >python.json
with "$bin" "$bin/mars-run" "${ask[@]}" >cpp.json
"$python" -c 'import json; a, b = (json.load(open(f)) for f in ("python.json", "cpp.json")); print(a["text"]); assert a["token_ids"] == b["token_ids"]'

mkdir tools # of uv's launchers
ln -s "$(command -v realpath)" "$(command -v dirname)" tools/
uv=("$bin/uvx" --find-links "$dist" --python "$(readlink -f "$python")")
with "$bin:$work/tools" "${uv[@]}" mars-export --version
with "$bin:$work/tools" "${uv[@]}" mars-export generate "${ask[@]}" >uv.json
"$python" -c 'import json; a, b = (json.load(open(f)) for f in ("python.json", "uv.json")); assert a["token_ids"] == b["token_ids"]'

cmake -S "$root/examples/cpp_embed" -B embed -DCMAKE_PREFIX_PATH="$("$bin/python" -m mars_export_cpp)" >/dev/null
cmake --build embed >/dev/null
embed/embed small.bundle 'turn on the kitchen light'
