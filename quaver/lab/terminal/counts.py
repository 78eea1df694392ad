"""Numbers of things as text: "1 rank", "2,048 tokens"."""


def format_count(count: int, noun: str) -> str:
    """Return the count and the noun, in the plural unless the count is 1."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"
