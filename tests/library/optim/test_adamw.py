"""Tests Float8AdamW in one process: numbers against torch's, bits in C, PyTorch and compiled code, refusals."""

import copy
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from quaver import convert_to_float8_training, use_float8_primary_weights
from quaver.kernels import adamw as cpu_adamw
from quaver.kernels.stochastic_rounding import round_to_bfloat16
from quaver.optim import FLOAT32_MOMENTS, Float8AdamW, Float8Muon, adamw, base, buckets, make_param_groups, muon, update
from quaver.optim.blocks import RowSpan, make_grid, number_blocks
from quaver.optim.rounding import (
    dequantize_moment,
    draw_random_bits,
    make_block_keys,
    make_step_key,
    quantize_moment,
    take_low16,
)
from quaver.recipes.formats import E4M3
from quaver.runtime.slow_paths import error_on_slow_path
from tests import steps
from tests.counting import CollectiveCounter
from tests.library.optim.training import (
    MUON,
    SHAPES,
    assert_same_states,
    build_parameters,
    count_state_bytes,
    give_gradients,
    make_steps,
    train,
)
from tests.steps import assert_same, by_torch_save
from tests.thinned import at_night

ROUNDING = 2**-E4M3.mantissa_bits / math.sqrt(6)
"""The relative error of a stochastic rounding, root mean square: a part p of an ulp is off by ulp^2 * p * (1 - p)."""
STORAGES = [{}, {"exp_avg": "bfloat16", "exp_avg_sq": "float32", "masters": "float32"}, {"exp_avg": "bfloat16"}]


@pytest.fixture
def use_pytorch(monkeypatch):
    return lambda: monkeypatch.setattr(cpu_adamw, "supports", lambda *tensors: False)


in_c = pytest.mark.skipif(not cpu_adamw.HAS_EXTENSION, reason="no C extension")


