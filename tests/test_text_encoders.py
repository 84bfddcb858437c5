"""Text and image encoders against the reference implementations, forward and backward, in graph mode."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from dancegrpo.config import ConfigError
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from mindspore import Tensor, nn, ops  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from dancegrpo.models import load_model, save_model  # noqa: E402
from dancegrpo.models.loading import named_parameters  # noqa: E402
from dancegrpo.models.saving import parameter_arrays  # noqa: E402

GOLDEN = Path(__file__).parent / "golden"
OPEN_CLIP = GOLDEN / "open_clip"


def relative(actual, expected) -> float:
    """Norm of the deviation over the norm of what is expected."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


def test_runs_in_graph_mode():
    assert ms.get_context("mode") == ms.GRAPH_MODE


class _Loss(nn.Cell):
    """Sum of the outputs at `positions` times `weights`."""

    def __init__(self, model, positions, weights):
        super().__init__()
        self.model, self.positions, self.weights = model, positions, weights

    def construct(self, *inputs):
        outputs = self.model(*inputs)
        total = 0.0
        for i in range(len(self.positions)):
            total = total + (outputs[self.positions[i]] * self.weights[i]).sum()
        return total


class _Gradient(nn.Cell):
    def __init__(self, loss, positions, parameters):
        super().__init__()
        self.gradient = ops.grad(loss, positions, ms.ParameterTuple(parameters))

    def construct(self, *inputs):
        return self.gradient(*inputs)


def gradients(model, inputs, cotangents, wanted_inputs=()):
    """Of sum(output * cotangent) over `cotangents` by output name: for inputs and for all parameters, by name."""
    parameters = named_parameters(model)
    positions = [model.output_names.index(name) for name in cotangents]
    loss = _Loss(model, tuple(positions), tuple(Tensor(array) for array in cotangents.values()))
    of = tuple(list(inputs).index(name) for name in wanted_inputs)
    result = _Gradient(loss, of or None, parameters.values())(*inputs.values())
    of_inputs, of_weights = result if of else ((), result)
    of_inputs = of_inputs if isinstance(of_inputs, tuple) else (of_inputs,)
    by_name = {name: g.asnumpy() for name, g in zip(wanted_inputs, of_inputs, strict=True)}
    return by_name, {name: g.asnumpy() for name, g in zip(parameters, of_weights, strict=True)}


def golden(name, without=(), **options):
    folder = GOLDEN / "models" / name
    io, model = np.load(folder / "io.npz"), load_model(folder, **options)
    keys = [key for key in inspect.signature(type(model).construct).parameters if f"in_{key}" in io]
    return model, io, {key: Tensor(io[f"in_{key}"]) for key in keys if key not in without}


def check_weight_gradients(actual, io):
    for key in io.files:
        if key.startswith("grad_w__"):
            assert relative(actual[key.removeprefix("grad_w__")], io[key]) < 1e-3, key
    if "param_names" in io:  # all of them, by their norms
        expected = dict(zip(io["param_names"], io["out_param_grad_l2"], strict=True))
        assert set(expected) == set(actual)
        norms = [np.linalg.norm(actual[key].astype(np.float64)) for key in expected]
        assert relative(norms, np.array(list(expected.values()))) < 1e-3


