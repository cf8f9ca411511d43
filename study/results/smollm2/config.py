# The study's main comparison with another teacher: SmolLM2-135M, its 49,152 tokens, English text;
# students of 6.9M parameters.
#
#   python study/compare.py study/results/smollm2_code/config.py study/results/smollm2/config.py \
#       --teacher=DIR --source=FILE
#
# Nobody can make it again: FILE, of which study/LOG.md has the hash, is lost to others. DIR is what
# study/results/smollm2_code/make_teacher.py writes. What is not set here is set by the config of
# smollm2_code, which came later. There are no trials: the settings are from the first trials of
# study/small.py.

methods = ("vanilla_kd", "alra", "fixed_9", "pretrain", "vanilla_kd@kl", "alra@ce")
data_dir = "data/study_smollm2"
val_share = 0.1
hyper = {"alra": {"gamma": 1}, "fixed_9": {"lr": 2.28e-3}, "vanilla_kd@kl": {"lr": 1.32e-3}}
_compare = {
    "out": "out/study_smollm2",
    "title": "Another teacher: SmolLM2-135M-Instruct in 4 bits",
    "summary": """\
Nobody can make this study again: its text, 3,637 English documents (documentation, books, \
speeches, a dictionary, the Brown corpus), is in no repository. With this teacher ALRA's CE is \
above that of vanilla KD, and of pre-training, though it is nearer to the teacher; it is worse \
calibrated than vanilla KD. fixed_9, which differs from ALRA in five things and in its rate, has \
a slightly lower CE. With as much cross-entropy as vanilla KD, ALRA has vanilla KD's CE (one \
seed), so labels explain in part why it is behind. No settings were tried here. Students of 6.9M \
parameters say nothing about those of 200M.""",
    "seeds": 3,
    "fewer_seeds": {"vanilla_kd@kl": 1, "alra@ce": 1},
    "tables": (("Methods", methods, "vanilla_kd"), ("Beside ALRA", methods[2:], "alra")),
}
