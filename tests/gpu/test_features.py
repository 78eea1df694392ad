"""Compares experts, optimizers, stored activations, special weights and the monitor on a GPU with a CPU."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import quaver
from quaver import convert_to_float8_training, freeze_to_float8, use_float8_primary_weights
from quaver.activations import store_activations_in_float8
from quaver.optim import Float8AdamW, Float8Muon
from tests.gpu.device import BACKEND, DEVICE, VIRTUAL, host, host_and_gpu, host_sync_refused, needs_silicon
from tests.library.activations.nets import LOWEST_DB, SAVED, build_net
from tests.library.experts.operands import ENDS, make_operands, step
from tests.recipes import DYNAMIC_RECIPES
from tests.reference import lowest_sqnr_db, sqnr_db
from tests.steps import compute_results, draw, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", DYNAMIC_RECIPES)
@pytest.mark.parametrize("k_n", [(96, 160), (70, 33)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_experts_agree_with_the_cpu(recipe, k_n, compiled):
    """NaN in rows outside every group would fail this, and in the weight gradient of the empty one."""
    a, b_t, ends = make_operands(k=k_n[0], n=k_n[1])
    grad_output = torch.randn(310, k_n[1], dtype=torch.bfloat16)
    with host():
        expected = step(a, b_t, ends, grad_output, recipe)
    function = quaver.float8_grouped_mm
    if compiled:
        function = torch.compile(function, fullgraph=True, backend=BACKEND)
    results = step(*(tensor.to(DEVICE) for tensor in (a, b_t, ends, grad_output)), config=recipe, function=function)
    for result, reference in zip(results, expected, strict=True):
        assert sqnr_db(reference, result.cpu()) > lowest_sqnr_db(7, 7, 7)  # a sum of Hopper, bfloat16 on each device
    assert results[0][ENDS[-1] :].count_nonzero() == 0


def test_experts_do_not_wait_for_the_device():
    a, b_t, ends = (tensor.to(DEVICE) for tensor in make_operands())
    grad_output = torch.randn(310, 160, dtype=torch.bfloat16, device=DEVICE)
    step(a, b_t, ends, grad_output, "rowwise")
    with host_sync_refused():
        step(a, b_t, ends, grad_output, "rowwise")


OPTIMIZERS = {
    "adamw": (Float8AdamW, {"compile": False}),
    "adamw, compiled": (Float8AdamW, {"compile": True}),
    "adamw, bfloat16": (Float8AdamW, {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}),
    "muon": (Float8Muon, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_follow_those_on_a_cpu(name, dtype):
    make, options = OPTIMIZERS[name]
    weights = []
    for device in host_and_gpu():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 300, bias=False), nn.Linear(300, 64, bias=False)).to(device, dtype)
        on_cpu = {"compile": False} if make is Float8AdamW and not weights else {}
        optimizer = make(model.parameters(), lr=1e-2, **{**options, **on_cpu})
        for index in range(5):
            for parameter in model.parameters():
                parameter.grad = draw(*parameter.shape, seed=index).to(device, dtype)
            optimizer.step()
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    # Under 1 in 12,000 codes of moments, whose errors are of an update's size, are their neighbor: e4m3's SQNR + 30 dB.
    lowest = lowest_sqnr_db(3) + 30
    assert min(sqnr_db(expected, actual) for expected, actual in zip(*weights, strict=True)) > lowest


@pytest.mark.parametrize("make", [Float8AdamW, Float8Muon])
def test_skipped_parts_are_warned_of_and_no_step_waits_for_the_device(make):
    parameter = nn.Parameter(torch.ones(64, 256, device=DEVICE))
    optimizer = make([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.grad.fill_(torch.nan)

    def step_and_save():
        # The step reads its copy of the counter, which the memory of a virtual GPU holds, too.
        with contextlib.nullcontext() if VIRTUAL else host_sync_refused():
            optimizer.step()
        optimizer.state_dict()

    with pytest.warns(RuntimeWarning, match="gradients or moments are not finite in"):
        step_and_save()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_silicon("what Inductor stores"))])
@pytest.mark.parametrize("recipe", [None, "rowwise", "blockwise"])
def test_activations_are_stored_in_few_bytes_and_gradients_are_near(recipe, compiled):
    def measure(net):
        """Return the bytes that are saved for backward, and the gradients."""
        net = net.to(DEVICE)
        if compiled:
            for layer in net.layers:
                layer.compile(fullgraph=True, backend=BACKEND)

        for _ in range(2):  # the first step allocates workspaces
            net.zero_grad()
            before = torch.cuda.memory_allocated()  # 0 on a virtual GPU, whose memory is the host's
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = net(draw(2, 64, 256).to(DEVICE).requires_grad_()).float().square().mean()
            saved = torch.cuda.memory_allocated() - before
            loss.backward()
        return saved, [parameter.grad for parameter in net.parameters() if parameter.grad is not None]

    exact_bytes, exact = measure(build_net(recipe, width=256))
    net = build_net(recipe, width=256)
    store_activations_in_float8(net)
    stored_bytes, stored = measure(net)
    assert min(sqnr_db(expected, actual) for expected, actual in zip(exact, stored, strict=True)) > LOWEST_DB
    assert stored_bytes <= SAVED[None] * exact_bytes


def make_linears(recipe, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 32, bias=False)).to(device)
    return convert_to_float8_training(model, config=recipe)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed_with_dynamic_weight"])
def test_primary_weights_train_as_those_on_a_cpu(recipe, compiled):
    losses = []
    for device in host_and_gpu():
        model = make_linears(recipe, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = use_float8_primary_weights(model, optimizer)
        call = torch.compile(model, fullgraph=True, backend=BACKEND) if compiled and losses else None
        batches = [draw(48, 64, seed=seed).to(device) for seed in range(4)]
        losses.append(train(model, optimizer, batches, call=call))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_frozen_weights_multiply_as_on_a_cpu(recipe):
    on_cpu = freeze_to_float8(nn.Sequential(nn.Linear(256, 128)).bfloat16(), config=recipe)
    on_gpu = copy.deepcopy(on_cpu).to(DEVICE)
    input = draw(2, 33, 256).bfloat16()
    results = []
    for model, device in zip((on_cpu, on_gpu), host_and_gpu(), strict=True):
        results.append([tensor.cpu() for tensor in compute_results(model, input.to(device))[:2]])
    assert min(sqnr_db(expected, actual) for expected, actual in zip(*results, strict=True)) > lowest_sqnr_db(7, 7, 7)


@pytest.mark.parametrize("recipe", DYNAMIC_RECIPES)
def test_a_sample_is_that_of_a_cpu(recipe):
    samples = []
    for device in host_and_gpu():
        model, lines = make_linears(recipe, device).bfloat16(), []
        with quaver.monitor(model, every=1, sink=lines.append):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), [draw(40, 64).to(device, torch.bfloat16)])
        samples.append(lines[1])
    for name in ("numel", "amax", "rms", "zeros", "saturated", "sqnr_db"):
        for expected, actual in zip(*(sample[name] for sample in samples), strict=True):
            assert actual == (None if expected is None else pytest.approx(expected, rel=0.05, abs=0.02)), name
