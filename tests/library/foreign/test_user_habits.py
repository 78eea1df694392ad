"""What other people's models do with an nn.Linear, done with a Float8Linear: nothing may raise, crash or go stale."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from quaver import Float8LinearConfig, convert_to_float8_training, sync_float8_amax_and_scale_history
from quaver.kernels import cpu
from tests.isolated import isolated
from tests.reference import sqnr_db
from tests.steps import assert_same, results_of
from tests.thinned import at_night, thinned

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
RECIPE = pytest.mark.parametrize("recipe", RECIPES)
CASTS = ("c", "pytorch")
K, N = 32, 16


@pytest.fixture(params=CASTS)
def casts(request, monkeypatch):
    """A test with the casts of the C extension, and with those of PyTorch, which are operations that a mode sees."""
    if request.param == "pytorch":
        monkeypatch.setattr(cpu, "AVAILABLE", False)
    return request.param


def convert(module, recipe):
    return convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))


def make(recipe, k=K, n=N, *, bias=True, dtype=torch.float32):
    """A converted linear; delayed scales are in use, because it has been through a step and a sync."""
    linear = convert(nn.Linear(k, n, bias=bias, dtype=dtype), recipe)
    if recipe == "delayed":
        linear(torch.randn(64, k, dtype=dtype).mul(2).requires_grad_()).mul(2).sum().backward()
        sync_float8_amax_and_scale_history(linear)
        linear.zero_grad()
    return linear


def _add(output):
    output += torch.ones(N)
    return output


def _set_items(output):
    output[0] = 0
    output[..., 3:7] *= 2
    return output


IN_PLACE = {
    "relu": nn.ReLU(inplace=True),
    "dropout": nn.Dropout(0.5, inplace=True),
    "add": _add,
    "mul": lambda output: output.mul_(2),
    "setitem": _set_items,
    "masked_fill": lambda output: output.masked_fill_(torch.arange(N) % 3 == 0, 0.5),
}


@pytest.mark.parametrize(
    ("recipe", "shape", "name"), thinned(RECIPES, [(K,), (6, K), (2, 3, K), (2, 3, 2, K), (2, 2048, K)], IN_PLACE)
)
def test_in_place_on_the_output(recipe, shape, name):
    linear, input, operation = make(recipe), torch.randn(shape), IN_PLACE[name]

    def function(input, clone=False):
        torch.manual_seed(1)  # for dropout
        return operation(linear(input).clone() if clone else linear(input))

    expected = results_of(linear, input, call=lambda x: function(x, clone=True))
    assert_same(results_of(linear, input, call=function), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert function(input).equal(expected[0])


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        ("delayed", (2, 3, K)),
        *at_night([("tensorwise", (6, K)), ("rowwise", (2, 3, K)), ("rowwise_with_gw_hp", (6, K))]),
    ],
)
def test_in_place_in_compiled_code(recipe, shape):
    """On the output, and on the input after it was read.

    Not on the input with "rowwise_with_gw_hp": Dynamo does not see that what an autograd.Function saved is written to;
    docs/limitations.md.
    """
    linear, input = make(recipe), torch.randn(shape)

    def function(input, clone=False):
        hidden = input * 1
        output = linear(hidden).clone() if clone else linear(hidden)
        if not clone and recipe != "rowwise_with_gw_hp":
            hidden.mul_(2)
        for name in ("add", "mul", "setitem", "masked_fill", "relu"):
            output = IN_PLACE[name](output)
        return output

    expected = results_of(linear, input, call=lambda x: function(x, clone=True))
    assert_same(results_of(linear, input, call=torch.compile(function, backend="aot_eager", fullgraph=True)), expected)


@RECIPE
@pytest.mark.parametrize("rows", [0, 6, 4096])
def test_the_output_is_no_view(recipe, rows):
    """As that of nn.Linear, whose result of more than two dims is a view, too, but one that may be written to."""
    linear = make(recipe)
    for shape in ((rows, K), (2, rows, K)):
        output = linear(torch.randn(shape, requires_grad=True))
        assert output._base is None
        assert output.is_contiguous()


@RECIPE
def test_in_place_on_the_input_after_it_was_read(recipe):
    """What is saved is a copy in float8, so gradients are right; where the input itself is, it may be an error."""
    linear, input = make(recipe), torch.randn(2, 3, K)

    def function(input):
        hidden = input * 1
        output = linear(hidden)
        hidden.mul_(2)
        return output

    expected = results_of(linear, input, call=lambda x: linear(x * 1))
    try:
        got = results_of(linear, input, call=function)
    except RuntimeError as error:
        if recipe != "rowwise_with_gw_hp" or "inplace" not in str(error):
            raise
    else:
        assert_same(got, expected)


def may_refuse(function, *args):
    """Call it; a Python exception is as good as a result."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001
        print("refused:", type(error).__name__, error)


