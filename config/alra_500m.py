# ALRA with the 500M student: the second block of the paper's Table 1.
#
#   python train.py config/alra_500m.py
#   python eval.py out/alra_500m/alra
#
# The rows are those of config/alra_200m.py.
# We have not run this yet. The paper reports an average of 37.40 over nine tasks.
# Computed: 6.2e18 FLOP, 4.3 h at 40 % of an H100's peak. On an H200 an update took 0.13 s
# (docs/running.md).

methods = ("alra",)
student = "500m"
out_dir = "out/alra_500m"
device = "cuda"
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4
