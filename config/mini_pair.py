# Uniform and unit pair weights, to be held against alra.
#
#   python train.py config/mini_main.py config/mini_pair.py

methods = ("alra_u", "alra_r")
out_dir = "out/mini_pair"
