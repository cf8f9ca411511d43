"""How the files in demo/teacher were made.

    python demo/make.py tokenizer                                  4,096 entries, from the training documents
    python prepare.py config/demo.py && python train.py config/demo_teacher.py
    python demo/make.py weights out/demo_teacher/pretrain/model    bfloat16 weights beside the tokenizer

None of it is needed to run the demo. The second file of weights holds the zeros that `Qwen2.save_pretrained` writes for a
tokenizer that is not Qwen's.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import configure  # noqa: E402
from model import Qwen2, load_tokenizer  # noqa: E402
from prepare import held_out, python_documents  # noqa: E402

EOS, VOCAB = "<|endoftext|>", 4096


def make_tokenizer() -> None:
    """Byte-level BPE with digits apart, as the teacher of the paper has it, on the documents that are not held out."""
    share = configure.load([str(ROOT / "config/demo.py")]).val_share
    texts = (document["text"] for document in python_documents() if not held_out(document, share))
    tokenizer = Tokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)
    fast.save_pretrained(ROOT / "demo/teacher")
    print(f"{len(fast):,} entries in demo/teacher")


def copy_weights(folder: str) -> None:
    model = Qwen2.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(ROOT / "demo/teacher", load_tokenizer(str(ROOT / "demo/teacher")))
    print(f"{model.n_params:,} parameters in demo/teacher")


if __name__ == "__main__":
    if sys.argv[1:] == ["tokenizer"]:
        make_tokenizer()
    elif sys.argv[1:2] == ["weights"] and len(sys.argv) == 3:
        copy_weights(sys.argv[2])
    else:
        sys.exit(__doc__)
