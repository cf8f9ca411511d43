# Candidate sets with no anchor, the label, and both, to be held against alra.
#
#   python train.py config/mini_main.py config/mini_anchor.py

methods = ("alra_n", "alra_ng", "alra_g")
out_dir = "out/mini_anchor"
