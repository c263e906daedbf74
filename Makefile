# Every target sets up .venv by itself when it is missing or older than what it is made from.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs format bench sanitize neon clean
.DEFAULT_GOAL := test

$(VENV)/.ready: pyproject.toml setup.py $(wildcard src/mgk/csrc/*)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready ## train softmax with 2 heads, smgk and mgk with 1, on short ListOps; ends with a table and a page
	$(BIN)/mgk compare

test: $(VENV)/.ready
	$(BIN)/python -m pytest --numprocesses=auto --quiet

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.ready ## the site, in build/site; any warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCH_JSON ?= results/bench/kernels.json
bench: $(VENV)/.ready ## the table of README.md: the fused kernels against softmax attention with twice the heads
	$(BIN)/mgk bench kernels --json $(BENCH_JSON)

SANITIZE := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: $(VENV)/.ready ## the kernels' tests with AddressSanitizer and UndefinedBehaviorSanitizer
	mkdir -p build/sanitize
	$(CXX) -std=gnu++17 -fPIC -shared -pthread -fno-tree-slp-vectorize -Wno-psabi $(SANITIZE) \
		-o build/sanitize/_kernels.so src/mgk/csrc/*.cpp
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		MGK_KERNELS_FOLDER=build/sanitize $(BIN)/python -m pytest --quiet tests/functional/test_kernels.py

NEON_CXX ?= aarch64-linux-gnu-g++
neon: $(VENV)/.ready ## the kernels' tests with a build for AArch64, in an emulator
	mkdir -p build/neon
	$(NEON_CXX) -std=gnu++17 -O3 -fno-tree-slp-vectorize -Wno-psabi -pthread -static \
		-o build/neon/worker tests/neon/worker.cpp src/mgk/csrc/*.cpp
	PYTHONPATH=tests/neon MGK_NEON_WORKER="qemu-aarch64 build/neon/worker" $(BIN)/python -m pytest --quiet -p emulated \
		tests/functional/test_kernels.py -k "not avx and not forked and not library and not set_that_is"

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
