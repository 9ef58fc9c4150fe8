#!/usr/bin/env bash
# A launcher in shell: exports what contract.toml requires, refuses with exit code 3 and one line what contradicts it,
# and starts the trainer.
set -euo pipefail

refuse() {
  echo "refused: $1" >&2
  exit 3
}

# require NAME VALUE: the variable has this value, or is not set yet.
require() {
  local found=${!1-$2}
  [ "$found" = "$2" ] || refuse "$1=$found, the contract requires $2"
  export "$1=$2"
}

require TORCHINDUCTOR_FX_GRAPH_CACHE 1
require TORCHINDUCTOR_AUTOGRAD_CACHE 1
require TORCHINDUCTOR_MAX_AUTOTUNE 0
require TORCHINDUCTOR_MAX_AUTOTUNE_GEMM 0
require TORCHINDUCTOR_DISTRIBUTED_MAX_AUTOTUNE_GEMM 0
require TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC 1

for line in TORCH_NCCL_ENABLE_MONITORING=0 TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=7200 TORCH_DISTRIBUTED_DEFAULT_TIMEOUT=7200 \
  TORCH_DIST_USE_NCCL2=0; do
  name=${line%%=*}
  if [ -n "${LOCAL_RANK-}" ]; then
    require "$name" "${line#*=}"
  elif [ -n "${!name+set}" ]; then
    refuse "$name is set without LOCAL_RANK"
  fi
done

for name in TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE TORCHDYNAMO_SUPPRESS_ERRORS TORCHINDUCTOR_FORCE_DISABLE_CACHES \
  TORCH_COMPILE_FORCE_DISABLE_CACHES TORCH_COMPILE_OVERRIDE_BACKENDS TORCH_COMPILE_OVERRIDE_DYNAMO_CONFIGS \
  TORCH_COMPILE_OVERRIDE_INDUCTOR_CONFIGS; do
  [ -z "${!name-}" ] || refuse "$name=${!name}: unset it"
done

# A folder that the user names must exist; a default one is created.
for name in TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR; do
  if [ -z "${!name+set}" ]; then
    export "$name=${XDG_CACHE_HOME:-$HOME/.cache}/my-trainer/$name"
    mkdir -p "${!name}"
  fi
  probe=$(mktemp -p "${!name}" 2>/dev/null) && [ -n "${!name}" ] || refuse "$name=${!name}: not a folder that can be written"
  rm "$probe"
done

exec python "$(dirname "$0")/train.py" "$@"
