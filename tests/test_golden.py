"""The recorded numbers of the authors' codes: loss and gradient.

tests/golden/README.md says where the numbers are from. The vectors are [B, L, V] fp64 logits with
the loss and its gradient. Each is compared as it is (fp64), with the same logits rounded to fp32,
and with logits rounded to bf16. The last two are compared with fp64 on the rounded logits, in value
and gradient. Errors are relative, of the gradient in norm; where the recorded number is 0, they are
absolute.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import losses
from tests.world import read_table

FOLDER = Path(__file__).resolve().parent / "golden"
BARS = {"loss": 1e-9, "gradient": 1e-8, "fp32": 1e-5, "bf16": 6e-3}

# File -> the objective, where it is not the file's name, and keywords that the file leaves unsaid.
OBJECTIVES = read_table("""
gkd_jsd_trl => jsd => {}
kd_mdistiller => vanilla_kd => {"t2_scaling": true}
logit_std_kd => vanilla_kd => {"t2_scaling": true, "standardize": true}
minillm_reverse_kl => reverse_kl => {}
ref_abkd_limits => abkd => {}
ref_alra => alra => {}
ref_bdl => bdl => {}
ref_pd => pd => {}
ref_tad => tad => {}
ref_topk_tail => tad => {"beta": 0.0}
vanilla_kd_miniplm => vanilla_kd => {}
vanilla_kd_modelopt => vanilla_kd => {"t2_scaling": true}
""")
OBJECTIVES = {name: (fn, json.loads(unsaid)) for name, fn, unsaid in OBJECTIVES}
RENAMED = {"T": "tau", "pre_T": "tau", "K": "top_k", "alpha_T": "tau_conf"}
RENAMED |= {"weights_detached": "detach_weights"}


def call(name, s, V):
    """The objective and its keywords for a file's recorded settings; None if none say them."""
    objective, unsaid = OBJECTIVES.get(name, (name, {}))
    keywords = {RENAMED.get(key, key): value for key, value in s.items()} | unsaid
    if name == "adakd":
        keywords = {"keep": s["ratio"], "c": s["t_scale"] if s["adaptive"] else 0.0}
        keywords["rule"] = s["rule"].replace("reversekl", "reverse_kl")
        keywords["base"] = {"rkd": "reverse", "fkd": "forward"}[s["loss_fn"]]
    elif name == "atkd":
        keywords = {"tau": s["T"], "easy_weight": s["lam"]}
    elif name == "bild":
        if s["k"] < 3:
            return None
        keywords = {"tau": s["T"], "top_k": s["k"]}
    elif name == "fdistill":
        if s["kind"] == "js":  # adds 1e-10 within the logarithm
            return None
        objective = {"kl": "vanilla_kd", "rkl": "reverse_kl", "tvd": "tvd"}[s["kind"]]
        keywords = {} if objective == "tvd" else {"tau": s["T"]}
        if objective == "vanilla_kd":
            keywords["t2_scaling"] = True
    elif name == "ref_pd":
        if s["support"] == "restricted" or s["Ts"] not in (1.0, s["Tt"]):
            return None
        keywords = {"tau": s["Tt"], "temper_student": s["Ts"] != 1.0, "truncate_on": s["trunc"]}
        keywords |= {"top_p": min(s["p"], 1.0), "top_k": min(s["k"], V)}
    elif name == "ref_tad":
        keywords["norm"] = s["norm"].replace("batch", "sequence")  # a batch is one sequence
    elif name == "rld" and keywords.pop("logit_stand"):
        return None
    elif name == "sekd":
        keywords = {"tau": s["T"], "keep": s["k_percent"] / 100}
    elif name == "vanilla_kd_miniplm":
        del keywords["kd_ratio"]
    return objective, keywords


class Vector(NamedTuple):
    objective: str  # name of a function in losses
    settings: dict  # keyword arguments of the objective
    case: str  # "file: case|setting"
    arrays: dict
    w_kd: float = 1.0  # the recorded loss is w_kd * objective + w_ce * cross-entropy + offset
    w_ce: float = 0.0
    offset: float = 0.0

    def tensor(self, key):
        """An array [B, L, ..] as [N, ..]."""
        return torch.from_numpy(self.arrays[key]).flatten(0, 1)


