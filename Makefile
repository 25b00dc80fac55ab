# For a fresh machine with make and Python 3.10 or newer: `make setup`, `make demo` and `make test`.
# Another interpreter: `make demo PYTHON=python3.12`; another place for the environment: `VENV=...`.

PYTHON ?= python3
VENV ?= .venv
OUT ?= out
CASES ?= 20000
COVERAGE ?= $(OUT)/coverage.json
SEED ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
CAPTURING := $(VENV)/.capturing
TESTABLE := $(VENV)/.testable

# What the goals need is installed at once: pip would resolve and build for each of several installations.
EXTRAS := $(if $(filter test suite slow coverage fuzz lint docs ledger $(TESTABLE),$(MAKECMDGOALS)),[dev],\
	$(if $(filter setup demo $(CAPTURING),$(MAKECMDGOALS)),[capture]))
# Not by pip, which compiles every file to bytecode, one after the other: tests of packages, models and servers that
# nothing here imports are more than a third of them.
INSTALL = $(PIP) install -qq --no-compile -c constraints.txt -e '.$(1)' && { \
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib || true; }
UNUSED = /tests?/|/torch/testing/_internal/|/transformers/models/|/ray/(rllib|data|serve|tune|train|llm)/|/fontTools/

.DEFAULT_GOAL := help
.PHONY: help setup demo test suite slow coverage newest fuzz lint check costs loops pieces bench docs ledger dist clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

setup: $(CAPTURING)  ## create the virtual environment and install foretrace into it, with PyTorch to record

demo: $(CAPTURING)  ## record a training step here, predict three that were never run, run them and compare
	@$(BIN)/python examples/demo.py --out $(OUT)/demo

# Each by itself, or at one time with -j2: the type check is of one process, beside which the tests leave no core idle.
test: lint check suite  ## linters, type check, the recorded traces' baseline and the tests but the slowest

# One process a core, so one thread a process. The commands that tests run in processes of their own find bytecode, which
# they would make anew each time where Python is asked to keep none. Assertions that say what they compared would be
# compiled by each process, for 16 s: tests that failed run once more, to say it. Real steps are recorded on a machine that
# others may use: where at most two tests failed and pass alone, both outputs stay and the suite passes. Tests marked slow,
# 374 of 5,679, run by themselves.
suite: $(TESTABLE)
	@$(BIN)/python -m compileall -q -j 0 foretrace tracer kernel_models graph_predictor step_views planner tests
	@rm -f .pytest_cache/v/cache/lastfailed
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder \
		--assert=plain -m 'not slow' || { test $$? = 1 && failed=$$(grep -c true .pytest_cache/v/cache/lastfailed) && \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --last-failed -m 'not slow' && test $$failed -le 2 && \
		echo "$$failed failed beside others, as said above, and passed alone."; }

# The lines that only a GPU runs are looked for here: the tests in which they show take ten minutes of a core once more.
slow: $(TESTABLE)  ## the slowest tests: campaigns and calibrations that are killed and resumed, compiled workloads
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow
	@$(PIP) install -qq -c constraints.txt coverage
	$(BIN)/python ci/gpu_lines.py --check

# In one process, half an hour of a core. Two commits are compared by `ci/branches.py`.
coverage: $(TESTABLE)  ## the branches that the tests take, into a file: make coverage COVERAGE=after.json
	@$(PIP) install -qq -c constraints.txt slipcover
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m slipcover --branch --json --out $(COVERAGE) \
		--source foretrace,planner,step_views,graph_predictor,kernel_models,tracer \
		-m pytest -q -p no:cacheprovider --assert=plain -m 'not slow' --ignore=tests/fuzz

newest:  ## captures, calibrations and a campaign with the newest releases of all packages, in an environment of their own
	$(PYTHON) ci/newest.py $(if $(TORCH),--torch $(TORCH))

# Other inputs each time; `make fuzz SEED=7` makes the same again.
fuzz: $(TESTABLE)  ## damaged inputs and odd options through every command: make fuzz CASES=100000
	$(BIN)/python tests/fuzz/fuzz_run.py --cases $(CASES) $(if $(SEED),--seed $(SEED)) --out $(OUT)/fuzz

check: $(INSTALLED)  ## predict the recorded traces again: fails where a model got worse than traces/baseline.json
	$(BIN)/foretrace check traces

lint: $(TESTABLE)  ## ruff, import rules, ceilings of size and of long sentences, mypy
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python benchmarks/walks.py --check
	$(BIN)/python ci/plain_words.py --check
	$(BIN)/mypy

costs: $(INSTALLED)  ## ratios of what commands cost to what bounds it; fails where one is over its limit
	$(BIN)/python benchmarks/costs.py

loops: $(INSTALLED)  ## compile the inner loops for shipping, after a change of one of them
	$(BIN)/python ci/ship_loops.py

pieces: $(TESTABLE)  ## trace the suite's decoders by pieces for shipping, after a change of what tracing gives
	$(BIN)/python ci/ship_pieces.py

bench: $(INSTALLED)  ## what the command line costs to start; benchmarks/ has more, each says how to run it
	$(BIN)/python benchmarks/startup.py

docs: $(TESTABLE)  ## build the documentation site into out/site; a broken link or a warning fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q -d $(OUT)/site

ledger: $(TESTABLE)  ## run the accuracy benchmarks whose data is at hand, and write docs/accuracy.md
	$(BIN)/python benchmarks/ledger.py run

dist: $(INSTALLED)  ## build the wheel and the source distribution into dist/
	@$(PIP) install -qq -c constraints.txt build
	$(BIN)/python -m build --outdir dist .

clean:  ## remove the environment, caches and outputs
	rm -rf $(VENV) $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Done once, and again when the dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'foretrace needs Python 3.10 or newer, and there is no $(PYTHON): name one with PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "foretrace needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): name another with PYTHON=..." >&2; exit 1; }
	@echo 'Installing foretrace into $(VENV), once ...'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		echo 'No virtual environment could be made: on Debian and Ubuntu install the package python3-venv' >&2; rm -rf $(VENV); exit 1; }
	@$(PIP) install -qq 'pip>=22.3'
	@$(call INSTALL,$(strip $(EXTRAS)))
	@touch $@
	@$(if $(findstring capture,$(EXTRAS)),touch $(CAPTURING))
	@$(if $(findstring dev,$(EXTRAS)),touch $(CAPTURING) $(TESTABLE))

# The demo captures real training runs, which needs PyTorch.
$(CAPTURING): $(INSTALLED)
	@test $@ -nt $< || { echo 'Installing PyTorch, which records, once ...' && $(call INSTALL,[capture]); }
	@touch $@

# So do the tests.
$(TESTABLE): $(INSTALLED)
	@test $@ -nt $< || { echo 'Installing what the tests need, PyTorch among it, once ...' && $(call INSTALL,[dev]); }
	@touch $@
