# A study: forward batches of 4 rows, over which the batch statistics run.
#
#   python train.py config/mini_main.py config/mini_group4.py

methods = ("vanilla_kd", "atkd", "tad", "alra")
out_dir = "out/mini_group4"

group = 4
