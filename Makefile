# `make` lists the targets. The environment lives in .venv and is made on first use; where packages
# come from (mirror, CPU or CUDA wheels) is left to pip's own configuration.

# Candidates in order of preference; PYTHON=... on the command line replaces both.
PYTHON ?= python3.11 python3
TORCH := torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
# Files of tests at a time, in the order of conftest.py; each has processes of its own.
JOBS ?= 2
AT_A_TIME := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Other versions of torch that pyproject.toml allows, and tests of what is private or new in one of them.
TORCHES ?= 2.11.0 2.14.1 2.15.0
TORCH_TESTS ?= public fake_cuda transforms trace kernels combining checkpoint recorded masks blocks plan_memory \
  generated plan_divide plan_fsdp metp_styles metp_attention metp_feed_forward mesh recipe pool agreement whereabouts \
  dealing sdpa schedule styles dtensor compile equivalence
# The oldest packages of models that pyproject.toml allows, each laid over .venv for its tests.
OLDEST ?= transformers-5.19.0 diffusers-0.41.0
transformers_TESTS := transformers trainer peft recipe_hf
diffusers_TESTS := diffusers
# Material announces its successor at every build unless it is told not to.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

.DEFAULT_GOAL := help
# Both stamps fill the same .venv, and the checks of `test` should stop at the first failure.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo docs titan gpu test test-all test-random test-fast torches oldest mutants format lint clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: .venv/stamp-recipes  ## train on bytes (TEXT=file for your own, DEMO_ARGS=... for options)
	$(BIN)/python -m recipes.train_bytes demo $(if $(TEXT),--text '$(TEXT)') $(DEMO_ARGS)

# Where the extra `dev` is installed, which has all of `torchtitan`, nothing else need be.
titan: $(firstword $(wildcard .venv/stamp-dev) .venv/stamp-torchtitan)  ## train torchtitan's Llama 3 on 2 x 2 ranks (TITAN_ARGS=... for options)
	$(BIN)/torchrun --nproc-per-node 4 --local-ranks-filter 0 -m recipes.torchtitan --config llama3_debugmodel \
	  --parallelism.context_parallel_degree 4 --parallelism.context_parallel_team 2$(if $(TITAN_ARGS), $(TITAN_ARGS))

test: lint  ## every check, and the tests of every day, stopping at the first failure; see docs/testing.md
	$(BIN)/python -m pytest $(AT_A_TIME) $(PYTEST)

test-all: lint  ## all tests, matrices whole and twelve times the examples; what runs on threads on processes as well
	$(BIN)/python -m pytest $(AT_A_TIME) --whole $(PYTEST)
	$(BIN)/python -m pytest $(AT_A_TIME) --processes $(PYTEST)

# One round of all properties after the other, of which the last begins within MINUTES.
test-random: .venv/stamp-dev  ## properties with examples never tried, until one fails (MINUTES=n, PYTEST=... for arguments)
	@end=$$(($$(date +%s) + 60 * $(or $(MINUTES),0))); \
	while [ -z "$(MINUTES)" ] || [ "$$(date +%s)" -lt "$$end" ]; do \
	  $(BIN)/python -m pytest --hypothesis-profile=random -m hypothesis -q -x $(PYTEST) || exit 1; \
	done

test-fast: .venv/stamp-dev  ## the quick tests only
	$(BIN)/python -m pytest -m "not slow and not ranks" -q -x

torches: $(TORCHES:%=.venvs/torch-%/stamp)  ## tests of private APIs on other versions of torch (TORCHES="2.15.0", TORCH_TESTS="trace")
	@failed=; for torch in $(TORCHES); do \
	  echo "torch $$torch"; \
	  PYTHONPATH=. .venvs/torch-$$torch/bin/python -m pytest $(AT_A_TIME) -p no:cacheprovider $(PYTEST) \
	    $(TORCH_TESTS:%=tests/test_%.py) || failed="$$failed $$torch"; \
	done; [ -z "$$failed" ] || { echo "make: tests failed on torch$$failed" >&2; exit 1; }

