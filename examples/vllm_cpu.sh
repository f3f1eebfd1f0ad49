#!/bin/bash
# Two vLLM servers on this host's CPU with pdtransfer between them, behind its router, and what they answer.
#
#     make venv-vllm && . .venv-vllm/bin/activate
#     examples/vllm_cpu.sh MODEL    # a name or a directory; further options go to both `vllm serve`
#
# On a terminal they serve until Ctrl-C. PREFILL_CORES and DECODE_CORES are each server's cores, such as 0-15 and 16-31;
# LOGS is the folder of the logs.
set -euo pipefail
MODEL=${1:-HuggingFaceTB/SmolLM2-135M-Instruct}
LOGS=${LOGS:-/tmp/pdtransfer-vllm}
HALF=$((($(nproc) + 1) / 2))
PREFILL_CORES=${PREFILL_CORES:-0-$((HALF - 1))} DECODE_CORES=${DECODE_CORES:-$(($(nproc) - HALF))-$(($(nproc) - 1))}
hash vllm pdtransfer curl || { echo "needs vllm, pdtransfer and curl on the path" >&2; exit 1; }
mkdir -p "$LOGS"
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT

serve() { # NAME PORT CORES TRANSFER OPTION...
    # Without --kv-cache-memory-bytes each takes a share of the host's memory, and the second may not start. Without
    # --enforce-eager each compiles the model, which takes minutes on few cores.
    VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=$3 vllm serve "$MODEL" --host 127.0.0.1 --port "$2" \
        --dtype bfloat16 --enforce-eager --max-model-len 1024 --kv-cache-memory-bytes 268435456 \
        --kv-transfer-config "$4" "${@:5}" >"$LOGS/$1.log" 2>&1 &
}
ask() { # PORT
    curl -sS -w '\n' "http://127.0.0.1:$1/v1/completions" -H 'Content-Type: application/json' \
        -d '{"prompt": "The three primary colors are", "max_tokens": 16, "temperature": 0}'
}

CONNECTOR='"kv_connector": "PDTransferConnector", "kv_connector_module_path": "pdtransfer.adapters.vllm"'
serve prefill 8100 "$PREFILL_CORES" "{$CONNECTOR, \"kv_role\": \"kv_producer\"}" "${@:2}"
serve decode 8200 "$DECODE_CORES" \
    "{$CONNECTOR, \"kv_role\": \"kv_consumer\", \"kv_load_failure_policy\": \"recompute\"}" "${@:2}"
pdtransfer router --engine vllm --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 >"$LOGS/router.log" 2>&1 &
echo "starting; the logs are in $LOGS"
until curl -sf http://127.0.0.1:8000/health >/dev/null; do
    [ "$(jobs -rp | wc -l)" = 3 ] || { tail -n 5 "$LOGS"/*.log >&2; exit 1; }
    sleep 1
done

# On processors with AMX, vLLM may end by SIGILL if the first step of an engine has less than five tokens.
for port in 8100 8200; do ask $port >/dev/null; done
pdtransfer doctor http://127.0.0.1:8100 http://127.0.0.1:8200
grep -ho 'pdtransfer [a-z]*: .*' "$LOGS/prefill.log" "$LOGS/decode.log"
echo "Both servers, with the bytes handed over in kv_bytes:"
ask 8000
echo "The decode server alone:"
ask 8200
if [ -t 0 ]; then
    echo "The router is at http://127.0.0.1:8000. Ctrl-C ends all."
    wait
fi
