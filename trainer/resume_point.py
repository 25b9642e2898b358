from __future__ import annotations

from pathlib import Path

from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.run_dir import begin_run
from umbra.trainer.config.trainer_config import RunSection
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.world.mesh import Mesh, from_lead


def find_resume_point(
    run: RunSection,
    incarnation: int,
    checkpoints: CheckpointStore,
    mesh: Mesh,
    display: ProgressDisplay,
) -> Path | None:
    """Prepares the run directory; returns the newest checkpoint whose files are intact. None if the
    run starts from scratch. Collective."""
    damaged = list[Path]()
    while True:
        path = from_lead(mesh, lambda: begin_run(run, incarnation, damaged))
        if path is None:
            return None
        with display.activity(f"checking {path.name}"):
            damage = checkpoints.find_damage(path)
        if not damage:
            if damaged:
                display.note(f"resuming from the older checkpoint {path} instead")
            return path
        display.note(f"warning: the checkpoint {path} is damaged: {damage}")
        damaged.append(path)
