"""Surviving lost ranks: the job continues in the living processes, with terms, their members, and states in memory."""

from stretto.survive.local import LocalCheckpoints
from stretto.survive.survivor import survives
from stretto.survive.terms import Term

__all__ = ["LocalCheckpoints", "Term", "survives"]
