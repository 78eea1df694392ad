"""Tests the bits, the recomputed matmuls and the saved bytes of each mode of activation checkpointing and recipe."""

import contextlib
import copy
import gc
import itertools
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch._functorch.config as compiler_config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from quaver import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.activations.policy import (
    MATMUL_OPS,
    apply_activation_checkpointing,
    find_operators,
    find_savable_operators,
)
from quaver.kernels import cpu
from quaver.linear.class_change import get_class_parts
from tests.library.activations.nets import Net, build_net
from tests.models import Block
from tests.recipes import TORCHAO_RECIPES
from tests.steps import assert_same, draw
from tests.thinned import at_night, by_day, thinned

CASTS = ["extension", "pytorch"]
COMMON_RECIPES = (*TORCHAO_RECIPES, "delayed")
MODES = [("full", None), ("selective", "op"), ("selective", "2")]
AMAXES = 1.001
"""A block's amaxes are a few numbers a row of its largest tensors: under a thousandth of what bfloat16 keeps."""


def copy_scales(net: nn.Module) -> list[torch.Tensor]:
    return [scale.clone() for scale in float8_scaling_state(net).state_dict().values()]


def train(net: nn.Module, *, dtype=torch.float32, autocast=True, offload=False) -> list[torch.Tensor]:
    """Run two steps, and return outputs, gradients and scales. With `offload` a recomputation reads copied inputs."""
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        source = torch.randn(2, 64, 64, dtype=dtype, requires_grad=True)
        saved = torch.autograd.graph.save_on_cpu() if offload else contextlib.nullcontext()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved:
            output = net(source * 1.5)
        output.square().mean().backward()
        results += [output, source.grad, *(parameter.grad.clone() for parameter in net.parameters())]
        results += copy_scales(net)
        if float8_scaling_state(net):
            sync_float8_amax_and_scale_history(net)
            results += copy_scales(net)
    return results


@pytest.fixture(params=CASTS)
def casts(request, monkeypatch):
    """Run casts in C, which no policy sees, or in PyTorch, where a policy sees each operation."""
    if request.param == "pytorch":
        monkeypatch.setattr(cpu, "HAS_EXTENSION", False)


class Readers(nn.Module):
    """Two linears that read the module's own input, one of them through a view, and one that reads their product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256, bias=False)
        self.second = nn.Linear(64, 256, bias=False)
        self.last = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        return self.last(self.first(x) * self.second(x.flatten(0, 1)).view(*x.shape[:-1], -1))


class CastBefore(nn.Module):
    """A block whose input was cast before it, and must not get another tensor's amax [Note: what a policy counts].

    Only the block is checkpointed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 256, bias=False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 256, bias=False), nn.SiLU(), nn.Linear(256, 256))])

    def forward(self, x):
        x = x * 100
        return self.before(x) * self.layers[0](x)


