"""Activations stored in float8: which tensors, how well, in how many bytes, eager and compiled, and the way back."""

import copy
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from quaver import convert_to_float8_training
from quaver.checkpointing import (
    activation_report,
    apply_activation_checkpointing,
    stop_storing_activations,
    store_activations_in_float8,
)
from quaver.checkpointing import hooks as store_hooks
from quaver.checkpointing.codes import MemoryLayout, dequantize_activation, quantize_activation
from quaver.checkpointing.partition import StoringPartitioner
from quaver.lab.recorder.allocator import measure_usage
from quaver.lab.settings import Model
from quaver.lab.trainer.mixture import Mixture
from quaver.recipes.scaling import dynamic_cast_blocks
from quaver.runtime.slow_paths import clear_slow_paths
from tests.library.checkpointing.test_policy import Net, make
from tests.models import rope_tables
from tests.reference import sqnr_db
from tests.steps import assert_same, by_torch_save, draw
from tests.thinned import at_night, thinned

RECIPES = (None, "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
SHAPE = (2, 64, 256)
SAVED = {None: 0.95, "rowwise": 0.35, "rowwise_with_gw_hp": 0.4, "blockwise": 0.35, "mxfp8": 0.35}
"""Of bfloat16's saved bytes, at most. A block that stores nothing saves 1, 0.39 to 0.49, 0.44 to 0.52, 0.39 and 0.4."""
COMPILED = 0.849
"""Of an eager block's saved bytes a compiled one's, in bfloat16."""


def inputs(seed=0, shape=SHAPE):
    return draw(*shape, seed=seed).requires_grad_()


def step(net, x=None, forward_is_done=lambda: None):
    """The gradients of a step, by name, with that of its input."""
    x = inputs() if x is None else x
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).float().square().mean()
    forward_is_done()
    loss.backward()
    return {"": x.grad, **{name: each.grad for name, each in net.named_parameters() if each.grad is not None}}


def stored(recipe, **shape):
    net = make(recipe, width=256, **shape)
    store_activations_in_float8(net)
    return net


def compile_blocks(net, **options):
    """As Inductor partitions, but with PyTorch's kernels in place of Inductor's."""
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=StoringPartitioner(),
    )
    for layer in net.layers:
        layer.compile(fullgraph=True, backend=backend, **options)


def saved_bytes(net):
    def measured_step(forward_is_done=lambda: None):
        step(net, forward_is_done=forward_is_done)
        net.zero_grad()

    measured_step()
    with measure_usage(torch.device("cpu")) as measured:
        measured_step(measured.mark)
    return measured.usage.saved_bytes


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
    expected = dynamic_cast_blocks(matrix, torch.float8_e4m3fn, power_of_2=True, block_size=(1, block_size), mode="")
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[2])
    again = layout.from_matrix(dequantize_activation(codes, scale, of_scales, dtype))
    assert (again.shape, again.dtype) == (tensor.shape, dtype)
    assert again.stride() == tensor.stride() or not layout.is_dense
    assert sqnr_db(tensor, again) > 28


def test_decoding_is_one_operator_of_a_graph():
    codes, scale, layout, *_ = quantize_activation(draw(4, 128), 32)
    compiled = torch.compile(
        lambda *args: torch.ops.quaver.dequantize_activation(*args), backend="eager", fullgraph=True
    )
    assert torch.equal(*(call(codes, scale, layout, torch.float32) for call in (compiled, dequantize_activation)))


@pytest.fixture(scope="module")
def bfloat16_bytes():
    return saved_bytes(make(None, width=256))


