"""The quickstart's model and data, smaller, and the model hardly warmed up."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_assets(folder: Path) -> None:
    """Writes model/, train.jsonl and eval.jsonl."""
    from umbra.trainer.quickstart import quickstart_model, quickstart_task

    (folder / "model").mkdir(parents=True)
    tasks = quickstart_task.draw_tasks(random.Random(0), 80)
    for name, rows in (("train", tasks[:64]), ("eval", tasks[64:])):
        text = "".join(json.dumps(row.row()) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    quickstart_model.write_tokenizer(folder / "model")
    warm_up = quickstart_model.WarmUp(careful_steps=5, shy_steps=0)
    quickstart_model.write_starting_model(folder / "model", tasks, 0, warm_up)
