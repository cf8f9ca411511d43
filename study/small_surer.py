# Study A again with a teacher that is surer than right: 1.05 times the logits of demo/teacher, so
# that its entropy lies 0.18 nats below its CE on the scored rows, as that of SmolLM2 does in
# study/smollm2.py. All else is study/small.py's: text, students, rates, updates.
#
#   python study/scale_teacher.py demo/teacher 1.05 data/demo_teacher_surer
#   python study/compare.py study/small_surer.py
#
# study/LOG.md has what was expected of the students before there were any.

from study.small import *  # noqa: F403

methods = ("vanilla_kd", "vanilla_kd@kl", "alra", "alra@ce")
teacher = "data/demo_teacher_surer"
out_dir = "out/study_surer"

histogram_every_steps = None
repeat_rows = False

_rate = {"lr": 1.73e-3}
hyper = {
    "vanilla_kd": _rate | {"tau": 1},
    "vanilla_kd@kl": {"lr": 1.32e-3, "w_kd": 1, "w_ce": 0, "tau": 1},
    "alra": _rate | {"gamma": 5},
    "alra@ce": _rate | {"gamma": 5, "w_kd": 0.5, "w_ce": 0.5},
}
_compare = {
    "title": "A teacher that is surer than right",
    "tables": (("Methods", methods, "vanilla_kd"), ("Beside ALRA", methods[:2], "alra")),
}
