"""Tests which activations are stored in float8, how well, in how many bytes, eager and compiled, and their removal."""

import copy
import gc
import inspect
import math
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from quaver import convert_to_float8_training, convert_to_high_precision
from quaver.activations import activation_report, apply_activation_checkpointing, store_activations_in_float8
from quaver.activations import hooks as store_hooks
from quaver.activations.codes import MemoryLayout, dequantize_activation, quantize_activation
from quaver.activations.partition import StoringPartitioner
from quaver.recipes.scaling import dynamic_cast_blocks
from tests.library.activations.nets import LOWEST_DB, SAVED, STORED_TENSORS, Net, build_net
from tests.models import rope_tables
from tests.reference import lowest_sqnr_db, sqnr_db
from tests.steps import assert_same, compute_results, draw
from tests.thinned import at_night, thinned

PRECISIONS = (None, "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
SHAPE = (2, 64, 256)
COMPILED = 0.849
"""Of an eager block's saved bytes a compiled one's, in bfloat16."""


def make_input(seed=0, shape=SHAPE):
    return draw(*shape, seed=seed).requires_grad_()


def compute_loss(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return net(x).float().square().mean()


def step(net):
    """Return the gradients of a step: of each parameter by name, and of the input as ""."""
    net.zero_grad()
    compute_loss(net, x := make_input()).backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {"": x.grad, **{name: grad for name, grad in gradients.items() if grad is not None}}


def differentiate(module, *arguments, x=None):
    """Return the gradient of a module's input."""
    x = make_input() if x is None else x
    return torch.autograd.grad(module(x, *arguments).sum(), x)[0]


def make_storing(recipe, **shape):
    net = build_net(recipe, width=256, **shape)
    store_activations_in_float8(net)
    return net


def list_classes(net):
    return [type(module) for module in net.modules()]


def nest(**modules):
    """Return a model of modules with these names."""
    return nn.Sequential(OrderedDict(modules))


def compile_modules(modules, **options):
    """Compile with Inductor's partitioner, but PyTorch's kernels."""
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=StoringPartitioner(),
    )
    for module in modules:
        module.compile(fullgraph=True, backend=backend, **options)


def count_saved_bytes(forward):
    """Return the bytes that PyTorch's CPU allocator holds more of while the result of `forward` is alive."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _result = forward()
        gc.collect()
    return sum(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")


def measure_saved_bytes(net):
    step(net)
    net.zero_grad()
    return count_saved_bytes(lambda: compute_loss(net, make_input()))


@pytest.fixture(scope="module")
def bfloat16_bytes():
    return measure_saved_bytes(build_net(None, width=256))


VIEWS = {
    "dense": draw(4, 128, seed=1),
    "transposed": torch.randn(2, 32, 4, 64).transpose(1, 2),
    "column-major": torch.randn(128, 40).t(),
    "a slice": torch.randn(16, 300)[:, 10:210],
    "ragged": torch.randn(5, 7, 33),
    "one row": torch.randn(129),
}


@pytest.mark.parametrize(
    ("view", "dtype", "block_size"), thinned(VIEWS, [torch.float32, torch.bfloat16, torch.float16], [32, 128])
)
def test_codes_are_those_of_the_block_cast_and_give_back_shape_dtype_and_order_of_strides(view, dtype, block_size):
    tensor = VIEWS[view].to(dtype)
    layout = MemoryLayout(tensor, block_size)
    matrix = layout.to_matrix(tensor)
    codes, scale, of_scales, *_ = quantize_activation(matrix, block_size)
    expected = dynamic_cast_blocks(matrix, torch.float8_e4m3fn, power_of_2=True, block_size=(1, block_size), rule="")
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[2])
    again = layout.from_matrix(dequantize_activation(codes, scale, of_scales, dtype))
    assert (again.shape, again.dtype) == (tensor.shape, dtype)
    assert again.stride() == tensor.stride() or not layout.is_dense
    assert sqnr_db(tensor, again) > lowest_sqnr_db(3, 7)  # e4m3, then bfloat16


def test_decoding_is_one_operator_of_a_graph():
    codes, scale, layout, *_ = quantize_activation(draw(4, 128), 32)
    operator = torch.ops.quaver.dequantize_activation
    compiled = torch.compile(lambda *args: operator(*args), backend="eager", fullgraph=True)
    assert torch.equal(*(call(codes, scale, layout, torch.float32) for call in (compiled, dequantize_activation)))


# Where a graph is cut depends on whether a linear's backward reads its input in high precision. A test below compiles a
# rowwise linear with Inductor.
@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        *((recipe, False) for recipe in PRECISIONS),
        ("rowwise_with_gw_hp", True),
        *at_night((recipe, True) for recipe in PRECISIONS if recipe != "rowwise_with_gw_hp"),
    ],
)
def test_a_block_saves_little_and_its_gradients_are_near(recipe, compiled, bfloat16_bytes):
    exact, net = build_net(recipe, width=256), make_storing(recipe)
    if compiled:
        compile_modules(net.layers)
    grads, approximate = step(exact), step(net)
    assert min(sqnr_db(grads[name], approximate[name]) for name in grads) > LOWEST_DB
    if recipe:  # the last linear reads what it saved, and the gradient of the loss
        last = "layers.0.mlp.down_proj.weight"
        assert torch.equal(grads[last], approximate[last])
    assert measure_saved_bytes(net) <= SAVED[recipe] * bfloat16_bytes * (COMPILED if compiled else 1)


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        ("rowwise", "selective"),
        ("mxfp8", "full"),
        *at_night((recipe, mode) for recipe in (None, *PRECISIONS[2:4]) for mode in ("full", "selective")),
    ],
)
def test_a_checkpoint_recomputes_in_high_precision_and_stores_nothing(recipe, mode):
    plain, net = build_net(recipe, mode, width=256), make_storing(recipe)
    apply_activation_checkpointing(net.layers, mode=mode)
    assert_same(step(net), step(plain))
    assert measure_saved_bytes(net) == measure_saved_bytes(plain)


def test_a_reentrant_checkpoint_recomputes_in_high_precision():
    exact, layer = step(build_net("rowwise", width=256)), make_storing("rowwise").layers[0]
    tables = rope_tables(64, 64, "cpu")
    compute_loss(lambda x: checkpoint(layer, x, *tables, use_reentrant=True), make_input()).backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, exact[f"layers.0.{name}"])


class FeedForward(nn.Module):
    """Saves the input of a linear, and its result."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 512, bias=False)

    def forward(self, x):
        return F.silu(self.up(x))


def test_inductor_stores_what_a_float8_linear_computes():
    """This runs Inductor's own passes, partitioner and kernels."""
    net = convert_to_float8_training(nest(block=FeedForward()), config="rowwise")
    x = make_input().detach()

    def compute_sum():
        with torch.autocast("cpu", torch.bfloat16):
            return net.block(x).sum()

    (exact,) = torch.autograd.grad(compute_sum(), net.block.up.weight)
    store_activations_in_float8(net, modules=["block"])
    net.block.compile(fullgraph=True)
    (approximate,) = torch.autograd.grad(compute_sum(), net.block.up.weight)
    assert 20 < sqnr_db(exact, approximate) < 60  # infinite if nothing was stored
    # a byte for each element of the input and the result
    assert count_saved_bytes(compute_sum) < (1 + 1.1 * 2) * x.numel()


class Gate(nn.Module):
    """Saves two tensors that it computes."""

    def forward(self, x):
        return (x * 2).sigmoid() * x.cos()


def test_a_compiled_graph_that_stores_is_not_mistaken_for_one_that_does_not():
    """The keys of Inductor's caches have no annotations."""
    grads = []
    for store in (False, True, False):
        torch.compiler.reset()
        net = nest(gate=Gate())
        if store:
            store_activations_in_float8(net, modules=["gate"])
        net.gate.compile(fullgraph=True)
        grads.append(differentiate(net.gate))
    assert torch.equal(grads[0], grads[2])
    assert 20 < sqnr_db(grads[0], grads[1]) < 60  # infinite if nothing was stored


class Foreign(CustomPartitionerFn):
    def __call__(self, *args, **options):
        return min_cut_rematerialization_partition(*args, **options)

    def uuid(self):
        return "foreign"


@pytest.mark.parametrize(("partitioner", "stores"), [(None, True), (Foreign(), False)])
def test_compiled_code_stores_after_the_partitioner_was_removed_or_reports_another(caplog, partitioner, stores):
    plain, net = nest(gate=Gate()), nest(gate=Gate())
    store_activations_in_float8(net, modules=["gate"])
    torch.compiler.reset()
    with inductor_config.patch(custom_partitioner_fn=partitioner):
        if partitioner is not None:
            with pytest.raises(RuntimeError, match="custom_partitioner_fn is Foreign"):
                store_activations_in_float8(plain, modules=["gate"])
        net.gate.compile(fullgraph=True)
        assert (sqnr_db(differentiate(plain.gate), differentiate(net.gate)) < 60) == stores
    assert type(plain.gate) is Gate
    assert ("does not store activations" in caplog.text) != stores


class Around(nn.Module):
    """Ends with a tanh, or leaves that to the module around it."""

    def __init__(self, ends):
        super().__init__()
        self.gate, self.block, self.ends = Gate(), FeedForward(), ends

    def forward(self, x):
        return self.block(self.gate(x)).tanh() if self.ends else self.block(self.gate(x))


class Top(nn.Module):
    def __init__(self, ends):
        super().__init__()
        self.around = Around(ends)

    def forward(self, x):
        return self.around(x) if self.around.ends else self.around(x).tanh()


def test_the_operators_of_a_graph_say_where_each_annotation_begins_and_ends():
    """The keys of the compiler's caches have these operators, and no annotations."""

    def operators(modules=(), block_size=128, ends=False, linear_is_added_later=False):
        torch.compiler.reset()
        net, graphs = Top(ends), []
        up = net.around.block.up
        if linear_is_added_later:
            net.around.block.up = nn.Identity()
        if modules:
            store_activations_in_float8(net, modules=modules, block_size=block_size)
        net.around.block.up = up
        net.compile(fullgraph=True, backend=lambda graph, _: graphs.append(graph.graph) or graph.forward)
        net(make_input())
        constants = [(node, [arg for arg in node.args if isinstance(arg, int | str)]) for node in graphs[0].nodes]
        return str([(node.op, str(node.target), args) for node, args in constants])

    plain, around = operators(), operators(["around"])
    assert plain == operators(ends=True)
    assert around == operators(["around"])
    different = [plain, around, operators(["around"], 32), operators(["around"], ends=True)]
    different.append(operators(["around"], linear_is_added_later=True))
    different += [operators(names) for names in (["around.gate"], ["around.block"], ["around.gate", "around.block"])]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("file", ["codes.py", "hooks.py", "partition.py", "policy.py"])
def test_changed_rules_change_the_key_of_graphs(file, monkeypatch):
    before, read = StoringPartitioner().uuid(), Path.read_bytes
    assert StoringPartitioner().uuid() == before
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == file))
    assert StoringPartitioner().uuid() != before


