"""Changes the recipes of layers of a model in training: what an alarm's fallback does, and a resume does again."""

from dataclasses import asdict, replace
from typing import Any

import torch

from quaver import conversion_report, float8_scaling_state
from quaver.lab.model.float8 import convert_layer, find_layer_name, fuse_producers
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.runtime.errors import reraise_as_input_error


def change_recipes(trained: TrainedModel, layers: dict[str, str]) -> dict[str, Any]:
    """Change the recipes of layers during training. `trained.config` is replaced by one that names them.

    Parameters, their gradients and the optimizer's state stay. All weights of a layer of experts change together.
    Discards all code that this process has compiled, so that the next step compiles the blocks with their new
    recipes.

    Args:
        layers: recipes or "high_precision", by the names of linears, experts or weights of experts.
    Returns:
        What later checkpoints must record: the new config and conversion report.
    Raises:
        InputError: a layer is not in this model, or the config allows no layer recipes; nothing has changed.
    """
    float8 = trained.config.float8
    with reraise_as_input_error():
        changes = {find_layer_name(trained.model, name): recipe for name, recipe in layers.items()}
    recipes = {**dict(float8.parse_layer_recipes().layers), **changes}
    entries = tuple(f"{name}={recipe}" for name, recipe in recipes.items())
    trained.config = replace(trained.config, float8=replace(float8, layer_recipes=entries))
    for name, recipe in changes.items():
        convert_layer(trained.model.get_submodule(name), float8, recipe)
    if float8.fused_producers:
        fuse_producers(trained.model)
    torch.compiler.reset()
    trained.scaling = float8_scaling_state(trained.model)
    trained.flops_per_token = trained.count_flops_per_token()
    return {"config": asdict(trained.config), "conversion_report": conversion_report(trained.model).to_dict()}
