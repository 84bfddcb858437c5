"""LoRA: starts as the model was, merges to what it is, and is stored in diffusers' names."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from dancegrpo.config import ConfigError, LoraConfig, dump_yaml, load_config
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from mindspore import Tensor, nn, ops  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from dancegrpo.models import load_model, save_model  # noqa: E402
from dancegrpo.models.lora import (  # noqa: E402
    adapt,
    add_lora,
    describe_lora,
    lora_layers,
    lora_parameters,
    merge_lora,
)
from dancegrpo.models.lora_files import LORA_FILE, find_lora, merge_stored, read_lora, save_lora  # noqa: E402
from dancegrpo.models.saving import parameter_arrays  # noqa: E402
from dancegrpo.models.weights import named_parameters  # noqa: E402
from dancegrpo.runtime.cli import model_overrides  # noqa: E402

GOLDEN = Path(__file__).parent / "golden" / "models"
OWN, TEXT = ("to_q", "to_k", "to_v", "to_out.0"), ("add_q_proj", "add_k_proj", "add_v_proj")
_UNET = [
    *("down_blocks.0.attentions.0", "mid_block.attentions.0"),
    *("up_blocks.1.attentions.0", "up_blocks.1.attentions.1"),
]
_XL = [
    "down_blocks.1.attentions.0",
    "mid_block.attentions.0",
    "up_blocks.0.attentions.0",
    "up_blocks.0.attentions.1",
]
# Attention -> its projections, as PEFT's get_peft_model_state_dict names them in diffusers' classes of these configs.
EXPECTED = {
    "flux_no_guidance": {
        "transformer_blocks.0.attn": (*OWN, *TEXT, "to_add_out"),
        "single_transformer_blocks.0.attn": OWN[:3],
    },
    "sd35_like_qknorm_dual": {
        "transformer_blocks.0.attn": (*OWN, *TEXT, "to_add_out"),
        "transformer_blocks.0.attn2": OWN,
        "transformer_blocks.1.attn": (*OWN, *TEXT),
    },
    "unet_sd15_like": {f"{b}.transformer_blocks.0.attn{i}": OWN for b in _UNET for i in (1, 2)},
    "unet_sdxl_like": {
        f"{b}.transformer_blocks.{k}.attn{i}": OWN for b in _XL for k in (0, 1) for i in (1, 2)
    },
    "dit_xl_like": {f"transformer_blocks.{k}.attn1": OWN for k in (0, 1)},
    "pixart_alpha_like_micro": {f"transformer_blocks.0.attn{i}": OWN for i in (1, 2)},
}
FORWARD = ("flux_no_guidance", "sd35_like_qknorm_dual", "unet_sd15_like", "pixart_alpha_like_micro")
"""DiT has PixArt's layers, SDXL has SD's."""


def prefix_of(case):
    return "unet" if case.startswith("unet") else "transformer"


def inputs_of(model, case):
    io = dict(np.load(GOLDEN / case / "io.npz"))
    names = [key for key in inspect.signature(type(model).construct).parameters if f"in_{key}" in io]
    return {key: Tensor(io[f"in_{key}"]) for key in names}


def fill(model, seed=1):
    """Numbers in place of B's zeros."""
    rng = np.random.default_rng(seed)
    for name, parameter in lora_parameters(model).items():
        if name.endswith("lora_B.weight"):
            array = 0.3 * rng.standard_normal(parameter.shape)
            parameter.set_data(Tensor(array.astype(np.float32)))


def relative(actual, expected) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", EXPECTED)
def test_names_are_those_of_diffusers(case, tmp_path):
    model, prefix = load_model(GOLDEN / case), prefix_of(case)
    assert prefix == ("unet" if "UNet" in type(model).__name__ else "transformer")
    before = parameter_arrays(model)
    add_lora(model, rank=4, alpha=6)
    save_lora(model, tmp_path, prefix)
    stored = load_file(tmp_path / LORA_FILE)
    modules = [f"{attention}.{part}" for attention, parts in EXPECTED[case].items() for part in parts]
    assert set(stored) == {f"{prefix}.{m}.lora_{x}.weight" for m in modules for x in "AB"}
    for module in modules:
        weight = before[f"{module}.weight"]
        down, up = (stored[f"{prefix}.{module}.lora_{x}.weight"] for x in "AB")
        assert down.shape == (4, weight.shape[1]) and up.shape == (weight.shape[0], 4)
        assert 0.5 < np.abs(down).max() * np.sqrt(weight.shape[1]) <= 1 and not up.any()
    with safe_open(tmp_path / LORA_FILE, framework="np") as opened:
        settings = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert settings.pop(f"{prefix}.target_modules") == list(lora_layers(model))
    patterns = {f"{prefix}.{kind}_pattern": {} for kind in ("rank", "alpha")}  # diffusers 0.36 looks for both
    assert settings == {f"{prefix}.r": 4, f"{prefix}.lora_alpha": 6} | patterns
    # The model's own weights: all there, under their names, and frozen.
    after = parameter_arrays(model)
    assert after.keys() == before.keys() and all(np.array_equal(after[key], before[key]) for key in before)
    assert {p.name for p in model.trainable_params()} == {key.removeprefix(f"{prefix}.") for key in stored}


