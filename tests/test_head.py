"""The fused head and loss against the plain path: values, gradients, batches of every size, and
several students."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
from torch._inductor import cpu_vec_isa
from torch.testing import assert_close

import losses
from configure import Config
from lib import head
from losses import IGNORE, METHODS
from run import methods
from tests.test_losses import BF16, FIRST_TIER, ROWS, assert_near

B = 4
T = 7
V = 61
D_S = 5  # width of the student
D_T = 11
ignore_dynamo = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def case(t=T, dtype=torch.float32, seed=0):
    """h_s, w_s, h_t, w_t and y: sequences of T, 5, none and one valid position."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    h_s = normal(B, t, D_S)
    w_s = normal(V, D_S)
    h_t = normal(B, t, D_T)
    w_t = normal(V, D_T)
    y = torch.randint(V, (B, t), generator=g)
    for row in range(1, B):
        y[row, (5 * row) % t :] = IGNORE
    y[B // 2] = IGNORE
    return h_s, w_s, h_t, w_t, y


def fused(h_s, w_s, h_t, w_t, y, method, group=1, compile=False, chunk=None, **settings):
    """`head_losses` of one student, whose method is a name or a row."""
    if isinstance(method, str):
        method = losses.resolve(method, **settings)
    method = losses.with_given(method, n_sequences=group)
    students = [(h_s, w_s, method)]
    chunk = chunk or group * y.shape[1]
    ((loss, sums),) = methods.head_losses(students, h_t, w_t, y, group, compile, chunk)
    return loss, in_fp64(sums)


def in_fp64(sums):
    return {key: value.double() for key, value in sums.items()}


def plain(h_s, w_s, h_t, w_t, y, method, group=1, **settings):
    """What `fused` must equal: each group by itself, means of terms times positions."""
    results = []
    n_valid = []
    for rows in torch.arange(B).split(group):
        z_s = (h_s[rows] @ w_s.T).flatten(0, 1)
        z_t = (h_t[rows] @ w_t.T).flatten(0, 1)
        labels = y[rows].flatten()
        results.append(losses.method_loss(method, z_s, z_t, labels, group, **settings))
        n_valid.append((labels != IGNORE).sum())
    loss = sum(loss for loss, _ in results) / len(results)
    terms = {}
    for key in results[0][1]:
        terms[key] = sum(terms[key] * n for (_, terms), n in zip(results, n_valid, strict=True))
    return loss, in_fp64(terms)


def run(fn, h_s, w_s, *inputs, scale=1.0, **settings):
    """-> loss, sums of terms, gradients of h_s and w_s."""
    h_s = h_s.clone().requires_grad_()
    w_s = w_s.clone().requires_grad_()
    loss, sums = fn(h_s, w_s, *inputs, **settings)
    (loss * scale).backward()
    return loss.detach(), sums, h_s.grad, w_s.grad


def assert_equal(got, expected):
    assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("group", "chunk"), [(1, 3), (1, 512), (2, 3), (2, 512)])
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_plain_path(name, group, chunk):
    """However many positions the head takes at once, and however many forward batches."""
    inputs = case(dtype=torch.float64)
    settings = {}
    if name == "alra":
        settings = {"d_max": 5, "w_ce": 0.5, "lambda_pair": 3.0}
    got = run(fused, *inputs, name, group, scale=3.0, chunk=chunk, **settings)
    expected = run(plain, *inputs, name, group, scale=3.0, **settings)
    assert_close(got, expected, rtol=1e-10, atol=1e-13)
    _, _, gradient, _ = got
    assert gradient.any()
    assert not gradient[inputs[-1] == IGNORE].any()


CALLS = """
True  =>  7 => 7 7 7 7    => 7 7 7 7
True  => 20 => 14 14      => 14 14
True  => 21 => 14 14      => 14 14
True  => 99 => 28         => 28
True  =>  4 => 4 3 4 3 4 3 4 3 => 4 3 4 3 4 3 4 3
False => 20 => 7 7 7 7    => 14 14
False =>  4 => 7 7 7 7    => 7 7 7 7
"""
CALLS = [line.split("=>") for line in CALLS.strip().split("\n")]


@pytest.fixture
def of_teacher(monkeypatch):
    """The number of positions in each call of the teacher's head."""
    sizes = []
    logits = methods.Head.logits

    def watched(self, here):
        if type(self) is methods.Head:
            sizes.append(here.stop - here.start)
        return logits(self, here)

    monkeypatch.setattr(methods.Head, "logits", watched)
    return sizes


