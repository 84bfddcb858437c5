"""Checkpoints on disk: shards, variants, number formats, memory, saving, and PyTorch's pickles."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.nn.utils import no_init_parameters
from safetensors.numpy import load_file, save_file

from dancegrpo.config import ConfigError, ReportedError
from dancegrpo.models import load_model, save_model
from dancegrpo.models.clip import CLIPTextConfig, CLIPTextModel
from dancegrpo.models.converting import convert
from dancegrpo.models.saving import parameter_arrays, write_weights
from dancegrpo.models.weights import load_parameters, named_parameters, read_headers
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

ROOT = Path(__file__).resolve().parent.parent
FLUX = ROOT / "tests" / "golden" / "models" / "flux_no_guidance"
TEXT = ROOT / "tests" / "golden" / "models" / "clip_text_gelu"
PLAIN, INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture(scope="module")
def flux():
    return load_model(FLUX)


@pytest.fixture
def shards(flux, tmp_path):
    """The model in some ten files."""
    save_model(flux, tmp_path / "shards", shard_bytes=20_000)
    return tmp_path / "shards"


def same(model, arrays) -> bool:
    found = parameter_arrays(model)
    return set(found) == set(arrays) and all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_shards_are_named_as_diffusers_does_and_load_to_the_same_numbers(shards):
    index = json.loads((shards / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
    stored = load_file(FLUX / PLAIN)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    assert sum((shards / file).stat().st_size for file in files) > index["metadata"]["total_size"]
    assert not (shards / PLAIN).exists()
    assert same(load_model(shards), stored)


def remove_shard(folder):
    (folder / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()


def swap_entries(folder):
    index = json.loads((folder / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == first)
    index["weight_map"][name] = second
    (folder / INDEX).write_text(json.dumps(index))


def drop_entry(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop("x_embedder.bias")
    (folder / INDEX).write_text(json.dumps(index))


def leave_the_folder(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["x_embedder.bias"] = "../other.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def cut_shard(folder):
    shard = folder / "diffusion_pytorch_model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


@pytest.mark.parametrize(
    "change, words",
    [
        (remove_shard, "shard diffusion_pytorch_model-00002-of-00002.safetensors is missing"),
        (swap_entries, "should be in .*00002-of-00002.safetensors, but is in .*00001-of-00002"),
        (drop_entry, "holds x_embedder.bias, which is not listed"),
        (leave_the_folder, "'../other.safetensors', which is no file of its own folder"),
        (cut_shard, "00001-of-00002.safetensors cannot be read as safetensors"),
        (lambda folder: (folder / INDEX).write_text("{}"), "no index of shards"),
    ],
)
def test_shards_that_do_not_fit_together_are_refused_by_name(flux, tmp_path, change, words):
    size = sum(array.nbytes for array in parameter_arrays(flux).values())
    save_model(flux, tmp_path / "model", shard_bytes=size * 2 // 3)
    change(tmp_path / "model")
    with pytest.raises(ConfigError, match=words):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_files_load_into_float32(flux, tmp_path, dtype):
    save_model(flux, tmp_path / "model", dtype=dtype)
    code = {"float16": "F16", "bfloat16": "BF16"}[dtype]
    assert {tensor.dtype for tensor in read_headers([tmp_path / "model" / PLAIN]).values()} == {code}
    rounded = {
        name: array.astype(np.dtype(dtype)).astype(np.float32)
        for name, array in load_file(FLUX / PLAIN).items()
    }
    assert same(load_model(tmp_path / "model"), rounded)


def test_a_variant_serves_where_there_is_no_plain_file(flux, tmp_path):
    folder = tmp_path / "model"
    save_model(flux, folder, dtype="float16")
    (folder / PLAIN).rename(folder / "diffusion_pytorch_model.fp16.safetensors")
    half = {name: a.astype(np.float16).astype(np.float32) for name, a in load_file(FLUX / PLAIN).items()}
    assert same(load_model(folder), half)
    shutil.copy(FLUX / PLAIN, folder / PLAIN)
    assert same(load_model(folder), load_file(FLUX / PLAIN))
    (folder / PLAIN).rename(folder / "diffusion_pytorch_model.ema.safetensors")
    (folder / "diffusion_pytorch_model.fp16.safetensors").rename(
        folder / "diffusion_pytorch_model.non_ema.safetensors"
    )
    with pytest.raises(ConfigError, match="variants ema, non_ema"):
        load_model(folder)


def test_a_folder_with_a_pickle_says_how_to_convert_it(tmp_path):
    shutil.copy(FLUX / "config.json", tmp_path)
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="diffusion_pytorch_model.bin has to be converted.*convert.py"):
        load_model(tmp_path)


def test_a_folder_with_an_open_clip_config_asks_for_its_weights(tmp_path):
    shutil.copy(ROOT / "tests/golden/open_clip/vit_gelu/open_clip_config.json", tmp_path)
    with pytest.raises(ConfigError, match="expected open_clip_model.safetensors"):
        load_model(tmp_path)


_MEASURE = """
import sys
from pathlib import Path
import mindspore as ms
from dancegrpo.models import clip, load_model
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
kept = []  # so that no model is loaded into the memory of an earlier one
for folder, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = peak()
    kept.append(load_model(folder, parameters_dtype=getattr(ms, dtype)))
    size = sum(parameter.size * parameter.itemsize for parameter in kept[-1].get_parameters())
    print("MEASURED", size, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_loading_takes_little_more_memory_than_the_model(tmp_path):
    config = CLIPTextConfig(vocab_size=40000, hidden_size=384, intermediate_size=1536, num_hidden_layers=4)
    with no_init_parameters():
        shapes = {name: p.shape for name, p in named_parameters(CLIPTextModel(config)).items()}
    rng, arguments = np.random.default_rng(0), []
    for stored, held, shard_bytes in [
        ("float32", "float32", 10**10),
        ("float16", "float32", 10**7),
        ("float32", "float16", 10**7),
    ]:
        folder = tmp_path / f"{stored}-{held}"
        folder.mkdir()
        named = {"architectures": ["CLIPTextModel"], **config.to_dict()}
        (folder / "config.json").write_text(json.dumps(named))
        write_weights(
            folder,
            "model",
            {name: int(np.prod(shape)) * np.dtype(stored).itemsize for name, shape in shapes.items()},
            lambda name, dtype=stored: rng.standard_normal(shapes[name], dtype=np.float32).astype(dtype),
            shard_bytes,
        )
        arguments += [str(folder), held]
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("MEASURED")]
    assert len(lines) == 3
    for (_, size, taken), megabytes in zip(lines, (89, 89, 44), strict=True):
        assert int(size) > megabytes * 1e6
        # Pieces of the file that are mapped do not grow with it; 1.3 is for models larger than these.
        assert 0.9 * int(size) < int(taken) < 1.1 * int(size) + 20e6


