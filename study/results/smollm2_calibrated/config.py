# Study B (smollm2_code) again with a teacher that is not overconfident: 0.974 times the logits of
# that study's teacher, so that its entropy is its CE on the scored rows. What is not set here is
# that study's: text, students, updates. After the first two commands of smollm2_code/config.py:
#
#   python study/results/small_surer/scale_teacher.py data/smollm2_teacher 0.974 \
#       data/smollm2_calibrated
#   python study/compare.py study/results/smollm2_code/config.py \
#       study/results/smollm2_calibrated/config.py
#
# study/LOG.md has what was expected of the students before there were any.

methods = ("vanilla_kd", "vanilla_kd@kl", "alra", "alra@ce")
teacher = "data/smollm2_calibrated"

_chosen = {"lr": 1.73e-3}  # by the trials of smollm2_code
hyper = {"vanilla_kd": _chosen, "alra": _chosen, "vanilla_kd@kl": {"lr": 1.32e-3}}
_compare = {
    "out": "out/study_smollm2_calibrated",
    "title": "SmolLM2-135M-Instruct, without overconfidence",
    "summary": """\
ALRA's CE is above that of vanilla KD by 0.08 ± 0.03, with the teacher as it is \
(results/smollm2_code, the same three seeds) by 0.07 ± 0.04; the change is 0.01 ± 0.02. That of \
KL alone, at 1.32e-3 in both, changes by 0.01 ± 0.03, that of ALRA with cross-entropy by 0.00 ± \
0.01. We had written before these runs that overconfidence is the reason only if ALRA's CE is \
below vanilla KD's by 0.05 or more (LOG.md). That concerns the sharpness of the teacher as a \
whole, not its errors at single tokens. The students of smollm2_code ran on an Intel Xeon with \
earlier code, these on an AMD EPYC; rounding alone has moved a student by 0.06. Teacher FLOPs \
leave out attention here.""",
    "seeds": 3,
    "fewer_seeds": {},
    "tables": (("Methods", methods, "vanilla_kd"), ("Beside ALRA", methods[:2], "alra")),
}
