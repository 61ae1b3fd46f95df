# `make demo` shows the product, `make check` is what people, hooks and CI run. Both set up .venv first. CI then runs
# `make check-more`: what needs more packages, programs or time.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
# Pinned, and installed first: a later unpinned torch would pull gigabytes of CUDA on Linux.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS = export,rtx,serve,dev
# Half a gigabyte more, in an environment of its own.
MORE_VENV = build/more
MORE_STAMP := $(MORE_VENV)/.installed
MORE_EXTRAS = $(EXTRAS),lm-eval,browser,traces
CPP_FILES = $(shell git ls-files '*.cpp' '*.hpp' '*.h' '*.c' | grep -v -e unicode_tables -e ^kernels/onnxruntime/)
# Where ONNX Runtime's library is; runtime/cpp/setup.sh links the wheel's in build/ort.
export ONNXRuntime_ROOT ?= $(CURDIR)/build/ort

.PHONY: wheels wheels-test demo check check-more check-fast docs format lint types test browser kernels processors processors-few qemu versions cpp cpp-aarch64 compilers attack fuzz ray gpu gpu-pack release clean

# The quick start of README.md, and its request one token a step, for comparison.
DEMO = build/demo.bundle
ASK = $(BIN)/mars-export generate $(DEMO) --system 'Reply with tool calls.' \
	-p "turn on the kitchen light and set a timer for 12 minutes"

demo: $(STAMP)
	[ -d $(DEMO) ] || $(BIN)/mars-export onnx -o $(DEMO) --precision auto
	$(ASK) --tau 1
	$(ASK)

check: lint types docs cpp kernels test

# lm-eval, the page in a browser, traces, the C++ runtime with sanitizers, emulated processors. On Debian, and as root:
# it installs what is missing. A test that cannot run is an error here.
check-more: cpp $(MORE_STAMP) browser
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target cpp-asan cpp-tsan processors-few
	$(MORE_VENV)/bin/python -m pytest --numprocesses=2 --dist=loadfile --durations=20 --more --require-all

# For the inner loop: lint, types, the decoding loop, the graph, the server's door. No C++, no other test.
check-fast: lint types
	$(MAKE) --no-print-directory test PYTEST="-x tests/runtime/decode tests/exporter/graph/test_graph.py tests/exporter/graph/test_batch_invariant.py \
	tests/runtime/serve/test_openai.py tests/runtime/serve/test_operation.py tests/runtime/serve/test_conformance.py"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	! git grep -nE '^(<<<<<<<|>>>>>>>) ' -- .

# Type checkers cannot see a package that is mapped onto the root, so they get a link named like the package.
types: $(STAMP)
	mkdir -p build/typing
	ln -sfn "$(CURDIR)" build/typing/mars_export
	$(BIN)/mypy

# The documentation as a site in build/site; a broken link or anchor is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --durations=20 $(PYTEST)

# Chromium, for the tests of the server's page.
browser:
	@command -v chromium >/dev/null || { apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends chromium >/dev/null; }

# The C++ runtime, with its tests. Without what it needs, this says what is missing and goes on; the summary of the
# Python tests then names the tests that were skipped.
cpp: $(STAMP)
	@if runtime/cpp/setup.sh $(BIN)/python; then $(MAKE) --no-print-directory cpp-release; \
	else echo "NOT CHECKED: the C++ runtime, because of the above (docs/cpp.md)"; fi

# mars-export-kernels as it is now, for its own tests. The environment has it, too; all other tests switch it off.
kernels: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/kernels ./kernels