oldest: .venv/stamp-dev $(OLDEST:%=.venvs/%/stamp)  ## tests of models on the oldest transformers and diffusers (OLDEST="diffusers-0.41.0")
	@failed=; $(foreach one,$(OLDEST),echo $(one); PYTHONPATH=$(CURDIR)/.venvs/$(one):$(CURDIR) $(BIN)/python -m pytest \
	  $(AT_A_TIME) -p no:cacheprovider $(PYTEST) $($(firstword $(subst -, ,$(one)))_TESTS:%=tests/test_%.py) || \
	  failed="$$failed $(one)"; ) [ -z "$$failed" ] || { echo "make: tests failed on$$failed" >&2; exit 1; }

mutants: .venv/stamp-dev  ## break the code line by line and see tests fail (MUTANTS="--sample 10", "--only word")
	$(BIN)/python -m tests.mutants $(MUTANTS)

gpu: .venv/stamp-recipes  ## what only a GPU can show, on one, in MINUTES=20 (GPU_ARGS="--device cpu" tries it)
	@end=$$(($$(date +%s) + 60 * $(or $(MINUTES),20))); \
	$(BIN)/python -m tests.gpu $(GPU_ARGS) --seconds $$((end - $$(date +%s))); checks=$$?; \
	$(BIN)/python -m recipes.benchmarks.gpu $(GPU_ARGS) --seconds $$((end - $$(date +%s))) && exit $$checks

docs: $(firstword $(wildcard .venv/stamp-dev) .venv/stamp-docs)  ## serve the documentation on http://127.0.0.1:8000
	$(MKDOCS) serve

format: .venv/stamp-dev  ## rewrite the sources: ruff format and its safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: .venv/stamp-dev  ## every check but the tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/python -m tests.lint_comparisons
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-logo
	$(BIN)/pydoclint wallfacer_dt
	$(BIN)/codespell
	$(MKDOCS) build --strict

clean:  ## remove caches and build outputs; .venv, .venvs and runs/ stay
	rm -rf build dist *.egg-info .*_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/stamp-EXTRA: this package and its EXTRA are installed. A .venv that works is kept, so that a
# torch already in it (CPU or CUDA) stays. Torch comes first, alone: whichever wheel that picks
# satisfies the pin in the second step, which therefore leaves it be. pydoclint's fork of docstring_parser
# and the original, which torchtitan's tyro brings, are files of one name; the fork serves both and comes last.
.venv/stamp-%: pyproject.toml constraints.txt
	@if ! { $(BIN)/python $(IS_NEW_ENOUGH) && $(BIN)/python -m pip --version; } >/dev/null 2>&1; then \
	  for python in $(PYTHON); do \
	    $$python $(IS_NEW_ENOUGH) 2>/dev/null && exec $$python -m venv --clear .venv; \
	  done; \
	  echo "make: Python >= 3.11 is needed, none found as: $(PYTHON); try make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi
	@echo "Installing into .venv (the first time this can take minutes) ..."
	@$(PIP) $(TORCH) setuptools
	@$(PIP) --no-build-isolation -e '.[$*]'
	@$(if $(filter dev,$*),$(PIP) --force-reinstall --no-deps docstring_parser_fork)
	@touch $@

.venvs/transformers-%/stamp .venvs/diffusers-%/stamp:
	@echo "Installing into $(@D) ..."
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --target $(@D) \
	  $(subst -,==,$(notdir $(@D)))
	@touch $@

# Of torch and the triton that belongs to it, whatever version it is, constraints.txt says nothing here.
.venvs/torch-%/stamp: pyproject.toml constraints.txt
	@echo "Installing torch $* into $(@D) (minutes) ..."
	@for python in $(PYTHON); do $$python $(IS_NEW_ENOUGH) 2>/dev/null && exec $$python -m venv --clear $(@D); done; exit 1
	@grep -Ev '^(torch|triton|setuptools)==' constraints.txt >$(@D)/constraints.txt
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c $(@D)/constraints.txt torch==$* triton numpy \
	  expecttest hypothesis pytest pytest-xdist matplotlib rich typer
	@touch $@
