# Every row of the main table from one teacher pass (Table 1).
#
#   python train.py config/table_main.py
#   python eval.py out/table_main
#   python eval.py --table out/table_main
#   python train.py config/table_main.py --student=500m --out_dir=out/table_main_500m
#
# Not yet run here. Cost, computed and not measured, at micro_batch=1 and 40 % of the card's peak:
#   200m  14.9e18 FLOP, 37 GiB; 10 h on an 80 GB H100
#   500m  29.9e18 FLOP, 73 GiB; 21 h on a card of H100 speed with more than 80 GB
# A run that does not fit the card: split `methods` over several runs. A checkpoint of the nine students has 22 GB (50 GB at
# 500m); one every half hour of 10 h writes 0.46 TB (21 h: 2.2 TB), 73 GB (167 GB) at most on the disk. Over a slow disk set
# --checkpoint_every_minutes=120.

methods = ("pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"
data_dir = "data/pile"
out_dir = "out/table_main"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
device = "cuda"
compile = True
histogram_every_steps = 250  # for the paper's Figures 3 and 4: 506 times 16 rows, as many as its 8,000 sequences
