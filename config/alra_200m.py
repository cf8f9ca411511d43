# ALRA, 200M student: the paper's main row (Table 2, first block, last line).
#
#   python prepare.py config/alra_200m.py     2.8B tokens of The Pile, once for every run
#   python train.py config/alra_200m.py
#   python eval.py out/alra_200m/alra
#
# The paper reports three days on one 24 GB card and an average of 36.62 over nine tasks; not yet run here.

methods = ("alra",)
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/alra_200m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
compile = True
