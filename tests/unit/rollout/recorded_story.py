"""Random moves of engines, agent loops, rewards and ranks, over incarnations of a manager."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ledger_replay import replay
from ledger_samples import wire_of
from recorded_checks import check_accounts, check_batches
from recorded_world import STOP, Engine, Life, Loop, Taken
from rollout_configs import rollout_config

from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.trajectory import Group
from umbra.runtime.rollout.ledger.ledger_events import Evaluated, Restored
from umbra.runtime.rollout.ledger.ledger_history import Position, read_history
from umbra.runtime.rollout.ledger.ledger_snapshot import read_content, snapshots_of, take_snapshot


class Kept(NamedTuple):
    """A checkpoint."""

    step: int = 0
    version: int = 0
    position: str = ""


class Story:
    """Random moves on one folder, over incarnations of its managers. The seed decides them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        self.config = rollout_config(
            stop_token_ids=(0,),
            max_staleness=self.chance.randrange(3),
            batch_order=self.chance.choice(["in_order", "first_finished"]),
            over_sampling=self.chance.choice([1.0, 1.0, 1.5]),
            drop_zero_variance_groups=self.chance.random() < 0.3,
            max_failed_share=1.0,
            agent="loops:run" if self.chance.random() < 0.6 else None,
        )
        self.moves: list[str] = []
        self.life = Life(folder, self.config)
        self.lives_of_engines = 0
        self.version = self.step = 0
        self.phase = "publish"
        self.is_current = False  # the engines' weights belong to this history
        self.version_steps: dict[int, int] = {}
        self.kept = [Kept()]
        self.delivered: dict[int, dict[str, Taken]] = {}
        self.once: dict[tuple[str, str], int] = {}
        self.durable_at = ""
        self.is_calm = False

    async def begin(self) -> None:
        await self.life.recorder.__aenter__()
        await self.life.recover(Restored(0, 0), "")

    def note(self, text: object) -> None:
        self.moves.append(str(text))

    async def move(self) -> None:
        life, workers = self.life, self.life.workers
        moves: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self.attach, 8 * (len(life.engines) < 2)),
            (self.serve, 2),
            (self.tick, 12 * any(engine.requests for engine in life.engines)),
            (self.deliver, 16 * any(engine.outbox for engine in life.engines)),
            (self.work, 12 * bool(workers.queue)),
            (self.score, 8 * bool(workers.scoring)),
            (self.ghost, bool(life.ghosts)),
            (self.loop, 12 * any(loop.is_free for loop in life.loops)),
            (self.ranks, 6),
        ]
        if not self.is_calm:
            moves += [
                (self.abort, 1),
                (self.lose_engine, 0.7),
                (self.refuse, 1),
                (self.lose_score, 0.5),
                (self.lose_loop, bool(life.loops)),
                (self.checkpoint, 4),
                (self.snapshot, 2),
                (self.damage, 0.3),
                (self.lose_manager, 0.6),
                (self.go_back, 0.3),
            ]
        chosen, *_ = self.chance.choices([m for m, _ in moves], [weight for _, weight in moves])
        await chosen()
        await asyncio.sleep(0)
        assert not self.life.failures, self.life.failures
        self.life.dispatcher.check_integrity()

    # -- engines -------------------------------------------------------------------------

    async def attach(self) -> None:
        if len(self.life.engines) < 2:
            self.lives_of_engines += 1
            name = EngineId(f"e{self.lives_of_engines}", 1)
            engine = Engine(name, self.version - (self.phase == "sync"))
            self.life.engines.append(engine)
            self.note(f"attach {name}")
            self.life.dispatcher.attach(name, engine)
            await self.serve()

    async def serve(self) -> None:
        """Also true while the ranks train, and until they have published the announced version."""
        if self.is_current:
            for engine in self.life.engines:
                self.life.dispatcher.set_serving(engine.engine_id, True)

    def engine(self) -> Engine | None:
        return self.chance.choice(self.life.engines) if self.life.engines else None

    async def tick(self) -> None:
        for engine in self.life.engines:
            if engine.requests:
                engine.tick(self.chance)
                self.note(f"tick {engine.engine_id}")

    async def deliver(self) -> None:
        engine = self.engine()
        if engine is not None and engine.outbox:
            self.note(f"deliver {engine.engine_id}")
            for _ in range(self.chance.randint(1, len(engine.outbox))):
                self.life.dispatcher.on_batch(engine.engine_id, engine.outbox.popleft())

    async def abort(self) -> None:
        engine = self.engine()
        if engine is not None:
            self.note(f"abort {engine.engine_id}")
            engine.abort([rid for rid in engine.requests if self.chance.random() < 0.5])

    async def refuse(self) -> None:
        engine = self.engine()
        if engine is not None and engine.requests:
            rid = max(engine.requests)
            del engine.requests[rid]
            self.note(f"refuse {engine.engine_id} {rid}")
            self.life.dispatcher.hand_back(engine.engine_id, [rid])

    async def lose_engine(self) -> None:
        engine = self.engine()
        if engine is not None:
            self.note(f"lose {engine.engine_id}")
            self.life.engines.remove(engine)
            self.life.dispatcher.detach(engine.engine_id)
            for batch in engine.outbox:
                self.life.dispatcher.on_batch(engine.engine_id, batch)

    # -- rewards and agent loops ---------------------------------------------------------

    async def work(self) -> None:
        """A worker takes a job."""
        workers = self.life.workers
        if not workers.queue:
            return
        job = workers.queue.pop(self.chance.randrange(len(workers.queue)))
        if not job.is_active():
            return
        self.note(f"work on {job.label}")
        arguments: Any = job.make_arguments()
        if job.method == "score":
            workers.scoring.append((job, len(arguments[1])))
        else:
            path = self.chance.choice([0, 0, 0, 1, 2])
            self.life.loops.append(Loop(job, arguments[0], path))

    async def score(self) -> None:
        if not self.life.workers.scoring:
            return
        job, count = self.life.workers.scoring.pop(0)
        self.note(f"result of {job.label}")
        if job.is_active():
            rewards = [float(self.chance.randrange(3)) for _ in range(count)]
            short = [math.nan if reward == 1.0 else -reward for reward in rewards]
            parts = {"exact": rewards, "short": short} if rewards[0] else {}
            job.on_result({"rewards": rewards, "parts": parts})

    async def lose_score(self) -> None:
        if self.life.workers.scoring:
            job, _ = self.life.workers.scoring.pop()
            again = self.chance.random() < 0.7
            self.note(f"{'death' if again else 'failure'} at {job.label}")
            (self.life.workers.put if again else self.life.workers.fail)(job)

    async def loop(self) -> None:
        if not self.life.loops:
            return
        free = [loop for loop in self.life.loops if loop.is_free]
        loop = self.chance.choice(free if free and self.chance.random() < 0.9 else self.life.loops)
        try:
            await self._go_on(loop)
        except RolloutError as error:
            self.note(f"loop {loop.sample_id}: {error}")
            if loop.job.is_active():
                raise  # it did nothing wrong
            self._forget(loop)

    async def _go_on(self, loop: Loop) -> None:
        chance = self.chance.random()
        if loop.task is not None and loop.task.done() and chance < 0.9:
            answer, loop.task = loop.task.result(), None
            tokens: list[int] = answer["tokens"].tolist()
            self.note(f"loop {loop.sample_id} got {tokens}")
            if answer["finish_reason"] == "stop":
                assert tokens[-1] == STOP
            elif loop.job.is_active():  # else there is another trajectory of that name
                is_full = self.life.sample(loop.sample_id).num_tokens_left() == 0
                assert len(tokens) == loop.limit or is_full, "less than it asked for"
            loop.heard(tokens)
        elif loop.task is not None:
            if chance < 0.03:
                self.note(f"loop {loop.sample_id} does not wait for it")
                await self._cancel(loop)
            elif chance < 0.04:
                await self._return(loop)
        elif chance < 0.2:
            await self._once(loop)
        elif loop.num_turns == 3 or chance < 0.25 or len(loop.context) >= 30:
            await self._return(loop)
        else:
            self.note(f"loop {loop.sample_id}, path {loop.path}, generates {loop.limit}")
            context = np.asarray(loop.context, np.int32)
            generating = self.life.sessions.generate(loop.session, context, loop.limit)
            loop.task = asyncio.get_running_loop().create_task(generating)
            self.life.tasks.append(loop.task)

    async def _once(self, loop: Loop) -> None:
        key = f"k{loop.num_turns}"
        known = [self.once[loop.sample_id, key]] if (loop.sample_id, key) in self.once else []
        assert self.life.sessions.recall(loop.session, key) == known, (loop.sample_id, key)
        if not known:
            value = self.chance.randrange(1000)
            self.note(f"loop {loop.sample_id} keeps {key} = {value}")
            await self.life.sessions.keep(loop.session, key, value)
            self.once[loop.sample_id, key] = value

    async def _return(self, loop: Loop) -> None:
        reward = self.chance.choice([None, 0.0, 1.0])
        self.note(f"loop {loop.sample_id} returns {reward}")
        if self.chance.random() < 0.5:
            await self._cancel(loop)
        self._forget(loop)
        if loop.job.is_active():
            sample = self.life.sample(loop.sample_id)
            loop.job.on_result(reward)
            if loop.seen:
                assert sample.context().tolist() == loop.seen
            else:
                assert sample.completion_len == 0
            await self._cancel(loop)

    async def lose_loop(self) -> None:
        if not self.life.loops:
            return
        loop, kind = self.chance.choice(self.life.loops), self.chance.choice(["dies", "raises"])
        self.note(f"loop {loop.sample_id} {kind}")
        if self.chance.random() < 0.5:
            await self._cancel(loop)
        self._forget(loop)
        if self.chance.random() < 0.3:
            self.life.ghosts.append(loop)
        if kind == "dies":
            self.life.workers.put(loop.job)
        else:
            self.life.workers.fail(loop.job)

    async def ghost(self) -> None:
        """A loop that counts as dead makes another call."""
        loop = self.life.ghosts.pop()
        self.note(f"ghost of {loop.sample_id} generates {loop.limit}")
        context = np.asarray(loop.context, np.int32)
        generating = self.life.sessions.generate(loop.session, context, loop.limit)
        self.life.tasks.append(asyncio.get_running_loop().create_task(generating))

    async def _cancel(self, loop: Loop) -> None:
        if loop.task is not None:
            loop.task.cancel()
            await asyncio.gather(loop.task, return_exceptions=True)
            loop.task = None

    def _forget(self, loop: Loop) -> None:
        self.life.loops.remove(loop)

    # -- ranks ---------------------------------------------------------------------------

    async def ranks(self) -> None:
        """The next thing that the ranks do."""
        life = self.life
        if self.phase == "publish":
            self.version += 1
            self.version_steps[self.version] = self.step
            self.note(f"announce version {self.version} of step {self.step}")
            life.learn(self.version, self.step)
            await life.recorder.durable()
            self.phase = "sync"
        elif self.phase == "sync":
            self.note("sync")
            for engine in life.engines:
                life.dispatcher.set_serving(engine.engine_id, False)
                if self.chance.random() < 0.7:  # else it keeps what it has
                    engine.abort(list(engine.requests))
                engine.version = self.version
            self.phase, self.is_current = "ask", True
            if not self.is_calm and self.chance.random() < 0.2:
                await self.evaluate()
        elif self.phase == "ask" or self.chance.random() < 0.1:
            self.note(f"ask for step {self.step}")
            await self.serve()
            life.learn(self.version, self.step)
            life.flow.advance(self.step)
            self.phase = "wait"
        elif self.phase == "wait" and (groups := life.flow.take(self.step)) is not None:
            self.note(f"take {[group.group_id for group in groups]}")
            if not self.is_calm and self.chance.random() < 0.1:
                await self.lose_manager()
                return
            await life.recorder.durable()
            self.take(groups)
            self.phase = "publish"
            self.step += 1

    async def evaluate(self) -> None:
        """An outcome that is given to the ranks."""
        outcome = {"accuracy": self.chance.random()}
        self.note(f"evaluation of step {self.step}: {outcome}")
        self.life.recorder.evaluated(self.step, 0.0, outcome)
        await self.life.recorder.durable()
        self.life.evaluation = Evaluated(self.step, 0.0, outcome)

    def take(self, groups: list[Group]) -> None:
        batch: dict[str, Taken] = {}
        for group in groups:
            for sample in group.trajectories:
                made = sample.versions[sample.versions >= 0].tolist()
                ages = [self.step - self.version_steps[version] for version in made]
                assert all(0 <= age <= self.config.settings.max_staleness for age in ages), ages
                assert sample.num_generated == len(made) <= self.config.settings.max_new_tokens
                versions = sample.versions.tolist()
                parts = repr(dict(sample.reward_parts))
                taken = Taken(sample.tokens.tolist(), versions, sample.reward, parts)
                batch[sample.sample_id] = taken
        before = self.delivered.setdefault(self.step, batch)
        assert before == batch, "another batch than the first time"
        earlier = [ids for step, ids in self.delivered.items() if step != self.step]
        assert not any(batch.keys() & ids.keys() for ids in earlier), "trained on twice"

    async def checkpoint(self) -> None:
        if self.phase == "publish" and self.step > self.kept[-1].step:
            self.note(f"checkpoint of step {self.step}")
            await self.life.recorder.durable()
            self.kept.append(Kept(self.step, self.version, self.life.recorder.position))
            if self.chance.random() < 0.8:
                self.life.recorder.checkpoint(self.step, self.version, [])
                await self.life.recorder.durable()

    async def snapshot(self) -> None:
        """As the manager's process does; which checkpoints are there may be unknown."""
        await self.life.recorder.durable()
        history = read_history(self.folder).until(Position.parse(self.life.recorder.position))
        steps = self.chance.choice([None, [kept.step for kept in self.kept]])
        taken = take_snapshot(history, steps)
        self.note(f"snapshot at {taken.position} of step {taken.steps_done}")

    async def damage(self) -> None:
        """Harms the newest snapshot."""
        for snapshot in snapshots_of(read_history(self.folder))[:1]:
            self.note(f"snapshot at {snapshot.position} is damaged")
            data = bytearray(snapshot.path.read_bytes())
            data[self.chance.randrange(len(data))] ^= 1
            snapshot.path.write_bytes(data[: self.chance.choice([len(data), len(data) // 2])])

    async def lose_manager(self, restored: Restored | None = None, needs: str = "") -> None:
        """Stops the manager in order, or at once, which loses what is not on disk yet."""
        old, self.life = self.life, Life(self.folder, self.config)
        is_sudden = self.chance.random() < 0.7
        self.note(f"the manager {'is killed' if is_sudden else 'ends'}")
        if not is_sudden:
            await old.end()
        await self.life.recorder.__aenter__()
        if is_sudden:
            await old.end()
        evaluation = old.evaluation if restored is None else None
        await self.life.recover(restored, needs)
        assert self.life.evaluation == evaluation
        if self.phase == "wait":
            self.phase = "ask"
        for _ in range(2):
            await self.attach()
        if restored is None and self.chance.random() < 0.7:
            self.note("it goes on before the ranks ask")
            self.life.flow.resume()

    async def go_back(self) -> None:
        """Restores the job from a checkpoint, with this manager or another."""
        while len(self.kept) > 1 and self.chance.random() < 0.3:
            self.kept.pop()
        kept = self.kept[-1]
        restored = Restored(kept.step, kept.version)
        self.step, self.phase, self.is_current = kept.step, "publish", False
        self.delivered = {s: batch for s, batch in self.delivered.items() if s < self.step}
        self.note(f"back to {restored}")
        if self.chance.random() < 0.6:
            await self.lose_manager(restored, kept.position)
            return
        for engine in self.life.engines:
            self.life.dispatcher.set_serving(engine.engine_id, False)
        await self.life.recover(restored, kept.position)

    # -- invariants ----------------------------------------------------------------------

    async def check(self) -> None:
        recorder = self.life.recorder
        await recorder.durable()
        await asyncio.sleep(0)
        while recorder.queued_nbytes:  # groups were admitted when there was capacity
            await recorder.durable()
            await asyncio.sleep(0)
        history = read_history(self.folder)
        if self.durable_at:
            assert history.covers(Position.parse(self.durable_at))
        self.durable_at = self.life.recorder.position
        state = replay(history.entries)
        assert wire_of(read_content(history).state) == wire_of(state)
        state.check_integrity()
        check_accounts(state, self.life)
        check_batches(state, self.delivered)
        if (
            self.config.settings.batch_order == "in_order"
            and self.config.settings.over_sampling == 1.0
        ):
            assert "too old" not in self.life.flow.dropped, "admission alone keeps the bound"
