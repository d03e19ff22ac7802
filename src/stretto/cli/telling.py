"""How a command tells its user a line while it works."""


def tell(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
