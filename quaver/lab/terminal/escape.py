"""Text of strangers' files, which could otherwise control the terminal."""


def escape_controls(text: str) -> str:
    """Return `text` with its unprintable characters escaped as Python does, except for line breaks."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
