# Two commands do all the set-up: `make demo` and `make test`. Everything lives in .venv beside this file.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO   := out/demo

.PHONY: demo test check bench soak clean
.DELETE_ON_ERROR:

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# A real training run whose rank is killed, and the proof that it came back bit for bit.
demo: $(READY)
	$(BIN)/drills run kill-any-rank --seed 7 --out $(DEMO) -- \
	  torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py {url} --steps 60 --every 10 --seed 1 --log-file {log}

test: $(READY)
	$(BIN)/python -m pytest

# What a change must pass besides the tests.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m tests.bench

# Long fault campaigns; resumable, results are appended to out/soak.
soak: $(READY)
	$(BIN)/python -m tests.soak

clean:
	rm -rf $(VENV) out
