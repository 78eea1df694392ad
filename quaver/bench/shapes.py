"""The linears of real models as (K, N), and the parsing of shapes that a user types."""

from __future__ import annotations

from dataclasses import dataclass

MODELS = {
    "llama-8b": {"q,o": (4096, 4096), "k,v": (4096, 1024), "gate,up": (4096, 14336), "down": (14336, 4096)},
    "llama-70b": {"q,o": (8192, 8192), "k,v": (8192, 1024), "gate,up": (8192, 28672), "down": (28672, 8192)},
}


@dataclass(frozen=True)
class Shape:
    """One linear: `m` tokens, `k` input features, `n` output features."""

    name: str
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m} x {self.k} x {self.n}" + (f" ({self.name})" if self.name else "")


def parse_shapes(text: str, *, tokens: int, divisor: int = 1) -> list[Shape]:
    """Read "1024", "512x1024x4096", "llama-8b" or several of them with commas between.

    Args:
        text: a number means a cube; three numbers are M x K x N; a model's name means all of its linears.
        tokens: M for the linears of a model.
        divisor: what K and N of a model's linears are divided by, to fit a small machine.
    Raises:
        ValueError: for anything else, with the choices; or for a divisor that leaves nothing of a model.
    """
    shapes: list[Shape] = []
    for word in text.split(","):
        word = word.strip().lower()
        if word in MODELS:
            scaled = f"{word}/{divisor}" if divisor > 1 else word
            shapes += [
                Shape(f"{scaled} {layer}", tokens, _divided(word, k, divisor), _divided(word, n, divisor))
                for layer, (k, n) in MODELS[word].items()
            ]
            continue
        numbers = word.split("x")
        if len(numbers) not in (1, 3) or not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(
                f"shape {word!r}: expected a size such as 1024, M x K x N such as 512x1024x4096, or one of "
                f"{', '.join(MODELS)}"
            )
        m, k, n = (int(number) for number in (numbers * 3)[:3])
        shapes.append(Shape("", m, k, n))
    return shapes


@dataclass(frozen=True)
class Matrix:
    """One operand of a linear: `rows` x `columns`."""

    name: str
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}" + (f" ({self.name})" if self.name else "")


def parse_matrices(text: str, *, tokens: int, divisor: int = 1) -> list[Matrix]:
    """Read "1024", "512x4096", "llama-8b" or several of them with commas between.

    Args:
        text: a number means a square; two numbers are rows x columns; a model's name means the inputs of its linears.
        tokens: rows of the inputs of a model's linears.
        divisor: what the columns of a model's inputs are divided by.
    Raises:
        ValueError: for anything else, with the choices; or for a divisor that leaves nothing of a model.
    """
    matrices: list[Matrix] = []
    for word in text.split(","):
        word = word.strip().lower()
        if word in MODELS:
            scaled = f"{word}/{divisor}" if divisor > 1 else word
            widths = dict.fromkeys(_divided(word, k, divisor) for k, _ in MODELS[word].values())
            matrices += [Matrix(f"{scaled} input", tokens, width) for width in widths]
            continue
        numbers = word.split("x")
        if len(numbers) not in (1, 2) or not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(
                f"matrix {word!r}: expected a size such as 1024, rows x columns such as 512x4096, or one of "
                f"{', '.join(MODELS)}"
            )
        rows, columns = (int(number) for number in (numbers * 2)[:2])
        matrices.append(Matrix("", rows, columns))
    return matrices


def _divided(model: str, width: int, divisor: int) -> int:
    if divisor > width:
        raise ValueError(f"--divisor: expected at most {width}, a width of {model}, got {divisor}")
    return width // divisor
