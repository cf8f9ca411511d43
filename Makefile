# make demo       set up, then distil small students from the shipped teacher, score and plot them: minutes on two cores
# make replicate  the study of study/small.py, 21 methods and variants over seeds: many hours; goes on after a kill
# make test       set up, then run the tests in a process for each core, four at most
# make check      style of the code
# make lock       write requirements.lock from .venv

PYTHON ?= python3
BIN := .venv/bin
TOO_OLD := Python %d.%d is too old: expected 3.11 or newer; set it, as in make demo PYTHON=python3.12

demo: .venv/ready
	$(BIN)/python prepare.py config/demo.py
	$(BIN)/python train.py config/demo.py
	$(BIN)/python eval.py out/demo --tasks none
	$(BIN)/python tools/plot.py out/demo
	$(BIN)/python demo/check.py out/demo
	@echo "look at out/demo/curves.png (LESSON.md explains it); before you type commands: source .venv/bin/activate"

replicate: .venv/ready
	$(BIN)/python study/compare.py study/small.py

test: .venv/ready
	$(BIN)/python -m pytest -n logical --maxprocesses=4 --dist=worksteal

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# requirements.lock holds every package as it was tested, for the Python of its first line; another takes the pinned ones alone.
.venv/ready: requirements.txt requirements-test.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(TOO_OLD)" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	locked=$$(head -1 requirements.lock | grep -q "$$($(PYTHON) -c 'import sys; print("Python %d.%d" % sys.version_info[:2])')" \
	  && echo "-c requirements.lock"); \
	  $(BIN)/python -m pip install --quiet --no-compile -r requirements.txt -r requirements-test.txt $$locked
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import eval, prepare, train, study.compare, tools.plot"  # compiles them, and what they import, once
	touch $@
	@echo "set up in .venv; before you type commands yourself: source .venv/bin/activate"

lock:
	$(BIN)/python -c 'import sys; print("# Python %d.%d" % sys.version_info[:2])' > requirements.lock
	$(BIN)/python -m pip freeze | sed 's/+cpu//' >> requirements.lock

.PHONY: demo replicate test check lock
