# ALRA: adaptive local set, ALD and SWPRA.
# 500M student, the paper's Table 1, second block.
#
#   python train.py config/alra_500m.py
#   python eval.py out/alra_500m/alra
#
# The paper's average over nine tasks is 37.40; not yet run here.
# Cost, computed and not measured: 6.2e18 FLOP, 13 GiB at micro_batch=1. At 40 % of the card's peak that is
# 4.3 h on an 80 GB H100 and 26 h on a 24 GB RTX 4090. A checkpoint has 5.6 GB; one every half hour makes 9 of them, 50 GB
# written in all, 19 GB at most on the disk with the model.

methods = ("alra",)
student = "500m"
teacher = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"
data_dir = "data/pile"
out_dir = "out/alra_500m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
device = "cuda"
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4: 506 times 16 rows, as many as its 8,000 sequences
