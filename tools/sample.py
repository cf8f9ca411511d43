"""Text from a checkpoint, by transformers.

python tools/sample.py out/demo/alra --prompt "def " --tokens 80 --temperature 0.8
"""

import argparse
import re
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import configure
from lib.errors import require
from lib.files import reading
from lib.hf import find_folder, load_tokenizer
from lib.tokens import leading_bos
from run.tables import run_facts


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("checkpoint", help="a method's folder of a run, any Hugging Face folder, or a hub id")
    add("--prompt", default="", help="text to continue; empty: the start of a document")
    add("--tokens", type=int, default=100, help="ids to add at most; the end of the document ends the text")
    add("--temperature", type=float, default=0.8, help="0: always the most likely token")
    add("--top_k", type=int, default=0, help="draw from the most likely ones only; 0: from all")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    fits = (args.temperature == 0 or 1e-3 <= args.temperature <= 1e3) and args.tokens >= 1 and args.top_k >= 0
    require(fits, "expected a --temperature of 0, or of 0.001 to 1000, --top_k of 0 or more, --tokens of at least 1")
    require(not re.search("[\ud800-\udfff]", args.prompt), "--prompt: expected UTF-8")
    inside = [str(path) for path in sorted(Path(args.checkpoint).glob("*/"))]
    students = [path for path in inside if find_folder(path).name == "model"] or [args.checkpoint]
    require(len(students) == 1, f"{args.checkpoint}: has several students; choose one: {', '.join(students)}")
    args.checkpoint = students[0]
    transformers.logging.disable_progress_bar()
    folder, tokenizer = find_folder(args.checkpoint), load_tokenizer(args.checkpoint)
    with reading(folder, "choose another checkpoint"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    v, n = model.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values()) + 1
    require(n <= v, f"{folder}: vocabulary of {v:,}, but its tokenizer has {n:,} tokens; choose another checkpoint")
    facts = run_facts(folder, ["bos"])
    bos = facts["bos"] if facts else leading_bos(tokenizer)  # the id that stood before its documents
    first = tokenizer.eos_token_id if bos is None else bos
    prompt = torch.tensor([[first, *tokenizer.encode(args.prompt, add_special_tokens=False)]])
    drawn = {"temperature": args.temperature, "top_k": args.top_k} if args.temperature else {}
    torch.manual_seed(args.seed)
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.tokens, do_sample=bool(drawn),
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id, **drawn)  # fmt: skip
    print(tokenizer.decode(ids[0, 1:], skip_special_tokens=False))


if __name__ == "__main__":
    sys.exit(configure.guard(lambda: main(sys.argv[1:])))
