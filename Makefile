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

.PHONY: demo check format lint types test programs cpp cpp-aarch64 python-aarch64 attack fuzz ray gpu gpu-pack gpu-unpack gpu-offline clean

demo: $(STAMP)
	$(BIN)/mars-export demo

# In CI the builds with sanitizers share the cores with the Python tests, which use one. Some of tests/runtime/cpp
# run those builds.
check: lint types cpp programs
ifdef CI
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target PYTEST=--ignore=tests/runtime/cpp test cpp-asan cpp-tsan
	$(MAKE) --no-print-directory PYTEST=tests/runtime/cpp test
else
	$(MAKE) --no-print-directory test
endif

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

# Type checkers cannot see a package that is mapped onto the root, so they get a link named like the package.
types: $(STAMP)
	mkdir -p build/typing
	ln -sfn "$(CURDIR)" build/typing/mars_export
	$(BIN)/mypy

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST)

# Chromium, for the tests of the server's page, and what signs bundles. CI installs Debian's; elsewhere their tests are
# skipped without them.
programs:
	@if [ -n "$$CI" ] && ! { command -v chromium && command -v ssh-keygen && command -v minisign; } >/dev/null; then apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends chromium openssh-client \
	minisign >/dev/null; fi

# The C++ runtime, with its tests. Without what it needs, people are told what is missing and go on; CI fails.
cpp: $(STAMP)
	@if runtime/cpp/setup.sh $(BIN)/python; then $(MAKE) --no-print-directory cpp-release; \
	elif [ -n "$$CI" ]; then exit 1; else echo "NOT CHECKED: the C++ runtime, because of the above (docs/cpp.md)"; fi

# The library for 64-bit Arm, its tests run by qemu-user. Not part of `check` outside CI: two compilers more.
cpp-aarch64: $(STAMP)
	runtime/cpp/setup.sh $(BIN)/python && runtime/cpp/setup_aarch64.sh $(BIN)/python
	cd runtime/cpp && cmake --preset aarch64 && cmake --build --preset aarch64 && ctest --preset aarch64

# The Python package for 64-bit Arm: the wheel and its dependencies in Debian's Python, run by qemu-user on a bundle.
python-aarch64: $(STAMP)
	[ -d build/aarch64.bundle ] || $(BIN)/mars-export onnx -o build/aarch64.bundle --precision w8a8
	tests/runtime/aarch64.sh $(BIN)/python build/aarch64.bundle

cpp-%:
	cd runtime/cpp && cmake --preset $* && cmake --build --preset $* $(if $(filter release,$*),,--parallel 1) && ctest --preset $*

# Hostile bundles by the hundred thousand, then requests by the hundred thousand, two hours; goes on where it was
# stopped (SECURITY.md).
attack: $(STAMP)
	mkdir -p build
	$(BIN)/python benchmarks/attack --state build/attack.jsonl
	$(BIN)/python benchmarks/attack --kind checkpoints --trials 20000 --state build/checkpoints.jsonl
	PYTHONPATH=benchmarks $(BIN)/python -m attack.kills --state build/kills.jsonl
	PYTHONPATH=benchmarks $(BIN)/python -m attack.memory --state build/memory.jsonl
	if [ -x build/cpp/release/mars-run ]; then \
	PYTHONPATH=benchmarks $(BIN)/python -m attack.memory --runs 40 --runner cpp build/cpp/release/mars-run \
	--state build/memory-cpp.jsonl; else echo "libmars is not built (make cpp): its runs are left out"; fi
	PYTHONPATH=benchmarks $(BIN)/python -m attack.schemas --state build/schemas.jsonl
	PYTHONPATH=benchmarks $(BIN)/python -m attack.soak --seconds 7200 --state build/soak.jsonl \
	--figures build/soak.json

# libFuzzer with ASan and UBSan on what others write, MINUTES for each program of runtime/cpp/fuzz, one after the
# other. Goes on from the inputs in build/fuzz; what is found lies there, and ends it with an error (docs/cpp.md).
MINUTES ?= 30
FUZZERS ?= manifest c_api http automaton tokenizer_json text graph
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
# some ten minutes, so neither `check` nor CI does it (docs/scale.md, docs/log.md).
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

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP_FILES)

# CI also tests the lm-evaluation-harness class, half a gigabyte that people are spared, and the page in a browser.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,export,calibrate,rtx,serve,dev$(if $(CI),$(comma)lm-eval$(comma)browser)]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
