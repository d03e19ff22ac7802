"""A short text from the model, to see what it has learned."""

from dataclasses import dataclass

import torch
from torch import nn

from stretto import errors
from stretto.recipes.heldout import evaluating
from stretto.recipes.tokens import END, Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippet:
    """How the sample at the end of a run is drawn."""

    prompt: str = "def "
    """What the text begins with; not empty."""

    length: int = 200
    """Most tokens to add; the end of the document ends it sooner."""

    temperature: float = 0.7
    """Divides the logits before a token is drawn; 0 takes the likeliest token always."""

    seed: int = 0
    """Of the draws: equal models write equal texts."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise errors.ConfigError("the prompt of the sample must not be empty: the model continues it")
        if self.temperature < 0 or self.length < 0:
            raise errors.ConfigError(
                f"temperature and length of the sample must not be negative, found {self.temperature} and "
                f"{self.length}"
            )

    def write(self, model: nn.Module, tokens: Tokens, context: int) -> str:
        """Continues the prompt with `model`, which reads the last `context` tokens each time."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(self.seed)
        written = tokens.encode(self.prompt.encode("utf-8"))
        with evaluating(model):
            for _ in range(self.length):
                recent = torch.tensor([written[-context:]], device=device)
                chosen = self._choose(model(recent).logits[0, -1].float().cpu(), generator)
                if chosen == END:
                    break
                written.append(chosen)
        return tokens.decode(written)

    def _choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        shares = torch.softmax(logits / self.temperature, dim=0)
        return int(torch.multinomial(shares, 1, generator=generator))
