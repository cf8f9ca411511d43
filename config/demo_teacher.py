# The demo's teacher: 2.6M parameters, pre-trained on each document of its text at most once.
#
#   python demo/make.py text && python demo/make.py tokenizer
#   python prepare.py config/demo_teacher.py
#   python train.py config/demo_teacher.py
#
# demo/make.py says how its weights came into demo/teacher; study/LOG.md reports the run.

methods = ("pretrain",)
student = "demo_teacher"
teacher = None
tokenizer = "demo/teacher"
data_dir = "data/demo_teacher"
out_dir = "out/demo_teacher"

source = "data/demo_teacher/text.jsonl.zst"  # not the documents of the demo
n_documents = None
train_rows = None
val_rows = 0
val_share = 0.01
seq_len = 256

shuffle = True
max_steps = 7600  # * 16 rows = 31M tokens
schedule_steps = 7600
micro_batch = 16
group = 16
lr = 3e-3
min_lr = 1e-4
warmup_steps = 200
clip = 1.0
val_every_steps = 500
val_max_rows = 256
checkpoint_every_steps = 250
log_every_steps = 50
save_dtype = "bfloat16"
compile = True
