# Unit, uniform and student-dependent pair weights (Table 4).
# 500M student.
#
#   python train.py config/table_pair_500m.py
#   python eval.py out/table_pair_500m
#   python eval.py --table out/table_pair_500m
#
# Not yet run here.
# Cost, computed and not measured: 12.1e18 FLOP, 28 GiB at micro_batch=1. At 40 % of the card's peak that is
# 8.5 h on an 80 GB H100; it does not fit a 24 GB card: split `methods` over several runs there.

methods = ("alra_r", "alra_u", "alra")
student = "500m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/table_pair_500m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
compile = True
