# ALRA, a student of 1.5B from a teacher of 32B, on eight cards: where the teacher does not fit one card beside the student.
#
#   python prepare.py config/large.py     5.2B tokens; the first time, the tokenizer's folder comes with the teacher's weights
#   torchrun --nproc_per_node=8 --max_restarts=3 train.py config/large.py
#
# --teacher_cache=True keeps the teacher's hidden states: 10 KB a token, 54 TB for all rows. Filled ahead by `-m run.cache` under the
# same torchrun, the runs load none of its 65e9 bytes; 100,000 tokens/s then read 1,000 MB/s (of Qwen1.5-1.8B, at 4 KB a token: 400 MB/s).
#
# Not run here.

methods = ("alra",)
student = "config/large_student.json"  # the shape of Qwen2.5-1.5B with the teacher's vocabulary: 1.54B parameters
teacher = "Qwen/Qwen2.5-32B"  # no commit: NAME@COMMIT pins it; run.json records the one used
data_dir = "data/pile_large"
n_documents = None
train_rows = 10_240_000
out_dir = "out/large"

batch_rows = 512  # 64 for each card
micro_batch = 64  # one for each update and card: no gradient is added up before it is spread
max_steps = 20_000  # * 512 rows * 512 inputs = 5.2B nominal tokens
schedule_steps = 20_000
lr = 3e-4
min_lr = 3e-5

shard = 8
recompute = True
compile = True
