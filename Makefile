# One command each. `make demo` and `make test` set up everything they need; `make` lists the rest.
#
# The virtual environment is .venv (VENV=... for another place), built with PYTHON (python3). Each requirements file
# leaves a stamp in it, so a second run installs nothing.

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= .venv-bench
CARGO ?= cargo
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
BIN := $(VENV)/bin
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),$(PYTHON))
NATIVE := python/oxidiff/_native.abi3.so
LIBRARY := $(TARGET_DIR)/release/liboxidiff_python.so
SOURCES := Cargo.toml Cargo.lock build.rs $(shell find src kernels -type f)
export VIRTUAL_ENV := $(abspath $(VENV))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The command's own arguments, e.g. `make test-python ARGS="-k unet"`.
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-archs test-tools test-built test-rust-built test-rust test-python fuzz gpu-test gpu-bench gpu-test-kernels golden bless lint lint-rust lint-python fmt \
	bench bench-contenders bench-kernels dump doc docs-models wheel wheel-manylinux train clean all

help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- set-up ---------------------------------------------------------------------------------------------------------

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "oxidiff needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25"

$(VENV)/.demo-stamp: requirements/demo.txt | $(BIN)/python
	$(BIN)/pip install --quiet --requirement requirements/demo.txt
	@touch $@

$(VENV)/.test-stamp: requirements/test.txt $(VENV)/.demo-stamp
	$(BIN)/pip install --quiet --requirement requirements/test.txt
	@touch $@

# An editable install, for the entry points (`oxidiff`, torch.compile's backend list) and the package's metadata.
$(VENV)/.package-stamp: pyproject.toml $(VENV)/.demo-stamp
	$(BIN)/maturin develop --release --quiet
	@touch $@

setup: $(VENV)/.test-stamp build ## create .venv with pinned torch and tools, build the extension

# The installation builds the extension, too, which a make of its own sees.
build: $(VENV)/.package-stamp ## build the extension in release mode into python/oxidiff
	@$(MAKE) --no-print-directory $(NATIVE)

$(NATIVE): $(SOURCES)
	$(CARGO) build --release --package oxidiff-python
	@cmp --silent $(LIBRARY) $@ || { cp $(LIBRARY) $@.new && mv $@.new $@; }
	@touch $@

# --- the main job ---------------------------------------------------------------------------------------------------

demo: build ## draw digits with an eager and a compiled pipeline: demo-out/digits.png and a table
	$(BIN)/python examples/demo.py --out demo-out $(ARGS)

train: $(VENV)/.test-stamp ## train the demo's two checkpoints again (about ten minutes on an idle machine)
	$(BIN)/python examples/train_digits.py $(ARGS)

# --- tests ----------------------------------------------------------------------------------------------------------

