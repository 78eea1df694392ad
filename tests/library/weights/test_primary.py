"""Tests that float8 primary weights have the losses of ordinary parameters, whatever trains, saves or copies them."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from quaver import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    convert_to_high_precision,
    use_float8_primary_weights,
)
from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import iter_model_weights
from quaver.optim import CombinedOptimizer, Float8AdamW
from quaver.weights.primary import round_stochastically
from quaver.weights.primary_weight import Float8PrimaryWeight
from tests import steps
from tests.library.weights.models import (
    build_bfloat16_pair,
    build_experts,
    build_linears,
    build_ordinary,
    build_pair,
    make_adamw,
)
from tests.mixture import DIM, make_mixture
from tests.recipes import DYNAMIC_RECIPES, TORCHAO_RECIPES
from tests.steps import assert_same, by_torch_save, draw
from tests.thinned import at_night, thinned

LINEAR_RECIPES = (*DYNAMIC_RECIPES, "delayed_with_dynamic_weight")
EXPERT_RECIPES = (*TORCHAO_RECIPES, "blockwise", "mxfp8")
COMPILED = ("delayed_with_dynamic_weight",)
"""A persistent scaling; a compiled mixture has linears of `tensorwise`. The others are for the night."""


def build_transposed_experts(recipe):
    return build_experts(recipe, is_transposed=True)


def make_sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, **options)


def train(model, optimizer, seeds=range(3), *, microbatches=2, **options):
    batches = [draw(8, DIM, seed=seed) for seed in seeds]
    return steps.train(model, optimizer, batches, microbatches=microbatches, **options)


def assert_same_weights(model, other):
    assert_same(model.state_dict(), other.state_dict())
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}


def assert_codes_follow(model):
    """Assert that the next forward reads the codes of the masters."""
    for _, weight in iter_model_weights(model):
        primary = weight.parameter
        fresh = Float8PrimaryWeight.from_master(primary.wrapped, weight.config, primary.transposed)
        for operand, expected in zip(primary.get_stored_operands(), fresh.get_stored_operands(), strict=True):
            assert_same((operand.data, operand.dequant_scale), (expected.data, expected.dequant_scale))


OPTIMIZERS = {
    "default": (make_adamw, {}),
    "foreach": (make_adamw, {"foreach": True}),
    "fused": (make_adamw, {"fused": True}),
    "amsgrad": (make_adamw, {"amsgrad": True, "weight_decay": 0.1}),
    "sgd": (make_sgd, {"foreach": True, "nesterov": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize(
    ("make", "recipe", "optimizer", "compiled"),
    [
        *((build_linears, recipe, "default", False) for recipe in LINEAR_RECIPES),
        *((build_linears, recipe, "default", True) for recipe in COMPILED),
        *((build_linears, "rowwise", optimizer, False) for optimizer in list(OPTIMIZERS)[1:]),
        *((build_experts, recipe, "default", False) for recipe in EXPERT_RECIPES),
        (build_transposed_experts, "rowwise", "default", False),
        *at_night((build_experts, name, "default", False) for name in DYNAMIC_RECIPES if name not in EXPERT_RECIPES),
        *at_night((build_transposed_experts, recipe, "default", False) for recipe in DYNAMIC_RECIPES),
        (build_experts, "tensorwise", "default", True),
        *at_night((build_linears, recipe, "default", True) for recipe in LINEAR_RECIPES if recipe not in COMPILED),
    ],
)
def test_losses_and_weights_are_those_of_ordinary_parameters(make, recipe, optimizer, compiled):
    make_optimizer, options = OPTIMIZERS[optimizer]
    (reference, plain), (model, primary) = (
        build(recipe, make_optimizer, make=make, **options) for build in (build_ordinary, build_pair)
    )
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else None
    losses, expected = train(model, primary, call=call), train(reference, plain)
    assert losses == expected
    assert len(set(losses)) == len(losses)
    assert_same_weights(model, reference)
    assert_codes_follow(model)
    for _, weight in iter_model_weights(model):
        assert isinstance(weight.parameter, Float8PrimaryWeight)
        stored = {operand.data.data_ptr() for operand in weight.parameter.get_stored_operands()}
        assert len(stored) == (2 if recipe in ("rowwise", "rowwise_with_gw_hp") else 1)


def test_two_casts_of_a_weight_have_two_sets_of_codes():
    casts = {"cast_config_weight": CastConfig(scale_rule="vllm"), "cast_config_weight_for_grad_input": CastConfig()}
    config = Float8LinearConfig(**casts, round_scales_to_power_of_2=True)
    (reference, plain), (model, optimizer) = build_ordinary(config), build_pair(config)
    assert train(model, optimizer) == train(reference, plain)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_has_stepped_keeps_its_state(dtype):
    model = build_linears(dtype=dtype)
    optimizer = make_adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    reference, plain = copy.deepcopy((model, optimizer))
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is dtype
    optimizer = use_float8_primary_weights(model, optimizer)
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is torch.float32
    if dtype is torch.float32:
        assert train(model, optimizer) == train(reference, plain)


def make_lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


def test_a_closure_evaluates_the_masters_of_its_step():
    losses = []
    for model, optimizer in (build_ordinary(make_optimizer=make_lbfgs), build_pair(make_optimizer=make_lbfgs)):

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(draw(8, DIM)).square().mean()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(3)])
    assert losses[0] == losses[1]


def train_with_everything(model, optimizer):
    """Train with groups, a group added later, a schedule, scaled gradients and clipping."""
    for group, rate in zip(optimizer.param_groups, (1e-2, 2e-2), strict=True):
        group["lr"] = rate
    added = nn.Parameter(torch.ones(16))
    optimizer.add_param_group({"params": [added], "weight_decay": 0.5})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(draw(8, DIM, seed=step)).float() * added).square().mean()
        scaler.scale(loss * (torch.inf if step == 2 else 1.0)).backward()  # which skips a step
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([*model.parameters(), added], 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        schedule.step()
        losses += [loss.item(), str(norm.item())]
    return losses, added


def test_groups_schedules_and_clipping_train_primary_weights_as_ordinary_ones():
    def two_groups(parameters):
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first], "weight_decay": 0.1}, {"params": others}], lr=1e-2)

    results, expected = (
        train_with_everything(*build(make_optimizer=two_groups)) for build in (build_pair, build_ordinary)
    )
    assert_same(results, expected)


def test_a_step_casts_each_weight_once(monkeypatch):
    model, optimizer = build_pair("tensorwise")
    casts, quantize = [], Float8PrimaryWeight.quantize
    monkeypatch.setattr(Float8PrimaryWeight, "quantize", lambda weight: casts.append(weight) or quantize(weight))
    train(model, optimizer, range(3), microbatches=4)
    assert len(casts) == 3 * 2


PAIRS = {
    "primary": (build_pair, build_pair),
    "from ordinary": (build_ordinary, build_pair),
    "to ordinary": (build_pair, build_ordinary),
    "bfloat16 masters": (build_bfloat16_pair, build_bfloat16_pair),
}


@pytest.mark.parametrize("make", [build_linears, build_experts])
@pytest.mark.parametrize("which", PAIRS)
def test_a_checkpoint_resumes_to_the_bit(which, make):
    build, rebuild = PAIRS[which]
    model, optimizer = build(make=make)
    for group in optimizer.param_groups:
        group["lr"] = 2e-2  # as a schedule does
    train(model, optimizer, range(2))
    weights, states = by_torch_save((model.state_dict(), optimizer.state_dict()), weights_only=True)
    expected = train(model, optimizer, range(2, 5))
    resumed, optimizer = rebuild(make=make)
    train(resumed, optimizer, range(1))  # states that the load replaces
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert optimizer.param_groups[0]["lr"] == 2e-2
    assert train(resumed, optimizer, range(2, 5)) == expected
    assert_same_weights(resumed, model)


def make_float8_adamw(parameters):
    return Float8AdamW(parameters, lr=1e-2)


def make_muon_and_adamw(parameters):
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    others = [parameter for parameter in parameters if parameter.dim() != 2]
    return CombinedOptimizer(torch.optim.Muon(matrices, lr=1e-2), make_adamw(others))


@pytest.mark.parametrize(
    ("option", "make_optimizer", "make"),
    thinned(
        [None, "flatten_optimizer_state_dict", "full_state_dict", "ignore_frozen_params"],
        [make_adamw, make_float8_adamw, make_muon_and_adamw],
        [build_linears, build_experts],
    ),
)
def test_torch_distributed_checkpoint_finds_states_by_parameter(option, make_optimizer, make):
    model, optimizer = build_pair(make_optimizer=make_optimizer, make=make)
    train(model, optimizer, range(2))
    for parameter in model.parameters():
        assert optimizer.state[parameter]
        assert parameter in optimizer.state
        assert any(parameter is key for key in optimizer.state)
    options = StateDictOptions(**{option: True} if option else {})
    weights, states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    expected = train(model, optimizer, range(2, 4))
    resumed, optimizer = build_pair(make_optimizer=make_optimizer, make=make)
    set_state_dict(resumed, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    assert train(resumed, optimizer, range(2, 4)) == expected


def test_a_flat_state_dict_may_lack_states():
    """Experts that no token has reached are such parameters."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
    first, second = (Float8AdamW(model.parameters()) for _ in range(2))
    for optimizer, factor in ((first, 1.0), (second, 2.0)):
        model[0](torch.full((1, 64), factor)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first, options=options), options=options)
    assert_same(second.state[model[0].weight], first.state[model[0].weight])
    assert not second.state[model[1].weight]


