# ALRA with the 200M student: the first block of the paper's Table 1.
#
#   python prepare.py config/alra_200m.py     about 1.0B tokens, once for all runs of the paper
#   python train.py config/alra_200m.py
#   python eval.py out/alra_200m/alra
#
# Any other method of losses.METHODS takes the same rows:
#
#   python train.py config/alra_200m.py --methods=tad --out_dir=out/tad_200m
#
# Teacher, data and optimisation are the defaults of configure.py: Qwen1.5-1.8B and
# 126,400 updates * 16 rows * 512 inputs = 1.035B nominal tokens of Pile-Uncopyrighted.
# We have not run this yet. The paper reports an average of 36.62 over nine tasks.
# Computed: 4.5e18 FLOP, 3.2 h at 40 % of an H100's peak. On an H200 an update took 0.10 s
# (docs/running.md).

methods = ("alra",)
student = "200m"
out_dir = "out/alra_200m"
device = "cuda"
compile = True
histogram_every_steps = 250  # for Figures 3 and 4: 506 * 16 rows, about the paper's 8,000