# Whether the case has hidden states. The last two were made with transformers 4.57.1, as their config.json says.
CASES = {
    "clip_text_quick_gelu_legacy_eos": True,
    "clip_text_gelu": True,
    "clip_text_with_projection": True,
    "clip_dual_gelu": False,
    "siglip_dual": False,
    "llama_gqa": True,
    "llama3_rope": True,
    "t5_encoder_relu": True,
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_transformers(name):
    model, io, inputs = golden(name, hidden_states=CASES[name])
    outputs = dict(zip(model.output_names, model(**inputs), strict=True))
    penultimate = f"hidden_{getattr(model.config, 'num_hidden_layers', 1) - 1}"
    names = [key.removeprefix("out_") for key in io.files if key.startswith("out_")]
    names = {key: penultimate if key == "penultimate" else key for key in names}
    names = {key: name for key, name in names.items() if key not in ("loss", "param_grad_l2")}
    assert len(names) >= 3
    for key, output in names.items():
        assert relative(outputs[output].asnumpy(), io[f"out_{key}"]) < 1e-4, key

    cotangents = {output: io[f"cot_{key}"] for key, output in names.items() if f"cot_{key}" in io}
    wanted = [key for key in inputs if f"grad_in_{key}" in io]
    of_inputs, of_weights = gradients(model, inputs, cotangents, wanted)
    for key, value in of_inputs.items():
        assert relative(value, io[f"grad_in_{key}"]) < 1e-3, key
    check_weight_gradients(of_weights, io)


def test_t5_with_and_without_mask_equals_transformers():
    total = {}
    for case, without in (("no_mask", ["attention_mask"]), ("masked", [])):
        model, io, inputs = golden("t5_encoder_gated_gelu", without)
        assert model.output_names == ("last_hidden_state",)
        assert relative(model(**inputs)[0].asnumpy(), io[f"out_last_hidden_state_{case}"]) < 1e-4
        cotangents = {"last_hidden_state": io[f"cot_last_hidden_state_{case}"]}
        for key, value in gradients(model, inputs, cotangents)[1].items():
            total[key] = total.get(key, 0) + value
    check_weight_gradients(total, io)


def open_clip_folder(name, tmp_path):
    """The golden folder; its vocabulary has rows for the tokens of the golden texts only."""
    arrays = dict(np.load(OPEN_CLIP / name / "weights.npz"))
    rows, ids = arrays["token_embedding.weight"], arrays.pop("token_ids")
    arrays["token_embedding.weight"] = np.zeros((49408, rows.shape[1]), np.float32)
    arrays["token_embedding.weight"][ids] = rows
    save_file(arrays, tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_config.json").write_text((OPEN_CLIP / name / "open_clip_config.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "whole", "prefix", "more"),
    [
        ("llama_gqa", "LlamaForCausalLM", "model.", {"lm_head.weight": (8, 8)}),
        (
            "t5_encoder_gated_gelu",
            "T5ForConditionalGeneration",
            "",
            {"decoder.final_layer_norm.weight": (8,)},
        ),
    ],
)
def test_the_encoder_within_a_whole_language_model_is_read(name, whole, prefix, more, tmp_path):
    """As LLaMA and T5 are published: with heads and decoders that a text encoder does without."""
    source = GOLDEN / "models" / name
    weights = load_file(source / "model.safetensors")
    weights = {prefix + key: array for key, array in weights.items()}
    weights |= {key: np.ones(shape, np.float32) for key, shape in more.items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [whole]}))
    found, expected = (parameter_arrays(load_model(folder)) for folder in (tmp_path, source))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["vit_gelu", "vit_quickgelu"])
def test_open_clip_model_equals_open_clip(name, tmp_path):
    model, io = load_model(open_clip_folder(name, tmp_path)), np.load(OPEN_CLIP / name / "io.npz")
    data = np.load(OPEN_CLIP / "preprocess.npz")
    inputs = {"input_ids": Tensor(data["token_ids"]), "pixel_values": Tensor(data["pixel_values"])}
    outputs = dict(zip(model.output_names, (x.asnumpy() for x in model(**inputs)), strict=True))
    assert relative(outputs["logits_per_image"], io["logits"]) < 1e-4
    assert relative(outputs["image_embeds"], io["image_features"]) < 1e-4
    assert relative(outputs["text_embeds"], io["text_features"]) < 1e-4
    pooled = outputs["vision_pooled"]
    assert relative(pooled / np.linalg.norm(pooled, axis=1, keepdims=True), io["image_features"]) < 1e-4

    cotangents = {"logits_per_image": io["weight_for_sum"]}
    of_inputs, of_weights = gradients(model, inputs, cotangents, ["pixel_values"])
    assert relative(of_inputs["pixel_values"], io["grad_pixel_values"]) < 1e-3
    named = [key for key in io.files if key.startswith("grad.")]
    assert len(named) == 3
    for key in named:
        assert relative(of_weights[key.removeprefix("grad.")], io[key]) < 1e-3, key


