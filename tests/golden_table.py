"""The recorded numbers of the authors' codes as vectors, and how far an objective is from one.

tests/golden/README.md says where the numbers are from. The vectors are [B, L, V] fp64 logits with the loss and its gradient. Each
is compared as it is (fp64), with the same logits rounded to fp32, and with logits rounded to bf16; the last two are compared with
fp64 on the rounded logits, in value and gradient. Errors are relative, of the gradient in norm; where the recorded number is 0, absolute.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import losses

FOLDER = Path(__file__).resolve().parent / "golden"
BARS = {"loss": 1e-9, "gradient": 1e-8, "fp32": 1e-5, "bf16": 6e-3}


class Vector(NamedTuple):
    objective: str  # name of a function in losses
    case: str  # "file: case|setting"
    z_s: Tensor  # [N, V] fp64
    z_t: Tensor
    y: Tensor  # [N] int64
    settings: dict  # keyword arguments of the objective
    w_kd: float  # the recorded loss is w_kd * objective + w_ce * cross-entropy + offset
    w_ce: float
    offset: float
    loss: float
    gradient: Tensor  # [N, V]


def names(folder: Path = FOLDER) -> list[str]:
    """The files of vectors, by name; inputs.npz holds the logits that they have in common."""
    return sorted({path.stem for path in folder.glob("*.npz")} - {"inputs"})


def cases(folder: Path, name: str):
    """Each case of a file: its label and its arrays by name. A key that the file lacks is in inputs.npz."""
    file = np.load(folder / f"{name}.npz")
    shared = np.load(folder / "inputs.npz") if (folder / "inputs.npz").is_file() else {}
    for i, label in enumerate(file["labels_of_cases"]):
        at, inputs = f"c{i:02d}/", f"{label.split('|')[0]}/"
        found = {key[len(inputs) :]: shared[key] for key in shared if key.startswith(inputs)}
        yield str(label), found | {key[len(at) :]: file[key] for key in file.files if key.startswith(at)}


def below(arrays: dict, kind: str) -> dict:
    """What stands under hp/ (settings) or part/ (components)."""
    return {key.split("/", 1)[1]: value for key, value in arrays.items() if key.startswith(f"{kind}/")}


def logits(arrays: dict) -> tuple[Tensor, Tensor, Tensor]:
    """z_s, z_t [N, V] and y [N], IGNORE where masked."""
    z_s, z_t, y, mask = (torch.from_numpy(arrays[key]).flatten(0, 1)
                         for key in ("student_logits", "teacher_logits", "labels", "mask"))  # fmt: skip
    return z_s, z_t, torch.where(mask, y, losses.IGNORE)


def read(folder: Path = FOLDER) -> list[Vector]:
    """The vectors whose settings can be said with the objectives' keywords."""
    found = []
    for name in names(folder):
        for case, arrays in cases(folder, name):
            z_s, z_t, y = logits(arrays)
            said = KEYWORDS[name]({key: value.item() for key, value in below(arrays, "hp").items()}, z_s.shape[1])
            if said is None:
                continue
            objective, keywords, *more = said
            w_kd, w_ce = more or (1.0, 0.0)
            offset = 0.0
            if name == "vanilla_kd_miniplm":  # recorded as cross-entropy with the teacher: KL + the teacher's entropy
                offset = w_kd * arrays["part/kd_entropy"].item()
            found.append(Vector(objective, f"{name}: {case}", z_s, z_t, y, keywords, w_kd, w_ce, offset,
                                arrays["loss"].item(), torch.from_numpy(arrays["grad"]).flatten(0, 1)))  # fmt: skip
    return found


def _pd(s, V):
    if s["support"] == "restricted" or s["Ts"] not in (1.0, s["Tt"]):
        return None
    return "pd", {"tau": s["Tt"], "top_p": min(s["p"], 1.0), "top_k": min(s["k"], V), "truncate_on": s["trunc"],
                  "temper_student": s["Ts"] != 1.0}  # fmt: skip


def _fdistill(s, V):
    if s["kind"] == "js":  # adds 1e-10 within the logarithm
        return None
    tau = {} if s["kind"] == "tvd" else {"tau": s["T"]}
    name = {"kl": "vanilla_kd", "rkl": "reverse_kl", "tvd": "tvd"}[s["kind"]]
    settings = {**tau, "t2_scaling": True} if name == "vanilla_kd" else tau
    return name, settings, s["T"] ** 2 if name == "reverse_kl" else 1.0, 0.0


def _adakd(s, V):
    return "adakd", {"keep": s["ratio"], "c": s["t_scale"] if s["adaptive"] else 0.0,
                     "rule": {"hellinger": "hellinger", "reversekl": "reverse_kl"}[s["rule"]],
                     "base": {"rkd": "reverse", "fkd": "forward"}[s["loss_fn"]]}  # fmt: skip


