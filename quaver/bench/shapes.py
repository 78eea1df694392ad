"""Llama 3's shapes, and the parsing of the shapes that a user types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from quaver.trainer.config import Model

MODELS = {
    "llama-8b": Model(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336),
    "llama-70b": Model(vocab_size=128256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
}
"""Llama 3, as published."""


@dataclass(frozen=True)
class Shape:
    """One linear: `m` tokens, `k` input features, `n` output features."""

    name: str
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}" + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True)
class Matrix:
    """One operand of a linear: `rows` x `columns`."""

    name: str
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}" + (f" ({self.name})" if self.name else "")


Parsed = TypeVar("Parsed", Shape, Matrix)


def parse_shapes(text: str, *, tokens: int, divisor: int = 1) -> list[Shape]:
    """Read "1024", "512x1024x4096", "llama-8b", or several of them separated by commas.

    Args:
        text: a number is a cube; three numbers are M x K x N; a model's name is all of its linears.
        tokens: M of the linears of a model.
        divisor: divides K and N of a model's linears, to fit a small machine.
    Raises:
        ValueError: anything else, with the choices; or a divisor above a width of the model.
    """

    def of_model(word: str) -> list[Shape]:
        layers = {name: [_divided(word, width, divisor) for width in shape] for name, shape in _linears(word).items()}
        return [Shape(f"{_scaled(word, divisor)} {name}", tokens, k, n) for name, (k, n) in layers.items()]

    expected = "a size such as 1024, M x K x N such as 512x1024x4096"
    return _parse(text, "shape", 3, lambda m, k, n: Shape("", m, k, n), of_model, expected)


def parse_matrices(text: str, *, tokens: int, divisor: int = 1) -> list[Matrix]:
    """Read "1024", "512x4096", "llama-8b", or several of them separated by commas.

    Args:
        text: a number is a square; two numbers are rows x columns; a model's name is the inputs of its linears.
        tokens: rows of the inputs of a model's linears.
        divisor: divides the columns of a model's inputs.
    Raises:
        ValueError: anything else, with the choices; or a divisor above a width of the model.
    """

    def of_model(word: str) -> list[Matrix]:
        widths = dict.fromkeys(_divided(word, k, divisor) for k, _ in _linears(word).values())
        return [Matrix(f"{_scaled(word, divisor)} input", tokens, width) for width in widths]

    expected = "a size such as 1024, rows x columns such as 512x4096"
    return _parse(text, "matrix", 2, lambda rows, columns: Matrix("", rows, columns), of_model, expected)


def _parse(
    text: str,
    what: str,
    sizes: int,
    make: Callable[..., Parsed],
    of_model: Callable[[str], list[Parsed]],
    expected: str,
) -> list[Parsed]:
    parsed: list[Parsed] = []
    for word in (each.strip().lower() for each in text.split(",")):
        numbers = word.split("x")
        if word in MODELS:
            parsed += of_model(word)
        elif len(numbers) in (1, sizes) and all(number.isdecimal() and int(number) for number in numbers):
            parsed.append(make(*map(int, (numbers * sizes)[:sizes])))
        else:
            raise ValueError(f"{what} {word!r}: expected {expected}, or one of {', '.join(MODELS)}")
    return parsed


def _linears(model: str) -> dict[str, tuple[int, int]]:
    """K and N of the linears of a block; linears of one shape are one entry."""
    shape = MODELS[model]
    kv_dim = shape.n_kv_heads * shape.head_dim
    names = {"q,o": (shape.dim, shape.dim), "k,v": (shape.dim, kv_dim)}
    return names | {"gate,up": (shape.dim, shape.hidden_dim), "down": (shape.hidden_dim, shape.dim)}


def _scaled(model: str, divisor: int) -> str:
    return f"{model}/{divisor}" if divisor > 1 else model


def _divided(model: str, width: int, divisor: int) -> int:
    if divisor > width:
        raise ValueError(f"--divisor: expected at most {width}, a width of {model}, got {divisor}")
    return width // divisor
