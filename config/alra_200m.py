# ALRA: adaptive local set, ALD and SWPRA.
# 200M student, the paper's Table 1, first block.
#
#   python prepare.py config/alra_200m.py     about 1.0B tokens of Pile-Uncopyrighted, once for every run
#   python train.py config/alra_200m.py
#   python eval.py out/alra_200m/alra
#   python train.py config/alra_200m.py --methods=tad --out_dir=out/tad_200m     any other method of losses.METHODS
#
# The paper's average over nine tasks is 36.62; not yet run here.
# Cost, computed and not measured: 4.5e18 FLOP, 9 GiB at micro_batch=1. At 40 % of the card's peak that is
# 3.2 h on an 80 GB H100 and 19 h on a 24 GB RTX 4090. A checkpoint has 2.4 GB; one every half hour makes 7 of them, 17 GB
# written in all, 8.1 GB at most on the disk with the model.

methods = ("alra",)
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"
data_dir = "data/pile"
out_dir = "out/alra_200m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
device = "cuda"
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4: 506 times 16 rows, as many as its 8,000 sequences
