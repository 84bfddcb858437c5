"""Text and image encoders, their tokenizers and their preprocessing against the reference implementations."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dancegrpo.config import ConfigError
from dancegrpo.runtime.setup import setup_runtime

setup_runtime(compile_cache=False)

import mindspore as ms  # noqa: E402
from mindspore import Tensor, nn, ops  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from dancegrpo.models import load_model, load_tokenizer, save_model  # noqa: E402
from dancegrpo.models.clip_bpe import _read_vocabulary  # noqa: E402
from dancegrpo.models.loading import named_parameters  # noqa: E402
from dancegrpo.models.preprocess import ImagePreprocess  # noqa: E402

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


def odd_strings() -> list[str]:
    """Prompts as nobody should write them, always the same 200."""
    parts = [
        *(
            "a photo of",
            "CAT",
            "it's",
            "don’t",
            "we'll",
            "THEY'RE",
            "3:45pm",
            "1234",
            "x2",
            "!!",
            "?!…",
            "--",
            "—",
        ),
        *(
            "“quoted”",
            "(small)",
            "[x]",
            "naïve",
            "café",
            "cafe\u0301",
            "Ångström",
            "ẞtraße",
            "İstanbul",
            "ΟΔΟΣ",
        ),
        *(
            "一只红色的猫",
            "東京タワー",
            "한국어",
            "привет",
            "مرحبا",
            "שלום",
            "नमस्ते",
            "ไทย",
            "½",
            "²",
            "Ⅳ",
            "٣",
            "🙂",
        ),
        *(
            "👩‍👩‍👧",
            "🇩🇪",
            "&amp;",
            "&lt;b&gt;",
            "<html>",
            "http://a.b/c?d=e",
            "a_b",
            "#tag",
            "@me",
            "$5",
            "50%",
            "\t",
            "\n\n",
        ),
        *(
            "\u200b",
            "\u00a0",
            "ﬁsh",
            "ＷＩＤＥ",
            "schÃ¶n",
            "\x07",
            "'s",
            "''t",
            "supercalifragilistic",
            "zzzzqqqq",
        ),
        *(
            "<|endoftext|>",
            "<|startoftext|>",
            "!",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "C++",
            "\\n",
            "~^`|",
            "№",
        ),
    ]
    rng = np.random.default_rng(0)
    texts = parts + [""]
    while len(texts) < 200:
        chosen = rng.choice(len(parts), size=rng.integers(2, 12))
        texts.append("".join(parts[i] + rng.choice(["", " ", "  "]) for i in chosen))
    return texts


def write_clip_tokenizer(folder, pad="<|endoftext|>"):
    """CLIP's vocabulary as transformers keeps it."""
    tokens, merges = _read_vocabulary()
    start, end = "<|startoftext|>", "<|endoftext|>"
    (folder / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate([*tokens, start, end])})
    )
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": start,
        "eos_token": end,
    }
    settings |= {"unk_token": end, "pad_token": {"content": pad, "__type": "AddedToken"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])  # SD 1.5 and SD 2.1
def test_clip_tokens_are_those_of_transformers(tmp_path, pad):
    from transformers import CLIPTokenizer

    write_clip_tokenizer(tmp_path, pad)
    texts = odd_strings()
    reference = CLIPTokenizer.from_pretrained(tmp_path)
    expected = reference(texts, padding="max_length", truncation=True, max_length=77)
    tokenizer = load_tokenizer(tmp_path)
    ids, mask = tokenizer.encode(texts)
    for text, mine, theirs in zip(texts, ids.tolist(), expected["input_ids"], strict=True):
        assert mine == theirs, text
    assert mask.tolist() == expected["attention_mask"]
    assert [tokenizer.is_truncated(text) for text in texts] == [
        len(row) > 77 for row in reference(texts)["input_ids"]
    ]


def test_open_clip_tokens_are_those_of_open_clip():
    texts = json.loads((OPEN_CLIP / "texts.json").read_text())
    tokenizer = load_tokenizer(OPEN_CLIP / "vit_gelu")
    assert np.array_equal(tokenizer(texts), np.load(OPEN_CLIP / "preprocess.npz")["token_ids"])
    assert [tokenizer.is_truncated(text) for text in texts] == [text.startswith("a a") for text in texts]


def train_sentencepiece(folder):
    """A T5 tokenizer folder with a vocabulary of English letters and a few words."""
    import sentencepiece

    lines = ["a red circle above a blue square", "two green stars", "a photo of a yellow triangle"] * 20
    with open(folder / "spiece.model", "wb") as file:
        ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=32, minloglevel=2, **ids
        )
    settings = {"tokenizer_class": "T5Tokenizer", "model_max_length": 20, "legacy": True, "extra_ids": 0}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"additional_special_tokens": []}))


