# The replication that one machine can afford: students of 0.36M parameters, the main table's nine methods.
#
#   python tools/compare.py config/mini.py --jobs=2    every method, variant and study, five seeds: hours (README, "Results")
#
# What differs from the paper's appendix E beside the sizes, and why:
#   learning rate   chosen per method by compare.py; falls to a tenth of its peak, as there
#   warm-up         15 updates of 150; 512 of 126,400 would be one
#   order of rows   drawn from the seed, so that seeds differ in it; the paper has one order and one seed

methods = ("pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra")
student = "mini"
teacher = "demo/teacher"
data_dir = "data/mini"
out_dir = "out/mini"

source = "python"  # all of the text that comes with Python; about every 20th document is held out
n_documents = train_rows = None
val_rows, val_share = 0, 0.05
seq_len = 128

shuffle = True
max_steps = schedule_steps = 150  # * 16 rows * 128 inputs = 0.31M nominal tokens
micro_batch = 16
lr, min_lr = 3e-3, 3e-4
warmup_steps = 15
val_every_steps = 150
val_max_rows = 256
checkpoint_every_steps = 50
keep_checkpoints = 1
histogram_every_steps = 10

# What compare.py reads: studies with their own keys, the paper's tables in its order, tables of the studies.
_alra, _kd = ("main", "alra"), ("main", "vanilla_kd")
_fixed = tuple(f"fixed_{d}" for d in (3, 7, 9, 15, 19, 25))
_grouped = ("vanilla_kd", "atkd", "tad", "alra")
_long = {"pretrain": "vanilla_kd", "vanilla_kd": "vanilla_kd", "tad": "vanilla_kd", "alra": "vanilla_kd",
         "fixed_9": "alra", "alra_n": "alra"}  # fmt: skip


def _table(name, title, names, reference):
    return name, title, [(m, ("main", m), reference) for m in names], reference[1]


_compare = {
    "title": "Replication at a small scale",
    "seeds": 5,
    "tune": ("lr=3e-4,1e-3,3e-3,1e-2,3e-2",),
    "like": "alra",
    "paper": True,
    "studies": {
        "pair": {"methods": ("alra_u", "alra_r")},
        "anchor": {"methods": ("alra_n", "alra_ng", "alra_g")},
        "budget": {"methods": _fixed},
        "detach": {"methods": ("alra",), "hyper": {"alra": {"detach_weights": False}}},
        "group4": {"methods": _grouped, "group": 4},  # forward batches of 4 rows
        "group16": {"methods": _grouped, "group": 16},
        "long": {"methods": (*_long,), "max_steps": 600, "schedule_steps": 600, "warmup_steps": 60, "val_every_steps": 600},
    },
    "tables": (
        _table("main", "Main results", methods, _kd),
        _table("pair", "Pairwise weighting", ("alra_r", "alra_u", "alra"), _alra),
        _table("budget", "Local budget", (*_fixed, "alra"), _alra),
        _table("anchor", "Anchoring", ("alra_n", "alra_ng", "alra", "alra_g"), _alra),
        ("detach", "Gradient through the SWPRA weights", [("alra (through weights)", ("detach", "alra"), _alra)], "alra"),
        ("group", "Forward batches of 4 and 16 sequences, each method against itself at one",
         [(f"{m} ({n})", (f"group{n}", m), ("main", m)) for m in _grouped for n in (4, 16)], "the same at one sequence"),
        ("long", "Four times the updates, at the same learning rates",
         [(m, ("long", m), ("long", ref)) for m, ref in _long.items()], "vanilla_kd, of ALRA for its variants"),
    ),
    "notes": (
        "How far this is from the paper, beside the sizes (`config/mini.py` has the rest):",
        "",
        "- The paper scores benchmarks; these students are at chance there, so text and teacher are what they are scored on.",
        "- Variants and studies take ALRA's settings or their method's, from the trials of the nine methods.",
        "- The paper stops its budget and anchor studies at 67,200 of 126,400 updates of a schedule; here the cosine ends "
        "with the run.",
        "- `fixed_d` is, as in the paper, a fixed budget with neither anchor nor teacher's ranking, and PRA-U: its "
        "neighbour is `alra_n`, not `alra`.",
    ),
}  # fmt: skip