@in_c
@pytest.mark.filterwarnings("ignore:gradients or moments are not finite:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_c_and_pytorch_agree_in_every_bit(use_pytorch, monkeypatch, dtype, storage):
    def train_with_nan():
        parameters, optimizer = train(steps=1, dtype=dtype, **storage)
        give_gradients(parameters, 1)
        for place in ((3, 5), (60, 300)):
            parameters[0].grad[place] = torch.nan
        optimizer.step()
        return parameters, optimizer

    expected = train_with_nan()
    use_pytorch()
    monkeypatch.setattr(buckets, "MAX_BUCKET_ELEMENTS", 5000)  # parameters in parts
    assert_same_states(train_with_nan(), expected)
    assert expected[1].skipped_blocks == 2


def test_a_bucket_is_a_quarter_of_the_elements(use_pytorch, monkeypatch):
    """With larger buckets the step of a small model would be the peak of its memory."""
    use_pytorch()
    sizes, update_blocks = [], buckets.update_blocks

    def record(old, grad, *args):
        sizes.append(len(grad))
        return update_blocks(old, grad, *args)

    monkeypatch.setattr(buckets, "update_blocks", record)
    train(steps=1, shapes=[(256, 256)] * 4)
    assert sizes == [256] * 4


def test_compiled_code_agrees_in_every_bit(use_pytorch):
    options = {"shapes": [(64, 512), (300,)], "steps": 2}  # moments in float8 and in float32
    expected = train(**options)
    use_pytorch()
    assert_same_states(train(compile=True, **options), expected)


@in_c
def test_the_c_extension_takes_compiled_steps(monkeypatch):
    monkeypatch.setattr(buckets, "compile_update", lambda: pytest.fail("compiled"))
    assert_same_states(train(compile=True), train())


@pytest.mark.parametrize("storage", [FLOAT32_MOMENTS, {}])
def test_float8_adamw_follows_torch_adamw(storage):
    """float32 moments are torch's up to rounding; each step by float8 ones has the error of both moments."""
    options = {"steps": 20, "lr": 1e-3, "weight_decay": 0.1}
    (ours, _), (theirs, _) = train(**options, **storage), train(torch.optim.AdamW, **options)
    for mine, other, start in zip(ours, theirs, build_parameters()[0], strict=True):
        error = (mine - other).norm() / (other - start).norm()
        assert error < (1e-5 if storage or mine.numel() < 4096 else math.sqrt(2) * ROUNDING)


@pytest.mark.parametrize("optimizer", [Float8AdamW, Float8Muon])
def test_bfloat16_parameters_follow_their_float32_masters(optimizer):
    parameters, its_optimizer = build_parameters(optimizer, SHAPES[:2], torch.bfloat16, masters="float32")
    start = copy.deepcopy(parameters)
    for step in range(3):
        make_steps(parameters, its_optimizer, [step])
        for parameter in parameters:
            assert torch.equal(parameter, its_optimizer.state[parameter]["master"].bfloat16())
    for parameter, before in zip(parameters, start, strict=True):
        assert (parameter != before).float().mean() > 0.5


@pytest.mark.parametrize("optimizer", [Float8AdamW, Float8Muon])
def test_weights_that_are_loaded_between_steps_replace_float32_masters(optimizer):
    """Elements that the load does not change keep the bits of their masters."""
    (parameter,), its_optimizer = train(optimizer, shapes=[(64, 128)], dtype=torch.bfloat16, masters="float32")
    master = its_optimizer.state[parameter]["master"]
    before, loaded = master.clone(), parameter.detach().clone()
    loaded[:32] = 0
    with torch.no_grad():
        parameter.copy_(loaded)
    parameter.grad = torch.zeros_like(parameter)
    its_optimizer.param_groups[0].update(lr=0.0)
    its_optimizer.step()
    assert torch.equal(parameter, loaded)
    assert torch.equal(master[32:], before[32:])


def test_a_state_that_is_loaded_alone_does_not_bring_back_old_weights():
    (parameter,), optimizer = train(shapes=[(64, 128)], dtype=torch.bfloat16, masters="float32")
    old, weights = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    optimizer.param_groups[0].update(lr=1.0)
    make_steps([parameter], optimizer, [3])
    optimizer.load_state_dict(old)
    optimizer.param_groups[0].update(lr=0.0)
    moved = parameter.detach().clone()
    optimizer.step()
    assert torch.equal(parameter, moved)
    assert not torch.equal(parameter, weights)


@pytest.mark.parametrize("optimizer", [Float8AdamW, Float8Muon])
def test_a_step_that_fails_is_not_counted(optimizer, monkeypatch):
    """The step that follows has the number, and the random bits, of the one that failed."""
    expected, failing = train(optimizer, shapes=[(64, 128)]), build_parameters(optimizer, shapes=[(64, 128)])
    for seed in range(3):
        give_gradients(failing[0], seed)
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            for module in (adamw, muon):
                patch.setattr(module, "get_local_gradient", mock.Mock(side_effect=MemoryError))
            failing[1].step()
        failing[1].step()
    assert_same_states(failing, expected)


def test_a_parameter_of_other_strides_is_updated_in_place():
    (expected,), _ = train(shapes=[(100, 300)])
    transposed = nn.Parameter(build_parameters(shapes=[(100, 300)])[0][0].detach().t().contiguous().t())
    address = transposed.data_ptr()
    make_steps([transposed], Float8AdamW([transposed], lr=1e-2), range(3))
    assert torch.equal(transposed, expected)
    assert (transposed.data_ptr(), transposed.stride()) == (address, (1, 100))


def test_gradients_in_float64_are_those_in_float32():
    (expected,), _ = train(steps=1, shapes=[(64, 128)])
    (parameter,), optimizer = build_parameters(shapes=[(64, 128)])
    parameter.grad_dtype = None  # allows any
    parameter.grad = expected.grad.double()
    optimizer.step()
    assert torch.equal(parameter, expected)


def measure_decay(beta2, *, stochastic, root):
    """Return the mean of 255 second moments, over the true one, after 1 / (1 - beta2) steps without gradient."""
    moment = torch.full((64, 256), 0.1)
    moment[:, 0] = 1.0  # the largest of each block stays
    steps = round(1 / (1 - beta2))
    for step in range(steps):
        moment *= beta2
        moment[:, 0] = 1.0
        values = moment.sqrt() if root else moment
        step_key = torch.full((64,), make_step_key(0, step, 0) - 2**31, dtype=torch.int32)
        keys = make_block_keys(step_key, torch.arange(64).int())
        noise = take_low16(draw_random_bits(keys)) if stochastic else torch.full((64, 256), 2**15, dtype=torch.int32)
        values = dequantize_moment(*quantize_moment(values, values.amax(1), noise, is_root=True))
        moment = values.square() if root else values
    return (moment[:, 1:].mean() / (0.1 * beta2**steps)).item()


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("beta2", [0.95, 0.99, *at_night([(0.999,)])])
def test_stochastic_rounding_does_not_freeze_second_moments(beta2, root):
    frozen = beta2 ** -round(1 / (1 - beta2))
    assert measure_decay(beta2, stochastic=False, root=root) == pytest.approx(frozen, rel=2**-E4M3.mantissa_bits)
    # A step takes an ulp off a moment m with probability (1 - beta2) * m / ulp, so its variance grows to ulp * m, and
    # that of a root to ulp / 2 of it: the bias of its square. Five standard deviations of the mean are below 0.02.
    bias = 2**-E4M3.mantissa_bits / 2 if root else 0.0
    assert -0.02 < measure_decay(beta2, stochastic=True, root=root) - 1 < bias + 0.02


def minimize(storage, steps, compute_gradient, **options):
    """Train parameters from 1, and return their mean square without the first of each block; 0 is best."""
    x = nn.Parameter(torch.ones(16, 256))
    optimizer = Float8AdamW([x], lr=1e-2, weight_decay=0.0, exp_avg=storage, exp_avg_sq=storage, **options)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        x.grad = compute_gradient(x.detach(), step, generator)
        optimizer.step()
    return x[:, 1:].square().mean().item()


def test_an_ill_conditioned_problem_converges():
    """Second moments span 1e8: curvatures are 1 to 1e-4 within a block, gradients come in a tenth of the steps."""
    curvature = torch.logspace(-4, 0, 256).repeat(16, 1)

    def compute_gradient(x, step, generator):
        noise, chosen = torch.randn(2, 16, 256, generator=generator)
        return curvature * (x + 0.1 * noise) * (chosen > 1.28)

    exact = minimize("float32", 600, compute_gradient)
    assert exact < 0.02
    assert minimize("float8", 600, compute_gradient) < 2 * exact


@pytest.mark.parametrize("rounding", ["stochastic", *at_night([("to nearest",)])])
def test_only_stochastic_rounding_converges_with_sparse_gradients(use_pytorch, monkeypatch, rounding):
    """Features of curvature 1e-5 occur in 20 steps, beside one whose gradient is 1. Then first moments of up to 4 steps
    of e4m3's subnormal numbers stay under 0.9 * m, and parameters go on in their direction for ever."""

    def compute_gradient(x, step, generator):
        grad = 1e-5 * x * (step < 20)
        grad[:, 0] = 1.0
        return grad

    if rounding == "stochastic":
        exact, ours = (minimize(storage, 400, compute_gradient, betas=(0.9, 0.99)) for storage in ("float32", "float8"))
        assert ours == pytest.approx(exact, rel=0.05)
        assert exact < 0.6
        return
    use_pytorch()
    halves = torch.full((1, 256), -0x7FFF8000, dtype=torch.int32)  # 2^15 in the lower and in the upper 16 bits
    monkeypatch.setattr(update, "draw_random_bits", lambda keys: halves.expand(len(keys), 256))
    assert minimize("float8", 400, compute_gradient, betas=(0.9, 0.99)) > 5


@pytest.mark.parametrize("is_root", [False, True])
def test_stochastic_rounding_keeps_representable_values_and_the_mean(is_root):
    exact = torch.arange(127, dtype=torch.uint8)
    values = torch.zeros(1, 256)
    values[0, :127] = dequantize_moment(exact[None], torch.ones(1))
    for noise in (0, 65535):  # what a code holds is not moved
        codes, scale = quantize_moment(values, values.amax(1), torch.full((1, 256), noise).int(), is_root=is_root)
        assert scale.item() == 1
        assert torch.equal(codes[0, :127], exact)
    values = torch.logspace(-5, 0, 256).repeat(4096, 1)
    keys = make_block_keys(torch.zeros(4096, dtype=torch.int32), torch.arange(4096).int())
    codes, scale = quantize_moment(values, values.amax(1), take_low16(draw_random_bits(keys)), is_root=is_root)
    mean = dequantize_moment(codes, scale).mean(0)
    normal = values[0] > 2**-9 / 448 if is_root else values[0] > 0
    torch.testing.assert_close(mean[normal], values[0][normal], rtol=0.01, atol=1e-7)
    bad = torch.tensor([torch.nan, -torch.inf])
    assert not round_to_bfloat16(bad, torch.tensor([65535] * 2).int()).isfinite().any()


def test_random_bits_are_those_of_the_element_in_the_whole_parameter():
    whole = torch.empty(6, 4, 700)
    key, number = number_blocks([RowSpan(make_grid(whole), 0, 24, 7)], whole.device)
    bits = draw_random_bits(make_block_keys(key, number))
    assert number.tolist() == list(range(72))
    assert (bits.view(-1).unique().numel() - 72 * 256) > -3
    mean = take_low16(bits).double().mean() / 65535
    assert abs(mean - 0.5) < 5 / math.sqrt(12 * bits.numel())  # five standard deviations of a mean of uniform numbers
    part = RowSpan(make_grid(whole), 5, 9, 7)
    assert torch.equal(number_blocks([part], whole.device)[1], number[15:27])
    assert len({make_step_key(*words) for words in [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2**32, 1, 2)]}) == 4


