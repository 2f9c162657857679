# All files are written to .venv and build/. Required: make, g++, and python3 3.11 or later with venv and headers (on
# Debian: python3-venv, python3-dev). CMake, Ninja and the Python packages are installed from PyPI.

PYTHON ?= python3
PROMPT ?= Why is the sky blue?
export PROMPT
MODEL ?= smollm2-135m-instruct
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
unexport PYTHONDONTWRITEBYTECODE # modules that tests and their processes import are compiled once
# Start more workers than processors, because tests wait at times, and no threads of NumPy in addition.
PYTEST = OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(shell expr $(JOBS) + $(JOBS) / 2)
PARITY_BIN := build/parity/bin
CMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" cmake
ARM := qemu-aarch64-static -L /usr/aarch64-linux-gnu
SITE_PACKAGES = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
NATIVE_BUILD = $(shell $(BIN)/python -c 'import sys, sysconfig; \
  print(f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/chunkrt._native")')
LOCATE = $(shell $(CXX) -print-file-name=$(1))
SANITIZED = PYTHONPATH=build/asan/package ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
  LD_PRELOAD="$(call LOCATE,libasan.so) $(call LOCATE,libstdc++.so)" $(BIN)/python -P
MINUTES ?= 60
TESTS ?=

PACKAGE_SOURCES := pyproject.toml setup.py CMakeLists.txt $(wildcard README.md LICENSE) \
  $(shell find chunkrt models csrc -type f ! -path 'csrc/tests/*' ! -path '*/__pycache__/*' ! -name '*.so')
CPP_SOURCES := $(shell find csrc bench/roofline -name '*.cc' -o -name '*.h')

# Install requirements of pyproject.toml in $(BIN). The argument is a Python expression that returns a list; `root` has
# the contents of the file. Modules are compiled when they are imported.
define install_requirements
$(BIN)/python -c 'import tomllib; root = tomllib.load(open("pyproject.toml", "rb")); print(*$(1), sep="\n")' \
  | $(PIP) install --no-compile --requirement /dev/stdin
endef

# Install extras of pyproject.toml in $(BIN).
define install_extras
$(call install_requirements,[r for e in "$(1)".split() for r in root["project"]["optional-dependencies"][e]])
endef

.PHONY: help run test test-cpp test-python test-slow test-all tests-ready lint docs parity wheels wheel-windows test-windows \
  test-windows-short test-arm test-arm-max test-arm-a76 test-arm-package test-sanitize \
  test-sanitize-kernels test-sanitize-programs test-sanitize-python sanitized fuzz clean
.DELETE_ON_ERROR:

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

run: $(VENV)/.package ## answer PROMPT="..." with MODEL=..., which is downloaded if needed
	$(BIN)/chunkrt run $(MODEL) --prompt "$$PROMPT"

test: ## run the C++ tests, and the Python tests on the installed package
	@$(MAKE) --no-print-directory -j2 test-cpp test-python

test-python: tests-ready ## run the Python tests
	$(PYTEST) -rs -m "not slow"

test-cpp: $(VENV)/.wheel ## run the C++ tests
	$(CMAKE) --build $(NATIVE_BUILD) --target chunkrt_tests --parallel $(JOBS)
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir $(NATIVE_BUILD) --parallel $(JOBS) --output-on-failure

test-slow: ## run the tests that `test` leaves out, or those of TESTS="tests/quant tests/onnx"
	@$(MAKE) --no-print-directory -j2 tests-ready
	@$(MAKE) --no-print-directory $(VENV)/.slow
	$(PYTEST) -rs -m "slow or hypothesis" --hypothesis-profile=slow -o faulthandler_timeout=3600 $(TESTS)

test-all: test test-slow ## run all tests of this processor

tests-ready: $(VENV)/.wheel $(VENV)/.test
	@$(MAKE) --no-print-directory $(VENV)/.compiled
	@$(BIN)/chunkrt pull $(MODEL) >/dev/null || echo "tests of the real model are skipped" >&2

lint: $(VENV)/.package $(VENV)/.test $(VENV)/.lint ## check style, types and English of all code
	$(BIN)/ruff check --extend-exclude build .
	$(BIN)/ruff format --check --extend-exclude build .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/validate-pyproject pyproject.toml
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)
	$(BIN)/python tests/prose/lint.py

parity: $(VENV)/.package $(VENV)/.test build/parity/.installed ## compare with Hugging Face Transformers (torch: large)
	$(PARITY_BIN)/python tests/parity/make_fixtures.py --check
	$(BIN)/python tests/parity/make_fixtures.py --live

wheels: $(VENV)/.wheel $(VENV)/.wheels ## build a wheel for machines without a compiler in dist/, install it and run a model with it
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(BIN)/python tests/packaging/install_wheel.py "$$(ls -t dist/*.whl | head -n 1)"

wheel-windows: $(VENV)/.windows ## cross-build wheels for Windows on x86-64 and Arm in dist/, and inspect them
	$(BIN)/python tests/packaging/windows_wheels.py
	$(BIN)/python tests/packaging/windows_kernels.py

test-windows: $(VENV)/.windows ## run the C++ and Python tests of the x86-64 wheel for Windows in Wine
	$(BIN)/python tests/packaging/windows_tests.py $(TESTS)

test-windows-short: $(VENV)/.windows ## run a part of them, in a few minutes
	$(BIN)/python tests/packaging/windows_tests.py --short

