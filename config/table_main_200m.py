# Every row of the main table from one teacher pass (Table 1).
# 200M student.
#
#   python train.py config/table_main_200m.py
#   python eval.py out/table_main_200m
#   python eval.py --table out/table_main_200m
#
# Not yet run here.
# Cost, computed and not measured: 14.9e18 FLOP, 37 GiB at micro_batch=1. At 40 % of the card's peak that is
# 10 h on an 80 GB H100; it does not fit a 24 GB card: split `methods` over several runs there.

methods = ("pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B"
data_dir = "data/pile"
out_dir = "out/table_main_200m"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4: 506 times 16 rows, as many as its 8,000 sequences
