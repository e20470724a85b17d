"""Which decoder does a scenario ask for? Models and what was packed of them stay in memory between runs."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack, suppress

import torch

from membound.kernels.base import Kernels
from membound.roofline.divisible import check_parallel
from membound.roofline.errors import MemboundError
from membound.roofline.precision import Precision
from membound.roofline.scenario import Scenario
from membound.roofline.techniques import KvBudget
from membound.runtime.decoder import Decoder
from membound.runtime.kv.build import is_plain, store_for, store_problem
from membound.runtime.loading.loaded import LoadedModel, load_model
from membound.runtime.offload.experts import OffloadedExperts
from membound.runtime.parallel.group import Group
from membound.runtime.parallel.leader import DividedDecoder, divided
from membound.runtime.parallel.recipe import ShardRecipe
from membound.runtime.parallel.shards import shard_spec
from membound.runtime.quantization.calibration import Calibrator
from membound.runtime.quantization.recipes import recipe_for
from membound.runtime.recipe import Recipe
from membound.runtime.refusals import unmeasured


class DeviceModels:
    """The models and decoders of one device."""

    def __init__(self, device: str, kernels: Kernels) -> None:
        self.device = device
        self.kernels = kernels
        self._models: dict[tuple[str, str], LoadedModel] = {}
        self._decoders: dict[tuple[str, str, str], Decoder] = {}
        self._calibrators: dict[tuple[str, str], Calibrator] = {}
        self._storing: dict[tuple[int, Precision, KvBudget | None], Decoder] = {}
        self._divided: tuple[tuple[str, str, str, int], DividedDecoder] | None = None
        self._offloads: dict[tuple[tuple[str, str, str], int], OffloadedExperts] = {}
        self._processes = ExitStack()
        weakref.finalize(self, self._processes.close)

    def model(self, scenario: Scenario) -> LoadedModel:
        """The scenario's model, loaded once."""
        key = (scenario.model, scenario.weights)
        if key not in self._models:
            self._models[key] = load_model(scenario)
        return self._models[key]

    def engine_decoder(self, scenario: Scenario) -> Decoder | DividedDecoder:
        """The scenario's decoder, which `parallel.tp` divides among processes; they stay until others are asked for."""
        if (tp := scenario.setup.parallel.tp) > 1:
            model, weights, packed = self._key(scenario)
            return self._divided_decoder(
                scenario, (model, weights, f"{packed} {scenario.setup.kv.name} {scenario.parallel}", tp)
            )
        return self.decoder(scenario)

    def decoder(self, scenario: Scenario) -> Decoder:
        """The whole decoder with its weights in the format that the scenario's techniques ask for, packed once."""
        key = self._key(scenario)
        if key not in self._decoders:
            self._decoders[key] = self._built_beside_others(scenario)
        return self._with_store(self._decoders[key], scenario)

    def bytes_beside(self, scenario: Scenario) -> int:
        """Bytes of the weights that stay loaded beside those of the scenario's decoder."""
        return sum(other.weight_bytes + other.embed.nbytes for _, other in self._beside(scenario))

    def keep_only(self, scenario: Scenario) -> None:
        """Lets all decoders but the scenario's go; one that somebody else holds stays as long as that."""
        for key, other in self._beside(scenario):
            del self._decoders[key]
            self._storing = {stored: decoder for stored, decoder in self._storing.items() if stored[0] != id(other)}
            self._offloads.pop((key, 1), None)
        self.collect()

    def collect(self) -> None:
        """Frees what nobody holds any more, such as the cache and the graphs of the engine before."""
        if not self.device.startswith("cpu"):
            gc.collect()
            torch.cuda.empty_cache()

    def _beside(self, scenario: Scenario) -> list[tuple[tuple[str, str, str], Decoder]]:
        """A divided decoder is none of these: its parts are in processes of their own."""
        own = self._key(scenario) if scenario.setup.parallel.tp == 1 else None
        return [(key, other) for key, other in self._decoders.items() if key != own]

    def offload(self, scenario: Scenario) -> OffloadedExperts | None:
        """Where the experts of the scenario's decoder lie, if elsewhere."""
        return self._offloads.get((self._key(scenario), scenario.setup.parallel.tp))

    def _built_beside_others(self, scenario: Scenario) -> Decoder:
        """A new decoder; if there is no room for it, all others leave the device first."""
        with suppress(torch.OutOfMemoryError):
            return self._built(scenario)
        self.keep_only(scenario)
        return self._built(scenario)

    def _built(self, scenario: Scenario) -> Decoder:
        loaded, recipe = self.model(scenario), self._recipe(scenario)
        offload = self._new_offload(scenario, recipe)
        if offload is None:
            return Decoder(loaded.spec, loaded.weights.to(self.device), self.kernels, recipe)
        decoder = Decoder(loaded.spec, offload.placed(loaded.weights), self.kernels, offload)
        offload.attach(decoder)
        return decoder

    def _new_offload(self, scenario: Scenario, recipe: Recipe) -> OffloadedExperts | None:
        """What puts the experts that `recipe` packs elsewhere, if the scenario asks for it; this process's own."""
        if (storage := scenario.setup.expert_storage) is None:
            return None
        check_parallel(self.model(scenario).spec, scenario.setup)
        offload = OffloadedExperts(recipe, storage, self.kernels, self.device)
        self._offloads[self._key(scenario), scenario.setup.parallel.tp] = offload
        return offload

    def _key(self, scenario: Scenario) -> tuple[str, str, str]:
        """What its packed weights depend on; raises MemboundError for a set-up that does not run."""
        if problem := unmeasured(scenario.setup, mxfp4=self.kernels.keeps_mxfp4):
            raise MemboundError(problem)
        plan = scenario.setup.precision
        chosen = [repr(technique) for technique in scenario.techniques if technique.layer == "weights"]
        return scenario.model, scenario.weights, f"{plan.weights.name} {plan.activations.name} {chosen}"

    def _recipe(self, scenario: Scenario) -> Recipe:
        """What the scenario's techniques make of its weights; text to calibrate on where the model reads any."""
        key = (scenario.model, scenario.weights)
        loaded = self.model(scenario)
        if loaded.tokenizer is not None and key not in self._calibrators:
            self._calibrators[key] = Calibrator.on_text(self.kernels, loaded.tokenizer)
        return recipe_for(
            scenario.techniques,
            scenario.setup.precision,
            self.kernels,
            self._calibrators.get(key),
            divided=scenario.setup.parallel.tp > 1,
            gguf=loaded.gguf,
        )

    def _with_store(self, decoder: Decoder, scenario: Scenario) -> Decoder:
        """The same decoder over the KV stores that the scenario asks for."""
        setup = scenario.setup
        if problem := store_problem(setup, scenario.engine, decoder.spec):
            raise MemboundError(problem)
        if is_plain(setup):
            return decoder
        key = (id(decoder), setup.kv, setup.kv_budget)
        if key not in self._storing:
            self._storing[key] = decoder.storing(store_for(setup, self.kernels, decoder.device))
        return self._storing[key]

    def close(self) -> None:
        """Ends the processes of a divided model; without it they end with this object."""
        self._divided = None
        self._processes.close()

    def part(self, scenario: Scenario, group: Group) -> Decoder:
        """What this process of `group` holds of the scenario's model."""
        loaded, whole = self.model(scenario), self.model(scenario).spec
        inner = self._recipe(scenario)
        offload = self._new_offload(scenario, inner)
        weights = loaded.weights.to(self.device) if offload is None else offload.placed(loaded.weights)
        recipe = ShardRecipe(offload or inner, group, whole, scenario.parallel)
        spec = shard_spec(whole, scenario.parallel)
        part = Decoder(spec, weights, self.kernels, recipe, replayed=False)
        if offload is not None:
            offload.attach(part)
        for mixture in part.mixtures().values():
            mixture.summed = group.all_reduce
        return self._with_store(part, scenario)

    def _divided_decoder(self, scenario: Scenario, key: tuple[str, str, str, int]) -> DividedDecoder:
        if self._divided is None or self._divided[0] != key or not self._divided[1].usable:
            self.close()
            spec = self.model(scenario).spec
            shard_spec(spec, scenario.parallel)
            opened = divided(scenario, spec, self.device, self.kernels, lambda group: self.part(scenario, group))
            self._divided = key, self._processes.enter_context(opened)
        return self._divided[1]
