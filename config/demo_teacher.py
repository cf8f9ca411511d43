# The demo's teacher: 2.6M parameters, plain pre-training, each document of its text at most once.
#
#   python demo/make.py text && python demo/make.py tokenizer
#   python prepare.py config/demo_teacher.py
#   python train.py config/demo_teacher.py
#
# study/LOG.md says what came of it; demo/make.py puts its weights into demo/teacher.

methods = ("pretrain",)
student = "demo_teacher"
teacher = None
tokenizer = "demo/teacher"
data_dir = "data/demo_teacher"
out_dir = "out/demo_teacher"

source = "data/demo_teacher/text.jsonl.zst"  # not the documents of the demo
n_documents = train_rows = None
val_rows, val_share = 0, 0.01
seq_len = 256

shuffle = True
max_steps = schedule_steps = 7600  # * 16 rows = 30M tokens
micro_batch = group = 16
lr, min_lr = 3e-3, 1e-4
warmup_steps = 200
clip = 1.0
val_every_steps = 500
val_max_rows = 256
checkpoint_every_steps = 250
log_every_steps = 50
compile = True
