# ALRA, 500M student: the paper's Table 1, second block. Rows and the rest as in config/alra_200m.py.
#
#   python train.py config/alra_500m.py
#   python eval.py out/alra_500m/alra
#
# The paper's average over nine tasks is 37.40; not yet run here.
# Computed, not measured: 6.2e18 FLOP, 4.3 h at 40 % of an H100's peak.

methods = ("alra",)
student = "500m"
out_dir = "out/alra_500m"
device = "cuda"
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4
