"""Encoded prompts on disk: read again to the bit, never those of another encoder, bounded, and enough to train with."""

import gc
import json
import os
import shutil
import time
import weakref

import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file, save_file
from test_families import LONG, SIZED, config_of, redness
from tiny_pipelines import save_pipeline

from dancegrpo.config import ConfigError, load_config
from dancegrpo.data import PromptSet, embedding_cache
from dancegrpo.data.embedding_cache import EmbeddingCache
from dancegrpo.pipelines import PipelineOptions, load_pipeline, read_process
from dancegrpo.pipelines.text import TextTower
from dancegrpo.rewards import FunctionReward, LabelledReward, RewardSet
from dancegrpo.rl import Trainer, open_run
from dancegrpo.runtime import compile_cache, digests


class Double(nn.Cell):
    def construct(self, x):
        return x + x


PROMPTS = ["a red circle", "two stars", "a red circle"]


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "dancegrpo"


@pytest.fixture
def encoded(monkeypatch):
    """The prompts of every call of a text encoder."""
    calls, original = [], TextTower.encode

    def encode(self, prompts):
        calls.append((self.folder.name, tuple(prompts)))
        return original(self, prompts)

    monkeypatch.setattr(TextTower, "encode", encode)
    return calls


def options(family="sd15", **changes):
    sizes = SIZED | LONG if family == "flux" else {}
    return PipelineOptions(**sizes, embedding_cache_gb=1.0, **changes)


def same(first, second):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_the_next_run_reads_what_the_encoder_said_to_the_bit(family, tmp_path, cache_home, encoded):
    folder = save_pipeline(family, tmp_path / "model")
    once = load_pipeline(folder, options(family)).encode_prompts(PROMPTS)
    assert encoded and len(PROMPTS) == len(once[0])
    encoded.clear()
    # A copy elsewhere is the same encoder, as the checkpoint of a run is.
    copy = shutil.copytree(folder, tmp_path / "copy")
    again = load_pipeline(copy, options(family)).encode_prompts(PROMPTS)
    assert not encoded and same(once, again)
    off = PipelineOptions(**SIZED, **LONG) if family == "flux" else PipelineOptions()
    assert same(once, load_pipeline(folder, off).encode_prompts(PROMPTS)) and encoded


def _change_weights(folder):
    file = folder / "text_encoder" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("mlp.fc1.weight"))
    weights[name][0, 0] += 0.5
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    save_file(weights, file)
    os.utime(file, ns=times)  # as a tool that copies times


def _change_tokenizer(folder):
    file = folder / "tokenizer" / "vocab.json"
    vocabulary = json.loads(file.read_text())
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(vocabulary))


def _change_config(folder):
    file = folder / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [_change_weights, _change_tokenizer, _change_config])
def test_a_changed_encoder_never_meets_stale_encodings(change, tmp_path, cache_home, encoded, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1.0)  # digests of files this young are remembered, too
    folder = save_pipeline("sd15", tmp_path / "model")
    load_pipeline(folder, options()).encode_prompts(["a cab"])
    assert list((cache_home / "digests").glob("*.json"))
    encoded.clear()
    change(folder)
    changed = load_pipeline(folder, options()).encode_prompts(["a cab"])
    assert encoded
    assert same(changed, load_pipeline(folder).encode_prompts(["a cab"]))


def test_what_decides_an_encoding_is_part_of_its_name(tmp_path, cache_home, encoded):
    folder = save_pipeline("sd15", tmp_path / "model")
    load_pipeline(folder, options()).encode_prompts(["a"])
    encoded.clear()
    load_pipeline(folder, options(negative_prompt="blurry")).encode_prompts(["a"])
    assert [prompts for _, prompts in encoded] == [("blurry",)]  # the prompt itself is there already
    encoded.clear()
    load_pipeline(folder, options(compute="float16")).encode_prompts(["a"])
    assert [prompts for _, prompts in encoded] == [("a",), ("",)]
    flux = save_pipeline("flux", tmp_path / "flux")
    keys = {
        load_pipeline(flux, PipelineOptions(**SIZED, max_sequence_length=length)).text_key()
        for length in (11, 12, 11)
    }
    assert len(keys) == 2
    assert load_pipeline(save_pipeline("dit", tmp_path / "dit"), options()).embedding_cache is None


