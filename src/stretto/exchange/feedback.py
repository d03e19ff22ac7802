"""Error feedback: the rounding error of a packed contribution is added to the next one.

    send q(g_t + e_t),   e_{t+1} = g_t + e_t - q(g_t + e_t)

Note [What counts]
    Over any run, the values that a rank's owners have received plus the rank's residual e equal its contributions to
    rounds that counted. Two things must not change e: a round that is skipped, because its contributions count
    nowhere, and a parameter that this rank has not used in the round, because perhaps no rank has used it, and then
    no rank steps with the sent values. So a rank adds and sends errors of the parameters that it has used, and only
    remembers the new errors when the round's report is there.

Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
Speech DNNs".
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stretto.exchange.wire import PackedWire
from stretto.flat import Layout


class ErrorFeedback:
    """One rank's residual for the sums of its job. Memory: 4 bytes per parameter.

    Args:
        layout: Layout of the contributions.
        wire: The format that packs them.
        packed: If this rank packs other values than its contribution: returns, for the index of a bucket and this
            rank's contribution to it, the last packed values, and a view of their place in the contribution.
    """

    def __init__(
        self,
        layout: Layout,
        wire: PackedWire,
        packed: Callable[[int, Tensor], tuple[Tensor, Tensor]] = lambda index, bucket: (bucket, bucket),
    ) -> None:
        self._layout = layout
        self._wire = wire
        self._packed = packed
        self.residuals = [
            torch.zeros(
                flat.numel,
                dtype=torch.promote_types(flat.accumulation_dtype, torch.float32),
                device=flat.device,
            )
            for flat in layout.sets
        ]
        """One tensor per flat set; zero in the padding and where nothing has been sent."""
        self._inside = layout.slots_by_bucket()
        self._sent: list[Tensor] = []
        self._own: Sequence[Tensor] = []
        self._used: Sequence[int] = []
        self._keeps = False

    def begin(self, flats: Sequence[Tensor], used: Sequence[int], *, keeps: bool = False) -> list[Tensor]:
        """Start a round; return the values to send: each bucket is complete once `add` was called for it.

        Args:
            flats: The contribution, one tensor per flat set.
            used: One number per parameter slot; above zero if this rank has used it.
            keeps: Whether to keep `flats` unchanged, for 4 more bytes per parameter; otherwise they are overwritten if
                they are wide enough for the sum.
        """
        self._own, self._used, self._keeps = flats, used, keeps
        if not keeps:
            self._sent = [
                flat.to(residuals.dtype) for flat, residuals in zip(flats, self.residuals, strict=True)
            ]
        elif not self._sent:
            self._sent = [torch.empty_like(residuals) for residuals in self.residuals]
        return self._sent

    def add(self, index: int) -> None:
        """Add this rank's errors to its contribution to a bucket, and skip parameters that it has not used."""
        bucket = self._layout.buckets[index]
        inside = slice(bucket.start, bucket.stop)
        sent = self._sent[bucket.set_index]
        torch.add(
            self._own[bucket.set_index][inside], self.residuals[bucket.set_index][inside], out=sent[inside]
        )
        for slot in self._inside[index]:
            if not self._used[slot.index]:
                sent[max(slot.start, bucket.start) : min(slot.stop, bucket.stop)].zero_()

    @property
    def given(self) -> list[Tensor]:
        """Copies of the contribution in the current round, without errors, by flat set, until the round is settled."""
        given = [sent - residuals for sent, residuals in zip(self._sent, self.residuals, strict=True)]
        for slot in self._layout.slots:
            if not self._used[slot.index]:
                given[slot.set_index][slot.start : slot.stop].zero_()
        return given

    def commit_residuals(self) -> None:
        """Keep the rounding errors of the last round; called once the round counts, before its buffers are written
        again.
        """
        for index, bucket in enumerate(self._layout.buckets):
            sent = self._sent[bucket.set_index][bucket.start : bucket.stop]
            values, place = self._packed(index, sent)
            self._wire.lose(values)  # packs once more: the receivers' bytes are gone
            if place is not sent:
                sent.zero_()
                place.copy_(values.view_as(place))
        for slot in self._layout.slots:
            if not self._used[slot.index]:
                # Not zero where it packs for other ranks, which may have used the parameter.
                residuals = self.residuals[slot.set_index][slot.start : slot.stop]
                self._sent[slot.set_index][slot.start : slot.stop].add_(residuals)
        for residuals, lost in zip(self.residuals, self._sent, strict=True):
            residuals.copy_(lost)
        self._own = []
        if not self._keeps:
            self._sent = []

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's residual, by parameter, as views."""
        return {
            slot.name: self.residuals[slot.set_index][slot.start : slot.stop].view(slot.shape)
            for slot in self._layout.slots
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over the residuals in `states`, from all ranks that returned them; none if there are none.

        If the number of ranks has changed, a rank takes over the residuals of several ranks or of none.
        """
        for residuals in self.residuals:
            residuals.zero_()
        for name, residuals in self.state_dict().items():
            for state in states:
                if name in state:
                    residuals.add_(state[name].to(residuals.device))