@pytest.mark.parametrize(("in_chunks", "chunk", "calls", "teacher_calls"), CALLS)
def test_how_many_positions_a_call_sees(in_chunks, chunk, calls, teacher_calls, of_teacher):
    """Each of `chunk` positions, by an objective, and by the teacher's head."""
    seen = []

    def objective(z_s, z_t, y):
        seen.append(len(y))
        return losses.jsd(z_s, z_t, y)

    method = losses.Method(objective, in_chunks="True" in in_chunks)
    fused(*case(), method, chunk=int(chunk))
    assert seen == [*map(int, calls.split())]
    assert of_teacher == [*map(int, teacher_calls.split())]


def test_students_with_different_needs_share_the_teachers_logits(of_teacher):
    """Two forward batches at once and one by one."""
    h_s, w_s, h_t, w_t, y = case()
    students = []
    for name in ("vanilla_kd", "adakd", "alra", "rs_kd"):
        method = methods.make_method(name, Config(seq_len=T), V)
        if name == "rs_kd":
            method = losses.with_given(method, generator=torch.Generator())
        students.append((h_s, w_s, method))
    methods.head_losses(students, h_t, w_t, y, chunk=2 * T)
    assert of_teacher == [2 * T, 2 * T]


class Sharpened(torch.nn.Module):
    """A temperature that learns."""

    def __init__(self):
        super().__init__()
        self.tau = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, z_s, z_t, y):
        return losses.vanilla_kd(z_s / self.tau, z_t, y, tau=1.0)


@pytest.mark.parametrize("group", [1, 2])
def test_a_module_learns_from_each_forward_batch(group, monkeypatch):
    """test_train.py has the state of one."""
    module = Sharpened()
    monkeypatch.setitem(METHODS, "mine", losses.Method(module))
    inputs = case(dtype=torch.float64)
    loss, _ = fused(*inputs, "mine", group)
    loss.backward()
    expected, _ = plain(*inputs, "mine", group)
    (gradient,) = torch.autograd.grad(expected, module.tau)
    assert_close((loss, module.tau.grad), (expected, gradient), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["pretrain", "tad", "alra"])
def test_what_stands_at_ignored_positions_changes_nothing(name):
    inputs = case()
    h_s, _, h_t, _, y = inputs
    clean = run(fused, *inputs, name)
    h_s[y == IGNORE] = math.nan
    h_t[y == IGNORE] = math.inf
    assert_equal(run(fused, *inputs, name), clean)


@pytest.mark.parametrize("name", FIRST_TIER)
def test_bf16_operands_give_fp32_logits(name):
    """As the plain path in fp32 on the same rounded operands. Gradients are rounded once."""
    *narrow, y = case(t=13, dtype=torch.bfloat16)
    wide = [x.float() for x in narrow]
    loss, _, *gradients = run(fused, *narrow, y, name)
    expected, _, *exact = run(plain, *wide, y, name)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, rtol=1e-5, atol=0)
    for gradient, x in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert_near(gradient.float(), x, BF16)


def test_fp32_master_weights_meet_bf16_hidden_states_as_under_autocast():
    h_s, w_s, h_t, w_t, y = case()
    narrow = [h_s.bfloat16(), w_s.bfloat16(), h_t.bfloat16(), w_t.bfloat16()]
    *values, _, gradient = run(fused, narrow[0], w_s, narrow[2], w_t, y, "alra")
    *expected, _, rounded = run(fused, *narrow, y, "alra")
    assert gradient.dtype == torch.float32
    assert_equal(values, expected)
    assert_equal(gradient.bfloat16(), rounded)


def test_autocast_around_it_changes_nothing():
    inputs = case()
    expected = run(fused, *inputs, "alra")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(fused, *inputs, "alra")
    assert_equal(got, expected)


