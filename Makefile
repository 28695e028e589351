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

# Beside plain DCP and the raw client, in one run; and what the formulas and the loop cost.
bench: $(READY)
	$(BIN)/python -m tests.bench.save_load
	$(BIN)/python -m tests.bench.agreement
	$(BIN)/python -m tests.bench.loop_overhead
	$(BIN)/python -m tests.bench.recovery_time --ranks 2 --rounds 10
	$(BIN)/python -m tests.bench.ledger_report
	$(BIN)/python -m tests.bench.ledger_step
	$(BIN)/python -m tests.bench.compare_worlds
	$(BIN)/python -m tests.bench.fingerprint_speed
	$(BIN)/python -m tests.bench.fingerprint_share
	$(BIN)/python -m tests.bench.validate_rate
	$(BIN)/python -m tests.bench.moving_memory 1024
	$(BIN)/python -m tests.bench.logical_shards
	$(BIN)/python -m tests.bench.interval_simulation
	$(BIN)/python -m tests.bench.interval_speed
	$(BIN)/python -m tests.bench.interval_end_to_end
	$(BIN)/python -m tests.bench.pacer_regret

# Long campaigns; resumable, results are appended below out/. Run again to go on.
soak: $(READY)
	$(BIN)/python -m tests.soak.kills 100
	$(BIN)/python -m tests.soak.restarts 20
	$(BIN)/python -m tests.soak.stops 63
	$(BIN)/python -m tests.soak.launch_kills --kills 100 --ranks 2
	$(BIN)/python -m tests.soak.launch_hangs --hangs 50
	$(BIN)/python -m tests.soak.drills_book 5
	$(BIN)/python -m tests.soak.drills_mutations
	$(BIN)/python -m tests.soak.paused_writer 200
	$(BIN)/python -m tests.soak.flips 10000
	$(BIN)/python -m tests.soak.faulty_storage 12
	$(BIN)/python -m tests.soak.crash single
	$(BIN)/python -m tests.soak.crash_s3 200
	$(BIN)/python -m tests.bench.fingerprint_campaign --until 1000000 --out out/soak/fingerprint.jsonl

clean:
	rm -rf $(VENV) out