def test_t5_tokens_are_those_of_transformers(tmp_path):
    from transformers import T5Tokenizer

    train_sentencepiece(tmp_path)
    texts = ["a red circle", "Two  GREEN stars!", "a photo of 一 cat", "a blue square above " * 9]
    texts += [text for text in odd_strings() if "<" not in text]
    reference = T5Tokenizer.from_pretrained(tmp_path)
    expected = reference(texts, padding="max_length", truncation=True)
    tokenizer = load_tokenizer(tmp_path)
    ids, mask = tokenizer.encode(texts)
    assert ids.shape == (len(texts), 20) and ids.dtype == np.int32
    for text, mine, theirs in zip(texts, ids.tolist(), expected["input_ids"], strict=True):
        assert mine == theirs, text
    assert mask.tolist() == expected["attention_mask"]
    lengths = [len(row) for row in reference(texts)["input_ids"]]
    assert [tokenizer.is_truncated(text) for text in texts] == [length > 20 for length in lengths]
    assert tokenizer.unknown_words("a photo of 一 cat") == ["一"]
    assert load_tokenizer(tmp_path, context=7)(texts).shape == (len(texts), 7)


def test_llama_folder_pads_with_its_end_token_and_needs_a_context(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<|begin|>", "<|end|>", "a", "red", "circle"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "model_max_length": 1e30,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids, mask = load_tokenizer(tmp_path, context=5).encode(["a red circle", "red red red red red red"])
    assert ids.tolist() == [[0, 2, 3, 4, 1], [0, 3, 3, 3, 3]]
    assert mask.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    with pytest.raises(ConfigError, match="model_max_length is 1e[+]30"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))
    assert load_tokenizer(tmp_path, context=5)(["a red circle"]).tolist() == [[1, 0, 2, 3, 4]]


_NINE = '{"model_max_length": 9, "eos_token": "<|end|>"}'


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "no tokenizer_config.json"),
        ({"tokenizer_config.json": "[1]"}, "unreadable tokenizer"),
        ({"tokenizer_config.json": _NINE}, "no tokenizer.json, no spiece.model"),
        ({"tokenizer_config.json": _NINE, "spiece.model": "?"}, "spiece.model cannot be read"),
        ({"tokenizer_config.json": _NINE, "tokenizer.json": "?"}, "tokenizer.json cannot be read"),
        ({"tokenizer_config.json": _NINE, "vocab.json": "?", "merges.txt": ""}, "vocab.json and merges.txt"),
        (
            {"tokenizer_config.json": '{"model_max_length": 9, "tokenizer_class": "Qwen2Tokenizer"}'}
            | {"vocab.json": "{}", "merges.txt": ""},
            "'Qwen2Tokenizer' needs a tokenizer.json",
        ),
    ],
)
def test_a_broken_tokenizer_folder_is_refused(files, words, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(tmp_path)


def read_image(index):
    return np.asarray(Image.open(OPEN_CLIP / f"image_{index}.png").convert("RGB"))


def to_tensor(pixels):
    return Tensor(pixels.transpose(2, 0, 1)[None].astype(np.float32) / 255.0)


@pytest.mark.parametrize("index", range(3))
def test_preprocessed_images_are_those_of_open_clip(index):
    pixels = read_image(index)
    actual = ImagePreprocess(*pixels.shape[:2], 32)(to_tensor(pixels)).asnumpy()
    assert np.abs(actual[0] - np.load(OPEN_CLIP / "preprocess.npz")["pixel_values"][index]).max() < 1e-2


@pytest.mark.parametrize("resize, height, width", [("squash", 47, 21), ("shortest", 16, 32)])
def test_preprocessing_also_squashes_and_enlarges(resize, height, width):
    pixels = read_image(1)[:height, :width]
    size = (32, 32) if resize == "squash" else (64, 32)
    expected = (
        np.asarray(Image.fromarray(pixels).resize(size, Image.BICUBIC)).astype(np.float32) / 127.5 - 1.0
    )
    left = (size[0] - 32) // 2
    preprocess = ImagePreprocess(height, width, 32, mean=(0.5,) * 3, std=(0.5,) * 3, resize=resize)
    actual = preprocess(to_tensor(pixels)).asnumpy()[0].transpose(1, 2, 0)
    difference = np.abs(actual - expected[:, left : left + 32]) * 127.5
    assert difference.max() < 1.01 and (difference > 0.01).mean() < 0.01  # a tie may round the other way


class _Weighted(nn.Cell):
    def __init__(self, preprocess, weight):
        super().__init__()
        self.preprocess, self.weight = preprocess, weight

    def construct(self, images):
        return (self.preprocess(images) * self.weight).sum()


class _GradientOfImages(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.gradient = ops.grad(loss)

    def construct(self, images):
        return self.gradient(images)


def test_gradient_of_preprocessing_is_that_of_the_map_without_rounding():
    rng = np.random.default_rng(0)
    images, direction = rng.uniform(0.4, 0.6, (2, 2, 3, 20, 33)).astype(np.float32)
    weight = Tensor(rng.standard_normal((2, 3, 16, 16)).astype(np.float32))
    smooth = ImagePreprocess(20, 33, 16, rounded=False)
    change = (smooth(Tensor(images + direction / 10)) - smooth(Tensor(images))) * weight
    gradient = _GradientOfImages(_Weighted(ImagePreprocess(20, 33, 16), weight))(Tensor(images)).asnumpy()
    assert (gradient * direction).sum() / 10 == pytest.approx(float(change.sum().asnumpy()), rel=1e-3)
