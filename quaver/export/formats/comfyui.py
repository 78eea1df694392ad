"""comfyui: ComfyUI's single files of diffusion models and text encoders, with a mark for each quantized layer.

    mark        `<layer>.comfy_quant`: the bytes of a JSON object, {"format": "float8_e4m3fn"}; or the same objects by
                layer in the metadata of the file, {"layers": {...}} under `_quantization_metadata`, which come first.
    older mark  `scaled_fp8`, one for a file or a part of it; scales are `<layer>.scale_weight`.
    no mark     The values of a float8 tensor without a scale are its codes, as in files that were cast.
    scale       `<layer>.weight_scale`, one number, or E8M0 per 1 x 32 in MXFP8, in the tiles of NVIDIA's tensor cores.

A marked layer has float8 codes with a scale. MXFP8 pads rows and columns with zeros to multiples of 32. ComfyUI scales
activations dynamically only in MXFP8. In other formats it casts activations unscaled if there is no static scale; the
mark then asks for a matmul in high precision.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.export.checkpoint_names import DIFFUSION_PREFIXES
from quaver.export.files import SAFETENSORS, StoredTensors, check_names, parse_json_object
from quaver.export.formats.base import WeightFormat
from quaver.export.formats.compressed_tensors import has_mx_scales
from quaver.export.formats.stored import StoredFormat, StoredScale, is_block_size
from quaver.kernels.operands import Operand
from quaver.recipes.config import CastConfig
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import join_names

COMFYUI = "comfyui"
_MARK = "comfy_quant"
_METADATA_KEY = "_quantization_metadata"
_OLDER_MARK = "scaled_fp8"
_TOKENIZER_TENSORS = ("spiece_model", "tekken_model", "tokenizer_json")
_CODE_DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn_rowwise": "F8_E4M3",
    "float8_e4m3fn_blockwise": "F8_E4M3",
    "mxfp8": "F8_E4M3",
}
"""The dtype of the codes by the format of a mark. Only convert_to_quant writes scales per row and per block."""

_REPLACED_PREFIXES = {
    "Flux or AuraFlow": ("single_transformer_blocks.0.attn.to_q.",),
    "SD3": ("transformer_blocks.0.attn.add_q_proj.", "pos_embed.proj."),
    "PixArt": ("transformer_blocks.0.", "adaln_single.emb.timestep_embedder.", "pos_embed.proj."),
    "Z-Image": ("noise_refiner.0.attention.to_q.",),
    "a UNet": ("down_blocks.0.", "mid_block.", "up_blocks.0.", "conv_in."),
}
"""Prefixes of tensor names that identify a model of diffusers. ComfyUI renames the tensors of these models."""

_PADDED_MULTIPLE = 32
_TILE_SHAPE = (128, 4)
"""The rows and columns of scales in a tile; see `_to_tiles`."""


class ComfyUI(WeightFormat):
    """The format for writing."""

    is_file = True

    @classmethod
    def from_casts(cls, weight: CastConfig, input: CastConfig) -> Self:
        if has_mx_scales(weight):
            return cls("group", "group")
        return cls("tensor", "tensor", has_activation_scales=True) if input.is_persistent else cls("tensor", None)

    @classmethod
    def list_unsupported(cls, model: nn.Module, linears: Sequence[str], stacks: Sequence[str]) -> list[str]:
        if stacks:
            raise NotImplementedError(
                f"{COMFYUI}: ComfyUI reads no matrices of single experts, got {join_names(stacks)}; leave them in high "
                "precision"
            )
        return []

    def iter_tensors(self, name: str, operand: Operand) -> Iterator[tuple[str, Tensor]]:
        yield from super().iter_tensors(name, operand)
        mark: dict[str, Any] = {"format": "mxfp8" if self.is_mx else "float8_e4m3fn"}
        if self.activation_strategy is None:
            mark["full_precision_matrix_mult"] = True
        text = bytearray(json.dumps(mark).encode())
        yield f"{name.removesuffix('weight')}{_MARK}", torch.frombuffer(text, dtype=torch.uint8)

    def convert_codes(self, codes: Tensor) -> Tensor:
        if not self.is_mx:
            return super().convert_codes(codes)
        padding = zip(_compute_padded_shape(codes.shape), codes.shape, strict=True)
        rows, columns = (padded - length for padded, length in padding)
        return F.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)

    def convert_scale(self, dequant_scale: Tensor) -> Tensor:
        stored = super().convert_scale(dequant_scale)
        return _to_tiles(stored) if self.is_mx else stored.reshape(())

    def check_target(self, path: Path, names: Sequence[str], **folder_options: object) -> None:
        """Refuse a folder, options of a folder, and names of diffusers, which ComfyUI replaces when it loads them."""
        if path.suffix != SAFETENSORS:
            raise InputError(
                f"{str(path)!r}: expected a name that ends in {SAFETENSORS}; the format {COMFYUI} is one file"
            )
        given = [name for name, value in folder_options.items() if value]
        if given:
            raise InputError(f"{', '.join(given)}: expected none for the format {COMFYUI}, which is one file")
        for model, parts in _REPLACED_PREFIXES.items():
            if all(any(name.startswith(part) for name in names) for part in parts):
                raise NotImplementedError(
                    f"{COMFYUI}: ComfyUI replaces the names of {model} in diffusers, and would read codes without "
                    "their scales; give the tensors ComfyUI's names (iter_float8_weights has them), or export another "
                    "format"
                )


class _LayerMark(NamedTuple):
    """The mark of a layer in a file: how its weight is quantized."""

    format: str
    """A key of `_CODE_DTYPES`. In "mxfp8" the scales are E8M0 in tiles and the codes are padded."""
    block_size: tuple[int, int] | None
    """The rows and columns of a block; None if the shape of the scale implies it."""
    shape: tuple[int, int] | None
    """The shape before padding, which convert_to_quant writes and ComfyUI does not."""


class MarkedFormat(StoredFormat):
    """The format of a file, or of a folder with marked layers, for reading."""

    metadata_keys = (_METADATA_KEY,)

    def __init__(self, config: StoredFormat, stored: StoredTensors, is_file: bool) -> None:
        """Read the marks of a checkpoint, if it has any.

        Raises:
            ValueError: a mark is damaged, or its layer is missing or has codes of another dtype.
            NotImplementedError: a mark has a format that is not float8.
        """
        super().__init__(config.method, config.block_sizes, config.token_scales)
        leaves = {name: name.rpartition(".")[2] for name in stored}
        objects = {
            name.removesuffix(f".{_MARK}"): parse_json_object(name, bytes(stored[name].flatten().tolist()))
            for name, leaf in leaves.items()
            if leaf == _MARK and stored.get_dtype(name) == "U8"
        }
        objects |= _iter_marks_in_metadata(stored)
        layers = {f"{layer}.weight": _parse_mark(layer, mark) for layer, mark in objects.items()}
        unknown = [f"{name} ({mark.format})" for name, mark in layers.items() if mark.format not in _CODE_DTYPES]
        if unknown:
            raise NotImplementedError(
                f"unsupported formats of ComfyUI: {join_names(unknown)}; expected one of {', '.join(_CODE_DTYPES)}"
            )
        for name, mark in layers.items():
            dtype = stored.get_dtype(name) if name in stored else "no such tensor"
            if dtype != _CODE_DTYPES[mark.format]:
                raise InputError(
                    f"{name} is marked as {mark.format}: expected {_CODE_DTYPES[mark.format]}, got {dtype}"
                )
        self.layer_marks, self.is_file = layers, is_file
        self.marks = [name for name, leaf in leaves.items() if leaf in (_MARK, _OLDER_MARK, *_TOKENIZER_TENSORS)]
        self.unpadded_shapes = {name: mark.shape for name, mark in layers.items() if mark.shape is not None}

    def get_padded_shape(self, name: str, shape: Sequence[int]) -> list[int] | None:
        is_padded = name in self.layer_marks and self.layer_marks[name].format == "mxfp8" and len(shape) == 2
        return _compute_padded_shape(shape) if is_padded else None

    def list_unscaled(self, float8: Collection[str], scaled: Collection[str]) -> list[str]:
        """Return the tensors without a scale, if the file has marks or no scales at all."""
        has_marks = bool(self.layer_marks) or any(name.endswith((_MARK, _OLDER_MARK)) for name in self.marks)
        if not self.is_file or (scaled and not has_marks):
            return []
        return [name for name in float8 if name not in scaled and name not in self.layer_marks]

    def parse_scales(self, name: str, shape: Sequence[int], stored: Tensor) -> list[StoredScale]:
        mark = self.layer_marks.get(name)
        if mark is None or mark.block_size is None:
            return super().parse_scales(name, shape, stored)
        if len(shape) == 3 and shape[0] == stored.shape[0]:
            return [scale for matrix in stored for scale in self.parse_scales(name, shape[1:], matrix)]
        if len(shape) != 2:
            raise InputError(f"{name} {shape} is marked as {mark.format}: expected a matrix, or a stack of them")
        format = StoredFormat(self.method, (mark.block_size,))
        return [format.parse_scale(name, shape, _from_tiles(name, stored, shape) if mark.format == "mxfp8" else stored)]


def _iter_marks_in_metadata(stored: StoredTensors) -> Iterator[tuple[str, Any]]:
    """Yield the marks in the metadata by the stored name of the layer, which may have a prefix."""
    for text in (metadata[_METADATA_KEY] for metadata in stored.metadata if _METADATA_KEY in metadata):
        layers = parse_json_object(_METADATA_KEY, text).get("layers")
        if not isinstance(layers, dict):
            raise InputError(f"{_METADATA_KEY}: expected an object of layers, got a {type(layers).__name__}")
        check_names(layers, stored.path)
        for layer, mark in layers.items():
            names = (f"{prefix}{layer}" for prefix in ("", *DIFFUSION_PREFIXES))
            yield next((name for name in names if f"{name}.weight" in stored), layer), mark


def _parse_mark(layer: str, mark: Any) -> _LayerMark:
    format = mark.get("format") if isinstance(mark, dict) else None
    if not isinstance(format, str) or not format.isprintable():
        raise InputError(f"the mark of {layer}: expected a format, got {str(mark)[:80]!r}")
    parameters = mark.get("params")
    size = mark.get("group_size", parameters.get("group_size") if isinstance(parameters, dict) else None)
    block_size = (1, _PADDED_MULTIPLE) if format == "mxfp8" else None
    if format == "float8_e4m3fn_blockwise":
        if type(size) is not int or size < 1:
            raise InputError(f"the mark of {layer}: expected a group_size of 1 or more, got {str(size)[:80]!r}")
        block_size = size, size
    shape = mark.get("orig_shape")
    return _LayerMark(format, block_size, (shape[0], shape[1]) if is_block_size(shape) else None)


def _compute_padded_shape(shape: Sequence[int]) -> list[int]:
    return [-(-length // _PADDED_MULTIPLE) * _PADDED_MULTIPLE for length in shape]


def _to_tiles(scales: Tensor) -> Tensor:
    """Return scales [R, C], one byte each, in tiles: [R', C'], multiples of 128 and 4, padded with 0.

    Within a tile, the scale of row r and column c is at (r % 32) * 16 + r // 32 * 4 + c: "scaling factors layout" in
    NVIDIA's documentation of cuBLAS.
    """
    rows, columns = (-(-length // tile) for length, tile in zip(scales.shape, _TILE_SHAPE, strict=True))
    padded = F.pad(scales, (0, columns * 4 - scales.shape[1], 0, rows * 128 - scales.shape[0]))
    return padded.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4).reshape(padded.shape)


def _from_tiles(name: str, scales: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the scales [N, K / 32] of the matrix `name` [N, K] from tiles; see `_to_tiles`."""
    rows, length = shape
    columns = -(-length // _PADDED_MULTIPLE)
    tiles = -(-rows // 128), -(-columns // 4)
    if scales.itemsize != 1 or scales.numel() != tiles[0] * tiles[1] * 512:
        raise InputError(
            f"the scale of {name} {list(shape)}: expected {[tiles[0] * 128, tiles[1] * 4]} bytes, got "
            f"{list(scales.shape)} in {scales.dtype}"
        )
    parts = scales.view(torch.uint8).reshape(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(tiles[0] * 128, tiles[1] * 4)[:rows, :columns]
