"""What a GPU's compiler is handed, and which operations it would run: seen on the CPU, without kernels."""

import copy
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.inductor_prims import force_stride_order

from lib.graph import Rewrite
from losses import IGNORE, METHODS, method_loss
from run import methods
from tests import world
from tests.test_losses import ROWS

aten = torch.ops.aten
N, V = 5, 32_771  # prime; blocks of 128, as at the real vocabulary


def case(seed=0):
    g = torch.Generator().manual_seed(seed)
    z_s, z_t = (scale * torch.randn(N, V, generator=g) for scale in (1.5, 3.0))
    y = torch.randint(V, (N,), generator=g)
    y[2] = IGNORE
    return z_s, z_t, y


# Between them a scatter, two splits and a cross-entropy; test_objectives.py traces others, test_fused.py compiles ALRA.
REWRITTEN = [("rld", torch.bfloat16), ("tad", torch.float32)]


def traced(f):
    """f compiled -> its rewritten graphs, and f. A rewritten graph is run beside the graph as it was."""
    graphs = []

    def rewritten(graph, _):
        before = copy.deepcopy(graph)
        Rewrite()(graph.graph)
        graph.graph.lint()
        graph.recompile()
        graphs.append(graph.graph)

        def both(*inputs):
            expected, results = before(*(x.clone() for x in inputs)), graph(*inputs)
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), "a rewrite changed a value"
            return results

        return both

    torch.compiler.reset()
    lowered = {"fw_compiler": rewritten, "inference_compiler": rewritten, "decompositions": select_decomp_table()}
    backend = aot_autograd(**lowered, keep_inference_input_mutations=True)
    return graphs, torch.compile(f, backend=backend, fullgraph=True, dynamic=False)


def value(node):
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else torch.empty(0)


def dense(graph):
    """Nodes of [N, V], in blocks or not."""
    return [n for n in graph.nodes if n.op == "call_function" and value(n).numel() >= N * (V - V % 128)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize(("name", "dtype"), REWRITTEN)
def test_value_and_gradient_are_one_graph_of_two_passes(name, dtype):
    z_s, z_t, y = case()
    graphs, compiled = traced(lambda *z: methods.evaluate(METHODS[name], dtype, *z))
    z = z_s.clone()
    with torch.no_grad():
        loss, _, dz = compiled(z, z_t, y)
        compiled(*case(seed=1))
    assert len(graphs) == 1  # `fullgraph` raises at a break, and the second call did not recompile
    assert (dz.data_ptr() == z.data_ptr()) == (dtype == torch.float32)  # written over the logits where it fits
    expected = method_loss(name, z := z_s.clone().requires_grad_(), z_t, y)[0]
    assert torch.allclose(loss, expected.detach(), rtol=1e-6)
    gradient = torch.autograd.grad(expected, z)[0].to(dtype).float()
    assert dz.dtype == dtype and (dz.float() - gradient).norm() <= 1e-3 * gradient.norm()

    (graph,) = graphs
    maxima = [n for n in graph.nodes if n.target is aten.amax.default and value(n.args[0]).numel() >= N * (V - V % 128)]
    assert len(maxima) <= 2 + 2 * (name == "rld")  # of the blocks of each model; RLD's below the label too
    assert not [n for n in dense(graph) if value(n).dtype == torch.float64]
    for n in dense(graph):
        operands = [a for a in n.all_input_nodes if a.all_input_nodes and 1 < value(a).numel() <= N]
        computed = {a.target for a in operands if value(a).is_floating_point()}
        assert value(n).ndim > 2 or computed <= {force_stride_order}, n
    scattered = [
        n for n in graph.nodes if n.target in (aten.scatter.src, aten.scatter_.src) and len(value(n.args[0])) == N
    ]
    scattered = [n for n in scattered if value(n.args[0]).shape == (N, V) and value(n.args[0]).is_floating_point()]
    in_place = aten.scatter.src if dtype == torch.bfloat16 else aten.scatter_.src
    assert [n.target for n in scattered] == [in_place] * (name in ("tad", "alra"))
    assert all(value(n.args[0]).dtype == dtype for n in scattered)


def test_a_changed_rewrite_has_another_identity(tmp_path, monkeypatch):
    """torch finds what it has compiled before by `uuid`."""
    from lib import graph

    before, copied = Rewrite().uuid(), tmp_path / "graph.py"
    copied.write_text(Path(graph.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(graph, "__file__", str(copied))
    assert Rewrite().uuid() != before


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
        found = op(*args, **(kwargs or {}))
        assert "sort" not in op.name(), op
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, torch.Tensor):
                assert x.device.type == "standin" or x.ndim == 0, f"{op} on {x.device}"
                assert x.dtype != torch.float64 or x.numel() < T * V, f"{op} in fp64 over the vocabulary"
        return found


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


def test_every_method_stays_on_its_device_in_narrow_numbers(tmp_path):
    """No CPU tensor, no sort, no fp64 over the vocabulary: forward and backward on a device that is not there."""
    process = world.start(exec, STANDIN, {"ROWS": ROWS}, out=tmp_path / "said")
    process.join()
    assert process.exitcode == 0 and (tmp_path / "said").read_text().split() == ROWS