test-arm: $(VENV)/.build ## run the C++ tests for 64-bit Arm in an emulator
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do command -v $$tool >/dev/null || { \
	  echo "test-arm: $$tool is missing; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2; \
	  exit 1; }; done
	$(CMAKE) -S . -B build/arm -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake \
	  -DCHUNKRT_BUILD_PYTHON=OFF
	$(CMAKE) --build build/arm --target chunkrt_tests --parallel $(JOBS)
	@$(MAKE) --no-print-directory -j2 test-arm-a76 test-arm-max

# The older processor tests all kernels that it can execute; the newer one tests the others, and all programs again.
test-arm-max:
	$(ARM) -cpu max build/arm/csrc/tests/chunkrt_program_tests
	$(ARM) -cpu max build/arm/csrc/tests/chunkrt_kernel_tests isa:
	$(ARM) -cpu max build/arm/csrc/tests/chunkrt_kernel_tests gemm
	$(ARM) -cpu max build/arm/csrc/tests/chunkrt_kernel_tests _neon_bf16

test-arm-a76: export CHUNKRT_FORCE_ISA = neon_dotprod
test-arm-a76:
	$(ARM) -cpu cortex-a76 build/arm/csrc/tests/chunkrt_kernel_tests
	$(ARM) -cpu cortex-a76 build/arm/csrc/tests/chunkrt_program_tests

test-arm-package: $(VENV)/.package $(VENV)/.test $(VENV)/.wheels ## cross-compile the wheel for 64-bit Arm, and run it in an emulator
	@$(BIN)/chunkrt pull $(MODEL) >/dev/null
	$(BIN)/python tests/packaging/arm_package.py

test-sanitize: sanitized ## run the C++ and the native Python tests under sanitizers
	$(CMAKE) -S . -B build/tsan -G Ninja -DCHUNKRT_SANITIZE=thread -DCHUNKRT_BUILD_PYTHON=OFF
	$(CMAKE) --build build/tsan --target chunkrt_program_tests --parallel $(JOBS)
	@$(MAKE) --no-print-directory -j2 test-sanitize-python test-sanitize-kernels test-sanitize-programs

test-sanitize-kernels:
	build/asan/csrc/tests/chunkrt_kernel_tests

test-sanitize-programs:
	build/asan/csrc/tests/chunkrt_program_tests
	build/tsan/csrc/tests/chunkrt_program_tests

test-sanitize-python:
	$(SANITIZED) -m pytest -p no:cacheprovider -o faulthandler_timeout=1200 tests/backends/test_native_*.py

docs: $(VENV)/.package $(VENV)/.docs ## build the documentation site in build/site/VERSION; broken links are errors
	$(BIN)/python -P docs/site/options.py > build/options.md && cp build/options.md docs/options.md
	$(BIN)/python -P docs/site/families.py > build/families.md && cp build/families.md docs/families.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: sanitized ## mutate files of all formats for MINUTES=60, under sanitizers
	$(SANITIZED) tests/fuzz/campaign.py $(MINUTES)

sanitized: $(VENV)/.package $(VENV)/.test
	$(CMAKE) -S . -B build/asan -G Ninja -DCHUNKRT_SANITIZE=address,undefined \
	  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python"
	$(CMAKE) --build build/asan --target all chunkrt_tests --parallel $(JOBS)
	rm -rf build/asan/package && mkdir build/asan/package && cp -R $(SITE_PACKAGES)/chunkrt build/asan/package
	rm build/asan/package/chunkrt/_native.* # CMake would keep a file of the same second as its own
	$(CMAKE) --install build/asan --prefix build/asan/package/chunkrt

clean: ## remove the virtual environments and all build results
	rm -rf $(VENV) build *.egg-info

define CHECK_PYTHON
import os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit(f"$(PYTHON) is Python {sys.version.split()[0]}, 3.11 or later is needed; choose one with make PYTHON=...")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("$(PYTHON) has no Python.h to build the native module with; on Debian: apt-get install python3-dev")
endef
export CHECK_PYTHON

# Upgrade pip: a new version takes half the time of an old one.
$(VENV)/.created:
	@$(PYTHON) -c "$$CHECK_PYTHON"
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	@touch $@

$(VENV)/.build: $(VENV)/.created pyproject.toml
	$(call install_requirements,root["build-system"]["requires"])
	@touch $@

$(VENV)/.wheel: $(VENV)/.build $(PACKAGE_SOURCES)
	rm -rf build/lib* build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	@touch $@

$(VENV)/.dependencies: $(VENV)/.build
	$(call install_requirements,root["project"]["dependencies"] + root["project"]["optional-dependencies"]["compile"])
	@touch $@

$(VENV)/.package: $(VENV)/.wheel $(VENV)/.dependencies
	$(PIP) install --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

$(VENV)/.test: $(VENV)/.dependencies
	$(call install_extras,test qnn plot mpi serve structured)
	@touch $@

# Compile the modules that all workers import, once. Errors are ignored here, since workers report them.
$(VENV)/.compiled: $(VENV)/.package $(VENV)/.test
	@$(BIN)/pytest --collect-only --quiet >/dev/null || true
	@touch $@

$(VENV)/.wheels $(VENV)/.windows $(VENV)/.docs: $(VENV)/.%: $(VENV)/.build
	$(call install_extras,$*)
	@touch $@

$(VENV)/.lint $(VENV)/.slow: $(VENV)/.%: $(VENV)/.test
	$(call install_extras,$*)
	@touch $@

build/parity/.installed:
	$(PYTHON) -m venv build/parity
	$(PARITY_BIN)/pip --disable-pip-version-check --quiet install torch==2.13.0 transformers==5.23.0 safetensors gguf
	@touch $@
