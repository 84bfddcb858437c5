"""Our LoRA files in diffusers and PEFT, and theirs here. Needs torch, diffusers and peft, which nothing else does."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

from dancegrpo.runtime.setup import setup_runtime  # noqa: E402

setup_runtime(compile_cache=False)

from mindspore import Tensor  # noqa: E402

from dancegrpo.models import load_model, save_model  # noqa: E402
from dancegrpo.models.lora import add_lora, lora_parameters  # noqa: E402
from dancegrpo.models.lora_files import read_lora, save_lora  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "models"
RANK, ALPHA = 4, 6
# Case -> diffusers' pipeline; None: it has no loader, PEFT puts the file into the model.
CASES = {
    "flux_no_guidance": "FluxPipeline",
    "sd35_like_qknorm_dual": "StableDiffusion3Pipeline",
    "unet_sd15_like": "StableDiffusionPipeline",
    "unet_sdxl_like": "StableDiffusionXLPipeline",
    "dit_xl_like": None,
    "pixart_alpha_like_micro": None,
}


def component(case):
    return "unet" if case.startswith("unet") else "transformer"


def ours(case):
    model = load_model(GOLDEN / case)
    add_lora(model, RANK, ALPHA)
    rng = np.random.default_rng(0)
    for name, parameter in lora_parameters(model).items():
        if name.endswith("lora_B.weight"):
            parameter.set_data(Tensor((0.3 * rng.standard_normal(parameter.shape)).astype(np.float32)))
    io = dict(np.load(GOLDEN / case / "io.npz"))
    names = [key for key in inspect.signature(type(model).construct).parameters if f"in_{key}" in io]
    inputs = {key: io[f"in_{key}"] for key in names}
    return model, inputs, model(**{key: Tensor(array) for key, array in inputs.items()})[0].asnumpy()


def theirs(case, folder=None):
    name = json.loads((GOLDEN / case / "config.json").read_text())["_class_name"]
    return getattr(diffusers, name).from_pretrained(folder or GOLDEN / case, low_cpu_mem_usage=False).eval()


def pipeline_of(case, model):
    """diffusers' pipeline around the model alone."""
    pipeline = getattr(diffusers, CASES[case])
    empty = {
        key: None
        for key, parameter in inspect.signature(pipeline.__init__).parameters.items()
        if parameter.default is inspect.Parameter.empty and key not in ("self", component(case))
    }
    further = {"requires_safety_checker": False} if CASES[case] == "StableDiffusionPipeline" else {}
    further |= {"add_watermarker": False} if CASES[case] == "StableDiffusionXLPipeline" else {}
    return pipeline(**empty, **{component(case): model}, **further)


def sample(model, inputs):
    arguments = {key: torch.from_numpy(array) for key, array in inputs.items()}
    added = {key: arguments.pop(key) for key in ("text_embeds", "time_ids") if key in arguments}
    added |= {key: arguments.pop(key) for key in ("resolution", "aspect_ratio") if key in arguments}
    if added:
        arguments["added_cond_kwargs"] = added
    with torch.no_grad():
        return model(**arguments).sample.numpy()


def relative(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("case", CASES)
def test_our_file_gives_our_output(case, tmp_path):
    model, inputs, adapted = ours(case)
    file = save_lora(model, tmp_path, component(case))
    reference = theirs(case)
    base = sample(reference, inputs)
    assert relative(adapted, base) > 1e-2
    if CASES[case]:
        pipeline_of(case, reference).load_lora_weights(str(tmp_path))
    else:
        from safetensors.torch import load_file

        state = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
        modules = sorted({key.split(".lora_")[0] for key in state})
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules)
        peft.inject_adapter_in_model(config, reference)
        assert not peft.set_peft_model_state_dict(reference, state).unexpected_keys
    error = relative(sample(reference, inputs), adapted)
    # What a checkpoint holds: the sum, for readers that know nothing of a LoRA.
    save_model(model, tmp_path / "sum")
    of_sum = relative(sample(theirs(case, tmp_path / "sum"), inputs), adapted)
    print(f"{case}: LoRA file {error:.2e}, merged folder {of_sum:.2e}")
    assert error < 1e-5 and of_sum < 1e-5


@pytest.mark.parametrize("case", [case for case, pipeline in CASES.items() if pipeline])
def test_their_file_is_read(case, tmp_path):
    reference, name = theirs(case), component(case)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["to_q", "to_v"], init_lora_weights=False
    )
    reference.add_adapter(config)
    state = peft.get_peft_model_state_dict(reference)
    layers = {f"{name}_lora_layers": state, f"{name}_lora_adapter_metadata": config.to_dict()}
    layers[f"{name}_lora_adapter_metadata"]["target_modules"] = ["to_q", "to_v"]
    getattr(diffusers, CASES[case]).save_lora_weights(str(tmp_path), **layers)
    stored = read_lora(tmp_path, name).layers
    assert {f"{key}.lora_A.weight" for key in stored} == {key for key in state if "lora_A" in key}
    for key, layer in stored.items():
        assert layer.alpha == ALPHA
        assert np.array_equal(layer.down, state[f"{key}.lora_A.weight"].numpy())
        assert np.array_equal(layer.up, state[f"{key}.lora_B.weight"].numpy())
