"""`quaver doctor --gpu NAME [--model CONFIG.toml|RUN|HF-FOLDER] [--recipe NAME]`: what a GPU multiplies natively.

The GPU need not be in this machine.
"""

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from quaver.lab.cli.doctor_options import DoctorOptions
from quaver.lab.doctor.gpu import NVIDIA_GPUS, GpuFindings, LayersOnGpu, MatmulOnGpu, describe_gpu
from quaver.lab.doctor.model_on_gpu import describe_model_on_gpu
from quaver.lab.terminal.tables import make_table
from quaver.roofline.device_specs import find_device_spec
from quaver.runtime.errors import InputError


def describe(options: DoctorOptions, gpu: str) -> GpuFindings:
    """Return what `gpu` runs natively. Raises OSError, InputError and NotImplementedError for bad input."""
    spec = find_device_spec(gpu)
    if spec is None or spec.compute_capability is None:
        raise InputError(f"--gpu must be the full name of one of {', '.join(NVIDIA_GPUS)}, got {gpu!r}")
    if options.model is None:
        return describe_gpu(spec)
    return describe_model_on_gpu(spec, Path(options.model), options.recipe)


def iter_views(findings: GpuFindings) -> Iterator[str | Table]:
    """Yield what a GPU casts and multiplies natively, recipe by recipe, and the layers of a model."""
    yield f"{findings.gpu}, {findings.capability}, by its specification: nothing was run\ncasts: {findings.casts}"
    rows = [
        (recipe.recipe, _describe_backends(recipe.linear), _describe_backends(recipe.experts))
        for recipe in findings.recipes
    ]
    yield make_table(None, ("recipe", "linears", "experts"), rows=rows, wrapped=("linears", "experts"))
    matmuls = [matmul for recipe in findings.recipes for matmul in (*recipe.linear, *recipe.experts)]
    for backend in ("native", "high precision", "exact"):
        kernels = dict.fromkeys(matmul.detail for matmul in matmuls if matmul.backend == backend)
        yield from (f"{backend}: {kernel}" for kernel in kernels)
    if findings.layers is not None:
        columns = ("layers", "count", "in", "out", "float8", "note")
        backends = next(
            _describe_backends(recipe.linear) for recipe in findings.recipes if recipe.recipe == findings.recipe
        )
        yield make_table(
            f"in {findings.recipe}, linears {backends}",
            columns,
            rows=map(_make_row, findings.layers),
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
