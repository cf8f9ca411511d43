"""The objectives of the field beside the paper's: their identities, their constants, and a setting that moves.

What holds for every objective is in test_losses.py, the recorded numbers are in test_golden.py.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import torch

import losses
from configure import Config
from lib import metrics
from losses import METHODS, method_loss
from run import methods
from tests.golden_table import KEYWORDS
from tests.test_golden import cases
from tests.test_losses import case, kd, kl, value_and_gradient

NEW = ["skew_fkl", "skew_rkl", "abkd", "topk_tail", "logit_std", "akl", "todi", "taid"]


def of(name, **settings):
    return lambda *inputs: getattr(losses, name)(*inputs, **settings)


@pytest.mark.parametrize("name", ["skew_fkl", "taid", "todi", "ref_topk_tail"])
def test_the_recorded_number_of_each_position(name):
    for label, (z_s, z_t, y), settings, part in cases(name):
        objective, keywords = KEYWORDS[name](settings, z_s.shape[1])
        found = getattr(losses, objective)(z_s, z_t, y, **keywords)
        found = getattr(found, "loss", found)
        torch.testing.assert_close(found, torch.from_numpy(part["tok"]).flatten(), rtol=1e-9, atol=1e-12, msg=label)


def test_the_recorded_head_of_akl():
    for label, (z_s, z_t, y), settings, part in cases("akl"):
        h, forward, reverse = (torch.from_numpy(part[key]).flatten(0, 1) for key in ("h_ratio", "fkl", "rkl"))
        found = losses.akl(z_s, z_t, y, mu=settings["mu"])
        torch.testing.assert_close(found, h * forward + (1 - h) * reverse, rtol=1e-9, atol=0, msg=label)
        share = losses._head_share(z_s, z_t, settings["mu"])
        torch.testing.assert_close(share, h[:, None], rtol=1e-9, atol=0, msg=label)


def test_the_skew_divergences_are_bounded():
    for name in ("skew_fkl", "skew_rkl"):
        for lam in (0.01, 0.1, 0.9):
            loss = of(name, lam=lam)(*case(teacher=60.0, student=60.0, ignored=()))
            assert (loss >= 0).all() and (loss <= -math.log(lam)).all() and loss.max() > -0.9 * math.log(lam)


@pytest.mark.parametrize("name", ["skew_fkl", "skew_rkl", "abkd"])
def test_tokens_that_underflow_in_both_models_are_no_nan(name):
    z_s, z_t, y = case(dtype=torch.float32)
    z_s[:, 3:9] -= 200
    z_t[:, 3:9] -= 200
    z_t[:, 11] -= 130
    loss, gradient = value_and_gradient(of(name), z_s, z_t, y)
    exact, gradient_64 = value_and_gradient(of(name), z_s.double(), z_t.double(), y)
    assert (loss - exact).norm() <= 1e-5 * exact.norm() and (gradient - gradient_64).norm() <= 1e-5 * gradient_64.norm()


def test_the_alpha_beta_divergence():
    z_s, z_t, y = case(ignored=())
    p, q = z_t.softmax(-1), z_s.softmax(-1)
    half = 4 * (1 - (p * q).sqrt().sum(-1))
    torch.testing.assert_close(losses.abkd(z_s, z_t, y, alpha=0.5, beta=0.5), half)
    near, tiny = z_t + 1e-4 * z_s, 1e-6
    d = near.log_softmax(-1) - z_t.log_softmax(-1)
    for a, b in ((0.2, 0.7), (0.5, 0.0), (0.0, 0.5), (0.5, -0.5), (0.0, 0.0)):
        second = (p ** (a + b) * d.square()).sum(-1) / 2
        torch.testing.assert_close(losses.abkd(near, z_t, y, alpha=a, beta=b), second, rtol=1e-3, atol=0)
        moved = (a + tiny * (a == 0), b + tiny * (b == 0 or a + b == 0))
        pairs = (value_and_gradient(of("abkd", alpha=x, beta=w), z_s, z_t, y) for x, w in ((a, b), moved))
        for exact, close in zip(*pairs, strict=True):
            assert (exact - close).norm() <= 3e-5 * exact.norm(), (a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_akls_head_is_found_to_the_last_token(dtype):
    z_s, z_t, _ = case(seed=3, n=17, v=997, teacher=2.0, dtype=dtype)
    falling = z_t.log_softmax(-1).sort(descending=True)
    error = (falling.values.exp() - z_s.softmax(-1).gather(1, falling.indices)).abs()
    for mu in (0.01, 0.5, 0.99):
        head = falling.values.exp().cumsum(-1) <= mu
        head[:, 0] = True
        expected = (error * head).sum(-1, keepdim=True) / error.sum(-1, keepdim=True)
        torch.testing.assert_close(losses._head_share(z_s, z_t, mu), expected)


def test_akl_at_equality_is_zero():
    _, z_t, y = case(dtype=torch.float32)
    loss, gradient = value_and_gradient(losses.akl, z_t, z_t, y)  # its weight is 0 / 0
    assert not loss.any() and gradient.abs().max() < 1e-6


def test_standardized_logits():
    z_s, z_t, y = case(ignored=())
    loss, gradient = value_and_gradient(lambda *z: kd("logit_std", *z), 0.3 * z_t + 7, z_t, y)
    assert loss.abs().max() < 1e-12 and gradient.abs().max() < 1e-6  # whatever the student's scale
    _, gradient = value_and_gradient(lambda *z: kd("logit_std", *z), z_s, z_t, y)
    assert (gradient * z_s).sum(-1).abs().max() < 1e-5 < gradient.abs().max()
    x_s, x_t = ((z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True) for z in (z_s, z_t))
    torch.testing.assert_close(kd("logit_std", x_s, x_t, y), 4 * kl(x_s, x_t, 2.0), rtol=1e-6, atol=0)
    z_s[3], z_t[4] = 5.0, -5.0  # constant rows
    loss, gradient = value_and_gradient(lambda *z: kd("logit_std", *z), z_s, z_t, y)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_taids_t_moves_over_the_run():
    at = lambda name, step, **of: methods.scheduled_settings(losses.resolve(name, **of), step, 1000)  # noqa: E731
    assert [at("taid", step)["t"] for step in (0, 500, 1000)] == pytest.approx([0.4, 0.7, 1.0])
    assert at("taid", 500, t=0.2, t_end=0.4, w_ce=1.0) == {"t": pytest.approx(0.3)} and at("alra", 500, gamma=3.0) == {}
    assert methods.scheduled_settings(METHODS["taid"]._replace(moving=()), 500, 1000) == {}  # a name alone moves nothing
    z_s, z_t, y = case()
    last, kl = methods.make_loss_fn("taid"), methods.make_loss_fn("vanilla_kd", tau=1.0, w_kd=1.0, w_ce=0.0)
    moved = {"t": torch.tensor(at("taid", 1000)["t"], dtype=torch.float64)}
    for a, b in zip(last(z_s.dtype, z_s.clone(), z_t, y, moved), kl(z_s.dtype, z_s, z_t, y), strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_random_depends_on_seed_update_student_and_forward_batch_alone(monkeypatch):
    def mine(z_s, z_t, y, *, generator: torch.Generator | None = None):
        seeds.append(generator.initial_seed())
        return losses.reverse_kl(z_s, z_t, y)

    def drawn(name="mine@a", step=3, world=1, seed=1):
        for rank in range(world):
            monkeypatch.setattr(methods, "parallel", SimpleNamespace(rank=lambda rank=rank: rank, world=lambda: world))
            cfg = Config(batch_rows=8, group=2, seed=seed, device="cpu")
            objective = methods.make_objective(name, cfg)(step)
            for _ in range(4 // world):
                objective(torch.float64, *case())
        return [seeds.pop(0) for _ in range(4)]

    seeds = []
    monkeypatch.setitem(METHODS, "mine", losses.Method(mine, {}, 1.0, 0.0))
    assert drawn() == drawn(world=2) == drawn(world=4) and drawn()[0] == 6394423578351708644  # in every Python
    assert len({*drawn(), *drawn("mine@b"), *drawn(step=4), *drawn(seed=5)}) == 16
    assert losses.settings("mine").keys() == {"w_kd", "w_ce"}  # the generator is none of them
    with pytest.raises(ValueError, match="mine: it draws from a `generator`, so set --compile=False"):
        methods.check_settings("mine", 53, compile=True)


def test_the_largest_five_of_a_vocabulary_of_four_are_four():
    y, model = torch.tensor([[0, 3]]), (lambda x: case(n=3, v=4)[0][None, :2], torch.eye(4).double())
    (sums,) = metrics.row_sums([model], model[1], [(0, y, y, model[0](y))], 1)
    assert sums["top5"] == sums["n"] == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("name", ["pretrain", "pd", "atkd", "ldrld", "bild", *NEW])  # test_graph.py has the others
def test_value_and_gradient_are_one_graph(name):
    z_s, z_t, y = case(n=5, v=97, dtype=torch.float32)
    torch.compiler.reset()
    one = functools.partial(methods.evaluate, METHODS[name], torch.float32)
    whole = torch.compile(one, backend="eager", fullgraph=True)
    loss, _, dz = whole(z := z_s.clone(), z_t, y)
    assert dz is z  # the gradient overwrites the logits
    expected = method_loss(name, z := z_s.clone().requires_grad_(), z_t, y)[0]
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(dz, torch.autograd.grad(expected, z)[0], rtol=1e-4, atol=1e-6)
