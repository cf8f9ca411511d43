"""Text from a checkpoint.

python tools/sample.py out/demo/alra --prompt "def " --tokens 80 --temperature 0.8
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import configure
from lib.files import UserError, read_json
from lib.hf import leading_bos, load_tokenizer
from model import Qwen2


@torch.no_grad()
def generate(model: Qwen2, ids: list[int], n: int, temperature: float, top_k: int | None, seed: int) -> list[int]:
    """`n` more ids after `ids`, drawn from softmax(z / temperature) over the `top_k` largest logits; 0 takes the largest."""
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(n), unit="token", delay=5, leave=False):
        context = torch.tensor([ids[-model.config.max_position_embeddings :]])
        z = model.hidden(context)[0, -1] @ model.head.T  # [V]
        if temperature == 0:
            ids = [*ids, int(z.argmax())]
            continue
        values, index = (z / temperature).topk(min(top_k or len(z), len(z)))
        ids = [*ids, int(index[torch.multinomial(values.softmax(0), 1, generator=generator)])]
    return ids


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a method's folder of a run, any Hugging Face folder, or a hub id")
    parser.add_argument("--prompt", default="", help="text to go on from; empty: the start of a document")
    parser.add_argument("--tokens", type=int, default=100, help="ids to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--top_k", type=int, help="draw from the most likely ones only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.temperature < 0 or args.tokens < 1 or (args.top_k or 1) < 1:
        raise ValueError("expected --temperature of 0 or more, --tokens and --top_k of at least 1")
    inside = Path(args.checkpoint) / "model"
    name = str(inside) if inside.is_dir() else args.checkpoint
    students = [str(path.parent) for path in sorted(Path(name).glob("*/model"))]
    if students:
        raise UserError(f"{name}: holds several students; name one of them: {', '.join(students)}")
    model, tokenizer = Qwen2.from_pretrained(name), load_tokenizer(name)
    run = Path(name).parent / "run.json"  # of a student: says which id stood before its documents
    student = Path(name).name == "model" and run.is_file()
    bos = read_json(run, {"bos?": int}).get("bos") if student else leading_bos(tokenizer)
    prompt = [tokenizer.eos_token_id if bos is None else bos, *tokenizer.encode(args.prompt, add_special_tokens=False)]
    ids = generate(model, prompt, args.tokens, args.temperature, args.top_k, args.seed)
    print(tokenizer.decode(ids[1:], skip_special_tokens=False))


def main() -> None:
    sys.exit(configure.guard(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
