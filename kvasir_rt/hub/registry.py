"""Coordinators and the model files that slices are cut from: what the core does not know of them.

A coordinator is polled only where `dials` allows, and kept only while it registers or reports. Its
model must be one that slices can be cut from: named by the operator, or a file on this machine.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from kvasir_core.swarm.events import ModelRegistered, ServedRow, ServingReported
from kvasir_core.swarm.refusal import Refused
from kvasir_core.swarm.words import CoordinatorId, ModelName, Standing, WorkerId
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.errors import ModelFileError
from kvasir_rt.hub.control import Control
from kvasir_rt.hub.dials import Dials
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.models import ExpertModel, open_expert_model
from kvasir_rt.hub.poller import Target
from kvasir_rt.hub.told import refused, tell
from kvasir_rt.swarm import protocol as wire

LEASE_CHECK_S = 5.0


@dataclass(slots=True)
class Heard:
    """When a coordinator was heard last, on the monotonic clock."""

    model: ModelName
    at_s: float


class Registry:
    """Who serves which model, and from which file.

    Args:
        files: Models that the operator named.
    """

    def __init__(
        self,
        control: Control,
        dials: Dials,
        limits: HubLimits,
        files: dict[ModelName, ExpertModel],
    ) -> None:
        self.heard: dict[CoordinatorId, Heard] = {}
        self.files = files
        self._control = control
        self._dials = dials
        self._limits = limits
        self._opening = asyncio.Lock()
        self._leases: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Registers the operator's models; `control` has started."""
        for model in self.files.values():
            self._add_model(model.facts)
        self._leases = asyncio.create_task(self._watch_leases())

    async def close(self) -> None:
        if self._leases is not None:
            self._leases.cancel()
            await asyncio.gather(self._leases, return_exceptions=True)
        for model in self.files.values():
            model.gguf.close()

    async def register(
        self, request: wire.CoordinatorRegistration, *, is_peer_local: bool
    ) -> wire.CoordinatorReply:
        """A coordinator presents itself: its model is known or cut from its file, or refused."""
        origin = self._dials.check(request.slots_url, is_peer_local=is_peer_local)
        coordinator = CoordinatorId(request.coordinator)
        if (
            coordinator not in self._control.targets
            and len(self._control.targets) >= self._limits.coordinators_max
        ):
            raise ApiError(
                503,
                f"{self._limits.coordinators_max} coordinators are registered, the most.",
                code="full",
            )
        model = await self._model_of(request, is_peer_local=is_peer_local)
        self._add_model(model.facts)
        try:
            self._control.add_coordinator(
                coordinator, model.facts.model, Target(origin, request.slots_key)
            )
        except Refused as refusal:
            raise refused(refusal) from None
        self.heard[coordinator] = Heard(model.facts.model, time.monotonic())
        return wire.CoordinatorReply(
            ok=True,
            lease_s=self._limits.coordinator_lease_s,
            poll_s=self._control.policy.poll_period_ns / NANOS_PER_SECOND,
        )

    async def _model_of(
        self, request: wire.CoordinatorRegistration, *, is_peer_local: bool
    ) -> ExpertModel:
        """The model as it is known here, or from the coordinator's own file."""
        name = ModelName(request.model)
        said = ModelRegistered(name, tuple(request.layers), request.experts, request.hidden_size)
        async with self._opening:
            known = self.files.get(name)
            if known is None:
                model = await self._open(request, is_peer_local=is_peer_local)
            else:
                model = known
            try:
                _check_same(model, said, request.model_file)
            except ApiError:
                if known is None:
                    model.gguf.close()
                raise
            self.files[name] = model
        return model

    async def _open(
        self, request: wire.CoordinatorRegistration, *, is_peer_local: bool
    ) -> ExpertModel:
        if request.model_file is None or not is_peer_local:
            raise ApiError(
                404,
                f"This hub has no file of model {request.model!r} to cut slices from: start it "
                f"with --model {request.model}=FILE, or, for a coordinator on the hub's own "
                "machine, send model_file.",
                code="no_model_file",
            )
        if len(self.files) >= self._limits.models_max:
            raise ApiError(
                503, f"{self._limits.models_max} models are registered, the most.", code="full"
            )
        path = Path(request.model_file)
        if not path.is_absolute() or "\0" in request.model_file:
            raise ApiError(400, "model_file must be an absolute path.", code="invalid_value")
        try:
            return await asyncio.to_thread(open_expert_model, ModelName(request.model), path)
        except ModelFileError as error:
            raise ApiError(400, f"model_file: {error}.", code="model_file") from None

    def leave(self, coordinator: str) -> wire.Done:
        name = CoordinatorId(coordinator)
        try:
            self._control.drop_coordinator(name, "said goodbye")
        except Refused as refusal:
            raise refused(refusal) from None
        self.heard.pop(name, None)
        return wire.Done()

    def report_serving(self, report: wire.ServingReport) -> wire.Done:
        rows = tuple(
            ServedRow(
                WorkerId(row.worker), row.layer, row.experts[0], row.experts[1],
                Standing(row.standing), row.last_serve_ms, row.pairs,
            )
            for row in report.rows
        )  # fmt: skip
        name = CoordinatorId(report.coordinator)
        tell(self._control, ServingReported(name, rows))
        self.heard[name].at_s = time.monotonic()
        return wire.Done()

    def _add_model(self, facts: ModelRegistered) -> None:
        if self._control.models.get(facts.model) != facts:
            try:
                self._control.add_model(facts)
            except Refused as refusal:
                raise refused(refusal) from None

    async def _watch_leases(self) -> None:
        """A coordinator that neither registers nor reports for so long is gone."""
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            oldest = time.monotonic() - self._limits.coordinator_lease_s
            for name in [n for n, heard in self.heard.items() if heard.at_s < oldest]:
                self._control.drop_coordinator(name, "its lease ended")
                del self.heard[name]


def _check_same(model: ExpertModel, said: ModelRegistered, path: str | None) -> None:
    """Raises ApiError (409) if the coordinator means another model by this name."""
    if path is not None and not model.is_same_file(Path(path)):
        raise ApiError(
            409,
            f"Slices of {said.model!r} are cut from another file here; serve this one under "
            "another model name, or restart the hub.",
            code="other_model_file",
        )
    if said != model.facts:
        raise ApiError(
            409,
            f"{said.model!r} has {model.facts.experts} experts of hidden size "
            f"{model.facts.hidden_size} in layers {_ranges(model.facts.layers)}; the registration "
            f"says {said.experts}, {said.hidden_size}, {_ranges(said.layers)}.",
            code="other_model",
        )


def _ranges(layers: tuple[int, ...]) -> str:
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"
