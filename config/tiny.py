# The smallest comparison, which shows the path and not which method is better: students of 0.36M parameters, 100 updates of 512 inputs, the demo's teacher.
#
#   python study/compare.py config/tiny.py --methods=vanilla_kd,alra --seeds=3    minutes on two cores

methods = ("vanilla_kd", "alra")
student = "mini"
teacher = "demo/teacher"
data_dir = "data/tiny"
out_dir = "out/tiny"

source = "demo/text.jsonl.zst"  # Python source; about every 20th document is held out
n_documents = train_rows = None
val_rows, val_share = 0, 0.05
seq_len = 64

shuffle = True
max_steps = schedule_steps = 100
batch_rows = micro_batch = 8
lr, min_lr = 1e-2, 1e-3
warmup_steps = 10
val_every_steps = 25
val_max_rows = 128
checkpoint_every_steps = 25
keep_checkpoints = 1
histogram_every_steps = 25
teacher_cache = True

_compare = {"tune": ("lr=3e-3,1e-2,3e-2",)}  # what compare.py tries unless it is told otherwise
