"""How is the serving engine set up: its limits, who is served first, and what holds the KV cache?"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from membound.roofline.parallel import Parallelism
from membound.roofline.part import MAX_TOKENS, Part
from membound.roofline.times.engines import get_profile

BatchingName = Literal["static", "continuous", "prefill_first", "chunked_prefill"]
OrderName = Literal["fcfs", "priority", "deadline", "slack"]
Reservation = Literal["pow2", "oracle"]
Allocator = Literal["paged", "buddy"]

DEFAULT_AGEING_S = 30.0


class ServiceClass(Part):
    """A share of the requests with its urgency: `priority` 0 is served first, `ttft_s` is due after arrival."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    share: float = Field(gt=0, le=1)
    priority: int = Field(0, ge=0, le=1000)
    ttft_s: float | None = Field(None, gt=0, le=1e9, description="when its first token is due; the scenario's SLO else")


class Admission(Part):
    """Which requests the engine turns away when they arrive."""

    max_waiting: int | None = Field(None, ge=0, le=MAX_TOKENS, description="requests in the queue at most")
    only_in_time: bool = Field(False, description="turn away whoever cannot have the first token when it is due")

    @model_validator(mode="after")
    def _turns_somebody_away(self) -> Admission:
        if self.max_waiting is None and not self.only_in_time:
            raise ValueError("neither max_waiting nor only_in_time is given, so it changes nothing; give one")
        return self


class Disaggregation(Part):
    """Prompts and outputs on engines of their own; the KV cache of a prompt crosses a link in between.

    With `layerwise` transfer the layers are sent while later ones are computed, so that only the last one's time and
    what the link cannot keep up with are seen. An engine of a pool is divided over devices as the scenario's `parallel`
    says, or in its pool's own way.
    """

    prefill_engines: int = Field(1, ge=1, le=10_000)
    decode_engines: int = Field(1, ge=1, le=10_000)
    link_bytes_per_s: float | None = Field(
        None, gt=0, le=1e15, description="out of or into one engine; the device's scale_out link where it is not given"
    )
    layerwise: bool = True
    prefill_parallel: Parallelism | None = None
    decode_parallel: Parallelism | None = None

    def devices(self, parallel: Parallelism) -> int:
        """Devices of all engines, where the scenario's is `parallel`."""
        prefill, decode = self.prefill_parallel or parallel, self.decode_parallel or parallel
        return self.prefill_engines * prefill.devices + self.decode_engines * decode.devices


class Engine(Part):
    """The limits of the serving engine, under the names that vLLM gave them, and how it schedules.

    `batching` is what the techniques make it where it is not given. Of two requests the one that `order` names goes
    first; `classes` divide the requests by a draw of each. KV blocks are paged; with `reserved_tokens` each request
    takes all of its blocks at once, which is what paging replaced: those of that many tokens, of its prompt and true
    output ('oracle'), or of its prompt and the next power of two from its output on ('pow2'), which are the baselines
    of Kwon et al., PagedAttention, SOSP 2023, section 6.1, as are the chunks of a 'buddy' `kv_allocator`, each of a
    power of two tokens. `host_kv_gib` is host memory for KV: preempted sequences are swapped there with preemption
    'swap', and evicted blocks of the prefix cache go there.
    """

    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="sequences in one step at most, of all dp ranks together; the profile's own on the hardware else",
    )
    max_batched_tokens: int | None = Field(
        None, ge=1, le=10**8, description="tokens in one step at most, of each dp rank; the profile's own else"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV block")
    num_blocks: int | None = Field(
        None, ge=1, le=1_000_000_000, description="KV blocks of all dp ranks; from memory where it is not given"
    )
    profile: str = Field("graphs", description="what the engine adds to its kernels: a profile of data/engines/")
    batching: BatchingName | None = None
    order: OrderName = "fcfs"
    ageing_s: float | None = Field(
        None, gt=0, le=1e9, description="waiting so long is worth one step of priority; 30 s where it is not given"
    )
    classes: tuple[ServiceClass, ...] = Field((), max_length=100)
    admission: Admission | None = None
    preemption: Literal["recompute", "swap"] = "recompute"
    host_kv_gib: float = Field(0.0, ge=0, le=1e6)
    reserved_tokens: int | Reservation | None = Field(
        None,
        description="tokens whose KV a request takes at once, 'pow2' or 'oracle'; without, blocks as they are needed",
    )
    kv_allocator: Allocator = Field("paged", description="'buddy' reserves chunks of a power of two tokens, not blocks")
    prefix_caching: bool = False
    disaggregation: Annotated[Disaggregation | None, Field(description="one engine does both where not given")] = None

    @field_validator("reserved_tokens", mode="before")
    @classmethod
    def _is_a_number_or_a_rule(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and 1 <= value <= MAX_TOKENS
        if not is_number and value is not None and value not in get_args(Reservation):
            raise ValueError(f"give 1 to {MAX_TOKENS} tokens, 'pow2' or 'oracle'")
        return value

    @field_validator("profile")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return get_profile(name).name

    @model_validator(mode="after")
    def _no_idle_option(self) -> Engine:
        if self.ageing_s is not None and self.order != "priority":
            raise ValueError(f"ageing_s is {self.ageing_s}, but order is '{self.order}'; only 'priority' ages")
        if self.order == "priority" and len({one.priority for one in self.classes}) < 2:
            raise ValueError("order is 'priority', but classes name fewer than two priorities; give some")
        if self.classes and abs(sum(one.share for one in self.classes) - 1) > 1e-6:
            raise ValueError(f"the shares of classes sum to {sum(one.share for one in self.classes):g}; make it 1")
        if self.preemption == "swap" and not self.host_kv_gib:
            raise ValueError("preemption is 'swap', but host_kv_gib is 0; say how much host memory takes the blocks")
        if self.host_kv_gib and self.preemption != "swap" and not self.prefix_caching:
            raise ValueError(
                f"host_kv_gib is {self.host_kv_gib:g}, but nothing is put there; set preemption to 'swap' or "
                "prefix_caching to true"
            )
        if self.kv_allocator == "buddy" and self.reserved_tokens is None:
            raise ValueError("kv_allocator is 'buddy', which holds what is reserved; give reserved_tokens, or 'paged'")
        if self.reserved_tokens is not None and self.prefix_caching:
            raise ValueError("reserved_tokens and prefix_caching exclude each other: reserved memory is not shared")
        return self
