# Pythia-410M teaches a student of Pythia-160M's size on The Pile, Pythia's own corpus.
#
#   python prepare.py config/pythia_160m.py     8.0 GB of rows, once
#   python train.py config/pythia_160m.py
#   python eval.py out/pythia_160m/alra
#
# The student is a Llama-like decoder of 162.2M parameters: width 768, 12 layers, and an untied
# head as in Pythia. Transformers computes the teacher (GPT-NeoX). An earlier checkpoint can teach
# too, if its revision has safetensors: --teacher=EleutherAI/pythia-410m@step64000.
#
# We have not run this.

methods = ("alra",)
student = (
    '{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,'
    ' "tie_word_embeddings": false}'
)
teacher = "EleutherAI/pythia-410m"  # NAME@COMMIT pins a commit; run.json records the one used
data_dir = "data/pile_pythia"
out_dir = "out/pythia_160m"

source = "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119"
n_documents = None
train_rows = 1_953_152
seq_len = 1024

max_steps = 30_518  # * 64 rows * 1,024 inputs = 2.0B nominal tokens
schedule_steps = 30_518
batch_rows = 64
compile = True
