# Unit, uniform and student-dependent pair weights (the paper's Table 4). Rows and the rest as in config/alra_200m.py.
#
#   python train.py config/table_pair.py
#   python eval.py out/table_pair
#   python eval.py --table out/table_pair
#   python train.py config/table_pair.py --student=500m --out_dir=out/table_pair_500m
#
# Not yet run here. Computed, not measured, at micro_batch=1 and 40 % of the peak of an 80 GB H100:
#   200m  7.1e18 FLOP, 16 GiB, 5.0 h
#   500m  12.1e18 FLOP, 28 GiB, 8.5 h

methods = ("alra_r", "alra_u", "alra")
student = "200m"
out_dir = "out/table_pair"
device = "cuda"
compile = True
