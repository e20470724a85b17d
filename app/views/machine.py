"""What are the roofs of this machine, and where under them does a real model run?"""

from __future__ import annotations

import threading

import streamlit as st

from membound.app import jobs, text
from membound.app.figures import roofline
from membound.app.i18n import Translate
from membound.app.records import Job
from membound.app.views import states, tables
from membound.app.views.charts import chart
from membound.app.views.console import console
from membound.app.views.session import has_torch, store, this_machine, translate
from membound.roofline import hardware, models
from membound.roofline.hardware import HardwareSpec
from membound.roofline.operating_point import OperatingPoint
from membound.roofline.techniques import TECHNIQUES, EngineSetup

MODEL, BATCHES, CONTEXT = "SmolLM2-135M", (1, 4, 16), 512
STAND_IN = "H100-SXM5"
# what `membound calibrate` measures, shown of a stand-in too
FORMATS = ("bf16", "int8")
# how the note of a calibration begins that measured only what a first run asks (`runtime.calibration.calibrate.QUICK`)
QUICKLY = "measured quickly"
_ONE_CALIBRATION = threading.Lock()


def machine_card() -> None:
    """This machine's roofline; measured first, without being asked, where it was not yet."""
    t = translate()
    machine = this_machine()
    if machine is not None:
        _card(machine, t)
        _refine(machine, t)
    elif not has_torch():
        states.no_torch()
        _card(hardware.get_hardware(STAND_IN), t)
    else:
        _calibrating(t)


def _refine(machine: HardwareSpec, t: Translate) -> None:
    """Of roofs that were measured quickly: what they leave out, and the way to measure all."""
    calibration = machine.calibration
    if calibration is None or not any(note.startswith(QUICKLY) for note in calibration.notes) or not has_torch():
        return
    newest = [jobs.poll(store(), job.id) for job in store().jobs("calibrate", limit=1)]
    with st.container(border=True):
        st.markdown(t("calibrate.was_quick"))
        if newest and newest[0].active:
            console(newest[0].id, watch_text=False)
            return
        if newest and newest[0].state in ("failed", "lost"):
            states.ended_badly(newest[0])
        if st.button(t("calibrate.all"), key="calibrate_all", icon=":material/straighten:"):
            _calibrate(quick=False)


def _calibrating(t: Translate) -> None:
    job = _calibration_job()
    if job.state in ("failed", "lost", "cancelled"):
        states.ended_badly(job)
        if st.button(t("calibrate.again"), key="calibrate_again"):
            _calibrate(quick=True)
        _card(hardware.get_hardware(STAND_IN), t)
        return
    st.info(t("calibrate.running" if job.spec.get("quick") else "calibrate.running_all"), icon=":material/straighten:")
    console(job.id, watch_text=False)


def _calibration_job() -> Job:
    """The newest calibration; one is started where there is none, and only one however many sessions look."""
    with _ONE_CALIBRATION:
        newest = store().jobs("calibrate", limit=1)
        if newest and (newest[0].active or newest[0].state != "done"):
            return jobs.poll(store(), newest[0].id)
        return store().job(jobs.submit(store(), "calibrate", {"quick": True}))


def _calibrate(*, quick: bool) -> None:
    jobs.submit(store(), "calibrate", {"quick": True} if quick else {})
    st.rerun()


def _card(machine: HardwareSpec, t: Translate) -> None:
    model = models.get_model(MODEL)
    points = [
        OperatingPoint(model, machine, setup, "decode", batch, CONTEXT)
        for setup in _setups(machine)
        for batch in BATCHES
    ]
    first = points[0]
    bound, share = first.bounds()[0]
    title = t("machine.title") if first.calibrated else t("machine.stand_in", device=machine.name)
    st.header(title, anchor="machine")
    answer = "machine.answer" if first.calibrated else "machine.stand_in_answer"
    held = {"bound": t(f"bound.{bound}"), "share": text.percent(share)}
    st.markdown(t(answer, device=machine.name, model=MODEL, context=CONTEXT, **held))
    steps = [_placed(point, labelled=point.setup.weights == first.setup.weights, t=t) for point in points]
    if "pages" in st.session_state:
        chosen = {"hw": machine.name, "model": MODEL, "batch": str(BATCHES[0]), "ctx": str(CONTEXT)}
        st.page_link(
            st.session_state["pages"]["explore"],
            label=t("machine.explore"),
            icon=":material/show_chart:",
            query_params=chosen,
        )
    roofs = roofline.roofs_of(machine)
    left, right = st.columns([3, 1], gap="medium")
    with left:
        chart(
            roofline.roofline_figure(roofs.around_the_ridge, steps, t, operators=False, height=430),
            key="machine",
            alt=roofline.alt_text(steps, t),
            caption=t("machine.caption", source=_measured(machine, t), model=MODEL, context=CONTEXT),
            table=tables.steps_table(points, t),
        )
    with right:
        _roofs(roofs, first, t)


def _roofs(roofs: roofline.Roofs, step: OperatingPoint, t: Translate) -> None:
    """The roofs in figures, the fastest format first, and the step that they hold back."""
    st.metric(t("machine.step", batch=step.batch), text.seconds(float(step.cost.time_s)), help=t("help.step"))
    for level, rate in sorted(roofs.bandwidths.items(), key=lambda item: item[1]):
        st.metric(t(f"level.{level}"), text.bandwidth(rate), help=t(f"help.{level}"))
    rows = [f"| {name} | {text.flop_rate(rate)} |" for name, rate in sorted(roofs.rates.items(), key=lambda r: -r[1])]
    head = [f"| {t('machine.format')} | {t('machine.rate')} |", "|---|--:|"]
    st.markdown("\n".join([*head, *rows]), help=t("help.matrix"))


def _measured(machine: HardwareSpec, t: Translate) -> str:
    """When and on what the roofs were measured; of a stand-in, where its data sheet is from."""
    calibration = machine.calibration
    if calibration is None:
        return machine.source
    when = calibration.created[:16].replace("T", " ")
    return t("machine.measured", when=when, machine=calibration.machine, threads=calibration.threads)


def _placed(point: OperatingPoint, labelled: bool, t: Translate) -> roofline.PlacedStep:
    """A step in its series; the labels of more than one would hide each other."""
    name = "machine.labelled_series" if labelled else "machine.series"
    label = str(point.batch) if labelled else ""
    return roofline.PlacedStep(t(name, format=point.setup.weights.name), label, point.cost)


def _setups(machine: HardwareSpec) -> list[EngineSetup]:
    """The plain engine, and each technique of the registry that has weights in a format that was measured here."""
    measured = machine.calibration.linear if machine.calibration else FORMATS
    setups = [technique(name=name).apply(EngineSetup()) for name, technique in TECHNIQUES.items()]
    changed = [setup for setup in setups if setup.weights != EngineSetup().weights]
    return [EngineSetup(), *(setup for setup in changed if setup.weights.name in measured)]
