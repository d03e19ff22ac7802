"""A record whose runs are made up: lines of a book, without training."""

from pathlib import Path
from typing import Any

from stretto_lab.reproduce import Book, Cell, Effect, Limits, Measure, Record, Site
from stretto_lab.reproduce.results import at_rate

LOSS = Measure(unit="nats", of=lambda line: line["heldout_loss"], digits=2)
SITE = Site()


def record(
    limits: Limits, *, paper: tuple[float | None, float | None] = (None, None), **fields: Any
) -> Record:
    """A record of two arms, of which the other one is said to end above the first."""
    return Record(
        id="acco.made-up",
        claim="the other arm ends above",
        source="nowhere",
        setting="recipe",
        cells={
            "first": {"loss": Cell(words="--strategy first", measure=LOSS, paper=paper[0])},
            "other": {"loss": Cell(words="--strategy other", measure=LOSS, paper=paper[1])},
        },
        effects=(
            Effect(
                says="above", of=lambda of: of("other", "loss") - of("first", "loss"), limits=limits, digits=2
            ),
        ),
        **fields,
    )


def add(book: Book, words: str, seed: int, loss: float | None) -> None:
    """Put a run into the book that ends at a loss."""
    book.add({"words": words, "seed": seed, "heldout_loss": loss, "error": None, "cpu_seconds": 1.0})


def book_of(folder: Path, first: list[float], other: list[float | None]) -> Book:
    """A book with both arms' losses, by seed."""
    book = Book(folder)
    for arm, losses in (("first", first), ("other", other)):
        for seed, loss in enumerate(losses):
            add(book, f"recipe --strategy {arm}", seed, loss)
    return book


__all__ = ["LOSS", "SITE", "add", "at_rate", "book_of", "record"]
