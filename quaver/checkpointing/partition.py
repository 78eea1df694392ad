"""Stores activations in float8 in compiled code: casts at the end of a forward graph, and values again in its backward.

torch.compile decides what to save when it partitions the joint graph of forward and backward. The partitioner here lets
Inductor's own do that, and then puts codes in the place of each saved tensor that was made inside a module that stores
(store.py annotates its nodes), under the rules of hooks.py; the largest argument of a module is the largest tensor that
its nodes read from outside. Also stored are inputs of the graph that a storing module reads, the residual stream. A
tensor that two graphs save is stored by each.

    forward       ..., saved              ..., codes, scale
    backward      saved, ..., tangents    codes, scale, ..., tangents

Left as they are besides are tensors that a matmul of the backward reads, directly or through a view: inputs of linears
in high precision. Backward recomputes what the partitioner chose to recompute, from stored values.

Other backends than Inductor do not partition this way, and store nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from quaver.checkpointing.codes import DTYPES, MemoryLayout, decode_in_graph, encode
from quaver.checkpointing.hooks import SMALL, STORED_IN, Around
from quaver.checkpointing.policy import MATMULS
from quaver.recipes.scale_layout import ScaleLayout
from quaver.runtime.slow_paths import say_once
from quaver.torch_private.compiler import CustomPartitionerFn, decompositions, partition

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.clone.default,
        torch.ops.prims.convert_element_type.default,
    }
)
_READERS = MATMULS | {_aten.convolution_backward.default}


class StoringPartitioner(CustomPartitionerFn):
    """Partitions as Inductor does, then stores; see the top of the file."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        """The graphs of forward and backward."""
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        static = {inputs[index] for index in options.get("static_lifetime_input_indices") or ()}
        forward, backward = partition(gm, joint_inputs, **options)
        with_gradient = {name for name, grad in zip(inputs, _results(backward.graph), strict=False) if grad is not None}
        of_backward = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        chosen = list(_stored(forward, backward, options["num_fwd_outputs"], static, with_gradient))
        for node, block_size in chosen:
            _store(forward.graph, backward.graph, node, of_backward[node.name], block_size)
        if chosen:
            forward.recompile()
            backward.recompile()
        return forward, backward

    def uuid(self) -> Any:
        """Hash of this folder's code, which decides what is stored and how, for the compiler's caches of graphs."""
        files = sorted(Path(__file__).parent.glob("*.py"))
        return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()


def _stored(
    forward: GraphModule, backward: GraphModule, num_outputs: int, static: set[str], with_gradient: set[str]
) -> Iterable[tuple[Node, int]]:
    """The saved nodes of the forward graph that are stored, and the size of a block."""
    outputs = _results(forward.graph)
    inputs_of_backward = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    largest = _largest_arguments(forward.graph, static)
    differentiable = _differentiable(forward.graph, with_gradient)
    for node in dict.fromkeys(outputs[num_outputs:]):
        around = _around(node)
        if node.name in static or node in outputs[:num_outputs] or around not in largest or node not in differentiable:
            continue
        if _is_storable(node, largest[around]) and not _feeds_matmul(inputs_of_backward[node.name]):
            yield node, around[1]


def _differentiable(graph: Graph, with_gradient: set[str]) -> set[Node]:
    """The nodes that depend on an input with a gradient; masks and tables do not."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.name in with_gradient or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _around(node: Node) -> Around | None:
    """The module around a saved node that stores; of an input, or of a linear's result, around what reads it."""
    found = _annotation(node)
    if found is not None:
        return found
    of_readers = (_around(each) if each.target in _VIEWS else _annotation(each) for each in node.users)
    return next((each for each in of_readers if each is not None), None)


def _annotation(node: Node) -> Around | None:
    found: Around | None = node.meta.get("custom", {}).get(STORED_IN)
    return found if node.op != "placeholder" else None


def _largest_arguments(graph: Graph, static: set[str]) -> dict[Around, int]:
    """For each class of modules the elements of the largest tensor that its nodes read from outside."""
    largest: dict[Around, int] = {}
    for node in graph.nodes:
        around = _annotation(node)
        if around is None:
            continue
        for argument in node.all_input_nodes:
            if _annotation(argument) != around and argument.name not in static:
                largest[around] = max(largest.get(around, 0), _elements(argument))
    return largest


def _elements(node: Node) -> int:
    """The number of elements of a floating-point tensor of known shape; 0 for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or not _is_static(value):
        return 0
    return value.numel()


def _is_static(value: Tensor) -> bool:
    if all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return True
    say_once(
        "stored activations of dynamic shapes",
        "compiled code with dynamic shapes does not store activations in float8: mark the shapes as static",
    )
    return False


def _is_storable(node: Node, largest: int) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in DTYPES or not _is_static(value):
        return False
    return value.numel() * SMALL > largest and 0 not in value.stride()


def _feeds_matmul(node: Node) -> bool:
    """Whether a matmul reads this input of the backward, directly or through a view."""
    return any(user.target in _READERS or (user.target in _VIEWS and _feeds_matmul(user)) for user in node.users)


def _store(forward: Graph, backward: Graph, node: Node, saved: Node, block_size: int) -> None:
    """Put codes and scales in the place of a saved tensor, `node` of the forward and `saved` of the backward."""
    value = node.meta["val"]
    layout = MemoryLayout(value, block_size)
    made = _copy(
        forward, lambda tensor: encode(layout.matrix_of(tensor), block_size)[:2], [node], _after(forward, node)
    )
    of_scales = ScaleLayout(1, block_size)
    for each in made:
        if node.meta.get("saved_tensor_with_no_vc_check", False):
            each.meta["saved_tensor_with_no_vc_check"] = True
    outputs = _results(forward)
    forward.output_node().args = (tuple(each for one in outputs for each in (made if one is node else [one])),)

    users = list(saved.users)
    inputs = []
    for each, what in zip(made, ("codes", "scale"), strict=True):
        with backward.inserting_before(saved):
            inputs.append(backward.placeholder(f"{saved.name}_{what}"))  # a name that the graph has is no parameter's
        inputs[-1].meta.update(each.meta)
    first_user = next(each for each in backward.nodes if each in saved.users)

    def decoded(codes: Tensor, scale: Tensor) -> Tensor:
        return layout.tensor_of(decode_in_graph(codes, scale, of_scales, value.dtype))

    restored = _copy(backward, decoded, inputs, first_user)[0]
    for user in users:
        user.replace_input_with(saved, restored)
    backward.erase_node(saved)


def _after(graph: Graph, node: Node) -> Node:
    """The node before which a reader of `node` may be inserted."""
    if node.op == "placeholder":
        return next(each for each in graph.nodes if each.op != "placeholder")
    following: Node = node.next
    return following


def _copy(graph: Graph, function: Callable[..., Any], arguments: list[Node], before: Node) -> list[Node]:
    """Insert the nodes of `function(*arguments)` into a graph; returns those of its results."""
    traced = make_fx(function, decomposition_table=decompositions())(*(each.meta["val"] for each in arguments))
    copies: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
    return [copies[each] for each in _results(traced.graph)]


def _results(graph: Graph) -> list[Node]:
    results: Any = graph.output_node().args[0]
    return list(results) if isinstance(results, tuple | list) else [results]
