# Pre-train w/o KD: causal language modelling alone.
# 500M student, the paper's Table 1, second block.
#
#   python train.py config/pretrain_500m.py
#   python eval.py out/pretrain_500m/pretrain
#
# The paper's average over nine tasks is 34.48; not yet run here.
# Cost, computed and not measured: 3.0e18 FLOP, 9 GiB at micro_batch=1. At 40 % of the card's peak that is
# 2.1 h on an 80 GB H100 and 12 h on a 24 GB RTX 4090.

methods = ("pretrain",)
student = "500m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/pretrain_500m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
compile = True
