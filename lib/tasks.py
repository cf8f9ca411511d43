"""The nine tasks: their held-out sets, validation sets of three, and the hashes of the items.

Prompts, choices and metrics are lm-eval's own; this file only reads the items. Their fields must
hash to the published ones, since lm-eval accepts fields of another type: with strings as labels,
for example, piqa scores 0.
"""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError
from lib.files import reading, text_hash


class Task(NamedTuple):
    """One benchmark."""

    file: str  # among lm-eval's task files
    fields: list[str]  # what that file reads of an item


class ItemSet(NamedTuple):
    """The items of a task that a suite scores."""

    split: str
    n_paper: int  # number of items in the paper
    sha256: str  # of the fields over all items, as published; "-" if it is not known


_TASKS = """\
arc_challenge   ARC-C arc/arc_challenge.yaml          question choices answerKey
arc_easy        ARC-E arc/arc_easy.yaml               question choices answerKey
hellaswag       HS    hellaswag/hellaswag.yaml        activity_label ctx_a ctx_b endings label
lambada_openai  LAMB  lambada/lambada_openai.yaml     text
openbookqa      OBQA  openbookqa/openbookqa.yaml      question_stem choices answerKey
piqa            PIQA  piqa/piqa.yaml                  goal sol1 sol2 label
social_iqa      SIQA  siqa/siqa.yaml                  context question answerA answerB answerC label
storycloze_2016 SC16  storycloze/storycloze_2016.yaml input_sentence_1 input_sentence_2 \
input_sentence_3 input_sentence_4 sentence_quiz1 sentence_quiz2 answer_right_ending
winogrande      WG    winogrande/default.yaml         sentence option1 option2 answer
"""
# Suite, task, split, number of items, hash.
_SETS = """\
heldout arc_challenge test 1172 25e574fa4260a367f0c898df5cadb2f716e00123dc23db43d920a950158f0fee
heldout arc_easy test 2376 e4f2fe1b706c7ccfd149f04f726e31d69af9680fc2c71856d1093f699ac93302
heldout hellaswag validation 10042 d3d6f7c8373c4dbef64b41e84e4df792a39bef4049542e4c62b8144a80d36f2a
heldout lambada_openai test 5153 61497177db7e60ae11f3c7b3eb473c24d36cfc6f296b2b5768b2bc8ab9cbb2cb
heldout openbookqa test 500 578196ff63a449c610c95317ae0718e3a37f8a8d8e109741008528b742cb5148
heldout piqa validation 1838 d82bc2d775ca19c38e52881aba14c9457d415a68063457d410029b983cbc7b89
heldout social_iqa validation 1954 a57e04b3193fb2e130dc6bde08370c11e801c5fe79ab7b66aa7599c7f0096876
heldout storycloze_2016 test 1000 -
heldout winogrande validation 1267 dae51b8724e82f870c6ce629fb23dc621f9d9b8035fe2d17cc67cee88ff630a3
validation arc_easy validation 570 803212e5381cf076f2420fa29799f9015ec64aa6c20860b8477b505264078bc7
validation hellaswag train 39905 -
validation piqa train 16113 03243e1387761b6888a8faf79874e7a7117247bd78f5c355c053d24e722ffeac
"""
TASKS = {}
COLUMNS = {}  # the paper's headings
for _line in _TASKS.splitlines():
    _name, _column, _file, *_fields = _line.split()
    TASKS[_name] = Task(_file, _fields)
    COLUMNS[_name] = _column
SUITES = {"heldout": {}, "validation": {}}
for _line in _SETS.splitlines():
    _suite, _name, _split, _n, _sha256 = _line.split()
    SUITES[_suite][_name] = ItemSet(_split, int(_n), _sha256)

NO_STORYCLOZE = (
    "storycloze_2016: its authors give the items out on request (cs.rochester.edu/nlp/rocstories), "
    "no hub has them; put them at DATA_DIR/storycloze_2016/test.csv or name the file by "
    "--storycloze; without it averages are over 8 of 9 tasks"
)
# The headings of its authors' CSV -> lm-eval's fields.
STORY_HEADINGS = (
    "InputSentence1 InputSentence2 InputSentence3 InputSentence4 "
    "RandomFifthSentenceQuiz1 RandomFifthSentenceQuiz2 AnswerRightEnding"
)
STORY_FIELDS = dict(zip(STORY_HEADINGS.split(), TASKS["storycloze_2016"].fields, strict=True))


# What `check_item` asks of an item, and the fields that are not texts.
FORM = "its fields, choices that are not blank, and a right answer among them"
NOT_TEXTS = ("answer", "answerKey", "answer_right_ending", "choices", "endings", "label")


class Items(NamedTuple):
    """The items of a task's set: where they come from, the fields that are read, and their hash."""

    source: str
    rows: list[dict]
    sha256: str


def choose_tasks(asked: str, split) -> list[str]:
    """Return the tasks of `all`, `none` or names with commas, in the paper's order."""
    suite = SUITES[split]
    names = {"all": suite, "none": []}.get(asked, asked.split(","))
    unknown = [name for name in names if name not in suite]
    if unknown:
        raise UserError(f"--tasks: no {unknown} in the {split} set, which has {', '.join(suite)}")
    return [name for name in suite if name in names]