def test_weights_held_in_float16_give_nearly_the_same_states():
    io = np.load(TEXT / "io.npz")
    model = load_model(TEXT, dtype=ms.float16, parameters_dtype=ms.float16)
    types = {name: parameter.dtype for name, parameter in named_parameters(model).items()}
    assert types["text_model.encoder.layers.0.mlp.fc1.weight"] == ms.float16
    assert types["text_model.embeddings.token_embedding.weight"] == ms.float16
    assert types["text_model.encoder.layers.0.mlp.fc1.bias"] == ms.float32
    assert types["text_model.final_layer_norm.weight"] == ms.float32
    assert ms.get_context("mode") == ms.GRAPH_MODE
    state = model(Tensor(io["in_input_ids"].astype(np.int32)))[0]
    expected = io["out_last_hidden_state"]
    assert state.dtype == ms.float32
    assert np.abs(state.asnumpy() - expected).max() < 1e-2 * np.abs(expected).max()


class _Old(nn.Cell):
    """A model whose checkpoints once had other names."""

    ignored_weights = ("decoder.*",)

    def __init__(self):
        super().__init__()
        self.to_q = Parameter(Tensor(np.zeros((2, 3), np.float32)), name="to_q")
        self.scale = Parameter(Tensor(np.float32(0)), name="scale")

    @staticmethod
    def weight_name(name):
        return {"query": "to_q"}.get(name, name)


def test_older_names_and_shapes_are_understood(tmp_path):
    file, query = tmp_path / "old.safetensors", np.arange(6, dtype=np.float32)
    whole = {
        "query": query.reshape(2, 3, 1, 1),
        "scale": np.array(2, np.float32),
        "decoder.0.bias": np.zeros(1),
    }
    save_file(whole, file)
    model = _Old()
    load_parameters(model, read_headers([file]), "old")
    assert np.array_equal(model.to_q.asnumpy(), query.reshape(2, 3)) and model.scale.asnumpy() == 2
    for change, words in [
        ({"to_q": query.reshape(2, 3)}, "twice under different names: .*query"),
        ({"query": query.reshape(3, 2)}, r"misshapen: query is \(3, 2\), expected \(2, 3\)"),
        ({"scale": np.array(2, np.int32)}, "scale is I32"),
    ]:
        save_file(whole | change, file)
        model = _Old()
        with pytest.raises(ConfigError, match=words):
            load_parameters(model, read_headers([file]), "old")
        assert not model.to_q.asnumpy().any()  # refused before anything was set


