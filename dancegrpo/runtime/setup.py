"""One call before anything else touches MindSpore: graph mode, device, quiet start, compile cache.

``setup_runtime`` sets environment variables that MindSpore and MindFormers read when they are imported, so
command lines call it first and import the rest after it.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from dancegrpo.config.folders import cache_folder
from dancegrpo.runtime import compile_cache as compile_cache_module
from dancegrpo.runtime import probes
from dancegrpo.runtime.precision import check_precision


@dataclass(frozen=True)
class Runtime:
    """What ``setup_runtime`` chose: device, compute format, folder of the compile cache (None: off)."""

    device: str
    precision: str
    compile_cache: Path | None


def setup_runtime(
    precision: str = "float32", *, compile_cache: bool = True, cache_key: str = "", device: str | None = None
) -> Runtime:
    """Prepares this process for static-graph work; can be called again, the last call counts.

    Args:
        precision: ``precision.compute`` of the config; refused when the device cannot do it.
        compile_cache: keep compiled graphs on disk for the next process; on a CPU only, tried on no other
            device.
        cache_key: text that stands for all that shapes the graphs in the config; other text, other cache.
        device: "CPU" or "Ascend"; None leaves it to MindSpore, which takes Ascend where its plugin loads.

    Raises:
        ConfigError: for a precision that the device cannot do, or an unknown one.
    """
    be_quiet()
    # OpenMP's threads would otherwise spin after each of their loops and keep MindSpore's own threads, or another
    # process, off the cores: an update takes twice as long with them on a busy machine. Read when MindSpore loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import mindspore as ms

    if device is not None:
        ms.set_device(device)
    target = ms.get_context("device_target")
    check_precision(precision, target)
    ms.set_context(mode=ms.GRAPH_MODE)
    if ms.get_context("mode") != ms.GRAPH_MODE:
        raise RuntimeError("MindSpore did not switch to graph mode")
    ms.set_seed(0)  # nothing of ours draws from global generators; third-party initialisers may
    probes.install_compilation_counter()
    store = None
    if compile_cache and target == "CPU":
        store = compile_cache_module.enable(cache_folder() / "compile", cache_key, target)
    else:
        compile_cache_module.disable()
    return Runtime(target, precision, store)


def be_quiet() -> None:
    """Keeps MindSpore's and MindFormers' start-up messages and log files away; errors still show.

    The variables only count when they are set before the first import; what the user has set is kept.
    """
    os.environ.setdefault("GLOG_v", "3")  # errors only
    os.environ.setdefault("LOG_MF_PATH", str(cache_folder() / "log"))  # MindFormers would write ./output/log
    os.environ.setdefault(
        "MS_OM_PATH", str(cache_folder() / "log")
    )  # a failed compilation would write ./rank_0/om
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "None of PyTorch, TensorFlow ... found"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"(mindspore|mindformers|transformers|datasets)(\.|$)")
    # MindFormers names its logger after its folder and sets the level itself, but leaves filters alone. It
    # warns at import about models of its own that need the package hyper_parallel.
    logger = logging.getLogger(f"mindformers{os.path.expanduser(os.environ['LOG_MF_PATH'])}")
    if not logger.filters:
        logger.addFilter(_errors_only)


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
