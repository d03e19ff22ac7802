"""The update of each batch in a job, for loaders that echo."""

from stretto.checksums import digest_of_all
from stretto.engine import Job


class JobUpdates:
    """Gives an `EchoLoader` the update of its next batch, and the parameters at which its gradient is computed.

    Args:
        job: The job of this rank.
    """

    def __init__(self, job: Job) -> None:
        self._compute = job.compute
        self.micro_batches = sum(job.compute.quota.minima)
        self.is_fixed = job.compute.quota.is_fixed and job.compute.begins_update
        self._begun_at = -1  # micro-batches before the newest update
        self._versions: list[int] = []
        self._fingerprint = 0

    def begins(self, slot: int) -> bool:
        """Return whether the next batch is the first of an update; an uncounted batch starts none."""
        compute = self._compute
        if not compute.begins_update or compute.num_counted == self._begun_at:
            return False
        self._begun_at = compute.num_counted
        return True

    def parameters(self) -> int:
        """Return a digest of the parameters that the model shows in training, equal for equal values."""
        parameters = self._compute.model.parameters
        versions = [parameter._version for parameter in parameters]
        if versions != self._versions:
            with self._compute.model.unsettled():
                self._fingerprint = digest_of_all(parameters)
            self._versions = versions
        return self._fingerprint
