# The paper's Table 3: no anchor, the label, the teacher's top-1 token, or both.
#
#   python train.py config/table_anchor.py
#   python eval.py out/table_anchor --split validation
#   python eval.py --table out/table_anchor
#   python train.py config/table_anchor.py --student=500m --out_dir=out/table_anchor_500m
#
# The rows are those of config/alra_200m.py. We have not run this yet.
# Computed, not measured; hours at 40 % of an H100's peak:
#   200m  4.5e18 FLOP, 3.1 h
#   500m  8.0e18 FLOP, 5.6 h

methods = ("alra_n", "alra_ng", "alra", "alra_g")
student = "200m"
out_dir = "out/table_anchor"
max_steps = 67_200  # of a schedule of 126,400, as in the paper
device = "cuda"
compile = True
