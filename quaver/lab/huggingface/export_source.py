"""Sources of `quaver export`: a model's structure, its weights one at a time, and the record of its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quaver.conversion.convert import convert_to_float8_training
from quaver.export.companion_files import list_copied_files
from quaver.export.converted_view import DEFAULT_FILTER, make_name_filter
from quaver.export.files import StoredTensors, read_config
from quaver.export.tensor_roles import find_quantization
from quaver.recipes.config import resolve_config
from quaver.runtime.errors import InputError, reraise_as_input_error
from quaver.runtime.module_names import find_tied_modules


@dataclass(frozen=True)
class ExportSource:
    """A model to export; the fields are arguments of `save_float8`."""

    model: nn.Module
    """Converted to float8, on the meta device."""
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    make_hp_model: Callable[[], nn.Module]
    origin: Mapping[str, Any]
    files: list[Path] = field(default_factory=list)
    forward_dtype: torch.dtype | None = None


def open_huggingface_source(folder: Path, *, recipe: str, filter_fqns: Sequence[str] = DEFAULT_FILTER) -> ExportSource:
    """Return the model of a high-precision Hugging Face folder, to export with the codes of `recipe`.

    Raises:
        OSError, ValueError: files are missing or damaged, the model is quantized already, or transformers is not
            installed.
    """
    config = read_config(folder)
    if find_quantization(config) is not None:
        raise InputError(
            f"{str(folder)!r} is quantized already; expected a model in high precision: use quaver import first"
        )
    weights = StoredTensors(folder)
    model = build_meta_model(folder, config)
    filter_fn = make_name_filter(filter_fqns, find_tied_modules(model))
    with reraise_as_input_error():
        float8_config = resolve_config(recipe)
    convert_to_float8_training(model, config=float8_config, module_filter_fn=filter_fn)

    def make_hp_model() -> nn.Module:
        model_class, _ = _get_model_class(folder, config)
        with _blame_folder(folder):
            hp_model: nn.Module = model_class.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        return hp_model

    origin = {"source": "a Hugging Face folder", "step": None}
    return ExportSource(model, weights, config, make_hp_model, origin, list_copied_files(folder))


def build_meta_model(folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """Build the model of a Hugging Face folder on the meta device. Raises as `open_huggingface_source`."""
    model_class, model_config = _get_model_class(folder, config)
    with torch.device("meta"), _blame_folder(folder):
        model: nn.Module = model_class._from_config(model_config)
    return model


@contextmanager
def _blame_folder(folder: Path) -> Iterator[None]:
    """Turn an error of transformers, which alone runs in the block, into an InputError about the folder that it reads.

    A bad value in config.json makes transformers raise almost any error, such as KeyError or ZeroDivisionError.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"transformers cannot build the model of {str(folder)!r}: {text}") from error


def _get_model_class(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class in transformers of a folder's model, and its config.

    `architectures` in config.json names the class. Without it, the class is the causal language model, else the
    image-text-to-text model, else the model without a head.

    Raises:
        ValueError: transformers is not installed or has no class for the model.
    """
    try:
        import transformers
        from transformers.models.auto import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise InputError("a Hugging Face folder needs transformers: pip install transformers") from error

    kind = config.get("model_type")
    if "auto_map" in config and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        raise InputError(
            f"{str(folder)!r} brings the code of its model (auto_map in config.json), which is not run; expected a "
            f"model_type of transformers, got {kind!r}"
        )
    with _blame_folder(folder):
        model_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        model_class = getattr(transformers, str(name), None)
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class, model_config
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        if type(model_config) in auto._model_mapping:
            model_class = auto._model_mapping[type(model_config)]
            return model_class[0] if isinstance(model_class, tuple) else model_class, model_config
    raise InputError(f"transformers has no model for {str(folder)!r}, whose architectures are {architectures!r}")