class Nested(nn.Module):
    """A checkpoint inside another one, which reads the same input and is recomputed on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        def inner(x):
            return self.second(self.first(x).sin())

        return inner(x) + checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False)


MODULES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "blocks": (lambda: Net(64, blocks=2), [{}]),
    "dropout": (lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)), [{}]),
    "own input": (Readers, [{"dtype": torch.float32}, {"dtype": torch.bfloat16}]),
    "cast before": (CastBefore, [{"autocast": False, "offload": True}]),
    "nested": (Nested, [{"autocast": False}]),
}
"""How to make a module, and the ways to train it."""


PRECISIONS = (None, *COMMON_RECIPES, "blockwise", "mxfp8_with_gw_hp")
IN_C = [*((module, "rowwise") for module in MODULES), ("blocks", "delayed"), ("blocks", "mxfp8_with_gw_hp")]
"""The modules and recipes that each run trains with casts in C, too: inside those a policy sees no operation."""


@pytest.mark.parametrize(
    ("module", "recipe", "casts"),
    [
        *thinned(MODULES, PRECISIONS, ["pytorch"], together=1),
        *((*case, "extension") for case in IN_C),
        *at_night((*case, "extension") for case in itertools.product(MODULES, PRECISIONS) if case not in IN_C),
    ],
    indirect=["casts"],
)
def test_checkpointing_changes_no_bit(module, recipe, casts):
    make_module, ways = MODULES[module]
    torch.manual_seed(1)
    plain = make_module()
    if recipe:
        convert_to_float8_training(plain, config=recipe)
    for way in ways:
        expected = train(copy.deepcopy(plain), **way)
        blocks = len(getattr(plain, "layers", [plain]))
        for mode, option in MODES if blocks > 1 else MODES[:2]:
            net = copy.deepcopy(plain)
            apply_activation_checkpointing(getattr(net, "layers", [net]), mode=mode, selective_ac_option=option)
            assert_same(train(net, **way), expected, f"{mode} {option}")


@pytest.mark.parametrize(
    ("recipe", "mode", "without_gradients"),
    thinned(COMMON_RECIPES, ("full", "selective"), (torch.no_grad, torch.inference_mode)),
)
def test_a_checkpointed_module_runs_without_gradients(recipe, mode, without_gradients):
    net = convert_to_float8_training(Readers(), config=Float8LinearConfig.from_recipe_name(recipe))
    apply_activation_checkpointing([net.eval()], mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(torch.ones(4, 64, 64))
        with without_gradients():
            assert torch.equal(net(torch.ones(4, 64, 64) * 1.0), expected)


def find_storages(values) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


class Calls(TorchDispatchMode):
    """Counts the calls of each operation, and the bytes that they allocate, of fake tensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        result = func(*args, **(kwargs or {}))
        older = find_storages((args, kwargs))
        new = {key: storage for key, storage in find_storages(result).items() if key not in older}
        self._storages |= {key: weakref.ref(storage) for key, storage in new.items()}
        return result

    @property
    def matmuls(self) -> int:
        return sum(self.counts[matmul] for matmul in MATMUL_OPS)

    def count_live_bytes(self) -> int:
        """Return the bytes of the allocated storages that still exist."""
        gc.collect()
        return sum(storage.nbytes() for reference in self._storages.values() if (storage := reference()) is not None)


def fake_step(recipe: str | None, mode: str) -> tuple[int, Calls, Calls]:
    """Run a bfloat16 block 4096 wide on 16384 tokens; return the bytes that its forward keeps, and the calls of both
    passes.

    On fake tensors the policy sees what it sees on a GPU: single operations of PyTorch, and whole float8 matmuls.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            net = build_net(recipe, mode, width=4096)
            input = torch.randn(4, 4096, 4096, requires_grad=True)
            with Calls() as forward:
                output = net(input)
            tables = 2 * 4096 * 512 * 4  # of rope, which a model computes once
            saved = forward.count_live_bytes() - output.untyped_storage().nbytes() - tables
            with Calls() as backward:
                output.backward(torch.ones_like(output))
    finally:
        torch.set_default_dtype(before)
    return max(saved, 0), forward, backward


RECOMPUTED_MATMULS = {"none": 0, "selective": 3, "full": 6}
"""A recomputation ends before the last of 7 matmuls, whose result nothing reads."""


@pytest.fixture(scope="module")
def bfloat16_steps() -> dict[str, tuple[int, Calls, Calls]]:
    return {mode: fake_step(None, mode) for mode in RECOMPUTED_MATMULS}


@pytest.mark.parametrize("recipe", by_day((None, "rowwise"), (None, *COMMON_RECIPES)))
def test_each_mode_keeps_no_more_than_in_bfloat16_and_recomputes_as_many_matmuls(recipe, bfloat16_steps):
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    steps = {mode: fake_step(recipe, mode) for mode in RECOMPUTED_MATMULS} if recipe else bfloat16_steps
    saved = {mode: step[0] for mode, step in steps.items()}
    assert saved["none"] > 3 * saved["selective"] > 100 * saved["full"]
    for mode, (_, forward, backward) in steps.items():
        assert saved[mode] <= AMAXES * bfloat16_steps[mode][0], mode
        assert (forward.matmuls, backward.matmuls) == (7, 14 + RECOMPUTED_MATMULS[mode]), mode  # two gradients of each
    assert steps["selective"][2].counts[flash] == 0  # a call that a policy answers is no call


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_a_block_that_knows_its_matmuls_does_not_keep_the_last(recipe):
    """[Note: which matmuls]: the first step keeps q, v, gate and down, later steps keep k, o and up."""
    net, input = build_net(recipe, "selective", width=64), torch.randn(4, 64, 64, requires_grad=True)
    saved, gradients = [], []
    for _ in range(3):
        net.zero_grad()
        with Calls() as forward:
            output = net(input)
        saved.append(forward.count_live_bytes())
        with Calls() as backward:
            output.sum().backward()
        assert backward.matmuls == 14 + 3
        gradients.append([parameter.grad.clone() for parameter in net.parameters()])
    tokens, width = 4 * 64, 64
    amaxes = 7 * 4 * (tokens + width * 7 // 2)  # those of saved results differ, and those of weights stay
    assert saved[1] == saved[2]
    assert saved[0] - saved[1] == pytest.approx(4 * tokens * width, abs=amaxes)
    assert_same(gradients[1:], [gradients[0]] * 2)


@pytest.mark.parametrize(
    ("recipe", "casts"),
    [(None, "extension"), ("tensorwise", "extension"), ("tensorwise", "pytorch"), ("rowwise", "pytorch")],
    indirect=["casts"],
)
def test_eager_code_on_a_cpu_keeps_matmuls_in_every_precision(recipe, casts):
    """Eager code keeps every second matmul, attention, and amaxes that the policy sees."""
    saved = {}
    for mode in ("none", "selective", "full"):
        net, input = build_net(recipe, mode, width=64), torch.randn(4, 64, 64, requires_grad=True)
        with Calls() as forward:
            output = net(input)
        saved[mode] = forward.count_live_bytes()
        output.sum().backward()
    tokens, width = 4 * 64, 64
    # q, v, gate and the projection back; attention, and its log-sum-exp for 4 heads
    results = 4 * tokens * (width + width // 2 + width * 7 // 2 + width) + 4 * tokens * (width + 4)
    amaxes = 7 * 4 * (tokens + width * 7 // 2)  # at most one for each token and each feature of seven linears
    assert saved["none"] > 1.5 * saved["selective"]
    assert results <= saved["selective"] - saved["full"] <= results + amaxes


class SmallAttention(nn.Module):
    """Two linears, attention, and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(4))

    def forward(self, x):
        query, key = (linear(x).unflatten(-1, (4, 32)).transpose(1, 2) for linear in self.linears[:2])
        attended = nn.functional.scaled_dot_product_attention(query, key, query).transpose(1, 2).flatten(2)
        return self.linears[3](self.linears[2](attended))


