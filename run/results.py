"""Reading what runs and eval.py leave behind, without the libraries that tables need.

eval.py appends each result to results.jsonl: a student's in its own folder, those of a checkpoint
or of any other model in out/eval/NAME.
"""

from pathlib import Path

from lib.errors import UserError
from lib.files import read_json, read_lines

# Files of entries beside log.jsonl, by the key that `read_log` gives to these entries.
PARTS = {"histogram": "histograms.jsonl", "teacher": "../teacher.jsonl"}


def training_facts(model):
    """Return the facts of the training behind a model's folder, or {} for other models.

    They are in run.json of a finished student, and in state.json of a checkpoint.
    """
    if model.name == "model":
        for name in ("run.json", "state.json"):
            if (model.parent / name).is_file():
                return read_json(model.parent / name)
    return {}


def has_model(folder) -> bool:
    """Return whether a student has finished, or is in training and has a checkpoint."""
    from lib.hf import find_folder  # imports transformers, which takes seconds

    is_stopped = (folder / "stopped.json").is_file()
    return folder.is_dir() and not is_stopped and find_folder(str(folder)) != folder


def read_log(folder):
    """Return the entries of log.jsonl, then {PART: entry} for those of PARTS."""
    log = read_lines(folder / "log.jsonl")
    if not log:  # a folder of anything else may be inside a run
        return []
    for part, path in PARTS.items():
        log += [{part: entry} for entry in read_lines(folder / path)]
    return log


def students_of(paths, is_done) -> list[Path]:
    """Return the folders that paths stand for.

    A path with `is_done(path)` stands for itself, any other one for the done folders inside it. A
    path without any stands for itself too, such as a hub id, unless it is a file.
    """
    folders = []
    for path in map(Path, paths):
        inside = sorted(filter(is_done, path.glob("*/")))
        if is_done(path) or not (inside or path.is_file()):
            inside = [path]
        folders += inside
    if not folders:
        raise UserError(f"{', '.join(map(str, paths))}: expected out/NAME, or a model's folder")
    return list(dict.fromkeys(folders))


def read_results(folder: Path) -> list[dict]:
    """Return a folder's results, oldest first, without those of a student's earlier weights."""
    current = training_facts(folder / "model").get("weights_sha256")
    results = read_lines(folder / "results.jsonl")
    return [x for x in results if current in (None, x["weights_sha256"])]


def newest_figures(folder: Path) -> dict:
    """Return a folder's newest result over held-out rows, or {}."""
    results = reversed(read_results(folder))
    return next((x for x in results if x["kind"] == "figures"), {})
