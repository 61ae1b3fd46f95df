# `make demo` shows the product, `make check` is what people, hooks and CI run. Both set up .venv first.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
# Pinned, and installed first: a later unpinned torch would pull gigabytes of CUDA on Linux.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# CI needs more packages than people do, so that an environment made by hand is not taken for its own.
STAMP := $(VENV)/.installed$(if $(CI),-ci)
comma := ,
CPP_FILES = $(shell git ls-files '*.cpp' '*.hpp' '*.h' '*.c' | grep -v unicode_tables)
# Where ONNX Runtime's headers and library are; runtime/cpp/setup.sh fills build/ort from apt and the wheel.
export ONNXRuntime_ROOT ?= $(CURDIR)/build/ort

.PHONY: demo check check-fast docs format lint types test programs kernels processors processors-few qemu versions cpp cpp-aarch64 compilers attack fuzz ray gpu gpu-pack gpu-unpack gpu-offline release clean

# The quick start of README.md, and its request one token a step, for comparison.
DEMO = build/demo.bundle
ASK = $(BIN)/mars-export generate $(DEMO) --system 'Reply with tool calls.' \
	-p "turn on the kitchen light and set a timer for 12 minutes"

demo: $(STAMP)
	[ -d $(DEMO) ] || $(BIN)/mars-export onnx -o $(DEMO) --precision auto
	$(ASK) --tau 1
	$(ASK)

# In CI the builds with sanitizers and the emulated processors share the cores with the Python tests. Some of
# tests/runtime/cpp run those builds.
check: lint types docs cpp kernels programs
ifdef CI
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target PYTEST=--ignore=tests/runtime/cpp test cpp-asan cpp-tsan processors-few
	$(MAKE) --no-print-directory PYTEST=tests/runtime/cpp test
else
	$(MAKE) --no-print-directory test
endif

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

# Chromium, for the tests of the server's page. CI installs Debian's; elsewhere they are skipped without it.
programs:
	@if [ -n "$$CI" ] && ! command -v chromium >/dev/null; then apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends chromium >/dev/null; fi

# The C++ runtime, with its tests. Without what it needs, people are told what is missing and go on; CI fails.
cpp: $(STAMP)
	@if runtime/cpp/setup.sh $(BIN)/python; then $(MAKE) --no-print-directory cpp-release; \
	elif [ -n "$$CI" ]; then exit 1; else echo "NOT CHECKED: the C++ runtime, because of the above (docs/cpp.md)"; fi

# mars-export-kernels for its own tests, outside of the environment: all other tests run without it.
kernels: $(STAMP)
	@if runtime/cpp/setup.sh $(BIN)/python; then \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/kernels ./kernels; \
	elif [ -n "$$CI" ]; then exit 1; else echo "NOT CHECKED: kernels/, because of the above (docs/cpp.md)"; fi

# The library for 64-bit Arm, its tests run by qemu-user. Not part of `check` outside CI: two compilers more.
cpp-aarch64: $(STAMP)
	runtime/cpp/setup.sh $(BIN)/python && runtime/cpp/setup_aarch64.sh $(BIN)/python
	cd runtime/cpp && cmake --preset aarch64 && cmake --build --preset aarch64 && ctest --preset aarch64

# libmars by the compilers of JetPack 6 (GCC 11), JetPack 7 (GCC 13) and by clang, those that are here, and its unit tests.
compilers: $(STAMP)
	runtime/cpp/setup.sh $(BIN)/python
	@cd runtime/cpp; for compiler in g++-11 g++-13 clang++; do command -v $$compiler >/dev/null || { echo "$$compiler is not here"; continue; }; \
	place=../../build/cpp/$$compiler; cmake -S . -B $$place -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_COMPILER=$$compiler \
	-DMARS_TESTS=ON -DMARS_WERROR=ON -DCMAKE_UNITY_BUILD=ON && cmake --build $$place && ctest --test-dir $$place --output-on-failure \
	|| exit 1; done

# A tiny model in every precision, run by qemu-user on processors that are not here: a table of what held (docs/measurements.md).
# Arm too, in Debian's Python for it. `processors-few` is a part of it.
MACHINES = build/machines
PROCESSORS = Nehalem Haswell max
ARM = cortex-a57 max
RUN = build/cpp/release/mars-run
MADE = PYTHONPATH=tests $(BIN)/python tests/machines/bundles.py $(MACHINES)
TABLE = $(BIN)/python tests/machines/table.py $(MACHINES)
ON_X86 = $(foreach cpu,$(1),"$(cpu)=qemu-x86_64 -cpu $(cpu) $(2)")

