#!/usr/bin/env bash
# Install this commit on all hosts of a Cloud TPU slice, and train; repeat the command to resume:
#     scripts/tpu_vm.sh NAME ZONE --config configs/heinsen_125m_pile.py --workdir gs://BUCKET/runs/pile --mesh.fsdp 8
# The run is in a bucket, to which the service account of the hosts has access. Needs gcloud, and changes
# committed. To create a slice:
#     gcloud compute tpus tpu-vm create NAME --zone=ZONE --accelerator-type=v6e-16 --version=v2-alpha-tpuv6e
set -euo pipefail
name=${1:?name of the TPU} zone=${2:?its zone}
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
git archive --prefix=heinsen_jax/ --output="$folder/heinsen_jax.tar.gz" HEAD
gcloud compute tpus tpu-vm scp "$folder/heinsen_jax.tar.gz" "$name:" --zone="$zone" --worker=all
# uv installs a newer Python than the one of the image.
on_all_hosts 'tar xzf heinsen_jax.tar.gz && cd heinsen_jax &&
    python3 -m pip install --user --quiet uv &&
    python3 -m uv venv --quiet --allow-existing --python 3.12 .venv &&
    python3 -m uv pip install --quiet --python .venv -c constraints.txt -e ".[tpu,gcs]"'
on_all_hosts "cd heinsen_jax && .venv/bin/python train.py$(printf ' %q' "$@")"
