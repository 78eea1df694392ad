"""`torchao.float8.inductor_utils` of torchao 0.9."""


def _prototype_register_float8_delayed_scaling_inductor_passes() -> None:
    """Do nothing: a cast with delayed scaling already reads its tensor once."""


__all__ = ["_prototype_register_float8_delayed_scaling_inductor_passes"]
