"""The nine tasks: their two sets in the paper's protocol, their sources, and the checks of their rows.

Prompts, choices and metrics are lm-eval's own; this file only finds the rows and checks them, field by field. A wrong
type does not always fail there: piqa with string labels gets an accuracy of 0.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet

from lib.files import UserError, first_line, nearest


def _one_of(*values):
    return " or ".join(map(repr, values)), lambda v, row: any(v == x and type(v) is type(x) for x in values)


def _says(v) -> bool:
    return isinstance(v, str) and bool(v.strip())


def _texts(v) -> bool:
    return isinstance(v, list) and len(v) > 1 and all(map(_says, v))


_TEXT = "a string", lambda v, row: isinstance(v, str)
_WORDS = "a string that is not blank", lambda v, row: _says(v)
_CHOICES = (
    "{'text': [..], 'label': [..]} of strings that are not blank, equally many, at least two",
    lambda v, row: isinstance(v, dict) and all(_texts(v.get(k)) for k in ("text", "label"))
    and len(v["text"]) == len(v["label"]),
)  # fmt: skip
_ARC = {
    "question": _WORDS,
    "choices": _CHOICES,
    "answerKey": ("one of the labels of the choices", lambda v, row: v in row["choices"]["label"]),
}


@dataclass(frozen=True)
class Task:
    """One benchmark: its place in the paper, and the fields that lm-eval's task file reads."""

    column: str  # the paper's heading
    file: str  # among lm-eval's task files
    heldout: tuple[str, int]  # split, and the number of items in the paper
    validation: tuple[str, int] | None
    fields: dict  # name -> (what is expected, test of value and row)


TASKS = {
    "arc_challenge": Task("ARC-C", "arc/arc_challenge.yaml", ("test", 1172), None, _ARC),
    "arc_easy": Task("ARC-E", "arc/arc_easy.yaml", ("test", 2376), ("validation", 570), _ARC),
    "hellaswag": Task(
        "HS", "hellaswag/hellaswag.yaml", ("validation", 10042), ("train", 39905),
        {"activity_label": _TEXT, "ctx_a": _TEXT, "ctx_b": _TEXT,
         "endings": ("a list of strings", lambda v, row: isinstance(v, list) and all(isinstance(e, str) for e in v)),
         "label": ("an index into endings (the hub's test rows have none)",
                   lambda v, row: str(v).isdecimal() and int(v) < len(row["endings"]))},
    ),
    "lambada_openai": Task(
        "LAMB", "lambada/lambada_openai.yaml", ("test", 5153), None,
        {"text": ("words, a space and the last word",
                  lambda v, row: isinstance(v, str) and all(map(_says, v.rpartition(" ")[::2])))},
    ),
    "openbookqa": Task(
        "OBQA", "openbookqa/openbookqa.yaml", ("test", 500), None,
        {"question_stem": _WORDS, "choices": _CHOICES,
         "answerKey": ("one of the labels of the choices",
                       lambda v, row: isinstance(v, str) and v.lstrip() in row["choices"]["label"])},
    ),
    "piqa": Task(
        "PIQA", "piqa/piqa.yaml", ("validation", 1838), ("train", 16113),
        {"goal": _WORDS, "sol1": _WORDS, "sol2": _WORDS, "label": _one_of(0, 1)},
    ),
    "social_iqa": Task(
        "SIQA", "siqa/siqa.yaml", ("validation", 1954), None,
        {"context": _WORDS, "question": _WORDS, "answerA": _WORDS, "answerB": _WORDS, "answerC": _WORDS,
         "label": _one_of("1", "2", "3", 1, 2, 3)},
    ),
    "storycloze_2016": Task(
        "SC16", "storycloze/storycloze_2016.yaml", ("test", 1000), None,
        {**{f"input_sentence_{i}": _WORDS for i in (1, 2, 3, 4)}, "sentence_quiz1": _WORDS, "sentence_quiz2": _WORDS,
         "answer_right_ending": _one_of(1, 2)},
    ),
    "winogrande": Task(
        "WG", "winogrande/default.yaml", ("validation", 1267), None,
        {"sentence": ("a string with a gap '_' and words after it",
                      lambda v, row: isinstance(v, str) and _says(v.partition("_")[2])),
         "option1": _WORDS, "option2": _WORDS, "answer": _one_of("1", "2")},
    ),
}  # fmt: skip

