"""Four rewrites of an objective's compiled graph, which share work over the vocabulary.

Objectives stay plain functions, each term by itself. torch.compile turns one into a graph, and
these passes merge what its terms have in common. No value changes. Eager objectives are not
rewritten.

Dimension key: N positions, V vocabulary, k tokens of a local set. A node is dense if it has the
shape of the logits, [N, V].
"""

import math
import operator

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.inductor_prims import force_stride_order
from torch._ops import OpOverload
from torch.fx import Graph, Node

aten = torch.ops.aten
# operations that move from behind a scatter to before it: a sum and a cast
MOVED = (aten.add.Tensor, torch.ops.prims.convert_element_type.default)


class Rewrite(CustomGraphPass):
    """All rewrites: torch.compile(f, options={"post_grad_custom_pre_pass": Rewrite()})."""

    def __call__(self, graph: Graph):
        compute_once(graph)
        inputs = [_shape(node) for node in graph.find_nodes(op="placeholder")]
        matrices = [shape for shape in inputs if len(shape) == 2]  # logits, or a state
        if matrices:
            dense = max(matrices, key=math.prod)
            scatter_last(graph, dense)
            store_per_position(graph, dense)
            scatter_in_place(graph)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return this file's hash, so that editing it invalidates torch's compile cache."""
        return get_hash_for_files((__file__,))


def compute_once(graph: Graph):
    """Merge nodes of the same operation on the same operands.

    Top-k, anchor, split and the reported cross-entropy all begin with the maximum of each block.
    """
    first = {}
    for node in graph.nodes:
        if _is_pure(node.target):
            same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)


def _is_pure(target) -> bool:
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return not target._schema.is_mutable  # random objectives are not compiled


def scatter_last(graph: Graph, dense: tuple):
    """Move scatters behind sums and casts.

        f(x.scatter(1, i, s), e) -> f(x, e).scatter(1, i, f(s, e.gather(1, i)))

    where f is a sum or a cast and e is dense. The gradients of all terms are then added, narrowed
    and written in one pass; only then are the k tokens written.
    """
    for node in graph.find_nodes(op="call_function", target=aten.scatter.src):
        while _shape(node) == dense and len(node.users) == 1:
            (user,) = node.users
            others = [a for a in user.all_input_nodes if a is not node]
            if user.target not in MOVED or any(_shape(a) != dense for a in others):
                break
            x, dim, index, source = node.args
            with graph.inserting_before(user):
                at_tokens = {node: source}
                for other in others:
                    at_tokens[other] = _gathered(graph, other, dim, index)
                everywhere = _copy(graph, user, {node: x})
                values = _copy(graph, user, at_tokens)
                values.meta["val"] = user.meta["val"].new_empty(_shape(index))
                moved = _copy(graph, node, {x: everywhere, source: values})
                moved.meta = user.meta.copy()
            user.replace_all_uses_with(moved)
            graph.erase_node(user)
            node = moved


def _gathered(graph, node, dim, index) -> Node:
    """Return node.gather(dim, index), computed from a copy of the node's dense arithmetic.

    With a second user, Inductor would write the dense node to memory.
    """

    def copy(n):
        if n.op == "call_function" and _shape(n) == _shape(node):
            return graph.node_copy(n, copy)
        return n

    gathered = graph.call_function(aten.gather.default, (copy(node), dim, index))
    gathered.meta["val"] = node.meta["val"].new_empty(_shape(index))
    return gathered


def _copy(graph, node, operands: dict) -> Node:
    """Return a copy of a node with other operands."""
    return graph.node_copy(node, lambda a: operands.get(a, a))


def store_per_position(graph: Graph, dense: tuple):
    """Write numbers per position to memory before a dense operation reads them.

    `force_stride_order` forces that. Otherwise Inductor repeats their arithmetic, fp64 logarithms
    included, for each of the [N, V] elements.
    """
    for node in list(graph.nodes):
        users = [user for user in node.users if _shape(user) == dense]
        is_small = math.prod(_shape(node)) <= dense[0]
        if not users or not node.all_input_nodes or not is_small:  # inputs are in memory already
            continue
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.is_floating_point():  # a sort has two
            with graph.inserting_after(node):
                stored = graph.call_function(force_stride_order, (node, value.stride()))
            for user in users:
                user.replace_input_with(node, stored)


def scatter_in_place(graph: Graph):
    """Scatter into the logits' own memory where the gradient overwrites them: no buffer.

        z.copy_(x.scatter(1, i, s)) -> z.copy_(x), then z.scatter_(1, i, s)

    The copy goes to a view of z: Inductor would defer a copy to z itself to the end of the graph.
    A gradient of another dtype than z (bf16, with bf16 products) keeps a buffer of its own.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        z, new = node.args
        if new.target is aten.copy.default:
            new = new.args[1]
        if new.target is aten.scatter.src:
            x, *at_tokens = new.args
            stride = z.meta["val"].stride()
            with graph.inserting_before(node):
                view = graph.call_function(aten.as_strided.default, (z, _shape(z), stride))
                graph.call_function(aten.copy_.default, (view, x))
                scattered = graph.call_function(aten.scatter_.src, (z, *at_tokens))
                node.replace_all_uses_with(scattered)
            graph.erase_node(node)


def _shape(node) -> tuple:
    value = node.meta.get("val")
    return tuple(getattr(value, "shape", ()))
