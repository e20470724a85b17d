"""What is all that anything needs to run? One `Scenario`, read from and written to YAML."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, JsonValue, ValidationError, field_validator, model_validator

from membound.roofline.engine_memory import EngineLimits
from membound.roofline.errors import MemboundError
from membound.roofline.hardware import HardwareSpec, get_hardware
from membound.roofline.models.files import published_formats, resolve_model
from membound.roofline.parallel import SINGLE, Parallelism
from membound.roofline.part import Part
from membound.roofline.reading.files import expanded, is_file, is_folder, is_pipe, read_pipe, read_text
from membound.roofline.reading.meant import FIELDS
from membound.roofline.reading.nearest import did_you_mean, nearest, nearest_first
from membound.roofline.reading.plain_yaml import parse_yaml
from membound.roofline.reading.problems import kind_of, one_sentence, shown
from membound.roofline.scenario.cluster import Cluster
from membound.roofline.scenario.engine import Engine
from membound.roofline.scenario.usual_limits import seats_that_pay, usual_limits
from membound.roofline.scenario.variants import Variant, completed
from membound.roofline.scenario.workload import Workload
from membound.roofline.techniques import AnyTechnique, EngineSetup, Technique, engine_setup
from membound.roofline.techniques.weights import leaves_rounding_to, rounded_by_engine
from membound.roofline.times.engines import get_profile

# What the words for this machine mean.
LOCAL_KINDS = {"local": "cpu", "local-gpu": "gpu"}


class Slo(Part):
    """Service-level objective: a request is good when it meets every bound that is given."""

    ttft_s: float | None = Field(None, gt=0)
    tpot_s: float | None = Field(None, gt=0)
    e2e_s: float | None = Field(None, gt=0)


class Scenario(Part):
    """Model, hardware, techniques, workload and objective of one question.

    `parallel` is how one replica divides the model over devices; without a `cluster` there is one. `without` names
    usual techniques that the engine lacks, and `expert_skew` s says that of a mixture's experts the i-th is as popular
    as i^-s; 0 is uniform. `expert_loads` are measured loads of each instead, in any unit, such as how often a router
    chose it. `sweep` lists the points at which `compare` asks it again, each as dotted paths into the scenario with
    values. `variants` are the engines that it compares with the plain one; without them each technique is one.
    """

    name: str = Field(pattern=r"^\w[\w.-]*$")
    description: str = ""
    model: str = Field(
        description="a catalog name, or the path of a config.json or a GGUF; 'NAME[:4]' is its first 4 layers"
    )
    weights: str = Field("random", description="'pretrained', 'random', or the path of a GGUF or safetensors folder")
    hardware: str = Field(
        "local",
        min_length=1,
        description="a device's name, the path of a YAML file, or what was calibrated here: 'local', or 'local-gpu'",
    )
    parallel: Parallelism = SINGLE
    engine: Engine = Engine()
    cluster: Cluster | None = None
    techniques: tuple[AnyTechnique, ...] = ()
    without: tuple[str, ...] = ()
    expert_skew: float = Field(0.0, ge=0, le=4)
    expert_loads: tuple[Annotated[float, Field(ge=0)], ...] = Field((), max_length=4096)
    workload: Workload
    slo: Slo = Slo()
    temperature: float = Field(0.0, ge=0, description="0 is greedy decoding")
    repeats: int = Field(3, ge=1, le=50, description="measurements of each cell, interleaved with its baseline")
    sweep: tuple[dict[str, JsonValue], ...] = ()
    variants: tuple[Variant, ...] = Field((), max_length=200)

    @field_validator("weights")
    @classmethod
    def _weights_are_a_choice_or_a_path(cls, value: str) -> str:
        """A path may be another machine's; a word that is none, and nothing that lies here, is a slip."""
        is_path = any(mark in value for mark in "/\\~") or value.lower().endswith((".gguf", ".safetensors"))
        if value not in ("random", "pretrained") and not is_path and not is_folder(Path(value)):
            raise ValueError("give random, pretrained, or the path of a GGUF or of a folder with safetensors")
        return value

    @field_validator("variants", mode="before")
    @classmethod
    def _variants_may_be_short(cls, value: Any) -> Any:
        return completed(value) if isinstance(value, list | tuple) else value

    @field_validator("techniques", mode="before")
    @classmethod
    def _names_are_short_for_techniques(cls, value: Any) -> Any:
        """A technique without parameters may be its name alone, and a single one need not be a list."""
        listed = [value] if isinstance(value, str) else value
        shape = "give a list such as [w8a8, {name: eagle, depth: 3}]"
        if not isinstance(listed, list | tuple):
            raise ValueError(f"it is no list; {shape}")
        for one in listed:
            if not isinstance(one, str | BaseModel) and not (isinstance(one, dict) and "name" in one):
                raise ValueError(f"{shown(one)} has no name; {shape}")
        return [{"name": one} if isinstance(one, str) else one for one in listed]

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        names = [technique.name for technique in self.techniques]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"techniques name {', '.join(sorted(twice))} twice; each may be given once")
        engine_setup(self.techniques, self.without)  # refuses those that exclude each other
        called = [variant.name for variant in self.variants]
        if again := {name for name in called if called.count(name) > 1}:
            raise ValueError(f"variants name {', '.join(sorted(again))} twice; give each a name of its own")
        for variant in self.variants:
            variant.scenario(self.model_copy(update={"sweep": (), "variants": (), "techniques": ()}))
        if self.expert_loads and self.expert_skew:
            raise ValueError("expert_skew and expert_loads both say how popular experts are; remove one of them")
        if self.cluster is not None and self.engine.disaggregation is not None:
            raise ValueError("cluster and engine.disaggregation exclude each other; remove one of them")
        if self.cluster is not None and self.cluster.router == "prefix_aware" and not self.engine.prefix_caching:
            raise ValueError(
                "cluster.router is 'prefix_aware', but engine.prefix_caching is false; set it to true or take another"
            )
        for _ in self.points():
            pass  # a point with a bad path or value raises here, not when it is reached
        return self

    @property
    def setup(self) -> EngineSetup:
        """What the techniques make of the plain engine and the model as it is published, on the scenario's devices."""
        setup = engine_setup(self.techniques, self.without, published_formats(self.model))
        if leaves_rounding_to(get_profile(self.engine.profile).library, self.techniques):
            setup = self._rounded(setup)
        popular = self.expert_loads or self.expert_skew
        return replace(setup, parallel=self.parallel, profile=self.engine.profile, expert_skew=popular)

    def _rounded(self, setup: EngineSetup) -> EngineSetup:
        """The set-up as engines round activations on the scenario's device, and as it is where nobody knows that:
        whoever needs the device says what is wrong."""
        try:
            return rounded_by_engine(setup, get_hardware(self.hardware))
        except MemboundError:
            return setup

    @property
    def seats(self) -> int:
        """Sequences in one step at most: those that are named, else the default of the profile's engine.

        Memory may hold fewer. Raises MemboundError where nobody names them and the hardware is unknown.
        """
        if self.engine.max_num_seqs is not None:
            return self.engine.max_num_seqs
        usual, hardware = self._usual_limits, self._hardware
        if hardware is None:
            return int(usual.sequences) * self.parallel.dp
        plain = replace(self.setup, drafts=None)
        return self.parallel.dp * seats_that_pay(usual, resolve_model(self.model), plain, hardware.memory_bytes)

    @property
    def step_tokens(self) -> int:
        """Tokens in one step of a dp rank at most: those that are named, else the default of the profile's engine."""
        return self.engine.max_batched_tokens or int(self._usual_limits.step_tokens)

    @property
    def _hardware(self) -> HardwareSpec | None:
        """None of this machine, whose data sheet nobody has."""
        return None if self.hardware in LOCAL_KINDS else get_hardware(self.hardware)

    @property
    def _usual_limits(self) -> EngineLimits:
        hardware = self._hardware
        kind = LOCAL_KINDS[self.hardware] if hardware is None else hardware.kind
        return usual_limits(self.engine.profile, hardware, kind)

    @property
    def limits(self) -> EngineLimits:
        """The largest step that the engine prepares for, of each data-parallel rank."""
        return EngineLimits(self.seats / self.parallel.dp, float(self.step_tokens))

    @property
    def digest(self) -> str:
        """A short hash of everything that determines the result."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """The scenario as YAML that `load_scenario` reads back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def with_techniques(self, techniques: tuple[Technique, ...]) -> Scenario:
        """This scenario with other techniques; a usual one that is dropped is one that the engine lacks from then on.

        So the baseline of a scenario, `with_techniques(())`, has none of the techniques that the scenario lists.
        """
        kept = {technique.name for technique in techniques}
        dropped = [technique.name for technique in self.techniques if technique.usual and technique.name not in kept]
        without = tuple(dict.fromkeys((*self.without, *dropped)))
        return self.model_copy(update={"techniques": techniques, "without": without})

    def compared(self) -> tuple[Variant, ...]:
        """The engines that a comparison measures beside the plain one."""
        return self.variants or tuple(Variant(name=one.name, techniques=(one,)) for one in self.techniques)

    def with_value(self, path: str, value: Any) -> Scenario:
        """This scenario with the field at the dotted `path` replaced; raises MemboundError for a bad path or value."""
        return self.with_values({path: value})

    def with_values(self, values: Mapping[str, Any]) -> Scenario:
        """This scenario with several fields replaced at once, in whatever order: one may need another."""
        if not values:
            return self
        document = self.model_dump(mode="json")
        for path in sorted(values, key=lambda path: path.count(".")):
            check_path(document, path)
            *parents, last = path.split(".")
            node: Any = document
            for key in parents:
                node = node[key]
            node[last] = values[path]
        return parse_scenario(document)

    def points(self) -> Iterator[tuple[dict[str, Any], Scenario]]:
        """Each point of the sweep with its scenario; the scenario itself without a sweep."""
        for point in self.sweep or ({},):
            yield point, self.model_copy(update={"sweep": (), "variants": ()}).with_values(point)


