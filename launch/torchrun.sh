#!/usr/bin/env bash
# One machine, all of its GPUs; without one, as many processes as cores. The same command goes on with the run.
#   launch/torchrun.sh recipe.toml [--section.key=value ...]
set -euo pipefail

recipe=${1:?usage: launch/torchrun.sh RECIPE [--section.key=value ...]}
run=${RUN:-runs/$(basename "$recipe" .toml)}
if [ -d "$recipe" ]; then run=$recipe; fi # a run to go on with
shift
# A signal reaches every rank, which finishes its update and saves; torchrun kills who takes longer than this.
exec torchrun --standalone --nproc-per-node "${PROCESSES:-auto}" --shutdown-timeout 600 \
    -m megabatch train "$recipe" --run.folder="$run" --run.resume=true "$@"
