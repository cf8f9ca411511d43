# Candidate sets with no anchor, the label, the teacher's top-1, and both (Table 3).
# 500M student.
#
#   python train.py config/table_anchor_500m.py
#   python eval.py out/table_anchor_500m --split validation
#   python eval.py --table out/table_anchor_500m
#
# Not yet run here.
# Cost, computed and not measured: 8.0e18 FLOP, 36 GiB at micro_batch=1. At 40 % of the card's peak that is
# 5.6 h on an 80 GB H100; it does not fit a 24 GB card: split `methods` over several runs there.

methods = ("alra_n", "alra_ng", "alra", "alra_g")
student = "500m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/table_anchor_500m"

max_steps = 67_200  # * 16 rows * 512 inputs = 550.5M nominal tokens, on the schedule of the whole 126,400
compile = True
