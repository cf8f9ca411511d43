# The demo: four students of 1.1M parameters learn from one teacher of 2.6M, on Python source.
#
#   make demo
#
# It takes a few minutes on two cores. The settings are the paper's, except that rows are shorter,
# and shuffled; updates have two rows and are few; the learning rate is higher, and falls to 6 % of
# its peak (in the paper 10 %); the warm-up is a larger share.

methods = ("pretrain", "vanilla_kd", "vanilla_kd@kl", "alra")
hyper = {"vanilla_kd@kl": {"w_kd": 1, "w_ce": 0, "tau": 1}}  # KL alone: ALRA has no labels either
student = "demo"
teacher = "demo/teacher"
data_dir = "data/demo"
out_dir = "out/demo"

source = "demo/text.jsonl.zst"  # Python source
n_documents = None
train_rows = None
val_rows = 0
val_share = 0.05
seq_len = 256

shuffle = True
max_steps = 480  # * 2 rows = 0.25M tokens
schedule_steps = 480
batch_rows = 2
micro_batch = 2
lr = 1.5e-3
min_lr = 9e-5
warmup_steps = 40
val_every_steps = 120
histogram_every_steps = 60  # for tools/plot.py
val_max_rows = 64
checkpoint_every_steps = 240
log_every_steps = 20