def test_the_parameter_answers_as_its_master():
    model, _ = build_pair()
    weight, master = model[0].weight, model[0].weight.wrapped
    assert isinstance(weight, nn.Parameter)
    assert weight.dtype is torch.float32
    assert weight.data_ptr() == master.data_ptr()
    assert torch.equal(weight, master)
    assert torch.equal(weight @ torch.ones(DIM), master @ torch.ones(DIM))
    assert (weight.detach().numpy() == master.detach().numpy()).all()
    with pytest.raises(RuntimeError, match=re.escape("cannot assign [48, 40] of torch.bfloat16")):
        weight.data = weight.detach().clone().bfloat16()


@pytest.mark.parametrize("make", [build_linears, build_experts])
def test_copies_are_independent_and_train_on_with_their_optimizer(make):
    model, optimizer = build_pair("rowwise", make=make)
    train(model, optimizer, range(2))
    pairs = [duplicate((model, optimizer)) for duplicate in (copy.deepcopy, by_torch_save)]
    alone = copy.deepcopy(model)
    expected = train(model, optimizer, range(2, 4))
    for twin, its_optimizer in pairs:
        assert train(twin, its_optimizer, range(2, 4)) == expected
        assert_same_weights(twin, model)
    for (_, untrained), (_, weight) in zip(iter_model_weights(alone), iter_model_weights(model), strict=True):
        assert isinstance(untrained.parameter, Float8PrimaryWeight)
        assert not torch.equal(untrained.parameter, weight.parameter)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(alone)
    average.update_parameters(model)
    assert_codes_follow(average.module)


