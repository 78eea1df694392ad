"""Tests that the private names of PyTorch exist, do what quaver relies on, and stand in quaver/torch_private alone."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as checkpointed

import quaver
from quaver import torch_private
from quaver.torch_private import (
    autograd,
    compiler,
    dispatch,
    distributed_checkpoint,
    dtensor,
    fake_ranks,
    fsdp,
    functional_collectives,
    hardware,
    memory,
    muon,
    policies,
    profiler,
    replacing,
    tracing,
    versions,
)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=fake_ranks.FakeStore())
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("retain_graph", [True, False])
def test_a_node_knows_itself_and_whether_its_graph_is_kept(retain_graph):
    answers = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    first = autograd.next_sequence_number()
    z = y * 3
    y.register_hook(lambda _: answers.append((autograd.current_node(), autograd.backward_keeps_graph())))
    y.register_hook(lambda _: answers.append(autograd.runs_in_backward()))
    assert not autograd.runs_in_backward()
    assert autograd.get_sequence_number(z.grad_fn) == first == autograd.next_sequence_number() - 1
    assert autograd.get_sequence_number(y.grad_fn) == first - 1
    assert autograd.current_node() is None
    z.sum().backward(retain_graph=retain_graph)
    assert answers == [(y.grad_fn, retain_graph), True]
    assert not autograd.runs_in_backward()


def test_leaves_are_created_after_every_node():
    """quaver.lab.recorder.modules tells AccumulateGrad by its number."""
    leaf = torch.ones(2, requires_grad=True)
    accumulate = (leaf * 1).grad_fn.next_functions[0][0]
    assert autograd.get_sequence_number(accumulate) == 2**64 - 1


def test_the_innermost_saved_tensors_hooks_are_on_top():
    assert autograd.top_saved_tensors_hooks(True) is None
    outer, inner = (lambda t: t, lambda t: t), (lambda t: t, lambda t: t)
    with saved_tensors_hooks(*outer), saved_tensors_hooks(*inner):
        assert autograd.top_saved_tensors_hooks(True) == inner


def test_the_frame_of_a_checkpoint_is_that_of_its_recomputation():
    frames = []

    def block(x):
        hooks = autograd.top_saved_tensors_hooks(True)
        assert autograd.is_checkpoint_hook(hooks)
        frames.append(autograd.find_checkpoint_frame(hooks))
        return x.sin()

    checkpointed(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    (frame, in_forward), (same, in_recomputation) = frames
    assert (frame is same, in_forward, in_recomputation) == (True, False, True)
    assert autograd.find_checkpoint_frame((lambda t: t, lambda t: t)) is None
    assert not autograd.is_checkpoint_hook((lambda t: t, lambda t: t))


def test_a_backward_says_which_gradients_it_wants():
    wanted = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b, c):
            return a * b

        @staticmethod
        def backward(ctx, grad):
            wanted.append(autograd.find_wanted_gradients(ctx, 3))
            return grad, grad, None

    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    inner = a * 1
    c = Product.apply(inner, b, None).sum()
    for inputs in ([a], [inner], [b], [a, b]):
        torch.autograd.grad(c, inputs, retain_graph=True)
    torch.autograd.backward(c, inputs=[b], retain_graph=True)
    c.backward()
    Product.apply(a.detach(), b, a).sum().backward()
    first, second, both = (True, False, False), (False, True, False), (True, True, False)
    assert wanted == [first, first, second, both, second, both, (False, True, True)]


def test_forward_mode_autodiff_has_a_level():
    assert autograd.get_forward_ad_level() == -1
    with forward_ad.dual_level():
        assert autograd.get_forward_ad_level() == 0


def test_a_group_is_found_by_its_name(mesh):
    group = mesh.get_group()
    assert functional_collectives.find_process_group(group.group_name) is group


def test_the_stacks_of_modes_are_counted_and_listed():
    assert dispatch.count_dispatch_modes() == dispatch.count_function_modes() == 0
    with Mode() as outer, Mode() as inner, FunctionMode():
        assert (dispatch.count_dispatch_modes(), dispatch.count_function_modes()) == (2, 1)
        assert dispatch.dispatch_mode_at(1) is inner
        assert dispatch.dispatch_modes() == [outer, inner]
        with dispatch.without_dispatch_modes():
            assert dispatch.count_dispatch_modes() == 0
        assert dispatch.count_dispatch_modes() == 2


def test_fake_modes_and_the_calls_of_fake_tensors_are_recognized():
    assert not dispatch.is_fake_mode_on()
    with tracing.FakeTensorMode():
        assert dispatch.is_fake_mode_on()
        assert isinstance(torch.ones(2), tracing.FakeTensor)
    answers = []

    class Parameter(torch.nn.Parameter):
        def untyped_storage(self):
            answers.append(tracing.is_called_by_fake_tensors())
            return super().untyped_storage()

    parameter = Parameter(torch.ones(2))
    parameter.untyped_storage()
    tracing.FakeTensorMode().from_tensor(parameter)
    assert answers[:2] == [False, True]


def test_transforms_are_listed_innermost_last():
    innermost, names = [], []
    assert dispatch.innermost_transform() is None
    assert dispatch.list_transforms() == ()

    def f(x):
        innermost.append(dispatch.innermost_transform())
        names.append(dispatch.list_transforms())
        return x.sum()

    for transform in (torch.func.vmap, torch.func.grad):
        transform(f)(torch.ones(2))
    torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    torch.func.functionalize(f)(torch.ones(2))
    torch.func.jacrev(f)(torch.ones(2))
    assert None not in innermost
    assert names == [("Vmap",), ("Grad",), ("Jvp",), ("Functionalize",), ("Grad",)]


def test_dispatch_keys_tell_ordinary_tensors():
    def keys(tensor):
        return dispatch.dispatch_keys(tensor).raw_repr()

    ordinary = dispatch.DispatchKeySet(dispatch.DispatchKey.CPU)
    for key in ("AutocastCPU", "ADInplaceOrView", "AutogradCPU"):
        ordinary = ordinary | dispatch.DispatchKeySet(getattr(dispatch.DispatchKey, key))
    x = torch.ones(2, 2)
    assert keys(x) == keys(nn.Parameter(x)) == keys(x.t()) == ordinary.raw_repr()
    for other in (x.to_sparse(), x.to("meta"), torch._neg_view(x), torch._efficientzerotensor(2)):
        assert keys(other) != ordinary.raw_repr()


def test_a_subclass_without_torch_function_reaches_its_dispatch_as_itself():
    class Plain(torch.Tensor):
        __torch_function__ = dispatch.skip_torch_function

    assert type(torch.ones(2).as_subclass(Plain) + 1) is torch.Tensor


def test_operators_have_their_classes():
    add = torch.ops.aten.add
    assert isinstance(add, dispatch.OpOverloadPacket)
    assert isinstance(add.Tensor, dispatch.OpOverload)
    assert dispatch.decompose(torch.ops.aten.reshape.default, (torch.ones(2, 2), [4]), {}).shape == (4,)
    assert isinstance(torch.ops.higher_order.cond, dispatch.HigherOrderOperator)


def test_a_constant_is_computed_while_dynamo_traces():
    calls = []

    @tracing.assume_constant_result
    def constant():
        calls.append(torch.compiler.is_dynamo_compiling())
        return 3

    compiled = torch.compile(lambda x: x * constant(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(())).item() for _ in range(2)] == [3, 3]
    assert len(calls) == 1


def test_disabled_code_is_not_compiled():
    answers = []

    @tracing.disable_compile
    def disabled(x):
        answers.append(torch.compiler.is_compiling())
        return x + 1

    assert torch.compile(lambda x: disabled(x * 2) * 2, backend="eager")(torch.ones(())).item() == 6
    assert answers == [False]


def test_the_jit_tracer_is_noticed():
    answers = []

    def f(x):
        answers.append(tracing.is_jit_tracing())
        return x + 1

    f(torch.ones(2))
    torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert answers == [False, True]


@pytest.mark.parametrize("strict", [False, True])
def test_exports_and_not_compilations_are_exports(strict):
    class Module(torch.nn.Module):
        def forward(self, x):
            return x + 1 if tracing.is_exporting() else x - 1

    module, x = Module(), torch.zeros(1)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert [module(x).item(), compiled(x).item()] == [-1, -1]
    assert torch.export.export(module, (x,), strict=strict).module()(x).item() == 1
    assert compiled(x).item() == -1


def test_the_compiler_has_a_tracing_context():
    contexts = []

    def backend(graph, inputs):
        contexts.append(tracing.current_tracing_context())
        return graph

    assert tracing.current_tracing_context() is None
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    (context,) = contexts
    assert context is not None


def test_settings_of_the_compiler_change_and_are_restored():
    linear = nn.Linear(2, 2)
    assert isinstance(torch.compile(linear, backend="eager"), compiler.OptimizedModule)
    with compiler.functorch_config.patch(activation_memory_budget=1.0):
        compiler.set_activation_memory_budget(0.5)
        assert compiler.functorch_config.activation_memory_budget == 0.5
    before = compiler.dynamo_config.recompile_limit
    with compiler.recompile_limit(before + 1):
        assert compiler.dynamo_config.recompile_limit == before + 1
    assert compiler.dynamo_config.recompile_limit == before


def test_in_place_operations_increment_version_counters():
    x = torch.ones(2)
    before = versions.get_version(x)
    x.add_(1)
    assert versions.get_version(x) == versions.get_version(x.detach()) == before + 1
    with versions.keep_versions(x):
        x.add_(1)
    assert versions.get_version(x) == before + 1
    with torch.inference_mode():
        inference = torch.ones(2)
    with pytest.raises(RuntimeError, match="version counter"):
        versions.get_version(inference)


def test_the_local_tensor_of_a_dtensor_is_the_object_itself(mesh):
    local = torch.ones(2)
    assert dtensor.get_local_tensor(local) is local
    distributed = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()]))
    part = dtensor.get_local_tensor(distributed)
    assert part.data_ptr() == local.data_ptr()
    assert dtensor.get_local_tensor(distributed) is part
    other = torch.zeros(2)
    dtensor.set_local_tensor(distributed, other)
    assert dtensor.get_local_tensor(distributed) is other
    assert dtensor.compute_local_shape_and_offset(distributed) == ((2,), (0,))


def test_fsdp2_allocates_in_its_collectives(mesh):
    """The recorder finds buffers of collectives by the name of the Python module that allocates them."""
    allocating = set()

    class Frames(Mode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            frame = sys._getframe(1)
            while frame is not None:
                allocating.add((str(func), frame.f_globals.get("__name__")))
                frame = frame.f_back
            return func(*args, **(kwargs or {}))

    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    with Frames():
        model(torch.ones(2, 4)).sum().backward()
    assert {"aten.empty.memory_format"} <= {name for name, module in allocating if module == fsdp.COLLECTIVES_MODULE}


def test_fsdp2_gathers_in_param_dtype(mesh):
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert fsdp.get_param_dtype(model) is torch.bfloat16
    assert fsdp.get_param_dtype(fully_shard(nn.Linear(4, 4), mesh=mesh)) is None


def test_policies_of_selective_checkpoints_see_nothing_inside_the_block_that_other_modes_see():
    counts = {"policy": 0, "mode": 0}

    class Counting(Mode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts["mode"] += func is torch.ops.aten.cos.default
            return func(*args, **(kwargs or {}))

    def decide(ctx, func, *args, **kwargs):
        # torch 2.11 asks the policy in the recomputation as well
        counts["policy"] += func is torch.ops.aten.cos.default and not ctx.is_recompute
        return CheckpointPolicy.PREFER_SAVE

    x, modes = torch.ones(2), create_selective_checkpoint_contexts(decide)
    for policy in modes:
        with Counting(), policy, Counting():
            with policies.without_policies():
                assert not any(mode in modes for mode in dispatch.dispatch_modes())
                x.cos()
            active = dispatch.dispatch_modes()
            assert (len(active), active[1]) == (3, policy)
            x.cos()
    assert counts == {"policy": 1, "mode": 7}  # a result that the policy saved is not computed again


def test_functional_collectives_have_the_shapes_of_their_results(mesh):
    group = mesh.get_group()
    x = torch.ones(4)
    for result, length in (
        (functional_collectives.all_reduce(x, "sum", group), 4),
        (functional_collectives.all_gather_single(x, 0, group), 8),
        (functional_collectives.reduce_scatter_single(x, "sum", 0, group), 2),
    ):
        assert isinstance(result, functional_collectives.AsyncCollectiveTensor)
        waited = functional_collectives.wait_tensor(result)
        assert type(waited) is torch.Tensor
        assert waited.shape == (length,)


def test_metadata_of_a_checkpoint_says_where_its_tensors_are(tmp_path):
    torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (place,) = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    assert place == distributed_checkpoint.StorageInfo(place.relative_path, place.offset, place.length)


def test_the_profiler_records_ranges_and_events():
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
    with recorded as profiled, profiler.named_range("here"):
        torch.ones(1000).add_(1)
    assert "here" in {event.name for event in profiled.events()}
    assert {event.device_type for event in profiled.events()} == {profiler.DeviceType.CPU}
    assert profiler.DeviceType.CUDA != profiler.DeviceType.CPU
    nodes, allocated = list(profiled.profiler.kineto_results.experimental_event_tree()), []
    while nodes:
        node = nodes.pop()
        nodes += node.children
        allocated += [node.typed[1].alloc_size] if node.typed[0] == profiler.EventType.Allocation else []
    assert 4000 in allocated


def test_views_have_the_storage_key_of_their_base():
    x, y = torch.ones(4), torch.ones(4)
    assert memory.storage_key(x.untyped_storage()) == memory.storage_key(x[2:].untyped_storage())
    assert memory.storage_key(x.untyped_storage()) != memory.storage_key(y.untyped_storage())


def test_properties_of_the_cpu_are_booleans():
    answers = hardware.has_amx_tiles(), hardware.has_avx512_bfloat16(), hardware.onednn_has_bfloat16()
    assert {type(answer) for answer in answers} == {bool}


def test_the_scaled_matmul_takes_these_arguments():
    a = torch.ones(16, 32).to(torch.float8_e4m3fn)
    b = torch.ones(16, 32).to(torch.float8_e4m3fn).t()
    scale = torch.tensor(0.5)
    options = {"bias": None, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    assert hardware.scaled_mm(a, b, scale_a=scale, scale_b=scale, **options).unique().item() == 8


def test_muon_computes_as_torch_optim_muon():
    weight = nn.Parameter(torch.zeros(8, 4))
    weight.grad = torch.randn(8, 4)
    torch.optim.Muon([weight], lr=0.5, momentum=0.0).step()
    whole = muon.zeropower_via_newtonschulz(weight.grad, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(weight, -muon.adjust_lr(0.5, None, weight.shape) * whole.float())


def test_an_attribute_is_replaced_inside_a_block():
    class Base:
        name = "base"

    class Owner(Base):
        pass

    with replacing.replace_attribute(Owner, "name", "outer"), replacing.replace_attribute(Owner, "name", "inner"):
        assert Owner.name == "inner"
    assert "name" not in vars(Owner)
    with pytest.raises(AttributeError, match="expected Owner.size to replace, got none"):
        replacing.replace_attribute(Owner, "size", 1).__enter__()
    with pytest.raises(RuntimeError, match="not restored"), replacing.replace_attribute(Base, "name", "outer"):
        Base.name = "other"
    assert Base.name == "base"


def test_attributes_of_objects_exist_and_are_documented():
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    holders = {
        "_schema": torch.ops.aten.mm.default,
        "_make_wrapper_subclass": torch.Tensor,
        "_is_param": nn.Parameter(tracing.FakeTensorMode().from_tensor(torch.ones(2))),
        "_orig_mod": torch.compile(linear),
        "_compiled_call_impl": linear,
        "_forward_pre_hooks": linear,
        "_forward_hooks": linear,
        "_forward_hooks_always_called": linear,
        "_wrapped_by_lr_sched": optimizer.step,
        "_is_profiler_enabled": torch.autograd.profiler,
    }
    for name, holder in holders.items():
        assert hasattr(holder, name), name
        assert re.search(rf"\b{name}`", torch_private.__doc__), name


FILES = [module.name for module in pkgutil.iter_modules(torch_private.__path__)]


@pytest.mark.parametrize("file", FILES)
def test_each_name_stands_in_the_first_lines_of_its_file(file):
    module = importlib.import_module(f"quaver.torch_private.{file}")
    assert f"| `{file}` |" in torch_private.__doc__
    source = Path(module.__file__).read_text()
    defined = set(re.findall(r"^(?:def )?(\w+)(?: = |\()", source, re.M))
    assert defined
    for name in defined:
        assert f"`{name}" in module.__doc__, name


PRIVATE = re.compile(
    r"\btorch\.(?:[a-z]\w*\.)*_[A-Za-z]\w*|\b_guards\.\w+|\bforward_ad\._\w+|"
    r"\b\w+\._(?:local_tensor|cdata|overloadpacket|sequence_nr|version|get_fsdp_state|fsdp_param_groups?)\b"
)
DOCUMENTED = re.compile(
    r"\btorch\.(?:utils\._pytree|utils\._python_dispatch|_foreach_\w+|ops\.\w+\._\w+)|\bself\._version"
)
"""Operators and modules that are private in name only, and an attribute of quaver's own."""

ELSEWHERE = {
    "lab/bench/ledger": "replaces parts of Inductor, and reads its kernels",
}


def private_names(path):
    """Return the private names of PyTorch in the code of a file."""
    code = re.sub(r'""".*?"""|#[^\n]*|"[^"\n]*"', "", path.read_text(), flags=re.S)
    names = {match[0] for match in PRIVATE.finditer(code) if not DOCUMENTED.match(match[0])}
    imported = re.findall(r"^\s*from torch(?:\.[\w.]+)? import ([^(\n]+|\([^)]*\))", code, re.M)
    return names | {name for line in imported for name in re.findall(r"\b_[A-Za-z]\w+", line)}


def test_private_names_stand_nowhere_else():
    root = Path(quaver.__file__).parent
    names = {path.relative_to(root).as_posix(): private_names(path) for path in root.rglob("*.py")}
    allowed = ("torch_private/", *ELSEWHERE)
    assert {path: private for path, private in names.items() if private and not path.startswith(allowed)} == {}
