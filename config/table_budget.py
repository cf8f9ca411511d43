# The paper's Table 2: fixed local budgets and ALRA.
#
#   python train.py config/table_budget.py
#   python eval.py out/table_budget --split validation
#   python eval.py --table out/table_budget
#   python train.py config/table_budget.py --student=500m --out_dir=out/table_budget_500m
#
# The rows are those of config/alra_200m.py. We have not run this yet.
# Computed, not measured; hours at 40 % of an H100's peak:
#   200m  6.5e18 FLOP, 4.6 h
#   500m  12.7e18 FLOP, 8.9 h; on an H100 with --recompute=True

methods = ("fixed_3", "fixed_7", "fixed_9", "fixed_15", "fixed_19", "fixed_25", "alra")
student = "200m"
out_dir = "out/table_budget"
max_steps = 67_200  # of a schedule of 126,400, as in the paper
device = "cuda"
compile = True
