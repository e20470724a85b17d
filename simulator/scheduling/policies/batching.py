"""Who shares a step: prompts, chunks of them, and sequences that decode?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from membound.roofline.scenario.engine import BatchingName


class Batching(Protocol):
    """How steps are filled. Pure: it sees counts, never a clock or a tensor.

    With `whole_prompts` a prompt is computed in one step, else in chunks that fill the step's token budget. With
    `prompts_alone` sequences that decode wait while prompts are computed. `cuts_long_prompts` says whether one that no
    step holds is computed in several, the first of them its own; else it is refused.
    """

    name: ClassVar[BatchingName]
    whole_prompts: ClassVar[bool]
    prompts_alone: ClassVar[bool]
    cuts_long_prompts: ClassVar[bool]

    def admits(self, begun: bool) -> bool:
        """Whether waiting sequences may join a batch; `begun` says that its sequences have begun to decode."""


@dataclass(frozen=True)
class StaticBatching:
    """A batch is filled once and served until its last sequence has ended; the others' places stay empty.

    Its prompts are computed in as many steps as they take, and all sequences decode together after the last of them.
    Kinder than engines that go on computing ended sequences as padding: an ended one costs nothing here.
    """

    name: ClassVar[BatchingName] = "static"
    whole_prompts: ClassVar[bool] = True
    prompts_alone: ClassVar[bool] = True
    cuts_long_prompts: ClassVar[bool] = True

    def admits(self, begun: bool) -> bool:
        return not begun


@dataclass(frozen=True)
class ContinuousBatching:
    """Iteration-level scheduling: a sequence joins at any step where there is room for its whole prompt.

    Source: Yu et al., Orca, OSDI 2022.
    """

    name: ClassVar[BatchingName] = "continuous"
    whole_prompts: ClassVar[bool] = True
    prompts_alone: ClassVar[bool] = False
    cuts_long_prompts: ClassVar[bool] = False

    def admits(self, begun: bool) -> bool:
        return True


@dataclass(frozen=True)
class PrefillFirst:
    """Iteration-level with steps of prompts alone, which go before steps of decode: vLLM's default up to version 0.

    SGLang's too, whose `--chunked-prefill-size` cuts longer prompts (docs.sglang.ai, "Server Arguments").
    Source: Kwon et al., PagedAttention, SOSP 2023; that it stalls decodes: Agrawal et al., Sarathi-Serve, OSDI 2024.
    """

    name: ClassVar[BatchingName] = "prefill_first"
    whole_prompts: ClassVar[bool] = True
    prompts_alone: ClassVar[bool] = True
    cuts_long_prompts: ClassVar[bool] = True

    def admits(self, begun: bool) -> bool:
        return True


@dataclass(frozen=True)
class ChunkedPrefill:
    """Decodes first, then chunks of prompts up to the token budget, so that no step is longer than that.

    Source: Agrawal et al., Sarathi-Serve, OSDI 2024; vLLM's default from version 1 on.
    """

    name: ClassVar[BatchingName] = "chunked_prefill"
    whole_prompts: ClassVar[bool] = False
    prompts_alone: ClassVar[bool] = False
    cuts_long_prompts: ClassVar[bool] = True

    def admits(self, begun: bool) -> bool:
        return True


BATCHINGS: dict[BatchingName, Batching] = {
    batching.name: batching for batching in (StaticBatching(), ContinuousBatching(), PrefillFirst(), ChunkedPrefill())
}
