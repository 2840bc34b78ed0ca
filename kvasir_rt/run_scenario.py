"""`kvasir-rt SCENARIO`: the simulator's question put to real stage processes.

The same plan, policy and workload, in real time, and the same report: times are measured, links and
costs of the scenario are the machine's own.
"""

import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from kvasir_core.units import nanos
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.member import CrewOptions
from kvasir_rt.pacer import Pacer
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.scenario_ring import RealRing, plan_layers, read_shape, ring_of
from kvasir_rt.scenario_swarm import HubAccess, slots_server, with_experts
from kvasir_rt.serve_cli import read_access
from kvasir_rt.swarm_measured import SwarmMeasure
from kvasir_rt.swarm_watch import SwarmRecorder
from kvasir_rt.switchboard import LineOptions
from kvasir_scenario.load import load_scenario
from kvasir_scenario.option_numbers import SEED_MAX, Number, Whole
from kvasir_scenario.recorder import Recorder
from kvasir_scenario.report import Labels, finish_run_dir
from kvasir_scenario.report_schema import Report, Variant
from kvasir_scenario.run_dir import nothing_of_a_stopped_run, prepare_run_dir
from kvasir_scenario.schema import Scenario
from kvasir_scenario.variants import variants_of
from kvasir_scenario.workload import WorkloadFacts, build_workload

Say = Callable[[str], object]  # `str` says nothing.


def run_scenario(
    scenario: Scenario,
    out: Path | None = None,
    *,
    ring_for: Callable[[Scenario], RealRing] = ring_of,
    access: HubAccess | None = None,
    speed: float = 1.0,
    pin: bool = False,
    csv: bool = False,
    events: bool = False,
    plots: bool = False,
    say: Say = str,
) -> Report:
    """Run a scenario and its variants on real processes, one after another.

    Args:
        scenario: A valid scenario.
        out: Directory for the result files; an earlier run there is replaced.
        ring_for: Makes the ring of the scenario or of a variant.
        access: The hub whose workers share the experts.
        speed: Arrivals and what clients do come so many times as fast.
        pin: Each stage on its own core.
        csv: Write each table as CSV too.
        events: Write the core's event log.
        plots: Draw the plots, and write the page `report.html`.
        say: Told in sentences what goes on.

    Raises:
        ScenarioError: An input file is wrong, or something cannot be run for real.
        OutputError: A file cannot be written; nothing of the run is left.
        RingDown: The ring did not start or gave up; what was recorded until then is written.
    """
    variants = [(name, variant, ring_for(variant)) for name, variant in variants_of(scenario)]
    ring = ring_for(scenario)
    pin = pin or scenario.runtime.pin
    directory = None if out is None else prepare_run_dir(out)
    with nothing_of_a_stopped_run(directory):
        one = RealRun(
            scenario, ring, directory, access=access, speed=speed, pin=pin, csv=csv, events=events
        )
        report = one.run(say)
        parts = []
        for name, variant, variant_ring in variants:
            say(f"variant {name}")
            other = RealRun(variant, variant_ring, None, access=access, speed=speed, pin=pin)
            parts.append(Variant(name=name, report=other.run(say)))
        report = report.model_copy(update={"variants": parts})
        if directory is not None:
            finish_run_dir(directory, scenario, report, plots=plots)
    if one.down_why:
        raise RingDown(one.down_why)
    return report


