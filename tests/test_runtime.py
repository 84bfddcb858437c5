"""Noise, files, batching, run folder, pictures, exit codes, and the set-up of MindSpore."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dancegrpo
from dancegrpo.config import ConfigError, ReportedError, load_config
from dancegrpo.runtime import files, noise
from dancegrpo.runtime.batching import run_batched
from dancegrpo.runtime.cli import run_cli
from dancegrpo.runtime.images import make_grid, save_png
from dancegrpo.runtime.precision import check_precision
from dancegrpo.runtime.report import write_report
from dancegrpo.runtime.runlog import RunFolder, read_metrics
from dancegrpo.runtime.signals import StopSignal, Terminated

NAMES = {"seed": 3, "iteration": 5, "prompt": 7, "candidate": 11, "step": 2}


def test_noise_is_the_same_for_ever():
    # Changing these numbers changes every run: old seeds would no longer give the old results.
    expected = np.array(
        [-0.7222191691398621, 0.9182822704315186, -0.004785111173987389, -2.321796417236328], np.float32
    )
    np.testing.assert_array_equal(noise.normal((4,), **NAMES), expected)


def test_noise_depends_on_its_names_only():
    alone = noise.normal((3, 5), **NAMES)
    noise.normal(
        (7,), **{**NAMES, "step": 3}
    )  # an odd draw leaves half a word behind, which must not be used
    rows = noise.batch((3, 5), seed=3, iteration=5, prompts=[1, 7, 7], candidates=[11, 11, 4], steps=2)
    np.testing.assert_array_equal(rows[1], alone)
    np.testing.assert_array_equal(
        noise.generator("noise", 3, 5, 7, 11, 2).standard_normal((3, 5), np.float32), alone
    )
    for name in NAMES:
        other = noise.normal((3, 5), **{**NAMES, name: NAMES[name] + 1})
        assert not np.intersect1d(other, alone).size, name
    swapped = noise.normal((3, 5), **{**NAMES, "prompt": 11, "candidate": 7})
    assert not np.intersect1d(swapped, alone).size
    many = noise.batch(
        (1000,),
        seed=0,
        iteration=1,
        prompts=range(100),
        candidates=noise.SHARED_CANDIDATE,
        steps=noise.INITIAL_STEP,
    )
    assert abs(many.mean()) < 0.01
    assert abs(many.std() - 1) < 0.01
    assert abs(np.corrcoef(many[0], many[1])[0, 1]) < 0.1


def test_batches_have_one_shape_and_no_padding_comes_back():
    shapes = []

    def fn(x, y):
        shapes.append(x.shape)
        return x + y, x

    x = np.arange(14.0).reshape(7, 2)
    total, same = run_batched(fn, (x, x), 3)
    np.testing.assert_array_equal(total, 2 * x)
    np.testing.assert_array_equal(same, x)
    assert shapes == [(3, 2)] * 3


def test_interrupted_writes_change_nothing(tmp_path):
    files.write_atomic(tmp_path / "file", b"old")
    with files.write_folder_atomic(tmp_path / "folder") as folder:
        (folder / "a").write_text("old")
    with pytest.raises(OSError, match="full"), files.write_folder_atomic(tmp_path / "folder") as folder:
        (folder / "a").write_text("new")
        raise OSError(errno.ENOSPC, "full")
    assert (tmp_path / "folder" / "a").read_text() == "old"
    # What a kill leaves behind: an unfinished folder, and a folder caught between the two renames.
    (tmp_path / ".tmp-other-1").mkdir()
    os.replace(tmp_path / "folder", tmp_path / ".old-folder")
    files.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "folder" / "a").read_text() == "old"


def test_bfloat16_on_cpu_is_refused():
    with pytest.raises(ConfigError, match="no CPU kernels.*'float32'"):
        check_precision("bfloat16", "CPU")
    check_precision("bfloat16", "Ascend")
    check_precision("float16", "CPU")


def test_pictures(tmp_path):
    images = np.zeros((5, 8, 8, 3), np.uint8)
    images[3] = (255, 0, 0)
    grid = make_grid(images, 2, ["a red circle and a blue square"] * 5, scale=10)
    pixels = np.asarray(grid)
    red = (pixels == (255, 0, 0)).all(-1)
    rows, columns = np.nonzero(red)
    assert red.sum() == 80 * 80  # whole, once
    assert rows.min() > grid.height / 3  # second row, second column
    assert columns.min() > grid.width / 2
    save_png(tmp_path / "a.png", images[3])
    assert np.array_equal(Image.open(tmp_path / "a.png"), images[3])


def _config(*overrides):
    return load_config(None, ["output.tensorboard=false", *overrides])


def _checkpoint(run, iteration):
    run.log({"iteration": iteration, "reward/rule/mean": np.float32(0.5), "loss/policy": float("nan")})
    with files.write_folder_atomic(run.checkpoint(iteration)) as folder:
        (folder / "model_index.json").write_text("{}")


def test_run_folder_resumes(tmp_path):
    path = tmp_path / "run"
    with RunFolder(path, _config()) as run:
        for iteration in (1, 2, 3):
            _checkpoint(run, iteration)
        run.save_sample(3, make_grid(np.zeros((1, 4, 4, 3), np.uint8), 1))
        run.log({"iteration": 4})
        run.prune_checkpoints(2)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 5, "rew')  # a kill in the middle of a line
    (path / "checkpoints" / ".tmp-iteration_000004-x").mkdir()
    with RunFolder(path, _config("train.iterations=999"), resume=True) as run:
        assert run.start == 3
        assert [row["iteration"] for row in run.metrics()] == [1, 2, 3]
        assert sorted(p.name for p in run.checkpoints.iterdir()) == ["iteration_000002", "iteration_000003"]
        assert (path / "samples" / "iteration_000003.png").exists()
    with RunFolder(path, _config(), resume=2) as run:
        assert (run.start, run.saved_iterations()) == (2, [2])
        assert not list((path / "samples").iterdir())
        run.log({"iteration": 3})
    rows = read_metrics(path)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert rows[0] == {"iteration": 1, "reward/rule/mean": 0.5, "loss/policy": None}


def test_run_folder_refuses(tmp_path):
    path = tmp_path / "run"
    with RunFolder(path, _config(), resume=True) as run:  # nothing saved yet: from the beginning
        assert run.start == 0
        _checkpoint(run, 1)
        with pytest.raises(ConfigError, match="another process"):
            RunFolder(path, _config(), resume=True)
    with pytest.raises(ConfigError, match="holds another run; use --resume"):
        RunFolder(path, _config())
    with pytest.raises(ConfigError, match="no checkpoint of iteration 7 to resume; saved are 1"):
        RunFolder(path, _config(), resume=7)
    with pytest.raises(ConfigError, match="train.seed = 0, but now it is 1"):
        RunFolder(path, _config("train.seed=1"), resume=True)
    assert [row["iteration"] for row in read_metrics(path)] == [1]  # refusals change nothing
    (path / "notes.txt").write_text("mine")
    with RunFolder(path, _config("train.seed=1"), overwrite=True) as run:
        assert (run.start, run.saved_iterations(), run.metrics()) == (0, [], [])
        assert (path / "notes.txt").exists()
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder(tmp_path, _config(), overwrite=True)


def test_overwriting_loses_nothing_before_the_new_run_trains(tmp_path):
    path = tmp_path / "run"
    with RunFolder(path, _config("train.seed=1")) as run:
        _checkpoint(run, 1)
    before = {file.relative_to(path): file.is_file() and file.read_bytes() for file in path.rglob("*")}
    with RunFolder(path, _config("train.seed=2"), overwrite=True) as run:
        assert run.saved_iterations() == [] and run.metrics() == []
        run.undo_overwrite()  # what the command does when the model or the prompts turn out to be wrong
    assert {
        file.relative_to(path): file.is_file() and file.read_bytes() for file in path.rglob("*")
    } == before

    RunFolder(path, _config("train.seed=2"), overwrite=True).close()  # and dies before its first iteration
    with RunFolder(path, _config("train.seed=1"), resume=True) as run:
        assert run.saved_iterations() == [1] and run.metrics()[0]["reward/rule/mean"] == 0.5

    with RunFolder(path, _config("train.seed=2"), overwrite=True) as run:
        run.log({"iteration": 1, "loss": 0.25})
        assert not (path / ".overwritten").exists()
        run.undo_overwrite()
        assert run.metrics()[0]["loss"] == 0.25


def test_report_shows_images_and_curves(tmp_path):
    rows = [
        {
            "iteration": i,
            "reward/rule/mean": i / 10,
            "reward/rule/group_std": None if i == 3 else 0.2,
            "grad/norm": 1.0,
            "loss/kl": 0.0,
        }
        for i in range(1, 8)
    ]
    images = np.zeros((4, 16, 16, 3), np.uint8)
    write_report(
        tmp_path / "full.png", rows, before=images, after=images + 255, captions=["a"] * 4, title="run"
    )
    write_report(tmp_path / "curves.png", rows)
    full, curves = (Image.open(tmp_path / name) for name in ("full.png", "curves.png"))
    assert full.height > curves.height
    assert len(np.unique(np.asarray(curves).reshape(-1, 3), axis=0)) > 10


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (None, 0, ""),
        (ConfigError("bad.yaml: no"), 2, "error: bad.yaml: no\n"),
        (ReportedError("reward broke"), 1, "error: reward broke\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 1, "error: the disk is full (/x/y); "),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1, "error: the disk is full; "),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("bug"), 1, "Traceback"),
    ],
)
def test_exit_codes(capsys, error, code, text):
    def main(_):
        if error:
            raise error

    with pytest.raises(SystemExit) as left:
        run_cli(main)
    assert left.value.code == code
    written = capsys.readouterr().err
    assert written.startswith(text)
    assert "Traceback" not in written or text == "Traceback"


def test_signals_wait_for_the_end_of_the_iteration():
    def send(number, holds):
        os.kill(os.getpid(), number)
        for _ in range(500):  # another thread may have to hand it over
            if holds():
                return
            time.sleep(0.01)
        pytest.fail("the signal did not arrive")

    with pytest.raises(Terminated), StopSignal() as stop:
        send(signal.SIGTERM, lambda: stop.requested)  # and we are still here: time to save
        stop.check()
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        send(signal.SIGINT, lambda: stop.requested)
        send(signal.SIGINT, lambda: False)  # the second one does not wait


def _process(folder: Path, *args: str) -> dict:
    """Runs runtime_process.py with the package's source as it was at the first call."""
    source = folder / "source"
    script = source / "runtime_process.py"
    if not source.exists():
        package = Path(dancegrpo.__file__).parent
        for part in ("config", "runtime"):
            shutil.copytree(package / part, source / "dancegrpo" / part)
        shutil.copy(package / "__init__.py", source / "dancegrpo")
        shutil.copy(Path(__file__).with_name(script.name), script)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    for name in (
        "GLOG_v",
        "LOG_MF_PATH",
        "MS_OM_PATH",
        "PYTHONPATH",
    ):  # the set-up is to do without conftest's
        environment.pop(name, None)
    (folder / "cwd").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, script, *args],
        cwd=folder / "cwd",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1, done.stdout
    assert not list((folder / "cwd").iterdir())
    return json.loads(done.stdout)


