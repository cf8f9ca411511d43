# The paper's Table 1: every method from one forward pass of the teacher.
#
#   python train.py config/table_main.py
#   python eval.py out/table_main
#   python eval.py --table out/table_main
#   python train.py config/table_main.py --student=500m --out_dir=out/table_main_500m
#
# The rows are those of config/alra_200m.py. We have not run this yet.
# Computed, not measured; hours at 40 % of an H100's peak:
#   200m  14.8e18 FLOP, 10.4 h
#   500m  29.9e18 FLOP, 21.0 h
# docs/running.md has the memory: on an H100, 500m needs --recompute=True. Or divide `methods` among
# several runs.

methods = ("pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra")
student = "200m"
out_dir = "out/table_main"
device = "cuda"
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4