@pytest.mark.parametrize("case", FORWARD)
def test_starts_as_the_model_was_and_merges_to_what_it_is(case, tmp_path):
    assert ms.get_context("mode") == ms.GRAPH_MODE
    plain, model = load_model(GOLDEN / case), load_model(GOLDEN / case)
    inputs = inputs_of(plain, case)
    add_lora(model, rank=4, alpha=2)
    base, start = plain(**inputs)[0].asnumpy(), model(**inputs)[0].asnumpy()
    assert np.array_equal(base, start)

    fill(model)
    adapted = model(**inputs)[0].asnumpy()
    assert relative(adapted, base) > 1e-2
    # Stored, read and added to a model that was compiled without it.
    save_lora(model, tmp_path, prefix_of(case))
    merge_stored(plain, read_lora(tmp_path, prefix_of(case)))
    assert relative(plain(**inputs)[0].asnumpy(), adapted) < 1e-5
    # What is written of the model is the sum, too.
    save_model(model, tmp_path / "model")
    written, arrays = load_file(next((tmp_path / "model").glob("*.safetensors"))), parameter_arrays(plain)
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(written[key], arrays[key]) for key in arrays)
    # Merged in place, under a graph that was compiled with A and B; nothing of them is left.
    assert merge_lora(model) is model and not lora_parameters(model) and not describe_lora(model)
    assert relative(model(**inputs)[0].asnumpy(), adapted) < 1e-5
    assert all(np.array_equal(a, arrays[key]) for key, a in parameter_arrays(model).items())


class Gradient(nn.Cell):
    def __init__(self, model, weight, parameters):
        super().__init__()
        self.model, self.weight = model, weight
        self.gradient = ops.grad(self.loss, None, ms.ParameterTuple(parameters))

    def loss(self, *inputs):
        return (self.model(*inputs)[0] * self.weight).sum()

    def construct(self, *inputs):
        return self.gradient(*inputs)


def test_gradients_are_those_of_the_factors_of_the_sum():
    """dB = scale G A^T and dA = scale B^T G, where G is the gradient of the merged weight."""
    case, wanted = "flux_no_guidance", ("to_q", "attn.to_add_out", "single_transformer_blocks.0.proj_out")
    model, whole = load_model(GOLDEN / case), load_model(GOLDEN / case)
    layers = add_lora(model, 3, 6, wanted)
    assert len(layers) == 4 and {len(p.shape) for p in model.trainable_params()} == {2}
    fill(model)
    for key, array in arrays_of(model).items():
        named_parameters(whole)[key].set_data(Tensor(array))
    inputs = list(inputs_of(model, case).values())
    weight = Tensor(np.load(GOLDEN / case / "io.npz")["cot_sample"])
    trained = model.trainable_params()
    found = dict(zip([p.name for p in trained], Gradient(model, weight, trained)(*inputs), strict=True))
    weights = [named_parameters(whole)[f"{name}.weight"] for name in layers]
    of_sum = dict(zip(layers, Gradient(whole, weight, weights)(*inputs), strict=True))
    for name, layer in layers.items():
        g, down, up = (x.asnumpy() for x in (of_sum[name], layer.lora_A.weight, layer.lora_B.weight))
        assert layer.lora_scale == 2 and np.abs(g).max() > 0
        assert relative(found[f"{name}.lora_B.weight"].asnumpy(), 2 * g @ down.T) < 1e-4, name
        assert relative(found[f"{name}.lora_A.weight"].asnumpy(), 2 * up.T @ g) < 1e-4, name


def arrays_of(model):
    """The weights of the sum, by the definition."""
    arrays = parameter_arrays(model)
    for name, layer in lora_layers(model).items():
        up, down = (p.asnumpy().astype(np.float32) for p in (layer.lora_B.weight, layer.lora_A.weight))
        arrays[f"{name}.weight"] = arrays[f"{name}.weight"] + np.float32(layer.lora_scale) * (up @ down)
    return arrays


