# Fixed local budgets against ALRA (Table 2), scored on the validation roles of three tasks.
# 200M student.
#
#   python train.py config/table_budget_200m.py
#   python eval.py out/table_budget_200m --split validation
#   python eval.py --table out/table_budget_200m
#
# Not yet run here.
# Cost, computed and not measured: 6.5e18 FLOP, 30 GiB at micro_batch=1. At 40 % of the card's peak that is
# 4.6 h on an 80 GB H100; it does not fit a 24 GB card: split `methods` over several runs there.

methods = ("fixed_3", "fixed_7", "fixed_9", "fixed_15", "fixed_19", "fixed_25", "alra")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/table_budget_200m"

max_steps = 67_200  # * 16 rows * 512 inputs = 550.5M nominal tokens, on the schedule of the whole 126,400
compile = True