COMPILED_MATMULS = {"none": 4 + 8, "selective": 4 + 8 + 1, "full": 4 + 8 + 3}
"""Of four linears the first and the third are saved, and the recomputation ends before the last."""


def compiled_step(recipe: str | None, mode: str, budget: float = 1.0) -> tuple[list, int, list[torch.Tensor]]:
    """Compile without code generation; return the tensors saved, the matmuls of both passes, and the results."""
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    torch.manual_seed(1)
    net = SmallAttention()
    if recipe:
        convert_to_float8_training(net, config=recipe)
    apply_activation_checkpointing([net], mode=mode)
    with compiler_config.patch(activation_memory_budget=budget):
        net.compile(fullgraph=True, backend=backend)
        input = draw(4, 128, 128).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = net(input)
        output.sum().backward()
    torch.compiler.reset()
    forward, backward = graphs
    (returned,) = (node for node in forward.graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in returned.args[0][1:] if node.op != "placeholder"]
    saved = [value for value in values if isinstance(value, torch.Tensor)]
    matmuls = sum(node.target in MATMUL_OPS for graph in graphs for node in graph.graph.nodes)
    return saved, matmuls, [output, input.grad, *(parameter.grad for parameter in net.parameters()), *copy_scales(net)]


def count_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors if tensor.dtype is not torch.uint8)


@pytest.mark.parametrize(
    ("recipe", "modes"),
    [("tensorwise", ("none", "selective")), *at_night((name, (*COMPILED_MATMULS,)) for name in PRECISIONS[:5])],
)
def test_a_compiled_block_keeps_what_the_policy_says(recipe, modes):
    runs = {mode: compiled_step(recipe, mode) for mode in modes}
    assert [matmuls for _, matmuls, _ in runs.values()] == [COMPILED_MATMULS[mode] for mode in modes]
    for mode in modes[1:]:
        assert_same(runs[mode][2], runs["none"][2], mode)
    if recipe != "delayed":  # whose graphs return what they recorded, too
        none, selective, *full = (count_bytes(saved) for saved, *_ in runs.values())
        tokens, width = 4 * 128, 128
        saved = 2 * tokens * 3 * width  # two linears and attention in bfloat16
        assert saved <= selective <= AMAXES * saved + 4 * tokens * 4 + 32  # and the log-sum-exp of attention
        assert none > 1.4 * selective
        assert not any(full)


