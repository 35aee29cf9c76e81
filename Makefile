# Targets and variables: make help
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_EXTRAS ?= torchvision==0.28.0 torchaudio==2.11.0
PIP_ARGS ?=
PYTEST_ARGS ?=

# Recipes get these through the environment. Text with a $ belongs in front: PROMPT='a $5 note' make demo
export PYTHON VENV TORCH TORCH_EXTRAS PIP_ARGS
export WORKFLOW MODEL PROMPT WIDTH HEIGHT FRAMES SEED SIGMA_POINTS OUT LISTEN PORT COMFYUI_PATH

RUN := "$$VENV/bin/python"
MAKE_ENV = "$$PYTHON" scripts/make_env.py --venv "$$VENV" --torch "$$TORCH" --torch-extras "$$TORCH_EXTRAS" \
	--pip-args="$$PIP_ARGS"
NEWER_HOST = $(if $(COMFYUI_PATH),newer-host)
FETCH_HOST = PYTHON="$$VENV/bin/python" bash scripts/fetch_comfy_host.sh .cache/host >/dev/null

.PHONY: help env demo serve test lint types bench clean

help:
	@echo 'make demo    a prompt to out/*.mp4 through a real ComfyUI server, on a tiny model or on MODEL'
	@echo 'make serve   ComfyUI with this pack and its workflows in the browser; Ctrl-C stops it'
	@echo 'make test    everything that a CPU can check: ruff, mypy, pytest'
	@echo 'make bench   benchmarks of the kernels and of the pipeline; JSON into benchmarks/results/'
	@echo 'make env     only the environment that the others need'
	@echo 'make clean   removes .cache/, and .venv/ where make env made it; not out/'
	@echo
	@echo 'demo and serve:'
	@echo '  WORKFLOW=t2va        what the demo runs: t2va, first_frame, fl2va or ref2va'
	@echo '  MODEL=/dir           a checkpoint in the layout of the MiniMax H3 release; default: a tiny one that makes noise'
	@echo '  PROMPT= WIDTH= HEIGHT= FRAMES= SEED= SIGMA_POINTS=   of the demo; FRAMES 17k+5, sides multiples of 32;'
	@echo '                       default 128x96, 22 frames on the tiny model, 1344x768, 124 frames on MODEL'
	@echo '  OUT=out              where the demo puts its file'
	@echo '  LISTEN=127.0.0.1 PORT=8188                           of the server'
	@echo '  COMFYUI_PATH=/dir    your ComfyUI instead of the fetched 0.3.75; nothing is written in it'
	@echo 'environment:'
	@echo '  PYTHON=python3       3.10 to 3.13, makes the environment'
	@echo '  VENV=.venv           where it is; an existing one, as that of your ComfyUI, is used and never changed'
	@echo '  TORCH="torch==2.13.0"'
	@echo '  TORCH_EXTRAS="torchvision==0.28.0 torchaudio==2.11.0"   the ones that belong to TORCH'
	@echo '  PIP_ARGS=            for each call of pip, for example --extra-index-url ADDRESS'
	@echo '                       On Linux, pip fetches a CUDA build of torch (gigabytes) unless the index of CPU builds'
	@echo '                       from the "Get started" page of PyTorch is named here: TORCH="torch==2.13.0+cpu"'
	@echo '                       For another CUDA version name its index in the same way.'
	@echo 'test:  PYTEST_ARGS="-k mp4 -x"'
	@echo '  H3_CHROMIUM=/file    the browser that opens the page; default: chromium or google-chrome of the PATH'
	@echo '  H3_SCREENSHOTS=/dir  keeps the pictures of the page'

env:
	@$(MAKE_ENV) host $(NEWER_HOST)

demo:
	@$(MAKE_ENV) host $(NEWER_HOST)
	@$(FETCH_HOST)
	@$(RUN) _bootstrap.py scripts.demo

serve:
	@$(MAKE_ENV) host page $(NEWER_HOST)
	@$(FETCH_HOST)
	@$(RUN) _bootstrap.py scripts.demo --serve

test:
	@$(MAKE_ENV) host page test $(NEWER_HOST)
	@$(FETCH_HOST)
	@$(MAKE) --no-print-directory lint types
	$(RUN) -m pytest $(PYTEST_ARGS)

lint:
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# mypy knows no import hooks: a link gives the pack the name that it has at run time.
types:
	@mkdir -p .cache/mypy && ln -sfn ../.. .cache/mypy/comfyui_h3
	MYPYPATH=.cache/mypy $(RUN) -m mypy --cache-dir .cache/mypy/cache \
		$(foreach layer,h3core kernels nodes scripts benchmarks,-p comfyui_h3.$(layer))

bench:
	@$(MAKE_ENV) host $(NEWER_HOST)
	@if $(RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then $(RUN) _bootstrap.py benchmarks.ops; else echo 'no GPU: the kernels are not timed'; fi
	$(RUN) _bootstrap.py benchmarks.pipeline $(if $(MODEL),--checkpoint "$$MODEL")

clean:
	rm -rf .cache
	[ ! -f .venv/h3-env.json ] || rm -rf .venv
