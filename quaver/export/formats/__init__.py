"""The formats of float8 checkpoints, one file each. The table shows how a recipe is stored in each format:

    format                      recipe                          weights                 activations
    compressed-tensors          rowwise, rowwise_with_gw_hp     a scale per row         dynamic, per token
                                rowwise_with_tensorwise_weight  one scale               dynamic, per token
                                tensorwise                      one scale               dynamic, per tensor
                                delayed, static                 one scale               static, per tensor
    compressed-tensors-block    any                             a scale per 128 x 128   dynamic, per 128 of a token
    compressed-tensors-mxfp8    any                             E8M0, a scale per 32    dynamic, per 32 of a token
    fp8                         any                             a scale per 128 x 128   dynamic, per 128 of a token
    comfyui                     mxfp8, mxfp8_with_gw_hp         E8M0, a scale per 32    dynamic, per 32 of a token
                                delayed, static                 one scale               static, per tensor
                                any other                       one scale               in high precision

A float8 weight `<linear>.weight`, e4m3 [N, K], has a scale in float32: [N, 1] per row, [1] per tensor,
[ceil(N / 128), ceil(K / 128)] per block; or the bytes of E8M0, uint8 [N, K / 32]. value = code * scale. The scale is
called `<linear>.weight_scale`, in fp8 `<linear>.weight_scale_inv`. Static activations add `<linear>.input_scale`, [1].

A weight is quantized again if the format cannot hold its codes. The 32 x 32 blocks of `mxfp8` become 32 equal rows of
scales. With a blockwise config, compressed-tensors has the blocks of compressed-tensors-block or of
compressed-tensors-mxfp8. `FORMAT_READERS` reads folders of other writers by their `quant_method`; docs/export.md
lists who writes which layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from quaver.export.formats import compressed_tensors, fp8
from quaver.export.formats.base import WeightFormat
from quaver.export.formats.comfyui import COMFYUI, ComfyUI
from quaver.export.formats.stored import StoredFormat, make_block_format
from quaver.recipes.config import Float8LinearConfig
from quaver.runtime.errors import InputError

COMPRESSED_TENSORS = compressed_tensors.METHOD

CHECKPOINT_FORMATS: dict[str, type[WeightFormat]] = {
    COMPRESSED_TENSORS: compressed_tensors.CompressedTensors,
    compressed_tensors.BLOCK_FORMAT: compressed_tensors.CompressedTensorsBlocks,
    "compressed-tensors-mxfp8": compressed_tensors.CompressedTensorsMXFP8,
    fp8.METHOD: fp8.DeepSeekFP8,
    COMFYUI: ComfyUI,
}
"""The formats that `save_float8` writes, by name."""

CONTROL_FORMATS = {"high-precision": WeightFormat}
"""The control of `iter_float8_weights`: the same names in high precision."""

FORMAT_READERS: dict[str, Callable[[Mapping[str, Any]], StoredFormat]] = {
    COMPRESSED_TENSORS: compressed_tensors.make_stored_format,
    fp8.METHOD: partial(make_block_format, fp8.METHOD),
    "fbgemm_fp8": partial(make_block_format, "fbgemm_fp8", by_token=True),
    "modelopt": lambda config: make_block_format("modelopt", config, by_token=_scales_tokens(config.get("quant_algo"))),
    "mxfp8": partial(make_block_format, "mxfp8", by_token=True),
    "quark": partial(make_block_format, "quark"),
}
"""The functions that read a quantization_config, by `quant_method`. They raise ValueError or NotImplementedError."""


def _scales_tokens(algorithm: object) -> bool:
    return "TOKEN" in str(algorithm) or "_PB" in str(algorithm)


def find_format_class(format: str) -> type[WeightFormat]:
    """Return the format, or the control, with this name. Raises ValueError for an unknown name."""
    formats = {**CHECKPOINT_FORMATS, **CONTROL_FORMATS}
    if format not in formats:
        raise InputError(f"format: expected one of {', '.join(formats)}, got {format!r}")
    return formats[format]


def make_weight_format(format: str, config: Float8LinearConfig) -> WeightFormat:
    """Return how `format` stores linears with `config`.

    Raises:
        ValueError: the format is unknown.
        NotImplementedError: the codes are not e4m3, or the format does not hold the casts.
    """
    weight, input = config.casts.weight.row, config.casts.input.row
    for name, cast in (("weight", weight), ("input", input)):
        if not cast.is_disabled and cast.float8_dtype is not torch.float8_e4m3fn:
            raise NotImplementedError(f"{name}: checkpoints hold codes in e4m3, got {cast}; export with another recipe")
    weight.require_layout("export")
    return find_format_class(format).from_casts(weight, input)