def test_blocks_with_gradients_that_are_not_finite_stay_and_are_reported(monkeypatch):
    counters, run_updates = [], adamw.run_updates

    def record_counter(updates, scalars, get_counter, **options):
        counters.append(get_counter(torch.device("cpu")))
        run_updates(updates, scalars, get_counter, **options)

    monkeypatch.setattr(adamw, "run_updates", record_counter)
    (parameter,), optimizer = train(steps=1, shapes=[(64, 512)])
    before, old_state = parameter.detach().clone(), copy.deepcopy(optimizer.state[parameter])
    parameter.grad[3, 300] = torch.inf
    with pytest.warns(
        RuntimeWarning, match="gradients or moments are not finite in 1 blocks of 256 elements"
    ) as warned:
        optimizer.step()
    assert [warning.filename for warning in warned] == [__file__]
    state = optimizer.state[parameter]
    assert torch.equal(parameter[3, 256:], before[3, 256:])
    assert not (parameter[3, :256] == before[3, :256]).any()
    assert torch.equal(state["exp_avg_fp8"][3, 256:], old_state["exp_avg_fp8"][3, 256:])
    assert torch.equal(state["exp_avg_sq_root_scale"][3, 1], old_state["exp_avg_sq_root_scale"][3, 1])
    assert optimizer.skipped_blocks == 1
    counters[-1].add_(2)  # as a GPU does after step() has returned
    for call, count in ((optimizer.state_dict, 2), (optimizer.step, 1)):
        with pytest.warns(RuntimeWarning, match=f"not finite in {count} blocks") as warned:
            call()
        assert [warning.filename for warning in warned] == [__file__]


