"""The recorded numbers of the authors' codes: loss and gradient.

tests/golden/README.md says where the numbers are from. Each is compared as it is (fp64), with the
same logits rounded to fp32, and with logits rounded to bf16. The last two are compared with fp64 on
the rounded logits, in value and gradient. Errors are relative, of the gradient in norm; where the
recorded number is 0, they are absolute.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import losses
from tests.test_losses import BF16, assert_near

ARRAYS = dict(np.load(Path(__file__).parent / "golden/vectors.npz"))
# Place of a case in vectors.npz, its input, and the recorded loss in terms of our objectives, with
# the settings of the case. MiniPLM's loss is a cross-entropy with the teacher, whose entropy it has
# too.
CASES = """\
abkd/c00 small abkd()
abkd/c01 small abkd(alpha=0.5, beta=0.5)
abkd/c02 small abkd(alpha=0.8, beta=0.3)
abkd/c03 small abkd(alpha=1.0, beta=0.0)
abkd/c04 small abkd(alpha=0.0, beta=1.0)
abkd/c05 small abkd(alpha=0.0, beta=0.0)
abkd/c06 peaked_teacher abkd()
adakd/c00 small adakd()
adakd/c01 small adakd(base='forward')
adakd/c02 small adakd(keep=1.0, base='forward')
adakd/c03 small adakd(c=0.0, base='forward')
adakd/c04 small adakd(c=0.6, rule='reverse_kl')
adakd/c05 peaked_teacher adakd()
akl/c00 small akl()
akl/c01 small akl(mu=0.8)
akl/c02 peaked_teacher akl()
atkd/c00 small atkd(easy_weight=0.2)
atkd/c01 small atkd()
atkd/c02 small atkd(tau=2.0)
atkd/c03 peaked_teacher atkd(easy_weight=0.2)
bild/c00 small bild()
bild/c01 small bild(tau=1.0)
bild/c02 small bild(top_k=16)
bild/c04 small bild(top_k=3)
bild/c05 peaked_teacher bild()
dkd/c00 small dkd()
dkd/c01 small dkd(beta=6.0)
dkd/c02 small dkd(beta=2.0)
dkd/c03 small dkd(beta=0.5, tau=1.0)
dkd/c04 small dkd(beta=2.0, tau=1.0)
dkd/c05 small dkd(beta=1.0, tau=1.0)
dkd/c06 peaked_teacher dkd()
fdistill/c02 small vanilla_kd(tau=1.0, t2_scaling=True)
fdistill/c03 small reverse_kl()
fdistill/c06 small vanilla_kd(tau=2.0, t2_scaling=True)
fdistill/c07 small 4.0 * reverse_kl(tau=2.0)
fdistill/c08 small tvd()
gkd_jsd_trl/c00 small jsd(beta=0.0)
gkd_jsd_trl/c01 small jsd(beta=0.0, tau=2.0)
gkd_jsd_trl/c02 small jsd(beta=0.1)
gkd_jsd_trl/c03 small jsd(beta=0.1, tau=2.0)
gkd_jsd_trl/c04 small jsd()
gkd_jsd_trl/c05 small jsd(tau=2.0)
gkd_jsd_trl/c06 small jsd(beta=0.9)
gkd_jsd_trl/c07 small jsd(beta=0.9, tau=2.0)
gkd_jsd_trl/c08 small jsd(beta=1.0)
gkd_jsd_trl/c09 small jsd(beta=1.0, tau=2.0)
gkd_jsd_trl/c10 peaked_teacher jsd(beta=0.0)
kd_mdistiller/c00 small vanilla_kd(t2_scaling=True)
kd_mdistiller/c01 small vanilla_kd(tau=1.0, t2_scaling=True)
kd_mdistiller/c02 small vanilla_kd(tau=4.0, t2_scaling=True)
kd_mdistiller/c03 peaked_teacher vanilla_kd(t2_scaling=True)
ldrld/c00 small ldrld(alpha=10.5, beta=7.0, d=7, tau=4.0)
ldrld/c01 small ldrld(d=7)
ldrld/c02 small ldrld()
ldrld/c03 small ldrld(tau=4.0)
ldrld/c04 small ldrld(d=3)
ldrld/c05 small ldrld(d=2)
ldrld/c06 peaked_teacher ldrld(alpha=10.5, beta=7.0, d=7, tau=4.0)
logit_std_kd/c00 small vanilla_kd(tau=2.0, t2_scaling=True, standardize=True)
logit_std_kd/c01 small vanilla_kd(tau=1.0, t2_scaling=True, standardize=True)
logit_std_kd/c02 small vanilla_kd(tau=4.0, t2_scaling=True, standardize=True)
logit_std_kd/c03 peaked_teacher vanilla_kd(tau=2.0, t2_scaling=True, standardize=True)
minillm_reverse_kl/c00 small reverse_kl()
minillm_reverse_kl/c01 peaked_teacher reverse_kl()
ref_abkd_limits/c00 small abkd(alpha=0.5, beta=0.0)
ref_abkd_limits/c01 small abkd(alpha=0.0, beta=0.5)
ref_abkd_limits/c02 small abkd(alpha=0.5, beta=-0.5)
ref_abkd_limits/c03 peaked_teacher abkd(alpha=0.5, beta=0.0)
ref_alra/c00 small alra()
ref_alra/c01 small alra(detach_weights=False)
ref_alra/c02 small alra(d_min=2, d_max=8, gamma=2.0, tau=2.0, tau_p=3.0, lambda_pair=0.5)
ref_alra/c03 small alra(d_min=15, d_max=15)
ref_alra/c04 peaked_teacher alra()
ref_alra/c05 peaked_teacher alra(detach_weights=False)
ref_alra/c06 peaked_teacher alra(d_min=2, d_max=8, gamma=2.0, tau=2.0, tau_p=3.0, lambda_pair=0.5)
ref_alra/c07 peaked_teacher alra(d_min=15, d_max=15)
ref_bdl/c00 small bdl()
ref_bdl/c01 small bdl(lam=0.1)
ref_bdl/c02 small bdl(lam=0.7)
ref_bdl/c03 peaked_teacher bdl()
ref_pd/c00 small pd(temper_student=True)
ref_pd/c01 small pd()
ref_pd/c03 small pd(truncate_on='raw')
ref_pd/c04 small pd(tau=2.0, truncate_on='raw')
ref_pd/c05 small pd(tau=1.0, truncate_on='raw', top_k=97)
ref_pd/c06 small pd(temper_student=True, top_k=5)
ref_pd/c07 small pd(tau=1.0, top_p=1.0, top_k=97)
ref_pd/c08 peaked_teacher pd(temper_student=True)
ref_tad/c00 small tad()
ref_tad/c01 small tad(beta=1.0)
ref_tad/c02 small tad(top_k=1)
ref_tad/c03 small tad(top_k=5)
ref_tad/c04 small tad(top_k=20)
ref_tad/c05 small tad(tau=2.0)
ref_tad/c06 small tad()
ref_tad/c07 small tad(beta=1.0, norm='none')
ref_tad/c08 small tad(norm='none')
ref_tad/c09 small tad(norm='unit')
ref_tad/c10 peaked_teacher tad()
ref_topk_tail/c00 small tad(top_k=1, beta=0.0)
ref_topk_tail/c01 small tad(top_k=5, beta=0.0)
ref_topk_tail/c02 small tad(beta=0.0)
ref_topk_tail/c03 small tad(top_k=20, beta=0.0)
ref_topk_tail/c04 peaked_teacher tad(top_k=1, beta=0.0)
rld/c00 small rld(beta=8.0, tau=4.0)
rld/c01 small rld(beta=8.0, tau=4.0, tau_conf=4.0)
rld/c02 small rld(beta=0.5)
rld/c03 small rld(beta=2.0)
rld/c04 small rld()
rld/c05 small rld(beta=4.0)
rld/c06 small rld(beta=8.0)
rld/c08 peaked_teacher rld(beta=8.0, tau=4.0)
sekd/c00 small sekd(tau=1.0)
sekd/c01 small sekd()
sekd/c02 small sekd(tau=1.0, keep=0.5)
sekd/c03 small sekd(keep=0.5)
sekd/c04 small sekd(tau=1.0, keep=1.0)
sekd/c05 small sekd(keep=1.0)
sekd/c06 peaked_teacher sekd(tau=1.0)
skew_fkl/c00 small skew_fkl()
skew_fkl/c01 small skew_fkl(lam=0.5)
skew_fkl/c02 small skew_fkl(lam=0.0)
skew_fkl/c03 peaked_teacher skew_fkl()
skew_rkl/c00 small skew_rkl()
skew_rkl/c01 small skew_rkl(lam=0.5)
skew_rkl/c02 small skew_rkl(lam=0.0)
skew_rkl/c03 peaked_teacher skew_rkl()
taid/c00 small taid()
taid/c01 small taid(t=0.7)
taid/c02 small taid(t=1.0)
taid/c03 peaked_teacher taid()
todi/c00 small todi()
todi/c01 small todi(tau=2.0)
todi/c02 peaked_teacher todi()
vanilla_kd_miniplm/c00 small 0.5 * (vanilla_kd(tau=1.0) + entropy + cross_entropy())
vanilla_kd_miniplm/c01 small 0.5 * (vanilla_kd() + entropy + cross_entropy())
vanilla_kd_miniplm/c02 small vanilla_kd(tau=1.0) + entropy
vanilla_kd_miniplm/c03 small vanilla_kd() + entropy
vanilla_kd_miniplm/c04 peaked_teacher 0.5 * (vanilla_kd(tau=1.0) + entropy + cross_entropy())
vanilla_kd_modelopt/c00 small vanilla_kd(t2_scaling=True)
vanilla_kd_modelopt/c01 small vanilla_kd(tau=1.0, t2_scaling=True)
vanilla_kd_modelopt/c02 small vanilla_kd(tau=2.0, t2_scaling=True)
vanilla_kd_modelopt/c03 peaked_teacher vanilla_kd(t2_scaling=True)
"""


def tensor(place, key):
    """An array [B, L, ..] as [N, ..]; a number as it is."""
    x = torch.from_numpy(ARRAYS[f"{place}/{key}"])
    return x.flatten(0, 1) if x.ndim else x


def evaluate(case, dtype, rounded):
    """Loss and gradient of a case computed in `dtype`, from logits rounded to `rounded` first."""
    place, kind, expression = case.split(maxsplit=2)
    z_s = tensor(f"inputs/{kind}", "student_logits").to(rounded).to(dtype).requires_grad_()
    z_t = tensor(f"inputs/{kind}", "teacher_logits").to(rounded).to(dtype)
    y = tensor(f"inputs/{kind}", "labels")
    y = y.where(tensor(f"inputs/{kind}", "mask"), losses.IGNORE)

    def mean_of(objective):
        def call(**settings):
            result = objective(z_s, z_t, y, **settings)
            return getattr(result, "loss", result).sum() / (y != losses.IGNORE).sum()

        return call

    names = {method.fn.__name__: mean_of(method.fn) for method in losses.METHODS.values()}
    names["entropy"] = float(ARRAYS.get(f"{place}/part/kd_entropy", "nan"))
    loss = eval(expression, names)
    (gradient,) = torch.autograd.grad(loss, z_s)
    return loss.detach(), gradient


@pytest.mark.parametrize("case", CASES.splitlines())
def test_the_recorded_loss_and_gradient(case):
    place, *_ = case.split()
    loss, gradient = evaluate(case, torch.float64, torch.float64)
    check(loss, tensor(place, "loss"), 1e-9)
    check(gradient, tensor(place, "grad"), 1e-8)
    for dtype, bar in ((torch.float32, 1e-5), (torch.bfloat16, BF16)):
        exact = evaluate(case, torch.float64, dtype)
        for x, expected in zip(evaluate(case, dtype, dtype), exact, strict=True):
            check(x, expected, bar)


def check(x, expected, bar):
    assert_near(x.double(), expected, bar, bar * (not expected.any()))


def test_every_file_is_read():
    files = {case.partition("/")[0] for case in CASES.splitlines()}
    assert files == {key.partition("/")[0] for key in ARRAYS} - {"inputs"}
