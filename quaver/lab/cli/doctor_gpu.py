"""`quaver doctor --gpu NAME [--model CONFIG_TOML|RUN|HF-FOLDER] [--recipe NAME]`: what a GPU multiplies natively.

The GPU need not be in this machine. Nothing runs and no weight is read: the model is made on the meta device.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from rich.table import Table

from quaver.conversion.convert import convert_to_float8_training
from quaver.export.files import CONFIG_JSON, read_config
from quaver.export.source import DEFAULT_FILTER, build_skeleton, make_name_filter
from quaver.lab.doctor.gpu import LayersOnGpu, MatmulOnGpu, OnGpu, describe_gpu
from quaver.lab.runs.run_folder import CONFIG_TOML
from quaver.lab.settings import Float8, TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.terminal.tables import make_table
from quaver.lab.trainer.float8 import convert_model, make_linear_config
from quaver.lab.trainer.model import make_meta_llama
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.device_specs import DeviceSpec, require_device_spec
from quaver.runtime.names import find_tied_modules


def find_on_gpu(gpu: str, model: str | None, recipe: str | None) -> OnGpu:
    """Return what `gpu` runs natively. Raises OSError, InputError and NotImplementedError for bad input."""
    spec = require_device_spec(gpu, "--gpu")
    if model is None:
        return describe_gpu(spec)
    path = Path(model)
    if path.name == CONFIG_JSON:
        path = path.parent
    if (path / CONFIG_JSON).is_file():
        skeleton, chosen = build_skeleton(path, read_config(path)), canonicalize_recipe(recipe or "tensorwise")
        admits = make_name_filter(DEFAULT_FILTER, find_tied_modules(skeleton))
        convert_to_float8_training(skeleton, config=chosen, module_filter_fn=admits)
        return describe_gpu(spec, skeleton, chosen)
    file = path / CONFIG_TOML if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"--model must be a run's config, a run or a Hugging Face folder, got {str(path)!r}, which has no "
            f"{CONFIG_JSON} and no {CONFIG_TOML}"
        )
    return _run_on_gpu(spec, load_config(file), recipe)


def _run_on_gpu(spec: DeviceSpec, config: TrainConfig, recipe: str | None) -> OnGpu:
    """Convert the model as the trainer does; with `recipe`, all of its float8 linears to that."""
    float8, training = config.float8, config.training
    if recipe is not None:
        names = ("filter_fqns", "skip_first_layers", "skip_last_layers", "auto_filter")
        float8 = Float8(recipe_name=recipe, **{name: getattr(float8, name) for name in names})
    model = make_meta_llama(config.model)
    tokens = training.local_batch_size * training.seq_len
    convert_model(model, float8, tokens=tokens, device=torch.device("cpu"))
    return describe_gpu(spec, model, float8.label, make_linear_config(float8))


def iter_views(result: OnGpu) -> Iterator[str | Table]:
    """Yield what a GPU casts and multiplies natively, recipe by recipe, and the layers of a model."""
    yield f"{result.gpu}, {result.capability}, by its specification: nothing was run\ncasts: {result.casts}"
    rows = [
        (recipe.recipe, _describe_backends(recipe.linear), _describe_backends(recipe.experts))
        for recipe in result.recipes
    ]
    yield make_table(None, ("recipe", "linears", "experts"), rows=rows, wrapped=("linears", "experts"))
    matmuls = [matmul for recipe in result.recipes for matmul in (*recipe.linear, *recipe.experts)]
    for backend in ("native", "high precision", "exact"):
        kernels = dict.fromkeys(matmul.how for matmul in matmuls if matmul.backend == backend)
        yield from (f"{backend}: {kernel}" for kernel in kernels)
    if result.layers is not None:
        columns = ("layers", "count", "in", "out", "float8", "note")
        backends = next(
            _describe_backends(recipe.linear) for recipe in result.recipes if recipe.recipe == result.recipe
        )
        yield make_table(
            f"in {result.recipe}, linears {backends}",
            columns,
            rows=map(_make_row, result.layers),
            wrapped=("layers", "note"),
            right=columns[1:4],
        )


def _describe_backends(matmuls: list[MatmulOnGpu]) -> str:
    """Return "native" if all matmuls are, else text such as "native output and grad_input, exact grad_weight"."""
    by_backend: dict[str, list[str]] = {}
    for matmul in matmuls:
        by_backend.setdefault(matmul.backend, []).append(matmul.matmul)
    if len(by_backend) == 1:
        return next(iter(by_backend))
    return ", ".join(f"{backend} {' and '.join(names)}" for backend, names in by_backend.items())


def _make_row(layers: LayersOnGpu) -> tuple[str, ...]:
    sizes = (f"{size:,}" for size in (layers.count, layers.in_features, layers.out_features))
    return layers.name, *sizes, "yes" if layers.converted else "no", layers.note