def test_files_that_change_while_they_are_in_use_are_refused(tmp_path, cache_home):
    folder = save_pipeline("sd15", tmp_path / "model")
    pipeline = load_pipeline(folder, options())
    _change_weights(folder)
    with pytest.raises(ConfigError, match="text_encoder or .*tokenizer has changed since it was first read"):
        pipeline.encode_prompts(["a"])


@pytest.mark.parametrize("damage", ["cut", "flipped", "exchanged", "empty"])
def test_a_damaged_file_is_encoded_anew_with_a_warning(damage, tmp_path, capsys):
    cache = EmbeddingCache("key", 10**6, tmp_path)
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert cache.put("one", (array, array[0].astype(np.int32))) and cache.put("two", (array + 1, array[0]))
    one, two = cache._file("one"), cache._file("two")
    content = bytearray(one.read_bytes())
    if damage == "cut":
        one.write_bytes(content[:-5])
    elif damage == "flipped":
        content[-1] ^= 1
        one.write_bytes(content)
    elif damage == "exchanged":
        shutil.copy(two, one)
    else:
        one.write_bytes(b"")
    assert cache.get("one") is None and "is damaged; its prompt is encoded anew" in capsys.readouterr().err
    assert same(cache.get("two"), (array + 1, array[0])) and cache.get("three") is None
    assert cache.put("one", (array,)) and same(cache.get("one"), (array,))
    assert not list(tmp_path.rglob(".tmp-*"))


def test_the_folder_stays_below_its_bound_and_the_oldest_go_first(tmp_path, capsys):
    array = np.zeros(1000, np.float32)
    other = EmbeddingCache("other", 50_000, tmp_path)
    cache = EmbeddingCache("key", 50_000, tmp_path)
    for name in "abc":
        other.put(name, (array,))
    for number in range(30):
        cache.put(f"{number}", (array,))
        os.utime(cache._file(f"{number}"), (time.time(), 1e9 + number))  # in this order
        cache.touch("0")  # the first one stays in use
        assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) <= 50_000
    assert cache.get("0") is not None and cache.get("29") is not None and cache.get("5") is None
    assert not cache.put("large", (np.zeros(20_000, np.float32),)) and "limit" in capsys.readouterr().err
    assert EmbeddingCache("key", 50_000, tmp_path).get("29") is not None


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    cache = EmbeddingCache("key", 10**6, tmp_path / "file")
    assert not cache.put("a", (np.zeros(3),)) and not cache.put("b", (np.zeros(3),))
    assert capsys.readouterr().err.count("cannot keep encoded prompts") == 1
    assert cache.get("a") is None


def _train(folder, run, prompts, monkeypatch=None, **changes):
    process, _ = read_process(folder)
    config = config_of(process, SIZED | LONG | changes)
    pipeline = load_pipeline(folder, PipelineOptions.of(config))
    cells = [weakref.ref(tower.encoder) for tower in pipeline.towers]
    rewards = RewardSet([LabelledReward("redness", FunctionReward(redness))])
    with open_run(run, config) as opened:
        trainer = Trainer(config, pipeline, rewards, PromptSet(prompts, ({},) * len(prompts)), opened)
        gc.collect()
        left = sum(cell() is not None for cell in cells)
        trainer.train()
        return trainer, opened.metrics(), left, opened.checkpoint(2)


