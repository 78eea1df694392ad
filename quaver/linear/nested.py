"""Nested tensors as inputs of linears: sequences of several lengths, jagged or strided.

In eval mode nn.TransformerEncoder makes strided ones from a batch and its padding mask. A float8 linear runs once on
the rows of all sequences, so they share kernels and a tensorwise scale as a batch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.torch_private.nested import ragged_dim


def apply_to_nested(linear: Callable[[Tensor], Tensor], input: Any) -> Tensor:
    """Apply `linear` to the last dim of the nested tensor `input`. Returns a nested tensor of the same layout.

    Raises:
        ValueError: the last dim, which linears contract, has several lengths; or there is no sequence.
        NotImplementedError: a jagged tensor with holes between its sequences.
    """
    if input.layout is torch.jagged:
        dim = ragged_dim(input)
        if dim == input.dim() - 1:
            raise ValueError(f"expected a nested input of one length along its last dim, got {tuple(input.shape)}")
        if input.lengths() is not None:
            raise NotImplementedError(
                "expected a nested input without holes between its sequences, got lengths; call contiguous() first"
            )
        return torch.nested.nested_tensor_from_jagged(linear(input.values()), input.offsets(), jagged_dim=dim)
    parts = input.unbind()
    if not parts:
        raise ValueError("expected a nested input of one or more sequences, got none")
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    outputs = linear(torch.cat(rows)).split([len(part_rows) for part_rows in rows])
    results = [output.view(*part.shape[:-1], output.shape[-1]) for output, part in zip(outputs, parts, strict=True)]
    return torch.nested.as_nested_tensor(results)
