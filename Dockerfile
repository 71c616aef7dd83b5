# Trains the quickstart, into the current folder:
#     docker build -t heinsen_jax .
#     docker run --rm -v "$PWD:/work" heinsen_jax
# On NVIDIA GPUs:
#     docker build -t heinsen_jax:cuda --build-arg EXTRAS=cuda .
#     docker run --rm --gpus all -v "$PWD:/work" heinsen_jax:cuda
# On TPUs:
#     docker build -t heinsen_jax:tpu --build-arg EXTRAS=tpu .
#     docker run --rm --privileged --net=host -v "$PWD:/work" heinsen_jax:tpu
# Several extras are separated by commas. A command after the name of the image replaces the default:
#     docker run --rm -v "$PWD:/work" heinsen_jax python -m heinsen_jax.train --config copying
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG EXTRAS=""

WORKDIR /opt/heinsen_jax
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY heinsen_jax ./heinsen_jax
COPY configs ./configs
RUN pip install --no-cache-dir -c constraints.txt ".[train${EXTRAS:+,$EXTRAS}]"

WORKDIR /work
CMD ["python", "-m", "heinsen_jax.train", "--config", "quickstart"]
