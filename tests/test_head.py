"""The fused head and loss against the plain path: values, gradients, batches cut in every way, several students."""

import functools
import math

import pytest
import torch
import torch._dynamo.testing

import losses
from lib import head
from losses import IGNORE, METHODS
from run import methods

B, T, D_S, D_T, V = 4, 7, 5, 11, 61
FIRST_TIER = ["pretrain", "vanilla_kd", "pd", "atkd", "rld", "ldrld", "tad", "bild", "alra"]


def fused_head_losses(students, h_t, w_t, y, group=1, compile=False):
    """`head_losses` of (h_s, w_s, method, settings) each."""
    heads = [(h, w, methods.make_loss_fn(name, group, compile, **settings)) for h, w, name, settings in students]
    return head.head_losses(heads, h_t, w_t, y, group)


def fused_head_loss(h_s, w_s, h_t, w_t, y, method, group=1, compile=False, **settings):
    return fused_head_losses([(h_s, w_s, method, settings)], h_t, w_t, y, group, compile)[0]


def case(b=B, t=T, v=V, dtype=torch.float32, seed=0):
    """Hidden states, heads and labels; sequences of unequal valid length, one of them with none."""
    g = torch.Generator().manual_seed(seed)
    h_s, w_s, h_t, w_t = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
                          for shape in ((b, t, D_S), (v, D_S), (b, t, D_T), (v, D_T)))  # fmt: skip
    y = torch.randint(v, (b, t), generator=g)
    for row in range(1, b):
        y[row, 1 + (5 * row) % t :] = IGNORE
    y[b // 2] = IGNORE
    return h_s.requires_grad_(), w_s.requires_grad_(), h_t, w_t, y


def plain(h_s, w_s, h_t, w_t, y, method, group=1, **overrides):
    """What the fused path must equal: full logits, one method_loss per group, terms weighted by positions."""
    each, n_valid = [], []
    for rows in torch.arange(len(y)).split(group):
        z_s, z_t = (h_s[rows] @ w_s.T).flatten(0, 1), (h_t[rows] @ w_t.T).flatten(0, 1)
        each.append(losses.method_loss(method, z_s, z_t, y[rows].flatten(), group, **overrides))
        n_valid.append(int((y[rows] != IGNORE).sum()))
    loss = sum(loss for loss, _ in each) / len(each)
    terms = {key: sum(t[key] * n for (_, t), n in zip(each, n_valid, strict=True)) / sum(n_valid) for key in each[0][1]}
    return loss, terms


def run(fn, h_s, w_s, h_t, w_t, y, *args, scale=1.0, **kwargs):
    """-> loss, terms, gradients of h_s and w_s."""
    h_s, w_s = (x.detach().clone().requires_grad_() for x in (h_s, w_s))
    loss, terms = fn(h_s, w_s, h_t, w_t, y, *args, **kwargs)
    (loss * scale).backward()
    return loss.detach(), terms, h_s.grad, w_s.grad


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_values_and_gradients_are_those_of_the_plain_path(name, group):
    inputs = case(dtype=torch.float64)
    overrides = {"d_max": 5, "w_ce": 0.5, "lambda_pair": 3.0} if name == "alra" else {}
    found, expected = (run(fn, *inputs, name, group, scale=3.0, **overrides) for fn in (fused_head_loss, plain))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    assert found[2].any() and not found[2][inputs[-1] == IGNORE].any()


def test_students_of_one_teacher_get_the_bits_they_would_get_alone():
    students, alone = [], []
    _, _, h_t, w_t, y = case()
    for seed, name in enumerate(FIRST_TIER):
        h_s, w_s, *_ = case(seed=seed)
        overrides = {"d_max": 9} if name == "alra" else {}
        students.append((h_s, w_s, name, overrides))
        alone.append(run(fused_head_loss, h_s, w_s, h_t, w_t, y, name, **overrides))
    together = fused_head_losses(students, h_t, w_t, y)
    sum(loss for loss, _ in together).backward()
    for (loss, terms), (h_s, w_s, *_), expected in zip(together, students, alone, strict=True):
        assert torch.equal(loss, expected[0]) and terms.keys() == expected[1].keys()
        assert all(torch.equal(terms[key], expected[1][key]) for key in terms)
        assert torch.equal(h_s.grad, expected[2]) and torch.equal(w_s.grad, expected[3])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("what", ["hidden", "head"])
def test_a_broken_student_leaves_the_others_as_they_are(what):
    h_s, w_s, h_t, w_t, y = case()
    broken = [h_s.detach().clone(), w_s.detach().clone()]
    broken[what == "head"].view(-1)[0] = math.nan
    students = [(*(x.requires_grad_() for x in broken), "alra", {}), (h_s, w_s, "alra", {})]
    (bad, bad_terms), (good, good_terms) = fused_head_losses(students, h_t, w_t, y)
    assert bad.isnan() and bad_terms["loss"].isnan()
    assert list(bad_terms) == ["loss", "kd", "ce", "mass", "local", "rest", "pair", "d_u", "support"]
    expected, expected_terms = fused_head_loss(h_s, w_s, h_t, w_t, y, "alra")
    assert torch.equal(good, expected) and torch.equal(good_terms["kd"], expected_terms["kd"])


@pytest.mark.parametrize("name", ["pretrain", "tad", "alra"])
def test_what_stands_at_ignored_positions_changes_nothing(name):
    h_s, w_s, h_t, w_t, y = case()
    clean = run(fused_head_loss, h_s, w_s, h_t, w_t, y, name)
    with torch.no_grad():
        h_s[y == IGNORE] = math.nan
        h_t[y == IGNORE] = math.inf
    for a, b in zip(clean, run(fused_head_loss, h_s, w_s, h_t, w_t, y, name), strict=True):
        assert a == b if isinstance(a, dict) else torch.equal(a, b)


@pytest.mark.parametrize("name", FIRST_TIER)
def test_bf16_operands_give_fp32_logits(name):
    """As the plain path in fp32 on the same rounded operands; gradients are rounded once, on the way out."""
    inputs = [x.detach().bfloat16() if x.is_floating_point() else x for x in case(t=13)]
    found = run(fused_head_loss, *inputs, name)
    expected = run(plain, *(x.float() if x.is_floating_point() else x for x in inputs), name)
    assert found[2].dtype == found[3].dtype == torch.bfloat16 and found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert (a - b).norm() <= 4e-3 * b.norm()


def test_fp32_master_weights_meet_bf16_hidden_states_as_under_autocast():
    h_s, w_s, h_t, w_t, y = case()
    narrow = h_s.detach().bfloat16(), w_s.detach().bfloat16(), h_t.bfloat16(), w_t.bfloat16()
    mixed = run(fused_head_loss, narrow[0], w_s.detach(), narrow[2], w_t, y, "alra")
    same = run(fused_head_loss, *narrow, y, "alra")
    assert torch.equal(mixed[0], same[0])
    assert mixed[3].dtype == torch.float32 and torch.equal(mixed[3].bfloat16(), same[3])


def test_autocast_around_it_changes_nothing():
    inputs = case()
    expected = run(fused_head_loss, *inputs, "alra")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(fused_head_loss, *inputs, "alra")
    assert torch.equal(found[0], expected[0]) and torch.equal(found[3], expected[3])


def test_without_gradients_the_value_is_the_same():
    h_s, w_s, h_t, w_t, y = case()
    expected, terms = fused_head_loss(h_s, w_s, h_t, w_t, y, "alra")
    with torch.no_grad():
        loss, found = fused_head_loss(h_s, w_s, h_t, w_t, y, "alra")
    assert torch.equal(loss, expected) and found == terms and not loss.requires_grad
    loss, _ = fused_head_loss(h_s.detach(), w_s.detach(), h_t, w_t, y, "alra")
    assert torch.equal(loss, expected) and not loss.requires_grad


def test_only_what_asks_for_a_gradient_gets_one():
    h_s, w_s, h_t, w_t, y = case()
    both = run(fused_head_loss, h_s, w_s, h_t, w_t, y, "tad")
    for frozen, learning in ((0, 1), (1, 0)):
        inputs = [h_s.detach().clone(), w_s.detach().clone()]
        inputs[learning].requires_grad_()
        fused_head_loss(*inputs, h_t, w_t, y, "tad")[0].backward()
        assert inputs[frozen].grad is None and torch.equal(inputs[learning].grad, both[2 + learning])
    fused_head_loss(h_s, w_s, h_t, w_t, y, "tad", w_kd=0.0, w_ce=0.0)[0].backward()
    assert not h_s.grad.any() and not w_s.grad.any()


def test_backward_runs_once():
    loss, _ = fused_head_loss(*case(), "tad")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward\\(\\) called twice"):
        loss.backward()


def test_no_valid_position_is_a_loss_of_zero():
    h_s, w_s, h_t, w_t, y = case()
    loss, terms = fused_head_loss(h_s, w_s, h_t, w_t, torch.full_like(y, IGNORE), "alra")
    loss.backward()
    assert loss == 0 and not any(terms.values()) and not h_s.grad.any() and not w_s.grad.any()


def test_a_method_without_teacher_takes_none():
    h_s, w_s, h_t, w_t, y = case()
    alone, _ = fused_head_loss(h_s, w_s, None, None, y, "pretrain")
    assert torch.equal(alone, fused_head_loss(h_s, w_s, h_t, w_t, y, "pretrain")[0])


def test_one_groups_logits_are_the_most_that_exist(monkeypatch):
    sizes = []
    real = head.mm
    monkeypatch.setattr(head, "mm", lambda *a, **k: sizes.append((out := real(*a, **k)).shape) or out)
    fused_head_loss(*case(), "alra")
    assert max(n for n, v in sizes if v == V) == T


@pytest.mark.parametrize("kernel", ["exact", "narrow", "missing"])
def test_the_heads_gradient_is_added_in_place_where_the_device_can(kernel, monkeypatch):
    """A kernel that stands in for the GPU's is taken where its value is right; else product and sum are two passes."""
    used = []

    def add(onto, a, b, dtype, *, alpha, out):
        if kernel == "missing":
            raise NotImplementedError("no kernel for this device")
        used.append(out)
        found = onto + alpha * (a.float() @ b.float())
        return out.copy_(found if kernel == "exact" else found.bfloat16())

    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", add)
    plain_mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: plain_mm(a.to(out_dtype), b.to(out_dtype)))
    head._adds_in_place.cache_clear()
    g = torch.Generator().manual_seed(0)
    a, b, onto = (torch.randn(*shape, generator=g) for shape in ((11, 7), (7, 5), (11, 5)))
    for _ in range(3):
        total = onto.clone()
        assert head.mm(a.bfloat16(), b.bfloat16(), onto=total, alpha=0.25) is total
        torch.testing.assert_close(total, onto + 0.25 * plain_mm(a.bfloat16().float(), b.bfloat16().float()))
    head._adds_in_place.cache_clear()
    assert len(used) == {"exact": 4, "narrow": 1, "missing": 0}[kernel]  # tried once


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
def test_compiled_it_is_the_same():
    inputs = case()
    compiled, eager = (run(fused_head_loss, *inputs, "alra", compile=c) for c in (True, False))
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    with torch.no_grad():  # another graph
        loss = fused_head_loss(*inputs, "vanilla_kd", compile=True)[0]
    torch.testing.assert_close(loss, fused_head_loss(*inputs, "vanilla_kd")[0], rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("name", ["pd", "alra"])
def test_one_graph_serves_every_weight_of_a_schedule(name, monkeypatch):
    counter, compile = torch._dynamo.testing.CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options, **keys: compile(function, backend=counter, **keys))
    methods._compiled.cache_clear()
    h_s, w_s, h_t, w_t, y = case()
    for w_kd in (0.0, 0.3, 1.0):
        tensor = {"w_kd": torch.tensor(w_kd, dtype=torch.float64)}
        expected, terms = plain(h_s, w_s, h_t, w_t, y, name, w_kd=w_kd, w_ce=1 - w_kd)
        wanted = torch.autograd.grad(expected, (h_s, w_s))
        for compiled in (True, False):
            evaluate = functools.partial(methods.make_loss_fn(name, compile=compiled), scheduled=tensor or None)
            loss, found = head.head_losses([(h_s, w_s, evaluate)], h_t, w_t, y)[0]
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(torch.autograd.grad(loss, (h_s, w_s)), wanted, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found["kd"].float(), terms["kd"], rtol=1e-5, atol=1e-6)
    methods._compiled.cache_clear()
    assert counter.frame_count == 1
