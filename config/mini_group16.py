# A study: forward batches of 16 rows, over which the batch statistics run.
#
#   python train.py config/mini_main.py config/mini_group16.py

methods = ("vanilla_kd", "atkd", "tad", "alra")
out_dir = "out/mini_group16"

group = 16
