# The study's main comparison with another teacher: SmolLM2-135M, its 49,152 tokens, English text;
# students of 6.9M parameters.
#
#   python study/compare.py study/smollm2.py --teacher=DIR --source=FILE
#
# Nobody can make it again: FILE, of which study/LOG.md has the hash, is lost to others. DIR is what
# study/smollm2_teacher.py writes. There are no trials: the settings are from the first trials of
# study/small.py.

methods = ("vanilla_kd", "alra", "fixed_9", "pretrain", "vanilla_kd@kl", "alra@ce")
student = "128x3x4"
teacher = "HuggingFaceTB/SmolLM2-135M"
data_dir = "data/study_smollm2"
out_dir = "out/study_smollm2"

source = "demo/text.jsonl.zst"
n_documents, train_rows = None, 8000
val_rows, val_share = 0, 0.1
seq_len = 256

shuffle = True
max_steps = schedule_steps = 1000  # 2.05M tokens (1.97M without padding), each document once
batch_rows = micro_batch = 8
lr, min_lr = 1.73e-3, 1.73e-4
warmup_steps = 50
val_every_steps = 200
val_max_rows = 64
checkpoint_every_steps = 200
keep_checkpoints = 1
compile = teacher_cache = True
dtype = "bfloat16"  # the teacher's pass takes half as long; heads and losses are in fp32

hyper = {"vanilla_kd": {"tau": 1}, "alra": {"gamma": 1}, "fixed_9": {"lr": 2.28e-3}}
hyper["vanilla_kd@kl"] = {"w_kd": 1, "w_ce": 0, "lr": 1.32e-3}  # ALRA has no cross-entropy either
hyper["alra@ce"] = {"w_kd": 0.5, "w_ce": 0.5}  # and ALRA with as much of it as vanilla KD has
_compare = {
    "title": "Another teacher: SmolLM2-135M-Instruct in 4 bits",
    "summary": "Nobody can make this study again: its text, 3,637 English documents "
    "(documentation, books, speeches, a dictionary, the Brown corpus), is in no repository. With "
    "this teacher ALRA's CE is above that of vanilla KD, and of pre-training, though it is nearer "
    "to the teacher; it is worse calibrated than vanilla KD. fixed_9, which differs from ALRA in "
    "five things and in its rate, has a slightly lower CE. With as much cross-entropy "
    "as vanilla KD, ALRA has vanilla KD's CE (one seed), so labels explain in part why it is "
    "behind. No settings were tried here. Students of 6.9M parameters "
    "say nothing about those of 200M.",
    "fewer_seeds": {"vanilla_kd@kl": 1, "alra@ce": 1},
    "tables": (("Methods", methods, "vanilla_kd"), ("Beside ALRA", methods[2:], "alra")),
}
