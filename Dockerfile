# CPU image: docker build -t dancegrpo . && docker run --rm -v "$PWD/runs:/work/runs" dancegrpo \
#     python tools/train_grpo.py --config flux_small.yaml --output runs/first
# On Ascend start from an image that has CANN and MindSpore 2.9 for it, and install this package there.
FROM python:3.11-slim

# What MindSpore's wheel needs beside Python: OpenMP; and a compiler for the fused CPU kernels.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgomp1 && rm -rf /var/lib/apt/lists/*

WORKDIR /work
COPY setup.py MANIFEST.in README.md LICENSE ./
COPY dancegrpo dancegrpo
COPY configs configs
COPY tools tools
COPY examples examples
RUN pip install --no-cache-dir -e .

CMD ["python", "tools/generate.py", "-h"]