processors: $(STAMP) qemu
	tests/machines/arm64.sh $(BIN)/python
	$(MADE) && $(TABLE) $(call ON_X86,$(PROCESSORS),$(BIN)/python) \
	$(foreach cpu,$(ARM),"aarch64 $(cpu)=build/arm64/python $(cpu)") \
	--mars-run "here=$(RUN)" $(call ON_X86,$(PROCESSORS),$(RUN))

processors-few: $(STAMP) qemu
	$(MADE) && $(TABLE) $(call ON_X86,Nehalem Haswell,$(BIN)/python) --precisions w8a8 --mars-run "here=$(RUN)"

qemu:
	@command -v qemu-x86_64 >/dev/null || { apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends qemu-user >/dev/null; }

# The same with the oldest and the newest release of ONNX Runtime that the extras allow, each in an environment of its own.
VERSION = $(PYTHON) -m venv build/ort-$(1) && build/ort-$(1)/bin/python -m pip install --quiet --upgrade --disable-pip-version-check . "$(2)"
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
fuzz: $(VENV)/.installed
	runtime/cpp/setup.sh $(BIN)/python
	PYTHONPATH=tests $(BIN)/python -m support.fuzzed build/fuzz/bundle
	cd runtime/cpp && cmake --preset fuzz && cmake --build --preset fuzz
	@cd build/fuzz; export MARS_FUZZ_BUNDLE=bundle; for name in $(FUZZERS); do mkdir -p $$name; \
	../cpp/fuzz/fuzz/fuzz-$$name --seeds=$$name-seeds; ../cpp/fuzz/fuzz/fuzz-$$name -max_len=65536 -len_control=20 -entropic=0 \
	-timeout=60 -max_total_time=$$(($(MINUTES) * 60)) -print_final_stats=1 -artifact_prefix=$$name- $$name \
	$$name-seeds 2>&1 | tee $$name.log; [ $${PIPESTATUS[0]} -eq 0 ] || found="$$found $$name"; done; \
	[ -z "$$found" ] || { echo "FOUND by:$$found; the inputs are in build/fuzz"; exit 1; }

# What waits for a GPU: tests, tokens, where memory is, what a step costs; a page in docs/gpu (docs/tensorrt.md).
gpu: $(STAMP)
	$(BIN)/python -c "import onnxruntime as o; exit('CUDAExecutionProvider' not in o.get_available_providers())" \
	|| { $(BIN)/python -m pip uninstall --quiet --yes onnxruntime; $(BIN)/python -m pip install --quiet '.[gpu]'; }
	$(BIN)/python benchmarks/gpu_prove.py

# Fleets on Ray Serve: requests, kills, an update under load. Half a gigabyte in an environment of its own, and
# some ten minutes, so neither `check` nor CI does it (docs/scale.md, docs/measurements.md).
ray: $(STAMP)
	$(PYTHON) -m venv build/ray
	build/ray/bin/python -m pip install --quiet --disable-pip-version-check '.[cpu,serve,ray]'
	MARS_RAY_PYTHON=$(CURDIR)/build/ray/bin/python $(BIN)/python -m pytest tests/ray

# For a machine with a GPU, PyTorch and no network: pieces of at most 25 MB here, joined there (PYTHON is the one
# there), whatever has arrived by then.
gpu-pack: $(STAMP)
	$(BIN)/python benchmarks/gpu_pack.py pack

gpu-unpack:
	$(PYTHON) benchmarks/gpu_pack.py unpack

gpu-offline: gpu-unpack
	$(PYTHON) benchmarks/gpu_prove.py --joined build/gpu-joined

# What a version publishes, in dist/: both packages, the default checkpoint in three precisions, the changelog's first
# section as notes, checksums (CONTRIBUTING.md). GPTQ chooses the codes of int4, which takes most of the time.
release: $(STAMP)
	rm -rf dist build/release && mkdir -p dist build/release
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist exporter/default
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

# CI also tests the lm-evaluation-harness class, half a gigabyte that people are spared, the page in a browser, and traces.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,export,rtx,serve,dev$(if $(CI),$(comma)lm-eval$(comma)browser$(comma)traces)]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
