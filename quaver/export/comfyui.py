"""ComfyUI's single files of diffusion models and text encoders: which tensors mark a layer, and how MXFP8 lies in them.

    mark        `<layer>.comfy_quant`: the bytes of a JSON object, {"format": "float8_e4m3fn"}; or the same objects by
                layer in the metadata of the file, {"layers": {...}} under `_quantization_metadata`, which come first
    older mark  `scaled_fp8`, one for a file or a part of it; scales are `<layer>.scale_weight`
    no mark     a float8 tensor without a scale is its codes, as in files that were cast
    scale       `<layer>.weight_scale`, one number, or E8M0 per 1 x 32 in MXFP8, in the tiles of NVIDIA's tensor cores

The layer of a mark has float8 codes with a scale. MXFP8 pads rows and columns with zeros to multiples of 32.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.export.files import StoredTensors, check_names
from quaver.runtime.names import listed

PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
"""Prefixes of the names of a diffusion model in files that hold other models, too."""

COMFYUI = "comfyui"
"""The name of the format."""

MARK = "comfy_quant"
METADATA = "_quantization_metadata"
RECORD = "quaver_export"
"""The key, in the metadata of a file that quaver wrote, of its record of the export."""

_OLDER_MARK = "scaled_fp8"
_TOKENIZERS = ("spiece_model", "tekken_model", "tokenizer_json")
_CODES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn_rowwise": "F8_E4M3",
    "float8_e4m3fn_blockwise": "F8_E4M3",
    "mxfp8": "F8_E4M3",
}
"""The formats of marks, and the dtype of their codes. ComfyUI has no scales by row and block; convert_to_quant has."""

_REPLACED = {
    "Flux or AuraFlow": ("single_transformer_blocks.0.attn.to_q.",),
    "SD3": ("transformer_blocks.0.attn.add_q_proj.", "pos_embed.proj."),
    "PixArt": ("transformer_blocks.0.", "adaln_single.emb.timestep_embedder.", "pos_embed.proj."),
    "Z-Image": ("noise_refiner.0.attention.to_q.",),
    "a UNet": ("down_blocks.0.", "mid_block.", "up_blocks.0.", "conv_in."),
}
"""The models of diffusers whose names ComfyUI replaces, and how some of their names begin."""

_PADDED = 32
_TILE = (128, 4)
"""The rows and columns of scales in a tile: those of 4 x 32 rows of a matrix follow each other, 32 at a time."""


@dataclass(frozen=True)
class LayerMark:
    """The mark of a layer in a file: how its weight is quantized."""

    format: str
    group_size: int | None = None
    shape: tuple[int, int] | None = None
    """Shape of the matrix before it was padded, where the mark has it: convert_to_quant writes it, ComfyUI does not."""

    @property
    def is_mx(self) -> bool:
        """Whether scales are E8M0 in tiles, and the codes padded."""
        return self.format == "mxfp8"

    @property
    def block_size(self) -> tuple[int, int] | None:
        """The rows and columns that share a scale; None where the shape of the scale says it."""
        if self.is_mx:
            return 1, _PADDED
        return None if self.group_size is None else (self.group_size, self.group_size)


class Marks(NamedTuple):
    """The marks of a checkpoint."""

    layers: dict[str, LayerMark]
    """By the names of weights."""
    tensors: list[str]
    """The tensors that are marks, or the tokenizer of a text encoder; none is one of a model."""


def marks_of(stored: StoredTensors) -> Marks:
    """Read the marks of a checkpoint; there are none in those of other libraries.

    Raises:
        ValueError: a mark is damaged, or its layer is missing or has codes of another dtype.
        NotImplementedError: a layer has a format that is no float8.
    """
    leaves = {name: name.rpartition(".")[2] for name in stored}
    objects = {
        name.removesuffix(f".{MARK}"): _json(name, bytes(stored[name].flatten().tolist()))
        for name, leaf in leaves.items()
        if leaf == MARK and stored.dtype(name) == "U8"
    }
    objects |= _of_metadata(stored)
    marked = {f"{layer}.weight": _mark(layer, each) for layer, each in objects.items()}
    unknown = [f"{name} ({each.format})" for name, each in marked.items() if each.format not in _CODES]
    if unknown:
        raise NotImplementedError(
            f"formats of ComfyUI that are no float8: {listed(unknown)}; known are {', '.join(_CODES)}"
        )
    for name, each in marked.items():
        got = stored.dtype(name) if name in stored else "no such tensor"
        if got != _CODES[each.format]:
            raise ValueError(f"{name} is marked as {each.format}: expected {_CODES[each.format]}, got {got}")
    return Marks(marked, [name for name, leaf in leaves.items() if leaf in (MARK, _OLDER_MARK, *_TOKENIZERS)])


def _json(name: str, text: bytes | str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be a JSON object, got a {type(found).__name__}")
    return found


def _of_metadata(stored: StoredTensors) -> Iterator[tuple[str, Any]]:
    """The objects by layer in the metadata, under the names in the file, which may have a prefix."""
    for text in (each[METADATA] for each in stored.metadata if METADATA in each):
        layers = _json(METADATA, text).get("layers")
        if not isinstance(layers, dict):
            raise ValueError(f"{METADATA} must have an object of layers, got a {type(layers).__name__}")
        check_names(layers, stored.path)
        for layer, each in layers.items():
            names = (f"{prefix}{layer}" for prefix in ("", *PREFIXES))
            yield next((name for name in names if f"{name}.weight" in stored), layer), each


def _mark(layer: str, found: Any) -> LayerMark:
    format = found.get("format") if isinstance(found, dict) else None
    if not isinstance(format, str) or not format.isprintable():
        raise ValueError(f"the mark of {layer} must name a format, got {str(found)[:80]!r}")
    parameters = found.get("params")
    size = found.get("group_size", parameters.get("group_size") if isinstance(parameters, dict) else None)
    if format == "float8_e4m3fn_blockwise":
        if type(size) is not int or size < 1:
            raise ValueError(f"the mark of {layer} must have a group_size, got {str(size)[:80]!r}")
        return LayerMark(format, size)
    shape = found.get("orig_shape")
    is_shape = isinstance(shape, list) and len(shape) == 2 and all(type(each) is int and each > 0 for each in shape)
    return LayerMark(format, shape=(shape[0], shape[1]) if is_shape else None)


def check_names_of_model(names: Collection[str]) -> None:
    """Refuse a model with diffusers' names that ComfyUI replaces when it loads a file, without those of the scales.

    Raises:
        NotImplementedError: it is one.
    """
    for model, parts in _REPLACED.items():
        if all(any(name.startswith(part) for name in names) for part in parts):
            raise NotImplementedError(
                f"{COMFYUI}: ComfyUI replaces the names of {model} in diffusers, and would read codes without their "
                "scales; give the tensors ComfyUI's names (iter_float8_weights has them), or export another format"
            )


def plain_tensors(float8: Collection[str], scaled: Collection[str], marks: Marks) -> list[str]:
    """The float8 tensors of a file whose values are their codes: those without a scale, in a file that has marks or
    no scale at all.
    """
    has_marks = bool(marks.layers) or any(name.endswith((MARK, _OLDER_MARK)) for name in marks.tensors)
    if scaled and not has_marks:
        return []
    return [name for name in float8 if name not in scaled and name not in marks.layers]


def padded_shape(shape: Collection[int]) -> list[int]:
    """The shape that MXFP8 stores a matrix with."""
    return [-(-length // _PADDED) * _PADDED for length in shape]


def padded(codes: Tensor) -> Tensor:
    """Float8 codes [N, K] with zeros up to the shape that MXFP8 stores."""
    rows, columns = (to - length for to, length in zip(padded_shape(codes.shape), codes.shape, strict=True))
    return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


def tiled(scales: Tensor) -> Tensor:
    """Scales [R, C], one byte each, in tiles: [R', C'], multiples of 128 and 4; what is padded is 0.

    Within a tile, the scale of row r and column c is at (r % 32) * 16 + r // 32 * 4 + c: "scaling factors layout" in
    NVIDIA's documentation of cuBLAS.
    """
    rows, columns = (-(-length // tile) for length, tile in zip(scales.shape, _TILE, strict=True))
    whole = F.pad(scales, (0, columns * 4 - scales.shape[1], 0, rows * 128 - scales.shape[0]))
    return whole.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4).reshape(whole.shape)


def untiled(name: str, scales: Tensor, shape: Collection[int]) -> Tensor:
    """The scales [N, K / 32] of the matrix `name` [N, K] from those in tiles; see `tiled`.

    Raises:
        ValueError: they are too few or too many.
    """
    rows, length = shape
    columns = -(-length // _PADDED)
    tiles = -(-rows // 128), -(-columns // 4)
    if scales.itemsize != 1 or scales.numel() != tiles[0] * tiles[1] * 512:
        raise ValueError(
            f"the scale of {name} {list(shape)} must be {[tiles[0] * 128, tiles[1] * 4]} bytes, got "
            f"{list(scales.shape)} in {scales.dtype}"
        )
    parts = scales.view(torch.uint8).reshape(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(tiles[0] * 128, tiles[1] * 4)[:rows, :columns]


def mark(format: str, *, is_hp: bool) -> Tensor:
    """The mark of a layer. `is_hp`: multiply dequantized weights with inputs in high precision."""
    made: Mapping[str, Any] = {"format": format, **({"full_precision_matrix_mult": True} if is_hp else {})}
    return torch.frombuffer(bytearray(json.dumps(made).encode()), dtype=torch.uint8)
