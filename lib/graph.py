"""Four rewrites of an objective's graph for torch.compile. Objectives stay plain functions, each term by itself; here
their work over the vocabulary is shared. No value changes; eager objectives are not rewritten.

Dimension key: N positions, V vocabulary, k tokens of a local set. A node is dense if it has the shape of the logits, [N, V].
"""

import math
import operator

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.inductor_prims import force_stride_order
from torch._ops import OpOverload
from torch.fx import Graph, Node

aten = torch.ops.aten
MOVED = (aten.add.Tensor, torch.ops.prims.convert_element_type.default)  # from behind a scatter to before it


class Rewrite(CustomGraphPass):
    """torch.compile(f, options={"post_grad_custom_pre_pass": Rewrite()})"""

    def __call__(self, graph: Graph) -> None:
        compute_once(graph)
        logits = [_shape(n) for n in graph.find_nodes(op="placeholder") if len(_shape(n)) == 2]  # of both models, equal
        if logits:
            scatter_last(graph, logits[0])
            store_per_position(graph, logits[0])
            scatter_in_place(graph)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))  # a changed rewrite does not find what torch has cached


def compute_once(graph: Graph) -> None:
    """Merge nodes of the same operation on the same operands.

    Top-k, anchor, split and the reported cross-entropy all begin with the maximum and the sum of each block.
    """
    first: dict[str, Node] = {}
    for node in graph.nodes:
        pure = isinstance(node.target, OpOverload) and not node.target._schema.is_mutable
        if node.target is operator.getitem or (pure and torch.Tag.nondeterministic_seeded not in node.target.tags):
            same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)


def scatter_last(graph: Graph, dense: tuple[int, int]) -> None:
    """f(x.scatter(1, i, s), e) -> f(x, e).scatter(1, i, f(s, e.gather(1, i))), f a sum or a cast, e dense.

    The gradients of all terms are then added, narrowed and written in one pass, and k tokens follow.
    """
    for node in list(graph.nodes):
        while node.target is aten.scatter.src and _shape(node) == dense and len(node.users) == 1:
            (user,) = node.users
            x, dim, index, source = node.args
            others = [a for a in user.all_input_nodes if a is not node]
            if user.target not in MOVED or any(_shape(a) != dense for a in others):
                break
            with graph.inserting_before(user):
                at_tokens = {node: source, **{a: _gathered(graph, a, dim, index, dense) for a in others}}
                everywhere = _copy(graph, user, {node: x}, user)
                values = _copy(graph, user, at_tokens, user, _shape(index))
                moved = _copy(graph, node, {x: everywhere, source: values}, user)
            user.replace_all_uses_with(moved)
            graph.erase_node(user)
            node = moved


def _gathered(graph: Graph, node: Node, dim: int, index: Node, dense: tuple[int, int]) -> Node:
    """node.gather(dim, index), of a copy of its dense arithmetic: with two users Inductor would write it out."""

    def copy(n: Node) -> Node:
        return graph.node_copy(n, copy) if n.op == "call_function" and _shape(n) == dense else n

    gathered = graph.call_function(aten.gather.default, (copy(node), dim, index))
    gathered.meta["val"] = node.meta["val"].new_empty(_shape(index))
    return gathered


def _copy(graph: Graph, node: Node, operands: dict, like: Node, shape: tuple | None = None) -> Node:
    """The node with other operands; its value is like another's, or of its dtype and another shape."""
    copy = graph.node_copy(node, lambda a: operands.get(a, a))
    copy.meta = {**like.meta, "val": like.meta["val"].new_empty(shape) if shape else like.meta["val"]}
    return copy


def scatter_in_place(graph: Graph) -> None:
    """z.copy_(x.scatter(1, i, s)) -> z.copy_(x), then z.scatter_(1, i, s): the scatter needs no buffer of its own.

    The copy goes to a view of z. A copy to z itself would be deferred to the end of the graph. Only where the gradient has
    the dtype of z: with bf16 products it is bf16, and has a buffer of its own.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        z, new = node.args
        new = new.args[1] if new.target is aten.copy.default else new
        if new.target is aten.scatter.src:
            x, *at_tokens = new.args
            with graph.inserting_before(node):
                view = graph.call_function(aten.as_strided.default, (z, _shape(z), z.meta["val"].stride()))
                graph.call_function(aten.copy_.default, (view, x))
                node.replace_all_uses_with(graph.call_function(aten.scatter_.src, (z, *at_tokens)))
            graph.erase_node(node)


def store_per_position(graph: Graph, dense: tuple[int, int]) -> None:
    """Store each number per position that meets a dense operand.

    Inductor would repeat its arithmetic, fp64 logarithms included, at every one of the [N, V] elements.
    """
    for node in list(graph.nodes):
        meets = [user for user in node.users if _shape(user) == dense]
        small = meets and node.all_input_nodes and math.prod(_shape(node)) <= dense[0]
        if small and node.meta["val"].is_floating_point():
            with graph.inserting_after(node):
                stored = graph.call_function(force_stride_order, (node, node.meta["val"].stride()))
            for user in meets:
                user.replace_input_with(node, stored)


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))
