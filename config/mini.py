# The replication that one machine can afford: students of 0.36M parameters, the main table's nine methods.
#
#   python replicate.py                       every method, variant and study, five seeds (README, "Results")
#   python prepare.py config/mini.py          by hand: the rows,
#   python train.py config/mini.py            and one seed of the nine methods, one learning rate for all
#
# What differs from the paper's appendix D beside the sizes, and why:
#   learning rate   chosen per method by replicate.py; falls to a tenth of its peak, as there
#   warm-up         15 updates of 150; 512 of 126,400 would be one
#   order of rows   drawn from the seed, so that seeds differ in it; the paper has one order and one seed

methods = ("pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra")
student = "mini"
teacher = "demo/teacher"
data_dir = "data/mini"
out_dir = "out/mini"

source = "python"
n_documents = None
train_rows = None
val_rows = 0
val_share = 0.05
seq_len = 128

shuffle = True
max_steps = schedule_steps = 150  # * 16 rows * 128 inputs = 0.31M nominal tokens
batch_rows = micro_batch = 16
lr = 3e-3
min_lr = 3e-4
warmup_steps = 15
val_every_steps = 150
val_max_rows = 256
checkpoint_every_steps = 50
keep_checkpoints = 1
histogram_every_steps = 10
