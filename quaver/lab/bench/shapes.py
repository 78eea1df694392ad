"""The shapes of Llama 3, and a parser of the shapes that a user types."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quaver.lab.model.llama import SPLIT_DIMS, list_block_weights
from quaver.lab.settings import Model
from quaver.runtime.errors import InputError

LLAMA3_MODELS = {
    "llama-8b": Model(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336),
    "llama-70b": Model(vocab_size=128256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
}
"""Llama 3, as published."""

MAX_SIZE = 10**9
"""The largest M, K or N: the bytes of a matrix then fit an int64."""

MODEL_NAMES = ("debug", *LLAMA3_MODELS)


@dataclass(frozen=True)
class Shape:
    """The sizes of a linear (M tokens x K inputs x N outputs) or of a matrix (rows x columns)."""

    sizes: tuple[int, ...]
    layer: str = ""
    """The layer of a model with this shape."""

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes)) + (f" ({self.layer})" if self.layer else "")


def make_model(name: str, *, divisor: int = 1) -> Model:
    """Return a one-block model. `divisor` divides width, heads and feed-forward, and keeps the size of a head.

    Raises:
        InputError: the number of heads is not a multiple of the divisor.
    """
    model = replace(LLAMA3_MODELS.get(name, Model()), n_layers=1)
    if model.n_heads % divisor or model.hidden_dim % divisor:
        raise InputError(f"--divisor: expected a divisor of {name}'s {model.n_heads} heads, got {divisor}")
    return replace(
        model,
        dim=model.dim // divisor,
        n_heads=model.n_heads // divisor,
        n_kv_heads=max(1, model.n_kv_heads // divisor),
        hidden_dim=model.hidden_dim // divisor,
    )


def parse_shapes(text: str, *, tokens: int, divisor: int = 1, matrices: bool = False) -> list[Shape]:
    """Read "1024" (a cube), "512x1024x4096" (M x K x N), "llama-8b" (its linears), or several separated by commas.

    Equal shapes are read once.

    Args:
        tokens: M of the linears of a model.
        divisor: divides K and N of a model's linears, to fit a small machine.
        matrices: read "1024" (a square), "512x4096" (rows x columns), "llama-8b" (the inputs of its linears).
    Raises:
        InputError: anything else, with the choices; or a divisor above a width of the model.
    """
    kind, form, count = "shape", "M x K x N such as 512x1024x4096", 3
    if matrices:
        kind, form, count = "matrix", "rows x columns such as 512x4096", 2
    parsed: list[Shape] = []
    for word in (word.strip().lower() for word in text.split(",")):
        numbers = word.split("x")
        if word in LLAMA3_MODELS:
            for layer, widths in _list_linears(word).items():
                sizes = (_divide(word, width, divisor) for width in widths[: count - 1])
                shape = Shape((tokens, *sizes), f"{format_scaled_name(word, divisor)} {'input' if matrices else layer}")
                parsed.append(shape)
        elif len(numbers) in (1, count) and all(map(_is_size, numbers)):
            parsed.append(Shape(tuple(map(int, (numbers * count)[:count]))))
        else:
            models = ", ".join(LLAMA3_MODELS)
            raise InputError(
                f"{kind} {word!r}: expected a size such as 1024, {form}, up to {MAX_SIZE}, or one of {models}"
            )
    return list(dict.fromkeys(parsed))  # inputs of one width are one shape


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(MAX_SIZE)) and 1 <= int(text) <= MAX_SIZE


def _list_linears(name: str) -> dict[str, tuple[int, int]]:
    """Return K and N of the linears of a block; linears of one shape are one entry."""
    names: dict[tuple[int, int], list[str]] = {}
    for linear, shape in list_block_weights(LLAMA3_MODELS[name]):
        if linear in SPLIT_DIMS:
            names.setdefault((shape[1], shape[0]), []).append(linear.removesuffix("_proj"))
    return {",".join(linears): sizes for sizes, linears in names.items()}


def format_scaled_name(name: str, divisor: int) -> str:
    """Return the name of a model, with the divisor of its widths."""
    return f"{name}/{divisor}" if divisor > 1 else name


def _divide(name: str, width: int, divisor: int) -> int:
    if divisor > width:
        raise InputError(f"--divisor: expected at most {width}, a width of {name}, got {divisor}")
    return width // divisor