def check_path(document: Any, path: str) -> None:
    """Raises MemboundError where the dotted path leads nowhere in a scenario's plain data."""
    node, seen = document, ""
    for key in path.split("."):
        if isinstance(node, dict) and key in node:
            node, seen = node[key], f"{seen}.{key}".strip(".")
            continue
        said = f"field '{path}' is not in the scenario"
        if not isinstance(node, dict):
            raise MemboundError(f"{said}: '{seen}' is {shown(node)}; give all of '{seen}' instead, as {{KEY: VALUE}}")
        meant = nearest(key, node)
        if path in FIELDS:
            raise MemboundError(f"{said} (meant: {FIELDS[path].format(path)})")
        close = f"; did you mean '{meant}'?" if meant else ""
        raise MemboundError(
            f"{said}{close}; {f'{seen!r} has' if seen else 'there are'} {', '.join(nearest_first(key, node))}"
        )


def parse_scenario(document: Any, origin: str = "scenario") -> Scenario:
    """A scenario from plain data; raises MemboundError with one sentence."""
    if not isinstance(document, dict):
        raise MemboundError(f"{origin} is {kind_of(document)}, not a mapping of scenario fields")
    try:
        return Scenario.model_validate(document)
    except ValidationError as error:
        lacks = any(problem["type"] == "missing" and problem["loc"] == ("workload",) for problem in error.errors())
        raise MemboundError(f"{origin}: {one_sentence(error, Scenario)}{_WORKLOAD if lacks else ''}") from None


