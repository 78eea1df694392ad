"""fp8, the format of DeepSeek's checkpoints: scales of 128 x 128 blocks, called `weight_scale_inv`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from quaver.export.checkpoint_names import is_transformers_model
from quaver.export.formats.base import WeightFormat
from quaver.export.formats.compressed_tensors import BLOCK_FORMAT
from quaver.recipes.scale_layout import BLOCK_SIZE
from quaver.runtime.module_names import join_names

METHOD = "fp8"


class DeepSeekFP8(WeightFormat):
    """DeepSeek's format, for writing."""

    scale_name = "weight_scale_inv"

    @classmethod
    def list_unsupported(cls, model: nn.Module, linears: Sequence[str], stacks: Sequence[str]) -> list[str]:
        """Return the linears that transformers never quantizes in fp8, regardless of config.json, such as T5's `wo`."""
        patterns = getattr(model, "_keep_in_fp32_modules", None) if is_transformers_model(model) else None
        if not patterns:
            return []
        from transformers.quantizers.quantizers_utils import should_convert_module

        return [name for name in linears if not should_convert_module(name, list(patterns))]

    def check_weights(self, model: nn.Module, sizes: Mapping[str, Sequence[int]], ignore: Sequence[str]) -> None:
        """Refuse linears whose name ends with the name of a module in `ignore`: transformers would skip them."""
        linears = [name.removesuffix(".weight") for name in sizes if name.endswith(".weight")]
        skipped = [name for name in linears if name.endswith(tuple(ignore))]
        if skipped and is_transformers_model(model):
            raise NotImplementedError(
                f"{METHOD}: transformers also skips linears whose names end with the name of a high-precision linear: "
                f"{join_names(skipped)}; keep these in high precision, or use the format {BLOCK_FORMAT}"
            )

    def make_quantization_config(
        self, ignore: Sequence[str], ragged_inputs: Sequence[str] = (), *, has_kv_scales: bool = False
    ) -> dict[str, Any]:
        return {
            "quant_method": METHOD,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
            "modules_to_not_convert": list(ignore),
        }

    def iter_warnings(self, ragged: Sequence[str], high_precision_linears: Sequence[str]) -> Iterator[str]:
        if ragged:
            yield (
                f"{join_names(ragged)}: a dimension is not a multiple of 128. transformers 5.23 without a GPU, or with "
                f"dequantize=True, refuses such fp8 weights or reads wrong values; use the format {BLOCK_FORMAT}"
            )
        if high_precision_linears:
            yield (
                f"{join_names(high_precision_linears)}: these linears are float8 in training and in high precision in "
                "the export, because transformers keeps them in float32 and reads no float8 for them in fp8; the "
                "formats of compressed-tensors hold them"
            )
