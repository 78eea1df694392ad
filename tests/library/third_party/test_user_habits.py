"""Tests that what users' models do with an nn.Linear works with a Float8Linear."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from quaver import convert_to_float8_training, sync_float8_amax_and_scale_history
from quaver.kernels import cpu
from tests.isolated import isolated
from tests.library.third_party.checkpointed import POLICIES, Block
from tests.recipes import TORCHAO_RECIPES
from tests.reference import sqnr_db
from tests.steps import assert_same, compute_results
from tests.thinned import at_night, first, thinned

COMMON_RECIPES = (*TORCHAO_RECIPES, "delayed")
RECIPE = pytest.mark.parametrize("recipe", COMMON_RECIPES)
CASTS = ("c", "pytorch")
K, N = 32, 16


@pytest.fixture(params=CASTS)
def casts(request, monkeypatch):
    """Run a test with the casts of the C extension, and with PyTorch's, whose operations a dispatch mode sees."""
    if request.param == "pytorch":
        monkeypatch.setattr(cpu, "HAS_EXTENSION", False)
    return request.param


def make_linear(recipe, k=K, n=N, *, bias=True, dtype=torch.float32):
    """Return a converted linear, with delayed scales after a step and a sync."""
    linear = convert_to_float8_training(nn.Linear(k, n, bias=bias, dtype=dtype), config=recipe)
    if recipe == "delayed":
        linear(torch.randn(64, k, dtype=dtype).mul(2).requires_grad_()).mul(2).sum().backward()
        sync_float8_amax_and_scale_history(linear)
        linear.zero_grad()
    return linear


def set_items(output):
    output[0] = 0
    output[..., 3:7] *= 2
    return output


IN_PLACE = {
    "relu": nn.ReLU(inplace=True),
    "dropout": nn.Dropout(0.5, inplace=True),
    "add": lambda output: output.__iadd__(torch.ones(N)),
    "mul": lambda output: output.mul_(2),
    "setitem": set_items,
    "masked_fill": lambda output: output.masked_fill_(torch.arange(N) % 3 == 0, 0.5),
}