# sha256 of the fields that are read, over all items of a set, as they are published; other items are told.
KNOWN = {
    ("arc_challenge", "heldout"): "25e574fa4260a367f0c898df5cadb2f716e00123dc23db43d920a950158f0fee",
    ("arc_easy", "heldout"): "e4f2fe1b706c7ccfd149f04f726e31d69af9680fc2c71856d1093f699ac93302",
    ("arc_easy", "validation"): "803212e5381cf076f2420fa29799f9015ec64aa6c20860b8477b505264078bc7",
    ("hellaswag", "heldout"): "d3d6f7c8373c4dbef64b41e84e4df792a39bef4049542e4c62b8144a80d36f2a",
    ("lambada_openai", "heldout"): "61497177db7e60ae11f3c7b3eb473c24d36cfc6f296b2b5768b2bc8ab9cbb2cb",
    ("openbookqa", "heldout"): "578196ff63a449c610c95317ae0718e3a37f8a8d8e109741008528b742cb5148",
    ("piqa", "heldout"): "d82bc2d775ca19c38e52881aba14c9457d415a68063457d410029b983cbc7b89",
    ("piqa", "validation"): "03243e1387761b6888a8faf79874e7a7117247bd78f5c355c053d24e722ffeac",
    ("social_iqa", "heldout"): "a57e04b3193fb2e130dc6bde08370c11e801c5fe79ab7b66aa7599c7f0096876",
    ("winogrande", "heldout"): "dae51b8724e82f870c6ce629fb23dc621f9d9b8035fe2d17cc67cee88ff630a3",
}

COLUMNS = {name: task.column for name, task in TASKS.items()}
SUITES = {split: [name for name, task in TASKS.items() if getattr(task, split)] for split in ("heldout", "validation")}

STORYCLOZE = """\
storycloze_2016: no copy here. Its authors give it out on request (cs.rochester.edu/nlp/rocstories); no hub carries it.
Take "cloze_test_test__spring2016 - cloze_test_ALL_test.csv" (or .tsv; .jsonl, .parquet with lm-eval's fields), put it
at DATA_DIR/storycloze_2016/test.csv or name it by --storycloze FILE. A CSV has commas and the columns InputSentence1 to 4,
RandomFifthSentenceQuiz1 and 2 and AnswerRightEnding, as they were sent. That file has 1,871 items; the paper scored 1,000,
and which of them is not known. Without it averages are over 8 of 9."""
STORY_FILES = ("jsonl", "csv", "tsv", "parquet")


def read_rows(name: str, split: str, data_dir: str | None, storycloze: str | None) -> tuple[str, Iterator[dict]]:
    """The source of a task's rows, and the rows: a local file, a folder laid out like the hub, or the hub."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    there = load_yaml(task_file(name), resolve_func=False)
    source, local = there["dataset_path"], Path(data_dir or "")
    if name == "storycloze_2016":
        file = find_storycloze(data_dir, storycloze)
        if not file:
            raise UserError(STORYCLOZE)
        return str(file), read_file(file)
    if data_dir:
        file, source = local / name / f"{split}.jsonl", str(local / source)
        if file.is_file():
            return str(file), read_file(file)
        if not Path(source).is_dir():
            raise UserError(f"{name}: no {file} and no folder {source}; put one there, or leave it out by --tasks")
    try:
        rows = datasets.load_dataset(source, there.get("dataset_name"), split=split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # no split, no network, ..
        raise UserError(
            f"{name}: no {split!r} of {source} ({first_line(error)}); or read files by --data_dir"
        ) from error
    return f"{source} [{split}]", iter(rows)


def find_storycloze(data_dir: str | None, named: str | None) -> Path | None:
    """The user's own copy of StoryCloze: the named file, or the one in the data folder; None where there is none."""
    if named and not Path(named).is_file():
        raise UserError(f"--storycloze {named}: no such file")
    files = [Path(data_dir, "storycloze_2016", f"test.{suffix}") for suffix in STORY_FILES if data_dir]
    return Path(named) if named else next((file for file in files if file.is_file()), None)