def test_a_model_that_is_moved_takes_its_optimizer_along():
    """`to` makes new masters, as Accelerate's prepare does when it moves a model to a GPU."""
    (reference, plain), (model, optimizer) = build_ordinary(), build_pair()
    train(reference, plain, range(1))
    train(model, optimizer, range(1))
    for moved in (reference, model):
        moved.to(torch.bfloat16).to(torch.float32)
    assert isinstance(model[0].weight, Float8PrimaryWeight)
    assert train(model, optimizer) == train(reference, plain)
    assert_same_weights(model, reference)


def test_stochastic_rounding_keeps_the_expected_value():
    values = torch.tensor([1.0, 1.0 + 2**-10, -3.3e-5, 2.5e-41, torch.inf, torch.nan, torch.finfo().max])
    generator = torch.Generator().manual_seed(0)
    rounded = torch.stack([round_stochastically(values, generator) for _ in range(4000)])
    assert rounded.dtype is torch.bfloat16
    assert (rounded[:, 0] == 1).all()
    assert set(rounded[:, 1].tolist()) == {1.0, 1 + 2**-7}
    # A mean of 4000 of two values a spacing d apart has a standard deviation under d / (2 * 63).
    torch.testing.assert_close(rounded[:, 1:3].float().mean(0), values[1:3], rtol=4 * 2**-7 / 126, atol=0)
    assert rounded[:, 4].isposinf().all()
    assert rounded[:, 5].isnan().all()