def test_saving_replaces_the_model_and_leaves_other_files(flux, shards, monkeypatch):
    (shards / "tokenizer.json").write_text("{}")
    save_model(flux, shards)
    assert sorted(file.name for file in shards.iterdir()) == ["config.json", PLAIN, "tokenizer.json"]
    before = (shards / PLAIN).read_bytes()
    monkeypatch.setattr("dancegrpo.models.saving.save_file", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_model(flux, shards, dtype="float16")
    assert (shards / PLAIN).read_bytes() == before and len(list(shards.parent.iterdir())) == 1


def test_weights_that_are_not_the_models_are_not_saved(flux, tmp_path):
    arrays = parameter_arrays(flux)
    large = arrays["x_embedder.bias"] + np.float32(1e5)
    for change, words in [
        ({"other": np.zeros(1)}, "other differ"),
        ({"x_embedder.bias": np.zeros(3)}, r"x_embedder.bias is \(3,\)"),
        ({"x_embedder.bias": large}, "x_embedder.bias has numbers beyond the range of float16"),
    ]:
        with pytest.raises(ConfigError, match=words):
            save_model(flux, tmp_path / "model", dtype="float16", weights=arrays | change)
    assert not (tmp_path / "model").exists()


def run_tool(*arguments):
    command = [sys.executable, ROOT / "tools" / "convert.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_convert_says_what_is_missing_and_exits_with_2(tmp_path):
    result = run_tool(tmp_path / "none.bin", "--output", tmp_path / "new")
    assert result.returncode == 2 and "none.bin does not exist" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "new").exists()


def test_convert_without_pytorch_says_what_to_install(tmp_path, monkeypatch):
    shutil.copy(FLUX / "config.json", tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ReportedError, match=r"pip install 'dancegrpo\[convert\]'"):
        convert(tmp_path / "model.bin", tmp_path / "new")


def test_convert_reads_shards_of_pickles(tmp_path):
    torch = pytest.importorskip("torch")
    old, stored = tmp_path / "old", load_file(FLUX / PLAIN)
    old.mkdir()
    shutil.copy(FLUX / "config.json", old)
    names = sorted(stored)
    parts = {"a.bin": names[:20], "b.bin": names[20:]}
    for file, part in parts.items():
        torch.save({name: torch.from_numpy(stored[name]).bfloat16() for name in part}, old / file)
    listed = {name: file for file, part in parts.items() for name in part}
    (old / "diffusion_pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": listed}))
    (old / "tokenizer.json").write_text("{}")
    assert convert(old, tmp_path / "new") == len(names)
    headers = read_headers([tmp_path / "new" / PLAIN])
    assert {tensor.dtype for tensor in headers.values()} == {"BF16"}
    rounded = {name: a.astype(np.dtype("bfloat16")).astype(np.float32) for name, a in stored.items()}
    assert same(load_model(tmp_path / "new"), rounded) and (tmp_path / "new" / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match="exists already"):
        convert(old, tmp_path / "new")


def test_convert_strips_the_frames_of_a_training_checkpoint(tmp_path):
    torch = pytest.importorskip("torch")
    stored = load_file(FLUX / PLAIN)
    tensors = {f"module.{name}": torch.from_numpy(array) for name, array in stored.items()}
    torch.save({"epoch": 3, "state_dict": tensors}, tmp_path / "last.pt")
    convert(tmp_path / "last.pt", tmp_path / "new", config=FLUX / "config.json", dtype="float16")
    half = {name: array.astype(np.float16).astype(np.float32) for name, array in stored.items()}
    assert same(load_model(tmp_path / "new"), half)


class _Code:
    def __reduce__(self):
        return print, ("code of a checkpoint ran",)


def test_convert_refuses_pickles_with_code_and_wrong_weights(tmp_path, capfd):
    torch = pytest.importorskip("torch")
    shutil.copy(FLUX / "config.json", tmp_path)
    torch.save({"w": torch.zeros(1), "run": _Code()}, tmp_path / "bad.bin")
    with pytest.raises(ConfigError, match="refused: it is damaged or holds other objects than tensors"):
        convert(tmp_path / "bad.bin", tmp_path / "new")
    assert "code of a checkpoint ran" not in capfd.readouterr().out
    torch.save({"w": torch.zeros(1), "epoch": 3}, tmp_path / "bad.bin")
    with pytest.raises(ConfigError, match="'epoch', which is no tensor"):
        convert(tmp_path / "bad.bin", tmp_path / "new")
    torch.save({"w": torch.zeros(1)}, tmp_path / "bad.bin")
    with pytest.raises(ConfigError, match="do not fit FluxTransformer2DModel: missing"):
        convert(tmp_path / "bad.bin", tmp_path / "new")
    (tmp_path / "bad.bin").write_bytes((tmp_path / "bad.bin").read_bytes()[:300])
    with pytest.raises(ConfigError, match="bad.bin"):
        convert(tmp_path / "bad.bin", tmp_path / "new")
    assert not (tmp_path / "new").exists()
