"""What a GPU's compiler is given, and which operations it would run: seen on the CPU, without
kernels."""

import copy

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.inductor_prims import force_stride_order

from lib import graph as rewrites
from losses import METHODS, method_loss
from run import methods
from tests import world
from tests.test_losses import ROWS, assert_near, case

aten = torch.ops.aten
N = 5
V = 32_771  # prime; blocks of 128, as at the real vocabulary


def traced(f):
    """f compiled -> its rewritten graphs, and f, which runs each beside the graph as it was."""
    graphs = []

    def rewritten(module, _):
        original = copy.deepcopy(module)
        rewrites.Rewrite()(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)

        def both(*inputs):
            expected = original(*(x.clone() for x in inputs))
            results = module(*inputs)
            assert all(map(torch.equal, results, expected)), "a rewrite changed a value"
            return results

        return both

    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=rewritten,
        inference_compiler=rewritten,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return graphs, torch.compile(f, backend=backend, fullgraph=True, dynamic=False)


def value(node):
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else torch.empty(0)


def is_dense(node):
    """Whether it has [N, V] elements, in blocks or not."""
    return value(node).numel() >= N * (V - V % 128)


# Between them a scatter, two splits and a cross-entropy. test_objectives.py traces others, and
# test_head.py compiles ALRA.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize(
    ("name", "dtype", "n_maxima", "scatter"),
    [
        ("rld", torch.bfloat16, 4, []),  # of the blocks of each model, and below the label
        ("tad", torch.float32, 2, [aten.scatter_.src]),
    ],
)
def test_value_and_gradient_are_one_graph_of_two_passes(name, dtype, n_maxima, scatter):
    z_s, z_t, y = case(n=N, v=V, dtype=torch.float32)
    graphs, compiled = traced(lambda *z: methods.evaluate(METHODS[name], dtype, *z))
    z = z_s.clone()
    with torch.no_grad():
        loss, _, dz = compiled(z, z_t, y)
        compiled(*case(n=N, v=V, dtype=torch.float32, seed=1))
    (graph,) = graphs  # `fullgraph` raises at a break, and the second call did not recompile
    is_in_place = dz.data_ptr() == z.data_ptr()
    assert is_in_place == (dtype == torch.float32)  # written over the logits where it fits
    z_s.requires_grad_()
    expected, _ = method_loss(name, z_s, z_t, y)
    (gradient,) = torch.autograd.grad(expected, z_s)
    gradient = gradient.to(dtype).float()
    assert torch.allclose(loss, expected.detach(), rtol=1e-6)
    assert dz.dtype == dtype
    assert_near(dz.float(), gradient, 1e-3)

    maxima = graph.find_nodes(op="call_function", target=aten.amax.default)
    assert sum(is_dense(n.args[0]) for n in maxima) <= n_maxima
    scattered = []
    for n in graph.nodes:
        if n.target in (aten.scatter.src, aten.scatter_.src) and is_dense(n.args[0]):
            scattered.append(n.target)
            assert value(n.args[0]).dtype == dtype
        if n.op != "call_function" or not is_dense(n):
            continue
        assert value(n).dtype != torch.float64
        for operand in n.all_input_nodes:  # a computed number per position is stored first
            number = value(operand)
            if number.is_floating_point() and 1 < number.numel() <= N and value(n).ndim == 2:
                assert not operand.all_input_nodes or operand.target is force_stride_order
    assert scattered == scatter


def test_an_objective_may_sort_the_vocabulary():
    """A node with two results has no shape."""
    traced(lambda z: z.sort(-1).values * z)[1](case()[0])


def test_a_changed_rewrite_has_another_identity(monkeypatch):
    """torch finds what it has compiled before by `uuid`."""
    uuid = rewrites.Rewrite().uuid()
    monkeypatch.setattr(rewrites, "__file__", __file__)
    assert rewrites.Rewrite().uuid() != uuid


STANDIN = """
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

module = backend_registration._DummyBackendModule()
module.get_amp_supported_dtype = lambda: [torch.bfloat16]
backend_registration._setup_privateuseone_for_python_backend("standin", module)
FakeTensor.is_cuda = property(lambda self: self.device.type == "standin")

from run import methods
from lib.head import head_losses

B, T, V = 2, 64, 151_936


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        assert "sort" not in op.name(), op
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                assert x.device.type == "standin" or x.ndim == 0, f"{op} on {x.device}"
                assert x.dtype != torch.float64 or x.numel() < T * V, f"{op} in fp64 over V"
        return result


with FakeTensorMode(), Watch():
    like = dict(device="standin", dtype=torch.bfloat16)
    h_t, w_t = torch.empty(B, T, 24, **like), torch.empty(V, 24, **like)
    y = torch.empty(B, T, device="standin", dtype=torch.int64)
    for name in ROWS:
        h_s = torch.empty(B, T, 16, **like, requires_grad=True)
        w_s = torch.empty(V, 16, device="standin", requires_grad=True)
        ((loss, terms),) = head_losses([(h_s, w_s, methods.make_loss_fn(name))], h_t, w_t, y)
        loss.backward()
        assert loss.dtype == w_s.grad.dtype == torch.float32 and h_s.grad.dtype == torch.bfloat16
        print(name)
"""


@pytest.mark.slow
def test_every_method_stays_on_its_device_in_narrow_numbers(tmp_path):
    """No CPU tensor, no sort, no fp64 over the vocabulary, on a device that is not there."""
    process = world.start(exec, STANDIN, {"ROWS": ROWS}, out=tmp_path / "output")
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "output").read_text().split() == ROWS
