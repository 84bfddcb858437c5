"""FLUX's packing against the reference, and the pipeline around it."""

from pathlib import Path

import numpy as np
from mindspore import Tensor, nn

from dancegrpo.pipelines.flux import FluxDecoder
from dancegrpo.pipelines.latents import image_ids, pack_latents, unpack_latents

GOLDEN = Path(__file__).parent / "golden"


class _IdentityVae(nn.Cell):
    """Decodes to the latents themselves."""

    def __init__(self, channels):
        super().__init__()
        self.config = type(
            "Config", (), {"latent_channels": channels, "scaling_factor": 0.3611, "shift_factor": 0.1159}
        )

    def decode(self, latents):
        return latents


def test_packing_equals_the_reference_on_host_and_in_the_graph():
    data = np.load(GOLDEN / "F_flux_pack_unpack.npz")
    latents = data["in_latents"]
    assert np.array_equal(pack_latents(latents), data["out_packed"])
    assert np.array_equal(unpack_latents(data["out_packed"], 8, 8), data["out_unpacked"])
    assert np.array_equal(image_ids(4, 4), data["out_image_ids"])
    images = FluxDecoder(_IdentityVae(16), 4, 4)(Tensor(data["out_packed"])).asnumpy()
    expected = np.clip(data["out_vae_input_flux"] * 0.5 + 0.5, 0, 1)
    np.testing.assert_allclose(images, expected, atol=1e-5)
