# Pythia-410M teaches a student of Pythia-160M's size (162.2M: width 768, 12 layers) on The Pile, its own corpus.
#
#   python prepare.py config/pythia_160m.py    8.0 GB of rows, once
#   python train.py config/pythia_160m.py
#   python eval.py out/pythia_160m/alra
#   python train.py config/pythia_160m.py --teacher=EleutherAI/pythia-410m@step64000 --out_dir=out/pythia_step64000
#
# The last line takes an earlier checkpoint of the teacher, where that revision has safetensors. Transformers computes the
# teacher (GPT-NeoX); the student is a Llama-like decoder, head and embedding apart as in Pythia.
#
# Not run here.

methods = ("alra",)
student = '{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "tie_word_embeddings": false}'
teacher = "EleutherAI/pythia-410m"  # no commit: NAME@COMMIT pins it; run.json records the one used
data_dir = "data/pile_pythia"
out_dir = "out/pythia_160m"

source = "monology/pile-uncopyrighted@3be90335b66f24456a5d6659d9c8d208c0357119"
n_documents = None
train_rows = 1_953_152
seq_len = 1024

max_steps = schedule_steps = 30_518  # * 64 rows * 1,024 inputs = 2.0B nominal tokens
batch_rows = 64
compile = True
