# The paper's Table 4: unit, uniform and student-dependent pair weights.
#
#   python train.py config/table_pair.py
#   python eval.py out/table_pair
#   python eval.py --table out/table_pair
#   python train.py config/table_pair.py --student=500m --out_dir=out/table_pair_500m
#
# The rows are those of config/alra_200m.py. We have not run this yet.
# Computed, not measured; hours at 40 % of an H100's peak:
#   200m  7.1e18 FLOP, 5.0 h
#   500m  12.1e18 FLOP, 8.5 h

methods = ("alra_r", "alra_u", "alra")
student = "200m"
out_dir = "out/table_pair"
device = "cuda"
compile = True
