"""The module: `Float8Linear`, an `nn.Linear` whose three matmuls run in float8 (linear_gemms.py)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from quaver.casts import CastInput
from quaver.config import Float8LinearConfig
from quaver.linear_gemms import linear_with_casts
from quaver.linear_surroundings import LinearScaling, LinearSharding
from quaver.scaling import NO_PERSISTENT_SCALES, PersistentScales
from quaver.tensor import Float8Tensor, WrappedTensor
from quaver.weight_casts import ScopedWeight, casts_of_gathered


class Float8Linear(nn.Linear):
    """An `nn.Linear` whose matmuls run in float8. Parameters and state_dict are those of `nn.Linear`.

    `convert_to_float8_training` makes it out of an `nn.Linear` in place; made directly it takes nn.Linear's arguments.

    Args:
        config: what to cast and how; None for the tensorwise recipe.
    """

    config: Float8LinearConfig
    scaling: LinearScaling | None
    """The kept scales of its operands, where the config has any (scale_state.py)."""
    sharding: LinearSharding | None
    """Set by tensor parallelism (distributed/tensor_parallel.py)."""
    gathering: object | None
    """Set where FSDP2 gathers the weight in float8 (distributed/fsdp.py)."""
    _scoped_weight: ScopedWeight | None
    """Set while a `cast_weights_once` is open."""
    _converted_from: type[nn.Linear]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config, nn.Linear)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, config: Float8LinearConfig | None = None) -> Float8Linear:
        """Turn `linear` itself into a Float8Linear: same object, parameters, hooks and attributes.

        [Note: a change of class] Swapping the class, not the object, is what keeps every reference to the module
        valid: a second parent's, a hook's, an optimizer's name map. The way back is exact for the same reason.
        """
        converted_from = type(linear)
        linear.__class__ = cls
        float8 = cast(Float8Linear, linear)
        float8._set_up(config, converted_from)
        return float8

    def to_linear(self) -> nn.Linear:
        """Turn this module back into the `nn.Linear` that it was: same object, parameters, hooks and attributes."""
        self.__class__ = self._converted_from  # type: ignore[assignment]
        del self.config, self.scaling, self.sharding, self.gathering, self._scoped_weight, self._converted_from
        return self

    def _set_up(self, config: Float8LinearConfig | None, converted_from: type[nn.Linear]) -> None:
        self.config = config or Float8LinearConfig()
        self.scaling = None
        self.sharding = None
        self.gathering = None
        self._scoped_weight = None
        self._converted_from = converted_from

    def forward(self, input: Tensor | CastInput) -> Tensor:
        weight = self.weight
        if type(weight) is not nn.Parameter and type(weight) is not Tensor and type(weight) is not FakeTensor:
            return self._forward_wrapped(input)
        kept = NO_PERSISTENT_SCALES
        if self.scaling is not None or self.config.has_persistent_scales:
            kept = self.kept_scales(_device_of(input))
        scoped = self._scoped_weight
        if scoped is None:
            return linear_with_casts(input, weight, self.bias, self.config, None, kept, None)
        if not torch.compiler.is_compiling():
            scoped.check(weight)
        return linear_with_casts(input, weight, self.bias, self.config, scoped.casts, kept, None)

    def kept_scales(self, device: torch.device, *, recording: bool | None = None) -> PersistentScales:
        """The kept scales of the operands, for a forward that begins now on `device`.

        Args:
            recording: whether to record what casts see; None for what the forward does: in training, with gradients.
        """
        if self.scaling is not None:
            if recording is None:
                recording = self.training and torch.is_grad_enabled()
            return self.scaling.scales(recording=recording, device=device)
        if self.config.has_persistent_scales:
            raise RuntimeError(
                "this Float8Linear has delayed or static scaling but no state to keep its scales in; give the model to "
                "convert_to_float8_training(model, config=...), which makes one"
            )
        return NO_PERSISTENT_SCALES

    def _forward_wrapped(self, input: Tensor | CastInput) -> Tensor:
        """`forward` with a weight that is not a plain parameter: gathered in float8, sharded, or to be gathered."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        sharding, kept = self.sharding, self.kept_scales(_device_of(input))
        bias_of_whole = weight_casts = None
        if sharding is not None:
            weight, bias, bias_of_whole = sharding.local_parameters(weight, bias)
        if isinstance(weight, Float8Tensor):
            weight_casts = casts_of_gathered(weight)
        elif isinstance(weight, WrappedTensor):
            weight = weight.plain()
        elif hasattr(weight, "placements"):
            raise RuntimeError(
                f"the weight of this Float8Linear is sharded ({weight.placements}) when its forward runs. If "
                "fully_shard did that, call the module that was given to it; if tensor parallelism, use "
                "Float8ColwiseParallel or Float8RowwiseParallel"
            )
        output = linear_with_casts(input, weight, bias, self.config, weight_casts, kept, sharding)
        return output if bias_of_whole is None else output + bias_of_whole.to(output.dtype)

    def extra_repr(self) -> str:
        recipe = self.config.recipe_name
        return f"{super().extra_repr()}, {f'recipe={recipe.value}' if recipe else self.config}"

    def _apply(self, fn: Any, recurse: bool = True) -> Float8Linear:
        super()._apply(fn, recurse)
        if self.scaling is not None:
            self.scaling.follow(self.weight.device)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.scaling is not None:
            self.scaling.belongs_to(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scoped_weight": None, "gathering": None}  # they belong to a scope or a model


def _device_of(input: Tensor | CastInput) -> torch.device:
    return input.stand_in.device if isinstance(input, CastInput) else input.device
