"""Steps of any model as most tests take them, and a comparison to the bit that says where it failed.

`results_of` has the output and the gradients of one step, `train` the losses of several, and `assert_same` compares
tensors in any nesting.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from quaver import sync_float8_amax_and_scale_history
from tests.reference import assert_same_bits


def results_of(
    module: nn.Module,
    *inputs: Tensor,
    grad_output: Tensor | float | None = None,
    call: Callable[..., Tensor] | None = None,
) -> list[Tensor]:
    """The output, then the gradients of the floating inputs and of the parameters, in order; those that there are.

    Args:
        grad_output: a number for one of that value everywhere; None for that of the sum of squares.
        call: what is called in place of `module`, compiled or around it.
    """
    given = [each.detach().requires_grad_() if each.is_floating_point() else each for each in inputs]
    module.zero_grad()
    output = (module if call is None else call)(*given)
    if grad_output is None:
        output.float().square().sum().backward()
    else:
        output.backward(
            grad_output.to(output.dtype) if isinstance(grad_output, Tensor) else torch.full_like(output, grad_output)
        )
    gradients = [each.grad for each in (*given, *module.parameters())]
    return [output.detach().clone(), *(each.clone() for each in gradients if each is not None)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Iterable[Tensor],
    *,
    microbatches: int = 1,
    scope: Callable[[nn.Module], Any] = lambda model: nullcontext(),
    call: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[nn.Module], object] = lambda model: None,
) -> list[float]:
    """The mean square of the output for each microbatch of each batch; persistent scales follow after each step.

    Args:
        optimizer: None to accumulate gradients.
        scope: a context of the model around the microbatches of a step.
        call: as of `results_of`.
        after: called with the model at the end of each step.
    """
    losses = []
    for batch in batches:
        with scope(model):
            for part in batch.chunk(microbatches):
                loss = (model if call is None else call)(part).float().square().mean()
                loss.backward()
                losses.append(loss.item())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        sync_float8_amax_and_scale_history(model)
        after(model)
    return losses


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_torch_save(saved: Any, *, weights_only: bool = False) -> Any:
    """What torch.load reads of what torch.save wrote."""
    torch.save(saved, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def full(value: Tensor) -> Tensor:
    """The tensor without its graph; all of it where a rank holds a part."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def assert_same(got: Any, expected: Any, where: str = "") -> None:
    """Equal keys, lengths, shapes, dtypes and bits in any nesting; of NaNs only that they are."""
    if isinstance(expected, Tensor):
        try:
            assert_same_bits(full(got), full(expected))
        except AssertionError as error:
            raise AssertionError(f"{where or 'the tensor'}: {error}") from None
    elif isinstance(expected, Mapping):
        assert got.keys() == expected.keys(), where
        for key in expected:
            assert_same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, Iterable) and not isinstance(expected, str):
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert got == expected, f"{where}: {got!r}, not {expected!r}"
