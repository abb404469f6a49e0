# One command each; `make help` lists them. Needs Python >= 3.11, make and a C++ compiler, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := demo-models
HOSTILE := tests/server/test_hostile.py tests/server/test_fuzz.py tests/server/test_log_privacy.py tests/e2e/test_fuzz.py tests/config/test_malformed.py
# Tests of engines and whole servers: after the others, so that what needs no engine fails within minutes.
BUSY   := tests/e2e tests/engine tests/gpu_kit tests/integration tests/sglang_patches tests/supervisor
KERNEL := $(shell find csrc -type f 2>/dev/null)
# The installation lists packages: a module that became one is found after the next.
PACKAGES := $(shell find prism sglang_patches -name __init__.py)

# Many container images forbid Python to keep what it compiled: each process of a server would compile all it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install serve demo check format test storm hostile contracts explore test-slow test-net sanitize compiled bench clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(VENV)/.installed ## create .venv, install pinned versions, build csrc/kvcached

# uv resolves and installs in seconds what pip needs minutes for; the lock file names versions only. It compiles nothing:
# the last step leaves compiled modules behind, for processes that may not, and ends with an error where engines cannot run.
$(VENV)/.dependencies: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.11" or 0)'
	@test -x $(BIN)/uv || { echo "[1/4] creating $(VENV)"; $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q uv; }
	@echo "[2/4] installing pinned packages (about 9 GB on disk, most of it CUDA libraries of torch)"
	@$(BIN)/uv pip install -r requirements.lock
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies pyproject.toml $(KERNEL) $(PACKAGES)
	@echo "[3/4] building csrc/kvcached"
	@$(BIN)/uv pip install --no-build-isolation --no-deps -e .
	@echo "[4/4] importing what engines import, once: starts take half the time then"
	@mkdir -p build
	@$(BIN)/python -m compileall -q prism sglang_patches
	@$(BIN)/python -c 'from prism.engine import boot; boot.boot("host")' > build/imports.log 2>&1 || { cat build/imports.log; exit 1; }
	@touch $@

demo: $(DEMO)/.complete ## create the three random-weight demo models

$(DEMO)/.complete: scripts/make_demo_models.py | install
	@$(BIN)/python scripts/make_demo_models.py $(DEMO) && touch $@

serve: demo ## serve the demo models on http://127.0.0.1:8000
	@$(BIN)/prism-serve examples/quickstart.yaml

check: install ## format, lint, types and import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file tests/mypy.ini
	@$(BIN)/lint-imports

format: install ## rewrite the sources in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

test: demo ## the tests (about 15 minutes on two cores)
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(BUSY:%=--ignore=%)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --durations=15 $(BUSY)

test-slow: demo ## the long ones: every family, chaos, ten thousand at once, memory under pressure (about 30 minutes)
	@$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --durations=15

storm: install ## kill and stop processes of a real server under mixed load: make storm STORM="--seconds 600 --seed 7"
	@$(BIN)/python -m tests.e2e.storm $(STORM)

hostile: install ## files, packs, stores and requests made to do harm (tests marked hostile)
	@$(BIN)/python -m pytest -m "hostile and not net and not gpu"
	@$(BIN)/python -m pytest $(HOSTILE)

contracts: demo ## vLLM's and SGLang's own tests of OpenAI servers, fetched, against a server here: make contracts CONTRACTS="--suite vllm"
	@$(BIN)/python -m tests.contracts.run $(CONTRACTS)

explore: install ## property tests with examples that no run has seen (what fails becomes an @example)
	@PRISM_EXPLORE=1 $(BIN)/python -m pytest -m "hypothesis and not slow and not net and not gpu"

test-net: demo ## multi-host tests in network namespaces (needs root and iproute2; skipped with a reason otherwise)
	@$(BIN)/python -m pytest -m "net and not slow" -n 2 --maxschedchunk 1

sanitize: install ## the C++ core under AddressSanitizer, UBSan and ThreadSanitizer
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/sanitize.sh

compiled: install ## the simulator as C extensions in build/compiled, 2.5 times as fast (about 3 minutes): docs/sim.md
	@$(BIN)/python scripts/compile_simulator.py

bench: demo ## the short benchmarks, one after the other (about 10 minutes on a quiet machine)
	@for question in memory.slots memory.contention memory.ramp memory.idle memory.fragmentation memory.mapped scheduler.placement_time \
	  scheduler.admission_time scheduler.event_cost engine.activation server.front_door server.big_catalog e2e.added_latency \
	  weights.load_host weights.planning_time weights.catalog_start; do \
	  echo "== benchmarks.$$question"; $(BIN)/python -m benchmarks.$$question || exit 1; done

clean: ## remove everything that was built or started here
	rm -rf $(VENV) build $(DEMO) state .mypy_cache .ruff_cache .pytest_cache .hypothesis
