"""Installation of dancegrpo; the upper bounds are what was tested together."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "dancegrpo" / "__init__.py").read_text()).group(1)

REQUIRES = [
    # These two go together: mindformers 2.0 (for mindspore 2.10) needs a package that PyPI does not have.
    "mindspore>=2.9.0,<2.10",
    "mindformers>=1.9.0,<1.10",
    "numpy>=1.26,<2",
    "scipy>=1.11,<2",
    "pillow>=10.1,<14",
    "scikit-image>=0.22,<0.27",
    "datasets>=4.0,<5",
    "tokenizers>=0.22,<0.23",
    "ftfy>=6.1.1,<7",
    "safetensors>=0.4.3,<0.9",
    "pyyaml>=6.0,<7",
    "tqdm>=4.66,<5",
    "tensorboardX>=2.6,<3",
    "matplotlib>=3.8,<3.12",
]

# None of these is needed to train or to sample.
EXTRAS = {
    "convert": ["torch==2.13.0"],
    "parity": ["torch==2.13.0", "diffusers==0.36.0", "transformers==4.57.1", "peft==0.17.1"],
    "t5": ["sentencepiece>=0.2,<0.3"],
    "clip": ["open_clip_torch>=2.24,<4"],
    "ocr": ["rapidocr>=3.0,<4", "onnxruntime>=1.17,<2"],
    "dev": ["pytest>=8,<10", "pytest-xdist>=3.5,<4", "ruff>=0.9,<0.18", "pre-commit>=3.5,<5"],
}

setup(
    name="dancegrpo",
    version=VERSION,
    description="RL post-training of text-to-image diffusion models on MindSpore",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    # configs/ lies at the top of the checkout, where people look for it, and in the package once installed.
    packages=[*find_packages(include=["dancegrpo", "dancegrpo.*"]), "dancegrpo.configs"],
    package_dir={"dancegrpo.configs": "configs"},
    package_data={"dancegrpo": ["assets/**/*", "ops/cpu/kernels.cc"], "dancegrpo.configs": ["*.yaml"]},
)
