# Study A with a larger teacher and larger students, for ten minutes on one card. What is not set
# here is study/small.py's: text, rows, updates. run.sh trains teacher and students, and
# study/LOG.md has what is expected of them.

methods = ("pretrain", "vanilla_kd", "vanilla_kd@kl", "alra", "alra@ce")
student = "256x6x8"  # 5.9M parameters
teacher = "out/card/teacher/pretrain/model"
val_max_rows = None  # all 947: no trial has read them
histogram_every_steps = None
teacher_cache = False  # computing hidden states takes less time than storing them
repeat_rows = False

# one rate for all, the middle of study A's best rates
hyper = {name: {"lr": 1.32e-3} for name in methods}
