# The search for the settings of study A (study/small.py): trials of a quarter of the updates.
#
#   python study/compare.py study/results/small_trials/config.py
#
# The trials on record are in results/small, with their table. All methods have tried six rates,
# though not at each other setting: this command would try more, such as ALRA's gamma 1 at 2.28e-3.

from study.small import *  # noqa: F403

methods = ("alra@published", "alra", "pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad")
methods += ("bild", "alra_u", "alra_n", "fixed_9", "fixed_25", "vanilla_kd@kl", "pretrain@flops")

hyper = {
    "vanilla_kd@kl": {"w_kd": 1, "w_ce": 0, "tau": 1},
    "alra@published": {"lr": 1.73e-3, "gamma": 5},  # has no trials: its lr is set
}
_compare = {
    "out": "out/study_trials",
    "title": "The search for the settings of study A",
    "summary": """\
The settings of results/small are those of the best trial, but for ALRA and BiLD: a rule written \
before the last 24 trials keeps students unless a trial is better by more than 0.03, and theirs \
are not (0.0156 and 0.0155). Over all updates, the rate that its trials choose changes ALRA's CE \
by -0.05 and +0.03 in seeds 1 and 2. `alra@published` is ALRA as in results/small.""",
    "seeds": 2,
    "fewer_seeds": dict.fromkeys(methods[1:], 0),
    "trial_steps": 525,
    "tune": (
        "lr=1e-3,1.15e-3,1.32e-3,1.73e-3,2.28e-3,3e-3",
        "vanilla_kd.tau=0.5,1",
        "pd.tau=0.5,1",
        "rld.beta=1,4",
        "ldrld.d=8,15",
        "tad.beta=1,2",
        "bild.tau=1,3",
        "alra.gamma=1,5",
        "alra_n.gamma=1,5",
    ),
    "tables": (("ALRA as published", methods[:1], "alra@published"),),
}
