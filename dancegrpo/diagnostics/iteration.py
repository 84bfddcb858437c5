"""Images a second of one training iteration, against the same iteration on diffusers' FLUX in PyTorch.

Rollout and update, without decoding and without a reward, on the shipped transformer in float32:

    ours            the real `Trainer`
    torch_b1        PyTorch at batch 1, gradients accumulated over the transitions, as the public trainer does
    torch_same      PyTorch at our micro-batch
    torch_compiled  the same through torch.compile

Each contender has a process of its own on the same `workers.THREADS` processors; they take turns, round after
round, and medians are compared. All of them do the whole iteration, all images and all transitions, and all
start from weights that the check has seen to give the same numbers: there are no ratios without that. Our
side draws its counter-based noise in the measured time, and PyTorch its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dancegrpo.config import Config, ConfigError, ReportedError, derive_counts
from dancegrpo.diagnostics.workers import Worker, thread_count

SETTINGS = (
    "data.prompts_per_iteration=8",
    "train.candidates=12",
    "sampler.num_steps=6",
    "train.timestep_fraction=0.6",
    "sampler.stochastic=all",
    "train.clip_range=0.01",
    "train.clip_unit=absolute",
    "train.ema_decay=0",
    "train.kl_weight=0",
    "train.trained_prompts=null",
    "train.updates_per_rollout=3",
    "train.micro_batch=96",
)
"""96 images of 6 stochastic steps, 3 of them trained, in 3 updates of 96 transitions; without the average of the
weights and with a fixed clip range, as public trainers have it. All else as in the config."""

TOLERANCES = {"velocity": 1e-4, "log_prob": 1e-4, "loss": 1e-3, "grad_norm": 1e-3, "update_norm": 1e-2}
"""Largest differences that still are the same computation; see `torch_flux.TorchIteration.check`. AdamW's
first step divides each gradient by its own size, which magnifies rounding: hence the last one."""

PLAIN_TOLERANCE = 0.15
"""How far PyTorch's speed here may lie from that of the plain loop, relative, before a warning is printed."""

_OURS = "dancegrpo.diagnostics.ours:OurIteration"
_TORCH = "dancegrpo.diagnostics.torch_flux:TorchIteration"
_PLAIN = "dancegrpo.diagnostics.torch_plain:PlainLoop"
_BATCH_1, _SAME, _COMPILED = "torch_b1", "torch_same", "torch_compiled"


@dataclass(frozen=True)
class TorchSetting:
    """What a PyTorch contender is given.

    Attributes:
        config: the run's config.
        folder, guidance_scale: see `ours.OurIteration.model`.
        reference: file that `ours.OurIteration.write_reference` wrote.
        batch: images per rollout call and transitions per gradient call; it divides the config's micro-batch.
        compiled: through torch.compile.
        threads: of PyTorch.
    """

    config: Config
    folder: str
    guidance_scale: float | None
    reference: str
    batch: int
    compiled: bool
    threads: int


def iteration(config: Config, repeats: int) -> dict[str, Any]:
    """The measurement; see the module.

    Returns:
        `images_per_s` by contender, and `ratio`: ours over theirs (above 1: ours is faster); None with an entry
        in `reasons` where torch.compile fails, for want of a C++ compiler say. `check`: differences by contender.
        `plain_loop`: a plain PyTorch loop at our batch, alone in a process of its own, beside `torch_same`.
        `cpu_s`: processor seconds of an iteration over all threads, the medians; on a busy machine they tell more
        than `seconds`, which holds all rounds. `idle_cpu_s`: what each process used of the processor in all the
        time that it waited.

    Raises:
        ConfigError: PyTorch is not installed, or the config asks for what only our side can do.
        ReportedError: the two sides do not compute the same.
    """
    _check_installed()
    _check_config(config)
    threads, counts = thread_count(), derive_counts(config)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dancegrpo-iteration-"))
        steps = 4 + 5 * repeats
        progress = stack.enter_context(tqdm(total=steps, unit="run", dynamic_ncols=True, file=sys.stderr))
        contest = _Contest(config, threads, str(Path(folder) / "reference.npz"), progress)
        measured = contest.run(repeats)
        plain, plain_cpu = contest.plain(repeats)
    seconds, check = measured["seconds"], measured["check"]
    rates = {
        name: None if values is None else counts.images / statistics.median(values)
        for name, values in seconds.items()
    }
    ratios = {name: None if rate is None else rates["ours"] / rate for name, rate in rates.items()}
    del ratios["ours"]
    return {
        "images_per_s": rates,
        "ratio": ratios,
        "reasons": measured["reasons"],
        "check": check,
        "tolerances": TOLERANCES,
        "plain_loop": _plain_result(counts.images / statistics.median(plain), rates[_SAME]),
        "cpu_s": measured["cpu_s"] | {"plain_loop": plain_cpu},
        "idle_cpu_s": measured["idle_cpu_s"],
        "threads": {"ours": threads, "torch": measured["facts"]["threads"]},
        "setting": asdict(counts) | {"micro_batch": config.train.micro_batch},
        "versions": {
            "mindspore": version("mindspore"),
            "mindformers": version("mindformers"),
            **measured["facts"]["versions"],
        },
        "seconds": {**seconds, "plain_loop": plain},
    }


