# A study: four times as many updates, at the learning rates that 150 updates chose. Does what they show last?
#
#   python train.py config/mini_main.py config/mini_long.py

methods = ("pretrain", "vanilla_kd", "tad", "alra", "fixed_9", "alra_n")
out_dir = "out/mini_long"

max_steps = schedule_steps = 600  # 1.23M nominal tokens
warmup_steps = 60
val_every_steps = 600