# Where a graph is cut depends on whether a linear's backward reads its input in high precision. A test below compiles a
# rowwise linear with Inductor.
@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        *((recipe, False) for recipe in RECIPES),
        ("rowwise_with_gw_hp", True),
        *at_night((recipe, True) for recipe in RECIPES if recipe != "rowwise_with_gw_hp"),
    ],
)
def test_a_block_saves_little_and_its_gradients_are_near(recipe, compiled, bfloat16_bytes):
    exact, net = make(recipe, width=256), stored(recipe)
    if compiled:
        compile_blocks(net)
    grads, approximate = step(exact), step(net)
    assert min(sqnr_db(grads[name], approximate[name]) for name in grads) > 18
    if recipe:  # the last linear reads what it saved, and the gradient of the loss
        last = "layers.0.mlp.down_proj.weight"
        assert sqnr_db(grads[last], approximate[last]) > 45
    assert saved_bytes(net) <= SAVED[recipe] * bfloat16_bytes * (COMPILED if compiled else 1)


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        ("rowwise", "selective"),
        ("mxfp8", "full"),
        *at_night((recipe, mode) for recipe in (None, *RECIPES[2:4]) for mode in ("full", "selective")),
    ],
)
def test_a_checkpoint_recomputes_in_high_precision_and_stores_nothing(recipe, mode):
    plain, net = make(recipe, mode, width=256), make(recipe, width=256)
    store_activations_in_float8(net)
    apply_activation_checkpointing(net.layers, mode=mode)
    expected, got = step(plain), step(net)
    assert_same(got, expected)
    assert saved_bytes(net) == saved_bytes(plain)


def test_a_reentrant_checkpoint_recomputes_in_high_precision():
    exact, net = step(make("rowwise", width=256)), stored("rowwise")
    layer = net.layers[0]
    cos_sin = rope_tables(64, 64, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        loss = checkpoint(layer, inputs(), *cos_sin, use_reentrant=True).float().square().mean()
    loss.backward()
    assert all(torch.equal(each.grad, exact[f"layers.0.{name}"]) for name, each in layer.named_parameters())


class FeedForward(nn.Module):
    """Saves the input of a linear, and its result."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 512, bias=False)

    def forward(self, x):
        return F.silu(self.up(x))


def test_inductor_stores_what_a_float8_linear_computes():
    """Inductor's own passes, partitioner and kernels."""
    net = nn.Sequential()
    net.block = FeedForward()
    convert_to_float8_training(net, config="rowwise")
    x = inputs().detach()

    def gradient(forward_is_done=lambda: None):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net.block(x).sum()
        forward_is_done()
        return torch.autograd.grad(loss, net.block.up.weight)[0]

    exact = gradient()
    store_activations_in_float8(net, modules=["block"])
    net.block.compile(fullgraph=True)
    assert 20 < sqnr_db(exact, gradient()) < 60  # infinite if nothing was stored
    with measure_usage(torch.device("cpu")) as measured:
        gradient(measured.mark)
    assert measured.usage.saved_bytes < (1 + 1.1 * 2) * x.numel()  # a byte for each element of the input and the result


class Gate(nn.Module):
    """Saves two tensors that it computes."""

    def forward(self, x):
        return (x * 2).sigmoid() * x.cos()


def test_a_compiled_graph_that_stores_is_not_mistaken_for_one_that_does_not():
    """The keys of Inductor's caches have no annotations."""
    grads = []
    for store in (False, True, False):
        torch.compiler.reset()
        net = nn.Sequential()
        net.gate = Gate()
        if store:
            store_activations_in_float8(net, modules=["gate"])
        net.gate.compile(fullgraph=True)
        grads.append(torch.autograd.grad(net.gate(x := inputs()).sum(), x)[0])
    assert torch.equal(grads[0], grads[2])
    assert 20 < sqnr_db(grads[0], grads[1]) < 60  # infinite if nothing was stored


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
    """They are in the keys of the compiler's caches, and annotations are not."""

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
        net(inputs())
        constants = [(each, [arg for arg in each.args if isinstance(arg, int | str)]) for each in graphs[0].nodes]
        return str([(each.op, str(each.target), args) for each, args in constants])

    plain, around = operators(), operators(["around"])
    assert plain == operators(ends=True)
    assert around == operators(["around"])
    different = [plain, around, operators(["around"], 32), operators(["around"], ends=True)]
    different += [
        operators(modules) for modules in (["around.gate"], ["around.block"], ["around.gate", "around.block"])
    ]
    different.append(operators(["around"], linear_is_added_later=True))
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("file", ["codes.py", "hooks.py", "partition.py", "policy.py"])
def test_changed_rules_change_the_key_of_graphs(file, monkeypatch):
    before, read = StoringPartitioner().uuid(), Path.read_bytes
    assert StoringPartitioner().uuid() == before
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == file))
    assert StoringPartitioner().uuid() != before


