# Candidate sets with no anchor, the label, the teacher's top-1, and both (Table 3).
# 200M student.
#
#   python train.py config/table_anchor_200m.py
#   python eval.py out/table_anchor_200m --split validation
#   python eval.py --table out/table_anchor_200m
#
# Not yet run here.
# Cost, computed and not measured: 4.5e18 FLOP, 19 GiB at micro_batch=1. At 40 % of the card's peak that is
# 3.1 h on an 80 GB H100 and 19 h on a 24 GB RTX 4090.

methods = ("alra_n", "alra_ng", "alra", "alra_g")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/table_anchor_200m"

max_steps = 67_200  # * 16 rows * 512 inputs = 550.5M nominal tokens, on the schedule of the whole 126,400
compile = True
