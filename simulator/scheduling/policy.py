"""Who may join the batch, and when?"""

from __future__ import annotations

from typing import Protocol

from membound.roofline.techniques import PolicyName


class Policy(Protocol):
    """The one decision that schedulers differ in here. Pure: it sees counts, never a clock or a tensor."""

    name: PolicyName

    def may_admit(self, running_before_step: int) -> bool:
        """Whether waiting sequences may join a batch that had `running_before_step` sequences."""


class StaticBatching:
    """A batch is filled once and served until its last sequence has ended; the others' places stay empty.

    Kinder than engines that go on computing ended sequences as padding: an ended one costs nothing here.
    """

    name: PolicyName = "static"

    def may_admit(self, running_before_step: int) -> bool:
        return running_before_step == 0


class ContinuousBatching:
    """Iteration-level scheduling: a sequence joins at any step where there is room.

    Source: Yu et al., Orca, OSDI 2022.
    """

    name: PolicyName = "continuous"

    def may_admit(self, running_before_step: int) -> bool:
        return True


POLICIES: dict[PolicyName, type[Policy]] = {"static": StaticBatching, "continuous": ContinuousBatching}
