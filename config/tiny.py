# The smallest comparison: students of 0.36M parameters, the demo's teacher, 100 updates.
#
#   python study/compare.py config/tiny.py --methods=vanilla_kd,alra --seeds=3
#
# It takes minutes on two cores. It shows how a comparison works, not which method is better.

methods = ("vanilla_kd", "alra")
student = "mini"
teacher = "demo/teacher"
data_dir = "data/tiny"
out_dir = "out/tiny"

source = "demo/text.jsonl.zst"  # Python source
n_documents = None
train_rows = None
val_rows = 0
val_share = 0.05
seq_len = 64

shuffle = True
max_steps = 100  # * 8 rows * 64 inputs
schedule_steps = 100
batch_rows = 8
micro_batch = 8
lr = 1e-2
min_lr = 1e-3
warmup_steps = 10
val_every_steps = 25
val_max_rows = 128
checkpoint_every_steps = 25
keep_checkpoints = 1
histogram_every_steps = 25
teacher_cache = True

_compare = {"tune": ("lr=3e-3,1e-2,3e-2",)}  # what study/compare.py tries by default
