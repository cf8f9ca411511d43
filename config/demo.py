# The demo: three students of 1.1M parameters learn from one teacher of 2.6M, on Python source.
#
#   make demo
#
# A few minutes on two cores. Paper settings but for the scale: shorter rows, two of them an update, few updates, a higher rate
# that ends lower, a longer warm-up; and rows in an order drawn from the seed.

methods = ("pretrain", "vanilla_kd", "alra")
student = "demo"
teacher = "demo/teacher"
data_dir = "data/demo"
out_dir = "out/demo"

source = "demo/text.jsonl.zst"  # Python source; about every 20th document is held out
n_documents = train_rows = None
val_rows, val_share = 0, 0.05
seq_len = 256

shuffle = True
max_steps = schedule_steps = 480  # * 2 rows = 0.24M tokens
batch_rows = micro_batch = 2
lr, min_lr = 5e-3, 3e-4
warmup_steps = 40
val_every_steps = 120
histogram_every_steps = 60  # for tools/plot.py
val_max_rows = 64
checkpoint_every_steps = 240
log_every_steps = 20
