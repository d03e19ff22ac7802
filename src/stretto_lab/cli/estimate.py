"""`stretto estimate`: reads its options and prints its answer without PyTorch, whose import alone takes seconds."""

from collections.abc import Sequence

from stretto_lab.cli.options import parse_alone
from stretto_lab.estimate import EstimateConfig, Row, estimate
from stretto_lab.evidence import ALIKE, SMALL
from stretto_lab.patience import fold


def print_estimate(words: Sequence[str]) -> None:
    """Read the words after `stretto estimate`, and print the answer; raises as `parse_alone`."""
    config = parse_alone("estimate", words, EstimateConfig())
    work = config.work
    rows, choice = estimate(work, config.allow_loss)
    base = rows[0].time
    time = choice.time
    limit = (
        f"A core limits exchanges on {choice.wire}, not the link: per update it packs and reads for "
        f"{time.core_seconds:.3g} s, and the link sends for {time.wire_seconds:.3g} s."
    )
    print(
        fold(
            f"{config.parameters} parameters, {work.ranks} ranks, {config.network}: an exact exchange sends "
            f"{_bytes(base.sent_bytes)} per rank and keeps the link busy for {base.wire_seconds:.3g} s, "
            f"next to {work.update_seconds:.3g} s of computing."
        )
    )
    print()
    table = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    alike = [
        f"{row.strategy} on {row.wire}"
        for row in rows
        if row != choice
        and row.nats is not None
        and row.nats <= config.allow_loss
        and 1 / ALIKE <= row.time.seconds / choice.time.seconds <= ALIKE
    ]
    print(
        f"\nFirst choice: {choice.options}  ({choice.nats:+.3f} nats)\n"
        + (fold(f"Too close to call: {', '.join(alike)}.") + "\n" if alike else "")
        + (fold(limit) + "\n" if time.core_seconds > time.wire_seconds else "")
        + fold(
            f"{base.seconds / choice.time.seconds:.2f} times as fast as zero1 on fp32. Nats: of held-out loss per "
            "byte, measured with a small GPT; for averages, with 2, 8 or 32 ranks (rounded up). A difference up to "
            f"{SMALL} is too close to call, since seeds differ by as much. Sent: by a rank per update. Waits: the "
            "share of an update that waits for the link. Memory is without activations. All times are computed, not "
            "measured: `stretto plan` measures."
        )
    )


_HEADINGS = ("strategy", "wire", "sent", "s/update", "waits", "memory", "nats")


def _cells(row: Row) -> tuple[str, ...]:
    time = row.time
    return (
        row.strategy,
        row.wire,
        _bytes(time.sent_bytes),
        f"{time.seconds:.3g}",
        f"{time.exposed_seconds / time.seconds:.0%}",
        _bytes(time.memory_bytes),
        "unknown" if row.nats is None else f"{row.nats:+.3f}",
    )


_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def _bytes(count: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), _UNITS[-1])
    return f"{count / size:.3g} {unit}"
