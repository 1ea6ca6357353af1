"""Models for the quality tests: a random Llama of two layers with a tokenizer of bytes, which reads any text."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers


def save_model(path: Path) -> Path:
    """Saves it in a directory, which is returned."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "<end>"])}
    letters = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = tokenizers.decoders.ByteLevel()
    letters.add_special_tokens(["<end>"])
    end = vocabulary["<end>"]
    random_llama(len(vocabulary), max_position_embeddings=2048, eos_token_id=end).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<end>", clean_up_tokenization_spaces=False
    ).save_pretrained(path)
    return path


def random_llama(vocab_size: int, **changes: Any) -> Any:
    """A random Llama of two layers that ends no text, sharp enough for its attention to decide what it says."""
    torch.manual_seed(0)
    settings = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = transformers.LlamaConfig(vocab_size=vocab_size, **(settings | changes))
    return transformers.LlamaForCausalLM(config).eval()


def sliding_model(vocab_size: int) -> transformers.Qwen2ForCausalLM:
    """A random Qwen 2 with one global layer and one that has a window of 32 tokens."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=32,
        use_sliding_window=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.Qwen2ForCausalLM(config).eval()
