"""Makes the model of a run or of a Hugging Face folder on the meta device, for `quaver doctor --gpu --model`.

Nothing runs, and no weight is read.
"""

from pathlib import Path

import torch

from quaver.conversion.convert import convert_to_float8_training
from quaver.export.converted_view import DEFAULT_FILTER, make_name_filter
from quaver.export.files import CONFIG_JSON, read_config
from quaver.lab.doctor.gpu import GpuFindings, describe_gpu
from quaver.lab.huggingface.export_source import build_meta_model
from quaver.lab.model.float8 import convert_model, make_linear_config
from quaver.lab.model.llama import make_meta_llama
from quaver.lab.runs.file_names import CONFIG_FILE
from quaver.lab.settings import Float8, TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.device_specs import DeviceSpec
from quaver.runtime.module_names import find_tied_modules


def describe_model_on_gpu(spec: DeviceSpec, path: Path, recipe: str | None) -> GpuFindings:
    """Return what a GPU runs natively of a run, a run's config, or a Hugging Face folder.

    Args:
        recipe: None for the run's, or tensorwise.
    Raises:
        OSError, InputError, NotImplementedError: `path` is something else or damaged, or is not for `recipe`.
    """
    if path.name == CONFIG_JSON:
        path = path.parent
    if (path / CONFIG_JSON).is_file():
        return _describe_huggingface_model(spec, path, canonicalize_recipe(recipe or "tensorwise"))
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"--model must be a run's config, a run or a Hugging Face folder, got {str(path)!r}, which has no "
            f"{CONFIG_JSON} and no {CONFIG_FILE}"
        )
    return _describe_run(spec, load_config(file), recipe)


def _describe_huggingface_model(spec: DeviceSpec, folder: Path, recipe: str) -> GpuFindings:
    model = build_meta_model(folder, read_config(folder))
    module_filter = make_name_filter(DEFAULT_FILTER, find_tied_modules(model))
    convert_to_float8_training(model, config=recipe, module_filter_fn=module_filter)
    return describe_gpu(spec, model, recipe)


def _describe_run(spec: DeviceSpec, config: TrainConfig, recipe: str | None) -> GpuFindings:
    """Convert the model as the trainer does; with `recipe`, all of its float8 linears to that."""
    float8, training = config.float8, config.training
    if recipe is not None:
        names = ("filter_fqns", "skip_first_layers", "skip_last_layers", "auto_filter")
        float8 = Float8(recipe_name=recipe, **{name: getattr(float8, name) for name in names})
    model = make_meta_llama(config.model)
    tokens = training.local_batch_size * training.seq_len
    convert_model(model, float8, tokens=tokens, device=torch.device("cpu"))
    return describe_gpu(spec, model, float8.label, make_linear_config(float8))