def test_bfloat16_masters_follow_updates_below_their_spacing():
    """100 updates of 2^-11 on weights of 1, whose spacing is 2^-7: to nearest, none would move."""
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32, bias=False)), config="tensorwise")
        nn.init.ones_(model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-11)
        optimizer = use_float8_primary_weights(model, optimizer, master_dtype=torch.bfloat16)
        weight = model[0].weight
        assert weight.dtype is torch.bfloat16
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        results.append(weight.detach().clone())
    assert torch.equal(*results)
    # Of 1024 weights, each the sum of 100 roundings with a deviation under half a spacing each.
    deviation = 2**-8 * 100**0.5 / 1024**0.5
    assert results[0].double().mean().item() == pytest.approx(1 - 100 * 2**-11, abs=4 * deviation)
    assert results[0].double().std() < 2**-8 * 100**0.5  # with equal bits in each step a weight moves always or never


def build_ones(seed):
    """Return a model of ones with bfloat16 masters whose rounding has this seed, and its optimizer."""
    model, optimizer = build_ordinary()
    torch.manual_seed(seed)
    optimizer = use_float8_primary_weights(model, optimizer, master_dtype=torch.bfloat16)
    for primary in optimizer.primaries:
        nn.init.ones_(primary.weight)
    return model, optimizer


def step_on_ones(optimizer, steps):
    """Make equal updates of about a spacing, and return the rounded masters."""
    for _ in range(steps):
        for primary in optimizer.primaries:
            primary.weight.grad = torch.ones_like(primary.weight)
        optimizer.step()
    return [primary.weight.detach().clone() for primary in optimizer.primaries]


def resume_on_ones(seed, change_state=lambda state: None):
    """Take two steps, and two more from a checkpoint in an optimizer of another seed."""
    model, optimizer = build_ones(seed)
    step_on_ones(optimizer, 2)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = build_ones(100 * seed)
    model.load_state_dict(weights)
    change_state(state)
    optimizer.load_state_dict(state)
    return step_on_ones(optimizer, 2)


def differ_everywhere(masters, others):
    return not any(map(torch.equal, masters, others))


def test_bfloat16_masters_round_by_torchs_seed_and_a_resumed_run_as_the_first_would_have():
    expected, repeated, other = (step_on_ones(build_ones(seed)[1], 4) for seed in (3, 3, 4))
    assert_same(repeated, expected)
    assert differ_everywhere(other, expected)
    assert_same(resume_on_ones(3), expected)


def test_optimizer_checkpoints_of_ordinary_parameters_which_have_no_random_start_load():
    def remove_count(state):
        del state["param_groups"][0]["stochastic_roundings"]

    resumed, repeated, other = (resume_on_ones(seed, remove_count) for seed in (3, 3, 4))
    assert_same(repeated, resumed)
    assert differ_everywhere(other, resumed)


def test_bfloat16_masters_step_in_float32():
    model, optimizer = build_bfloat16_pair()
    weight, master = optimizer.primaries[0][-2:]
    sizes = []

    def measure(*_):
        sizes.append((weight.wrapped.nbytes + weight.grad.nbytes + master.grad.nbytes) / weight.numel())

    optimizer.inner.register_step_pre_hook(measure)
    losses = train(model, optimizer, range(6))
    assert losses[-1] < losses[0]
    assert set(sizes) == {4.0 + 2.0 + 4.0}  # 2 + 2 between steps
    assert weight.wrapped.nbytes / weight.numel() == 2.0
    assert model[0].weight.grad is None
    state = optimizer.state_dict()["state"]
    assert state[0]["exp_avg"].dtype is torch.float32
    assert model.state_dict()["0.weight"].dtype is torch.bfloat16
    assert_codes_follow(model)


def tie(config=None):
    model, embedding = build_linears(), nn.Embedding(48, DIM)
    embedding.weight = model[0].weight
    return nn.ModuleList([model, embedding])


def tie_experts(config=None):
    model = convert_to_float8_training(make_mixture(layers=2), config="rowwise")
    model[1].experts.down_proj = model[0].experts.down_proj
    return model


