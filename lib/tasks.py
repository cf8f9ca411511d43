"""The nine tasks: their held-out sets, validation sets of three, and the hashes of the items.

Prompts, choices and metrics are lm-eval's own; this file only gives it the items. Their fields must
hash to the published ones, since lm-eval accepts fields of another type: with strings as labels,
for example, piqa scores 0.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError
from lib.files import read_lines, reading, text_hash


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
    "no hub has them; name their CSV by --storycloze; without it averages are over 8 of 9 tasks"
)
# The headings of that CSV, in the order of lm-eval's fields.
STORY_HEADINGS = """\
InputSentence1 InputSentence2 InputSentence3 InputSentence4
RandomFifthSentenceQuiz1 RandomFifthSentenceQuiz2 AnswerRightEnding
"""


class OpenTask(NamedTuple):
    """A task of lm-eval with a set's items."""

    loaded: dict  # as its TaskManager loads it
    facts: dict  # the paper's number of items; where these come from, and the hash of their fields


def choose_tasks(asked: str, split) -> list[str]:
    """Return the tasks of `all`, `none` or names with commas, in the paper's order."""
    suite = SUITES[split]
    names = {"all": suite, "none": []}.get(asked, asked.split(","))
    unknown = [name for name in names if name not in suite]
    if unknown:
        raise UserError(f"--tasks: no {unknown} in the {split} set, which has {', '.join(suite)}")
    return [name for name in suite if name in names]


def open_task(
    name,
    split,
    data_dir: str | None,
    storycloze: str | None = None,
    any_items: bool = False,
) -> OpenTask:
    """Return lm-eval's own task with the items of its `heldout` or `validation` set.

    data_dir    folder with local items; None: the hub
    storycloze  the user's own copy of that task
    any_items   take also items that are not the published ones
    """
    import datasets
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    expected = SUITES[split][name]
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / TASKS[name].file)
    source, rows = read_rows(name, config, expected.split, data_dir, storycloze)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with reading(source, f"expected items of {name} that are alike in their types"):
        items = [{field: row[field] for field in TASKS[name].fields} for row in rows]
        test_set = datasets.Dataset.from_list(items)
        config |= {
            "custom_dataset": lambda **_: {"test": test_set},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "num_fewshot": 0,
        }
        loaded = lm_eval.tasks.TaskManager(include_defaults=False).load([config])
    sha256 = text_hash("".join(json.dumps(item, sort_keys=True) for item in items))
    if expected.sha256 != sha256:
        if expected.sha256 != "-" and not any_items:
            raise UserError(
                f"{source}: {len(items):,} items that are not the published ones of {name} "
                f"(sha256 {sha256[:12]}, expected {expected.sha256[:12]}); --any_items scores them"
            )
        task = loaded["tasks"][name]
        for number, item in enumerate(task.eval_docs):
            with reading(f"{source}, item {number}", f"expected an item of {name} with its answer"):
                check_item(task, item)
    facts = {"n_paper": expected.n_paper, "source": source, "data_sha256": sha256}
    return OpenTask(loaded, facts)


def check_item(task, item: dict):
    """Raise an error for an item that lm-eval would stop at, or score without a right answer."""
    if None in item.values():
        raise ValueError("a field is null")
    if task.OUTPUT_TYPE == "multiple_choice":
        answer = task.doc_to_text(item) if task.multiple_input else task.doc_to_target(item)
        n_choices = len(task.doc_to_choice(item))
        if answer not in range(n_choices):
            raise ValueError(f"answer {answer!r} (from 0) of {n_choices} choices")


def read_rows(
    name, config: dict, split, data_dir: str | None, storycloze: str | None
) -> tuple[str, Iterable[dict]]:
    """Return where a task's rows come from, and the rows: in a local file, or on the hub.

    config  lm-eval's own of the task
    """
    import datasets

    if name == "storycloze_2016":
        if storycloze is None:
            raise UserError(NO_STORYCLOZE)
        return storycloze, read_stories(storycloze)
    if data_dir:
        file = Path(data_dir, name, f"{split}.jsonl")
        if not file.is_file():
            raise UserError(
                f"{file}: no such file; --tasks can leave out {name}, or all: --tasks none"
            )
        return str(file), read_lines(file)
    source = config["dataset_path"]
    remedy = f"name local files by --data_dir, leave out {name} by --tasks, or all: --tasks none"
    with reading(source, remedy):
        rows = datasets.load_dataset(source, config.get("dataset_name"), split=split)
        return f"{source} [{split}]", rows


def read_stories(file) -> list[dict]:
    """Return the items of StoryCloze, from the CSV of its authors, in lm-eval's fields."""
    import pandas as pd

    with reading(file, "expected the CSV of StoryCloze's authors"):
        stories = pd.read_csv(file, dtype=str, index_col=False, keep_default_na=False)
        stories = stories[STORY_HEADINGS.split()]
        stories.columns = TASKS["storycloze_2016"].fields
        return stories.astype({"answer_right_ending": int}).to_dict("records")
