# `make train` and `make test` do all of their own set-up in .venv; the second time they start at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
# Python compiles what it imports: compiling all that is installed takes pip twice as long. It must keep the bytecode,
# or each process of the tests compiles PyTorch's sources again, for eight seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)
# Test processes; each runs torch on one thread. A file's tests run in one of them, because they share fixtures that take
# a minute and processes that serve as ranks. Folders with slow files come first, small files fill the end.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m $(RUN) pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
CONFIG ?= train_configs/llama3_debug.toml
# One of `quaver bench`'s.
BENCH ?= linear
ARGS ?=
# Its tools are in an environment of their own.
WHEEL := $(VENV)/wheel
# The oldest and the newest PyTorch that the tests pass on; constraints.txt has the one in between.
TORCHES := 2.11.0 2.15.0

# torch throws C++ exceptions, which AddressSanitizer must find in libstdc++ when it is loaded.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
SANITIZED := $(VENV)/sanitized
PRELOAD = $(shell gcc -print-file-name=libasan.so):$(shell gcc -print-file-name=libstdc++.so)

.PHONY: train test minutes coverage sizes nightly sanitize lint docs wheel bench gpu clean help

help:
	@echo "make train   set up, train a small Llama in float8 and in bfloat16 on real text, compare and plot"
	@echo "make test    set up, run the tests"
	@echo "make minutes run the tests, print the minutes of each folder and the slowest files and tests"
	@echo "make coverage run the tests, print the share of each file's lines that they run; before Python 3.12 slowly"
	@echo "make sizes   print the lines of each folder of the package and of the tests"
	@echo "make nightly run the tests of the widest products of parameters, and test-torch-$(firstword $(TORCHES)) and -$(lastword $(TORCHES))"
	@echo "make test-torch-VERSION  run the tests on that PyTorch, in a virtual environment of its own (6 GB on Linux)"
	@echo "make sanitize run the tests of the kernels with the C extension under AddressSanitizer and UBSan (gcc)"
	@echo "make lint    set up, check style, types and layers"
	@echo "make docs    set up, build the documentation as a site in build/site, check its links"
	@echo "make wheel   build the sdist and from it the wheels with and without the extension; check and try them"
	@echo "make bench   set up with torchao, time one linear against bfloat16 and torchao; BENCH=cast or another of"
	@echo "             quaver bench's for that one"
	@echo "make gpu     measure on this machine's quiet GPU, then run the GPU tests, 14 minutes at most (installs nothing);"
	@echo "             ARGS=quiet, ARGS=tests or parts by name; ARGS=\"--dry quiet\" tries it on a CPU"

train: $(VENV)/.base
	$(BIN)/quaver train $(CONFIG) --compare $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) $(ARGS)

minutes: $(VENV)/.dev
	$(PYTEST) --junitxml=$(VENV)/tests.xml $(ARGS)
	$(BIN)/python tools/minutes.py $(VENV)/tests.xml

# From Python 3.12 on sys.monitoring counts lines at no cost; the tracer before it takes half as long again.
coverage: RUN = coverage run -m
coverage: $(VENV)/.dev
	rm -rf build/coverage
	COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
		$(PYTEST) $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

sizes:
	@$(PYTHON) tools/sizes.py

nightly: $(VENV)/.dev sanitize wheel $(TORCHES:%=test-torch-%)
	$(PYTEST) -m nightly $(ARGS)

test-torch-%: $(VENV)/torch-%/constraints.txt
	$(MAKE) test VENV=$(VENV)/torch-$* CONSTRAINTS=$< ARGS="tests/library tests/lab -p no:warnings $(ARGS)"

.PRECIOUS: $(VENV)/torch-%/constraints.txt
$(VENV)/torch-%/constraints.txt: constraints.txt
	mkdir -p $(@D)
	sed 's/^torch==.*/torch==$*/' constraints.txt > $@

sanitize: $(VENV)/.dev
	rm -rf $(SANITIZED)
	mkdir $(SANITIZED)
	cp -r quaver tests setup.py pyproject.toml README.md LICENSE $(SANITIZED)
	rm -f $(SANITIZED)/quaver/_cpu*.so
	cd $(SANITIZED) && CC=gcc CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" \
		$(abspath $(BIN))/python setup.py -q build_ext --inplace
	ls $(SANITIZED)/quaver/_cpu*.so  # the extension is optional, so a build that fails is no error
	cd $(SANITIZED) && LD_PRELOAD=$(PRELOAD) ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONPATH=. OMP_NUM_THREADS=1 \
		$(abspath $(BIN))/python -m pytest tests/library/kernels $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.toml
	$(BIN)/lint-imports --no-cache

# A warning is an error: a link that leads nowhere, a page that is not in mkdocs.yml.
# Not with --quiet, under which mkdocs counts no warnings. The variable silences what mkdocs-material says of a future
# mkdocs.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "built build/site; to read it with search: $(BIN)/python -m http.server --directory build/site"

# The wheels are built from the sdist, so it has all that a build needs.
wheel: $(WHEEL)/.tools
	rm -rf dist build
	$(WHEEL)/bin/python -m build --sdist
	for extension in 1 0; do \
		QUAVER_EXTENSION=$$extension $(WHEEL)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/quaver-*.tar.gz \
			|| exit 1; \
	done
	$(WHEEL)/bin/twine check --strict dist/*
	$(WHEEL)/bin/check-wheel-contents dist/*.whl
	$(WHEEL)/bin/python tools/wheel.py dist $(WHEEL)/empty

$(WHEEL)/.tools:
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	touch $@

bench: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/quaver bench $(BENCH) $(ARGS)

gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

clean:
	rm -rf $(VENV) runs build dist

# .base, .dev, .docs and .bench each hold the set before them, so a rebuilt one never lacks a package. Those that come
# after .base leave its C extension as it is: pip would compile it again for each.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quaver needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# What continuous integration needs, by one call of pip instead of three.
$(VENV)/.ci: $(VENV)/bin/python pyproject.toml setup.py $(wildcard quaver/csrc/*) $(CONSTRAINTS)
	$(PIP) --editable '.[dev,docs]'
	touch $(VENV)/.base $(VENV)/.dev $(VENV)/.docs $@

$(VENV)/.base: $(VENV)/bin/python pyproject.toml setup.py $(wildcard quaver/csrc/*) $(CONSTRAINTS)
	@echo "installing quaver into $(VENV) (once)"
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	QUAVER_EXTENSION=0 $(PIP) --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	QUAVER_EXTENSION=0 $(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.bench: $(VENV)/.base
	QUAVER_EXTENSION=0 $(PIP) --editable '.[bench]'
	touch $@
