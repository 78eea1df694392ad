"""`CastOnceWeight`: a weight that is quantized once, while a `cast_weights_once` is open (weights/cast_once.py)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quaver.kernels.operands import Operands
from quaver.recipes.config import Float8LinearConfig
from quaver.runtime.module_names import format_module_name
from quaver.torch_private.tracing import FakeTensor
from quaver.torch_private.versions import get_version


class HasFloat8Config(Protocol):
    """A `Float8Module`, whose file imports this one."""

    float8_config: Float8LinearConfig


class CastOnceWeight:
    """The operands of a whole weight while the scope is open, and a check that the weight does not change."""

    def __init__(
        self, module: HasFloat8Config, name: str, operands: Operands, *, full_name: str, opened_by: str
    ) -> None:
        """`operands`: the casts of the parameter `name` of `module`; others: see `open_scope`."""
        self.operands, self.opened_by, self._full_name = operands, opened_by, full_name
        self._module, self._config = module, module.float8_config
        self._weight: Tensor = getattr(module, name)
        self._memory, self._version = self._weight.detach(), get_version(self._weight)

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to afterwards."""
        if weight is not self._weight:
            raise make_scope_error(self._full_name, "replaced")
        check_same_config(self._full_name, self._module.float8_config, self._config)
        if get_version(weight) != self._version or _get_address(weight) != _get_address(self._memory):  # `.data = ...`
            raise make_scope_error(self._full_name, "changed")


def check_same_config(name: str, config: Float8LinearConfig, config_at_entry: Float8LinearConfig) -> None:
    """Raise RuntimeError if the module of the weight `name` has another config than at the entry of the scope."""
    if config is not config_at_entry and config != config_at_entry:
        raise make_scope_error(name, "given another config")


def make_scope_error(name: str, how: str) -> RuntimeError:
    """Make the error for the weight `name` that was "changed", "replaced" or "given another config" (`how`)."""
    return RuntimeError(
        f"the weight of {format_module_name(name)} was {how} inside cast_weights_once; "
        "leave the scope before you change weights or pass others to torch.func.functional_call"
    )


def _get_address(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
