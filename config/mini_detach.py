# A study: the gradient goes through the SWPRA weights too.
#
#   python train.py config/mini_main.py config/mini_detach.py

methods = ("alra",)
out_dir = "out/mini_detach"

detach_weights = False