def _step_and_validate(model, input):
    may_refuse(lambda: model(input).sum().backward())
    with torch.no_grad():
        may_refuse(model, input)


def _fake_tensors(model, input):
    output = model(input)
    for allows in (True, False):
        with FakeTensorMode(allow_non_fake_inputs=allows):
            _step_and_validate(model, input)
            may_refuse(lambda: output.sum().backward())
            if allows:
                assert model(torch.randn(512, 64)).shape == (512, 64)


def check_fake_tensors(recipe):
    model, fresh = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2))
    input = torch.randn(512, 64)
    _fake_tensors(convert(model, recipe), input)
    output = model(input)
    assert type(output) is torch.Tensor
    convert(fresh, recipe).load_state_dict(model.state_dict())
    assert output.equal(fresh(input.clone()))


@pytest.mark.parametrize("recipe", ["delayed", *at_night([("tensorwise",)])])
def test_fake_tensors_crash_no_process_and_leave_no_trace(recipe):
    """The mode may refuse with a Python exception, and real tensors give the same numbers afterwards."""
    isolated(check_fake_tensors, recipe)


@RECIPE
def test_meta_tensors(recipe):
    linear = make(recipe).to("meta")
    output = linear(torch.empty(4, K, device="meta", requires_grad=True))
    assert output.shape == (4, N)
    output.sum().backward()
    assert linear.weight.grad.is_meta


def _operations_of_quaver():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "quaver::" in name}
    return [getattr(torch.ops.quaver, name).default for name in sorted(names)]


def _policy(decision):
    return lambda ctx, operation, *args, **kwargs: decision


POLICIES = {
    "casts, amaxes and matmuls": lambda: [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.amax.default,
        *_operations_of_quaver(),
    ],
    "amaxes": lambda: [torch.ops.aten.amax.default, torch.ops.aten.abs.default],
    "everything": lambda: _policy(CheckpointPolicy.MUST_SAVE),
    "nothing": lambda: _policy(CheckpointPolicy.PREFER_RECOMPUTE),
}


class Block(nn.Module):
    """q, k and v that share their input, which a linear before the block has read too."""

    def __init__(self, policy, nesting):
        super().__init__()
        self.before, self.q, self.k, self.v, self.o = (nn.Linear(K, K, bias=False) for _ in range(5))
        self.policy, self.nesting, self.checkpoints = policy, nesting, True
        self.alive, self.drops = None, False

    def attend(self, x):
        made = self.q(x), self.k(x), self.v(x)
        if self.alive is not None:
            self.alive += [x, *made]
        return made[0] * made[1].tanh() + made[2]

    def project(self, x):
        return self.o(self.checkpointed(self.attend, x)) if self.nesting == "nested" else self.o(self.attend(x))

    def checkpointed(self, function, x):
        if not self.checkpoints:
            return function(x)
        if self.nesting == "reentrant":
            return checkpoint(function, x, use_reentrant=True)
        context_fn = POLICIES[self.policy]
        return checkpoint(
            function, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(context_fn())
        )

    def forward(self, input):
        x = input * 1
        before = self.before(x)
        if self.alive is not None:
            self.alive += [x, before]
            output = self.checkpointed(self.project, x) + before
            if self.drops:
                output.register_hook(lambda grad: self.alive.clear())
            return output
        with torch.no_grad():
            total = before.sum()
        del before
        return self.checkpointed(self.project, x) + total


CHECKPOINTS = [(policy, nesting) for policy in POLICIES for nesting in ("flat", "nested")] + [("nothing", "reentrant")]


def check_users_checkpoint(recipe, policy, nesting, alive):
    block, input = convert(Block(policy, nesting), recipe), torch.randn(24, K) * torch.logspace(-3, 0, 24).view(-1, 1)
    steps = {}
    for checkpoints in (False, True):
        model = copy.deepcopy(block)
        model.checkpoints, steps[checkpoints] = checkpoints, []
        for factor in (1.0, 1.0, 3.0):
            model.alive = None if alive == "never" else []
            model.drops = alive == "in forward"
            steps[checkpoints] += [g for g in results_of(model, input * factor) if g is not None]
            sync_float8_amax_and_scale_history(model)
    assert_same(steps[True], steps[False])


