# ALRA, 200M student: the paper's Table 1, first block.
#
#   python prepare.py config/alra_200m.py     about 1.0B tokens of Pile-Uncopyrighted, once for every run of the paper
#   python train.py config/alra_200m.py
#   python eval.py out/alra_200m/alra
#   python train.py config/alra_200m.py --methods=tad --out_dir=out/tad_200m     any other method of losses.METHODS
#
# Teacher, data and optimisation are the defaults of configure.py: Qwen1.5-1.8B, 126,400 updates * 16 rows * 512 inputs =
# 1.035B nominal tokens. The paper's average over nine tasks is 36.62; not yet run here.
# Computed, not measured: 4.5e18 FLOP, 3.2 h at 40 % of an H100's peak.

methods = ("alra",)
student = "200m"
out_dir = "out/alra_200m"
device = "cuda"
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4: 506 times 16 rows, about the 8,000 sequences of Figure 4
