"""Between characters and token ids: tokenizer, chat template, incremental detokenizer, stop strings."""