@pytest.mark.parametrize("how", ["dynamic shapes", "backend='eager'", "backend='aot_eager'", "backend='inductor'"])
def test_other_compiled_code_stores_nothing_and_says_so(caplog, how, monkeypatch):
    net = nest(gate=Gate())
    exact = differentiate(net.gate)
    store_activations_in_float8(net, modules=["gate"])
    if how == "dynamic shapes":
        compile_modules([net.gate], dynamic=True)
    else:
        if "inductor" in how:  # without Inductor's own compilation
            monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_, **__: graph.forward)
        net.gate.compile(fullgraph=True, backend=how.split("'")[1])
    assert torch.equal(differentiate(net.gate), exact)
    assert (f"{how} does not store activations" in caplog.text) == ("inductor" not in how)


class Masked(nn.Module):
    """Attention with a mask that SDPA turns into infinities, and a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x, mask):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "compiled"), [("bool", False), ("infinite", False), ("infinite", True), *at_night([("bool", True)])]
)
def test_masks_and_statistics_stay_as_they_are(kind, compiled):
    net = nest(attention=Masked())
    mask = torch.ones(64, 64, dtype=torch.bool).tril().expand(2, 4, 64, 64).clone()
    mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))

    def compute_gradients():
        return torch.autograd.grad(net.attention(make_input(), mask).square().sum(), list(net.parameters()))

    exact = compute_gradients()
    assert store_activations_in_float8(net) == ["attention", "attention.norm"]
    if compiled:
        compile_modules([net.attention])
    assert min(map(sqnr_db, exact, compute_gradients())) > LOWEST_DB


class Ends(nn.Module):
    """Saves what it returns."""

    def forward(self, x):
        return (x * 2).softmax(-1)


def test_a_compiled_graph_stores_no_result_that_lives_on():
    net = nest(ends=Ends())

    def square(x):
        return net.ends(x).square()

    exact = differentiate(square)
    store_activations_in_float8(net, modules=["ends"])
    net.ends.compile(fullgraph=True)  # Inductor removes the detach between both
    # a softmax sums 256 numbers, in any order within 256 * 2^-24
    assert sqnr_db(exact, differentiate(square)) > 20 * math.log10(2**24 / 256)


@pytest.mark.parametrize("compiled", [False, True])
def test_float64_stays_as_it_is(compiled):
    net, x = nest(gate=Gate()), make_input().detach().double().requires_grad_()
    exact = differentiate(net.gate, x=x)
    store_activations_in_float8(net, modules=["gate"])
    if compiled:
        compile_modules([net.gate])
    torch.testing.assert_close(differentiate(net.gate, x=x), exact, rtol=1e-14, atol=1e-14)


class Experts(nn.Module):
    """Four experts, each of which takes every token."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(draw(4, 256, columns) * 0.1) for columns in (512, 256))

    def forward(self, hidden):
        gate, up = (hidden.flatten(0, 1).expand(4, -1, -1) @ self.gate_up_proj).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down_proj