def test_float16_products_and_matrices():
    model = load_model(GOLDEN / "flux_no_guidance", dtype=ms.float16)
    plain, inputs = load_model(GOLDEN / "flux_no_guidance"), inputs_of(model, "flux_no_guidance")
    layers = add_lora(model, 4, dtype="float16")
    fill(model)
    assert {p.dtype for p in lora_parameters(model).values()} == {ms.float16}
    assert {layer.lora_A.compute_dtype for layer in layers.values()} == {ms.float16}
    for key, array in arrays_of(model).items():
        named_parameters(plain)[key].set_data(Tensor(array))
    sample = model(**inputs)[0]
    assert sample.dtype == ms.float32
    assert 1e-6 < relative(sample.asnumpy(), plain(**inputs)[0].asnumpy()) < 2e-2


def test_the_seed_decides_and_neither_order_nor_other_layers_do():
    def drawn(seed, targets):
        model = load_model(GOLDEN / "dit_xl_like")
        add_lora(model, 2, targets=targets, seed=seed)
        return {key: p.asnumpy() for key, p in lora_parameters(model).items() if key.endswith("A.weight")}

    one, few, other = drawn(3, None), drawn(3, ["to_v"]), drawn(4, None)
    assert len(few) == 2 and all(np.array_equal(few[key], one[key]) for key in few)
    assert not any(np.array_equal(other[key], one[key]) for key in one)
    arrays = list(one.values())
    assert not np.array_equal(arrays[0], arrays[1])


@pytest.mark.parametrize(
    ("case", "targets", "message"),
    [
        ("unet_sd15_like", ["to_q", "conv1"], "conv1 is no linear layer but a Conv2d"),
        ("unet_sd15_like", ["proj_in"], "proj_in is no linear layer but a PointwiseConv2d"),
        ("sd3_medium_like", ["pos_embed.proj"], "no linear layer but a PatchProjection"),
        (
            "flux_no_guidance",
            ["to_qq"],
            "lora.targets: no layer of FluxTransformer2DModel is called 'to_qq'; did you",
        ),
        ("flux_no_guidance", ["o_q"], "is called 'o_q'"),
        ("flux_no_guidance", [], "must name at least one layer"),
        ("t5_encoder_relu", None, "T5EncoderModel takes no LoRA"),
    ],
)
def test_refuses_layers_that_take_no_lora(case, targets, message):
    model = load_model(GOLDEN / case)
    with pytest.raises(ConfigError, match=message):
        add_lora(model, 2, targets=targets)
    assert model.trainable_params() and not lora_layers(model)  # as it was


def test_refuses_files_that_do_not_fit(tmp_path):
    case = "flux_no_guidance"
    model, dit = load_model(GOLDEN / case), load_model(GOLDEN / "dit_xl_like")
    add_lora(model, 2, targets=["attn.to_q"])
    good = {f"transformer.{key}": p.asnumpy() for key, p in lora_parameters(model).items()}
    name = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"

    def refused(arrays, *words, metadata=None, into=None):
        save_file(arrays, tmp_path / LORA_FILE, metadata=metadata)
        target = load_model(GOLDEN / case) if into is None else into
        before = parameter_arrays(target)
        with pytest.raises(ConfigError) as caught:
            merge_stored(target, read_lora(tmp_path, "transformer"))
        assert all(word in str(caught.value) for word in words), caught.value
        assert "\n" not in str(caught.value) and str(tmp_path / LORA_FILE) in str(caught.value)
        assert all(np.array_equal(a, before[key]) for key, a in parameter_arrays(target).items())

    refused(good, "DiTTransformer2DModel", "the model has no single_transformer_blocks.0.attn.to_q", into=dit)
    wide = np.zeros((2, 48), np.float32)
    refused(good | {name.format("A"): wide}, "attn.to_q is for weights (32, 48), the model's are (32, 32)")
    refused({name.format("A"): good[name.format("A")]}, "has down only")
    refused(good | {name.format("B"): wide}, "A (2, 32) and B (2, 48)")
    refused(good | {"text_encoder.layers.0.q_proj.lora_A.weight": wide}, "holds a LoRA of text_encoder")
    refused({"lora_unet_down_0_attn1_to_q.lora_down.weight": wide}, "should begin with 'transformer'")
    refused(good | {name.format("A").replace(".weight", ".bias"): wide}, "is no part of a LoRA")
    refused(good, "use_dora", metadata={"lora_adapter_metadata": '{"transformer.use_dora": true}'})
    (tmp_path / LORA_FILE).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read as a LoRA"):
        read_lora(tmp_path, "transformer")
    with pytest.raises(ConfigError, match=f"expected|does not exist.*{LORA_FILE}"):
        find_lora(tmp_path / "nowhere")


