# Unit, uniform and student-dependent pair weights (Table 4).
# 200M student.
#
#   python train.py config/table_pair_200m.py
#   python eval.py out/table_pair_200m
#   python eval.py --table out/table_pair_200m
#
# Not yet run here.
# Cost, computed and not measured: 7.1e18 FLOP, 16 GiB at micro_batch=1. At 40 % of the card's peak that is
# 5.0 h on an 80 GB H100 and 30 h on a 24 GB RTX 4090.

methods = ("alra_r", "alra_u", "alra")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/table_pair_200m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
compile = True