def test_processes_start_quietly_and_share_compiled_graphs(tmp_path):
    first = _process(
        tmp_path, "net:2,net:2,gradient:2,function:2,function:2,net:3,stray:4", "cache", "mindformers"
    )
    assert first["graph_mode"]
    assert first["counts"] == [0, 1, 1, 2, 3, 3, 4, 5]  # compiled once per shape, looked up after that
    # Code outside the packages that the key covers is not cached.
    assert (first["hits"], first["misses"], len(first["refused"])) == (0, 3, 2)
    # Another order of compilation gives each its own graph, and what is not there yet is compiled.
    second = _process(tmp_path, "stray:4,net:3,loss:2,gradient:2,function:2,net:2", "cache")
    assert (second["hits"], second["misses"]) == (3, 1)
    for name in set(first["results"]) & set(second["results"]):
        assert first["results"][name] == second["results"][name], name
    assert len(set(second["results"].values())) == 6
    assert list((tmp_path / "cache").rglob("*.mindir"))
    assert not list((tmp_path / "cache").rglob(".process-*"))


def test_graph_digest_tells_graphs_apart(monkeypatch):
    import mindspore as ms
    from mindspore import nn

    from dancegrpo.runtime import fingerprint
    from dancegrpo.runtime.compile_cache import graph_digest

    class Part(nn.Cell):
        def __init__(self, width=4, scale=1.0, table=(1.0, 2.0), name="weight", layers=1, hidden=None):
            super().__init__()
            self.scale = scale
            self.table = ms.Tensor(np.array(table, np.float32))
            self.weight = ms.Parameter(ms.Tensor(np.ones(width, np.float32)), name=name)
            self.layers = nn.CellList([nn.ReLU() for _ in range(layers)])
            self.function = lambda x: x + scale
            self.hidden = lambda x: x if hidden is None else hidden(x)

    def digest(part, rows=2, constant=None):
        part.__parse_method__ = "construct"
        return graph_digest(part, (ms.Tensor(np.zeros((rows, 4), np.float32)), constant), {}, {})

    with pytest.raises(fingerprint.NotFingerprintable, match="code of "):
        digest(Part())
    monkeypatch.setattr(fingerprint, "TRUSTED", {*fingerprint.TRUSTED, __name__.split(".")[0]})
    same = digest(Part())
    assert digest(Part()) == same
    trained = Part()
    trained.weight.set_data(ms.Tensor(np.zeros(4, np.float32)))  # values of parameters are inputs
    assert digest(trained) == same
    frozen = Part()
    frozen.weight.requires_grad = False
    others = [
        digest(Part(width=5)),
        digest(Part(scale=2.0)),
        digest(Part(table=(1.0, 3.0))),
        digest(Part(name="w")),
        digest(Part(layers=2)),
        digest(frozen),
        digest(Part().set_train()),
        digest(Part(), rows=3),
        digest(Part(), constant=2.0),
        digest(Part(), constant=(ms.Tensor(np.ones(2, np.float32)),)),
        digest(Part(), constant=(ms.Tensor(np.zeros(2, np.float32)),)),
    ]
    assert len({same, *others}) == 1 + len(others)
    # MindSpore would give the cached graph garbage in place of a Parameter that no Cell registers.
    with pytest.raises(fingerprint.NotFingerprintable, match="is not a Parameter of the Cell"):
        digest(Part(hidden=nn.Dense(2, 2)))
