"""Finds modules under the names that they had before, which pickles hold: `torch.save(model)`, a config in a queue.

A pickle names the module of each class. The modules of quaver have moved into the folders of their layers since 1.0, so
an old name gives a module whose attributes are those of the new one. It can go with 2.0.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

NEW_NAMES = {
    "active_experts": "conversion.active_experts",
    "cast_config": "recipes.cast_config",
    "checkpointing.early_stop": "linear.saved_tensors",
    "checkpointing.held": "linear.saved_tensors",
    "class_change": "linear.class_change",
    "compile_hints": "runtime.compile_hints",
    "config": "recipes.config",
    "conversion_report": "conversion.report",
    "convert": "conversion.convert",
    "delayed": "conversion.delayed",
    "devices": "runtime.devices",
    "distributed.agreement": "runtime.agreement",
    "distributed.collectives": "runtime.collectives",
    "distributed.expert_parallel": "parallel.expert_parallel",
    "distributed.linear_sharding": "parallel.linear_sharding",
    "distributed.tensor_parallel": "parallel.tensor_parallel",
    "distributed.tensor_parallel_quantizer": "parallel.tensor_parallel_quantizer",
    "distributed.weight_scales": "fsdp.siblings",
    "formats": "recipes.formats",
    "frozen": "conversion.freeze",
    "gemm": "linear.gemm",
    "integrations.check": "conversion.check",
    "layer_recipes": "conversion.layer_recipes",
    "nested": "linear.nested",
    "phases": "runtime.phases",
    "quantize": "linear.quantize",
    "quantized_configs": "conversion.quantized_configs",
    "reference": "recipes.reference",
    "scale_state": "linear.scale_state",
    "scaling": "recipes.scaling",
    "shared_input": "linear.shared_input",
    "slow_paths": "runtime.slow_paths",
    "tensor": "linear.tensor",
    "torchao_forms": "recipes.torchao_forms",
    "trainer.checkpoint": "runs.checkpoint",
    "trainer.checkpoint_folder": "runs.checkpoint_folder",
    "trainer.config": "settings",
    "trainer.config.checkpoint": "settings.checkpoint",
    "trainer.config.data": "settings.data",
    "trainer.config.flags": "settings.flags",
    "trainer.config.float8": "settings.float8",
    "trainer.config.model": "settings.model",
    "trainer.config.output": "settings.output",
    "trainer.config.settings": "settings.fields",
    "trainer.config.train_config": "settings.train_config",
    "trainer.config.training": "settings.training",
    "trainer.config_docs": "settings.docs",
    "trainer.config_io": "settings.config_file",
    "trainer.data": "data",
    "trainer.data.cache": "data.cache",
    "trainer.data.documents": "data.documents",
    "trainer.data.load": "data.load",
    "trainer.data.order": "data.order",
    "trainer.data.records": "data.records",
    "trainer.data.samples": "data.samples",
    "trainer.data.source": "data.source",
    "trainer.data.text_files": "data.text_files",
    "trainer.data.token_files": "data.token_files",
    "trainer.data.tokenizer": "data.tokenizer",
    "trainer.errors": "runs.errors",
    "trainer.json_file": "settings.json_file",
    "trainer.manifest": "runs.manifest",
    "trainer.parallel_dims": "settings.parallel_dims",
    "trainer.ranks": "runtime.ranks",
    "trainer.run_folder": "runs.run_folder",
    "trainer.run_lock": "runs.lock",
    "trainer.safe_dcp": "runs.safe_dcp",
    "weights.base": "linear.weight_form",
    "weights.frozen": "linear.frozen_weight",
    "weights.frozen_state": "linear.frozen_state",
    "weights.gathered": "fsdp.gathered",
    "weights.module_weight": "experts.module_weight",
}
"""By the name that a module of quaver had, the one that it has."""

NEW_CLASSES = {"reference.PersistentScale": "ScaleHistory"}
"""By the names that a module and its class had, the one that the class has."""


class _OldNames(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name.removeprefix("quaver.") in NEW_NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.removeprefix("quaver.")
        vars(module)["__getattr__"] = partial(_attribute, importlib.import_module("quaver." + NEW_NAMES[old]), old)


def _attribute(new: ModuleType, old: str, name: str) -> Any:
    return getattr(new, NEW_CLASSES.get(f"{old}.{name}", name))


def find_old_names() -> None:
    """Let `import` find the modules under their old names.

    An import binds a module to its name in the package. `quaver.conversion_report` is a function by now, and stays it:
    that module is there before it is imported.
    """
    if any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        return
    finder = _OldNames()
    sys.meta_path.insert(0, finder)
    report = ModuleType("quaver.conversion_report")
    finder.exec_module(report)
    sys.modules[report.__name__] = report
