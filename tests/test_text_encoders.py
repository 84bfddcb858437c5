"""Text and image encoders: what they survive, load, save and refuse; their numbers are in test_golden_models."""

import json

import numpy as np
import pytest

from dancegrpo.config import ConfigError
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from golden_models import CASES, MODELS, OPEN_CLIP, load_case, open_clip_folder, relative  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from dancegrpo.models import load_model, save_model  # noqa: E402
from dancegrpo.models.loading import named_parameters  # noqa: E402
from dancegrpo.models.saving import parameter_arrays  # noqa: E402


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
    source = MODELS / name
    weights = load_file(source / "model.safetensors")
    weights = {prefix + key: array for key, array in weights.items()}
    weights |= {key: np.ones(shape, np.float32) for key, shape in more.items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [whole]}))
    found, expected = (parameter_arrays(load_model(folder)) for folder in (tmp_path, source))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_t5_in_float16_survives_activations_beyond_the_range_of_float16():
    """As in T5 XXL, whose feed-forward blocks leave float16's range inside and in the residual stream."""
    case = load_case("t5_encoder_gated_gelu", hidden_states=True)
    model, inputs = case.model, case.inputs
    half = load_case("t5_encoder_gated_gelu", dtype=ms.float16).model
    for net in (model, half):
        for name, parameter in named_parameters(net).items():
            if "wi_" in name:
                parameter.set_data(parameter * 300.0)
    outputs = dict(zip(model.output_names, model(**inputs), strict=True))
    assert np.abs(outputs["hidden_1"].asnumpy()).max() > 65504
    assert 1e-6 < relative(half(**inputs)[0].asnumpy(), outputs["last_hidden_state"].asnumpy()) < 2e-2


@pytest.mark.parametrize("name", [name for name in CASES if (MODELS / name / "model.safetensors").is_file()])
def test_what_is_saved_has_the_options_and_weights_of_the_reference(name, tmp_path):
    folder = MODELS / name
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
    folder, file = (OPEN_CLIP, "open_clip_config.json") if is_open_clip else (MODELS, "config.json")
    config = json.loads((folder / name / file).read_text())
    (tmp_path / file).write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=words):
        load_model(tmp_path)
