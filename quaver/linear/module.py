"""`Float8Linear`: an `nn.Linear` whose matmuls run in float8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.foreign.torchao import LinearMMConfig, is_torchao_tensor
from quaver.linear.backends import describe_backends
from quaver.linear.class_change import get_class_parts
from quaver.linear.float8_module import Float8Module
from quaver.linear.function import apply_linear, get_checked_operands
from quaver.linear.nested import apply_to_nested
from quaver.linear.scale_state import LinearScaleSlots
from quaver.linear.tensor import Float8Tensor
from quaver.linear.weight_form import WrapperWeight
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.scaling import NO_PERSISTENT_SCALES, PersistentScales
from quaver.torch_private.dtensor import is_dtensor
from quaver.torch_private.tracing import FakeTensor

if TYPE_CHECKING:
    from quaver.linear.sharding import LinearSharding


class Float8Linear(Float8Module, nn.Linear):
    """An `nn.Linear` whose matmuls run in float8. It has the parameters and state_dict of `nn.Linear`.

    `convert_to_float8_training` turns an `nn.Linear` into one in place. The constructor takes nn.Linear's arguments.

    Args:
        config: a config, a recipe or a recipe's name; None for the tensorwise recipe.
    """

    _describe_backends = staticmethod(describe_backends)
    original_class: ClassVar[type[nn.Linear]] = nn.Linear
    """A converted nn.Linear becomes a Float8Linear; a converted subclass, a subclass of both (class_change.py)."""
    _float8_attributes = (*Float8Module._float8_attributes, "config", "scale_slots", "sharding")
    scale_slots: LinearScaleSlots | None
    """Its persistent scales, if the config has any (scale_state.py)."""
    sharding: LinearSharding | None
    """Set by tensor parallelism (parallel/tensor_parallel.py)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._init_float8(resolve_config(config))

    @classmethod
    def from_float(
        cls, linear: nn.Linear, config: Float8LinearConfig | Float8LinearRecipeName | str | None = None
    ) -> Float8Linear:
        """Return a new Float8Linear that shares the parameters of `linear`, as in torchao. `linear` does not change.

        A float8 all-gather and persistent scales need the whole model: use `convert_to_float8_training` for them.

        Raises:
            ValueError: `linear` overrides the forward of nn.Linear.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected an nn.Linear, got {type(linear).__name__}")
        if "forward" in vars(linear) or get_class_parts(linear).original.forward is not nn.Linear.forward:
            raise ValueError(
                f"linear: expected the forward of nn.Linear, got a {type(linear).__name__} that overrides it; to "
                "replace its forward, use convert_to_float8_training(linear, include_subclasses=True)"
            )
        float8 = cls(linear.in_features, linear.out_features, bias=False, device="meta", config=config)
        float8.weight, float8.bias = linear.weight, linear.bias
        float8._last_run = float8._make_last_run()
        return float8.train(linear.training)

    def _init_float8(self, config: Float8LinearConfig) -> None:
        super()._init_float8(config)
        self.scale_slots = None
        self.sharding = None

    def _get_code_sharing_kind(self) -> str:
        return f"linear {self.in_features} -> {self.out_features}"

    config = Float8Module.float8_config
    """`float8_config`, under its name in torchao."""

    def check_config(self, config: Float8LinearConfig) -> None:
        if config.has_persistent_scales and (self.scale_slots is None or not self.scale_slots.fits(config)):
            raise ValueError(
                "config: expected one without delayed or static scaling, or with the scaling that the linear was "
                f"converted with, got {config.short_str()}; call convert_to_high_precision(model) and then "
                "convert_to_float8_training(model, config=...), which makes its slots"
            )
        if self.sharding is not None:
            self.sharding.check_config(self, config)

    def forward(self, input: Tensor) -> Tensor:
        if input.is_nested:
            return apply_to_nested(self.forward, input)
        weight = self.weight
        if type(weight) is not nn.Parameter and type(weight) is not Tensor and type(weight) is not FakeTensor:
            if is_torchao_tensor(weight):  # quantized for inference, after training
                if weight.requires_grad:
                    raise RuntimeError(
                        f"the weight of this Float8Linear is a {type(weight).__name__} of torchao and trains; call "
                        "convert_to_high_precision(model) before quantize_"
                    )
                return F.linear(input, weight, self.bias)
            sharding = self.sharding or self._find_sharding(input)
            if sharding is not None:
                return sharding.forward(self, input)
        return self.forward_local(input, None)

    def _find_sharding(self, input: Tensor) -> LinearSharding | None:
        """Return the sharding of a linear whose weight other code made a DTensor, or None for other weights."""
        if not is_dtensor(self.weight):
            return None
        from quaver.linear.sharding import derive_sharding  # [Note: import time] in torch_private/dtensor.py

        return derive_sharding(self, input)

    def forward_local(self, input: Tensor, sharding: LinearSharding | None) -> Tensor:
        """Run `forward` on local tensors: this rank's part, if the linear has a `sharding`."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        scales = self.begin_forward_and_get_scales(input.device)
        bias_after_reduction = operands = None
        if sharding is not None:
            weight, bias, bias_after_reduction = sharding.get_local_parameters(weight, bias)
        if isinstance(weight, Float8Tensor):
            operands = get_checked_operands(weight, self.float8_config)
        elif isinstance(weight, WrapperWeight):
            weight = weight.get_plain()
        else:
            operands = self.get_cast_once_operands("weight")
        output = apply_linear(
            input, weight, bias, self.float8_config, scales, weight_operands=operands, sharding=sharding, linear=self
        )
        return output if bias_after_reduction is None else output + bias_after_reduction.to(output.dtype)

    def begin_forward_and_get_scales(self, device: torch.device) -> PersistentScales:
        """Begin a forward on `device`, and return the persistent scales of its operands.

        If the forward records gradients, or during a calibration, it is counted and its casts record amaxes.
        """
        if self.scale_slots is not None and (torch.is_grad_enabled() or self.scale_slots.conversion_slots.calibrating):
            return self.scale_slots.begin_forward_and_get_scales(device, self.weight)
        return self.get_persistent_scales(device)

    def get_persistent_scales(self, device: torch.device) -> PersistentScales:
        """Return the persistent scales of the operands for casts on `device` that record no amaxes."""
        if self.scale_slots is not None:
            return self.scale_slots.move_and_get_scales(device)
        if self.float8_config.has_persistent_scales:
            raise RuntimeError(
                "this Float8Linear has delayed or static scaling but no slots for its scales; give the model to "
                "convert_to_float8_training(model, config=...), which makes them"
            )
        return NO_PERSISTENT_SCALES

    @property
    def linear_mm_config(self) -> LinearMMConfig:
        """The options of the three matmuls, in torchao's form."""
        return self.float8_config.linear_mm_config

    def _apply(self, fn: Any, recurse: bool = True) -> Float8Linear:
        super()._apply(fn, recurse)
        if self.scale_slots is not None and getattr(self, "weight", None) is not None:
            self.scale_slots.move_to(self.weight.device)
        return self
