"""Takes training steps of any model, and compares bits with an error that names the place of a difference.

`compute_results` returns the output and the gradients of one step, `train` the losses of several steps. `assert_same`
compares tensors in any nesting.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from quaver import sync_float8_amax_and_scale_history
from tests.reference import assert_same_bits


def compute_results(
    module: nn.Module,
    *inputs: Tensor,
    grad_output: Tensor | float | None = None,
    call: Callable[..., Tensor] | None = None,
) -> list[Tensor]:
    """Run a step, and return the output and the gradients of floating-point inputs and of parameters, in order.

    Leaves out gradients that are None.

    Args:
        grad_output: the gradient of the output, or a number that fills it; None for that of the sum of squares.
        call: a function to call in place of `module`, such as a compiled one or a wrapper.
    """
    leaves = [tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor for tensor in inputs]
    module.zero_grad()
    output = (module if call is None else call)(*leaves)
    if grad_output is None:
        output.float().square().sum().backward()
    else:
        output.backward(
            grad_output.to(output.dtype) if isinstance(grad_output, Tensor) else torch.full_like(output, grad_output)
        )
    gradients = [tensor.grad for tensor in (*leaves, *module.parameters())]
    return [output.detach().clone(), *(gradient.clone() for gradient in gradients if gradient is not None)]


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
    """Train on `batches`, and return the loss of each microbatch: the mean square of the output.

    Syncs persistent scales after each step.

    Args:
        optimizer: None to accumulate gradients.
        scope: returns a context manager of the model, entered around the microbatches of a step.
        call: as for `compute_results`.
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
    """Return normal numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_torch_save(saved: Any, *, weights_only: bool = False) -> Any:
    """Return what torch.load reads after torch.save has written `saved`."""
    torch.save(saved, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def to_plain(value: Tensor) -> Tensor:
    """Return the tensor without its graph; a DTensor is gathered."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Assert equal keys, lengths, shapes, dtypes and bits in any nesting. All NaNs are equal."""
    if isinstance(expected, Tensor):
        try:
            assert_same_bits(to_plain(actual), to_plain(expected))
        except AssertionError as error:
            raise AssertionError(f"{where or 'the tensor'}: {error}") from None
    elif isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, Iterable) and not isinstance(expected, str):
        for index, (actual_item, expected_item) in enumerate(zip(actual, expected, strict=True)):
            assert_same(actual_item, expected_item, f"{where}[{index}]")
    else:
        assert actual == expected, f"{where}: {actual!r}, not {expected!r}"
