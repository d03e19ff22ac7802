"""`stretto estimate`: reads its options and prints its answer without PyTorch, whose import alone takes seconds."""

from collections.abc import Sequence

from stretto.errors import UnknownName
from stretto.fields import field_types, read_value, unknown_name
from stretto_lab.estimate import EstimateConfig, estimate
from stretto_lab.patience import fold


def print_estimate(words: Sequence[str]) -> None:
    """Read the words after `stretto estimate`, and print the answer.

    Raises:
        UnknownName: No option is called so.
        ConfigError: A value cannot be read, or cannot be.
    """
    config = _read(words)
    work = config.work
    rows, choice = estimate(work, config.allow_loss)
    base = rows[0].time
    print(
        fold(
            f"{config.parameters} parameters, {work.ranks} ranks, {config.network}: an exact exchange sends "
            f"{_bytes(base.sent_bytes)} per rank and keeps the link busy for {base.wire_seconds:.3g} s, beside "
            f"{work.update_seconds:.3g} s of computing."
        )
    )
    print("\nstrategy                 wire   sent       s/update  waits   memory     nats")
    for row in rows:
        time = row.time
        waits = f"{time.exposed_seconds / time.seconds:.0%}"
        print(
            f"{row.strategy:24} {row.wire:6} {_bytes(time.sent_bytes):10} {time.seconds:<9.3g} {waits:7} "
            f"{_bytes(time.memory_bytes):10} {'unknown' if row.nats is None else f'{row.nats:+.3f}'}"
        )
    print(
        f"\nFirst choice: {choice.options}  ({choice.nats:+.3f} nats)\n"
        + fold(
            f"{base.seconds / choice.time.seconds:.2f} times as fast as zero1 on fp32. Nats: of held-out loss, per "
            "byte, what each has cost a small GPT, averages on the next larger of 2, 8 and 32 ranks; it may differ for "
            "you. "
            "Memory is without activations and what a packed wire keeps. "
            "Nothing was measured here: `stretto plan` does that."
        )
    )


def _read(words: Sequence[str]) -> EstimateConfig:
    kinds = field_types(EstimateConfig)
    values, left = {}, [part for word in words for part in (word.split("=", 1) if "=" in word else [word])]
    while left:
        option = left.pop(0)
        name = option.removeprefix("--").replace("-", "_")
        if name not in kinds or not option.startswith("--"):
            known = [f"--{kind.replace('_', '-')}" for kind in kinds]
            raise unknown_name("estimate has no option", option, known)
        if not left:
            raise UnknownName(f"{option} needs a value")
        values[name] = read_value(left.pop(0), kinds[name])
    return EstimateConfig(**values)


def _bytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