class RealRun:
    """One scenario on one ring, from spawning to the report."""

    def __init__(
        self,
        scenario: Scenario,
        ring: RealRing,
        out: Path | None,
        *,
        access: HubAccess | None = None,
        speed: float,
        pin: bool,
        csv: bool = False,
        events: bool = False,
    ) -> None:
        self.down_why = ""
        self._scenario = scenario
        self._ring = ring
        self._out = out
        self._speed = speed
        self._csv = csv
        self._access = access
        self._pin = pin
        self._log = out / "events.jsonl" if events and out is not None else None

    def run(self, say: Say) -> Report:
        """Start the ring, offer the workload, stop, and report."""
        if self._access is None:
            return self._run(self._engine_of(self._ring), say)
        with slots_server() as slots:
            ring = with_experts(self._ring, self._scenario, self._access, slots.url)
            engine = self._engine_of(ring)
            slots.engine = engine
            return self._run(engine, say)

    def _engine_of(self, ring: RealRing) -> Engine:
        crew = CrewOptions(
            plan=ring.plan, dtype=ring.dtype, compute=ring.compute, secret=secrets.token_hex(32)
        )
        lines = LineOptions(crew=crew, pin=self._pin)
        return Engine(EngineOptions(lines=lines, events=self._log, vocabulary=ring.vocabulary))

    def _run(self, engine: Engine, say: Say) -> Report:
        scenario, speed = self._scenario, self._speed
        workload, facts = build_workload(scenario)
        recorder, swarm = self._recorder(engine)
        engine.recorder = recorder
        horizon_s = scenario.run.horizon_s
        until_ns = None if horizon_s is None else round(nanos(horizon_s) / speed)
        if swarm is not None:
            swarm.begin()
        try:
            engine.start(say)
            if facts.failed_rows is not None:
                arrivals = facts.failed_rows.arrival_ns
                scaled = (arrivals / speed).round().astype(arrivals.dtype)
                recorder.offered_many(replace(facts.failed_rows, arrival_ns=scaled))
            if swarm is not None:
                swarm.start()
            pacer = Pacer(engine, scenario, workload, vocabulary=self._ring.vocabulary, speed=speed)
            pacer.run(until_ns, _every_so_often(say))
            end_ns, statistics = engine.stop_recording()
            self.down_why = engine.driver.down_why
        finally:
            if swarm is not None:
                swarm.close()
            engine.close()
        report = recorder.close(end_ns, statistics, self._facts(facts, workload), self._labels())
        if swarm is None:
            return report
        return swarm.into(report, end_ns, self._out, csv=self._csv)

    def _recorder(self, engine: Engine) -> tuple[Recorder, SwarmMeasure | None]:
        kind = Recorder if self._access is None else SwarmRecorder
        recorder = kind(
            self._out,
            self._ring.plan,
            engine.ring.causes,
            warmup_ns=round(nanos(self._scenario.run.warmup_s) / self._speed),
            csv=self._csv,
            is_overlapping=self._access is not None,
        )
        if self._access is None:
            return recorder, None
        assert isinstance(recorder, SwarmRecorder)
        return recorder, SwarmMeasure(engine, self._scenario, self._access, recorder, self._speed)

    def _facts(self, facts: WorkloadFacts, workload: object) -> WorkloadFacts:
        clipped = getattr(workload, "clipped", None)  # A closed loop counts while it sends.
        return facts if clipped is None else replace(facts, clipped=clipped)

    def _labels(self) -> Labels:
        scenario = self._scenario
        notes = ["stages are real processes; link and cost settings of the scenario are not used"]
        if self._access is not None:
            notes.append(
                "experts were shared with workers of a real hub; experts.hub, workers, routing and "
                "local of the scenario are not used"
            )
        if self._speed != 1:
            notes.append(
                f"arrivals, thinking and cancels came {self._speed:g} times as fast as the "
                "scenario says"
            )
        return Labels(
            name=scenario.name,
            mode="measured",
            seed=scenario.run.seed,
            slo_ttft_s=scenario.slo.ttft_s,
            slo_tpot_s=scenario.slo.tpot_s,
            provenance="measured",
            notes=tuple(notes),
        )


def _every_so_often(say: Say) -> Callable[[int], None]:
    """Speak when the count has grown by a tenth, or by 100."""
    spoken = 0

    def tell(ended: int) -> None:
        nonlocal spoken
        if ended >= spoken + max(1, min(100, spoken // 10)):
            spoken = ended
            say(f"{ended} requests have ended")

    return tell


@click.command("run")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key, as YAML.")
@click.option("--seed", type=Whole(0, SEED_MAX), help="Overrides run.seed.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory [runs/NAME].")
@click.option("--speed", type=Number(0.001, 1000), default=1.0, show_default=True)
@click.option("--device", help="For every stage: cpu, cuda:0 [as the scenario says].")
@click.option("--pin", is_flag=True, help="Each stage on a processor core of its own.")
@click.option("--hub", metavar="URL", help="Share section experts with this hub's workers.")
@click.option("--hub-token-file", type=click.Path(path_type=Path), help="Its service token.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON and nothing else.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors; write the files.")
@click.option("--csv", is_flag=True, help="Write each table as CSV too.")
@click.option("--events", is_flag=True, help="Write the scheduler's event log, events.jsonl.")
@click.option("--plots/--no-plots", default=True, help="Draw the plots (PNG) [yes].")
def command(
    scenario: Path,
    settings: tuple[str, ...],
    seed: int | None,
    out: Path | None,
    speed: float,
    device: str | None,
    pin: bool,
    hub: str | None,
    hub_token_file: Path | None,
    as_json: bool,
    quiet: bool,
    csv: bool,
    events: bool,
    plots: bool,
) -> None:
    """Run SCENARIO on real stage processes; write its tables, plots and report."""
    if device is not None:
        settings = (*settings, f"runtime.device={device}")
    loaded = load_scenario(
        scenario, settings, seed=seed, planner=plan_layers, read_shape=read_shape
    )
    access = read_access(hub, hub_token_file)
    directory = Path("runs") / loaded.name if out is None else out
    say: Say = str if quiet else partial(print, file=sys.stderr)
    report = run_scenario(
        loaded,
        directory,
        ring_for=partial(ring_of, has_hub=access is not None),
        access=access,
        speed=speed,
        pin=pin,
        csv=csv,
        events=events,
        plots=plots,
        say=say,
    )
    if as_json:
        click.echo(report.to_json(), nl=False)
    elif not quiet:
        from kvasir_scenario.terminal import print_report

        print_report(report)
        click.echo(
            f"Files: {directory}/ (report.json, *.parquet{', *.png, *.html' if plots else ''})"
        )
