# The search for the rates of study B (results/smollm2_code): trials of a quarter of the updates.
#
#   python study/compare.py study/results/smollm2_trials/config.py
#
# The trials on record are in results/smollm2_code, with their table. Not every method has tried
# every rate: this command would try more.

from study.results.smollm2_code.config import *  # noqa: F403

methods = ("vanilla_kd@published", "vanilla_kd", "alra", "fixed_9", "vanilla_kd@kl")

hyper = {
    "vanilla_kd@published": {"tau": 1, "lr": 1.73e-3},  # has no trials: its lr is set
    "vanilla_kd": {"tau": 1},
    "alra": {"gamma": 5},
    "vanilla_kd@kl": {"w_kd": 1, "w_ce": 0},
}
_compare = {
    "out": "out/study_smollm2_trials",
    "title": "The search for the rates of study B",
    "summary": "The rates of results/smollm2_code are those of the best trials, but alra@faster's.",
    "seeds": 1,
    "fewer_seeds": dict.fromkeys(methods[1:], 0),
    "trial_steps": 250,
    "tune": ("lr=1e-3,1.32e-3,1.73e-3,2.28e-3,3e-3",),
    "tables": (("Vanilla KD as published", methods[:1], "vanilla_kd@published"),),
}
