"""Print text that a model writes.

    python tools/sample.py out/demo/alra --prompt "def " --tokens 80 --temperature 0.8

It takes a student's folder, a checkpoint, any Hugging Face folder, or a hub id. An empty prompt is
the start of a document. The text ends with the document, or after --tokens. Temperature 0 takes the
most likely token each time.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.errors import UserError
from lib.hf import find_folder, load_tokenizer
from lib.tokens import leading_bos
from run.results import training_facts
from run.scoring import check_model
from run.teacher import Teacher, check_vocabulary, load_teacher

OPTIONS = {"prompt": "", "tokens": 100, "temperature": 0.8, "seed": 0}


@torch.no_grad()
def generate(model: Teacher, ids: list[int], eos: int, args) -> list[int]:
    """Return the ids with those that the model adds, up to its first `eos`."""
    for _ in range(args.tokens):
        z = model.head @ model.hidden(torch.tensor([ids]))[0, -1]  # [V]
        token = z.argmax()
        if args.temperature:
            token = torch.multinomial((z / args.temperature).softmax(-1), 1)
        ids = [*ids, int(token)]
        if token == eos:
            break
    return ids


def main(argv):
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("checkpoint")
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args(argv)
    if not args.temperature >= 0:  # NaN is refused too
        raise UserError(f"--temperature {args.temperature}: expected 0 or more")

    folder = find_folder(args.checkpoint)
    tokenizer = load_tokenizer(str(folder))
    model = load_teacher(str(folder), torch.float32, torch.device("cpu"))
    check_vocabulary(args.checkpoint, len(model.head), tokenizer)
    facts = training_facts(folder, {"bos": int | None, "made_by": {"shape": dict}})
    if facts:
        check_model(args.checkpoint, model.model, facts)
    bos = facts["bos"] if facts else leading_bos(tokenizer)  # starts a document, or None
    eos = tokenizer.eos_token_id
    first = eos if bos is None else bos
    prompt = [first, *tokenizer.encode(args.prompt, add_special_tokens=False)]
    torch.manual_seed(args.seed)
    ids = generate(model, prompt, eos, args)
    print(tokenizer.decode(ids[1:]))


if __name__ == "__main__":
    configure.run(main)
