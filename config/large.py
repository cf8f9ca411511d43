# ALRA with a student of 1.5B and a teacher of 32B, which does not fit on one card beside the
# student: both are sharded over eight cards.
#
#   python prepare.py config/large.py     5.2B tokens
#   torchrun --nproc_per_node=8 train.py config/large.py
#
# With --teacher_cache=True the first run stores the teacher's hidden states: 10 KB a token, 54 TB
# for all rows. Later runs load only the head, 1.6e9 of the teacher's 65e9 bytes, and read 1,000
# MB/s at 100,000 tokens/s.
#
# We have not run this.

methods = ("alra",)
# Qwen2.5-1.5B with the teacher's vocabulary: 1.54B
student = """{
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2,
    "vocab_size": 152064, "tie_word_embeddings": true, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768
}"""
teacher = "Qwen/Qwen2.5-32B"  # NAME@COMMIT pins a commit; run.json records the one used
data_dir = "data/pile_large"
n_documents = None
train_rows = 10_240_000
out_dir = "out/large"

batch_rows = 512  # 64 for each card
max_steps = 20_000  # * 512 rows * 512 inputs = 5.2B nominal tokens
schedule_steps = 20_000
lr = 3e-4
min_lr = 3e-5

shard = 8
recompute = True
compile = True
