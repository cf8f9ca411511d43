# The smallest comparison that shows something: students of 0.36M parameters, 100 updates of 512 inputs, the demo's teacher.
#
#   python compare.py config/tiny.py --methods=vanilla_kd,alra --seeds=3     minutes on two cores
#   python prepare.py config/tiny.py                                         by hand: the rows,
#   python train.py config/tiny.py                                           and one seed

methods = ("vanilla_kd", "alra")
student = "mini"
teacher = "demo/teacher"
data_dir = "data/tiny"
out_dir = "out/tiny"

source = "python"
n_documents = None
train_rows = None
val_rows = 0
val_share = 0.05
seq_len = 64

shuffle = True
max_steps = schedule_steps = 100
batch_rows = micro_batch = 8
lr = 1e-2
min_lr = 1e-3
warmup_steps = 10
val_every_steps = 25
val_max_rows = 128
checkpoint_every_steps = 25
keep_checkpoints = 1
histogram_every_steps = 25

_compare = {"tune": ("lr=3e-3,1e-2,3e-2",)}  # what compare.py tries unless it is told otherwise
