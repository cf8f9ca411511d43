# Pre-train w/o KD: causal language modelling alone.
# 200M student, the paper's Table 1, first block.
#
#   python train.py config/pretrain_200m.py
#   python eval.py out/pretrain_200m/pretrain
#
# The paper's average over nine tasks is 34.31; not yet run here.
# Cost, computed and not measured: 1.3e18 FLOP, 5 GiB at micro_batch=1. At 40 % of the card's peak that is
# 0.9 h on an 80 GB H100 and 5.4 h on a 24 GB RTX 4090.

methods = ("pretrain",)
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/pretrain_200m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
compile = True
