"""`undercurrent probe`: make probes, as folders that a probe host reads, judge them, and roll them out."""

from __future__ import annotations

from typing import ClassVar

import typer

from undercurrent.cli.lazy import LazyCommand, LazyGroup


class ProbeTree(LazyGroup):
    """Its commands, in the order in which one meets them."""

    table: ClassVar[dict[str, LazyCommand]] = {
        "train": LazyCommand(
            target="probe_consumers.train_cli:app", help="Train a probe on recorded requests and their labels."
        ),
        "evaluate": LazyCommand(
            target="probe_consumers.evaluate_cli:app", help="Judge a probe on the test part of recorded requests."
        ),
        "compare": LazyCommand(
            target="probe_consumers.compare_cli:app", help="Compare two probes on the same requests."
        ),
        "drift": LazyCommand(
            target="probe_consumers.drift_cli:app", help="Tell how far traffic is from what placed a probe's threshold."
        ),
        "import": LazyCommand(
            target="undercurrent.cli.probe_importing:app", help="Write a direction from elsewhere as a probe's folder."
        ),
        "precision": LazyCommand(
            target="probe_consumers.precision_cli:app", help="Say what a coarser recording costs a probe, and saves."
        ),
        "deploy": LazyCommand(
            target="probe_consumers.rollout_cli:deploy", help="Put a version of a probe on trial, as a candidate."
        ),
        "mode": LazyCommand(
            target="probe_consumers.rollout_cli:mode", help="Change what a probe may do: shadow, flag or abort."
        ),
        "promote": LazyCommand(
            target="probe_consumers.rollout_cli:promote", help="Make the candidate the deployed version."
        ),
        "rollback": LazyCommand(
            target="probe_consumers.rollout_cli:rollback", help="Drop the candidate, or go back to the version before."
        ),
        "pause": LazyCommand(
            target="probe_consumers.rollout_cli:pause", help="Let a probe act on nobody, and go on recording."
        ),
        "resume": LazyCommand(
            target="probe_consumers.rollout_cli:resume", help="Let a probe act again after a pause or a brake."
        ),
        "rollouts": LazyCommand(
            target="probe_consumers.rollout_cli:rollouts", help="Show which versions are in force, and what was."
        ),
        "shadow": LazyCommand(
            target="probe_consumers.shadow_cli:app", help="Compare a candidate with the version that guards."
        ),
    }


app = typer.Typer(
    cls=ProbeTree,
    help="Train, judge and roll out probes, and make them of directions from elsewhere.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def probe() -> None:
    """Train, judge and roll out probes, and make them of directions from elsewhere."""
