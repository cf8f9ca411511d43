# Fixed local budgets, to be held against alra.
#
#   python train.py config/mini_main.py config/mini_budget.py

methods = ("fixed_3", "fixed_7", "fixed_9", "fixed_15", "fixed_19", "fixed_25")
out_dir = "out/mini_budget"