def test_primary_weights_are_trained():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(256, 64, bias=False)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        convert_to_float8_training(model, config="tensorwise")
    optimizers = [Float8AdamW(model.parameters(), lr=1e-2) for model in models]
    optimizers[1] = use_float8_primary_weights(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        steps.train(model, optimizer, [torch.ones(16, 256)] * 3)
    assert_same(*(model.state_dict() for model in models))
    assert_same(*(optimizer.state_dict()["state"] for optimizer in optimizers))


def test_a_step_between_forward_and_backward_is_noticed():
    model, x = nn.Linear(64, 64), torch.ones(2, 64, requires_grad=True)
    optimizer = Float8AdamW(model.parameters())
    model(x).sum().backward()
    loss = model(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_operations_do_not_grow_with_parameters(use_pytorch):
    use_pytorch()
    counts = []
    for number in (8, 80):
        _, optimizer = train(steps=1, shapes=[(16, 256)] * number)
        with CollectiveCounter() as counter:
            optimizer.step()
        counts.append(counter.kernels.total())
    assert counts[1] - counts[0] <= 2 * (80 - 8)  # a parameter is detached and its steps are counted


def test_large_matrices_have_float8_states_and_others_float32():
    model = nn.Sequential(nn.Embedding(100, 256), nn.Linear(512, 512), nn.LayerNorm(8192), nn.Linear(8, 8))
    optimizer = Float8AdamW(make_param_groups(model, weight_decay=0.1))
    make_steps(list(model.parameters()), optimizer, [0])
    assert count_state_bytes(optimizer, model[1].weight) == 2 + 2 * 4 / 256 <= 2.04
    in_float32 = [model[0].weight, model[1].bias, model[2].weight, model[3].weight]
    assert [count_state_bytes(optimizer, parameter) for parameter in in_float32] == [8] * 4
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}


@pytest.mark.parametrize("exp_avg", ["float8", "bfloat16", "float32"])
@pytest.mark.parametrize("exp_avg_sq", ["float8", "bfloat16", "float32"])
def test_a_spike_in_a_block_leaves_the_steps_of_its_neighbours_bounded(exp_avg, exp_avg_sq):
    """A pair of storages without this property is refused, in the constructor and in a load."""
    x = nn.Parameter(torch.zeros(16, 256))
    options = {"lr": 1.0, "weight_decay": 0.0, "eps": 0.0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if exp_avg == "float8" != exp_avg_sq:
        message = f"exp_avg_sq: expected 'float8' with exp_avg='float8', got '{exp_avg_sq}'"
        with pytest.raises(ValueError, match=message):
            Float8AdamW([x], **options)
        optimizer = Float8AdamW([x], **(options | {"exp_avg_sq": "float8"}))
        saved = optimizer.state_dict()
        saved["param_groups"][0]["exp_avg_sq"] = exp_avg_sq
        with pytest.raises(ValueError, match="expected 'float8' with"):
            optimizer.load_state_dict(saved)
        return
    optimizer = Float8AdamW([x], **options)
    for step in range(20):
        x.grad = torch.randn(16, 256)
        x.grad[:, 7] *= 1e9 if step == 10 else 1
        before = x.detach().clone()
        optimizer.step()
        steps = (x.detach() - before).abs()
        steps[:, 7] = 0
        assert steps.max() < 2.5


def test_large_vectors_are_said_once_for_each_optimizer_to_stay_in_float32(caplog):
    """FSDP1's parameters are such vectors, with use_orig_params too."""
    for number in (1, 2):
        with error_on_slow_path():
            train(steps=2, shapes=[(8192,), (1 << 16,), (1 << 17,)])
        assert len(caplog.messages) == number
        assert "this model has vectors of 65536 elements or more" in caplog.messages[-1]


PAGE = (Path(__file__).parents[3] / "docs" / "optimizer.md").read_text()


@pytest.mark.parametrize("named", ["by name_parameters", "by named_parameters"])
@pytest.mark.parametrize("copied", [lambda pair: pair, copy.deepcopy, by_torch_save])
def test_the_log_names_a_parameter_and_its_copies(copied, named, monkeypatch, caplog):
    monkeypatch.setattr(base, "explain_block_obstacle", lambda _: "its shards have no whole blocks")
    model = nn.Linear(64, 64, bias=False)
    optimizer = Float8AdamW(model.named_parameters() if named == "by named_parameters" else model.parameters())
    if named == "by name_parameters":
        optimizer.name_parameters(model)
    model, optimizer = copied((model, optimizer))
    make_steps(list(model.parameters()), optimizer, range(2))
    assert caplog.messages == ["moments of weight [64, 64] are float32: its shards have no whole blocks"]


def test_the_documented_bytes_are_those_of_each_choice():
    choice = r"^\| (float8|bfloat16|float32) \| (\w+) \| (\w+) \| (-|\w+) "
    rows = re.findall(choice + r"\| ([\d.]+) " * 4 + r"\|$", PAGE, re.MULTILINE)
    assert len(rows) == 7
    for exp_avg, exp_avg_sq, dtype, masters, *documented in rows:
        options = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        options |= {} if masters == "-" else {"masters": masters}
        (parameter,), optimizer = train(steps=1, shapes=[(64, 512)], dtype=getattr(torch, dtype), **options)
        state = {name: tensor.nbytes for name, tensor in optimizer.state[parameter].items() if tensor.dim()}
        counts = [parameter.nbytes + parameter.grad.nbytes, state.pop("master", 0), sum(state.values())]
        assert [f"{count / parameter.numel():.3f}" for count in (*counts, sum(counts))] == documented


def test_the_code_of_the_page_runs(monkeypatch, tmp_path):
    codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for code, moment in zip(codes, ("exp_avg_fp8", "momentum_buffer_fp8"), strict=True):
        names = {}
        exec(code.replace("/tmp", str(tmp_path)), names)
        assert moment in names["optimizer"].state[names["model"][1].weight]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *((Float8AdamW, {"dtype": torch.bfloat16, **storage}) for storage in STORAGES),
        *((Float8Muon, {"dtype": dtype, **MUON}) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_a_saved_state_goes_on_to_the_same_bits(optimizer, options):
    parameters, first = train(optimizer, **options)
    resumed = copy.deepcopy(parameters)
    second = optimizer(resumed)
    second.load_state_dict(by_torch_save(first.state_dict(), weights_only=True))
    expected = make_steps(parameters, first, [9])
    assert_same_states(make_steps(resumed, second, [9]), expected)
    assert_same_states(copy.deepcopy(expected), expected)


def test_states_of_adamw_are_converted_in_both_directions():
    theirs, adamw = train(torch.optim.AdamW, steps=1, lr=3e-3, betas=(0.8, 0.9))
    ours = copy.deepcopy(theirs)
    optimizer = Float8AdamW(ours)
    optimizer.load_adamw_state_dict(adamw.state_dict())
    back = optimizer.adamw_state_dict()
    assert back["param_groups"][0]["betas"] == (0.8, 0.9)
    assert back["param_groups"][0].keys() == adamw.state_dict()["param_groups"][0].keys()
    for index, state in adamw.state_dict()["state"].items():
        assert back["state"][index]["step"] == state["step"]
        for name, tolerance in (("exp_avg", ROUNDING), ("exp_avg_sq", 2 * ROUNDING)):  # e4m3 holds its root
            error = (back["state"][index][name] - state[name]).norm() / state[name].norm()
            assert error < (tolerance if state[name].numel() >= 4096 else 1e-6)
    adamw.load_state_dict(back)
    twins = copy.deepcopy(ours)
    first, second = Float8AdamW(ours), Float8AdamW(twins)
    first.load_adamw_state_dict(adamw.state_dict())
    second.load_state_dict(adamw.state_dict())  # as a trainer does, which knows no other method
    assert_same_states(make_steps(twins, second, [1]), make_steps(ours, first, [1]))


def test_states_that_do_not_fit_are_refused():
    parameters, optimizer = train()
    saved = optimizer.state_dict()
    newer = copy.deepcopy(saved)
    newer["param_groups"][0]["state_version"] = 9
    with pytest.raises(ValueError, match="state_version 1, or of torch.optim.AdamW, got state_version 9"):
        optimizer.load_state_dict(newer)
    theirs = torch.optim.AdamW(parameters)
    theirs.step()
    more = torch.optim.AdamW([*parameters, torch.zeros(4, requires_grad=True)])
    with pytest.raises(ValueError, match=r"expected a state dict with param groups of \[7\] parameters, got \[8\]"):
        optimizer.load_state_dict(more.state_dict())
    momentum = torch.optim.SGD(parameters, momentum=0.9)
    momentum.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="or of torch.optim.AdamW, got one without .*betas"):
        optimizer.load_state_dict(momentum.state_dict())
    assert_same(optimizer.state_dict(), before)
    _, other = build_parameters(shapes=[(64, 256), *SHAPES[1:]])
    message = r"expected exp_avg_fp8 in torch.uint8 \[64, 256\], got torch.uint8 \[64, 512\]"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"exp_avg: expected a Parameter \[64, 256\], got Tensor \[64, 512\]"):
        other.load_adamw_state_dict(theirs.state_dict())
    parameters[-1].grad = torch.zeros_like(parameters[-1]).to_sparse()
    with pytest.raises(ValueError, match="expected a dense gradient, got torch.sparse_coo"):
        optimizer.step()
    assert_same(optimizer.state_dict(), before)
