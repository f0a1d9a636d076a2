# Everything a newcomer runs. Each target sets up what it needs, in .venv, and a second run reuses it.
#
# Where nothing may be installed (a GPU machine with its own torch), use that Python as it is:
#     make test-gpu PYTHON=python3 VENV=
# Where there is no git either, say which revision runs:
#     make test-gpu PYTHON=python3 VENV= COMMIT=$SHA DIRTY=no
# Where pip should choose other versions than the tested ones: make CONSTRAINTS= ...

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=
# Whose implementation `make grade` and `make course-tests` judge.
ADAPTERS ?= tests/adapters.py
GRADE_ARGS ?=
# Processes that `make test` spreads the test files over; one where it is empty, as pytest-xdist may be missing there.
TEST_PROCESSES ?= $(if $(strip $(VENV)),3)
# Processes a GPU that `make test-gpu` runs; empty: one after the other, in one process.
GPU_PROCESSES ?=
GPU_RECORD ?= results/nvidia-h200/tests.jsonl
SM90_TRITON ?= 3.6.0
# Where torch comes from: on Linux without an NVIDIA GPU PyTorch's CPU builds, 0.2 GB to download in place of 3. Empty:
# pip's own index.
TORCH_INDEX ?= $(if $(filter Linux,$(shell uname -s)),$(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),,$(CPU_BUILDS)))
WITH_TRANSFORMERS := -e '.[lab,hf]' # a comma within $(if) would begin its second half
CPU_BUILDS := https://download.pytorch.org/whl/cpu
NEWEST_TORCH ?= 2.15.0

# Revision and state of the code under test, empty without git; the results that a run writes do not make it dirty.
COMMIT ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null)
DIRTY ?= $(shell changes=$$(git status --porcelain --untracked-files=no -- . ':!results' 2>/dev/null) && \
    { test -n "$$changes" && echo yes || echo no; })

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH=. $(PYTHON)
STAMP :=
else
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
endif

CHECK_PYTHON = command -v $(PYTHON) >/dev/null || \
    { echo "error: no $(PYTHON): install Python 3.11 or later, or set PYTHON" >&2; exit 1; }; \
    $(PYTHON) tools/check_python.py

# the requirement as pyproject.toml has it: torch>=...,<...
TORCH = $(shell sed -n 's/^ *"\(torch[>=<][^"]*\)",$$/\1/p' pyproject.toml)
# torch alone: what it needs comes with the installation that follows, which keeps any build of the right version.
TORCH_FIRST = if [ -n "$(TORCH_INDEX)" ] && ! $(@D)/bin/python -c "import torch" 2>/dev/null; then \
    echo "no NVIDIA GPU here: taking torch's CPU build (make TORCH_INDEX= takes pip's default)"; \
    $(@D)/bin/python -m pip install --quiet --no-compile --no-deps --retries 1 --timeout 15 --index-url $(TORCH_INDEX) \
        $(addprefix -c ,$(CONSTRAINTS)) '$(TORCH)' || \
    echo "$(TORCH_INDEX) could not be used: taking the torch of pip's own index"; fi

# Python keeps what it has compiled, or every process of a test compiles its imports again: five seconds each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv test test-slow test-newest test-hf test-hf-slow test-gpu sanitize report book lint notebooks notebooks-check grade course-tests fuzz check-wheel sm90-venv spills ptx clean

help: ## list the targets
	@awk -F ':[^#]*## ' '/^[a-z0-9-]+:[^#]*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## build the environment, once

ifneq ($(STAMP),)
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(CHECK_PYTHON)
	test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	@$(TORCH_FIRST)
	$(@D)/bin/python -m pip install --quiet --no-compile $(addprefix -c ,$(CONSTRAINTS)) -e '.[lab,dev,notebooks]'
	@touch $@
endif

test: $(STAMP) ## run the tests, name the stale GPU tests
	$(if $(TEST_PROCESSES),OMP_NUM_THREADS=1 )$(RUN) -m pytest -m 'not slow' \
	    $(addprefix --dist loadfile -n ,$(TEST_PROCESSES)) $(PYTEST_ARGS)

test-slow: $(STAMP) ## the tests that take long: whole runs, jobs of ranks, compilations
	$(if $(TEST_PROCESSES),OMP_NUM_THREADS=1 )$(RUN) -m pytest -m slow \
	    $(addprefix --dist load -n ,$(TEST_PROCESSES)) $(PYTEST_ARGS)

test-newest: ## the tests of the core with the newest torch and Triton, in .venv-newest (5 GB)
	@$(CHECK_PYTHON)
	test -x .venv-newest/bin/pip || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --no-compile torch==$(NEWEST_TORCH) -e '.[lab,dev]'
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -m 'not slow' $(addprefix --dist loadfile -n ,$(TEST_PROCESSES)) $(PYTEST_ARGS)

