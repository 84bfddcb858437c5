"""What graphs and batches are worth in sampling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dancegrpo.config import Config

_PROMPT = "a red circle"


def denoise(config: Config, repeats: int) -> dict[str, Any]:
    """One denoising step at the run's micro-batch: static graph against PyNative (eager) mode."""
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=False)
    import mindspore as ms

    from dancegrpo.diffusion import PolicyStep
    from dancegrpo.pipelines import PipelineOptions, load_pipeline
    from dancegrpo.rl.chain import make_chain

    batch = config.train.micro_batch
    pipeline = load_pipeline(config.model.checkpoint, PipelineOptions.of(config))
    transition, schedule = make_chain(config.sampler, pipeline.process, pipeline.scheduler)
    step = PolicyStep(pipeline.denoiser, transition)
    random = np.random.default_rng(0)
    latents, drawn = (
        ms.Tensor(random.standard_normal((batch, *pipeline.latent_shape), np.float32)) for _ in "ab"
    )
    times = [
        ms.Tensor(np.full(batch, value, np.float32))
        for value in (schedule.sigmas[0], schedule.sigmas[1], schedule.timesteps[0])
    ]
    conditions = [ms.Tensor(array) for array in pipeline.encode_prompts([_PROMPT] * batch)]

    def run() -> None:
        # One value read back is enough to wait for the whole step.
        step(latents, *times, drawn, None, *conditions)[0].asnumpy()

    modes = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(repeats + 1):
        for name, mode in modes.items():
            ms.set_context(mode=mode)
            run()  # compiles the first time, and warms up after each change of mode
            start = time.perf_counter()
            run()
            if turn:  # the first turn is warm-up
                seconds[name].append(time.perf_counter() - start)
    ms.set_context(mode=ms.GRAPH_MODE)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": medians, "ratio": {"pynative": medians["pynative"] / medians["graph"]}, "batch": batch}


def chain(config: Config, repeats: int) -> dict[str, Any]:
    """One graph per denoising step called T times (what `Sampler` does) against one graph for the whole chain.

    The chain graph is measured with its loop unrolled, and as a loop inside the graph. All three get the same
    noise from the host, and must end with the same latents.

    Returns:
        `seconds` of a chain, `compile_s` (the first call less a later one), `ratio` (step over the other: above
        1 the whole chain is faster), `max_abs_difference` of the decoded latents from the step graph's; None,
        with an entry in `reasons`, for a form that MindSpore does not compile.
    """
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=False)
    from dancegrpo.diagnostics.chains import make_chains

    chains, reasons = make_chains(config), {}
    first: dict[str, float] = {}
    finals: dict[str, np.ndarray] = {}
    for name, run in list(chains.items()):
        start = time.perf_counter()
        try:
            finals[name] = run()
        except Exception as error:
            if name == "step":
                raise
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            del chains[name]
            continue
        first[name] = time.perf_counter() - start
    medians = _alternate(chains, repeats)
    missing = dict.fromkeys(reasons)
    others = [name for name in chains if name != "step"]
    return {
        "seconds": medians | missing,
        "compile_s": {name: first[name] - medians[name] for name in chains} | missing,
        "ratio": {name: medians["step"] / medians[name] for name in others} | missing,
        "max_abs_difference": {name: float(np.abs(finals[name] - finals["step"]).max()) for name in others}
        | missing,
        "reasons": reasons,
        "steps": config.sampler.num_steps,
        "batch": config.train.micro_batch,
    }


def batch(config: Config, repeats: int) -> dict[str, Any]:
    """Making 16 images against making 1, after warm-up, as `tools/generate.py` does with its own batch.

    Every call of a generator has the batch's shape, so one image costs what a batch costs; `one_alone` is one
    image at batch 1.

    Returns:
        `seconds` for `sixteen`, `one` and `one_alone`, and `ratio` of sixteen to each of the others.
    """
    from dancegrpo.runtime.setup import setup_runtime

    setup_runtime(config.precision.compute, compile_cache=False)
    from dancegrpo.pipelines import PipelineOptions, load_pipeline
    from dancegrpo.pipelines.generate import GenerateOptions, ImageGenerator, requests_for

    pipeline = load_pipeline(config.model.checkpoint, PipelineOptions.of(config))
    size = GenerateOptions(output="").batch
    usual, single = (
        ImageGenerator(
            pipeline, num_steps=config.evaluation.num_steps, batch=images, shift=config.sampler.shift
        )
        for images in (size, 1)
    )
    seed, many, one = config.train.seed, requests_for([_PROMPT], 16), requests_for([_PROMPT])
    medians = _alternate(
        {
            "sixteen": lambda: usual.images(many, seed),
            "one": lambda: usual.images(one, seed),
            "one_alone": lambda: single.images(one, seed),
        },
        repeats,
    )
    return {
        "seconds": medians,
        "ratio": {name: medians["sixteen"] / medians[name] for name in ("one", "one_alone")},
        "batch": size,
        "steps": config.evaluation.num_steps,
    }


def _alternate(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turns after a round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