@pytest.mark.parametrize(
    ("recipe", "way", "alive", "casts"),
    thinned(RECIPES, CHECKPOINTS, ("never", "in forward", "always"), CASTS, together=1),
    indirect=["casts"],
)
def test_a_users_checkpoint_changes_no_bit(recipe, way, alive, casts):
    """What a forward and its recomputation execute must not depend on which Python objects are alive."""
    policy, nesting = way
    if casts == "c" and policy == "everything":  # also allocations, which a recomputation must not take for others
        isolated(check_users_checkpoint, recipe, policy, nesting, alive)
    else:
        check_users_checkpoint(recipe, policy, nesting, alive)


@pytest.mark.parametrize(
    ("recipe", "mode", "wrap"),
    thinned(RECIPES, (torch.inference_mode, torch.no_grad), (lambda x: x, lambda x: x[:3], lambda x: x.view(3, 2, K))),
)
def test_validation_between_training_steps_on_one_tensor(recipe, mode, wrap):
    """Lightning validates in inference mode; a model may read a constant buffer in both."""
    linear, constant = make(recipe), torch.randn(6, K)
    expected = results_of(linear, call=lambda: linear(wrap(constant.clone())))
    for _ in range(2):
        linear.eval()
        with mode():
            validated = linear(wrap(constant))
            also = linear(constant)
        linear.train()
        assert_same(results_of(linear, call=lambda: linear(wrap(constant))), expected)
        assert validated.equal(expected[0])
    del also


@RECIPE
def test_training_on_a_tensor_made_in_inference_mode(recipe):
    linear = make(recipe)
    with torch.inference_mode():
        constant = torch.randn(6, K)
        for _ in range(2):  # it has no version counter
            validated = linear(constant.mul_(2))
    normal = constant.clone()
    expected = results_of(linear, call=lambda: linear(normal))
    assert validated.equal(expected[0])
    if recipe == "rowwise_with_gw_hp":  # it saves the input, as nn.Linear does
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            linear(constant)
        return
    assert_same(results_of(linear, call=lambda: linear(constant)), expected)


