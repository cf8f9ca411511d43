"""Print text that one or more models write.

    python tools/sample.py out/demo/alra --prompt "def" --tokens 80 --temperature 0.8
    python tools/sample.py demo/teacher out/demo/alra --prompt "def"

A model is a student's folder, a checkpoint, any Hugging Face folder, or a hub id. An empty prompt
is the start of a document. The text ends with the document, after --tokens, or where the model's
context is full. Temperature 0 takes the most likely token each time.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, f"{Path(__file__).parents[1]}")

import configure
from lib.errors import UserError
from lib.files import reading
from lib.settings import NonNegative, NonNegativeInt, checked

OPTIONS = {
    "tokens": (NonNegativeInt, 100),
    "temperature": (NonNegative, 0.8),
    "seed": (NonNegativeInt, 0),
}


def arguments(argv) -> argparse.Namespace:
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("names", nargs="+", metavar="MODEL")
    parser.add_argument("--prompt", default="")
    for key, (_, default) in OPTIONS.items():
        parser.add_argument(f"--{key}", type=type(default), default=default)
    args = parser.parse_args(argv)
    for key, (kind, _) in OPTIONS.items():
        checked(f"--{key}", getattr(args, key), kind)
    with reading("--prompt", "expected UTF-8"):
        args.prompt.encode()
    return args


if __name__ == "__main__":
    configure.check_flags(arguments)

import torch

from lib.metrics import logits_of
from lib.tokens import leading_bos
from run.scoring import Opened, open_model


@torch.no_grad()
def generate(m: Opened, ids: list[int], args) -> list[int]:
    """Return the ids with those that the model adds, up to its first EOS."""
    n_most = len(ids) + args.tokens
    if m.context:
        n_most = min(n_most, m.context + 1)
    while len(ids) < n_most:
        h = m.model.hidden(torch.tensor([ids]))[0, -1:]  # [1, D]
        z = logits_of(h, m.model.head)[0]  # [V]
        token = z.argmax()
        if args.temperature:
            z = z.double() - z.max()  # at most 0: none is too large for a small temperature
            token = torch.multinomial((z / args.temperature).softmax(-1), 1)
        ids = [*ids, int(token)]
        if token == m.tokenizer.eos_token_id:
            break
    return ids


def encode(name, m: Opened, prompt: str) -> list[int]:
    """Return the ids of a prompt, after the token that starts a document."""
    bos = m.run["bos"] if m.run else leading_bos(m.tokenizer)
    first = m.tokenizer.eos_token_id if bos is None else bos
    ids = m.tokenizer.encode(prompt, add_special_tokens=False)
    longer = m.tokenizer.encode(f"{prompt}a", add_special_tokens=False)
    if prompt != prompt.rstrip() and longer[: len(ids)] != ids:
        print(
            f"{name}: --prompt ends in a blank, which this tokenizer joins to the next word; leave "
            "it out, or the text goes on with a piece of a word",
            file=sys.stderr,
        )
    if m.context and len(ids) >= m.context:
        raise UserError(f"--prompt: {len(ids) + 1} tokens with the first, {name} takes {m.context}")
    return [first, *ids]


def main(argv):
    args = arguments(argv)
    for name in args.names:
        m = open_model(name, {"bos": int | None, "made_by": {"shape": dict}})
        if len(args.names) > 1:
            print(f"--- {name}")
        torch.manual_seed(args.seed)
        ids = generate(m, encode(name, m, args.prompt), args)
        print(m.tokenizer.decode(ids[1:]))


if __name__ == "__main__":
    configure.run(main)
