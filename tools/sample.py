"""Print text that one or more models write.

    python tools/sample.py out/demo/alra --prompt "def" --tokens 80 --temperature 0.8
    python tools/sample.py demo/teacher out/demo/alra --prompt "def"

A model is a student's folder, a checkpoint, any Hugging Face folder, or a hub id. The folder of a
run stands for its students. An empty prompt is the start of a document; do not end one in a blank,
which most tokenizers join to the next word. The text ends with the document, after --tokens, or
where the model's context is full. Temperature 0 takes the most likely token each time.
"""

import sys
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from pathlib import Path

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.errors import UserError
from lib.settings import NonNegative, checked


def arguments(argv) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="MODEL")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    checked("--temperature", args.temperature, NonNegative)
    return args


if __name__ == "__main__":
    configure.check_flags(arguments)

import torch

from lib.head import Head
from run.results import has_model, students_of
from run.saved_models import Checkpoint, open_checkpoint
from run.teacher import load_model


@torch.no_grad()
def generate(c: Checkpoint, ids: list[int], args) -> list[int]:
    """Return the ids with those that the model adds, up to its first EOS."""
    model = load_model(c.folder)
    n_most = min(len(ids) + args.tokens, c.context + 1)
    while len(ids) < n_most:
        h = model.hidden(torch.tensor([ids]))
        z = Head(h[:, -1:], model.head).logits()[0]  # [V]
        token = z.argmax()
        if args.temperature:
            token = torch.multinomial((z.double() / args.temperature).softmax(-1), 1)
        ids = [*ids, int(token)]
        if token == c.tokenizer.eos_token_id:
            break
    return ids


def main(argv):
    args = arguments(argv)
    names = students_of(args.names, has_model)
    for name in names:
        c = open_checkpoint(str(name))
        if len(names) > 1:
            print(f"--- {name}")
        torch.manual_seed(args.seed)
        ids = c.encode(args.prompt)
        if len(ids) > c.context:
            raise UserError(f"--prompt: {len(ids)} tokens with the first, {name} takes {c.context}")
        print(c.tokenizer.decode(generate(c, ids, args)[1:]))


if __name__ == "__main__":
    configure.run(main)