@pytest.mark.parametrize("how", ["dynamic shapes", "backend='eager'", "backend='aot_eager'", "backend='inductor'"])
def test_other_compiled_code_stores_nothing_and_says_so(caplog, how, monkeypatch):
    clear_slow_paths()
    net = nn.Sequential()
    net.gate = Gate()
    (exact,) = torch.autograd.grad(net.gate(x := inputs()).sum(), x)
    store_activations_in_float8(net, modules=["gate"])
    if how == "dynamic shapes":
        net.layers = [net.gate]
        compile_blocks(net, dynamic=True)
    else:
        if "inductor" in how:  # without Inductor's own compilation
            monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward)
        net.gate.compile(fullgraph=True, backend=how.split("'")[1])
    (got,) = torch.autograd.grad(net.gate(x := inputs()).sum(), x)
    assert torch.equal(got, exact)
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
    net = nn.Sequential()
    net.attention = Masked()
    mask = torch.ones(64, 64, dtype=torch.bool).tril().expand(2, 4, 64, 64).clone()
    mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    exact = torch.autograd.grad(net.attention(inputs(), mask).square().sum(), list(net.parameters()))
    assert store_activations_in_float8(net) == ["attention", "attention.norm"]
    if compiled:
        net.layers = [net.attention]
        compile_blocks(net)
    got = torch.autograd.grad(net.attention(inputs(), mask).square().sum(), list(net.parameters()))
    assert min(map(sqnr_db, exact, got)) > 18


class Ends(nn.Module):
    """Saves what it returns."""

    def forward(self, x):
        return (x * 2).softmax(-1)


def test_a_compiled_graph_stores_no_result_that_lives_on():
    net = nn.Sequential()
    net.ends = Ends()
    (exact,) = torch.autograd.grad(net.ends(x := inputs()).square().sum(), x)
    store_activations_in_float8(net, modules=["ends"])
    net.ends.compile(fullgraph=True)  # Inductor removes the detach between both
    (got,) = torch.autograd.grad(net.ends(x := inputs()).square().sum(), x)
    assert sqnr_db(exact, got) > 100


@pytest.mark.parametrize("compiled", [False, True])
def test_float64_stays_as_it_is(compiled):
    net = nn.Sequential()
    net.gate = Gate()
    x = inputs().detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(net.gate(x).sum(), x)
    store_activations_in_float8(net, modules=["gate"])
    if compiled:
        net.layers = [net.gate]
        compile_blocks(net)
    (got,) = torch.autograd.grad(net.gate(x).sum(), x)
    torch.testing.assert_close(got, exact, rtol=1e-14, atol=1e-14)


def test_experts_store_and_weights_in_any_form_stay_as_they_are():
    """Experts have no module inside; autocast casts their 3-D parameters. A row that was looked up is an activation."""
    shape = Model(dim=256, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=256, n_experts=4, top_k=2)
    net = nn.Sequential()
    net.embedding, net.mixture, net.norm = nn.Embedding(64, 256), Mixture(shape, None), nn.LayerNorm((2, 256))
    for parameter in net.mixture.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert store_activations_in_float8(net) == ["mixture.experts", "norm"]

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            looked_up = net.norm(net.embedding(torch.arange(64)).view(32, 2, 256))
            net.mixture(looked_up).float().square().mean().backward()

    report = activation_report(net, step)
    stored = [(each.module, each.shape) for each in report.saved if each.sqnr_db is not None]
    assert ("norm", (32, 2, 256)) in stored
    assert sum(module == "mixture.experts" for module, _ in stored) > 3
    assert not [shape for _, shape in stored if shape[0] == 4]
    assert report.bytes_before > 4 * 256 * 768 * 2  # so there were such weights