class _Contest:
    """The contenders, one after the other made and checked, then measured in turns."""

    def __init__(self, config: Config, threads: int, reference: str, progress: tqdm) -> None:
        self.config, self.threads, self.reference, self.progress = config, threads, reference, progress
        self.model: dict[str, Any] = {}

    def run(self, repeats: int) -> dict[str, Any]:
        """Seconds of all rounds, differences, reasons for what is missing, and facts of PyTorch."""
        check, reasons = {}, {}
        with contextlib.ExitStack() as stack:
            self._show("ours: compiling")
            ours = stack.enter_context(Worker(_OURS, self.config, self.threads, True, threads=self.threads))
            ours.call("write_reference", self.reference)
            self.model = ours.call("model")
            workers = {"ours": ours}
            self.progress.update()
            for name, batch in ((_BATCH_1, 1), (_SAME, self.config.train.micro_batch)):
                self._show(f"{name}: checking")
                workers[name] = stack.enter_context(self._torch(batch, compiled=False))
                check[name] = _checked(name, workers[name])
                self.progress.update()
            self._show(f"{_COMPILED}: compiling")
            try:
                compiled = stack.enter_context(self._torch(self.config.train.micro_batch, compiled=True))
                check[_COMPILED] = _checked(_COMPILED, compiled)
                workers[_COMPILED] = compiled
            except RuntimeError as error:
                if isinstance(error, ReportedError):  # it compiles, but computes something else
                    raise
                reasons[_COMPILED] = str(error).splitlines()[0]
                print(f"warning: no torch.compile here: {reasons[_COMPILED]}", file=sys.stderr)
            self.progress.update()
            seconds, cpu = self._rounds(workers, repeats)
            return {
                "seconds": seconds | dict.fromkeys(reasons),
                "cpu_s": cpu | dict.fromkeys(reasons),
                "check": check,
                "reasons": reasons,
                "facts": workers[_SAME].call("facts"),
                "idle_cpu_s": {name: worker.idle_cpu_s() for name, worker in workers.items()},
            }

    def plain(self, repeats: int) -> tuple[list[float], float]:
        """Seconds of the plain loop, when all contenders are gone, and its median processor seconds."""
        name = "plain PyTorch loop"
        self._show(name)
        setting = self._setting(self.config.train.micro_batch, compiled=False)
        with Worker(_PLAIN, setting, threads=self.threads) as worker:
            seconds, cpu = self._rounds({name: worker}, repeats)
        return seconds[name], cpu[name]

    def _rounds(
        self, workers: dict[str, Worker], repeats: int
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Seconds of all rounds, and median processor seconds.

        Each turn begins with an iteration that is not measured: a process that has waited for the others' turns
        finds its caches cold, which would count most against the fast ones.
        """
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        cpu: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(repeats):
            for name, worker in workers.items():
                self._show(f"{name}: warming up")
                worker.call("run")
                self._show(name)
                seconds[name].append(worker.call("run"))
                cpu[name].append(worker.cpu_s)
                self.progress.update()
        return seconds, {name: statistics.median(values) for name, values in cpu.items()}

    def _torch(self, batch: int, compiled: bool) -> Worker:
        return Worker(_TORCH, self._setting(batch, compiled), threads=self.threads)

    def _setting(self, batch: int, compiled: bool) -> TorchSetting:
        return TorchSetting(
            config=self.config,
            folder=self.model["folder"],
            guidance_scale=self.model["guidance_scale"],
            reference=self.reference,
            batch=batch,
            compiled=compiled,
            threads=self.threads,
        )

    def _show(self, text: str) -> None:
        self.progress.set_description(text)


def disagreements(check: dict[str, float]) -> list[str]:
    """What lies beyond `TOLERANCES` (or is not a number), in words."""
    return [
        f"{name} differs by {check[name]:.2g} (at most {limit:g})"
        for name, limit in TOLERANCES.items()
        if not check[name] <= limit
    ]


def _checked(name: str, worker: Worker) -> dict[str, float]:
    check = worker.call("check")
    problems = disagreements(check)
    if problems:
        raise ReportedError(
            f"{name} does not compute the same as our side, so there is nothing to compare: {', '.join(problems)}"
        )
    return check


def _plain_result(rate: float, beside: float) -> dict[str, Any]:
    difference = beside / rate - 1.0
    agrees = abs(difference) <= PLAIN_TOLERANCE
    if not agrees:
        print(
            f"warning: {_SAME} runs {beside:.2f} images a second between its neighbours and {rate:.2f} as a plain "
            f"loop alone ({100 * difference:+.0f}%): the machine is not idle, or the ratios are not to be trusted",
            file=sys.stderr,
        )
    return {"images_per_s": rate, _SAME: beside, "relative_difference": difference, "agrees": agrees}


def _check_installed() -> None:
    missing = [name for name in ("torch", "diffusers", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(
            f"the iteration benchmark compares with PyTorch, and {' and '.join(missing)} cannot be imported; "
            "install the extra that brings them: pip install -e .[parity]"
        )


def _check_config(config: Config) -> None:
    """Refuses what the PyTorch side does not do."""
    train = config.train
    wanted = {
        "sampler.transition": (config.sampler.transition, "dance_sde"),
        "sampler.stochastic": (config.sampler.stochastic, "all"),
        "train.clip_unit": (train.clip_unit, "absolute"),
        "precision.compute": (config.precision.compute, "float32"),
        "train.kl_weight": (train.kl_weight, 0.0),
        "train.ema_decay": (train.ema_decay, 0.0),
        "train.lr_schedule": (train.lr_schedule, "constant"),
        "train.warmup_iterations": (train.warmup_iterations, 0),
    }
    for key, (value, only) in wanted.items():
        if value != only:
            raise ConfigError(f"{key}: the iteration benchmark compares {only!r} only, got {value!r}")