def read_items(
    names: list[str],
    split,
    data_dir: str | None,
    storycloze: str | None = None,
    any_items: bool = False,
) -> dict[str, Items]:
    """Return the items of these tasks' `heldout` or `validation` set.

    data_dir    folder with local items; None: the hub
    storycloze  the user's own copy of that task
    any_items   take also items that are not the published ones
    """
    items = {}
    for name in names:
        expected = SUITES[split][name]
        source, rows = read_rows(name, expected.split, data_dir, storycloze)
        chosen = []
        for number, row in enumerate(rows):
            with reading(f"{source}, item {number}", f"expected an item of {name}, with {FORM}"):
                item = {field: row[field] for field in TASKS[name].fields}
                check_item(name, item)
            chosen.append(item)
        if not chosen:
            raise UserError(f"{source}: no rows; expected items of {name}")
        text = "".join(json.dumps(item, sort_keys=True) for item in chosen)
        got = text_hash(text)
        items[name] = Items(source, chosen, got)
        if expected.sha256 not in (got, "-") and not any_items:
            raise UserError(
                f"{source}: {len(chosen):,} items that are not the published ones of {name} "
                f"(sha256 {got[:12]}, expected {expected.sha256[:12]}); --any_items scores them"
            )
    return items


def check_item(name, item: dict):
    """Raise an error for an item that lm-eval would stop at, or score without a right answer."""
    for field, text in item.items():
        if field not in NOT_TEXTS and not isinstance(text, str):
            raise TypeError(f"{field} is {text!r}, not a text")
    choices, answer = choices_of(name, item)
    if not isinstance(choices, list):
        raise TypeError(f"choices are {choices!r}, not a list")
    for choice in choices:
        if not isinstance(choice, str) or not choice.strip():
            raise ValueError(f"a choice is {choice!r}")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"answer {answer!r} (from 0) of {len(choices)} choices")


def choices_of(name, item: dict) -> tuple[list[str], int]:
    """Return an item's choices and the index of the right one, as lm-eval's task file has them.

    LAMBADA has one choice, the last word.
    """
    match name:
        case "arc_challenge" | "arc_easy" | "openbookqa":
            choices = item["choices"]
            answer = item["answerKey"]
            if name == "openbookqa":
                answer = answer.lstrip()
            return choices["text"], choices["label"].index(answer)
        case "hellaswag":
            return item["endings"], ["0", "1", "2", "3"].index(str(item["label"]))
        case "lambada_openai":
            return [item["text"].split(" ")[-1]], 0
        case "piqa":
            return [item["sol1"], item["sol2"]], item["label"]
        case "social_iqa":
            return [item["answerA"], item["answerB"], item["answerC"]], int(item["label"]) - 1
        case "storycloze_2016":
            return [item["sentence_quiz1"], item["sentence_quiz2"]], item["answer_right_ending"] - 1
        case "winogrande":
            if not item["sentence"].partition("_")[2].strip():
                raise ValueError("no _ in the sentence with words after it")
            return [item["option1"], item["option2"]], ["1", "2"].index(item["answer"])


def read_rows(
    name, split, data_dir: str | None, storycloze: str | None
) -> tuple[str, Iterable[dict]]:
    """Return where a task's rows come from, and the rows.

    They are in a local file, in a folder laid out like the hub, or on the hub.
    """
    import datasets

    if name == "storycloze_2016":
        file = find_storycloze(data_dir, storycloze)
        if file is None:
            raise UserError(NO_STORYCLOZE)
        return str(file), read_stories(file)
    config = read_config(name)
    source = config["dataset_path"]
    if data_dir:
        file = Path(data_dir, name, f"{split}.jsonl")
        if file.is_file():
            return str(file), read_file(file)
        source = str(Path(data_dir, source))
        if not Path(source).is_dir():
            raise UserError(f"{name}: no {file} and no folder {source}; --tasks can leave it out")
    with reading(source, f"leave out {name} by --tasks, or name local files by --data_dir"):
        rows = datasets.load_dataset(source, config.get("dataset_name"), split=split)
        return f"{source} [{split}]", rows


def find_storycloze(data_dir: str | None, file: str | None) -> Path | None:
    """Return the user's own copy of StoryCloze: `file`, else the one in the data folder, if any."""
    if file:
        if not Path(file).is_file():
            raise UserError(f"--storycloze {file}: no such file")
        return Path(file)
    if data_dir:
        for kind in ("jsonl", "csv"):
            path = Path(data_dir, "storycloze_2016", f"test.{kind}")
            if path.is_file():
                return path
    return None


def read_stories(file) -> list[dict]:
    """Return the items of StoryCloze in lm-eval's fields, with labels as numbers."""
    labels = {"1": 1, "2": 2}  # a CSV has texts
    rows = []
    with reading(file, "expected one story a line"):
        for row in read_file(file):
            story = {STORY_FIELDS.get(key, key): value for key, value in row.items()}
            label = story.get("answer_right_ending")
            rows.append(story | {"answer_right_ending": labels.get(str(label), label)})
    return rows


def read_file(file) -> list[dict]:
    """Return the rows of a JSONL or CSV file."""
    if file.suffix not in (".jsonl", ".csv"):
        raise UserError(f"{file}: expected one of .jsonl, .csv")
    with reading(file, "fetch it again"):
        text = file.read_bytes().decode("utf-8-sig")
        if file.suffix == ".csv":
            return list(csv.DictReader(io.StringIO(text, newline="")))
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        with reading(f"{file}, line {number}", "correct or remove it"):
            if line:
                rows.append(json.loads(line))
    return rows


def read_config(name) -> dict:
    """Return lm-eval's own configuration of a task."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(Path(lm_eval.tasks.__file__).parent / TASKS[name].file)
