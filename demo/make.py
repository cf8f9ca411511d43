"""How the files in demo/ were made. None of it is needed to run the demo.

    python demo/make.py text        demo/text.jsonl.zst, its licences, and the teacher's own text, in data/demo_teacher
    python demo/make.py tokenizer   4,096 entries, from the teacher's text
    python prepare.py config/demo_teacher.py && python train.py config/demo_teacher.py
    python demo/make.py weights out/demo_teacher/pretrain/model    bfloat16 weights beside the tokenizer

The text is Python source and documentation of the packages in requirements.lock, as installed. Documents come in the order
of the sha256 of their names. The first TEXT_CHARS characters are those of the students, all others the teacher's.
"""

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lib.documents import read_files  # noqa: E402
from lib.files import atomic_write  # noqa: E402
from model import Qwen2, load_tokenizer  # noqa: E402

DEMO, TEACHER_TEXT = ROOT / "demo", ROOT / "data/demo_teacher/text.jsonl.zst"
EOS, VOCAB, TEXT_CHARS = "<|endoftext|>", 4096, 15_500_000

ALLOWED = re.compile(r"[(\s]*(BSD|MIT|The MIT|Apache|PSF|Python Software Foundation)")
OWN = {"torch": "BSD-3-Clause", "numpy": "BSD-3-Clause"}  # of their Python; the others are of bundled C and C++
UNWANTED = re.compile(r"(^|/)(tests?|testing|.*_tests?|_?vendor(ed)?|third_party|externals?|_?generated)(/|$)"
                      r"|(^|/)(_?tests?|test_[^/]*|[^/]*_test|testing_[^/]*|conftest)\.py$|^\.\.|dist-info")  # fmt: skip
GENERATED = re.compile(r"(?i)auto(matically)?[ -]?generated|generated (by|from|file)|do not (edit|modify)|@generated")


def licence(package: metadata.Distribution) -> str:
    """The licence that a package names; empty if another than BSD, MIT, Apache and PSF is among them."""
    about = package.metadata
    names = [c.split(" :: ")[-1] for c in about.get_all("Classifier", []) if c.startswith("License")]
    named = OWN.get(about["Name"]) or about.get("License-Expression") or " OR ".join(names) or about.get("License", "")
    return named if all(map(ALLOWED.match, re.split(r" AND | OR ", named))) else ""


def wanted(text: str) -> bool:
    """Neither very short nor very long, nor generated, nor a table of data."""
    n_digits, longest = sum(map(text.count, "0123456789")), max(map(len, text.split("\n")))
    return (
        500 <= len(text) <= 200_000
        and longest <= 1000
        and n_digits < 0.12 * len(text)
        and not GENERATED.search(text[:2000])
    )


def documents() -> Iterator[dict]:
    """Those of all packages that are not near-duplicates: half of a document's longer lines are in none before it."""
    files = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines()[1:]:
        package = metadata.distribution(line.partition("==")[0])
        if terms := licence(package):
            inside = (
                f for f in package.files or [] if f.suffix in (".py", ".rst", ".md") and not UNWANTED.search(str(f))
            )
            files |= {str(f): (f, f"{line} ({terms})") for f in inside}
    seen = set()
    for name in tqdm(sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()), unit="file"):
        file, package = files[name]
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        lines = {line.strip() for line in text.split("\n") if len(line.strip()) >= 20}
        if wanted(text) and lines and len(lines & seen) <= len(lines) / 2:
            seen |= lines
            yield {"name": name, "package": package, "text": text}


def make_text() -> None:
    """The students' and the teacher's documents, the licences of the first, the names and hashes of the second."""
    students, others, n_chars = [], [], 0
    for document in documents():
        (students if n_chars < TEXT_CHARS else others).append(document)
        n_chars += len(document["text"])
    TEACHER_TEXT.parent.mkdir(parents=True, exist_ok=True)
    for file, records, level in ((DEMO / "text.jsonl.zst", students, 22), (TEACHER_TEXT, others, 3)):
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        atomic_write(file, zstandard.ZstdCompressor(level=level, threads=0).compress(lines))
        print(f"{file}: {len(records):,} documents, {sum(len(r['text']) for r in records):,} characters")
    hashes = (f"{hashlib.sha256(r['text'].encode()).hexdigest()}  {r['name']}\n" for r in others)
    atomic_write(DEMO / "teacher.sha256", "".join(hashes).encode())
    counts, texts = Counter(r["package"] for r in students), {}
    for package in sorted(counts, key=str.lower):
        files = metadata.distribution(package.partition("==")[0]).files
        found = sorted(
            (f for f in files if re.match(r"(?i)licen[cs]e|copying", f.name)), key=lambda f: (len(f.parts), str(f))
        )
        terms = (
            "\n".join(line.rstrip() for line in found[0].read_text("utf-8").splitlines()) if found else "no file of it"
        )
        texts.setdefault(terms, []).append(f"{package}: {counts[package]} documents")
    sections = ("\n".join(["=" * 80, *names, "=" * 80, "", terms, ""]) for terms, names in texts.items())
    atomic_write(DEMO / "LICENSES.txt", "\n".join(sections).encode())


def make_tokenizer() -> None:
    """Byte-level BPE with digits apart, as the teacher of the paper has it, on the teacher's text."""
    tokenizer = Tokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        (document["text"] for document in read_files([str(TEACHER_TEXT)], str(ROOT), "text")),
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=alphabet),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)
    fast.save_pretrained(DEMO / "teacher")
    print(f"{len(fast):,} entries in demo/teacher")


def copy_weights(folder: str) -> None:
    model = Qwen2.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(DEMO / "teacher", load_tokenizer(str(DEMO / "teacher")))
    print(f"{model.n_params:,} parameters in demo/teacher")


if __name__ == "__main__":
    if sys.argv[1:] == ["text"]:
        make_text()
    elif sys.argv[1:] == ["tokenizer"]:
        make_tokenizer()
    elif sys.argv[1:2] == ["weights"] and len(sys.argv) == 3:
        copy_weights(sys.argv[2])
    else:
        sys.exit(__doc__)