def make_scheduled_sgd(parameters):
    optimizer = make_sgd(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def build_primary_twice():
    model, _ = build_pair()
    return model, make_sgd(model.parameters())


def wrap_twice():
    model, optimizer = build_pair()
    return model, optimizer.inner


GATHERING = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: build_ordinary(make_optimizer=make_scheduled_sgd), {}, "expected one without a scheduler"),
        (lambda: build_ordinary(GATHERING), {}, "0.weight cannot .* its config has enable_fsdp_float8_all_gather"),
        (lambda: build_ordinary(make=lambda recipe: nn.Linear(16, 16)), {}, "got none; convert the model"),
        (lambda: build_ordinary("delayed"), {}, "0.weight cannot .* delayed_with_dynamic_weight"),
        (lambda: build_ordinary(make=tie), {}, "it is tied: 0.0.weight, 1.weight"),
        (lambda: build_ordinary(make=tie_experts), {}, "0.experts.down_proj cannot .* tied: .*1.experts.down_proj"),
        (lambda: (build_experts(), build_ordinary()[1]), {}, "that holds weights of float8 linears or experts"),
        (build_pair, {}, "expected a torch.optim.Optimizer of ordinary parameters"),
        (wrap_twice, {}, "got the master of 0, which is a float8 primary weight already"),
        (build_primary_twice, {}, "0.weight cannot be a float8 primary weight: it is one already"),
        (build_ordinary, {"master_dtype": torch.float16}, "expected torch.float32 or torch.bfloat16"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_changed(make, options, message):
    model, optimizer = make()
    before = [type(parameter) for parameter in model.parameters()]
    with pytest.raises((ValueError, TypeError), match=message):
        use_float8_primary_weights(model, optimizer, **options)
    assert [type(parameter) for parameter in model.parameters()] == before


class RefusingSGD(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        raise ValueError("no loading")


@pytest.mark.parametrize("make_optimizer", [make_sgd, lambda parameters: RefusingSGD(parameters, lr=1e-2)])
def test_an_error_half_way_leaves_model_and_optimizer_unchanged(make_optimizer, monkeypatch):
    model, optimizer = build_ordinary(make_optimizer=make_optimizer)
    steps.train(model, optimizer, [draw(8, DIM)])
    parameters, before = list(model.parameters()), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if not isinstance(optimizer, RefusingSGD):
        made = iter([Float8PrimaryWeight.from_master])  # for the first weight only
        monkeypatch.setattr(Float8PrimaryWeight, "from_master", lambda *given: next(made)(*given))
    with pytest.raises((ValueError, StopIteration)):
        use_float8_primary_weights(model, optimizer, master_dtype=torch.bfloat16)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert_same((model.state_dict(), optimizer.state_dict()), before)


@pytest.mark.parametrize("make", [build_linears, build_experts])
def test_codes_of_one_recipe_are_not_those_of_another(make):
    model, _ = build_pair("tensorwise", make=make)
    input = torch.randn(32, DIM)
    expected = model(input)
    with pytest.raises(RuntimeError, match="cannot be converted back: its weight is a float8 primary weight"):
        convert_to_high_precision(model)
    assert_same(model(input), expected)
    for module in model.modules():
        if isinstance(module, Float8Linear | Float8Experts):
            name = "config" if isinstance(module, Float8Linear) else "float8_config"
            setattr(module, name, Float8LinearConfig.from_recipe_name("rowwise"))
    with pytest.raises(ValueError, match="was quantized under another config"):
        convert_to_float8_training(model, config="rowwise")
    with pytest.raises(RuntimeError, match="was quantized under another config"):
        model(input)


def test_a_weight_that_was_replaced_is_an_error_and_not_untrained():
    model, optimizer = build_pair()
    model.load_state_dict(build_linears().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="0.weight was replaced after use_float8_primary_weights"):
        train(model, optimizer)


def test_a_group_that_the_wrapped_optimizer_refuses_is_added_to_neither():
    model, optimizer = build_pair(make_optimizer=Float8AdamW)
    with pytest.raises(ValueError, match="lr: expected"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": -1.0})
    train(model, optimizer, seeds=[0])


def test_the_wrapped_optimizer_is_not_stepped_or_scheduled_by_itself():
    model, optimizer = build_pair()
    with pytest.raises(RuntimeError, match="step the optimizer that use_float8_primary_weights returned"):
        optimizer.inner.step()
    torch.optim.lr_scheduler.StepLR(optimizer.inner, 1)
    with pytest.raises(RuntimeError, match="a scheduler was made for the wrapped optimizer"):
        train(model, optimizer)
