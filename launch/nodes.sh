#!/usr/bin/env bash
# Several machines: the same command on each, MEET_AT being one of them. A lost process, or host, is started again from the
# last checkpoint, up to three times; see docs/reliability.md.
#   MEET_AT=node1 NODES=2 launch/nodes.sh recipe.toml --run.save_every=50 [--section.key=value ...]
set -euo pipefail

recipe=${1:?usage: MEET_AT=... NODES=N launch/nodes.sh RECIPE [--section.key=value ...]}
run=${RUN:-runs/$(basename "$recipe" .toml)} # on a disk that all of them see
if [ -d "$recipe" ]; then run=$recipe; fi # a run to go on with
shift
exec torchrun --nnodes "${NODES:?how many machines}" --nproc-per-node "${PROCESSES:-gpu}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${MEET_AT:?the name of one machine}:${PORT:-29500}" --rdzv-id "$(basename "$run")" \
    --shutdown-timeout 600 -m megabatch train "$recipe" --run.folder="$run" --run.resume=true "$@"