def test_training_goes_on_without_the_text_encoder_and_to_the_same_bytes(
    tmp_path, cache_home, encoded, capsys
):
    folder = save_pipeline("flux", tmp_path / "model")
    prompts = ("a red circle", "two stars", "three")
    kept, rows, left, checkpoint = _train(folder, tmp_path / "kept", prompts)
    assert left == 2 and {prompt for _, called in encoded for prompt in called} == set(prompts)
    encoded.clear()
    dropped, again, left, other = _train(folder, tmp_path / "dropped", prompts, drop_text_encoder=True)
    assert left == 0 and all(tower.encoder is None for tower in dropped.pipeline.towers)
    # One prompt is always encoded, to compare: so the number of graphs does not depend on what was on disk.
    assert {called for _, called in encoded} == {prompts[:1]}
    assert [row["graph/compilations"] for row in rows] == [rows[0]["graph/compilations"]] * 2
    times = ("time/", "memory/", "graph/")
    plain = [{k: v for k, v in row.items() if not k.startswith(times)} for row in rows + again]
    assert plain[:2] == plain[2:]
    name = "transformer/diffusion_pytorch_model.safetensors"
    assert (checkpoint / name).read_bytes() == (other / name).read_bytes()
    assert (other / "text_encoder_2" / "model.safetensors").is_file()

    encoded.clear()
    states = dropped.pipeline.encode_prompts(["a new prompt"])
    assert "1 prompts are new: the text encoder is loaded again" in capsys.readouterr().err
    assert all(tower.encoder is None for tower in dropped.pipeline.towers)
    assert same(states, kept.pipeline.encode_prompts(["a new prompt"])) and len(encoded) == 2


@pytest.mark.parametrize("family", ["sd15", "pixart_sigma"])
def test_a_dropped_encoder_is_gone_without_the_compile_cache_too(family, tmp_path, cache_home, monkeypatch):
    monkeypatch.setattr(compile_cache._State, "store", None)
    sizes = SIZED | LONG if family != "sd15" else {}
    pipeline = load_pipeline(
        save_pipeline(family, tmp_path), PipelineOptions(**sizes, embedding_cache_gb=1.0)
    )
    cells = [weakref.ref(cell) for cell in pipeline.towers[0].encoder.cells()]
    weights = [weakref.ref(weight) for weight in pipeline.towers[0].encoder.get_parameters()]
    pipeline.prepare_prompts(["a", "b"], drop=True)
    assert not any(found() is not None for found in cells)
    Double()(
        Tensor(np.ones(3, np.float32))
    )  # MindSpore keeps the parameters of the graph that it compiled last
    gc.collect()
    assert not any(found() is not None for found in weights)


def test_wrong_encodings_on_disk_are_found_before_training(tmp_path, cache_home, capsys):
    pipeline = load_pipeline(save_pipeline("sd15", tmp_path / "model"), options())
    right = pipeline.encode_prompts(["a", "b"])
    for prompt in "ab":
        pipeline.embedding_cache.put(f"prompt {prompt}", tuple(array[0, 0] * 2 for array in right))
    again = load_pipeline(tmp_path / "model", options())
    again.prepare_prompts(["a", "b"])
    assert "are not this encoder's; they are removed" in capsys.readouterr().err
    assert same(again.encode_prompts(["a", "b"]), right)


def test_prompts_that_do_not_fit_on_the_disk_are_counted_before_the_encoder_goes(tmp_path, cache_home):
    folder = save_pipeline("sd15", tmp_path / "model")
    small = PipelineOptions(embedding_cache_gb=6e-6)
    with pytest.raises(ConfigError, match="the 5 prompts need 0.0 GB.*embedding_cache_gb is 6e-06"):
        load_pipeline(folder, small).prepare_prompts([*"abcde"], drop=True)
    with pytest.raises(ConfigError, match="drop_text_encoder needs output.embedding_cache"):
        load_pipeline(folder).prepare_prompts(["a"], drop=True)
    with pytest.raises(ConfigError, match="drop_text_encoder: true needs output.embedding_cache: true"):
        load_config(None, ["model.drop_text_encoder=true", "output.embedding_cache=false"])
    assert embedding_cache.cache_folder() == cache_home
