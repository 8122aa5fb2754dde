# `make demo` and `make test` start from nothing but Python 3.12 and make; both can be repeated.
VENV := .venv
BIN := $(VENV)/bin
# The shim of pyenv answers to the name without having the version, so each candidate is run.
PYTHON312 ?= $(shell for p in python3.12 "$$(uv python find 3.12 2>/dev/null)" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do \
	"$$p" -c 'import sys; assert sys.version_info[:2] == (3, 12)' 2>/dev/null && echo "$$p" && break; done)
STACK := $(VENV)/.stack-$(shell cksum pyproject.toml | cut -d' ' -f1)

# Which releases `make matrix` runs live.
CELLS ?= --ci
SPREAD := -m "not timing" --dist loadgroup --no-loadscope-reorder

.PHONY: demo grpo grpo-lora test check bench matrix clean

demo: $(STACK)
	@echo "== Which patches are needed here"
	$(BIN)/ultra-patches status
	@echo "== Each defect on the installed upstream, without and with its patch"
	$(BIN)/ultra-patches verify
	@echo "== A real vLLM engine takes new weights and gives them back"
	@rm -rf $(VENV)/.run
	ULTRA_PATCHES_RUN_DIR=$(CURDIR)/$(VENV)/.run $(BIN)/python -W ignore -m examples.weight_update_session
	@echo "== Every process of that engine, and whether they have the same patches"
	$(BIN)/ultra-patches status --run-dir $(VENV)/.run
	@echo "== GRPO: Megatron trains, vLLM generates, and the weights go between them"
	@rm -rf build/grpo/run
	$(MAKE) grpo

# Under ten minutes on two cores. `make grpo ARGS=grpo.steps=20` overrides; a run that was stopped goes on.
grpo: $(STACK) build/grpo/train.jsonl
	$(BIN)/python -W ignore -m examples.grpo.train examples/grpo/cpu.yaml $(ARGS)

# LoRA on the model as it is after the supervised steps.
grpo-lora: $(STACK) build/grpo/base/config.json
	$(BIN)/python -W ignore -m examples.grpo.train examples/grpo/cpu_lora.yaml $(ARGS)

build/grpo/base/config.json: build/grpo/train.jsonl
	rm -rf build/grpo/base
	$(BIN)/python -W ignore -m examples.grpo.train examples/grpo/cpu.yaml grpo.steps=0 out=build/grpo/sft export=build/grpo/base

build/grpo/train.jsonl: $(STACK) examples/grpo/cpu_preset.py
	$(BIN)/python -W ignore -m examples.grpo.cpu_preset build/grpo

# Three processes on two cores, because most tests wait a part of their time for processes of their own.
# Not what asserts on time: other tests would decide on it.
test: $(STACK)
	$(BIN)/python -m pytest $(SPREAD) -n 2 tests/unit compat
	$(BIN)/python -m pytest $(SPREAD) -n 3 tests --ignore tests/unit

check: $(STACK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# On a quiet machine: the time of arming, of a replaced function and of a whole reload, and the peak memory of a reload.
bench: $(STACK)
	$(BIN)/python -m pytest tests/bench

# Every release statically, and the lowest, boundary and latest ones live, against what is recorded.
matrix: $(STACK)
	$(BIN)/python -m compat scan
	$(BIN)/python -m compat run $(CELLS) --check

$(STACK): pyproject.toml
	@test -n "$(PYTHON312)" || { echo "No Python 3.12 on PATH, with uv or under pyenv: install one, or say make PYTHON312=/path/to/python3.12"; exit 1; }
	@echo "== Setting up $(VENV) with $(PYTHON312)"
	test -x $(BIN)/python || "$(PYTHON312)" -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --disable-pip-version-check --quiet uv
	@# Bytecode, because every probe and every engine process imports the stack anew.
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --group stack --group grpo --group dev --group docs --editable .
	@# Megatron's own requirements name GPU packages that do not build here, and its modules do without.
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --no-deps --group megatron
	@rm -f $(VENV)/.stack-*
	@touch $@

clean:
	rm -rf $(VENV)
