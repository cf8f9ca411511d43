# Unit, uniform and student-dependent pair weights (Table 4).
#
#   python train.py config/table_pair.py
#   python eval.py out/table_pair
#   python eval.py --table out/table_pair
#   python train.py config/table_pair.py --student=500m --out_dir=out/table_pair_500m
#
# Not yet run here. Cost, computed and not measured, at micro_batch=1 and 40 % of the card's peak:
#   200m  7.1e18 FLOP, 16 GiB; 5.0 h on an 80 GB H100 and 30 h on a 24 GB RTX 4090
#   500m  12.1e18 FLOP, 28 GiB; 8.5 h on an 80 GB H100
# A checkpoint of the 3 students has 7.3 GB at 200m, 16.7 GB at 500m.

methods = ("alra_r", "alra_u", "alra")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"
data_dir = "data/pile"
out_dir = "out/table_pair"

max_steps = 126_400  # * 16 rows * 512 inputs = 1.035B nominal tokens
device = "cuda"
compile = True