# The library for 64-bit Arm, its tests run by qemu-user. Not part of `check`: two compilers more.
cpp-aarch64: $(STAMP)
	runtime/cpp/setup.sh $(BIN)/python && runtime/cpp/setup_aarch64.sh $(BIN)/python
	cd runtime/cpp && cmake --preset aarch64 && cmake --build --preset aarch64 && ctest --preset aarch64
	cmake -G Ninja -S kernels -B build/kernels-aarch64 --toolchain ../runtime/cpp/cmake/aarch64-linux-gnu.cmake \
	&& cmake --build build/kernels-aarch64 --target same_bits
	@for set in "max i8mm" "max dotprod" "cortex-a76 dotprod"; do echo "kernels on $$set" && qemu-aarch64-static -cpu $${set% *} \
	-L build/qemu-aarch64 build/kernels-aarch64/same_bits $${set#* } || exit 1; done

# libmars by the compilers of JetPack 6 (GCC 11), JetPack 7 (GCC 13) and by clang, those that are here, and its unit tests.
compilers: $(STAMP)
	runtime/cpp/setup.sh $(BIN)/python
	@cd runtime/cpp; for compiler in g++-11 g++-13 clang++; do command -v $$compiler >/dev/null || { echo "$$compiler is not here"; continue; }; \
	place=../../build/cpp/$$compiler; cmake -S . -B $$place -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_COMPILER=$$compiler \
	-DMARS_TESTS=ON -DMARS_WERROR=ON -DCMAKE_UNITY_BUILD=ON && cmake --build $$place && ctest --test-dir $$place --output-on-failure \
	|| exit 1; done

# All wheels, in dist/: mars-export, the default adapter, and for manylinux_2_28 the kernels and libmars.
wheels: $(STAMP)
	mkdir -p dist && rm -f dist/*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . ./exporter/default
	runtime/cpp/wheels.sh $(BIN)/python dist
	ls -l dist/*.whl

# Installs dist/ into fresh environments with no compiler in PATH: Python, mars-run, a C++ program.
wheels-test: $(STAMP)
	[ -d $(DEMO) ] || $(BIN)/mars-export onnx -o $(DEMO) --precision auto
	tests/machines/wheels.sh $(BIN)/python $(DEMO)

# A tiny model in every precision, run by qemu-user on processors that are not here: a table of what held (docs/measurements.md).
# Arm too, in Debian's Python for it, and mars-run of `make cpp-aarch64`. `processors-few` is a part of it.
MACHINES = build/machines
PROCESSORS = Nehalem Haswell max
ARM = cortex-a57 cortex-a76 max
RUN = build/cpp/release/mars-run
MADE = PYTHONPATH=tests $(BIN)/python tests/machines/bundles.py $(MACHINES)
TABLE = $(BIN)/python tests/machines/table.py $(MACHINES)
ON_X86 = $(foreach cpu,$(1),"$(cpu)=qemu-x86_64 -cpu $(cpu) $(2)")

processors: $(STAMP) qemu
	tests/machines/arm64.sh $(BIN)/python
	$(MADE) && $(TABLE) $(call ON_X86,$(PROCESSORS),$(BIN)/python) \
	$(foreach cpu,$(ARM),"aarch64 $(cpu)=build/arm64/python $(cpu)") \
	--mars-run "here=$(RUN)" $(call ON_X86,$(PROCESSORS),$(RUN)) \
	$(foreach cpu,$(ARM),"aarch64 $(cpu)=qemu-aarch64 -cpu $(cpu) -L build/qemu-aarch64 build/cpp/aarch64/mars-run")

processors-few: $(STAMP) qemu
	$(MADE) && $(TABLE) $(call ON_X86,Nehalem Haswell,$(BIN)/python) --precisions w8a8 --mars-run "here=$(RUN)"

qemu:
	@command -v qemu-x86_64 >/dev/null || { apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends qemu-user >/dev/null; }

# The same with the oldest and the newest release of ONNX Runtime that the extras allow, each in an environment of its own.
VERSION = $(PYTHON) -m venv build/ort-$(1) && build/ort-$(1)/bin/python -m pip install --quiet --upgrade --disable-pip-version-check . \
	$(or $(wildcard dist/mars_export_kernels-*$(shell uname -m).whl),./kernels) "$(2)"
versions: $(STAMP)
	$(call VERSION,oldest,onnxruntime==1.25.*)
	$(call VERSION,newest,onnxruntime)
	$(MADE) && $(TABLE) oldest=build/ort-oldest/bin/python newest=build/ort-newest/bin/python

cpp-%:
	cd runtime/cpp && cmake --preset $* && cmake --build --preset $* $(if $(filter release,$*),,--parallel 1) && ctest --preset $*

# Hostile checkpoints by the ten thousand (SECURITY.md).
attack: $(STAMP)
	MARS_ATTACKS=20000 $(BIN)/python -m pytest --quiet tests/attack/checkpoint

# libFuzzer with ASan and UBSan on what others write, MINUTES for each program of runtime/cpp/fuzz, one after the
# other. Goes on from the inputs in build/fuzz; what is found lies there, and ends it with an error (docs/cpp.md).
MINUTES ?= 30
FUZZERS ?= manifest c_api http automaton tokenizer_json text
fuzz: $(STAMP)
	runtime/cpp/setup.sh $(BIN)/python
	PYTHONPATH=tests $(BIN)/python -m support.fuzzed build/fuzz/bundle
	cd runtime/cpp && cmake --preset fuzz && cmake --build --preset fuzz
	@cd build/fuzz; export MARS_FUZZ_BUNDLE=bundle; for name in $(FUZZERS); do mkdir -p $$name; \
	../cpp/fuzz/fuzz/fuzz-$$name --seeds=$$name-seeds; ../cpp/fuzz/fuzz/fuzz-$$name -max_len=65536 -len_control=20 -entropic=0 \
	-timeout=60 -max_total_time=$$(($(MINUTES) * 60)) -print_final_stats=1 -artifact_prefix=$$name- $$name \
	$$name-seeds 2>&1 | tee $$name.log; [ $${PIPESTATUS[0]} -eq 0 ] || found="$$found $$name"; done; \
	[ -z "$$found" ] || { echo "FOUND by:$$found; the inputs are in build/fuzz"; exit 1; }

# What waits for a GPU: captured steps, what they cost, answers, tests (docs/tensorrt.md).
gpu: $(STAMP)
	$(BIN)/python -c "import onnxruntime as o; exit('CUDAExecutionProvider' not in o.get_available_providers())" \
	|| { $(BIN)/python -m pip install --quiet '.[gpu]' ./kernels; \
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps onnxruntime-gpu; }
	$(BIN)/python benchmarks/gpu/half_hour.py capture steps answers tests

# Fleets on Ray Serve: requests, kills, an update under load. Half a gigabyte in an environment of its own, and
# some ten minutes, so neither `check` nor `check-more` does it (docs/scale.md, docs/measurements.md).
ray: $(STAMP)
	$(PYTHON) -m venv build/ray
	build/ray/bin/python -m pip install --quiet --disable-pip-version-check '.[serve,ray]' ./kernels
	MARS_RAY_PYTHON=$(CURDIR)/build/ray/bin/python $(BIN)/python -m pytest tests/ray

# For a machine with a GPU, PyTorch and no network: pieces of at most 52 MiB in build/gpu-pack (docs/tensorrt.md).
gpu-pack: $(STAMP)
	$(BIN)/python benchmarks/gpu_pack.py pack

# What a version publishes, in dist/: all packages, the default checkpoint in three precisions, the changelog's first
# section as notes, checksums (CONTRIBUTING.md). GPTQ chooses the codes of int4, which takes most of the time.
release: $(STAMP)
	rm -rf dist build/release && mkdir -p dist build/release
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist exporter/default
	$(BIN)/python -m build --sdist --outdir dist kernels
	runtime/cpp/wheels.sh $(BIN)/python dist
	$(BIN)/python -m twine check --strict dist/*
	@set -e; for precision in w8a8 int4 fp32; do name=mars-smollm2-135m-$$precision.bundle; \
	$(BIN)/mars-export onnx --precision $$precision -o build/release/$$name; $(BIN)/mars-export verify build/release/$$name; \
	tar --sort=name --owner=0 --group=0 --numeric-owner -C build/release -cf dist/$$name.tar $$name; done
	sed '1,/^## /d; /^## /,$$d' CHANGELOG.md > dist/NOTES.md
	cd dist && sha256sum * > SHA256SUMS

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP_FILES)

INSTALL = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call INSTALL,$(VENV)) $(TORCH)
	$(call INSTALL,$(VENV)) --editable '.[$(EXTRAS)]' ./kernels
	touch $@

$(MORE_STAMP): pyproject.toml
	$(PYTHON) -m venv $(MORE_VENV)
	$(call INSTALL,$(MORE_VENV)) $(TORCH)
	$(call INSTALL,$(MORE_VENV)) --editable '.[$(MORE_EXTRAS)]' ./kernels
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
