"""Reads float8 checkpoints: `load_float8` dequantizes tensors on access, `import_float8` writes a trainable folder."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from quaver.export.checkpoint_names import DIFFUSION_PREFIXES, PartNames, make_checkpoint_names
from quaver.export.companion_files import HEADER_KEY, check_digests, list_copied_files
from quaver.export.files import (
    SAFETENSORS,
    SINGLE_FILE,
    SafetensorsWriter,
    StoredTensors,
    check_positive_integer,
    read_config,
    write_model,
)
from quaver.export.formats.comfyui import MarkedFormat
from quaver.export.formats.stored import StoredFormat, StoredScale
from quaver.export.tensor_roles import read_stored_format, remove_quantization, sort_tensors
from quaver.foreign.transformers import patch_transformers_models
from quaver.recipes.formats import FLOAT8_FORMATS, HP_DTYPES
from quaver.runtime.errors import InputError
from quaver.runtime.files import check_is_new, write_new_folder
from quaver.runtime.module_names import find_parameter_names, join_names, strip_wrappers

logger = logging.getLogger(__name__)


def load_float8(
    folder: Path | str, *, dtype: torch.dtype = torch.bfloat16, model: nn.Module | None = None
) -> Float8Checkpoint | ModelTensors:
    """Return the tensors of a float8 checkpoint in high precision: `model.load_state_dict(dict(load_float8(folder)))`.

    A tensor is read and dequantized on access, so that a loop over the items holds one at a time. The value of a
    float8 weight is code * scale in float32, rounded to `dtype`; other floating-point tensors are converted to it.

    A mixture of experts needs `model`, because checkpoints have matrices of single experts and the model has stacks:

        model.load_state_dict(dict(load_float8(folder, model=model)))

    The scales of a float8 KV cache are not among the tensors; `kv_scales` has them, for `set_kv_scales`.

    Args:
        folder: a folder with config.json and safetensors files of compressed-tensors, AutoFP8, DeepSeek, FBGEMM,
            modelopt and others (tensor_roles.py), or one .safetensors file, as for ComfyUI, where the values of a
            float8 tensor without a scale are its codes. Files of quaver's exports are compared with their sha256.
        dtype: float32, bfloat16 or float16.
        model: return tensors under the names and in the stacks of this model, converted or not, on any device; None for
            the stored names. The result keeps the names of tensors that the model lacks. It leaves out tensors that
            the model's class ignores in transformers, and tensors of other models or of other parts of a larger one.
    Raises:
        OSError: a file is missing, or the index names one outside of the folder.
        ValueError: a file is damaged; a scale is missing, not finite or has a wrong shape; a matrix of an expert is
            missing or has another shape than the first expert's.
        NotImplementedError: the layout is unknown.
    """
    checkpoint = Float8Checkpoint(Path(folder), dtype)
    _log_unloaded_kv_scales(checkpoint, "set_kv_scales(model, load_float8(folder).kv_scales)")
    return checkpoint if model is None else ModelTensors(model, checkpoint)


class Float8Checkpoint(Mapping[str, Tensor]):
    """The dequantized tensors of a checkpoint by their stored names, and the codes and scales of its float8 weights."""

    dtype: torch.dtype
    """The dtype of the dequantized tensors."""
    format: StoredFormat
    """How the checkpoint stores float8 weights."""
    float8_names: list[str]
    """The names of the weights that are stored in float8."""
    kv_scales: dict[str, float]
    """The scales of a float8 KV cache, by name in a model: `model.layers.0.self_attn.k_scale`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        if dtype not in HP_DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(map(str, HP_DTYPES))}, got {dtype}")
        patch_transformers_models()
        self._config = {} if folder.is_file() else read_config(folder)
        config_format = read_stored_format(self._config)
        self._stored, self.dtype = StoredTensors(folder), dtype
        check_digests(folder)
        self.format = MarkedFormat(config_format, self._stored, folder.is_file())
        self._sort_tensors()

    def _sort_tensors(self) -> None:
        stored = self._stored
        roles = sort_tensors(
            {name: stored.get_dtype(name) for name in stored if name not in self.format.marks}, self.format
        )
        self._scale_of, self._names = roles.scale_of, dict.fromkeys(roles.model_tensors)
        if not self._scale_of:
            if self.format.method is None:
                raise InputError("expected float8 weights, got only high precision; use the model unchanged")
            raise InputError(
                f"expected float8 weights for quant_method {self.format.method!r} of config.json, got none"
            )
        self._unpadded_shapes: dict[str, list[int]] = {}
        for name, shape in self.format.unpadded_shapes.items():
            self.remove_padding(name, shape)
        for name in self._scale_of:
            self.read_scales(name)
        self.float8_names = list(self._scale_of)
        self.kv_scales = {}
        for name, in_model in roles.cache_scales.items():
            if not (stored[name].numel() == 1 and 0 < (scale := stored[name].float().item()) < math.inf):
                raise InputError(f"{name}: expected one scale of a KV cache, above 0 and finite, got {stored[name]}")
            self.kv_scales |= dict.fromkeys(in_model, scale)
        unscaled = [name for name, scale in self._scale_of.items() if scale is None]
        if unscaled:
            logger.warning("%s: float8 without a scale; the codes are the values", join_names(unscaled))
        if roles.left_out:
            logger.warning(
                "%s: scales of activations are left out; activations are scaled dynamically",
                join_names(roles.left_out),
            )

    def read_scales(self, name: str) -> list[StoredScale]:
        """Return the scales of a float8 weight: one for a matrix or a whole stack, else one for each matrix."""
        scale_name = self._scale_of[name]
        stored = torch.ones((), dtype=torch.float32, device="cpu") if scale_name is None else self._stored[scale_name]
        return self.format.parse_scales(name, self.get_shape(name), stored)

    def remove_padding(self, name: str, shape: Sequence[int]) -> None:
        """Read only `shape` of a matrix from now on, if the file holds it padded."""
        padded = self.format.get_padded_shape(name, shape)
        if padded is not None and padded == self._stored.get_shape(name):
            self._unpadded_shapes[name] = list(shape)

    def _read(self, name: str) -> Tensor:
        tensor = self._stored[name]
        if name in self._unpadded_shapes:
            rows, columns = self._unpadded_shapes[name]
            return tensor[:rows, :columns].contiguous()
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, self.dtype)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor, dequantized or converted to `dtype`. Raises ValueError for a NaN or an inf in float8."""
        patch_transformers_models()  # again: transformers may have been imported since
        tensor = self._read(name)
        if name in self._scale_of:
            _check_codes(name, tensor)
            scales = self.read_scales(name)
            if tensor.dim() == 2:
                return scales[0].dequantize(tensor, dtype)
            if len(scales) == 1:
                return scales[0].dequantize(tensor.reshape(1, -1), dtype).view(tensor.shape)
            matrices = [scale.dequantize(codes, dtype) for scale, codes in zip(scales, tensor, strict=True)]
            return torch.stack(matrices)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    @property
    def files(self) -> list[Path]:
        """The files of the checkpoint."""
        return self._stored.files

    @property
    def scales_and_marks(self) -> list[str]:
        """The names of stored scales and marks, which are not tensors of a model."""
        return [name for name in self._stored if name not in self._names]

    def read_codes(self, name: str) -> Tensor:
        """Return the float8 codes of a weight [N, K], or of a stack. Raises ValueError if one is NaN or infinite."""
        codes = self._read(name)
        _check_codes(name, codes)
        return codes

    def get_code_dtype(self, name: str) -> str:
        """Return the dtype of a float8 weight, as the header of its file names it."""
        return self._stored.get_dtype(name)

    def get_scale(self, name: str) -> StoredScale:
        """Return the scale of a float8 matrix."""
        return self.read_scales(name)[0]

    def write_file(self, path: Path) -> None:
        """Write all tensors in high precision to the new file `path`. Keeps metadata that is not about float8."""
        with write_new_folder(path, file=SINGLE_FILE) as partial:
            writer, format_keys = SafetensorsWriter(partial, None), (*self.format.metadata_keys, HEADER_KEY)
            for metadata in self._stored.metadata:
                writer.metadata |= {key: text for key, text in metadata.items() if key not in format_keys}
            for name, tensor in self.items():
                writer.add(name, tensor)
            writer.close()

    def has_part(self, model: nn.Module) -> bool:
        """Return whether `model` is a part of the checkpoint's model, such as its text model."""
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        parts = [part.get("model_type") for part in self._config.values() if isinstance(part, dict)]
        return model_type is not None and model_type in parts and model_type != self._config.get("model_type")

    def get_shape(self, name: str) -> list[int]:
        """Return the shape of a tensor, from the header of its file."""
        return self._unpadded_shapes.get(name) or self._stored.get_shape(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ModelTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint under the names of a model. Stacks of experts are assembled on access.

    Raises (in the constructor):
        ValueError: the checkpoint lacks some matrices of a stack, or their shapes differ.
    """

    parts: dict[str, list[PartNames]]
    """The stored parts of each matrix of a stack, by name in the model; any other tensor is one part."""
    stacks: frozenset[str]
    """The stacks that the checkpoint holds as matrices."""
    transposed: set[str]
    """The stacks that hold each matrix transposed."""
    tied: set[str]
    """The names of tied tensors that the checkpoint stores under another of their names."""
    transposed_whole_stacks: set[str]
    """The stacks that the checkpoint holds as one tensor, with the matrices of the model transposed."""
    kv_scales: dict[str, float]
    """The scales of the `Float8Checkpoint`."""

    def __init__(self, model: nn.Module, checkpoint: Float8Checkpoint) -> None:
        self._names, self._checkpoint = make_checkpoint_names(model).with_linears(checkpoint), checkpoint
        self.kv_scales, self.transposed = checkpoint.kv_scales, self._names.transposed
        tensors = {strip_wrappers(name): tensor for name, tensor in model.state_dict().items()}
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
        self.parts = {}
        stacks: dict[str, list[PartNames]] = {}
        stored_by_part = self._names.find_stored_parts(checkpoint)
        outside, in_model = [], self._names.find_model_names(tensors, checkpoint)
        prefixes = {stored.removesuffix(name) for stored, name in in_model.items() if stored.endswith(name)}
        prefix = next((prefix for prefix in DIFFUSION_PREFIXES if prefix in prefixes), "")
        for stored, name in in_model.items():
            if name in self._names.stacks and stored != name:
                stacks[name] = [
                    tuple(stored_by_part.get(part, part) for part in parts) for parts in self._names.stacks[name]
                ]
            elif name in tensors:
                self.parts[name] = [(stored,)]
                if isinstance(tensors[name], Tensor):
                    checkpoint.remove_padding(stored, tensors[name].shape)
            elif checkpoint.has_part(model) or not stored.startswith(prefix):  # of another part, or another model
                outside.append(stored)
            elif not any(re.search(pattern, name) for pattern in ignored):
                self.parts[name] = [(stored,)]
        if outside:
            logger.warning("the model is a part of the checkpoint's model; left out: %s", join_names(sorted(outside)))
        for stack in stacks.values():
            self._check_stack(stack)
        self.tied, self.stacks = self._add_tied_names(model), frozenset(stacks)
        self.transposed_whole_stacks = {
            name
            for name in self._names.whole_stacks
            if name in self.parts
            and list(tensors[name].shape) != (shape := self._checkpoint.get_shape(self.parts[name][0][0]))
            and list(tensors[name].mT.shape) == shape
        }
        self.parts |= stacks

    def _add_tied_names(self, model: nn.Module) -> set[str]:
        """Add the missing names of tied tensors that the checkpoint has under another name; returns the added names."""
        tied: dict[str, list[PartNames]] = {}
        for names in find_parameter_names(model).values():
            tied_names = [strip_wrappers(name) for name in names]
            first = next((name for name in tied_names if name in self.parts), None)
            if first is not None:
                tied |= {name: self.parts[first] for name in tied_names if name not in self.parts}
        self.parts |= tied
        return set(tied)

    def _check_stack(self, stack: list[PartNames]) -> None:
        missing = [part for parts in stack for part in parts if part not in self._checkpoint]
        if missing:
            raise InputError(
                f"the checkpoint lacks matrices of experts of the model: {join_names(missing)}; it has "
                f"{join_names(sorted(set(self._checkpoint).difference(*stack)))}"
            )
        expected = [self._checkpoint.get_shape(stack[0][0])] * len(stack[0])
        for parts in stack:
            shapes = [self._checkpoint.get_shape(part) for part in parts]
            if shapes != expected:
                raise InputError(f"{' and '.join(parts)}: expected {expected}, as the first matrix has, got {shapes}")

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, self._checkpoint.dtype)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor, or a stack, dequantized or converted to `dtype`; raises as `Float8Checkpoint.read`."""
        if name not in self.stacks:
            tensor = self._checkpoint.read(self.parts[name][0][0], dtype)
            return tensor.mT.contiguous() if name in self.transposed_whole_stacks else tensor
        stored = dict(zip(self._names.get_stored_names(name), itertools.chain(*self.parts[name]), strict=True))
        return self._names.read_stack(
            name, self.get_shape(name), dtype, lambda part: self._checkpoint.read(stored[part], dtype)
        )

    def get_shape(self, name: str) -> list[int]:
        """Return the shape of a tensor, from the headers of the files."""
        first, *more_parts = self.parts[name][0]
        if name not in self.stacks:
            shape = self._checkpoint.get_shape(first)
            return [shape[0], *reversed(shape[1:])] if name in self.transposed_whole_stacks else shape
        rows, columns = self._checkpoint.get_shape(first)
        matrix = [rows * (1 + len(more_parts)), columns]
        return [len(self.parts[name]), *(reversed(matrix) if name in self.transposed else matrix)]

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def _log_unloaded_kv_scales(checkpoint: Float8Checkpoint, call: str) -> None:
    if checkpoint.kv_scales:
        logger.warning(
            "%s: scales of a float8 KV cache are not loaded; %s keeps them for save_float8",
            join_names(list(checkpoint.kv_scales)),
            call,
        )


def _check_codes(name: str, codes: Tensor) -> None:
    fmt = FLOAT8_FORMATS[codes.dtype]
    magnitudes = codes.view(torch.uint8).bitwise_and(0x7F)
    if (magnitudes >= min(code & 0x7F for code in fmt.nan_codes + fmt.infinity_codes)).any():
        raise InputError(f"{name} has a NaN or an inf: the model that was exported has diverged")


def import_float8(
    folder: Path | str, target: Path | str, *, dtype: torch.dtype = torch.bfloat16, max_shard_bytes: int = 5 * 1000**3
) -> int:
    """Write the float8 checkpoint in `folder` as the new Hugging Face folder `target` in high precision.

    transformers' `from_pretrained` loads it for training. The tokenizer and the generation config are copied. One file
    of the result at a time is in memory. If `folder` is a file, `target` is a new file with the same tensor names.
    Returns the number of float8 weights.

    Raises:
        OSError, ValueError, NotImplementedError: as `load_float8`.
        ValueError: `folder` is a file and `target` does not end in .safetensors; `max_shard_bytes` is no
            integer of 1 or more.
        FileExistsError: `target` exists.
        NotWrittenError: the weights cannot be written.
    """
    folder, target = Path(folder), Path(target)
    check_is_new(target)
    check_positive_integer("max_shard_bytes", max_shard_bytes)
    weights = Float8Checkpoint(folder, dtype)
    if folder.is_file() and target.suffix != SAFETENSORS:
        raise InputError(
            f"{str(target)!r}: expected a name that ends in {SAFETENSORS}, because {str(folder)!r} is a file"
        )
    _log_unloaded_kv_scales(weights, f"quaver export --kv-scales {str(folder)!r}")
    if folder.is_file():
        weights.write_file(target)
        return len(weights.float8_names)
    config = remove_quantization(read_config(folder))
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    config.pop("dtype", None)
    with write_new_folder(target) as partial:
        write_model(partial, weights.items(), config, list_copied_files(folder), max_shard_bytes)
    return len(weights.float8_names)