test-hf: $(STAMP) ## install Transformers, then test what integrates with it
	$(if $(STAMP),$(VENV)/bin/python -m pip install --quiet --no-compile $(addprefix -c ,$(CONSTRAINTS)) $(WITH_TRANSFORMERS))
	$(RUN) -m pytest -m 'not slow' tests/test_integrations.py tests/test_transformers_models.py \
	    tests/test_documents.py::test_the_script_for_transformers_trains_and_saves $(PYTEST_ARGS)

test-hf-slow: $(STAMP) ## with Transformers installed, walk all of its model classes
	$(RUN) -m pytest -m slow tests/test_transformers_models.py $(PYTEST_ARGS)

test-gpu: $(STAMP) ## on a GPU: run the GPU tests and record their outcomes
	@test -n "$(COMMIT)" -a -n "$(filter yes no,$(DIRTY))" || \
	    { echo "error: no git here: say which code runs with COMMIT=SHA DIRTY=yes or DIRTY=no" >&2; exit 1; }
ifeq ($(strip $(GPU_PROCESSES)),)
	$(RUN) -m pytest -m gpu --gpu-record=$(GPU_RECORD) --gpu-commit=$(COMMIT) \
	    $(if $(filter yes,$(DIRTY)),--gpu-dirty,--gpu-clean) $(PYTEST_ARGS)
else
	$(RUN) tools/gpu_tests.py --processes $(GPU_PROCESSES) --record $(GPU_RECORD) --commit $(COMMIT) \
	    $(if $(filter yes,$(DIRTY)),--dirty,--clean) -- $(PYTEST_ARGS)
endif

sanitize: $(STAMP) ## on a GPU: run every shipped kernel configuration under compute-sanitizer
	@test -n "$(COMMIT)" -a -n "$(filter yes no,$(DIRTY))" || \
	    { echo "error: no git here: say which code runs with COMMIT=SHA DIRTY=yes or DIRTY=no" >&2; exit 1; }
	$(RUN) tools/sanitize.py --commit $(COMMIT) $(if $(filter yes,$(DIRTY)),--dirty,--clean)

report: $(STAMP) ## measure every problem on this machine, then write its tables and figures
	$(RUN) -m cs336_systems run --all
	$(RUN) -m cs336_systems report

book: $(STAMP) ## build the book, all pages and documents as a site: build/book/index.html
	$(RUN) tools/make_book.py

lint: $(STAMP) ## ruff, mypy, and how easy the package is to read
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check cs336_systems tests tools
	$(RUN) tools/house.py
	$(RUN) -m mypy

notebooks: $(STAMP) ## open the notebooks in Jupyter
	$(RUN) -m jupyterlab notebooks

notebooks-check: $(STAMP) ## execute every notebook without a browser
	$(RUN) tools/check_notebooks.py

grade: $(STAMP) ## grade an implementation: ADAPTERS=path/to/adapters.py GRADE_ARGS='--edition 2026'
	@$(RUN) -m cs336_systems grade "$(ADAPTERS)" $(GRADE_ARGS)

course-tests: $(STAMP) ## run the course's own tests: DIR=path/to/assignment2-systems ADAPTERS=path/to/adapters.py
	$(if $(STAMP),@$(RUN) -c "import einops; import einx" 2>/dev/null || $(RUN) -m pip install --quiet --no-compile einops einx)
	@$(RUN) tools/course_tests.py "$(DIR)" "$(ADAPTERS)"

fuzz: $(STAMP) ## the tests that draw their cases, ten times as many: attention against the oracle, masks
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m hypothesis --hypothesis-profile=fuzz \
	    $$(grep -l '^from hypothesis import' tests/test_*.py) $(PYTEST_ARGS)

check-wheel: $(STAMP) ## build the wheel, install it elsewhere, use it with and without Triton
	$(RUN) tools/check_wheel.py

sm90-venv: .venv-sm90/.stamp-$(SM90_TRITON) ## an environment with the GPU machines' Triton, to compile offline

.venv-sm90/.stamp-$(SM90_TRITON):
	@$(CHECK_PYTHON)
	test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile $(addprefix -c ,$(CONSTRAINTS)) -e '.[lab]' pytest hypothesis
	$(@D)/bin/python -m pip install --quiet --no-deps triton==$(SM90_TRITON)
	@touch $@

spills: sm90-venv ## compile the shipped Hopper kernels: a new spill, or tensor cores that wait, fail
	OMP_NUM_THREADS=1 .venv-sm90/bin/python -m pytest -q tests/test_tune.py tests/test_launching.py tests/test_hopper_reports.py -k 'spill or nor_wait or cores_wait'

ptx: sm90-venv ## compile the shipped kernels: whether their PTX is still what the GPU tests ran
	.venv-sm90/bin/python -m tests.ptx $(PTX_ARGS)

clean: ## remove the environments and caches; records and reports stay
	rm -rf .venv .venv-sm90 cs336_systems.egg-info .pytest_cache .mypy_cache .ruff_cache
	find cs336_systems tests tools notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