def test_the_report_names_each_tensor_its_bytes_and_its_error():
    net = stored("rowwise", blocks=2)
    report = activation_report(net, lambda: step(net))
    by_name = {(each.module, each.shape[-1], str(each.dtype)) for each in report.saved if each.sqnr_db is not None}
    assert ("layers.0.input_layernorm", 256, "torch.float32") in by_name
    assert ("layers.1.mlp", 896, "torch.bfloat16") in by_name
    assert all(each.sqnr_db > 28 for each in report.saved if each.sqnr_db is not None)
    assert not [each for each in report.saved if each.dtype is torch.float8_e4m3fn and each.sqnr_db is not None]
    assert report.bytes_after < 0.6 * report.bytes_before
    assert set(report.gradient_sqnr_db) == {"layers.0", "layers.1"}
    assert min(report.gradient_sqnr_db.values()) > 18
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
    net, x = convert_to_float8_training(nn.Sequential(FusedAttention()), config="rowwise"), inputs()
    store_activations_in_float8(net, modules=["0"])
    report = activation_report(net, lambda: net(x).square().sum().backward())
    *lines, total, _ = str(report).replace("unchanged", "-").splitlines()
    columns = [[int(each.replace(",", "")) for each in line.removesuffix(" dB").split()[-3:-1]] for line in lines]
    before, after = map(sum, zip(*columns, strict=True))
    assert total == f"{before:,} bytes before, {after:,} bytes with float8"
    assert len([each for each in report.saved if each.shape == x.shape and each.bytes_before >= x.numel() * 4]) == 5


def test_one_storage_is_stored_once_until_it_is_written_to():
    x = inputs() * 1
    pack = store_hooks.Pack(store_hooks.ActivationStorage("", 128), [x], None)
    first, view, transposed = pack(x), pack(x.view(-1, 256)), pack(x.transpose(0, 1))
    assert first.codes is view.codes is transposed.codes
    assert torch.equal(first.restore(), transposed.restore().transpose(0, 1))
    with torch.no_grad():
        x.add_(1)
    assert pack(x).codes is not first.codes


def test_a_new_storage_in_the_place_of_a_freed_one_has_codes_of_its_own():
    pack = store_hooks.Pack(store_hooks.ActivationStorage("", 128), [inputs()], None)
    for seed in range(20):
        x = inputs(seed) * 1
        kept = pack(x)
        expected = x.detach().clone()
        del x
        assert sqnr_db(expected, kept.restore()) > 28