# File -> (its settings, V) -> objective, keywords and, where not 1 and 0, the two weights; None: no keyword says it.
KEYWORDS = {
    "abkd": lambda s, V: ("abkd", {"alpha": s["alpha"], "beta": s["beta"]}),
    "adakd": _adakd,
    "akl": lambda s, V: ("akl", {"mu": s["mu"]}),
    "atkd": lambda s, V: ("atkd", {"tau": s["T"], "easy_weight": s["lam"]}),
    "bild": lambda s, V: None if s["k"] < 3 else ("bild", {"tau": s["T"], "top_k": s["k"]}),
    "dkd": lambda s, V: ("dkd", {"tau": s["T"], "alpha": s["alpha"], "beta": s["beta"]}),
    "fdistill": _fdistill,
    "gkd_jsd_trl": lambda s, V: ("jsd", {"beta": s["beta"], "tau": s["T"]}),
    "kd_mdistiller": lambda s, V: ("vanilla_kd", {"tau": s["T"], "t2_scaling": True}),
    "ldrld": lambda s, V: ("ldrld", {"tau": s["T"], "d": s["d"], "alpha": s["alpha"], "beta": s["beta"]}),
    "logit_std_kd": lambda s, V: ("vanilla_kd", {"tau": s["T"], "t2_scaling": True, "standardize": True}),
    "minillm_reverse_kl": lambda s, V: ("reverse_kl", {"tau": s["T"]}),
    "ref_abkd_limits": lambda s, V: ("abkd", {"alpha": s["alpha"], "beta": s["beta"]}),
    "ref_alra": lambda s, V: ("alra", {("detach_weights" if k == "weights_detached" else k): v for k, v in s.items()}),
    "ref_bdl": lambda s, V: ("bdl", {"lam": s["lam"]}),
    "ref_pd": _pd,
    "ref_tad": lambda s, V: ("tad", {"tau": s["T"], "top_k": s["K"], "beta": s["beta"],
                                     "norm": "sequence" if s["norm"] == "batch" else s["norm"]}),  # one sequence a batch
    "ref_topk_tail": lambda s, V: ("tad", {"top_k": s["K"], "beta": 0.0}),
    "rld": lambda s, V: None if s["logit_stand"] else
        ("rld", {"tau": s["T"], "tau_conf": s["alpha_T"], "alpha": s["alpha"], "beta": s["beta"]}),
    "sekd": lambda s, V: ("sekd", {"tau": s["T"], "keep": s["k_percent"] / 100}),
    "skew_fkl": lambda s, V: ("skew_fkl", {"lam": s["lam"]}),
    "skew_rkl": lambda s, V: ("skew_rkl", {"lam": s["lam"]}),
    "taid": lambda s, V: ("taid", {"t": s["t"]}),
    "todi": lambda s, V: ("todi", {"tau": s["T"]}),
    "vanilla_kd_miniplm": lambda s, V: ("vanilla_kd", {"tau": s["pre_T"]}, s["kd_ratio"], 1 - s["kd_ratio"]),
    "vanilla_kd_modelopt": lambda s, V: ("vanilla_kd", {"tau": s["T"], "t2_scaling": True}),
}  # fmt: skip


def evaluate(v: Vector, dtype: torch.dtype, rounded: torch.dtype | None = None) -> tuple[float, Tensor]:
    """Loss and gradient of a vector computed in `dtype`, from logits that were rounded to `rounded` first."""
    z_s, z_t = (z.to(rounded or dtype).to(dtype) for z in (v.z_s, v.z_t))
    z_s.requires_grad_()
    n = (v.y != losses.IGNORE).sum()
    found = getattr(losses, v.objective)(z_s, z_t, v.y, **v.settings)
    loss = v.w_kd * getattr(found, "loss", found).sum() / n + v.offset
    if v.w_ce:
        loss = loss + v.w_ce * losses.cross_entropy(z_s, None, v.y).sum() / n
    (gradient,) = torch.autograd.grad(loss, z_s)
    return loss.item(), gradient


def errors(v: Vector) -> dict[str, float]:
    """The vector's error in each column of the table."""
    found = {}
    loss, gradient = evaluate(v, torch.float64)
    found["loss"], found["gradient"] = _off(loss, v.loss), _off(gradient, v.gradient)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        exact = evaluate(v, torch.float64, rounded=dtype)
        found[name] = max(_off(*pair) for pair in zip(evaluate(v, dtype), exact, strict=True))
    return found


def _off(got, expected) -> float:
    got, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (got, expected))
    gap, size = (got - expected).norm().item(), expected.norm().item()
    return gap / size if size else gap
