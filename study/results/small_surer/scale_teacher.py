"""Write a teacher with FACTOR times the logits of another one: surer if FACTOR is above 1.

    python study/results/small_surer/scale_teacher.py demo/teacher 1.05 data/demo_teacher_surer

The factor multiplies the weight of the final norm, and so all logits. It is the inverse of a
temperature: no token changes its rank. The copy is in fp32. eval.py prints its CE and entropy:

    python eval.py demo/teacher --teacher data/demo_teacher_surer --rows data/demo --tasks none
"""

import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def main(teacher, factor, out):
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    model.model.norm.weight.data *= float(factor)
    model.save_pretrained(out)
    PreTrainedTokenizerFast.from_pretrained(teacher).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:] or sys.exit(__doc__))
