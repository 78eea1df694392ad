"""Memory of saved activations: which results a checkpoint recomputes, and which are stored in float8."""

from quaver.checkpointing.policy import MODES, apply_activation_checkpointing
from quaver.checkpointing.store import stop_storing_activations, store_activations_in_float8
from quaver.checkpointing.store_report import ActivationReport, activation_report

__all__ = [
    "MODES",
    "ActivationReport",
    "activation_report",
    "apply_activation_checkpointing",
    "stop_storing_activations",
    "store_activations_in_float8",
]