def list_stored(report):
    return [tensor for tensor in report.saved if tensor.sqnr_db is not None]


def test_experts_store_and_weights_in_any_form_stay_as_they_are():
    """Experts have no module inside; autocast casts their 3-D parameters. A row that was looked up is an activation."""
    net = nest(embedding=nn.Embedding(64, 256), experts=Experts(), norm=nn.LayerNorm((2, 256)))
    assert store_activations_in_float8(net) == ["experts", "norm"]

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            looked_up = net.norm(net.embedding(torch.arange(64)).view(32, 2, 256))
            net.experts(looked_up).float().square().mean().backward()

    report = activation_report(net, step)
    stored = [(tensor.module, tensor.shape) for tensor in list_stored(report)]
    assert ("norm", (32, 2, 256)) in stored
    assert sum(module == "experts" for module, _ in stored) > 3
    assert not [shape for _, shape in stored if shape[-2] == 256]
    assert report.bytes_before > 4 * 256 * 768 * 2  # so there were such weights


def test_the_report_names_each_tensor_its_bytes_and_its_error():
    net = make_storing("rowwise", blocks=2)
    report = activation_report(net, lambda: step(net))
    stored = {(tensor.module, tensor.shape[-1], tensor.dtype) for tensor in list_stored(report)}
    assert ("layers.0.input_layernorm", 256, torch.float32) in stored
    assert ("layers.1.mlp", 896, torch.bfloat16) in stored
    assert all(tensor.sqnr_db > lowest_sqnr_db(3) for tensor in list_stored(report))
    assert len(list_stored(report)) == 2 * STORED_TENSORS
    assert torch.float8_e4m3fn not in {dtype for _, _, dtype in stored}
    for tensor in report.saved:  # codes with a scale for 128 of them; again or a view: none
        bytes_stored = math.prod(tensor.shape) * (1 + 4 / 128) if tensor.bytes_before else 0
        assert tensor.bytes_after == (tensor.bytes_before if tensor.sqnr_db is None else bytes_stored)
    assert set(report.gradient_sqnr_db) == {"layers.0", "layers.1"}
    assert min(report.gradient_sqnr_db.values()) > LOWEST_DB
    assert "layers.0.mlp" in str(report)
    assert "dB" in str(report)


