from __future__ import annotations

from umbra.runtime.tracing.spans import span
from umbra.trainer.run_parts import TrainingRun


def train(run: TrainingRun) -> None:
    """Trains until `train.steps`, or until the ranks agree to stop; leaves a checkpoint and the
    results. Collective. Raises UmbraError on every rank if that is not possible.

    In a hybrid pool, engines and trainer use the GPUs in turn: engines pause while the trainer
    computes, free what `pool.sleep` names, and get the new weights when they wake. With
    `train.offload`, a rank's memory moves to the host as soon as sleeping engines have read its
    weights, and comes back when they sleep again. In a standalone pool, engines generate all the
    time, as far ahead as `rollout.max_staleness` allows, and are updated meanwhile.

    The ranks agree on stopping where they synchronise anyway: before training on a batch, and after
    a step. A signal to one of them ends the waits of all (`umbra.trainer.world.signals`).
    """
    while run.step < run.config.train.total_steps:
        with span("step", step=run.step + 1) as step:
            if not run.publish():
                break
            run.evaluate_if_due()
            batch = run.next_batch()
            if batch is None:
                break
            with run.training_owns_gpus():
                run.add_advantages(batch)
                run.update(batch)
            del batch  # its memory is free while the next one is generated
        run.finish_step(step.seconds)
        if run.should_stop():
            break
    else:
        run.evaluate_at_end()
    run.save()
    run.leave_results()
