"""Stores activations in float8 in compiled code: quantizes in the forward graph and dequantizes in the backward graph.

torch.compile decides what to save when it partitions the joint graph of forward and backward. The partitioner here runs
Inductor's, then replaces saved tensors with their codes and scales:

    forward returns       ..., saved              ->    ..., codes, scale
    backward reads        saved, ..., tangents    ->    codes, scale, ..., tangents

It replaces results of the nodes inside a module that stores, which store.py annotates, and graph inputs that a storing
module reads, for example the residual stream. The rules of hooks.py apply; the largest argument is the largest tensor
that nodes of the module's class read from outside. Tensors that a matmul of the backward reads, directly or through a
view, are not replaced: they are inputs of linears in high precision. If two graphs save a tensor, each stores it.

The backward recomputes what the partitioner chose to recompute, from the dequantized tensors. Backends other than
Inductor do not partition this way and store nothing.
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

from quaver.activations.codes import STORABLE_DTYPES, MemoryLayout, dequantize_in_graph, quantize_activation
from quaver.activations.hooks import SMALL_TENSOR_RATIO, STORED_BY_KEY, StoringClass
from quaver.activations.policy import MATMUL_OPS
from quaver.recipes.scale_layout import ScaleLayout
from quaver.runtime.slow_paths import report_slow_path
from quaver.torch_private.compiler import CustomPartitionerFn, decompositions, partition

_aten = torch.ops.aten
_VIEW_OPS = frozenset(
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
_MATMUL_AND_CONV_OPS = MATMUL_OPS | {_aten.convolution_backward.default}


class StoringPartitioner(CustomPartitionerFn):
    """Inductor's partitioner, followed by the replacement of saved tensors; see the top of the file."""

    def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        static = {inputs[index] for index in options.get("static_lifetime_input_indices") or ()}
        forward, backward = partition(gm, joint_inputs, **options)
        gradients = _get_results(backward.graph)
        differentiable_inputs = {name for name, grad in zip(inputs, gradients, strict=False) if grad is not None}
        saved = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        num_outputs = options["num_fwd_outputs"]
        to_store = list(_find_nodes_to_store(forward.graph, saved, num_outputs, static, differentiable_inputs))
        for node, block_size in to_store:
            _replace_saved_node(forward.graph, backward.graph, node, saved[node.name], block_size)
        if to_store:
            forward.recompile()
            backward.recompile()
        return forward, backward

    def uuid(self) -> Any:
        """Return a hash of this folder's code, for the compiler's caches: the code decides what is stored, and how."""
        files = sorted(Path(__file__).parent.glob("*.py"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _find_nodes_to_store(
    forward: Graph, saved: dict[str, Node], num_outputs: int, static: set[str], differentiable_inputs: set[str]
) -> Iterable[tuple[Node, int]]:
    """Yield the saved nodes of the forward graph to store, with block sizes. `saved`: the inputs of the backward."""
    outputs = _get_results(forward)
    largest = _measure_largest_arguments(forward, static)
    differentiable = _find_differentiable_nodes(forward, differentiable_inputs)
    for node in dict.fromkeys(outputs[num_outputs:]):
        storing_class = _find_storing_class(node)
        if node.name in static or node in outputs[:num_outputs] or node not in differentiable:
            continue
        if storing_class not in largest or not _is_storable(node, largest[storing_class]):
            continue
        if not _feeds_matmul(saved[node.name]):
            yield node, storing_class[1]


def _find_differentiable_nodes(graph: Graph, differentiable_inputs: set[str]) -> set[Node]:
    """Return the nodes that depend on an input with a gradient; masks and tables do not."""
    differentiable: set[Node] = set()
    for node in graph.nodes:
        if node.name in differentiable_inputs or not differentiable.isdisjoint(node.all_input_nodes):
            differentiable.add(node)
    return differentiable


def _find_storing_class(node: Node) -> StoringClass | None:
    """Return the class of the storing module that computes a saved node.

    No storing module computes a graph input or a linear's result: for these, the class of one that reads it.
    """
    storing_class = _get_annotation(node)
    if storing_class is not None:
        return storing_class
    readers = (_find_storing_class(user) if user.target in _VIEW_OPS else _get_annotation(user) for user in node.users)
    return next((reader for reader in readers if reader is not None), None)


def _get_annotation(node: Node) -> StoringClass | None:
    storing_class: StoringClass | None = node.meta.get("custom", {}).get(STORED_BY_KEY)
    return storing_class if node.op != "placeholder" else None


def _measure_largest_arguments(graph: Graph, static: set[str]) -> dict[StoringClass, int]:
    """Return, by class of modules, the elements of the largest tensor that its nodes read from outside the class."""
    largest: dict[StoringClass, int] = {}
    for node in graph.nodes:
        storing_class = _get_annotation(node)
        if storing_class is None:
            continue
        for argument in node.all_input_nodes:
            if _get_annotation(argument) != storing_class and argument.name not in static:
                largest[storing_class] = max(largest.get(storing_class, 0), _count_elements(argument))
    return largest


def _count_elements(node: Node) -> int:
    """Return the number of elements of a floating-point tensor of known shape; 0 for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or _reports_dynamic_shape(value):
        return 0
    return value.numel()


def _reports_dynamic_shape(value: Tensor) -> bool:
    if all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return False
    report_slow_path(
        "stored activations of dynamic shapes",
        "compiled code with dynamic shapes does not store activations in float8: mark the shapes as static",
    )
    return True


def _is_storable(node: Node, largest: int) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in STORABLE_DTYPES or _reports_dynamic_shape(value):
        return False
    return value.numel() * SMALL_TENSOR_RATIO > largest and 0 not in value.stride()


def _feeds_matmul(node: Node) -> bool:
    return any(
        user.target in _MATMUL_AND_CONV_OPS or (user.target in _VIEW_OPS and _feeds_matmul(user)) for user in node.users
    )


def _replace_saved_node(forward: Graph, backward: Graph, node: Node, saved: Node, block_size: int) -> None:
    value = node.meta["val"]
    layout, scale_layout = MemoryLayout(value, block_size), ScaleLayout(1, block_size)

    def quantize(tensor: Tensor) -> tuple[Any, ...]:
        return quantize_activation(layout.to_matrix(tensor), block_size)[:2]

    def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
        return layout.from_matrix(dequantize_in_graph(codes, scale, scale_layout, value.dtype))

    stored = _insert_traced(forward, quantize, [node], _get_next_node(forward, node))
    if node.meta.get("saved_tensor_with_no_vc_check", False):
        for result in stored:
            result.meta["saved_tensor_with_no_vc_check"] = True
    outputs = _get_results(forward)
    forward.output_node().args = (tuple(new for old in outputs for new in (stored if old is node else [old])),)

    users = list(saved.users)
    inputs = []
    for result, name in zip(stored, ("codes", "scale"), strict=True):
        with backward.inserting_before(saved):
            inputs.append(backward.placeholder(f"{saved.name}_{name}"))
        inputs[-1].meta.update(result.meta)
    first_user = next(node for node in backward.nodes if node in saved.users)
    dequantized = _insert_traced(backward, dequantize, inputs, first_user)[0]
    for user in users:
        user.replace_input_with(saved, dequantized)
    backward.erase_node(saved)


def _get_next_node(graph: Graph, node: Node) -> Node:
    """Return the first node before which a reader of `node` may be inserted."""
    if node.op == "placeholder":
        return next(following for following in graph.nodes if following.op != "placeholder")
    return node.next


def _insert_traced(graph: Graph, function: Callable[..., Any], arguments: list[Node], before: Node) -> list[Node]:
    traced = make_fx(function, decomposition_table=decompositions())(*(argument.meta["val"] for argument in arguments))
    copies: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
    return [copies[result] for result in _get_results(traced.graph)]


def _get_results(graph: Graph) -> list[Node]:
    results: Any = graph.output_node().args[0]
    return list(results) if isinstance(results, tuple | list) else [results]
