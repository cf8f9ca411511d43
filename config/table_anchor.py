# Candidate sets with no anchor, the label, the teacher's top-1, and both (Table 3).
#
#   python train.py config/table_anchor.py
#   python eval.py out/table_anchor --split validation
#   python eval.py --table out/table_anchor
#   python train.py config/table_anchor.py --student=500m --out_dir=out/table_anchor_500m
#
# Not yet run here. Cost, computed and not measured, at micro_batch=1 and 40 % of the card's peak:
#   200m  4.5e18 FLOP, 19 GiB; 3.1 h on an 80 GB H100 and 19 h on a 24 GB RTX 4090
#   500m  8.0e18 FLOP, 36 GiB; 5.6 h on an 80 GB H100
# A run that does not fit the card: split `methods` over several runs.
# A checkpoint of the 4 students has 9.8 GB at 200m, 22.3 GB at 500m.

methods = ("alra_n", "alra_ng", "alra", "alra_g")
student = "200m"
teacher = "Qwen/Qwen1.5-1.8B@7846de7ed421727b318d6605a0bfab659da2c067"
data_dir = "data/pile"
out_dir = "out/table_anchor"

max_steps = 67_200  # * 16 rows * 512 inputs = 550.5M nominal tokens, on the schedule of the whole 126,400
device = "cuda"
compile = True