@pytest.mark.parametrize("name", ["llama_gqa", "siglip_dual"])
def test_float16_products_stay_close_and_outputs_are_float32(name):
    model, io, inputs = golden(name, dtype=ms.float16)
    for key, value in zip(model.output_names, model(**inputs), strict=True):
        assert value.dtype == ms.float32
        assert 1e-6 < relative(value.asnumpy(), io[f"out_{key}"]) < 2e-2, key  # above zero: it was float16


def test_t5_in_float16_survives_activations_beyond_the_range_of_float16():
    """As in T5 XXL, whose feed-forward blocks leave float16's range inside and in the residual stream."""
    model, _, inputs = golden("t5_encoder_gated_gelu", hidden_states=True)
    half = golden("t5_encoder_gated_gelu", dtype=ms.float16)[0]
    for net in (model, half):
        for name, parameter in named_parameters(net).items():
            if "wi_" in name:
                parameter.set_data(parameter * 300.0)
    outputs = dict(zip(model.output_names, model(**inputs), strict=True))
    assert np.abs(outputs["hidden_1"].asnumpy()).max() > 65504
    assert 1e-6 < relative(half(**inputs)[0].asnumpy(), outputs["last_hidden_state"].asnumpy()) < 2e-2


@pytest.mark.parametrize("name", [*CASES, "t5_encoder_gated_gelu", "clip_dual_quick_gelu"])
def test_what_is_saved_has_the_options_and_weights_of_the_reference(name, tmp_path):
    folder = GOLDEN / "models" / name
    save_model(load_model(folder), tmp_path)
    reference, saved = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    assert {key: saved.get(key) for key in reference} == reference
    reference, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert set(reference) == set(saved)
    assert all(np.array_equal(reference[key], saved[key]) for key in reference)


def test_saved_open_clip_folder_is_the_loaded_one(tmp_path):
    (tmp_path / "a").mkdir()
    save_model(load_model(open_clip_folder("vit_quickgelu", tmp_path / "a")), tmp_path / "b")
    files = [sorted(path.name for path in (tmp_path / x).iterdir()) for x in "ab"]
    assert files[0] == files[1]
    configs = [json.loads((tmp_path / x / "open_clip_config.json").read_text()) for x in "ab"]
    assert configs[0] == configs[1]
    weights = [load_file(tmp_path / x / "open_clip_model.safetensors") for x in "ab"]
    assert set(weights[0]) == set(weights[1])
    assert all(np.array_equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize(
    "name, change, words",
    [
        (
            "t5_encoder_relu",
            {"feed_forward_proj": "gated-tanh"},
            "feed_forward_proj is 'gated-tanh'; valid: relu",
        ),
        ("t5_encoder_relu", {"is_decoder": True}, "is_decoder is true; valid: false"),
        (
            "llama_gqa",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type is 'yarn'; valid: default, linear",
        ),
        ("llama3_rope", {"rope_scaling": {"rope_type": "linear"}}, "'linear' needs the option factor"),
        ("llama_gqa", {"hidden_act": "mish"}, "hidden_act is 'mish'; valid: .*silu"),
        (
            "llama_gqa",
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        (
            "siglip_dual",
            {"vision_config": {"vision_use_head": False}},
            "vision_use_head is false; valid: true",
        ),
        ("vit_gelu", {"vision_cfg": {"pool_type": "avg"}}, "vision_cfg.pool_type is 'avg'; valid: 'tok'"),
        ("vit_gelu", {"vision_cfg": {"layers": [3, 4, 6, 3]}}, "vision_cfg.layers is .*valid: one positive"),
        ("vit_gelu", {"text_cfg": {"hf_model_name": "roberta"}}, "text_cfg.hf_model_name is 'roberta'"),
        ("vit_gelu", {"text_cfg": {"some_new_option": 1}}, "some_new_option = 1; valid: context_length"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(name, change, words, tmp_path):
    is_open_clip = name == "vit_gelu"
    folder, file = (
        (OPEN_CLIP, "open_clip_config.json") if is_open_clip else (GOLDEN / "models", "config.json")
    )
    config = json.loads((folder / name / file).read_text())
    (tmp_path / file).write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=words):
        load_model(tmp_path)