TEST_RUST := $(CARGO) test --release --workspace --exclude oxidiff-python --quiet
# Those that take the most first, so that none is left alone at the end.
RUST_LONG := tests/cuda_kernels.rs tests/cuda_emulated.rs kernels/tests/registry.rs tests/cuda_libraries.rs
RUST_TESTS := $(RUST_LONG) $(filter-out $(RUST_LONG),$(wildcard tests/*.rs kernels/tests/*.rs))

# Rust first: most of what the extension is made of is compiled with its tests.
# Before its tests PyTorch: those of CUDA use its libraries, and are left out where there are none.
test: test-tools test-built test-python ## everything a change must pass: lint, types, Rust and Python tests

# The one mostly waits for the network, the other for the processor.
test-tools:
	@$(MAKE) --jobs 2 $(VENV)/.test-stamp test-rust-built

# Types are looked at by one processor, and of the tests some are long.
test-built:
	@$(MAKE) --jobs 2 test-rust lint-python

test-rust-built: lint-rust
	$(TEST_RUST) --no-run

# Two files of tests at a time: those of CUDA wait for one compiler each. The kernels have no tests but in such files, and
# would with `--lib` be compiled once more for none.
test-rust: ## Rust unit, golden, property and tidy tests (no Python needed), e.g. ARGS="--test golden"
	$(TEST_RUST) $(or $(ARGS),--no-run)
	$(if $(ARGS),,printf '%s\n' $(addprefix --test=,$(notdir $(basename $(RUST_TESTS)))) '--exclude oxidiff-kernels --lib' --doc | xargs -L 1 -P 2 $(TEST_RUST))

# Two processes: much of a test is one thread's work. A test that is stolen from the slower one may run in either.
test-python: $(VENV)/.test-stamp build ## Python tests, e.g. ARGS="-k unet"
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist worksteal $(ARGS)

test-archs: $(VENV)/.test-stamp build ## every CUDA kernel for every architecture, of which `test` takes turns (no GPU; more than ten minutes)
	OXIDIFF_CUDA_ARCHS=all $(TEST_RUST) --test cuda_kernels
	OXIDIFF_CUDA_ARCHS=all $(BIN)/python -m pytest --quiet tests/python/test_cuda_zoo.py

fuzz: ## thousands of random graphs on the CPU backend against the interpreter (minutes)
	$(CARGO) test --release --test backends -- --ignored many_random

# These two need an installed wheel, and neither Rust nor a network; where there is no GPU they say so and pass.
gpu-test: ## ops, models, streams, threads, captures, memory on an NVIDIA GPU, e.g. ARGS="--only capture"
	$(GPU_PYTHON) tests/gpu/run.py $(ARGS)

gpu-bench: ## whole models on an NVIDIA GPU against eager and torch.compile, e.g. ARGS="--only sdxl --write"
	$(GPU_PYTHON) benches/gpu.py $(ARGS)

gpu-test-kernels: ## every op on the first NVIDIA GPU against the interpreter (needs Rust)
	$(CARGO) test --release --test cuda_device -- --nocapture

golden: ## golden tests of the compiler's stages alone
	$(CARGO) test --release --test golden

bless: ## rewrite the golden expectations; review the diff
	OXIDIFF_BLESS=1 $(CARGO) test --release --test golden

# --- style ----------------------------------------------------------------------------------------------------------

lint: lint-rust lint-python ## formatting, clippy, ruff, mypy and the stubs of the extension

lint-rust:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings

lint-python: $(VENV)/.test-stamp build
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/python -m mypy.stubtest oxidiff._native

fmt: $(VENV)/.test-stamp ## format Rust and Python
	$(CARGO) fmt --all
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

# --- measurements ---------------------------------------------------------------------------------------------------

bench: $(VENV)/.test-stamp build ## whole models against eager, into benches/RESULTS.md; ARGS="--only unet-f32"
	$(BIN)/python benches/run.py $(ARGS)

# The contenders bring many packages of their own: an environment apart, on top of nothing else.
$(BENCH_VENV)/.stamp: requirements/bench.txt requirements/demo.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet --upgrade "pip>=25"
	$(BENCH_VENV)/bin/pip install --quiet --requirement requirements/bench.txt
	@touch $@

bench-contenders: $(BENCH_VENV)/.stamp build ## whole models against Inductor, OpenVINO and onnxruntime (an hour)
	PYTHONPATH=python $(BENCH_VENV)/bin/python benches/contenders.py $(ARGS)

bench-kernels: $(VENV)/.test-stamp build ## single kernels against the machine's ceilings and torch; ARGS="--only conv_f32"
	$(BIN)/python benches/kernels.py $(ARGS)

docs-models: $(VENV)/.test-stamp build ## measure every model of the zoo and rewrite docs/models.md
	$(BIN)/python benches/models.py $(ARGS)

# --- looking inside -------------------------------------------------------------------------------------------------

dump: build ## write every stage of compiling one model as text into dump-out; MODEL=sd15-unet
	OXIDIFF_DUMP=dump-out $(BIN)/python -m oxidiff.testing $(or $(MODEL),sd15-unet)

doc: ## API documentation of the Rust crates
	$(CARGO) doc --workspace --no-deps --document-private-items

# --- packaging ------------------------------------------------------------------------------------------------------

wheel: $(BIN)/python ## one abi3 wheel for this machine, in dist
	$(BIN)/pip wheel . --no-deps --wheel-dir dist

wheel-manylinux: $(VENV)/.test-stamp ## the wheel to publish: runs on glibc 2.17 and newer (zig is the linker)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin build --release --zig --compatibility manylinux2014 --out dist

clean: ## remove build results; keeps .venv
	rm -rf $(TARGET_DIR) dist demo-out dump-out $(NATIVE)

all: build test demo doc wheel ## build, test, demo, documentation and wheel
