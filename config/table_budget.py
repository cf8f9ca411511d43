# Fixed local budgets against ALRA (Table 2), scored on the validation roles of three tasks.
#
#   python train.py config/table_budget.py
#   python eval.py out/table_budget --split validation
#   python eval.py --table out/table_budget
#   python train.py config/table_budget.py --student=500m --out_dir=out/table_budget_500m
#
# Not yet run here. Cost, computed and not measured, at micro_batch=1 and 40 % of the card's peak:
#   200m  6.5e18 FLOP, 30 GiB; 4.6 h on an 80 GB H100
#   500m  12.7e18 FLOP, 58 GiB; 8.9 h on an 80 GB H100
# A run that does not fit the card: split `methods` over several runs.
# A checkpoint of the 7 students has 17.1 GB at 200m, 39.0 GB at 500m.

methods = ("fixed_3", "fixed_7", "fixed_9", "fixed_15", "fixed_19", "fixed_25", "alra")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"
data_dir = "data/pile"
out_dir = "out/table_budget"

max_steps = 67_200  # * 16 rows * 512 inputs = 550.5M nominal tokens, on the schedule of the whole 126,400
device = "cuda"
compile = True