@pytest.mark.parametrize(
    ("recipe", "shape", "name"),
    thinned(COMMON_RECIPES, [(K,), (6, K), (2, 3, K), (2, 3, 2, K), (2, 2048, K)], IN_PLACE),
)
def test_an_output_may_be_written_in_place(recipe, shape, name):
    linear, input, operation = make_linear(recipe), torch.randn(shape), IN_PLACE[name]

    def function(input, clone=False):
        torch.manual_seed(1)  # for dropout
        return operation(linear(input).clone() if clone else linear(input))

    expected = compute_results(linear, input, call=lambda x: function(x, clone=True))
    assert_same(compute_results(linear, input, call=function), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert function(input).equal(expected[0])


COMPILED = [("delayed", (2, 3, K)), ("tensorwise", (6, K)), ("rowwise", (2, 3, K)), ("rowwise_with_gw_hp", (6, K))]


@pytest.mark.parametrize(("recipe", "shape"), first(1, COMPILED))
def test_compiled_code_may_write_in_place(recipe, shape):
    """Operations write to the output, and to the input after it was read.

    Not on the input with "rowwise_with_gw_hp": Dynamo does not see that what an autograd.Function saved is written to;
    docs/limitations.md.
    """
    linear, input = make_linear(recipe), torch.randn(shape)

    def function(input, clone=False):
        hidden = input * 1
        output = linear(hidden).clone() if clone else linear(hidden)
        if not clone and recipe != "rowwise_with_gw_hp":
            hidden.mul_(2)
        for name in ("add", "mul", "setitem", "masked_fill", "relu"):
            output = IN_PLACE[name](output)
        return output

    expected = compute_results(linear, input, call=lambda x: function(x, clone=True))
    assert_same(
        compute_results(linear, input, call=torch.compile(function, backend="aot_eager", fullgraph=True)), expected
    )


@RECIPE
def test_a_write_to_the_input_after_it_was_read_keeps_gradients_right(recipe):
    """A float8 copy is saved, so gradients are right; a recipe that saves the input itself may raise."""
    linear, input = make_linear(recipe), torch.randn(2, 3, K)

    def function(input):
        hidden = input * 1
        output = linear(hidden)
        hidden.mul_(2)
        return output

    expected = compute_results(linear, input, call=lambda x: linear(x * 1))
    try:
        results = compute_results(linear, input, call=function)
    except RuntimeError as error:
        if recipe != "rowwise_with_gw_hp" or "inplace" not in str(error):
            raise
    else:
        assert_same(results, expected)


def call_or_refuse(function, *args):
    """Call the function; a Python exception is as good as a result."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001
        print("refused:", type(error).__name__, error)


def check_fake_tensors(recipe):
    model, fresh = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2))
    input = torch.randn(512, 64)
    output = convert_to_float8_training(model, config=recipe)(input)
    for allows in (True, False):
        with FakeTensorMode(allow_non_fake_inputs=allows):
            call_or_refuse(lambda: model(input).sum().backward())
            with torch.no_grad():
                call_or_refuse(model, input)
            call_or_refuse(lambda: output.sum().backward())
            if allows:
                assert model(torch.randn(512, 64)).shape == (512, 64)
    output = model(input)
    assert type(output) is torch.Tensor
    convert_to_float8_training(fresh, config=recipe).load_state_dict(model.state_dict())
    assert output.equal(fresh(input.clone()))


@pytest.mark.parametrize("recipe", ["delayed", *at_night([("tensorwise",)])])
def test_fake_tensors_crash_no_process_and_leave_no_trace(recipe):
    """The mode may refuse with a Python exception, and real tensors give the same numbers afterwards."""
    isolated(check_fake_tensors, recipe)


@RECIPE
def test_meta_tensors_go_forward_and_backward(recipe):
    linear = make_linear(recipe).to("meta")
    output = linear(torch.empty(4, K, device="meta", requires_grad=True))
    assert output.shape == (4, N)
    output.sum().backward()
    assert linear.weight.grad.is_meta


CHECKPOINTS = [(policy, nesting) for policy in POLICIES for nesting in ("flat", "nested")] + [("nothing", "reentrant")]


def check_users_checkpoint(recipe, policy, nesting, alive):
    block = convert_to_float8_training(Block(policy, nesting), config=recipe)
    input, results = torch.randn(24, K) * torch.logspace(-3, 0, 24).view(-1, 1), {}
    for checkpoints in (False, True):
        model = copy.deepcopy(block)
        model.checkpoints, results[checkpoints] = checkpoints, []
        for factor in (1.0, 1.0, 3.0):
            model.alive = None if alive == "never" else []
            model.drops = alive == "in forward"
            results[checkpoints] += compute_results(model, input * factor)
            sync_float8_amax_and_scale_history(model)
    assert_same(results[True], results[False])


@pytest.mark.parametrize(
    ("recipe", "way", "alive", "casts"),
    thinned(COMMON_RECIPES, CHECKPOINTS, ("never", "in forward", "always"), CASTS, together=1),
    indirect=["casts"],
)
def test_a_users_checkpoint_changes_no_bit(recipe, way, alive, casts):
    """What a forward and its recomputation execute must not depend on which Python objects are alive."""
    policy, nesting = way
    if casts == "c" and policy == "everything":  # also allocations, which a recomputation must not take for others
        isolated(check_users_checkpoint, recipe, policy, nesting, alive)
    else:
        check_users_checkpoint(recipe, policy, nesting, alive)


WRAPS = (lambda x: x, lambda x: x[:3], lambda x: x.view(3, 2, K))


@pytest.mark.parametrize(
    ("recipe", "mode", "wrap"), thinned(COMMON_RECIPES, (torch.inference_mode, torch.no_grad), WRAPS)
)
def test_validation_between_training_steps_changes_no_gradient(recipe, mode, wrap):
    """Lightning validates in inference mode; a model may read a constant buffer in both."""
    linear, constant = make_linear(recipe), torch.randn(6, K)
    expected = compute_results(linear, call=lambda: linear(wrap(constant.clone())))
    for _ in range(2):
        linear.eval()
        with mode():
            validated = linear(wrap(constant))
            unused = linear(constant)
        linear.train()
        assert_same(compute_results(linear, call=lambda: linear(wrap(constant))), expected)
        assert validated.equal(expected[0])
    del unused


@RECIPE
def test_a_tensor_made_in_inference_mode_trains(recipe):
    linear = make_linear(recipe)
    with torch.inference_mode():
        constant = torch.randn(6, K)
        for _ in range(2):  # it has no version counter
            validated = linear(constant.mul_(2))
    normal = constant.clone()
    expected = compute_results(linear, call=lambda: linear(normal))
    assert validated.equal(expected[0])
    if recipe == "rowwise_with_gw_hp":  # it saves the input, as nn.Linear does
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            linear(constant)
        return
    assert_same(compute_results(linear, call=lambda: linear(constant)), expected)


DTYPES = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("recipe", "bias", "shape", "dtypes"),
    thinned(COMMON_RECIPES, (False, True), [(48, K), (2, 24, K)], [DTYPES, DTYPES[::-1]]),
)
def test_weight_and_input_may_have_two_dtypes(recipe, bias, shape, dtypes):
    """As in torchao: both are quantized in their dtype, results have the input's, gradients the parameters'."""
    weight_dtype, input_dtype = dtypes
    linear = make_linear(recipe, bias=bias, dtype=torch.bfloat16).to(weight_dtype)  # parameters that both dtypes hold
    same = copy.deepcopy(linear).to(input_dtype)
    input = torch.randn(shape, dtype=torch.bfloat16).to(input_dtype)
    results, expected = compute_results(linear, input), compute_results(same, input)
    assert results[0].dtype is results[1].dtype is input_dtype
    assert all(parameter.grad.dtype is weight_dtype for parameter in linear.parameters())
    assert_same(results[:2], expected[:2])
    for gradient, close in zip(results[2:], expected[2:], strict=True):
        torch.testing.assert_close(gradient.float(), close.float(), rtol=2**-7, atol=1e-30)
    with torch.no_grad():
        assert linear(input).equal(results[0])


@RECIPE
def test_a_float32_weight_is_quantized_from_float32(recipe):
    """Rounding it to bfloat16 first would move some codes."""
    linear, input = make_linear(recipe, 256, 256, bias=False), torch.randn(64, 256).bfloat16()
    exact = copy.deepcopy(linear)(input.float())
    assert sqnr_db(exact, linear(input)) > 45  # bfloat16 rounds the output; the quantized operands are the same


@pytest.mark.parametrize(("recipe", "weight_dtype", "input_dtype"), thinned(COMMON_RECIPES, DTYPES, DTYPES))
def test_two_dtypes_become_one_under_autocast(recipe, weight_dtype, input_dtype):
    linear = make_linear(recipe, dtype=torch.bfloat16).to(weight_dtype)
    input = torch.randn(48, K).bfloat16().to(input_dtype)
    same = copy.deepcopy(linear).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = compute_results(linear, input)
    expected = compute_results(same, input.bfloat16())
    assert [tensor.dtype for tensor in results] == [torch.bfloat16, input_dtype, weight_dtype, weight_dtype]
    assert_same([tensor.bfloat16() for tensor in results], expected)


def test_a_strict_export_takes_a_dynamic_batch():
    model = nn.Sequential(make_linear("rowwise", K, 48), nn.ReLU(), make_linear("rowwise", 48, N))
    shapes = ({0: torch.export.Dim("batch", min=2, max=1024)},)
    exported = torch.export.export(model, (torch.randn(4, 6, K),), dynamic_shapes=shapes, strict=True).module()
    for rows in (4, 7, 33):
        input = torch.randn(rows, 6, K)
        assert exported(input).equal(model(input))


@RECIPE
def test_every_call_of_autograd_gives_the_same_gradients(recipe):
    linear, unused = make_linear(recipe), torch.randn(3, requires_grad=True)
    input = torch.randn(2, 3, K, requires_grad=True)
    leaves = [input, linear.weight, linear.bias]

    def compute_gradients(**options):
        return torch.autograd.grad(linear(input).square().sum(), leaves, **options)

    expected = compute_gradients()
    *gradients, nothing = torch.autograd.grad(linear(input).square().sum(), [*leaves, unused], allow_unused=True)
    assert_same(gradients, expected)
    assert nothing is None
    loss = linear(input).square().sum()
    for _ in range(2):
        assert_same(torch.autograd.grad(loss, leaves, retain_graph=True), expected)
    assert_same(torch.autograd.grad(loss, leaves), expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        assert_same(compute_gradients(), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(compute_gradients(), expected)
    with torch.set_grad_enabled(False):
        assert not linear(input).requires_grad
        with torch.set_grad_enabled(True):
            assert_same(compute_gradients(), expected)
    for _ in range(2):
        linear(input).square().sum().backward()
    torch.testing.assert_close(linear.weight.grad, 2 * expected[1], rtol=0, atol=0)
    grads = compute_gradients(create_graph=True)
    assert_same(grads, expected)
    with pytest.raises(RuntimeError, match="convert_to_high_precision"):
        grads[0].square().sum().backward()


@RECIPE
def test_hooks_see_and_change_inputs_outputs_and_gradients(recipe):
    linear, input, shapes = make_linear(recipe), torch.randn(2, 3, K), []
    expected = compute_results(linear, input, call=lambda x: linear(x * 3) * 2)
    handles = [
        linear.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
        linear.register_forward_hook(lambda module, args, output: output.mul_(2)),
    ]
    assert_same(compute_results(linear, input), expected)
    record = lambda module, inputs, outputs: shapes.extend(grad.shape for grad in (*inputs, *outputs))  # noqa: E731
    handles.append(linear.register_full_backward_hook(record))
    assert_same(compute_results(linear, input), expected)
    assert shapes == [input.shape, (2, 3, N)]
    for handle in handles:
        handle.remove()
    linear.weight.register_hook(lambda grad: grad.mul_(2))
    doubled = compute_results(linear, input, call=lambda x: linear(x * 3) * 2)
    assert doubled[2].equal(2 * expected[2])


TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "trace": lambda f, x: torch.jit.trace(f, (x.cos(),), check_trace=False)(x),
    "make_fx": lambda f, x: make_fx(f)(x.cos())(x),
}


def check_transforms(recipe, gradients_on):
    linear, input = make_linear(recipe, 64, 64), torch.randn(8, 16, 64)
    plain = nn.Linear(64, 64)
    plain.load_state_dict(linear.state_dict())
    expected = linear(input).detach()
    for name, transform in TRANSFORMS.items():
        with torch.set_grad_enabled(gradients_on):
            try:
                result, refusal = transform(linear, input).detach(), ""
            except (RuntimeError, NotImplementedError, ValueError) as error:
                result, refusal = None, str(error)
            if result is None:
                assert any(word in refusal for word in ("setup_context", "Float8Linear", "float8", "quaver")), name
            else:
                assert sqnr_db(transform(plain, input).detach(), result) > 18, name
        assert linear(input).equal(expected), name


@pytest.mark.parametrize(
    ("recipe", "gradients_on"),
    [("delayed", True), ("rowwise_with_gw_hp", False), *at_night([("tensorwise", False), ("rowwise", True)])],
)
def test_transforms_are_right_or_refused(recipe, gradients_on):
    """The result is near nn.Linear's, or an error names float8; the module works as before afterwards."""
    isolated(check_transforms, recipe, gradients_on)


@RECIPE
def test_the_flop_counter_counts_what_it_counts_in_high_precision(recipe):
    for linear in (nn.Linear(32, 48), make_linear(recipe, 32, 48)):
        with FlopCounterMode(display=False) as counter:
            linear(torch.randn(16, 32, requires_grad=True)).sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 16 * 32 * 48
