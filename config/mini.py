# The replication that one machine can afford: students of 0.36M parameters, the main table's nine methods.
#
#   python tools/compare.py config/mini.py --jobs=2    every method with five seeds, four variants with three: hours
#
# What differs from the paper's appendix E beside the sizes, and why:
#   learning rate   chosen per method by compare.py; falls to a tenth of its peak, as there
#   warm-up         15 updates of 150; 512 of 126,400 would be one
#   order of rows   drawn from the seed, so that seeds differ in it; the paper has one order and one seed

methods = ("pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra")
student = "mini"
teacher = "demo/teacher"
data_dir = "data/mini"
out_dir = "out/mini"

source = "python"  # all of the text that comes with Python; about every 20th document is held out
n_documents = train_rows = None
val_rows, val_share = 0, 0.05
seq_len = 128

shuffle = True
max_steps = schedule_steps = 150  # * 16 rows * 128 inputs = 0.31M nominal tokens
micro_batch = 16
lr, min_lr = 3e-3, 3e-4
warmup_steps = 15
val_every_steps = 150
val_max_rows = 256
checkpoint_every_steps = 50
keep_checkpoints = 1
histogram_every_steps = 10

_variants = ("alra_u", "alra_n", "fixed_9", "fixed_25")
_compare = {
    "title": "Replication at a small scale",
    "seeds": 5,
    "fewer_seeds": dict.fromkeys(_variants, 3),
    "tune": ("lr=3e-4,1e-3,3e-3,1e-2,3e-2",),
    "tables": (
        ("Methods and variants", methods + _variants, "vanilla_kd"),
        ("Variants of ALRA", _variants, "alra"),
    ),
    "paper": True,
}
methods += _variants