@pytest.mark.parametrize(
    ("recipe", "bias", "shape", "dtypes"),
    thinned(
        RECIPES,
        (False, True),
        [(48, K), (2, 24, K)],
        [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ),
)
def test_weight_and_input_of_two_dtypes(recipe, bias, shape, dtypes):
    """As in torchao: each is quantized as it is, results have the input's dtype, gradients the parameters'."""
    weight_dtype, input_dtype = dtypes
    linear = make(recipe, bias=bias, dtype=torch.bfloat16).to(weight_dtype)  # parameters that both dtypes hold
    same = copy.deepcopy(linear).to(input_dtype)
    input = torch.randn(shape, dtype=torch.bfloat16).to(input_dtype)
    got, expected = results_of(linear, input), results_of(same, input)
    assert got[0].dtype is got[1].dtype is input_dtype
    assert all(p.grad.dtype is weight_dtype for p in linear.parameters())
    assert_same(got[:2], expected[:2])
    for one, other in zip(got[2:], expected[2:], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=1e-30)
    with torch.no_grad():
        assert linear(input).equal(got[0])


@RECIPE
def test_a_float32_weight_is_quantized_from_float32(recipe):
    """Not from its bfloat16 rounding, which moves some codes."""
    linear, input = make(recipe, 256, 256, bias=False), torch.randn(64, 256).bfloat16()
    exact = copy.deepcopy(linear)(input.float())
    assert sqnr_db(exact, linear(input)) > 45  # bfloat16 rounds the output; the quantized operands are the same


@pytest.mark.parametrize(
    ("recipe", "weight_dtype", "input_dtype"),
    thinned(RECIPES, (torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16)),
)
def test_two_dtypes_under_autocast(recipe, weight_dtype, input_dtype):
    linear = make(recipe, dtype=torch.bfloat16).to(weight_dtype)
    input = torch.randn(48, K).bfloat16().to(input_dtype)
    same = copy.deepcopy(linear).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results_of(linear, input)
    expected = results_of(same, input.bfloat16())
    assert [t.dtype for t in got] == [torch.bfloat16, input_dtype, weight_dtype, weight_dtype]
    assert_same([t.bfloat16() for t in got], expected)


@pytest.mark.parametrize(
    ("recipe", "strict", "shape"),
    [
        ("rowwise", True, (4, 6, K)),
        ("delayed", False, (4, K)),
        *at_night([("tensorwise", True, (4, K)), ("rowwise_with_gw_hp", False, (4, 6, K))]),
    ],
)
def test_export_with_a_dynamic_batch_and_gradients_on(recipe, strict, shape):
    model = nn.Sequential(make(recipe, K, 48), nn.ReLU(), make(recipe, 48, N))
    batch = torch.export.Dim("batch", min=2, max=1024)
    exported = torch.export.export(model, (torch.randn(shape),), dynamic_shapes=({0: batch},), strict=strict).module()
    for rows in (4, 7, 33):
        input = torch.randn(rows, *shape[1:])
        assert exported(input).equal(model(input))


@RECIPE
def test_autograd_in_every_form(recipe):
    linear, input, unused = make(recipe), torch.randn(2, 3, K, requires_grad=True), torch.randn(3, requires_grad=True)
    leaves = [input, linear.weight, linear.bias]
    expected = torch.autograd.grad(linear(input).square().sum(), leaves)
    *got, nothing = torch.autograd.grad(linear(input).square().sum(), [*leaves, unused], allow_unused=True)
    assert_same(got, expected)
    assert nothing is None
    loss = linear(input).square().sum()
    for _ in range(2):
        assert_same(torch.autograd.grad(loss, leaves, retain_graph=True), expected)
    assert_same(torch.autograd.grad(loss, leaves), expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        assert_same(torch.autograd.grad(linear(input).square().sum(), leaves), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(torch.autograd.grad(linear(input).square().sum(), leaves), expected)
    with torch.set_grad_enabled(False):
        hidden = linear(input)
        assert not hidden.requires_grad
        with torch.set_grad_enabled(True):
            assert_same(torch.autograd.grad(linear(input).square().sum(), leaves), expected)
    for _ in range(2):
        linear(input).square().sum().backward()
    torch.testing.assert_close(linear.weight.grad, 2 * expected[1], rtol=0, atol=0)
    grads = torch.autograd.grad(linear(input).square().sum(), leaves, create_graph=True)
    assert_same(grads, expected)
    with pytest.raises(RuntimeError, match="convert_to_high_precision"):
        grads[0].square().sum().backward()


@RECIPE
def test_hooks(recipe):
    linear, input, seen = make(recipe), torch.randn(2, 3, K), []
    expected = results_of(linear, input, call=lambda x: linear(x * 3) * 2)
    handles = [
        linear.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
        linear.register_forward_hook(lambda module, args, output: output.mul_(2)),
    ]
    assert_same(results_of(linear, input), expected)
    handles.append(linear.register_full_backward_hook(lambda module, grads, outputs: seen.append((grads, outputs))))
    assert_same(results_of(linear, input), expected)
    assert [t.shape for each in seen[0] for t in each] == [input.shape, (2, 3, N)]
    for handle in handles:
        handle.remove()
    linear.weight.register_hook(lambda grad: grad.mul_(2))
    doubled = results_of(linear, input, call=lambda x: linear(x * 3) * 2)
    assert doubled[2].equal(2 * expected[2])


@RECIPE
def test_two_threads(recipe):
    linear, inputs = make(recipe), [torch.randn(256, K, requires_grad=True) for _ in range(2)]

    def grads(input):
        return torch.autograd.grad(linear(input).square().sum(), (input, linear.weight, linear.bias))

    expected = [grads(input) for input in inputs]
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(grads, inputs * 10))
    for index, each in enumerate(got):
        assert_same(each, expected[index % 2])


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
    linear, input = make(recipe, 64, 64), torch.randn(8, 16, 64)
    plain = nn.Linear(64, 64)
    plain.load_state_dict(linear.state_dict())
    expected = linear(input).detach()
    for name, transform in TRANSFORMS.items():
        refusal, got = "", None
        with torch.set_grad_enabled(gradients_on):
            try:
                got = transform(linear, input)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                refusal = str(error)
            if got is None:
                assert any(word in refusal for word in ("setup_context", "Float8Linear", "float8", "quaver")), name
            else:
                assert sqnr_db(transform(plain, input).detach(), got.detach()) > 18, name
        assert linear(input).equal(expected), name


@pytest.mark.parametrize(
    ("recipe", "gradients_on"),
    [("delayed", True), ("rowwise_with_gw_hp", False), *at_night([("tensorwise", False), ("rowwise", True)])],
)
def test_transforms_are_right_or_refused(recipe, gradients_on):
    """A result near nn.Linear's, or one clear error; the module works as before afterwards."""
    isolated(check_transforms, recipe, gradients_on)


@RECIPE
def test_the_flop_counter_counts_what_it_counts_in_high_precision(recipe):
    counted = []
    for model in (nn.Linear(32, 48), convert_to_float8_training(nn.Linear(32, 48), config=recipe)):
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(16, 32, requires_grad=True)).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] == 3 * 2 * 16 * 32 * 48
