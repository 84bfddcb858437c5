"""The loop: rollout, score, advantage, update. It knows nothing of the model, the sampler or the rewards."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, ops
from tqdm import tqdm

from dancegrpo.config import Config, derive_counts
from dancegrpo.data import PromptSet
from dancegrpo.diffusion import PolicyStep, Sampler
from dancegrpo.models.lora import adapt
from dancegrpo.rl.advantages import make_advantage_rule, most_informative_groups, shuffle_in_groups
from dancegrpo.rl.chain import make_chain
from dancegrpo.rl.clipping import clip_verdict
from dancegrpo.rl.guard import FiniteGuard, RatioCheck
from dancegrpo.rl.measures import group_metrics, reward_metrics, update_metrics
from dancegrpo.rl.objectives import make_objective
from dancegrpo.rl.run_state import RunState, load_run_state, save_run_state
from dancegrpo.rl.samples import SampleGrid
from dancegrpo.rl.trajectory import Trajectory, select_transitions
from dancegrpo.rl.update import PolicyUpdater, UpdateStats
from dancegrpo.runtime import noise, probes
from dancegrpo.runtime.files import write_folder_atomic
from dancegrpo.runtime.report import write_report
from dancegrpo.runtime.runlog import RunFolder
from dancegrpo.runtime.signals import StopSignal, Terminated

if TYPE_CHECKING:
    from dancegrpo.pipelines import Pipeline
    from dancegrpo.rewards import RewardSet

_CLIP_ADVICE_AFTER = 5  # iterations


class Trainer:
    """RL post-training of a pipeline.

    Everything is a function of the config, the seed, the iteration and the state that checkpoints hold, so a
    resumed run ends with the same bytes.

    Args:
        config: the resolved config.
        pipeline: the model to start from (`pipelines.load_pipeline`); its backbone, or with `lora.rank` a LoRA of it,
            is trained in place.
        reward_set: see `rewards.RewardSet`.
        prompt_set: prompts to train on.
        run_folder: opened for this run; the trainer continues after ``run_folder.start``.

    Raises:
        ConfigError: a transition without a density, a LoRA that does not fit the backbone, or no room for encoded
            prompts (`Pipeline.prepare_prompts`).
    """

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        reward_set: RewardSet,
        prompt_set: PromptSet,
        run_folder: RunFolder,
    ) -> None:
        self.config, self.counts = config, derive_counts(config)
        self.pipeline, self.reward_set, self.prompt_set, self.run_folder = (
            pipeline,
            reward_set,
            prompt_set,
            run_folder,
        )
        train = config.train
        adapt(pipeline.backbone, config.lora, config.model.lora, pipeline.component, train.seed)
        pipeline.prepare_prompts(prompt_set.prompts, config.model.drop_text_encoder)
        transition, self.schedule = make_chain(config.sampler, pipeline.process, pipeline.scheduler)
        self.policy_step = PolicyStep(pipeline.denoiser, transition)
        self.sampler = Sampler(
            self.policy_step, self.schedule, train.micro_batch, self.counts.stochastic_steps
        )
        self.advantage_rule = make_advantage_rule("group_sample_std")
        self.updater = PolicyUpdater(
            self.policy_step,
            pipeline.backbone.trainable_params(),
            make_objective("clipped_surrogate"),
            config,
            self.counts.transitions_per_update,
        )
        self.reference = self.updater.flat.weights.asnumpy().copy() if train.kl_weight > 0 else None
        self.samples = SampleGrid(config, pipeline, prompt_set) if config.output.sample_every else None
        self.timer = probes.PhaseTimer()
        self.iteration = 0  # the last one that the weights have seen whole
        self.guard = FiniteGuard(train.max_skipped)
        self.ratio_check = RatioCheck(self.updater.clip_range)
        self._updating = False  # True: the weights are those of no whole, logged iteration

    # ---- the four verbs

    def rollout(self, iteration: int) -> Trajectory:
        """Samples all candidates of the iteration's prompts and decodes them; host rewards work meanwhile."""
        counts, train = self.counts, self.config.train
        rows = self.prompt_set.batch(iteration, counts.prompts, train.seed, self.config.data.shuffle)
        chosen = [self.prompt_set.prompts[row] for row in rows]
        conditions = self.pipeline.encode_prompts(chosen)
        prompt, candidate = np.divmod(np.arange(counts.images), counts.candidates)
        prompts, metadata = [chosen[i] for i in prompt], [self.prompt_set.metadata[rows[i]] for i in prompt]
        chains, images, scoring = [], [], self.reward_set.stream()
        for start in range(0, counts.images, train.micro_batch):
            part = slice(start, start + train.micro_batch)
            initial, drawn = self._noise(iteration, prompt[part], candidate[part])
            chain = self.sampler.sample(
                initial, [array[prompt[part]] for array in conditions], drawn, keep=True
            )
            images.append(self.pipeline.decode(chain.final))
            scoring.add(images[-1], prompts[part], metadata[part])
            chains.append(chain)
        return Trajectory(
            iteration=iteration,
            prompts=prompts,
            metadata=metadata,
            group_size=counts.candidates,
            conditions=tuple(conditions),
            schedule=self.schedule,
            latents=np.concatenate([_stack(chain.latents) for chain in chains], axis=1),
            log_probs=np.concatenate([_stack(chain.log_probs) for chain in chains], axis=1),
            images=images[0] if len(images) == 1 else ops.cat(images),
            scoring=scoring,
        )

    def score(self, trajectory: Trajectory) -> dict[str, np.ndarray]:
        """Label -> float32 (N,): what each reward says of each image."""
        return trajectory.scoring.finish(trajectory.images, trajectory.prompts, trajectory.metadata)

    def advantage(self, scores: Mapping[str, np.ndarray], iteration: int) -> np.ndarray:
        """Float32 (N,): advantages within groups; shuffled there if the run is a control."""
        train = self.config.train
        advantages = self.advantage_rule(
            self.reward_set.total(scores), train.candidates, clip=train.advantage_clip
        )
        if train.control == "shuffled_advantages":
            advantages = shuffle_in_groups(
                advantages, train.candidates, noise.generator("control", train.seed, iteration)
            )
        return advantages

    def choose(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """int, ascending: the images that are trained on, those of the prompts whose rewards differ most."""
        size = self.counts.candidates
        groups = most_informative_groups(self.reward_set.total(scores), size, self.counts.trained_prompts)
        return (groups[:, None] * size + np.arange(size)).reshape(-1)

    def update(self, trajectory: Trajectory, advantages: np.ndarray, images: np.ndarray) -> dict[str, float]:
        """All updates of an iteration, on transitions of the given images (see `choose`); returns their metrics.

        Raises:
            NotFinite: too many updates in a row were not finite.
            ConfigError: the clip range lies below the numerical noise of the ratio.
        """
        counts, train = self.counts, self.config.train
        chosen = select_transitions(
            images,
            min(counts.steps - 1, counts.stochastic_steps),
            counts.trained_per_image,
            train.seed,
            trajectory.iteration,
            train.timestep_selection,
        )
        batches = chosen.reshape(-1, train.micro_batch, 2)
        references = (
            [None] * len(batches) if self.reference is None else self._reference_means(trajectory, batches)
        )
        per_update, measured, skipped = counts.micro_batches_per_update, [], 0
        for number in range(counts.updates):
            for index in range(number * per_update, (number + 1) * per_update):
                self.updater.accumulate(trajectory.batch(batches[index], advantages, references[index]))
            stats = self.updater.stats()
            measured.append(stats)
            if stats.finite:
                if number == 0:
                    self.ratio_check.look(stats.ratio_deviation)
                self.updater.apply()
                self.guard.applied()
            else:
                skipped += 1
                self._skip(self.updater.discard(), trajectory.iteration)
        return self._update_metrics(measured, skipped)

    # ---- the loop

    def train(self) -> dict[str, Any]:
        """Runs all iterations that are left; returns what `summary.json` holds.

        Ctrl-C and SIGTERM abort an iteration that has not changed the weights yet, else wait for its end,
        save the last whole iteration and then raise KeyboardInterrupt or Terminated.
        """
        total, started = self.config.train.iterations, time.perf_counter()
        self.run_folder.path.joinpath("summary.json").unlink(missing_ok=True)  # of a run that is prolonged
        # With the weights to start from, on resume too; so it is compiled before the first iteration ends.
        before = self.samples.images() if self.samples else None
        if self.run_folder.start:
            self.load(self.run_folder.start)
        elif self.samples:
            self.run_folder.save_sample(0, self.samples.grid(before))
        after = self._sample_images() if self.samples and self.run_folder.start else before
        with StopSignal() as stop, self._saved_on_interrupt(), _progress(self.iteration, total) as progress:
            for iteration in range(self.iteration + 1, total + 1):
                metrics, reward = self._iterate(iteration, stop.check)
                last = iteration == total
                if self.samples and (iteration % self.config.output.sample_every == 0 or last):
                    after = self._sample_images()
                    self.run_folder.save_sample(iteration, self.samples.grid(after))
                metrics["graph/compilations"] = probes.compilations()
                self.run_folder.log(metrics)
                if iteration == _CLIP_ADVICE_AFTER and not last:
                    self._advise_on_clipping()
                self.iteration, self._updating = iteration, False
                if iteration % self.config.output.checkpoint_every == 0 or last:
                    self.save()
                progress.set_postfix(reward=f"{reward:.4f}", refresh=False)
                progress.update()
                stop.check()
        return self._finish(before, after, time.perf_counter() - started)

    def _iterate(self, iteration: int, check: Callable[[], None]) -> tuple[dict[str, Any], float]:
        """One iteration; ``check`` is called while it can still be aborted. Metrics and mean reward."""
        self.timer.reset()
        with self.timer("rollout"):
            trajectory = self.rollout(iteration)
        check()
        with self.timer("score"):
            scores = self.score(trajectory)
        check()
        self._updating = True
        with self.timer("update"):
            bad = [label for label, values in scores.items() if not np.isfinite(values).all()]
            if bad:
                for _ in range(self.counts.updates):
                    self._skip(f"the reward {bad[0]!r}", iteration)
                measured = self._update_metrics([], self.counts.updates)
            else:
                measured = self.update(trajectory, self.advantage(scores, iteration), self.choose(scores))
        metrics = {"iteration": iteration, "images": self.counts.images}
        metrics |= reward_metrics(scores, self.counts.candidates)
        metrics |= group_metrics(self.reward_set.total(scores), self.counts.candidates)
        metrics |= measured | self.timer.metrics() | {"memory/peak_rss_mb": probes.peak_rss_mb()}
        return metrics, float(np.mean(self.reward_set.total(scores)))

    def _finish(self, before: np.ndarray | None, after: np.ndarray | None, seconds: float) -> dict[str, Any]:
        rows = self.run_folder.metrics()
        labels = self.reward_set.labels
        summary = {
            "iterations": self.iteration,
            "images": self.iteration * self.counts.images,
            "seconds": round(seconds, 1),
            "checkpoint": str(self.run_folder.checkpoint(self.iteration).relative_to(self.run_folder.path)),
            "skipped": sum(row["skipped"] for row in rows),
            "clipping": clip_verdict(rows, self.config.train),
            "seed": self.config.train.seed,
            "reward": {
                label: {"first": rows[0][f"reward/{label}/mean"], "last": rows[-1][f"reward/{label}/mean"]}
                for label in labels
            },
        }
        write_report(
            self.run_folder.path / "report.png",
            rows,
            before=before,
            after=after,
            captions=self.samples.prompts if self.samples else None,
            title=f"{self.run_folder.path.name}: {self.iteration} iterations",
        )
        self.run_folder.write_summary(summary)
        return summary

    # ---- state

    def save(self) -> None:
        """Saves the last whole iteration, unless it is saved already."""
        target = self.run_folder.checkpoint(self.iteration)
        if target.exists():
            return
        state = self.state()
        with write_folder_atomic(target) as folder:
            self.pipeline.save(folder, weights=state.policy if state.average is None else state.average)
            save_run_state(folder, state)
        self.run_folder.prune_checkpoints(self.config.output.keep_last)

    def load(self, iteration: int) -> None:
        """Puts the trainer into the state that the checkpoint of ``iteration`` holds.

        Raises:
            CheckpointError: the checkpoint is damaged. ConfigError: it is of another model.
        """
        self.restore(load_run_state(self.run_folder.checkpoint(iteration)))

    def state(self) -> RunState:
        """What a checkpoint must hold for a run to continue to the same bytes."""
        return self.updater.state({"iteration": self.iteration, "skipped_in_row": self.guard.in_row})

    def restore(self, state: RunState) -> None:
        """The inverse of `state`."""
        self.updater.restore(state)
        self.iteration = state.counters["iteration"]
        self.guard.in_row = state.counters["skipped_in_row"]

    @contextlib.contextmanager
    def _saved_on_interrupt(self):
        try:
            yield
        except (KeyboardInterrupt, Terminated):
            if self.iteration and not self._updating:
                self.save()
            raise

    # ---- parts

    def _update_metrics(self, measured: Sequence[UpdateStats], skipped: int) -> dict[str, float]:
        """The metrics of an iteration's updates; the range of the next one learns their spread."""
        clip_range = self.updater.clip_range
        metrics = update_metrics(measured, clip_range.value, self.updater.learning_rate, skipped)
        clip_range.observe(metrics["ratio/spread"])
        return metrics

    def _advise_on_clipping(self) -> None:
        advice = clip_verdict(self.run_folder.metrics(), self.config.train)
        if advice:
            tqdm.write(f"warning: {advice}", file=sys.stderr)

    def _noise(
        self, iteration: int, prompt: np.ndarray, candidate: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Initial noise (B, ...) and the noise of the stochastic steps (T, B, ...) of some images."""
        train, shape = self.config.train, self.pipeline.latent_shape
        shared = np.full_like(candidate, noise.SHARED_CANDIDATE)
        where = {"seed": train.seed, "iteration": iteration, "prompts": prompt.tolist()}
        initial = noise.batch(
            shape,
            candidates=(shared if train.shared_noise else candidate).tolist(),
            steps=noise.INITIAL_STEP,
            **where,
        )
        drawn = [
            noise.batch(shape, candidates=candidate.tolist(), steps=step, **where)
            for step in range(self.counts.stochastic_steps)
        ]
        return initial, np.stack(drawn)

    def _reference_means(self, trajectory: Trajectory, batches: np.ndarray) -> list[np.ndarray]:
        """Means of the frozen reference at the chosen transitions.

        The rollout's own graph is called with the reference's weights in place: no second model in memory, no
        further graph, and a divergence of exactly 0 where the weights are still the same.
        """
        self.updater.flat.show(self.reference)
        means = []
        for chosen in batches:
            batch = trajectory.batch(chosen, np.zeros(len(trajectory.prompts), np.float32))
            inputs = (
                batch.latents,
                batch.sigmas,
                batch.sigmas_next,
                batch.timesteps,
                np.zeros_like(batch.latents),
            )
            outputs = self.policy_step(*map(Tensor, inputs), None, *map(Tensor, batch.conditions))
            means.append(outputs[1].asnumpy())
        self.updater.flat.show(self.updater.flat.weights.asnumpy())
        return means

    def _sample_images(self) -> np.ndarray:
        """Images on the fixed prompts and noise, with the weights that a checkpoint gives to users."""
        average, flat = self.updater.average, self.updater.flat
        if average is None:
            return self.samples.images()
        flat.show(average.asnumpy())
        images = self.samples.images()
        flat.show(flat.weights.asnumpy())
        return images

    def _skip(self, bad: str, iteration: int) -> None:
        saved = self.run_folder.saved_iterations()
        last_good = (
            str(self.run_folder.checkpoint(saved[-1])) if saved else "the model that the run started from"
        )
        self.guard.skipped(bad, iteration, last_good)


def _stack(tensors: tuple[Tensor, ...]) -> np.ndarray:
    return np.stack([tensor.asnumpy() for tensor in tensors])


def _progress(done: int, total: int) -> tqdm:
    """A bar on a terminal; in a log file a line every half minute."""
    interval = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=total, initial=done, desc="training", unit="it", mininterval=interval, dynamic_ncols=True
    )