def test_a_double_backward_is_refused():
    net, x = stored("rowwise"), inputs()
    with pytest.raises(RuntimeError, match="do not support double backward"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


def test_a_write_to_a_tensor_that_is_left_as_it_is_is_refused():
    class Scales(nn.Module):
        def forward(self, x, scale):
            return x * scale

    net = nn.Sequential()
    net.scales = Scales()
    assert store_activations_in_float8(net, modules="scale?") == ["scales"]
    scale = torch.ones(256)
    loss = net.scales(inputs(), scale).sum()
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_around_the_model_get_the_codes():
    net = stored("rowwise")
    expected, seen = step(net), []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        got = step(net)
    assert_same(got, expected)
    residual = [each for each in seen if each.shape == SHAPE and each.dtype is torch.float32]
    assert len(residual) == 1  # the loss saves the output
    with save_on_cpu():
        offloaded = step(net)
    assert_same(offloaded, expected)


def test_a_module_around_checkpoints_stores_their_inputs():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make("rowwise", width=256, blocks=3).layers
            apply_activation_checkpointing(self.layers, mode="full")

        forward = Net.forward

    plain = Around()
    net = copy.deepcopy(plain)
    store_activations_in_float8(net, modules=["", "layers.*"])
    expected, got = step(plain), step(net)
    assert min(sqnr_db(expected[name], got[name]) for name in expected) > 18
    assert saved_bytes(plain) - saved_bytes(net) > 1.6 * 0.74 * inputs().nbytes  # the loss saves one of them as it is


@pytest.mark.parametrize("modules", [None, ["*"]])
def test_a_model_is_saved_whole(modules):
    net = make("rowwise", width=256)
    store_activations_in_float8(net, modules=modules)
    again = by_torch_save(net)
    assert [type(each) for each in again.modules()] == [type(each) for each in net.modules()]
    expected = step(net)
    assert_same(step(again), expected)


def test_evaluation_and_other_threads_of_autograd_are_as_before():
    net = stored("rowwise")
    plain = make("rowwise", width=256)
    with torch.no_grad():
        assert torch.equal(net(inputs()), plain(inputs()))
    with torch.inference_mode():
        assert torch.equal(net(inputs().detach()), plain(inputs().detach()))


def test_classes_keep_their_names_and_signatures_and_exported_programs_store_nothing():
    """Libraries find blocks to shard by their class's name, and a batch's columns by the signature of forward."""
    net = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), Gate())
    plain = copy.deepcopy(net)
    store_activations_in_float8(net, modules=["*"])
    for ours, theirs in zip(net.modules(), plain.modules(), strict=True):
        assert repr(ours) == repr(theirs)
        assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    x = inputs().detach()
    exported = torch.export.export(net, (x,))
    assert [node.name for node in exported.graph.nodes] == [
        node.name for node in torch.export.export(plain, (x,)).graph.nodes
    ]
    assert torch.equal(torch.jit.trace(net, x)(x), plain(x))


def test_the_way_back_and_copies():
    net, plain = stored("rowwise"), make("rowwise", width=256)
    twin = copy.deepcopy(net)
    assert net.state_dict().keys() == plain.state_dict().keys()
    expected = step(net)
    assert_same(step(twin), expected)
    stop_storing_activations(net)
    assert [type(each) for each in net.modules()] == [type(each) for each in plain.modules()]
    exact = step(plain)
    assert_same(step(net), exact)
    assert not torch.equal(step(twin)[""], exact[""])


def test_habits_of_users_have_the_gradients_of_a_plain_step():
    """Evaluation in between, functional_call, accumulated gradients and a kept graph."""
    net = stored("rowwise")
    expected = step(net)
    net.eval()
    with torch.no_grad():
        net(inputs())
    net.train()
    called = {name: each.detach().clone().requires_grad_() for name, each in net.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.func.functional_call(net, called, (inputs(),)).float().square().mean()
    loss.backward(retain_graph=True)
    assert all(torch.equal(called[name].grad, expected[name]) for name in called)
    loss.backward()
    assert all(torch.equal(called[name].grad, 2 * expected[name]) for name in called)


REFUSED = {
    "block_size": (
        lambda net: store_activations_in_float8(net, block_size=64),
        "block_size: expected one of 32, 128, got 64",
    ),
    "pattern": (
        lambda net: store_activations_in_float8(net, modules=["layers.*.mpl"]),
        "'layers.*.mpl' matches no module",
    ),
    "only linears": (
        lambda net: store_activations_in_float8(net, modules=["*_proj"]),
        "'*_proj' matches only linears, convolutions and embeddings",
    ),
    "patched": (
        lambda net: (setattr(net.layers[0].mlp, "forward", len), store_activations_in_float8(net)),
        "layers.0.mlp overrides `forward` on the instance",
    ),
    "twice": (
        lambda net: (store_activations_in_float8(net), store_activations_in_float8(net)),
        "layers.0.self_attn stores its activations in float8 already",
    ),
    "nothing": (lambda net: store_activations_in_float8(nn.Linear(4, 4)), "in Linear, got none"),
    "report": (lambda net: activation_report(net, lambda: step(net)), "no module that stores saved anything"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(case):
    call, message = REFUSED[case]
    net: Net = make("rowwise", width=256)
    classes = [type(each) for each in net.modules()]
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        call(net)
    assert "\n" not in str(refused.value)
    assert case == "twice" or [type(each) for each in net.modules()] == classes
