# Every target sets itself up: a virtual environment in .venv, pinned packages, the project itself (editable).
# Needed on the machine: make and Python 3.11 or newer. `make` alone lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Build backend and packages come from the pins; nothing is resolved freely. Twice quiet: errors only.
INSTALL := $(PIP) install --quiet --quiet --no-build-isolation --constraint constraints.txt
# Test processes: one per core, at most this many (each may load torch). A file is run by one of them: its tests share
# what they compile and build. Files come in the order of tests/conftest.py.
JOBS   ?= 8
PARALLEL := -n auto --maxprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# converters/ and kernels/ lie in the root: with this, Python never takes them for top-level packages.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: each would compile every module of the project again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-llm test portable test-gpu test-gpu-sanitizer check lint types imports c-reader kernels-check wheel release install-check docs \
    report-page matrix bench fuzz soak peers soak-emulated clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.core  ## convert a small GPTQ model, prove the way back, read it, break it, say what happened
	@$(BIN)/bcqfmt demo

demo-llm: $(VENV)/.test  ## SmolLM2 from PyPI: GGUF to BCQ and back, to GPTQ and back, prove it, generate text
	@$(BIN)/python docs/examples/demo_llm.py

test: $(VENV)/.test  ## the whole test suite (PYTEST_ARGS=... adds options)
	@$(BIN)/pytest $(PARALLEL) $(PYTEST_ARGS)

# Tests of code that depends on the processor, and the test that asks every library what it uses of it.
PORTABLE := tests/format tests/converters tests/methods tests/quantize/test_dense.py \
    tests/kernels/cpu \
    tests/architecture/test_portable.py
portable: $(VENV)/.test  ## format, converters, methods and CPU kernels as if the processor had no extensions
	@$(BIN)/python tests/install/portable.py $(PARALLEL) $(PORTABLE) $(PYTEST_ARGS)

check: lint types imports c-reader kernels-check install-check docs report-page  ## everything that is not a test: linters, types, import rules, wheel, docs
	@echo "check: all passed"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

c-reader: $(VENV)/.test  ## the C reader under sanitizers, on all vectors (needs a C compiler)
	@$(BIN)/pytest -m "cc and not soak" tests/c_reader tests/fuzz $(PARALLEL) -q

kernels-check: $(VENV)/.dev  ## every CUDA kernel to machine code without a GPU; registers and spills
	@$(BIN)/python tests/kernels/compile_check.py

test-gpu: $(VENV)/.dev  ## the kernels on the GPU of this machine
	@$(BIN)/pytest tests/gpu $(PYTEST_ARGS)

SANITIZED := never_followed or operator_and_direct_call or (first_planes and -2]) or of_every_engine or matrix_of_codes
# Without torch's cache every tensor is an allocation of its own: nothing beside it can be touched unnoticed.
test-gpu-sanitizer: $(VENV)/.dev  ## every operator and wrong indices under compute-sanitizer, which has to be in PATH
	@for tool in "memcheck --report-api-errors no" synccheck racecheck initcheck; do \
	    echo "compute-sanitizer: $$tool"; \
	    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
	        $(BIN)/pytest tests/gpu -k "$(SANITIZED)" $(PYTEST_ARGS) || exit 1; \
	done

wheel: $(VENV)/.dev  ## source archive and wheel in dist/, reproducible, contents checked
	@$(BIN)/python tests/install/release.py build dist
	$(BIN)/check-wheel-contents dist/*.whl

release: check test  ## checks and tests, then: built twice and compared, installed, signed, uploaded (docs/releasing.md)
	@$(BIN)/python tests/install/release.py publish dist

install-check: wheel  ## wheel and source archive into a clean environment, also from a clone without symlinks
	@$(BIN)/python tests/install/clean_install.py dist

report-page: $(VENV)/.test  ## reports in headless Chromium, light and dark, wide and narrow (where it is installed)
	@$(BIN)/pytest -m soak tests/docs/test_screenshots.py -q

matrix:  ## the core's tests on every Python from 3.11 to 3.13 that this machine has
	@tests/install/matrix.sh

docs: $(VENV)/.dev  ## the documentation site in docs/_build/html, warnings are errors
	$(BIN)/sphinx-build -W --keep-going -E -q -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

bench: $(VENV)/.test  ## measure the figures in docs/benchmarks (BENCH_ARGS=... adds options)
	@$(BIN)/python tests/benchmarks/run.py $(BENCH_ARGS)

TIME ?= 600
fuzz: $(VENV)/.test  ## all readers on mutated inputs, side by side, on all cores (TIME=600 seconds; needs a C compiler)
	@$(BIN)/python tests/fuzz/run.py --time $(TIME) --out fuzz.json

soak: $(VENV)/.soak $(VENV)/signing/.ready  ## the long runs
	@MODEL_SIGNING=$(CURDIR)/$(VENV)/signing/bin/model_signing $(BIN)/pytest -m soak $(PYTEST_ARGS)

peers: $(VENV)/.test  ## exports into transformers, compressed-tensors, GPTQModel, AutoAWQ and llama.cpp, each in its environment; docs/peers.md
	@$(BIN)/python tests/peers/run.py $(PEERS_ARGS)

soak-emulated:  ## format and converters on an emulated processor of another architecture (needs qemu-user, mmdebstrap)
	@tests/soak/emulated.sh

clean:  ## remove what was built, keep the environment
	rm -rf build dist build.log *.egg-info docs/_build docs/_generated .pytest_cache .mypy_cache .ruff_cache \
	    .import_linter_cache .hypothesis .coverage htmlcov
	find bcqfmt converters kernels spec tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove the environment too
	rm -rf $(VENV)

# ------------------------------------------------------------------ set-up, repeated only when the pins change
TOO_OLD := bcqfmt needs Python 3.11 or newer, and found none. Install one, then: make PYTHON=/path/to/python3.11 ...
NO_VENV := This Python cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv

$(BIN)/python:
	@for candidate in "$(PYTHON)" python3 python3.13 python3.12 python3.11; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        found="$$candidate"; break; \
	    fi; \
	done; \
	if [ -z "$$found" ]; then echo "$(TOO_OLD)" >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$("$$found" --version) (once)" >&2; \
	"$$found" -m venv --clear $(VENV) || { rm -rf $(VENV); echo "$(NO_VENV)" >&2; exit 1; }

$(VENV)/.tools: constraints.txt | $(BIN)/python
	@$(PIP) install --quiet --quiet --constraint constraints.txt pip setuptools
	@touch $@

$(VENV)/.core: pyproject.toml constraints.txt $(VENV)/.tools
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.tools
	@echo "installing the project and what its tests need (once)" >&2
	@$(INSTALL) --editable ".[test]"
	@touch $(VENV)/.core $@

$(VENV)/.soak: pyproject.toml constraints.txt $(VENV)/.tools
	@$(INSTALL) --editable ".[test,ray]"
	@touch $(VENV)/.core $(VENV)/.test $@

# it brings 25 packages of its own: they stay apart
$(VENV)/signing/.ready: constraints.txt | $(BIN)/python
	@$(BIN)/python -m venv --clear $(VENV)/signing
	@$(VENV)/signing/bin/python -m pip install --quiet --quiet --constraint constraints.txt model-signing pyopenssl
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.tools
	@echo "installing the project and its development tools (once)" >&2
	@$(INSTALL) --editable ".[dev]"
	@touch $(VENV)/.core $(VENV)/.test $@
