# Qwen3-1.7B-Base teaches a student of 203M parameters on FineWeb-Edu's sample of 10B tokens.
#
#   python prepare.py config/qwen3_200m.py     9.4 GB of rows, once
#   python train.py config/qwen3_200m.py
#   python eval.py out/qwen3_200m/alra
#   python train.py config/qwen3_200m.py --resume_from=out/qwen3_200m/alra/checkpoints/step_00027000 --max_steps=30000 --schedule_steps=30000 --out_dir=out/qwen3_200m_30k
#
# The last line is a branch: the rate falls over the last 10 % of 30,000 updates, which are those after update 27,000.
# Not run here. Teacher and corpus have no commit: NAME@COMMIT pins one; run.json and train.json record those used.

methods = ("alra",)
student = "200m"  # vocabulary, rope base, norm epsilon and context are the teacher's
teacher = "Qwen/Qwen3-1.7B-Base"  # not Qwen3-1.7B, whose documents would end with a token of chats
data_dir = "data/fineweb_edu_qwen3"
out_dir = "out/qwen3_200m"

source = "HuggingFaceFW/fineweb-edu"
source_config = "sample-10BT"
n_documents = None
train_rows = 2_304_000
seq_len = 1024

max_steps = schedule_steps = 36_000  # * 64 rows * 1,024 inputs = 2.36B nominal tokens
batch_rows = 64
lr_schedule = "wsd"  # the rate stays until update 32,400; before that a longer run or a branch can begin
checkpoint_every_steps = keep_every_steps = 9_000
compile = True