def test_alpha_is_read_as_diffusers_and_peft_write_it(tmp_path):
    modules = ("single_transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k")
    rng, sizes = np.random.default_rng(0), {"A": (4, 32), "B": (32, 4)}
    factors = {m: {x: rng.standard_normal(s).astype(np.float32) for x, s in sizes.items()} for m in modules}

    def alphas(arrays, **settings):
        packed = {f"transformer.{key}": value for key, value in settings.items()}
        save_file(arrays, tmp_path / LORA_FILE, metadata={"lora_adapter_metadata": json.dumps(packed)})
        stored = read_lora(tmp_path / LORA_FILE, "transformer").layers
        assert all(np.array_equal(stored[m].down, factors[m]["A"]) for m in modules)
        assert all(np.array_equal(stored[m].up, factors[m]["B"]) for m in modules)
        return [stored[m].alpha for m in modules]

    def named(pattern, first="A", second="B"):
        names = {"A": first, "B": second}
        return {pattern.format(m, names[x]): factors[m][x] for m in modules for x in sizes}

    ours = named("transformer.{}.lora_{}.weight")
    assert alphas(ours) == [4, 4]
    assert alphas(ours, lora_alpha=8, alpha_pattern={"attn.to_k": 2}) == [8, 2]
    beside = {
        f"transformer.{m}.alpha": np.array(v, np.float32) for m, v in zip(modules, (1, 16), strict=True)
    }
    assert alphas(ours | beside) == [1, 16]
    assert alphas(named("transformer.{}.lora.{}.weight", "down", "up")) == [4, 4]
    assert alphas(named("base_model.model.{}.lora_{}.weight")) == [4, 4]


def test_a_stored_lora_is_trained_on_or_becomes_part_of_the_weights(tmp_path):
    case = "pixart_alpha_like_micro"
    first, second, whole = (load_model(GOLDEN / case) for _ in range(3))
    adapt(first, LoraConfig(rank=2, alpha=6.0, targets=("attn1.to_q", "attn2.to_k")), seed=5)
    fill(first)
    file = save_lora(first, tmp_path, "transformer")
    adapt(second, LoraConfig(rank=2), str(tmp_path))
    (tmp_path / "again").mkdir()
    assert save_lora(second, tmp_path / "again", "transformer").read_bytes() == file.read_bytes()
    assert {p.name for p in second.trainable_params()} == set(lora_parameters(first))
    for settings, message in (
        (LoraConfig(rank=4), "lora.rank is 4, but .* has rank 2"),
        (LoraConfig(rank=2, alpha=2.0), "lora.alpha is 2.0, but .* has alpha 6"),
        (LoraConfig(rank=2, targets=("attn1.to_q",)), "attn2.to_k for one"),
    ):
        with pytest.raises(ConfigError, match=message):
            adapt(load_model(GOLDEN / case), settings, str(file))
    adapt(whole, LoraConfig(), str(file))  # rank 0: all weights are trained, from the sum on
    assert not lora_layers(whole) and len(whole.trainable_params()) > 20
    sums = arrays_of(first)
    assert all(np.abs(array - sums[key]).max() < 1e-6 for key, array in parameter_arrays(whole).items())


def test_config_keys(tmp_path):
    config = load_config(None, ["lora.rank=4", "lora.targets=[to_q, to_out.0]", "model.lora=some/file"])
    assert config.lora == LoraConfig(rank=4, targets=("to_q", "to_out.0"))
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    for override in ("lora.targets=to_q", "lora.targets=[1]"):
        with pytest.raises(ConfigError, match="lora.targets must be a list of texts or null"):
            load_config(None, [override])

    # The LoRA that a run started from belongs to its model.checkpoint, not to the checkpoints that it made.
    class Args:
        checkpoint, lora, set = "run", None, []

    assert load_config(tmp_path / "config.yaml", model_overrides(Args)).model.lora is None
    Args.lora = "mine"
    assert load_config(tmp_path / "config.yaml", model_overrides(Args)).model.lora == "mine"
    Args.checkpoint = Args.lora = None
    assert load_config(tmp_path / "config.yaml", model_overrides(Args)).model.lora == "some/file"