@pytest.mark.parametrize(("kernel", "n_used"), [(torch.float32, 4), (torch.bfloat16, 1)])
def test_the_heads_gradient_is_added_in_place_where_the_device_can(kernel, n_used, monkeypatch):
    """The GPU's kernel is tried once, and used if it adds in fp32."""
    used = []

    def add(onto, a, b, dtype, *, out):
        used.append(out)
        return out.copy_((onto + a.float() @ b.float()).to(kernel))

    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", add)
    monkeypatch.setattr(head, "mm", lambda a, b: a.float() @ b.float())
    head._adds_in_place.cache_clear()
    a, b = torch.randn(2, 7, 7).bfloat16()
    total = torch.zeros(7, 7)
    for n in range(3):
        head.add_mm(total, a, b)
        assert_close(total, (n + 1) * (a.float() @ b.float()))
    head._adds_in_place.cache_clear()
    assert len(used) == n_used


@pytest.mark.slow
@ignore_dynamo
@pytest.mark.parametrize(
    ("name", "vectors", "chunk"),
    [("pretrain", True, T), ("alra", False, 2 * T)],
)
def test_compiled_it_is_the_same(name, vectors, chunk, monkeypatch):
    """In the last, partly filled block of vectors too, which torch's loops leave out."""
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [cpu_vec_isa.VecAVX2()])
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    torch.compiler.reset()
    inputs = case()
    # 256 bits: AVX2, also where ATEN_CPU_CAPABILITY says otherwise, which torch's cache ignores
    with torch._inductor.config.patch({"cpp.vec_isa_ok": vectors, "cpp.simdlen": 256}):
        got = run(fused, *inputs, name, compile=True, chunk=chunk)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    assert_close(got, run(fused, *inputs, name), rtol=1e-5, atol=1e-7)


@pytest.fixture
def graphs(monkeypatch):
    """What counts the graphs that are traced, and not compiled."""
    counter = torch._dynamo.testing.CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch.compiler.reset()
    methods.compiled.cache_clear()
    yield counter
    methods.compiled.cache_clear()


@ignore_dynamo
@pytest.mark.parametrize("name", ["alra", "atkd", "sekd", "ldrld", "bild", "adakd", "akl"])
def test_value_and_gradient_are_one_graph(name, graphs):
    """Those that choose or sort. If chunks depend on their forward batch, a first pass is another.

    It returns a function of the objective, which is then called on whole batches.
    """
    inputs = case()
    got = run(fused, *inputs, name, 2, compile=True, chunk=T)
    assert_close(got, run(fused, *inputs, name, 2), rtol=1e-4, atol=1e-5)
    assert graphs.frame_count == 1 + (name in ("alra", "atkd", "sekd"))


@ignore_dynamo
def test_one_graph_serves_every_weight_of_a_schedule(graphs):
    inputs = case()
    for w_kd in (0.0, 0.3, 1.0):
        expected = run(plain, *inputs, "pd", w_kd=w_kd, w_ce=1 - w_kd)
        tensor = torch.tensor(w_kd, dtype=torch.float64)
        method = METHODS["pd"]._replace(w_kd=tensor, w_ce=1.0 - tensor)
        for compiled in (True, False):
            got = run(fused, *inputs, method, compile=compiled)
            assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert graphs.frame_count == 1


def test_what_is_random_depends_on_seed_update_student_and_forward_batch_alone(monkeypatch):
    seeds = []

    def mine(z_s, z_t, y, *, generator: torch.Generator | None = None):
        seeds.append(generator.initial_seed())
        return losses.reverse_kl(z_s, z_t, y)

    h, w, _, _, y = case()
    w.requires_grad_()

    def drawn(name="mine@a", step=3, world=1, seed=1):
        seeds.clear()
        cfg = Config(batch_rows=8, group=2, seed=seed, device="cpu", compile=True)
        monkeypatch.setattr(methods.parallel, "world", lambda: world)
        for rank in range(world):
            monkeypatch.setattr(methods.parallel, "rank", lambda rank=rank: rank)
            student = SimpleNamespace(name=name, method=methods.make_method(name, cfg, V))
            method = methods.method_at(student, step, cfg)
            rows = torch.arange(8 // world) % 4
            inputs = (h[rows], w.detach(), y[rows])
            methods.head_losses([(h[rows], w, method)], *inputs, 2, True, 2 * T)
        return seeds.copy()

    monkeypatch.setitem(METHODS, "mine", losses.Method(mine))
    first = drawn()
    assert first[0] == 4217922091839384867  # in every Python
    assert first == drawn("mine@b") == drawn(world=2) == drawn(world=4)
    other = drawn("rs_kd") + drawn(step=4) + drawn(seed=5)
    assert len({*first, *other}) == 12
