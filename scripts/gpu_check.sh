#!/usr/bin/env bash
# What takes a GPU: its tests, then a short benchmark. Needs no network, and ends within 8 minutes.
#
#   scripts/gpu_check.sh [CACHE]
#
# CACHE is a cache directory that holds the demo model, which is then measured; without it a tiny random checkpoint is.
# PYTHON names the interpreter, whose environment has what pyproject.toml asks for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python}
cache=${1:-}
export HF_HUB_OFFLINE=1

# run SECONDS COMMAND...: say what is run, and end it where it takes longer.
run() {
  local seconds=$1
  shift
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  timeout --kill-after=5 "$seconds" "$@"
}

# A checkpoint of the tests with a token per byte, as the benchmark's prompts are text.
save_tiny_checkpoint() {
  "$python" - "$1" <<'PYTHON'
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.tiny import qwen3_moe_config, save_checkpoint

config = qwen3_moe_config()
config.vocab_size = 256
path = save_checkpoint(config, Path(sys.argv[1]))
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({char: token_id for token_id, char in enumerate(alphabet)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(path)
PYTHON
}

has_gpu=$("$python" -c 'import torch; print(torch.cuda.is_available())')
if [[ $has_gpu != True ]]; then
  echo "torch finds no CUDA device here; run this on a machine with an NVIDIA GPU and a torch that is built for it." >&2
  exit 1
fi

run 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
"$python" -c 'import sys, torch, transformers
print("Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda,
      "transformers", transformers.__version__, "on", torch.cuda.get_device_name())'

# A test that fails says more beside a benchmark that ran, so one does not stop the other.
status=0
run 300 "$python" -m pytest -m gpu || status=1

bench=("$python" -m server bench --device cuda --link real --modes lru,plain,specter,auto --max-tokens 32)
if [[ -n $cache ]]; then
  run 150 "${bench[@]}" demo --quick --cache "$cache" || status=1
else
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  save_tiny_checkpoint "$scratch/tiny-qwen3-moe"
  run 150 "${bench[@]}" "$scratch/tiny-qwen3-moe" --quick --cache "$scratch/cache" || status=1
fi
exit "$status"
