"""Memory of saved activations: which results a checkpoint recomputes, and which are stored in float8."""

from quaver.activations.policy import CHECKPOINT_MODES, apply_activation_checkpointing
from quaver.activations.store import stop_storing_activations, store_activations_in_float8
from quaver.activations.store_report import ActivationReport, activation_report

__all__ = [
    "CHECKPOINT_MODES",
    "ActivationReport",
    "activation_report",
    "apply_activation_checkpointing",
    "stop_storing_activations",
    "store_activations_in_float8",
]