def test_a_memory_budget_reaches_the_compiler(memory_budget_restored):
    apply_activation_checkpointing([], mode="memory_budget", memory_budget=0.25)
    assert compiler_config.activation_memory_budget == 0.25
    saved = [count_bytes(compiled_step(None, "none", budget)[0]) for budget in (1.0, 0.25)]
    assert 0 < saved[1] <= 0.25 * saved[0]


def test_modules_keep_their_names_and_what_they_are():
    plain, net = build_net("delayed", width=64, blocks=2), build_net("delayed", "selective", width=64, blocks=2)
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(net.state_dict()) == list(plain.state_dict())
    assert list(float8_scaling_state(net).state_dict()) == list(float8_scaling_state(plain).state_dict())
    assert all(isinstance(layer, Block) for layer in net.layers)
    assert type(net.layers[0]) is type(net.layers[1])
    assert repr(net) == repr(plain)


def test_a_deep_copy_computes_with_its_own_weights():
    net = build_net("tensorwise", "selective", width=64)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    assert not torch.equal(train(net)[0], train(copied)[0])


def test_every_nth_module_is_checkpointed():
    chosen = [type(layer) is not Block for layer in build_net(None, "selective", "3", width=64, blocks=7).layers]
    assert chosen == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "all"}, "mode: expected one of none, full, selective, memory_budget, got 'all'"),
        ({"selective_ac_option": "0"}, "selective_ac_option: expected"),
        ({"selective_ac_option": "-1"}, "selective_ac_option: expected"),
        ({"selective_ac_option": 2}, "selective_ac_option: expected"),
        ({"mode": "memory_budget", "memory_budget": 1.5}, "memory_budget: expected a number from 0 to 1, got 1.5"),
        ({"mode": "memory_budget", "memory_budget": "1"}, "memory_budget: expected a number from 0 to 1, got '1'"),
        ({"also_save": "aten.silu"}, r"also_save: expected a list of names, got one string; give \['aten.silu'\]"),
        ({"never_save": [torch.ops.aten.mm]}, "expected the name of an operator that torch knows, .*got <OpOverload"),
        ({"mode": "full", "selective_ac_option": "2"}, "none unless mode is selective, got '2' with mode 'full'"),
        ({"mode": "none", "selective_ac_option": "op"}, "selective_ac_option: expected none unless"),
        ({"memory_budget": 0.5}, "expected none unless mode is memory_budget, got 0.5 with mode 'selective'"),
        *(
            ({**how, **changes}, "also_save and never_save: expected none unless mode is selective")
            for how in ({"mode": "full"}, {"mode": "none"}, {"selective_ac_option": "1"})
            for changes in ({"also_save": ["aten.abs"]}, {"never_save": ["aten.amax"]})
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        apply_activation_checkpointing([layer], **arguments)
    assert type(layer) is nn.Linear


def test_a_model_in_place_of_its_blocks_and_a_second_checkpoint_are_refused():
    with pytest.raises(TypeError, match="modules: expected blocks, such as model.layers, got Linear"):
        apply_activation_checkpointing(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="modules: expected blocks, such as model.layers, got list"):
        apply_activation_checkpointing(["layers.0"])
    net = build_net(None, "full", width=64)
    with pytest.warns(UserWarning, match="nothing is checkpointed: expected at least 5 modules .* got 2"):
        apply_activation_checkpointing([nn.Linear(2, 2), nn.Linear(2, 2)], selective_ac_option="5")
    with pytest.raises(ValueError, match="this Block is checkpointed already"):
        apply_activation_checkpointing(net.layers)
    shared = nn.Linear(2, 2)
    apply_activation_checkpointing([shared, shared], mode="full")
    assert len(get_class_parts(shared).wrappers) == 1


def count_saved_silus(**changes) -> tuple[int, list[torch.Tensor]]:
    """Return how many results of silu a block's forward saves for its backward, and the gradients."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 256, bias=False), nn.SiLU(), nn.Linear(256, 64, bias=False))
    apply_activation_checkpointing([block], **changes)
    with Calls() as calls:
        output = block(torch.ones(32, 64, requires_grad=True))
        forward = calls.counts[torch.ops.aten.silu.default]
        output.sum().backward()
    saved = 2 * forward - calls.counts[torch.ops.aten.silu.default]
    return saved, [parameter.grad for parameter in block.parameters()]


def test_a_policy_can_be_told_what_to_keep_and_what_not():
    saved, expected = count_saved_silus()
    assert saved == 0
    for changes, number in (
        ({"also_save": ["aten.silu"]}, 1),
        ({"also_save": ["aten.silu.default", "aten.abs"]}, 1),
        ({"also_save": ["aten.silu"], "never_save": ["aten.silu"]}, 0),
    ):
        saved, gradients = count_saved_silus(**changes)
        assert saved == number
        assert_same(gradients, expected)


class WritesInPlace(nn.Module):
    """Writes to the results of a matmul, of silu and of mul, through a view too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        gate, up = self.first(x), self.second(x)
        product = torch.nn.functional.silu(gate).mul_(up) * 0.5
        product.view(-1).add_(1)
        torch._foreach_mul_([product], 2.0)
        return self.last(product).relu_() + self.first(x).mul_(3)


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("also_save", [(), ("aten.silu", "aten.mul", "aten._unsafe_view", "aten.relu")])
def test_results_that_are_saved_can_be_written_to(also_save, recipe):
    def gradients(mode, **changes):
        torch.manual_seed(0)
        block = WritesInPlace()
        if recipe:
            convert_to_float8_training(block, config=recipe)
        apply_activation_checkpointing([block], mode=mode, **changes)
        block(torch.ones(32, 64, requires_grad=True)).square().sum().backward()
        return [parameter.grad for parameter in block.parameters()]

    assert_same(gradients("selective", also_save=also_save), gradients("none"))


class FlashAttention(nn.Module):
    """Calls a GPU's operator, which has a meta kernel, and an operator whose backward needs its result."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.args, self.kwargs = args, kwargs

    def forward(self, query):
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        return attend(query, query, query, *self.args, **self.kwargs)[0].sin()


@pytest.mark.parametrize(
    ("module", "recomputed"),
    [(FlashAttention(), 0), (FlashAttention(0.0), 0), (FlashAttention(0.1), 1), (FlashAttention(dropout_p=0.1), 1)],
)
def test_attention_that_draws_random_numbers_is_not_saved(module, recomputed):
    apply_activation_checkpointing([module])
    output = module(torch.empty(1, 2, 16, 32, dtype=torch.float16, device="meta", requires_grad=True))
    with Calls() as backward:
        output.sum().backward()
    assert backward.counts[torch.ops.aten._scaled_dot_product_flash_attention.default] == recomputed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aten.mul_", "which writes to its arguments"),
        ("aten.mul.out", "which writes to its arguments"),
        ("aten.view", "which returns a view of its argument"),
        ("aten.detach", "which returns a view of its argument"),
        ("aten.linear", "which is a composite operator"),
        ("aten.native_dropout", "which draws random numbers"),
        ("aten.sym_size", "which"),
        ("quaver.update_amax_buffer", "which writes to its arguments"),
    ],
)
def test_operators_without_a_result_to_save_are_refused(name, reason):
    with pytest.raises(ValueError, match="expected an operator whose result can be saved") as raised:
        apply_activation_checkpointing([], also_save=[name])
    assert f"got {name!r}, {reason}" in str(raised.value)


def test_operators_are_found_by_name():
    assert find_savable_operators(["aten.mul"]) == {torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar}
    named = find_operators(["aten.add", "aten.mul.Tensor"])
    assert {torch.ops.aten.add.Tensor, torch.ops.aten.add.out, torch.ops.aten.mul.Tensor} <= named
    assert torch.ops.aten.mul.out not in named
    for name in ("abs", "aten.nothing", "nowhere.abs", "aten.abs.nothing", "", "aten.__class__", "aten.abs.default.x"):
        with pytest.raises(ValueError, match="expected the name of an operator that torch knows") as raised:
            find_operators([name])
        assert repr(name) in str(raised.value)
