"""The epoch after the one that the loop reads, begun early, so that no worker is idle in between.

the last task of this epoch is submitted, and there is room --feed()--> tasks of the next one
the loop has read this epoch to its end ------------------------------> `Epochs.begin` takes it
"""

from __future__ import annotations

from enqueuer.enqueuers.run import Run
from enqueuer.enqueuers.workload import EpochWork, Workload


class NextEpoch:
    """The work of at most one epoch that the loop has not reached.

    All that the loop can see, such as the position, knows nothing of it.

    Args:
        run: The run that the epoch belongs to.
        workload: What is run.

    Attributes:
        workload: The same.
        is_wanted: Whether the loop that waits, or waited last, reads all epochs.
        work: The next epoch; None if it has not begun.
    """

    def __init__(self, run: Run, workload: Workload) -> None:
        self.is_wanted = False
        self.work: EpochWork | None = None
        self._run = run
        self.workload = workload

    def feed(self, current: EpochWork) -> None:
        """Give the workers what they need of the next epoch, if it may begin. Lock held.

        Args:
            current: The epoch that the loop reads.
        """
        if self.work is None:
            if not current.may_be_followed:
                return
            self.work = self.workload.begin(self._run, current.next_epoch(), True, current)
        self.work.feed()