class FusedAttention(nn.Module):
    """q, k and v are views of one tensor, of which k and v are saved, and a function of q."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(256), nn.Linear(256, 3 * 256)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return torch.sigmoid(q) * k * v


def test_views_of_one_tensor_are_lines_that_sum_to_the_total():
    net, x = convert_to_float8_training(nn.Sequential(FusedAttention()), config="rowwise"), make_input()
    store_activations_in_float8(net, modules=["0"])
    report = activation_report(net, lambda: net(x).square().sum().backward())
    *lines, total, _ = str(report).replace("unchanged", "-").splitlines()
    cells = [line.removesuffix(" dB").split()[-3:-1] for line in lines]
    before, after = (sum(int(cell.replace(",", "")) for cell in column) for column in zip(*cells, strict=True))
    assert total == f"{before:,} bytes before, {after:,} bytes with float8"
    assert sum(tensor.shape == x.shape and tensor.bytes_before >= x.numel() * 4 for tensor in report.saved) == 5


def test_one_storage_is_stored_once_until_it_is_written_to():
    x = make_input() * 1
    pack = store_hooks.StoringPackHook(store_hooks.ActivationStorage("", 128), [x], None)
    first, view, transposed = pack(x), pack(x.view(-1, 256)), pack(x.transpose(0, 1))
    assert first.codes is view.codes is transposed.codes
    assert torch.equal(first.restore(), transposed.restore().transpose(0, 1))
    with torch.no_grad():
        x.add_(1)
    assert pack(x).codes is not first.codes


def test_a_new_storage_in_the_place_of_a_freed_one_has_codes_of_its_own():
    pack = store_hooks.StoringPackHook(store_hooks.ActivationStorage("", 128), [make_input()], None)
    for seed in range(20):
        x = make_input(seed) * 1
        packed, expected = pack(x), x.detach().clone()
        del x
        assert sqnr_db(expected, packed.restore()) > lowest_sqnr_db(3)


def test_a_double_backward_is_refused():
    net, x = make_storing("rowwise"), make_input()
    with pytest.raises(RuntimeError, match="do not support double backward"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


def test_a_write_to_a_tensor_that_is_left_as_it_is_is_refused():
    class Scales(nn.Module):
        def forward(self, x, scale):
            return x * scale

    net = nest(scales=Scales())
    assert store_activations_in_float8(net, modules="scale?") == ["scales"]
    scale = torch.ones(256)
    loss = net.scales(make_input(), scale).sum()
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_around_the_model_get_the_codes():
    net = make_storing("rowwise")
    expected, packed = step(net), []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        assert_same(step(net), expected)
    # the loss saves the output
    assert sum(tensor.shape == SHAPE and tensor.dtype is torch.float32 for tensor in packed) == 1
    with save_on_cpu():
        assert_same(step(net), expected)


def test_a_module_around_checkpoints_stores_their_inputs():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = build_net("rowwise", width=256, blocks=3).layers
            apply_activation_checkpointing(self.layers, mode="full")

        forward = Net.forward

    plain = Around()
    net = copy.deepcopy(plain)
    store_activations_in_float8(net, modules=["", "layers.*"])
    exact, approximate = step(plain), step(net)
    assert min(sqnr_db(exact[name], approximate[name]) for name in exact) > LOWEST_DB
    saved = measure_saved_bytes(plain) - measure_saved_bytes(net)
    assert saved > 1.6 * 0.74 * make_input().nbytes  # the loss saves one input in high precision


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_are_as_before(without_gradients):
    with without_gradients():
        x = make_input().detach()
        assert torch.equal(make_storing("rowwise")(x), build_net("rowwise", width=256)(x))


def test_classes_keep_their_names_and_signatures_and_exported_programs_store_nothing():
    """Libraries find blocks to shard by their class's name, and a batch's columns by the signature of forward."""
    plain = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), Gate())
    net = copy.deepcopy(plain)
    store_activations_in_float8(net, modules=["*"])
    for ours, theirs in zip(net.modules(), plain.modules(), strict=True):
        assert repr(ours) == repr(theirs)
        assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    x = make_input().detach()
    exported, expected = ([node.name for node in torch.export.export(m, (x,)).graph.nodes] for m in (net, plain))
    assert exported == expected
    assert torch.equal(torch.jit.trace(net, x)(x), plain(x))


def test_linears_that_are_converted_back_keep_their_inputs():
    net, plain = (nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 64), nn.Tanh()) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    store_activations_in_float8(convert_to_float8_training(net, config="rowwise"), modules=[""])
    convert_to_high_precision(net)
    store_activations_in_float8(plain, modules=[""])
    assert_same(compute_results(net, make_input().detach()), compute_results(plain, make_input().detach()))


def test_unusual_training_loops_have_the_gradients_of_a_plain_step():
    net = make_storing("rowwise")
    expected = step(net)
    net.eval()
    with torch.no_grad():
        net(make_input())
    net.train()
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in net.named_parameters()}
    loss = compute_loss(lambda x: torch.func.functional_call(net, copies, (x,)), make_input())
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert all(torch.equal(copies[name].grad, times * expected[name]) for name in copies)


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (None, {"block_size": 64}, "block_size: expected one of 32, 128, got 64"),
        (None, {"modules": []}, "modules: expected patterns of names, got []"),
        (None, {"modules": [3]}, "modules: expected patterns of names, got [3]"),
        (None, {"modules": ["layers.*.mpl"]}, "'layers.*.mpl' matches no module"),
        (None, {"modules": ["*_proj"]}, "'*_proj' matches only linears, convolutions and embeddings"),
        (
            lambda net: setattr(net.layers[0].mlp, "forward", len),
            {},
            "'layers.0.mlp' overrides `forward` on the instance",
        ),
        (store_activations_in_float8, {}, "'layers.0.self_attn' stores its activations in float8 already"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(prepare, options, message):
    net = build_net("rowwise", width=256)
    if prepare:
        prepare(net)
    classes = list_classes(net)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        store_activations_in_float8(net, **options)
    assert "\n" not in str(refused.value)
    assert list_classes(net) == classes


def test_models_without_a_module_that_stores_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"\A.*in Linear, got none.*\Z"):
        store_activations_in_float8(nn.Linear(4, 4))
    net = build_net("rowwise", width=256)
    with pytest.raises(ValueError, match=r"\A.*no module that stores saved anything.*\Z"):
        activation_report(net, lambda: step(net))
