# quickstart  learn to repair real code here, in minutes: sets up .venv first, resumes an unfinished run
# test        all tests but the slow ones        check  lint, layers, types, architecture
# bench       benchmarks, into bench-results/; TRL=, VLLM=, MINI=, VERIFIERS=PYTHON name the peers' own
#             nano  make the shipped model anew (hours; resumable)
#
# PYTHON=python3.12 chooses the interpreter for .venv; pip's own variables (PIP_INDEX_URL, ...) are honoured.
# ARGS="rl.seed=1 eval.k=2" gives the quickstart other dials.

PYTHON ?= python3
VENV := .venv
# wall_s of a run counts from here
export ETUDE_STARTED := $(shell date +%s)
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt .ci/setup | cksum | cut -d ' ' -f 1)

.PHONY: quickstart test check bench nano setup
.DEFAULT_GOAL := quickstart

quickstart: $(READY)
	@$(VENV)/bin/etude quickstart $(ARGS)

test: $(READY)
	$(VENV)/bin/pytest -m "not slow" -n 2 --dist loadfile

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest tests/test_architecture.py

bench: $(READY)
	@mkdir -p bench-results
	$(VENV)/bin/python benchmarks/sandbox.py --json bench-results/sandbox.json
	$(VENV)/bin/python benchmarks/engine.py --json bench-results/engine.json $(if $(VLLM),--vllm $(VLLM))
	$(VENV)/bin/python benchmarks/harness.py --json bench-results/harness.json $(if $(MINI),--mini $(MINI)) $(if $(VERIFIERS),--verifiers $(VERIFIERS))
	$(VENV)/bin/python benchmarks/serve.py --json bench-results/serve.json
	$(if $(TRL),$(VENV)/bin/python benchmarks/rl_step.py --json bench-results/rl_step.json --trl $(TRL))

nano: $(READY)
	$(VENV)/bin/etude tasks functions
	$(VENV)/bin/etude tasks build functions=functions.jsonl.zst
	$(VENV)/bin/etude pretrain
	$(VENV)/bin/etude sft tasks=repair.tasks.zst/base

setup: $(READY)

$(READY):
	@sh .ci/setup "$(PYTHON)" "$(VENV)" "$@"
