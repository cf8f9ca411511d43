"""Reading what runs and eval.py leave behind, without the libraries that tables need.

eval.py appends each result to results.jsonl: a student's in its own folder, those of a checkpoint
or of any other model in out/eval/NAME.
"""

from pathlib import Path
from typing import Literal

from lib.errors import UserError
from lib.files import check_kinds, read_json, read_lines
from lib.tasks import SUITES

# The keys, with their kinds, that are read from a student's run.json ..
RUN = {
    "method": str,
    "student": str,
    "seed": int,
    "overrides": dict,
    "step": int,
    "config": dict,
    "made_by": {"shape": dict},
}
# .. from a line of results.jsonl, and from its values by its kind.
RESULT = {
    "kind": Literal["figures", "heldout", "validation"],
    "name": str,
    "protocol": dict,
    "scored": dict,
    "weights_sha256": str,
    "run": dict,
    "values": dict,
}
SCORES = {"acc": float, "n": int, "n_paper": int}  # of a task
VALUES = dict.fromkeys(SUITES, dict[str, SCORES])
VALUES["figures"] = {"ce": float, "n_targets": int, "n_rows": int}
# Files of entries beside log.jsonl, by the key that `read_log` gives to these entries.
PARTS = {"histogram": "histograms.jsonl", "teacher": "../teacher.jsonl"}


def training_facts(model, kinds=()):
    """Return the facts of the training behind a model's folder, or {} for other models.

    They are in run.json of a finished student, and in state.json of a checkpoint.
    """
    if model.name == "model":
        for name in ("run.json", "state.json"):
            if (model.parent / name).is_file():
                return read_json(model.parent / name, kinds)
    return {}


def read_log(folder):
    """Return the entries of log.jsonl, then {"step": .., PART: entry} for those of PARTS."""
    log = read_lines(folder / "log.jsonl", {"step": int})
    for part, path in PARTS.items():
        for entry in read_lines(folder / path, {"step": int}):
            log.append({"step": entry["step"], part: entry})
    return log


def students_of(paths, is_done) -> list[str]:
    """Return the folders that paths stand for.

    A path with `is_done(path)` stands for itself, any other one for the done folders inside it. A
    path without any stands for itself too, such as a hub id, unless it is a file.
    """
    folders = []
    for path in paths:
        inside = [f"{folder}" for folder in sorted(filter(is_done, Path(path).glob("*/")))]
        if is_done(Path(path)) or not (inside or Path(path).is_file()):
            inside = [path]
        folders += inside
    if not folders:
        raise UserError(f"{', '.join(map(str, paths))}: expected out/NAME, or a model's folder")
    return list(dict.fromkeys(folders))


def left_out(paths, folders) -> list[str]:
    """Return the students inside the paths whose folder is not among `folders`."""
    logs = [log for path in paths for log in Path(path).glob("*/log.jsonl")]
    return sorted({str(log.parent) for log in logs}.difference(folders))


def read_results(folder: Path) -> list[dict]:
    """Return the newest results of a folder, oldest first, without a student's earlier weights."""
    current = training_facts(folder / "model").get("weights_sha256")
    file = folder / "results.jsonl"
    results = []
    for x in read_lines(file, RESULT):
        check_kinds(x["values"], VALUES[x["kind"]], file)
        if x["run"]:
            check_kinds(x["run"], RUN, file)
        x["scored"].pop("scoring_code", None)  # of older versions; edits of code are shown
        if current in (None, x["weights_sha256"]):
            results.append(x | {"folder": folder})
    return newest(results)


def newest(results: list[dict]) -> list[dict]:
    """Return the newest result of each model, kind and protocol, oldest first.

    Tasks of several results are merged, if all that was scored has the same hashes.
    """
    found = {}
    for x in results:
        model = x["folder"], x["weights_sha256"], x.get("tokenizer_sha256")
        key = *model, x["kind"], protocol_text(x)
        earlier = found.pop(key, x)
        if earlier["scored"] == x["scored"]:
            x = x | {"values": earlier["values"] | x["values"]}
        found[key] = x
    return list(found.values())


def protocol_text(result) -> str:
    return ", ".join(f"{key} {x}" for key, x in result["protocol"].items() if x is not None)


def newest_figures(folder) -> dict:
    """Return a folder's newest result over held-out rows, or {}."""
    figures = [x for x in read_results(folder) if x["kind"] == "figures"]
    return figures[-1] if figures else {}
