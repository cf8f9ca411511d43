# Qwen3-1.7B-Base teaches a student of 203M parameters on FineWeb-Edu's sample of 10B tokens.
#
#   python prepare.py config/qwen3_200m.py     9.4 GB of rows, once
#   python train.py config/qwen3_200m.py
#   python eval.py out/qwen3_200m/alra
#
# The learning rate stays at its peak until update 32,400. Any earlier checkpoint can begin a
# longer run, or a branch. In this one the rate falls from update 27,000 to update 30,000:
#
#   --resume_from=out/qwen3_200m/alra/checkpoints/step_00027000
#   --max_steps=30000 --schedule_steps=30000 --out_dir=out/qwen3_200m_30k
#
# NAME@COMMIT pins a commit of teacher and corpus; run.json and train.json record those used.
# We have not run this.

methods = ("alra",)
student = "200m"  # with the teacher's vocabulary, rope base, norm epsilon and context
teacher = "Qwen/Qwen3-1.7B-Base"  # documents of Qwen3-1.7B would end with a token of chats
data_dir = "data/fineweb_edu_qwen3"
out_dir = "out/qwen3_200m"

source = "HuggingFaceFW/fineweb-edu"
source_config = "sample-10BT"
n_documents = None
train_rows = 2_304_000
seq_len = 1024

max_steps = 36_000  # * 64 rows * 1,024 inputs = 2.36B nominal tokens
schedule_steps = 36_000
batch_rows = 64
lr_schedule = "wsd"
checkpoint_every_steps = 9_000
keep_every_steps = 9_000
compile = True