@functools.cache
def tables(folder=FOLDER):
    """The arrays of each source by name, from vectors.npz (SOURCE/KEY) or from SOURCE.npz.

    "inputs" has the logits that sources have in common.
    """
    sources = {}
    for path in sorted(folder.glob("*.npz")):
        for key, value in np.load(path).items():
            name = path.stem
            if name == "vectors":
                name, _, key = key.partition("/")
            sources.setdefault(name, {})[key] = value
    return sources


def names(folder=FOLDER):
    return sorted(tables(folder).keys() - {"inputs"})


def cases(folder):
    """The name of a source, and label and arrays of each case. "inputs" has what these lack."""
    shared = tables(folder).get("inputs", {})
    for name in names(folder):
        file = tables(folder)[name]
        for i, label in enumerate(file["labels_of_cases"]):
            arrays = {}
            for source, prefix in ((shared, f"{label.split('|')[0]}/"), (file, f"c{i:02d}/")):
                for key in source:
                    if key.startswith(prefix):
                        arrays[key.removeprefix(prefix)] = source[key]
            yield name, label, arrays


def read(folder=FOLDER):
    """The vectors whose settings can be said with the objectives' keywords."""
    vectors = []
    for name, label, arrays in cases(folder):
        s = {key[3:]: arrays[key].item() for key in arrays if key.startswith("hp/")}
        called = call(name, s, arrays["student_logits"].shape[-1])
        if called is None:
            continue
        weights = {}
        if name == "vanilla_kd_miniplm":  # the cross-entropy with the teacher
            w_kd = s["kd_ratio"]
            entropy = arrays["part/kd_entropy"].item()  # the teacher's
            weights = {"w_kd": w_kd, "w_ce": 1 - w_kd, "offset": w_kd * entropy}
        elif name == "fdistill" and called[0] == "reverse_kl":
            weights = {"w_kd": s["T"] ** 2}
        vectors.append(Vector(*called, f"{name}: {label}", arrays, **weights))
    return vectors


def evaluate(v, dtype, rounded):
    """Loss and gradient of a vector computed in `dtype`, from logits rounded to `rounded` first."""
    z_s = v.tensor("student_logits").to(rounded).to(dtype).requires_grad_()
    z_t = v.tensor("teacher_logits").to(rounded).to(dtype)
    y = torch.where(v.tensor("mask"), v.tensor("labels"), losses.IGNORE)
    n = (y != losses.IGNORE).sum()
    result = getattr(losses, v.objective)(z_s, z_t, y, **v.settings)
    loss = v.w_kd * getattr(result, "loss", result).sum() / n + v.offset
    if v.w_ce:
        loss = loss + v.w_ce * losses.cross_entropy(z_s, None, y).sum() / n
    (gradient,) = torch.autograd.grad(loss, z_s)
    return loss.item(), gradient


def errors(v):
    """The vector's error in each column of the table."""
    loss, gradient = evaluate(v, torch.float64, torch.float64)
    columns = {"loss": _error(loss, v.arrays["loss"].item())}
    columns["gradient"] = _error(gradient, v.tensor("grad"))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        exact = evaluate(v, torch.float64, dtype)
        pairs = zip(evaluate(v, dtype, dtype), exact, strict=True)
        columns[name] = max(_error(*pair) for pair in pairs)
    return columns


def _error(got, expected):
    got = torch.as_tensor(got, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    gap = (got - expected).norm().item()
    size = expected.norm().item()
    return gap / size if size else gap


VECTORS = read()
# what FOLDER was thinned from
LARGER = Path(__file__).resolve().parents[2] / "shared/golden"


def is_near(v):
    return all(error <= BARS[column] for column, error in errors(v).items())


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v.case)
def test_the_recorded_loss_and_gradient(v):
    assert is_near(v), errors(v)


@pytest.mark.skipif(not LARGER.is_dir(), reason=f"no larger set of golden vectors at {LARGER}")
def test_the_recorded_losses_and_gradients_of_the_larger_set():
    vectors = read(LARGER)
    assert len(vectors) > 180
    assert not [v.case for v in vectors if not is_near(v)]


def test_every_file_is_read():
    files = {v.case.split(": ")[0] for v in VECTORS}
    kinds = {v.case.split(": ")[1].split("|")[0] for v in VECTORS}
    assert files == set(names())
    assert kinds == {"small", "peaked_teacher"}
    assert len(files) == 26
    assert len(VECTORS) > 100
