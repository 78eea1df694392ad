"""modelopt, the format of TensorRT Model Optimizer, which is read alone."""

from collections.abc import Mapping
from typing import Any

from quaver.export.formats.stored import StoredFormat, with_blocks


def stored_format(quantization: Mapping[str, Any]) -> StoredFormat:
    """The format of a folder with this quantization_config; its algorithm says how activations are quantized."""
    algorithm = str(quantization.get("quant_algo") or "")
    return with_blocks("modelopt", quantization, by_token="TOKEN" in algorithm or "_PB" in algorithm)
