# The demo's teacher: 5.8M parameters on the text that comes with Python, by plain pre-training.
#
#   python prepare.py config/demo.py
#   python train.py config/demo_teacher.py
#
# results/LOG.md says what came of it; demo/make.py puts its weights into demo/teacher.

methods = ("pretrain",)
student = "demo_teacher"
teacher = None
tokenizer = "demo/teacher"
data_dir = "data/demo"
out_dir = "out/demo_teacher"

source = "python"  # all of the text that comes with Python; about every 20th document is held out
n_documents = train_rows = None
val_rows, val_share = 0, 0.05
seq_len = 256

shuffle = True
repeat_rows = True
max_steps = schedule_steps = 2000
micro_batch = 16
lr, min_lr = 2e-3, 1e-4
warmup_steps = 200
clip = 1.0
val_every_steps = 250
val_max_rows = 256
checkpoint_every_steps = 250
log_every_steps = 25
dtype = "bfloat16"  # on the CPU too: half the time
