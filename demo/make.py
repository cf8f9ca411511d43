"""How the files in demo/ were made. Not needed to run the demo: it overwrites these files.

    python demo/make.py text        demo/text.jsonl.zst, and the teacher's own text
    python demo/make.py tokenizer   4,096 entries, from the teacher's text
    python prepare.py config/demo_teacher.py
    python train.py config/demo_teacher.py
    cp out/demo_teacher/pretrain/model/{config.json,model.safetensors} demo/teacher

The text is Python source and documentation of the packages in requirements.lock, as installed.
Documents are sorted by the sha256 of their names. The students get the first TEXT_CHARS characters,
the teacher all others, in data/demo_teacher. LICENSES.txt has the licences of the students' text.
"""

import hashlib
import json
import re
import sys
from importlib import metadata
from itertools import accumulate
from pathlib import Path

import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "demo/text.jsonl.zst"
TEACHER = ROOT / "demo/teacher"
TEACHER_TEXT = ROOT / "data/demo_teacher/text.jsonl.zst"
EOS = "<|endoftext|>"
TEXT_CHARS = 15_500_000

ALLOWED = re.compile(r"[(\s]*(BSD|MIT|The MIT|Apache|PSF|Python Software Foundation)")
PYTHON_PARTS = {"torch": "BSD-3-Clause", "numpy": "BSD-3-Clause"}  # others are of bundled C and C++
WANTED = re.compile(r".*\.(py|rst|md)")
UNWANTED = re.compile(
    r"(^|/)(tests?|testing|.*_tests?|_?vendor(ed)?|third_party|externals?|_?generated)(/|$)"
    r"|(^|/)(_?tests?|test_[^/]*|[^/]*_test|testing_[^/]*|conftest)\.py$|^\.\.|dist-info"
)
GENERATED = re.compile(
    r"(?i)auto(matically)?[ -]?generated|generated (by|from|file)|do not (edit|modify)|@generated"
)


def make_text():
    documents = without_near_duplicates()
    totals = accumulate(len(document["text"]) for document in documents)
    n = 1 + sum(total < TEXT_CHARS for total in totals)
    write_documents(TEXT, documents[:n], 22)
    write_documents(TEACHER_TEXT, documents[n:], 3)
    print(f"{TEXT}: {n} documents, {TEACHER_TEXT}: {len(documents) - n}")


def write_documents(file, documents, level):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    file.write_bytes(zstandard.compress(lines.encode(), level))


def without_near_duplicates() -> list[dict]:
    """Return the documents without those of whose longer lines half are in earlier documents."""
    documents = []
    seen = set()
    for _, file, package in sorted(package_files()):
        text = file.locate().read_text("utf-8")
        lines = {line for line in map(str.strip, text.split("\n")) if len(line) >= 20}
        if is_prose_or_code(text) and lines and len(lines & seen) <= len(lines) / 2:
            seen |= lines
            documents.append({"name": str(file), "package": package, "text": text})
    return documents


def package_files():
    """Yield the sha256 of the name, the file, and its package with the licence."""
    for line in (ROOT / "requirements.lock").read_text().splitlines()[1:]:
        package = metadata.distribution(line.partition("==")[0])
        terms = licence(package.metadata)
        for file in package.files:
            name = str(file)
            if terms and WANTED.fullmatch(name) and not UNWANTED.search(name):
                yield hashlib.sha256(name.encode()).digest(), file, f"{line} ({terms})"


def is_prose_or_code(text) -> bool:
    """Return whether a text is neither short nor long, nor generated, nor a table of data."""
    return (
        500 <= len(text) <= 200_000
        and max(map(len, text.split("\n"))) <= 1000
        and len(re.findall("[0-9]", text)) < 0.12 * len(text)
        and not GENERATED.search(text[:2000])
    )


def licence(about) -> str:
    """Return the licence that a package names; empty if it is not of BSD, MIT, Apache and PSF."""
    classifiers = about.get_all("Classifier", [])
    names = [c.split(" :: ")[-1] for c in classifiers if c.startswith("License")]
    expression = PYTHON_PARTS.get(about["Name"]) or about.get("License-Expression")
    named = expression or " OR ".join(names) or about.get("License", "")
    return named if all(map(ALLOWED.match, re.split(r" AND | OR ", named))) else ""


def make_tokenizer():
    """Train a byte-level BPE on the teacher's text. Digits are split, as by the paper's teacher."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=[EOS], initial_alphabet=letters.alphabet()
    )
    with zstandard.open(TEACHER_TEXT, "rt") as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False
    ).save_pretrained(TEACHER)
    print(f"{TEACHER}: a tokenizer")


if __name__ == "__main__":
    steps = {"text": make_text, "tokenizer": make_tokenizer}
    steps.get(" ".join(sys.argv[1:]), lambda: sys.exit(__doc__))()