_WORKLOAD = (
    "; for example workload: {arrivals: {kind: closed_loop, concurrency: 8}, requests: 64, prompts: {kind: synthetic, "
    "tokens: {kind: fixed, tokens: 1024}}, output_tokens: {kind: fixed, tokens: 256}}"
)


def scenario_of_text(text: str, origin: str = "the scenario") -> Scenario:
    """A scenario from YAML text, which names devices by their names alone; raises MemboundError with one sentence."""
    return parse_scenario(parse_yaml(text, origin), origin)


def shipped_scenarios() -> dict[str, str]:
    """Name and YAML text of every scenario in `data/scenarios/`."""
    folder = resources.files("membound.data") / "scenarios"
    files = sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else []
    return {
        entry.name.removesuffix(".yaml"): entry.read_text("utf-8") for entry in files if entry.name.endswith(".yaml")
    }


def load_scenario(name_or_path: str) -> Scenario:
    """A scenario from a YAML file, the standard input ('-', or a pipe), or the shipped one of that name.

    Raises MemboundError with one sentence.
    """
    path = Path(name_or_path)
    if name_or_path == "-" or is_pipe(path):
        text = read_pipe(None if name_or_path == "-" else path, "scenario")
    elif path.suffix in (".yaml", ".yml") or is_file(path):
        text = read_text(path, "scenario file")
    else:
        shipped = shipped_scenarios()
        if is_folder(path):
            raise MemboundError(f"scenario '{name_or_path}' is a folder; give the path of a YAML file in it")
        if name_or_path not in shipped:
            raise MemboundError(
                f"scenario '{name_or_path}' is neither a file nor shipped{did_you_mean(name_or_path, shipped)}; "
                f"shipped are {', '.join(shipped) or 'none'}"
            )
        text = shipped[name_or_path]
    origin = f"scenario '{name_or_path}'"
    document = parse_yaml(text, origin)
    if isinstance(document, dict):
        document = document | {"hardware": _beside(path, document.get("hardware", "local"))}
        points = document.get("sweep")
        if isinstance(points, list):
            document["sweep"] = [_with_hardware_beside(path, point) for point in points]
    return parse_scenario(document, origin)


def _beside(scenario: Path, hardware: Any) -> Any:
    """A device's file as it is found from the scenario's folder; a name, and a path that is not there, as they are."""
    if not isinstance(hardware, str) or not hardware.endswith((".yaml", ".yml")):
        return hardware
    found = scenario.parent / expanded(hardware, "hardware file")
    return str(found) if is_file(found) else hardware


def _with_hardware_beside(scenario: Path, point: Any) -> Any:
    if not isinstance(point, dict) or "hardware" not in point:
        return point
    return point | {"hardware": _beside(scenario, point["hardware"])}
