"""vLLM: dense prefill, sparse decoding, without a change to vLLM. `pip install 'locks-attention[vllm]'` registers it.

With `--attention-backend CUSTOM` (on a CPU: with a configuration, see `locks.vllm.config`) every attention layer
gets a second cache of its own for page summaries, planned and paged by vLLM as the first.
"""