def read_file(file: Path) -> Iterator[dict]:
    """Rows of a JSONL, parquet, CSV or TSV file. StoryCloze's own headings become lm-eval's names."""
    if file.suffix == ".parquet":
        yield from pyarrow.parquet.read_table(file).to_pylist()
        return
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{file}, row {number}: not JSON in UTF-8 ({error})") from error
                if not isinstance(row, dict):
                    raise UserError(f"{file}, row {number}: expected an object with fields, got {line[:40]!r}")
                yield row
    elif file.suffix in (".csv", ".tsv"):
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: expected UTF-8 ({error}); save it as such") from error
        lines = io.StringIO(text, newline="")
        for row in csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ","):
            row = {_story_field(key): value for key, value in row.items() if key}
            answer = row.get("answer_right_ending")
            yield {**row, "answer_right_ending": int(answer) if answer in ("1", "2") else answer}
    else:
        raise UserError(f"{file}: expected .jsonl, .csv, .tsv or .parquet")


def _story_field(heading: str) -> str:
    """InputSentence1, RandomFifthSentenceQuiz1, AnswerRightEnding -> lm-eval's names; others in snake case."""
    heading = heading.removeprefix("RandomFifth")
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=Sentence)(?=\d)", "_", heading).lower()


def check_rows(name: str, where: str, rows: Iterator[dict]) -> tuple[list[dict], str]:
    """Check the fields that the task reads -> the rows, and a hash of them that does not depend on the source."""
    kept, digest, fields = [], hashlib.sha256(), TASKS[name].fields
    for number, row in enumerate(rows, 1):
        for field, (what, good) in fields.items():
            if field not in row:
                there = ", ".join(map(str, row))
                raise UserError(f"{where}, row {number}: no field {field!r}, only {there}; expected {what}")
            if not good(row[field], row):
                raise UserError(f"{where}, row {number}, field {field!r}: expected {what}, got {row[field]!r:.60}")
            if kept and type(row[field]) is not type(kept[0][field]):
                raise UserError(f"{where}, row {number}, field {field!r}: {row[field]!r:.60}, and {kept[0][field]!r:.60} in row 1; "
                                "expected one type throughout")  # fmt: skip
        kept.append({field: row[field] for field in fields})
        digest.update(json.dumps(kept[-1], sort_keys=True).encode())
    if not kept:
        raise UserError(f"{where}: no rows; expected {name} items with {', '.join(fields)}")
    return kept, digest.hexdigest()


def task_file(name: str) -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / TASKS[name].file


def choose_tasks(asked: str, split: str) -> list[str]:
    """`all`, `none` or names with commas -> names, in the paper's order."""
    having = SUITES[split]
    names = {"all": having, "none": []}.get(asked, asked.split(","))
    for name in names:
        if name not in having:
            near = nearest(name, having)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(having)}"
            raise UserError(f"--tasks: no task {name!r} in the {split} set, {hint}")
    return [name for name in having if name in names]


@dataclass(frozen=True)
class Items:
    """A task's rows, read and checked."""

    where: str
    rows: list[dict]
    sha256: str


def read_items(names: list[str], split: str, data_dir: str | None, storycloze: str | None) -> dict[str, Items]:
    """The rows of these tasks' `heldout` or `validation` set, each read and checked."""
    items = {}
    for name in names:
        where, rows = read_rows(name, getattr(TASKS[name], split)[0], data_dir, storycloze)
        try:
            items[name] = Items(where, *check_rows(name, where, rows))
        except UserError:
            raise
        except (OSError, ValueError, csv.Error) as error:  # what pyarrow raises is one of them
            raise UserError(f"{where}: not read ({first_line(error)}); fetch it again") from error
    return items


def differing(items: dict[str, Items], split: str) -> list[str]:
    """A line for each task whose items are not the published ones, as far as those are known here."""
    return [
        f"{name}: {len(found.rows):,} items of {found.where}, not those that are published (sha256 {found.sha256[:12]}, "
        f"expected {KNOWN[name, split][:12]}); scores do not compare with those of others"
        for name, found in items.items()
        if found.sha256 != KNOWN.get((name, split), found.sha256)
    ]
