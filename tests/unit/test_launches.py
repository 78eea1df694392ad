"""What a linear launches on a GPU in eager mode, counted without one.

Triton's kernels in its interpreter, a matmul as one launch, and each operation of PyTorch's that is no view and no
allocation.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from quaver import Float8LinearConfig, linear_gemms
from quaver.casts import MatrixCasts
from quaver.convert import convert_to_float8_training
from quaver.delayed import sync_float8_amax_and_scale_history
from quaver.kernels import zero_pairs
from tests.triton_kernels import interpreting_process

MOST_LAUNCHES = 14
OF_BIAS = 2  # its gradient's partial sums are added up, and converted
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias")


class _Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and func._schema.name.removeprefix("aten::") not in FREE:
            self.counted[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def _launches(recipe, bias):
    """Launches of a warm step, by name."""
    from triton.runtime.interpreter import GridExecutor

    linear = torch.nn.Sequential(torch.nn.Linear(48, 32, bias=bias, dtype=torch.bfloat16))
    convert_to_float8_training(linear, config=Float8LinearConfig.from_recipe_name(recipe))
    input = torch.randn(64, 48, dtype=torch.bfloat16, requires_grad=True)
    grad_output = torch.randn(64, 32, dtype=torch.bfloat16)
    MatrixCasts.lays_out = lambda self, hp: True
    linear(input).backward(grad_output)
    sync_float8_amax_and_scale_history(linear)
    linear.zero_grad()
    input = input.detach().requires_grad_()  # another tensor, of which no scale is known

    launches = _Launches()
    run, multiply = GridExecutor.__call__, linear_gemms._matmul

    def counted_run(self, *args, **kwargs):
        launches.counted[self.fn.__name__] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, **kwargs)

    def counted_multiply(*args):
        launches.counted["matmul"] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return multiply(*args)

    GridExecutor.__call__, linear_gemms._matmul = counted_run, counted_multiply
    stack_length = torch._C._len_torch_dispatch_stack
    torch._C._len_torch_dispatch_stack = lambda: 0  # casts as they run while nobody counts operations
    try:
        with launches:
            linear(input).backward(grad_output)
    finally:
        GridExecutor.__call__, linear_gemms._matmul = run, multiply
        torch._C._len_torch_dispatch_stack = stack_length
        del MatrixCasts.lays_out
    return dict(launches.counted)


@pytest.fixture(scope="module")
def interpreter():
    with interpreting_process() as call:
        yield call


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
def test_launches_of_an_eager_step(interpreter, recipe, bias):
    launches = interpreter(_launches, recipe, bias)
    assert launches["matmul"] == 3
    assert sum(launches.values()) <= MOST_LAUNCHES + OF_BIAS * bias, launches
    assert not any("abs" in name or "clamp" in name or "transpose" in name for name in launches), launches


def test_pairs_of_zeros_are_apart():
    like = torch.empty(1)
    pairs = [zero_pairs.zero_pair(like) for _ in range(zero_pairs.PAIRS + 3)]
    assert all(pair.tolist() == [0, 0] for pair in pairs)
    assert len({pair.data_ptr() for pair in pairs}) == len(pairs)
    with torch.inference_mode():
        assert not zero_pairs.zero_pair(torch.empty(1, device="meta")).is_inference()
